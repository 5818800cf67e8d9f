"""A lock over all threads and processes that open the same file."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from keyfront.errors import CoordinatorError

#: Seconds to wait for the lock. It is held for microseconds, unless its holder is stopped.
LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.0005


class FileLock:
    """Locks a file while its ``with`` block runs; not to be entered again inside itself.

    The kernel lets go of it when its holder is killed. It never waits inside a lock: under
    greenlets a wait lets others run, in this same thread, which would then wait for each other.

    :param path: a file that is never replaced; if it is removed, all go on with a new one
    :param create: true to make it if it is missing, with mode 0600
    :param seconds: time to wait for it, above 0
    """

    __slots__ = ("__weakref__", "_create", "_fd", "_path", "_pid", "_seconds", "_threads")

    def __init__(
        self, path: Path, *, create: bool = True, seconds: float = LOCK_SECONDS
    ) -> None:
        self._path = path
        self._create = create
        self._seconds = seconds
        self._threads = threading.Lock()
        self._fd = -1
        self._pid = os.getpid()
        _all.add(self)

    def __enter__(self) -> None:
        """Take the lock.

        :raises CoordinatorError: it was not free in time
        """
        deadline = time.monotonic() + self._seconds
        while not self.attempt():
            if time.monotonic() > deadline:
                raise CoordinatorError(
                    f"{self._path}: not free within {self._seconds:g} s; a process that holds it "
                    "is stopped or stuck"
                )
            time.sleep(_POLL_SECONDS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        """Close the file. The lock opens it again when it is next taken."""
        if self._pid != os.getpid():
            return
        # Not under another thread's hands, which would lose the lock and then fail to release it.
        deadline = time.monotonic() + LOCK_SECONDS
        while not self._threads.acquire(blocking=False):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        try:
            self._close()
        finally:
            self._threads.release()

    def after_fork(self) -> None:
        """Close the parent's file here, so that the parent's lock ends when it is killed."""
        self._close()
        self._threads = threading.Lock()
        self._pid = os.getpid()

    def _close(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def attempt(self) -> bool:
        """Take the lock if it is free now; who got it leaves it by :meth:`__exit__`.

        :raises CoordinatorError: its file cannot be opened
        """
        if self._pid != os.getpid():
            # Nobody here would release what a thread of the parent held when it forked; and a lock
            # taken through an inherited descriptor would be the parent's as well.
            # Closed here, or this process would hold on to it when the parent is killed.
            if self._fd >= 0 and self._is_ours():
                self._close()
            self._threads = threading.Lock()
            self._fd, self._pid = -1, os.getpid()
        if not self._threads.acquire(blocking=False):
            return False
        try:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                flags |= os.O_CREAT if self._create else 0
                self._fd = os.open(self._path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_removed():
                self._close()
                self._threads.release()
                return False
        except BlockingIOError:
            self._threads.release()
            return False
        except OSError as error:
            self._threads.release()
            raise CoordinatorError(f"{self._path}: {error.strerror}") from None
        return True

    def _is_ours(self) -> bool:
        """Return whether the descriptor is still that of the lock, not one of its number."""
        with suppress(OSError):
            return not self._is_removed()
        return False

    def _is_removed(self) -> bool:
        """Return whether those who open the file now would lock another one."""
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        here = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


_all: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)

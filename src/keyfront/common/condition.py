"""A condition that no timeout or kill of a greenlet leaves half done.

``threading.Condition`` finds out whether its lock is held by an attempt to take it, and gevent's
lock, when that fails, lets other greenlets run: in the midst of what the lock protects, and with a
chance for a timeout or a kill to land there. It also takes its lock again after a wait in a way
that can be interrupted, and then lets go of what it does not have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Lock(Protocol):
    """The type of what ``threading.Lock()`` returns, patched or not."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock."""

    def release(self) -> None:
        """Release the lock."""


def take_surely(lock: Lock, raised: BaseException | None = None) -> BaseException | None:
    """Take a lock, whatever is raised while it is waited for.

    It is for what must be done to the end, such as giving something back. The lock must be one
    that is never held for long.

    :param raised: the exception of an attempt before, if there was one
    :returns: the exception that was raised last, to be raised when all is done
    """
    while True:
        try:
            lock.acquire()
        except BaseException as error:
            raised = error.with_traceback(None)
        else:
            return raised


class Surely:
    """Holds a lock for a block that must run; what was raised meanwhile is raised at its end.

    For one use.
    """

    __slots__ = ("_lock", "_raised")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._raised: BaseException | None = None

    def __enter__(self) -> None:
        self._raised = take_surely(self._lock)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        raise_if(self._raised)


def raise_if(raised: BaseException | None) -> None:
    """Raise this unless it is nothing."""
    if raised is not None:
        try:
            raise raised
        finally:
            raised = None  # or it would hold this frame, and this frame it


class Condition:
    """A lock, and a list of those who wait for what it protects to change.

    ``with condition:`` may be interrupted before its block, as by ``gevent.Timeout``, and is for
    taking things; ``with condition.surely():`` is not, and is for giving them back.

    :param lock: the lock, not held; by default a new one
    :ivar lock: the lock
    """

    __slots__ = ("_waiters", "lock")

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock: Lock = threading.Lock() if lock is None else lock
        self._waiters: list[Lock] = []

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lock.release()

    def surely(self) -> Surely:
        """Return a context manager that holds the lock for a block that must run."""
        return Surely(self.lock)

    def wait(self, seconds: float) -> bool:
        """Release the lock, which is held, until notified, and take it again.

        :param seconds: time to wait at most
        :returns: true if it was notified in time
        """
        signal = threading.Lock()
        signal.acquire()
        self._waiters.append(signal)
        self.lock.release()
        notified = False
        try:
            notified = signal.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        finally:
            raised = take_surely(self.lock)
            if signal in self._waiters:
                self._waiters.remove(signal)
            try:
                raise_if(raised)
            finally:
                raised = None
        return notified

    def wait_for(self, predicate: Callable[[], bool], seconds: float) -> bool:
        """Wait, with the lock held, until a predicate is true that is asked under the lock.

        :param seconds: time to wait at most
        :returns: true if it came true
        """
        deadline = time.monotonic() + seconds
        while not predicate():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left)
        return True

    def notify_all(self) -> None:
        """Wake all who wait; the lock is held."""
        while self._waiters:
            self._waiters.pop().release()

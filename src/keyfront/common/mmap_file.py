"""A file of a fixed size that the processes of a node map into their memory."""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import suppress
from pathlib import Path

from keyfront.errors import CoordinatorError

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def boot_word() -> int:
    """Return a number of this boot: times of the monotonic clock in a file are of one boot only."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = ""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Mapped:
    """A mapped file, made with mode 0600 and its room reserved if missing or of another size.

    Its room is reserved because a write into a full tmpfs ends the process by SIGBUS.

    :param path: the file
    :param size: its length in bytes
    :raises CoordinatorError: the file cannot be made
    """

    __slots__ = ("_identity", "_path", "_size", "map")

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        try:
            fd = _opened(path, size)
            try:
                found = os.fstat(fd)
                self._identity = (found.st_dev, found.st_ino)
                self.map = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except OSError as error:
            raise CoordinatorError(
                f"{path}: cannot be made: {error.strerror}; it needs {size} bytes"
            ) from None

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def is_there(self) -> bool:
        """Return whether the file is still the one that is mapped, and as long."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        return found.st_size == self._size and (found.st_dev, found.st_ino) == self._identity


def _opened(path: Path, size: int) -> int:
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        return _made(path, size)
    found = os.fstat(fd)
    if found.st_size == size and not found.st_mode & 0o077 and found.st_uid == os.geteuid():
        return fd
    os.close(fd)
    # Not made longer or shorter: others have it mapped.
    path.unlink()
    return _made(path, size)


def _made(path: Path, size: int) -> int:
    fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
        raise
    return fd

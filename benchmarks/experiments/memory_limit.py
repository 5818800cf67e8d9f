"""A bound on the memory of servers, as a small virtual machine has: a memory cgroup, if permitted.

Version 2 of the kernel's control groups is taken where its memory controller is there, else
version 1. Without a right to make groups nothing is bounded, and the result says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class Limit:
    """A bound in force, or the reason why there is none.

    :ivar refused: the reason for which it is not in force; ``None`` if it is in force
    """

    def __init__(self, folder: Path | None, refused: str | None) -> None:
        self._folder = folder
        self.refused = refused

    def add(self, pid: int) -> None:
        """Put a process under it, unless it has ended; what it forks later is, too."""
        if self._folder is not None:
            with suppress(ProcessLookupError):
                self._folder.joinpath("cgroup.procs").write_text(str(pid), encoding="ascii")

    def peak(self) -> int | None:
        """Return the most bytes ever in use, with file pages; ``None`` if not known."""
        if self._folder is not None:
            for name in ("memory.peak", "memory.max_usage_in_bytes"):
                with suppress(OSError, ValueError):
                    return int(self._folder.joinpath(name).read_text(encoding="ascii"))
        return None


@contextmanager
def limited(size: int) -> Iterator[Limit]:
    """Bound the memory to ``size`` bytes for the block, which its processes must not outlive."""
    folder, refused = _make(size)
    try:
        yield Limit(folder, refused)
    finally:
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()


def _make(size: int) -> tuple[Path | None, str | None]:
    reason = "this kernel has no memory controller that can be used here"
    for parent, name in (
        (_ROOT, "memory.max"),
        (_ROOT / "unified", "memory.max"),
        (_ROOT / "memory", "memory.limit_in_bytes"),
    ):
        folder = parent / f"keyfront-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            folder.mkdir()
        except OSError as error:
            reason = error.strerror or reason
            continue
        try:
            folder.joinpath(name).write_text(str(size), encoding="ascii")
            return folder, None
        except OSError as error:
            # mkdir works on a tmpfs, too
            reason = error.strerror or reason
            with suppress(OSError):
                folder.rmdir()
    return None, reason

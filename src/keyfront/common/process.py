"""Processes of this machine: whether one lives, and since when, as its number may be used again;
and whether this one is the one that it was.

Processes of several containers may share files. In these a process is named ``NODE:PID:START``: the
node is this boot and set of process numbers, the start tells two processes of one number apart.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_WIPE_ON_FORK = 18  # asm-generic/mman-common.h


def started(pid: int | str) -> int | None:
    """Return the start of a process, in clock ticks since the machine's (proc(5), stat).

    ``None`` if it does not live, be it that it is a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name in parentheses may have anything in it.
            fields = (file.read(4096) or b"").rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def lives(pid: int) -> bool:
    """Return whether there is a process of that number, zombies and other users' included."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no number of a process at all
        return False
    except OSError:
        pass
    return True


def hidden(pid: int) -> bool:
    """Return whether a process lives that /proc does not show, as under ``hidepid`` (proc(5)).

    So it is with systemd's ``ProtectProc=invisible``, of other users' processes.
    """
    return not os.path.exists(f"/proc/{pid}") and lives(pid)


@functools.cache
def _node(me: int) -> str:
    """Return the name of this boot and of the set of process numbers that a process is in."""
    found = ""
    with suppress(OSError):
        found += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        found += os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(found.encode(), digest_size=6).hexdigest()


# Asked for at each miss of the token cache, of this process as a rule.
@functools.lru_cache(maxsize=1)
def name_of(pid: int) -> str:
    """Return the name of a process of this node, which lives: ``NODE:PID:START``.

    :param pid: its number, as a rule the caller's own
    """
    return f"{_node(os.getpid())}:{pid}:{started(pid) or 0}"


def named_lives(name: str) -> bool | None:
    """Return whether a process lives; ``None`` for one of another node, or if that cannot be seen.

    :param name: its name, as :func:`name_of` returned it there; empty for none, which does not live
    """
    node, _, rest = name.partition(":")
    pid, _, start = rest.partition(":")
    if not name:
        return False
    if node != _node(os.getpid()) or not pid.isdigit():
        return None
    began = started(pid)
    # Of one that is kept from us, as by systemd's ProtectProc, the number alone is known.
    if began is None:
        return None if hidden(int(pid)) else False
    return str(began) == start


class Mark(Protocol):
    """Tells the process that made it (``mark[0]`` is 1) from those forked from it (0)."""

    def __getitem__(self, place: int, /) -> int: ...


class _NumberMark:
    """A mark by the process's number, which is a system call each time."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, place: int) -> int:
        return int(self._pid == os.getpid())


def mark() -> Mark:
    """Make a mark of this process.

    It is a page of memory that the kernel empties in each child (``MADV_WIPEONFORK``, Linux 4.14;
    madvise(2)), whoever forks and whatever hooks that calls. Where there is none, it is the
    process's number.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_WIPE_ON_FORK)
    except (OSError, AttributeError):
        page.close()
        return _NumberMark()
    page[0] = 1
    return page

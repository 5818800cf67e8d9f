"""Processes of this machine: whether one lives, and since when, as its number may be used again.

Processes of several containers may share files. In these a process is named ``NODE:PID:START``: the
node is this boot and set of process numbers, the start tells two processes of one number apart.
"""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path


def started(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks since the machine did (proc(5), stat).

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

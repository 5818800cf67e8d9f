"""Processes of this machine: whether one lives, and since when, as its number may be used again."""

from __future__ import annotations

import os


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
    """Tell whether there is a process of that number, zombies and other users' included."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no number of a process at all
        return False
    except OSError:
        pass
    return True


def hidden(pid: int) -> bool:
    """Tell whether a process lives that /proc does not show, as under ``hidepid`` (proc(5)).

    So it is with systemd's ``ProtectProc=invisible``, of other users' processes.
    """
    return not os.path.exists(f"/proc/{pid}") and lives(pid)

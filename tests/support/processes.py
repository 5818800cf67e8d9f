"""What tests do to processes that are not theirs alone."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

import psutil

from keyfront.benchmarks.servers.processes import freeze

stop = freeze


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended, whether or not its parent has asked how."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return False


def kill(process: psutil.Process) -> None:
    """Kill a process that may have ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal: uWSGI's master has none before it has forked."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def parent(process: psutil.Process) -> int:
    """The number of a process's parent; 0 of one that has ended meanwhile."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; none of one that has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []

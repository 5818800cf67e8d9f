"""What tests do to processes that are not theirs alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

PATIENCE = 60.0


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs.

    kill() returns before they have stopped: one that is on another processor may answer once more.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while not all(state == "T" for state in _states(pid)):
        assert time.monotonic() < deadline, f"{pid} does not stop"
        time.sleep(0.001)


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; none of one that has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _states(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            # the name before it, in parentheses, may have blanks and parentheses
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            pass  # that thread has ended
    return found

"""What tests do to processes that are not theirs alone."""

from __future__ import annotations

import psutil

from keyfront.benchmarks.worlds.processes import freeze

stop = freeze


def command_line(process: psutil.Process) -> list[str]:
    """Arguments of a process; none of one that has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []

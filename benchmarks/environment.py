"""Describes a measurement's environment: machine, versions, and what else ran meanwhile.

A figure without these cannot be compared with another one. Everything is read from ``/proc``,
``/sys`` and the programs themselves; nothing names the host or a user.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from keyfront import __version__
from keyfront.common import programs
from keyfront.common.machine import cores, somaxconn
from keyfront.errors import MissingPartError

from . import proc

# How each program says its version; all others by --version.
_VERSION_OPTIONS = {"nginx": "-v", "apache2": "-v", "wrk": "-v", "ab": "-V", "siege": "-V"}
# The share of all cores' time above which others, or the host by steal, disturb a measurement.
QUIET = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


def described() -> dict[str, object]:
    """Return the machine: CPU, cores, memory in MB, kernel, distribution."""
    distribution = "unknown"
    with suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", distribution)
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "distribution": distribution,
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "unknown",
        "somaxconn": somaxconn(),
    }


def versions(distributions: Iterable[str] = (), programs: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, keyfront, and of what is named; what is not installed is left out.

    :param distributions: names of Python packages, as pip writes them
    :param programs: names of programs of the system
    """
    found = {"python": platform.python_version(), "keyfront": __version__}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in programs:
        version = _program_version(name)
        if version:
            found[name] = version
    return found


def _program_version(name: str) -> str | None:
    try:
        program = programs.system_program((name,), name)
        done = proc.ran([program, _VERSION_OPTIONS.get(name, "--version")], 20)
    except (MissingPartError, OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\d+(?:\.\d+)+[\w.+~-]*", done.stdout + done.stderr)
    return match[0] if match else None


def command_line() -> list[str]:
    """Return the command that runs now, as it would be typed, without folders."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def _cpu() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "Hardware")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


class Times(NamedTuple):
    """CPU seconds: of the whole machine, of what the host took away, and of this process tree."""

    busy: float
    stolen: float
    own: float


def cpu_times() -> Times:
    """Return CPU seconds since the start; ``own`` counts this process, its children, and theirs."""
    fields = [int(field) for field in _text("/proc/stat").splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    busy = user + nice + system + irq + softirq
    return Times(busy / _TICKS, steal / _TICKS, proc.tree_seconds(os.getpid()))


class Watch:
    """Finds out whether others worked on the machine while a block ran.

    Processes that were started in the block have to be children of this process, or have been
    waited for by one, else they count as others.
    """

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._loads = [os.getloadavg()[0]]
        self._start = time.monotonic()
        self._times = cpu_times()
        self._end: tuple[float, Times] | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the watch; what is asked later speaks of the time until now."""
        self._end = self._until_now()
        self._loads.append(os.getloadavg()[0])

    def _until_now(self) -> tuple[float, Times]:
        # The clock first and last: what was taken between is not more than all cores.
        times = cpu_times()
        return time.monotonic() - self._start, times

    @property
    def seconds(self) -> float:
        """The seconds that it watched, or has until now."""
        return self._end[0] if self._end else time.monotonic() - self._start

    def described(self) -> dict[str, object]:
        """Return for a result: load averages, cores that others and the host took, and the verdict.

        ``quiet`` is true if others took less than 5 % of all cores and the host less than 5 %.
        """
        elapsed, after = self._end or self._until_now()
        elapsed = max(elapsed, 1 / _TICKS)
        before = self._times
        own = after.own - before.own
        others = max(after.busy - before.busy - own, 0.0) / elapsed
        stolen = (after.stolen - before.stolen) / elapsed
        return {
            "load_before": round(self._loads[0], 2),
            "load_after": round(self._loads[-1], 2),
            "own_cores": round(own / elapsed, 3),
            "other_cores": round(others, 3),
            "stolen_cores": round(stolen, 3),
            "quiet": max(others, stolen) < QUIET * self._cores,
        }

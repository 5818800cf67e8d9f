"""Counts CPU, memory, connections and queues of an experiment's servers and the kernel over time.

CPU is told by process group (nginx, Apache, uWSGI, mod_wsgi's daemons, the database …), so that a
reader sees what the limit was. Only descendants of this process are counted. What the kernel counts
is the network namespace's: the experiment's alone where it has one of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from .. import proc
from ..results import Timeline

INTERVAL = 0.25
_GROUPS = {
    "nginx": "nginx",
    "apache2": "Apache",
    "httpd": "Apache",
    "uwsgi": "uWSGI",
    "mariadbd": "MariaDB",
    "beam.smp": "RabbitMQ",
    "memcached": "memcached",
    "slapd": "slapd",
    "wrk": "generator",
    "ab": "generator",
    "siege": "generator",
}
MOD_WSGI = "mod_wsgi"
#: Kernel counters, by the names that results show.
LISTEN_OVERFLOWS = "listen overflows"
LISTEN_DROPS = "listen drops"


def group(name: str, command: str) -> str | None:
    """Which group a process belongs to, by its name and its command line; ``None``: to no group."""
    if command.startswith("(wsgi:"):
        return MOD_WSGI
    return _GROUPS.get(name)


class Usage:
    """CPU seconds and resident bytes by group, now."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.resident: dict[str, int] = defaultdict(int)
        for process in proc.tree(os.getpid())[1:]:
            command = ""
            if _GROUPS.get(process.name) == "Apache":
                command = "".join(_lines(f"/proc/{process.pid}/cmdline"))
            found = group(process.name, command)
            if found:
                self.cpu[found] += process.cpu
                self.resident[found] += process.resident


def kernel() -> dict[str, float]:
    """TCP sockets in use and in TIME_WAIT, tracked connections, and what listen queues lost."""
    found = {"connections": 0.0, "TIME_WAIT": 0.0}
    for line in _lines("/proc/net/sockstat"):
        if line.startswith("TCP:"):
            words = line.split()
            found["connections"] = float(words[words.index("inuse") + 1])
            found["TIME_WAIT"] = float(words[words.index("tw") + 1])
    tracked = _lines("/proc/sys/net/netfilter/nf_conntrack_count")
    if tracked:
        found["tracked connections"] = float(tracked[0])
    names: list[str] = []
    for line in _lines("/proc/net/netstat"):
        if line.startswith("TcpExt:"):
            if not names:
                names = line.split()
                continue
            values = dict(zip(names, line.split(), strict=False))
            found[LISTEN_OVERFLOWS] = float(values.get("ListenOverflows", 0))
            found[LISTEN_DROPS] = float(values.get("ListenDrops", 0))
    return found


def clients(port: int) -> int:
    """Return how many clients a server on loopback has now, at a port of IPv4."""
    return sum(one.port == port and one.state == proc.ESTABLISHED for one in proc.sockets())


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


class Watch:
    """Samples CPU by group and the kernel's counters in a thread of its own until the block ends.

    :param start: the ``time.monotonic()`` that the timelines count from
    :param probes: more to sample: name and unit, and what gives the value
    """

    def __init__(
        self, start: float, probes: Mapping[tuple[str, str], Callable[[], float]] | None = None
    ) -> None:
        self._start = start
        self._probes = dict(probes or {})
        self._points: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counters", daemon=True)
        self._before = Usage()
        self._kernel = kernel()
        self._began = time.monotonic()
        self.cpu: dict[str, float] = {}
        """Cores that each group took, over the block; known at its end."""
        self.resident: dict[str, int] = {}
        """The most bytes that each group had resident; shared pages count in each process."""
        self.peaks: dict[str, float] = {}
        """The most that the kernel counted, and of what is lost the sum in the block."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        usage, seconds = Usage(), time.monotonic() - self._began
        for name, spent in usage.cpu.items():
            cores = (spent - self._before.cpu.get(name, 0.0)) / seconds
            self.cpu[name] = round(max(cores, 0.0), 3)
        after = kernel()
        for name in (LISTEN_OVERFLOWS, LISTEN_DROPS):
            self.peaks[name] = after.get(name, 0.0) - self._kernel.get(name, 0.0)
        for name, bytes_ in usage.resident.items():
            self.resident[name] = max(bytes_, self.resident.get(name, 0))

    def _run(self) -> None:
        last, at = self._before, self._began
        over = False
        while not over:
            over = self._stop.wait(INTERVAL)
            # a block that was over before the first sample has one at its end
            if over and at != self._began:
                return
            usage, now = Usage(), time.monotonic()
            when = round(now - self._start, 2)
            for name, spent in usage.cpu.items():
                cores = max(spent - last.cpu.get(name, 0.0), 0.0) / (now - at)
                self._points["CPU " + name, "cores"].append([when, round(cores, 3)])
            for name, bytes_ in usage.resident.items():
                self.resident[name] = max(bytes_, self.resident.get(name, 0))
            for name, value in kernel().items():
                if name in (LISTEN_OVERFLOWS, LISTEN_DROPS):
                    value -= self._kernel.get(name, 0.0)
                else:
                    self.peaks[name] = max(value, self.peaks.get(name, 0.0))
                self._points[name, "sockets"].append([when, value])
            for key, probe in self._probes.items():
                # a server that is being asked for more than it can do may not answer a probe
                with suppress(Exception):
                    self._points[key].append([when, float(probe())])
            last, at = usage, now

    def timelines(self, title: str) -> list[Timeline]:
        """Return what was sampled, each named ``title: what``; what was always 0 is left out."""
        return [
            Timeline(name=f"{title}: {name}", unit=unit, points=points)
            for (name, unit), points in self._points.items()
            if any(value for _, value in points)
        ]

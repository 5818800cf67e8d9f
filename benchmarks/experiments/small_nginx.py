"""13 bytes from a small machine with nginx, as C. Cutler measured it in 2011: 24 000 a second.

Connections in TIME_WAIT and in conntrack's table are counted: both were believed to need settings
of the kernel that are obsolete or gone now.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from keyfront.common.machine import cores

from .. import proc, results
from ..lineups import lineup, stock_servers
from ..load import generators
from ..load.measured import Request
from ..servers.ports import free_port
from ..servers.processes import HOST, Process
from . import isolation, timelines, tiny_application
from .experiment import Conclusions, Experiment, World
from .findings import PAIRS, Change, Finding, number, paired_change

NAME = "small-nginx"
SOURCE = "C. Cutler, 2011-07, cutler.sg/2011/07/nginix-on-a-256mb-vm-slice-24000-tps"
PUBLISHED = 24000
MEMORY = 256 * 2**20
CONNECTIONS = 100
# Answers with which a point of the quick form ends; its seconds only bound it.
QUICK_ANSWERS = 2000
SECONDS, QUICK_SECONDS = 10, 30
STATIC, DYNAMIC = "static file", "dynamic endpoint"
STOCK, TUNED, KEYFRONT = SERVERS = ("nginx, stock", "nginx, tuned", "nginx + uWSGI by keyfront")
_PATHS = {STATIC: "/hello.txt", DYNAMIC: "/dynamic"}
_CGROUPS = Path("/sys/fs/cgroup")
_CONNTRACK = (
    "add table inet keyfront; "
    "add chain inet keyfront in { type filter hook input priority 0; }; "
    "add rule inet keyfront in ct state new counter"
)

# What advice of the time said, for a machine that many connect to.
OLD_ADVICE = {
    "net.ipv4.tcp_tw_recycle": "1",
    "net.ipv4.tcp_tw_reuse": "1",
    "net.ipv4.tcp_fin_timeout": "15",
    "net.ipv4.tcp_max_tw_buckets": "5000",
    "net.core.somaxconn": "262144",
    "net.ipv4.tcp_max_syn_backlog": "262144",
}
# nginx's own, of today: no line that is a default.
_TUNED_MAIN = {"worker_rlimit_nofile": 16384}
_TUNED_EVENTS = {"worker_connections": 8192}
_TUNED_HTTP = {
    "sendfile": "on",
    "tcp_nopush": "on",
    "keepalive_requests": 100000,
    "open_file_cache": "max=1000 inactive=60s",
    "open_file_cache_valid": "60s",
}


@contextmanager
def served(folder: Path, port: int, server: str) -> Iterator[list[Process]]:
    """Run nginx and uWSGI until the block ends.

    keyfront's line-up has the dynamic endpoint alone: it serves no files.
    """
    target, listen = f"{tiny_application.__name__}:application", f"{HOST}:{port}"
    if server == KEYFRONT:
        room = lineup.Room(folder / "state", {})
        programs = lineup.served_files("nginx+uwsgi", room, listen, target, cores())
    else:
        files = folder / "files"
        files.mkdir(mode=0o755)
        files.joinpath("hello.txt").write_bytes(tiny_application.BODY)
        socket = folder / "socket"
        options = {
            "module": target,
            "processes": cores(),
            "socket": socket,
            "chmod-socket": 666,
            "buffer-size": 65535,
            "listen": 1024 if server == TUNED else 100,
            "disable-logging": "true",
        }
        passed = " ".join(f"{one};" for one in stock_servers.uwsgi_pass(f"unix:{socket}"))
        location = [f"root {files}", "location = /dynamic { " + passed + " }"]
        tuned: dict[str, Any] = {
            "main": _TUNED_MAIN,
            "events": _TUNED_EVENTS,
            "http": _TUNED_HTTP,
            "access_log": f"{folder}/access.log combined buffer=64k flush=1s",
        }
        if server == TUNED:
            listen += " backlog=4096"
        programs = [
            stock_servers.uwsgi_workers(folder, options),
            stock_servers.nginx(
                folder, listen, location=location, **(tuned if server == TUNED else {})
            ),
        ]
    with ExitStack() as stack:
        yield [stack.enter_context(stock_servers.started(one)) for one in programs]


class Limit:
    """A bound on memory that is in force, or the reason why there is none.

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
    """Bound the memory to ``size`` bytes for the block, which its processes must not outlive.

    Version 2 of the kernel's control groups is taken where its memory controller is there, else
    version 1. Without a right to make groups nothing is bounded, and the result says so.
    """
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
        (_CGROUPS, "memory.max"),
        (_CGROUPS / "unified", "memory.max"),
        (_CGROUPS / "memory", "memory.limit_in_bytes"),
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


def track_connections() -> str | None:
    """Have the kernel track connections in this namespace; why not, if it does not."""
    if not isolation.inside():
        return "no network namespace of its own is permitted here"
    program = shutil.which("nft", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        return "nft is not installed"
    done = proc.ran([program, _CONNTRACK])
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[0]


def measure(world: World, record: results.Record) -> list[str]:
    """Measure stock and tuned, in turns; gives notes."""
    quick = world.options.quick
    seconds = world.seconds(QUICK_SECONDS, SECONDS)
    # who names the seconds wants them whole
    answers = QUICK_ANSWERS if quick and not world.options.seconds else None
    bounds: dict[str, Any] = {"connections": CONNECTIONS, "seconds": seconds, "most": answers}
    untracked, start, notes = track_connections(), time.monotonic(), []
    if untracked:
        notes.append(f"Connections are not tracked: {untracked}.")
    unbounded: set[str] = set()
    rounds = 1 if quick else PAIRS
    for number_ in range(rounds):
        for name in reversed(SERVERS) if number_ % 2 else SERVERS:
            port = free_port()
            with limited(MEMORY) as limit, served(world.folder(), port, name) as running:
                for path in _PATHS.values():
                    running[-1].wait_for_answer(port, path)
                for pid in (pid for one in running for pid in proc.family(one.pid)):
                    limit.add(pid)
                if limit.refused:
                    unbounded.add(limit.refused)
                for what in _PATHS if name != KEYFRONT else (DYNAMIC,):
                    # a new connection for each request, and kept ones
                    for generator in ("ab", "wrk"):
                        request = Request(f"http://{HOST}:{port}{_PATHS[what]}", {})
                        with timelines.Watch(start) as watch:
                            load = generators.closed(generator, request, **bounds)
                        peak = limit.peak()
                        resident = sum(watch.resident.get(one, 0) for one in ("nginx", "uWSGI"))
                        record.sample(
                            server=name,
                            what=what,
                            round=number_,
                            connections=CONNECTIONS,
                            kept=generator == "wrk",
                            **load.sample(),
                            cpu=watch.cpu,
                            resident_mb=round(resident / 2**20, 1),
                            cgroup_peak_mb=peak and round(peak / 2**20, 1),
                            peaks=watch.peaks,
                        )
                        if number_ == 0:
                            kept = "kept" if generator == "wrk" else "new"
                            record.timelines += watch.timelines(f"{name}, {what}, {kept}")
            done = [f"{one['rate']:.0f}" for one in record.samples if one["server"] == name]
            world.say(f"{name}: {', '.join(done)} a second")
    if unbounded:
        notes.append(f"Memory is not bounded: {', '.join(sorted(unbounded))}; it is only counted.")
    return notes


def _best(samples: list[results.Sample], **wanted: object) -> results.Sample:
    return max(results.matching(samples, **wanted), key=lambda one: float(one["rate"]))


def findings(samples: list[results.Sample], refused: dict[str, str]) -> list[Finding]:
    """Return what was published, and what is true of it here."""
    static = {
        (server, kept): _best(samples, server=server, what=STATIC, kept=kept)
        for server in (STOCK, TUNED)
        for kept in (False, True)
    }
    dynamic = _best(samples, server=TUNED, what=DYNAMIC, kept=False)
    waiting = max(one["peaks"].get("TIME_WAIT", 0) for one in samples)
    tracked = [x for one in samples if (x := one["peaks"].get("tracked connections")) is not None]
    most = max(one["cgroup_peak_mb"] or one["resident_mb"] for one in samples)
    failed = sum(one["failed"] for one in samples)
    gone = [name for name, why in refused.items() if "does not have" in why]
    rates = {
        server: f"{number(static[server, False]['rate'])} with new connections, "
        f"{number(static[server, True]['rate'])} with kept ones"
        for server in (STOCK, TUNED)
    }
    unknown, fast = "not known to us", static[TUNED, True]["rate"] >= PUBLISHED
    told = f"{number(dynamic['rate'])} with new connections"
    waits = f"{number(waiting)}; {failed} requests failed"
    count = number(max(tracked)) if tracked else "not counted"
    left = f"{', '.join(gone) or 'none'} no longer exists" if refused else "all exist"
    file, low = "static file of 13 bytes, tuned: a second", "to be kept low by kernel settings"
    table = "conntrack's table has to be large or off"
    size, memory = "a machine of 256 MB", f"{most:.0f} MB at most"
    return [
        Finding(file, f"about {number(PUBLISHED)}", rates[TUNED], fast),
        Finding("the same, stock", unknown, rates[STOCK]),
        Finding("dynamic endpoint, tuned: a second", unknown, told),
        Finding("memory of all servers", size, memory, most <= 256),
        Finding("connections in TIME_WAIT at a time", low, waits, failed > 0),
        Finding("tracked connections at a time", table, count),
        Finding("kernel settings of the time", f"{len(OLD_ADVICE)} of them", left, not gone),
    ]


def changes(samples: list[results.Sample]) -> list[Change]:
    """Return the change of the dynamic endpoint by keyfront, against the better other one."""
    found = []
    for kept in (False, True):
        dynamic = results.matching(samples, what=DYNAMIC, kept=kept)
        dynamic.sort(key=lambda one: int(one["round"]))
        rates = {
            server: [one["rate"] for one in results.matching(dynamic, server=server)]
            for server in SERVERS
        }
        best = max((STOCK, TUNED), key=lambda server: statistics.median(rates[server]))
        what = f"13 bytes from an application, {'kept' if kept else 'new'} connections"
        found.append(paired_change(what, best, rates[best], rates[KEYFRONT]))
    return found


def _table(samples: list[results.Sample]) -> results.Table:
    return results.tabled(
        "points",
        samples,
        {
            "server": "server",
            "asked for": "what",
            "connections": lambda one: f"{one['connections']} {'kept' if one['kept'] else 'new'}",
            "a second": lambda one: round(one["rate"]),
            "failed": "failed",
            "p99 ms": "p99_ms",
            "TIME_WAIT": lambda one: one["peaks"].get("TIME_WAIT"),
            "tracked": lambda one: one["peaks"].get("tracked connections"),
            "MB": "resident_mb",
        },
        "New connections by ab, kept ones by wrk. MB is what nginx and uWSGI have resident, with "
        "what they share counted in each.",
    )


def run(world: World, record: results.Record) -> Conclusions:
    """Measure."""
    record.conditions |= {"memory_mb": MEMORY // 2**20, "connections": CONNECTIONS}
    with isolation.settings(OLD_ADVICE) as old:
        refused = dict(old.refused)
    record.conditions["old_settings_refused"] = refused
    notes = measure(world, record)
    record.tables.append(_table(record.samples))
    generator = max(one["generator_cores"] for one in record.samples)
    notes += [
        "Generator and servers share the cores of one machine; the generator took up to "
        f"{generator:.1f} cores.",
        "The kernel's settings are the defaults of today: what was advised then is gone, the "
        "default, or harmful now (see docs/benchmarks.md).",
        "uWSGI answers the dynamic endpoint; only the opening of the publication is known to us.",
    ]
    return Conclusions(findings(record.samples, refused), changes(record.samples), notes)


TITLE = "13 bytes from nginx within 256 MB, static and dynamic, stock and tuned"
EXPERIMENT = Experiment(NAME, TITLE, SOURCE, run)

"""Keystone behind Apache + mod_wsgi and behind nginx + uWSGI, as Rackspace measured it in 2016.

siege asks, but for 2000 clients, which it could not do: ab. keyfront's line-up is put beside them,
and validations of tokens beside lists, since those are most of what a Keystone in service is asked.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.middleware.tokens import node_cache as node

from .. import results
from ..lineups.keystone import PROJECTS, VALIDATION
from ..lineups.lineup import SERVE, Lineup, Served, served
from ..load import generators
from ..load.measured import Request
from . import isolation, timelines
from .experiment import Conclusions, Experiment, World
from .findings import (
    Change,
    Finding,
    Point,
    alike,
    best_stock,
    first_failing,
    less_is_better,
    number,
)

NAME = "keystone-frontends"
SOURCE = (
    "P. Hopkins, Rackspace, 2016-07-05, docs.rackspace.com/blog/apache-nginx-keystone-performance"
)
LISTS, VALIDATIONS = "list of projects", "validation of a token"
_PATHS = {LISTS: PROJECTS, VALIDATIONS: VALIDATION}
# As published for the tuned line-ups.
SOMAXCONN = 8192

SWEEP = (*range(10, 101, 10), *range(200, 1001, 100))
MOST = 2000
FEW, QUICK_FEW = 10, 4
# Beyond what stock nginx + uWSGI can hold, which is less than 20 in work and 100 waiting; for it
# and for keyfront's only. By wrk, which does not wait for all that has been accepted.
QUICK_MANY = 150
QUICK_BEYOND = ("nginx stock", "keyfront")
# Of each line-up in the quick form: most of its time would be for importing Keystone.
QUICK_PROCESSES = 1
# Good answers with which a point of the quick form ends; its seconds only bound it.
QUICK_ANSWERS = 8
SECONDS, QUICK_SECONDS = 10, 30
# Of a warm-up, at most; a process answers its first request a hundred times slower than others.
WARM = 60
DRAIN = 120


def drain(seconds: float = DRAIN) -> bool:
    """Wait until the servers have worked off what clients have given up; whether they have."""
    deadline = time.monotonic() + seconds
    before, at = timelines.Usage().cpu, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.4)
        after, now = timelines.Usage().cpu, time.monotonic()
        spent = sum(value - before.get(name, 0.0) for name, value in after.items())
        if spent / (now - at) < 0.1:
            return True
        before, at = after, now
    return False


class Setting(NamedTuple):
    """A line-up of the experiment.

    :ivar label: the line-up's name in tables
    :ivar size: processes and threads of the application; 0 and 0 in keyfront's, which is not told
    :ivar database_connections: MariaDB's ``max_connections`` meanwhile
    """

    label: str
    lineup: Lineup
    size: tuple[int, int] = (0, 0)
    database_connections: int = 100

    @property
    def stock(self) -> bool:
        """True if there is nothing of keyfront in it."""
        return self.lineup.tuning != SERVE


def settings(*, processes: int = 0) -> dict[str, Setting]:
    """Return the line-ups by name: as published, stock and tuned, and keyfront's own.

    :param processes: the processes of each; 0: 5, 10, 38 and 38 as published. Fewer need less
        memory and start sooner
    """
    first, second, tuned = processes or 5, processes or 10, processes or 38
    apache, nginx = (Lineup(name, "published-stock") for name in ("mod_wsgi-event", "nginx+uwsgi"))
    tuned_apache, tuned_nginx = (replace(one, tuning="published-tuned") for one in (apache, nginx))
    return {
        "apache stock": Setting(f"Apache + mod_wsgi {first}x1, stock", apache, (first, 1)),
        "nginx stock": Setting(f"nginx + uWSGI {second}x2, stock", nginx, (second, 2)),
        "apache tuned": Setting(
            f"Apache + mod_wsgi {tuned}x4, tuned", tuned_apache, (tuned, 4), 200
        ),
        "nginx tuned": Setting(f"nginx + uWSGI {tuned}x5, tuned", tuned_nginx, (tuned, 5), 200),
        "keyfront": Setting(
            "keyfront, as served (nginx + uWSGI)", Lineup("nginx+uwsgi", SERVE, True)
        ),
    }


class Bench:
    """One run: the line-ups in turn, each at every load."""

    def __init__(self, world: World, record: results.Record, start: float) -> None:
        self.world = world
        self.record = record
        self.start = start
        quick = world.options.quick
        self.few = QUICK_FEW if quick else FEW
        self.sweep: Sequence[int] = (QUICK_FEW, QUICK_MANY) if quick else SWEEP
        self.most = () if quick else (MOST,)
        self.seconds = world.seconds(QUICK_SECONDS, SECONDS)
        self.processes = QUICK_PROCESSES if quick else 0
        # who names the seconds wants them whole
        self.answers = QUICK_ANSWERS if quick and not world.options.seconds else None

    def measure(self) -> None:
        """Serve each line-up and load it."""
        keystone, headers = self.world.keystone, None
        with isolation.settings({"net.core.somaxconn": str(SOMAXCONN)}) as kernel:
            self.record.conditions["kernel"] = {**kernel.applied}
            self.record.conditions["kernel_refused"] = {**kernel.refused}
            for name, setting in settings(processes=self.processes).items():
                if self.world.database is not None:
                    self.world.database.limit(setting.database_connections)
                with served(setting.lineup, keystone, processes=self.processes) as found:
                    headers = headers or keystone.validation_headers(found.url)
                    self._warm(setting, found, headers)
                    self._points(name, setting, found, headers)

    def _warm(self, setting: Setting, found: Served, headers: dict[str, str]) -> None:
        """Have every thread answer a few times, lists and validations."""
        size = math.prod(setting.size)
        connections = wanted = size or self.few
        if not self.answers:
            connections = max(size, FEW)
            wanted = 3 * connections
        deadline, answers = time.monotonic() + WARM, 0
        while answers < wanted and time.monotonic() < deadline:
            for path in _PATHS.values():
                request, most = Request(f"{found.url}{path}", headers), self.answers and connections
                answers += generators.closed(
                    "wrk", request, connections=connections, seconds=2, most=most
                ).good
        drain()

    def _points(self, name: str, setting: Setting, found: Served, headers: dict[str, str]) -> None:
        plan = [("wrk", VALIDATIONS, self.few)]
        if self.world.options.quick:
            # in place of the 2000 clients
            plan += [("ab", LISTS, self.few)] if name in ("nginx tuned", "keyfront") else []
            plan += [("siege", LISTS, self.few)]
            plan += [("wrk", LISTS, QUICK_MANY)] if name in QUICK_BEYOND else []
        else:
            plan += [("wrk", LISTS, FEW), ("wrk", VALIDATIONS, 100), ("wrk", LISTS, 100)]
            plan += [("siege", LISTS, load) for load in self.sweep]
        plan += [("ab", LISTS, load) for load in self.most]
        done = []
        for position, (generator, what, connections) in enumerate(plan):
            request = Request(f"{found.url}{_PATHS[what]}", headers)
            most = self.answers
            if most and not setting.stock:
                # it has to answer each of them, and what it keeps costs next to nothing
                most = 100 * most if what == VALIDATIONS else max(most, connections)
            with timelines.Watch(self.start, self._probes(found)) as watch:
                load = generators.closed(
                    generator, request, connections=connections, seconds=self.seconds, most=most
                )
            database = self.world.database
            self.record.sample(
                lineup=name,
                label=setting.label,
                stock=setting.stock,
                what=what,
                connections=connections,
                **load.sample(),
                cpu=watch.cpu,
                listen_overflows=watch.peaks[timelines.LISTEN_OVERFLOWS],
                database_connections=database.most_connections() if database else None,
            )
            if connections == max(self.sweep) or (what == VALIDATIONS and not setting.stock):
                title = f"{setting.label}, {what}, {connections} connections, {load.generator}"
                self.record.timelines += watch.timelines(title)
            done.append(f"{connections}: {load.rate:.0f}")
            # the last one's line-up is stopped, with what still waits in it
            if connections > self.few and position < len(plan) - 1:
                drain()
        self.world.say(f"{setting.label}: {', '.join(done)} good answers a second")

    def _probes(self, found: Served) -> dict[tuple[str, str], Callable[[], float]]:
        """Return the database's connections and, of keyfront, the token cache's timelines."""
        probes: dict[tuple[str, str], Callable[[], float]] = {}
        if self.world.database is not None:
            probes["database connections", "sockets"] = self.world.database.connections
        if found.cache is not None:
            for name in ("hits", "node_hits", "misses"):
                probes[f"token cache, {name.replace('_', ' ')}", "requests"] = partial(
                    _counter, found.cache, name
                )
        return probes


def _counter(folder: Path, name: str) -> float:
    return float(node.statistics(folder).get(name, 0))


def points(samples: Sequence[results.Sample], what: str, generator: str) -> list[Point]:
    """Return the samples of one question and generator."""
    return [
        Point(
            one["lineup"], one["stock"], one["connections"], one["rate"], one["failed"],
            one["good"] + one["failed"],
        )
        for one in results.matching(samples, what=what, generator=generator)
    ]


def _swept(samples: Sequence[results.Sample]) -> list[Point]:
    """Return the lists by more and more clients."""
    many = points(samples, LISTS, "wrk")
    return points(samples, LISTS, "siege") + [one for one in many if one.load == QUICK_MANY]


def findings(samples: Sequence[results.Sample]) -> list[Finding]:
    """Return the statements of the publication, and what is true of them here."""
    swept = _swept(samples)
    names = ("apache stock", "nginx stock", "apache tuned", "nginx tuned")
    low = {name: _mean(swept, name, 100) for name in names}
    loads = {point.load for point in swept}
    reached = max(loads, default=0)
    best = max(low["apache stock"], low["nginx stock"])
    tuned = max(low["apache tuned"], low["nginx tuned"])
    failing = {name: first_failing(swept, name) for name in low}
    many = [p for p in points(samples, LISTS, "ab") if p.load == MOST and p.lineup == "nginx tuned"]
    share = _python_share(samples)
    stock_failing = failing["apache stock"], failing["nginx stock"]
    # a single point proves no difference
    same = alike(low["apache stock"], low["nginx stock"]) or (
        False if sum(load <= 100 for load in loads) > 2 else None
    )
    both_fail = None
    if reached >= 200 or None not in stock_failing:
        both_fail = all((load or math.inf) <= 200 for load in stock_failing)
    no_failure = False if failing["nginx tuned"] else (True if reached >= 1000 else None)
    above = (failing["apache tuned"] or 0) > 700 if reached >= 1000 else None
    begins = {name: _begin(load, reached) for name, load in failing.items()}
    lists = f"Apache {number(low['apache stock'])}, nginx {number(low['nginx stock'])}"
    fails = f"Apache {begins['apache stock']}, nginx {begins['nginx stock']}"
    gain = f"{number(best)} to {number(tuned)} lists a second"
    failed = f"{many[0].failures} of {many[0].requests} failed" if many else "not tried"
    cpu = f"{share:.0%} of the servers' CPU time is in the processes that run it"
    held, gave_up = begins["nginx tuned"], begins["apache tuned"]
    no_error = many[0].failures == 0 if many else None
    loads_of = "stock, 10 to 100 clients: lists a second"
    fails_of = "stock: clients at which requests begin to fail"
    gain_of = "tuned, 10 to 100 clients: what tuning gains"
    return [
        Finding(loads_of, "Apache and nginx the same", lists, same),
        Finding(fails_of, "both at 200, with 503", fails, both_fail),
        Finding(gain_of, "very little", gain, tuned <= best * 1.25),
        Finding("tuned nginx + uWSGI", "no failure to 1000 clients", held, no_failure),
        Finding("tuned Apache + mod_wsgi", "fails above 700 clients", gave_up, above),
        Finding(f"uWSGI behind a web server, {MOST} clients, ab", "no error", failed, no_error),
        Finding("what the limit is", "Keystone's Python, not the web server", cpu, share > 0.5),
    ]


def _mean(found: Sequence[Point], lineup: str, most: int) -> float:
    rates = [point.good for point in found if point.lineup == lineup and point.load <= most]
    return sum(rates) / len(rates) if rates else 0.0


def _begin(load: int | None, reached: int) -> str:
    return f"fails from {load}" if load is not None else f"no failure to {reached}"


def _python_share(samples: Sequence[results.Sample]) -> float:
    """Return how much of the CPU time of web servers and Python is Python's, in stock line-ups."""
    cpu: Counter[str] = Counter()
    for one in results.matching(samples, stock=True, what=LISTS):
        cpu.update(one["cpu"])
    python = cpu["uWSGI"] + cpu[timelines.MOD_WSGI]
    everything = python + cpu["nginx"] + cpu["Apache"]
    return python / everything if everything else 0.0


def changes(samples: Sequence[results.Sample]) -> list[Change]:
    """Return what keyfront changes, against the best stock line-up at each load."""
    found = []
    labels = {one["lineup"]: one["label"] for one in samples}
    for all_points, title in (
        (points(samples, VALIDATIONS, "wrk"), "Validations of a token"),
        (_swept(samples), "Lists of projects"),
    ):
        loads = sorted({point.load for point in all_points if not point.stock})
        for load in dict.fromkeys((loads[0], loads[-1])) if loads else ():
            best = best_stock(all_points, load)
            ours = next(p for p in all_points if not p.stock and p.load == load)
            if best is None:
                continue
            what = f"{title}, {load} clients at a time"
            found.append(Change(what, best.good, labels[best.lineup], ours.good, "a second"))
            if load > FEW:
                stock = [p for p in all_points if p.stock and p.load == load]
                least = min(stock, key=lambda point: point.failed_share)
                what = f"{title} that fail, {load} clients at a time"
                shares = 100 * least.failed_share, labels[least.lineup], 100 * ours.failed_share
                found.append(less_is_better(what, *shares, "%"))
    return found


def _table(samples: Sequence[results.Sample]) -> results.Table:
    return results.tabled(
        "points",
        samples,
        {
            "line-up": "label",
            "asked for": "what",
            "clients": "connections",
            "by": "generator",
            "a second": lambda one: round(one["rate"], 1),
            "failed": "failed",
            "p50 ms": "p50_ms",
            "p95 ms": "p95_ms",
        },
        "Good answers a second; failed counts what was refused, lost or not answered. A closed "
        "loop: each client waits for its answer. Times are of good answers only.",
    )


def run(world: World, record: results.Record) -> Conclusions:
    """Measure all line-ups."""
    bench = Bench(world, record, time.monotonic())
    record.conditions |= {
        "database": "SQLite" if world.options.sqlite else "MariaDB",
        "clients": list(bench.sweep),
        "seconds": bench.seconds,
        "tuned_processes": bench.processes or 38,
        "answers": bench.answers,
    }
    bench.measure()
    record.tables.append(_table(record.samples))
    long = f"{bench.answers} answers" if bench.answers else f"{bench.seconds} s"
    notes = [
        "Keystone 30 instead of Mitaka; Keystone, MariaDB, web server and generator share the "
        "machine's cores instead of three machines; HTTP instead of HTTPS.",
        f"{long} for each point instead of 120 s (--seconds 120): what fails only "
        "after a minute of waiting does not show.",
        "Today's uWSGI, nginx, Apache and kernel: somaxconn is 4096 where it was 128, and what is "
        "not named in the publication is the default of today's Debian package.",
    ]
    if bench.processes:
        notes.append(
            f"{bench.processes} process in each line-up, instead of 5 and 10 stock, 38 tuned, and "
            "one for each core of keyfront's."
        )
    if world.options.sqlite:
        notes.append("SQLite instead of MySQL, as told.")
    refused = record.conditions.get("kernel_refused")
    if refused:
        notes.append("net.core.somaxconn stays as it is, and uWSGI's listen queue keeps below it.")
    return Conclusions(findings(record.samples), changes(record.samples), notes)


TITLE = "Keystone's list of projects behind Apache and nginx, stock and tuned"
EXPERIMENT = Experiment(NAME, TITLE, SOURCE, run)

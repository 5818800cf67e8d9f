"""Throughput, latency and failures of line-ups against connections, or against offered rates.

Each line-up is started, warmed as in the published test, and loaded point by point; the result is
written after each one, so that an interrupted sweep goes on where it was. What is asked is the
published test's list of projects, or a validation.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from keyfront.common import ranges
from keyfront.errors import BenchmarkError, OptionError, ServerError

from .. import environment, results
from ..lineups.keystone import PROJECTS, VALIDATION, Keystone
from ..lineups.lineup import CACHES, TOPOLOGIES, TUNINGS, Lineup, Served, served
from ..results import Cell, Record, Sample, Table
from ..servers.processes import Cores, split
from . import arguments as given
from . import generators
from .measured import OPEN, Load, Request

REQUESTS = ("projects", "validation")
PUBLISHED_POINTS = (*range(10, 100, 10), *range(100, 1001, 100), 2000, 5000)
"""10 to 100 and 100 to 1000 as published with siege, 2000 as with ab, and 5000."""

# Connections that warm a line-up, as published.
_WARM_CONNECTIONS = 200
# A line-up is warm when a run is no faster than the one before by more than this; or after so many.
_WARMER, _WARM_RUNS = 1.2, 4
# Beyond it siege fails by itself.
_SIEGE_CONNECTIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a sweep.

    :param name: the name of the result
    :param lineups: the line-ups, in the order in which they are measured
    :param points: connections of closed loops, ascending
    :param rates: requests per second of open loops
    :param request: one of :data:`REQUESTS`
    :param seconds: the seconds of each point
    :param warm_up: seconds of each run that warms
    :param pause: seconds between points
    :param generator: the generator of closed loops, or ``auto``
    """

    name: str
    lineups: Sequence[Lineup]
    points: Sequence[int]
    rates: Sequence[float] = ()
    request: str = "projects"
    seconds: int = 10
    warm_up: int = 10
    pause: float = 2.0
    generator: str = "auto"

    def conditions(self, cores: Cores) -> dict[str, Any]:
        """Return what has to be the same for samples to stand in one table."""
        values = asdict(self)
        for varied in ("name", "lineups", "points", "rates"):
            del values[varied]
        return {**values, "cores": str(cores)}


class Sweep:
    """One sweep.

    :param keystone: one that is made
    :param folder: the folder of results
    :param out: progress goes there
    """

    def __init__(self, settings: Settings, keystone: Keystone, folder: Path, out: TextIO) -> None:
        self._settings = settings
        self._keystone = keystone
        self._folder = folder
        self._say = results.to(out)
        self._cores = split()
        self._each = len(settings.points) + len(settings.rates)
        # what is left, and the seconds that each took; a stock Keystone loads for some ten seconds
        self._points, self._starts = self._each * len(settings.lineups), len(settings.lineups)
        self._point_seconds = [settings.seconds + 1.0]
        self._start_seconds = [10.0 + 2 * settings.warm_up]
        self._record: Record

    def run(self) -> Path:
        """Measure what is missing; returns the file of the result.

        A line-up that cannot be served, or that ends meanwhile, is told in the result's notes, and
        the others go on.

        :raises BenchmarkError: there is a result that was measured under other conditions; no
            line-up could be measured
        """
        conditions = self._settings.conditions(self._cores)
        before = self._before(conditions)
        with Record(
            "sweep",
            self._settings.name,
            title="Keystone's throughput and failures against connections",
            conditions=conditions,
            distributions=("keystone", "uwsgi", "pyuwsgi", "mod_wsgi", "gevent", "SQLAlchemy"),
            programs=("nginx", "apache2", "wrk", "ab", "siege"),
        ) as record:
            self._record = record
            if before is not None:
                record.resume(before)
            if not self._cores.apart:
                record.note("the generator shares its only core with the servers")
            for lineup in self._settings.lineups:
                self._measure(lineup)
        if not record.samples:
            raise BenchmarkError(f"nothing could be measured: {'; '.join(record.notes)}")
        return self._write(complete=True)

    def _before(self, conditions: dict[str, Any]) -> results.Result | None:
        path = self._folder / results.file_name("sweep", self._settings.name)
        if not path.exists():
            return None
        found = results.read(path)
        changed = [name for name in conditions if found.conditions.get(name) != conditions[name]]
        if changed:
            name = changed[0]
            raise BenchmarkError(
                f"{path}: was measured with {name} = {found.conditions.get(name)}, not "
                f"{conditions[name]}; go on with that, use --fresh, or give another --name"
            )
        return found

    def _write(self, *, complete: bool) -> Path:
        self._record.tables[:] = tables(self._record.samples)
        return results.write(self._record.result(complete=complete), self._folder)

    def _missing(self, lineup: Lineup) -> list[tuple[str, float]]:
        there = {
            (one["loop"], one["rate_offered"] or one["connections"])
            for one in self._record.samples
            if lineup_of(one) == str(lineup)
        }
        wanted: list[tuple[str, float]] = [("closed", one) for one in self._settings.points]
        wanted += [(OPEN, one) for one in self._settings.rates]
        return [one for one in wanted if one not in there]

    def _measure(self, lineup: Lineup) -> None:
        missing = self._missing(lineup)
        self._points -= self._each - len(missing)
        self._starts -= 1
        after_this = self._points - len(missing)
        if not missing:
            self._say(f"{lineup}: measured before")
            return
        begin = time.monotonic()
        try:
            with served(lineup, self._keystone, self._cores) as found:
                warm = self._warm(found)
                self._start_seconds.append(time.monotonic() - begin)
                self._say(f"{lineup}: warm after {self._start_seconds[-1]:.0f} s, {warm:.0f}/s")
                for loop, value in missing:
                    self._point(found, loop, value)
                    self._write(complete=False)
        except ServerError as error:
            self._record.note(f"{lineup}: {error}")
            self._say(f"{lineup}: {error}")
            self._points = after_this

    def _left(self) -> str:
        """Return what is left, as ``12 points and 3 min left``."""
        each = statistics.fmean(self._point_seconds) + self._settings.pause
        seconds = self._points * each + self._starts * statistics.fmean(self._start_seconds)
        time_left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"{self._points} points and {time_left} left"

    def _warm(self, found: Served) -> float:
        """Load a line-up until it gets no faster; returns its rate.

        As published: 200 connections, so that every process has loaded Keystone and its database.
        """
        request, rate = asked(found, self._settings.request), 0.0
        for _ in range(_WARM_RUNS):
            last = rate
            connections = min(_WARM_CONNECTIONS, max(self._settings.points, default=50))
            rate = self._load(found, request, connections, self._settings.warm_up).rate
            if last and rate < last * _WARMER:
                break
        return rate

    def _load(self, found: Served, request: Request, connections: int, seconds: int) -> Load:
        """Load a line-up by a closed loop."""
        name, cores = _generator(self._settings, found.lineup), self._cores.generator
        return generators.closed(
            name, request, connections=connections, seconds=seconds, cores=cores
        )

    def _point(self, found: Served, loop: str, value: float) -> None:
        time.sleep(self._settings.pause)
        found.settle()
        # tokens live for an hour: one for each point
        request = asked(found, self._settings.request)
        before = found.cpu()
        with environment.Watch() as watch:
            seconds, cores = self._settings.seconds, self._cores.generator
            if loop == OPEN:
                outcome = generators.constant(request, rate=value, seconds=seconds, cores=cores)
            else:
                outcome = self._load(found, request, int(value), seconds)
        found.check()
        cpu = found.cores(before, outcome.seconds)
        self._record.samples.append(
            {
                **asdict(found.lineup),
                "connections": None if loop == OPEN else int(value),
                "rate_offered": value if loop == OPEN else None,
                **outcome.sample(),
                "cpu_cores": cpu,
                "memory_mb": found.memory(),
                "others": watch.described(),
            }
        )
        self._points -= 1
        self._point_seconds.append(watch.seconds)
        self._say(f"{found.lineup}: {told(loop, value, outcome)}; {self._left()}")


def asked(found: Served, what: str) -> Request:
    """Return the request that a line-up is loaded with, with fresh tokens.

    :param what: ``projects``, the published test's list of projects, or ``validation``, as a
        service asks for
    """
    headers = {"X-Auth-Token": found.keystone.token(found.url)}
    if what == "projects":
        return Request(f"{found.url}{PROJECTS}", headers)
    headers["X-Subject-Token"] = found.keystone.token(found.url)
    return Request(f"{found.url}{VALIDATION}", headers)


def told(loop: str, value: float, outcome: Load) -> str:
    """Return a point, for a reader who waits."""
    what = f"{value:g}/s offered" if loop == OPEN else f"{value:g} connections"
    failures = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.failures.items()))
    p95 = outcome.percentile(0.95)
    parts = [f"{what} {outcome.rate:.0f}/s"]
    if p95 is not None:
        parts.append(f"p95 {p95:.0f} ms")
    parts.append(f"failed: {failures}" if failures else "none failed")
    if outcome.at_limit:
        parts.append("the generator was the limit")
    return ", ".join(parts)


def _generator(settings: Settings, lineup: Lineup) -> str:
    """Return which generator is right: wrk, unless the server closes without saying so."""
    if settings.generator != "auto":
        return settings.generator
    return "ab" if lineup.closes else "wrk"


def check(settings: Settings) -> None:
    """Find out, before anything is made, that a sweep can run here.

    :raises KeyfrontError: it cannot; says what to do
    """
    if settings.request not in REQUESTS:
        raise OptionError("--request", settings.request, f"one of {', '.join(REQUESTS)}")
    for lineup in settings.lineups:
        lineup.check()
    if settings.points:
        for name in sorted({_generator(settings, lineup) for lineup in settings.lineups}):
            if name == generators.CONSTANT:
                raise OptionError("--generator", name, "a closed loop; constant rates are --rates")
            generators.check(name)
    if settings.generator == "siege" and max(settings.points, default=0) > _SIEGE_CONNECTIONS:
        limit = f"{_SIEGE_CONNECTIONS} at most for siege"
        raise OptionError("--points", max(settings.points), limit)


def lineups(
    topologies: Sequence[str], tunings: Sequence[str], caches: Sequence[str]
) -> list[Lineup]:
    """Return every combination, one topology after the other.

    :param caches: ``off`` and ``on``
    """
    return [
        Lineup(topology, tuning, cache == "on")
        for topology in topologies
        for tuning in tunings
        for cache in caches
    ]


_LEGEND = "answers per second; in brackets the share of requests that failed"
_LIMITED = "; * the generator may have been the limit"
_FAILURES = (
    "Closed loop: answers per second, 99th percentile in milliseconds of all answers, and how many "
    "requests failed, by kind; refused is 503 with Retry-After."
)
_SHORT = "; ~ fewer than two answers a connection, so measured too shortly"


def lineup_of(sample: Sample) -> str:
    """``nginx+uwsgi:tuned:cached``"""
    return str(Lineup(sample["topology"], sample["tuning"], sample["cached"]))


def tables(samples: Sequence[Sample]) -> list[Table]:
    """Return ``throughput`` and ``latency`` of closed loops, ``rates`` of open ones.

    ``failures`` tells what failed by kind, where the generator told each status. In ``best`` each
    line-up has one row: its best point without a failure in a hundred requests. Empty ones are
    left out.
    """
    closed = [sample for sample in samples if sample["loop"] != OPEN]
    constant = [sample for sample in samples if sample["loop"] == OPEN]
    latency = "Closed loop: median and 95th percentile of good answers, in milliseconds."
    rates = (
        "Constant rate: good answers in percent, and their median and 95th percentile in "
        f"milliseconds from when they were due{_LIMITED}."
    )
    found = [
        _grid("throughput", closed, throughput, f"Closed loop: {_LEGEND}{_LIMITED}{_SHORT}."),
        _grid("latency", closed, _latency, latency),
        _grid("rates", constant, _open, rates),
        _grid("failures", _by_status(closed), _failures, _FAILURES),
        _best(closed),
    ]
    return [table for table in found if table.rows]


def _grid(
    name: str, samples: Sequence[Sample], cell: Callable[[Sample], Cell], caption: str
) -> Table:
    opened = bool(samples) and samples[0]["loop"] == OPEN
    key = "rate_offered" if opened else "connections"
    by = "offered per second" if opened else key
    names = list(dict.fromkeys(map(lineup_of, samples)))
    values = {(sample[key], lineup_of(sample)): cell(sample) for sample in samples}
    rows: list[list[Cell]] = [
        [point, *(values.get((point, one)) for one in names)]
        for point in sorted({sample[key] for sample in samples})
    ]
    return Table(name=name, columns=[by, *names], rows=rows, caption=caption)


def _good_share(sample: Sample) -> float:
    """Return the share of requests that did not fail, in percent."""
    everything = sample["good"] + sample["failed"]
    return 100 * sample["good"] / everything if everything else 100.0


def throughput(sample: Sample) -> str:
    """``812 (0.4 %)``"""
    share = 100 - _good_share(sample)
    text = str(number(sample["rate"]))
    if share:
        text += f" ({share:.1f} %)" if share >= 0.05 else " (<0.1 %)"
    if sample["good"] < 2 * sample["connections"]:
        text = f"~{text}"
    return text + ("*" if sample["generator_limit"] else "")


def _latency(sample: Sample) -> Cell:
    if sample["p50_ms"] is None:
        return None
    return f"{number(sample['p50_ms'])} / {number(sample['p95_ms'])}"


def _by_status(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples, or none where no generator told each status."""
    kinds = {kind for one in samples for kind in one.get("failures", ())}
    if any(kind == "refused" or kind.startswith("status ") for kind in kinds):
        return list(samples)
    return []


def _failures(sample: Sample) -> str:
    """``49 200, p99 35; 12 refused``"""
    p99 = sample.get("p99_with_failed_ms") or sample["p99_ms"]
    text = f"{number(sample['rate'])}" + (f", p99 {number(p99)}" if p99 is not None else "")
    failures = sorted(sample["failures"].items())
    return "; ".join([text, *(f"{count} {kind}" for kind, count in failures)])


def _open(sample: Sample) -> str:
    text = f"{_good_share(sample):.4g} %"
    if sample["p50_ms"] is not None:
        text += f", {_latency(sample)}"
    return text + ("*" if sample["generator_limit"] else "")


def _best(samples: Iterable[Sample]) -> Table:
    best: dict[str, Sample] = {}
    for sample in samples:
        clean = sample["failed"] * 100 <= sample["good"]
        name = lineup_of(sample)
        if clean and (name not in best or sample["rate"] > best[name]["rate"]):
            best[name] = sample
    return results.tabled(
        "best",
        sorted(best.values(), key=lambda one: -one["rate"]),
        {
            "line-up": "topology",
            "setting": "tuning",
            "token cache": lambda one: "on" if one["cached"] else "off",
            "answers/s": lambda one: number(one["rate"]),
            "connections": "connections",
            "p95, ms": lambda one: number(one["p95_ms"]),
        },
        "The best point of each line-up at which at most 1 % failed.",
    )


def number(value: float | None) -> str | None:
    """Three digits that count: ``0.81``, ``8.1``, ``812``, ``8120``; ``None`` for ``None``."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


HIGHEST = 60000
# Three minutes on two cores at most, with the Keystone that it makes.
QUICK_LINEUPS = tuple(
    Lineup("nginx+uwsgi", *how) for how in (("stock", False), ("tuned", False), ("tuned", True))
)
QUICK_POINTS = "10,100"
QUICK = {"seconds": "4", "warm_up": "2", "pause": "0"}
DEFAULTS = {"seconds": "10", "warm_up": "10", "pause": "2"}
# What was published: two minutes a point, half a minute between, one of warming.
PUBLISHED = {"seconds": "120", "warm_up": "60", "pause": "30"}


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Measure Keystone's throughput, latency and failures against connections, for each line-up "
        "of servers. Everything runs on loopback; the generator has a core of its own if there are "
        "two. An interrupted sweep goes on where it was when it is started again."
    )
    for option, metavar, text in (
        ("--topology", "NAME[,NAME]", f"of {', '.join(TOPOLOGIES)} (default: all)"),
        ("--tuning", "NAME[,NAME]", f"of {', '.join(TUNINGS)} (default: stock and tuned)"),
        ("--cache", "off|on", "keyfront's token cache (default: off and on)"),
    ):
        parser.add_argument(option, action="append", metavar=metavar, help=text)
    points = "connections, 1 to 60000 (default: 10-100/10,100-1000/100,2000,5000)"
    given.add_texts(
        parser,
        ("--points", "N,N|FROM-TO/STEP", points),
        ("--rates", "N,N", "constant rates too, in requests per second (default: none)"),
        ("--seconds", "N", "of each point, 1 to 3600 (default: 10)"),
        ("--warm-up", "N", "seconds, 1 to 3600 (default: 10)"),
        ("--pause", "N", "seconds between points, 0 to 600 (default: 2)"),
    )
    asked = "what is asked: the published test's list of projects, or the validation of a token"
    by = f"of {', '.join(generators.GENERATORS[:-1])} (default: wrk, and ab for servers that close "
    for option, default, metavar, text in (
        ("--request", "projects", "|".join(REQUESTS), f"{asked} (default: %(default)s)"),
        ("--generator", "auto", "NAME", f"{by}without saying so)"),
    ):
        parser.add_argument(option, default=default, metavar=metavar, help=text)
    for option, text in (
        ("--published", "120 s a point, 30 s between, 60 s of warming, as published"),
        ("--quick", "a look within three minutes: nginx and uWSGI, stock, tuned, with the cache"),
        ("--fresh", "measure again what was measured"),
    ):
        parser.add_argument(option, action="store_true", help=text)
    given.add_name(parser, "keystone")
    given.add_state(parser)
    results.add_argument(parser)


def run(arguments: Namespace, out: TextIO) -> int:
    """Sweep, and print the tables."""
    settings = read(arguments)
    check(settings)
    results.prepare(arguments.results)
    say = partial(print, file=out, flush=True)
    path = arguments.results / results.file_name("sweep", settings.name)
    if arguments.fresh:
        path.unlink(missing_ok=True)
    with given.ended_in_order():
        try:
            with given.keystone(arguments, say) as found:
                path = Sweep(settings, found, arguments.results, out).run()
        except KeyboardInterrupt:
            there = f"the same command goes on with {path}"
            say(f"interrupted; {there if path.exists() else 'nothing was measured yet'}")
            return 130
    out.write(results.told(results.read(path), path))
    return 0


def read(arguments: Namespace) -> Settings:
    """Return what the arguments ask for.

    :raises OptionError: one is wrong
    """
    defaults = QUICK if arguments.quick else PUBLISHED if arguments.published else DEFAULTS
    numbers = {name: getattr(arguments, name) or default for name, default in defaults.items()}
    chosen = (arguments.topology, arguments.tuning, arguments.cache)
    if arguments.quick and not any(chosen):
        wanted = list(QUICK_LINEUPS)
    else:
        wanted = lineups(
            given.choices("--topology", arguments.topology, TOPOLOGIES),
            given.choices("--tuning", arguments.tuning or ["stock,tuned"], TUNINGS),
            given.choices("--cache", arguments.cache, CACHES),
        )
    points = list(PUBLISHED_POINTS)
    text = arguments.points or (QUICK_POINTS if arguments.quick else "")
    if text:
        points = given.points("--points", text, HIGHEST)
    rates = given.points("--rates", arguments.rates, HIGHEST) if arguments.rates else []
    return Settings(
        name=arguments.name,
        lineups=wanted,
        points=points,
        rates=rates,
        request=arguments.request,
        seconds=ranges.whole("--seconds", numbers["seconds"], 1, 3600),
        warm_up=ranges.whole("--warm-up", numbers["warm_up"], 1, 3600),
        pause=ranges.decimal("--pause", numbers["pause"], 0, 600),
        generator=arguments.generator,
    )

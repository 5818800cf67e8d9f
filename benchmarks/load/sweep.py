"""Throughput, latency and failures of line-ups against connections, or against offered rates.

Each line-up is started, warmed as in the published test, and loaded point by point; the result is
written after each one, so that an interrupted sweep goes on where it was. What is asked is the
published test's list of projects, or a validation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from keyfront.errors import BenchmarkError, OptionError, ServerError

from .. import results, surroundings
from ..lineups.keystone import Keystone
from ..lineups.lineup import Lineup, Served, served
from ..lineups.processes import Cores, split
from ..results import Record
from . import generators, sweep_tables
from .measured import OPEN, Outcome, Request

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
    """What a sweep does.

    :param name: of the result
    :param lineups: in this order
    :param points: connections of closed loops, ascending
    :param rates: requests per second of open loops
    :param request: one of :data:`REQUESTS`
    :param seconds: of each point
    :param warm_up: seconds of each run that warms
    :param pause: seconds between points
    :param generator: of closed loops, or ``auto``
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
        """What has to be the same for samples to stand in one table."""
        values = asdict(self)
        for varied in ("name", "lineups", "points", "rates"):
            del values[varied]
        return {**values, "cores": str(cores)}


class Sweep:
    """One sweep.

    :param keystone: one that is made
    :param folder: of results
    :param out: progress goes there
    """

    def __init__(self, settings: Settings, keystone: Keystone, folder: Path, out: TextIO) -> None:
        self._settings = settings
        self._keystone = keystone
        self._folder = folder
        self._out = out
        self._cores = split()
        self._clock = _Clock(settings)
        self._record: Record | None = None

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
            programs=("nginx", "apache2", "wrk", "ab", "siege", "h2load"),
            samples=before.samples if before else (),
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
        assert self._record is not None
        self._record.tables[:] = sweep_tables.tables(self._record.samples)
        return results.write(self._record.result(complete=complete), self._folder)

    def _missing(self, lineup: Lineup) -> list[tuple[str, float]]:
        assert self._record is not None
        there = {
            (one["loop"], one["rate_offered"] if one["loop"] == OPEN else one["connections"])
            for one in self._record.samples
            if sweep_tables.lineup_of(one) == str(lineup)
        }
        wanted: list[tuple[str, float]] = [("closed", one) for one in self._settings.points]
        wanted += [(OPEN, one) for one in self._settings.rates]
        return [one for one in wanted if one not in there]

    def _measure(self, lineup: Lineup) -> None:
        assert self._record is not None
        missing = self._missing(lineup)
        self._clock.skip(len(self._settings.points) + len(self._settings.rates) - len(missing))
        if not missing:
            self._say(f"{lineup}: measured before")
            self._clock.started(0.0)
            return
        begin = time.monotonic()
        try:
            with served(lineup, self._keystone, self._cores) as found:
                warm = self._warm(found)
                self._clock.started(time.monotonic() - begin)
                self._say(f"{lineup}: warm after {time.monotonic() - begin:.0f} s, {warm:.0f}/s")
                for loop, value in missing:
                    self._point(found, loop, value)
                    self._write(complete=False)
        except ServerError as error:
            self._record.note(f"{lineup}: {error}")
            self._say(f"{lineup}: {error}")
            self._clock.give_up(lineup)

    def _request(self, found: Served) -> Request:
        if self._settings.request == "validation":
            return found.validation()
        return found.projects()

    def _warm(self, found: Served) -> float:
        """Load a line-up until it gets no faster; returns its rate.

        As published: 200 connections, so that every process has loaded Keystone and its database.
        """
        request, rate = self._request(found), 0.0
        for _ in range(_WARM_RUNS):
            last = rate
            outcome = generators.closed(
                self._generator(found.lineup, _WARM_CONNECTIONS),
                request,
                connections=min(_WARM_CONNECTIONS, max(self._settings.points, default=50)),
                seconds=self._settings.warm_up,
                cores=self._cores.generator,
            )
            rate = outcome.rate
            if last and rate < last * _WARMER:
                break
        return rate

    def _generator(self, lineup: Lineup, connections: int) -> str:
        """Which generator is right: wrk, unless the server closes without saying so."""
        if self._settings.generator != "auto":
            return self._settings.generator
        return "ab" if lineup.closes else "wrk"

    def _point(self, found: Served, loop: str, value: float) -> None:
        assert self._record is not None
        time.sleep(self._settings.pause)
        found.settle()
        # tokens live for an hour: one for each point
        request = self._request(found)
        before = found.cpu()
        with surroundings.Watch() as watch:
            outcome = self._load(found, request, loop, value)
        found.check()
        after = found.cpu()
        cpu = {name: round((after[name] - before[name]) / outcome.seconds, 3) for name in after}
        self._record.samples.append(
            {
                "topology": found.lineup.topology,
                "tuning": found.lineup.tuning,
                "cached": found.lineup.cached,
                "connections": None if loop == OPEN else int(value),
                "rate_offered": value if loop == OPEN else None,
                **outcome.sample(),
                "cpu_cores": cpu,
                "others": watch.described(),
            }
        )
        self._clock.point(watch.seconds)
        self._say(f"{found.lineup}: {told(loop, value, outcome)}; {self._clock.left()}")

    def _load(self, found: Served, request: Request, loop: str, value: float) -> Outcome:
        if loop == OPEN:
            return generators.constant(
                request, rate=value, seconds=self._settings.seconds, cores=self._cores.generator
            )
        return generators.closed(
            self._generator(found.lineup, int(value)),
            request,
            connections=int(value),
            seconds=self._settings.seconds,
            cores=self._cores.generator,
        )

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def told(loop: str, value: float, outcome: Outcome) -> str:
    """A point, for a reader who waits."""
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


class _Clock:
    """How much time is left: by what points and starts have taken until now."""

    def __init__(self, settings: Settings) -> None:
        self._each = len(settings.points) + len(settings.rates)
        self._points = self._each * len(settings.lineups)
        self._starts = len(settings.lineups)
        self._point_seconds = [settings.seconds + 1.0]
        self._pause = settings.pause
        # a stock Keystone loads for some ten seconds
        self._start_seconds = [10.0 + 2 * settings.warm_up]
        self._done_here = 0

    def skip(self, points: int) -> None:
        self._points -= points
        self._done_here = points

    def started(self, seconds: float) -> None:
        self._starts -= 1
        if seconds:
            self._start_seconds.append(seconds)

    def point(self, seconds: float) -> None:
        self._points -= 1
        self._done_here += 1
        self._point_seconds.append(seconds)

    def give_up(self, lineup: Lineup) -> None:
        self._points -= self._each - self._done_here

    def left(self) -> str:
        """Such as ``12 points and 3 min left``."""
        point = sum(self._point_seconds) / len(self._point_seconds) + self._pause
        start = sum(self._start_seconds) / len(self._start_seconds)
        seconds = self._points * point + self._starts * start
        time_left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"{self._points} points and {time_left} left"


def check(settings: Settings) -> None:
    """Find out, before anything is made, that a sweep can run here.

    :raises KeyfrontError: it cannot; says what to do
    """
    if settings.request not in REQUESTS:
        raise OptionError("--request", settings.request, f"one of {', '.join(REQUESTS)}")
    for lineup in settings.lineups:
        lineup.check()
    if settings.points:
        wanted = {settings.generator}
        if settings.generator == "auto":
            wanted = {"ab" if lineup.closes else "wrk" for lineup in settings.lineups}
        for name in sorted(wanted):
            if name == generators.CONSTANT:
                raise OptionError("--generator", name, "a closed loop; constant rates are --rates")
            generators.check(name)
    if settings.generator == "siege" and max(settings.points, default=0) > _SIEGE_CONNECTIONS:
        limit = f"{_SIEGE_CONNECTIONS} at most for siege"
        raise OptionError("--points", max(settings.points), limit)


def lineups(
    topologies: Sequence[str], tunings: Sequence[str], caches: Sequence[str]
) -> list[Lineup]:
    """Every combination, one topology after the other.

    :param caches: ``off`` and ``on``
    """
    return [
        Lineup(topology, tuning, cache == "on")
        for topology in topologies
        for tuning in tunings
        for cache in caches
    ]

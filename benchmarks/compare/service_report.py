"""The cases of ``service_rates``, and its report: for a terminal, the documents and a file."""

from __future__ import annotations

from typing import NamedTuple

from .. import results
from ..lineups.uwsgi import PROCESSES
from ..results import Table
from . import goals
from .goals import SERVICE_GOALS, Goal
from .service_servers import CANDIDATES, SERVICES
from .token_samples import Ratio, Samples, ratio, row
from .token_servers import CONNECTIONS

TITLE = "A service behind authtoken, and behind keystonemiddleware's"
DISTRIBUTIONS = ("keystone", "keystonemiddleware", "redis", "uWSGI", "pyuwsgi")
PROGRAMS = ("wrk", "memcached", "redis-server")


class Settings(NamedTuple):
    """How it was measured."""

    rounds: int
    seconds: int

    @property
    def command(self) -> str:
        """What measures the same again."""
        return (
            f"python -m keyfront.benchmarks.compare.service_rates --rounds {self.rounds} "
            f"--seconds {self.seconds}"
        )


class Case(NamedTuple):
    """A candidate under one load.

    :param catalog: whether the token has one
    """

    candidate: str
    catalog: bool = True

    @property
    def label(self) -> str:
        """For a table."""
        label = CANDIDATES[self.candidate].label
        if CANDIDATES[self.candidate].kept:
            label += ", kept connections"
        return label if self.catalog else f"{label}, no catalog"


# The two sides of a ratio are neighbours.
CASES = {
    "memcached": Case("memcached"),
    "revalidate": Case("revalidate"),
    "strict": Case("strict"),
    "bare": Case("bare"),
    "lease": Case("lease"),
    "lease, no catalog": Case("lease", catalog=False),
    "lease kept": Case("lease kept"),
    "bare kept": Case("bare kept"),
}
RATIOS = (
    ("strict", "bare"),
    ("lease", "bare"),
    ("revalidate", "bare"),
    ("lease kept", "bare kept"),
    ("strict", "memcached"),
    ("lease", "memcached"),
    ("revalidate", "memcached"),
    ("bare", "memcached"),
    ("lease", "lease, no catalog"),
)


def _ratios(samples: Samples) -> list[tuple[Ratio, Ratio]]:
    """Rate and CPU time of all pairs."""
    return [
        (ratio(samples, first, second, "rate"), _cpu(samples, first, second))
        for first, second in RATIOS
    ]


def _cpu(samples: Samples, first: str, second: str) -> Ratio:
    pairs = zip(samples[first], samples[second], strict=True)
    return Ratio(
        first,
        second,
        "CPU",
        tuple(
            (one.server_cpu / one.load.good) / (other.server_cpu / other.load.good)
            for one, other in pairs
        ),
    )


def _goal(found: Ratio) -> Goal | None:
    return goals.find(found.first, found.second, found.figure, among=SERVICE_GOALS)


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    found = [each for both in _ratios(samples) for each in both]
    return {goal: goal.judge(each.pairs) for each in found if (goal := _goal(each)) is not None}


def table(samples: Samples) -> str:
    """The result as text of at most 100 columns."""
    lines = [f"{'':<50}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU us':>9}{'wrk':>6}"]
    for name, each in samples.items():
        one = row(each)
        lines.append(
            f"{CASES[name].label:<50}{one.rate:>11.0f}{one.p50:>9.3f}{one.p99:>9.3f}"
            f"{one.cpu:>9.0f}{one.generator:>6.0%}"
        )
    lines += [
        "",
        f"{'ratio of each pair (lowest to highest)':<42}{'requests/s':>22}{'CPU per request':>22}",
    ]
    for rate, cpu in _ratios(samples):
        names = f"{rate.first} / {rate.second}"
        lines.append(f"{names:<42}{_spread(rate):>22}{_spread(cpu):>22}")
    lines.append("")
    for goal, verdict in judge(samples).items():
        lines.append(f"{verdict:<8} {goal.figure:<4} {goal.first} / {goal.second} {goal}")
    return "\n".join(lines)


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """The result as the documents show it: ``rates`` and ``ratios``."""
    rates: list[list[results.Cell]] = []
    for name, each in samples.items():
        one = row(each)
        rates.append(
            [
                CASES[name].label,
                _round(one.rate),
                f"{one.p50:.2f} ms",
                f"{one.p99:.2f} ms",
                f"{one.cpu:.0f} µs",
            ]
        )
    verdicts = judge(samples)
    found: list[list[results.Cell]] = []
    for both in _ratios(samples):
        names = " / ".join(CASES[one].label for one in both[0][:2])
        wanted = [f"{one.figure} {one}: {verdicts[one]}" for one in map(_goal, both) if one]
        rate, cpu = map(_spread, both)
        found.append([names, rate, cpu, ", ".join(wanted)])
    columns = ["in front of the service", "requests per second", "p50", "p99", "CPU per request"]
    caption = (
        f"`{settings.command}`: wrk with {CONNECTIONS} connections, Redis, memcached and Keystone "
        f"on the same cores; a catalog of {SERVICES} services; uWSGI with {PROCESSES} processes."
    )
    spread = "ratio: median of the pairs (lowest to highest)"
    return [
        Table(name="rates", columns=columns, rows=rates, caption=caption),
        Table(
            name="ratios",
            columns=[spread, "requests per second", "CPU per request", "goal"],
            rows=found,
        ),
    ]


def raw(samples: Samples) -> list[results.Sample]:
    """Every round of every case."""
    return [
        {
            "case": name,
            "round": number,
            **sample.described(),
        }
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def _round(value: float) -> str:
    """As many digits as mean something, thousands apart."""
    return f"{round(value, -2):,.0f}".replace(",", " ")


def _spread(found: Ratio) -> str:
    low, high = min(found.pairs), max(found.pairs)
    digits = 2 if high < 10 else 1
    return f"{found.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

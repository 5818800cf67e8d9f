"""The cases of ``service_rates``, and its report: for a terminal, the documents and a file."""

from __future__ import annotations

import importlib.metadata
from typing import Any, NamedTuple

from . import goals, token_report
from .goals import SERVICE_GOALS, Goal
from .service_servers import CANDIDATES, SERVICES
from .token_samples import Ratio, Samples, ratio, row
from .token_servers import CONNECTIONS
from .uwsgi_server import PROCESSES


class Settings(NamedTuple):
    """How it was measured."""

    rounds: int
    seconds: int

    @property
    def command(self) -> str:
        """What measures the same again."""
        return (
            f"python -m keyfront.benchmarks.service_rates --rounds {self.rounds} "
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
            (one.server_cpu / one.load.requests) / (other.server_cpu / other.load.requests)
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


def markdown(samples: Samples, settings: Settings) -> str:
    """The result as the documents show it."""
    lines = [
        "| in front of the service | requests per second | p50 | p99 | CPU per request |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, each in samples.items():
        one = row(each)
        lines.append(
            f"| {CASES[name].label} | {_round(one.rate)} | {one.p50:.2f} ms | {one.p99:.2f} ms "
            f"| {one.cpu:.0f} µs |"
        )
    lines += [
        "",
        "| ratio: median of the pairs (lowest to highest) | requests per second "
        "| CPU per request | goal |",
        "|---|---:|---:|---|",
    ]
    verdicts = judge(samples)
    for both in _ratios(samples):
        names = " / ".join(CASES[one].label for one in both[0][:2])
        wanted = [f"{one.figure} {one}: {verdicts[one]}" for one in map(_goal, both) if one]
        rate, cpu = map(_spread, both)
        lines.append(f"| {names} | {rate} | {cpu} | {', '.join(wanted)} |")
    return "\n".join([*lines, "", described_in_words(settings)])


def described_in_words(settings: Settings) -> str:
    """One paragraph: the command, the machine, the versions."""
    facts = environment()
    return (
        f"`{settings.command}`, {facts['date']}: {facts['cpu']}, {facts['cores']} cores, wrk with "
        f"{CONNECTIONS} connections, Redis, memcached and Keystone on the same; a catalog of "
        f"{SERVICES} services; uWSGI {facts['uwsgi']} with {PROCESSES} processes, "
        f"keystonemiddleware {facts['keystonemiddleware']}, redis-py {facts['redis']}, Python "
        f"{facts['python']}, keyfront {facts['keyfront']}."
    )


def described(samples: Samples, settings: Settings, seconds: float) -> dict[str, Any]:
    """All that was measured, for a file."""
    return {
        "schema": 1,
        "environment": environment(),
        "settings": settings._asdict(),
        "wall_seconds": round(seconds, 1),
        "cases": {
            name: {**row(each)._asdict(), "rates": [one.load.rate for one in each]}
            for name, each in samples.items()
        },
        "ratios": {
            f"{rate.first} / {rate.second}": {"rate": rate.pairs, "CPU": cpu.pairs}
            for rate, cpu in _ratios(samples)
        },
        "goals": {
            f"{goal.figure} of {goal.first} / {goal.second} {goal}": verdict
            for goal, verdict in judge(samples).items()
        },
    }


def environment() -> dict[str, str | int]:
    """What the numbers were measured on."""
    facts = token_report.environment()
    for name in ("keystonemiddleware", "redis"):
        facts[name] = importlib.metadata.version(name)
    return facts


def _round(value: float) -> str:
    """As many digits as mean something, thousands apart."""
    return f"{round(value, -2):,.0f}".replace(",", " ")


def _spread(found: Ratio) -> str:
    low, high = min(found.pairs), max(found.pairs)
    digits = 2 if high < 10 else 1
    return f"{found.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

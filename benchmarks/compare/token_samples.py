"""What ``token_validation`` measures: the cases, one sample of each per round, and their ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import NamedTuple

from ..load.measured import Load, percentile
from . import goals
from .goals import GOALS, Goal
from .token_servers import CANDIDATES


class Case(NamedTuple):
    """A candidate under one load.

    :param slow: measured for longer, so that there are enough answers
    :param vary: each request is another one, so that no cache in front knows its answer
    :param changes: all that Keystone's own caches hold is made stale all the time
    """

    candidate: str
    slow: bool = False
    vary: bool = False
    changes: bool = False

    @property
    def label(self) -> str:
        """For a table."""
        kind = "kept connections" if CANDIDATES[self.candidate].kept else ""
        if self.vary:
            kind = "misses, changes" if self.changes else "misses"
        label = CANDIDATES[self.candidate].label
        return f"{label}, {kind}" if kind else label


# The two sides of a ratio are neighbours.
CASES = {
    "bare kept": Case("bare kept"),
    "keyfront kept": Case("keyfront kept"),
    "bare": Case("bare"),
    "keyfront": Case("keyfront"),
    "memcached": Case("memcached", slow=True),
    "keystone": Case("keystone", slow=True),
    "keystone miss": Case("keystone", slow=True, vary=True),
    "keyfront miss": Case("keyfront", slow=True, vary=True),
    "memcached miss": Case("memcached", slow=True, vary=True),
    "keyfront+memcached miss": Case("keyfront+memcached", slow=True, vary=True),
}

TOKEN_CACHING_CASES = {
    "uncached tokens miss": Case("keyfront+memcached-tokens", slow=True, vary=True),
    "keyfront+memcached changes": Case("keyfront+memcached", slow=True, vary=True, changes=True),
    "uncached tokens changes": Case(
        "keyfront+memcached-tokens", slow=True, vary=True, changes=True
    ),
}
"""Whether Keystone's token cache helps beneath ours: at best, with what it holds never stale, and
at worst, with all of it stale before it is asked for again."""

RATIOS = (
    ("keyfront", "bare"),
    ("keyfront kept", "bare kept"),
    ("keyfront", "memcached"),
    ("keyfront", "keystone"),
    ("keyfront miss", "keystone miss"),
    ("keyfront+memcached miss", "memcached miss"),
    ("uncached tokens miss", "keyfront+memcached miss"),
    ("uncached tokens changes", "keyfront+memcached changes"),
)


class Sample(NamedTuple):
    """One case in one round."""

    load: Load
    server_cpu: float
    """CPU seconds that uWSGI's processes took."""

    @property
    def p50(self) -> float:
        return percentile(self.load.latencies or {}, 0.50)

    @property
    def p99(self) -> float:
        return percentile(self.load.latencies or {}, 0.99)

    def described(self) -> dict[str, float]:
        """For a result."""
        return {
            "requests": self.load.good,
            "seconds": self.load.seconds,
            "errors": self.load.failed,
            "p50_ms": self.p50,
            "p99_ms": self.p99,
            "server_cpu": self.server_cpu,
            "generator_cpu": self.load.generator_cpu,
        }


Samples = dict[str, list[Sample]]


class Row(NamedTuple):
    """One case over all rounds."""

    rate: float
    """The median of the rounds."""
    p50: float
    """Milliseconds, of all answers together."""
    p99: float
    errors: int
    cpu: float
    """Microseconds of uWSGI's processes per answer."""
    generator: float
    """The part of one core that wrk took."""


def row(samples: list[Sample]) -> Row:
    """Sum up one case."""
    latencies: Counter[int] = Counter()
    for sample in samples:
        latencies.update(sample.load.latencies or {})
    seconds = sum(sample.load.seconds for sample in samples)
    answers = sum(sample.load.good for sample in samples)
    return Row(
        statistics.median(sample.load.rate for sample in samples),
        percentile(latencies, 0.50),
        percentile(latencies, 0.99),
        sum(sample.load.failed for sample in samples),
        sum(sample.server_cpu for sample in samples) / answers * 1e6,
        sum(sample.load.generator_cpu for sample in samples) / seconds,
    )


class Ratio(NamedTuple):
    """A figure of two cases, first to second, over the pairs."""

    first: str
    second: str
    figure: str
    """``rate`` or ``p99``."""
    pairs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.pairs)

    @property
    def goal(self) -> Goal | None:
        return goals.find(self.first, self.second, self.figure)


def ratio(samples: Samples, first: str, second: str, figure: str) -> Ratio:
    """Take a ratio in each round."""
    pairs = zip(samples[first], samples[second], strict=True)
    if figure == "rate":
        found = tuple(one.load.rate / other.load.rate for one, other in pairs)
    else:
        found = tuple(one.p99 / other.p99 for one, other in pairs)
    return Ratio(first, second, figure, found)


def ratios(samples: Samples) -> list[tuple[Ratio, Ratio]]:
    """Rate and p99 of all pairs that were measured."""
    return [
        (ratio(samples, first, second, "rate"), ratio(samples, first, second, "p99"))
        for first, second in RATIOS
        if first in samples and second in samples
    ]


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    return {
        goal: goal.judge(ratio(samples, goal.first, goal.second, goal.figure).pairs)
        for goal in GOALS
    }

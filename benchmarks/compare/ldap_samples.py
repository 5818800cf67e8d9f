"""What ``ldap_logins`` measures: the cases, a sample of each, and the ratios between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import goals
from .goals import MET, MISSED, Goal
from .ldap_keystones import CANDIDATES

# Milliseconds that are added to each round trip.
LATENCIES = (0, 1, 10)
FAR = 50
ONE, MANY = "one", "many"


@dataclass(frozen=True)
class Case:
    """One candidate under one load.

    :param users: ``one`` (the same user each time) or ``many`` (each login another's)
    :param latency: milliseconds added to each round trip
    :param at_once: whether all logins begin at once
    :param driver: whether the driver alone is asked, and no token is made
    """

    candidate: str
    users: str
    latency: int
    at_once: bool = False
    driver: bool = False

    @property
    def label(self) -> str:
        """The candidate, as tables show it."""
        return CANDIDATES[self.candidate].label


def name_of(candidate: str, users: str, latency: int, *, driver: bool = False) -> str:
    """What a case is called, in goals too."""
    return f"{candidate}{' driver' if driver else ''}, {users}, {latency} ms"


def _cases() -> dict[str, Case]:
    cases = [Case("sql", ONE, 0)]
    cases += [
        Case(candidate, users, latency)
        for latency in LATENCIES
        for users in (ONE, MANY)
        for candidate in ("unpooled", "ldappool", "keyfront")
    ]
    cases += [
        Case(f"{candidate} gevent", MANY, FAR, True, driver)
        for driver in (False, True)
        for candidate in ("unpooled", "ldappool", "keyfront")
    ]
    return {
        name_of(case.candidate, case.users, case.latency, driver=case.driver): case
        for case in cases
    }


CASES = _cases()

RATIOS = (
    *(
        (name_of("keyfront", users, latency), name_of(other, users, latency))
        for latency in LATENCIES
        for users in (ONE, MANY)
        for other in ("unpooled", "ldappool")
    ),
    *(
        (
            name_of("keyfront gevent", MANY, FAR, driver=driver),
            name_of(f"{other} gevent", MANY, FAR, driver=driver),
        )
        for driver in (False, True)
        for other in ("unpooled", "ldappool")
    ),
)


class Sample(NamedTuple):
    """One case in one round."""

    tokens: int
    seconds: float
    """Wall time of all logins together."""
    cpu: float
    """CPU seconds of Keystone's process."""
    connects: int
    binds: int
    searches: int
    uneven: int
    """Users with more or fewer BINDs than logins."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Samples = Mapping[str, Sequence[Sample]]


class Row(NamedTuple):
    """One case over all rounds."""

    tokens: int
    seconds: float
    """Per token: the median of the rounds."""
    cpu: float
    connects: float
    binds: float
    searches: float


def row(samples: Sequence[Sample]) -> Row:
    """Sum up one case, per token."""
    tokens = sum(sample.tokens for sample in samples)
    return Row(
        tokens,
        statistics.median(1 / sample.rate for sample in samples),
        sum(sample.cpu for sample in samples) / tokens,
        sum(sample.connects for sample in samples) / tokens,
        sum(sample.binds for sample in samples) / tokens,
        sum(sample.searches for sample in samples) / tokens,
    )


class Ratio(NamedTuple):
    """The rates of two cases, first to second, in each round."""

    first: str
    second: str
    pairs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.pairs)

    @property
    def goal(self) -> Goal | None:
        return goals.find(self.first, self.second, "rate", goals.LDAP_GOALS)


def ratio(samples: Samples, first: str, second: str) -> Ratio:
    """Take a ratio in each round: how many times as fast the first is."""
    pairs = zip(samples[first], samples[second], strict=True)
    return Ratio(first, second, tuple(one.rate / other.rate for one, other in pairs))


def ratios(samples: Samples) -> list[Ratio]:
    """All ratios of what was measured."""
    return [
        ratio(samples, first, second)
        for first, second in RATIOS
        if first in samples and second in samples
    ]


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    verdicts = {
        one.goal: one.goal.judge(one.pairs) for one in ratios(samples) if one.goal is not None
    }
    uneven = sum(
        sample.uneven
        for name, each in samples.items()
        if CASES[name].candidate.startswith("keyfront")
        for sample in each
    )
    # counted, not timed: one login with another number is enough to miss it
    verdicts[goals.ONE_BIND] = MISSED if uneven else MET
    return verdicts

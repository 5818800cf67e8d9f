"""The statistics of comparisons: what a figure was over the rounds, and the ratio of two cases.

Two cases are measured one after the other in each round, a pair, and a ratio is taken of each pair:
what the machine does meanwhile meets both sides. Shown is the median of the pairs, with the lowest
and the highest; how a goal was met is said in ``goals.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import goals
from .goals import Goal


class Spread(NamedTuple):
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        """Return it.

        :param rounds: the figure in each round, at least one
        """
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def text(self, digits: int) -> str:
        """Return the median, the lowest and the highest, each with so many digits."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Ratio(NamedTuple):
    """A figure of two cases, first to second, over the pairs.

    :ivar figure: ``rate``, ``p99`` or ``CPU``
    """

    first: str
    second: str
    figure: str
    pairs: tuple[float, ...]

    @property
    def median(self) -> float:
        """The ratio that tables show."""
        return statistics.median(self.pairs)

    @property
    def goal(self) -> Goal | None:
        """The goal that it has to reach, if there is one."""
        return goals.find(self.first, self.second, self.figure)

    def spread(self, digits: int) -> str:
        """Return the median, the lowest and the highest."""
        return Spread.of(self.pairs).text(digits)


def by_round(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Return the ratio of two figures in each round.

    :raises ValueError: one was measured in more rounds than the other
    """
    return tuple(one / other for one, other in zip(first, second, strict=True))


def ratio(
    samples: Mapping[str, Sequence[Any]], first: str, second: str, figure: str = "rate"
) -> Ratio:
    """Take the ratio of a figure of the samples in each round."""
    name = figure.lower()
    one, other = ([float(getattr(each, name)) for each in samples[x]] for x in (first, second))
    return Ratio(first, second, figure, by_round(one, other))


def ratios(
    samples: Mapping[str, Sequence[Any]],
    wanted: Iterable[tuple[str, str]],
    figures: Sequence[str] = ("rate",),
) -> Iterator[list[Ratio]]:
    """Return the ratios of each pair of cases that were measured, one for each figure."""
    for first, second in wanted:
        if first in samples and second in samples:
            yield [ratio(samples, first, second, figure) for figure in figures]


def judge(found: Iterable[Iterable[Ratio]]) -> dict[Goal, str]:
    """Say of each goal among ratios how it was met."""
    return {one.goal: one.goal.judge(one.pairs) for each in found for one in each if one.goal}


def in_words(
    goal: Goal, pairs: Sequence[float], what: str = "", digits: int = 3
) -> tuple[str, str]:
    """Return a goal with the ratio that was found, and how it was met.

    :param what: words before the two cases
    """
    text = f"{what}{goal.first} / {goal.second} {goal}: {Spread.of(pairs).text(digits)}"
    return text, goal.judge(pairs)

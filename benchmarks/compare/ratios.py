"""The statistics of comparisons: what a figure was over the rounds, and the ratio of two cases.

Two cases are measured one after the other in each round, a pair, and a ratio is taken of each pair:
what the machine does meanwhile meets both sides. Shown is the median of the pairs, with the lowest
and the highest; how a goal was met is said in ``goals.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..results import Cell, Table
from . import goals
from .goals import MET, UNCLEAR, Goal

#: The name of the column that has goals.
GOAL = "goal"


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
    def goal(self) -> Goal | None:
        """The goal that it has to reach, if there is one."""
        return goals.find(self.first, self.second, self.figure)

    def text(self) -> str:
        """Return the median, the lowest and the highest, with as many digits as mean something."""
        high = max(self.pairs)
        return Spread.of(self.pairs).text(3 if high < 0.1 else 2 if high < 10 else 0)


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
        if samples.get(first) and samples.get(second):
            yield [ratio(samples, first, second, figure) for figure in figures]


def in_words(found: Iterable[Iterable[Ratio]]) -> list[tuple[str, str]]:
    """Return each goal among ratios with what was found, and how it was met."""
    words = []
    for one in (one for each in found for one in each):
        if goal := one.goal:
            text = f"{goal.figure} of {goal.first} / {goal.second} {goal}: {one.text()}"
            words.append((text, goal.judge(one.pairs)))
    return words


def at_most(
    what: str, bound: float, unit: str, found: float, *, over: str = UNCLEAR
) -> tuple[str, str]:
    """Return a goal for a figure itself in words, and how it was met.

    :param over: the verdict on more; by default it fails nothing: it may be the machine
    """
    return f"{what} <= {bound:g} {unit}: {found:.3g}", MET if found <= bound else over


def table(
    found: Iterable[Sequence[Ratio]], figures: Mapping[str, str], labels: Mapping[str, str]
) -> Table:
    """Return ratios as the documents show them.

    :param figures: the name of a column for each figure
    :param labels: the words of cases; those without are called by their names
    """
    rows: list[list[Cell]] = []
    for each in found:
        names = " / ".join(labels.get(one, one) for one in each[0][:2])
        wanted = [f"{one.figure} {one.goal}" for one in each if one.goal]
        rows.append([names, *(one.text() for one in each), ", ".join(wanted)])
    spread = "ratio: median of the pairs (lowest to highest)"
    return Table(name="ratios", columns=[spread, *figures.values(), GOAL], rows=rows)


def spreads(title: str, unit: str, found: Mapping[str, Spread], digits: int = 1) -> Table:
    """Return figures over the rounds as a table, by the words of a row."""
    rows: list[list[Cell]] = [
        [name, *(f"{one:.{digits}f}" for one in spread)] for name, spread in found.items()
    ]
    return Table(name="figures", columns=[title, unit, "lowest", "highest"], rows=rows)

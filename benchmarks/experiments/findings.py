"""Judges an experiment's figures: against those published, and against the best stock line-up.

Nothing here measures. A change is told as what it is: better, worse, or none that shows here. Two
runs of the same differ by chance, in short points and on a machine that others use by much. What is
within that is called no difference, unless pairs that were measured in turn all say otherwise: six
of them at least, for six coins show the same side once in 32 throws.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..results import Cell, Table

CHANCE = 1.1
"""What two runs of the same may differ by, as a factor: a single one shows nothing smaller."""

ROUGH = 2.0
"""The same of short points, and of a machine that others use; of both it is the square."""

PAIRS = 6
"""Pairs that can show a difference smaller than that."""

MORE, LESS = "more", "less"
BETTER, WORSE, SAME = "better", "worse", "no difference"
AS_PUBLISHED, OTHERWISE, UNKNOWN = "as published", "otherwise", "cannot be said"


class Point(NamedTuple):
    """One line-up at one load.

    :param good: answers per second with a status below 400
    :param failures: requests that were refused, lost or answered with an error
    :param requests: all, with the failed ones
    """

    lineup: str
    stock: bool
    load: int
    good: float
    failures: int
    requests: int

    @property
    def failed_share(self) -> float:
        return self.failures / self.requests if self.requests else 0.0


def best_stock(points: Iterable[Point], load: int) -> Point | None:
    """Return the stock line-up with the most good answers at a load; fewer failures break a tie."""
    stock = [point for point in points if point.stock and point.load == load]
    return max(stock, key=lambda point: (point.good, -point.failures), default=None)


def first_failing(points: Iterable[Point], lineup: str, *, share: float = 0.01) -> int | None:
    """Return the smallest load at which more than ``share`` of a line-up's requests failed."""
    failing = [p.load for p in points if p.lineup == lineup and p.failed_share > share]
    return min(failing, default=None)


@dataclass(frozen=True)
class Change:
    """A figure, with the best stock line-up and with keyfront.

    :param what: the figure, as a sentence begins: ``Validations of a token``
    :param stock: the best stock value
    :param stock_name: the line-up that it is of
    :param unit: behind the values: ``a second``, ``ms``
    :param more_is_better: true if a larger value is the better one
    :param pairs: ratios keyfront / stock that were measured in turn, if they were
    :param chance: the factor that a single run may be off by
    :param because: a sentence that a reader must know of it; empty for nothing
    """

    what: str
    stock: float
    stock_name: str
    keyfront: float
    unit: str
    more_is_better: bool = True
    pairs: Sequence[float] = ()
    chance: float = CHANCE
    because: str = ""

    @property
    def ratio(self) -> float | None:
        """Keyfront's value as a multiple of the stock one; ``None`` if that was 0."""
        if self.pairs:
            return statistics.median(self.pairs)
        return self.keyfront / self.stock if self.stock else None

    @property
    def verdict(self) -> str:
        """:data:`BETTER`, :data:`WORSE` or :data:`SAME`."""
        if self.ratio is None:
            if self.keyfront == self.stock:
                return SAME
            return BETTER if (self.keyfront > self.stock) == self.more_is_better else WORSE
        if len(self.pairs) >= PAIRS:
            low, high = min(self.pairs), max(self.pairs)
            if low <= 1 <= high:
                return SAME
        elif 1 / self.chance <= self.ratio <= self.chance:
            return SAME
        return BETTER if (self.ratio > 1) == self.more_is_better else WORSE

    @property
    def times(self) -> str:
        """The ratio in words, as ``3 times`` or ``2 times less``; empty if there is none."""
        ratio = self.ratio
        if not ratio:
            return ""
        if self.more_is_better:
            return f"{number(ratio)} times as many"
        return f"{number(ratio)} times" if ratio > 1 else f"{number(1 / ratio)} times less"

    @property
    def sentence(self) -> str:
        """Return a sentence for a reader who knows nothing of the experiment."""
        verdict = "no difference that shows here" if self.verdict == SAME else self.verdict
        times = f", {self.times}" if self.times and self.verdict != SAME else ""
        because = f" {self.because}" if self.because else ""
        return (
            f"{self.what}: {number(self.keyfront)} {self.unit} with keyfront, "
            f"{number(self.stock)} with {self.stock_name}: {verdict}{times}.{because}"
        )

    def row(self) -> list[Cell]:
        """Return its row in the table of :func:`changes`."""
        ratio = self.ratio
        return [
            self.what,
            self.stock_name,
            _cell(self.stock),
            _cell(self.keyfront),
            self.unit,
            MORE if self.more_is_better else LESS,
            _cell(ratio) if ratio is not None else None,
            self.verdict,
        ]


CHANGES, WORDS = "changes", "words"
"""Tables of what keyfront changes: the figures, and a sentence for each of the same lines."""
_CHANGE_COLUMNS = [
    *("what", "best stock line-up", "stock", "keyfront", "unit", "better is", "times", "verdict")
]


def chance(*, quick: bool, quiet: bool) -> float:
    """Return what single figures may be off by, as a factor.

    :param quick: true if points were few and short
    :param quiet: true if nobody else used the machine
    """
    rough = ROUGH ** (quick + (not quiet))
    return max(CHANCE, rough)


def changes(found: Iterable[Change], factor: float = CHANCE) -> Table:
    """Return the figures that the report's first answer is made of.

    :param factor: the factor that a single run may be off by, from :func:`chance`
    """
    return Table(
        name=CHANGES,
        columns=list(_CHANGE_COLUMNS),
        rows=[change.row() for change in found],
        caption="Against the stock line-up that did best at the same load. What was measured less "
        f"than {PAIRS} times and differs by less than a factor of {factor:g} is called no "
        "difference.",
    )


less_is_better = partial(Change, more_is_better=False)
"""The change of a time, a loss or a count."""


def paired_change(
    what: str, stock_name: str, stock: Sequence[float], ours: Sequence[float]
) -> Change:
    """Return the change of a rate that was measured in turns, once in each round."""
    pairs = [a / b for a, b in zip(ours, stock, strict=True)] if len(ours) > 1 else ()
    before, after = statistics.median(stock), statistics.median(ours)
    return Change(what, before, stock_name, after, "a second", pairs=pairs)


def in_words(found: Iterable[Change]) -> Table:
    """Return the same in sentences."""
    rows: list[list[Cell]] = [[change.what, change.sentence] for change in found]
    return Table(name=WORDS, columns=["what", "in words"], rows=rows)


class Finding(NamedTuple):
    """A figure or a statement that was published, and what was found here.

    :param holds: true if the statement holds here; ``None`` if it could not be tried, or is none
    """

    what: str
    published: str
    measured: str
    holds: bool | None = None

    @property
    def verdict(self) -> str:
        """:data:`AS_PUBLISHED`, :data:`OTHERWISE` or :data:`UNKNOWN`."""
        if self.holds is None:
            return UNKNOWN
        return AS_PUBLISHED if self.holds else OTHERWISE


COMPARISON = "published"


def comparison(found: Iterable[Finding], caption: str) -> Table:
    """Published and measured, side by side.

    :param caption: the publication, in a line
    """
    return Table(
        name=COMPARISON,
        columns=["what", "published", "measured here", "verdict"],
        rows=[[one.what, one.published, one.measured, one.verdict] for one in found],
        caption=caption,
    )


def alike(first: float, second: float) -> bool:
    """Return whether two rates are the same as far as single runs can tell."""
    low, high = sorted((first, second))
    return high == 0 or low / high >= 1 / CHANCE**2


def number(value: float | None) -> str:
    """Three digits that mean something, thousands apart."""
    if value is None:
        return "?"
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    if abs(value) < 10:
        return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
    digits = len(str(int(abs(value)))) - 3
    rounded = round(value, -digits) if digits > 0 else round(value)
    return f"{rounded:,.0f}".replace(",", " ")


def _cell(value: float) -> float:
    return float(f"{value:.4g}")

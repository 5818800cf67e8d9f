"""Ratios with their intervals: what the gates measured, and what keyfront changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..experiments.findings import number
from .drawing import BAD, EVEN, GOOD, INK, Drawn, draw, folded, plain_log, tall

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# How far a branch's number stands from its mark, in points.
_ASIDE = 6
# Characters of a label on a line, wide and narrow.
_LABELS = (46, 20)


class Branch(NamedTuple):
    """A line of a forest.

    :param verdict: 1 for good, -1 for bad, 0 for neither
    :param low: the interval's ends; the same as ``ratio`` if there is none
    :param limit: the ratio that it must keep below; ``None`` for no limit
    """

    label: str
    verdict: int
    ratio: float
    low: float
    high: float
    limit: float | None = None


_COLORS = {1: GOOD, 0: EVEN, -1: BAD}
_MARKERS = {1: "o", 0: "D", -1: "s"}


def forest(
    title: str,
    branches: Sequence[Branch],
    *,
    axis: str,
    caption: str,
    right_is_good: bool,
    told: bool = False,
) -> Drawn:
    """Draw ratios on a logarithmic axis, each with its interval and limit.

    :param axis: the meaning of the ratios, in words
    :param right_is_good: true if larger ratios are the better ones
    :param told: true if each ratio stands beside its mark
    """

    def plot(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.grid(False, axis="y")
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=0.8)
        for place, one in enumerate(branches):
            color = _COLORS[one.verdict]
            axes.plot([one.low, one.high], [place, place], color=color, linewidth=2)
            axes.plot([one.ratio], [place], color=color, marker=_MARKERS[one.verdict])
            if told:
                beside: dict[str, Any] = {"xytext": (_ASIDE, 0), "textcoords": "offset points"}
                axes.annotate(number(one.ratio), (one.high, place), va="center", **beside)
            if one.limit is not None:
                axes.plot([one.limit], [place], color=INK, marker="|", markersize=9)
        axes.set_yticks(range(len(branches)))
        axes.set_yticklabels([folded(one.label, _LABELS[narrow]) for one in branches])
        axes.set_ylim(len(branches) - 0.4, -0.6)
        low = min(min(one.low, one.limit or one.low) for one in branches)
        high = max(max(one.high, one.limit or one.high) for one in branches)
        room = (high / low) ** (0.25 if narrow else 0.1) if told else 1.25
        axes.set_xlim(min(low * 0.8, 0.8), max(high * room, 1.25))
        plain_log(axes, "x")
        if high / low < 8:
            ticks = (0.2, 0.33, 0.5, 0.7, 1, 1.5, 2, 3, 5)
            axes.set_xticks([one for one in ticks if low * 0.8 <= one <= high * 1.25 or one == 1])
        axes.set_xlabel(axis)
        side, word = ("right", "better →") if right_is_good else ("left", "← better")
        axes.text(right_is_good, 1, word, transform=axes.transAxes, ha=side, va="bottom")

    heights = tall([one.label for one in branches], _LABELS)
    return draw(title, plot, caption=caption, heights=heights)

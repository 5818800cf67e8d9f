"""The first answer of the page, in words: what keyfront changes, better and worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..experiments.findings import BETTER, CHANGES, MORE, SAME, WORDS, WORSE
from ..results import Cell, Result
from .forest import Branch

VERDICTS = (BETTER, SAME, WORSE)


class Line(NamedTuple):
    """One figure that keyfront changes, or does not.

    :param goodness: the number of times as good; below 1 it is worse; ``None`` if it is not known
    """

    what: str
    sentence: str
    verdict: str
    goodness: float | None
    experiment: str


@dataclass(frozen=True)
class Answer:
    """The answer that the results give.

    :param summary: sentences, the most important first
    :param lines: every figure, as measured
    :param warnings: reasons to take the figures with care
    """

    summary: list[str]
    lines: list[Line] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def by_verdict(self, verdict: str) -> list[Line]:
        """Return the figures of one verdict, the greatest change first."""
        found = [line for line in self.lines if line.verdict == verdict]
        return sorted(found, key=lambda line: -_size(line))

    def branches(self) -> list[Branch]:
        """Return the branches of the figure beside the words."""
        signs = {BETTER: 1, SAME: 0, WORSE: -1}
        return [
            Branch(line.what, signs[verdict], line.goodness, line.goodness, line.goodness)
            for verdict in VERDICTS
            for line in self.by_verdict(verdict)
            if line.goodness
        ]


def _size(line: Line) -> float:
    if line.goodness is None:
        return float("inf")
    return max(line.goodness, 1 / line.goodness) if line.goodness else float("inf")


def lines(results: Iterable[Result]) -> list[Line]:
    """Return every figure that keyfront changes, from all experiments."""
    found = []
    for result in results:
        table, words = result.table(CHANGES), result.table(WORDS)
        if table is None or words is None:
            continue
        for row, (_, sentence) in zip(table.rows, words.rows, strict=True):
            values = dict(zip(table.columns, row, strict=True))
            what, verdict = str(values["what"]), str(values["verdict"])
            found.append(Line(what, str(sentence), verdict, _goodness(values), result.name))
    return found


def _goodness(values: dict[str, Cell]) -> float | None:
    """Return the ratio, turned so that more is better."""
    times = values["times"]
    if not isinstance(times, int | float) or times <= 0:
        return None
    return float(times) if values["better is"] == MORE else 1 / float(times)


def answer(results: Sequence[Result]) -> Answer:
    """Return what all results together say."""
    found = lines(results)
    counts = Counter(line.verdict for line in found)
    if not found:
        return Answer(
            ["Nothing that compares keyfront with stock servers has been measured here yet: run "
             "keyfront bench experiment all --quick."],
            [],
            warnings(results),
        )  # fmt: skip
    summary = [
        f"Of {len(found)} figures measured here, keyfront makes {counts[BETTER]} better and "
        f"{counts[WORSE]} worse; {counts[SAME]} show no difference. Each is compared with the "
        "stock line-up that did best."
    ]
    all_found = Answer(summary, found)
    for verdict, words in ((BETTER, "The greatest gain"), (WORSE, "The greatest loss")):
        # what cannot be put as a ratio is told in the list
        rated = [line.sentence for line in all_found.by_verdict(verdict) if line.goodness]
        for one in rated[:1]:
            # an abbreviation stays as it is
            told = one if one[1:2].isupper() else one[:1].lower() + one[1:]
            summary.append(f"{words}: {told}")
    return Answer(summary, found, warnings(results))


def warnings(results: Sequence[Result]) -> list[str]:
    """Return the reasons why the figures are to be taken with care."""
    busy = [one.name for one in results if not one.others.get("quiet", True)]
    quick = [one.name for one in results if one.conditions.get("quick")]
    unfinished = [one.name for one in results if not one.complete]
    found = {
        f"Others worked on the machine, or its host took time away, during {_listed(busy)}: "
        "those figures are rough.": busy,
        f"Of {_listed(quick)} this is the quick form: its points are few and short. Without "
        "that option the same commands measure the whole form.": quick,
        f"Interrupted, and not whole: {_listed(unfinished)}.": unfinished,
    }
    return [text for text, names in found.items() if names]


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"

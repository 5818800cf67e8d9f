"""The soak's one page: the faults in time, what clients saw of each, and what everything took."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.benchmarks import environment
from keyfront.benchmarks.report import drawing
from keyfront.benchmarks.report.page import style
from support.soak.clients import Seen
from support.soak.faults import Fault
from support.soak.resources import Rest

_JUDGED = ("good", "refused", "late", "none", "wrong")
_LABELS = {
    "good": "good", "refused": "refused, for now (503, 429)",
    "late": "no answer in time (502, 504)", "none": "connection ended", "wrong": "wrong",
}  # fmt: skip


@dataclass
class Found:
    """What a soak found.

    :param began: seconds of the monotonic clock, as all moments are
    :param impossible: what the history says cannot have happened, a stale answer among it
    :param wrong: answers that are neither good nor a refusal as there may be one
    :param grown: what took more at the end than it may
    """

    began: float
    ended: float
    seen: Sequence[Seen]
    faults: Sequence[Fault]
    rests: Sequence[Rest]
    changes: Counter[str]
    doubtful: Counter[str]
    impossible: Sequence[str] = ()
    wrong: Sequence[str] = ()
    grown: Sequence[str] = ()
    absent: Sequence[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True if nothing is amiss."""
        return not (self.impossible or self.wrong or self.grown)

    def verdict(self) -> str:
        """Return the result in a sentence."""
        counts = Counter(one.judged for one in self.seen)
        return (
            f"{len(self.seen)} answers and {self.changes.total()} changes in"
            f" {(self.ended - self.began) / 60:.1f} minutes under {len(self.faults)} faults of"
            f" {len({one.name for one in self.faults})} kinds: {len(self.impossible)} stale,"
            f" {len(self.wrong)} wrong, {counts['refused'] + counts['late']} refused,"
            f" {counts['none']} without an answer, {len(self.grown)} that grew."
        )

    def rows(self) -> list[list[str]]:
        """Return a row for each kind of fault: what clients saw from its beginning to recovery."""
        found = []
        for name in dict.fromkeys(one.name for one in self.faults):
            had = [one for one in self.faults if one.name == name]
            during = [
                one for one in self.seen
                if any(x.began <= one.moment <= x.recovered for x in had)
            ]  # fmt: skip
            counts = Counter(one.judged for one in during)
            slowest = max((one.seconds for one in during if one.judged == "good"), default=0.0)
            found.append(
                [
                    name, str(len(had)), f"{max(x.ended - x.began for x in had):.1f}",
                    f"{max(x.recovered - x.ended for x in had):.1f}", str(counts["good"]),
                    str(counts["refused"]), str(counts["late"] + counts["none"]),
                    f"{slowest:.1f}",
                ]
            )
        return found

    HEADS = (
        "fault", "times", "s", "until well, s", "good", "refused", "no answer",
        "slowest good, s",
    )  # fmt: skip

    def text(self) -> str:
        """Return what a terminal of 80 columns shows."""
        heads = ["fault", "times", "s", "well", "good", "refused", "none", "slowest"]
        rows = [heads, *self.rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
        lines = [
            "  ".join([f"{row[0]:<{widths[0]}}", *(f"{x:>{w}}" for x, w in
                       zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]  # fmt: skip
        amiss = [f"  {line}" for line in (*self.impossible, *self.wrong, *self.grown)[:20]]
        return "\n".join([self.verdict(), *self.absent, *amiss, "", *lines])


def write(found: Found, path: Path) -> None:
    """Write the page.

    :param path: an HTML file; nothing of it comes from anywhere else
    """
    drawn = drawing.draw(
        "Answers a second, and faults", lambda figure, narrow: _plot(found, figure, narrow),
        legend=[
            drawing.Key(_LABELS[name], place, drawing.BAR) for place, name in enumerate(_JUDGED)
        ],
        heights=(5.6, 5.6),
    )  # fmt: skip
    legend = "".join(
        f'<li><span style="color:var(--s{key.place + 1})">{key.glyph}</span> '
        f"{html.escape(key.label)}</li>"
        for key in drawn.legend
    )
    amiss = [*found.impossible, *found.wrong, *found.grown]
    told = "".join(f"<li>{html.escape(line)}</li>" for line in amiss[:50])
    changes = [
        [name, str(found.changes[name]), str(found.doubtful[name])]
        for name in sorted({*found.changes, *found.doubtful})
    ]
    moments = [f"{one.moment - found.began:.0f} s" for one in found.rests]
    rests = [
        [name, *(f"{one.figures.get(name, 0):.0f}" for one in found.rests)]
        for name in (found.rests[0].figures if found.rests else ())
    ]
    machine = environment.described()
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>keyfront soak</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style()}</style></head>
<body><main><h1>Soak: {"nothing amiss" if found.good else "something is amiss"}</h1>
<p class="lead">{html.escape(found.verdict())}</p>
<p class="soft">Two nodes (nginx + uWSGI) behind HAProxy as rendered, MariaDB, Redis, two slapds,
RabbitMQ and two services on {html.escape(str(machine.get("cpu", "?")))},
{machine.get("cores", "?")} cores. {html.escape(" ".join(found.absent))}</p>
<ul class="changes">{told}</ul>
<figure><strong>{drawn.title}</strong><ul class="legend">{legend}</ul>
<div class="wide">{drawn.wide}</div><div class="narrow">{drawn.narrow}</div></figure>
<h2>What clients saw of each fault</h2>{_table(found.HEADS, found.rows())}
<h2>Changes</h2>{_table(("change", "made", "without a good answer"), changes)}
<h2>What it took at rest</h2>{_table(("", *moments), rests)}
</main></body></html>
"""
    path.write_text(page, encoding="utf-8")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{' class=number' * bool(n)}>{html.escape(x)}" for n, x in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(
            f"<td{' class=number' * bool(n)}>{html.escape(cell)}" for n, cell in enumerate(row)
        ) for row in rows
    )  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{head}</thead><tbody>{body}</table></div>'


def _plot(found: Found, figure: object, narrow: bool) -> None:
    seconds = int(found.ended - found.began) + 1
    step = max(seconds // 200, 1)
    places = range(0, seconds, step)
    counts = {name: [0.0] * len(places) for name in _JUDGED}
    for one in found.seen:
        place = int(one.moment - found.began) // step
        if 0 <= place < len(places):
            counts[one.judged][place] += 1 / step
    names = list(dict.fromkeys(one.name for one in found.faults))
    above, below = figure.subplots(  # type: ignore[attr-defined]
        2, 1, sharex=True, height_ratios=(2, max(len(names), 1) / 5)
    )
    above.stackplot(
        [x / 60 for x in places], *counts.values(), colors=drawing.SERIES[: len(_JUDGED)],
        step="post",
    )  # fmt: skip
    above.set_ylabel("answers/s")
    for row, name in enumerate(names):
        had = [one for one in found.faults if one.name == name]
        spans = [((x.began - found.began) / 60, (x.ended - x.began) / 60) for x in had]
        after = [((x.ended - found.began) / 60, (x.recovered - x.ended) / 60) for x in had]
        below.broken_barh(spans, (row - 0.4, 0.8), facecolor=drawing.BAD)
        below.broken_barh(after, (row - 0.4, 0.8), facecolor=drawing.EVEN, alpha=0.5)
    below.set_yticks(range(len(names)), names, fontsize=5 if narrow else 7)
    below.invert_yaxis()
    below.set_xlabel("minutes; grey: until all is well again")

"""The table of servers in docs/heartbeat.md, from what a full run of the matrix found.

    KEYFRONT_HEARTBEAT_MATRIX=full KEYFRONT_HEARTBEAT_RESULTS=results.json \\
        pytest tests/integration/heartbeat/test_matrix.py
    python tests/support/heartbeat_table.py results.json docs/heartbeat.md

It goes between the markers ``<!-- matrix -->`` and ``<!-- /matrix -->``; without a document it is
printed. ``tox -e heartbeat`` does both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

START, END = "<!-- matrix -->", "<!-- /matrix -->"
PATCHES = ("none", "eventlet", "gevent")
IDLES = 2
_LEGEND = f"""\
Connections that RabbitMQ closed during {IDLES} idle times of over three heartbeats each, and how
long the first operation after one took; the worst of plain TCP and TLS, of the idle times, and of
the ways to install. An empty cell is no combination that makes sense, or one that this run had no
server for. An unsafe one is broken for other reasons: a process that eventlet or gevent has patched
must serve requests in one thread; `keyfront` warns of it."""
_KINDS = {
    "publish": "Publish",
    "call": "RPC call; two connections",
    "server": "RPC server, called from outside; two connections",
}


@dataclass
class Outcome:
    """What one server did, and what RabbitMQ saw of it. Times in seconds."""

    shape: str
    patch: str
    tls: bool
    kind: str
    install: str
    unsafe: bool = False
    free: list[float] = field(default_factory=list)
    """Of one operation each, without an idle time before it."""
    first: list[float] = field(default_factory=list)
    """Of the first one after each idle time."""
    connections: int = 0
    """Before the first idle time."""
    accepted: int = 0
    """In all."""
    ended: int = 0
    """Closed by either side, for whatever reason."""
    missed: int = 0
    """Connections that RabbitMQ closed since no heartbeat came."""
    delays: float = 0.0
    """Slept before connecting again."""
    warnings: list[str] = field(default_factory=list)
    """What the heartbeat logged."""
    statistics: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    """Why it could not be started on this machine."""


def save(outcomes: Iterable[Outcome], path: Path) -> None:
    path.write_text(json.dumps([asdict(x) for x in outcomes], indent=1))


def load(path: Path) -> list[Outcome]:
    return [Outcome(**x) for x in json.loads(path.read_text())]


def render(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a table for each kind of use, a row for each server."""
    found = list(outcomes)
    parts = [_LEGEND]
    for kind, title in _KINDS.items():
        chosen = [x for x in found if x.kind == kind]
        if chosen:
            parts.append(f"**{title}**\n\n{_table(chosen)}")
    return "\n\n".join(parts)


def _table(outcomes: list[Outcome]) -> str:
    heads = [("not patched" if patch == "none" else patch) for patch in PATCHES]
    lines = [
        "| server | " + " | ".join(f"{x}: without | with" for x in heads) + " |",
        "|---|" + "---|---|" * len(PATCHES),
    ]
    for shape in dict.fromkeys(x.shape for x in outcomes):
        cells = []
        for patch in PATCHES:
            row = [x for x in outcomes if (x.shape, x.patch) == (shape, patch)]
            if any(x.unsafe for x in row):
                cells += ["unsafe", "warned of"]
            else:
                cells.append(_cell([x for x in row if x.install == "none"]))
                cells.append(_cell([x for x in row if x.install != "none"]))
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(outcomes: list[Outcome]) -> str:
    """Resets, and the first operation after an idle time in milliseconds, each the worst."""
    outcomes = [x for x in outcomes if not x.skipped]
    if not outcomes:
        return ""
    if any(x.error for x in outcomes):
        return "failed"
    missed = max(x.missed for x in outcomes)
    slowest = 1000 * max(y for x in outcomes for y in x.first)
    shown = f"{slowest:.0f}" if slowest >= 10 else f"{slowest:.1f}"
    text = f"{missed}, {shown} ms"
    return f"**{text}**" if missed else text


def put_in(table: str, document: str) -> str:
    """The document with the table between its markers."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"the document has no {START} with an {END} behind it")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: heartbeat_table.py RESULTS.json [DOCUMENT.md]")
    table = render(load(Path(sys.argv[1])))
    if len(sys.argv) == 2:
        print(table)
        return
    path = Path(sys.argv[2])
    path.write_text(put_in(table, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

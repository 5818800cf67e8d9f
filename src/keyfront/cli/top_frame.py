"""One frame of ``keyfront top``: two snapshots of ``keyfront status`` become text of a given size.

The frame is made of blocks that are as narrow as half of 80 columns. Each has its column, so that
it stays where it was as long as the size does.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.text import Text

from .status import p99

#: The least columns of a block, and the columns between two.
BLOCK, GAP = 37, 3
_WIDEST = 56
_ERROR_LINES = 3
# Whether there are blank lines, and how many lines a list may have: the first of these that fits.
_SHAPES = (
    *((True, rows) for rows in (100, 50, 30, 20, 12, 8, 6, 5, 4)),
    *((False, rows) for rows in (6, 5, 4, 3, 2, 1)),
)
_MIB = 1 << 20
_TITLE, _BAD, _WARNING = "bold cyan", "bold red", "yellow"

Part = Mapping[str, Any]


class Snapshot(NamedTuple):
    """The state of a node that was read at one time.

    :param when: the time of the reading, in seconds of a clock that never goes back
    :param found: the result of :func:`keyfront.cli.status.status`; empty if it raised an error
    :param error: the error that it raised, in one line
    :param clock: the time of day, for people
    :param times: the same as ``when``, of each part by its name
    """

    when: float
    found: Part
    error: str = ""
    clock: str = ""
    times: Mapping[str, float] = MappingProxyType({})


class Rates:
    """The counts of a part between two snapshots.

    :param before: the earlier snapshot; ``None`` if there is none, as in the first frame
    :param now: the later snapshot
    :param part: its name in :func:`keyfront.cli.status.status`
    """

    def __init__(self, before: Snapshot | None, now: Snapshot, part: str) -> None:
        self.now: Part = now.found.get(part) or {}
        self._before = (before.found.get(part) if before is not None else None) or {}
        since, until = (one.times.get(part, one.when) if one else 0.0 for one in (before, now))
        self._seconds = until - since if before is not None else 0.0

    def grown(self, *names: str) -> int | None:
        """Return the growth of these counts, at least 0: they begin anew with the node's folder.
        ``None`` if that is not known.
        """
        if self._seconds <= 0 or not self._before.keys() & self.now.keys() >= set(names):
            return None
        grown: int = sum(max(self.now[name] - self._before[name], 0) for name in names)
        return grown

    def total(self, *names: str) -> int:
        """Return the sum of these counts."""
        return sum(self.now.get(name, 0) for name in names)

    def rate(self, *names: str) -> str:
        """Return the growth of these counts a second, in at most seven columns."""
        grown = self.grown(*names)
        return "-" if grown is None else per_second(grown / self._seconds)

    def waited(self) -> list[int] | None:
        """Return the numbers of requests that waited, by the bits of the microseconds."""
        before, now = (one.get("by_microseconds") for one in (self._before, self.now))
        if not before or not now:
            return None
        return [max(now[name] - before.get(name, 0), 0) for name in now]


def per_second(value: float) -> str:
    """Return a rate in at most six columns."""
    if value < 0.05:
        return "<0.1" if value else "0"
    return f"{value:.1f}" if value < 1000 else short(round(value))


def short(number: int) -> str:
    """Return a number in at most seven columns."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1_000_000 or unit == "P":
            return f"{number}{unit}"
        number //= 1000
    raise AssertionError("unreachable")


def span(seconds: float) -> str:
    """Return a length of time, short: two units at most."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us" if seconds else "0 s"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def plain(text: object) -> str:
    """Return a text in one line, with a question mark for what not every terminal shows in one
    column.
    """
    line = " ".join(str(text).split())
    return "".join(x if x.isascii() and x.isprintable() else "?" for x in line)


class Block:
    """Lines about one part, the first of which is its title.

    :param width: its columns, at least :data:`BLOCK`
    """

    def __init__(self, title: str, width: int, *heads: str) -> None:
        self.width = width
        self.lines: list[Text] = []
        self.row(title, *heads, style=_TITLE)

    def row(self, label: str, *values: str, style: str = "") -> None:
        """Add a line: a label at the left, values at the right, the last two below the heads."""
        right = "".join(f"{value:>{9 if place else 8}}" for place, value in enumerate(values))
        room = self.width - len(right)
        self.lines.append(Text(f"{label[:room]:<{room}}{right}"[: self.width], style))

    def text(self, text: str, style: str = "") -> None:
        """Add a line of words, cut if it is too long."""
        cut = text if len(text) <= self.width else f"{text[: self.width - 2]}.."
        self.lines.append(Text(f"{cut:<{self.width}}", style))


#: Makes a block of two snapshots, of so many columns and with lists of so many lines; ``None`` if
#: its part is not in use.
Make = Callable[[Snapshot | None, Snapshot, int, int], Block | None]


def frame(
    before: Snapshot | None, now: Snapshot, *, width: int, height: int | None = None, note: str = ""
) -> Text:
    """Return the frame of an interval.

    :param before: the snapshot at its beginning; ``None`` if there is none: then no rate is known
    :param now: the snapshot at its end
    :param width: columns of the screen; none of its lines is longer
    :param height: lines of the screen; ``None`` for as many as it takes
    :param note: words for the last line, as which keys there are
    """
    top = _head(before, now, width)
    bottom = [Text(plain(note)[:width], "dim")] if note else []
    room = None if height is None else max(height - len(top) - len(bottom), 1)
    body = _body(before, now, width, room)
    if room is not None and len(body) > room:
        hidden = len(body) - room + 1
        more = Text(f"... {hidden} lines more: enlarge this"[:width], _WARNING)
        body = [*body[: room - 1], more]
    return Text("\n").join([*top, *body, *bottom][:height])


def _body(before: Snapshot | None, now: Snapshot, width: int, room: int | None) -> list[Text]:
    """Return the blocks in their columns: with blank lines and the longest lists that fit."""
    fitting = min(max((width + GAP) // (BLOCK + GAP), 1), len(_COLUMNS))
    used = [
        column
        for column in _COLUMNS[fitting - 1]
        if any(make(before, now, BLOCK, 1) is not None for make in column)
    ]
    if not used:
        return []
    each = max(min((width - GAP * (len(used) - 1)) // len(used), _WIDEST), BLOCK)
    lines: list[Text] = []
    for blank, rows in _SHAPES:
        sides = [_side(column, before, now, each, rows, blank=blank) for column in used]
        lines = []
        for row in itertools.zip_longest(*sides, fillvalue=Text(" " * each)):
            line = Text(" " * GAP).join(row)
            line.truncate(width)
            line.rstrip()
            lines.append(line)
        if room is None or len(lines) <= room:
            break
    return lines


def _side(
    column: Sequence[Make], before: Snapshot | None, now: Snapshot, width: int, rows: int, *,
    blank: bool,
) -> list[Text]:  # fmt: skip
    """Return the blocks of a column, one below the other."""
    side: list[Text] = []
    for make in column:
        block = make(before, now, width, rows)
        if block is not None:
            side += [Text(" " * width)] if blank and side else []
            side += block.lines
    return side


def _head(before: Snapshot | None, now: Snapshot, width: int) -> list[Text]:
    """Return the lines above the blocks: which node, its state, and what is wrong."""
    found = now.found
    state, style = "in service", "bold green"
    if not found or "error" in found["requests"]:
        state, style = "NOT READ", _BAD
    elif found["draining"]:
        state, style = "DRAINING", "bold yellow"
    elif not found["requests"]["workers"]:
        state, style = "NOT SERVING", _BAD
    elif not found["ok"]:
        state, style = "in service, NOT OK", _BAD
    interval = "" if before is None else f"in the last {span(now.when - before.when)}"
    right = "  ".join(x for x in (state, interval, now.clock) if x)
    where = plain(found.get("node", ""))
    room = max(width - len(right) - 2, 0)
    if len(where) > room:
        where = f"..{where[len(where) - room + 2 :]}" if room > 12 else ""
    line = Text(f"{where:<{room}}  ")
    line.append(state, style)
    line.append(right[len(state) :])
    line.truncate(width)
    lines = [line]
    errors = {plain(now.error): ""} if now.error else {}
    for name in ("requests", "tokens", "ldap", "heartbeat"):
        part = found.get(name)
        if part and "error" in part:
            errors.setdefault(plain(part["error"]), name)
    for error, name in errors.items():
        text = f"{name}: {error}" if name else error
        cut = textwrap.wrap(
            text, max(width, 3), max_lines=_ERROR_LINES, placeholder="..", break_on_hyphens=False
        )
        lines += [Text(words[:width], _BAD) for words in cut]
    return lines


def _of(before: Snapshot | None, now: Snapshot, part: str) -> Rates | None:
    """Return the rates of a part; ``None`` if it is not in use, or cannot be read."""
    found = now.found.get(part)
    return None if not found or "error" in found else Rates(before, now, part)


def _requests(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "requests")
    if of is None:
        return None
    block = Block("REQUESTS", width, "a second", "in all")
    block.row("requests", of.rate("requests"), short(of.total("requests")))
    block.row("in progress", short(of.now["in_progress"]))
    shed = of.grown("shed")
    style = _BAD if shed else ""
    block.row("shed", of.rate("shed"), short(of.total("shed")), style=style)
    queue = _of(before, now, "queue")
    if queue is None:
        return block
    waited = queue.waited()
    count = sum(waited) if waited else 0
    if waited is None or not count:
        block.row("queue: nobody waited" if waited is not None else "queue", "-")
        return block
    block.row("queue, 99 of 100 within", span(p99(waited) or 0.0), style=_WARNING if shed else "")
    return block


def _workers(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "requests")
    if of is None:
        return None
    workers = sorted(of.now["workers"], key=lambda one: (-one["memory_bytes"], one["pid"]))
    memory = sum(worker["memory_bytes"] for worker in workers)
    block = Block("WORKERS", width, str(len(workers)), f"{memory / _MIB:.0f} MiB")
    if not workers:
        block.text("NO WORKER RUNS", _BAD)
    shown = rows if len(workers) <= 2 * rows else rows - 1
    for start in range(0, min(len(workers), 2 * shown), 2):
        pair = workers[start : start + 2]
        cells = [f"{one['pid']:>7} {one['memory_bytes'] / _MIB:>5.0f} MiB" for one in pair]
        block.text("  ".join(cells))
    if len(workers) > 2 * shown:
        left = len(workers) - 2 * shown
        largest = f", the largest {workers[0]['memory_bytes'] / _MIB:.0f} MiB" if not shown else ""
        block.text(f"{'and ' if shown else ''}{left} {'more' if shown else 'of them'}{largest}")
    if of.now["loaded_seconds_ago"] is not None and workers:
        block.row("newest loaded", f"{span(of.now['loaded_seconds_ago'])} ago")
    started, grown = of.grown("workers_started"), of.total("workers_outgrown")
    if started:
        block.row("started just now", str(started), style=_WARNING)
    if grown:
        block.row("replaced for memory", short(grown), style=_WARNING)
    return block


def _parts(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "requests")
    if of is None or not of.now["parts"]:
        return None
    oldest = max(one["seconds_ago"] for one in of.now["parts"].values())
    block = Block("PARTS", width, f"asked {span(oldest)} ago")
    for name, one in of.now["parts"].items():
        if not one["ok"]:
            block.row(f"{name} AWAY", f"{span(one['seconds_ago'])} ago", style=_BAD)
    there = [name for name, one in of.now["parts"].items() if one["ok"]]
    if there:
        block.text(f"there: {' '.join(there)}")
    return block


#: The requests by what the token cache did: label, the counts.
_DID = (
    ("repeated, worker", "hits"),
    ("repeated, node", "node_hits"),
    ("first, known", "known"),
    ("misses", "misses"),
    ("bypassed", "bypassed"),
)
_HITS = ("hits", "node_hits", "known")


def _tokens(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "tokens")
    if of is None:
        return None
    block = Block("TOKEN CACHE", width, "a second", "in all")
    for label, name in _DID:
        block.row(label, of.rate(name), short(of.total(name)))
    asked, hits = of.grown(*_HITS, "misses"), of.grown(*_HITS)
    in_all = of.total(*_HITS, "misses")
    values = [
        f"{100 * part / whole:.2f} %" if whole and part is not None else "-"
        for part, whole in ((hits, asked), (of.total(*_HITS), in_all))
    ]
    block.row("hit ratio", *values, style="bold")
    limit = of.now["answers_bytes_limit"]
    if limit:
        block.row("memory of answers", f"{100 * of.now['answers_bytes'] / limit:.1f} %")
    return block


def _changes(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "tokens")
    if of is None:
        return None
    block = Block("CHANGES", width, "a second", "in all")
    block.row("committed", of.rate("changes"), short(of.total("changes")))
    block.row("under way", short(of.now["changes_under_way"]))
    for label, name in (
        ("refused", "changes_refused"),
        ("recovered", "changes_recovered"),
        ("flushes", "flushes"),
    ):
        if of.total(name):
            style = _BAD if of.grown(name) and name == "changes_refused" else ""
            block.row(label, of.rate(name), short(of.total(name)), style=style)
    return block


def _ended(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "tokens")
    if of is None:
        return None
    names = [name for name in of.now if name.startswith("ended_") and of.now[name]]
    if not names:
        return None
    names.sort(key=lambda name: (-(of.grown(name) or 0), -of.now[name], name))
    block = Block("ENDED ANSWERS, BY", width, "a second", "in all")
    shown = names if len(names) <= rows else names[: max(rows - 1, 0)]
    for name in shown:
        block.row(name.removeprefix("ended_"), of.rate(name), short(of.total(name)))
    left = names[len(shown) :]
    if left:
        words = f"{len(left)} others" if shown else f"{len(left)} causes"
        block.row(words, of.rate(*left), short(of.total(*left)))
    return block


def _ldap(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "ldap")
    if of is None:
        return None
    block = Block(f"LDAP{'':7}  size lent wait  most", width)
    for label, kind in (("search pool", "search"), ("login pool", "auth")):
        size, lent, waiting, most = (
            of.now[f"{kind}_{name}"] for name in ("size", "lent", "waiting", "max_size")
        )
        text = f"{label:<11} {short(size):>5}{short(lent):>5}{short(waiting):>5}{short(most):>6}"
        block.text(text, _WARNING if waiting else "")
    up, down = of.now["servers_up"], of.now["servers_down"]
    servers = f"{up} up, {down} DOWN" if down else f"{up} up"
    block.row("servers", servers, style=_BAD if down else "")
    return block


def _logins(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "ldap")
    if of is None:
        return None
    block = Block("BINDS AND SEARCHES", width, "a second", "in all")
    for label, name in (
        ("accepted", "logins_accepted"),
        ("refused", "credentials_refused"),
        ("failed, outage", "logins_failed"),
        ("searches", "searches"),
    ):
        style = _BAD if name == "logins_failed" and of.grown(name) else ""
        block.row(label, of.rate(name), short(of.total(name)), style=style)
    return block


def _heartbeat(before: Snapshot | None, now: Snapshot, width: int, rows: int) -> Block | None:
    of = _of(before, now, "heartbeat")
    if of is None:
        return None
    block = Block("HEARTBEAT", width, "a second", "in all")
    whose = f"in {of.now['processes']} processes" if of.now["processes"] != 1 else "in a process"
    block.row(f"connections, {whose}", short(of.now["connections"]))
    block.row("sent", of.rate("beats"), short(of.total("beats")))
    style = _BAD if of.grown("dead_peers") else ""
    block.row("dead peers", of.rate("dead_peers"), short(of.total("dead_peers")), style=style)
    block.row("late at worst", span(of.now["late_seconds"]))
    return block


# The blocks of each column, where there is one, and where there are two or three.
_COLUMNS: tuple[tuple[tuple[Make, ...], ...], ...] = (
    (
        (
            *(_requests, _workers, _parts),
            *(_tokens, _changes, _ended, _ldap, _logins, _heartbeat),
        ),
    ),
    (
        (_requests, _workers, _ldap, _logins),
        (_tokens, _changes, _ended, _heartbeat, _parts),
    ),
    (
        (_requests, _workers, _parts),
        (_tokens, _changes, _ended),
        (_ldap, _logins, _heartbeat),
    ),
)

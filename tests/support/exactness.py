"""Reads a token while it is changed, and counts the answers that are too old.

An answer is stale when its request was begun after the response to the change had been received,
and it shows the state before that change. Requests that overlap a change may show either.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.keystone_world import Answer, Client, World
from support.served import PATIENCE
from support.token_changes import Change, Kind, Prepared, Read

# Reads that each reader completes in each state before the next change.
ENOUGH = 3
# Seconds between the reads of one reader beside a change, and while the state before it may still
# be shown: they are many, and the change, which they are to meet in all of its parts, needs the
# workers as well.
PACE = 0.01


@dataclass
class Tally:
    """What the readers of one read saw.

    :param overlapping: reads that ran beside a change, and so prove nothing
    :param judged: reads that had to show the one state there was
    :param strange: judged reads that showed neither state
    """

    overlapping: int = 0
    judged: int = 0
    stale: int = 0
    strange: int = 0


@dataclass
class Report:
    """What :func:`check` found; :attr:`exact` if nothing was wrong."""

    kind: str
    changes: int = 0
    seconds: float = 0.0
    reads: dict[str, Tally] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def _sum(self, name: str) -> int:
        return sum(getattr(tally, name) for tally in self.reads.values())

    @property
    def judged(self) -> int:
        return self._sum("judged")

    @property
    def stale(self) -> int:
        return self._sum("stale")

    @property
    def strange(self) -> int:
        return self._sum("strange")

    @property
    def exact(self) -> bool:
        return self.judged > 0 and not self.stale and not self.strange

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.changes} changes, {self.judged} reads judged, {self.stale} stale,"
            f" {self.strange} strange, {self._sum('overlapping')} beside a change,"
            f" {self.seconds:.1f} s"
        ]
        lines += [
            f"  {name}: {tally.judged} judged, {tally.stale} stale, {tally.strange} strange"
            for name, tally in self.reads.items()
            if tally.stale or tally.strange
        ]
        return "\n".join([*lines, *(f"  e.g. {example}" for example in self.examples)])


class _Board:
    """Where readers put what they saw and the writer says what there is to see."""

    def __init__(self, report: Report, enough: int) -> None:
        self._report = report
        self._enough = enough
        self._condition = threading.Condition()
        self._since: float | None = None
        self._what = ""
        self._changed = False
        self._first = True
        self._counts: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._exampled: set[tuple[str, str]] = set()
        self.ended = False

    def join(self, reader: int) -> None:
        self._counts[reader] = 0

    def unsettle(self) -> None:
        """A change begins: what is read from now on proves nothing. Wake who had paused."""
        with self._condition:
            self._since = None
            self._condition.notify_all()

    def pause(self, reader: int) -> None:
        """Wait for the next change if this reader has read enough, and leave the rest the CPU."""
        with self._condition:
            proves = self._since is not None and time.monotonic() > self._since
            if not proves and not self.ended:
                self._condition.wait(PACE)
            while (
                self._since is not None
                and self._counts[reader] >= self._enough
                and not self.ended
                and self._failure is None
            ):
                self._condition.wait()

    def end(self) -> None:
        """No more reads."""
        with self._condition:
            self.ended = True
            self._condition.notify_all()

    def settle(self, since: float, what: str, *, changed: bool) -> None:
        """What begins after ``since`` has to show this state; wait until enough reads did begin."""
        deadline = time.monotonic() + PATIENCE
        with self._condition:
            self._first = not self._what
            self._since, self._what, self._changed = since, what, changed
            self._counts = dict.fromkeys(self._counts, 0)
            while self._failure is None and min(self._counts.values()) < self._enough:
                left = deadline - time.monotonic()
                assert left > 0, f"{self._report.kind}: too few reads in {PATIENCE} s {what}"
                self._condition.wait(left)
            if self._failure is not None:
                raise self._failure

    def record(self, reader: int, read: Read, start: float, answer: Answer) -> None:
        """Judge an answer."""
        with self._condition:
            tally = self._report.reads[read.name]
            if self._since is None or start <= self._since:
                tally.overlapping += 1
                return
            tally.judged += 1
            right, wrong = (read.before, read.after)[:: -1 if self._changed else 1]
            if not right(answer):
                # Before the first change there is nothing to be stale.
                verdict = "stale" if wrong(answer) and not self._first else "strange"
                setattr(tally, verdict, getattr(tally, verdict) + 1)
                self._example(verdict, read, start - self._since, answer)
            self._counts[reader] += 1
            if self._counts[reader] >= self._enough:
                self._condition.notify_all()

    def _example(self, verdict: str, read: Read, late: float, answer: Answer) -> None:
        if (verdict, read.name) in self._exampled:
            return
        self._exampled.add((verdict, read.name))
        self._report.examples.append(
            f"{verdict}: {read.name}, begun {late * 1000:.1f} ms {self._what}, was answered"
            f" {answer.status} {str(answer.body)[:200]}"
        )

    def fail(self, failure: BaseException) -> None:
        """A reader ended; the writer raises what ended it."""
        with self._condition:
            self._failure = failure
            self._condition.notify_all()


def _read(board: _Board, number: int, base_url: str, read: Read) -> None:
    client = Client(read.base_url or base_url)
    asked = [read.headers]
    if read.also_by is not None:
        asked.append({**read.headers, "X-Auth-Token": read.also_by})
    everybody = itertools.cycle(asked)
    try:
        while not board.ended:
            start = time.monotonic()
            answer = client.request(read.method, read.path, next(everybody), read.body)
            board.record(number, read, start, answer)
            board.pause(number)
    except Exception as failure:
        board.fail(failure)
    finally:
        client.close()


@contextmanager
def _reading(board: _Board, base_url: str, reads: list[Read], readers: int) -> Iterator[None]:
    threads = []
    for number in range(len(reads) * readers):
        board.join(number)
        arguments = (board, number, base_url, reads[number % len(reads)])
        threads.append(threading.Thread(target=_read, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        board.end()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a reader hangs"


def _steps(prepared: Prepared, rounds: int) -> Iterator[tuple[Change, str, bool]]:
    """The changes to make, what to call them, and whether the state after is then shown."""
    for number in range(1, rounds + 1):
        yield prepared.change, f"after change {number}", True
        if prepared.keep is not None:
            yield prepared.keep, f"after what must not undo change {number}", True
        if prepared.undo is not None:
            yield prepared.undo, f"after change {number} was undone", False


def _play(
    board: _Board, report: Report, base_url: str, prepared: Prepared, rounds: int, readers: int,
    grace: float,
) -> None:
    with _reading(board, base_url, prepared.reads, readers):
        board.settle(time.monotonic(), "before any change", changed=False)
        for change, what, changed in _steps(prepared, rounds):
            board.unsettle()
            change()
            received = time.monotonic() + grace
            report.changes += 1
            board.settle(received, what, changed=changed)


def check(
    base_url: str, password: str, kind: Kind, *, rounds: int, readers: int,
    world: World | None = None, enough: int = ENOUGH, grace: float = 0.0,
) -> Report:
    """Make a kind of change again and again while its reads run in a loop.

    Every read runs in ``readers`` threads with a connection each. Before the first and after every
    change the writer waits until each thread has completed ``enough`` reads that began since.

    :param base_url: Keystone's URL, ``/v3`` included
    :param password: the administrator's
    :param rounds: how often the change is made; as often again it is undone, if it can be
    :param world: what to prepare with, if there is one already
    :param grace: seconds after a change for which the state before it may still be shown
    :raises AssertionError: Keystone refused a change, or reads hang
    """
    report = Report(kind.name)
    started = time.monotonic()
    world = world or World(base_url, password)
    left = rounds
    while left > 0:
        prepared = kind.prepare(world)
        for read in prepared.reads:
            report.reads.setdefault(read.name, Tally())
        # What cannot be undone is prepared anew for every round.
        now = left if prepared.undo is not None else 1
        _play(_Board(report, enough), report, base_url, prepared, now, readers, grace)
        left -= now
    report.seconds = time.monotonic() - started
    return report

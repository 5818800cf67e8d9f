"""A world for ``explorer.py``: nodes and a service that share a table in Redis, under a lease.

The service's :class:`Mirror` is the real one. The table is a twin of what Redis runs
(``coordinator/redis/scripts.py``), which ``tests/conformance/test_redis_twin.py`` holds against a
real Redis. A poll reads in two steps, as the coordinator's does, and anything may come between
them. One row of the database has a version; what the service keeps is the version that it was
answered.

What must hold: from ``lease`` seconds after a change was completed, response or not, the service
shows nothing from before it; nor, from then after its commit, from before one whose mark is there;
nor, in a table that was made since, from before a commit that was marked in one that is lost.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from keyfront.middleware.tokens.coordinator.redis import lease as lease_module
from keyfront.middleware.tokens.coordinator.redis.lease import Mirror
from keyfront.middleware.tokens.coordinator.redis.outages import SETTLE_SECONDS
from keyfront.middleware.tokens.epochs import ALL_SLOT, MARK_SECONDS, Epoch, Slots
from support.explorer import Disabled, Steps, Violation

LEASE = 1.0
#: Slots of what a change touches, and of an answer that shows it.
CHANGED, SHOWN = (5,), (ALL_SLOT, 5)
#: The serial number of the mark with which a generation begins.
FIRST = 0

# A mark: when its owner is looked for, and its slots.
_Mark = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class Table:
    """The twin: what Redis holds, and what it makes of each deed. Times are seconds.

    Of a clock that goes on by itself: that it may be set makes Redis wait longer, not shorter. Nor
    does it go back to what it held before, by which it is told which change was the last one.
    """

    generation: int = 0
    #: The number of the last complete change.
    sequence: int = 0
    #: Before which no change may begin.
    until: float = 0.0
    serial: int = 0
    #: Marks by their serial numbers.
    marks: tuple[tuple[int, _Mark], ...] = ()
    #: Numbers of slots; below zero: so many changes of it are under way.
    numbers: tuple[tuple[int, int], ...] = ()
    #: The slots of each change.
    changes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def begin(cls, generation: int, now: float) -> Table:
        """A new generation: everything is marked until nobody writes who did in an older one."""
        until = now + SETTLE_SECONDS
        return cls(
            generation, 1, until, 0, ((FIRST, (until, (ALL_SLOT,))),), ((ALL_SLOT, -1),)
        )

    def number(self, slot: int) -> int:
        return dict(self.numbers).get(slot, 0)

    def mark(self, slots: tuple[int, ...], now: float) -> tuple[Table, int]:
        """Announce a change; serial number 0: it is too early for one."""
        if self.until > now:
            return self, 0
        table, _ = self.recover((), now)
        numbers = dict(table.numbers)
        for slot in slots:
            numbers[slot] = min(0, numbers.get(slot, 0)) - 1
        serial = table.serial + 1
        marks = (*table.marks, (serial, (now + MARK_SECONDS, slots)))
        return table._with(serial=serial, marks=marks, numbers=numbers), serial

    def stamp(self, serial: int, generation: int, slots: tuple[int, ...]) -> Table:
        """Complete a change."""
        if generation != self.generation:
            # Its mark is in a table that is gone.
            return self.complete((ALL_SLOT,), marked=False)
        mark = dict(self.marks).get(serial)
        if mark is None:
            return self.complete(slots, marked=False)
        return self.complete(mark[1], marked=True)._without(serial)

    def complete(self, slots: tuple[int, ...], *, marked: bool) -> Table:
        """Give slots the next number; those of other marks stay under way."""
        number, numbers = self.sequence + 1, dict(self.numbers)
        for slot in slots:
            value = numbers.get(slot, 0)
            if value < 0 and marked:
                value += 1
            numbers[slot] = value if value < 0 else number
        changes = (*self.changes, (number, slots))
        return self._with(sequence=number, numbers=numbers, changes=changes)

    def recover(self, settled: tuple[int, ...], now: float) -> tuple[Table, tuple[int, ...]]:
        """Complete the marks that were settled; return those to be looked for."""
        table, old = self, []
        for serial, (deadline, slots) in self.marks:
            if deadline > now:
                continue
            if serial in settled:
                table = table.complete(slots, marked=True)._without(serial)
            else:
                old.append(serial)
        return table, tuple(old)

    def _without(self, serial: int) -> Table:
        return replace(self, marks=tuple(x for x in self.marks if x[0] != serial))

    def _with(self, *, numbers: dict[int, int], **more: Any) -> Table:
        return replace(self, numbers=tuple(sorted(numbers.items())), **more)

    def save(self) -> tuple[Any, ...]:
        return (
            *(self.generation, self.sequence, self.until, self.serial),
            *(self.marks, self.numbers, self.changes),
        )


@dataclass(frozen=True)
class Rules:
    """What is in force of it; all by default.

    :param ends: a lease ends
    :param sees_generations: a mirror begins anew with another generation
    :param sees_marks: a slot under a mark is not in it
    :param from_asking: it is complete up to when it was asked for, not up to when that came
    :param learns_forward: what it is taught from before its last change it does not take in
    :param begins_marked: a table begins under a mark until who wrote before writes no more
    """

    ends: bool = True
    sees_generations: bool = True
    sees_marks: bool = True
    from_asking: bool = True
    learns_forward: bool = True
    begins_marked: bool = True


class _Mirror(Mirror):
    """The real one, but for what is not in force."""

    def __init__(self, rules: Rules, clock: _Clock) -> None:
        super().__init__(LEASE if rules.ends else math.inf)
        self._rules = rules
        self._clock = clock

    def advance(
        self, asked: float, generation: int, sequence: int, changes: Any, marked: Any = frozenset()
    ) -> None:
        if not self._rules.sees_generations and self.position[0]:
            generation = self.position[0]
        if not self._rules.from_asking:
            asked = self._clock.now
        if not self._rules.sees_marks:
            marked = frozenset()
        super().advance(asked, generation, sequence, changes, marked)

    def learn(self, generation: int, sequence: int, numbers: Any) -> None:
        if not self._rules.learns_forward:
            sequence = max(sequence, self.position[1])
        super().learn(generation, sequence, numbers)

    def save(self) -> tuple[Any, ...]:
        table = self._table
        return (
            *(table.generation, table.sequence, table.horizon),
            *(tuple(sorted(table.numbers.items())), tuple(sorted(table.marked))),
        )

    def load(self, state: tuple[Any, ...]) -> None:
        generation, sequence, horizon, numbers, marked = state
        self._table = table = lease_module._Table(generation, sequence, horizon)
        table.numbers.update(numbers)
        table.marked = frozenset(marked)


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Leases:
    """The world: a table, a database, nodes without a lease, and a service with one."""

    def __init__(self, rules: Rules, clock: _Clock) -> None:
        self.clock = clock
        self._rules = rules
        self._table = Table.begin(1, clock.now)
        self._table, _ = self._table.recover((FIRST,), clock.now + SETTLE_SECONDS)
        self._table = replace(self._table, until=clock.now)
        for _ in range(3):  # there is more behind it than behind one that has just begun
            self._table = self._table.complete((7,), marked=False)
        self._made = 1
        self._mirror = _Mirror(rules, clock)
        self._database = 0
        #: Transactions by process: begun (-1), on their way (0), or the version they made.
        self._transactions: dict[str, int] = {}
        #: Who wrote when the database was first asked after a table was begun, and writes still.
        self._older: tuple[int, frozenset[str]] = (0, frozenset())
        #: The mark of a process's change.
        self._marked: dict[str, tuple[int, int]] = {}
        self._owners: dict[tuple[int, int], str] = {}
        self._killed: frozenset[str] = frozenset()
        #: When which version was told in a response or completed, and when a process committed
        #: which, under a mark of which generation and serial number.
        self._told: tuple[tuple[float, int], ...] = ()
        self._committed: tuple[tuple[float, int, tuple[int, int]], ...] = ()
        #: What the service keeps: number, generation and version.
        self._kept: frozenset[tuple[int, int, int]] = frozenset()

    # What explorer.World asks for

    def save(self) -> Any:
        return (
            self.clock.now, self._table.save(), self._made, self._mirror.save(), self._database,
            tuple(sorted(self._transactions.items())), tuple(sorted(self._marked.items())),
            tuple(sorted(self._owners.items())), tuple(sorted(self._killed)), self._told,
            self._committed, tuple(sorted(self._kept)), self._older,
        )  # fmt: skip

    def load(self, state: Any) -> None:
        (
            self.clock.now, table, self._made, mirror, self._database, transactions, marked,
            owners, killed, self._told, self._committed, kept, self._older,
        ) = state  # fmt: skip
        self._table = Table(*table)
        self._mirror.load(mirror)
        self._transactions, self._marked = dict(transactions), dict(marked)
        self._owners, self._killed = dict(owners), frozenset(killed)
        self._kept = frozenset(kept)

    def dead(self, process: str) -> bool:
        return process.partition(" ")[0] in self._killed

    def act(self, process: str, step: tuple[Any, ...]) -> Any:
        self._acting = process
        return getattr(self, f"do_{step[0]}")(*step[1:])

    def check(self) -> None:
        """The service shows nothing that it must not; nor does one that asks Redis."""
        for sequence, generation, version in self._kept:
            slots = Slots(SHOWN)
            due = self._due(generation, LEASE)
            shown = self._mirror.verdict(Epoch(generation, sequence), slots)
            if shown and version < due:
                raise Violation(f"the service shows version {version} of {due} under its lease")
            due = self._due(generation, 0.0)
            if version < due and self._is_fresh(generation, sequence):
                raise Violation(f"version {version} of {due} is fresh in Redis")

    def check_end(self) -> None:
        """When what was abandoned is recovered, answers are fresh again."""
        self.do_ask()
        self.clock.now += MARK_SECONDS + SETTLE_SECONDS
        self.do_recover()
        if not self._is_fresh(*self.do_ask()):
            raise Violation("nothing is fresh any more")

    def _due(self, generation: int, grace: float) -> int:
        """The version that must be shown by now of an answer of this generation."""
        before = self.clock.now - grace
        there = {serial for serial, _ in self._table.marks}
        told = [version for when, version in self._told if when < before or not grace]
        under = [
            version
            for when, version, (made, serial) in self._committed
            if 0 < made < generation
            or (made == generation and (not grace or (when < before and serial in there)))
        ]
        return max([0, *told, *under])

    def _is_fresh(self, generation: int, sequence: int) -> bool:
        numbers = [self._table.number(slot) for slot in SHOWN]
        return (
            self._table.generation == generation and min(numbers) >= 0 and max(numbers) <= sequence
        )

    # What processes do

    def do_ask(self) -> tuple[int, int]:
        """A node takes the present epoch, and begins a generation if there is none."""
        if not self._table.generation:
            self._made += 1
            self._table = Table.begin(self._made, self.clock.now)
        return self._table.generation, self._table.sequence

    def do_read(self) -> int:
        """A node reads the row."""
        return self._database

    def do_keep(self, epoch: tuple[int, int], version: int) -> None:
        """The service keeps what it was answered, if a node finds it fresh."""
        if self._is_fresh(*epoch):
            self._kept |= {(epoch[1], epoch[0], version)}

    def do_poll(self) -> tuple[Any, ...]:
        """The first read of a poll: numbers and changes, and which marks there are."""
        base = self._mirror.position[1]
        changes = tuple(x for x in self._table.changes if x[0] > base)
        marks = tuple(serial for serial, _ in self._table.marks)
        return self.clock.now, self._table.generation, self._table.sequence, changes, marks

    def do_marks(self, poll: tuple[Any, ...]) -> tuple[int, ...]:
        """The second: the slots of those marks that are still there."""
        marks = dict(self._table.marks) if self._table.generation == poll[1] else {}
        return tuple(sorted({slot for x in poll[4] if x in marks for slot in marks[x][1]}))

    def do_advance(self, poll: tuple[Any, ...], marked: tuple[int, ...]) -> None:
        """The mirror takes it in."""
        asked, generation, sequence, changes, _ = poll
        if generation:
            self._mirror.advance(asked, generation, sequence, dict(changes), frozenset(marked))
        else:
            self._mirror.clear()

    def do_look(self) -> tuple[Any, ...]:
        """The service reads the slots of an answer that its mirror does not know."""
        numbers = tuple((slot, self._table.number(slot)) for slot in SHOWN)
        return self._table.generation, self._table.sequence, numbers

    def do_learn(self, look: tuple[Any, ...]) -> None:
        """The mirror is taught what was read."""
        generation, sequence, numbers = look
        if generation:
            clean = {slot: number for slot, number in numbers if number >= 0}
            self._mirror.learn(generation, sequence, clean)

    def do_mark(self) -> tuple[int, int]:
        """A node announces a change."""
        self.do_ask()
        self._table, serial = self._table.mark(CHANGED, self.clock.now)
        if not serial:
            raise Disabled  # it waits
        mark = self._marked[self._acting] = self._table.generation, serial
        self._transactions[self._acting] = -1
        self._owners[mark] = self._acting
        return mark

    def do_send(self) -> None:
        """It sends the database the commit."""
        self._transactions[self._acting] = 0

    def do_commit(self, process: str) -> None:
        """The database commits what was sent."""
        if self._transactions.get(process) != 0:
            raise Disabled
        self._database += 1
        self._transactions[process] = self._database
        self._committed += ((self.clock.now, self._database, self._marked[process]),)

    def do_hear(self) -> int:
        """The node hears of it."""
        version = self._transactions[self._acting]
        if version < 1:
            raise Disabled
        return version

    def do_stamp(self, mark: tuple[int, int]) -> None:
        """It completes the change."""
        self.do_ask()
        self._table = self._table.stamp(mark[1], mark[0], CHANGED)
        if mark[0] == self._table.generation:
            self._told += ((self.clock.now, self._transactions[self._acting]),)

    def do_respond(self, version: int) -> None:
        """It sends the response, when nobody goes by an older generation any more."""
        if self._table.generation and self._table.until > self.clock.now:
            raise Disabled
        self._told += ((self.clock.now, version),)

    def do_recover(self) -> None:
        """A node completes what was abandoned, and the first mark when it is over."""
        self.do_ask()
        self._table, old = self._table.recover((), self.clock.now)
        settled = tuple(x for x in old if x == FIRST or self._is_over(self._owner(x)))
        if FIRST in old and not self._has_begun():
            settled = settled[1:]
        self._table, _ = self._table.recover(settled, self.clock.now)
        for serial in settled:
            version = self._transactions.get(self._owner(serial), 0) if serial else 0
            self._told += ((self.clock.now, version),)

    def _owner(self, serial: int) -> str:
        return self._owners[self._table.generation, serial]

    def _has_begun(self) -> bool:
        """Whether nobody writes any more who did when this was first asked."""
        if not self._rules.begins_marked:
            return True
        generation, older = self._older
        writing = frozenset(x for x in self._transactions if not self._writes_no_more(x))
        if generation == self._table.generation:
            writing &= older
        self._older = self._table.generation, writing
        return not writing

    def _writes_no_more(self, process: str) -> bool:
        # Of one that was killed the database ends what it has not heard to be committed.
        version = self._transactions[process]
        return version > 0 or (version < 0 and self.dead(process))

    def _is_over(self, owner: str) -> bool:
        return self.dead(owner) and self._writes_no_more(owner)

    def do_kill(self, worker: str) -> None:
        """Kill a node's worker."""
        self._killed |= {worker}

    def do_pass(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds

    def do_lose(self) -> None:
        """Redis loses the table."""
        self._table = Table()


@contextlib.contextmanager
def leases(rules: Rules) -> Iterator[Leases]:
    """A :class:`Leases` until the block ends."""
    clock = _Clock()
    with mock.patch.object(lease_module, "time", clock):
        yield Leases(rules, clock)


# Processes


def fill() -> Steps:
    """A service has a token validated by a node."""
    epoch = yield ("ask",)
    version = yield ("read",)
    yield ("keep", epoch, version)


def poll() -> Steps:
    """The service's mirror follows."""
    read = yield ("poll",)
    marked = (yield ("marks", read)) if read[4] else ()
    yield ("advance", read, marked)


def renew() -> Steps:
    """The service asks Redis about an answer that its mirror does not know."""
    look = yield ("look",)
    yield ("learn", look)


def change() -> Steps:
    """A node changes the row."""
    mark = yield ("mark",)
    yield ("send",)
    version = yield ("hear",)
    yield ("stamp", mark)
    yield ("respond", version)


def after(program: Any, *more: Any) -> Steps:
    """One after the other."""
    yield from program()
    for other in more:
        yield from other()

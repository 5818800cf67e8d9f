"""The twin of what Redis runs, by which leases are modelled, against a real Redis.

Random deeds of two nodes are done to both; then both say the same of generations, numbers, marks
and what a mirror would be told.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.mark_owners import begins
from keyfront.middleware.tokens.coordinator.redis import outages, scripts
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.epochs import DIRTY, MARK_SECONDS, Epoch, Mark, Slots
from keyfront.middleware.tokens.invalidation.rules import FIXED
from support.lease_model import FIRST, Table
from support.redis_epochs import KEY, SLOTS, TIMEOUT, RedisClock, address, program_by
from support.redis_servers import RedisServer, redis_server

# The key that names the tables.
NAMES = "keyfront:digests"
# Of the fixed tags, whose numbers a coordinator tells.
CHOICE = (*range(1, 6), 0)
DEEDS = ("mark", "mark", "stamp", "stamp", "touch", "recover", "later", "much later", "lose")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


class Both:
    """A table in Redis, and its twin.

    :param clock: of the one, on which time passes for the other as well
    """

    def __init__(self, server: RedisServer, clock: RedisClock, dice: random.Random) -> None:
        self._server, self._clock, self._dice = server, clock, dice
        self.nodes = [
            Redis(address(server.url), slot_count=SLOTS, timeout=TIMEOUT, lease=0.5)
            for _ in range(2)
        ]
        self._settled: set[str] = set()
        self._begun = False
        for node in self.nodes:
            # A mirror that tells what it was told, and follows only when it is asked to.
            node._poller = None
            # One that recovers nothing unless it is told to.
            node._recovered = math.inf
            node.settled = self._is_settled
        self._twin = Table()
        self._now = 0.0
        self._generations = 0
        #: Marks of both, by the names of their owners.
        self._marks: dict[str, tuple[Mark, int, int]] = {}
        self._mirrored: dict[int, int] = {}

    def _is_settled(self, owner: str, age: float) -> bool:
        return self._begun if begins(owner) else owner in self._settled

    @property
    def _node(self) -> Redis:
        return self._dice.choice(self.nodes)

    def _slots(self) -> tuple[int, ...]:
        return tuple(sorted(self._dice.sample(CHOICE, self._dice.randint(1, 3))))

    def _begin(self) -> None:
        """A node that finds no table makes one."""
        if not self._twin.generation:
            self._generations += 1
            self._twin = Table.begin(self._generations, self._now)

    def do(self, deed: str) -> None:
        """Do a deed to both."""
        if deed == "lose":
            # Both keys, or one of them: neither counts without the other.
            for key in self._dice.choice(((KEY, NAMES), (KEY,), (NAMES,))):
                self._server.client.delete(key)
            self._twin = Table()
        elif deed in ("later", "much later"):
            seconds = 1.0 if deed == "later" else MARK_SECONDS + 0.5
            self._clock.later(seconds)
            self._now += seconds
        elif deed == "mark":
            self._mark()
        elif deed == "touch":
            slots = self._slots()
            self._twin_completes(lambda: self._node.touch(Slots(slots)))
            self._twin = self._twin.complete(slots, marked=False)
            self._settle()
        elif deed == "stamp" and self._marks:
            owner = self._dice.choice(sorted(self._marks))
            mark, serial, generation = self._marks.pop(owner)
            self._twin_completes(lambda: self._node.stamp(mark))
            self._twin = self._twin.stamp(serial, generation, tuple(mark.slots))
            self._settle()
        elif deed == "recover":
            self._settled = {x for x in self._marks if self._dice.random() < 0.5}
            self._begun = self._dice.random() < 0.5
            found = self._node.recover()
            self._begin()
            self._twin, old = self._twin.recover((), self._now)
            settled = [
                serial for owner, (_, serial, generation) in self._marks.items()
                if owner in self._settled and generation == self._twin.generation
            ]  # fmt: skip
            wanted = tuple(x for x in old if x in settled)
            assert found == len(wanted)
            if self._begun:
                wanted = (*wanted, FIRST)
            self._twin, _ = self._twin.recover(wanted, self._now)

    def _mark(self) -> None:
        slots, owner = self._slots(), f"owner {self._dice.random()}"
        before = self._clock.monotonic()
        mark = self._node.mark(Slots(slots), owner)
        # Who comes too early sleeps.
        self._now += self._clock.monotonic() - before if self._too_early() else 0.0
        self._begin()
        self._now = max(self._now, self._twin.until)
        self._twin, serial = self._twin.mark(slots, self._now)
        assert serial, "the twin says that it is too early"
        assert tuple(mark.slots) == slots
        self._marks[owner] = mark, serial, self._twin.generation

    def _too_early(self) -> bool:
        return not self._twin.generation or self._twin.until > self._now

    def _twin_completes(self, complete: Any) -> None:
        complete()
        self._begin()

    def _settle(self) -> None:
        """Who completes a change too early for others waits."""
        self._now = max(self._now, self._twin.until)

    def same(self) -> None:
        """Both say the same."""
        node = self._node
        epoch = node.now()
        self._begin()
        generation, numbers = node.snapshot()
        assert epoch.sequence == self._twin.sequence
        wanted = [self._twin.number(slot) for slot in range(len(FIXED))]
        assert [DIRTY if n < 0 else n for n in wanted] == list(numbers)
        marks = [serial for serial, _ in self._twin.marks if serial]
        assert node.statistics()["changes_under_way"] == len(marks)
        for slots in (Slots((0, 1)), Slots((0, 3, 5))):
            for back in range(3):
                number = self._twin.sequence - back
                fresh = all(0 <= self._twin.number(slot) <= number for slot in slots)
                assert node.fresh_now(Epoch(generation, number), slots) is fresh
        # What a mirror is told: all changes since it last looked, and what is under a mark.
        mirror = node._mirror
        assert mirror is not None
        known = mirror.position
        node._poll()
        assert mirror.position == (generation, self._twin.sequence)
        marked = {slot for _, (_, slots) in self._twin.marks for slot in slots}
        assert set(mirror._table.marked) == marked
        if known[0] == generation:
            changed = {slot: n for n, slots in self._twin.changes if n > known[1] for slot in slots}
            for slot, number in mirror._table.numbers.items():
                assert slot not in changed or number == changed[slot]
        clean = {s: self._twin.number(s) for s in CHOICE if self._twin.number(s) >= 0}
        mirror.learn(generation, self._twin.sequence, clean)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.mark.parametrize("seed", range(12))
def test_the_twin_says_what_redis_says(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    # Time passes for both when the test says so: the twin's does not run on by itself.
    clock = RedisClock(server, runs=False)
    clock.put_in_place(monkeypatch)
    monkeypatch.setattr(outages, "TABLE", scripts.Program(program_by("1.7e15")))
    server.client.flushall()
    both = Both(server, clock, dice)
    done = []
    try:
        for _ in range(60):
            deed = dice.choice(DEEDS)
            done.append(deed)
            try:
                both.do(deed)
            except CoordinatorError as error:
                raise AssertionError(f"{done}: {error}") from error
            both.same()
    finally:
        both.close()
    assert set(done) == set(DEEDS)

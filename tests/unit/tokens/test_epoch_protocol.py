"""The protocol as a whole, against a model of the database, in whatever order things may happen.

A machine of hypothesis begins, interrupts and ends fills and changes in several processes, kills
writers, loses the table and lets time pass. After each step every process looks at every answer
that was kept: one that is fresh shows no less than the last change whose response was sent, nor,
in the table in which it was marked, than the last that was committed.

The machine itself is put to the test with coordinators that are wrong on purpose.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator import local as module
from keyfront.middleware.tokens.coordinator.local import LEASE_SECONDS, NAME, SharedMemory, Table
from keyfront.middleware.tokens.coordinator.mark_owners import beginning, begins
from keyfront.middleware.tokens.epochs import ALL_SLOT, MARK_SECONDS, Epoch, Mark, Slots
from support.clocks import Clock

TAGS = ("a", "b", "c")
# Two of the tags share a slot, as tags may.
SLOT_OF = {"a": 100, "b": 101, "c": 101}
WORKERS = 2
#: Nobody needs more of anything at once.
FEW = 4

which = st.integers(0, FEW - 1)
TAG_SETS = [frozenset(tags) for tags in ("a", "b", "ab", "c")]
PAUSES = [0.01, LEASE_SECONDS / 2, LEASE_SECONDS * 0.99, 1.0, 4.0]
DEEDS = (
    *("begin_a_fill", "read_the_database", "finish_a_fill"),
    *("begin_a_change", "commit", "stamp_and_respond", "crash"),
    *("fill_at_once", "change_at_once"),
)
Versions = dict[str, int]


def slots_of(tags: frozenset[str]) -> Slots:
    return Slots(SLOT_OF[tag] for tag in tags)


@dataclass
class Fill:
    """An answer that is being made."""

    worker: int
    tags: frozenset[str]
    epoch: Epoch | None
    seen: Versions = field(default_factory=dict)


@dataclass
class Kept:
    """An answer that was stored."""

    tags: frozenset[str]
    epoch: Epoch
    seen: Versions


@dataclass
class Change:
    """A change under way."""

    worker: int
    tags: frozenset[str]
    mark: Mark
    #: When its mark may be taken for abandoned.
    deadline: float
    #: What the database holds of its tags once it is committed.
    committed: Versions = field(default_factory=dict)


class Protocol(RuleBasedStateMachine):
    """Two workers, and a process like keystone-manage that only changes."""

    coordinator: ClassVar[type[SharedMemory]] = SharedMemory
    deeds: ClassVar[tuple[str, ...]] = DEEDS
    tag_sets: ClassVar[list[frozenset[str]]] = TAG_SETS
    #: When a fill takes its epoch.
    takes_epoch: ClassVar[str] = "before"
    troubles: ClassVar[tuple[str, ...]] = (
        *("recover", "restart", "flush"),
        *("lose_the_store", "lose_the_table", "damage_the_table"),
    )
    #: Whether a new table waits for the commits of changes that were marked before it.
    knows_commits: ClassVar[bool] = True
    hits: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.undo = ExitStack()
        self.undo.enter_context(mock.patch.object(module, "time", self.clock))
        # Few places for marks, so that looking through them does not take most of the time.
        places = module._PLACES[: FEW * 2]
        self.undo.enter_context(mock.patch.object(module, "_PLACES", places))
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(dir=base))
        self.folder = self.home / "epochs"
        self.changes: list[Change] = []
        self.processes = [self.attach() for _ in range(WORKERS)]
        self.processes.append(self.attach(create=False))
        self.database: Versions = dict.fromkeys(TAGS, 0)
        #: What the responses that were sent have promised.
        self.told: Versions = dict.fromkeys(TAGS, 0)
        self.fills: list[Fill] = []
        #: What was committed under a mark, by the generation of the mark's table and by tag.
        self.marked: dict[tuple[int, str], int] = {}
        self.memories: list[list[Kept]] = [[] for _ in range(WORKERS)]
        self.store: list[Kept] = []

    def attach(self, *, create: bool = True) -> SharedMemory:
        return self.coordinator(
            self.folder, create=create, slot_count=1024, settled=self.is_settled
        )

    def is_settled(self, owner: str, age: float) -> bool:
        """Tell as a database does: a table begins until no change of before it may be committed."""
        return not self.knows_commits or not begins(owner) or all(
            change.committed or beginning(change.mark.generation) == owner
            for change in self.changes
        )

    def teardown(self) -> None:
        for process in self.processes:
            process.close()
        self.undo.close()
        shutil.rmtree(self.home, ignore_errors=True)

    @rule(
        deed=st.sampled_from(DEEDS),
        process=st.integers(0, WORKERS),
        tags=st.sampled_from(TAG_SETS),
        index=which,
    )
    def act(self, deed: str, process: int, tags: frozenset[str], index: int) -> None:
        """One rule for all: hypothesis leaves whole rules out, and a race needs all of these."""
        getattr(self, deed)(process, tags, index)

    @rule(seed=st.integers(0, 2**32 - 1))
    def act_at_random(self, seed: int) -> None:
        """A while of it with even odds, which hypothesis by itself does not give."""
        dice = random.Random(seed)
        for _ in range(30):
            deed, tags = dice.choice(self.deeds), dice.choice(self.tag_sets)
            process, index = dice.randrange(WORKERS + 1), dice.randrange(FEW)
            if dice.random() < 0.08:
                self.let_time_pass(dice.choice(PAUSES))
            elif dice.random() < 0.08 and self.troubles:
                deed = dice.choice(self.troubles)
                note(f"{deed}({process % WORKERS})")
                getattr(self, deed)(process % WORKERS)
            else:
                note(f"{deed}({process}, {tags}, {index})")
                self.act(deed, process, tags, index)
            self.no_answer_is_from_before_a_response()

    @rule(seconds=st.sampled_from(PAUSES))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.later(seconds)

    # Fills

    def begin_a_fill(self, process: int, tags: frozenset[str], index: int) -> None:
        if len(self.fills) == FEW:
            return
        worker = process % WORKERS
        epoch = self.now(worker) if self.takes_epoch == "before" else None
        self.fills.append(Fill(worker, tags, epoch))

    def read_the_database(self, process: int, tags: frozenset[str], index: int) -> None:
        waiting = [fill for fill in self.fills if not fill.seen]
        if not waiting:
            return
        fill = waiting[index % len(waiting)]
        fill.seen = {tag: self.database[tag] for tag in fill.tags}

    def finish_a_fill(self, process: int, tags: frozenset[str], index: int) -> None:
        ready = [fill for fill in self.fills if fill.seen]
        if not ready:
            return
        fill = ready[index % len(ready)]
        self.fills.remove(fill)
        epoch = fill.epoch if self.takes_epoch == "before" else self.now(fill.worker)
        if epoch is None:
            return
        kept = Kept(fill.tags, epoch, fill.seen)
        for place in (self.memories[fill.worker], self.store):
            place.append(kept)
            del place[:-FEW]

    def now(self, worker: int) -> Epoch | None:
        try:
            return self.processes[worker].now()
        except CoordinatorError:
            return None

    # Changes

    def begin_a_change(self, process: int, tags: frozenset[str], index: int) -> None:
        if len(self.changes) == FEW:
            return
        deadline = self.clock.monotonic() + MARK_SECONDS
        try:
            mark = self.processes[process].mark(slots_of(tags))
        except CoordinatorError:
            return  # then it does not happen
        self.changes.append(Change(process, tags, mark, deadline))

    def commit(self, process: int, tags: frozenset[str], index: int) -> None:
        waiting = [change for change in self.changes if not change.committed]
        if not waiting:
            return
        change = waiting[index % len(waiting)]
        for tag in change.tags:
            self.database[tag] += 1
        change.committed = {tag: self.database[tag] for tag in change.tags}
        if self.clock.monotonic() < change.deadline:
            for tag, version in change.committed.items():
                self.marked[change.mark.generation, tag] = version

    def stamp_and_respond(self, process: int, tags: frozenset[str], index: int) -> None:
        """Complete a change, or one that was rolled back."""
        if not self.changes:
            return
        change = self.changes.pop(index % len(self.changes))
        try:
            self.processes[change.worker].stamp(change.mark)
        except CoordinatorError:
            pass  # the response leaves all the same: the mark stays
        for tag, version in change.committed.items():
            self.told[tag] = max(self.told[tag], version)

    def crash(self, process: int, tags: frozenset[str], index: int) -> None:
        """Kill a writer: of its mark nobody takes care."""
        if not self.changes:
            return
        self.changes.pop(index % len(self.changes))

    def recover(self, worker: int) -> None:
        """After the deadline of all marks that were abandoned."""
        self.clock.later(MARK_SECONDS + 1)
        with contextlib.suppress(CoordinatorError):
            self.processes[worker].recover()

    def fill_at_once(self, process: int, tags: frozenset[str], index: int) -> None:
        others, self.fills = self.fills, []
        for step in (self.begin_a_fill, self.read_the_database, self.finish_a_fill):
            step(process, tags, 0)
        self.fills = others

    def change_at_once(self, process: int, tags: frozenset[str], index: int) -> None:
        others, self.changes = self.changes, []
        for step in (self.begin_a_change, self.commit, self.stamp_and_respond):
            step(process, tags, 0)
        self.changes = others

    # Trouble

    @precondition(lambda self: self.troubles)
    @rule(index=st.integers(0, 59), worker=st.integers(0, WORKERS - 1))
    def trouble(self, index: int, worker: int) -> None:
        """One kind of it at a time, so that it is not all that ever happens."""
        getattr(self, self.troubles[index % len(self.troubles)])(worker)

    def lose_the_store(self, worker: int) -> None:
        self.store.clear()

    def lose_the_table(self, worker: int) -> None:
        (self.folder / NAME).unlink(missing_ok=True)

    def damage_the_table(self, worker: int) -> None:
        """Put another file in its place, as a restored backup would."""
        other = self.home / "other"
        other.write_bytes(bytes(5000))
        other.chmod(0o600)
        other.rename(self.folder / NAME)

    def restart(self, worker: int) -> None:
        """With it go its memory, its fills and its changes."""
        self.processes[worker].close()
        self.fills = [fill for fill in self.fills if fill.worker != worker]
        for change in [change for change in self.changes if change.worker == worker]:
            self.crash(worker, change.tags, self.changes.index(change))
        self.memories[worker].clear()
        self.processes[worker] = self.attach()

    def flush(self, worker: int) -> None:
        self.processes[worker].flush()

    # What must hold

    @invariant()
    def no_answer_is_from_before_a_response(self) -> None:
        for worker, memory in enumerate(self.memories):
            process = self.processes[worker]
            for kept in (*memory, *self.store):
                if not process.fresh(kept.epoch, Slots((ALL_SLOT, *slots_of(kept.tags)))):
                    continue
                type(self).hits += 1
                for tag in kept.tags:
                    told = self.told[tag]
                    # Under a mark not even what is committed, response or not, is hidden.
                    marked = self.marked.get((kept.epoch.generation, tag), 0)
                    assert kept.seen[tag] >= max(told, marked), (tag, kept, told, marked)


def run(machine: type[Protocol], examples: int, *, seeded: bool = False) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            deadline=None,
            database=None,
            derandomize=seeded,
            phases=[Phase.generate] if seeded else [Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_answer_is_from_before_a_response() -> None:
    Protocol.hits = 0
    run(Protocol, 50)
    assert Protocol.hits > 100


# Coordinators that are wrong


class ReusesNumber(SharedMemory):
    """A change gets the number of the one before it."""

    def stamp(self, mark: Mark) -> None:
        super().stamp(mark)
        with self._lock:
            table = self._attach()
            number = table.sequence - 1
            table._words[module._SEQUENCE] = number
            for slot in mark.slots:
                if table.values[slot] == number + 1:
                    table._set(slot, number)


class FirstStampCleans(SharedMemory):
    """Of two changes of one slot, the first that ends makes it clean."""

    def stamp(self, mark: Mark) -> None:
        super().stamp(mark)
        with self._lock:
            table = self._attach()
            for slot in mark.slots:
                table._set(slot, table.sequence)


class ForgetsLateStamps(SharedMemory):
    """A change that was taken for abandoned is not completed when its writer comes to it."""

    def stamp(self, mark: Mark) -> None:
        with self._lock:
            table = self._attach()
            words = table._words
            places = [p for p in module._PLACES if words[p] and words[p + 1] == mark.serial]
        if mark.generation != table.generation or places:
            super().stamp(mark)


class StampsOnlyItsOwnTable(SharedMemory):
    """A change whose table was lost says nothing in the one that was made since."""

    def stamp(self, mark: Mark) -> None:
        if mark.generation == self.now().generation:
            super().stamp(mark)


class MarksNothing(SharedMemory):
    """Only the stamp tells, as in a cache that is invalidated after the commit."""

    def mark(self, slots: Slots) -> Mark:
        return super().mark(Slots([900]))._replace(slots=slots)

    def stamp(self, mark: Mark) -> None:
        pass


def wrong(
    coordinator: type[SharedMemory] = SharedMemory,
    *troubles: str,
    takes_epoch: str = "before",
    deeds: tuple[str, ...] = DEEDS,
    knows_commits: bool = True,
) -> type[Protocol]:
    """A machine with a coordinator that is wrong, and the deeds and trouble in which it shows."""
    attributes = {
        "coordinator": coordinator,
        "troubles": troubles,
        "deeds": deeds,
        "takes_epoch": takes_epoch,
        "knows_commits": knows_commits,
        "tag_sets": TAG_SETS[:1],
    }
    return type("Wrong", (Protocol,), attributes)


@contextmanager
def no_wait_in_a_new_table() -> Iterator[None]:
    with mock.patch.object(Table, "settled", property(lambda self: 0)):
        yield


@contextmanager
def generations_that_repeat() -> Iterator[None]:
    with mock.patch.object(module.secrets, "randbelow", lambda limit: 7):
        yield


NOTHING = contextlib.nullcontext
LONG_CHANGES = ("fill_at_once", "begin_a_change", "commit", "stamp_and_respond")
MUTATIONS: dict[str, tuple[type[Protocol], Callable[[], AbstractContextManager[None]]]] = {
    "a number is used again": (wrong(ReusesNumber), NOTHING),
    "the first stamp cleans": (wrong(FirstStampCleans, deeds=LONG_CHANGES), NOTHING),
    "nothing is marked": (wrong(MarksNothing), NOTHING),
    "a fill takes its epoch at its end": (wrong(takes_epoch="after"), NOTHING),
    "a late stamp is forgotten": (
        wrong(ForgetsLateStamps, "recover", deeds=LONG_CHANGES),
        NOTHING,
    ),
    "a lost table's change is forgotten": (
        # Where it waits, it takes two faults at once.
        wrong(
            StampsOnlyItsOwnTable, "lose_the_table", deeds=LONG_CHANGES, knows_commits=False
        ),
        NOTHING,
    ),
    "a change begins at once in a new table": (
        wrong(SharedMemory, "lose_the_table"),
        no_wait_in_a_new_table,
    ),
    "two tables have one generation": (
        wrong(SharedMemory, "lose_the_table"),
        generations_that_repeat,
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_machine_finds_what_is_wrong(mutation: str) -> None:
    machine, patched = MUTATIONS[mutation]
    with patched(), pytest.raises(AssertionError) as caught:
        run(machine, 400, seeded=True)
    assert "kept.seen" in str(caught.traceback[-1].statement)


# The race that every cache of this kind has to lose, step by step


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    monkeypatch.setattr(module, "time", Clock())
    return SharedMemory(tmp_path / "epochs", slot_count=1024)


@pytest.mark.parametrize("stored", ["before the mark", "during the change", "after the stamp"])
@pytest.mark.parametrize("began", ["before the mark", "during the change"])
def test_a_slow_fill(worker: SharedMemory, began: str, stored: str) -> None:
    """It read the old row, and stores it whenever it likes."""
    asked = Slots([ALL_SLOT, 100])
    kept: dict[str, tuple[Epoch, str]] = {}
    row = "old"
    fill = (worker.now(), row) if began == "before the mark" else None
    if stored == "before the mark" and fill:
        kept["key"] = fill
        assert worker.fresh(kept["key"][0], asked)
    mark = worker.mark(Slots([100]))
    fill = fill or (worker.now(), row)
    if stored == "during the change":
        kept["key"] = fill
        assert not worker.fresh(kept["key"][0], asked)
    row = "new"
    worker.stamp(mark)
    if stored == "after the stamp":
        kept["key"] = fill
    if "key" in kept:
        assert kept["key"][1] == "old"
        assert not worker.fresh(kept["key"][0], asked)
    kept["key"] = (worker.now(), row)
    assert worker.fresh(kept["key"][0], asked)

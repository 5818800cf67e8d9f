"""What every coordinator must do: derive from :class:`CoordinatorSuite` and give it a ``world``.

The suite knows nothing of where the table lies. The coordinators that a world hands out stand for
processes, on one node or on many, that share one table.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import (
    ALL_SLOT,
    DIRTY,
    MARK_SECONDS,
    MARK_TAGS,
    Coordinator,
    Epoch,
    Mark,
    Slots,
    slots,
)
from keyfront.middleware.tokens.invalidation.rules import FIXED


class World(Protocol):
    """A table that several processes share."""

    def attach(self, **options: Any) -> Coordinator:
        """Return the coordinator of one more process; the first makes the table."""
        ...

    def later(self, seconds: float) -> None:
        """Let time pass, on the clock by which marks are found abandoned."""
        ...

    def lose(self) -> None:
        """Take the table away from under those who use it."""
        ...


# Seconds; a bound on a hang.
PATIENCE = 90.0
#: Longer than any coordinator may go on trusting a table that is lost.
NOTICE_SECONDS = 2.0


#: Less than the time of a mark by so much that a busy machine does not make up for it.
SHORT = MARK_SECONDS / 4


def some(*numbers: int) -> Slots:
    """Slots as an entry or a change has them: away from the fixed tags, and not ``all``."""
    return Slots(100 + number for number in numbers)


def entry(*numbers: int) -> Slots:
    """Slots as an entry has them: every answer depends on ``all``."""
    return Slots((ALL_SLOT, *some(*numbers)))


class CoordinatorSuite:
    """The conformance tests; a class that derives from it has a fixture ``world``."""

    @pytest.fixture
    def world(self) -> World:
        raise NotImplementedError

    @pytest.fixture
    def peers(self, world: World) -> Iterator[tuple[Coordinator, Coordinator, Coordinator]]:
        """Three processes that share a table which has seen a change."""
        peers = world.attach(), world.attach(), world.attach()
        change(peers[0], some(900))
        yield peers
        for peer in peers:
            peer.close()

    def test_what_is_filled_after_the_last_change_is_fresh(self, peers: Any) -> None:
        change(peers[0], some(1))
        for filler in peers:
            epoch = filler.now()
            assert [peer.fresh(epoch, entry(1, 2)) for peer in peers] == [True] * 3

    def test_an_epoch_is_the_same_for_all(self, peers: Any) -> None:
        first, second, third = peers
        assert first.now() == second.now() == third.now()
        assert isinstance(first.now(), Epoch)
        assert first.slot_count == second.slot_count > MARK_TAGS * 4

    def test_a_mark_is_seen_by_all_at_once(self, peers: Any) -> None:
        epoch = peers[1].now()
        mark = peers[0].mark(some(1, 2, 3))
        for peer in peers:
            for number in (1, 2, 3):
                assert not peer.fresh(epoch, entry(number))
                assert not peer.fresh(peer.now(), entry(number))
            assert not peer.fresh(epoch, entry(1, 7))
            assert peer.fresh(epoch, entry(7))
        peers[0].stamp(mark)

    def test_a_stamp_ends_what_was_before_it_and_lets_in_what_is_after(self, peers: Any) -> None:
        before = peers[1].now()
        mark = peers[0].mark(some(1))
        meanwhile = peers[1].now()
        peers[0].stamp(mark)
        after = peers[2].now()
        for peer in peers:
            assert not peer.fresh(before, entry(1))
            assert not peer.fresh(meanwhile, entry(1))
            assert peer.fresh(after, entry(1))
            assert peer.fresh(before, entry(2))

    def test_a_slow_fill_is_stale_however_late_it_is_stored(self, peers: Any) -> None:
        fill = peers[1].now()
        for _ in range(3):
            change(peers[0], some(1))
        change(peers[0], some(2))
        assert not any(peer.fresh(fill, entry(1)) for peer in peers)

    def test_stamp_after_stamp_renews(self, peers: Any) -> None:
        for _ in range(5):
            old = peers[0].now()
            change(peers[1], some(1))
            new = peers[2].now()
            assert new.sequence > old.sequence
            assert not peers[0].fresh(old, entry(1))
            assert peers[0].fresh(new, entry(1))

    @pytest.mark.parametrize("first_ends", [True, False])
    def test_of_two_changes_of_a_slot_the_last_to_end_makes_it_clean(
        self, peers: Any, first_ends: bool
    ) -> None:
        one, two = peers[0].mark(some(1, 2)), peers[1].mark(some(2, 3))
        assert one != two
        order = ((peers[0], one), (peers[1], two))
        (early, ended), (late, other) = order if first_ends else order[::-1]
        early.stamp(ended)
        between = peers[2].now()
        lone, shared = ((1, 3) if first_ends else (3, 1)), 2
        for peer in peers:
            assert peer.fresh(between, entry(lone[0]))
            assert not peer.fresh(between, entry(shared))
            assert not peer.fresh(peer.now(), entry(shared))
            assert not peer.fresh(between, entry(lone[1]))
        late.stamp(other)
        for peer in peers:
            assert not peer.fresh(between, entry(shared))
            assert peer.fresh(peer.now(), entry(1, 2, 3))

    def test_many_changes_of_one_slot_at_once(self, peers: Any) -> None:
        marks = [(peer, peer.mark(some(1, 10 + n))) for n in range(10) for peer in peers]
        assert len({mark for _, mark in marks}) == 30
        random.Random(1).shuffle(marks)
        for peer, mark in marks:
            assert not any(p.fresh(p.now(), entry(1)) for p in peers)
            peer.stamp(mark)
        assert all(peer.fresh(peer.now(), entry(1)) for peer in peers)

    def test_a_mark_may_be_stamped_by_another_process(self, peers: Any) -> None:
        mark = peers[0].mark(some(1))
        peers[1].stamp(Mark(*mark))
        assert peers[2].fresh(peers[2].now(), entry(1))

    def test_a_snapshot_has_the_numbers_of_all_fixed_tags(self, peers: Any) -> None:
        fixed = Slots(range(len(FIXED)))
        before = peers[1].snapshot()
        assert before == peers[2].snapshot()
        assert before[0] == peers[0].now().generation
        assert len(before[1]) == len(fixed)
        change(peers[0], Slots((3, 5)))
        generation, numbers = peers[1].snapshot()
        assert generation == before[0]
        last = peers[0].now().sequence
        assert numbers == tuple(last if x in (3, 5) else n for x, n in enumerate(before[1]))
        mark = peers[0].mark(Slots((4,)))
        assert [n == DIRTY for n in peers[2].snapshot()[1]] == [x == 4 for x in fixed]
        peers[0].stamp(mark)
        assert DIRTY not in peers[2].snapshot()[1]

    def test_a_touch_ends_what_was_before_it(self, peers: Any) -> None:
        before = peers[1].now()
        peers[0].touch(some(1))
        for peer in peers:
            assert not peer.fresh(before, entry(1))
            assert peer.fresh(peer.now(), entry(1))
            assert peer.fresh(before, entry(2))

    def test_a_touch_does_not_end_the_change_of_another(self, peers: Any) -> None:
        mark = peers[0].mark(some(1))
        peers[1].touch(some(1))
        assert not any(peer.fresh(peer.now(), entry(1)) for peer in peers)
        peers[0].stamp(mark)
        assert all(peer.fresh(peer.now(), entry(1)) for peer in peers)

    def test_a_flush_ends_everything_once(self, peers: Any) -> None:
        flush = getattr(peers[0], "flush", None)
        if flush is None:
            pytest.skip("it offers none")
        before = peers[1].now()
        flush()
        for peer in peers:
            assert not any(peer.fresh(before, entry(number)) for number in range(50))
            assert peer.fresh(peer.now(), entry(1))

    def test_all_means_everything(self, peers: Any) -> None:
        before = peers[1].now()
        every = slots(["all"], peers[0].slot_count)
        assert every == (ALL_SLOT,)
        mark = peers[0].mark(every)
        for peer in peers:
            assert not any(peer.fresh(peer.now(), entry(number)) for number in range(50))
        peers[0].stamp(mark)
        for peer in peers:
            assert not any(peer.fresh(before, entry(number)) for number in range(50))
            assert peer.fresh(peer.now(), entry(1))

    def test_a_mark_of_as_many_tags_as_it_takes(self, peers: Any) -> None:
        before = peers[1].now()
        mark = peers[0].mark(some(*range(MARK_TAGS)))
        assert not any(peers[2].fresh(before, entry(number)) for number in range(MARK_TAGS))
        assert peers[2].fresh(before, entry(MARK_TAGS))
        peers[0].stamp(mark)
        assert peers[2].fresh(peers[2].now(), entry(*range(MARK_TAGS)))

    def test_a_mark_of_more_is_one_of_everything(self, peers: Any) -> None:
        before = peers[1].now()
        mark = peers[0].mark(some(*range(MARK_TAGS + 1)))
        for peer in peers:
            assert not any(peer.fresh(before, entry(number)) for number in range(200))
        peers[0].stamp(mark)
        for peer in peers:
            assert not any(peer.fresh(before, entry(number)) for number in range(MARK_TAGS + 1))
            assert peer.fresh(peer.now(), entry(*range(200)))

    def test_an_abandoned_mark_is_completed(self, world: World, peers: Any) -> None:
        before = peers[1].now()
        peers[0].mark(some(1))
        world.later(SHORT)
        assert peers[1].recover() == 0
        assert not peers[1].fresh(peers[1].now(), entry(1))
        world.later(MARK_SECONDS - SHORT + 1)
        assert peers[1].recover() == 1
        assert peers[2].recover() == 0
        for peer in peers:
            assert not peer.fresh(before, entry(1))
            assert peer.fresh(peer.now(), entry(1))

    def test_readers_find_an_abandoned_mark_by_themselves(
        self, world: World, peers: Any
    ) -> None:
        peers[0].mark(some(1))
        peers[0].mark(some(2))
        world.later(MARK_SECONDS + 1)
        looks = 0
        while not peers[1].fresh(peers[1].now(), entry(1)):
            world.later(0.2)
            looks += 1
            assert looks < 10
        while not peers[2].fresh(peers[2].now(), entry(2)):
            world.later(0.2)
            looks += 1
            assert looks < 10

    def test_a_mark_stays_until_its_owner_is_settled(self, world: World, peers: Any) -> None:
        """Of whom the others are told what he is and how old his mark is."""
        asked = []
        settled = False

        def ask(owner: str, age: float) -> bool:
            asked.append(owner)
            assert MARK_SECONDS <= age <= MARK_SECONDS + 60
            return settled and owner == "node:1:2 server/3"

        for peer in peers:
            peer.settled = ask
        peers[0].mark(some(1), "node:1:2 server/3")
        peers[0].mark(some(2), "another")
        world.later(SHORT)
        assert peers[1].recover() == 0
        assert not asked
        world.later(MARK_SECONDS - SHORT + 1)
        assert peers[1].recover() == 0
        assert sorted(asked) == ["another", "node:1:2 server/3"]
        assert not peers[2].fresh(peers[2].now(), entry(1))
        settled = True
        assert peers[2].recover() == 1
        assert peers[1].fresh(peers[1].now(), entry(1))
        assert not peers[1].fresh(peers[1].now(), entry(2))

    def test_processes_that_number_slots_otherwise_begin_anew_with_each_change(
        self, world: World, peers: Any
    ) -> None:
        """As in a rolling upgrade: whatever the other version's change is about."""
        newer = world.attach(digest="0123456789ab")
        committing: list[Any] = []
        for coordinator in (*peers, newer):
            coordinator.settled = lambda owner, age: not committing  # as the database tells
        try:
            for one, other in ((peers[0], newer), (newer, peers[1])):
                self._begun(world, other)
                before = other.now()
                assert other.fresh(before, entry(5))
                assert before.generation != self._begun(world, one).generation
                mark = one.mark(some(1))
                committing.append(mark)
                world.later(NOTICE_SECONDS / 2)
                assert not other.fresh(before, entry(5))
                # Between mark and commit, in a table that was made in between.
                between = other.now()
                assert not other.fresh(between, entry(5))
                committing.clear()
                one.stamp(mark)
                assert not other.fresh(before, entry(5))
                assert not other.fresh(between, entry(5))
                assert one.fresh(one.now(), entry(1))
                # And again as long as nobody changes anything.
                self._begun(world, other)
                assert other.fresh(other.now(), entry(5))
        finally:
            newer.close()

    @staticmethod
    def _begun(world: World, coordinator: Any) -> Epoch:
        """Wait until something is fresh for a process that may have begun anew."""
        for _ in range(3):
            if coordinator.fresh(coordinator.now(), entry(5)):
                break
            world.later(MARK_SECONDS + 1)
            coordinator.recover()
        found: Epoch = coordinator.now()
        return found

    def test_an_abandoned_mark_does_not_end_another_change(
        self, world: World, peers: Any
    ) -> None:
        peers[0].mark(some(1, 2))
        world.later(MARK_SECONDS - 1)
        mark = peers[1].mark(some(2, 3))
        world.later(2)
        assert peers[2].recover() == 1
        now = peers[2].now()
        assert peers[2].fresh(now, entry(1))
        assert not peers[2].fresh(now, entry(2))
        assert not peers[2].fresh(now, entry(3))
        peers[1].stamp(mark)
        assert peers[2].fresh(peers[2].now(), entry(1, 2, 3))

    def test_a_late_stamp_counts(self, world: World, peers: Any) -> None:
        """Its writer was only slow: what was read before its commit must go."""
        mark = peers[0].mark(some(1))
        world.later(MARK_SECONDS + 1)
        assert peers[1].recover() == 1
        between = peers[2].now()
        assert peers[2].fresh(between, entry(1))
        peers[0].stamp(mark)
        for peer in peers:
            assert not peer.fresh(between, entry(1))
            assert peer.fresh(peer.now(), entry(1))

    def test_a_late_stamp_does_not_end_a_change_that_came_meanwhile(
        self, world: World, peers: Any
    ) -> None:
        late = peers[0].mark(some(1))
        world.later(MARK_SECONDS + 1)
        assert peers[1].recover() == 1
        mark = peers[1].mark(some(1))
        peers[0].stamp(late)
        assert not any(peer.fresh(peer.now(), entry(1)) for peer in peers)
        peers[1].stamp(mark)
        assert all(peer.fresh(peer.now(), entry(1)) for peer in peers)

    def test_a_stamp_twice_does_no_harm(self, peers: Any) -> None:
        mark = peers[0].mark(some(1))
        peers[0].stamp(mark)
        before = peers[1].now()
        peers[0].stamp(mark)
        assert not peers[1].fresh(before, entry(1))
        assert peers[1].fresh(peers[1].now(), entry(1))

    def test_the_sequence_never_goes_back(self, world: World, peers: Any) -> None:
        dice = random.Random(7)
        open_marks: list[Mark] = []
        last = peers[0].now()
        for _ in range(300):
            peer = dice.choice(peers)
            deed = dice.randrange(6)
            if deed < 2 and len(open_marks) < 20:
                open_marks.append(peer.mark(some(dice.randrange(20), dice.randrange(20))))
            elif deed < 4 and open_marks:
                peer.stamp(open_marks.pop(dice.randrange(len(open_marks))))
            elif deed == 4:
                peer.touch(some(dice.randrange(20)))
            else:
                world.later(3)
                peer.recover()
            seen = [other.now() for other in peers]
            assert len(set(seen)) == 1
            assert seen[0].generation == last.generation
            assert seen[0].sequence >= last.sequence
            last = seen[0]

    def test_nothing_of_a_lost_table_is_fresh_in_a_new_one(
        self, world: World, peers: Any
    ) -> None:
        for _ in range(5):
            change(peers[0], some(1))
        old = peers[0].now()
        world.lose()
        world.later(NOTICE_SECONDS)
        assert not any(peer.fresh(old, entry(9)) for peer in peers)
        new = world.attach().now()
        assert new.generation != old.generation
        assert all(peer.now().generation == new.generation for peer in peers)
        for _ in range(20):
            assert not any(peer.fresh(old, entry(9)) for peer in peers)
            change(peers[0], some(2))
        assert all(peer.fresh(peer.now(), entry(1)) for peer in peers)

    def test_every_table_has_a_generation_of_its_own(self, world: World, peers: Any) -> None:
        seen = {peers[0].now().generation}
        for _ in range(10):
            world.lose()
            world.later(NOTICE_SECONDS)
            seen.add(peers[1].now().generation)
        assert len(seen) == 11

    def test_a_change_during_which_the_table_is_lost_counts_in_the_new_one(
        self, world: World, peers: Any
    ) -> None:
        mark = peers[0].mark(some(1))
        world.lose()
        world.later(NOTICE_SECONDS)
        # Read between the loss and the commit, so from before the change.
        before = peers[1].now()
        assert before.generation != mark.generation
        peers[0].stamp(mark)
        for peer in peers:
            assert not peer.fresh(before, entry(1))
            assert not peer.fresh(before, entry(7))  # the new table may have other slots
            assert peer.fresh(peer.now(), entry(1))

    def test_a_closed_coordinator_finds_nothing_fresh(self, world: World, peers: Any) -> None:
        epoch = peers[0].now()
        mark = peers[0].mark(some(5))
        peers[0].close()
        peers[0].close()
        for _ in range(3):
            assert not peers[0].fresh(epoch, entry(1))
            world.later(NOTICE_SECONDS)
        with pytest.raises(CoordinatorError):
            peers[0].now()
        with pytest.raises(CoordinatorError):
            peers[0].snapshot()
        # The table lives on, and the mark with it.
        assert peers[1].fresh(epoch, entry(1))
        assert not peers[1].fresh(epoch, entry(5))
        peers[1].stamp(mark)
        assert peers[1].fresh(peers[1].now(), entry(5))
        assert not peers[0].fresh(peers[1].now(), entry(1))

    def test_closing_amid_a_change_leaves_it_dirty_or_done(
        self, world: World, peers: Any
    ) -> None:
        """A coordinator may be closed under the hands of another thread."""
        before = peers[1].now()
        mark = peers[0].mark(some(1))
        peers[0].close()
        try:
            peers[0].stamp(mark)
        except CoordinatorError:
            assert not peers[1].fresh(peers[1].now(), entry(1))
        else:
            assert peers[1].fresh(peers[1].now(), entry(1))
        assert not peers[1].fresh(before, entry(1))
        assert not peers[0].fresh(peers[1].now(), entry(1))

    def test_statistics_are_counts_by_name(self, peers: Any) -> None:
        change(peers[0], some(1))
        counts = peers[1].statistics()
        assert counts
        assert all(
            isinstance(name, str) and isinstance(count, int) for name, count in counts.items()
        )
        assert peers[0].statistics() == counts

    def test_threads_of_several_processes(self, peers: Any) -> None:
        hammer = Hammer(peers, writers=3, readers=3, changes=300)
        hammer.run()
        assert hammer.failures == []
        assert hammer.hits > 0
        assert all(peer.fresh(peer.now(), entry(*range(hammer.tags))) for peer in peers)


def change(coordinator: Coordinator, changed: Slots) -> None:
    coordinator.stamp(coordinator.mark(changed))


class Hammer:
    """A database of versions by tag, writers that raise them and readers that keep them.

    :param changes: by each writer
    """

    tags = 4

    def __init__(self, peers: Any, *, writers: int, readers: int, changes: int) -> None:
        self._peers = peers
        self._changes = changes
        self._committed = [0] * self.tags
        # What was told to somebody: no read that starts later may show less.
        self._told = [0] * self.tags
        self._commit = threading.Lock()
        self._over = threading.Event()
        self.failures: list[str] = []
        self.hits = 0
        self._writers = [
            threading.Thread(target=self._guarded, args=(self._write, n)) for n in range(writers)
        ]
        self._readers = [
            threading.Thread(target=self._guarded, args=(self._read, n)) for n in range(readers)
        ]

    def run(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.0001)
        try:
            for thread in (*self._readers, *self._writers):
                thread.start()
            for thread in self._writers:
                thread.join(PATIENCE)
            self._over.set()
            for thread in self._readers:
                thread.join(PATIENCE)
        finally:
            self._over.set()
            sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in (*self._readers, *self._writers))

    def _guarded(self, role: Any, number: int) -> None:
        try:
            role(self._peers[number % len(self._peers)], random.Random(number))
        except Exception as error:
            self.failures.append(repr(error))

    def _write(self, peer: Coordinator, dice: random.Random) -> None:
        for _ in range(self._changes):
            changed = {dice.randrange(self.tags) for _ in range(dice.randint(1, 2))}
            mark = peer.mark(some(*changed))
            with self._commit:
                for number in changed:
                    self._committed[number] += 1
                seen = list(self._committed)
            peer.stamp(mark)
            with self._commit:
                for number in changed:
                    self._told[number] = max(self._told[number], seen[number])

    def _read(self, peer: Coordinator, dice: random.Random) -> None:
        kept: dict[int, tuple[Epoch, int]] = {}
        while not self._over.is_set():
            number = dice.randrange(self.tags)
            told = self._told[number]
            epoch, version = kept.get(number, (None, 0))
            if epoch is not None and peer.fresh(epoch, entry(number)):
                self.hits += 1
                if version < told:
                    self.failures.append(f"{version} of {number} after {told}")
                continue
            epoch = peer.now()
            kept[number] = epoch, self._committed[number]

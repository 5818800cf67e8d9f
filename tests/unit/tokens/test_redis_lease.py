"""What a mirror of a table in Redis takes in, and what it may say when."""

from __future__ import annotations

import pytest

from keyfront.middleware.tokens.coordinator.redis import lease
from keyfront.middleware.tokens.coordinator.redis.lease import Mirror
from keyfront.middleware.tokens.epochs import Epoch, Slots
from support.clocks import Clock

BOTH = Slots((0, 100))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    return clock


@pytest.fixture
def mirror(clock: Clock) -> Mirror:
    """Of generation 7, at number 10, which knows slots 0 and 100."""
    mirror = Mirror(1.0)
    mirror.advance(clock.monotonic(), 7, 10, {})
    mirror.learn(7, 10, {0: 1, 100: 5})
    return mirror


def test_what_it_knows(mirror: Mirror) -> None:
    assert mirror.verdict(Epoch(7, 5), BOTH) is True
    assert mirror.verdict(Epoch(7, 4), BOTH) is False
    assert mirror.verdict(Epoch(7, 10), Slots((0, 101))) is None
    assert mirror.verdict(Epoch(8, 10), BOTH) is None


def test_it_says_nothing_after_the_lease(mirror: Mirror, clock: Clock) -> None:
    clock.later(1.0)
    assert mirror.verdict(Epoch(7, 5), BOTH) is True
    clock.later(0.001)
    assert mirror.verdict(Epoch(7, 5), BOTH) is None
    assert mirror.is_behind()


def test_a_new_one_says_nothing(clock: Clock) -> None:
    mirror = Mirror(1.0)
    assert mirror.is_behind()
    mirror.learn(7, 10, {0: 1, 100: 5})
    assert mirror.verdict(Epoch(7, 10), BOTH) is None


def test_changes_that_it_missed(mirror: Mirror, clock: Clock) -> None:
    clock.later(0.5)
    mirror.advance(clock.monotonic(), 7, 12, {11: [100], 12: [300]})
    clock.later(0.9)
    assert mirror.verdict(Epoch(7, 10), BOTH) is False
    assert mirror.verdict(Epoch(7, 11), BOTH) is True
    assert mirror.verdict(Epoch(7, 12), Slots((0, 300))) is None


def test_a_change_that_nobody_remembers_clears_it(mirror: Mirror, clock: Clock) -> None:
    mirror.advance(clock.monotonic(), 7, 13, {11: [300], 13: [300]})
    assert mirror.verdict(Epoch(7, 13), BOTH) is None
    mirror.learn(7, 13, {0: 1, 100: 12})
    assert mirror.verdict(Epoch(7, 11), BOTH) is False


def test_what_is_under_a_mark_is_not_in_it(mirror: Mirror, clock: Clock) -> None:
    mirror.advance(clock.monotonic(), 7, 10, {}, {100})
    assert mirror.verdict(Epoch(7, 5), BOTH) is None
    mirror.learn(7, 10, {100: 5})  # read before it was marked
    assert mirror.verdict(Epoch(7, 5), BOTH) is None
    mirror.advance(clock.monotonic(), 7, 11, {11: [100]})
    mirror.learn(7, 11, {100: 11})
    assert mirror.verdict(Epoch(7, 10), BOTH) is False
    assert mirror.verdict(Epoch(7, 11), BOTH) is True


def test_a_new_table_knows_what_is_under_a_mark(mirror: Mirror, clock: Clock) -> None:
    mirror.advance(clock.monotonic(), 8, 1, {}, {0})
    mirror.learn(8, 1, {0: 0, 100: 0})
    assert mirror.verdict(Epoch(8, 1), BOTH) is None


def test_another_generation_clears_it(mirror: Mirror, clock: Clock) -> None:
    mirror.advance(clock.monotonic(), 8, 10, {})
    assert mirror.verdict(Epoch(7, 10), BOTH) is None
    assert mirror.verdict(Epoch(8, 10), BOTH) is None
    assert mirror.position == (8, 10)


def test_what_was_read_before_a_change_does_not_undo_it(mirror: Mirror, clock: Clock) -> None:
    mirror.advance(clock.monotonic(), 7, 12, {11: [100], 12: [200]})
    mirror.learn(7, 11, {200: 3, 100: 11})  # an answer that was overtaken
    assert mirror.verdict(Epoch(7, 11), Slots((0, 200))) is None
    mirror.learn(7, 12, {200: 12})
    assert mirror.verdict(Epoch(7, 11), Slots((0, 200))) is False


def test_what_was_read_after_a_change_stays(mirror: Mirror, clock: Clock) -> None:
    mirror.learn(7, 14, {100: 14})
    mirror.advance(clock.monotonic(), 7, 12, {11: [100], 12: [100]})
    assert mirror.verdict(Epoch(7, 13), BOTH) is False


def test_a_poll_that_was_overtaken_counts_for_nothing(mirror: Mirror, clock: Clock) -> None:
    asked = clock.monotonic()
    clock.later(0.5)
    mirror.advance(clock.monotonic(), 8, 3, {})
    mirror.advance(asked, 7, 10, {})
    assert mirror.position == (8, 3)


def test_what_is_read_of_another_generation_clears_it(mirror: Mirror) -> None:
    mirror.learn(8, 99, {0: 1, 100: 1})
    assert mirror.verdict(Epoch(7, 10), BOTH) is None
    assert mirror.verdict(Epoch(8, 99), BOTH) is None

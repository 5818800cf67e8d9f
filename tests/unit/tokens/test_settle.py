"""Which changes a database that may be behind has shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keyfront.middleware.tokens import epochs
from keyfront.middleware.tokens.epochs import Epoch, Settling


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(epochs, "time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_seconds_the_present_is_what_it_is() -> None:
    assert Settling(0.0).settled(Epoch(7, 3)) == Epoch(7, 3)


def test_a_change_settles_when_it_was_seen_so_long_ago(clock: Clock) -> None:
    seen = Settling(3.0)
    assert seen.settled(Epoch(7, 5)) == Epoch(7, -1)  # how long ago it was nobody knows
    clock.now += 2.9
    assert seen.settled(Epoch(7, 6)) == Epoch(7, -1)
    clock.now += 0.1
    assert seen.settled(Epoch(7, 6)) == Epoch(7, 5)
    clock.now += 2.8
    assert seen.settled(Epoch(7, 6)) == Epoch(7, 5)
    clock.now += 0.1
    assert seen.settled(Epoch(7, 6)) == Epoch(7, 6)
    assert seen.settled(Epoch(7, 7)) == Epoch(7, 6)


def test_a_change_that_is_first_seen_late_settles_late(clock: Clock) -> None:
    seen = Settling(3.0)
    seen.settled(Epoch(7, 5))
    clock.now += 100
    assert seen.settled(Epoch(7, 9)) == Epoch(7, 5)


def test_another_generation_begins_anew(clock: Clock) -> None:
    seen = Settling(3.0)
    seen.settled(Epoch(7, 5))
    clock.now += 4
    assert seen.settled(Epoch(7, 5)).sequence == 5
    assert seen.settled(Epoch(8, 9)) == Epoch(8, -1)
    clock.now += 4
    assert seen.settled(Epoch(8, 9)) == Epoch(8, 9)


@pytest.mark.parametrize("step", [0.0001, 0.01, 0.5, 2.0, 10.0])
def test_no_change_ever_settles_early_nor_much_too_late(clock: Clock, step: float) -> None:
    """Each moment has a change, and is looked at."""
    seen, made = Settling(3.0), {}
    for number in range(1, 40_000 if step < 0.001 else 2000):
        made[number] = clock.now
        found = seen.settled(Epoch(7, number)).sequence
        assert found < 0 or made[found] <= clock.now - 3.0
        if clock.now > 1000.0 + 3.2 + 2 * step:
            assert made[found] >= clock.now - 3.0 - 3.0 / 32 - 2 * step
        clock.now += step
    assert len(seen._seen) <= 65


def test_a_read_settles_with_no_change_that_it_has_not_seen(clock: Clock) -> None:
    """Another thread may have looked later and come first, and this one have stood still since: the
    values that it uses were looked up by the number that it has seen."""
    seen = Settling(3.0)
    seen.settled(Epoch(7, 5))
    seen.settled(Epoch(7, 4))
    clock.now += 3
    assert seen.settled(Epoch(7, 4)) == Epoch(7, 4)
    assert seen.settled(Epoch(7, 5)) == Epoch(7, 5)

"""The explorer, on worlds whose schedules can be counted by hand."""

from __future__ import annotations

from functools import partial
from math import comb
from typing import Any

import pytest

from support.explorer import Again, Disabled, Step, Steps, Violation, explore


class Shelf:
    """A number that processes read and write, and may lock."""

    def __init__(self, *, most: int = 99, least: int = -9) -> None:
        self.number = 0
        self.holder = ""
        self.waited: frozenset[str] = frozenset()
        self._most, self._least = most, least
        self.killed: frozenset[str] = frozenset()

    def save(self) -> Any:
        return (self.number, self.holder, tuple(sorted(self.waited)), tuple(sorted(self.killed)))

    def load(self, state: Any) -> None:
        self.number, self.holder, waited, killed = state
        self.waited, self.killed = frozenset(waited), frozenset(killed)

    def check(self) -> None:
        if self.number > self._most:
            raise Violation(f"{self.number} is too many")
        self.number = -1  # what it does here is undone

    def check_end(self) -> None:
        if self.number < self._least:
            raise Violation(f"{self.number} is too few")

    def dead(self, process: str) -> bool:
        return process in self.killed

    def act(self, process: str, step: Step) -> Any:
        what, *arguments = step
        if what == "read":
            return self.number
        if what == "write":
            (self.number,) = arguments
        elif what == "lock":
            if self.holder:
                raise Disabled
            self.holder = process
        elif what == "unlock":
            self.holder = ""
        elif what == "wait" and process not in self.waited:
            self.waited |= {process}
            raise Again
        elif what == "kill":
            self.killed |= {arguments[0]}
        elif what == "expect" and self.number != arguments[0]:
            raise Violation(f"{process} found {self.number}")
        return None


def add(*, locks: bool = False) -> Steps:
    if locks:
        yield ("lock",)
    number = yield ("read",)
    yield ("write", number + 1)
    if locks:
        yield ("unlock",)


def steps(*them: Step) -> Steps:
    yield from them


def test_every_order_is_run() -> None:
    writes = partial(steps, *(("write", 0) for _ in range(4)))
    found = explore(Shelf(), {"a": writes, "b": writes})
    # One state for each pair of how far they are.
    assert (found.states, found.schedules, found.depth) == (25, comb(8, 4), 8)
    assert not found.failure
    assert "nothing is wrong" in str(found)


def test_all_that_may_come_of_it() -> None:
    found = set()

    class Watched(Shelf):
        def check(self) -> None:
            found.add(self.number)

    explore(Watched(), {"a": add, "b": add})
    assert found == {0, 1, 2}


def test_a_shortest_schedule_is_told() -> None:
    found = explore(Shelf(), {"a": add, "b": add, "c": partial(steps, ("expect", 0))})
    assert found.failure == "c found 1"
    assert found.schedule == ("a: read -> 0", "a: write 1", "c: expect 0")
    assert str(found).endswith("  1 a: read -> 0\n  2 a: write 1\n  3 c: expect 0")


def test_what_is_checked_in_each_state() -> None:
    found = explore(Shelf(most=1), {"a": add, "b": add})
    assert found.failure == "2 is too many"
    assert [line.partition(" -> ")[0] for line in found.schedule] == [
        *("a: read", "a: write 1", "b: read", "b: write 2")
    ]


def test_what_is_checked_in_the_end() -> None:
    found = explore(Shelf(least=2), {"a": add, "b": add})
    assert found.failure == "1 is too few"
    assert len(found.schedule) == 4


def test_a_lock_keeps_the_others_waiting() -> None:
    locked = partial(add, locks=True)
    found = explore(Shelf(), {"a": locked, "b": locked})
    assert (found.schedules, found.depth) == (2, 8)


def test_a_step_may_take_more_than_one() -> None:
    waits = partial(steps, ("wait",), ("write", 1))
    found = explore(Shelf(), {"a": waits})
    assert (found.states, found.schedules, found.depth) == (4, 1, 3)


def test_who_is_killed_does_nothing_more() -> None:
    found = explore(Shelf(), {"a": add, "killer": partial(steps, ("kill", "a"))})
    # Before each of the two steps, or after them.
    assert found.schedules == 3


def test_too_many_states_are_an_error() -> None:
    with pytest.raises(AssertionError, match="more than 3 states"):
        explore(Shelf(), {"a": add, "b": add}, limit=3)

"""All interleavings of what the token cache's protocol consists of, within small bounds.

``test_epoch_protocol.py`` goes far at random; this leaves nothing out where it goes: every order in
which two workers, Keystone's caches and the database can do what they do, with a writer killed, a
table lost or time passing before any step. Where nothing can be done any more, what was abandoned
is recovered, and answers can be kept again. Holes that the protocol once had are put back one by
one, and are found. With a larger bound::

    KEYFRONT_MODEL=full pytest -s tests/unit/tokens/test_protocol_model.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest

from keyfront.middleware.tokens.coordinator.local import LEASE_SECONDS, Table
from keyfront.middleware.tokens.epochs import DIRTY, MARK_SECONDS
from support.explorer import Explored, Program, explore
from support.protocol_model import Rules, change, cloud, fill, first, issue, login, once

FULL = os.environ.get("KEYFRONT_MODEL") == "full"
# What explores more than this is not what it was when its bound was set.
LIMIT = 3_000_000 if FULL else 400_000

Programs = Mapping[str, Program]
TWO = {"w0": 0, "w1": 0}
#: In the middle of an upgrade.
MIXED = {"w0": 0, "w1": 1}


def does(*steps: Any) -> Program:
    return partial(once, *steps)


def changes(worker: str, **options: bool) -> dict[str, Program]:
    """A change, and the database that commits it when it likes."""
    return {
        f"{worker} change": partial(change, **options),
        f"database for {worker}": does(("commit", f"{worker} change")),
    }


FILL: Programs = {"w1 fill": fill}
BARE_FILL: Programs = {"w1 fill": partial(fill, look=False)}
LOGIN: Programs = {"w1 login": login}
HALTING: Programs = {"w1 login": partial(login, halts=True)}
ISSUE: Programs = {"w1 issue": issue}
# By the worker that did not issue it: they share what is known.
FIRST: Programs = {"w0 first": first}
KILLED: Programs = {"kill": does(("kill", "w0"))}
LATE_0: Programs = {"time": does(("pass", MARK_SECONDS + 1)), "w0 recovery": does(("recover",))}
LATE: Programs = {"time": does(("pass", MARK_SECONDS + 1)), "w1 recovery": does(("recover",))}
LOST: Programs = {"loss": does(("lose",)), "time": does(("pass", LEASE_SECONDS + 0.1))}

#: What is explored: the workers, the processes, and whether by each word that is written.
SMALL: dict[str, tuple[dict[str, int], Programs, bool]] = {
    "a change, a fill and a login": (TWO, {**changes("w0"), **FILL, **LOGIN}, False),
    "a change, and a login that stands still among the slots": (
        TWO,
        {**changes("w0"), **HALTING, **FILL},
        False,
    ),
    "two changes, one of which stores late, and a fill": (
        TWO,
        {**changes("w0", stores=True), **changes("w1"), **FILL},
        False,
    ),
    "a change, an issue and a first validation": (
        TWO,
        {**changes("w0"), **ISSUE, **FIRST},
        False,
    ),
    "a writer is killed, an issue and a first validation": (
        TWO,
        {**changes("w1"), "kill": does(("kill", "w1")), **LATE_0, "w0 issue": issue, **FIRST},
        False,
    ),
    "the table is lost, an issue and a first validation": (
        TWO,
        {**changes("w0"), **LOST, "w1 issue": issue, **FIRST},
        False,
    ),
    "a writer is killed, and recovered late": (
        TWO,
        {**changes("w0"), **KILLED, **LATE, **FILL},
        False,
    ),
    "a writer is killed, a login and a fill": (
        TWO,
        {**changes("w0"), **KILLED, **LATE, **BARE_FILL, **LOGIN},
        False,
    ),
    "the table is lost": (TWO, {**changes("w0"), **LOST, **FILL}, False),
    "the table is lost under a writer who is killed": (
        TWO,
        {**changes("w0"), **KILLED, **LOST, **BARE_FILL},
        False,
    ),
    "an upgrade": (MIXED, {**changes("w0"), **changes("w1"), **BARE_FILL}, False),
    "a writer is killed between two words": (
        TWO,
        {**changes("w0"), **KILLED, **LATE, **BARE_FILL},
        True,
    ),
}
LARGE: dict[str, tuple[dict[str, int], Programs, bool]] = {
    "a writer is killed, a login and a fill that looks into Keystone's caches": (
        TWO,
        {**changes("w0"), **KILLED, **LATE, **FILL, **LOGIN},
        False,
    ),
    "two changes, one of which stores late, a fill and a login": (
        TWO,
        {**changes("w0", stores=True), **changes("w1"), **FILL, **LOGIN},
        False,
    ),
    "the table is lost under two changes, one of whose writers is killed": (
        TWO,
        {**changes("w0"), **changes("w1"), **KILLED, **LOST, **BARE_FILL},
        False,
    ),
    "two changes, an issue and two first validations": (
        TWO,
        {**changes("w0"), **changes("w1"), **ISSUE, **FIRST, "w1 first": first},
        False,
    ),
    "an upgrade, with a fill that looks into Keystone's caches": (
        MIXED,
        {**changes("w0"), **changes("w1"), **FILL},
        False,
    ),
    "an upgrade, with a fill by each version": (
        MIXED,
        {**changes("w0"), **changes("w1"), **BARE_FILL, "w0 fill": partial(fill, look=False)},
        False,
    ),
    "two changes, one of whose writers is killed between two words": (
        TWO,
        {**changes("w0"), **changes("w1"), **KILLED, **BARE_FILL},
        True,
    ),
}
BOUNDS = {**SMALL, **(LARGE if FULL else {})}


# The schedules of one protocol are the same on every Python.
pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tens of thousands of times it is logged that a table was lost."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def explored(
    rules: Rules, workers: dict[str, int], programs: Programs, by_word: bool = False
) -> Explored:
    with cloud(rules, workers, by_word=by_word) as world:
        return explore(world, programs, limit=LIMIT)


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_schedule_shows_what_a_change_has_replaced(bound: str) -> None:
    found = explored(Rules(), *BOUNDS[bound])
    print(f"{bound}: {found}")
    assert not found.failure, f"\n{found}"
    assert found.states > 500


# The protocol as it was

HOLES: dict[str, tuple[Rules, dict[str, int], Programs, str]] = {
    "1: what a login stores has the number of its end": (
        Rules(from_the_beginning=False),
        TWO,
        {**changes("w0"), **LOGIN},
        "finds version 0 of 1 as 'token'",
    ),
    "2: after its own change a request goes on sharing": (
        Rules(alone=False),
        TWO,
        {**changes("w0", stores=True), **changes("w1")},
        "finds version 1 of 2 as ",
    ),
    "4: a mark is completed while its commit may yet come": (
        Rules(asks_owner=False),
        TWO,
        {**changes("w0"), **KILLED, **LATE, **BARE_FILL},
        "answers from the filter with version 0 of 1",
    ),
    "4: a new table knows nothing of what the lost one had marked": (
        Rules(begins_marked=False),
        TWO,
        {**changes("w0"), **KILLED, **LOST, **BARE_FILL},
        "answers from the filter with version 0 of 1",
    ),
    "what a login keeps has the number of its end": (
        Rules(late="issue"),
        TWO,
        {**changes("w0"), **ISSUE},
        "answers from the filter with version 0 of 1",
    ),
    "what is made of what is known has the number of its end": (
        Rules(late="first"),
        TWO,
        {**changes("w0"), **FILL, **FIRST},
        "answers from the filter with version 0 of 1",
    ),
    "a request begins with a number that was given while it read the slots": (
        Rules(from_one_moment=False),
        TWO,
        {**changes("w0"), **FILL, **HALTING},
        "finds version 0 of 1 as 'token'",
    ),
    "13: two versions number the slots of one table differently": (
        Rules(tables_apart=False),
        MIXED,
        {**changes("w0"), **BARE_FILL},
        "answers from the filter with version 0 of 1",
    ),
}


@pytest.mark.parametrize("hole", HOLES)
def test_holes_that_are_put_back_are_found(hole: str) -> None:
    rules, workers, programs, failure = HOLES[hole]
    found = explored(rules, workers, programs)
    print(f"{hole}: {found}")
    assert failure in found.failure, f"\n{found}"
    assert not explored(Rules(), workers, programs).failure


def test_an_abandoned_mark_that_nobody_completes_is_found() -> None:
    recover = Table.recover

    def only_the_first(table: Table, serials: set[int]) -> int:
        return recover(table, serials & {1})  # with which the table begins

    with mock.patch.object(Table, "recover", only_the_first):
        found = explored(Rules(), TWO, {**changes("w0"), **KILLED})
    assert found.failure == "nothing is fresh any more"
    assert [line.partition(" -> ")[0] for line in found.schedule] == [
        *("w0 change: mark", "kill: kill w0")
    ]


def test_a_slot_that_is_made_dirty_before_its_mark_counts_is_found() -> None:
    mark = Table.mark

    def late(table: Table, slots: tuple[int, ...], now: int, owner: str = "") -> int | None:
        for slot in slots:
            table._set(slot, DIRTY)
        return mark(table, slots, now, owner)

    with mock.patch.object(Table, "mark", late):
        assert not explored(Rules(), TWO, {**changes("w0"), **KILLED}).failure
        found = explored(Rules(), TWO, {**changes("w0"), **KILLED}, by_word=True)
    assert found.failure == "nothing is fresh any more"


def test_a_schedule_is_told_as_it_happened() -> None:
    """To the point, and as short as it can be."""
    rules, workers, programs, _ = next(x for hole, x in HOLES.items() if hole.startswith("13"))
    found = explored(rules, workers, programs)
    steps = [line.partition(" -> ")[0] for line in found.schedule]
    assert sorted(steps) == sorted(
        [
            "w1 fill: ask",
            "w1 fill: begin",
            "w1 fill: read",
            "w1 fill: keep (2, 2) 0",
            "w0 change: mark",
            "w0 change: send",
            "database for w0: commit w0 change",
        ]
    )
    assert f"after {len(steps)} steps" in str(found)
    assert "\n  1 w" in str(found)

"""All interleavings of a mirror of Redis with changes, marks and losses, within small bounds.

The mirror is the real one. Holes are put back one by one, and each is found. With a larger bound::

    KEYFRONT_MODEL=full pytest -s tests/unit/tokens/test_lease_model.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.middleware.tokens.epochs import MARK_SECONDS
from support.explorer import Explored, Program, explore
from support.lease_model import LEASE, Rules, after, change, fill, leases, poll, renew
from support.protocol_model import once

FULL = os.environ.get("KEYFRONT_MODEL") == "full"
LIMIT = 3_000_000 if FULL else 60_000

Programs = Mapping[str, Program]


def does(*steps: Any) -> Program:
    return partial(once, *steps)


CHANGE: Programs = {"node change": change, "database": does(("commit", "node change"))}
#: Filled, learnt and followed, in the order in which a service does; and followed once more.
SERVICE: Programs = {"service": partial(after, fill, poll, renew)}
FOLLOWS: Programs = {"service": partial(after, fill, poll, renew, poll)}
TIME: Programs = {"time": does(("pass", LEASE * 0.7), ("pass", LEASE * 0.7))}
LOST: Programs = {"loss": does(("lose",))}
#: It is lost, somebody begins another generation, and changes may be made in that.
ANEW: Programs = {
    "time": does(("lose",), ("ask",), ("pass", 2.0), ("recover",), ("pass", LEASE * 1.2)),
}  # fmt: skip
FILLS: Programs = {"service": fill}
#: The same, and somebody looks whether it may be used yet.
LOOKED: Programs = {"time": does(("lose",), ("ask",), ("pass", 2.0), ("recover",), ("recover",))}
KILLED: Programs = {"kill": does(("kill", "node"))}
LATE: Programs = {
    "time": does(("pass", LEASE * 1.1), ("pass", MARK_SECONDS + 1)), "other": does(("recover",)),
}  # fmt: skip

SMALL: dict[str, Programs] = {
    "a change, and a service that follows": {**CHANGE, **FOLLOWS, **TIME},
    "a change, and an answer is asked about": {**CHANGE, **SERVICE, "asks": renew},
    "the table is lost": {**CHANGE, **SERVICE, **ANEW},
    "a writer is killed": {**CHANGE, **FOLLOWS, **KILLED, "time": does(("pass", LEASE * 1.1))},
    "the table is lost, and its writer is killed": {**CHANGE, **FILLS, **LOOKED, **KILLED},
}
LARGE: dict[str, Programs] = {
    "a change, and two who poll": {**CHANGE, **FOLLOWS, "poller": poll, **TIME},
    "a change, a poll, and an answer is asked about": {
        **CHANGE, **SERVICE, "poller": poll, "asks": renew, **TIME,
    },
    "the table is lost, and a service that follows": {**CHANGE, **FOLLOWS, **ANEW},
    "the table is lost as time passes": {**CHANGE, **SERVICE, "poller": poll, **LOST, **TIME},
    "a writer is killed, and recovered late": {
        **CHANGE, **SERVICE, **KILLED, **LATE, "poller": poll,
    },
}  # fmt: skip
BOUNDS = {**SMALL, **(LARGE if FULL else {})}

# The schedules of one protocol are the same on every Python.
pytestmark = pytest.mark.once


def explored(rules: Rules, programs: Programs) -> Explored:
    with leases(rules) as world:
        return explore(world, programs, limit=LIMIT)


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_schedule_shows_longer_than_the_lease_what_was_replaced(bound: str) -> None:
    found = explored(Rules(), BOUNDS[bound])
    print(f"{bound}: {found}")
    assert not found.failure, f"\n{found}"
    assert found.states > 500


UNDER_LEASE = "the service shows version 0 of 1 under its lease"
HOLES: dict[str, tuple[Rules, Programs]] = {
    "a lease is read after its end": (Rules(ends=False), {**CHANGE, **SERVICE, **TIME}),
    "another generation is not seen": (
        Rules(sees_generations=False),
        {**CHANGE, **FOLLOWS, **ANEW},
    ),
    "a mark is not seen": (
        Rules(sees_marks=False),
        {**CHANGE, **FOLLOWS, **TIME},
    ),
    "it is taken to be complete up to when the answer came": (
        Rules(from_asking=False),
        {**CHANGE, **FOLLOWS, **TIME},
    ),
    "what was read before the last change is learnt after it": (
        Rules(learns_forward=False),
        {"service": partial(after, fill, poll, poll), "asks": renew, **CHANGE, **TIME},
    ),
    "a table that was begun anew is used when its time has come": (
        Rules(begins_marked=False),
        {**CHANGE, **FILLS, **LOOKED, **KILLED},
    ),
}  # fmt: skip
IN_REDIS = "version 0 of 1 is fresh in Redis"


@pytest.mark.parametrize("hole", HOLES)
def test_holes_that_are_put_back_are_found(hole: str) -> None:
    rules, programs = HOLES[hole]
    found = explored(rules, programs)
    print(f"{hole}: {found}")
    assert found.failure in (UNDER_LEASE, IN_REDIS), f"\n{found}"

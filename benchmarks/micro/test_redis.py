"""The coordinator in Redis: whether an answer still stands, and a change, by round trips."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

import redis

from keyfront.benchmarks.compare.token_hit import shared_folder
from keyfront.benchmarks.servers import redis as server
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import MissingPartError
from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.coordinator.factory import coordinator_of
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import ALL_SLOT, Coordinator, Slots

# As an answer of a user with a few roles has them.
SLOTS = Slots((ALL_SLOT, *range(100, 109)))
CHANGED = Slots((40_000, 40_001))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-micro-", dir=temporary_parent()) as folder:
        try:
            with server.redis(Path(folder)) as made:
                yield made
        except MissingPartError as error:
            pytest.skip(error.message)


@pytest.fixture
def ping(url: str) -> Iterator[Any]:
    """A round trip that asks nothing."""
    with redis.Redis.from_url(url) as client:
        yield client.ping


@contextmanager
def opened(url: str, consistency: str) -> Iterator[Coordinator]:
    """Use a table, which is asked at each check (``strict``), or under a ``lease``."""
    defaults = {option.dest: option.default for option in options.COORDINATOR}
    made = coordinator_of({**defaults, "coordinator": url, "consistency": consistency}, True)
    assert made is not None
    # So that the table is made and has settled.
    made.stamp(made.mark(CHANGED))
    yield made
    made.close()


def test_strict_check_against_a_ping(paired: Any, url: str, ping: Any) -> None:
    """It is one round trip, and 1.05 times a ping; with two it would be 2."""
    with opened(url, "strict") as table:
        epoch = table.now()
        assert table.fresh(epoch, SLOTS)
        paired(lambda: table.fresh(epoch, SLOTS), ping, limit=1.8)


def test_check_within_a_lease_against_shared_memory(paired: Any, url: str) -> None:
    """It is no round trip."""
    with opened(url, "lease") as table, shared_folder() as folder:
        local = SharedMemory(folder)
        epoch, now = table.now(), local.now()
        assert table.fresh(epoch, SLOTS)
        paired(lambda: table.fresh(epoch, SLOTS), lambda: local.fresh(now, SLOTS), limit=3)
        local.close()


@pytest.mark.parametrize("consistency", ["strict", "lease"])
def test_change_against_a_ping(paired: Any, url: str, ping: Any, consistency: str) -> None:
    """It is two round trips: a change is marked, then stamped; that is 2.9 to 3.3 times a ping."""
    with opened(url, consistency) as table:
        paired(lambda: table.stamp(table.mark(CHANGED)), ping, limit=5)

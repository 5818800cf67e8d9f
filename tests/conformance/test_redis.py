"""The Redis coordinator: the suite on a real server, asked each time and under a lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.register_assert_rewrite("conformance.coordinator")
pytest.importorskip("redis")

from conformance.coordinator import CoordinatorSuite, World  # noqa: E402
from keyfront.errors import CoordinatorError  # noqa: E402
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis  # noqa: E402
from keyfront.middleware.tokens.epochs import Epoch, Slots  # noqa: E402
from support.redis_epochs import KEY, SLOTS, TIMEOUT, RedisClock, address  # noqa: E402
from support.redis_servers import RedisServer, redis_server  # noqa: E402


class Deployment:
    """A Redis, and processes that share the table in it."""

    kind: type[Redis] = Redis
    lease: float | None = None

    def __init__(self, server: RedisServer, clock: RedisClock) -> None:
        self.server = server
        self._clock = clock
        self._attached: list[Redis] = []

    def attach(self, **options: Any) -> Redis:
        settings = {"slot_count": SLOTS, "timeout": TIMEOUT, "lease": self.lease, **options}
        made = self.kind(address(self.server.url), **settings)
        self._attached.append(made)
        return made

    def later(self, seconds: float) -> None:
        self._clock.later(seconds)

    def lose(self) -> None:
        assert self.server.client.delete(KEY) == 1

    def close(self) -> None:
        for coordinator in self._attached:
            coordinator.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def clock(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisClock:
    server.client.flushall()
    clock = RedisClock(server)
    clock.put_in_place(monkeypatch)
    return clock


class TestRedis(CoordinatorSuite):
    @pytest.fixture
    def world(self, server: RedisServer, clock: RedisClock) -> Iterator[World]:
        world = Deployment(server, clock)
        yield world
        world.close()


class Prompt(Redis):
    """Under a lease that was renewed just now, so that what it does not know it never will."""

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        with suppress(CoordinatorError):
            self._poll()
        return super().fresh(epoch, slots)


class LeaseDeployment(Deployment):
    kind = Prompt
    lease = 1.0


class TestRedisLease:
    """What must be so under a lease as well: all but that marks are seen before their stamps."""

    peers = CoordinatorSuite.peers

    @pytest.fixture
    def world(self, server: RedisServer, clock: RedisClock) -> Iterator[Any]:
        world = LeaseDeployment(server, clock)
        yield world
        world.close()


_AGREE = [
    "what_is_filled_after_the_last_change_is_fresh",
    "an_epoch_is_the_same_for_all",
    "a_stamp_ends_what_was_before_it_and_lets_in_what_is_after",
    "a_slow_fill_is_stale_however_late_it_is_stored",
    "stamp_after_stamp_renews",
    "a_mark_may_be_stamped_by_another_process",
    "a_touch_ends_what_was_before_it",
    "a_flush_ends_everything_once",
    "an_abandoned_mark_is_completed",
    "a_late_stamp_counts",
    "a_stamp_twice_does_no_harm",
    "the_sequence_never_goes_back",
    "nothing_of_a_lost_table_is_fresh_in_a_new_one",
    "every_table_has_a_generation_of_its_own",
    "a_change_during_which_the_table_is_lost_counts_in_the_new_one",
    "statistics_are_counts_by_name",
    "threads_of_several_processes",
]
for _name in _AGREE:
    setattr(TestRedisLease, f"test_{_name}", getattr(CoordinatorSuite, f"test_{_name}"))

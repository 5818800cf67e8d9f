"""The Redis coordinator under a lease: no round trip on a hit, and no change unseen for longer."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.common.poller import Poller
from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.coordinator.redis import coordinator as module
from keyfront.middleware.tokens.coordinator.redis import lease as redis_mirror
from keyfront.middleware.tokens.coordinator.redis import outages
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.coordinator.redis.scripts import CHANGES
from keyfront.middleware.tokens.epochs import ALL_SLOT, Slots, slots
from support.clocks import Clock
from support.fault_proxy import FaultProxy
from support.redis_epochs import KEY, SLOTS, TIMEOUT, RedisClock, address, hanging
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE

LEASE = 0.5
ENTRY = Slots((ALL_SLOT, 101))
OTHER = Slots((ALL_SLOT, 102))

Make = Callable[..., Redis]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, server: RedisServer) -> Clock:
    """That of the leases; it stands still unless it is told."""
    clock = Clock()
    monkeypatch.setattr(module, "time", RedisClock(server))
    monkeypatch.setattr(redis_mirror, "time", clock)
    monkeypatch.setattr(outages, "time", clock)
    return clock


@pytest.fixture
def make(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Redis] = []

    def one(port: int = 0, *, thread: bool = False, **options: Any) -> Redis:
        url = f"redis://127.0.0.1:{port or server.port}"
        made.append(Redis(address(url), **{"slot_count": SLOTS, "timeout": TIMEOUT, **options}))
        if not thread and made[-1]._poller is not None:
            made[-1]._poller.stop()
        return made[-1]

    yield one
    for coordinator in made:
        coordinator.close()


def change(coordinator: Redis, *numbers: int) -> None:
    coordinator.stamp(coordinator.mark(Slots(numbers or (101,))))


@pytest.fixture
def keystone(make: Make, clock: Clock) -> Redis:
    keystone = make()
    change(keystone)
    return keystone


def poll_clock(service: Redis, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the times of its questions go by the clock of the leases."""
    monkeypatch.setattr(module, "time", clock)


def test_a_hit_costs_no_round_trip(
    keystone: Redis, make: Make, proxy: FaultProxy, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make(proxy.port, create=False, lease=LEASE)
    poll_clock(service, clock, monkeypatch)
    epoch = keystone.now()
    assert service.fresh(epoch, ENTRY)
    asked = proxy.received("request")
    for _ in range(100):
        assert service.fresh(epoch, ENTRY)
    assert proxy.received("request") == asked
    assert service.fresh(epoch, OTHER)
    once = proxy.received("request")
    assert once > asked
    assert service.fresh(epoch, OTHER)
    assert proxy.received("request") == once


def test_a_change_is_seen_when_the_lease_has_ended(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make(create=False, lease=LEASE)
    epoch = keystone.now()
    keystone.mark(Slots((500,)))
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY) and service.fresh(epoch, OTHER)
    change(keystone)
    clock.later(LEASE)
    assert service.fresh(epoch, ENTRY)
    clock.later(0.001)
    assert not service.fresh(epoch, ENTRY)
    assert service.fresh(epoch, OTHER)
    assert service.fresh(keystone.now(), ENTRY)


@pytest.mark.parametrize("missed", [1, 15, 16, 17, 100])
def test_as_many_changes_as_were_missed_are_made_up_for(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, missed: int
) -> None:
    service = make(create=False, lease=LEASE)
    epoch = keystone.now()
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY) and service.fresh(epoch, OTHER)
    for number in range(missed):
        change(keystone, *((300,) if number < missed - 1 else (101,)))
    clock.later(LEASE + 0.001)
    assert not service.fresh(epoch, ENTRY)
    # It was not cleared for that.
    assert service._mirror is not None and service._mirror.verdict(epoch, OTHER) is True


def test_more_changes_than_are_kept(
    server: RedisServer,
    keystone: Redis,
    make: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make(create=False, lease=LEASE)
    epoch = keystone.now()
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY)
    change(keystone)
    for _ in range(CHANGES + 1):
        keystone.touch(Slots((300,)))
    fields = server.client.hkeys(KEY)
    assert sum(field[0] == "c" and field[1:].isdigit() for field in fields) == CHANGES
    clock.later(LEASE + 0.001)
    assert not service.fresh(epoch, ENTRY)
    assert service._mirror is not None and not service._mirror.is_behind()
    assert service.fresh(epoch, OTHER)


def test_what_a_change_holds_is_asked_of_redis(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a change holds dirty is asked of Redis until it is stamped."""
    service = make(create=False, lease=LEASE)
    mark = keystone.mark(Slots((101,)))
    epoch = keystone.now()
    poll_clock(service, clock, monkeypatch)
    assert not service.fresh(epoch, ENTRY)
    assert service.fresh(epoch, OTHER)
    keystone.stamp(mark)
    assert not service.fresh(epoch, ENTRY)
    assert service.fresh(keystone.now(), ENTRY)


def test_a_change_that_is_never_stamped_is_seen_when_the_lease_has_ended(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its response leaves all the same: Keystone could not reach Redis after the commit."""
    service = make(create=False, lease=LEASE)
    epoch = keystone.now()
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY) and service.fresh(epoch, OTHER)
    keystone.mark(Slots((101,)))
    keystone.close()
    clock.later(LEASE + 0.001)
    assert not service.fresh(epoch, ENTRY)
    assert service.fresh(epoch, OTHER)
    for _ in range(3):
        clock.later(LEASE + 0.001)
        assert not service.fresh(epoch, ENTRY)


def test_services_are_told_nothing_that_stands_by_a_lease_alone(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They may be promised more than clients of this node."""
    pytest.importorskip("sqlalchemy")
    from support.token_worlds import World

    world = World(tmp_path)
    node = make(lease=LEASE, folder=tmp_path)
    poll_clock(node, clock, monkeypatch)
    worker = world.worker(node)
    asked = {tags_header.ENVIRON_KEY: tags_header.ASK}
    for _ in range(2):
        assert world.get(by=worker)[0] == world.get(by=worker, **asked)[0] == "200 OK"
    assert world.keystone.asked == 1
    del world.keystone.known["t"]
    world.keystone.garbage.add("t")
    change(keystone, *slots(["user:user-t"], SLOTS))
    assert world.get(by=worker)[0] == "200 OK"
    assert world.get(by=worker, **asked)[0] == "404 NOT FOUND"


def test_a_restart_ends_what_the_mirror_knows(
    server: RedisServer,
    keystone: Redis,
    make: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make(create=False, lease=LEASE)
    epoch = keystone.now()
    server.client.save()
    change(keystone, 300)
    settled = module.time
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY)
    server.restart()
    clock.later(LEASE + 0.001)
    assert not service.fresh(epoch, ENTRY)
    monkeypatch.setattr(module, "time", settled)
    change(keystone)
    poll_clock(service, clock, monkeypatch)
    assert not service.fresh(epoch, ENTRY)
    assert service.fresh(keystone.now(), ENTRY)


def test_redis_is_lost_when_the_lease_has_ended(
    server: RedisServer,
    keystone: Redis,
    make: Make,
    proxy: FaultProxy,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make(proxy.port, create=False, lease=LEASE)
    epoch = keystone.now()
    poll_clock(service, clock, monkeypatch)
    assert service.fresh(epoch, ENTRY)
    with hanging(server, service):
        assert service.fresh(epoch, ENTRY)
        clock.later(LEASE + 0.001)
        assert not service.fresh(epoch, ENTRY)
        proxy.wait_for_connections(0)  # and has counted what came by them
        asked = proxy.received("request")
        for _ in range(50):
            assert not service.fresh(epoch, ENTRY)
        assert proxy.received("request") == asked
    clock.later(outages.RETRY_SECONDS)
    assert service.fresh(epoch, ENTRY)


def test_the_thread_keeps_the_mirror_up_to_date(
    server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    RedisClock(server).put_in_place(monkeypatch)
    keystone = make()
    change(keystone)
    service = make(create=False, lease=0.1, thread=True)
    epoch = keystone.now()
    assert service.fresh(epoch, ENTRY)
    mirror = service._mirror
    assert mirror is not None
    change(keystone)
    number = keystone.now().sequence
    server.wait(lambda client: mirror.position[1] == number)


def test_a_child_has_a_mirror_and_connections_of_its_own(
    server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    RedisClock(server).put_in_place(monkeypatch)
    keystone = make()
    change(keystone)
    service = make(create=False, lease=1.0, thread=True)
    epoch = keystone.now()
    assert service.fresh(epoch, ENTRY)
    before = len(server.client.client_list(_type="normal"))
    ready, over = os.pipe(), os.pipe()
    # As if a thread of the parent were at it just now.
    assert service._mirror is not None
    with service._mirror._lock, service._contact._paying, service._contact._outage._lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                service._mirror._table.horizon = float("-inf")
                assert service.fresh(epoch, ENTRY)
                assert service._poller is not None
                assert service._poller._thread is not None
                assert service._poller._thread.is_alive()
                assert strict_and_lease(keystone, service)
                os.write(ready[1], b".")
                select.select([over[0]], [], [], PATIENCE)
                status = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:
                os._exit(status)
    try:
        if not select.select([ready[0]], [], [], PATIENCE)[0]:
            os.kill(pid, signal.SIGKILL)
        assert len(server.client.client_list(_type="normal")) > before
    finally:
        os.write(over[1], b".")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for end in (*ready, *over):
            os.close(end)
    assert status == 0
    assert keystone.fresh(keystone.now(), OTHER)
    assert service.fresh(keystone.now(), OTHER)


def strict_and_lease(keystone: Redis, service: Redis) -> bool:
    change(keystone, 400)
    return keystone.fresh(keystone.now(), OTHER) and service.fresh(keystone.now(), OTHER)


def test_where_no_thread_may_run(
    keystone: Redis, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    service = make(create=False, lease=LEASE, thread=True)
    poll_clock(service, clock, monkeypatch)
    epoch = keystone.now()
    for _ in range(3):
        assert service.fresh(epoch, ENTRY)
        clock.later(LEASE + 0.001)
    assert isinstance(service._poller, Poller) and service._poller._thread is None

"""Sentinels: a failover that loses a change, an old master that comes back, no majority."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.redis import connections, outages
from keyfront.middleware.tokens.coordinator.redis import sentinels as redis_sentinels
from keyfront.middleware.tokens.coordinator.redis.connections import REST_SECONDS
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.epochs import ALL_SLOT, Slots
from support.clocks import Clock
from support.fault_proxy import FaultProxy
from support.redis_epochs import SLOTS, TIMEOUT, RedisClock, address, head
from support.redis_servers import RedisServer, fail_over, redis_server, sentinels
from support.served import PATIENCE

ENTRY = Slots((ALL_SLOT, 101))
CHANGED = Slots((101,))


class Deployment:
    """A master, a replica, and three sentinels that know them."""

    def __init__(self, master: RedisServer, replica: RedisServer, watchers: list[RedisServer]):
        self.master = master
        self.replica = replica
        self.sentinels = watchers
        self._made: list[Redis] = []

    def url(self, count: int = 3) -> str:
        return "redis://" + ",".join(one.address for one in self.sentinels[:count])

    def attach(self, count: int = 3, **options: Any) -> Redis:
        where = address(self.url(count), coordinator_sentinel_master="keyfront")
        self._made.append(Redis(where, **{"slot_count": SLOTS, "timeout": TIMEOUT, **options}))
        return self._made[-1]

    def close(self) -> None:
        for coordinator in self._made:
            coordinator.close()


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with deploy() as deployment:
        yield deployment


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    """For tests after which the master is who it was."""
    with deploy() as deployment:
        yield deployment


@contextmanager
def deploy() -> Iterator[Deployment]:
    with ExitStack() as stack:
        master = stack.enter_context(redis_server())
        replica = stack.enter_context(redis_server(replica_of=master))
        watchers = stack.enter_context(sentinels(master))
        made = Deployment(master, replica, watchers)
        stack.callback(made.close)
        yield made


def retry(coordinator: Redis) -> None:
    """Have a coordinator that lost Redis try again at once."""
    coordinator._contact._outage._next = 0.0


def believe(coordinator: Redis, server: RedisServer) -> None:
    """Have it think that the sentinels have just named a server."""
    masters = coordinator._contact._masters
    masters._found = time.monotonic(), ("127.0.0.1", server.port)  # type: ignore[union-attr]


def forget_master(coordinator: Redis) -> None:
    """Have it ask the sentinels again: with a lease it trusts their last word for some time, in
    which no change can begin at a new master."""
    coordinator._contact._masters._found = None  # type: ignore[union-attr]


def change(coordinator: Redis) -> None:
    coordinator.stamp(coordinator.mark(CHANGED))


def test_an_old_master_is_not_believed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still while another took its place, and calls itself master when it goes on.

    The other did not hear of the last change.
    """
    old, new = deployment.master, deployment.replica
    keystone, service = deployment.attach(), deployment.attach(create=False)
    lease = deployment.attach(create=False, lease=0.1)
    writer = deployment.attach()
    clock = RedisClock(old)
    clock.put_in_place(monkeypatch)
    # When it is back, sentinels would make it a replica after some seconds.
    old.client.execute_command("ACL", "SETUSER", "default", "-slaveof", "-replicaof")
    change(keystone)
    mark = writer.mark(Slots((300,)))
    filled = service.now()
    assert service.fresh(filled, ENTRY) and lease.fresh(filled, ENTRY)
    assert old.client.wait(1, round(PATIENCE * 1000)) == 1
    new.client.save()
    new.kill()  # it does not hear of the next change
    change(keystone)
    assert not service.fresh(filled, ENTRY)
    read = service.now()
    old.stop()
    new.start()
    fail_over(deployment.sentinels, new)
    assert int(head(new.client)["sequence"]) == filled.sequence < read.sequence
    clock.server = new
    forget_master(lease)
    old.resume()
    assert old.client.info("replication")["role"] == "master"
    for one in (keystone, service, lease):
        for _ in range(3):
            retry(one)
            assert not one.fresh(filled, ENTRY)
            assert not one.fresh(read, ENTRY)
    retry(keystone)
    change(keystone)
    assert keystone.now().generation != filled.generation
    retry(service)
    assert not service.fresh(filled, ENTRY)
    read = service.now()
    assert service.fresh(read, ENTRY)
    # What is owed is not paid to it either, by one who thinks that it was named just now.
    writer._contact._owed.append(mark)
    believe(writer, old)
    writer.now()
    assert not service.fresh(read, ENTRY)
    assert old.client.info("replication")["role"] == "master"  # nor is it yet told otherwise


def test_a_stamp_on_a_master_that_is_none_any_more(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done anew where the sentinels are, as what was read there since must not stand."""
    first, second = deployment.attach(), deployment.attach()
    clock = RedisClock(deployment.master)
    clock.put_in_place(monkeypatch)
    change(first)
    mark = first.mark(CHANGED)
    fail_over(deployment.sentinels, deployment.replica)
    clock.server = deployment.replica
    retry(second)
    read = second.now()
    assert read.generation != mark.generation
    # As if the old one had been named just now: the stamp itself must find out.
    believe(first, deployment.master)
    first.stamp(mark)
    assert not second.fresh(read, ENTRY)
    change(second)
    assert second.fresh(second.now(), ENTRY)


def test_a_minority_is_not_believed(shared: Deployment) -> None:
    keystone = shared.attach()
    epoch = keystone.now()
    shared.sentinels[0].kill()
    keystone._contact._masters._found = None  # type: ignore[union-attr]
    assert keystone.now() == epoch
    shared.sentinels[1].kill()
    keystone._contact._masters._found = None  # type: ignore[union-attr]
    assert not keystone.fresh(epoch, ENTRY)
    retry(keystone)
    with pytest.raises(CoordinatorError, match="too few sentinels answer"):
        keystone.now()
    shared.sentinels[0].start()
    shared.sentinels[1].start()
    retry(keystone)
    assert keystone.now() == epoch


@pytest.fixture
def reached(shared: Deployment) -> Iterator[tuple[Redis, list[FaultProxy]]]:
    """A coordinator with connections to all sentinels, by proxies."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(one.port)) for one in shared.sentinels]
        url = "redis://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        where = address(url, coordinator_sentinel_master="keyfront")
        coordinator = Redis(where, slot_count=SLOTS, timeout=TIMEOUT)
        stack.callback(coordinator.close)
        masters: Any = coordinator._contact._masters
        for one in where.hosts:  # two others are asked, which is most of them
            masters._found, masters._failed = None, {one: 1.0}
            coordinator.now()
        assert len(masters._connections) == 3
        yield coordinator, proxies


@pytest.mark.parametrize("gone", ["reset", "forgotten", "reset in rest", "forgotten in rest"])
def test_connections_to_sentinels_that_are_gone_are_made_anew(
    reached: tuple[Redis, list[FaultProxy]], monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """All of them at once, as by a firewall: no outage comes of it."""
    keystone, proxies = reached
    clock = Clock(runs=True)
    for module in (redis_sentinels, connections):
        monkeypatch.setattr(module, "time", clock)
    masters: Any = keystone._contact._masters
    masters._found = None
    masters._connections = {
        one: (connection, clock.monotonic())
        for one, (connection, _) in masters._connections.items()
    }
    epoch = keystone.now()
    assert len(masters._connections) == 3
    for proxy in proxies:
        proxy.reset() if gone.startswith("reset") else proxy.half_open()
    for connection, _ in masters._connections.values():
        connection._sock.settimeout(0.2)
    masters._found = None
    with monkeypatch.context() as patch:
        if gone.endswith("rest"):
            clock.later(2.0 if gone.startswith("reset") else REST_SECONDS + 1)
            patch.setattr(masters, "_forget_all", lambda: pytest.fail("a dead one was asked"))
        assert keystone.now() == epoch
    assert keystone.losses == 0


@pytest.mark.parametrize("hang", [1, 2])
def test_a_sentinel_that_hangs_is_asked_last(
    reached: tuple[Redis, list[FaultProxy]], hang: int
) -> None:
    """Once it has not answered, until it is needed and does."""
    keystone, proxies = reached
    masters: Any = keystone._contact._masters
    masters._failed.clear()
    epoch = keystone.now()
    first = "127.0.0.1", proxies[0].port
    masters._connections[first][0]._sock.settimeout(0.2)
    if hang == 2:
        masters._timeout, masters._patience = 0.2, 0.4
    for proxy in proxies[:hang]:
        proxy.stall()
    for number in range(3):
        masters._found = None
        retry(keystone)
        if hang == 1:
            assert keystone.now() == epoch
            assert masters._failed.keys() == {first}
        else:
            with pytest.raises(CoordinatorError, match="too few sentinels answer"):
                keystone.now()
        if number == 0:
            accepted = proxies[0].accepted
    assert keystone.losses == hang - 1
    if hang == 1:
        assert proxies[0].accepted == accepted
    for proxy in proxies:
        proxy.forward()
    masters._timeout = masters._patience = TIMEOUT
    masters._found = None
    retry(keystone)
    assert keystone.now() == epoch


def test_all_sentinels_must_be_named(shared: Deployment) -> None:
    keystone = shared.attach(count=1)
    with pytest.raises(CoordinatorError, match="there are 3 sentinels, coordinator names only 1"):
        keystone.now()


def test_a_name_that_they_do_not_know(shared: Deployment) -> None:
    where = address(shared.url(), coordinator_sentinel_master="other")
    keystone = Redis(where)
    with pytest.raises(CoordinatorError, match="other"):
        keystone.now()
    keystone.close()


def test_they_are_asked_again_when_trust_has_ended(
    shared: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(redis_sentinels, "time", clock)
    monkeypatch.setattr(outages, "time", Clock())
    keystone = shared.attach()
    epoch = keystone.now()
    asked = []
    monkeypatch.setattr(
        keystone._contact._masters, "_ask", lambda deadline: asked.append(1) or ("127.0.0.1", 1)
    )
    keystone.fresh(epoch, ENTRY)
    assert not asked
    clock.later(redis_sentinels.TRUST_SECONDS + 0.01)
    assert not keystone.fresh(epoch, ENTRY)
    assert asked

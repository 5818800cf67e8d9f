"""What the Redis coordinator does when Redis is lost, comes back older, refuses or talks nonsense.

docs/cluster.md lists these failures; each row of its table names the test here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

import redis

from keyfront.benchmarks.compare.token_hit import call
from keyfront.benchmarks.compare.token_stand_in import Answers, request
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.cache import TokenCache
from keyfront.middleware.tokens.coordinator.mark_owners import begins
from keyfront.middleware.tokens.coordinator.redis import connections, outages
from keyfront.middleware.tokens.coordinator.redis import coordinator as module
from keyfront.middleware.tokens.coordinator.redis.connections import REST_SECONDS, Link
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.coordinator.redis.outages import (
    RETRY_SECONDS,
    SETTLE_SECONDS,
    UNTOLD,
)
from keyfront.middleware.tokens.epochs import ALL_SLOT, MARK_SECONDS, Slots
from keyfront.middleware.tokens.invalidation.change_log import Changes, coordinators
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.routes import Routes
from support.clocks import Clock
from support.fault_proxy import FaultProxy
from support.redis_epochs import (
    KEY,
    SLOTS,
    TIMEOUT,
    RedisClock,
    address,
    hanging,
    head,
    set_head,
)
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE, wait_for

Make = Callable[..., Redis]
# In which all tables are named.
REGISTER = "keyfront:digests"


def some(*numbers: int) -> Slots:
    return Slots(100 + number for number in numbers)


def entry(*numbers: int) -> Slots:
    return Slots((ALL_SLOT, *some(*numbers)))


def change(coordinator: Redis, *numbers: int) -> None:
    coordinator.stamp(coordinator.mark(some(*numbers)))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def clock(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisClock:
    """Nobody waits until a new table has settled."""
    clock = RedisClock(server)
    clock.put_in_place(monkeypatch)
    return clock


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A Redis that is lost is tried again when the test says so."""
    clock = Clock()
    monkeypatch.setattr(outages, "time", clock)
    return clock


@pytest.fixture
def make(server: RedisServer, clock: RedisClock, retries: Clock) -> Iterator[Make]:
    made: list[Redis] = []

    def one(port: int = 0, *, threads: bool = False, **options: Any) -> Redis:
        """Make one; without ``threads`` only what the test does asks Redis, and whoever is first
        to look for a Redis that was lost is the test, too."""
        url = f"redis://127.0.0.1:{port or server.port}"
        made.append(Redis(address(url), **{"slot_count": SLOTS, "timeout": TIMEOUT, **options}))
        if not threads:
            for poller in filter(None, (made[-1]._poller, made[-1]._contact._payer)):
                poller.stop()
        return made[-1]

    yield one
    for coordinator in made:
        coordinator.close()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


# Back, and not what it was


@pytest.mark.parametrize("saved", ["nothing", "older numbers"])
def test_killed_and_started_again(server: RedisServer, make: Make, saved: str) -> None:
    keystone, service = make(), make(create=False)
    change(keystone, 1)
    filled = service.now()
    if saved != "nothing":
        server.client.save()
    change(keystone, 1)
    assert not service.fresh(filled, entry(1))
    server.restart()
    assert server.client.exists(KEY) == (saved != "nothing")
    # Loaded from before the second change, the numbers would say that it stands.
    for _ in range(3):
        assert not service.fresh(filled, entry(1))
    with pytest.raises(CoordinatorError, match="no Keystone has begun"):
        service.now()
    change(keystone, 2)
    assert service.now().generation == keystone.now().generation != filled.generation
    assert not service.fresh(filled, entry(1))
    assert service.fresh(service.now(), entry(1))


def test_killed_and_started_again_amid_a_change(server: RedisServer, make: Make) -> None:
    """What is read before the commit, in the new table, must not stand after it."""
    first, second = make(), make()
    mark = first.mark(some(1))
    server.restart()
    read = second.now()
    assert read.generation != mark.generation
    assert not second.fresh(read, entry(1))  # not before it has settled
    first.stamp(mark)
    assert not second.fresh(read, entry(1))
    assert second.fresh(second.now(), entry(1))


def test_a_writer_that_dies_as_redis_does(
    server: RedisServer, make: Make, clock: RedisClock
) -> None:
    """Its mark went with the table, and nobody will stamp it."""
    first, second = make(), make()
    first.mark(some(1))
    server.restart()
    read = second.now()
    # Here it commits, and dies.
    clock.later(5)
    second.recover()
    assert not second.fresh(read, entry(1))
    assert second.fresh(second.now(), entry(1))


@pytest.mark.parametrize("how", ["flush", "eviction", KEY, REGISTER])
def test_flushed_or_evicted(server: RedisServer, make: Make, how: str) -> None:
    """All of it, or each key alone."""
    keystone, service = make(), make(create=False)
    lease = make(create=False, lease=0.1, threads=True)
    change(keystone, 1)
    filled = service.now()
    assert service.fresh(filled, entry(1)) and lease.fresh(filled, entry(1))
    if how == "flush":
        server.client.flushall()
    elif how == "eviction":
        server.client.config_set("maxmemory-policy", "allkeys-random")
        server.client.config_set("maxmemory", 1)
        server.client.info()
        while server.client.exists(KEY):
            server.client.config_set("maxmemory", 1)
        server.client.config_set("maxmemory", 0)
    else:
        assert server.client.delete(how) == 1
    assert not service.fresh(filled, entry(1))
    assert not keystone.fresh(filled, entry(1))
    wait_for(lambda: not lease.fresh(filled, entry(1)), "the lease has ended")
    change(keystone, 2)
    assert server.client.exists(KEY, REGISTER) == 2
    assert not service.fresh(filled, entry(1))
    assert service.fresh(service.now(), entry(1))


@pytest.mark.parametrize("again", [False, True])
def test_two_versions_when_the_list_of_their_tables_is_lost(
    server: RedisServer, make: Make, clock: RedisClock, again: bool
) -> None:
    """Neither finds the other's table any more, so none counts that is not in the list."""
    old, new = make(digest="0123456789ab"), make()
    service = make(create=False, digest="0123456789ab")
    change(new, 1)
    change(old, 1)
    change(new, 2)
    old.now()
    clock.later(SETTLE_SECONDS)
    old.recover()
    filled = old.now()
    assert service.fresh(filled, entry(1)) and old.fresh(filled, entry(1))
    assert server.client.delete(REGISTER) == 1
    if again:
        assert not new.fresh(new.now(), entry(1))  # it is named again, the other is not
    change(new, 1)
    assert not service.fresh(filled, entry(1))
    assert not old.fresh(filled, entry(1))
    assert old.now().generation != filled.generation
    change(old, 3)
    assert service.fresh(service.now(), entry(1))


def test_a_mark_that_is_completed_ends_other_versions(
    server: RedisServer, make: Make, clock: RedisClock
) -> None:
    """What they read before its commit became visible, long after its writer's death."""
    old, new = make(digest="0123456789ab"), make()
    new.mark(some(1))
    old.now()
    clock.later(SETTLE_SECONDS)
    old.recover()
    filled = old.now()
    assert old.fresh(filled, entry(1))
    clock.later(MARK_SECONDS)
    assert new.recover() == 1
    assert not old.fresh(filled, entry(1))


def test_what_another_version_took_away_is_begun_when_its_commit_is_over(
    server: RedisServer, make: Make, clock: RedisClock
) -> None:
    """However long that goes on, and whoever has died in it."""
    old, new = make(digest="0123456789ab"), make()
    service = make(create=False, digest="0123456789ab")
    over = threading.Event()
    ages: list[float] = []

    def settled(owner: str, age: float) -> bool:
        if not begins(owner):
            return True
        ages.append(age)
        return over.is_set()

    old.settled = settled
    new.mark(some(1))
    filled = old.now()
    for seconds in (SETTLE_SECONDS, MARK_SECONDS, 3600):
        clock.later(seconds)
        assert old.recover() == 0
        for one in (old, service):
            assert not one.fresh(filled, entry(1))
            assert not one.fresh(one.now(), entry(1))
    # Who wrote before then is asked of since the wait was over, by no clock but one's own.
    assert ages[0] == 0.0
    assert ages == sorted(ages) and len(set(ages)) > 1
    over.set()
    old.recover()
    for one in (old, service):
        assert not one.fresh(filled, entry(1))
        assert one.fresh(one.now(), entry(1))
    assert old.statistics()["changes_recovered"] == 0


def test_what_was_settled_in_another_generation_settles_nothing(
    server: RedisServer, make: Make, clock: RedisClock
) -> None:
    """Its first mark has the same number as that of the next one."""
    one, other = make(), make()
    one.settled = lambda owner, age: False
    change(other, 1)
    generation = one.now().generation
    server.client.flushall()
    later = one.now()
    clock.later(SETTLE_SECONDS)
    one._run("recover", "0", f"{generation:x}")
    assert not one.fresh(one.now(), entry(1))
    one._run("recover", "0", f"{later.generation:x}")
    assert one.fresh(one.now(), entry(1))


def test_many_make_a_new_table_at_once(server: RedisServer, make: Make) -> None:
    coordinators = [make() for _ in range(8)]
    for _ in range(5):
        server.client.flushall()
        start, found = threading.Barrier(8), []

        def look(one: Redis, start: threading.Barrier = start, found: list[Any] = found) -> None:
            start.wait()
            found.append(one.now())

        threads = [threading.Thread(target=look, args=(one,)) for one in coordinators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len(set(found)) == 1


def test_a_damaged_table_is_made_anew(server: RedisServer, make: Make) -> None:
    keystone = make()
    change(keystone, 1)
    damages: list[Callable[[], object]] = [
        lambda: server.client.hset(KEY, "100", "junk"),
        lambda: server.client.hset(KEY, "head", ""),
        lambda: server.client.hset(KEY, "head", "one two"),
        lambda: server.client.hdel(KEY, "head"),
        *(
            partial(set_head, server.client, **{word: value})
            for word, value in (
                *(("generation", ""), ("generation", "zz"), ("sequence", "x"), ("slots", "")),
                *(("change", ""), ("life", "elsewhere:1")),
            )
        ),
    ]
    for damage in damages:
        filled = keystone.now()
        damage()
        assert not keystone.fresh(filled, entry(0)) or damage is damages[0]
        server.client.hdel(KEY, "head")
        assert keystone.now().generation != filled.generation
        change(keystone, 1)


def test_a_key_of_somebody_else_is_left_alone(server: RedisServer, make: Make) -> None:
    server.client.set(KEY, "mine")
    keystone = make()
    with pytest.raises(CoordinatorError, match="WRONGTYPE"):
        keystone.mark(some(1))
    assert server.client.get(KEY) == "mine"


# Made a replica, and master again, by hand: no connection is closed


def test_demoted_and_promoted(server: RedisServer, make: Make, retries: Clock) -> None:
    """As a replica it loads what the new master has, from before the last change."""
    keystone, service = make(), make(create=False)
    change(keystone, 1)
    with redis_server(replica_of=server) as other:
        change(keystone, 3)  # a server that gets a replica begins a new life
        assert server.client.wait(1, round(PATIENCE * 1000)) == 1
        filled = service.now()
        other.client.replicaof("no", "one")
        change(keystone, 1)
        assert service.fresh(service.now(), entry(1))
        assert not service.fresh(filled, entry(1))
        server.client.replicaof("127.0.0.1", other.port)
        server.wait(lambda client: client.info("replication")["master_link_status"] == "up")
        run = server.client.info("server")["run_id"]
        assert head(server.client)["life"].startswith(run)
        assert not service.fresh(filled, entry(1))
        with pytest.raises(CoordinatorError, match=r"replica|READONLY"):
            keystone.mark(some(1))
        server.client.replicaof("no", "one")
        retries.later(RETRY_SECONDS)
        assert not service.fresh(filled, entry(1))
        change(keystone, 2)
        assert not service.fresh(filled, entry(1))
        assert service.fresh(service.now(), entry(1))


# Away


def test_a_paused_redis_is_waited_for_once(
    server: RedisServer,
    make: Make,
    proxy: FaultProxy,
    retries: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    keystone = make(proxy.port)
    change(keystone, 1)
    filled = keystone.now()
    with hanging(server, keystone):
        assert not keystone.fresh(filled, entry(1))
        proxy.wait_for_connections(0)  # and has counted what came by them
        asked, connected = proxy.received("request"), proxy.accepted
        for _ in range(100):
            assert not keystone.fresh(filled, entry(1))
            with pytest.raises(CoordinatorError):
                keystone.now()
            with pytest.raises(CoordinatorError):
                keystone.mark(some(1))
        assert (proxy.received("request"), proxy.accepted) == (asked, connected)
        for number in (1, 2):
            retries.later(RETRY_SECONDS)
            assert not keystone.fresh(filled, entry(1))
            assert not keystone.fresh(filled, entry(1))
            proxy.wait_for_accepted(connected + number)
            assert proxy.accepted == connected + number
    retries.later(RETRY_SECONDS)
    assert keystone.fresh(filled, entry(1))
    assert keystone.losses == 1
    lost, back = [record.getMessage() for record in caplog.records if "redis://" in record.message]
    assert "until it is back, Keystone is asked and changes are refused" in lost
    assert "back after" in back


def test_a_server_that_is_gone(server: RedisServer, make: Make, retries: Clock) -> None:
    keystone = make()
    change(keystone, 1)
    filled = keystone.now()
    server.kill()
    assert not keystone.fresh(filled, entry(1))
    with pytest.raises(CoordinatorError):
        keystone.mark(some(1))
    server.start()
    assert not keystone.fresh(filled, entry(1))
    retries.later(RETRY_SECONDS)
    change(keystone, 1)
    assert keystone.fresh(keystone.now(), entry(1))


def test_a_connection_that_was_cut_is_made_anew(make: Make, proxy: FaultProxy) -> None:
    keystone = make(proxy.port)
    change(keystone, 1)
    for deed in (lambda: keystone.fresh(keystone.now(), entry(1)), lambda: change(keystone, 2)):
        proxy.reset()
        proxy.wait_for_connections(0)
        assert deed() is not False
    assert keystone.losses == 0


def shorten(coordinator: Redis, seconds: float) -> None:
    """Have it wait for so long by the connections that it has."""
    for link in coordinator._contact._server._idle:
        link._connection._sock.settimeout(seconds)


def asks_no_dead_one(coordinator: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it fail where it asks by a connection that does not answer."""

    def fail(*_: Any) -> bool:
        pytest.fail("a dead connection was asked")

    monkeypatch.setattr(coordinator._contact, "_tries_again", fail)


@pytest.mark.parametrize("rested", [REST_SECONDS + 1, 0.0])
@pytest.mark.parametrize("deed", ["fresh", "now", "change", "lease"])
def test_a_connection_that_a_firewall_forgot_is_made_anew(
    make: Make,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    deed: str,
    rested: float,
) -> None:
    """Nobody says that it is gone: one that rested is not used, and one that did not is tried."""
    clock = Clock(runs=True)
    monkeypatch.setattr(connections, "time", clock)
    keystone = make(proxy.port, lease=1.0 if deed == "lease" else None)
    change(keystone, 1)
    filled = keystone.now()
    accepted = proxy.accepted
    proxy.half_open()
    clock.later(rested)
    shorten(keystone, 0.2)
    if rested:
        asks_no_dead_one(keystone, monkeypatch)
    if deed == "change":
        change(keystone, 2)
    else:
        assert keystone.now() == filled if deed == "now" else keystone.fresh(filled, entry(1))
    assert keystone.losses == 0
    assert proxy.accepted == accepted + 1


def test_a_connection_that_was_closed_as_it_rested_is_not_asked(
    make: Make, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a change is marked once."""
    clock = Clock(runs=True)
    monkeypatch.setattr(connections, "time", clock)
    keystone = make(proxy.port)
    change(keystone, 1)
    before = keystone.statistics()["changes"]
    for _ in range(2):
        proxy.reset()
        proxy.wait_for_connections(0)
        clock.later(2.0)
        asks_no_dead_one(keystone, monkeypatch)
        change(keystone, 1)
    assert keystone.statistics()["changes"] == before + 2
    assert keystone.losses == 0


def test_a_question_is_asked_anew_once(
    make: Make, proxy: FaultProxy, retries: Clock
) -> None:
    """Where a new connection is not answered either, Redis is lost."""
    keystone = make(proxy.port)
    change(keystone, 1)
    filled = keystone.now()
    accepted = proxy.accepted
    proxy.stall()
    keystone._contact._server._timeout = 0.2
    shorten(keystone, 0.2)
    assert not keystone.fresh(filled, entry(1))
    assert keystone.losses == 1
    proxy.wait_for_accepted(accepted + 1)
    assert proxy.accepted == accepted + 1
    proxy.forward()
    keystone._contact._server._timeout = TIMEOUT
    retries.later(RETRY_SECONDS)
    assert keystone.fresh(filled, entry(1))


def test_a_mark_whose_answer_is_lost_is_refused_and_stays(
    server: RedisServer, make: Make, proxy: FaultProxy, clock: RedisClock, retries: Clock
) -> None:
    keystone, other = make(proxy.port), make()
    change(keystone, 1)
    filled = other.now()
    proxy.reset_after(0)
    with pytest.raises(CoordinatorError):
        keystone.mark(some(1))
    assert other.statistics()["changes_under_way"] == 1
    assert not other.fresh(filled, entry(1))
    assert other.fresh(filled, entry(2))
    clock.later(MARK_SECONDS + 1)
    assert other.recover() == 1
    assert not other.fresh(filled, entry(1))
    assert other.fresh(other.now(), entry(1))
    proxy.forward()
    retries.later(RETRY_SECONDS)
    change(keystone, 1)


@pytest.mark.parametrize("ran", [True, False])
def test_a_stamp_that_is_not_answered_is_made_up_for(
    server: RedisServer, make: Make, proxy: FaultProxy, retries: Clock, ran: bool
) -> None:
    keystone, other = make(proxy.port), make()
    change(keystone, 1)
    filled = other.now()
    mark = keystone.mark(some(1))
    proxy.reset_after(0) if ran else proxy.cut()
    with pytest.raises(CoordinatorError):
        keystone.stamp(mark)
    assert not other.fresh(filled, entry(1))
    assert other.fresh(other.now(), entry(1)) == ran
    proxy.forward()
    read = other.now()
    retries.later(RETRY_SECONDS)
    keystone.now()
    assert not other.fresh(read, entry(1))
    assert other.fresh(other.now(), entry(1))
    assert other.statistics()["changes_under_way"] == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"$5\r\nhello\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
    ],
)
def test_answers_that_are_none(
    make: Make, proxy: FaultProxy, retries: Clock, nonsense: bytes
) -> None:
    keystone, lease = make(proxy.port), make(proxy.port, lease=1.0)
    change(keystone, 1)
    filled = keystone.now()
    assert lease.fresh(filled, entry(1))
    lease._mirror.clear()  # type: ignore[union-attr]
    proxy.garbage(nonsense * 2, close=True)
    for one in (keystone, lease):
        assert not one.fresh(filled, entry(1))
        retries.later(RETRY_SECONDS)
        with pytest.raises(CoordinatorError):
            one.mark(some(1))
        retries.later(RETRY_SECONDS)
        with pytest.raises(CoordinatorError):
            one.snapshot()
    proxy.forward()
    retries.later(RETRY_SECONDS)
    for one in (keystone, lease):
        assert one.fresh(filled, entry(1))


def test_no_memory_left(server: RedisServer, make: Make) -> None:
    """A change is refused whole; what is read goes on."""
    keystone = make()
    change(keystone, 1)
    mark = keystone.mark(some(2))
    filled = keystone.now()
    server.client.config_set("maxmemory", 1)
    before = server.client.hgetall(KEY)
    with pytest.raises(CoordinatorError, match="maxmemory"):
        keystone.mark(some(1))
    with pytest.raises(CoordinatorError, match="maxmemory"):
        keystone.stamp(mark)
    assert server.client.hgetall(KEY) == before
    server.client.config_set("maxmemory", 0)
    assert keystone.fresh(filled, entry(1))
    # Paid as soon as it could be.
    assert keystone.statistics()["changes_under_way"] == 0
    assert not keystone.fresh(filled, entry(2))
    assert keystone.losses == 0


# Changes without Redis, by option


@pytest.mark.parametrize("how", ["stopped", "restarted"])
def test_changes_that_are_allowed_without_redis(
    server: RedisServer,
    make: Make,
    clock: RedisClock,
    retries: Clock,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    keystone = make(allow=True, bound="30 s (ttl)")
    other = make()
    change(keystone, 1)
    filled = other.now()
    if how == "restarted":
        server.kill()
    with hanging(server, keystone) if how == "stopped" else nullcontext():
        for _ in range(3):
            change(keystone, 1)
            assert not keystone.fresh(filled, entry(9))
    told = [r.getMessage() for r in caplog.records if "changes are made all the same" in r.message]
    assert len(told) == 1 and "may go on with answers from before for 30 s (ttl)" in told[0]
    if how == "restarted":
        server.start()
    retries.later(RETRY_SECONDS)
    assert not keystone.fresh(filled, entry(9))
    assert not other.fresh(filled, entry(9))
    change(keystone, 2)
    # The mark that a stopped Redis found in its socket stays until it is taken for abandoned.
    clock.later(MARK_SECONDS + 1)
    assert other.recover() == (how == "stopped")
    assert other.fresh(other.now(), entry(1))


def test_a_change_that_may_be_told_of_late(
    server: RedisServer, make: Make, clock: RedisClock, retries: Clock
) -> None:
    """It is made without Redis whatever the option says, and told of before anything is fresh."""
    keystone, other = make(), make()
    change(keystone, 1)
    filled = other.now()
    with hanging(server, keystone):
        with pytest.raises(CoordinatorError):
            keystone.mark(some(1))
        late = keystone.mark(some(1), late=True)
        assert late == UNTOLD
        keystone.stamp(late)
        assert not keystone.fresh(filled, entry(9))
    retries.later(RETRY_SECONDS)
    assert not keystone.fresh(filled, entry(9))
    assert not other.fresh(filled, entry(9))
    assert keystone.fresh(keystone.now(), entry(9))


@pytest.mark.parametrize("allow", [True, False])
def test_a_process_that_starts_without_redis(
    server: RedisServer, make: Make, clock: RedisClock, tmp_path: Path, allow: bool
) -> None:
    """As keystone-manage does: it has never heard how many slots there are."""
    other = make()
    change(other, 1)
    keystone = make(allow=allow)
    coordinators.set(tmp_path, keystone)
    changes = Changes(lambda: tmp_path)
    try:
        with hanging(server, keystone):
            if allow:
                assert changes.begin(["user:u"]) == UNTOLD
            else:
                with pytest.raises(CoordinatorError):
                    changes.begin(["user:u"])
    finally:
        coordinators.forget(tmp_path)


def test_what_is_owed_is_paid_without_being_asked(
    server: RedisServer, make: Make, clock: RedisClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "time", clock)
    keystone, other = make(allow=True, threads=True), make()
    change(keystone, 1)
    filled = other.now()
    with hanging(server, keystone):
        change(keystone, 1)
    clock.later(RETRY_SECONDS)
    server.wait(lambda client: not other.fresh(filled, entry(9)))


def test_more_is_owed_than_is_remembered(
    server: RedisServer, make: Make, retries: Clock
) -> None:
    keystone, other = make(), make()
    change(keystone, 1)
    marks = [keystone.mark(some(n)) for n in range(100)]
    filled = other.now()
    with hanging(server, keystone):
        for mark in marks:
            with pytest.raises(CoordinatorError):
                keystone.stamp(mark)
    retries.later(RETRY_SECONDS)
    keystone.now()
    assert not other.fresh(filled, entry(200))


def test_what_was_paid_before_the_commit_is_owed_again(
    server: RedisServer, make: Make, retries: Clock
) -> None:
    keystone, other = make(allow=True), make()
    change(keystone, 1)
    with hanging(server, keystone):
        mark = keystone.mark(some(1))
    retries.later(RETRY_SECONDS)
    keystone.now()
    read = other.now()  # and from the database what the commit will replace
    keystone.stamp(mark)
    assert not other.fresh(read, entry(9))
    assert other.fresh(other.now(), entry(9))


# A new table


@pytest.mark.parametrize("deed", ["mark", "touch", "flush", "stamp"])
def test_nothing_is_told_in_a_new_table_before_it_has_settled(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    """Until then somebody may go by an older one."""
    monkeypatch.setattr(outages, "SETTLE_SECONDS", 0.15)
    monkeypatch.setattr(module, "_BEGIN_SECONDS", PATIENCE)
    keystone = Redis(address(server.url), slot_count=SLOTS, timeout=TIMEOUT)
    mark = keystone.mark(some(2))
    server.client.flushall()
    if deed == "mark":
        keystone.mark(some(1))
    elif deed == "touch":
        keystone.touch(some(1))
    elif deed == "flush":
        keystone.flush()
    else:
        keystone.stamp(mark)
    seconds, microseconds = server.client.time()
    assert seconds * 10**6 + microseconds >= int(server.client.hget(KEY, "until"))
    wait_for(lambda: keystone.fresh(keystone.now(), entry(5)), "nobody writes who did before")
    keystone.close()


def test_a_closed_link_does_not_connect_by_itself(server: RedisServer) -> None:
    """It would lead to whatever is there then, under the name of the life that it knew."""
    where = address(server.url)
    link = Link(connections.connect(where, where.hosts[0], TIMEOUT), where.hosts[0])
    link.close()
    with pytest.raises(redis.ConnectionError, match="was closed"):
        link.run("KEYS", "*")


# Keystone's filter


def test_a_keystone_that_starts_without_redis(
    server: RedisServer, make: Make, retries: Clock, tmp_path: Path
) -> None:
    """It asks Keystone, and begins to keep answers when Redis is there."""
    keystone = Answers()
    server.kill()
    coordinator = make(folder=tmp_path / "node")
    assert len(coordinator.secret) == 32
    cache = TokenCache(
        keystone,
        coordinator,
        NodeCache(tmp_path / "node", size=1 << 20, flight_timeout=1.0),
        routes=Routes(()),
        ttl=60.0,
        negative_ttl=60.0,
        memory=1 << 20,
    )
    for _ in range(2):
        assert call(cache, request(1))
    assert keystone.calls == 2
    server.start()
    retries.later(RETRY_SECONDS)
    change(coordinator, 5)
    for _ in range(3):
        assert call(cache, request(1))
    assert keystone.calls == 3
    server.restart()
    assert call(cache, request(1))
    assert keystone.calls == 4


def test_a_mark_whose_answer_was_lost_is_ended_by_its_process(
    server: RedisServer, make: Make, clock: Clock, retries: Clock, tmp_path: Path
) -> None:
    """It lives, so nobody else takes the mark away; the change was refused."""
    coordinator = make(folder=tmp_path / "node")
    change(coordinator, 1)
    coordinators.set(tmp_path, coordinator)
    told_of = Changes(lambda: tmp_path)
    try:
        with hanging(server, coordinator):
            with pytest.raises(CoordinatorError):
                told_of.begin(["catalog"])
        retries.later(RETRY_SECONDS)
        wait_for(lambda: coordinator.statistics()["changes_under_way"] == 1, "it is marked")
        clock.later(MARK_SECONDS + 1)
        assert coordinator.recover() == 1
        assert coordinator.statistics()["changes_under_way"] == 0
    finally:
        coordinators.forget(tmp_path)

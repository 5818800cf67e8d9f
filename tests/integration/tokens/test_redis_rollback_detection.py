"""What the Redis coordinator does when its numbers go back, or are forged, or Redis' clock is set.

The server is the same all the time and in the same life: nothing but the numbers tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("redis")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.mark_owners import COMMIT_TIMEOUT
from keyfront.middleware.tokens.coordinator.redis import coordinator as module
from keyfront.middleware.tokens.coordinator.redis.connections import Link
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.coordinator.redis.outages import SETTLE_SECONDS
from keyfront.middleware.tokens.coordinator.redis.scripts import CHANGES, STEP_SECONDS
from keyfront.middleware.tokens.epochs import ALL_SLOT, DIGEST, Slots
from support.redis_epochs import KEY, SLOTS, TIMEOUT, RedisClock, address, head, set_head
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE, wait_for
from support.set_clock import SetClock

Make = Callable[..., Redis]
Deed = Callable[[RedisServer], None]
ENTRY = Slots((ALL_SLOT, 101))
OTHER = Slots((ALL_SLOT, 102))
CHANGED = Slots((101,))
BACK = "its numbers went back"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server(config=["enable-debug-command yes", "dbfilename then.rdb"]) as server:
        yield server


@pytest.fixture
def make(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    RedisClock(server).put_in_place(monkeypatch)
    made: list[Redis] = []

    def one(**options: Any) -> Redis:
        settings = {"slot_count": SLOTS, "timeout": TIMEOUT, **options}
        made.append(Redis(address(server.url), **settings))
        return made[-1]

    yield one
    for coordinator in made:
        coordinator.close()


def change(coordinator: Redis, slots: Slots = CHANGED) -> None:
    coordinator.stamp(coordinator.mark(slots))


def complaints(caplog: pytest.LogCaptureFixture) -> int:
    return sum(BACK in record.getMessage() for record in caplog.records)


def snapshot(server: RedisServer) -> Deed:
    """As it is when a virtual machine is set back: with all of its memory, and its life."""
    then = {key: server.client.dump(key) for key in ("keyfront:digests", KEY)}

    def restore(server: RedisServer) -> None:
        for key, value in then.items():
            server.client.restore(key, 0, value, replace=True)

    return restore


def saved(server: RedisServer) -> Deed:
    """A file of the past is loaded, without a restart."""
    server.client.save()
    return lambda server: server.client.execute_command("DEBUG", "RELOAD", "NOSAVE")


def sequence(server: RedisServer) -> Deed:
    """Only the number of the last change is written back, by hand."""
    then = head(server.client)["sequence"]
    return lambda server: set_head(server.client, sequence=then)


def table_head(server: RedisServer) -> Deed:
    """The number, and what tells its change."""
    then = head(server.client)
    return lambda server: set_head(server.client, **then)


def slot(server: RedisServer) -> Deed:
    """Only the number of a slot."""
    then = server.client.hget(KEY, "101")
    return lambda server: server.client.hset(KEY, "101", then)


@pytest.fixture
def raw(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that takes bytes for what they are, as DUMP gives them."""
    import redis

    client = redis.Redis(unix_socket_path=str(server.socket))
    monkeypatch.setattr(server, "_clients", [client])
    yield
    client.close()


@pytest.mark.parametrize("goes_on", [0, 1, 5])
@pytest.mark.parametrize("then", [snapshot, saved, sequence, table_head, slot])
def test_set_back_while_it_runs(
    server: RedisServer,
    make: Make,
    raw: None,
    caplog: pytest.LogCaptureFixture,
    then: Callable[[RedisServer], Deed],
    goes_on: int,
) -> None:
    """Whoever saw a number that is gone keeps nothing, and begins a new generation."""
    keystone, other, service = make(), make(), make(create=False)
    change(keystone)
    filled = service.now()
    set_back = then(server)
    change(keystone)
    for one in (keystone, service):
        assert not one.fresh(filled, ENTRY)
    set_back(server)
    for _ in range(goes_on):
        # By a process that knows of nothing; its numbers reach those that are gone, and pass them.
        change(other, Slots((102,)))
    for _ in range(3):
        assert not service.fresh(filled, ENTRY)
        assert not service.fresh(filled, OTHER)
    assert complaints(caplog) == 1
    assert not keystone.fresh(filled, ENTRY)
    assert keystone.now().generation != filled.generation
    change(keystone)
    assert complaints(caplog) <= 2
    for one in (keystone, other, service):
        assert not one.fresh(filled, ENTRY)
        assert one.fresh(one.now(), ENTRY)


@pytest.mark.parametrize("deed", ["mark", "look"])
def test_a_generation_that_was_followed_does_not_come_back(
    server: RedisServer, make: Make, raw: None, caplog: pytest.LogCaptureFixture, deed: str
) -> None:
    keystone, other, service = make(), make(), make(create=False)
    change(keystone)
    filled = other.now()
    service.now()
    set_back = snapshot(server)
    server.client.flushall()
    change(keystone)
    service.now()
    set_back(server)
    assert other.fresh(filled, ENTRY)  # it has seen nothing of that
    assert not service.fresh(filled, ENTRY)
    with pytest.raises(CoordinatorError):
        service.now()
    if deed == "mark":
        change(keystone)
    else:
        assert not keystone.fresh(filled, ENTRY)
        keystone.now()
    assert complaints(caplog) == 2
    assert not other.fresh(filled, ENTRY)
    change(other)
    for one in (keystone, other, service):
        assert one.fresh(one.now(), ENTRY)


@pytest.mark.parametrize("deed", ["mark", "stamp", "touch", "recover", "now"])
def test_a_writer_notices_it_as_well(
    server: RedisServer, make: Make, raw: None, caplog: pytest.LogCaptureFixture, deed: str
) -> None:
    """In the same call: no change is counted in a table that was set back."""
    keystone, other = make(), make()
    change(other)
    filled = other.now()
    mark = keystone.mark(Slots((300,)))
    set_back = snapshot(server)
    change(keystone)
    set_back(server)
    assert other.fresh(filled, ENTRY)  # it has seen nothing that is gone
    {
        "mark": lambda: keystone.mark(CHANGED),
        "stamp": lambda: keystone.stamp(mark),
        "touch": lambda: keystone.touch(Slots((300,))),
        "recover": keystone.recover,
        "now": keystone.now,
    }[deed]()
    assert complaints(caplog) == 1
    assert not other.fresh(filled, ENTRY)
    assert keystone.now().generation != filled.generation


def test_a_lease_notices_it(
    server: RedisServer, make: Make, raw: None, caplog: pytest.LogCaptureFixture
) -> None:
    keystone, lease = make(), make(create=False, lease=0.1)
    change(keystone)
    filled = keystone.now()
    set_back = snapshot(server)
    change(keystone)
    wait_for(lambda: not lease.fresh(filled, ENTRY), "the change is heard")
    set_back(server)
    wait_for(lambda: not lease.fresh(filled, OTHER), "its mirror is given up")
    assert not lease.fresh(filled, ENTRY)
    assert complaints(caplog) == 1


def test_more_changes_than_are_kept_are_no_reason(
    server: RedisServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Who was away for so long does not find the last change that he knows of."""
    keystone, other = make(), make()
    change(keystone)
    filled = other.now()
    for _ in range(CHANGES + 1):
        keystone.touch(Slots((300,)))
    assert other.fresh(filled, ENTRY)
    change(other)
    assert other.now().generation == filled.generation
    assert not complaints(caplog)


def test_an_answer_that_comes_late_is_no_reason(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads of one process hear of the numbers in another order than they asked for them."""
    keystone, service = make(), make(create=False)
    change(keystone)
    over = threading.Event()
    generations = set()

    def ask() -> None:
        while not over.is_set():
            epoch = service.now()
            service.fresh(epoch, ENTRY)
            generations.add(epoch.generation)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        change(keystone)
    over.set()
    for thread in threads:
        thread.join()
    assert len(generations) == 1
    assert not complaints(caplog)


class Late:
    """Holds an answer that Redis has given, as if the network had, for one question.

    :param coordinator: the coordinator whose next question it is
    :param how: the name of the method of links that asks
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str, deed: Callable[[], Any]) -> None:
        self._comes = threading.Event()
        answered = threading.Event()
        real = getattr(Link, how)

        def held(link: Link, *command: Any) -> Any:
            answer = real(link, *command)
            if threading.current_thread() is self._thread and not answered.is_set():
                answered.set()
                assert self._comes.wait(PATIENCE)
            return answer

        monkeypatch.setattr(Link, how, held)
        self.said: Any = None

        def ask() -> None:
            self.said = deed()

        self._thread = threading.Thread(target=ask)
        self._thread.start()
        assert answered.wait(PATIENCE)

    def comes(self) -> Any:
        """Let it come, and return what was made of it."""
        self._comes.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.said


@pytest.mark.parametrize("lost", [1, 2])
def test_an_answer_of_an_older_generation_that_comes_late_is_no_reason(
    server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, lost: int,
) -> None:
    """It was asked for before another thread heard of the newest, and says nothing of that."""
    keystone, service = make(), make(create=False)
    change(keystone)
    service.now()
    if lost == 2:
        server.client.flushall()
        change(keystone)  # of which the service has not heard when it asks
    late = Late(monkeypatch, "read", service.now)
    server.client.flushall()
    change(keystone)
    filled = service.now()
    assert late.comes() == filled  # it is asked anew
    for _ in range(3):
        assert service.fresh(filled, ENTRY)
        assert service.now() == filled
    assert not complaints(caplog)


def test_a_writers_answer_that_comes_late_is_no_reason(
    server: RedisServer, make: Make, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keystone, other = make(), make()
    change(keystone)
    late = Late(monkeypatch, "run", lambda: keystone.touch(CHANGED))
    server.client.flushall()
    change(other)
    filled = keystone.now()
    late.comes()
    for _ in range(3):
        assert keystone.fresh(filled, ENTRY)
        change(keystone, Slots((102,)))
        assert keystone.now().generation == filled.generation
    assert not complaints(caplog)


def test_a_late_answer_that_went_back_ends_nothing_that_was_begun_since(
    server: RedisServer, make: Make, raw: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not believed, and what was heard since it was asked for is remembered."""
    keystone, service = make(), make(create=False)
    change(keystone)
    filled = service.now()
    set_back = snapshot(server)
    change(keystone)
    service.now()
    set_back(server)
    late = Late(monkeypatch, "read", lambda: service.fresh(filled, ENTRY))
    change(keystone)  # which begins another generation
    filled = service.now()
    set_back = snapshot(server)
    change(keystone)
    service.now()
    assert late.comes() is False
    set_back(server)
    assert not service.fresh(filled, ENTRY)


def test_two_versions_of_a_table_are_two_histories(
    server: RedisServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """While nodes of both run, Keystone names now the one and now the other to a service."""
    digests = ("0123456789ab", DIGEST)
    nodes = [make(digest=digest) for digest in digests]
    service = make(create=False)
    for _ in range(3):
        for node, digest in zip(nodes, digests, strict=True):
            change(node)  # which takes the other's table away
            service.follow(digest)
            epoch = service.now()
            assert epoch.generation == node.now().generation
            assert service.fresh(epoch, ENTRY)
    # Both there, as after one has looked and before it changes anything.
    epochs = [node.now() for node in nodes]
    for _ in range(3):
        for epoch, digest in zip(epochs, digests, strict=True):
            service.follow(digest)
            assert service.now().generation == epoch.generation
    assert not complaints(caplog)


def test_what_was_seen_of_a_table_is_remembered_while_another_is_followed(
    server: RedisServer, make: Make, raw: None, caplog: pytest.LogCaptureFixture
) -> None:
    keystone, service = make(), make(create=False)
    change(keystone)
    filled = service.now()
    set_back = snapshot(server)
    change(keystone)
    assert not service.fresh(filled, ENTRY)
    service.follow("0123456789ab")
    with pytest.raises(CoordinatorError):
        service.now()
    set_back(server)
    service.follow(DIGEST)
    assert not service.fresh(filled, ENTRY)
    assert complaints(caplog) == 1


def test_a_number_that_is_too_high_is_none(server: RedisServer, make: Make) -> None:
    """Redis' program counts in floating point: beyond 2**53 two changes may have one number."""
    keystone, service = make(), make(create=False)
    change(keystone)
    generation = keystone.now().generation
    set_head(server.client, sequence=str(2**53))
    assert not service.fresh(keystone.now(), ENTRY)
    assert keystone.now().generation != generation
    change(keystone)
    assert service.fresh(service.now(), ENTRY)


# The clock of the server


@pytest.fixture(scope="module")
def wall(tmp_path_factory: pytest.TempPathFactory) -> SetClock:
    return SetClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def stepped(wall: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    # A change waits for a table to settle in steps that count no longer than they should take.
    monkeypatch.setattr(module, "_BEGIN_SECONDS", PATIENCE)
    wall.set(0)
    with redis_server(environment=wall.environment) as server:
        wall.set(1000)
        assert abs(server.client.time()[0] - time.time() - 1000) < 100, "its clock is not set"
        wall.set(0)
        yield server


def attach(server: RedisServer, **options: Any) -> Redis:
    return Redis(address(server.url), slot_count=SLOTS, timeout=TIMEOUT, **options)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_the_wait_of_a_new_generation_is_no_shorter(
    stepped: RedisServer, wall: SetClock, step: float
) -> None:
    """The clock is set in the middle of it: a change still waits until nobody goes by the old one,
    and no longer than it takes.
    """
    keystone, other = attach(stepped), attach(stepped)
    began = time.monotonic()
    epoch = keystone.now()
    wall.set(step)
    assert not keystone.fresh(epoch, ENTRY)
    change(other)
    waited = time.monotonic() - began
    assert waited > SETTLE_SECONDS - STEP_SECONDS
    assert not keystone.fresh(epoch, OTHER)  # read in that time
    assert keystone.fresh(keystone.now(), OTHER)
    assert keystone.now().generation == epoch.generation
    for one in (keystone, other):
        one.close()


def test_a_mark_is_no_older_than_it_was_seen_to_be(
    stepped: RedisServer, wall: SetClock
) -> None:
    """Whose owner cannot be looked for is taken for gone after five minutes, not by Redis alone."""
    keystone, other = attach(stepped), attach(stepped)
    change(keystone)
    ages = []

    def settled(owner: str, age: float) -> bool:
        ages.append(age)
        return age > COMMIT_TIMEOUT

    other.settled = settled
    epoch = other.now()
    mark = keystone.mark(CHANGED, "elsewhere:1:1 ?#1")
    wall.set(3600)
    for _ in range(3):
        assert other.recover() == 0
        assert not other.fresh(epoch, ENTRY)
    assert max(ages) < COMMIT_TIMEOUT
    wall.set(-3600)
    assert other.recover() == 0
    keystone.stamp(mark)
    assert not other.fresh(epoch, ENTRY)
    assert other.fresh(other.now(), ENTRY)
    for one in (keystone, other):
        one.close()


def test_a_clock_that_is_set_ends_and_revives_nothing(
    stepped: RedisServer, wall: SetClock
) -> None:
    keystone, service = attach(stepped), attach(stepped, create=False)
    change(keystone)
    filled = service.now()
    change(keystone, Slots((102,)))
    for step in (3600, -3600, 0):
        wall.set(step)
        assert service.fresh(filled, ENTRY)
        assert not service.fresh(filled, OTHER)
        change(keystone, Slots((103,)))
        assert service.now().generation == filled.generation
    for one in (keystone, service):
        one.close()

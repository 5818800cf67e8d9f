"""Who has logged in on one node is no stranger on the others, by the Redis that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("redis")
pytest.importorskip("keystone")

from keyfront.errors import CoordinatorError
from keyfront.gateway.login_limit import login_of
from keyfront.gateway.node import known_logins
from keyfront.gateway.node.known_logins import KnownLogins
from keyfront.gateway.node.login_turns import Login, LoginTurns, Turn
from keyfront.middleware.tokens.coordinator.redis import scripts
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from support.floods import Flood, Known, login_environ
from support.keystone_world import World
from support.keystones import keystone_state, serve_as_is
from support.redis_epochs import TIMEOUT, address
from support.redis_servers import RedisServer, redis_server
from support.served import wait_for

KEY = "keyfront:told"
ALICE, BERTA = Login("192.0.2.1", "alice"), Login("192.0.2.2", "berta")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


class Node:
    """A node's turns, and what tells of them; each step is made by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.turns = LoginTurns(folder, running=2, waiting=0)
        self.known = KnownLogins(self.turns, folder)

    def log_in(self, login: Login, *, right: bool | None = True) -> bool:
        """Whether it was known before."""
        turn = self.turns.begin(login)
        assert isinstance(turn, Turn)
        self.turns.end(turn, right=right)
        return turn.known

    def knows(self, login: Login) -> bool:
        return self.log_in(login, right=None)


@pytest.fixture
def coordinator(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    server.client.flushall()
    coordinator = Redis(address(server.url), timeout=TIMEOUT)
    monkeypatch.setattr(known_logins, "coordinators", lambda: [coordinator])
    yield coordinator
    coordinator.close()


@pytest.fixture
def nodes(coordinator: Redis, tmp_path: Path) -> tuple[Node, Node]:
    """Two that have heard of each other."""
    one, other = Node(tmp_path / "one"), Node(tmp_path / "other")
    for node in (one, other):
        node.known.exchange()
    return one, other


def test_who_logs_in_on_one_is_known_on_the_other(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    assert not one.log_in(ALICE)
    assert not other.knows(ALICE)
    one.known.exchange()
    assert not other.knows(ALICE)
    other.known.exchange()
    assert other.knows(ALICE)
    assert not other.knows(BERTA)
    assert not other.knows(ALICE._replace(address="192.0.2.9"))


def test_what_is_told_names_nobody(nodes: tuple[Node, Node], server: RedisServer) -> None:
    one, _ = nodes
    one.log_in(ALICE)
    one.known.exchange()
    kept = server.client.hgetall(KEY)
    assert set(kept) == {"key", "begun", "last", "0"}
    assert ALICE.user not in kept["0"] and ALICE.address not in kept["0"]


def test_a_wrong_password_is_not_told(nodes: tuple[Node, Node], server: RedisServer) -> None:
    one, _ = nodes
    one.log_in(ALICE, right=False)
    one.known.exchange()
    assert not server.client.hexists(KEY, "last")


def test_it_is_told_once_a_day(nodes: tuple[Node, Node], server: RedisServer) -> None:
    one, other = nodes
    for _ in range(3):
        one.log_in(ALICE)
        one.known.exchange()
        other.known.exchange()
        other.log_in(ALICE)
    assert server.client.hget(KEY, "last") == "1"


def test_a_node_that_comes_later_hears_of_all(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    one, _ = nodes
    users = [Login(f"198.51.100.{number % 250}", f"user {number}") for number in range(2500)]
    for number, user in enumerate(users, 1):
        one.log_in(user)
        if number % known_logins.MOST == 0:
            one.known.exchange()
    one.known.exchange()
    late = Node(tmp_path / "late")
    # Before it has heard of the key that the others go by.
    late.log_in(ALICE)
    late.known.exchange()
    # Some share their places with too many others.
    assert sum(late.knows(user) for user in users) > 0.99 * len(users)
    one.known.exchange()
    assert not one.knows(ALICE)


def test_what_redis_loses_the_nodes_still_know(
    nodes: tuple[Node, Node], server: RedisServer, tmp_path: Path
) -> None:
    one, other = nodes
    one.log_in(ALICE)
    for node in nodes:
        node.known.exchange()
    server.client.flushall()
    for node in nodes:
        node.known.exchange()
    assert other.knows(ALICE)
    other.log_in(BERTA)
    other.known.exchange()
    one.known.exchange()
    assert one.knows(BERTA)


def test_what_could_not_be_told_is_told_when_redis_is_back(
    nodes: tuple[Node, Node],
    coordinator: Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = nodes

    def away(*arguments: object) -> None:
        raise CoordinatorError("away")

    one.log_in(ALICE)
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "exchange", away)
        for _ in range(2):
            one.known.exchange()
    assert caplog.messages == ["other nodes are not told who has logged in: away"]
    one.log_in(BERTA)
    one.known.exchange()
    other.known.exchange()
    assert other.knows(ALICE) and other.knows(BERTA)


def test_one_process_of_a_node_asks_and_each_tells(
    nodes: tuple[Node, Node], coordinator: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = nodes
    asked = []
    exchange = coordinator.exchange

    def counted(*arguments: object) -> object:
        asked.append(arguments)
        return exchange(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator, "exchange", counted)
    second = Node(one.folder)
    second.known.exchange()
    assert not asked
    second.log_in(ALICE)
    second.known.exchange()
    assert len(asked) == 1
    other.known.exchange()
    assert other.knows(ALICE)


@pytest.mark.parametrize(
    "field, value", [("key", "ab"), ("key", "no"), ("0", "1"), ("0", f"{2**64:x} 5"), ("0", "0 5")]
)
def test_what_is_no_hash_harms_nobody(
    nodes: tuple[Node, Node],
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: str,
) -> None:
    one, other = nodes
    one.log_in(ALICE)
    one.known.exchange()
    server.client.hset(KEY, field, value)
    other.known.exchange()
    assert "DEL" in caplog.text
    assert not other.log_in(BERTA)
    server.client.delete(KEY)
    other.known.exchange()
    one.known.exchange()
    assert one.knows(BERTA)


def test_a_replica_tells_nothing(coordinator: Redis, server: RedisServer) -> None:
    """An answer of one would end the outage that the coordinator has noted."""
    key = b"k" * 16
    coordinator.exchange(key, [1], "")
    server.client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(CoordinatorError):
            coordinator.exchange(key, [], "")
    finally:
        server.client.replicaof("NO", "ONE")


def test_no_more_is_kept_than_there_is_room_for(coordinator: Redis, server: RedisServer) -> None:
    key, place = b"k" * 16, ""
    for first in range(1, scripts.TOLD + 2000, 1000):
        found = coordinator.exchange(key, range(first, first + 1000), place)
        assert [number for number, _ in found.told] == list(range(first, first + 1000))
        assert not found.more
        place = found.place
    assert server.client.hlen(KEY) == scripts.TOLD + 3
    told, place, more = [], "", True
    while more:
        found = coordinator.exchange(key, [], place)
        told += [number for number, _ in found.told]
        place, more = found.place, found.more
    assert told == list(range(first + 1000 - scripts.TOLD, first + 1000))


def test_a_flood_on_a_node_keeps_nobody_out_who_is_known_on_another(
    server: RedisServer, tmp_path: Path
) -> None:
    server.client.flushall()
    environment = {
        "KEYFRONT_LOGIN_LIMIT": "2",
        "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "10",
        "OS_KEYFRONT_TOKEN_CACHE__COORDINATOR": server.url,
        "OS_KEYFRONT_TOKEN_CACHE__COORDINATOR_TIMEOUT": "10",
    }
    states = [keystone_state(tmp_path / "one")]
    shared = f"sqlite:///{states[0] / 'keystone.sqlite'}"
    states.append(keystone_state(tmp_path / "other", database_url=shared))
    with ExitStack() as running:
        one, other = (
            running.enter_context(serve_as_is(state, kind, environment=environment))
            for state, kind in zip(states, ("mod_wsgi", "uwsgi"), strict=True)
        )
        users = [World(one.url, one.password).user() for _ in range(3)]
        honest = [Known(one, user, f"127.2.0.{n}") for n, user in enumerate(users, 1)]
        here = Node(states[1] / "run/node")
        for each in honest:
            login = login_of(login_environ(each.address, each.user))
            assert login is not None
            wait_for(lambda login=login: here.knows(login), "it has heard of it")
        with Flood(other, [users[0], "nobody"]).under_way():
            for each in honest:
                each.served = other
                each.logs_in()

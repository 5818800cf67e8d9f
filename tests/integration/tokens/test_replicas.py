"""A node whose database answers from the past keeps nothing of it, nor gives it to others.

Node A asks the primary, node B a replica that the test holds in the past. Both share a Redis, and
on MariaDB a memcached as well, in which Keystone caches. The stock Keystone behind B says that a
revoked token is good as long as its database says so; that must end when the replica has caught up.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event

from keyfront.gateway.keystone.stale_reads import Connections
from keyfront.middleware.tokens.epochs import Epoch
from keyfront.middleware.tokens.node_cache import statistics
from keyfront.middleware.tokens.request import Request, current
from support import APPS, servers
from support.apps.held_filter import Holds
from support.cluster import service
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, Client, World
from support.keystones import keystone_state, serve_as_is
from support.redis_servers import redis_server
from support.replicas import (
    GaleraPair,
    LogicalPair,
    MariaDBPair,
    PostgreSQLPair,
    galera_options,
    galera_pair,
    logical_pair,
    mariadb_pair,
    pgpool,
    postgresql_pair,
)
from support.served import PATIENCE, Served, free_port, wait_for

pytest.importorskip("keystone")

# A ttl that no test outlasts.
EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[keyfront_token_cache]
ttl = 600
negative_ttl = 600
path = {path}
coordinator = {redis}
# One that is well takes no longer on a busy machine.
coordinator_timeout = 10
"""
SETTLE = 5.0
PASTE = """\
[pipeline:main]
pipeline = token_cache held keystone

[filter:token_cache]
use = egg:keyfront#token_cache

[filter:held]
paste.filter_factory = held_filter:filter_factory
folder = {folder}

[app:keystone]
use = egg:keyfront#keystone
"""
LOGGED = "token_cache keeps nothing of what this database says"


@dataclass
class Place:
    """Two nodes, and what they ask."""

    pair: MariaDBPair | PostgreSQLPair | GaleraPair
    redis: str
    memcached: str | None
    a: Served
    #: B; ``None`` where only one that is told by how much the replica may be behind is asked.
    replica: Served | None = None

    def __post_init__(self) -> None:
        self.world = World(self.a.url, self.a.password)
        self.admin = self.world.admin

    @property
    def b(self) -> Served:
        assert self.replica is not None
        return self.replica

    def token(self) -> str:
        """A token that the replica knows, too."""
        token = self.world.person().token
        self.pair.let_go()
        return token

    def forget(self) -> None:
        """Have everything read in the database that others have put into memcached."""
        if self.memcached is not None:
            host, _, port = self.memcached.rpartition(":")
            with socket.create_connection((host, int(port)), PATIENCE) as connection:
                connection.sendall(b"flush_all\r\n")
                assert connection.recv(64) == b"OK\r\n"

    def status(self, node: Served, token: str) -> set[int]:
        """What several connections are told of a token: they reach both workers."""
        return {self._ask(node, token)[0] for _ in range(8)}

    def told(self, node: Served, token: str) -> set[str]:
        """What a service would be told of how long that stands."""
        return {self._ask(node, token)[1].partition(".")[0] for _ in range(8)}

    def hits(self, node: Served) -> dict[str, int]:
        """The counts of a node."""
        return statistics(node.state / "tokens")

    def _ask(self, node: Served, token: str) -> tuple[int, str]:
        client = Client(node.url)
        headers = {"X-Auth-Token": self.admin, "X-Subject-Token": token, "X-Keyfront-Epochs": "1"}
        try:
            answer = client.request("GET", VALIDATE, headers)
            return answer.status, answer.headers["X-Keyfront-Epochs"]
        finally:
            client.close()


def node(
    folder: Path, url: str, redis: str, *, memcached: str | None = None, options: str = "",
    reading: str = "",
) -> Path:
    """Make a node of the Keystone in a database.

    :param url: of the primary
    :param reading: of the replica, if the node knows that one only
    """
    extra = EXTRA.format(path=folder / "tokens", redis=redis) + options
    state = keystone_state(folder, database_url=url, memcached=memcached, extra=extra)
    if reading:
        config = state / "keystone.conf"
        text = config.read_text()
        changed = re.sub(r"^connection = .*$", f"connection = {reading}", text, flags=re.MULTILINE)
        assert changed != text
        config.write_text(changed)
    return state


@pytest.fixture(scope="module", params=["mariadb", "postgresql", "galera"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()).url
        memcached = None
        if request.param == "mariadb":
            pair = stack.enter_context(mariadb_pair(folder))
            memcached = stack.enter_context(servers.memcached()).address
        else:
            pairs = {
                "postgresql": postgresql_pair, "logical": logical_pair, "galera": galera_pair,
            }  # fmt: skip
            pair = stack.enter_context(pairs[request.param](folder))
        url, reading = pair.primary.fresh_database("keystone"), pair.replica.url("keystone")
        waits = "[database]\nmysql_wsrep_sync_wait = 1\n" if request.param == "galera" else ""
        a = node(folder / "a", url, redis, memcached=memcached, options=waits)
        states = [a]
        if isinstance(pair, LogicalPair):
            pair.follow()
        else:
            states.append(node(folder / "b", url, redis, memcached=memcached, reading=reading))
            pair.let_go()
        served = [stack.enter_context(serve_as_is(state, "uwsgi")) for state in states]
        found = Place(pair, redis, memcached, *served)
        # A change waits for a table that has just begun, on a busy machine for too long.
        found.world.wait_until_kept()
        yield found


@contextmanager
def settling(place: Place, folder: Path) -> Iterator[tuple[Served, Holds]]:
    """Run one more node on the replica, which is told by how much that may be behind."""
    holds = folder / "holds"
    holds.mkdir()
    paste = folder / "keystone.ini"
    paste.write_text(PASTE.format(folder=holds))
    state = node(
        folder / "c", place.pair.primary.url("keystone"), place.redis, memcached=place.memcached,
        reading=place.pair.replica.url("keystone"),
        options=f"settle = {SETTLE}\nflight_timeout = 0\n",
    )
    place.pair.let_go()
    environment = {
        "KEYFRONT_APP": f"config:{paste}",
        "PYTHONPATH": str(APPS),
    }
    with serve_as_is(state, "uwsgi", environment=environment) as served:
        yield served, Holds(holds)


@pytest.mark.slow
def test_an_answer_from_the_past_is_kept_nowhere(place: Place) -> None:
    token = place.token()
    assert place.status(place.b, token) == {200}
    place.pair.hold()
    try:
        place.world.revoke(token)
        assert place.status(place.b, token) == {200}, "the replica is not behind"
        assert place.status(place.a, token) == {404}
    finally:
        place.pair.let_go()
    assert place.status(place.b, token) == {404}


@pytest.mark.slow
def test_a_service_is_told_that_it_does_not_stand(place: Place) -> None:
    token = place.token()
    place.forget()
    assert place.told(place.b, token) == {"none"}
    assert "none" not in place.told(place.a, token)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mariadb"], indirect=True)
def test_what_others_put_into_memcached_stands_at_a_replica_as_well(place: Place) -> None:
    """As long as it is all that an answer is made of."""
    token = place.token()
    assert "none" not in place.told(place.a, token)
    assert "none" not in place.told(place.b, token)
    place.pair.hold()
    try:
        place.world.revoke(token)
        assert place.told(place.b, token) == {"none"}, "the replica is not behind"
        assert place.status(place.b, token) == {200}
        assert place.status(place.a, token) == {404}
    finally:
        place.pair.let_go()
    assert place.status(place.b, token) == {404}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mariadb"], indirect=True)
def test_a_service_keeps_nothing_of_the_past(place: Place, tmp_path: Path) -> None:
    """It asks each time: as long as the replica is behind it is told what that says, no longer."""
    pytest.importorskip("keystonemiddleware")
    options = f"keyfront_coordinator = {place.redis}\nkeyfront_coordinator_timeout = 10\n"
    with service(tmp_path, place.b, options) as running:
        token = place.token()
        client = Client(running.url.removesuffix("/v3"))

        def statuses() -> set[int]:
            return {client.request("GET", "/", {"X-Auth-Token": token}).status for _ in range(8)}

        try:
            assert statuses() == {200}
            place.pair.hold()
            try:
                place.world.revoke(token)
                assert statuses() == {200}, "the replica is not behind"
            finally:
                place.pair.let_go()
            assert statuses() == {401}
        finally:
            client.close()


@pytest.mark.slow
def test_it_is_counted_and_logged_once(place: Place) -> None:
    token = place.token()
    place.forget()
    before = place.hits(place.b)
    assert place.status(place.b, token) == {200}
    after = place.hits(place.b)
    assert after["not_kept"] - before["not_kept"] == 8
    assert after["hits"] == before["hits"]
    lines = [line for line in place.b.log("keystone.log").splitlines() if LOGGED in line]
    assert 0 < len(lines) <= 2, lines  # by each worker
    assert LOGGED not in place.a.log("keystone.log")


@pytest.mark.slow
def test_connections_that_were_cut_are_made_anew(place: Place) -> None:
    """Whoever is given one is the first to use it: to ask whether it leads to the primary."""
    assert place.status(place.a, place.token()) == {200}
    for _ in range(2):
        token = place.token()
        place.pair.cut()
        assert place.status(place.a, token) == {200}
        wait_for(lambda token=token: "none" not in place.told(place.a, token), "A keeps answers")
    assert LOGGED not in place.a.log("keystone.log")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mariadb", "logical"], indirect=True)
def test_what_a_change_touched_is_doubtful_until_it_has_settled(
    place: Place, tmp_path: Path
) -> None:
    """The replica takes writes, so that nobody can tell what it is; the operator can."""
    with settling(place, tmp_path) as (c, holds):
        # The operator's word is kept by the test, as soon as the machine is not too busy.
        for _ in range(10):
            if _a_change_while_behind(place, c, holds):
                return
        pytest.fail("the replica was behind for longer than the test says, again and again")


def _a_change_while_behind(place: Place, c: Served, holds: Holds) -> bool:
    """Revoke a token while the replica is behind; ``False`` if that was for too long."""
    token = place.token()
    wait_for(lambda: "none" not in place.told(c, token), "C keeps answers")
    holds.arm("answer")
    place.pair.hold()
    place.world.revoke(token)
    behind = time.monotonic()
    late = threading.Thread(target=place.status, args=(c, token))
    late.start()
    try:
        wait_for(lambda: holds.arrived("answer"), "an answer is there")
        seen = place.status(c, token)
        place.pair.let_go()
        if time.monotonic() - behind > SETTLE:
            return False
        assert seen == {200}, "the replica is not behind"
        assert place.status(c, token) == place.status(place.a, token) == {404}
        # It has settled when the present is kept. Now the late one comes.
        wait_for(lambda: "none" not in place.told(c, token), "C keeps answers")
    finally:
        holds.release("answer")
        late.join()
    assert place.status(c, token) == {404}
    return True


def is_doubted(url: str) -> bool:
    """Whether what a connection answers to a request is not to be kept."""
    engine = create_engine(url)
    event.listen(engine, "checkout", Connections(engine.dialect))
    request = Request(recording=True, since=Epoch(1, 1))
    before = current.set(request)
    try:
        with engine.connect():
            return request.unvouched
    finally:
        current.reset(before)
        engine.dispose()


def test_a_proxy_that_asks_a_standby_is_found_out(tmp_path: Path) -> None:
    """pgpool, which sends pg_is_in_recovery() to the primary, and what Keystone reads elsewhere."""
    with postgresql_pair(tmp_path) as pair, pgpool(pair) as url:
        assert is_doubted(url)
        assert not is_doubted(pair.primary.url("postgres"))
        assert is_doubted(pair.replica.url("postgres"))


def test_a_proxy_that_only_forwards_is_none(tmp_path: Path) -> None:
    with servers.mariadb(tmp_path, port=free_port()) as server, FaultProxy(server.port) as proxy:
        server.fresh_database("keystone")
        assert not is_doubted(f"mysql+pymysql://keystone@127.0.0.1:{proxy.port}/keystone")
        assert proxy.accepted > 0


def test_one_galera_node_has_no_others_to_wait_for(tmp_path: Path) -> None:
    options = galera_options([free_port(), free_port()])
    with servers.mariadb(tmp_path, more=options) as server:
        wait_for(lambda: not is_doubted(server.url("mysql")), "the node is ready")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mariadb", "postgresql"], indirect=True)
def test_a_server_is_judged_by_what_it_is_now(place: Place) -> None:
    """The last one: it changes the servers. The connections of B are those from before."""
    token = place.token()
    place.pair.promote()
    wait_for(lambda: "none" not in place.told(place.b, token), "B keeps what it is told")
    if isinstance(place.pair, PostgreSQLPair):
        return  # it becomes a standby by a restart, which ends its connections
    place.pair.refuse_writes(True)
    place.world.person()  # a change, after which nothing of before it is believed
    place.world.revoke(token)
    assert place.told(place.b, token) == {"none"}

"""A commit that the database server is slow to carry out, or that fails.

PostgreSQL waits for a standby that is not there: to others the commit is not visible, and it may
become so when whoever sent it has been dead for long. Two workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pytest

from keyfront.common.file_lock import FileLock
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.counters import Counters
from keyfront.middleware.tokens.epochs import MARK_SECONDS
from support import servers
from support.keystone_world import VALIDATE, Client, World, random_name
from support.keystones import keystone_state, serve_as_is
from support.processes import kill
from support.programs import remove
from support.redis_servers import redis_server
from support.served import PATIENCE, Served, wait_for

pytest.importorskip("keystone")

EXTRA = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
ttl = 600
path = {path}
coordinator = {coordinator}
"""
# Seconds between validations that go on for many seconds; far less than a lease.
PAUSE = 0.2


class Place(NamedTuple):
    """A served Keystone, its administrator and its database.

    :param folder: of the files that its workers share
    :param lose: takes its epochs away
    """

    served: Served
    world: World
    database: Any
    folder: Path
    lose: Callable[[], object]

    @property
    def epochs(self) -> SharedMemory:
        return SharedMemory(self.folder, create=False)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.database.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def wait_for_standby(self, wait: bool) -> None:
        """Let commits wait for a standby, from now on or no more."""
        self.query(f"ALTER SYSTEM SET synchronous_standby_names = '{'nobody' if wait else ''}'")
        self.query("SELECT pg_reload_conf()")
        wait_for(
            lambda: self.query("SHOW synchronous_standby_names") == [("nobody" if wait else "",)],
            "the server has read its configuration",
        )

    def commits(self) -> int:
        """How many commits wait for the standby."""
        look = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        return int(self.query(look)[0][0])

    def under_way(self) -> int:
        return self.epochs.statistics()["changes_under_way"]

    def hits(self) -> int:
        """How many answers were kept ones."""
        lock = FileLock(self.folder / "node-lock")
        return Counters(self.folder / "counters", lock).statistics()["hits"]

    @contextmanager
    def revocation_that_waits(self, token: str) -> Iterator[None]:
        """One that the server is committing as the block runs, and whose worker was killed."""
        self.wait_for_standby(True)

        def revoke() -> None:
            with suppress(HTTPException, OSError, AssertionError):
                self.world.revoke(token)

        thread = threading.Thread(target=revoke)
        thread.start()
        try:
            wait_for(lambda: self.commits() == 1, "the revocation is being committed")
            for process in self.served.masters("uwsgi").children():
                kill(process)
            thread.join(PATIENCE)
            yield
        finally:
            self.wait_for_standby(False)

    def validate(self, token: str, **more: str) -> int:
        client = Client(self.world.base_url)
        headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token, **more}
        try:
            return client.request("GET", VALIDATE, headers).status
        finally:
            client.close()


@pytest.fixture(scope="module", params=["node"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """With epochs of the node, or those in Redis."""
    folder = tmp_path_factory.mktemp("commits")
    path = folder / "epochs"
    lose: Callable[[], object] = partial(remove, path)
    with ExitStack() as stack:
        coordinator = ""
        if request.param == "Redis":
            redis = stack.enter_context(redis_server(folder / "redis"))
            coordinator, lose = redis.url, redis.client.flushall
            coordinator += "\ncoordinator_timeout = 10"
        server = stack.enter_context(servers.postgresql(folder, replicated=True))
        url = server.fresh_database("keystone")
        extra = EXTRA.format(path=path, coordinator=coordinator)
        state = keystone_state(folder / "state", database_url=url, extra=extra)
        database = psycopg2.connect(url.replace("+psycopg2", ""))
        stack.callback(database.close)
        database.autocommit = True
        with database.cursor() as cursor:
            cursor.execute("ALTER DATABASE keystone SET synchronous_commit = on")
        served = stack.enter_context(serve_as_is(state, "uwsgi"))
        world = World(served.url, served.password)
        # A change waits for a table that has just begun, on a busy machine for too long.
        world.wait_until_kept()
        yield Place(served, world, database, path, lose)


def test_a_commit_that_outlives_its_writer_is_waited_for(place: Place) -> None:
    token = place.world.person().token
    assert {place.validate(token) for _ in range(4)} == {200}
    with place.revocation_that_waits(token):
        killed = time.monotonic()
        wait_for(lambda: _answers(place, token), "there are workers again")
        while time.monotonic() < killed + MARK_SECONDS + 3:
            assert place.validate(token) == 200  # nobody can see it yet
            time.sleep(PAUSE)
        assert place.under_way() == 1
        assert place.commits() == 1
    wait_for(lambda: place.commits() == 0, "the commit is over")
    assert {place.validate(token) for _ in range(4)} == {404}
    wait_for(lambda: {place.validate(token), place.under_way()} == {404, 0}, "its mark is gone")
    assert {place.validate(token) for _ in range(4)} == {404}


@pytest.mark.parametrize("place", ["node", "Redis"], indirect=True)
def test_a_commit_that_outlives_its_writer_and_its_mark_is_waited_for(place: Place) -> None:
    """As when a pod ends with its /dev/shm, or Redis is started anew, and the database is not."""
    token = place.world.person().token
    assert {place.validate(token) for _ in range(4)} == {200}
    with place.revocation_that_waits(token):
        place.lose()
        wait_for(lambda: _answers(place, token), "there are workers again")
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:  # in each worker, again and again
            assert place.validate(token) == 200
            time.sleep(PAUSE)
        assert place.commits() == 1
    wait_for(lambda: place.commits() == 0, "the commit is over")
    assert {place.validate(token) for _ in range(8)} == {404}
    wait_for(lambda: _is_kept(place), "answers are kept again")
    assert {place.validate(token) for _ in range(4)} == {404}


def _is_kept(place: Place) -> bool:
    before = place.hits()
    for _ in range(4):
        assert place.validate(place.world.bystander.token) == 200
    return place.hits() > before


def _answers(place: Place, token: str) -> bool:
    with suppress(HTTPException, OSError):
        return place.validate(token) == 200
    return False


FAIL = """\
CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'not this time' USING ERRCODE = '{state}'; END $$
"""
TRIGGER = """\
CREATE CONSTRAINT TRIGGER fail AFTER UPDATE ON project DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION fail()
"""


@pytest.mark.parametrize(("state", "known"), [("40001", True), ("23514", True), ("XX000", False)])
def test_a_commit_that_the_server_refuses(place: Place, state: str, known: bool) -> None:
    project = place.world.project()
    client = Client(place.world.base_url)
    place.query(FAIL.format(state=state))
    place.query(TRIGGER)
    try:
        headers = {"X-Auth-Token": place.world.admin}
        body = {"project": {"description": random_name()}}
        answer = client.request("PATCH", f"/projects/{project}", headers, body)
    finally:
        client.close()
        place.query("DROP TRIGGER fail ON project")
    assert answer.status >= 400
    # What is known not to have been committed is marked no longer than it took.
    assert place.under_way() == (0 if known else 1)

    def is_over() -> bool:
        # Whoever looks for what Keystone caches meets the mark.
        assert place.validate(place.world.bystander.token, **{"X-Once": random_name()}) == 200
        return not place.under_way()

    wait_for(is_over, "nothing is marked any more")

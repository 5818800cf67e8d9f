"""A commit of which nobody hears: its connection, or the machine that sent it, is lost in it.

A proxy looks for the command COMMIT itself in what goes to the server. Two workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from keyfront.middleware.tokens.coordinator.local import SharedMemory
from support import servers
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, Answer, Client, World, random_name
from support.keystones import keystone_state, serve_as_is
from support.processes import kill
from support.redis_epochs import KEY
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE, Served, free_port, wait_for

pytest.importorskip("keystone")
pytestmark = pytest.mark.slow

EXTRA = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
ttl = 600
path = {path}
"""
REDIS = """\
coordinator = redis://127.0.0.1:{port}
coordinator_timeout = 1
"""
#: The command as PyMySQL and psycopg2 send it.
COMMIT = {"mariadb": b"\x07\x00\x00\x00\x03COMMIT", "postgresql": b"Q\x00\x00\x00\x0bCOMMIT\x00"}
SESSIONS = {
    "mariadb": "SELECT id FROM information_schema.processlist WHERE db = 'keystone'",
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = 'keystone'",
}
DESCRIPTION = "SELECT description FROM {}project WHERE id = '{}'"


class Place(NamedTuple):
    """A served Keystone, and the proxies that it gets to its database and to Redis by.

    :param kind: of database
    :param folder: of the files that its workers share
    """

    kind: str
    served: Served
    world: World
    database: Any
    proxy: FaultProxy
    folder: Path
    redis: RedisServer | None = None
    redis_proxy: FaultProxy | None = None

    def lose(self, fate: str) -> None:
        """Lose each connection in its next COMMIT."""
        self.proxy.lose_at(COMMIT[self.kind], fate)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Ask the database past the proxy."""
        if self.kind == "mariadb":
            return [tuple(row.values()) for row in self.database.ask(statement)]
        rows: list[tuple[Any, ...]] = self.database.ask(statement, "keystone")
        return rows

    def sessions(self) -> set[int]:
        return {row[0] for row in self.query(SESSIONS[self.kind])}

    def description(self, project: str) -> str:
        """What the database shows of a project."""
        schema = "keystone." if self.kind == "mariadb" else ""
        ((found,),) = self.query(DESCRIPTION.format(schema, project))
        return str(found)

    def describe(self, project: str, text: str) -> Answer:
        """Change a project, once."""
        with closing(Client(self.served.url)) as client:
            headers = {"X-Auth-Token": self.world.admin}
            path, body = f"/projects/{project}", {"project": {"description": text}}
            return client.request("PATCH", path, headers, body)

    def validate(self, token: str) -> Answer:
        with closing(Client(self.served.url)) as client:
            headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
            return client.request("GET", VALIDATE, headers)

    def under_way(self) -> int:
        if self.redis is not None:
            # The first is the mark of everything with which a table begins.
            marks = self.redis.client.hget(KEY, "marks") or ""
            return len(set(marks.split(",")) - {"", "0"})
        return SharedMemory(self.folder, create=False).statistics()["changes_under_way"]

    def is_unmarked(self, token: str) -> bool:
        """Whether nothing is under way any more, when a token was asked for in each worker."""
        for _ in range(4):
            assert self.validate(token).status == 200
        return not self.under_way()


@contextmanager
def _place(folder: Path, kind: str, *, redis: bool = False) -> Iterator[Place]:
    path = folder / "epochs"
    with ExitStack() as stack:
        port = free_port()
        database = stack.enter_context(getattr(servers, kind)(folder, port=port))
        proxy = stack.enter_context(FaultProxy(port))
        database.fresh_database("keystone")
        extra, server, redis_proxy = EXTRA.format(path=path), None, None
        if redis:
            server = stack.enter_context(redis_server(folder / "redis"))
            redis_proxy = stack.enter_context(FaultProxy(server.port))
            extra += REDIS.format(port=redis_proxy.port)
        url = database.url("keystone", port=proxy.port)
        state = keystone_state(folder / "state", database_url=url, extra=extra)
        served = stack.enter_context(serve_as_is(state, "uwsgi"))
        world = World(served.url, served.password)
        world.wait_until_kept()
        yield Place(kind, served, world, database, proxy, path, server, redis_proxy)


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_a_machine_that_was_lost_in_a_commit_leaves_no_mark(tmp_path: Path, kind: str) -> None:
    """The server keeps its session, by default for two hours, but in no transaction."""
    with _place(tmp_path, kind) as place:
        person = place.world.person()
        project, text = person.project, random_name()
        place.lose("silent")

        def describe() -> None:
            with suppress(HTTPException, OSError, AssertionError):
                place.describe(project, text)

        thread = threading.Thread(target=describe)
        thread.start()
        try:
            place.proxy.wait_for_losses(1)
            wait_for(lambda: place.description(project) == text, "the server has committed")
            assert place.under_way() == 1
            then = place.sessions()
        finally:
            for process in place.served.masters("uwsgi").children():
                kill(process)
            thread.join(PATIENCE)
        place.proxy.forward()
        wait_for(lambda: _answers(place, person.token), "there are workers again")
        assert place.under_way() == 1
        wait_for(lambda: place.is_unmarked(person.token), "nothing is marked any more")
        assert place.sessions() & then, "the server keeps the session"
        assert place.validate(person.token).status == 200


def _answers(place: Place, token: str) -> bool:
    with suppress(HTTPException, OSError):
        return place.validate(token).status == 200
    return False


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_who_loses_database_and_redis_at_once_takes_the_mark_away(
    tmp_path: Path, kind: str
) -> None:
    """By itself, when both are back: it makes no other change, and nobody else may."""
    with _place(tmp_path, kind, redis=True) as place:
        assert place.redis_proxy is not None
        person = place.world.person()
        place.lose("held")
        answers: list[Answer] = []
        thread = threading.Thread(
            target=lambda: answers.append(place.describe(person.project, random_name()))
        )
        thread.start()
        try:
            place.proxy.wait_for_losses(1)
            assert place.under_way() == 1
            place.redis_proxy.cut()
        finally:
            place.proxy.cut()
            thread.join(PATIENCE)
        (answer,) = answers
        assert answer.status == 503
        assert answer.headers["Retry-After"] is None
        assert "Look whether it is made" in answer.body["error"]["message"]
        place.redis_proxy.forward()
        place.proxy.forward()
        wait_for(lambda: _answers(place, person.token), "both are back")
        wait_for(lambda: place.is_unmarked(person.token), "nothing is marked any more")

"""A commit of which nobody hears: its connection, or the machine that sent it, is lost in it.

A proxy looks for the command COMMIT itself in what goes to the server. Two workers.
"""

from __future__ import annotations

import os
import pwd
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from keyfront.middleware.tokens.coordinator.local import SharedMemory
from support import servers
from support.fault_proxy import FaultProxy
from support.history import History
from support.imported import Imported
from support.keystone_world import VALIDATE, Answer, Client, World, grant, random_name
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
#: How often each way to lose a commit is tried with each kind of change.
ROUNDS = int(os.environ.get("KEYFRONT_LOST_COMMITS_ROUNDS", "1"))
#: Seconds between reads: others need the processor, too.
PAUSE = 0.05
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
def _place(
    folder: Path, kind: str, *, redis: bool = False, more: str = ""
) -> Iterator[Place]:
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
        url = f"{database.url('keystone', port=proxy.port)}{more}"
        state = keystone_state(folder / "state", database_url=url, extra=extra)
        served = stack.enter_context(serve_as_is(state, "uwsgi"))
        world = World(served.url, served.password)
        world.wait_until_kept()
        yield Place(kind, served, world, database, proxy, path, server, redis_proxy)


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """One without Redis, for all tests of it in turn."""
    more = "?plugin=keyfront" if request.param == "postgresql" else ""
    folder = tmp_path_factory.mktemp("lost")
    with _place(folder, request.param, more=more) as place:
        yield place


# The first of them: what others lose leaves marks until somebody asks for what was changed.
def test_a_machine_that_was_lost_in_a_commit_leaves_no_mark(place: Place) -> None:
    """The server keeps its session, by default for two hours, but in no transaction."""
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


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_a_change_of_which_a_part_is_made_is_not_to_be_repeated(place: Place) -> None:
    """A user is deleted before what he is granted: once more he would not be found."""
    user = place.world.person().user.id
    place.proxy.lose_at(b"DELETE FROM assignment", "unsent")
    with closing(Client(place.served.url)) as client:
        headers = {"X-Auth-Token": place.world.admin}
        try:
            answers = [client.request("DELETE", f"/users/{user}", headers)]
        finally:
            place.proxy.forward()
        answers.append(client.request("DELETE", f"/users/{user}", headers))
    assert [answer.status for answer in answers] == [503, 404]
    assert answers[0].headers["Retry-After"] is None
    assert "a part of the change" in answers[0].body["error"]["message"]


def test_nobody_is_shown_anything_stale_of_commits_that_are_lost(place: Place) -> None:
    """Nor told that a change was refused which may have been made."""
    with _Readers(place) as readers:
        for fate in ("unsent", "sent", "unanswered") * ROUNDS:
            for change in (readers.rename_user, readers.rename_project, readers.revoke):
                change(fate)
                change("")
        readers.take_role("unanswered")
        readers.enough()
    assert readers.history.faults() == []


# keystone-manage, whether or not its script lies beside this interpreter.
MANAGE = "from keystone.cmd.manage import main; main()"


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_nobody_is_shown_anything_stale_beside_keystone_manage(place: Place) -> None:
    """Not even if it loses its commit, and ends with that."""
    with Imported("keystone.cmd.manage") as imported, _Readers(place) as readers:

        def manage(*arguments: str) -> int:
            config = place.served.state / "keystone.conf"
            variables = {**os.environ, "OS_BOOTSTRAP_PASSWORD": place.served.password}
            done = imported.run(
                "-c", MANAGE, "--config-file", config, *arguments, environment=variables
            )
            print(arguments, done.stderr[-1000:])
            return done.returncode

        for fate in ("unsent", "unanswered", ""):
            url, losses = f"http://127.0.0.1:1/{random_name()}", place.proxy.losses
            if fate:
                place.proxy.lose_at(COMMIT[place.kind], fate, after=b"UPDATE endpoint")
            with suppress(_Lost), readers.history.change("url", url, "keystone-manage"):
                region = ("--bootstrap-region-id", "RegionOne")
                status = manage("bootstrap", *region, "--bootstrap-public-url", url)
                place.proxy.forward()
                assert place.proxy.losses - losses == bool(fate)
                assert (status != 0) == bool(fate)
                if fate:
                    raise _Lost
        owner = pwd.getpwuid(os.geteuid())
        rotate = f"fernet_rotate --keystone-user {owner.pw_name} --keystone-group {owner.pw_gid}"
        for command in ("trust_flush", "mapping_purge --all", rotate):
            thread = threading.Thread(target=lambda: (readers.rename_user(""), readers.revoke("")))
            thread.start()
            try:
                assert manage(*command.split()) == 0
            finally:
                thread.join(PATIENCE)
        readers.enough()
    assert readers.history.faults() == []


class _Readers:
    """Two threads that validate a person's tokens and write down what they are shown."""

    def __init__(self, place: Place) -> None:
        self.place, self.world = place, place.world
        self.history = History()
        self.role = self.world.role()
        self.person = self.world.person(self.role, self.world.role())
        self.tokens = {self.person.token: "token 0"}
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.changes = 0
        token = place.validate(self.person.token).token()
        for register, value in [("token 0", "holds"), *self._shown(token)]:
            self.history.start(register, value)
        self._threads = [threading.Thread(target=self._read) for _ in range(2)]

    def __enter__(self) -> _Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert self.failures == []

    def _shown(self, token: dict[str, Any]) -> list[tuple[str, object]]:
        return [
            ("user", token["user"]["name"]),
            ("project", token["project"]["name"]),
            ("role", self.role in {x["id"] for x in token["roles"]}),
            *(
                ("url", endpoint["url"])
                for service in token["catalog"]
                for endpoint in service["endpoints"]
                if (service["type"], endpoint["interface"]) == ("identity", "public")
            ),
        ]

    def _read(self) -> None:
        try:
            while not self.over.is_set():
                for token, register in list(self.tokens.items())[-3:]:
                    began = time.monotonic()
                    answer = self.place.validate(token)
                    shown = [(register, "revoked")]
                    if answer.status == 200:
                        shown = [(register, "holds"), *self._shown(answer.token())]
                    elif answer.status == 503:  # its connection was not to be had
                        assert answer.headers["Retry-After"] == "1", answer.body
                        continue
                    else:
                        assert answer.status == 404, answer.body
                    self.history.read(began, "Keystone", shown)
                    self.over.wait(PAUSE)
        except BaseException as failure:
            self.failures.append(failure)
            self.over.set()

    def enough(self) -> None:
        """Read on until what was lost last is seen, whatever it is."""
        seen = self.history.reads + 50
        wait_for(lambda: self.over.is_set() or self.history.reads >= seen, "they have read")

    def _change(self, fate: str, register: str, value: object, *request: Any, good: int) -> None:
        """Ask for a change, whose commit is lost in some way; none: in no way."""
        self.changes += 1
        losses = self.place.proxy.losses
        self.place.lose(fate) if fate else self.place.proxy.forward()
        with suppress(_Lost), self.history.change(register, value, "Keystone"):
            with closing(Client(self.place.served.url)) as client:
                method, path, headers, body = request
                headers = {"X-Auth-Token": self.world.admin, **headers}
                answer = client.request(method, path, headers, body)
            self.place.proxy.forward()
            assert (self.place.proxy.losses > losses) == bool(fate)
            if not fate:
                assert answer.status == good, answer.body
                return
            assert answer.status == 503, answer.body
            assert answer.headers["Retry-After"] is None
            assert "Look whether it is made" in answer.body["error"]["message"]
            raise _Lost

    def rename_user(self, fate: str) -> None:
        name = random_name()
        body = {"user": {"name": name}}
        path = f"/users/{self.person.user.id}"
        self._change(fate, "user", name, "PATCH", path, {}, body, good=200)

    def rename_project(self, fate: str) -> None:
        name = random_name()
        path, body = f"/projects/{self.person.project}", {"project": {"name": name}}
        self._change(fate, "project", name, "PATCH", path, {}, body, good=200)

    def revoke(self, fate: str) -> None:
        self.place.proxy.forward()
        token = self.world.issue(self.person.user, project=self.person.project)
        register = f"token {len(self.tokens)}"
        self.history.start(register, "holds")
        self.tokens[token] = register
        self.enough()
        headers = {"X-Subject-Token": token}
        self._change(fate, register, "revoked", "DELETE", VALIDATE, headers, None, good=204)

    def take_role(self, fate: str) -> None:
        path = grant("projects", self.person.project, "users", self.person.user.id, self.role)
        self._change(fate, "role", False, "DELETE", path, {}, None, good=204)


class _Lost(Exception):
    """A change may have been made or not."""


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

"""Several writers at once on SQLite: each is answered, and what was acknowledged is there.

SQLite has one writer at a time. A transaction that has read and writes then cannot wait for
another one, whose change it has not seen: it fails at once, however long it may wait.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from keyfront.gateway.serve.state import State
from support.imported import Imported
from support.keystones import keystone_state, serve_as_is
from support.served import PATIENCE, Served

pytest.importorskip("keystone")

SECONDS = float(os.environ.get("KEYFRONT_WRITERS_SECONDS", "2"))
WRITERS = 8
LOGINS = 2
EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[security_compliance]
# Each login writes, and so does each failed one.
disable_user_account_days_inactive = 90
lockout_failure_attempts = 1000000
"""
MANAGE = "from keystone.cmd.manage import main; main()"


class Client:
    """One client: its answers by status, and what was acknowledged to it."""

    def __init__(self, served: Served, token: str) -> None:
        self.served, self.token = served, token
        self.statuses: Counter[int] = Counter()
        self.projects: dict[str, str] = {}

    def ask(self, method: str, path: str, body: object, token: str | None = None) -> Any:
        with closing(HTTPConnection("127.0.0.1", self.served.port, timeout=PATIENCE)) as connection:
            headers = {"Content-Type": "application/json"}
            if token:
                headers["X-Auth-Token"] = token
            connection.request(method, path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = json.loads(answer.read() or b"{}")
        self.statuses[answer.status] += 1
        return answer, content

    def write(self, number: int) -> None:
        """Make a project and give it a description, which reads it first."""
        name = f"project-{id(self)}-{number}"
        answer, content = self.ask("POST", "/v3/projects", {"project": {"name": name}}, self.token)
        if answer.status != 201:
            return
        identifier = content["project"]["id"]
        self.projects[identifier] = ""
        change = {"project": {"description": name}}
        answer, _ = self.ask("PATCH", f"/v3/projects/{identifier}", change, self.token)
        if answer.status == 200:
            self.projects[identifier] = name

    def log_in(self, number: int) -> None:
        """Log in, every other time with a wrong password."""
        password = self.served.password if number % 2 else "wrong"
        self.ask("POST", "/v3/auth/tokens", login(password))


def login(password: str) -> dict[str, Any]:
    user = {"name": "admin", "domain": {"id": "default"}, "password": password}
    return {
        "auth": {
            "identity": {"methods": ["password"], "password": {"user": user}},
            "scope": {"project": {"name": "admin", "domain": {"id": "default"}}},
        }
    }


@pytest.fixture(scope="module", params=["uwsgi", "gevent"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A Keystone whose database is not in write-ahead mode, as Keystone itself makes it."""
    state = keystone_state(tmp_path_factory.mktemp("writers") / "state", extra=EXTRA)
    with closing(sqlite3.connect(state / "keystone.sqlite")) as database:
        assert database.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    with serve_as_is(state, request.param) as running:
        yield running


def _until(end: float, act: Callable[[int], None]) -> None:
    number = 0
    # twice at least, however slow the machine is
    while number < 2 or time.monotonic() < end:
        number += 1
        act(number)


def _bootstrap(served: Served, imported: Imported, end: float) -> list[str]:
    """Run ``keystone-manage bootstrap`` again and again; what it said when it failed."""
    failed = []
    state = State(served.state)
    endpoint = state.endpoint()
    assert endpoint is not None
    first = True
    while first or time.monotonic() < end:
        first = False
        done = imported.run(
            *("-c", MANAGE, "--config-file", state.config, "bootstrap"),
            environment={
                **os.environ, "OS_BOOTSTRAP_PASSWORD": served.password,
                "OS_BOOTSTRAP_REGION_ID": "RegionOne", "OS_BOOTSTRAP_PUBLIC_URL": endpoint,
            },
        )  # fmt: skip
        if done.returncode:
            failed.append((done.stdout + done.stderr)[-2000:])
    return failed


def test_writers_and_logins_at_once(served: Served, imported: Imported) -> None:
    """Eight writers, two logins at a time and a bootstrap: nobody fails, nothing is lost."""
    first = Client(served, "")
    answer, _ = first.ask("POST", "/v3/auth/tokens", login(served.password))
    assert answer.status == 201
    token = answer.headers["X-Subject-Token"]
    writers = [Client(served, token) for _ in range(WRITERS)]
    logins = [Client(served, token) for _ in range(LOGINS)]
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(WRITERS + LOGINS + 1) as pool:
        made = [pool.submit(_until, end, one.write) for one in writers]
        made += [pool.submit(_until, end, one.log_in) for one in logins]
        bootstrap = pool.submit(_bootstrap, served, imported, end)
        for future in made:
            future.result()
    assert bootstrap.result() == []
    assert {status for one in writers for status in one.statuses} == {200, 201}, [
        dict(one.statuses) for one in writers
    ]
    assert {status for one in logins for status in one.statuses} == {201, 401}
    found = {
        project["id"]: project["description"]
        for project in _get(served, token, "/v3/projects")["projects"]
    }
    # For the long form, with -s.
    for who, clients in (("writers", writers), ("logins", logins)):
        total = sum((one.statuses for one in clients), Counter())
        print(f"{served.process.args[-1]}: {SECONDS:g} s, {who}: {dict(total)}")
    for one in writers:
        assert one.projects, "it never had its turn"
        assert one.projects.items() <= found.items()


def _get(served: Served, token: str, path: str) -> Any:
    with closing(HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)) as connection:
        connection.request("GET", path, headers={"X-Auth-Token": token})
        answer = connection.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())


def test_reading_does_not_wait_for_a_writer(served: Served) -> None:
    """A reader is answered while another process holds the database's only right to write."""
    client = Client(served, "")
    answer, _ = client.ask("POST", "/v3/auth/tokens", login(served.password))
    token = answer.headers["X-Subject-Token"]
    asked, answered = threading.Event(), threading.Event()
    statuses: list[int] = []

    def write() -> None:
        asked.set()
        project = {"project": {"name": "waits"}}
        made, _ = client.ask("POST", "/v3/projects", project, token)
        statuses.append(made.status)
        answered.set()

    with closing(sqlite3.connect(served.state / "keystone.sqlite", isolation_level=None)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=write)
        writer.start()
        assert asked.wait(PATIENCE)
        for _ in range(4):
            _get(served, token, "/v3/projects?name=admin")
        assert not answered.is_set()
        other.execute("ROLLBACK")
    writer.join()
    assert statuses == [201]


def test_a_login_waits_for_a_writer_once_a_day(served: Served) -> None:
    """Whose last login was today logs in while another process holds the right to write."""
    client = Client(served, "")

    def log_in() -> str:
        answer, _ = client.ask("POST", "/v3/auth/tokens", login(served.password))
        assert answer.status == 201
        return str(database.execute(LAST_ACTIVE).fetchone()[0])

    path = served.state / "keystone.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        today = log_in()
        database.execute("UPDATE user SET last_active_at = date(last_active_at, '-1 day')")
        yesterday = database.execute(LAST_ACTIVE).fetchone()[0]
        assert yesterday < today == log_in()
        database.execute("BEGIN IMMEDIATE")
        log_in()
        database.execute("ROLLBACK")


LAST_ACTIVE = """
SELECT last_active_at FROM user JOIN local_user ON local_user.user_id = user.id
WHERE local_user.name = 'admin'
"""

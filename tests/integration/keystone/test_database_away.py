"""The database goes away and comes back under a Keystone that is being asked, on real processes.

Or it stays, and refuses what it is asked for now.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keyfront.common.machine import cores
from support import servers
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, Answer, Client, World, random_name
from support.keystones import keystone_state, serve_as_is
from support.processes import kill, runs
from support.replicas import galera_options
from support.served import Served, free_port, wait_for

pytest.importorskip("keystone")

ASKED = 80
# One for each core.
WORKERS = cores()
TOLD = "the database cannot be reached"
# path: the usual folder, named after the database.
EXTRA = """\
[identity]
password_hash_rounds = 4
# As Keystone has it by default, with a warning at each password.
max_password_length = 4096
[keyfront_token_cache]
path =
# What is known does not end by the clock on a busy machine.
ttl = 3600
"""


# Of the driver, in seconds: so long a database that hangs is waited for.
TIMEOUTS = "connect_timeout=3&read_timeout=6&write_timeout=6"


@pytest.mark.slow
def test_it_is_said_in_a_line_and_answered_with_503(tmp_path: Path) -> None:
    """Also where Keystone would write a traceback of 35 kB for each request."""
    port = free_port()
    with servers.mariadb(tmp_path, port=port) as database, FaultProxy(port) as proxy:
        database.fresh_database("keystone")
        url = f"mysql+pymysql://root@127.0.0.1:{proxy.port}/keystone?{TIMEOUTS}"
        state = keystone_state(tmp_path / "state", database_url=url, extra=EXTRA)
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            world.wait_until_kept()
            token = world.admin
            headers = {"X-Auth-Token": token, "X-Subject-Token": token}

            def look_up(number: int) -> Answer:
                # A user of whom nothing is kept anywhere.
                return ask(served, "GET", f"/users/{number}", {"X-Auth-Token": token})

            def known() -> Answer:
                return ask(served, "GET", VALIDATE, headers)

            assert known().status == 200
            assert look_up(0).status == 404
            size = len(served.log("keystone.log"))
            proxy.cut()
            begun = time.monotonic()
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(look_up, range(1, 1 + ASKED)))
            answers.append(ask(served, "POST", VALIDATE, {}, login(served)))
            # What it would be done to cannot be found: Keystone takes that for a lack of rights.
            body: dict[str, object] = {"domain": {"name": "other"}}
            answers.append(ask(served, "PATCH", "/domains/none", {"X-Auth-Token": token}, body))
            assert known().status == 200, "what is known needs no database"
            # What is known and has to be looked at: it stands no longer.
            command = [sys.executable, "-m", "keyfront", "tokens", "flush"]
            subprocess.run([*command, "--config-file", state / "keystone.conf"], check=True)
            answers.append(known())
            _assert_told(answers)
            seconds = time.monotonic() - begun
            lines = _lines(served, size)
            # A line a second and worker, whatever is asked.
            assert 1 <= len(lines) <= WORKERS * (int(seconds) + 2), lines
            others = sum(int(x) for x in re.findall(r"so were (\d+) others", "\n".join(lines)))
            assert len(lines) + others <= len(answers)

            proxy.forward()
            wait_for(lambda: look_up(1 + ASKED).status == 404, "the database is back")
            assert ask(served, "POST", VALIDATE, {}, login(served)).status == 201
            assert known().status == 200

            # It takes what is sent and says nothing: a request waits for the driver's time.
            size = len(served.log("keystone.log"))
            proxy.stall()
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(look_up, 2 + ASKED)
                assert known().status == 200, "others are not kept waiting"
                _assert_told([waiting.result()])
            assert _lines(served, size)
            proxy.forward()
            wait_for(lambda: look_up(3 + ASKED).status == 404, "the database is back")
            assert ask(served, "POST", VALIDATE, {}, login(served)).status == 201


@pytest.mark.slow
def test_workers_that_never_reached_it_keep_nobody_waiting(tmp_path: Path) -> None:
    """Not even where /readyz is the first to want an engine of oslo.db's.

    By its defaults that one would try ten times, ten seconds apart, under a lock: until harakiri
    ends the worker, whose clients get no answer at all, and so would those of the next worker.
    """
    port = free_port()
    with servers.mariadb(tmp_path, port=port) as database, FaultProxy(port) as proxy:
        database.fresh_database("keystone")
        url = f"mysql+pymysql://root@127.0.0.1:{proxy.port}/keystone?{TIMEOUTS}"
        state = keystone_state(tmp_path / "state", database_url=url, extra=EXTRA)
        with serve_as_is(state, "uwsgi") as served:
            token = World(served.url, served.password).admin

            def look_up(number: int) -> Answer:
                return ask(served, "GET", f"/users/{number}", {"X-Auth-Token": token})

            proxy.cut()
            size = len(served.log("keystone.log"))
            before = served.masters("uwsgi").children()
            for process in before:
                kill(process)
            wait_for(lambda: not any(map(runs, before)), "the workers are gone")
            told = [ready(served) for _ in range(4 * WORKERS)]
            assert {(x.status, x.body["parts"]["database"]["ok"]) for x in told} == {(503, False)}
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(look_up, range(4 * WORKERS)))
            answers.append(ask(served, "POST", VALIDATE, {}, login(served)))
            _assert_told(answers)
            assert "attempts left" not in served.log("keystone.log")[size:]
            after = served.masters("uwsgi").children()
            assert len(after) == len(before) and not set(after) & set(before)

            proxy.forward()
            wait_for(lambda: look_up(0).status == 404, "the database is back")
            assert ask(served, "POST", VALIDATE, {}, login(served)).status == 201
            wait_for(lambda: ready(served).status == 200, "it is ready again")
            assert set(served.masters("uwsgi").children()) == set(after)


FAIL_IN_MARIADB = """\
CREATE TRIGGER keystone.fail BEFORE UPDATE ON keystone.project FOR EACH ROW
SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {}, MESSAGE_TEXT = 'not this time'
"""
FAIL_IN_POSTGRESQL = """\
CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'not this time' USING ERRCODE = '{}'; END $$
"""
TRIGGER = "CREATE TRIGGER fail BEFORE UPDATE ON project FOR EACH ROW EXECUTE FUNCTION fail()"
AWAY, BUSY, FIXED = "cannot be reached", "was busy with other changes", "takes no changes"


@pytest.mark.slow
def test_a_mariadb_that_refuses_for_now(tmp_path: Path) -> None:
    with servers.mariadb(tmp_path) as database, _served(tmp_path, database) as place:
        lock = "SELECT * FROM keystone.project WHERE id = '{}' FOR UPDATE"
        database.ask("SET GLOBAL innodb_lock_wait_timeout = 1")
        with closing(database._connect()) as other, other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(lock.format(place.project))
            place.kill_workers()  # who has connected since has that timeout
            place.assert_refused(BUSY)
        place.assert_good()
        codes = dict.fromkeys((1020, 1205, 1213), BUSY) | dict.fromkeys((1047, 1053), AWAY)
        for code, reason in (codes | dict.fromkeys((1290, 1836), FIXED)).items():
            database.ask(FAIL_IN_MARIADB.format(code))
            place.assert_refused(reason)
            database.ask("DROP TRIGGER keystone.fail")
            place.assert_good()
        place.assert_nothing_more()


@pytest.mark.slow
def test_a_node_of_galera_that_is_in_no_cluster(tmp_path: Path) -> None:
    """Also for who only reads. It is ready again without a connection being tried in vain."""
    options = galera_options([free_port() for _ in range(2)])
    with servers.mariadb(tmp_path, more=options) as database:
        with _served(tmp_path, database) as place:
            database.ask("SET GLOBAL wsrep_reject_queries = ALL")
            place.assert_refused(AWAY)
            _assert_told([place.look_up(), ask(place.served, "POST", VALIDATE, {}, place.login)])
            database.ask("SET GLOBAL wsrep_reject_queries = NONE")
            place.assert_good()
            assert place.look_up().status == 404
            assert ask(place.served, "POST", VALIDATE, {}, place.login).status == 201
            place.assert_nothing_more()


@pytest.mark.slow
def test_a_postgresql_that_refuses_for_now(tmp_path: Path) -> None:
    with servers.postgresql(tmp_path) as database, _served(tmp_path, database) as place:
        for state in ("40001", "40P01", "55P03"):
            database.ask(FAIL_IN_POSTGRESQL.format(state), "keystone")
            database.ask(TRIGGER, "keystone")
            place.assert_refused(BUSY)
            database.ask("DROP TRIGGER fail ON project", "keystone")
            place.assert_good()
        _take_changes(database, False)
        place.assert_refused(FIXED)
        assert place.look_up().status == 404, "it is read all the same"
        _take_changes(database, True)
        place.assert_good()
        place.assert_nothing_more()


def _take_changes(database: servers.PostgreSQL, take: bool) -> None:
    fixed = "off" if take else "on"
    database.ask(f"ALTER SYSTEM SET default_transaction_read_only = {fixed}")
    database.ask("SELECT pg_reload_conf()")
    shown = "SHOW default_transaction_read_only"
    wait_for(lambda: database.ask(shown) == [(fixed,)], "it has read its configuration")


@dataclass
class _Place:
    """A served Keystone, with a project to be changed."""

    served: Served
    token: str
    project: str

    @property
    def login(self) -> dict[str, object]:
        return login(self.served)

    def change(self) -> Answer:
        body = {"project": {"description": random_name()}}
        path = f"/projects/{self.project}"
        return ask(self.served, "PATCH", path, {"X-Auth-Token": self.token}, body)

    def look_up(self) -> Answer:
        return ask(self.served, "GET", f"/users/{random_name()}", {"X-Auth-Token": self.token})

    def assert_refused(self, reason: str) -> None:
        # In each worker, as a rule.
        answers = [self.change() for _ in range(2 * WORKERS)]
        _assert_told(answers)
        for answer in answers:
            assert reason in answer.body["error"]["message"]

    def assert_good(self) -> None:
        assert {self.change().status for _ in range(2 * WORKERS)} == {200}

    def assert_nothing_more(self) -> None:
        log = self.served.log("keystone.log")
        assert "a request was answered 503" in log
        assert "Traceback" not in log

    def kill_workers(self) -> None:
        before = self.served.masters("uwsgi").children()
        for process in before:
            kill(process)
        wait_for(lambda: not any(map(runs, before)), "the workers are gone")


@contextmanager
def _served(
    folder: Path, database: servers.MariaDB | servers.PostgreSQL
) -> Iterator[_Place]:
    url = database.fresh_database("keystone")
    state = keystone_state(folder / "state", database_url=url, extra=EXTRA)
    with serve_as_is(state, "uwsgi") as served:
        world = World(served.url, served.password)
        world.wait_until_kept()
        yield _Place(served, world.admin, world.project())


def _assert_told(answers: list[Answer]) -> None:
    """All are refused for now."""
    assert {answer.status for answer in answers} == {503}
    for answer in answers:
        assert answer.headers["Retry-After"] == "1"
        assert answer.body["error"]["code"] == 503


def _lines(served: Served, size: int) -> list[str]:
    """The lines that tell of it, in what was logged since; no traceback is beside them."""
    log = served.log("keystone.log")[size:]
    assert "Traceback" not in log
    return [line for line in log.splitlines() if TOLD in line]


def ask(
    served: Served, method: str, path: str, headers: dict[str, str], body: object = None
) -> Answer:
    with closing(Client(served.url)) as client:
        return client.request(method, path, headers, body)


def ready(served: Served) -> Answer:
    with closing(Client(served.url.removesuffix("/v3"))) as client:
        return client.request("GET", "/readyz", {})


def login(served: Served) -> dict[str, object]:
    user = {"name": "admin", "domain": {"id": "default"}, "password": served.password}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}

"""What real database servers say of commits whose writers may be dead."""

from __future__ import annotations

import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg2
import pymysql
import pytest
import sqlalchemy as sa

from keyfront.middleware.tokens.coordinator import mark_owners
from keyfront.middleware.tokens.coordinator.mark_owners import Settled
from keyfront.middleware.tokens.invalidation.change_log import coordinators
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach
from support import servers
from support.replicas import galera_pair
from support.served import PATIENCE, wait_for

NEW = mark_owners.beginning(7)
_T = sa.Table("t", sa.MetaData(), sa.Column("x", sa.Integer, primary_key=True))


def _judge(*urls: str) -> Settled:
    made = Settled()
    for url in urls:
        engine = sa.create_engine(url)
        arguments, named = engine.dialect.create_connect_args(engine.url)
        made.connections.append(
            (engine.dialect.name, lambda e=engine, a=arguments, n=named: e.dialect.connect(*a, **n))
        )
    return made


def _asked(judge: Settled, owner: str, age: float) -> bool:
    """As soon as it asks once more."""
    judge._asked = float("-inf")
    judge._met.clear()
    return judge(owner, age)


@contextmanager
def _writing(url: str, value: int) -> Iterator[sa.Connection]:
    """A transaction that has written."""
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.insert(_T).values(x=value))
        yield connection


@contextmanager
def _committing(url: str, value: int, backup: Any, commits: Callable[[], bool]) -> Iterator[None]:
    """A transaction that is being committed until a backup lets it go on."""
    with _writing(url, value) as connection:
        thread = threading.Thread(target=connection.commit)
        _do(backup, "FLUSH TABLES WITH READ LOCK")
        try:
            thread.start()
            wait_for(commits, "the server is committing")
            yield
        finally:
            _do(backup, "UNLOCK TABLES")
            thread.join(PATIENCE)


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with servers.postgresql(tmp_path_factory.mktemp("pg"), replicated=True) as server:
        url = server.fresh_database("keystone")
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            _T.create(connection)
            connection.exec_driver_sql("CREATE ROLE plain LOGIN")
            connection.exec_driver_sql("ALTER DATABASE keystone SET synchronous_commit = on")
        engine.dispose()
        yield server


def test_postgresql_knows_who_writes_whoever_asks(postgresql: Any) -> None:
    url = postgresql.url("keystone")
    judge = _judge(url)
    with _writing(url, 1) as first:
        assert not _asked(judge, NEW, 0.0)
        with _writing(url, 2), _writing(url, 3) as third:
            third.rollback()
            assert not _asked(judge, NEW, 1.0)
            first.commit()
            # Whoever began after it was first asked is not waited for.
            assert _asked(judge, NEW, 2.0)
            # But for another table.
            assert not _asked(judge, mark_owners.beginning(8), 0.0)
    assert _asked(judge, mark_owners.beginning(8), 1.0)
    # Reading keeps nothing up, nor do other databases.
    other = postgresql.fresh_database("other")
    engine = sa.create_engine(other)
    with engine.connect() as elsewhere:
        _T.create(elsewhere)
        with sa.create_engine(url, poolclass=sa.pool.NullPool).connect() as reader:
            reader.execute(sa.select(_T)).all()
            assert _asked(judge, mark_owners.beginning(9), 0.0)
    engine.dispose()
    # And from where another user's sessions are not shown.
    hidden = _plain(postgresql)
    with _writing(url, 4):
        assert not _asked(hidden, NEW, 0.0)
    assert _asked(hidden, NEW, 0.0)


def _plain(server: Any) -> Settled:
    made = Settled()
    # The kernel says who the user is, so that it takes the role on.
    options = "-c role=plain"
    made.connections.append(
        ("postgresql", lambda: psycopg2.connect(
            host=str(server.folder), user="keystone", dbname="keystone", options=options
        ))
    )  # fmt: skip
    return made


def test_postgresql_knows_a_transaction_by_its_number(postgresql: Any) -> None:
    """Of which a proxy does not say in what session it is; while a standby is waited for, too."""
    url = postgresql.url("keystone")
    judge = _judge(url)

    def owner(connection: sa.Connection) -> str:
        session = mark_owners.transaction_of("postgresql", connection.connection.dbapi_connection)
        assert session.startswith("xid/")
        return f"0123456789ab:1:5 {session}#3"

    _let_commits_wait(postgresql, True)
    try:
        with _writing(url, 11) as one, _writing(url, 12) as other:
            first, second = owner(one), owner(other)
            assert not _asked(judge, first, 1e6)
            other.rollback()
            assert _asked(judge, second, 10)
            thread = threading.Thread(target=one.commit)
            thread.start()
            look = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_for(lambda: postgresql.ask(look) == [(1,)], "the server is committing")
            assert not _asked(judge, first, 1e6)
            assert not _asked(judge, NEW, 0.0)
            _let_commits_wait(postgresql, False)
            thread.join(PATIENCE)
            assert _asked(judge, first, 10)
            assert _asked(judge, NEW, 1.0)
    finally:
        _let_commits_wait(postgresql, False)
    # Of a number that was not given yet nothing is known.
    assert not _asked(judge, "0123456789ab:1:5 xid/99999999999#1", 299)


def _let_commits_wait(server: Any, wait: bool) -> None:
    """For a standby, which is not there."""
    names = "nobody" if wait else ""
    server.ask(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.ask("SELECT pg_reload_conf()")
    wait_for(lambda: server.ask("SHOW synchronous_standby_names") == [(names,)], "it is read")


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    more = {"skip-log-bin": 1}  # with a database for privileges
    with servers.mariadb(tmp_path_factory.mktemp("maria"), more=more) as server:
        engine = sa.create_engine(server.fresh_database("keystone"))
        with engine.begin() as connection:
            _T.create(connection)
        engine.dispose()
        yield server


def test_mariadb_knows_what_it_is_at(mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = mariadb.url("keystone")
    judge = _judge(url)
    assert not _asked(judge, NEW, 0.5)  # a commit may be on its way
    assert _asked(judge, NEW, 2.5)
    look = "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE info = 'COMMIT'"
    with closing(_judge(url).connections[0][1]()) as backup:
        with _committing(url, 1, backup, lambda: mariadb.ask(look)[0]["n"] == 1):
            assert not _asked(judge, mark_owners.beginning(12), 2.0)
            # Nor is it overlooked without the right to see transactions.
            with monkeypatch.context() as refused:
                refused.setattr(mark_owners, "_MYSQL_TRANSACTIONS", "SELECT 1 FROM that_is_refused")
                assert not _asked(judge, mark_owners.beginning(13), 2.0)
    for number in (12, 13):
        assert _asked(judge, mark_owners.beginning(number), 3.0)
    # What was begun since is not waited for.
    with closing(_judge(url).connections[0][1]()) as connection:
        thread = threading.Thread(target=_sleep, args=[connection])
        thread.start()
        sleeps = "SELECT id FROM information_schema.processlist WHERE info LIKE '%SLEEP(600)'"
        wait_for(lambda: mariadb.ask(sleeps), "a statement is being executed")
        assert _asked(judge, mark_owners.beginning(8), 600.0)
        assert not _asked(judge, mark_owners.beginning(9), 2.0)
        mariadb.ask(f"KILL QUERY {mariadb.ask(sleeps)[0]['id']}")
        thread.join(PATIENCE)
    # A transaction that waits for its client, with the right PROCESS and without.
    with _writing(url, 2):
        assert not _asked(judge, mark_owners.beginning(10), 2.0)
        with monkeypatch.context() as refused:
            refused.setattr(mark_owners, "_MYSQL_TRANSACTIONS", "SELECT 1 FROM that_is_refused")
            assert not _asked(judge, mark_owners.beginning(11), 2.0)
    assert _asked(judge, mark_owners.beginning(10), 4.0)


# In the server, and by several: on a busy machine one alone may look too seldom.
_WATCH = """\
BEGIN NOT ATOMIC
    DECLARE found INT;
    WHILE IS_FREE_LOCK('over') DO
        SELECT COUNT(*) INTO found FROM information_schema.innodb_trx;
    END WHILE;
END"""


def test_mariadb_tells_of_transactions_of_some_time_ago(mariadb: Any) -> None:
    """For as long as somebody looks at them all the time, as some who watch servers do."""
    url = mariadb.url("keystone")
    judge = _judge(url)
    # From where nobody looks for who writes here.
    connect = _judge(mariadb.fresh_database("watched")).connections[0][1]
    look = "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE info LIKE '%innodb_trx'"
    with ExitStack() as stack:
        ends, *watchers = (stack.enter_context(closing(connect())) for _ in range(5))
        threads = [threading.Thread(target=_do, args=(one, _WATCH)) for one in watchers]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: mariadb.ask(look)[0]["n"] > 1, "they watch")
            with _writing(url, 51):
                assert not _asked(judge, mark_owners.beginning(51), 2.0)
            # And that nobody has waited for so long is known all the same.
            assert _asked(judge, mark_owners.beginning(51), 40.0)
        finally:
            _do(ends, "SELECT GET_LOCK('over', 0)")
            for thread in threads:
                thread.join(PATIENCE)


# Whose lines make the tables of privileges; of the package of the server itself.
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_PRIVILEGES = (
    *("db", "global_priv", "roles_mapping", "tables_priv", "columns_priv", "procs_priv"),
    *("proxies_priv", "servers", "func", "plugin"),
)
# The last one has the right PROCESS.
USERS = ("plain", "other", "seeing")
# A process that is killed in its commit says first in what session it is.
_WRITER = """\
import sys
import sqlalchemy as sa
from keyfront.middleware.tokens.coordinator import mark_owners
with sa.create_engine(sys.argv[1]).connect() as connection:
    session = mark_owners.session_of("mysql", connection.connection.dbapi_connection)
    connection.exec_driver_sql(f"INSERT INTO t VALUES ({sys.argv[2]})")
    print(session, flush=True)
    sys.stdin.readline()
    connection.commit()
"""


@pytest.fixture(scope="module")
def granted(mariadb: Any) -> Any:
    """The server goes by privileges: of ``keystone`` all, of others what guides tell to grant."""
    lines = _TABLES.read_text(encoding="utf-8").splitlines()
    starts = tuple(f"CREATE TABLE IF NOT EXISTS {table} " for table in _PRIVILEGES)
    tables = [line for line in lines if line.startswith(starts)]
    assert len(tables) == len(_PRIVILEGES)
    everything = """('localhost', 'keystone', '{"access": 18446744073709551615}')"""
    mariadb.ask("USE mysql", *tables, f"INSERT INTO global_priv VALUES {everything}")
    mariadb.ask("FLUSH PRIVILEGES")
    for user in USERS:
        grant = f"GRANT ALL PRIVILEGES ON keystone.* TO {user}@localhost"
        mariadb.ask(f"CREATE USER {user}@localhost", grant)
    mariadb.ask(f"GRANT PROCESS ON *.* TO {USERS[-1]}@localhost")
    return mariadb


class _Numbering(socketserver.BaseRequestHandler):
    """Greets with a number of its own, as ProxySQL and MaxScale do, and forwards all else."""

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.server.behind)  # type: ignore[attr-defined]
            greeting = bytearray(server.recv(4096))
            number = greeting.index(0, 5) + 1  # behind the header, the protocol and the version
            greeting[number : number + 4] = (4_000_000).to_bytes(4, "little")
            self.request.sendall(greeting)
            back = threading.Thread(target=_forward, args=(server, self.request))
            back.start()
            _forward(self.request, server)
            back.join()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def _proxy(behind: Path) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Numbering) as proxy:
        proxy.behind = str(behind)  # type: ignore[attr-defined]
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy.server_address[1]
        finally:
            proxy.shutdown()
            thread.join()


def test_mariadb_whose_user_sees_his_own_sessions_only(
    granted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right PROCESS, which no guide of Keystone tells to grant."""
    full = granted.url("keystone")
    plain, other, seeing = (full.replace("keystone@", f"{user}@") for user in USERS)
    look = "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE info = 'COMMIT'"

    def said(judge: Settled, owner: str, age: float) -> tuple[bool, str]:
        caplog.clear()
        judge._told = ""
        return _asked(judge, owner, age), caplog.text

    with _proxy(granted.socket) as port:
        proxied = f"mysql+pymysql://plain@127.0.0.1:{port}/keystone"
        own, strange, behind, right = map(_judge, (plain, other, proxied, full))
        with closing(right.connections[0][1]()) as backup, subprocess.Popen(
            [sys.executable, "-c", _WRITER, plain, "31"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            try:
                assert writer.stdout is not None
                session = writer.stdout.readline().decode().strip()
                assert session.partition("/")[2].isdigit()
                owner = f"0123456789ab:1:5 {session}#1"
                _do(backup, "FLUSH TABLES WITH READ LOCK")
                assert writer.stdin is not None
                writer.stdin.write(b"\n")
                writer.stdin.flush()
                wait_for(lambda: granted.ask(look)[0]["n"] == 1, "the server is committing")
                # As good as dead; a server that hears of its end would end the session soon.
                writer.send_signal(signal.SIGSTOP)
                # Whoever has the same user sees it, and waits for as long as it takes.
                over, text = said(own, owner, 1e6)
                assert not over
                assert "its database session goes on; until that is over" in text
                assert said(own, NEW, 2.0)[0] is False
                # Another user does not, nor who asks through a proxy: they wait for so long.
                for judge in (strange, behind):
                    over, text = said(judge, owner, 299)
                    assert not over
                    assert "cannot be looked for; until 300 s have passed" in text
                    over, text = said(judge, owner, 301)
                    assert over
                    assert "taken for complete after 301 s" in text
                # A table that was made anew: a proxy tells nothing, another user sees nobody.
                assert "cannot be found out; until 300 s" in said(behind, NEW, 299)[1]
                assert said(strange, NEW, 2.0)[0]
                # With the right he sees all.
                assert not _asked(_judge(seeing), NEW, 2.0)
            finally:
                writer.kill()
            _do(backup, "UNLOCK TABLES")
        wait_for(lambda: _asked(own, owner, 10), "its session is gone")
        assert not _asked(strange, owner, 299)
        assert _asked(own, NEW, 4.0)
        # Who writes through a proxy is in no session that anybody could look for.
        with closing(behind.connections[0][1]()) as connection:
            session = mark_owners.session_of("mysql", connection)
        assert session == mark_owners.UNKNOWN
        # Nor is anything set there, which a proxy might not know; elsewhere it is.
        for url, bound in ((proxied, 0), (plain, mark_owners.IDLE_SECONDS)):
            assert _idle_bound(url) == bound
        over, text = said(own, mark_owners.left(session), 299)
        assert not over
        assert "cannot be looked for; until 300 s have passed" in text
        assert _asked(own, mark_owners.left(session), 301)


# A process that is stopped before its commit.
_STOPPED = """\
import sys
import sqlalchemy as sa
from keyfront.middleware.tokens.coordinator import mark_owners
mark_owners.IDLE_SECONDS = int(sys.argv[3])
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach
engine = sa.create_engine(sys.argv[1])
attach(engine)
with engine.connect() as connection:
    connection.exec_driver_sql(f"INSERT INTO t VALUES ({sys.argv[2]})")
    print("has written", flush=True)
    sys.stdin.readline()
    try:
        connection.commit()
    except sa.exc.OperationalError as error:
        print(error.orig.args[0], flush=True)
    else:
        print("committed", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def _stopped(url: str, value: int, idle: int) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _STOPPED, url, str(value), str(idle)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has written\n"
            yield process
        finally:
            process.kill()


def _says(process: subprocess.Popen[str]) -> str:
    """After it was let go on."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_mariadb_does_not_let_a_stopped_writer_come_back_late(granted: Any) -> None:
    """Whom nobody without the right PROCESS sees, but by his waiting."""
    plain = granted.url("keystone").replace("keystone@", f"{USERS[0]}@")
    judge, bound = _judge(plain), mark_owners.IDLE_SECONDS + 2.0

    def is_over(number: int, age: float) -> bool:
        return _asked(judge, mark_owners.beginning(number), age)

    def rows(value: int) -> int:
        return int(granted.ask(f"SELECT COUNT(*) AS n FROM keystone.t WHERE x = {value}")[0]["n"])

    with _stopped(plain, 61, mark_owners.IDLE_SECONDS) as process:
        assert not is_over(61, 2.0)
        # As long as he may come back; he comes, and is at his commit.
        backup = _judge(granted.url("keystone")).connections[0][1]()
        with closing(backup):
            _do(backup, "FLUSH TABLES WITH READ LOCK")
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            look = "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE info = 'COMMIT'"
            wait_for(lambda: granted.ask(look)[0]["n"] == 1, "the server is committing")
            # Since so much later: he had waited for as long.
            assert not is_over(61, bound - 1)
            process.send_signal(signal.SIGSTOP)
            assert not is_over(61, bound - 1)
            process.kill()
            _do(backup, "UNLOCK TABLES")
        wait_for(lambda: is_over(61, bound - 1), "its commit is over")
        assert rows(61) == 1
    # Another one has done something since, and is not waited for.
    with closing(_judge(plain).connections[0][1]()):
        assert not is_over(62, 2.0)
        assert is_over(62, bound - 1)
    # Longer than so he does not come back.
    with _stopped(plain, 63, 1) as process:
        assert not is_over(63, 2.0)
        gone = f"SELECT id FROM information_schema.processlist WHERE user = '{USERS[0]}'"
        wait_for(lambda: not granted.ask(gone), "the server has ended his session")
        assert is_over(63, 3.0)
        assert _says(process) in ("2006", "2013")
        assert rows(63) == 0


def test_mysql_lets_writers_wait_for_as_long_as_they_like(
    granted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that without the right PROCESS it is not known when they are over."""
    plain = granted.url("keystone").replace("keystone@", f"{USERS[0]}@")
    monkeypatch.setattr(mark_owners, "_MARIADB_IDLE_SECONDS", "SELECT @@that_is_none")
    judge = _judge(plain)
    new = mark_owners.beginning(71)
    with closing(_judge(plain).connections[0][1]()) as idle:
        assert not _asked(judge, new, 2.0)
        assert not _asked(judge, new, 2.0)
        assert "cannot be found out; until 300 s have passed" in caplog.text
        # It is at something, perhaps its commit, for however long.
        thread = threading.Thread(target=_sleep, args=[idle])
        thread.start()
        sleeps = "SELECT id FROM information_schema.processlist WHERE info LIKE '%SLEEP(600)'"
        wait_for(lambda: granted.ask(sleeps), "a statement is being executed")
        assert not _asked(judge, new, 299)
        assert _asked(judge, new, 301)
        granted.ask(f"KILL QUERY {granted.ask(sleeps)[0]['id']}")
        thread.join(PATIENCE)
        # It has done something since, and it is over.
        assert _asked(judge, new, 299)


def test_a_galera_cluster_is_asked_node_by_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit may go on at another node than at the one that is asked."""
    with galera_pair(tmp_path) as pair:
        engine = sa.create_engine(pair.primary.fresh_database("keystone"))
        with engine.begin() as connection:
            _T.create(connection)
        attach(engine)
        judge = Settled()
        judge.connections.append(coordinators.settled.connections.pop())
        pair.let_go()
        for number, url in enumerate((pair.primary.url("keystone"), pair.replica.url("keystone"))):
            new = mark_owners.beginning(80 + number)
            with _writing(url, 80 + number):
                assert not _asked(judge, new, 2.0)
                assert not _asked(judge, new, 2.0)
            wait_for(lambda new=new: _asked(judge, new, 4.0), "nobody writes any more")
        assert "cannot be found out" not in caplog.text
        # Where one cannot be reached, nobody knows.
        dialect, connect = judge.connections.pop()

        def only_here(host: str = "", port: int = 0) -> Any:
            if port == pair.replica.port:
                raise OSError("no route")
            return connect(host, port)

        judge.connections.append((dialect, only_here))
        new = mark_owners.beginning(90)
        assert not _asked(judge, new, 299)
        assert "cannot be found out; until 300 s have passed" in caplog.text
        assert _asked(judge, new, 301)
        engine.dispose()


def _idle_bound(url: str) -> int:
    """What a connection of Keystone's has for how long a transaction may wait for it."""
    engine = sa.create_engine(url)
    attach(engine)
    coordinators.settled.connections.pop()
    try:
        with engine.connect() as connection:
            look = "SELECT @@idle_write_transaction_timeout"
            return int(connection.exec_driver_sql(look).scalar_one())
    finally:
        engine.dispose()


def _do(connection: Any, statement: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)


def _sleep(connection: Any) -> None:
    with pytest.raises(pymysql.err.OperationalError, match="interrupted"):
        _do(connection, "SELECT SLEEP(600)")

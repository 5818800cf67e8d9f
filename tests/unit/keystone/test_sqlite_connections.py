"""The sessions of a request use one connection to a SQLite file, each with its own transaction."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("oslo_db.sqlalchemy")

import sqlalchemy as sa
from oslo_db.sqlalchemy import enginefacade
from sqlalchemy.pool import NullPool

from keyfront.gateway.keystone import sqlite
from keyfront.gateway.keystone.application import KeystoneApplication
from keyfront.middleware.tokens.request import Request, current

READ = sa.text("SELECT value FROM thing")
WRITE = sa.text("UPDATE thing SET value = value + 1")


class Sessions:
    """A database, and sessions for reading and writing as Keystone opens them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE thing (value INTEGER)")
            database.execute("INSERT INTO thing VALUES (0)")
            database.commit()
        self.context: Any = enginefacade.transaction_context()
        self.context.configure(connection=f"sqlite:///{path}")
        self.context.append_on_engine_create(sqlite.attach)
        self.context.append_on_engine_create(sqlite.keep_for_requests)
        sqlite.mark_writers(self.context._factory)
        self._threads = threading.local()
        self.engine = self.context.writer.get_engine()
        #: The connections that were made, and that are open.
        self.made: list[Any] = []
        self.open: set[int] = set()
        sa.event.listen(self.engine, "connect", self._connected)
        sa.event.listen(self.engine, "close", lambda one, record: self.open.discard(id(one)))

    def _connected(self, connection: Any, record: Any) -> None:
        self.made.append(connection)
        self.open.add(id(connection))

    def read(self) -> Any:
        return self.context.reader.using(self._threads)

    def write(self) -> Any:
        return self.context.writer.using(self._threads)

    def beside(self) -> Any:
        """A session for reading, beside the one that is open."""
        return self.context.reader.using(threading.local())

    def value(self) -> Any:
        with self.read() as session:
            return session.execute(READ).scalar()

    def other(self) -> sqlite3.Connection:
        """Another process's connection."""
        return sqlite3.connect(self.path, isolation_level=None, timeout=0)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    one = Sessions(tmp_path / "db")
    yield one
    assert not one.open
    one.context.dispose_pool()


@contextlib.contextmanager
def request() -> Iterator[Request]:
    one = Request()
    one.connections = []
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)
        kept, one.connections = one.connections, None
        for connection in kept or ():
            connection.close()


def test_a_request_has_one_connection_which_ends_with_it(sessions: Sessions) -> None:
    for number in (1, 2):
        with request():
            for _ in range(3):
                sessions.value()
            with sessions.write() as session:
                session.execute(WRITE)
            assert len(sessions.made) == number
            assert len(sessions.open) == 1
        assert not sessions.open
    # what is no request opens the file anew each time, and so does what only notes decisions
    sessions.value()
    token = current.set(Request())
    sessions.value()
    current.reset(token)
    assert len(sessions.made) == 4
    assert not sessions.open


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_closed_however_the_request_ends(sessions: Sessions, fails: bool) -> None:
    def keystone(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        sessions.value()
        sessions.value()
        assert len(sessions.open) == 1
        if fails:
            raise LookupError
        start_response("200 OK", [])
        return []

    application = KeystoneApplication(keystone, threading.local())
    with pytest.raises(LookupError) if fails else contextlib.nullcontext():
        application({}, lambda *values: None)
    assert len(sessions.made) == 1
    assert not sessions.open
    # what reads after that, as a body that is being sent, keeps nothing
    sessions.value()
    assert not sessions.open


def test_each_session_sees_what_others_have_committed_before_it(sessions: Sessions) -> None:
    with closing(sessions.other()) as other, request():
        with sessions.read() as session:
            assert session.execute(READ).scalar() == 0
            other.execute("UPDATE thing SET value = 7")
            assert session.execute(READ).scalar() == 0
        assert sessions.value() == 7
        other.execute("ALTER TABLE thing ADD COLUMN other INTEGER")
        other.execute("UPDATE thing SET value = 8, other = 1")
        with sessions.read() as session:
            assert session.execute(sa.text("SELECT * FROM thing")).one() == (8, 1)
        assert len(sessions.made) == 1


def test_nothing_of_a_write_that_fails_is_in_the_next_session(sessions: Sessions) -> None:
    with closing(sessions.other()) as other, request():
        with pytest.raises(LookupError), sessions.write() as session:
            session.execute(WRITE)
            raise LookupError
        assert sessions.value() == 0
        with pytest.raises(Exception, match="no such table"), sessions.write() as session:
            session.execute(WRITE)
            session.execute(sa.text("UPDATE missing SET value = 1"))
        # nor does it keep another writer out, or the next session from being one
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE thing SET value = 5")
        other.execute("COMMIT")
        with sessions.write() as session:
            session.execute(READ)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            session.execute(WRITE)
        assert other.execute("SELECT value FROM thing").fetchone() == (6,)
        assert len(sessions.made) == 1


def test_sessions_beside_each_other_have_a_connection_each(sessions: Sessions) -> None:
    with request():
        with sessions.write() as session:
            session.execute(WRITE)
            with sessions.beside() as other:
                assert other.execute(READ).scalar() == 0
            assert len(sessions.open) == 2
        # of two that are given back one is kept
        assert len(sessions.open) == 1
        assert sessions.value() == 1
    assert len(sessions.made) == 2


def test_requests_of_two_threads_share_no_connection(sessions: Sessions) -> None:
    both = threading.Barrier(2)
    used: list[set[int]] = []

    def serve() -> None:
        with request() as one:
            sessions.value()
            both.wait(60)
            assert one.connections is not None
            used.append({id(record.dbapi_connection) for record in one.connections})
            sessions.value()
            both.wait(60)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sessions.made) == 2
    assert [len(one) for one in used] == [1, 1]
    assert used[0] != used[1]


def test_a_session_of_another_file_has_a_connection_to_that(
    sessions: Sessions, tmp_path: Path
) -> None:
    other = Sessions(tmp_path / "other")
    with request():
        for each in (sessions, other):
            assert each.value() == 0
            with each.write() as session:
                session.execute(WRITE)
            assert each.value() == 1
        assert sessions.value() == 1
    assert not other.open
    other.context.dispose_pool()


@pytest.mark.parametrize("marked", [False, True])
def test_a_connection_is_not_kept_in_a_transaction(sessions: Sessions, marked: bool) -> None:
    with request():
        connection = sessions.engine.connect()
        connection.execute(READ)
        record: Any = connection.connection._connection_record
        # As where a transaction ends without oslo.db's hearing of it, or is not ended at all.
        connection._transaction = None
        if marked:
            record.dbapi_connection.rollback()
        else:
            del record.info["in_transaction"]
            sessions.engine.pool._reset_on_return = sa.pool.base.ResetStyle.reset_none
        connection.close()
        assert not sessions.open
        with sessions.write() as session:
            session.execute(WRITE)
        assert sessions.value() == 1
        assert len(sessions.made) == 2


def test_a_connection_that_was_lost_is_not_kept(sessions: Sessions) -> None:
    with request() as one:
        sessions.value()
        one.lost = "disk I/O error"
        sessions.value()
        assert not sessions.open
        sessions.value()
        assert len(sessions.made) == 2


def test_another_file_in_its_place_is_read_by_the_next_request(sessions: Sessions) -> None:
    with request():
        assert sessions.value() == 0
    # a file alone, which may be copied
    assert [path.name for path in sessions.path.parent.iterdir()] == ["db"]
    restored = sessions.path.parent / "restored"
    with closing(sqlite3.connect(restored)) as database:
        database.execute("CREATE TABLE thing (value INTEGER)")
        database.execute("INSERT INTO thing VALUES (9)")
        database.commit()
    restored.rename(sessions.path)
    with request():
        assert sessions.value() == 9


def test_it_outlasts_what_is_done_before_a_fork(sessions: Sessions) -> None:
    sessions.engine.dispose()
    with request():
        sessions.value()
        pinged: list[object] = []
        sessions.engine.dialect.do_ping = pinged.append  # type: ignore[method-assign]
        sessions.value()
        assert not pinged  # there is no server that could be gone
    assert len(sessions.made) == 1


def test_pools_are_left_alone(tmp_path: Path) -> None:
    kept = sa.create_engine("sqlite://")
    queue = sa.create_engine(f"sqlite:///{tmp_path}/db", poolclass=sa.pool.QueuePool)
    before = [type(engine.pool) for engine in (kept, queue)]
    for engine in (kept, queue):
        sqlite.keep_for_requests(engine)
        sqlite.keep_for_requests(engine)
    assert [type(engine.pool) for engine in (kept, queue)] == before
    other = sa.create_engine(f"sqlite:///{tmp_path}/db", poolclass=NullPool)
    other.dialect.name = "other"
    sqlite.keep_for_requests(other)
    assert type(other.pool) is NullPool

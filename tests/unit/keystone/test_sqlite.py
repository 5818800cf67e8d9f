"""Writers on a SQLite file begin as such and wait; readers and other databases are left alone."""

from __future__ import annotations

import sqlite3
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("oslo_db.sqlalchemy")

import sqlalchemy as sa
from oslo_db.sqlalchemy import enginefacade

from keyfront.gateway.keystone import sqlite
from keyfront.middleware.tokens.request import Request, current

READ = sa.text("SELECT value FROM thing")
WRITE = sa.text("UPDATE thing SET value = value + 1")


class Sessions:
    """A database, and sessions for reading and writing as Keystone opens them."""

    def __init__(self, path: Path, context: Any) -> None:
        self.path, self._context = path, context
        self._threads = threading.local()

    def read(self) -> Any:
        return self._context.reader.using(self._threads)

    def write(self) -> Any:
        return self._context.writer.using(self._threads)

    def other(self) -> sqlite3.Connection:
        """Another process's connection."""
        return sqlite3.connect(self.path, isolation_level=None, timeout=0)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE thing (value INTEGER)")
        database.execute("INSERT INTO thing VALUES (0)")
        database.commit()
    context = enginefacade.transaction_context()
    context.configure(connection=f"sqlite:///{path}")
    context.append_on_engine_create(sqlite.attach)
    sqlite.mark_writers(context._factory)
    yield Sessions(path, context)
    context.dispose_pool()


def test_a_writer_that_reads_first_keeps_others_out(sessions: Sessions) -> None:
    """Without it, the other's change after our reading makes our writing fail at once."""
    with closing(sessions.other()) as other:
        with sessions.write() as session:
            session.execute(READ)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            session.execute(WRITE)
        assert other.execute("SELECT value FROM thing").fetchone() == (1,)


def test_a_reader_neither_waits_nor_keeps_others_out(sessions: Sessions) -> None:
    with closing(sessions.other()) as other:
        with sessions.read() as session:
            assert session.execute(READ).scalar() == 0
            other.execute("BEGIN IMMEDIATE")
            other.execute("UPDATE thing SET value = 7")
            assert session.execute(READ).scalar() == 0
            other.execute("COMMIT")
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_writer_inside_a_writer_and_savepoints_are_one_transaction(sessions: Sessions) -> None:
    with sessions.write() as session:
        session.execute(WRITE)
        with sessions.write() as inner, inner.begin_nested():
            inner.execute(WRITE)
    with sessions.write() as session:
        nested = session.begin_nested()
        session.execute(WRITE)
        nested.rollback()
    with closing(sessions.other()) as other:
        assert other.execute("SELECT value FROM thing").fetchone() == (2,)


def test_what_is_rolled_back_is_gone_and_the_next_begins_anew(sessions: Sessions) -> None:
    with pytest.raises(ZeroDivisionError), sessions.write() as session:
        session.execute(WRITE)
        raise ZeroDivisionError
    with sessions.write() as session:
        assert session.execute(READ).scalar() == 0
        session.execute(WRITE)


class Ended(BaseException):
    """As gevent's ``Timeout``."""


def test_a_writer_that_is_ended_in_a_statement_keeps_nobody_out(sessions: Sessions) -> None:
    with sessions.read() as session:
        engine = session.get_bind()

    def end(*values: object) -> None:
        raise Ended

    kept: list[BaseException] = []
    sa.event.listen(engine, "after_cursor_execute", end)
    try:
        with sessions.write() as session:
            session.execute(READ)
    except BaseException as error:
        kept.append(error)  # with its traceback, as until somebody looks for garbage
    finally:
        sa.event.remove(engine, "after_cursor_execute", end)
    assert kept
    with closing(sessions.other()) as other:
        other.execute("BEGIN IMMEDIATE")
    with sessions.write() as session:
        session.execute(WRITE)


def test_a_writer_waits_for_another(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []
    with closing(sessions.other()) as other:
        other.execute("BEGIN IMMEDIATE")

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                other.execute("COMMIT")

        clock = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep)
        monkeypatch.setattr(sqlite, "time", clock)
        with sessions.write() as session:
            session.execute(WRITE)
    assert len(slept) == 3


def test_who_waits_in_vain_is_to_try_again(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sessions.write() as session:
        session.execute(READ)  # connected before
    monkeypatch.setattr(sqlite, "PATIENCE", 0.02)
    request = Request()
    token = current.set(request)
    try:
        with closing(sessions.other()) as other:
            other.execute("BEGIN IMMEDIATE")
            locked = pytest.raises(sa.exc.OperationalError, match="locked")
            with locked, sessions.write() as session:
                session.execute(WRITE)
            assert request.refused == "the database was busy with other changes"
            other.execute("COMMIT")
        with sessions.write() as session:
            session.execute(WRITE)
    finally:
        current.reset(token)


def test_other_databases_are_left_alone() -> None:
    for url in ("sqlite://", "sqlite:///:memory:"):
        engine = sa.create_engine(url)
        sqlite.attach(engine)
        assert not hasattr(engine.dialect, sqlite._ATTACHED)
        engine.dispose()


def test_the_plugin_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of Keystone's, as keystone-manage is, and in any other."""
    sa.dialects.plugins.register("keyfront", "keyfront.gateway.keystone.sqlite", "Plugin")
    url = f"sqlite:///{tmp_path}/db?plugin=keyfront"
    context = enginefacade.transaction_context()
    monkeypatch.delitem(sys.modules, "keystone.common.sql.core", raising=False)
    other = sa.create_engine(url)
    assert not hasattr(other.dialect, sqlite._ATTACHED)
    other.dispose()
    core = types.SimpleNamespace(_get_main_context_manager=lambda: context)
    monkeypatch.setitem(sys.modules, "keystone.common.sql.core", core)
    context.configure(connection=url)
    with context.reader.using(threading.local()) as session:
        session.execute(sa.text("SELECT 1"))
    with context.writer.using(threading.local()) as session:
        session.execute(sa.text("SELECT 1"))
        with closing(sqlite3.connect(tmp_path / "db", timeout=0)) as database:
            assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                database.execute("BEGIN IMMEDIATE")
    context.dispose_pool()


def test_a_file_that_cannot_be_written_ahead_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE thing (value INTEGER)")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connected = sqlite._settings("/srv/keystone.sqlite")
        connected(connection, None)
        connected(connection, None)
    (record,) = caplog.records
    assert record.getMessage().startswith("/srv/keystone.sqlite: SQLite does not write ahead here")

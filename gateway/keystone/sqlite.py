"""SQLite for Keystone: writers that wait for one another, and one connection for each request.

SQLite has one writer at a time. A transaction that begins as a reader and writes later cannot wait
for another one to end: it has not seen that one's change, so SQLite refuses it ("database is
locked") however long it may wait. So the sessions that Keystone opens for writing begin as writers,
readers go on beside them in write-ahead mode, and a writer that finds another one waits.

oslo.db emits BEGIN itself, since pysqlite would emit it too late. It does so in an event of the
engine, which comes after ours, and not if a transaction has begun already.

oslo.db also opens the file anew for each session, and SQLite reads the schema anew for each
connection: in a login that takes longer than its statements. Here a session gets the connection
that another one of the same request has given back. It is closed at the end of the request, so that
a file may be copied, or another one put in its place, as before. Each session has a transaction of
its own.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from keyfront.middleware.tokens.invalidation import sqlalchemy_plugin
from keyfront.middleware.tokens.request import current

from .needed_interfaces import incompatible

LOG = logging.getLogger(__name__)

#: Seconds that a writer waits for others; less than the 30 seconds after which, at the earliest,
#: uWSGI ends a worker over a stuck request.
PATIENCE = 15.0
# Seconds between two tries, at random, so that two writers do not go on meeting.
_PAUSES = (0.001, 0.01)
# An execution option of the engine that writing sessions are bound to.
_WRITES = "keyfront_writes"
# As an attribute of a dialect, which is one engine's own.
_ATTACHED = "keyfront_sqlite"
# oslo.db's mark of a connection whose transaction has begun.
_BEGUN = "in_transaction"
# The pool of a connection: another file has another one.
_POOL = "keyfront.pool"


class Plugin(sqlalchemy_plugin.Plugin):
    """The plugin ``keyfront`` of SQLAlchemy's URLs (entry point ``sqlalchemy.plugins``)."""

    def engine_created(self, engine: Engine) -> None:
        """Attach the hooks to the engine."""
        super().engine_created(engine)
        sql = sys.modules.get("keystone.common.sql.core")
        if sql is not None:  # other programs' sessions are their own
            attach(engine)
            # But for the session that the engine is made for: it is being made already. Those of
            # keystone-manage write at once, which waits as well.
            mark_writers(sql._get_main_context_manager()._factory)


def attach(engine: Engine) -> None:
    """Make the writers of a SQLite file wait for one another; once only.

    :param engine: the engine of Keystone's database, whose writing sessions :func:`mark_writers`
        marks; engines of other databases are left alone
    """
    if not _is_file(engine) or hasattr(engine.dialect, _ATTACHED):
        return
    setattr(engine.dialect, _ATTACHED, True)
    event.listen(engine, "connect", _settings(str(engine.url.database)))
    event.listen(engine, "invalidate", _let_go)
    # Listeners of the class are called before an engine's own, whichever was added first.
    if not event.contains(Engine, "begin", _begin):
        event.listen(Engine, "begin", _begin)


def _is_file(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:")


def mark_writers(factory: Any) -> None:
    """Bind the sessions that are opened for writing on SQLite to an engine with a mark; once only.

    :param factory: the factory of oslo.db's transaction context, which makes the sessions
    :raises IncompatibleError: it does not make them as expected
    """
    try:
        from oslo_db.sqlalchemy.enginefacade import _WRITER

        make = factory._create_session
    except (ImportError, AttributeError) as error:
        raise incompatible(f"oslo.db's sessions are not made as expected ({error})") from None
    if hasattr(make, "keyfront"):
        return

    def create_session(mode: Any, bind: Any = None) -> Any:
        if mode is _WRITER and bind is None:
            if not factory._started:
                factory._start()
            engine = factory._writer_engine
            if _is_file(engine):
                bind = engine.execution_options(**{_WRITES: True})
        return make(mode, bind)

    create_session.keyfront = True  # type: ignore[attr-defined]
    factory._create_session = create_session


def _settings(name: str) -> Callable[[Any, Any], None]:
    """Return a listener that sets up each new connection, and by the first one the file's mode.

    :param name: the file's name, for the log
    """
    first = True

    def connected(connection: sqlite3.Connection, record: Any) -> None:
        nonlocal first
        connection.execute(f"PRAGMA busy_timeout = {PATIENCE * 1000:.0f}")
        if not first:
            return
        first = False
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.Error as error:
            mode = error
        if mode != "wal":
            LOG.warning(
                "%s: SQLite does not write ahead here (%s): readers and writers wait for one "
                "another; put the database on a disk of this machine", name, mode,
            )  # fmt: skip

    return connected


def _let_go(connection: sqlite3.Connection, record: Any, error: BaseException | None) -> None:
    """Let other writers in before a connection is closed whose request was ended in a statement.

    Closed, it would keep its lock for as long as a traceback holds that statement.
    """
    with suppress(sqlite3.Error):
        connection.rollback()


def _begin(connection: Connection) -> None:
    """Begin the transaction of a marked session as a writer's; wait for others up to 15 seconds."""
    if _BEGUN in connection.info or not connection.get_execution_options().get(_WRITES):
        return
    dbapi: Any = connection.connection.dbapi_connection
    deadline = time.monotonic() + PATIENCE
    # SQLite's own waiting would stop all greenlets, and with them the one that is waited for.
    dbapi.execute("PRAGMA busy_timeout = 0")
    try:
        while (code := _error_of_begin(dbapi)) is not None:
            busy = code == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                _raise_as_sqlalchemy(connection, busy=busy)
                break
            time.sleep(random.uniform(*_PAUSES))
    finally:
        dbapi.execute(f"PRAGMA busy_timeout = {PATIENCE * 1000:.0f}")
    connection.info[_BEGUN] = True


def _error_of_begin(connection: sqlite3.Connection) -> int | None:
    """Begin to write; return SQLite's error code, or ``None`` if there was no error."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF
    return None


def _raise_as_sqlalchemy(connection: Connection, *, busy: bool) -> None:
    """Try for the last time, through SQLAlchemy, which raises its own error.

    :param connection: the connection
    :param busy: true if others write; then an error is logged and answered 503
    """
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except Exception:
        if busy:
            LOG.error("a change was refused: other writers held the database for %.0f s", PATIENCE)
            request = current.get()
            if request is not None:
                request.refused = "the database was busy with other changes"
        raise


def keep_for_requests(engine: Engine) -> None:
    """Make the sessions of a request use one connection after the other.

    :param engine: the engine of Keystone's database; one with a pool of connections, as for other
        databases, is left alone
    """
    pool: Any = engine.pool
    if engine.dialect.name == "sqlite" and type(pool) is NullPool:
        # Of the class, and not of this pool: another one is made of it before a fork.
        pool.__class__ = OnePerRequest


class OnePerRequest(NullPool):
    """A pool that keeps a connection for the next session of the same request, and no longer."""

    def _do_get(self) -> ConnectionPoolEntry:
        request = current.get()
        kept = None if request is None else request.connections
        if not kept or kept[-1].info.get(_POOL) is not self:
            return super()._do_get()
        record: Any = kept.pop()
        record.fresh = True  # there is no server that could have gone away
        return record  # type: ignore[no-any-return]

    def _do_return_conn(self, record: Any) -> None:
        request = current.get()
        connection = record.dbapi_connection
        if (
            request is None
            or request.connections is None
            or request.connections  # there is one
            or request.lost
            or connection is None
            or connection.in_transaction
            or _BEGUN in record.info  # the next one would not begin
        ):
            super()._do_return_conn(record)
        else:
            record.info[_POOL] = self
            request.connections.append(record)

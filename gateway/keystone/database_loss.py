"""Notes on requests that the database fails: it is away, refuses for now, or its disk is full.

Keystone takes a database that cannot be used for an error of its own: it answers 500 and logs a
traceback of 35 kB for each request. Here SQLAlchemy's event of a failed statement or connect tells
which request was hit. The application answers that one with 503 and ``Retry-After``, logs one line
a second, and Keystone's records of it are not logged.

SQLAlchemy cleans up after a lost connection: the first error empties the pool, so that the next
request after the database is back gets a new connection.

No engine waits for the database either, see :func:`connect_once`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from keyfront.middleware.tokens.request import Request, current

from ..log_limit import LogLimit

LOG = logging.getLogger(__name__)

# The loggers of exceptions that become a 500.
_LOGGERS = (
    "keystone.server.flask.application",
    "keystone.server.flask.request_processing.middleware.auth_context",
)


class Loss(NamedTuple):
    """A way in which a database fails a request.

    :param text: the line of the log, with the number of others and the driver's message to come
    :param reason: the message for the client
    :param again: seconds after which the client may try again
    :param ends: true if the connections to this server are given up: another one may be the right
        one by now, as behind HAProxy
    """

    text: str
    reason: str
    again: int = 1
    ends: bool = False


AWAY = Loss(
    "the database cannot be reached, a request was answered 503%s: %s",
    "The database cannot be reached. Try again.",
    ends=True,
)
DISK = Loss(
    "the database's disk is full or fails, a request was answered 503%s: %s",
    "The database's disk is full or fails. Try again later.",
    again=10,
)
READ_ONLY = Loss(
    "the database takes no changes, a request was answered 503%s: %s",
    "The database takes no changes for now. Try again.",
    ends=True,
)
BUSY = Loss(
    "the database was busy with other changes, a request was answered 503%s: %s",
    "The database was busy with other changes. Try again.",
)

# By what the driver says: result codes of SQLite, which are below 256, error numbers of MariaDB and
# MySQL, and states of PostgreSQL.
_LOST: Mapping[object, Loss] = {
    # A node of Galera that is in no cluster, or out of step; a server that is shutting down; a
    # connection that it has ended.
    **dict.fromkeys((1047, 1053, 1927), AWAY),
    # admin_shutdown, crash_shutdown, cannot_connect_now
    **dict.fromkeys(("57P01", "57P02", "57P03"), AWAY),
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN), DISK),
    # ER_DISK_FULL, ER_ERROR_ON_WRITE, ER_RECORD_FILE_FULL; disk_full, io_error
    **dict.fromkeys((1021, 1026, 1114, "53100", "58030"), DISK),
    # Of a table, by --read-only, in such a transaction, by innodb_read_only;
    # read_only_sql_transaction
    **dict.fromkeys((1036, 1290, 1792, 1836, "25006", sqlite3.SQLITE_READONLY), READ_ONLY),
    # A record that has changed since (MariaDB's snapshots), a lock that was waited for too long, a
    # deadlock, which is also Galera's refused certification, and that of group replication.
    **dict.fromkeys((1020, 1205, 1213, 3101), BUSY),
    # serialization_failure, deadlock_detected, lock_not_available
    **dict.fromkeys(("40001", "40P01", "55P03"), BUSY),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL), BUSY),
}


class DatabaseLoss:
    """The log of requests of this process that the database has failed.

    :param lines: the limit of its lines; by default one a second
    """

    def __init__(self, lines: LogLimit | None = None) -> None:
        self._lines = lines or LogLimit()

    def watch(self) -> None:
        """Listen to the failures of all engines of this process, and filter Keystone's records of
        them."""
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        if not event.contains(Engine, "handle_error", note_error):
            event.listen(Engine, "handle_error", note_error)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            if is_worth_logging not in logger.filters:
                logger.addFilter(is_worth_logging)

    def tell(self, request: Request) -> None:
        """Log that a request was answered 503; of many in one second, the first and their number.

        :param request: the notes on the request, with the driver's message in ``lost``, and which
            :class:`Loss` it is
        """
        untold = self._lines.admit()
        if untold is None:
            return
        more = f"; so were {untold} others since the last such line" if untold else ""
        LOG.error((request.loss or AWAY).text, more, request.lost)


def connect_once(context: Any) -> None:
    """Have Keystone's engines made without waiting for the database, whatever the options say.

    oslo.db tries to connect while it makes an engine, by default ten times and ten seconds apart.
    It does so when a worker first needs the database, for a request, ``/readyz`` or the follower
    of directories, and under a lock for which all other requests of the worker wait.

    :param context: oslo.db's transaction context, whose engines are not made yet
    """
    context.configure(max_retries=0)


def note_error(context: Any) -> None:
    """Note with the request that is being served that its database has failed it.

    :param context: SQLAlchemy's ``ExceptionContext``
    """
    if context.is_pre_ping:
        return
    loss = lost_for(context.original_exception)
    if loss is None and (context.is_disconnect or context.connection is None):
        loss = AWAY
    if loss is None:
        return
    if loss.ends:
        context.is_disconnect = True
    request = current.get()
    if request is not None:
        request.loss = loss
        lines = str(context.original_exception).strip().splitlines()
        request.lost = lines[0] if lines else type(context.original_exception).__name__


def lost_for(error: BaseException) -> Loss | None:
    """Return how the database fails by a driver's error; ``None`` if the error is another.

    :param error: the error, which says by a code what it is
    """
    if isinstance(error, sqlite3.Error):
        # Errors that the module sqlite3 itself raises have no code.
        return _LOST.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    number = error.args[0] if error.args else None
    return _LOST.get(state) or (_LOST.get(number) if isinstance(number, int) else None)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a log record of Keystone's tells more than that the database is away."""
    request = current.get()
    return request is None or not request.lost or record.levelno < logging.ERROR

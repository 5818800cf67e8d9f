"""Notes on requests that fail because the database is away, or its disk is full or fails.

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
from typing import Any

from keyfront.middleware.tokens.request import Request, current

from ..line_limit import LineLimit

LOG = logging.getLogger(__name__)

# The loggers of exceptions that become a 500.
_LOGGERS = (
    "keystone.server.flask.application",
    "keystone.server.flask.request_processing.middleware.auth_context",
)

# Errors of a disk that is full or fails. SQLite's are result codes; those of MariaDB and MySQL are
# ER_DISK_FULL, ER_ERROR_ON_WRITE and ER_RECORD_FILE_FULL; PostgreSQL's are disk_full and io_error.
_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_MYSQL = (1021, 1026, 1114)
_POSTGRESQL = ("53100", "58030")


class DatabaseLoss:
    """The log of requests of this process that the database has failed.

    :param lines: the limit of its lines; by default one a second
    """

    def __init__(self, lines: LineLimit | None = None) -> None:
        self._lines = lines or LineLimit()

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

        :param request: the notes on the request, with the driver's message in ``lost``
        """
        untold = self._lines.admit()
        if untold is None:
            return
        more = f"; so were {untold} others since the last such line" if untold else ""
        text = "the database cannot be reached, a request was answered 503%s: %s"
        if request.disk_failed:
            text = "the database's disk is full or fails, a request was answered 503%s: %s"
        LOG.error(text, more, request.lost)


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
    disk_failed = is_of_disk(context.original_exception)
    lost = context.is_disconnect or context.connection is None
    if context.is_pre_ping or not (lost or disk_failed):
        return
    request = current.get()
    if request is not None:
        request.disk_failed = disk_failed
        lines = str(context.original_exception).strip().splitlines()
        request.lost = lines[0] if lines else type(context.original_exception).__name__


def is_of_disk(error: BaseException) -> bool:
    """Return whether a driver's error says that the database's disk is full or fails."""
    if isinstance(error, sqlite3.Error):
        # Errors that the module sqlite3 itself raises have no code.
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state in _POSTGRESQL or (bool(error.args) and error.args[0] in _MYSQL)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a log record of Keystone's tells more than that the database is away."""
    request = current.get()
    return request is None or not request.lost or record.levelno < logging.ERROR

"""Answers 503 instead of 500 while the database is away, and says so in one line a second.

Keystone takes a database that cannot be reached for an error of its own: it answers 500 and logs a
traceback of 35 kB for each request. Here SQLAlchemy's event of a failed statement or connect tells
which request was hit. The application answers that one with 503 and ``Retry-After``, and Keystone's
records of it are not logged.

What a lost connection leaves behind is SQLAlchemy's affair: the first error empties the pool, so
that the next request after the database is back gets a new connection.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from keyfront.middleware.tokens.request import current

LOG = logging.getLogger(__name__)

# What logs the exceptions that become a 500.
_LOGGERS = (
    "keystone.server.flask.application",
    "keystone.server.flask.request_processing.middleware.auth_context",
)

# Seconds between two lines of the log.
_INTERVAL = 1.0


class DatabaseLoss:
    """The requests of this process that the database has failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._untold = 0

    def watch(self) -> None:
        """Note the failures of all engines of this process, and keep Keystone's traces of them
        from its log."""
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        if not event.contains(Engine, "handle_error", note_error):
            event.listen(Engine, "handle_error", note_error)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            if is_worth_logging not in logger.filters:
                logger.addFilter(is_worth_logging)

    def tell(self, reason: str) -> None:
        """Log that a request was answered 503; of many in one second, the first and their number.

        :param reason: what the driver said, in one line
        """
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._untold += 1
                return
            self._next = now + _INTERVAL
            untold, self._untold = self._untold, 0
        more = f"; so were {untold} others since the last such line" if untold else ""
        LOG.error("the database cannot be reached, a request was answered 503%s: %s", more, reason)


def note_error(context: Any) -> None:
    """Note with the request that is being served that the database has failed it.

    :param context: SQLAlchemy's ``ExceptionContext``
    """
    if context.is_pre_ping or not (context.is_disconnect or context.connection is None):
        return
    request = current.get()
    if request is not None:
        lines = str(context.original_exception).strip().splitlines()
        request.lost = lines[0] if lines else type(context.original_exception).__name__


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether a record of Keystone's tells more than that the database is away."""
    request = current.get()
    return request is None or not request.lost or record.levelno < logging.ERROR

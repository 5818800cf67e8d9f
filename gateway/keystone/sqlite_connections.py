"""One connection to a SQLite file for all sessions of a request.

oslo.db opens the file anew for each session, and SQLite reads the schema anew for each connection:
in a login that takes longer than its statements. Here a session gets the connection that another
one of the same request has given back. It is closed at the end of the request, so that a file may
be copied, or another one put in its place, as before. Each session has a transaction of its own.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from keyfront.middleware.tokens.request import current

# oslo.db's mark of a connection whose transaction has begun.
_BEGUN = "in_transaction"
# The pool of a connection: another file has another one.
_POOL = "keyfront.pool"


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

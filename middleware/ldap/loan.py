"""A connection lent for the length of a ``with`` block, of whose fate the servers learn."""

from __future__ import annotations

import time
from types import TracebackType

from keyfront.errors import DirectoryAnswerError, DirectoryUnavailableError

from .connector import PoolConnection
from .lease import Lease
from .opener import Opener
from .pool import ConnectionPool


class Loan(Lease[PoolConnection]):
    """A context manager, for one use.

    :param timeout: seconds to wait for a connection; ``None`` for the pool's
    """

    __slots__ = ("_opener", "_since")

    def __init__(
        self, pool: ConnectionPool[PoolConnection], opener: Opener, timeout: float | None = None
    ) -> None:
        super().__init__(pool, timeout)
        self._opener = opener

    def __enter__(self) -> PoolConnection:
        connection = super().__enter__()
        self._since = time.monotonic()
        return connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection = self._connection
        try:
            if isinstance(error, DirectoryUnavailableError):
                # It may have come from elsewhere.
                if error.server == connection.server and not connection.usable:
                    self._opener.failed(connection, error, self._since)
            elif connection.usable and (error is None or isinstance(error, DirectoryAnswerError)):
                self._opener.answered(connection)
        finally:
            super().__exit__(kind, error, trace)

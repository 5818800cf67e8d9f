"""A connection lent for the length of a ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")


class Lender(Protocol[C]):
    """Where the connection comes from."""

    def checkout(self, timeout: float | None = None) -> C: ...

    def checkin(self, connection: C, discard: bool = False) -> None: ...


class Lease(Generic[C]):
    """A context manager, for one use."""

    __slots__ = ("_connection", "_pool", "_timeout")

    def __init__(self, pool: Lender[C], timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout

    def __enter__(self) -> C:
        self._connection = self._pool.checkout(self._timeout)
        return self._connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A killed greenlet or an interrupt may have left half an answer in the connection.
        killed = kind is not None and not issubclass(kind, Exception)
        self._pool.checkin(self._connection, discard=killed)

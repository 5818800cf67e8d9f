"""The limits of a connection's stay in oslo.messaging's pool, for the native thread.

oslo.messaging looks for connections that lay for longer than ``conn_pool_ttl`` whenever one is
borrowed, and keeps the ``conn_pool_min_size`` that came back last. Where nobody borrows, nobody
looks. So their owners note here what lies in the pool, and the native thread hangs up what has lain
there for too long. Nothing here is green, and nothing here is waited for: whoever takes the one
element out of the list of a place has its connection, which is one step of the interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class PoolRecord:
    """The connections that lie in one pool, and the limits of their stay.

    :param ttl: seconds for which a connection may lie there
    :param keep: number of connections that are kept for longer, of those that came back last
    :param pool: a function that returns the pool, or ``None`` if it has gone; not for the native
        thread
    :param to_heed: the records of pools in which the native thread has hung something up, to which
        it adds this one
    """

    __slots__ = ("being_expired", "keep", "places", "pool", "to_heed", "ttl")

    def __init__(
        self, ttl: float, keep: int, pool: Callable[[], Any], to_heed: deque[PoolRecord | None]
    ) -> None:
        self.ttl = ttl
        self.keep = keep
        self.pool = pool
        self.to_heed = to_heed
        #: The places of all its open connections, lent ones included.
        self.places: dict[Pooled, None] = {}
        #: Somebody is closing what has expired.
        self.being_expired = False


class Pooled:
    """The place of one of oslo.messaging's connections in its pool; it outlives reconnecting.

    :param record: the record of its pool
    :param item: a function that returns oslo.messaging's connection; not for the native thread
    """

    __slots__ = ("__weakref__", "item", "record", "there", "until")

    def __init__(self, record: PoolRecord, item: Callable[[], Any]) -> None:
        self.record = record
        self.item = item
        #: Holds one element while it lies there, and has neither been hung up nor closed.
        self.there: list[None] = []
        #: The end of its stay there (``time.monotonic``); ``None`` while it is lent.
        self.until: float | None = None

    def put(self, now: float) -> None:
        """Note that it is about to lie in the pool."""
        self.record.places[self] = None
        self.until = now + self.record.ttl
        self.there[:] = (None,)

    def lend(self) -> bool:
        """Note that it has been borrowed; returns false if it was hung up or closed before."""
        there = self._take()
        lay, self.until = self.until is not None, None
        return there or not lay

    def leave(self) -> None:
        """Note that its connection was closed."""
        self.record.places.pop(self, None)
        self._take()

    def come_back(self) -> None:
        """Note that it was connected again; it may lie there no longer for that."""
        self.record.places[self] = None
        if self.until is not None:
            self.there[:] = (None,)

    def is_overdue(self, now: float) -> bool:
        """Return whether it has lain there for too long, and enough others came back after it."""
        until = self.until
        if until is None or now <= until or not self.there:
            return False
        newer = sum(
            bool(other.there) and (other.until or 0.0) > until
            for other in list(self.record.places)
        )
        return newer >= self.record.keep

    def claim(self, now: float) -> bool:
        """Take it out if it is overdue; then it is not lent as it is. For the native thread."""
        if not self.is_overdue(now) or not self._take():
            return False
        self.record.to_heed.append(self.record)
        return True

    def _take(self) -> bool:
        try:
            self.there.pop()
        except IndexError:
            return False
        return True

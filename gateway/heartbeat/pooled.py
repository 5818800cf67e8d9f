"""The limits of a connection's stay in oslo.messaging's pool, for the native thread.

oslo.messaging looks for connections that lay for longer than ``conn_pool_ttl`` whenever one is
borrowed, and keeps the ``conn_pool_min_size`` that came back last. Where nobody borrows, nobody
looks. So their owners note here what lies in the pool, and the native thread hangs up what has lain
there for too long. Nothing here is green, and nothing here is waited for: whoever takes a
connection out of the dictionary has it, which is one step of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PoolRecord:
    """The connections that lie in one pool, and the limits of their stay.

    :param ttl: seconds for which a connection may lie there
    :param keep: number of connections that are kept for longer, of those that came back last
    :param pool: a function that returns the pool, or ``None`` if it has gone; not for the native
        thread
    """

    __slots__ = ("being_expired", "hung_up", "idle", "keep", "pool", "ttl")

    def __init__(self, ttl: float, keep: int, pool: Callable[[], Any]) -> None:
        self.ttl = ttl
        self.keep = keep
        self.pool = pool
        #: What lies there, and until when it may (``time.monotonic``).
        self.idle: dict[Pooled, float] = {}
        #: The native thread has hung something up that still lies there.
        self.hung_up = False
        #: Somebody is closing what has expired.
        self.being_expired = False


class Pooled:
    """The place of one of oslo.messaging's connections in its pool; it outlives reconnecting.

    :param record: the record of its pool
    :param item: a function that returns oslo.messaging's connection; not for the native thread
    """

    __slots__ = ("__weakref__", "item", "record", "until")

    def __init__(self, record: PoolRecord, item: Callable[[], Any]) -> None:
        self.record = record
        self.item = item
        #: Until when it may lie there; ``None`` while it is lent.
        self.until: float | None = None

    def put(self, now: float) -> None:
        """Note that it is about to lie in the pool."""
        self.until = now + self.record.ttl
        self.record.idle[self] = self.until

    def lend(self) -> bool:
        """Note that it has been borrowed; returns false if it was hung up or closed before."""
        there = self.record.idle.pop(self, None) is not None
        lay, self.until = self.until is not None, None
        return there or not lay

    def leave(self) -> None:
        """Note that its connection was closed."""
        self.record.idle.pop(self, None)

    def come_back(self) -> None:
        """Note that it was connected again; it may lie there no longer for that."""
        if self.until is not None:
            self.record.idle[self] = self.until

    def is_overdue(self, now: float) -> bool:
        """Return whether it has lain there for too long, and enough others came back after it."""
        until = self.record.idle.get(self)
        if until is None or now <= until:
            return False
        newer = sum(other > until for other in list(self.record.idle.values()))
        return newer >= self.record.keep

    def claim(self, now: float) -> bool:
        """Take it out if it is overdue; then it is not lent as it is. For the native thread."""
        if not self.is_overdue(now) or self.record.idle.pop(self, None) is None:
            return False
        self.record.hung_up = True
        return True

"""Who has the places of a pool: its connections, and those who wait, in one process.

A place is taken before a connection is opened into it and is given back after that is closed, so
there are never more connections than places. Whoever gives up a connection or a place hands it to
the longest waiter. Hence while anybody waits, nothing is idle and every place is taken.
"""

from __future__ import annotations

import bisect
import enum
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Generic, TypeVar

from .counts import Counts
from .workers import Crew

C = TypeVar("C")


class Grant(enum.Enum):
    """What a waiter may get other than a connection."""

    PLACE = "a place, to open a connection into"
    CLOSED = "nothing: the pool was closed"
    MOVED = "nothing: this is a forked child, which has a pool of its own"


class Member(Generic[C]):
    """A connection of the pool. Times are the pool's clock's."""

    __slots__ = ("alive_at", "connection", "expires_at", "idle_since", "lent_at", "retired")

    def __init__(self, connection: C, now: float, expires_at: float) -> None:
        self.connection = connection
        self.expires_at = expires_at
        self.idle_since = now
        self.lent_at = now
        #: When it was last known to work.
        self.alive_at = now
        #: Whether it is to be closed when it is next seen.
        self.retired = False


class Waiter(Generic[C]):
    """A thread that waits. Who takes it from the queue sets its grant, once, and wakes it."""

    __slots__ = ("grant", "signal")

    def __init__(self) -> None:
        self.grant: Member[C] | Grant | None = None
        self.signal = threading.Lock()
        self.signal.acquire()


class Places(Generic[C]):
    """The state of a pool in one process. All is read and changed under ``lock``.

    :param min_size: below which the workers are rung for
    """

    def __init__(self, min_size: int, crew: Crew) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        #: Told of each new connection, and of each place given back once the pool is closed.
        self.changed = threading.Condition(self.lock)
        self.opened = False
        self.closed = False
        #: Places taken: by idle and lent connections, and by those being opened or closed.
        self.size = 0
        #: The last is lent next; in the order of ``idle_since``.
        self.idle: list[Member[C]] = []
        #: By the identity of the connection; also those that the pool itself is examining.
        self.lent: dict[int, Member[C]] = {}
        self.waiters: OrderedDict[Waiter[C], None] = OrderedDict()
        self.crew = crew
        self.counts = Counts()
        self.sweeping = False
        #: Whether a connection was found dead only after it had been asked: others may be, too.
        self.suspect = False
        # How the workers fare with opening.
        self.failures = 0
        self.retry_at = 0.0
        self.last_error = ""
        #: The places of forked children by process id, in their memory only.
        self.heirs: dict[int, Places[C]] = {}
        #: What the parent had lent at the fork: a checkin of these is right, and does nothing.
        self.inherited: dict[int, C] = {}
        self._min_size = min_size

    @property
    def is_open(self) -> bool:
        """Whether connections may be checked out."""
        return self.opened and not self.closed

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self.idle) + len(self.lent)

    def lend(self) -> Member[C]:
        """Lend the connection that was idle for the shortest time."""
        member = self.idle.pop()
        self.lent[id(member.connection)] = member
        return member

    def borrow(self, member: Member[C]) -> bool:
        """Lend this one, if it is idle."""
        if member not in self.idle:
            return False
        self.idle.remove(member)
        self.lent[id(member.connection)] = member
        return True

    def put(self, member: Member[C]) -> None:
        """Hand a connection that is not lent any more to the longest waiter, or keep it idle."""
        if self.waiters:
            self.lent[id(member.connection)] = member
            self._wake(member)
        elif self.idle and self.idle[-1].idle_since > member.idle_since:
            bisect.insort(self.idle, member, key=lambda other: other.idle_since)
        else:
            self.idle.append(member)

    def give_back(self) -> None:
        """Hand a place to the longest waiter, who opens a connection then, or free it."""
        if self.waiters:
            self._wake(Grant.PLACE)
            return
        self.size -= 1
        if self.closed:
            self.changed.notify_all()
        elif self.size < self._min_size:
            self.crew.ring()

    def close(self) -> None:
        """Lend no more, and fail all who wait."""
        self.closed = True
        while self.waiters:
            self._wake(Grant.CLOSED)
        self.crew.ring()
        self.changed.notify_all()

    def _wake(self, grant: Member[C] | Grant) -> None:
        waiter, _ = self.waiters.popitem(last=False)
        waiter.grant = grant
        waiter.signal.release()

    def inherit(self) -> Places[C]:
        """Return the empty places of this forked child. Without a lock: a thread of the parent may
        have held any, and nobody here would release it."""
        heir = self.heirs.get(os.getpid())
        if heir is None:
            heir = Places[C](self._min_size, Crew(self.crew.name, self.crew.count))
            heir.opened, heir.closed = self.opened, self.closed
            for member in list(self.lent.values()):
                heir.inherited[id(member.connection)] = member.connection
            heir = self.heirs.setdefault(heir.pid, heir)
        return heir

    def desert(self) -> list[C]:
        """Return the parent's connections, once, and send on those who wait in this child.

        Only greenlets still wait there; of threads, none but the forking one lives on.
        """
        members = []
        # One by one, as two threads of the child may both be at it.
        with suppress(IndexError):
            while True:
                members.append(self.idle.pop())
        with suppress(KeyError):
            while True:
                members.append(self.lent.popitem()[1])
        with suppress(KeyError):
            while True:
                self._wake(Grant.MOVED)
        return [member.connection for member in members]

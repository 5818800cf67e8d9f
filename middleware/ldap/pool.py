"""A pool of connections that are costly to open. It knows nothing of what they are for.

Checking out takes microseconds while a connection is idle, and the one used last is lent first, so
that those that are not needed grow old and are closed. If none is idle, the caller opens one,
unless ``max_size`` are there; then it waits in turn. No lock is held while a connection is opened,
checked or closed.

Each process has connections of its own: in a forked child the pool is empty at first. Where
``threading`` is monkey-patched by gevent or eventlet before the pool is made, the same code runs
on greenlets.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from keyfront.errors import OptionError, PoolTimeoutError

from .counts import Counts
from .lease import Lease
from .maintenance import Upkeep
from .places import Grant, Member, Places
from .stock import Found, Stock
from .waiting import Queue
from .workers import Crew, Worker

LOG = logging.getLogger(__name__)

C = TypeVar("C")


class ConnectionPool(Generic[C]):
    """At most ``max_size`` connections, lent to one thread at a time.

    It must be opened before use, and closed after it; both may be left to a ``with`` block. All
    times are seconds. ``math.inf`` stands for never.

    :param open: returns a new connection within the seconds it is given, or raises
    :param close: closes a connection, without waiting for the network
    :param check: asks the server over a connection; raises if it does not work
    :param usable: whether a connection that comes back may be lent again
    :param stale: whether a connection is seen to be dead without asking; called at every checkout
    :param abandon: closes what a forked child inherits: its descriptor only, as the connection is
        still the parent's; without it they are just forgotten
    :param name: for messages, and in the names of the worker threads
    :param min_size: connections that the workers keep open, 0 to ``max_size``
    :param max_size: at least 1
    :param timeout: for a checkout, opening included
    :param max_waiting: threads that may wait at a time; 0 for any number
    :param max_lifetime: a connection's age at which it is closed, less up to 5 %
    :param max_idle: after which an unused connection is closed, or, if it is one of ``min_size``,
        checked: choose less than what the server allows
    :param check_after: idle seconds after which a connection is checked before it is lent
    :param workers: background threads; with 0, :meth:`maintain` must be called now and then
    :param retry_delay: before the workers try again to open a connection; doubled each time up to
        a minute
    :param clock: what time it is
    :raises OptionError: a value is out of range
    """

    def __init__(
        self,
        open: Callable[[float], C],
        close: Callable[[C], None],
        *,
        check: Callable[[C], None] | None = None,
        usable: Callable[[C], bool] = lambda connection: True,
        stale: Callable[[C], bool] = lambda connection: False,
        abandon: Callable[[C], None] = lambda connection: None,
        name: str = "pool",
        min_size: int = 1,
        max_size: int = 10,
        timeout: float = 30.0,
        max_waiting: int = 0,
        max_lifetime: float = 3600.0,
        max_idle: float = 600.0,
        check_after: float = 30.0,
        workers: int = 1,
        retry_delay: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for option, number, least in (
            ("max_size", max_size, 1),
            ("max_waiting", max_waiting, 0),
            ("check_after", check_after, 0),
            ("workers", workers, 0),
        ):
            if not number >= least:
                raise OptionError(option, number, f"{least} or more")
        if not 0 <= min_size <= max_size:
            raise OptionError("min_size", min_size, f"from 0 to max_size ({max_size})")
        for option, seconds in (
            ("timeout", timeout),
            ("max_lifetime", max_lifetime),
            ("max_idle", max_idle),
            ("retry_delay", retry_delay),
        ):
            if not seconds > 0:  # not a number is neither
                raise OptionError(option, seconds, "more than 0 seconds")
        self.name = name
        self.min_size = min_size
        self.max_size = max_size
        self._usable = usable
        self._timeout = timeout
        self._check_after = check_after
        self._workers = workers
        self._clock = clock
        self._stock = Stock(
            open, close, check=check, stale=stale, abandon=abandon, name=name,
            max_lifetime=max_lifetime, clock=clock,
        )
        self._queue = Queue(
            self._stock, name=name, max_size=max_size, max_waiting=max_waiting, clock=clock
        )
        self._upkeep = Upkeep(
            self._stock, name=name, min_size=min_size, max_idle=max_idle, check_after=check_after,
            open_timeout=timeout, retry_delay=retry_delay, clock=clock,
        )
        self._places: Places[C] = Places(min_size, Crew(name, workers))

    def __repr__(self) -> str:
        places = self._places
        return f"<{type(self).__name__} {self.name}: {places.size} of {self.max_size}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Using it

    def connection(self, timeout: float | None = None) -> Lease[C]:
        """Return a context manager that lends a connection; see :meth:`checkout`.

        If the block is left by what is no :class:`Exception`, such as a greenlet's death, the
        connection is closed.
        """
        return Lease(self, timeout)

    def checkout(self, timeout: float | None = None) -> C:
        """Lend a connection until :meth:`checkin`.

        If one has to be opened and that fails, its error is raised as it is, and the longest
        waiter may try instead.

        :param timeout: seconds; ``None`` for the pool's, 0 to take only what is idle now
        :raises PoolTimeoutError: none became free in time
        :raises PoolFullError: ``max_waiting`` others wait already
        :raises PoolClosedError: the pool is closed, or becomes closed meanwhile
        """
        places = self._places
        if places.pid != os.getpid():
            places = self._inherit()
        now = self._clock()
        with places.lock:
            places.counts.requests += 1
            member = places.lend() if places.idle else None
        try:
            found = None
            if member is not None:
                member.lent_at = now
                found = self._stock.look(places, member, self._check_after)
                if found is Found.FIT:
                    return member.connection
            return self._checkout_slowly(places, now, timeout, found)
        except BaseException:
            with places.lock:
                places.counts.errors += 1
            raise

    def checkin(self, connection: C, discard: bool = False) -> None:
        """Take back what :meth:`checkout` lent.

        :param discard: close it, whatever it looks like
        :raises ValueError: it is not lent by this pool, or was given back before
        """
        places = self._places
        if places.pid != os.getpid():
            places = self._inherit()
        keep = False
        try:
            keep = not discard and self._usable(connection)
        finally:
            now = self._clock()
            expired = False
            with places.lock:
                member = places.lent.pop(id(connection), None)
                if member is not None:
                    places.counts.used += now - member.lent_at
                    expired = now >= member.expires_at
                    if keep and not (expired or member.retired or places.closed):
                        member.idle_since = member.alive_at = now
                        places.put(member)
                        member = None
                elif places.inherited.pop(id(connection), None) is None:
                    raise ValueError(f"{self.name}: this connection is not lent by the pool")
            if member is not None:
                self._stock.drop(places, member, expired=expired)

    def _checkout_slowly(
        self, places: Places[C], now: float, timeout: float | None, found: Found | None
    ) -> C:
        """Lend another connection than the one that was found unfit, whose place is still ours."""
        timeout = self._timeout if timeout is None else timeout
        deadline = now + timeout
        while True:
            grant: Member[C] | Grant = Grant.PLACE
            if found is None:
                grant = self._queue.take(places, deadline, timeout)
            elif found is Found.DEAD:
                # Asking the next may take as long again: that is for the workers.
                places.suspect = True
                places.crew.ring()
            else:
                with places.lock:
                    if places.idle:
                        grant = places.lend()
                        places.give_back()
            if grant is Grant.PLACE:
                opened = self._open_into_place(places, deadline, timeout)
                if opened is not None:
                    return opened.connection
                grant = Grant.MOVED
            if grant is Grant.MOVED:
                places, found = self._here(), None
            elif grant is Grant.CLOSED:
                raise self._stock.closed_error(places)
            else:
                assert isinstance(grant, Member)
                grant.lent_at = self._clock()
                found = self._stock.look(places, grant, self._check_after)
                if found is Found.FIT:
                    return grant.connection

    def _open_into_place(
        self, places: Places[C], deadline: float, timeout: float
    ) -> Member[C] | None:
        """Open a connection into a place that is ours, or give that back."""
        try:
            left = deadline - self._clock()
            if left <= 0:
                raise self._queue.timeout_error(places, timeout)
            places.crew.start(self)
        except BaseException:
            with places.lock:
                places.give_back()
            raise
        return self._stock.open(places, left)

    # Its life

    @property
    def closed(self) -> bool:
        """Whether nothing can be checked out: after :meth:`close`, and before :meth:`open`."""
        return not self._here().is_open

    def open(self) -> None:
        """Let connections be checked out, and the workers open ``min_size``; again is no harm.

        :raises PoolClosedError: it was closed; a closed pool stays closed
        """
        places = self._here()
        with places.lock:
            if places.closed:
                raise self._stock.closed_error(places)
            places.opened = True
        if self.min_size:
            places.crew.start(self)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until ``min_size`` connections are open.

        :param timeout: seconds; ``None`` for the pool's
        :raises PoolTimeoutError: they are not; names the last error
        :raises PoolClosedError: the pool is closed, or becomes closed meanwhile
        """
        places = self._here()
        timeout = self._timeout if timeout is None else timeout
        if not self._workers:
            self.maintain()
            timeout = 0.0  # nobody else would open any
        with places.changed:
            places.changed.wait_for(
                lambda: not places.is_open or places.connections >= self.min_size,
                min(timeout, threading.TIMEOUT_MAX),
            )
            if not places.is_open:
                raise self._stock.closed_error(places)
            if places.connections < self.min_size:
                reason = f": {places.last_error}" if places.last_error else ""
                raise PoolTimeoutError(
                    f"{self.name}: {places.connections} of {self.min_size} connections are open "
                    f"after {timeout:g} s{reason}"
                )

    def close(self, timeout: float = 5.0) -> bool:
        """Fail those who wait, close what is idle, and wait for what is lent; again is no harm.

        What is still lent after ``timeout`` seconds is closed when it comes back.

        :return: whether all connections are closed and the workers have been told
        """
        places = self._here()
        deadline = time.monotonic() + timeout
        with places.lock:
            places.close()
        while True:
            with places.lock:
                idle = places.lend() if places.idle else None
            if idle is None:
                break
            self._stock.drop(places, idle)
        with places.changed:
            left = min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
            done = places.changed.wait_for(lambda: places.size == 0, left)
            size = places.size
        places.crew.join(deadline - time.monotonic())
        if not done:
            LOG.warning("%s: closed, but %d connections are still in use", self.name, size)
        return done

    def check(self) -> None:
        """Look at each idle connection now, ask the server over it, and close the dead ones."""
        places = self._here()
        with places.lock:
            members = list(places.idle)
        for member in members:
            self._stock.examine(places, member, 0.0)

    def retire(self, predicate: Callable[[C], bool]) -> int:
        """Close the connections of which ``predicate`` is true: now, or when they come back.

        What is being opened meanwhile is not asked about.

        :return: how many there are
        """
        places = self._here()
        with places.lock:
            members = [*places.idle, *places.lent.values()]
        chosen = [member for member in members if predicate(member.connection)]
        for member in chosen:
            member.retired = True
        for member in chosen:
            with places.lock:
                found = places.borrow(member)
            if found:
                self._stock.drop(places, member)
        return len(chosen)

    def maintain(self) -> float:
        """Do what the workers do: only needed with ``workers=0``.

        :return: seconds until there is more to do
        """
        return self._upkeep.run(self._here())

    def get_stats(self) -> dict[str, int | float]:
        """Return sizes as they are, and counts since the start or since they were last popped.

        ``lent`` includes connections that the pool itself examines; what is neither idle nor lent
        of ``size`` is being opened or closed.
        """
        return self._statistics(pop=False)

    def pop_stats(self) -> dict[str, int | float]:
        """Like :meth:`get_stats`, and begin to count anew."""
        return self._statistics(pop=True)

    def _statistics(self, *, pop: bool) -> dict[str, int | float]:
        places = self._here()
        with places.lock:
            counts = places.counts
            if pop:
                places.counts = Counts()
            return {
                "size": places.size,
                "idle": len(places.idle),
                "lent": len(places.lent),
                "waiting": len(places.waiters),
                "max_size": self.max_size,
                **counts.statistics(),
            }

    # Processes and threads

    def _here(self) -> Places[C]:
        """Return the places of this process."""
        places = self._places
        return places if places.pid == os.getpid() else self._inherit()

    def _inherit(self) -> Places[C]:
        """Begin with empty places in a forked child."""
        parents = self._places
        if parents.pid == os.getpid():
            return parents
        places = self._places = parents.inherit()
        for connection in parents.desert():
            self._stock.abandon(connection)
        if places.is_open and self.min_size:
            places.crew.start(self)
        return places

    def work(self, worker: Worker) -> float | None:
        """Called by the workers only."""
        places = self._places
        if worker.pid != os.getpid() or worker not in places.crew or not places.is_open:
            return None
        return self._upkeep.run(places)

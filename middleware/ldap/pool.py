"""A bounded pool of connections that are costly to open, with the options of psycopg_pool.

Checking out takes microseconds while a connection is idle. The one used last is lent first, so
that those that are not needed grow old and are closed. If none is idle, the caller opens one,
unless ``max_size`` exist; then it waits in turn. No lock is held while a connection is opened,
checked or closed.

A connection is counted in ``size`` before it is opened and until it is closed, so there are never
more than ``max_size``. A caller that gives up a connection, or its count, hands it to the longest
waiter; hence while anybody waits, no connection is idle and ``size`` is ``max_size``. Whatever is
raised, by whatever call, neither is lost: a call that gives one back takes the lock ``surely``, so
that the timeout or the death of a greenlet comes after it.

Each process has connections of its own: in a forked child the pool is empty at first. Where
``threading`` is monkey-patched by gevent or eventlet before the pool is made, the same code runs
on greenlets.
"""

from __future__ import annotations

import bisect
import enum
import logging
import math
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from keyfront.common import ranges
from keyfront.common.condition import Condition, raise_if, take_surely
from keyfront.common.process import mark
from keyfront.errors import PoolClosedError, PoolFullError, PoolTimeoutError

from . import maintenance
from .maintenance import Worker, Workers

LOG = logging.getLogger(__name__)

C = TypeVar("C")

#: Connections that are opened together do not end together: up to this part of their lifetime is
#: taken off, at random.
LIFETIME_JITTER = 0.05

# Time of the last sign of life of a connection that is doubted.
_DOUBTED = -math.inf
# Seconds for a check of an idle connection at least, however few its caller has.
_LEAST_CHECK = 0.05


class Connector(Protocol[C]):
    """Opens, checks and closes a pool's connections; a pool knows nothing else of them."""

    def open(self, seconds: float) -> C:
        """Return a new connection within ``seconds``, or raise."""

    def close(self, connection: C) -> None:
        """Close a connection, without waiting for the network."""

    def abandon(self, connection: C) -> None:
        """Close the descriptor that a forked child inherits; the connection is the parent's."""

    def check(self, connection: C, seconds: float) -> None:
        """Ask the server over an idle connection for a sign of life; raise if there is none.

        :param seconds: time for it at most
        """

    def is_stale(self, connection: C) -> bool:
        """Return whether an idle connection is seen to be dead; costs no round trip."""

    def is_fit(self, connection: C) -> bool:
        """Return whether a connection that comes back may be lent again."""


class Member(Generic[C]):
    """A connection of the pool with its dates, by the pool's clock."""

    __slots__ = ("alive_at", "connection", "expires_at", "idle_since", "lent_at", "retired")

    def __init__(self, connection: C, now: float, expires_at: float) -> None:
        self.connection = connection
        self.expires_at = expires_at
        self.idle_since = now
        self.lent_at = now
        #: The moment when it was last known to work.
        self.alive_at = now
        #: True if it is to be closed when it is next seen.
        self.retired = False


class _Grant(enum.Enum):
    """The things that a waiter gets instead of a connection."""

    OPEN = "leave to open a connection, which is counted already"
    CLOSED = "nothing: the pool was closed"
    MOVED = "nothing: this is a forked child, which has a state of its own"


class _Found(enum.Enum):
    """The outcomes of looking at a connection."""

    FIT = "it may be lent"
    UNFIT = "it was closed at sight"
    DEAD = "it was closed as it did not answer, which may have taken long"


# Their names make objects when they are looked up, for which there may be no memory.
_OPEN, _CLOSED, _MOVED = _Grant.OPEN, _Grant.CLOSED, _Grant.MOVED
_FIT, _UNFIT, _DEAD = _Found.FIT, _Found.UNFIT, _Found.DEAD


class _Waiter(Generic[C]):
    """A thread that waits. Whoever takes it from the queue sets its grant, once, and wakes it."""

    __slots__ = ("grant", "signal")

    def __init__(self) -> None:
        self.grant: Member[C] | _Grant | None = None
        self.signal = threading.Lock()
        self.signal.acquire()


class _Counts:
    """Sums since the pool was opened, or since they were last popped; times in seconds."""

    __slots__ = (
        *("closed", "errors", "evicted", "expired", "lost", "open_errors", "opened", "queued"),
        *("requests", "used", "waited"),
    )

    def __init__(self) -> None:
        self.requests = self.queued = self.errors = self.opened = self.open_errors = 0
        self.closed = self.lost = self.expired = self.evicted = 0
        self.used = self.waited = 0.0


class State(Generic[C]):
    """The state of a pool in one process. All is read and changed under ``lock``.

    :param min_size: connections below which the workers are woken
    :param workers: the background threads of this process, not yet started
    """

    def __init__(self, min_size: int, workers: Workers) -> None:
        self.pid = os.getpid()
        #: Tells this process (``mark[0]`` is 1) from those forked from it, without a system call.
        self.mark = mark()
        self.lock = threading.Lock()
        #: Notified of each new connection, and of each one closed once the pool is closed.
        self.changed = Condition(self.lock)
        self.opened = False
        self.closed = False
        #: Connections that exist: idle, lent, being opened or being closed.
        self.size = 0
        #: The idle connections by ``idle_since``; the last is lent next.
        self.idle: list[Member[C]] = []
        #: By the identity of the connection; also those that the pool itself examines.
        self.lent: dict[int, Member[C]] = {}
        self.waiters: OrderedDict[_Waiter[C], None] = OrderedDict()
        #: Lent connections whose users were collected as garbage, for the workers to close.
        self.forgotten: deque[C] = deque()
        self.workers = workers
        self.counts = _Counts()
        #: True if one of the workers is looking through the idle connections.
        self.sweeping = False
        #: True if a connection was found dead only after it had been asked: others may be, too.
        self.suspect = False
        #: Failed attempts of the workers to open a connection, since the last that succeeded.
        self.failures = 0
        #: The moment when the workers may try again, by the pool's clock.
        self.retry_at = 0.0
        self.last_error = ""
        #: The states of forked children by process id, in their memory only.
        self.children: dict[int, State[C]] = {}
        #: The connections that the parent had lent: a checkin of these is right, and does nothing.
        self.inherited: dict[int, C] = {}
        self._min_size = min_size

    @property
    def is_open(self) -> bool:
        """True if connections may be checked out."""
        return self.opened and not self.closed

    def lend(self) -> Member[C]:
        """Lend the connection that was idle for the shortest time."""
        # First what may fail for want of memory.
        member = self.idle[-1]
        self.lent[id(member.connection)] = member
        self.idle.pop()
        return member

    def lend_this(self, member: Member[C]) -> bool:
        """Lend this connection if it is idle, and return whether it is."""
        if member not in self.idle:
            return False
        self.lent[id(member.connection)] = member
        self.idle.remove(member)
        return True

    def put(self, member: Member[C]) -> None:
        """Hand a connection that is not lent to the longest waiter, or keep it idle."""
        if self.waiters:
            self.lent[id(member.connection)] = member
            self._wake(member)
        elif self.idle and self.idle[-1].idle_since > member.idle_since:
            bisect.insort(self.idle, member, key=lambda other: other.idle_since)
        else:
            self.idle.append(member)

    def subtract(self) -> None:
        """Count one connection less, or let the longest waiter open one in its stead."""
        if self.waiters:
            self._wake(_OPEN)
            return
        self.size -= 1
        if self.closed:
            self.changed.notify_all()
        elif self.size < self._min_size:
            self.workers.wake()

    def subtract_surely(self) -> None:
        """Take the lock and :meth:`subtract`, whatever is raised, and with no memory left."""
        raised = take_surely(self.lock)
        try:
            self.subtract()
        finally:
            self.lock.release()
        raise_if(raised)

    def close(self) -> None:
        """Lend no more connections, and fail all waiters."""
        self.closed = True
        while self.waiters:
            self._wake(_CLOSED)
        self.workers.wake()
        self.changed.notify_all()

    def _wake(self, grant: Member[C] | _Grant) -> None:
        waiter, _ = self.waiters.popitem(last=False)
        waiter.grant = grant
        waiter.signal.release()

    def in_child(self) -> State[C]:
        """Return the empty state of this forked child.

        It takes no lock: a thread of the parent may have held any, and nobody here would release
        it.
        """
        child = self.children.get(os.getpid())
        if child is None:
            child = State[C](self._min_size, self.workers.in_child())
            child.opened, child.closed = self.opened, self.closed
            for member in list(self.lent.values()):
                child.inherited[id(member.connection)] = member.connection
            child = self.children.setdefault(child.pid, child)
        return child

    def leave_to_child(self) -> list[C]:
        """Return the parent's connections, once, and wake the waiters that go on in this child.

        These are greenlets; of threads, none but the forking one lives on.
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
                self._wake(_MOVED)
        return [member.connection for member in members]


class Lease(Generic[C]):
    """A context manager, for one use, that lends a connection for the length of its block.

    :param timeout: seconds to wait for a connection; ``None`` for the pool's
    """

    __slots__ = ("_connection", "_pool", "_timeout")

    def __init__(self, pool: ConnectionPool[C], timeout: float | None = None) -> None:
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
        self._pool.checkin(self._connection, killed)


class ConnectionPool(Generic[C]):
    """At most ``max_size`` connections, lent to one thread at a time.

    It must be opened before use, and closed after it; both may be left to a ``with`` block. All
    times are seconds; ``math.inf`` stands for never.

    :param connector: the connector, which opens, checks and closes connections
    :param name: the pool's name, in messages and in the names of the worker threads
    :param min_size: connections that the workers keep open, 0 to ``max_size``
    :param max_size: connections that may exist, at least 1
    :param timeout: seconds for a checkout, opening included; above 0
    :param max_waiting: threads that may wait at a time; 0 for any number
    :param max_lifetime: age at which a connection is closed, less up to 5 %; above 0
    :param max_idle: seconds after which an unused connection is closed, or, if it is one of
        ``min_size``, checked; above 0. Choose less than what the server allows.
    :param check_after: idle seconds after which a connection is checked before it is lent
    :param workers: background threads; with 0, :meth:`maintain` must be called now and then
    :param retry_delay: seconds until the workers try again to open a connection, above 0; doubled
        each time up to a minute
    :param clock: a function that returns seconds that never go back
    :param after_fork: a function called in a forked child before it uses the pool, perhaps more
        than once
    :raises OptionError: a value is out of range
    """

    def __init__(
        self,
        connector: Connector[C],
        *,
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
        after_fork: Callable[[], object] | None = None,
    ) -> None:
        ranges.sizes(min_size, max_size)
        for option, number in (("max_waiting", max_waiting), ("workers", workers)):
            ranges.count(option, number)
        for option, seconds in (
            ("timeout", timeout),
            ("max_lifetime", max_lifetime),
            ("max_idle", max_idle),
            ("retry_delay", retry_delay),
        ):
            ranges.above_zero(option, seconds)
        ranges.zero_or_more("check_after", check_after)
        self.name = name
        self.min_size = min_size
        self.max_size = max_size
        self.timeout = timeout
        self.max_idle = max_idle
        self.check_after = check_after
        self.retry_delay = retry_delay
        self.clock = clock
        self._connector = connector
        self._max_waiting = max_waiting
        self._max_lifetime = max_lifetime
        self._after_fork = after_fork
        self._state: State[C] = State(min_size, Workers(name, workers))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self._state.size} of {self.max_size}>"

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

    # Checking out and in

    def connection(self, timeout: float | None = None) -> Lease[C]:
        """Return a context manager that lends a connection; see :meth:`checkout`.

        If the block is left by an error that is no :class:`Exception`, such as a greenlet's death,
        the connection is closed.

        :param timeout: seconds to wait; ``None`` for the pool's
        """
        return Lease(self, timeout)

    def checkout(self, timeout: float | None = None) -> C:
        """Lend a connection until :meth:`checkin`.

        If one has to be opened and that fails, its error is raised as it is, and the longest
        waiter may try instead.

        :param timeout: seconds; ``None`` for the pool's, 0 to take only an idle one
        :raises PoolTimeoutError: no connection became free in time
        :raises PoolFullError: ``max_waiting`` others wait already
        :raises PoolClosedError: the pool is closed, or becomes closed meanwhile
        """
        state = self._state
        if not state.mark[0]:
            state = self._begin_in_child()
        now = self.clock()
        member = found = None
        try:
            with state.lock:
                state.counts.requests += 1
                if idle := state.idle:
                    member = idle[-1]
                    state.lent[id(member.connection)] = member
                    idle.pop()
            if member is not None:
                member.lent_at = now
                stale = False
                if (
                    now - member.alive_at < self.check_after
                    and now < member.expires_at
                    and not member.retired
                ):
                    # What `_look` does where all is well, without the call.
                    connection = member.connection
                    try:
                        stale = self._connector.is_stale(connection)
                    except Exception:
                        stale = True
                    if not stale:
                        return connection
                found = self._look(state, member, now, self.check_after, timeout, stale=stale)
                if found is _FIT:
                    return member.connection
            return self._checkout_slowly(state, now, timeout, found)
        except BaseException:
            if member is not None and found is None:
                self._let_go(state, member)
            with state.lock:
                state.counts.errors += 1
            raise

    def checkin(self, connection: C, discard: bool = False) -> None:
        """Take back a connection that :meth:`checkout` lent.

        :param connection: the connection
        :param discard: true to close it even if it may be lent again
        :raises ValueError: it is not lent by this pool, or was given back before
        """
        state = self._state
        back = False
        try:
            if not state.mark[0]:
                state = self._begin_in_child()
            keep = False
            try:
                keep = not discard and self._connector.is_fit(connection)
            finally:
                now = self.clock()
                expired = False
                raised = None
                try:
                    state.lock.acquire()
                except BaseException as error:
                    raised = take_surely(state.lock, error)
                member = None
                try:
                    try:
                        member = state.lent.pop(id(connection), None)
                        back = True
                        if member is not None:
                            state.counts.used += now - member.lent_at
                            expired = now >= member.expires_at
                            if keep and not (expired or member.retired or state.closed):
                                member.idle_since = now
                                if member.alive_at != _DOUBTED:
                                    member.alive_at = now
                                idle = state.idle
                                if state.waiters or (idle and idle[-1].idle_since > now):
                                    state.put(member)
                                else:
                                    idle.append(member)
                                member = None
                        elif state.inherited.pop(id(connection), None) is None:
                            raise ValueError(
                                f"{self.name}: this connection is not lent by the pool"
                            )
                    finally:
                        state.lock.release()
                finally:
                    if member is not None:
                        self.drop(state, member, expired=expired)
                if raised is not None:
                    raise_if(raised)
        except MemoryError:
            # What its frames have given back may do for this.
            member = None if back else state.lent.get(id(connection))
            if member is not None:
                self.drop(state, member)
            raise

    def forget(self, connection: C) -> None:
        """Let the workers close a lent connection. Takes no lock: it is for finalizers.

        The garbage collector may call these in a thread that holds the pool's lock.
        """
        state = self._state
        if state.pid == os.getpid():
            state.forgotten.append(connection)
            state.workers.wake()

    def _checkout_slowly(
        self, state: State[C], now: float, timeout: float | None, found: _Found | None
    ) -> C:
        """Lend a connection other than the first idle one.

        :param state: the pool's state in this process
        :param now: the time of the call, by the pool's clock
        :param timeout: seconds; ``None`` for the pool's
        :param found: UNFIT or DEAD for the idle one that was closed, which is still counted, so
            that another may be opened; ``None`` if none was idle
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = now + timeout
        while True:
            grant: Member[C] | _Grant = _OPEN
            if found is None:
                grant = self._wait_in_turn(state, deadline, timeout)
            elif found is _DEAD:
                # To ask the next may take as long again: the workers do it.
                state.suspect = True
                state.workers.wake()
            else:
                try:
                    with state.lock:
                        if state.idle:
                            grant = state.lend()
                            state.subtract()
                except BaseException:
                    state.subtract_surely()
                    raise
            if grant is _OPEN:
                opened = self._open_in_time(state, deadline, timeout)
                if opened is not None:
                    return opened.connection
                grant = _MOVED
            if grant is _MOVED:
                state, found = self._here(), None
            elif grant is _CLOSED:
                raise self._closed_error(state)
            else:
                assert isinstance(grant, Member)
                grant.lent_at = self.clock()
                left = deadline - grant.lent_at
                found = self._look(state, grant, grant.lent_at, self.check_after, left)
                if found is _FIT:
                    return grant.connection

    def _wait_in_turn(
        self, state: State[C], deadline: float, timeout: float
    ) -> Member[C] | _Grant:
        """Return an idle connection or leave to open one, or wait in turn for either."""
        waiter: _Waiter[C] = _Waiter()
        began = self.clock()
        try:
            with state.lock:
                if not state.is_open:
                    raise self._closed_error(state)
                if state.idle:
                    return state.lend()
                if began >= deadline:
                    raise self._timeout_error(state, timeout)
                if state.size < self.max_size:
                    state.size += 1
                    return _OPEN
                waiting = len(state.waiters)
                if self._max_waiting and waiting >= self._max_waiting:
                    raise PoolFullError(
                        f"{self.name}: all {self.max_size} connections are in use and {waiting} "
                        "requests wait already, which is max_waiting"
                    )
                state.waiters[waiter] = None
                state.counts.queued += 1
            waiter.signal.acquire(timeout=min(deadline - began, threading.TIMEOUT_MAX))
            with state.lock:
                state.counts.waited += self.clock() - began
                if waiter.grant is None:
                    del state.waiters[waiter]
                    raise self._timeout_error(state, timeout)
                return waiter.grant
        except BaseException:
            # A connection or leave that was granted at this moment is handed on.
            try:
                with state.changed.surely():
                    state.waiters.pop(waiter, None)
                    if waiter.grant is _OPEN:
                        state.subtract()
            finally:
                if isinstance(waiter.grant, Member):
                    self._put_back(state, waiter.grant)
            raise

    def _open_in_time(
        self, state: State[C], deadline: float, timeout: float
    ) -> Member[C] | None:
        """Open a connection that is counted already; see :meth:`open_counted`."""
        try:
            left = deadline - self.clock()
            if left <= 0:
                raise self._timeout_error(state, timeout)
            state.workers.start(self)
        except BaseException:
            state.subtract_surely()
            raise
        return self.open_counted(state, left, lend=True)

    # Opening, examining and closing one connection, over the network

    def open_counted(self, state: State[C], seconds: float, *, lend: bool) -> Member[C] | None:
        """Open a connection that ``size`` counts already; after an error it counts no more.

        :param state: the pool's state in this process
        :param seconds: time to open it
        :param lend: true to lend it to the caller; else it goes to the longest waiter or is idle
        :returns: ``None`` if the process was forked meanwhile, and this is the child
        :raises PoolClosedError: the pool was closed meanwhile
        """
        member: Member[C] | None = None
        here = True
        closed = placed = False
        try:
            connection = self._connector.open(seconds)
        except BaseException as error:
            try:
                with state.changed.surely():
                    state.counts.open_errors += 1
                    state.last_error = str(error) or type(error).__name__
            finally:
                state.subtract_surely()
            raise
        try:
            now = self.clock()
            lifetime = self._max_lifetime * (1 - LIFETIME_JITTER * random.random())
            member = Member(connection, now, now + lifetime)
            with state.changed.surely():
                here = state.pid == os.getpid()
                if here:
                    closed = state.closed
                    state.counts.opened += 1
                    state.failures, state.last_error = 0, ""
                    # In one step: who waits for it to be open finds it where it belongs.
                    if lend or closed:
                        state.lent[id(connection)] = member
                    else:
                        state.put(member)
                        placed = True
                    state.changed.notify_all()
        except BaseException:
            if not here:
                self._abandon(connection)
            elif member is None:
                try:
                    self._close(connection)
                finally:
                    state.subtract_surely()
            elif not placed:
                self.drop(state, member)
            raise
        if not here:
            self._abandon(connection)
            return None
        if closed:
            self.drop(state, member)
            raise self._closed_error(state)
        return member

    def examine(self, state: State[C], member: Member[C], check_after: float) -> None:
        """Check a connection if it is idle, and close it if it does not work.

        :param state: the pool's state in this process
        :param member: the connection
        :param check_after: seconds without a sign of life after which the server is asked
        """
        with state.lock:
            idle = state.lend_this(member)
        if not idle:
            return
        if self._look(state, member, self.clock(), check_after, math.inf) is _FIT:
            self._put_back(state, member)
        else:
            state.subtract_surely()

    def drop(
        self, state: State[C], member: Member[C], *, expired: bool = False, evicted: bool = False
    ) -> None:
        """Close a lent connection, and count one less.

        :param state: the pool's state in this process
        :param member: the connection
        :param expired: true to count it among those that reached ``max_lifetime``
        :param evicted: true to count it among those unused for ``max_idle``
        """
        try:
            self._discard(state, member, expired=expired, evicted=evicted)
        finally:
            state.subtract_surely()

    def _look(
        self,
        state: State[C],
        member: Member[C],
        now: float,
        check_after: float,
        seconds: float | None,
        *,
        stale: bool = False,
    ) -> _Found:
        """Check that a lent connection works; else close it, but leave it counted.

        :param state: the pool's state in this process
        :param member: the connection
        :param now: the time, by the pool's clock
        :param check_after: seconds without a sign of life after which the server is asked
        :param seconds: the caller's time, ``None`` for the pool's timeout; half of it is left for
            another connection
        :param stale: true if it was seen to be dead
        """
        lost = expired = asked = False
        try:
            if member.retired:
                pass
            elif now >= member.expires_at:
                expired = True
            elif stale or self._connector.is_stale(member.connection):
                lost = True
            elif now - member.alive_at < check_after:
                return _FIT
            else:
                asked = True
                left = self.timeout if seconds is None else seconds
                self._connector.check(member.connection, max(left / 2, _LEAST_CHECK))
                member.alive_at = self.clock()
                return _FIT
        except Exception as error:
            lost = True
            if asked:
                LOG.info("%s: a connection was lost while it was idle: %s", self.name, error)
        except BaseException:
            self.drop(state, member)
            raise
        try:
            self._discard(state, member, lost=lost, expired=expired)
        except BaseException:
            state.subtract_surely()
            raise
        return _DEAD if asked else _UNFIT

    def _put_back(self, state: State[C], member: Member[C]) -> None:
        """Hand a lent connection that was not used to the longest waiter, or keep it idle."""
        kept = False
        try:
            with state.changed.surely():
                if state.is_open and not member.retired:
                    del state.lent[id(member.connection)]
                    state.put(member)
                    kept = True
        finally:
            if not kept:
                self.drop(state, member)

    def _discard(
        self,
        state: State[C],
        member: Member[C],
        *,
        lost: bool = False,
        expired: bool = False,
        evicted: bool = False,
    ) -> None:
        """Close a lent connection; it is still counted, whatever is raised."""
        try:
            with state.changed.surely():
                state.lent.pop(id(member.connection), None)
                counts = state.counts
                counts.closed += 1
                counts.lost += lost
                counts.expired += expired
                counts.evicted += evicted
        finally:
            try:
                self._close(member.connection)
            finally:
                # Again, if there was no memory for that.
                state.lent.pop(id(member.connection), None)

    def _let_go(self, state: State[C], member: Member[C]) -> None:
        """Take back a connection of a checkout that failed, unless it is closed by then."""
        idle = lent = False
        raised = take_surely(state.lock)
        try:
            lent = state.lent.get(id(member.connection)) is member
            idle = member in state.idle
            if lent and idle:
                del state.lent[id(member.connection)]
        finally:
            state.lock.release()
            if lent and not idle:
                self.drop(state, member)
        raise_if(raised)

    def _close(self, connection: C) -> None:
        try:
            self._connector.close(connection)
        except Exception as error:
            LOG.debug("%s: closing a connection: %s", self.name, error)

    def _abandon(self, connection: C) -> None:
        with suppress(Exception):
            self._connector.abandon(connection)

    def _closed_error(self, state: State[C]) -> PoolClosedError:
        told = "is closed" if state.closed else "was not opened; call open() first"
        return PoolClosedError(f"{self.name}: the pool {told}")

    def _timeout_error(self, state: State[C], timeout: float) -> PoolTimeoutError:
        return PoolTimeoutError(
            f"{self.name}: no connection became free within {timeout:.3g} s: "
            f"{state.size} of {self.max_size} are in use and {len(state.waiters)} requests wait"
        )

    # The pool's own life

    @property
    def closed(self) -> bool:
        """True if nothing can be checked out: after :meth:`close`, and before :meth:`open`."""
        return not self._here().is_open

    def open(self) -> None:
        """Open the pool for use, and let the workers open ``min_size``; it may be called again.

        :raises PoolClosedError: it was closed; a closed pool stays closed
        """
        state = self._here()
        with state.lock:
            if state.closed:
                raise self._closed_error(state)
            state.opened = True
        if self.min_size:
            state.workers.start(self)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until ``min_size`` connections are open.

        :param timeout: seconds; ``None`` for the pool's
        :raises PoolTimeoutError: they are not open in time; the error names the last one
        :raises PoolClosedError: the pool is closed, or becomes closed meanwhile
        """
        state = self._here()
        timeout = self.timeout if timeout is None else timeout
        if not state.workers.count:
            self.maintain()
            timeout = 0.0  # nobody else would open any
        with state.changed:
            state.changed.wait_for(
                lambda: not state.is_open or len(state.idle) + len(state.lent) >= self.min_size,
                timeout,
            )
            if not state.is_open:
                raise self._closed_error(state)
            count = len(state.idle) + len(state.lent)
            if count < self.min_size:
                reason = f": {state.last_error}" if state.last_error else ""
                raise PoolTimeoutError(
                    f"{self.name}: {count} of {self.min_size} connections are open "
                    f"after {timeout:g} s{reason}"
                )

    def close(self, timeout: float = 5.0) -> bool:
        """Close idle connections, fail waiters, and wait for lent connections.

        Connections still lent after ``timeout`` seconds are closed when they come back. It may be
        called again.

        :param timeout: seconds to wait for lent connections
        :returns: true if all connections are closed
        """
        state = self._here()
        deadline = time.monotonic() + timeout
        with state.lock:
            state.close()
        while True:
            with state.lock:
                idle = state.lend() if state.idle else None
            if idle is None:
                break
            self.drop(state, idle)
        with state.changed:
            done = state.changed.wait_for(lambda: state.size == 0, deadline - time.monotonic())
            size = state.size
        state.workers.join(deadline - time.monotonic())
        if not done:
            LOG.warning("%s: closed, but %d connections are still in use", self.name, size)
        return done

    def check(self) -> None:
        """Ask the server over each idle connection now, and close the dead ones."""
        state = self._here()
        with state.lock:
            members = list(state.idle)
        for member in members:
            self.examine(state, member, 0.0)

    @property
    def is_waited_for(self) -> bool:
        """True if somebody waits for a connection; takes no lock."""
        return bool(self._state.waiters)

    def connections(self) -> list[C]:
        """Return the connections there are, idle ones first, without those being opened."""
        state = self._here()
        with state.lock:
            return [member.connection for member in (*state.idle, *state.lent.values())]

    def retire(self, predicate: Callable[[C], bool]) -> int:
        """Close the connections for which ``predicate`` is true: now, or when they come back.

        Connections that are being opened meanwhile are left alone.

        :param predicate: a function that takes a connection
        :returns: the number of these connections
        """
        state = self._here()
        with state.lock:
            members = [*state.idle, *state.lent.values()]
        chosen = [member for member in members if predicate(member.connection)]
        for member in chosen:
            member.retired = True
        for member in chosen:
            with state.lock:
                found = state.lend_this(member)
            if found:
                self.drop(state, member)
        return len(chosen)

    def doubt(self, predicate: Callable[[C], bool]) -> None:
        """Doubt the connections for which ``predicate`` is true: each is checked before it is lent.

        :param predicate: a function that takes a connection and never waits: a lock is held
        """
        state = self._here()
        with state.lock:
            # Lent ones, too: they may have been heard from before, and come back only now.
            for member in (*state.idle, *state.lent.values()):
                if predicate(member.connection):
                    member.alive_at = _DOUBTED

    def maintain(self) -> float:
        """Do the workers' work; only needed with ``workers=0``.

        :returns: seconds until there is more to do
        """
        return maintenance.run(self, self._here())

    def work(self, worker: Worker) -> float | None:
        """Do all maintenance that is due; called by a worker alone.

        :returns: seconds until there is more to do, ``None`` if that is never
        """
        state = self._state
        if worker.pid != os.getpid() or worker not in state.workers or not state.is_open:
            return None
        return maintenance.run(self, state)

    def get_stats(self) -> dict[str, int | float]:
        """Return present sizes, and counts since the start or since they were last popped.

        Sizes: ``size``, ``idle``, ``lent`` (also those that the pool itself examines; others are
        being opened or closed), ``waiting``, ``max_size``. By the counts an operator sizes the
        pool: ``requests``, of these ``requests_queued`` had to wait for another's connection,
        ``requests_wait_ms`` in all, and ``requests_errors`` ended without one; ``opened``,
        ``open_errors``, ``closed`` for any reason, of these ``lost`` were found dead before they
        were lent, ``expired`` had reached ``max_lifetime``, and ``idle_evicted`` were unused for
        ``max_idle``; ``usage_ms`` is the time for which connections were lent, in all.
        """
        return self._statistics(pop=False)

    def pop_stats(self) -> dict[str, int | float]:
        """Return the numbers of :meth:`get_stats`, and start the counts from 0."""
        return self._statistics(pop=True)

    def _statistics(self, *, pop: bool) -> dict[str, int | float]:
        state = self._here()
        with state.lock:
            counts = state.counts
            if pop:
                state.counts = _Counts()
            return {
                "size": state.size,
                "idle": len(state.idle),
                "lent": len(state.lent),
                "waiting": len(state.waiters),
                "max_size": self.max_size,
                "requests": counts.requests,
                "requests_queued": counts.queued,
                "requests_wait_ms": round(counts.waited * 1000),
                "requests_errors": counts.errors,
                "opened": counts.opened,
                "open_errors": counts.open_errors,
                "closed": counts.closed,
                "lost": counts.lost,
                "expired": counts.expired,
                "idle_evicted": counts.evicted,
                "usage_ms": round(counts.used * 1000),
            }

    def _here(self) -> State[C]:
        """Return the state of this process."""
        state = self._state
        return state if state.mark[0] else self._begin_in_child()

    def _begin_in_child(self) -> State[C]:
        """Return the state of a forked child, empty at first."""
        parents = self._state
        if parents.pid == os.getpid():
            return parents
        if self._after_fork is not None:
            self._after_fork()
        state = self._state = parents.in_child()
        for connection in parents.leave_to_child():
            self._abandon(connection)
        if state.is_open and self.min_size:
            state.workers.start(self)
        return state

"""The background threads of a pool, which spare callers the waiting.

They close connections that are too old, find dead ones, and keep the minimum open. Where
``threading`` is monkey-patched they are greenlets.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from keyfront.errors import KeyfrontError, PoolClosedError

if TYPE_CHECKING:
    from .pool import ConnectionPool, Member, State

LOG = logging.getLogger(__name__)

#: The longest pause between two attempts to open a connection, in seconds.
MAX_RETRY_DELAY = 60.0

# Part of a pause by which it is longer or shorter at random, so that processes do not try at once.
_RETRY_JITTER = 0.1

#: Seconds after which the idle connections are looked at, at the latest.
SWEEP_SECONDS = 60.0

# Part of the time between two sweeps: connections that were heard from since are left alone.
_FRESH = 0.5


def run(pool: ConnectionPool[Any], state: State[Any]) -> float:
    """Do all maintenance that is due for a pool.

    :param pool: the pool
    :param state: the pool's state in this process
    :returns: seconds until there is more to do, above 0
    """
    try:
        while state.forgotten:
            pool.checkin(state.forgotten.popleft(), discard=True)
        _sweep(pool, state)
        while _open_one(pool, state):
            pass
        return _delay(pool, state)
    except Exception:
        LOG.exception("%s: the maintenance failed", pool.name)
        return pool.retry_delay


def _sweep(pool: ConnectionPool[Any], state: State[Any]) -> None:
    """Close connections unused for ``max_idle``, and check those not heard from lately."""
    now = pool.clock()
    with state.lock:
        # Two would evict one too many.
        if state.sweeping or not state.idle:
            return
        state.sweeping = True
    try:
        while unwanted := _take_unwanted(pool, state, now):
            pool.drop(state, unwanted, evicted=True)
        with state.lock:
            # Those that stay are asked before the server finds them idle for too long.
            check_after, fresh = pool.max_idle, _interval(pool) * _FRESH
            if state.suspect:
                check_after, fresh = pool.check_after, -math.inf
            state.suspect = False
            # A connection is lent while it is checked: only those that nobody is likely to want at
            # this moment, who would wait or open another one.
            members = [
                member
                for member in state.idle
                if now - member.alive_at >= fresh or now >= member.expires_at
            ]
        for member in members:
            pool.examine(state, member, check_after)
    finally:
        state.sweeping = False


def _take_unwanted(
    pool: ConnectionPool[Any], state: State[Any], now: float
) -> Member[Any] | None:
    with state.lock:
        if state.idle and state.size > pool.min_size:
            longest = state.idle[0]
            if now - longest.idle_since >= pool.max_idle:
                state.lend_this(longest)
                return longest
    return None


def _open_one(pool: ConnectionPool[Any], state: State[Any]) -> bool:
    """Open one connection if there are too few; return whether to look again."""
    with state.lock:
        if (
            not state.is_open
            or state.size >= pool.min_size
            or (state.failures and pool.clock() < state.retry_at)
        ):
            return False
        state.size += 1
    failures = state.failures
    opened, failure = False, None
    try:
        opened = pool.open_counted(state, pool.timeout, lend=False) is not None
    except PoolClosedError:
        pass
    except Exception as error:
        failure = error
    if failure is not None:
        try:
            _put_off(pool, state, failures, failure)
        finally:
            failure = None  # or it would hold this frame, and this frame it
    elif opened and failures:
        LOG.info("%s: connections can be opened again", pool.name)
    return opened


def _put_off(
    pool: ConnectionPool[Any], state: State[Any], failures: int, error: Exception
) -> None:
    """Put off the next attempt. Not called while ``error`` is handled: oslo.log would add it."""
    delay = min(pool.retry_delay * 2.0 ** min(failures, 60), MAX_RETRY_DELAY)
    delay *= 1 + _RETRY_JITTER * (2 * random.random() - 1)
    with state.lock:
        state.failures = failures + 1
        state.retry_at = pool.clock() + delay
    if not failures:
        # An error that is none of ours may need its trace.
        trace = None if isinstance(error, KeyfrontError) else error
        LOG.warning("%s: cannot open a connection: %s", pool.name, error, exc_info=trace)


def _interval(pool: ConnectionPool[Any]) -> float:
    """Return the seconds between two sweeps, at most."""
    return min(SWEEP_SECONDS, pool.max_idle / 8)


def _delay(pool: ConnectionPool[Any], state: State[Any]) -> float:
    """Return the seconds until something is due."""
    now = pool.clock()
    with state.lock:
        due = now + _interval(pool)
        for member in () if state.sweeping else state.idle:
            due = min(due, member.expires_at, member.alive_at + pool.max_idle)
            if state.size > pool.min_size:
                due = min(due, member.idle_since + pool.max_idle)
        if state.size < pool.min_size:
            due = min(due, state.retry_at)
        # Never a busy loop, should something be due that cannot be done.
        return max(due - now, 0.01)


class Owner(Protocol):
    """An object that workers work for."""

    def work(self, worker: Worker) -> float | None:
        """Do all that is due; return the seconds until there is more, ``None`` for never."""
        ...


class Worker:
    """One daemon thread. It refers to its owner weakly, and ends when that is gone.

    :param owner: the object whose ``work`` is called again and again
    :param name: name of the thread
    """

    def __init__(self, owner: Owner, name: str) -> None:
        #: The process it runs in: a greenlet goes on in a forked child, where it must end.
        self.pid = os.getpid()
        #: True if it does nothing any more, and another may take its place.
        self.ended = False
        # A lock and no condition: the garbage collector may wake it, in a thread that holds any
        # lock.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._owner = weakref.ref(owner, self._owner_is_gone)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. If none can be started, :attr:`ended` is true."""
        started = False
        try:
            self._thread.start()
            started = True
        except RuntimeError:
            pass  # at the process's end, or at its limit: the pool does without
        finally:
            self.ended = not started

    def wake(self) -> None:
        """Wake the thread to look for work; never waits."""
        if self._asleep.locked():
            try:
                self._asleep.release()
            except RuntimeError:
                pass  # another woke it at the same instant

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until it has ended."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(min(max(timeout, 0.0), threading.TIMEOUT_MAX))

    def _owner_is_gone(self, _: weakref.ref[Any]) -> None:
        self.wake()

    def _run(self) -> None:
        try:
            while True:
                owner = self._owner()
                delay = None if owner is None else owner.work(self)
                owner = None  # while it sleeps, nothing of the pool is held
                if delay is None:
                    return
                self._asleep.acquire(timeout=delay)
        finally:
            self.ended = True


class Workers:
    """The workers of a pool in one process.

    :param name: name of the pool, to name the threads by
    :param count: threads to be kept running, 0 or more
    """

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._name = name
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def in_child(self) -> Workers:
        """Return the workers of a forked child, where none of the parent's runs."""
        return Workers(self._name, self.count)

    def start(self, owner: Owner) -> None:
        """Start the workers that are missing; costs little if none is.

        :param owner: the object that they work for
        """
        workers = self._workers
        if len(workers) == self.count and not any(worker.ended for worker in workers):
            return
        new = []
        with self._lock:
            workers = [worker for worker in self._workers if not worker.ended]
            while len(workers) < self.count:
                worker = Worker(owner, f"keyfront-ldap-{self._name}-{len(workers) + 1}")
                workers.append(worker)
                new.append(worker)
            self._workers = workers
        try:
            while new:
                new[0].start()
                del new[0]
        finally:
            for worker in new:  # not reached, as a greenlet was killed here
                worker.ended = True

    def wake(self) -> None:
        """Wake all workers."""
        for worker in self._workers:
            worker.wake()

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all have ended."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.join(deadline - time.monotonic())

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

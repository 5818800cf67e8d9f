"""The monitor of a directory's servers, which probes them and moves connections to the best one."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from keyfront.errors import DirectoryError

from .maintenance import Worker, Workers
from .pool import ConnectionPool
from .protocol.connection import Connection
from .protocol.transport import Address
from .protocol.urls import ServerURL
from .servers import ServerSet

LOG = logging.getLogger(__name__)

#: Seconds between two looks at the servers when all are up; a failure wakes the worker.
IDLE_SECONDS = 30.0
# The same while one is down, or connections are still to be moved.
_SHORTEST, _LONGEST = 0.01, 1.0


class _Prepares(Protocol):
    def prepare(self) -> None:
        """Open a connection that the pool's next one is."""


class Monitor:
    """Watches the servers with one thread, started when one is first down. It keeps no pool alive.

    :param servers: the servers of the directory
    :param probe: a function that checks that a server is up, without a BIND; see
        :meth:`.ServerSet.check`
    :param name: name of the directory's pool
    :param fail_back: true to close connections to a worse server when a better one is up
    :param wait: seconds for a pool to replace a connection, above 0
    :ivar avoided: servers that are down while another is up

    Where servers are looked up in DNS, the monitor does that in time. Connections to servers that
    are not named any more are closed as those to a worse server are: a few at a time, while others
    are opened.
    """

    def __init__(
        self,
        servers: ServerSet,
        probe: Callable[[ServerURL, Address, float], None],
        *,
        name: str,
        fail_back: bool,
        wait: float,
    ) -> None:
        self._servers = servers
        self._probe = probe
        self._fail_back = fail_back
        self._wait = wait
        self._name = f"{name}-health"
        self._watched: list[_Watched] = []
        self._workers = Workers(self._name, 1)
        self._closed = False
        self._lock = threading.Lock()
        self._down: frozenset[ServerURL] = frozenset()
        # Whether a connection was opened that no pool has yet, and that should lead elsewhere.
        self._unsettled = False
        self.avoided: frozenset[ServerURL] = frozenset()
        self._looks_up = servers.discovery is not None
        if servers.discovery is not None:
            this = weakref.WeakMethod(self._looked_up)
            servers.discovery.ended = lambda: (method := this()) and method()

    def watch(self, pool: ConnectionPool[Any], connector: _Prepares) -> None:
        """Close connections of this pool when they should lead to another server.

        :param pool: the pool whose connections are looked at
        :param connector: the connector that opened them
        """
        self._watched.append(_Watched(pool, connector))

    def update(self) -> None:
        """Read the states of the servers; to be called after a failure or a connect."""
        before = self._down
        self._read_states()
        if (self._down or self._looks_up) and not self._closed:
            self._workers.start(self)
            if self._down != before:
                self._workers.wake()

    def suspect(self, url: ServerURL, *, silent: bool) -> None:
        """Probe a server that may be down, or may only have failed for a single user.

        :param url: the server
        :param silent: true if it did not answer, so that idle connections may be dead, too
        """
        if not self._servers.suspect(url) or self._closed:
            return
        for watched in self._watched if silent else ():
            pool = watched.pool()
            if pool is not None:
                pool.doubt(lambda connection: connection.url == url)
        self._workers.start(self)
        self._workers.wake()

    def opened(self, url: ServerURL) -> None:
        """Note the server of a new connection; a better one may have come up meanwhile."""
        if self._should_move(url) and not self._closed:
            self._unsettled = True
            self._workers.start(self)
            self._workers.wake()

    def _looked_up(self) -> None:
        self._workers.wake()

    def _should_move(self, url: ServerURL) -> bool:
        """Return whether a connection should lead to another server."""
        if self._fail_back:
            return not self._servers.preferred(url)
        return self._looks_up and self._servers.has_left(url)

    def stop(self) -> None:
        """End the worker."""
        self._closed = True
        self._workers.wake()

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until the worker has ended."""
        self._workers.join(timeout)

    def after_fork(self) -> None:
        """Start without a worker: the parent's does not run here."""
        self._workers = self._workers.in_child()
        self._lock = threading.Lock()
        for watched in self._watched:
            watched.leaving = weakref.WeakSet()

    def work(self, worker: Worker) -> float | None:
        """Probe servers that are down and move connections; called by the worker alone.

        :returns: seconds until there is more to do, ``None`` if that is never
        """
        if self._closed or worker.pid != os.getpid() or worker not in self._workers:
            return None
        unsettled, self._unsettled = self._unsettled, False
        try:
            self._check()
        except Exception:
            LOG.exception("%s: the check of the servers failed", self._name)
        due = self._servers.next_check()
        if due is not None:
            return min(max(due, _SHORTEST), _LONGEST)
        unsettled = unsettled or any(watched.leaving for watched in self._watched)
        delay = _LONGEST if unsettled else IDLE_SECONDS
        lookup = self._servers.next_lookup()
        return delay if lookup is None else min(delay, max(lookup, _SHORTEST))

    def _read_states(self) -> None:
        with self._lock:
            # Of two who read at once, the last one knows.
            self._down, self.avoided = self._servers.avoided()

    def _check(self) -> None:
        before = self._down
        self._servers.check(self._probe)
        self._read_states()
        for watched in self._watched:
            pool, connector = watched.pool(), watched.connector()
            if pool is None or connector is None:
                continue
            pool.retire(lambda connection: connection.url in self.avoided)
            if before - self._down:
                # Connections from before the outage may be dead.
                pool.check()
            if self._fail_back or self._looks_up:
                self._move(watched.leaving, pool, connector)

    def _move(
        self,
        leaving: weakref.WeakSet[Connection],
        pool: ConnectionPool[Any],
        connector: _Prepares,
    ) -> None:
        """Close connections that should lead to a better server, never fewer than ``min_size``."""
        while not self._closed:
            moving = [
                connection
                for connection in pool.connections()
                if self._should_move(connection.url) and connection not in leaving
            ]
            if not moving:
                return
            stats = pool.get_stats()
            still_here = sum(1 for each in leaving if each.transport.raw is not None)
            spare = int(stats["size"]) - still_here - pool.min_size
            try:
                if spare <= 0:
                    if still_here:
                        return  # these come back first
                    if not stats["lent"] and pool.min_size < pool.max_size:
                        connector.prepare()
                    spare = 1
                chosen = set(moving[:spare])
                leaving.update(chosen)
                pool.retire(chosen.__contains__)
                pool.wait(self._wait)
            except DirectoryError as error:
                LOG.debug("%s: connections cannot be moved now: %s", self._name, error)
                return


class _Watched:
    """A pool, with its connections that are to end when they come back."""

    __slots__ = ("connector", "leaving", "pool")

    def __init__(self, pool: ConnectionPool[Any], connector: _Prepares) -> None:
        self.pool = weakref.ref(pool)
        self.connector = weakref.ref(connector)
        self.leaving: weakref.WeakSet[Connection] = weakref.WeakSet()

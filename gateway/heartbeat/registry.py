"""The registry of the AMQP connections of this process that are kept alive.

A process that was forked from this one keeps none of them: its registry begins anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyfront.errors import HeartbeatError

from . import concurrency, native, tls
from .amqp_connection import KeptConnection
from .counters import (
    CONNECTIONS,
    DEAD_PEERS,
    FAILURES,
    OPENED,
    RECONNECTIONS,
    Counts,
    default_folder,
)
from .pool_expiry import Pooled, PoolRecord
from .thread import HeartbeatThread
from .writer import Writer, make_writer

LOG = logging.getLogger("keyfront.gateway.heartbeat")


class ConnectionRegistry:
    """Keeps py-amqp's connections alive.

    :param amqp: the module ``amqp``, looked at by :func:`.amqp_hooks.difference`
    :param interval: seconds between beats; by default half of the heartbeat that each connection
        negotiated
    :param folder: the folder of the counts; by default this user's (:func:`.default_folder`)
    :param threaded: true if a native thread beats; otherwise somebody calls :meth:`turn`
    """

    def __init__(
        self, amqp: Any, *, interval: float | None, folder: Path | None, threaded: bool
    ) -> None:
        self._amqp = amqp
        #: The class of py-amqp's connections.
        self.connection_class: type = amqp.connection.Connection
        self.interval = interval
        self._folder = folder
        self._threaded = threaded
        self._said: set[str] = set()
        #: True if connections were open when this process was forked.
        self.has_inherited = False
        #: The records of pools to be looked at before a connection is borrowed: the native thread
        #: has hung up something that still lies there; ``None``, for good: connections of the
        #: parent may lie in any.
        self.to_heed: deque[PoolRecord | None] = deque()
        self._begin()
        self._show()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._mark = native.mark()
        self._kept: dict[KeptConnection, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
        # By kombu's connection, which outlives those of py-amqp.
        self._by_client: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._pooled: weakref.WeakKeyDictionary[Any, Pooled] = weakref.WeakKeyDictionary()
        self._records: weakref.WeakKeyDictionary[Any, PoolRecord] = weakref.WeakKeyDictionary()
        self.to_heed.clear()
        if self.has_inherited:
            self.to_heed.append(None)
        self._around: concurrency.Surroundings | None = None
        self._shown = False
        self.counts = Counts(None)
        self._thread = HeartbeatThread(self.counts, threaded=self._threaded)

    def _show(self) -> None:
        """Show the counts to other processes; in a forked one not before it has a connection.

        A fork may be followed by exec at once.
        """
        if self._shown:
            return
        self._shown = True
        try:
            self.counts = Counts(self._folder or default_folder())
        except HeartbeatError as error:
            self.say(f"counts of this process are not shown: {error}")
        self._thread = HeartbeatThread(self.counts, threaded=self._threaded)
        self.look_around()

    def is_inherited(self) -> bool:
        """Return whether this process was forked since, and has not begun anew yet."""
        return self._pid != os.getpid()

    def renew(self) -> None:
        """Begin anew in a process that was forked; again is no harm."""
        if self.is_inherited():
            self.counts.close()  # the parent's: this gives back a descriptor, no more
            self.has_inherited = self.has_inherited or bool(self._kept)
            self._let_go_of_parents()
            self._begin()

    def _let_go_of_parents(self) -> None:
        """Close this process's copies; hang up if the parent runs no Python any more."""
        orphaned = concurrency.parent_is_idle()
        for kept in list(self._kept):  # the end of one may be the end of others
            if orphaned:
                try:
                    kept.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # another child was quicker
            kept.close()

    def say(self, line: str) -> None:
        """Warn, once in the life of the process."""
        if line not in self._said:
            self._said.add(line)
            LOG.warning("heartbeat: %s", line)

    def look_around(self) -> None:
        """Show the server and patching of this process in the counts, and log what cannot work."""
        around = concurrency.surroundings()
        if around == self._around:
            return
        self._around = around
        lines = concurrency.unsafe(around)
        self.counts.describe(
            server=around.server,
            threading=around.patching if around.is_patched else "native",
            interval="" if self.interval is None else f"{self.interval:g}",
            unsafe=lines,
            **_named(),
        )
        for line in lines:
            self.say(line)

    def keep(self, connection: Any) -> None:
        """Beat on a connection of py-amqp that has just been opened, if it wants heartbeats."""
        self.renew()
        self._show()
        self.look_around()
        transport, timeout = connection._transport, connection.heartbeat
        if not timeout or transport is None or writer_of(transport) is not None:
            return
        try:
            kept = self._guard(connection, transport, float(timeout))
        except OSError:
            return  # it was closed meanwhile: whoever uses it will hear of it
        if kept is None:
            self.say(
                f"a {type(transport).__name__} of amqp {self._amqp.__version__} looks different"
                " from what this keyfront knows, or writes frames with a writer of its own: such"
                " connections are not kept alive; use amqp as it is on PyPI, or a newer keyfront"
            )
            return
        self._count_client(connection, transport)
        self._find_place(connection, kept)
        gone = weakref.ref(transport, lambda _: self.let_go(kept))
        self._kept[kept] = (gone, weakref.ref(connection))
        self.counts.count(OPENED)
        self._count_kept()
        try:
            self._thread.add(kept)
        except RuntimeError as error:
            self._say_no_thread(error)
        self._say_failure()

    def _count_kept(self) -> None:
        self.counts.row[CONNECTIONS] = sum(not kept.expired for kept in list(self._kept))

    def is_beaten(self, kept: KeptConnection, now: float) -> bool:
        """Return whether the thread beats on a connection; one that has ended is started again.

        While it does not, whoever else sends heartbeats has to.
        """
        self.watch_thread()
        return self._thread.runs and kept.is_beaten(now)

    def watch_thread(self) -> None:
        """Start the thread again if it has ended, and say what failed there."""
        if not self._thread.runs:
            try:
                self._thread.start()
            except RuntimeError as error:
                self._say_no_thread(error)
        self._say_failure()

    def cannot_beat(self, line: str) -> None:
        """Note that nobody beats in this process."""
        self.counts.count(FAILURES)
        self.say(line)

    def _say_no_thread(self, error: RuntimeError) -> None:
        self.say(
            f"the thread that beats cannot be started: {error}; until it can, connections depend on"
            " the heartbeats of those who use them"
        )

    def _say_failure(self) -> None:
        failure, self._thread.failure = self._thread.failure, None
        if failure is not None:
            self.say(failure)

    def let_go(self, kept: KeptConnection) -> None:
        """Stop beating on a connection; as often as wanted."""
        kept.close()
        if kept.pooled is not None:
            kept.pooled.leave()
        if self._kept.pop(kept, None) is not None:
            self._count_kept()

    def sever(self, transport: Any, kept: KeptConnection) -> None:
        """Give up a connection whose peer is gone: everybody who waits on it wakes up.

        It is left to its owner to close it and to connect again.
        """
        if not kept.expired:
            self.counts.count(DEAD_PEERS)
        transport.connected = False
        try:
            # Without it a goodbye over TLS would wait for an answer.
            kept.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was down already
        self.let_go(kept)

    def abandon(self, transport: Any) -> None:
        """Close, in a forked process, its copy of a connection without a word to the peer."""
        sock, transport.sock = transport.sock, None
        transport.connected = False
        if sock is not None:
            sock.close()

    def close_all(self) -> None:
        """Say goodbye on all connections, so that processes forked from now on share none."""
        for _, reference in list(self._kept.values()):
            connection = reference()
            if connection is None or connection._transport is None:
                continue
            try:
                # The answer is not waited for: nobody is to stop a start.
                connection.send_method(
                    self._amqp.spec.Connection.Close, "BsBB", (200, "before a fork", 0, 0)
                )
            except Exception as error:
                LOG.debug("heartbeat: no goodbye before the fork: %s", type(error).__name__)
            connection.collect()
        # Without connections there is nothing to beat on, and a fork is better without a thread.
        self._thread.end()
        self._thread = HeartbeatThread(self.counts, threaded=self._threaded)

    def turn(self) -> None:
        """Beat on what is due, in the thread that calls (see :mod:`.uwsgi_timer`)."""
        self.renew()
        self._thread.turn()

    def end(self) -> None:
        """End the thread, drop all connections and remove the counts; called at exit."""
        if not self.is_inherited():
            self._thread.end()
            for kept in list(self._kept):
                self.let_go(kept)
            self.counts.close()

    def statistics(self) -> dict[str, Any]:
        """Return the counts of this process, by name; see :func:`.installation.statistics`."""
        self.renew()
        self._show()
        return self.counts.statistics()

    def _guard(self, connection: Any, transport: Any, timeout: float) -> KeptConnection | None:
        """Put a writer into a transport; ``None`` if the transport looks different."""
        if connection.frame_writer_cls is not self._amqp.method_framing.frame_writer:
            return None  # the service's own, which may write a frame in parts
        sock, row, mark = transport.sock, self.counts.row, self._mark
        interval = self._interval(timeout)
        kinds = self._amqp.transport
        reference = weakref.ref(transport)
        kept: KeptConnection
        if type(transport) is kinds.TCPTransport and transport._write == sock.sendall:
            send = transport._write
            kept = KeptConnection(
                sock.fileno(), interval=interval, timeout=timeout, row=row, mark=mark
            )
        elif type(transport) is kinds.SSLTransport and "_write" not in vars(transport):
            real = getattr(sock, "_sslobj", None)
            if not tls.is_known(real):
                return None
            write = kinds.SSLTransport._write
            # Not the bound method: it would keep the transport alive, and so itself.
            def send(data: Any) -> None:
                write(reference(), data)

            kept = tls.KeptTLSConnection(
                sock.fileno(),
                tls=real,
                blocks=tls.waits(sock),
                interval=interval,
                timeout=timeout,
                row=row,
                mark=mark,
            )
            sock._sslobj = tls.GuardedTLS(real, kept.reading, sock)
        else:
            return None
        transport._write = make_writer(
            kept,
            send,
            pause=concurrency.pause_of(sock),
            inherited=lambda: self._inherited(reference()),
        )
        return kept

    def _inherited(self, transport: Any) -> Exception:
        if transport is not None:
            self.abandon(transport)
        error: Exception = self._amqp.exceptions.RecoverableConnectionError(
            "this connection was opened before the process was forked; it is the parent's, and a"
            " new one is needed"
        )
        return error

    def refuse_inherited(self, transport: Any) -> None:
        """Raise py-amqp's recoverable error if the connection is another process's."""
        writer = writer_of(transport)
        if writer is not None and writer.kept.inherited():
            raise self._inherited(transport)

    def _interval(self, timeout: float) -> float:
        half = timeout / 2
        if self.interval is None:
            return half
        if self.interval > half:
            self.say(
                f"interval = {self.interval:g}: must be at most half of the {timeout:g} s that a"
                f" connection negotiated; it is {half:g} s there"
            )
            return half
        return self.interval

    def put_into_pool(self, pool: Any, item: Any, *, ttl: float, keep: int) -> None:
        """Note that a connection is about to lie in a pool, where it may for a limited time.

        :param pool: oslo.messaging's pool
        :param item: oslo.messaging's connection
        :param ttl: seconds for which it may lie there
        :param keep: number of connections that may lie there for longer
        """
        kept = kept_by(item.connection)
        if kept is None or kept.inherited():
            return
        pooled = kept.pooled
        if pooled is None or pooled.record.pool() is not pool:
            pooled = Pooled(self._record(pool, ttl, keep), weakref.ref(item))
            self._pooled[item.connection] = kept.pooled = pooled
        item.keyfront_pooled = pooled
        pooled.put(native.monotonic())

    def take_out_of_pool(self, item: Any, kept: KeptConnection | None) -> bool:
        """Note that a connection was borrowed; returns false if it was hung up or closed before.

        :param item: oslo.messaging's connection
        :param kept: the kept connection, if it is connected and kept
        """
        pooled: Pooled | None = getattr(item, "keyfront_pooled", None)
        if pooled is None:
            return True
        if kept is not None and kept.pooled is not pooled:
            item.keyfront_pooled = None  # noted by a heartbeat that was removed since
        return pooled.lend()

    def pools_with_expired(self) -> Iterator[Any]:
        """Return, once, each pool in which the native thread has hung something up."""
        for record in [one for one in list(self.to_heed) if one is not None]:
            with contextlib.suppress(ValueError):  # another thread was quicker
                self.to_heed.remove(record)
                pool = record.pool()
                if pool is not None:
                    yield pool

    def _record(self, pool: Any, ttl: float, keep: int) -> PoolRecord:
        record = self._records.get(pool)
        if record is None:

            def gone(_: object) -> None:
                made.keep = 0  # nobody will borrow from it again

            record = made = PoolRecord(ttl, keep, weakref.ref(pool, gone), self.to_heed)
            self._records[pool] = record
        return record

    def _find_place(self, connection: Any, kept: KeptConnection) -> None:
        """Find the place in its pool of a connection that was made again, which is in use now."""
        client = getattr(connection, "client", None)
        try:
            pooled = self._pooled.get(client)
        except TypeError:
            return
        if pooled is not None:
            kept.pooled = pooled
            pooled.come_back()

    def _count_client(self, connection: Any, transport: Any) -> None:
        client = getattr(connection, "client", None)
        if client is None:
            return
        try:
            before = self._by_client.get(client)
            self._by_client[client] = weakref.ref(transport)
        except TypeError:
            return  # a client that cannot be referred to weakly is none of kombu's
        if before is None:
            return
        self.counts.count(RECONNECTIONS)
        old = before()
        if old is not None and not old.connected:
            # kombu has forgotten it without closing it.
            try:
                old.close()
            except OSError:
                # amqp before 5.1 gives up where the peer is gone, and leaves the socket open.
                self.abandon(old)


def _named() -> dict[str, str]:
    """Return the service's name in oslo.config: a server's program is named after the server."""
    config: Any = sys.modules.get("oslo_config.cfg")
    project = getattr(getattr(config, "CONF", None), "project", None)
    return {"command": project} if isinstance(project, str) and project else {}


def kept_by(client: Any) -> KeptConnection | None:
    """Return the kept connection of one of kombu's, if it is connected and kept."""
    connection = getattr(client, "_connection", None)
    writer = writer_of(getattr(connection, "_transport", None))
    return None if writer is None else writer.kept


def writer_of(transport: Any) -> Writer | None:
    """Return the writer in a transport of py-amqp, if there is one."""
    writer = getattr(transport, "_write", None)
    return writer if isinstance(getattr(writer, "kept", None), KeptConnection) else None

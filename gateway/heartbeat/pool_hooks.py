"""The hooks in pools: a connection is looked at when it is taken out, and replaced if it is dead.

No heartbeat helps while the whole machine is suspended or the broker is restarted. The kernel knows
at once; without a look the first message would find out, and oslo.messaging then waits a second
before it tries again.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
import threading
import time
from typing import Any

from . import concurrency, native
from .amqp_connection import ANSWER, KeptConnection
from .amqp_hooks import Replacements
from .registry import ConnectionRegistry, kept_by, writer_of

# Seconds: a connection that was written to so lately is lent without a look, which would cost more
# than the pool itself. Whoever writes all the time finds out by writing.
_RECENT = 0.1

# The attributes that say how often and at what intervals oslo.messaging tries to connect.
_PATIENCE = ("max_retries", "interval_start", "interval_stepping")

# Methods that are read at borrowing: a connection for sending is told little.
_MOST = 100
# Seconds to wait for the rest of a frame that has come in part.
_REST = 0.1

LOG = logging.getLogger("keyfront.gateway.heartbeat")


class BorrowHooks:
    """The replaced methods of the pools of oslo.messaging and kombu, if these are imported.

    :param registry: keeps the connections
    """

    def __init__(self, registry: ConnectionRegistry) -> None:
        self._registry = registry
        self._replacements = Replacements()

    def put_in(self) -> None:
        """Replace the methods that lend; again when another library has been imported."""
        for module, name, method, make in (
            ("oslo_messaging._drivers.pool", "ConnectionPool", "get", self._get),
            ("oslo_messaging._drivers.pool", "ConnectionPool", "put", self._put),
            ("kombu.connection", "ConnectionPool", "prepare", self._prepare),
        ):
            owner: Any = getattr(sys.modules.get(module), name, None)
            if not hasattr(owner, method):
                continue
            if method == "get" and not _takes_retry(owner):
                self._cannot_look(TypeError("its pool lends by arguments that are not known"))
                continue
            self._replacements.put(owner, method, make)

    def take_out(self) -> None:
        """Put the originals back."""
        self._replacements.take_out()

    def hush(self) -> None:
        """End oslo.messaging's own heartbeats; before a fork.

        In the parent they would connect again, for nobody. Ours go on where they are needed.
        """
        kind = getattr(sys.modules.get("oslo_messaging._drivers.impl_rabbit"), "Connection", None)
        if kind is None:
            return
        # type(): asking a lazy proxy for its __class__ would run it.
        for item in [thing for thing in gc.get_objects() if type(thing) is kind]:
            _end_heartbeat(item)

    # Each message of the service goes through these two: where all is as it mostly is, no function
    # of Python is called, and each attribute is looked at once.

    def _get(self, original: Any) -> Any:
        registry, monotonic = self._registry, native.monotonic
        to_heed = registry.to_heed

        def get(pool: Any, retry: Any = None) -> Any:
            if to_heed:
                self._heed(pool)
            item = original(pool, retry)
            kept: KeptConnection | None = None
            try:
                transport = item.connection._connection._transport
                kept = transport._write.kept
                pooled: Any = kept.pooled
                pooled.there.pop()
                pooled.until = None
                there = True
            except (AttributeError, IndexError):
                # It is not kept, was never in a pool, or was hung up or closed in it.
                if not hasattr(item, "_connection_lock"):
                    return item  # another driver's
                there = registry.take_out_of_pool(item, kept)
            if (
                there
                and kept is not None
                and monotonic() - kept.written < _RECENT
                and transport.connected
                and kept.mark[0]
            ):
                return item
            return self._looked_at(pool, item, there, retry)

        return get

    def _put(self, original: Any) -> Any:
        monotonic = native.monotonic

        def put(pool: Any, item: Any) -> Any:
            # Before it lies there: after that, another thread may have borrowed it.
            try:
                pooled = item.keyfront_pooled
                pooled.until = monotonic() + pooled.record.ttl
                pooled.there.append(None)
            except AttributeError:
                self._note_return(pool, item)
            return original(pool, item)

        return put

    def _heed(self, pool: Any) -> None:
        """Drop what was made before this process was forked, and what the thread has hung up."""
        if self._registry.has_inherited:
            for inherited in _inherited(pool):
                _disown(inherited)
        for each in self._registry.pools_with_expired():
            self._drop_expired(each)

    def _note_return(self, pool: Any, item: Any) -> None:
        try:
            if hasattr(item, "_connection_lock") and pool._item_ttl is not None:
                self._registry.put_into_pool(pool, item, ttl=pool._item_ttl, keep=pool._min_size)
        except Exception as error:
            self._registry.say(
                f"a pool's connections are kept without an end: {type(error).__name__}: {error};"
                " use a keyfront that knows this oslo.messaging"
            )

    def expire(self, kept: KeptConnection) -> None:
        """Make a pool close overdue connections, in a thread of the kind that the process uses."""
        pooled = kept.pooled
        if pooled is None:
            return
        record = pooled.record
        pool, item = record.pool(), pooled.item()
        if kept.expired and item is not None:
            _end_heartbeat(item)
        if record.being_expired:
            return

        def close() -> None:
            failure = None
            try:
                if pool is not None:
                    _wait_for_answers(_items(pool))
                    self._drop_expired(pool)
                elif item is not None:
                    _wait_for_answers([item])
                    item.close()  # its pool was dropped, and it was not closed
            except Exception as error:
                failure = error
            finally:
                record.being_expired = False
            if failure is not None:
                LOG.debug("heartbeat: an idle connection: %s", type(failure).__name__)

        record.being_expired = True
        try:
            threading.Thread(target=close, daemon=True, name="keyfront-expire").start()
        except RuntimeError:
            record.being_expired = False  # at the next heartbeat, then

    def _drop_expired(self, pool: Any) -> None:
        """Make a pool close overdue connections, so that nobody connects them again."""
        for item in _items(pool):
            kept = kept_by(getattr(item, "connection", None))
            if kept is not None and kept.expired:
                _end_heartbeat(item)
        pool.expire()

    def _looked_at(self, pool: Any, item: Any, there: bool, retry: Any) -> Any:
        """Return an item of oslo.messaging's pool that may be used, repaired or new if need be.

        :param there: false if it was hung up, even if that is still on its way
        :param retry: the attempts to connect, as the pool's ``get`` takes them
        """
        self._registry.watch_thread()
        self._warn_of_native_heartbeats(item)
        connection = getattr(item.connection, "_connection", None)
        if getattr(item, "_initial_pid", None) not in (None, os.getpid()):
            # The parent's: what is left of it here falls silent.
            _disown(item)
            return pool.create(retry=retry)
        if not self._is_amqp(connection):
            return item
        try:
            if not there:
                self._give_up(connection)
            if not self._is_usable(connection) or not self._is_quiet(item, connection):
                self._replace(item, hung_up=not there)
        except Exception as error:
            self._cannot_look(error)
        return item

    def _prepare(self, original: Any) -> Any:
        def prepare(pool: Any, *args: Any, **kwargs: Any) -> Any:
            client = original(pool, *args, **kwargs)
            connection = getattr(client, "_connection", None)
            try:
                if self._is_amqp(connection) and not self._is_usable(connection):
                    # kombu connects by itself when it is next used.
                    client._do_close_self()
            except Exception as error:
                self._cannot_look(error)
            return client

        return prepare

    def _cannot_look(self, error: Exception) -> None:
        """Say that a library looks different: what it lends is lent as before."""
        self._registry.say(
            f"a connection is lent without a look: {type(error).__name__}: {error}; use a keyfront"
            " that knows this oslo.messaging and kombu"
        )

    def _is_amqp(self, connection: Any) -> bool:
        """Return whether it is py-amqp's: of kombu's other transports nothing is known here."""
        return isinstance(connection, self._registry.connection_class)

    def _is_usable(self, connection: Any) -> bool:
        """Return whether a connection stands and its peer was heard of; a dead one is given up."""
        transport = getattr(connection, "_transport", None)
        if transport is None or not transport.connected:
            return False
        writer = writer_of(transport)
        if writer is None:
            return True  # not ours to judge
        kept = writer.kept
        if kept.inherited():
            return False
        state = kept.state()
        if state is None or (state.established and not kept.dead and not kept.silent(state)):
            return True
        self._registry.sever(transport, kept)
        return False

    def _give_up(self, connection: Any) -> None:
        """Give up a connection that was hung up, and have nobody read what came of it."""
        transport = getattr(connection, "_transport", None)
        writer = writer_of(transport)
        if writer is not None:
            self._registry.sever(transport, writer.kept)

    def _is_quiet(self, item: Any, connection: Any) -> bool:
        """Read what lies unread, which may be the broker's goodbye; returns false if it was, or
        ends within a frame."""
        writer = writer_of(connection._transport)
        if writer is None:
            return True
        kept = writer.kept
        if not _has_unread(connection.transport, kept):
            return True
        failure: Exception | None = None
        with item._connection_lock:
            try:
                methods = 0
                while methods < _MOST and _has_unread(connection.transport, kept):
                    methods += bool(connection.blocking_read(timeout=_REST))
            except TimeoutError as error:
                # Who has sent a part and no more has stopped, or is gone. Before it publishes,
                # py-amqp would ask for the rest again and again, and let no green thread run.
                if _part_of_frame(connection.transport):
                    failure = error
            except Exception as error:
                failure = error
        if failure is None:
            return True
        LOG.debug("heartbeat: %s", type(failure).__name__)
        if connection._transport is not None:
            self._registry.sever(connection._transport, kept)
        return False

    def _replace(self, item: Any, *, hung_up: bool) -> None:
        """Connect again, trying each broker once; if none answers, sending tells why.

        :param hung_up: oslo.messaging's own heartbeats were ended with the old connection
        """
        brokers = max(len(item.connection.alt or ()), 1)
        patience = {name: getattr(item, name) for name in _PATIENCE}
        vars(item).update(zip(_PATIENCE, (brokers, 0, 0), strict=True))
        failure = None
        try:
            with item._connection_lock:
                if not item.connection.connected:
                    item.ensure_connection()
        except Exception as error:
            failure = error
        finally:
            vars(item).update(patience)
        if hung_up:
            item._heartbeat_stop()
            item._heartbeat_start()
        if failure is None:
            LOG.info(
                "heartbeat: replaced a connection to %s:%s that was lost while it lay idle",
                item.connection.hostname,
                item.connection.port,
            )
        else:
            LOG.debug("heartbeat: no broker answers: %s", type(failure).__name__)

    def _warn_of_native_heartbeats(self, item: Any) -> None:
        if getattr(item, "heartbeat_in_pthread", False):
            around = concurrency.surroundings()
            if around.is_patched:
                self._registry.say(
                    f"[oslo_messaging_rabbit] heartbeat_in_pthread = true in a process patched by"
                    f" {around.patching}: the whole process stands still while the broker is away;"
                    " set it to false, it is not needed any more"
                )


def _has_unread(transport: Any, kept: KeptConnection) -> bool:
    """Return whether something has come that was not read, or a part of a frame that was."""
    if _part_of_frame(transport):
        return True
    state = kept.state()
    if state is not None and state.unread:
        return True
    pending = getattr(transport.sock, "pending", None)  # only of TLS
    return pending is not None and pending() > 0


def _part_of_frame(transport: Any) -> bool:
    """Return whether py-amqp has read a part of a frame."""
    return bool(getattr(transport, "_read_buffer", b""))


def _items(pool: Any) -> list[Any]:
    """Return the items that lie in oslo.messaging's pool."""
    return [entry[-1] for entry in list(getattr(pool, "_items", ()))]


def _wait_for_answers(items: list[Any]) -> None:
    """Wait until brokers have answered the goodbyes: what is closed before has vanished for them.

    Only in a thread for that.
    """
    deadline = native.monotonic() + ANSWER + 1
    for item in items:
        kept = kept_by(getattr(item, "connection", None))
        while kept is not None and kept.expired and not (kept.hung_up or kept.closed):
            if native.monotonic() > deadline:
                return
            time.sleep(0.1)


def _inherited(pool: Any) -> list[Any]:
    """Return the items in a pool that were made before this process was forked."""
    pid = os.getpid()
    return [item for item in _items(pool) if getattr(item, "_initial_pid", pid) != pid]


def _disown(item: Any) -> None:
    """End the heartbeats of the parent's connection in a forked process.

    Without waking their thread, if it is eventlet's: it would go on in the parent's hub, and never
    come back. And nobody is to wait for it, as oslo.messaging does when it closes what has expired.
    """
    ended: Any = getattr(item, "_heartbeat_exit_event", None)
    if hasattr(ended, "_flag"):
        ended._flag = True
    else:
        _end_heartbeat(item)
    item._heartbeat_thread = None


def _end_heartbeat(item: Any) -> None:
    """End the thread that oslo.messaging has for a connection, without waiting for it."""
    ended = getattr(item, "_heartbeat_exit_event", None)
    if ended is not None:
        ended.set()


def _takes_retry(owner: Any) -> bool:
    """Return whether a pool of oslo.messaging is asked for a connection as it ever was.

    Passing on whatever arguments there are would cost a message as much as all else here.
    """
    return list(inspect.signature(owner.get).parameters) == ["self", "retry"]

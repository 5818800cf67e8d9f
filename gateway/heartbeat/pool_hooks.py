"""The hooks in pools: a connection is looked at when it is taken out, and replaced if it is dead.

No heartbeat helps while the whole machine is suspended or the broker is restarted. The kernel knows
at once; without a look the first message would find out, and oslo.messaging then waits a second
before it tries again.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from . import concurrency, native
from .amqp_hooks import Replacements
from .registry import ConnectionRegistry, writer_of

# Seconds: a connection that was written to so lately is lent without a look, which would cost more
# than the pool itself. Whoever writes all the time finds out by writing.
_RECENT = 0.1

# The attributes that say how often and at what intervals oslo.messaging tries to connect.
_PATIENCE = ("max_retries", "interval_start", "interval_stepping")

# Methods that are read at borrowing: a connection for sending is told little.
_MOST = 100

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
            ("kombu.connection", "ConnectionPool", "prepare", self._prepare),
        ):
            owner: Any = getattr(sys.modules.get(module), name, None)
            if hasattr(owner, method):
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

    def _get(self, original: Any) -> Any:
        def get(pool: Any, *args: Any, **kwargs: Any) -> Any:
            item = original(pool, *args, **kwargs)
            connection = getattr(getattr(item, "connection", None), "_connection", None)
            transport: Any = getattr(connection, "_transport", None)
            writer = writer_of(transport)
            if (
                writer is not None
                and native.monotonic() - writer.kept.written < _RECENT
                and transport.connected
                and not writer.kept.inherited()
            ):
                return item
            if not hasattr(item, "_connection_lock"):
                return item  # another driver's
            return self._looked_at(item, lambda: pool.create(**_retry(args, kwargs)))

        return get

    def _looked_at(self, item: Any, create: Callable[[], Any]) -> Any:
        """Return an item of oslo.messaging's pool that may be used, repaired or new if need be."""
        self._warn_of_native_heartbeats(item)
        connection = getattr(item.connection, "_connection", None)
        if getattr(item, "_initial_pid", None) not in (None, os.getpid()):
            # The parent's: what is left of it here falls silent.
            _end_heartbeat(item)
            return create()
        if not self._is_amqp(connection):
            return item
        try:
            if not self._is_usable(connection) or not self._is_quiet(item, connection):
                self._replace(item)
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
        """Tell whether it is py-amqp's: of kombu's other transports nothing is known here."""
        return isinstance(connection, self._registry.connection_class)

    def _is_usable(self, connection: Any) -> bool:
        """Tell whether a connection stands and its peer was heard of; a dead one is given up."""
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

    def _is_quiet(self, item: Any, connection: Any) -> bool:
        """Read what lies unread, which may be the broker's goodbye; returns false if it was."""
        writer = writer_of(connection._transport)
        state = writer.kept.state() if writer is not None else None
        if state is None or not state.unread:
            return True
        failure = None
        with item._connection_lock:
            try:
                for _ in range(_MOST):  # each reads one method, and the heartbeats before it
                    connection.drain_events(timeout=0)
            except TimeoutError:
                pass  # that was all
            except Exception as error:
                failure = error
        if failure is None:
            return True
        LOG.debug("heartbeat: %s", type(failure).__name__)
        if writer is not None and connection._transport is not None:
            self._registry.sever(connection._transport, writer.kept)
        return False

    def _replace(self, item: Any) -> None:
        """Connect again, trying each broker once; if none answers, sending tells why."""
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


def _end_heartbeat(item: Any) -> None:
    """End the thread that oslo.messaging has for a connection, without waiting for it."""
    ended = getattr(item, "_heartbeat_exit_event", None)
    if ended is not None:
        ended.set()


def _retry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``get`` for ``create``, whose first parameter is another."""
    return {"retry": args[0]} if args else kwargs

"""The hooks in py-amqp: three of its methods are replaced for the whole process, and one that reads
in processes that were forked.

They are replaced in the classes, so that oslo.messaging, kombu, celery and whoever uses py-amqp
directly are covered alike, without a change in their configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import native
from .amqp_connection import FRAME, KeptConnection
from .registry import ConnectionRegistry, writer_of


def difference(amqp: Any) -> str | None:
    """Return a difference of this py-amqp from what keyfront needs; ``None`` without one.

    This is found out by trying, not by version: a frame is written through a transport that is not
    connected, and must come out as one call of ``_write`` with the bytes of AMQP 0-9-1.
    """
    try:
        connection, transports = amqp.connection.Connection, amqp.transport
        for owner, name in (
            (connection, "connect"),
            (connection, "collect"),
            (connection, "blocking_read"),
            (connection, "heartbeat_tick"),
            (connection, "send_method"),
            (transports._AbstractTransport, "close"),
            (transports.SSLTransport, "_write"),
            (amqp.exceptions, "RecoverableConnectionError"),
            (amqp.exceptions, "ConnectionForced"),
        ):
            if not callable(getattr(owner, name, None)):
                return f"there is no {getattr(owner, '__name__', owner)}.{name}"
        made = connection(heartbeat=1)
        for name in (
            "_transport", "frame_writer_cls", "last_heartbeat_received", "last_heartbeat_sent",
        ):
            if not hasattr(made, name):
                return f"a Connection has no {name}"
        for kind in (transports.TCPTransport, transports.SSLTransport):
            written: list[bytes] = []
            transport = kind("127.0.0.1:1")
            transport._write = lambda data, into=written: into.append(bytes(data))
            write = amqp.method_framing.frame_writer(made, transport)
            write(8, 0, None, None, None)
            if written != [FRAME]:
                return f"{kind.__name__} does not write a frame by one call of _write"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Replacements:
    """Methods of other libraries' classes that were replaced, for the whole process, in order."""

    def __init__(self) -> None:
        self._made: list[tuple[type, str, Any]] = []

    def put(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method; one that was replaced already stays as it is.

        :param owner: the class
        :param name: the name of its method
        :param make: makes the replacement of the original
        :raises TypeError: the class is compiled and cannot be changed
        """
        if any(one is owner and other == name for one, other, _ in self._made):
            return
        original = getattr(owner, name)
        replacement = make(original)
        replacement.__name__ = name
        replacement.__doc__ = original.__doc__
        replacement.__wrapped__ = original
        own = vars(owner).get(name)
        setattr(owner, name, replacement)
        self._made.append((owner, name, own))

    def take_out(self) -> None:
        """Put the originals back."""
        while self._made:
            owner, name, own = self._made.pop()
            if own is None:
                delattr(owner, name)  # it was a base class's
            else:
                setattr(owner, name, own)


class AmqpHooks:
    """The replaced methods of py-amqp.

    :param amqp: the module ``amqp``
    :param registry: keeps the connections
    :param connected: called after each connect; by then all that uses py-amqp is imported
    :param overdue: called for a connection that has lain in its pool for too long, in the thread
        that would send its heartbeats
    """

    def __init__(
        self,
        amqp: Any,
        registry: ConnectionRegistry,
        *,
        connected: Callable[[], object],
        overdue: Callable[[KeptConnection], object],
    ) -> None:
        self._connected = connected
        self._overdue = overdue
        self._forced: type[Exception] = amqp.exceptions.ConnectionForced
        self._registry = registry
        self._classes = (amqp.connection.Connection, amqp.transport._AbstractTransport)
        self._replacements = Replacements()

    def put_in(self) -> None:
        """Replace the methods.

        :raises TypeError: py-amqp's classes are compiled and cannot be changed
        """
        connection, transport = self._classes
        self._replacements.put(connection, "connect", self._connect)
        self._replacements.put(connection, "heartbeat_tick", self._tick)
        self._replacements.put(transport, "close", self._close)

    def forked(self) -> None:
        """Refuse to read from connections of the parent from now on.

        Only where there are some: each message reads at least once, and would pay for the look.
        """
        if self._registry.has_inherited:
            self._replacements.put(self._classes[0], "blocking_read", self._read)

    def take_out(self) -> None:
        """Put the originals back."""
        self._replacements.take_out()

    def _connect(self, original: Any) -> Any:
        registry, connected = self._registry, self._connected

        def connect(connection: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(connection, *args, **kwargs)
            failure = None
            try:
                registry.keep(connection)
                connected()
            except Exception as error:  # the connection itself is good
                failure = error
            if failure is not None:
                registry.say(f"a connection is not kept alive: {type(failure).__name__}: {failure}")
            return answer

        return connect

    def _read(self, original: Any) -> Any:
        registry = self._registry

        def blocking_read(connection: Any, timeout: float | None = None) -> Any:
            if connection._transport is not None:
                registry.refuse_inherited(connection._transport)
            return original(connection, timeout)

        return blocking_read

    def _close(self, original: Any) -> Any:
        registry = self._registry

        def close(transport: Any, *args: Any, **kwargs: Any) -> Any:
            writer = writer_of(transport)
            if writer is not None:
                if writer.kept.inherited():
                    registry.abandon(transport)
                    return None
                registry.let_go(writer.kept)
            return original(transport, *args, **kwargs)

        return close

    def _tick(self, original: Any) -> Any:
        """Replace ``heartbeat_tick``: it learns what lies unread and what the thread has sent."""
        registry, forced, overdue = self._registry, self._forced, self._overdue

        def heartbeat_tick(connection: Any, *args: Any, **kwargs: Any) -> Any:
            transport = connection._transport
            writer = writer_of(transport)
            if writer is None:
                return original(connection, *args, **kwargs)
            kept = writer.kept
            if kept.inherited():
                return None
            state = kept.state()
            now = native.monotonic()
            if state is not None and state.established:
                heard = now - state.silent_data if state.room else now
                if heard > connection.last_heartbeat_received:
                    connection.last_heartbeat_received = heard
            if kept.expired or (kept.pooled is not None and kept.pooled.is_overdue(now)):
                overdue(kept)
            if kept.expired:
                # Read no more: its owner would take the answer to our goodbye for a lost
                # connection, and make a new one.
                connection.blocking_read = _nothing_to_read
                return None
            if not kept.stopped and not kept.dead:
                # Sent by whomever. Where nobody beats the original goes by it, and sends.
                connection.prev_sent = connection.bytes_sent
                connection.last_heartbeat_sent = (
                    now if registry.is_beaten(kept, now) else max(kept.written, kept.tried)
                )
            try:
                return original(connection, *args, **kwargs)
            except forced:
                # Without this kombu would take it for connected, and go on with it.
                registry.sever(transport, kept)
                raise

        return heartbeat_tick


def _nothing_to_read(timeout: float | None = None) -> None:
    raise TimeoutError("this connection has expired and was closed")

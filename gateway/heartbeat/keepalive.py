"""Keeps LDAP, database and other connections from being dead when they are wanted.

AMQP connections have heartbeats, see :mod:`keyfront.gateway.heartbeat`. For the others the kernel
does what works under every server and every kind of green thread: it probes an idle peer, which
also keeps firewalls and load balancers from forgetting the connection, and gives up one that does
not acknowledge. What only the caller may do, talking to the server, is done when a connection is
borrowed, and only if the kernel cannot answer for it::

    alive = keepalive(lambda connection: connection.ping(reconnect=False), interval=30)
    alive.watch(connection, sock=connection._sock)    # once, when it was made
    ...
    if not alive.alive(connection):                   # each time before it is used
        connection = connect_again()

Nothing here starts a thread, and no connection is ever touched but by the one who calls.
"""

from __future__ import annotations

import _socket
import logging
import math
import os
import socket
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from keyfront.errors import OptionError

from . import tcp

T = TypeVar("T")

# The kernel's limits for TCP_KEEPIDLE and TCP_KEEPINTVL, whole seconds: net/tcp.h.
_MIN_INTERVAL: Final = 1
_MAX_INTERVAL: Final = 32767
# The number of probes in a row that may stay without an answer. The last comes one interval after
# the first, so that a host which vanished is given up within about twice the interval.
_PROBES: Final = 3

NAMES: Final = (
    "watched", "heard", "checked", "refused", "failed", "closed", "inherited", "unset",
)  # fmt: skip

_log = logging.getLogger(__name__)


class HasDescriptor(Protocol):
    """A socket of any library, or a connection that tells its descriptor."""

    def fileno(self) -> int:
        """Return the descriptor; negative if it is closed."""


def keepalive(check: Callable[[T], object], interval: float) -> Keepalive[T]:
    """Make a :class:`Keepalive` for connections of one kind.

    :param check: asks the server something that costs nothing, for example ``SELECT 1`` or the
        root DSE. Returning ``False`` or raising means dead. It needs a time limit of its own,
        the read timeout of the driver: a server that is stopped acknowledges and never answers.
    :param interval: seconds, 1 to 32767, rounded up to whole ones for the kernel; less than what
        cuts idle connections on the way (a firewall, ``wait_timeout`` of MariaDB)
    :raises OptionError: one of them is out of range
    """
    return Keepalive(check, interval)


class Keepalive(Generic[T]):
    """Watches connections of one kind; made by :func:`keepalive`.

    All threads, greenlets and processes may use it.

    It holds no connection: one that nobody else holds is gone, and forgotten here.

    :param check: a function that tells whether a connection works, as for :func:`keepalive`
    :param interval: seconds within which a word of the server counts, as for :func:`keepalive`
    :raises OptionError: ``check`` is no function, or the interval is out of its range
    """

    def __init__(self, check: Callable[[T], object], interval: float) -> None:
        if not callable(check):
            raise OptionError("check", type(check).__name__, "a function of a connection")
        if (
            isinstance(interval, bool)
            or not isinstance(interval, (int, float))
            or not _MIN_INTERVAL <= interval <= _MAX_INTERVAL
        ):
            raise OptionError(
                "interval", repr(interval), f"from {_MIN_INTERVAL} to {_MAX_INTERVAL} seconds"
            )
        self._check = check
        self._interval = float(interval)
        self._wanted = _options(self._interval)
        self._watched: dict[int, _Watched[T]] = {}
        self._statistics = _Statistics()
        self._warned = False

    def watch(self, connection: T, sock: HasDescriptor | int | None = None) -> None:
        """Make the kernel probe a connection's peer, and remember the connection.

        It is to be called once it is connected, before or after a TLS handshake; again if it
        changed its socket. Where an option cannot be set, one warning says so and ``check`` does
        the rest. A socket in the file system (``AF_UNIX``) needs no probes and gets none.

        :param connection: the object later given to :meth:`alive`; it can be weakly referenced
        :param sock: its socket, a plain, green or TLS one, or the bare descriptor; by default
            the connection tells its descriptor itself
        :raises OptionError: it has no descriptor, or cannot be weakly referenced
        """
        fd = _descriptor(connection if sock is None else sock)
        key = id(connection)
        try:
            reference = weakref.ref(connection, partial(_forget, self._watched, key))
        except TypeError:
            raise OptionError(
                "connection",
                type(connection).__name__,
                "an object that can be weakly referenced: the one that owns it, for example",
            ) from None
        plain = _duplicate(fd)
        if plain is None:
            identity = None
        else:
            try:
                identity = _identity(plain)
                self._prepare(plain)
            finally:
                plain.close()
        self._watched[key] = _Watched(reference, fd, identity)
        self._statistics.here()["watched"] += 1

    def alive(self, connection: T) -> bool:
        """Return whether a connection may be used now; to be called just before it is used.

        False at once if it is closed, by the server or here, or was opened before a fork. True at
        once if the server sent something within the interval. Otherwise the answer is that of
        ``check``, called in the caller's own thread or greenlet. One that was never watched is
        checked each time.

        A server that stopped less than an interval ago is not noticed. An error of ``check`` that
        is no ``Exception`` (a timeout of gevent or eventlet) goes through; the connection counts
        as dead from then on.

        :param connection: the object given to :meth:`watch`
        """
        counts = self._statistics.here()
        found = self._watched.get(id(connection))
        if found is None or found.connection() is not connection:
            return self._ask(connection, None)
        if found.pid != os.getpid():
            counts["inherited"] += 1
            return False
        heard = None if found.broken else _heard(found)
        if heard is None:
            counts["closed"] += 1
            return False
        if heard <= self._interval:
            counts["heard"] += 1
            return True
        return self._ask(connection, found)

    def inherited(self, connection: T) -> bool:
        """Return whether a connection was opened before a fork, so that the parent still uses it.

        Drop such a connection without closing it: in most protocols to close it says goodbye to
        the server, and the parent would lose it.

        :param connection: the object given to :meth:`watch`
        """
        found = self._watched.get(id(connection))
        return (
            found is not None
            and found.connection() is connection
            and found.pid != os.getpid()
        )

    def statistics(self) -> dict[str, float]:
        """Return the counts of this process so far, by name.

        ``watched``; ``heard`` (alive without a check), ``checked`` (alive by a check),
        ``refused`` (the check returned ``False``), ``failed`` (it raised), ``closed``,
        ``inherited``; ``unset`` (connections on which a kernel option did not hold);
        ``check_seconds`` and ``check_seconds_worst``. Under plain threads a count may be lost.
        """
        return dict(self._statistics.here())

    def _ask(self, connection: T, found: _Watched[T] | None) -> bool:
        counts = self._statistics.here()
        outcome = "failed"
        began = time.monotonic()
        try:
            outcome = "refused" if self._check(connection) is False else "checked"
        except Exception as error:
            # Only its name: drivers put statements and addresses into the text.
            _log.debug("the check of a connection failed: %s", type(error).__name__)
        finally:
            now = time.monotonic()
            counts[outcome] += 1
            counts["check_seconds"] += now - began
            counts["check_seconds_worst"] = max(counts["check_seconds_worst"], now - began)
            if found is not None:
                # After a check that was left half-way, the next answer would be the check's.
                found.confirmed, found.broken = now, outcome != "checked"
        return outcome == "checked"

    def _prepare(self, plain: _socket.socket) -> None:
        if tcp.look_at(plain) is None:
            return
        missing = [name for name, *option in self._wanted if not _holds(plain, *option)]
        if missing:
            self._statistics.here()["unset"] += 1
            if not self._warned:
                self._warned = True
                _log.warning(
                    "the kernel does not keep %s on a connection: one that breaks is only "
                    "noticed by the check",
                    ", ".join(missing),
                )


class _Watched(Generic[T]):
    """A connection, as it was when it was watched."""

    __slots__ = ("broken", "confirmed", "connection", "fd", "identity", "pid")

    def __init__(
        self, connection: weakref.ref[T], fd: int, identity: tuple[int, int] | None
    ) -> None:
        self.connection = connection
        self.fd = fd
        # The number of a closed descriptor is soon another's: this is the socket's own.
        self.identity = identity
        self.pid = os.getpid()
        self.confirmed = time.monotonic()
        self.broken = False


class _Statistics:
    """Counts of this process; a child begins at zero."""

    def __init__(self) -> None:
        self._pid = -1
        self._counts: dict[str, float] = {}

    def here(self) -> dict[str, float]:
        pid = os.getpid()
        if pid != self._pid:
            self._counts = dict.fromkeys(NAMES, 0)
            self._counts.update(check_seconds=0.0, check_seconds_worst=0.0)
            self._pid = pid
        return self._counts


def _forget(watched: dict[int, _Watched[T]], key: int, reference: weakref.ref[T]) -> None:
    found = watched.get(key)
    # another connection may have its address by now
    if found is not None and found.connection is reference:
        watched.pop(key, None)


def _heard(found: _Watched[T]) -> float | None:
    """Return the seconds since the server said something that was read; ``None`` if it is gone.

    Acknowledgements do not count: the kernel of a server that is stopped still sends them.
    """
    plain = _duplicate(found.fd)
    if plain is None:
        return None
    try:
        if _identity(plain) != found.identity:
            return None
        state = tcp.look_at(plain)
        if state is None:
            return None if _ended(plain) else time.monotonic() - found.confirmed
        if not state.established:
            return None
        if state.unread or state.retransmits:
            # What nobody asked for is most often a last word, and the check reads it.
            return math.inf
        return state.silent_data
    finally:
        plain.close()


def _ended(plain: _socket.socket) -> bool:
    try:
        return not plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _duplicate(fd: int) -> _socket.socket | None:
    """Return a duplicate of our own, which nobody closes between two questions."""
    try:
        ours = os.dup(fd)
    except OSError:
        return None
    try:
        return tcp.plain_socket(ours)
    except OSError:
        os.close(ours)
        return None


def _identity(plain: _socket.socket) -> tuple[int, int]:
    found = os.fstat(plain.fileno())
    return found.st_dev, found.st_ino


def _descriptor(sock: object) -> int:
    fd = sock
    if not isinstance(fd, int):
        try:
            fd = sock.fileno()  # type: ignore[attr-defined]
        except (OSError, ValueError):
            return -1
        except Exception:
            fd = None
    if isinstance(fd, bool) or not isinstance(fd, int):
        raise OptionError(
            "sock", type(sock).__name__, "a socket, an object with fileno(), or a descriptor"
        )
    return fd


def _options(interval: float) -> list[tuple[str, int, int, int]]:
    """Return name, level, option and value of each option of the socket, see tcp(7)."""
    idle = math.ceil(interval)
    between = max(1, math.ceil(idle / _PROBES))
    wanted = {
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": _PROBES,
        # Data on its way stops the probes: it gets as long, in milliseconds.
        "TCP_USER_TIMEOUT": (idle + _PROBES * between) * 1000,
    }
    options = [("SO_KEEPALIVE", socket.SOL_SOCKET, int(socket.SO_KEEPALIVE), 1)]
    for name, value in wanted.items():
        options.append((name, socket.IPPROTO_TCP, int(getattr(socket, name)), value))
    return options


def _holds(plain: _socket.socket, level: int, option: int, value: int) -> bool:
    try:
        plain.setsockopt(level, option, value)
        return plain.getsockopt(level, option) == value
    except OSError:
        return False

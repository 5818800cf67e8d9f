"""Kept connections over TLS, where OpenSSL may not read and write at once.

A beat over TLS is written by OpenSSL itself, into the record that comes next. OpenSSL's object is
not made for two threads, so reading takes a lock around each of its calls, and a beat only tries
it. Green sockets never wait inside OpenSSL. Others do, so they wait for data outside the lock
first.
"""

from __future__ import annotations

import _socket
import _ssl
import fcntl
import select
import ssl
import sys
import termios
import weakref
from typing import Any

from . import native
from .amqp_connection import FRAME, GOODBYE, LOOK, KeptConnection
from .counters import BEATS, FLOWING, FULL
from .native import Mark
from .tcp import State

# The part of an interval after which a beat is tried again that found somebody reading.
_AGAIN = 0.25

# Bytes in the send buffer from which on a beat might have to wait for room: a record of TLS with
# a beat has under 100, the smallest send buffer of Linux has 4608 (tcp(7)).
_CROWDED = 2048


class KeptTLSConnection(KeptConnection):
    """A kept connection whose beats are written by OpenSSL.

    :param tls: the connection's ``_ssl._SSLSocket``
    :param blocks: true if a write would wait inside OpenSSL
    """

    __slots__ = ("_blocks", "_tls", "reading")

    def __init__(
        self,
        fd: int,
        *,
        tls: Any,
        blocks: bool,
        interval: float,
        timeout: float,
        row: memoryview[int],
        mark: Mark | None = None,
    ) -> None:
        super().__init__(fd, interval=interval, timeout=timeout, row=row, mark=mark)
        self._tls = tls
        self._blocks = blocks
        self.reading: native.Lock = native.allocate_lock()

    def _send(self, now: float, due: float) -> float | None:
        if not self.reading.acquire(False):
            # Bytes are coming in, which says nothing of bytes going out.
            self.row[FLOWING] += 1
            return now + self.interval * _AGAIN
        try:
            if self._blocks and self._crowded():
                self.row[FULL] += 1
                self.tried = now
                return due + self.interval
            self._tls.write(self.pending or FRAME)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # OpenSSL has made the record of it: the next write must be of the same bytes.
            self.pending = FRAME
            self.row[FULL] += 1
        except (OSError, ValueError):
            self.dead = True
            return None
        else:
            self.pending = b""
            self.beaten = due
            self.row[BEATS] += 1
        finally:
            self.reading.release()
        self.tried = now
        return due + self.interval

    def _say_goodbye(self) -> None:
        # What OpenSSL has begun to send would have to be sent first: then it goes without.
        if self.pending or not self.reading.acquire(False):
            return
        try:
            if not self._blocks or not self._crowded():
                self._tls.write(GOODBYE)
        finally:
            self.reading.release()

    def _is_answered(self, state: State) -> bool:
        # Of records that are not to be read only the time is known; nothing comes after the answer.
        return state.silent_data >= LOOK

    def _shut(self) -> None:
        """Close the socket, and drop OpenSSL's object, which holds 80 kB."""
        self._tls = None
        super()._shut()

    def _crowded(self) -> bool:
        waiting = fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > _CROWDED


class GuardedTLS:
    """Stands in a TLS socket's ``_sslobj`` and takes a lock around each read.

    Everything else is passed on to the real one.
    """

    __slots__ = ("_lock", "_real", "_socket")

    def __init__(self, real: Any, lock: native.Lock, sock: Any) -> None:
        set_here = object.__setattr__
        set_here(self, "_real", real)
        set_here(self, "_lock", lock)
        # Only of a socket that waits inside OpenSSL.
        set_here(self, "_socket", weakref.ref(sock) if waits(sock) else None)

    def read(self, *args: Any) -> Any:
        """Do as ``_ssl._SSLSocket.read`` does, and raise the same."""
        if self._socket is not None and not self._real.pending():
            self._wait()
        with self._lock:
            return self._real.read(*args)

    def shutdown(self) -> Any:
        """Do as ``_ssl._SSLSocket.shutdown`` does."""
        return self._real.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def _wait(self) -> None:
        sock = self._socket()
        timeout = sock.gettimeout() if sock is not None else 0.0
        if timeout == 0.0:
            return
        waiting = native.poll()
        waiting.register(sock.fileno(), select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            # the words of _ssl.c
            raise TimeoutError("The read operation timed out")


def waits(sock: Any) -> bool:
    """Return whether a TLS socket waits inside OpenSSL: a green one never does."""
    plain = getattr(sock, "_sock", sock)  # gevent's holds the real one
    return not isinstance(plain, _socket.socket) or _socket.socket.gettimeout(plain) != 0.0


def is_known(tls: Any) -> bool:
    """Return whether this is the object of OpenSSL that the interpreter makes for a socket."""
    kind: type = vars(_ssl)["_SSLSocket"]
    return isinstance(tls, kind)

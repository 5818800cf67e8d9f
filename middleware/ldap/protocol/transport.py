"""The socket under an LDAP connection.

No wait on a socket (TCP, TLS or local) is longer than its operation. Sockets are blocking with a
timeout, so that the same code waits in a thread, or in a greenlet of a process that gevent or
eventlet patched.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from keyfront.common import interpreter
from keyfront.errors import (
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
)

from .happy_eyeballs import Connected
from .urls import ServerURL

_CHUNK = 65536
# Setting a socket's timeout is a system call; one that is longer by less stays.
_SLACK = 0.001
# Seconds idle until the peer's kernel is asked, between tries, and tries.
_KEEPALIVE = (60, 10, 3)
# Certificate errors of OpenSSL that another CA would cure.
_UNKNOWN_CA = frozenset((2, 18, 19, 20, 21))
# What a server says of a client's certificate (RFC 8446 section 6.2), as OpenSSL spells it.
_CLIENT_CERTIFICATE = re.compile(
    r"ALERT_((BAD|UNSUPPORTED)_CERTIFICATE|CERTIFICATE_\w+|UNKNOWN_CA|ACCESS_DENIED)$"
)

# Of the interpreter: eventlet's module ``select`` has none, and gevent's lets its hub run.
_select = interpreter.fresh("select")
_poll, _POLLIN = _select.poll, _select.POLLIN

#: The ``sockaddr`` of ``socket.getaddrinfo``; ``None`` for a socket file, which its URL names.
Address = tuple[Any, ...] | None


class Transport:
    """A socket to a server. Its errors are :class:`DirectoryUnavailableError` and subclasses.

    :param url: URL of the server
    """

    __slots__ = (
        *("_deadline", "_pending", "_pid", "_poll", "_seconds", "_socket", "_timeout", "_url"),
    )

    def __init__(self, url: ServerURL) -> None:
        self._url = url
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        # of the operation under way: its time, its end, and what the socket was told
        self._seconds: float | None = None
        self._deadline: float | None = None
        self._timeout: float | None = None
        # of the socket, once somebody has asked whether it is readable
        self._poll: Callable[[int], list[Any]] | None = None
        self._pending: Callable[[], int] | None = None

    @property
    def raw(self) -> socket.socket | None:
        """The socket, ``None`` once it is closed."""
        return self._socket

    @property
    def certificate(self) -> bytes:
        """The server's certificate in DER; empty without TLS."""
        secured = self._socket
        found = secured.getpeercert(True) if isinstance(secured, ssl.SSLSocket) else None
        return found or b""

    @property
    def peer(self) -> str:
        """The address that is connected to, in numbers; empty if that is a file, or nobody."""
        try:
            return str(self._socket.getpeername()[0]) if self._socket is not None else ""
        except (OSError, IndexError):
            return ""

    def begin(self, seconds: float | None, *, since: float | None = None) -> None:
        """Begin an operation, which ends or fails within ``seconds``; ``None`` for no limit.

        :param seconds: the time for the operation, above 0
        :param since: the beginning of an operation that goes on, by ``time.monotonic()``, for the
            message if it fails; by default now
        """
        now = time.monotonic()
        self._seconds = seconds
        self._deadline = None if seconds is None else now + seconds
        if since is not None and seconds is not None:
            self._seconds = now + seconds - since
        if seconds != self._timeout and self._socket is not None:
            self._timeout = seconds
            self._socket.settimeout(seconds)

    def connect(self, address: Address = None) -> None:
        """Connect, to one address or to those of the URL's name in turn."""
        url = self._url
        if url.scheme == "ldapi":
            self._connect(socket.AF_UNIX, url.host)
            return
        if isinstance(address, Connected) and (connected := address.take()) is not None:
            self._socket = connected
            self._timeout = connected.gettimeout()
            self._prepare(connected)
            return
        if address is not None:
            family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
            self._connect(family, address)
            return
        found, reason = [], "none"
        try:
            found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except OSError as error:
            reason = error.strerror or str(error)
        if not found:
            raise DirectoryUnavailableError(f"cannot find its address: {reason}", server=url.text)
        failed: DirectoryError | None = None
        for family, _, _, _, each in found:
            try:
                self._connect(family, each)
                return
            except DirectoryUnavailableError as error:
                failed = error.with_traceback(None)
        assert failed is not None
        raise failed

    def _connect(self, family: int, address: Any) -> None:
        failed: DirectoryError
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._timeout = self._socket.gettimeout()
            if family != socket.AF_UNIX:
                self._prepare(self._socket)
            self._wait(self._socket)
            self._socket.connect(address)
            return
        except OSError as error:
            failed = self._failure(error, "no connection")
        self.close()
        raise failed

    @staticmethod
    def _prepare(made: socket.socket) -> None:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(
            ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEPALIVE, strict=True
        ):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def secure(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake.

        :raises DirectoryTLSError: it failed, or the certificate is not trusted
        """
        failed: DirectoryError | None = None
        plain = self._open()
        try:
            self._wait(plain)
            secured = context.wrap_socket(
                plain, server_hostname=self._url.tls_name, do_handshake_on_connect=False
            )
            self._socket = secured
            self._poll = None
            secured.do_handshake()
        except TimeoutError as error:
            failed = self._failure(error, "no TLS handshake")
        except (OSError, ValueError) as error:
            failed = DirectoryTLSError(_explain(error), server=self._url.text)
        if failed is not None:
            raise failed

    def send(self, data: bytes) -> None:
        """Send a whole message. It may hold a password, so no error leads to it."""
        failed: DirectoryError | None = None
        try:
            connected = self._open()
            sent = connected.send(data)
            if sent < len(data):
                rest = memoryview(data)[sent:]
                while rest:
                    self._wait(connected)
                    rest = rest[connected.send(rest) :]
        except (OSError, EOFError) as error:
            failed = self._failure(error, "the request could not be sent")
        except BaseException as error:
            # a greenlet that is killed, Ctrl-C: without the frames that have the message
            error.__context__ = None
            raise error.with_traceback(None) from None
        finally:
            del data
            rest = memoryview(b"")
        if failed is not None:
            raise failed

    def receive(self) -> bytes:
        """Wait for bytes and return them, at least one."""
        try:
            connected = self._open()
            if self._deadline is not None:
                self._wait(connected)
            data: bytes = connected.recv(_CHUNK)
            if data:
                return data
            failed: DirectoryError = DirectoryUnavailableError(
                "the server closed the connection", server=self._url.text
            )
        except (OSError, EOFError) as error:
            # the latter is eventlet's if another greenlet closed the socket
            failed = self._failure(error, "no answer")
        raise failed

    def is_readable(self) -> bool:
        """Return whether something has come, or the connection is lost; waits for neither."""
        poll = self._poll or self._prepare_poll()
        if poll is None:
            return True
        if not poll(0):
            pending = self._pending
            return pending is not None and pending() > 0
        return self._pending is None or self._is_for_us()

    def _prepare_poll(self) -> Callable[[int], list[Any]] | None:
        """Prepare the look whether something has come, which is taken each time it is lent.

        It is one system call, which never waits and which no hub has to do with.

        :returns: ``None`` if the socket is closed
        """
        connected = self._socket
        if connected is None:
            return None
        poller = _poll()
        try:
            poller.register(connected.fileno(), _POLLIN)
        except ValueError:
            return None
        self._pending = connected.pending if isinstance(connected, ssl.SSLSocket) else None
        self._poll = poller.poll
        return self._poll

    def _is_for_us(self) -> bool:
        """Return whether what has come is not for TLS only, such as session tickets or new keys."""
        connected = self._socket
        if connected is None:
            return True
        try:
            if self._timeout != 0.0:
                self._timeout = 0.0
                connected.settimeout(0.0)
            connected.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except TimeoutError as error:
            # eventlet's word for it, unless it is the kernel's for a peer that is gone
            return error.errno is not None
        except (OSError, EOFError):
            pass
        return True

    def close(self, farewell: bytes = b"") -> None:
        """Close the socket, after a last message if that can be had at once. Never raises.

        In a process that inherited it, only the descriptor is closed: the connection is the
        parent's.
        """
        connected, self._socket = self._socket, None
        self._poll = self._pending = None
        if connected is None:
            return
        if farewell and self._pid == os.getpid():
            try:
                connected.settimeout(0.0)
                connected.send(farewell)
            except (OSError, ValueError):
                pass
        try:
            connected.close()
        except OSError:
            pass

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        return self._socket

    def _wait(self, connected: socket.socket) -> None:
        """Set the socket's timeout to the time that is left until the deadline."""
        if self._deadline is None:
            left = None
        else:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._timeout is not None and left <= self._timeout <= left + _SLACK:
                return
        if left != self._timeout:
            self._timeout = left
            connected.settimeout(left)

    def _failure(self, error: OSError | EOFError, what: str) -> DirectoryError:
        if isinstance(error, TimeoutError) and error.errno is None:
            within = f" within {self._seconds:.3g} s" if self._seconds is not None else ""
            return DirectoryTimeoutError(f"{what}{within}", server=self._url.text)
        if isinstance(error, TimeoutError):
            # the kernel's: keepalive, or no answer to a SYN
            return DirectoryTimeoutError(f"{what}: {error.strerror}", server=self._url.text)
        if isinstance(error, ssl.SSLError):
            # with TLS 1.3 a server refuses a client's certificate after the handshake
            return DirectoryTLSError(f"{what}: {_explain(error)}", server=self._url.text)
        reason = getattr(error, "strerror", None) or str(error) or "the socket was closed"
        return DirectoryUnavailableError(f"{what}: {reason}", server=self._url.text)


def _explain(error: OSError | ValueError) -> str:
    """Return the text that tells why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "; set ca_file to the CA" if error.verify_code in _UNKNOWN_CA else ""
        return f"its certificate is not accepted: {error.verify_message}{advice}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        words = reason.replace("_", " ").lower()
        if _CLIENT_CERTIFICATE.search(reason):
            return f"the client certificate, or that there is none, is not accepted: {words}"
        return f"TLS failed: {words}"
    if isinstance(error, OSError):
        return f"TLS failed: {error.strerror or str(error)}"
    return f"TLS failed: {error}"

"""The socket under an LDAP connection, and the addresses of a server's name, tried one by one.

No wait on a socket (TCP, TLS or local) is longer than its operation. Sockets are blocking with a
timeout, so that the same code waits in a thread, or in a greenlet of a process that gevent or
eventlet patched.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
)

from .urls import ServerURL

_CHUNK = 65536
# Setting a socket's timeout is a system call; one that is longer by less stays.
_SLACK = 0.001
# Seconds idle until the peer's kernel is asked, between tries, and tries.
_KEEPALIVE = (60, 10, 3)
# Certificate errors of OpenSSL that another CA would cure.
_UNKNOWN_CA = frozenset((2, 18, 19, 20, 21))

#: The ``sockaddr`` of ``socket.getaddrinfo``; ``None`` for a socket file, which its URL names.
Address = tuple[Any, ...] | None
Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]

C = TypeVar("C")

# So many addresses are named in an error.
_NAMED = 4


class Transport:
    """One socket. Its errors are :class:`DirectoryUnavailableError` and subclasses.

    :param url: URL of the server
    """

    __slots__ = ("_deadline", "_pid", "_seconds", "_socket", "_timeout", "_url")

    def __init__(self, url: ServerURL) -> None:
        self._url = url
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        # of the operation under way: its time, its end, and what the socket was told
        self._seconds: float | None = None
        self._deadline: float | None = None
        self._timeout: float | None = None

    @property
    def raw(self) -> socket.socket | None:
        """The socket, ``None`` once it is closed."""
        return self._socket

    def begin(self, seconds: float | None) -> None:
        """Begin an operation, which ends or fails within ``seconds``; ``None`` for no limit."""
        self._seconds = seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        if seconds != self._timeout and self._socket is not None:
            self._timeout = seconds
            self._socket.settimeout(seconds)

    def connect(self, address: Address = None) -> None:
        """Connect, to one address or to those of the URL's name in turn."""
        url = self._url
        if url.scheme == "ldapi":
            self._connect(socket.AF_UNIX, url.host)
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
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._keep_alive(self._socket)
            self._wait(self._socket)
            self._socket.connect(address)
            return
        except OSError as error:
            failed = self._failure(error, "no connection")
        self.close()
        raise failed

    @staticmethod
    def _keep_alive(made: socket.socket) -> None:
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
        connected = self._socket
        if connected is None:
            return True
        try:
            if self._timeout != 0.0:
                self._timeout = 0.0
                connected.settimeout(0.0)
            if isinstance(connected, ssl.SSLSocket):
                # What has come may be for TLS only: session tickets, new keys.
                connected.recv(1)
            else:
                connected.recv(1, socket.MSG_PEEK)
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
        """Let the socket wait for no longer than until the deadline."""
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
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, OSError):
        return f"TLS failed: {error.strerror or str(error)}"
    return f"TLS failed: {error}"


def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return a name's addresses, in the order in which the system prefers them (RFC 6724).

    :raises OSError: there are none, or the resolver does not answer
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [item[4] for item in found]


def alternate(addresses: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return addresses, each once, IPv6 and IPv4 in turn (RFC 8305 section 4).

    The family of the first one keeps the lead, and each family its order.
    """
    unique = list(dict.fromkeys(addresses))
    lead = [address for address in unique if len(address) == len(unique[0])]
    rest = [address for address in unique if len(address) != len(unique[0])]
    turns = zip_longest(lead, rest)
    return [address for turn in turns for address in turn if address is not None]


class Addresses:
    """The addresses of one server. Threads may use it at once; nothing waits for another.

    A name is looked up anew for each connection, so a change in DNS is followed at once. One
    address of several that does not answer costs its share of the time and no more, and the address
    that answered last is tried first.

    :param url: URL of the server
    :param resolve: returns the addresses of a name and a port; may raise ``OSError``
    :param clock: returns seconds that never go back
    """

    __slots__ = ("_clock", "_good", "_resolve", "_url")

    def __init__(
        self, url: ServerURL, *, resolve: Resolve = look_up, clock: Callable[[], float]
    ) -> None:
        self._url = url
        self._resolve = resolve
        self._clock = clock
        self._good: Address = None

    def reach(self, call: Callable[[ServerURL, Address, float], C], seconds: float) -> C:
        """Return what ``call`` returns for the first address with which it does not fail.

        Each address may take a fair share of the time that the ones before it have left, and the
        last one all of it. The name's lookup is part of that time.

        :param call: called with the URL, an address and the seconds it may take
        :param seconds: time for all of it
        :raises DirectoryUnavailableError: no address answers, with the reason of each; or the
            name has none
        :raises DirectoryTimeoutError: the same, and at least one used up its time
        """
        deadline = self._clock() + seconds
        addresses = self._now(seconds)
        kinds: set[type[DirectoryError]] = set()
        reasons: list[str] = []
        for number, address in enumerate(addresses):
            left = deadline - self._clock()
            if left <= 0:
                kinds.add(DirectoryTimeoutError)
                reasons.append(f"no time left for {len(addresses) - number} more")
                break
            try:
                result = call(self._url, address, left / (len(addresses) - number))
            except DirectoryAnswerError:
                self._good = address
                raise
            except (DirectoryUnavailableError, OSError) as error:
                kinds.add(_kind(error))
                reasons.append(self._reason(error, address))
            else:
                self._good = address
                return result
        if len(reasons) > _NAMED:
            reasons[_NAMED - 1 :] = [f"and {len(reasons) - _NAMED + 1} more addresses"]
        kind: type[DirectoryError] = DirectoryUnavailableError
        if len(kinds) == 1:
            kind = kinds.pop()
        elif DirectoryTimeoutError in kinds:
            kind = DirectoryTimeoutError
        raise kind("; ".join(reasons), server=self._url.text)

    def _now(self, seconds: float) -> Sequence[Address]:
        if self._url.scheme == "ldapi":
            return [None]
        addresses: list[Address] = [*alternate(self._found(seconds))]
        good = self._good
        if good in addresses:
            addresses.remove(good)
            addresses.insert(0, good)
        return addresses

    def _found(self, seconds: float) -> Sequence[tuple[Any, ...]]:
        host, port = self._url.host, self._url.port
        found: list[Sequence[tuple[Any, ...]]] = []
        reasons: list[str] = []
        done = threading.Event()

        def ask() -> None:
            try:
                found.append(self._resolve(host, port))
            except Exception as error:  # not only OSError: UnicodeError for what can be no name
                reasons.append(_words(error))
            finally:
                done.set()

        if _is_numeric(host):
            ask()
        else:
            # A resolver that hangs cannot be interrupted, only left alone; its own limit is
            # often 10 s and more for each name.
            try:
                threading.Thread(target=ask, name="keyfront-ldap-lookup", daemon=True).start()
            except RuntimeError:  # no thread to be had
                ask()
            if not done.wait(seconds):
                raise DirectoryTimeoutError(
                    f"no answer to the lookup of {host} within {seconds:.3g} s",
                    server=self._url.text,
                )
        if not found or not found[0]:
            reason = reasons[0] if reasons else "it has no address"
            raise DirectoryUnavailableError(
                f"the lookup of {host} failed: {reason}", server=self._url.text
            )
        return found[0]

    def _reason(self, error: Exception, address: Address) -> str:
        words = _words(error).removeprefix(f"{self._url.text}: ")
        if address is None or _is_numeric(self._url.host):
            return words
        host = f"[{address[0]}]" if len(address) == 4 else address[0]
        return f"{host}: {words}"


def _kind(error: Exception) -> type[DirectoryError]:
    if isinstance(error, DirectoryUnavailableError):
        return type(error)
    return DirectoryTimeoutError if isinstance(error, TimeoutError) else DirectoryUnavailableError


def _words(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""A client of any Keystone: JSON over TLS or without, and each answer with what it took.

Connections are kept where the server keeps them, one for each thread that asks, as services do. No
token, password or body appears in an error.

It takes little, so that what is measured is the server, which mostly shares its processors: a
request can be made ready beforehand, an answer of a usual form is taken from the socket as it is,
and its JSON is read when it is asked for. What has another form is left to :mod:`http.client`.
"""

from __future__ import annotations

import io
import json
import socket
import ssl
import threading
import time
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from keyfront.cli.credentials import Credentials
from keyfront.errors import ServerError

TOKENS = "/auth/tokens"
LOST = "no answer"
"""How failures without an answer begin: a server that is away gives no others."""

# Bytes of a body at most, and of a part of an answer.
_LONGEST = 16 << 20
_DIGITS = len(str(_LONGEST))
_MUCH = 1 << 16
# They have none, whatever they tell of its length.
_WITHOUT_BODY = ("100", "101", "102", "103", "204", "304")


class Answer(NamedTuple):
    """The outcome of a request.

    :ivar status: 0 if there was no answer
    :ivar failure: the kind of failure, for a count: ``status 503``, ``no answer: timed out``; empty
        for an answer as it should be
    :ivar token: the token that was issued, if one was
    :ivar text: the body of the answer
    :ivar seconds: from before the request, and the connection if one was made, to the answer's end
    """

    status: int
    failure: str
    token: str
    text: bytes
    seconds: float

    @property
    def content(self) -> dict[str, Any]:
        """The JSON object of the answer, read at each call; empty if it has none."""
        try:
            found = json.loads(self.text or b"{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def __repr__(self) -> str:
        return f"<Answer {self.failure or self.status}>"


class Ready(NamedTuple):
    """A request that is ready to be sent.

    :ivar wire: all of its bytes; no text for an error
    :ivar again: true if nothing is made twice when it is sent twice
    """

    wire: bytes
    again: bool

    def __repr__(self) -> str:
        return "<Ready>"


class Client:
    """Asks a Keystone, from as many threads as want to.

    :param credentials: its address, and the rules for its certificate
    :param timeout: seconds without a byte after which there is no answer
    :raises ServerError: the file of certificates cannot be read
    """

    def __init__(self, credentials: Credentials, *, timeout: float) -> None:
        self.credentials = credentials
        self._timeout = timeout
        parts = urlsplit(credentials.url)
        self._tls = credentials.tls()
        usual = 80 if self._tls is None else 443
        self._address = (parts.hostname or "", parts.port or usual)
        self._path = parts.path
        host = f"[{self._address[0]}]" if ":" in self._address[0] else self._address[0]
        self._host = host if self._address[1] == usual else f"{host}:{self._address[1]}"
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._stopped = False

    @property
    def url(self) -> str:
        """The URL of the version 3."""
        return self.credentials.url

    def _connection(self) -> _Connection:
        found: _Connection | None = getattr(self._own, "connection", None)
        if found is None:
            found = _Connection(self._address, self._tls, self._timeout)
            self._own.connection = found
            with self._lock:
                self._connections.append(found)
        return found

    def ready(
        self,
        method: str,
        path: str,
        token: str | None = None,
        body: dict[str, Any] | None = None,
        *,
        subject: str | None = None,
    ) -> Ready:
        """Return a request, for :meth:`send`.

        :param path: behind ``/v3``
        :param subject: the token that the request is about
        """
        text = b"" if body is None else json.dumps(body).encode()
        given = {
            "Host": self._host,
            "Accept-Encoding": "identity",
            "X-Auth-Token": token,
            "X-Subject-Token": subject,
            "User-Agent": "keyfront-bench-cloud",
            "Content-Type": None if body is None else "application/json",
            "Content-Length": None if method == "GET" else len(text),
        }
        lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
        head = "\r\n".join([f"{method} {self._path}{path} HTTP/1.1", *lines, "\r\n"])
        return Ready(head.encode("ascii") + text, method != "POST" or path == TOKENS)

    def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        body: dict[str, Any] | None = None,
        *,
        subject: str | None = None,
    ) -> Answer:
        """Make one request, see :meth:`ready` and :meth:`send`."""
        return self.send(self.ready(method, path, token, body, subject=subject))

    def send(self, ready: Ready) -> Answer:
        """Send a request and wait for its answer.

        A kept connection that the server has just closed is made anew once, as every client does,
        unless the request would then make something twice.
        """
        connection = self._connection()
        again = connection.is_open and ready.again
        begun = time.perf_counter()
        while True:
            if self._stopped:
                return Answer(0, f"{LOST}: stopped", "", b"", time.perf_counter() - begun)
            try:
                status, token, text = connection.exchange(ready.wire)
                break
            except (OSError, HTTPException) as error:
                connection.close()
                if again and isinstance(error, ConnectionError) and not self._stopped:
                    again = False
                    continue
                return Answer(0, f"{LOST}: {_said(error)}", "", b"", time.perf_counter() - begun)
        seconds = time.perf_counter() - begun
        return Answer(
            status, "" if 200 <= status < 300 else f"status {status}", token, text, seconds
        )

    def demand(
        self, method: str, path: str, token: str | None = None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make one request whose answer is needed, and return what it holds.

        :raises ServerError: there is no answer, or not a good one
        """
        answer = self.ask(method, path, token, body)
        if answer.failure:
            what = f"{method} {self.url}{path.partition('?')[0]}"
            raise ServerError(f"{what}: {_refused(answer)}")
        return answer.content

    def log_in(self, auth: dict[str, Any], who: str) -> tuple[str, dict[str, Any]]:
        """Return a new token, and what it says.

        :param auth: the value of ``auth``, as in :class:`Credentials`
        :param who: for the error
        :raises ServerError: the login failed
        """
        answer = self.ask("POST", TOKENS, body={"auth": auth})
        if answer.failure or not answer.token:
            said = "it is refused: is the password right, and has the user a role on the project?"
            if answer.status != 401:
                said = _refused(answer)
            raise ServerError(f"{self.url}: login of {who}: {said}")
        said_by: dict[str, Any] = answer.content.get("token", {})
        return answer.token, said_by

    def stop(self) -> None:
        """End requests that are under way, of all threads: they and later ones have no answer."""
        self._stopped = True
        with self._lock:
            for connection in self._connections:
                connection.end()

    def close(self) -> None:
        """Close all connections; nothing may be asked meanwhile."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._own = threading.local()


class _Connection:
    """A connection to a server, which is made when it is needed.

    :param address: the host and the port
    :param tls: the rules for its certificate; ``None`` for a connection without TLS
    :param timeout: seconds that are waited for a byte
    """

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None, timeout: float
    ) -> None:
        self._address = address
        self._tls = tls
        self._timeout = timeout
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is kept from a request before."""
        return self._socket is not None

    def _opened(self) -> socket.socket:
        made = socket.create_connection(self._address, self._timeout)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                made = self._tls.wrap_socket(made, server_hostname=self._address[0])
        except BaseException:
            made.close()
            raise
        self._socket = made
        return made

    def exchange(self, wire: bytes) -> tuple[int, str, bytes]:
        """Send a request; returns the status of its answer, the issued token and the body.

        :raises OSError: there is no answer
        :raises HTTPException: it is none of HTTP
        """
        sock = self._socket or self._opened()
        sock.sendall(wire)
        data = sock.recv(_MUCH)
        if not data:
            raise RemoteDisconnected("closed without an answer")
        while (end := data.find(b"\r\n\r\n")) < 0 and len(data) < _MUCH:
            more = sock.recv(_MUCH)
            if not more:
                raise IncompleteRead(data)
            data += more
        lines = data[: max(end, 0)].decode("latin-1").split("\r\n")
        fields = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        length, status = fields.get("content-length", ""), lines[0][9:12]
        if (
            not (lines[0].startswith("HTTP/1.1 ") and status.isdecimal() and length.isdecimal())
            or status in _WITHOUT_BODY
            or "transfer-encoding" in fields
            or len(length) > _DIGITS
            or int(length) > _LONGEST
        ):
            return self._unusual(sock, data)
        parts = [data[end + 4 : end + 4 + int(length)]]
        missing = int(length) - (len(data) - end - 4)
        while missing > 0:
            more = sock.recv(_MUCH)
            if not more:
                raise IncompleteRead(data)
            parts.append(more)
            missing -= len(more)
        if missing or "close" in fields.get("connection", "").lower():
            self.close()
        return int(status), fields.get("x-subject-token", ""), b"".join(parts)[: int(length)]

    def _unusual(self, sock: socket.socket, data: bytes) -> tuple[int, str, bytes]:
        """Take an answer that has no usual form, of which some bytes are there."""
        answer = HTTPResponse(_Begun(sock, data))  # type: ignore[arg-type]
        answer.begin()
        text = answer.read(_LONGEST + 1)
        if answer.length or len(text) > _LONGEST:
            raise IncompleteRead(text)
        # Of another one to come, the answer itself is still on its way.
        if answer.will_close or not answer.isclosed() or answer.status < HTTPStatus.OK:
            self.close()
        return answer.status, answer.headers.get("X-Subject-Token", ""), text

    def end(self) -> None:
        """Have who waits for an answer get none."""
        sock = self._socket
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed meanwhile

    def close(self) -> None:
        """Close it; the next request makes it anew."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()


class _Begun(io.RawIOBase):
    """The bytes of an answer, some of which were taken from the socket already."""

    def __init__(self, sock: socket.socket, data: bytes) -> None:
        self._socket = sock
        self._data = data

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return it as :class:`~http.client.HTTPResponse` reads it."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Take bytes; 0 at the end."""
        if not self._data:
            return self._socket.recv_into(buffer)
        taken, self._data = self._data[: len(buffer)], self._data[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def _said(error: Exception) -> str:
    """Return a failure in a few words, the same for the same cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused, {error.verify_message}; name its CA by OS_CACERT"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, HTTPException | ConnectionResetError):
        return "connection lost"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _refused(answer: Answer) -> str:
    if answer.failure.startswith(LOST):
        return f"{answer.failure}; is it running?"
    return f"Keystone answers {answer.status}" if answer.failure else "answers with no token"

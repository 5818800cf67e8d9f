"""A client of any Keystone: JSON over TLS or without, and each answer with what it took.

Connections are kept where the server keeps them, one for each thread that asks, as services do. No
token, password or body appears in an error.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from keyfront.cli.credentials import Credentials
from keyfront.errors import ServerError

TOKENS = "/auth/tokens"
LOST = "no answer"
"""How failures without an answer begin: a server that is away gives no others."""

_LONGEST = 16 << 20


class Answer(NamedTuple):
    """The outcome of a request.

    :ivar status: 0 if there was no answer
    :ivar failure: the kind of failure, for a count: ``status 503``, ``no answer: timed out``; empty
        for an answer as it should be
    :ivar token: the token that was issued, if one was
    :ivar content: the JSON object of the answer, empty if it has none
    :ivar seconds: from before the request, and the connection if one was made, to the answer's end
    """

    status: int
    failure: str
    token: str
    content: dict[str, Any]
    seconds: float

    def __repr__(self) -> str:
        return f"<Answer {self.failure or self.status}>"


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
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path
        self._tls = credentials.tls()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: list[HTTPConnection] = []
        self._stopped = False

    @property
    def url(self) -> str:
        """The URL of the version 3."""
        return self.credentials.url

    def _connection(self) -> HTTPConnection:
        found: HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            if self._tls is None:
                found = HTTPConnection(self._host, self._port, timeout=self._timeout)
            else:
                found = HTTPSConnection(
                    self._host, self._port, timeout=self._timeout, context=self._tls
                )
            self._own.connection = found
            with self._lock:
                self._connections.append(found)
        return found

    def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        body: dict[str, Any] | None = None,
        *,
        subject: str | None = None,
    ) -> Answer:
        """Make one request.

        A kept connection that the server has just closed is made anew once, as every client does,
        unless the request would then make something twice.

        :param path: behind ``/v3``
        :param subject: the token that the request is about
        """
        given = {"X-Auth-Token": token, "X-Subject-Token": subject}
        headers = {name: value for name, value in given.items() if value is not None}
        headers["User-Agent"] = "keyfront-bench-cloud"
        text = None
        if body is not None:
            text = json.dumps(body)
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        again = connection.sock is not None and (method != "POST" or path == TOKENS)
        begun = time.perf_counter()
        while True:
            if self._stopped:
                return Answer(0, f"{LOST}: stopped", "", {}, time.perf_counter() - begun)
            try:
                connection.request(method, f"{self._path}{path}", text, headers)
                found = connection.getresponse()
                content = found.read(_LONGEST)
                break
            except (OSError, HTTPException) as error:
                connection.close()
                if again and isinstance(error, ConnectionError) and not self._stopped:
                    again = False
                    continue
                return Answer(0, f"{LOST}: {_said(error)}", "", {}, time.perf_counter() - begun)
        seconds = time.perf_counter() - begun
        failure = "" if 200 <= found.status < 300 else f"status {found.status}"
        issued = found.headers.get("X-Subject-Token", "")
        return Answer(found.status, failure, issued, _object(content), seconds)

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
                sock = connection.sock
                if sock is not None:
                    try:
                        sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass  # it was closed meanwhile

    def close(self) -> None:
        """Close all connections; nothing may be asked meanwhile."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._own = threading.local()


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(error: Exception) -> str:
    """Return a failure in a few words, the same for the same cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused, {error.verify_message}; OS_CACERT names another CA"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, HTTPException | ConnectionResetError):
        return "connection lost"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _refused(answer: Answer) -> str:
    if answer.failure.startswith(LOST):
        return f"{answer.failure}; is it running?"
    return f"Keystone answers {answer.status}" if answer.failure else "answers with no token"

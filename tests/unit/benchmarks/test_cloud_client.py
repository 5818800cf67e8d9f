"""The client of ``keyfront bench cloud`` against servers that answer in every form of HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import pytest

from keyfront.benchmarks.load.cloud_client import Answer, Client
from keyfront.cli.credentials import Credentials

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"token": {"roles": [1]}}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


class Server:
    """Sends scripted bytes, a script for each connection, and reads a request before each part.

    :param scripts: of each connection the answers, each of them in parts that arrive one by one
    """

    def __init__(self, scripts: Sequence[Sequence[Sequence[bytes]]]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._scripts = scripts
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v3"
        self.requests: list[bytes] = []

    def serve(self) -> None:
        for script in self._scripts:
            connection, _ = self._listening.accept()
            # who has read enough may have closed it, and one that did not read all resets it
            with connection, suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for parts in script:
                    self.requests.append(self._request(connection))
                    for part in parts:
                        connection.sendall(part)
                # who reads has what was sent before the end
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

    @staticmethod
    def _request(connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(4096)
            assert more, "the request ended before its end"
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                while len(body) < int(line[15:]):
                    body += connection.recv(4096)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._listening.close()


@contextmanager
def asking(*scripts: Sequence[Sequence[bytes]]) -> Iterator[tuple[Client, Server]]:
    with closing(Server(scripts)) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        with closing(Client(Credentials(server.url, {}), timeout=60)) as client:
            yield client, server
        thread.join(60)
        assert not thread.is_alive(), "not every script was played"


def bytewise(data: bytes) -> list[bytes]:
    return [bytes([one]) for one in data]


FORMS = {
    "at once": [OK + LENGTH + BODY],
    "byte by byte": bytewise(OK + LENGTH + BODY),
    "head and body": [OK + LENGTH, BODY],
    "chunks": [
        OK + b"Transfer-Encoding: chunked\r\n\r\n",
        b"5\r\n" + BODY[:5] + b"\r\n",
        b"%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n",
    ],
    "an answer to come": [b"HTTP/1.1 100 Continue\r\n\r\n", OK + LENGTH + BODY],
    "names in capitals": [OK + LENGTH.upper() + BODY],
    "more headers": [OK + b"Vary: X-Auth-Token\r\n" * 9 + LENGTH + BODY],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_over_a_kept_connection(form: str) -> None:
    with asking([FORMS[form], FORMS[form]]) as (client, _):
        for _ in range(2):
            answer = client.ask("GET", "/auth/tokens")
            assert (answer.failure, answer.text) == ("", BODY)
            assert answer.content == {"token": {"roles": [1]}}


@pytest.mark.parametrize(
    "parts",
    [
        [OK + b"Connection: close\r\n" + LENGTH + BODY],
        [OK + b"\r\n" + BODY],
        [b"HTTP/1.0 200 OK\r\n" + LENGTH + BODY],
        [b"HTTP/1.0 200 OK\r\n\r\n", BODY],
        [OK + LENGTH + BODY + b"more than it told"],
        [OK + LENGTH, BODY + b"more than it told"],
        [OK + b"Content-Length: " + b"0" * 5000 + LENGTH[16:] + BODY],
    ],
    ids=[
        "it says so", "no length", "HTTP/1.0", "HTTP/1.0 without a length", "too many bytes",
        "too many bytes of the body", "many digits",
    ],
)
def test_a_connection_that_ends_is_made_anew(parts: list[bytes]) -> None:
    with asking([parts], [parts]) as (client, _):
        for _ in range(2):
            assert client.ask("POST", "/users", "t", {}).text == BODY


def test_an_answer_that_is_not_the_last_one_is_nobody_elses() -> None:
    early = [b"HTTP/1.1 103 Early Hints\r\n\r\n", OK + LENGTH + BODY]
    other = OK + b"Content-Length: 2\r\n\r\n{}"
    with asking([early], [[other]]) as (client, _):
        assert client.ask("GET", "/a").failure == "status 103"
        assert client.ask("GET", "/b").text == b"{}"


def test_a_kept_connection_that_was_closed_is_made_anew_once() -> None:
    answer = FORMS["at once"]
    with asking([answer], [answer], []) as (client, _):
        assert client.ask("GET", "/a").status == client.ask("GET", "/b").status == 200
        # that one was not kept by the server, either, and a user is not made twice
        said = client.ask("POST", "/users", "t", {"user": {}})
        assert said.failure.startswith("no answer: ")
        assert client.ask("GET", "/c").failure == "no answer: connection lost"


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [OK],
        [OK + LENGTH + BODY[:5]],
        [b"not HTTP\r\n\r\n"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nabc"],
        [b"HTTP/1.0 200 OK\r\n" + LENGTH + BODY[:5]],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + OK + LENGTH + BODY[:5]],
    ],
    ids=[
        "nothing", "half a head", "half a body", "another protocol", "half a chunk",
        "half a body of HTTP/1.0", "half a body of an answer to come",
    ],
)
def test_what_is_no_answer(parts: list[bytes]) -> None:
    with asking([parts]) as (client, _):
        answer = client.ask("GET", "/auth/tokens")
        assert (answer.status, answer.failure) == (0, "no answer: connection lost")


def test_statuses_and_the_token() -> None:
    issued = b"HTTP/1.1 201 Created\r\nX-Subject-Token: gAAA\r\n" + LENGTH + BODY
    nothing = b"HTTP/1.1 204 No Content\r\n\r\n"
    refused = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
    with asking([[issued], [nothing], [refused]]) as (client, _):
        found = [client.ask("POST", "/auth/tokens", body={}) for _ in range(3)]
    assert [(one.status, one.failure, one.token) for one in found] == [
        (201, "", "gAAA"), (204, "", ""), (401, "status 401", ""),
    ]  # fmt: skip


def test_what_is_sent() -> None:
    answer = FORMS["at once"]
    with asking([answer] * 2) as (client, server):
        client.ask("GET", "/auth/tokens", "caller", subject="token")
        client.ask("POST", "/users", "caller", {"user": {"name": "ä"}})
    first, second = server.requests
    host = server.url.removeprefix("http://").removesuffix("/v3").encode()
    assert first == (
        b"GET /v3/auth/tokens HTTP/1.1\r\nHost: " + host + b"\r\nAccept-Encoding: identity\r\n"
        b"X-Auth-Token: caller\r\nX-Subject-Token: token\r\n"
        b"User-Agent: keyfront-bench-cloud\r\n\r\n"
    )
    head, _, body = second.partition(b"\r\n\r\n")
    assert body == b'{"user": {"name": "\\u00e4"}}'
    assert head.endswith(b"Content-Type: application/json\r\nContent-Length: %d" % len(body))


def test_no_secret_is_shown() -> None:
    client = Client(Credentials("http://[::1]:5000/v3", {}), timeout=1)
    ready = client.ready("GET", "/auth/tokens", "secret")
    assert b"Host: [::1]:5000\r\n" in ready.wire
    assert "secret" not in repr(ready)
    assert "secret" not in repr(Answer(201, "", "secret", b"secret", 0.0))

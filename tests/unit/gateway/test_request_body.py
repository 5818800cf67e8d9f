"""Request bodies behind uWSGI are read whole before the application runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from keyfront.gateway.request_body import LIMIT, read_whole

Started = list[tuple[str, dict[str, str]]]


class Application:
    """Reads its body as PEP 3333 allows: CONTENT_LENGTH bytes."""

    def __init__(self) -> None:
        self.environ: dict[str, Any] | None = None
        self.body: bytes | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.environ = dict(environ)
        self.body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("200 OK", [])
        return [b"done"]


def reader(*chunks: bytes | Exception) -> Callable[[], bytes]:
    """A chunked_read() that gives these and fails the test when called beyond its end."""
    left = list(chunks)

    def read() -> bytes:
        chunk = left.pop(0)
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    read.left = left  # type: ignore[attr-defined]
    return read


def call(
    application: Application,
    read: Callable[[], bytes],
    limit: int = LIMIT,
    **environ: object,
) -> tuple[str, dict[str, str], bytes]:
    started: Started = []
    given: dict[str, Any] = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO(), **environ}
    wrapped = read_whole(application, read_chunk=read, limit=limit)
    answer = b"".join(wrapped(given, lambda s, h, *_: started.append((s, dict(h)))))  # type: ignore[arg-type, misc]
    ((status, headers),) = started
    return status, headers, answer


@pytest.mark.parametrize("name", ["chunked", "Chunked", " chunked "])
def test_body_is_presented_with_its_length(name: str) -> None:
    application = Application()
    read = reader(b"one ", b"two", b"")
    status, _, _ = call(application, read, HTTP_TRANSFER_ENCODING=name, REQUEST_METHOD="POST")
    assert status == "200 OK"
    assert application.body == b"one two"
    assert application.environ is not None
    assert application.environ["CONTENT_LENGTH"] == "7"
    assert "HTTP_TRANSFER_ENCODING" not in application.environ
    assert application.environ["REQUEST_METHOD"] == "POST"
    assert not read.left  # type: ignore[attr-defined]


def test_empty_body() -> None:
    application = Application()
    call(application, reader(b""), HTTP_TRANSFER_ENCODING="chunked")
    assert application.body == b""
    assert application.environ is not None
    assert application.environ["CONTENT_LENGTH"] == "0"


@pytest.mark.parametrize("encoding", [None, "gzip, chunked", "identity", ""])
def test_other_requests_pass_untouched(encoding: str | None) -> None:
    application = Application()
    environ = {} if encoding is None else {"HTTP_TRANSFER_ENCODING": encoding}
    body = io.BytesIO(b"plain")
    call(application, reader(), CONTENT_LENGTH="5", **{"wsgi.input": body}, **environ)
    assert application.body == b"plain"
    assert application.environ is not None
    assert body.read() == b"", "it was not read before"
    del application.environ["wsgi.input"]
    assert application.environ == {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "5", **environ}


def test_limit_is_the_largest_that_passes() -> None:
    application = Application()
    assert call(application, reader(b"12345", b"67", b""), 7, HTTP_TRANSFER_ENCODING="chunked")[
        0
    ].startswith("200")
    assert application.body == b"1234567"


def test_too_large_a_body_is_refused_without_reading_on() -> None:
    application = Application()
    read = reader(b"12345", b"678", b"never read")
    status, headers, answer = call(application, read, 7, HTTP_TRANSFER_ENCODING="chunked")
    assert status == "413 Content Too Large"
    assert headers["Content-Length"] == str(len(answer))
    assert application.environ is None
    assert read.left == [b"never read"]  # type: ignore[attr-defined]


def test_broken_chunks_are_refused() -> None:
    application = Application()
    read = reader(b"one", OSError("unable to receive chunked part"))
    status, headers, answer = call(application, read, HTTP_TRANSFER_ENCODING="chunked")
    assert status == "400 Bad Request"
    assert headers["Content-Length"] == str(len(answer))
    assert application.environ is None


def test_other_errors_of_reading_are_not_hidden() -> None:
    with pytest.raises(ValueError, match="a fault of ours"):
        call(Application(), reader(ValueError("a fault of ours")), HTTP_TRANSFER_ENCODING="chunked")


def test_a_body_is_read_although_the_application_does_not() -> None:
    body = io.BytesIO(b"unread")

    def refuse(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        assert body.read() == b""
        start_response("401 Unauthorized", [])
        return []

    wrapped = read_whole(refuse)  # type: ignore[arg-type]
    list(wrapped({"wsgi.input": body, "CONTENT_LENGTH": "6"}, lambda *_: None))  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("length", "status"),
    [("7", "400"), ("-1", "400"), ("six", "400"), ("11", "413"), ("6", "200"), ("", "200")],
)
def test_lengths(length: str, status: str) -> None:
    given, _, _ = call(
        Application(), reader(), 10, CONTENT_LENGTH=length, **{"wsgi.input": io.BytesIO(b"sixsix")}
    )
    assert given.startswith(status)


def test_what_is_no_request_is_refused() -> None:
    """As uWSGI hands on a line without blanks."""
    application, started = Application(), []
    wrapped = read_whole(application)  # type: ignore[arg-type]
    list(wrapped({}, lambda status, headers: started.append(status)))  # type: ignore[arg-type, misc]
    assert started == ["400 Bad Request"]
    assert application.environ is None


def test_chunks_are_left_alone_behind_a_web_server() -> None:
    application = Application()
    wrapped = read_whole(application)  # type: ignore[arg-type]
    environ = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO()}
    environ["HTTP_TRANSFER_ENCODING"] = "chunked"
    list(wrapped(environ, lambda *_: None))  # type: ignore[arg-type, misc]
    assert application.environ is not None
    assert "CONTENT_LENGTH" not in application.environ

"""Bodies that are nested too deep are refused before the application parses them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest

from keyfront.gateway.json_depth import is_deeper, refuse_deep

LIMIT = 114688


class Application:
    """Keeps what it reads."""

    def __init__(self) -> None:
        self.body: bytes | None = None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.body = environ["wsgi.input"].read()
        start_response("200 OK", [])
        return [b"done"]


def call(body: bytes, **environ: object) -> tuple[str, bytes, bytes | None]:
    """Status, answer and what the application has read."""
    application, started = Application(), []
    given = {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body)), **environ}
    wrapped = refuse_deep(application, limit=LIMIT, depth=100)
    answer = b"".join(wrapped(given, lambda status, headers: started.append((status, headers))))  # type: ignore[arg-type, func-returns-value, return-value]
    ((status, headers),) = started
    if not status.startswith("200"):
        assert dict(headers)["Content-Type"] == "application/json"
        assert dict(headers)["Content-Length"] == str(len(answer))
    return status, answer, application.body


def nested(depth: int, kind: str = "[") -> bytes:
    opening, closing = {"[": ("[", "]"), "{": ('{"a":', "}")}[kind]
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize("kind", ["[", "{"])
def test_deep_bodies_are_refused(kind: str) -> None:
    assert call(nested(100, kind)) == ("200 OK", b"done", nested(100, kind))
    status, answer, read = call(nested(101, kind))
    assert (status, read) == ("400 Bad Request", None)
    assert json.loads(answer)["error"] == {
        "code": 400, "title": "Bad Request",
        "message": "The request body is nested deeper than 100 levels.",
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"[" * LIMIT,
        b'{"a": "' + b"]" * 500 + b'", "b": ' + b"[" * 200,
        b'["\\"", ' + b"[" * 200,
        b"\xef\xbb\xbf" + b"[" * 200,
        ("[" * 200).encode("utf-16"),
        ('["\\"[", ' + "[" * 200).encode("utf-16-le"),
        ('["ü\\\\", ' + "[" * 200).encode("utf-32"),
    ],
)
def test_whatever_hides_the_depth(body: bytes) -> None:
    assert is_deeper(body, 100)
    assert call(body)[0] == "400 Bad Request"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[[1], {}]" * 5000,
        json.dumps(["[" * 500, '"[' * 500, "\\" * 501, {"a": "{" * 500}]).encode(),
        b"\xff\xfe\xfd",
    ],
)
def test_others_pass_as_they_are(body: bytes) -> None:
    assert call(body) == ("200 OK", b"done", body)


def test_what_is_too_large_is_for_the_application() -> None:
    body = b"[" * (LIMIT + 1)
    assert call(body) == ("200 OK", b"done", body)


def test_chunks_that_the_server_puts_together() -> None:
    given = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}
    assert call(nested(101), **given)[0] == "400 Bad Request"
    assert call(nested(5), **given) == ("200 OK", b"done", nested(5))
    assert call(nested(101), CONTENT_LENGTH="")[0] == "200 OK"

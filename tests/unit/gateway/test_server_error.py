"""An application that raises is answered for, with nothing of what it raised."""

from __future__ import annotations

import io
import json
from typing import Any
from wsgiref.validate import validator

import pytest

from keyfront.gateway.server_error import answer_errors


def call(application: Any, method: str = "GET") -> tuple[list[Any], bytes, str]:
    errors = io.StringIO()
    started: list[Any] = []
    environ = {"REQUEST_METHOD": method, "wsgi.errors": errors}

    def start_response(status: str, headers: Any, error: Any = None) -> Any:
        started.append((status, dict(headers), error))

    body = b"".join(answer_errors(application)(environ, start_response))
    return started, body, errors.getvalue()


def raising(environ: Any, start_response: Any) -> list[bytes]:
    raise ValueError("secret of the database")


def raising_late(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    raise ValueError("secret of the database")


def good(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Length", "4")])
    return [b"good"]


def test_an_error_is_answered_and_logged() -> None:
    started, body, logged = call(raising)
    ((status, headers, error),) = started
    assert error is None
    assert status == "500 Internal Server Error"
    assert json.loads(body)["error"]["code"] == 500
    assert int(headers["Content-Length"]) == len(body)
    assert b"secret" not in body
    assert "ValueError: secret of the database" in logged


def test_an_error_after_the_status_stays_the_servers() -> None:
    with pytest.raises(ValueError, match="secret"):
        call(raising_late)


def test_a_client_that_has_gone_is_not_logged() -> None:
    errors, started = io.StringIO(), []
    environ = {"REQUEST_METHOD": "POST", "wsgi.errors": errors}
    application = answer_errors(raising, client_gone=lambda error: isinstance(error, ValueError))
    application(environ, lambda status, headers: started.append(status))
    assert started == ["400 Bad Request"]
    assert errors.getvalue() == ""


def test_a_head_has_no_body() -> None:
    started, body, _ = call(raising, "HEAD")
    assert (started[-1][0], body) == ("500 Internal Server Error", b"")


def test_a_good_answer_is_left_alone() -> None:
    started, body, logged = call(good)
    assert ([status for status, _, _ in started], body, logged) == (["200 OK"], b"good", "")


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_end_of_the_process_is_not_answered(end: type[BaseException]) -> None:
    def ending(environ: Any, start_response: Any) -> list[bytes]:
        raise end

    with pytest.raises(end):
        call(ending)


def test_it_keeps_to_the_standard() -> None:
    errors = io.StringIO()
    from wsgiref.util import setup_testing_defaults

    environ: dict[str, Any] = {"QUERY_STRING": ""}
    setup_testing_defaults(environ)
    environ["wsgi.errors"] = errors
    body = validator(answer_errors(raising))(environ, lambda *arguments: lambda data: None)
    try:
        assert json.loads(b"".join(body))["error"]["code"] == 500
    finally:
        body.close()  # type: ignore[attr-defined]

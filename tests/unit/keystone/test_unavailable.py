"""What a client is answered in place of Keystone's error when the database was lost."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from keyfront.gateway.keystone.application import KeystoneApplication
from keyfront.gateway.keystone.database_loss import BUSY, DISK
from keyfront.middleware.tokens.request import current
from keyfront.middleware.tokens.routes import TOKENS


def answer(
    status: str | None, content_type: str = "text/plain",
    environ: dict[str, Any] | None = None, **noted: Any,
) -> tuple[str, dict[str, str], bytes]:
    """Answer a request for which Keystone's hooks note something, and which it then answers.

    :param status: of Keystone's answer; ``None``: it raises
    """

    def keystone(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        request = current.get()
        for name, value in noted.items():
            setattr(request, name, value)
        if status is None:
            raise OSError("gone")
        own = [("Content-Type", content_type), ("Content-Length", "14"), ("Vary", "X-Auth-Token")]
        start_response(status, own)
        return [b"Keystone's own"]

    given: list[Any] = []
    application = KeystoneApplication(keystone, threading.local())
    body = application(environ or {}, lambda *values: given.extend(values))
    return given[0], dict(given[1]), b"".join(body)


@pytest.mark.parametrize("status", ["500 INTERNAL SERVER ERROR", "403 FORBIDDEN", None])
def test_who_lost_the_database_may_try_again(status: str | None) -> None:
    given, headers, body = answer(status, lost="refused")
    assert given == "503 Service Unavailable"
    assert headers["Retry-After"] == "1"
    assert headers["Content-Length"] == str(len(body))
    assert json.loads(body)["error"]["message"].endswith("Try again.")
    assert b"refused" not in body


def test_a_full_disk_takes_longer() -> None:
    given, headers, body = answer("500 ERROR", lost="database or disk is full", loss=DISK)
    assert given == "503 Service Unavailable"
    assert int(headers["Retry-After"]) > 1
    assert "disk is full" in json.loads(body)["error"]["message"]


def test_a_database_that_was_busy_is_named_so() -> None:
    given, headers, body = answer("500 ERROR", lost="Deadlock found", loss=BUSY)
    assert given == "503 Service Unavailable"
    assert headers["Retry-After"] == "1"
    assert json.loads(body)["error"]["message"] == BUSY.reason


@pytest.mark.parametrize(
    ("noted", "what"),
    [("unknown_commit", "while it made the change"), ("committed", "a part of the change")],
)
def test_who_lost_it_in_a_commit_or_after_one_has_to_look_first(noted: str, what: str) -> None:
    given, headers, body = answer("500 ERROR", lost="gone", **{noted: True})
    assert given == "503 Service Unavailable"
    assert "Retry-After" not in headers
    message = json.loads(body)["error"]["message"]
    assert what in message
    assert "Look whether it is made" in message
    # But for a login.
    login = {"REQUEST_METHOD": "POST", "PATH_INFO": TOKENS}
    given, headers, _ = answer("500 ERROR", environ=login, lost="gone", **{noted: True})
    assert (given, headers["Retry-After"]) == ("503 Service Unavailable", "1")


@pytest.mark.parametrize("status", ["200 OK", "404 NOT FOUND"])
def test_what_was_answered_all_the_same_stands(status: str) -> None:
    given, headers, body = answer(status, "application/json", lost="gone")
    assert (given, body) == (status, b"Keystone's own")
    assert "Retry-After" not in headers


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("404 NOT FOUND", "There is nothing at this address."),
        ("405 METHOD NOT ALLOWED", "This method is not allowed."),
        ("413 Request Entity Too Large", "The request is too large."),
        ("500 ERROR", "Internal Server Error."),
        ("599 ODD", "Error."),
    ],
)
def test_what_is_meant_for_browsers_becomes_an_error_of_the_api(status: str, message: str) -> None:
    given, headers, body = answer(status)
    assert given == status
    assert headers["Content-Type"] == "application/json"
    assert headers["Vary"] == "X-Auth-Token"
    assert headers["Content-Length"] == str(len(body))
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == (int(status[:3]), message)


def test_another_error_is_keystones() -> None:
    assert answer("500 ERROR")[0] == "500 ERROR"
    with pytest.raises(OSError, match="gone"):
        answer(None)

"""Which failures of a statement mean that the database is away, and what is logged of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.gateway.keystone import database_loss
from keyfront.gateway.keystone.database_loss import DatabaseLoss, is_worth_logging, note_error
from keyfront.middleware.tokens.request import Request, current


@pytest.fixture
def request_() -> Iterator[Request]:
    made = Request()
    before = current.set(made)
    yield made
    current.reset(before)


def failure(error: Exception, **facts: Any) -> Any:
    usual = {"is_pre_ping": False, "is_disconnect": False, "connection": object()}
    return SimpleNamespace(original_exception=error, **{**usual, **facts})


@pytest.mark.parametrize(
    ("facts", "lost"),
    [
        ({"is_disconnect": True}, "gone"),
        ({"connection": None}, "gone"),
        # it is replaced, and the statement goes on
        ({"is_disconnect": True, "is_pre_ping": True}, ""),
        ({}, ""),
    ],
)
def test_a_lost_connection_or_none(request_: Request, facts: dict[str, Any], lost: str) -> None:
    note_error(failure(OSError("gone\nand more"), **facts))
    assert request_.lost == lost


def test_outside_of_a_request_nothing_is_noted() -> None:
    note_error(failure(OSError("gone"), is_disconnect=True))


def test_an_error_without_words_has_its_name(request_: Request) -> None:
    note_error(failure(TimeoutError(), connection=None))
    assert request_.lost == "TimeoutError"


@pytest.mark.parametrize(
    ("lost", "level", "logged"),
    [("", logging.ERROR, True), ("gone", logging.ERROR, False), ("gone", logging.WARNING, True)],
)
def test_keystones_traces_of_it_are_not_logged(
    request_: Request, lost: str, level: int, logged: bool
) -> None:
    request_.lost = lost
    record = logging.LogRecord("keystone", level, "", 1, "trace", None, None)
    assert is_worth_logging(record) is logged


def test_a_line_a_second(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter((10.0, 10.2, 10.9, 11.0))
    monkeypatch.setattr(database_loss, "time", SimpleNamespace(monotonic=lambda: next(times)))
    loss = DatabaseLoss()
    for _ in range(4):
        loss.tell("refused")
    first, second = caplog.messages
    assert first == "the database cannot be reached, a request was answered 503: refused"
    assert "so were 2 others" in second

"""Which failures of a statement mean that the database is away, and what is logged of them."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pymysql
import pytest

from keyfront.gateway.keystone.database_loss import (
    AWAY,
    BUSY,
    DISK,
    READ_ONLY,
    DatabaseLoss,
    Loss,
    connect_once,
    is_worth_logging,
    note_error,
)
from keyfront.gateway.log_limit import LogLimit
from keyfront.middleware.tokens.request import Request, current
from support.served import free_port


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
    assert (request_.lost, request_.loss) == (lost, AWAY if lost else None)


class _PostgreSQLError(Exception):
    def __init__(self, sqlstate: str) -> None:
        self.sqlstate = sqlstate


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("it")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL), DISK),
        (sqlite_error(sqlite3.SQLITE_IOERR_SHMSIZE), DISK),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), BUSY),
        (sqlite_error(sqlite3.SQLITE_READONLY_DIRECTORY), READ_ONLY),
        (sqlite_error(sqlite3.SQLITE_CONSTRAINT), None),
        (sqlite3.ProgrammingError("without a code"), None),
        (pymysql.err.OperationalError(1021, "Disk full"), DISK),
        (pymysql.err.OperationalError(1114, "The table 'user' is full"), DISK),
        (pymysql.err.OperationalError(1213, "Deadlock found"), BUSY),
        (pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"), BUSY),
        (pymysql.err.OperationalError(1047, "WSREP has not yet prepared node"), AWAY),
        (pymysql.err.OperationalError(1290, "--read-only"), READ_ONLY),
        (pymysql.err.OperationalError(1836, "Running in read-only mode"), READ_ONLY),
        (pymysql.err.IntegrityError(1062, "Duplicate entry"), None),
        (_PostgreSQLError("53100"), DISK),
        (_PostgreSQLError("25006"), READ_ONLY),
        (_PostgreSQLError("57P01"), AWAY),
        (_PostgreSQLError("40001"), BUSY),
        (_PostgreSQLError("40P01"), BUSY),
        (_PostgreSQLError("55P03"), BUSY),
        (_PostgreSQLError("23505"), None),
        (ValueError(), None),
        (ValueError([1021]), None),
    ],
)
def test_what_a_database_refuses_for_now(
    request_: Request, error: Exception, loss: Loss | None
) -> None:
    context = failure(error)
    note_error(context)
    assert (bool(request_.lost), request_.loss) == (bool(loss), loss)
    assert context.is_disconnect == (loss in (AWAY, READ_ONLY))


def test_no_engine_waits_for_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    enginefacade = pytest.importorskip("oslo_db.sqlalchemy.enginefacade")
    engines = pytest.importorskip("oslo_db.sqlalchemy.engines")
    cfg = pytest.importorskip("oslo_config.cfg")
    monkeypatch.setattr(engines.time, "sleep", lambda _: pytest.fail("it waits"))
    conf = cfg.ConfigOpts()
    conf.register_opts(enginefacade.options.database_opts, "database")
    conf.set_override("max_retries", -1, "database")
    nowhere = f"mysql+pymysql://root@127.0.0.1:{free_port()}/none"
    conf.set_override("connection", nowhere, "database")
    context = enginefacade.transaction_context()
    connect_once(context)
    context._factory._start(conf)
    assert context._factory.get_writer_engine().url.database == "none"


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


def test_a_line_a_second(request_: Request, caplog: pytest.LogCaptureFixture) -> None:
    times = iter((10.0, 10.2, 10.9, 11.0, 12.0))
    loss = DatabaseLoss(LogLimit(clock=lambda: next(times)))
    for _ in range(4):
        request_.lost, request_.loss = "refused", None
        loss.tell(request_)
    request_.lost, request_.loss = "no room", DISK
    loss.tell(request_)
    first, second, third = caplog.messages
    assert third == "the database's disk is full or fails, a request was answered 503: no room"
    assert first == "the database cannot be reached, a request was answered 503: refused"
    assert "so were 2 others" in second

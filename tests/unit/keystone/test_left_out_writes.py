"""What is left out of a login or validation while nobody can be told of it, and what is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyfront.errors import CoordinatorError
from keyfront.gateway.keystone import left_out_writes
from keyfront.middleware.tokens.request import Request, current


class Manager:
    """Of Keystone: a login writes a name, and others write it, too."""

    def __init__(self) -> None:
        self.away = self.broken = False
        self.written: list[str] = []

    def login(self, name: str) -> str:
        self.rename(name)
        return "token"

    def rename(self, name: str) -> str:
        if self.broken:
            raise OSError("no database")
        if self.away:
            request = current.get()
            if request is not None:
                request.refused = "nobody could be told"
            raise CoordinatorError("nobody could be told")
        self.written.append(name)
        return name


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(Manager, "login", Manager.login)
    monkeypatch.setattr(Manager, "rename", Manager.rename)
    for _ in range(2):  # once only
        left_out_writes._mark(Manager, "login")
        left_out_writes._leave_out(Manager, "rename", "the name")
    return Manager()


@contextmanager
def served() -> Iterator[Request]:
    request = Request()
    before = current.set(request)
    try:
        yield request
    finally:
        current.reset(before)


def test_it_is_left_out_of_a_login(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    with served() as request:
        assert manager.login("one") == "token"
        manager.away = True
        assert manager.login("two") == "token"
        assert not request.refused
        manager.away = False
        assert manager.login("three") == "token"
    assert manager.written == ["one", "three"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "the name is not written before others can be told of it"


def test_who_asks_for_it_is_refused(manager: Manager) -> None:
    manager.away = True
    with served() as request:
        with pytest.raises(CoordinatorError):
            manager.rename("two")
        assert request.refused
        # What was refused before stays so.
        with pytest.raises(CoordinatorError):
            manager.login("two")
        assert request.refused
    with pytest.raises(CoordinatorError):
        manager.login("two")  # keystone-manage serves no request


def test_another_failure_is_one(manager: Manager) -> None:
    manager.broken = True
    with served(), pytest.raises(OSError, match="no database"):
        manager.login("two")


def test_what_it_calls_is_not_left_out_alone(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or half of it would be written."""
    deeds: list[str] = []

    def update(self: Any, name: str) -> None:
        self.rename(name)
        deeds.append("the rest")

    monkeypatch.setattr(Manager, "update", update, raising=False)
    left_out_writes._leave_out(Manager, "update", "all of it")
    monkeypatch.setattr(Manager, "enter", lambda self: self.update("two"), raising=False)
    left_out_writes._mark(Manager, "enter")
    manager.away = True
    with served() as request:
        assert manager.enter() is None  # type: ignore[attr-defined]
        assert not request.refused
    assert not deeds

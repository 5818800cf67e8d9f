"""The hooks in Keystone: recorded validations, the request-local cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from keyfront.middleware.tokens import keystone_hooks
from keyfront.middleware.tokens.request import Request, current


@contextlib.contextmanager
def serving(request: Request) -> Iterator[Request]:
    token = current.set(request)
    try:
        yield request
    finally:
        current.reset(token)


class Driver:
    def validate_token(self, token_id: str) -> str:
        if token_id.startswith("junk"):
            raise ValueError("no key opens it")
        return token_id


class Manager:
    """As Keystone's: the driver decodes, the manager decides."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.refused: set[str] = set()

    def validate_token(
        self, token_id: str, window_seconds: int = 0, access_rules_support: Any = None
    ) -> str:
        model = f"model of {self.driver.validate_token(token_id)}"
        if token_id in self.refused:
            raise KeyError(token_id)
        return model


@pytest.fixture
def manager() -> Manager:
    manager = Manager()
    keystone_hooks.record_validations(manager)
    return manager


def test_each_validation_is_noted_with_how_it_ended(manager: Manager) -> None:
    manager.refused.add("revoked")
    with serving(Request(recording=True)) as request:
        assert manager.validate_token("good", access_rules_support="1.0") == "model of good"
        manager.validate_token("late", window_seconds=60)
        for token in ("revoked", "junk"):
            with pytest.raises((KeyError, ValueError)):
                manager.validate_token(token)
    assert request.accepted == {"good": "model of good", "late": "model of late"}
    assert request.windows == {"good": 0.0, "late": 60.0}
    assert request.unsure == {"revoked"}
    assert request.garbage == {"junk"}


def test_the_narrower_window_counts(manager: Manager) -> None:
    with serving(Request(recording=True)) as request:
        manager.validate_token("t", 60)
        manager.validate_token("t")
    assert request.windows == {"t": 0.0}


def test_a_token_accepted_once_and_refused_once_is_unsure(manager: Manager) -> None:
    with serving(Request(recording=True)) as request:
        manager.validate_token("t")
        manager.refused.add("t")
        with pytest.raises(KeyError):
            manager.validate_token("t")
    assert "t" in request.accepted
    assert "t" in request.unsure


@pytest.mark.parametrize("request_", [None, Request()])
def test_nothing_is_noted_unless_wanted(manager: Manager, request_: Request | None) -> None:
    token = current.set(request_)
    try:
        assert manager.validate_token("good") == "model of good"
    finally:
        current.reset(token)
    assert request_ is None or not request_.accepted


def test_the_request_local_cache_is_the_requests() -> None:
    class Proxy:
        def _get_request_context(self) -> str:
            return "as before"

    keystone_hooks.keep_per_request(Proxy)
    assert Proxy()._get_request_context() == "as before"
    with serving(Request()) as request:
        assert Proxy()._get_request_context() is request.memory
    with serving(Request()) as other:
        assert other.memory is not request.memory

"""The hooks in Keystone: recorded validations, the request-local cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from keyfront.gateway.keystone import token_cache_hooks
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


class Model(NamedTuple):
    token: str
    trust: dict[str, str] | None = None
    application_credential: dict[str, str] | None = None


class Manager:
    """As Keystone's: the driver decodes, the manager decides, and a cache keeps the models."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.refused: set[str] = set()
        self.kept: dict[str, Model] = {}
        #: Tokens that have ended.
        self.over: set[str] = set()

        def model_of(token_id: str) -> Model:
            if token_id in self.kept:
                return self.kept[token_id]
            model = Model(self.driver.validate_token(token_id))
            if token_id in self.refused:
                raise KeyError(token_id)
            return model

        def forget(_: object, token_id: str) -> None:
            del self.kept[token_id]

        model_of.invalidate = forget  # type: ignore[attr-defined]
        self._validate_token: Callable[[str], Model] = model_of

    def check_revocation(self, token: Model) -> None:
        request = current.get()
        assert request is None or request.checked is token

    def validate_token(
        self, token_id: str, window_seconds: int = 0, access_rules_support: Any = None
    ) -> Model:
        model = self._validate_token(token_id)
        if token_id in self.over:
            raise LookupError(token_id)
        request = current.get()
        if request is not None:
            assert not request.reading
        self.check_revocation(model)
        return model


@pytest.fixture
def manager() -> Manager:
    manager = Manager()
    token_cache_hooks.record_validations(manager)
    return manager


def test_each_validation_is_noted_with_how_it_ended(manager: Manager) -> None:
    manager.refused.add("revoked")
    with serving(Request(recording=True)) as request:
        assert manager.validate_token("good", access_rules_support="1.0") == Model("good")
        manager.validate_token("late", window_seconds=60)
        for token in ("revoked", "junk"):
            with pytest.raises((KeyError, ValueError)):
                manager.validate_token(token)
    assert request.accepted == {"good": Model("good"), "late": Model("late")}
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
        assert manager.validate_token("good") == Model("good")
    finally:
        current.reset(token)
    assert request_ is None or not request_.accepted


def test_what_a_token_reads_is_not_the_answers(manager: Manager) -> None:
    with serving(Request(recording=True)) as request:
        request.reading = True
        manager.validate_token("t")
        assert request.reading


def test_a_model_that_was_kept_ends_with_its_trust(manager: Manager) -> None:
    past, future = "2020-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"
    for basis in ("trust", "application_credential"):
        manager.kept["t"] = Model("t", **{basis: {"expires_at": future}})
        assert manager.validate_token("t") == manager.kept["t"]
        manager.refused.add("t")
        manager.kept["t"] = Model("t", **{basis: {"expires_at": past}})
        with pytest.raises(KeyError):
            manager.validate_token("t")


def test_a_token_that_ends_with_its_trust_is_refused_for_the_trust(manager: Manager) -> None:
    """As by Keystone when it has kept nothing: it looks for the trust first."""
    manager.kept["t"] = Model("t", trust={"expires_at": "2020-01-01T00:00:00.000000Z"})
    manager.refused.add("t")
    manager.over.add("t")
    with pytest.raises(KeyError):
        manager.validate_token("t")


def test_the_request_local_cache_is_the_requests() -> None:
    class Proxy:
        def _get_request_context(self) -> str:
            return "as before"

    token_cache_hooks.keep_per_request(Proxy)
    assert Proxy()._get_request_context() == "as before"
    with serving(Request()) as request:
        assert Proxy()._get_request_context() is request.memory
    with serving(Request()) as other:
        assert other.memory is not request.memory

"""The hooks in Keystone: recorded validations, cache names, the request-local cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import keystone_hooks
from keyfront.middleware.tokens.coordinators.shared_memory import SharedMemory
from keyfront.middleware.tokens.epochs import slots
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


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    return SharedMemory(tmp_path / "shared")


def names(coordinator: Any) -> Any:
    """A region of each kind, and a function that returns the names of a key in them."""
    regions = [SimpleNamespace(name=name, key_mangler=str.upper) for name in ("tokens", "shared")]
    keystone_hooks.name_after_epochs(regions, lambda: coordinator)
    return lambda: tuple(region.key_mangler("key") for region in regions)


def touch(coordinator: SharedMemory, *tags: str) -> None:
    coordinator.touch(slots(tags, coordinator.slot_count))


def test_names_change_with_changes(coordinator: SharedMemory) -> None:
    both = names(coordinator)
    before = both()
    assert before == both()
    assert all(name.startswith("KEY:") for name in before)
    touch(coordinator, "any", "audit:a")  # a revocation
    after = both()
    assert after[0] != before[0]
    assert after[1] == before[1]
    touch(coordinator, "any", "content", "users")
    assert both()[1] != before[1]
    everything = both()
    touch(coordinator, "all")
    assert not set(both()) & set(everything)


def test_a_request_keeps_its_names(coordinator: SharedMemory) -> None:
    """What it reads later must not be found by those that begin after a change."""
    both = names(coordinator)
    with serving(Request()) as request:
        before = both()
        touch(coordinator, "any", "content")
        assert both() == before
        request.namespaces.clear()  # as its own change does
        assert both() != before


def test_nobody_shares_names_while_a_change_is_under_way(coordinator: SharedMemory) -> None:
    both = names(coordinator)
    mark = coordinator.mark(slots(["any", "content"], coordinator.slot_count))
    assert not set(both()) & set(both())
    coordinator.stamp(mark)
    assert both() == both()


def test_nobody_shares_names_when_the_epochs_are_lost() -> None:
    def find() -> Any:
        raise CoordinatorError("gone")

    region = SimpleNamespace(name="tokens", key_mangler=None)
    keystone_hooks.name_after_epochs([region], find)
    assert region.key_mangler("key") != region.key_mangler("key")


def test_without_the_cache_keys_are_as_they_were() -> None:
    assert names(None)() == ("KEY", "KEY")


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

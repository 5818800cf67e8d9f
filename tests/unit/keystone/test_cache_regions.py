"""The names of what Keystone keeps in caches of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.errors import CoordinatorError
from keyfront.gateway.keystone.cache_regions import KINDS, CacheNames
from keyfront.middleware.tokens import epochs
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation import rules
from keyfront.middleware.tokens.request import Request, current

PROJECT = "keystone.resource.core:get_project|p"
CREDENTIAL = "keystone.credential.core:_get_credential|c"
APPCRED = "keystone.application_credential.core:get_application_credential|a"
OTHER = "keystone.new.core:get|x"


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    return SharedMemory(tmp_path / "shared")


class Caches:
    """Two of Keystone's cache regions, and requests that look for keys in them."""

    def __init__(self, coordinator: Any, settle: float = 0.0) -> None:
        self._coordinator = coordinator
        names = ("tokens", "shared default")
        self.tokens, self.shared = (SimpleNamespace(name=x, key_mangler=str.upper) for x in names)
        self.names = CacheNames([self.tokens, self.shared], self._find, settle)

    def _find(self) -> Any:
        if isinstance(self._coordinator, Exception):
            raise self._coordinator
        return self._coordinator

    @contextlib.contextmanager
    def request(self) -> Iterator[Request]:
        request = Request()
        self.names.begin(request)
        token = current.set(request)
        try:
            yield request
        finally:
            current.reset(token)

    def looked_for(self) -> dict[str, str]:
        """What is looked for by the request under way."""
        keys = {key: self.shared.key_mangler(key) for key in (PROJECT, CREDENTIAL, APPCRED, OTHER)}
        return {"token": self.tokens.key_mangler("token"), **keys}

    def seen(self) -> dict[str, str]:
        """What is looked for by a request that begins now."""
        with self.request():
            return self.looked_for()


def touch(coordinator: SharedMemory, *tags: str) -> None:
    coordinator.touch(slots(tags, coordinator.slot_count))


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (("any", "audit:a"), {"token"}),  # a revocation
        (("any", "content", "users"), {"token", APPCRED, OTHER}),
        (("any", "content", "projects"), {"token", PROJECT, APPCRED, OTHER}),
        # what a user may do of his own as often as he likes
        (("any", "content", "appcreds"), {"token", APPCRED, OTHER}),
        (("any", "content", "trusts"), {"token", OTHER}),
        (("any", "content", "credentials"), {"token", CREDENTIAL, OTHER}),
        (("all",), {"token", PROJECT, CREDENTIAL, APPCRED, OTHER}),
    ],
)
def test_a_change_renames_what_it_may_concern(
    coordinator: SharedMemory, tags: tuple[str, ...], expected: set[str]
) -> None:
    caches = Caches(coordinator)
    before = caches.seen()
    assert before == caches.seen()
    assert all(name.startswith(key.upper() + ":") for key, name in before.items())
    touch(coordinator, *tags)
    assert changed(before, caches.seen()) == expected


def test_every_family_counts_for_something() -> None:
    named = {tag for tags in KINDS.values() for tag in tags}
    # No function of these is known by its module: what they keep goes by every change.
    assert {*rules.FAMILIES} - named == {"trusts", "oauth", "policies"}
    assert named - {*rules.FAMILIES} == {rules.ANY, rules.CONTENT, rules.REVOKED}


def test_what_is_read_out_of_a_cache_is_noted_for_the_answer(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    with caches.request() as request:
        caches.shared.key_mangler(PROJECT)
        assert not request.reads  # it may be the token's
        request.reading = True
        caches.shared.key_mangler(PROJECT)
        assert request.reads == {"projects"}
        caches.tokens.key_mangler("token")
        caches.shared.key_mangler(OTHER)
        assert request.reads == {"projects", rules.ANY, rules.CONTENT}


def test_all_names_are_from_the_beginning_of_the_request(coordinator: SharedMemory) -> None:
    """A login that took one late outlived what had been disabled meanwhile."""
    caches = Caches(coordinator)
    before = caches.seen()
    with caches.request():
        touch(coordinator, "any", "content", "projects")
        assert caches.looked_for() == before
    assert changed(before, caches.seen())


def test_after_its_own_change_a_request_is_alone(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    with caches.request() as request:
        touch(coordinator, "any", "content", "projects")
        request.names = None  # as its own change does
        own = caches.looked_for()
        assert own == caches.looked_for()
        assert not set(own.values()) & set(caches.seen().values())


def test_nobody_shares_names_while_a_change_is_under_way(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    mark = coordinator.mark(slots(["any", "content"], coordinator.slot_count))
    assert not set(caches.seen().values()) & set(caches.seen().values())
    coordinator.stamp(mark)
    assert caches.seen() == caches.seen()


def test_nobody_shares_names_when_the_epochs_are_lost() -> None:
    caches = Caches(CoordinatorError("gone"))
    assert not set(caches.seen().values()) & set(caches.seen().values())


def test_outside_of_requests_nothing_is_shared(coordinator: SharedMemory) -> None:
    caches = Caches(coordinator)
    assert not set(caches.looked_for().values()) & set(caches.looked_for().values())


def test_a_request_says_since_when_it_reads(coordinator: SharedMemory) -> None:
    """Its connections are judged by that, also after a change of its own."""
    caches = Caches(coordinator)
    with caches.request() as first:
        assert first.since == (first.names or ("",))[0]
    touch(coordinator, "any", "audit:a")
    with caches.request() as second:
        assert second.since != first.since
    mark = coordinator.mark(slots(["any"], coordinator.slot_count))
    with caches.request() as third:
        assert third.since is None
    coordinator.stamp(mark)
    with Caches(None).request() as fourth:
        assert fourth.since is None


def test_nothing_is_shared_before_the_last_change_has_settled(
    coordinator: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of a database that is behind may lack the change that it is named by."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(epochs, "time", clock)
    caches = Caches(coordinator, settle=3.0)
    assert not set(caches.seen().values()) & set(caches.seen().values())
    now += 3.0
    before = caches.seen()
    assert before == caches.seen()
    touch(coordinator, "any")
    with caches.request() as late:
        assert late.names is None
        now += 2.9
        assert not set(caches.seen().values()) & set(caches.seen().values())
        now += 0.1
        assert changed(before, caches.seen()) == {"token"}
        assert caches.looked_for()["token"] != caches.seen()["token"], "it began before"


def test_without_the_token_cache_keys_are_as_they_were() -> None:
    caches = Caches(None)
    assert caches.seen()["token"] == "TOKEN"
    assert caches.looked_for()["token"] == "TOKEN"


def test_caches_that_keep_nothing_cost_no_look() -> None:
    class NullBackend:
        pass

    def find() -> Any:
        raise AssertionError("asked")

    region = SimpleNamespace(name="tokens", key_mangler=None, actual_backend=NullBackend())
    request = Request()
    CacheNames([region], find).begin(request)
    assert set(request.names or ("none",)) == {""}

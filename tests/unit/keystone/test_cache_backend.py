"""What Keystone has computed, kept in the worker's memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dogpile")

from dogpile.cache import api, make_region
from dogpile.cache.backends.memory import MemoryPickleBackend
from dogpile.cache.proxy import ProxyBackend

from keyfront.gateway.keystone import cache_regions
from keyfront.gateway.keystone.cache_regions import FUNCTIONS, KINDS, LEFT_OUT, KeystoneMemory
from keyfront.middleware.tokens.request import Names, Request, current

PROJECT = "keystone.resource.core:get_project|p:1.5"
TOKEN = "keystone.token.provider:_validate_token|secret-token:1.5"
SHARED = ("1.5",) * len(KINDS)


class Model:
    """As Keystone's TokenModel."""

    def __init__(self, token: str) -> None:
        self.id: str | None = token
        self.audit_ids = ["a"]


def cached(payload: Any) -> Any:
    return api.CachedValue(payload, {"ct": 1.0, "v": 2})


@contextlib.contextmanager
def request(names: Names | None = SHARED) -> Iterator[Request]:
    one = Request()
    one.names = names
    token = current.set(one)
    try:
        yield one
    finally:
        current.reset(token)


@pytest.fixture
def memory() -> KeystoneMemory:
    return KeystoneMemory(1 << 20, 30.0)


def test_a_value_is_found_by_its_name_only(memory: KeystoneMemory) -> None:
    with request():
        memory.set(PROJECT, cached({"id": "p"}))
        assert memory.get(PROJECT).payload == {"id": "p"}
        assert memory.get(PROJECT.replace("1.5", "1.6")) is api.NO_VALUE
        assert memory.get_multi([PROJECT, "x"]) == [cached({"id": "p"}), api.NO_VALUE]
        memory.delete(PROJECT)
        assert memory.get(PROJECT) is api.NO_VALUE


def test_what_keystone_does_to_a_value_is_not_kept(memory: KeystoneMemory) -> None:
    with request():
        project = {"id": "p", "tags": []}
        memory.set(PROJECT, cached(project))
        project["id"] = "changed"
        memory.get(PROJECT).payload["tags"].append("more")
        assert memory.get(PROJECT).payload == {"id": "p", "tags": []}


@pytest.mark.parametrize("names", [None, ("",) * len(KINDS)])
def test_who_shares_no_names_shares_no_values(
    memory: KeystoneMemory, names: Names | None
) -> None:
    """After a change of its own, or where there is no token cache."""
    with request():
        memory.set(PROJECT, cached("shared"))
    with request(names):
        assert memory.get(PROJECT) is api.NO_VALUE
        memory.set(PROJECT, cached("own"))
    with request():
        assert memory.get(PROJECT).payload == "shared"


def test_nothing_is_kept_outside_of_requests(memory: KeystoneMemory) -> None:
    memory.set(PROJECT, cached("x"))
    with request():
        assert memory.get(PROJECT) is api.NO_VALUE


def test_a_value_ends(memory: KeystoneMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(cache_regions, "time", clock)
    with request():
        memory.set(PROJECT, cached("x"))
        clock.monotonic = lambda: 129.9
        assert memory.get(PROJECT).payload == "x"
        clock.monotonic = lambda: 130.1
        assert memory.get(PROJECT) is api.NO_VALUE


def test_no_token_is_kept(memory: KeystoneMemory) -> None:
    with request():
        model = Model("secret-token")
        memory.set(TOKEN, cached(model))
        assert model.id == "secret-token"
        assert memory.get(TOKEN).payload.id == "secret-token"
        ((key, value),) = memory._values._entries.items()
        assert b"secret-token" not in key + value.data


def test_a_token_under_another_key_is_not_kept(memory: KeystoneMemory) -> None:
    with request():
        memory.set(TOKEN, cached(Model("another")))
        assert memory.get(TOKEN) is api.NO_VALUE


def test_only_what_is_known_is_kept(memory: KeystoneMemory) -> None:
    with request():
        for function in (*LEFT_OUT, "keystone.new.core:get_secret"):
            memory.set(f"{function}|x:1.5", cached("x"))
            assert memory.get(f"{function}|x:1.5") is api.NO_VALUE


def test_memory_is_bounded(memory: KeystoneMemory) -> None:
    with request():
        for number in range(2000):
            memory.set(f"keystone.resource.core:get_project|{number}:1.5", cached("x" * 1000))
        assert memory._values.size <= 1 << 20
        assert memory.get("keystone.resource.core:get_project|1999:1.5").payload == "x" * 1000


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_may_be_from_the_past_is_not_stored(wrapped: bool) -> None:
    """In no backend, whichever it is; nor is what is stored already taken away."""
    region = make_region().configure("dogpile.cache.memory")
    if wrapped:
        region.wrap(ProxyBackend)
    cache_regions.use([region], KeystoneMemory(1 << 20, 30.0))
    kept = region.actual_backend._cache
    with request() as one:
        region.set("before", "x")
        one.unvouched = True
        region.set("after", "x")
        region.set_multi({"after": "x"})
        region.get_or_create("after", lambda: "x")
        assert region.get("before") == "x"
    assert set(kept) == {"before"}
    with request():
        region.set_multi({"another": "x"})
    assert set(kept) == {"before", "another"}


def test_what_may_be_from_the_past_is_not_stored_as_bytes_either() -> None:
    backend = MemoryPickleBackend({})
    region = make_region().configure("dogpile.cache.null")
    region.serializer = backend.serializer
    region.backend = backend
    cache_regions.use([region], KeystoneMemory(1 << 20, 30.0))
    with request() as one:
        region.set("before", "x")
        one.unvouched = True
        region.set("after", "x")
        region.set_multi({"after": "x"})
    assert set(backend._cache) == {"before"}


def test_each_function_that_keystone_caches_was_thought_of() -> None:
    """A new one is not kept until somebody has looked at it."""
    pytest.importorskip("keystone")
    import keystone.server.flask.core  # noqa: F401  (with all its managers)

    found = set()
    modules = [module for name, module in sys.modules.items() if name.startswith("keystone.")]
    for owner in [x for module in modules for x in vars(module).values() if isinstance(x, type)]:
        for value in vars(owner).values():
            original = getattr(value, "__wrapped__", None)
            if hasattr(value, "refresh") and original is not None:
                found.add(f"{original.__module__}:{original.__name__}")
    assert found == FUNCTIONS | LEFT_OUT.keys()
    assert not FUNCTIONS & LEFT_OUT.keys()


def test_what_is_made_of_a_value_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(cache_regions.time, "monotonic", lambda: now)
    memory = KeystoneMemory(1 << 20, 30.0)
    with request():
        memory.set(PROJECT, cached("old"))
    now = 1029.0
    with request():
        assert memory.get(PROJECT).payload == "old"
        memory.set(TOKEN, cached("made of it"))
        made_of = current.get()
        assert made_of is not None and made_of.until == 1030.0
    now = 1031.0
    with request():
        assert memory.get(PROJECT) is api.NO_VALUE
        assert memory.get(TOKEN) is api.NO_VALUE

"""stevedore's list of entry points, in one pass."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("stevedore._cache")

from stevedore import _cache

from keyfront.gateway.keystone import needless_imports

own = _cache._build_cacheable_data


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "_build_cacheable_data", own)


def test_it_is_what_stevedore_lists() -> None:
    listed = own()
    assert len(listed["groups"]) > 10
    if "path_values" not in listed:  # another release
        pytest.skip("this stevedore lists otherwise")
    assert needless_imports.cacheable_data() == listed


def test_all_entry_points_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint
    listed = [entry("a", "m:a", "g"), entry("b", "m:b", "h"), entry("a", "m:a", "g")]
    asked = []

    class EntryPoints(tuple):  # type: ignore[type-arg]
        def select(self, **parameters: Any) -> Any:
            raise AssertionError("once for each group")

    def read() -> Any:
        asked.append(read)
        return EntryPoints(listed)

    needless_imports.list_entry_points_once()
    if _cache._build_cacheable_data is own:  # another release
        pytest.skip("this stevedore lists otherwise")
    monkeypatch.setattr(importlib.metadata, "entry_points", read)
    assert _cache._build_cacheable_data()["groups"] == {
        "g": [("a", "m:a", "g")],
        "h": [("b", "m:b", "h")],
    }
    assert len(asked) == 1


def test_a_stevedore_that_does_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other() -> Any:
        found = SimpleNamespace(select=own, something_else=1)
        return found.select, found.something_else

    monkeypatch.setattr(_cache, "_build_cacheable_data", other)
    needless_imports.list_entry_points_once()
    assert _cache._build_cacheable_data is other

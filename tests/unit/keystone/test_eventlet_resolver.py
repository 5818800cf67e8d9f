"""eventlet's resolver is left out while Keystone is imported, and only then."""

from __future__ import annotations

import os

import pytest

from keyfront.gateway.keystone import needless_imports

VARIABLE = "EVENTLET_NO_GREENDNS"


def test_the_environment_is_afterwards_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ImportError), needless_imports.without_resolver():
        assert os.environ[VARIABLE] == "yes"
        raise ImportError
    assert VARIABLE not in os.environ


def test_what_the_operator_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no")
    with needless_imports.without_resolver():
        assert os.environ[VARIABLE] == "no"
    assert os.environ[VARIABLE] == "no"

"""keystone.token_info is a dict in every way a service may use it, and read only when it does."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from oslo_serialization import jsonutils, msgpackutils

from keyfront.middleware.tokens.authtoken import token_info
from keyfront.middleware.tokens.authtoken.token_info import TokenInfo, pack

BODY = {"user": {"id": "u"}, "catalog": [{"type": "x"}], "auth_token": "t", "version": "v3"}
DATA = {"token": BODY}


def made() -> TokenInfo:
    packed = pack(DATA, "t")
    assert packed is not None and b'"t"' not in packed
    return TokenInfo(packed, "t")


WAYS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda x: {"token": x["token"]},
    "get": lambda x: {"token": x.get("token"), **({"n": 1} if x.get("n", 1) != 1 else {})},
    "dict()": dict,
    "**": lambda x: {**x},
    "call": lambda x: (lambda **named: named)(**x),
    "|": lambda x: x | {},
    "right |": lambda x: {} | x,
    "items": lambda x: dict(x.items()),
    "keys": lambda x: {name: x[name] for name in x.keys()},  # noqa: SIM118
    "iteration": lambda x: {name: x[name] for name in x},
    "values": lambda x: {"token": next(iter(x.values()))},
    "copy": lambda x: x.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "json": lambda x: json.loads(json.dumps(x)),
    "json, indented": lambda x: json.loads(json.dumps(x, indent=1)),
    "json of what holds it": lambda x: json.loads(json.dumps({"in": [x]}))["in"][0],
    "jsonutils": lambda x: jsonutils.loads(jsonutils.dumps(x)),
    "to_primitive": jsonutils.to_primitive,
    "msgpack": lambda x: msgpackutils.loads(msgpackutils.dumps(x)),
    "pop": lambda x: {"token": x.pop("token")},
    "popitem": lambda x: dict([x.popitem()]),
    "setdefault": lambda x: {"token": x.setdefault("token", None)},
    "repr": lambda x: eval(repr(x)),
    "update of another": lambda x: (y := {}).update(x) or y,
    "assignment": lambda x: x.__setitem__("other", 1) or {"token": x["token"]},
    "deletion": lambda x: (dict(x), x.__delitem__("token"), x)[0],
    "|=": lambda x: {k: v for k, v in x.__ior__({"more": 1}).items() if k == "token"},
    "reversed": lambda x: {name: x[name] for name in reversed(x)},
    "match": lambda x: _matched(x),
}


def _matched(info: Any) -> Any:
    match info:
        case {"token": body}:
            return {"token": body}
    return None


@pytest.mark.parametrize("way", WAYS)
def test_it_is_a_dict(way: str) -> None:
    assert WAYS[way](made()) == DATA


def test_its_size_and_names_are_known_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    info = made()
    monkeypatch.setattr(token_info.json, "loads", None)
    assert len(info) == 1 and "token" in info and "x" not in info and bool(info)
    assert isinstance(info, dict)


def test_equality_and_hash() -> None:
    plain: dict[str, Any] = dict(DATA)
    assert made() == plain and made() == made() and plain == made()
    empty: dict[str, Any] = {}
    assert made() != empty and empty != made()
    with pytest.raises(TypeError):
        hash(made())


def test_what_is_changed_stays_changed() -> None:
    info = made()
    info["token"]["user"]["id"] = "other"
    assert info["token"]["user"]["id"] == "other"
    info.clear()
    assert info == {} and len(info) == 0
    info.update(token=1)
    assert info == {"token": 1}


def test_a_token_of_another_name_is_left_in() -> None:
    packed = pack({"token": {"auth_token": "another"}}, "t")
    assert packed is not None
    assert TokenInfo(packed, "t") == {"token": {"auth_token": "another"}}


@pytest.mark.parametrize("data", [{}, {"access": {}}, {"token": None}, {"token": {}, "x": 1}])
def test_what_is_no_token_is_not_packed(data: dict[str, Any]) -> None:
    assert pack(data, "t") is None

"""What a service finds in ``keystone.token_info``: a dict of its own, made when it is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, SupportsIndex

_TOKEN = "token"
# Where Keystone's client puts the token itself, which no validation holds.
_ITSELF = "auth_token"


def pack(data: dict[str, Any], token: str) -> bytes | None:
    """Return what :class:`TokenInfo` is made of; ``None`` if ``data`` is not ``{"token": {…}}``.

    The token itself is left out: no validation holds one.
    """
    body = data.get(_TOKEN)
    if len(data) != 1 or not isinstance(body, dict):
        return None
    return json.dumps(without(body, token), separators=(",", ":")).encode()


def without(body: dict[str, Any], token: str) -> dict[str, Any]:
    """Return the data of a token without the token itself, whose place :class:`TokenInfo` fills."""
    return {**body, _ITSELF: None} if body.get(_ITSELF) == token else body


class TokenInfo(dict[str, Any]):
    """``{"token": {…}}``, read from its packed form when it is first looked into.

    Services may change what they are given, down to the endpoints in the catalog, and some did;
    so each request has its own. Most never look, and pay nothing for a catalog of any size.

    :param packed: from :func:`pack`
    :param token: the token itself, stripped
    """

    __slots__ = ("_own_token", "_packed")

    def __init__(self, packed: bytes, token: str) -> None:
        # A key to be counted and found without reading anything. What asks for the value comes by
        # one of the methods below, C code included: it looks for them in classes that are not dict.
        dict.__setitem__(self, _TOKEN, None)
        self._packed: bytes | None = packed
        self._own_token = token

    def _read(self) -> None:
        packed = self._packed
        if packed is not None:
            self._packed = None
            body = json.loads(packed)
            if _ITSELF in body and body[_ITSELF] is None:
                body[_ITSELF] = self._own_token
            super().__setitem__(_TOKEN, body)

    def __getitem__(self, key: str) -> Any:
        self._read()
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._read()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._read()
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        # dict(info) copies without asking, unless this is here.
        self._read()
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        self._read()
        if isinstance(other, TokenInfo):
            other._read()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as a dict has none

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __ior__(self, other: Any) -> Any:
        self._read()
        return super().__ior__(other)

    def __repr__(self) -> str:
        self._read()
        return super().__repr__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def get(self, key: str, default: Any = None) -> Any:
        self._read()
        return super().get(key, default)

    def items(self) -> Any:
        self._read()
        return super().items()

    def values(self) -> Any:
        self._read()
        return super().values()

    def pop(self, *arguments: Any) -> Any:
        self._read()
        return super().pop(*arguments)

    def popitem(self) -> tuple[str, Any]:
        self._read()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read()
        return super().setdefault(key, default)

    def update(self, *arguments: Any, **more: Any) -> None:
        self._read()
        super().update(*arguments, **more)

    def clear(self) -> None:
        self._packed = None
        super().clear()

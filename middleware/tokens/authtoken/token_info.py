"""The forms in which a service is given a token: ``keystone.token_info`` and headers.

Headers are made once for a token; its data are packed, and unpacked for each request that asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, SupportsIndex

from keystonemiddleware.auth_token import _request

_TOKEN = "token"
# The name under which Keystone's client adds the token itself, which no validation holds.
_ITSELF = "auth_token"


def pack(data: dict[str, Any], token: str) -> bytes | None:
    """Return the packed form of a token's data, for :class:`TokenInfo`.

    :param data: the token's data
    :param token: the token itself, which is left out: no validation holds one
    :returns: JSON; ``None`` if ``data`` is not ``{"token": {…}}``
    :raises TypeError: JSON cannot hold the data
    """
    body = data.get(_TOKEN)
    if len(data) != 1 or not isinstance(body, dict):
        return None
    return json.dumps(without(body, token), separators=(",", ":")).encode()


def without(body: dict[str, Any], token: str) -> dict[str, Any]:
    """Return the data of a token without the token itself, which :class:`TokenInfo` adds again.

    :param body: the value of ``token`` in the token's data
    :param token: the token itself
    """
    return {**body, _ITSELF: None} if body.get(_ITSELF) == token else body


class TokenInfo(dict[str, Any]):
    """A token's data, ``{"token": {…}}``, unpacked when a service first looks into it.

    Services may change what they are given, down to the endpoints in the catalog, and some did;
    so each request has its own. Most never look, and pay nothing for a catalog of any size.

    :param packed: from :func:`pack`
    :param token: the token itself, stripped
    """

    __slots__ = ("_own_token", "_packed")

    def __init__(self, packed: bytes, token: str) -> None:
        # The key can be counted and found without unpacking. Access to the value goes through the
        # methods below, from C code too: for a subclass of dict it calls them.
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


Request = _request._AuthTokenRequest

#: The header of a system scope, which keystonemiddleware sets but does not remove from a request.
SYSTEM_SCOPE: str = Request._SYSTEM_SCOPE_HEADER

TOKEN_AUTH: str = Request._TOKEN_AUTH
TOKEN_INFO: str = Request._TOKEN_INFO


def _environ_name(header: str) -> str:
    return "HTTP_" + header.upper().replace("-", "_")


#: The names in a WSGI environment of all that only ``authtoken`` may tell a service.
STRIPPED = frozenset(map(_environ_name, (*Request.blank("/")._all_auth_headers(), SYSTEM_SCOPE)))


def ready(auth_ref: Any, *, catalog: bool) -> dict[str, str | None]:
    """Return the WSGI variables that keystonemiddleware sets for a confirmed token, by name.

    They are made by its own request object, so that names, deprecated names and the forms of values
    are its own.

    :param auth_ref: the token's ``keystoneauth1.access.AccessInfo``
    :param catalog: true to include the catalog
    """
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET"}
    request = Request(environ)
    request.user_token_valid = True
    request.set_user_headers(auth_ref)
    if catalog:
        request.set_service_catalog_headers(auth_ref)
    return {name: value for name, value in environ.items() if name.startswith("HTTP_")}

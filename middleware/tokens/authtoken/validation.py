"""A token that Keystone has confirmed, or refused, and how long that stands."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, SupportsIndex

from keystonemiddleware.auth_token import _request

from ..epochs import Epoch, Slots


class Standing(NamedTuple):
    """How long an answer of Keystone may be used."""

    #: Seconds of the monotonic clock.
    until: float
    #: Seconds since the epoch of the wall clock, when the token ends: a clock that is set forward
    #: ends what is known of it as well.
    expires: float
    #: What the coordinator is asked about at each use; ``None`` if there is none to ask.
    epoch: Epoch | None = None
    slots: Slots | None = None


@functools.lru_cache(maxsize=16)
def _without(names: frozenset[str]) -> frozenset[str]:
    """Return the headers that a token of this shape does not have: one set for all of it."""
    return STRIPPED - names


class Validation:
    """A confirmed token.

    :param ready: what the service finds of it in the WSGI environment
    :param packed: what ``keystone.token_info`` is made of
    :param plain: whether nothing of the request itself decides if the token may be used: neither
        a token bind nor access rules
    :param etag: names the answer for asking again, or ``None``
    :param ends: Unix time after which it is good for nothing, whatever Keystone says
    """

    __slots__ = ("absent", "ends", "etag", "packed", "plain", "ready", "size", "standing")

    def __init__(
        self,
        ready: dict[str, str | None],
        packed: bytes,
        *,
        plain: bool,
        etag: str | None,
        ends: float,
        standing: Standing,
    ) -> None:
        self.ready = ready
        #: What is to be taken off a request, besides what ``ready`` replaces.
        self.absent = _without(frozenset(ready))
        self.packed = packed
        self.plain = plain
        self.etag = etag
        self.ends = ends
        #: Replaced as a whole when Keystone says that the answer still stands.
        self.standing = standing
        # What Python needs for the rest, measured: objects, dict, strings, slots and the key.
        self.size = len(packed) + 4200 + sum(len(value or "") for value in ready.values())

    def data(self, token: str) -> TokenInfo:
        """Return the token's data for one request.

        :param token: the token itself, stripped
        """
        return TokenInfo(self.packed, token)


class Refusal:
    """A token that Keystone does not know."""

    __slots__ = ("size", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        # Measured as well.
        self.size = 350 if standing.slots is None else 700 + 50 * len(standing.slots)


# What a service finds in ``keystone.token_info``: a dict of its own, made when it is looked at.

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


# The headers that a service is given of a token, made once and not for each request.

Request = _request._AuthTokenRequest

#: What keystonemiddleware sets of a token's scope but does not take off a request beforehand.
SYSTEM_SCOPE: str = Request._SYSTEM_SCOPE_HEADER

TOKEN_AUTH: str = Request._TOKEN_AUTH
TOKEN_INFO: str = Request._TOKEN_INFO


def _environ_name(header: str) -> str:
    return "HTTP_" + header.upper().replace("-", "_")


#: The names in a WSGI environment of all that only ``authtoken`` may tell a service.
STRIPPED = frozenset(map(_environ_name, (*Request.blank("/")._all_auth_headers(), SYSTEM_SCOPE)))


def ready(auth_ref: Any, *, catalog: bool) -> dict[str, str | None]:
    """Return what keystonemiddleware puts into the WSGI environment for a token it has confirmed.

    By its own request object, so that names, deprecated names and the forms of values are its own.

    :param auth_ref: ``keystoneauth1.access.AccessInfo`` of the token
    :param catalog: whether the service is told the catalog
    """
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET"}
    request = Request(environ)
    request.user_token_valid = True
    request.set_user_headers(auth_ref)
    if catalog:
        request.set_service_catalog_headers(auth_ref)
    return {name: value for name, value in environ.items() if name.startswith("HTTP_")}

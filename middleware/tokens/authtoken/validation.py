"""A token that Keystone has confirmed or refused, and the end of that answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, SupportsIndex

from keystonemiddleware.auth_token import _request

from ..epochs import Epoch, Slots


class Standing(NamedTuple):
    """The end of an answer of Keystone, and the epoch by which it stands."""

    #: Seconds of the monotonic clock.
    until: float
    #: Unix time when the token ends: a wall clock that is set forward ends the answer as well.
    expires: float
    #: The epoch and slots that the coordinator checks at each use; ``None`` without a coordinator.
    epoch: Epoch | None = None
    slots: Slots | None = None


@functools.lru_cache(maxsize=16)
def _without(names: frozenset[str]) -> frozenset[str]:
    """Return the headers that a token with these headers lacks: one set for all such tokens."""
    return STRIPPED - names


class Validation:
    """A confirmed token.

    :param ready: the WSGI variables that the service is given of the token, by name
    :param packed: the packed data of ``keystone.token_info``, from :func:`pack`
    :param plain: true if the token may be used for any request: it has neither a bind that must be
        checked nor access rules
    :param etag: the ETag of the answer, for asking again; ``None`` without one
    :param ends: Unix time after which the token may not be used, whatever Keystone says
    :param standing: the end of the answer
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
        #: The WSGI variables to be removed from a request, besides those that ``ready`` replaces.
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
        """Return the token's data for one request: ``{"token": {…}}``.

        :param token: the token itself, stripped
        """
        return TokenInfo(self.packed, token)


class Refusal:
    """A token that Keystone does not know.

    :param standing: the end of the answer
    """

    __slots__ = ("size", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        # Measured as well.
        self.size = 350 if standing.slots is None else 700 + 50 * len(standing.slots)


# The value of ``keystone.token_info``: each request's own dict, made when a service looks into it.

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


# The headers that a service is given of a token, made once and not for each request.

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

"""What Keystone keeps in caches of its own, named after the state in which it was made.

With ``[cache]`` on memcached, Keystone 30 goes on serving what a change has replaced: it deletes a
value before another worker, which read the old row, stores it again; or it does not delete it at
all. So here the name of a value carries the epoch. Values are not deleted but no longer found, so
it does not matter who stores what how late:

* A request takes all its names together when it begins, before it reads anything. What it stores,
  however late, has the name of the state that it may have read.
* After a change of its own it may hold something from before that change, or from before another
  one that came in between. What it stores then has a name that nobody else looks for.
* While a change is under way, or where the epochs are not known, the same; and where the database
  may be behind, until it has shown the last change.

What is read of a database that may answer from the past is not stored at all, see ``Vouched`` in
this file: its name would be that of the present.

Which changes a name goes by depends on what is kept: the families of tables that the function reads
whose values they are. So a user who changes what is his own (application credentials, trusts,
credentials) does not empty what is kept of projects, roles, users and the catalog for all others.
Tokens, receipts and revocations go by every change.
"""

from __future__ import annotations

import copy
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Final

from dogpile.cache.api import NO_VALUE, CacheBackend, CacheMutex
from dogpile.cache.backends.null import NullBackend
from dogpile.cache.proxy import ProxyBackend

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import DIRTY, Coordinator, Epoch, Settling
from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT, FIXED
from keyfront.middleware.tokens.lru_cache import Memory
from keyfront.middleware.tokens.request import Names, Request, current

Find = Callable[[], Coordinator | None]

_PEOPLE = ("users", "groups", "mappings", "federation")

#: The tags that each kind of value goes by, besides ``all``.
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "any": (ANY,),
    "content": (CONTENT,),
    "people": _PEOPLE,
    "projects": ("projects",),
    "assignments": ("grants", "members", "roles", "projects", *_PEOPLE),
    "catalog": ("catalog", "projects"),
    "federation": ("federation",),
    "limits": ("limits", "catalog", "projects"),
    "credentials": ("credentials",),
    "appcreds": ("appcreds", "users", "projects", "roles"),
}

#: Regions of Keystone's cache in which every change counts, by their names.
_BY_REGION: Final = dict.fromkeys(("tokens", "revoke", "receipts"), "any")

#: The kind of what a function keeps, by its module; of others, ``content``.
_BY_MODULE: Final[Mapping[str, str]] = {
    "keystone.application_credential.core": "appcreds",
    "keystone.assignment.core": "assignments",
    "keystone.catalog.core": "catalog",
    "keystone.credential.core": "credentials",
    "keystone.federation.core": "federation",
    "keystone.identity.core": "people",
    "keystone.limit.core": "limits",
    "keystone.resource.core": "projects",
}

_PLACES = {kind: place for place, kind in enumerate(KINDS)}
_READ = tuple(itemgetter(*(FIXED.index(tag) for tag in (ALL, *tags))) for tags in KINDS.values())

#: Where there is no token cache: Keystone's caches stay as they are.
_NONE: Names = ("",) * len(KINDS)


class CacheNames:
    """The names of one Keystone.

    :param regions: its cache regions (dogpile), each with a ``key_mangler`` through which a key
        goes once; their keys begin with the module of the function whose values they are
    :param find: returns the coordinator; ``None`` where the token cache is not in use
    :param settle: seconds by which the database may be behind
    """

    def __init__(self, regions: Iterable[Any], find: Find, settle: float = 0.0) -> None:
        self._find = find
        self._settling = Settling(settle)
        self._in_use = False
        for region in regions:
            self._in_use |= not _keeps_nothing(region)
            region.key_mangler = self._mangler(region)

    def begin(self, request: Request) -> None:
        """Take the names of a request, before it reads anything."""
        request.names = self._names() if self._in_use else _NONE
        if request.names is not None and request.names is not _NONE:
            request.since = request.names[0]

    def _names(self) -> Names | None:
        try:
            coordinator = self._find()
            if coordinator is None:
                return _NONE
            generation, numbers = coordinator.snapshot()
        except CoordinatorError:
            return None
        newest = [max(read(numbers)) for read in _READ]
        last = max(newest)
        if last == DIRTY or last > self._settling.settled(Epoch(generation, last)).sequence:
            return None
        return tuple(f"{generation:x}.{number:x}" for number in newest)

    def _mangler(self, region: Any) -> Callable[[str], str]:
        mangle = region.key_mangler
        fixed = _BY_REGION.get(region.name)

        def key_mangler(key: str) -> str:
            request = current.get()
            # Outside of a request nobody knows when its beginning was.
            names = self._outside() if request is None else request.names
            kind = fixed or _BY_MODULE.get(key.partition(":")[0], "content")
            if request is not None and request.reading:
                request.reads.update(KINDS[kind])
            if names is not None:
                name = names[_PLACES[kind]]
            else:
                name = request.own_name if request is not None else ""
                if not name:
                    name = secrets.token_hex(8)
                    if request is not None:
                        request.own_name = name
            if name:
                key = f"{key}:{name}"
            return mangle(key) if mangle is not None else key

        return key_mangler

    def _outside(self) -> Names | None:
        names = self._names()
        return names if names is _NONE else None


def _keeps_nothing(region: Any) -> bool:
    return type(getattr(region, "actual_backend", None)).__name__ == "NullBackend"


# What Keystone has once computed, kept in the memory of the worker where it keeps nothing itself.
#
# By default Keystone's caches are on and their backend is null: each login and first validation
# reads the same roles, projects, domains, users and catalog again. This backend (of dogpile.cache)
# takes its place. Exactness is that of the names of what is kept; what no
# name shows, such as a change in LDAP, is bounded by ``ttl``.
#
# Only what functions return that are known is kept: none whose value is a secret, and no token.

_CORE = "keystone.{}.core:{}"

#: The functions of Keystone whose values are kept.
FUNCTIONS = frozenset(
    {
        *(_CORE.format("identity", x) for x in ("get_user", "get_user_by_name", "get_group")),
        *(_CORE.format("identity", x) for x in ("_get_public_id", "get_id_mapping")),
        *(_CORE.format("resource", x) for x in ("get_domain", "get_domain_by_name")),
        *(_CORE.format("resource", x) for x in ("get_project", "get_project_by_name")),
        *(
            _CORE.format("assignment", x)
            for x in (
                "get_role",
                "get_roles_for_user_and_project",
                "get_roles_for_trustor_and_project",
                "get_roles_for_user_and_domain",
                "list_projects_for_user",
                "list_domains_for_user",
                "list_role_assignments",
            )
        ),
        *(_CORE.format("catalog", x) for x in ("get_region", "get_service", "get_endpoint")),
        _CORE.format("catalog", "get_v3_catalog"),
        _CORE.format("federation", "get_enabled_service_providers"),
        _CORE.format("revoke", "_list_events"),
        "keystone.token.provider:_validate_token",
        "keystone.token.provider:check_revocation_v3",
    }
)

#: Those that are not, with the reason.
LEFT_OUT: Mapping[str, str] = {
    _CORE.format("identity", "_shadow_nonlocal_user"): "it writes",
    _CORE.format("resource", "get_config_with_sensitive_info"): "passwords of directories",
    _CORE.format("credential", "_get_credential"): "secrets",
    _CORE.format("credential", "_list_credentials_for_user"): "secrets",
    _CORE.format("application_credential", "get_application_credential"): "hashes of secrets",
    _CORE.format("application_credential", "get_access_rule"): "asked for once in a while",
    _CORE.format("limit", "get_limit"): "asked for once in a while",
    _CORE.format("limit", "get_registered_limit"): "asked for once in a while",
    "keystone.receipt.provider:_validate_receipt": "used once",
}


class _NoLock(CacheMutex):
    def acquire(self, wait: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return False


class _Value:
    """A value, pickled: Keystone changes what it is given."""

    __slots__ = ("data", "deadline", "size")

    def __init__(self, data: bytes, deadline: float) -> None:
        self.data = data
        self.deadline = deadline
        # With the object, the key and their places in dicts.
        self.size = len(data) + 400


class KeystoneMemory(CacheBackend):
    """A backend for all of Keystone's cache regions.

    :param limit: bytes
    :param ttl: seconds for which a value is kept at most
    """

    def __init__(self, limit: int, ttl: float) -> None:
        self._values: Memory[_Value] = Memory(limit)
        self._ttl = ttl
        # Keys may hold tokens.
        self._hash = blake2b(digest_size=16, key=os.urandom(32))

    def get_mutex(self, key: str) -> _NoLock:
        """Return a lock that is none: who computes a value waits for nobody."""
        return _NoLock()

    def get(self, key: str) -> Any:
        """Return the value as it was set, or ``NO_VALUE``."""
        request = _sharing()
        found = None if request is None else self._values.get(self._digest(key))
        if request is None or found is None or time.monotonic() > found.deadline:
            return NO_VALUE
        # What is made of it ends with it.
        request.until = min(request.until, found.deadline)
        value = pickle.loads(found.data)
        if _is_token(value.payload):
            value.payload.id = _argument(key)
        return value

    def set(self, key: str, value: Any) -> None:
        """Keep a value, if it is one of those that are kept."""
        request = _sharing()
        if request is None or key.partition("|")[0] not in FUNCTIONS:
            return
        if _is_token(value.payload):
            if value.payload.id != _argument(key):
                return
            without = copy.copy(value.payload)
            without.id = None
            value = value._replace(payload=without)
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        deadline = min(time.monotonic() + self._ttl, request.until)
        self._values.put(self._digest(key), _Value(data, deadline))

    def delete(self, key: str) -> None:
        """Forget a value."""
        self._values.drop(self._digest(key))

    def get_multi(self, keys: Iterable[str]) -> list[Any]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def set_multi(self, mapping: Mapping[str, Any]) -> None:
        """Keep several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def delete_multi(self, keys: Iterable[str]) -> None:
        """Forget several values."""
        for key in keys:
            self.delete(key)

    def _digest(self, key: str) -> bytes:
        keyed = self._hash.copy()
        keyed.update(key.encode("utf-8", "surrogatepass"))
        return keyed.digest()


def _sharing() -> Request | None:
    """Return the present request if it has names that others have, too."""
    request = current.get()
    return request if request is not None and request.names and request.names[0] else None


def _is_token(payload: object) -> bool:
    return hasattr(payload, "audit_ids")


def _argument(key: str) -> str:
    """Return the argument of a function of one, from the key of its value."""
    return key.partition("|")[2].partition(":")[0]


class Vouched(ProxyBackend):
    """Stores nothing for a request that may have read the past; it stands before a backend.

    What the request has read before that it has stored already. The name of a value is taken
    before the value is read, so that it cannot tell.
    """

    def set(self, key: Any, value: Any) -> None:
        """Store a value."""
        if _vouched():
            self.proxied.set(key, value)

    def set_multi(self, mapping: Any) -> None:
        """Store several values."""
        if _vouched():
            self.proxied.set_multi(mapping)

    def set_serialized(self, key: Any, value: Any) -> None:
        """Store a value of a backend that takes bytes."""
        if _vouched():
            self.proxied.set_serialized(key, value)

    def set_serialized_multi(self, mapping: Any) -> None:
        """Store several of them."""
        if _vouched():
            self.proxied.set_serialized_multi(mapping)


def _vouched() -> bool:
    request = current.get()
    return request is None or not request.unvouched


def use(regions: Iterable[Any], memory: KeystoneMemory) -> None:
    """Let Keystone's regions keep their values in ``memory`` where their backend keeps nothing.

    Their keys are no longer mangled: a hash shows no function, and the random name by which
    Keystone empties a region would be another one in each request.

    Whatever the backend is, it is given nothing that may be from the past.

    :param regions: cache regions that are configured
    """
    for region in regions:
        outer: Any = getattr(region, "backend", None)
        while hasattr(getattr(outer, "proxied", None), "proxied"):
            outer = outer.proxied
        backend = getattr(outer, "proxied", None)
        if isinstance(backend, NullBackend):
            backend = memory
            region.key_mangler = None
        if backend is not None:
            # Right before it: what Keystone keeps for one request only goes on.
            outer.proxied = Vouched().wrap(backend)
        elif outer is not None:
            region.backend = Vouched().wrap(outer)

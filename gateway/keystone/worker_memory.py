"""A cache backend in the worker's memory, for Keystone's caches that have no backend of their own.

By default Keystone's caches are on and their backend is null: each login and first validation
reads the same roles, projects, domains, users and catalog again. This backend (of dogpile.cache)
takes its place. Each value is kept with the tags of the rows that it was made of, by the
statements that were executed and the values that were found while it was computed. It is used
as long as none of them has changed, as an answer in ``TokenCache``: a user who is created
elsewhere ends only values that show all users. A value that was read from a directory is used as
long as that is followed (``directory_invalidation.py``); changes that nothing announces are bounded
by ``ttl``.

Only values of known functions are kept: none that is a secret, and no token.

The workers share their values in the mapped file of :class:`.NodeCache`. They are signed, as
answers are, so that only bytes that one of them has pickled are unpickled.
"""

from __future__ import annotations

import copy
import functools
import marshal
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import NoneType
from typing import Any, Final, NamedTuple

from dogpile.cache.api import NO_VALUE, CacheBackend, CachedValue, CacheMutex
from dogpile.cache.backends.null import NullBackend
from dogpile.cache.proxy import ProxyBackend

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.directory_leases import leases
from keyfront.middleware.tokens.epochs import Epoch, Slots, View, slots
from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT, FIXED
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.node_cache import NodeCache
from keyfront.middleware.tokens.request import Fill, Request, current, token_tags
from keyfront.middleware.tokens.worker_cache import LRUCache

from .cache_regions import own_mangler, told_apart, without_own_name
from .values_by_rows import ByRows, emptied_by_others

_FIXED = {tag: place for place, tag in enumerate(FIXED)}

_CORE = "keystone.{}.core:{}"

#: The functions of Keystone whose values are kept.
FUNCTIONS = frozenset(
    {
        *(_CORE.format("identity", x) for x in ("get_user", "get_user_by_name", "get_group")),
        *(_CORE.format("identity", x) for x in ("_get_public_id", "get_id_mapping")),
        # It makes a user who is new to Keystone: then the request shares nothing.
        _CORE.format("identity", "_shadow_nonlocal_user"),
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

#: Functions of Keystone's drivers that Keystone itself does not cache. Their values are the same
#: for all users, and asked for at the first login of each, or for all projects of one.
DRIVERS: Final = frozenset(
    {
        "keystone.assignment.backends.sql:list_role_assignments",
        "keystone.assignment.core:_get_group_ids_for_user_id",
        "keystone.assignment.role_backends.sql:list_implied_roles",
        "keystone.resource.backends.sql:list_project_parents",
        "keystone.catalog.backends.sql:get_v3_catalog",
        # A method of a model: from the kept grants and roles, each time that a token is read.
        "keystone.models.token_model:_get_project_roles",
    }
)

# Functions whose values the workers do not share: the catalog of a user is large, and that of a
# project is shared by DRIVERS; the revocations of a token are looked up sooner than shared.
_REVOCATION = "keystone.token.provider:check_revocation_v3"
_OF_EACH = frozenset({_CORE.format("catalog", "get_v3_catalog"), _REVOCATION})
_KEYS_OF_EACH = tuple(f"{function}|" for function in _OF_EACH)

# Functions whose values are mostly computed for another value, which is kept, so that nobody asks
# for them again; with the beginnings of the keys of those other values.
_ROLES = "keystone.models.token_model:_get_project_roles|"
_INNER = {
    _CORE.format("assignment", "list_role_assignments"): (
        _CORE.format("assignment", "get_roles_for_"),
        _ROLES,
    ),
    _CORE.format("assignment", "get_roles_for_user_and_project"): (_ROLES,),
}

# The catalog of a user is that of the project, where no URL names a user.
_CATALOG = _CORE.format("catalog", "get_v3_catalog")
_CATALOG_OF_PROJECT = "keystone.catalog.backends.sql:get_v3_catalog|{!r}"

#: Cached functions of Keystone whose values are not kept, with the reason.
LEFT_OUT: Mapping[str, str] = {
    _CORE.format("resource", "get_config_with_sensitive_info"): "passwords of directories",
    _CORE.format("credential", "_get_credential"): "secrets",
    _CORE.format("credential", "_list_credentials_for_user"): "secrets",
    _CORE.format("application_credential", "get_application_credential"): "asked for seldom",
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


class _NoLocks:
    """A registry of no locks, in place of dogpile.cache's, which itself takes a lock."""

    def __init__(self) -> None:
        self._lock = _NoLock()

    def get(self, key: str) -> _NoLock:
        return self._lock


@functools.lru_cache(maxsize=1024)
def _reader(families: frozenset[str]) -> Callable[[Any], tuple[int, ...]]:
    return Slots(_FIXED[tag] for tag in {ALL, *families}).read


class _Value:
    """A value, pickled, as Keystone changes objects that it gets. Empty data: it was deleted.

    What dogpile.cache notes with it is kept beside it: a named tuple of both takes longer to
    unpickle than most values.
    """

    __slots__ = ("data", "deadline", "epoch", "metadata", "read", "reads", "size", "slots")

    def __init__(
        self,
        data: bytes,
        metadata: dict[str, Any],
        deadline: float,
        epoch: Epoch,
        reads: Reads,
        slots: Slots,
    ) -> None:
        self.data = data
        self.metadata = metadata
        self.deadline = deadline
        self.epoch = epoch
        self.reads = reads
        self.slots = slots
        #: The function that picks the numbers of its families out of those of the fixed tags.
        self.read = _reader(reads.families)
        # With the object, the key, tags, slots and their places in dicts.
        self.size = len(data) + 800 + 100 * len(reads.tags)

    def pack(self) -> bytes:
        """Return the value as bytes, for the memory that the workers share."""
        parts = (
            *(self.data, self.metadata, self.deadline, tuple(self.epoch)),
            *(tuple(self.reads), tuple(self.slots)),
        )
        return marshal.dumps(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> _Value:
        """Return the value that another worker has packed.

        :raises ValueError: a worker of another build has packed it in another form; so do EOFError,
            LookupError and TypeError
        """
        data, metadata, deadline, epoch, reads, slots = marshal.loads(packed)
        return cls(data, metadata, deadline, Epoch(*epoch), Reads(*reads), Slots(slots))

    def stands(self, view: View) -> bool:
        """Return whether nothing that it was made of has changed up to a view."""
        generation, sequence = self.epoch
        if generation != view.seen.generation:
            return False
        if self.reads.followed and (
            leases.leases is None or not leases.leases.stand(self.reads.followed)
        ):
            return False
        if max(self.read(view.numbers)) <= sequence:
            return True
        # A family of tables has changed; the slots tell whether that concerns this value.
        if not view.coordinator.fresh_now(self.epoch, self.slots):
            return False
        self.epoch = max(self.epoch, view.seen)
        return True


class NotKept(NamedTuple):
    """A value that may be used in this request only."""

    value: Any


class KeystoneMemory(CacheBackend):
    """A backend for all of Keystone's cache regions; :class:`Noting` has to stand before it.

    :param limit: bytes of values in this process
    :param ttl: seconds for which a value is kept at most
    :param node: a function that returns the memory of the workers; ``None`` if they share nothing
    :param form: a text that is equal in workers that may share values
    """

    def __init__(
        self,
        limit: int,
        ttl: float,
        node: Callable[[], NodeCache | None] = lambda: None,
        form: str = "",
    ) -> None:
        self._values: LRUCache[_Value] = LRUCache(limit)
        self._ttl = ttl
        self._node = node
        self._form = form
        # Keys may hold tokens.
        self._hash = blake2b(digest_size=16, key=os.urandom(32))

    def get_mutex(self, key: str) -> _NoLock:
        """Return a lock that never waits: a value may be computed twice at once."""
        return _NoLock()

    def get(self, key: str) -> Any:
        """Return the value of a key that stands, as it was set; else ``NO_VALUE``."""
        request = current.get()
        found = None if request is None else self.find(request, key)
        return NO_VALUE if found is None else CachedValue(found[0], found[1].copy())

    def find(self, request: Request, key: str) -> tuple[Any, dict[str, Any]] | None:
        """Return the value of a key that stands, and what is noted with it; else ``None``."""
        kept = request.values.get(key)
        if kept is None:
            found = self._found(request, key)
            if found is None:
                return None
            # An answer that is made of it ends with it.
            request.until = min(request.until, found.deadline)
            request.kept[key] = found.reads
            kept = request.values[key] = found.data, found.metadata
        payload = pickle.loads(kept[0])
        if type(payload) not in _PLAIN and _is_token(payload) and payload.id is None:
            payload.id = _argument(key)
        return payload, kept[1]

    def _found(self, request: Request, key: str) -> _Value | None:
        """Return the kept value if it stands in the state in which a request began."""
        if request.view is None:
            return None
        digest = self._digest(key)
        found = self._values.get(digest)
        if found is not None and time.monotonic() > found.deadline:
            found = None
        if found is not None and not found.data:
            return None  # it was deleted
        if found is None or not found.stands(request.view):
            found = self._of_another(key)
            if found is None or not found.stands(request.view):
                return None
            self._values.put(digest, found)
        return found

    def set(self, key: str, value: Any) -> None:
        """Keep a value for the present request, and for others if its function is one of
        :data:`FUNCTIONS` or :data:`DRIVERS` and its reads are known."""
        request = current.get()
        if request is None:
            return
        function = key.partition("|")[0]
        if request.view is not None and _is_kept_elsewhere(request, key, function):
            return
        payload, metadata = value.payload, value.metadata
        is_token = _is_token(payload) and payload.id == _argument(key)
        if is_token:
            # The key has it: whoever gets the value is given it anew.
            payload = copy.copy(payload)
            payload.id = None
        data = pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)
        request.values[key] = data, metadata
        if (
            request.view is None
            or request.unvouched
            or request.view.settled.sequence < 0
            or not (function in FUNCTIONS or function in DRIVERS)
            # A token that is being issued will hardly be checked again.
            or (request.issuing and function == _REVOCATION)
        ):
            return
        reads = request.kept.get(key)
        if _is_token(value.payload):
            # The model of an OAuth access token may hold the token's secret.
            if not is_token or _is_of_oauth(value.payload):
                return
            reads = _of_token(value.payload, reads)
        if reads is None:
            return
        request.kept[key] = reads
        view = request.view
        try:
            found = slots({ALL, *reads.tags}, view.coordinator.slot_count)
        except CoordinatorError:
            return
        deadline = min(time.monotonic() + self._ttl, request.until)
        kept = _Value(data, metadata, deadline, view.settled, reads, found)
        self._values.put(self._digest(key), kept)
        node = self._node()
        if node is not None and function not in _OF_EACH:
            self._share(request, node, self._form + key, kept.pack())

    @staticmethod
    def _share(request: Request | None, node: NodeCache, name: str, packed: bytes) -> None:
        if request is None or request.shared is None:
            node.keep_value(name, packed)
        else:
            request.shared.append((name, packed))

    def _of_another(self, key: str) -> _Value | None:
        """Return the value that another worker has shared; ``None`` without one."""
        if key.startswith(_KEYS_OF_EACH):
            return None
        node = self._node()
        packed = None if node is None else node.value(self._form + key)
        if packed is None:
            return None
        try:
            found = _Value.unpack(packed)
        except (EOFError, LookupError, TypeError, ValueError):
            # Of another form under the same number: it is computed anew, and so replaced.
            return None
        return None if time.monotonic() > found.deadline else found

    def of_state(self, what: str, state: str) -> Any:
        """Return what a worker keeps of a state of the database; ``None`` if nobody does.

        :param state: a name of it, see :func:`~.cache_regions.name_of`
        """
        node = self._node()
        packed = None if node is None else node.value(f"{self._form}{what} {state}")
        found = None if packed is None else pickle.loads(packed)
        return None if found is None or time.monotonic() > found[-1] else found

    def keep_of_state(self, what: str, state: str, value: tuple[Any, ...]) -> None:
        """Keep something for all workers that holds as long as a state has its name.

        :param state: its name, as :meth:`of_state` takes it
        :param value: its last element is the end of it, in seconds of the monotonic clock
        """
        node = self._node()
        if node is not None:
            packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            self._share(current.get(), node, f"{self._form}{what} {state}", packed)

    def computed(self, function: str, argument: object, compute: Callable[[], Any]) -> Any:
        """Return the kept value of a driver's function, or compute and keep it.

        :param function: one of :data:`DRIVERS`
        :param argument: the argument on which the value depends, besides the database
        :param compute: the function that computes the value; it is kept, unless it is a
            :class:`NotKept`
        """
        request = current.get()
        if request is None or request.view is None:
            value = compute()
            return value.value if isinstance(value, NotKept) else value
        key = f"{function}|{argument!r}"
        found = self.find(request, key)
        if found is not None:
            request.note(request.kept[key])
            return found[0]
        request.fills.append(Fill(key))
        value = compute()
        reads = _end_fill(request, key)
        assert reads is not None, "it was begun here"
        request.note(reads)
        if isinstance(value, NotKept):
            return value.value
        if _vouched():
            request.kept[key] = reads
            self.set(key, CachedValue(value, {}))
        return value

    def delete(self, key: str) -> None:
        """Delete a value: it is not found here until it is set again."""
        request = current.get()
        if request is not None:
            request.values.pop(key, None)
        key = without_own_name(key)
        # An empty value in its place, so that it is not taken from the workers' memory either.
        deadline = time.monotonic() + self._ttl
        reads = Reads(frozenset(), frozenset())
        nothing = _Value(b"", {}, deadline, Epoch(0, 0), reads, Slots((0,)))
        self._values.put(self._digest(key), nothing)

    def get_multi(self, keys: Iterable[str]) -> list[Any]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def set_multi(self, mapping: Mapping[str, Any]) -> None:
        """Keep several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def delete_multi(self, keys: Iterable[str]) -> None:
        """Delete several values."""
        for key in keys:
            self.delete(key)

    def _digest(self, key: str) -> bytes:
        keyed = self._hash.copy()
        keyed.update(key.encode("utf-8", "surrogatepass"))
        return keyed.digest()


def _is_kept_elsewhere(request: Request, key: str, function: str) -> bool:
    """Return whether a value is part of another kept one, so that it need not be kept itself."""
    if function == _CATALOG:
        return _CATALOG_OF_PROJECT.format(key.rpartition(" ")[2]) in request.kept
    outer = _INNER.get(function)
    return outer is not None and any(fill.key.startswith(outer) for fill in request.fills)


# Mostly a value is one of these, and no token.
_PLAIN = frozenset({dict, list, str, NoneType})


def _is_token(payload: object) -> bool:
    return hasattr(payload, "audit_ids")


def _is_of_oauth(model: Any) -> bool:
    return bool(getattr(model, "access_token_id", True))


def _argument(key: str) -> str:
    """Return the argument of a function with one argument, from the key of its value."""
    return key.partition("|")[2].partition(":")[0]


def _of_token(model: Any, reads: Reads | None) -> Reads | None:
    """Return the reads of a token: the tags of its validations, and the reads that were noted.

    A token that has just been issued is kept without having been read.
    """
    try:
        tags = frozenset(token_tags(model))
    except (AttributeError, KeyError, TypeError, ValueError):
        return reads
    # Every change that can matter has the tag ``any``.
    if reads is None:
        # The login has asked the user's directory, if he is in one.
        request = current.get()
        followed = frozenset(() if request is None else request.followed)
        return Reads(frozenset({ANY}), tags, followed)
    return Reads(frozenset({ANY}), tags | reads.tags, reads.followed)


#: The check of a token against revocations.
_REVOKED = f"{_REVOCATION}|"

# The reads of a value whose reads nobody has noted.
_UNKNOWN = Reads(frozenset({ANY}), frozenset({ANY, CONTENT}))


class Noting(ProxyBackend):
    """A proxy before all others, which notes the reads of each value while it is computed.

    It also stands before Keystone's request-local cache: values that are found there count as well.
    """

    def get(self, key: Any) -> Any:
        """Return a value and note its reads; without one, expect it to be computed."""
        value = self.proxied.get(key)
        self._looked_for(key, value)
        return value

    def get_serialized(self, key: Any) -> Any:
        """Return a value as bytes, otherwise as :meth:`get`."""
        value = self.proxied.get_serialized(key)
        self._looked_for(key, value)
        return value

    def set(self, key: Any, value: Any) -> None:
        """Store a value that was computed, and note its reads."""
        self._computed(key)
        self.proxied.set(key, value)

    def set_serialized(self, key: Any, value: Any) -> None:
        """Store a value that is given as bytes, otherwise as :meth:`set`."""
        self._computed(key)
        self.proxied.set_serialized(key, value)

    @staticmethod
    def _looked_for(key: Any, value: Any) -> None:
        request = current.get()
        if request is not None and not request.as_it_is:
            if value is not NO_VALUE:
                request.note(request.kept.get(key, _UNKNOWN))
            elif not request.fills or request.fills[-1].key != key:
                # dogpile.cache looks twice.
                request.fills.append(Fill(key))

    @staticmethod
    def _computed(key: Any) -> None:
        request = current.get()
        if request is not None and not request.as_it_is:
            reads = _end_fill(request, key)
            if reads is not None:
                request.kept[key] = reads
                request.note(reads)
            else:
                # The noted reads are of a former value.
                request.kept.pop(key, None)


def _end_fill(request: Request, key: str) -> Reads | None:
    """Return the reads of a value that was computed; ``None`` if nobody noted its beginning."""
    fills = request.fills
    if all(fill.key != key for fill in fills):
        return None
    families: set[str] = set()
    tags: set[str] = set()
    followed: set[str] = set()
    while True:
        # Values further in were not kept: they failed, or are not to be kept.
        fill = fills.pop()
        families |= fill.families
        tags |= fill.tags
        followed |= fill.followed
        if fill.key == key:
            break
    if ANY in tags and CONTENT not in tags and key.startswith(_REVOKED):
        try:
            tags = (tags - {ANY}) | set(token_tags(request.checked))
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
    return Reads(frozenset(families), frozenset(tags), frozenset(followed))


class NotedAsCheck:
    """Notes what is read in its block as a check of a token against revocations that is kept.

    Such a check depends on what the token depends on, where by itself it would on each change.

    :param request: the notes on the request
    """

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        """Begin to note."""
        self._request.fills.append(Fill(_REVOKED))

    def __exit__(self, *error: object) -> None:
        """Note what was read for whoever waits for the check."""
        reads = _end_fill(self._request, _REVOKED)
        if reads is not None:
            self._request.note(reads)


class Vouched(ProxyBackend):
    """A proxy before a backend, which stores nothing for a request that may have read the past.

    Values that the request had read before that are stored already. The number of a value is taken
    before the value is read, so it does not show that the value is old.
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
        """Store a value that is given as bytes."""
        if _vouched():
            self.proxied.set_serialized(key, value)

    def set_serialized_multi(self, mapping: Any) -> None:
        """Store several values that are given as bytes."""
        if _vouched():
            self.proxied.set_serialized_multi(mapping)


def _vouched() -> bool:
    request = current.get()
    return request is None or not request.unvouched


def _made_of(payload: Any, reads: Reads | None) -> Reads | None:
    return _of_token(payload, reads) if _is_token(payload) else reads


def _reads_rows_only(function: str) -> bool:
    return function in FUNCTIONS or function in LEFT_OUT


def use(
    regions: Iterable[Any],
    memory: KeystoneMemory | None,
    is_absent: Callable[[], bool] = lambda: False,
) -> bool:
    """Make Keystone's cache regions keep their values in ``memory`` where their backend is null.

    Their keys are then mangled by us only: a hash shows no function, and the random name by which
    Keystone empties a region would be another one in each request.

    Another backend is given no value that may be from the past, and none of its values is used
    longer than the rows stand that it was made of.

    :param regions: Keystone's cache regions, configured
    :param memory: the worker's memory; ``None``: regions with a null backend keep nothing
    :param is_absent: a function that tells whether there is no token cache, so that other backends
        stay as they are
    :returns: true if any of them uses ``memory``
    """
    used = False
    for region in regions:
        outer: Any = getattr(region, "backend", None)
        while hasattr(getattr(outer, "proxied", None), "proxied"):
            outer = outer.proxied
        if outer is None:
            continue
        # Right before it: what Keystone keeps for one request only goes on.
        wrapped = getattr(outer, "proxied", None) is not None
        backend: Any = outer.proxied if wrapped else outer
        if isinstance(backend, NullBackend):
            if memory is not None:
                used = True
                _use(region, memory)
            continue
        name = emptied_by_others(region)
        rows = ByRows(
            region.key_mangler, name, is_absent, _made_of, _reads_rows_only,
            region._parse_serialized_from_backend,
        )  # fmt: skip
        vouched = Vouched().wrap(rows.wrap(backend))
        if wrapped:
            outer.proxied, vouched = vouched, region.backend
        region.backend = Noting().wrap(vouched)
        _note_anew(region)
    return used


def _note_anew(region: Any) -> None:
    """Make a region note the reads of a value that is computed because the kept one is too old."""
    ask: Callable[..., Any] = region.get_or_create

    @functools.wraps(ask)
    def get_or_create(
        key: str,
        creator: Callable[..., Any],
        expiration_time: float | None = None,
        should_cache_fn: Callable[[Any], bool] | None = None,
        creator_args: tuple[Any, Mapping[str, Any]] | None = None,
    ) -> Any:
        request = current.get()
        if request is None or request.as_it_is:
            return ask(key, creator, expiration_time, should_cache_fn, creator_args)
        key = told_apart(key, creator_args)
        mangled = own_mangler(key)

        def create(*arguments: Any, **names: Any) -> Any:
            # It was found, and so is not expected to be computed.
            if all(fill.key != mangled for fill in request.fills):
                request.fills.append(Fill(mangled))
            return creator(*arguments, **names)

        return ask(key, create, expiration_time, should_cache_fn, creator_args)

    region.get_or_create = get_or_create


def _use(region: Any, memory: KeystoneMemory) -> None:
    """Make a region keep its values in ``memory``, which also keeps them for one request.

    Keystone does the latter by a proxy that packs and unpacks a value each time: it is left out.
    """
    backend: Any = memory
    for proxy in reversed(list(_proxies(region.backend))):
        if type(proxy).__name__ != "_ResponseCacheProxy":
            backend = proxy.wrap(backend)
    region.backend = noting = Noting().wrap(backend)
    region._lock_registry = _NoLocks()
    ask: Callable[..., Any] = region.get_or_create
    # Where no proxy of the operator's stands between, the memory is asked itself.
    find = memory.find if backend is memory else None

    @functools.wraps(ask)
    def get_or_create(
        key: str,
        creator: Callable[..., Any],
        expiration_time: float | None = None,
        should_cache_fn: Callable[[Any], bool] | None = None,
        creator_args: tuple[Any, Mapping[str, Any]] | None = None,
    ) -> Any:
        request = current.get()
        if request is None:
            return ask(key, creator, expiration_time, should_cache_fn, creator_args)
        key = told_apart(key, creator_args)
        # As dogpile.cache does where no lock has to be had, and without asking for one.
        if request.own_name or region.key_mangler is not own_mangler:
            key = region.key_mangler(key)
        if find is not None and region.backend is noting:
            value = find(request, key)
            if value is None:
                value = NO_VALUE
                noting._looked_for(key, value)
            elif not request.as_it_is:
                request.note(request.kept.get(key, _UNKNOWN))
        else:
            value = region.backend.get(key)
        if value is not NO_VALUE:
            lasts = region.expiration_time if expiration_time is None else expiration_time
            payload, metadata = value
            if lasts in (None, -1) or time.time() - metadata["ct"] <= lasts:
                return payload
            request.fills.append(Fill(key))
        values, named = creator_args or ((), {})
        created = creator(*values, **named)
        if should_cache_fn is None or should_cache_fn(created):
            region.backend.set(key, region._value(created))
        return created

    region.get_or_create = get_or_create


def _proxies(backend: Any) -> Iterator[Any]:
    """Yield the proxies before a backend, the outermost first."""
    while hasattr(backend, "proxied"):
        yield backend
        backend = backend.proxied

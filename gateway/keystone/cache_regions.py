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
``worker_memory.py``: its name would be that of the present.

Which changes a name goes by depends on what is kept: the families of tables that the function reads
whose values they are. So a user who changes what is his own (application credentials, trusts,
credentials) does not empty what is kept of projects, roles, users and the catalog for all others.
Tokens, receipts and revocations go by every change.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import DIRTY, Coordinator, Epoch, Settling
from keyfront.middleware.tokens.invalidation.reads import Reads
from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT, FIXED, REVOKED
from keyfront.middleware.tokens.request import Names, Request, current

Find = Callable[[], Coordinator | None]

_PEOPLE = ("users", "groups", "mappings", "federation")

#: The tags that each kind of value goes by, besides ``all``.
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "any": (ANY,),
    "content": (CONTENT,),
    "revocations": (REVOKED,),
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
_OF_KIND = {kind: Reads(frozenset(tags), frozenset(tags)) for kind, tags in KINDS.items()}
_READ = tuple(itemgetter(*(FIXED.index(tag) for tag in (ALL, *tags))) for tags in KINDS.values())

#: Where there is no token cache: Keystone's caches stay as they are.
_NONE: Names = ("",) * len(KINDS)


class CacheNames:
    """What each request shares of what one Keystone keeps.

    :param regions: its cache regions (dogpile), each with a ``key_mangler`` through which a key
        goes once; their keys begin with the module of the function whose values they are
    :param find: returns the coordinator; ``None`` where the token cache is not in use
    :param settle: seconds by which the database may be behind
    """

    def __init__(self, regions: Iterable[Any], find: Find, settle: float = 0.0) -> None:
        self._find = find
        self._settling = Settling(settle)
        self._named = self._own = False
        for region in regions:
            backend = getattr(region, "actual_backend", None)
            if getattr(backend, "by_rows", False):
                self._own = True
                region.key_mangler = _own_mangler
            else:
                self._named |= type(backend).__name__ != "NullBackend"
                region.key_mangler = self._mangler(region)

    def begin(self, request: Request) -> None:
        """Take the state that a request shares things of, before it reads anything."""
        request.names = _NONE
        if not (self._named or self._own):
            return
        state = self._state()
        if state is None:
            request.names = None
        elif state is not _ABSENT:
            if self._own:
                request.view = state
                request.since = state.seen
            if self._named:
                request.names = state.names()
                request.since = request.names[0] if request.names else None

    def _state(self) -> View | None:
        try:
            coordinator = self._find()
            if coordinator is None:
                absent: View = _ABSENT
                return absent
            generation, numbers = coordinator.snapshot()
        except CoordinatorError:
            return None
        # While a change is under way its number is not known: that of the one before it.
        last = max((number for number in numbers if number != DIRTY), default=0)
        seen = Epoch(generation, last)
        return View(coordinator, numbers, seen, self._settling.settled(seen))

    def _mangler(self, region: Any) -> Callable[[str], str]:
        mangle = region.key_mangler
        fixed = _BY_REGION.get(region.name)

        def key_mangler(key: str) -> str:
            request = current.get()
            # Outside of a request nobody knows when its beginning was.
            names = self._outside() if request is None else request.names
            kind = fixed or _BY_MODULE.get(key.partition(":")[0], "content")
            if request is not None:
                request.note(_OF_KIND[kind])
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
        return _NONE if self._state() is _ABSENT else None


class View(NamedTuple):
    """The state that a request began with.

    What it keeps is of this state or a later one. What it finds has to be of no earlier one.
    """

    coordinator: Coordinator
    #: The numbers of the fixed tags.
    numbers: tuple[int, ...]
    #: The last change that was complete.
    seen: Epoch
    #: The last one that the database shows for certain.
    settled: Epoch

    def names(self) -> Names | None:
        """Return the names of the values of this state; ``None`` if they would not be certain."""
        names = tuple(self.name(kind) for kind in KINDS)
        return names if all(names) else None

    def name(self, kind: str) -> str:
        """Return the name of the values of a kind; empty if it would not be certain."""
        newest = max(_READ[_PLACES[kind]](self.numbers))
        if newest == DIRTY or newest > self.settled.sequence:
            return ""
        return f"{self.seen.generation:x}.{newest:x}"


def name_of(request: Request | None, kind: str) -> str:
    """Return the name that a request gives to values of a kind; empty if others do not share it.

    :param kind: one of :data:`KINDS`
    """
    if request is None or request.names is None:
        return ""
    view: View | None = request.view
    return request.names[_PLACES[kind]] or (view.name(kind) if view is not None else "")


# Where there is no token cache.
_ABSENT: Final[Any] = object()


def _own_mangler(key: str) -> str:
    """Return the key of a value in the worker's memory: after a change of its own another one."""
    request = current.get()
    return key if request is None or not request.own_name else f"{key}:{request.own_name}"

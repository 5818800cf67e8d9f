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
``keystone_memory.py``: its name would be that of the present.

Which changes a name goes by depends on what is kept: the families of tables that the function reads
whose values they are. So a user who changes what is his own (application credentials, trusts,
credentials) does not empty what is kept of projects, roles, users and the catalog for all others.
Tokens, receipts and revocations go by every change.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import DIRTY, Coordinator, Epoch
from keyfront.middleware.tokens.invalidation.rules import ALL, ANY, CONTENT, FIXED
from keyfront.middleware.tokens.request import Names, Request, current
from keyfront.middleware.tokens.settle import Settling

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

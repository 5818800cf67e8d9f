"""The state in which a request begins, and the values of Keystone's caches that it may share.

Each value that Keystone keeps, in the worker's memory (``worker_memory.py``) or in memcached
(``values_by_rows.py``), has the number of the last change before the request that made it:

* A request takes the numbers of all changes together when it begins, before it reads anything.
  A value that it stores, however late, is of the state that it may have read.
* After a change of its own it may hold something from before that change, or from before another
  one that came in between. From then on it shares nothing with others.
* It shares nothing either where the epochs are not known, or where the database may be behind,
  until it has shown the last change.

A value that is read from a database that may answer from the past is not stored at all, see
``Vouched`` in ``worker_memory.py``: its number would be that of the present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import Coordinator, Settling, View
from keyfront.middleware.tokens.request import Request, current

Find = Callable[[], Coordinator | None]


class CacheViews:
    """Gives requests the state in which they share the values of Keystone's caches.

    That is those without notes of the ``token_cache`` filter, which has given the others theirs.

    :param regions: Keystone's cache regions (dogpile.cache), whose keys begin with the module and
        name of the function whose value it is
    :param find: a function that returns the coordinator; ``None`` where there is no token cache
    :param settle: seconds by which the database may be behind its primary, 0 or more
    """

    def __init__(self, regions: Iterable[Any], find: Find, settle: float = 0.0) -> None:
        self._find = find
        self._settling = Settling(settle)
        self._used = False
        for region in regions:
            self._used |= type(getattr(region, "actual_backend", None)).__name__ != "NullBackend"
            region.key_mangler = own_mangler

    def begin(self, request: Request) -> None:
        """Note the present state with a request of which nothing was noted, before it reads."""
        if not self._used:
            return
        try:
            coordinator = self._find()
            if coordinator is None:
                request.as_it_is = True
                return
            request.begin(View.of(coordinator, self._settling))
        except CoordinatorError:
            return


def name_of(request: Request | None, tag: str) -> str:
    """Return a name of the state in which a request began; empty if it shares nothing.

    :param request: the notes on the request, if there is one
    :param tag: a fixed tag, as for :meth:`.View.name`
    """
    return "" if request is None or request.view is None else request.view.name(tag)


# What stands in keys for arguments that are no texts.
_WORDS: Final = frozenset({"None", "True", "False"})


def told_apart(key: str, creator_args: tuple[Any, Mapping[str, Any]] | None) -> str:
    """Return a key that no call with other arguments has.

    dogpile.cache makes one key of ``None`` and "None", and one of "a b", "c" and "a", "b c". So a
    client's filter ``role.id=None`` would be answered as if there were none, and its empty answer
    would pass for the roles of a user who logs in.

    :param key: the key as dogpile.cache has made it: the arguments' texts, joined by blanks
    :param creator_args: the arguments of a call of a method, as dogpile.cache tells them
    """
    values = creator_args[0][1:] if creator_args else ()
    if len(values) < 2 or all(map(_is_plain, values)):
        return key
    return f"{key.partition('|')[0]}|\0{values!r}"


def _is_plain(value: object) -> bool:
    if type(value) is str:
        return value.isprintable() and " " not in value and value not in _WORDS
    return value is None or type(value) is bool


_SEPARATOR: Final = ":"


def own_mangler(key: str) -> str:
    """Return a key for Keystone's caches; after a change of the request's own, a key of its own."""
    request = current.get()
    if request is None or request.as_it_is or not request.own_name:
        return key
    return f"{key}{_SEPARATOR}{request.own_name}"


def without_own_name(key: str) -> str:
    """Return the key that other requests have for a value."""
    request = current.get()
    if request is None or not request.own_name:
        return key
    return key.removesuffix(f"{_SEPARATOR}{request.own_name}")

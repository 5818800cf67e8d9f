"""The state in which a request begins, and what it shares of what Keystone keeps in its caches.

Each value that Keystone keeps, in the worker's memory (``worker_memory.py``) or in memcached
(``values_by_rows.py``), has the number of the last change before the request that made it:

* A request takes the numbers of all changes together when it begins, before it reads anything.
  What it stores, however late, is of the state that it may have read.
* After a change of its own it may hold something from before that change, or from before another
  one that came in between. From then on it shares nothing with others.
* Where the epochs are not known, the same; and where the database may be behind, until it has shown
  the last change.

What is read of a database that may answer from the past is not stored at all, see ``Vouched`` in
``worker_memory.py``: its number would be that of the present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.epochs import DIRTY, Coordinator, Epoch, Settling
from keyfront.middleware.tokens.invalidation.rules import ALL, FIXED
from keyfront.middleware.tokens.request import Request, current

Find = Callable[[], Coordinator | None]

_PLACES = {tag: place for place, tag in enumerate(FIXED)}


class CacheViews:
    """Gives each request the state that it shares of what one Keystone keeps.

    :param regions: its cache regions (dogpile). A key of theirs begins with the module and name of
        the function whose value it is
    :param find: returns the coordinator; ``None`` where the token cache is not in use
    :param settle: seconds by which the database may be behind
    """

    def __init__(self, regions: Iterable[Any], find: Find, settle: float = 0.0) -> None:
        self._find = find
        self._settling = Settling(settle)
        self._used = False
        for region in regions:
            self._used |= type(getattr(region, "actual_backend", None)).__name__ != "NullBackend"
            region.key_mangler = own_mangler

    def begin(self, request: Request) -> None:
        """Take the state that a request shares things of, before it reads anything."""
        if not self._used:
            return
        try:
            coordinator = self._find()
            if coordinator is None:
                request.as_it_is = True
                return
            generation, numbers = coordinator.snapshot()
        except CoordinatorError:
            return
        # While a change is under way its number is not known: that of the one before it.
        last = max((number for number in numbers if number != DIRTY), default=0)
        seen = Epoch(generation, last)
        request.view = View(coordinator, numbers, seen, self._settling.settled(seen))
        request.since = seen


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

    def name(self, tag: str) -> str:
        """Return a name of this state, in which nothing has changed; empty if it is not certain.

        :param tag: a fixed one, whose changes give other names
        """
        newest = max(self.numbers[_PLACES[ALL]], self.numbers[_PLACES[tag]])
        if newest == DIRTY or newest > self.settled.sequence:
            return ""
        return f"{self.seen.generation:x}.{newest:x}"


def name_of(request: Request | None, tag: str) -> str:
    """Return a name of the state that a request began with; empty if others do not share it.

    :param tag: as of :meth:`View.name`
    """
    view: View | None = None if request is None else request.view
    return "" if view is None else view.name(tag)


_SEPARATOR: Final = ":"


def own_mangler(key: str) -> str:
    """Return the key of a value as Keystone's caches have it: after an own change another one."""
    request = current.get()
    if request is None or request.as_it_is or not request.own_name:
        return key
    return f"{key}{_SEPARATOR}{request.own_name}"


def without_own_name(key: str) -> str:
    """Return the key that others have for a value."""
    request = current.get()
    if request is None or not request.own_name:
        return key
    return key.removesuffix(f"{_SEPARATOR}{request.own_name}")

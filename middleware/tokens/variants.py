"""A bound on the ways in which one caller may ask the same and have each answer kept.

Whoever has a token may validate it with whatever query and headers he likes, and each of them is
part of the key. Without a bound he would displace the answers that are kept for others, first of
all in the memory of the workers, where the oldest are overwritten whether they are used or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import Any, Final, NamedTuple

from .entries import Keys

#: Ways of one caller that are known at a time: hosts, languages, service tokens, proxies' headers.
WAYS: Final = 8

# Callers whose ways one process remembers.
_CALLERS = 4096

_WITHOUT_CATALOG = ("nocatalog", "nocatalog=", "nocatalog=1", "nocatalog=true", "nocatalog=True")
_ALSO_EXPIRED = ("allow_expired=1", "allow_expired=true", "allow_expired=True")

#: The queries of a validation that clients send. Keystone reads no other names.
QUERIES: Final = frozenset(
    {
        *("", *_WITHOUT_CATALOG, *_ALSO_EXPIRED),
        *("&".join(both) for both in product(_WITHOUT_CATALOG, _ALSO_EXPIRED)),
        *("&".join(both) for both in product(_ALSO_EXPIRED, _WITHOUT_CATALOG)),
    }
)


class Way(NamedTuple):
    """A way in which a caller asks: keyed hashes of the caller and of the way."""

    caller: bytes
    variant: bytes


class Variants:
    """Remembers the ways in which each caller was answered lately.

    :param seconds: seconds after which a way that was not used makes room for another
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # No lock: two threads at once may let a way too many in, and nothing worse.
        self._callers: dict[bytes, dict[bytes, float]] = {}

    def way(self, environ: Mapping[str, Any], keys: Keys) -> Way | None:
        """Return the way of a request that has a key; ``None`` if its answer must not be kept.

        That is for a query that is not in :data:`QUERIES`, and a caller with :data:`WAYS` others.

        :param environ: the WSGI environment of a validation
        :param keys: the maker of keys of the present epoch table
        """
        if environ.get("QUERY_STRING", "") not in QUERIES:
            return None
        way = Way(keys.named("asks", environ.get("HTTP_X_AUTH_TOKEN", "")), keys.variant(environ))
        known = self._callers.get(way.caller)
        if known is None or way.variant in known or len(known) < WAYS:
            return way
        first, last = next(iter(known.items()), (b"", 0.0))
        if time.monotonic() - last < self._seconds:
            return None
        known.pop(first, None)
        return way

    def note(self, way: Way) -> None:
        """Note that an answer was kept which a caller was given in this way."""
        callers = self._callers
        known = callers.pop(way.caller, None) or {}
        known.pop(way.variant, None)
        # The last of each at the end.
        known[way.variant] = time.monotonic()
        callers[way.caller] = known
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread is at it
            while len(callers) > _CALLERS:
                del callers[next(iter(callers))]

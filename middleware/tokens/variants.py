"""In how many ways one caller may ask the same and have each answer kept.

Whoever has a token may validate it, with whatever query and headers he likes, and each of them is
part of the key. Without a bound he would push out what is kept for others: from what the workers
share first, where the oldest goes, used or not.
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

# Callers of which that is known, in one process.
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
    """A way in which a caller asks, by keyed hashes."""

    caller: bytes
    variant: bytes


class Variants:
    """Remembers in which ways each caller was answered lately.

    :param seconds: after which one that was not used makes room for another
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # No lock: two threads at once may let a way too many in, and nothing worse.
        self._callers: dict[bytes, dict[bytes, float]] = {}

    def way(self, environ: Mapping[str, Any], keys: Keys) -> Way | None:
        """Return the way of a request that has a key; ``None`` if its caller has too many.

        :param environ: of a validation
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
        """Note that a caller was given an answer that is kept."""
        callers = self._callers
        known = callers.pop(way.caller, None) or {}
        known.pop(way.variant, None)
        # The last of each at the end.
        known[way.variant] = time.monotonic()
        callers[way.caller] = known
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread is at it
            while len(callers) > _CALLERS:
                del callers[next(iter(callers))]

"""Values of Keystone's caches in a backend of its own choice (memcached), checked by their rows.

With ``[cache]`` on memcached, Keystone 30 goes on serving values that a change has replaced: it
deletes a value before another worker, which read the old row, stores it again; or it does not
delete it at all. So here each value carries the number of the last change before the request that
made it, and the tags of the rows that it was made of. It is used as long as none of these has
changed since, as one in the worker's memory (``worker_memory.py``): old values are not deleted but
no longer used, so a value that is stored late does no harm. A user who changes his own data ends
the values that show them, and none of other users.

Each epoch table has values of its own: its generation is in the key.

Keystone also empties a whole region at each revocation, by another random name in all of its keys.
Where values are checked by their rows that is needless, and any user may revoke. So only the
emptying by a Keystone without keyfront on the same memcached counts here; that one hears of all,
see :func:`emptied_by_others`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dogpile.cache.api import NO_VALUE, CachedValue
from dogpile.cache.proxy import ProxyBackend

from keyfront.common import json_text
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.directory_leases import leases
from keyfront.middleware.tokens.epochs import Epoch, View, slots
from keyfront.middleware.tokens.invalidation.rules import ALL, CONTENT, FIXED
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.request import Request, current

from .cache_regions import without_own_name

#: Version of the data that are kept with a value, raised when their form changes; in each key.
FORM: Final = 1

#: The name in a value's metadata of the reads that it was made of.
MADE_OF: Final = "keyfront"

# The number of the last change before it; families, tags and names of what must be followed.
_MadeOf = tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]

_PLACES = {tag: place for place, tag in enumerate(FIXED)}
_LENGTH = struct.Struct("<I")

# The tag of values of functions that may read other things than rows of the database.
_CONTENT = frozenset({CONTENT})


class ByRows(ProxyBackend):
    """A proxy right before the backend that stores values with the reads that they were made of.

    :param mangle: a function that makes a key of the backend from one of Keystone's where there is
        no token cache; ``None``: they are the same
    :param name: a function that returns a part of the keys; with another one all values are gone
    :param is_absent: a function that tells whether there is no token cache, so that everything
        stays as it is
    :param of_value: a function that returns the reads of a value, given the value and the reads
        that were noted for it; ``None`` if they are not known
    :param is_known: a function that tells, by the name of one of Keystone's functions, whether that
        depends on the rows of its statements only
    :param parse: a function that returns the value that bytes for the backend were made of
    """

    def __init__(
        self,
        mangle: Callable[[str], str] | None,
        name: Callable[[], bytes],
        is_absent: Callable[[], bool],
        of_value: Callable[[Any, Reads | None], Reads | None],
        is_known: Callable[[str], bool],
        parse: Callable[[bytes], Any] = lambda value: NO_VALUE,
    ) -> None:
        self._mangle = mangle or (lambda key: key)
        self._name = name
        self._is_absent = is_absent
        self._of_value = of_value
        self._is_known = is_known
        self._parse = parse

    def get(self, key: Any) -> Any:
        """Return a value that stands; else ``NO_VALUE``."""
        view = self._view()
        if view is _AS_IT_IS:
            return self.proxied.get(self._mangle(key))
        if view is None:
            return NO_VALUE
        value = self.proxied.get(self._key(key, view))
        if not isinstance(value, CachedValue) or MADE_OF not in value.metadata:
            return NO_VALUE
        metadata = {name: one for name, one in value.metadata.items() if name != MADE_OF}
        if not self._stands(key, value.metadata[MADE_OF], view):
            return NO_VALUE
        return CachedValue(value.payload, metadata)

    def get_serialized(self, key: Any) -> Any:
        """Return a value that stands, as bytes; else ``NO_VALUE``."""
        view = self._view()
        if view is _AS_IT_IS:
            return self.proxied.get_serialized(self._mangle(key))
        value = NO_VALUE if view is None else self.proxied.get_serialized(self._key(key, view))
        if not isinstance(value, bytes):
            return NO_VALUE
        try:
            (length,) = _LENGTH.unpack_from(value)
            # Others may write there: nothing is unpickled here that Keystone would not unpickle.
            made_of = json_text.parse(value[_LENGTH.size : _LENGTH.size + length])
            if type(made_of[0]) is not int:
                return NO_VALUE
            parts: Any = (made_of[0], *map(tuple, made_of[1:]))
            stands = self._stands(key, parts, view)
        except (struct.error, ValueError, TypeError, LookupError, AttributeError):
            return NO_VALUE  # damaged, or somebody else's
        return value[_LENGTH.size + length :] if stands else NO_VALUE

    def set(self, key: Any, value: Any) -> None:
        """Store a value, if the reads that it was made of are known."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.set(self._mangle(key), value)
            return
        made_of = self._made_of(key, value.payload, view)
        if made_of is not None:
            kept = CachedValue(value.payload, {**value.metadata, MADE_OF: made_of})
            self.proxied.set(self._key(key, view), kept)

    def set_serialized(self, key: Any, value: Any) -> None:
        """Store a value that is given as bytes, if the reads that it was made of are known."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.set_serialized(self._mangle(key), value)
            return
        parsed = self._parse(value)
        # Without the value it cannot be told whether it is a token, and on what it depends.
        made_of = None if parsed is NO_VALUE else self._made_of(key, parsed.payload, view)
        if made_of is not None:
            packed = json.dumps(made_of).encode()
            kept = _LENGTH.pack(len(packed)) + packed + value
            self.proxied.set_serialized(self._key(key, view), kept)

    def delete(self, key: Any) -> None:
        """Delete a value, which would not be used any more after the change that deletes it."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.delete(self._mangle(key))
        elif view is not None:
            self.proxied.delete(self._key(without_own_name(key), view))

    def get_mutex(self, key: Any) -> Any:
        """Return the lock for computing a value; ``None``: dogpile.cache makes one."""
        return self.proxied.get_mutex(_hashed(key))

    def get_multi(self, keys: Iterable[Any]) -> Any:
        """Return several values."""
        return [self.get(key) for key in keys]

    def set_multi(self, mapping: Mapping[Any, Any]) -> None:
        """Store several values."""
        for key, value in mapping.items():
            self.set(key, value)

    def delete_multi(self, keys: Iterable[Any]) -> None:
        """Delete several values."""
        for key in keys:
            self.delete(key)

    def get_serialized_multi(self, keys: Iterable[Any]) -> Any:
        """Return several values as bytes."""
        return [self.get_serialized(key) for key in keys]

    def set_serialized_multi(self, mapping: Mapping[Any, Any]) -> None:
        """Store several values that are given as bytes."""
        for key, value in mapping.items():
            self.set_serialized(key, value)

    def _view(self) -> Any:
        """Return the state in which the present request shares values; ``None``: it shares none."""
        request = current.get()
        if request is None:
            # Outside of requests there is no beginning whose state would count.
            return _AS_IT_IS if self._is_absent() else None
        return _AS_IT_IS if request.as_it_is else request.view

    def _key(self, key: str, view: View) -> str:
        return _hashed(f"{FORM}:{key}:{view.seen.generation:x}:{self._name().hex()}")

    def _stands(self, key: str, made_of: _MadeOf, view: View) -> bool:
        """Return whether nothing a value was made of changed up to a view; if so, note its reads.
        """
        sequence, families, tags, followed = made_of
        if followed and (leases.leases is None or not leases.leases.stand(frozenset(followed))):
            return False
        numbers = view.numbers
        newest = max(numbers[_PLACES[family]] for family in (ALL, *families))
        if newest > sequence:
            # A family of tables has changed; the rows tell whether that concerns this value.
            try:
                found = slots((ALL, *tags), view.coordinator.slot_count)
            except CoordinatorError:
                return False
            if not view.coordinator.fresh_now(Epoch(view.seen.generation, sequence), found):
                return False
        request: Request | None = current.get()
        if request is not None:
            request.kept[key] = Reads(frozenset(families), frozenset(tags), frozenset(followed))
        return True

    def _made_of(self, key: str, payload: Any, view: View | None) -> _MadeOf | None:
        request = current.get()
        if request is None or view is None or view.settled.sequence < 0:
            return None
        reads = self._of_value(payload, request.kept.get(key))
        if reads is None:
            return None
        if not self._is_known(key.partition("|")[0]):
            reads = Reads(reads.families | _CONTENT, reads.tags | _CONTENT, reads.followed)
        request.kept[key] = reads
        families, tags, followed = (tuple(sorted(one)) for one in reads)
        return view.settled.sequence, families, tags, followed


def _hashed(key: str) -> str:
    # Short and without blanks, as memcached wants them; and keys may hold tokens.
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


# Bytes of a region's random name, of 10, that stay when a Keystone under keyfront empties it.
_STAY = 5


def emptied_by_others(region: Any) -> Callable[[], bytes]:
    """Return a function that returns a region's name, which a stock Keystone's emptying changes.

    A Keystone under keyfront goes on emptying it for stock ones, by a name with the same beginning.

    :param region: one of Keystone's cache regions, with ``DistributedInvalidationStrategy`` if it
        has such a name
    :returns: a function without arguments; the name is empty if the region has none
    """
    manager = getattr(getattr(region, "region_invalidator", None), "_region_manager", None)
    if manager is None:
        return bytes

    def invalidate_region() -> bytes:
        new: bytes = manager.region_id[:_STAY]
        new += secrets.token_bytes(_STAY)
        manager._invalidation_region.set(manager._region_key, new)
        return new

    manager.invalidate_region = invalidate_region
    return lambda: bytes(manager.region_id[:_STAY])


# The view where there is no token cache.
_AS_IT_IS: Final[Any] = object()

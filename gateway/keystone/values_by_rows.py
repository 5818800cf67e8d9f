"""What Keystone keeps in a backend of its own choice (memcached), found by what it was made of.

With ``[cache]`` on memcached, Keystone 30 goes on serving what a change has replaced: it deletes a
value before another worker, which read the old row, stores it again; or it does not delete it at
all. So here each value carries the number of the last change before the request that made it, and
the tags of the rows that it was made of. It is found as long as none of these has changed since,
as one in the worker's memory (``worker_memory.py``): values are not deleted but no longer believed,
so it does not matter who stores what how late. A user who changes what is his own ends what shows
that, and nothing of others.

A table has values of its own, and another one has others: its generation is in the key.

Keystone also empties a whole region at each revocation, by another random name in all of its keys.
Where all go by rows that says nothing new, and any user may revoke. So only those by a Keystone
without keyfront on the same memcached count here; it hears of all, see :func:`emptied_by_others`.
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
from keyfront.middleware.tokens.epochs import Epoch, slots
from keyfront.middleware.tokens.invalidation.reads import Reads
from keyfront.middleware.tokens.invalidation.rules import ALL, CONTENT, FIXED
from keyfront.middleware.tokens.leases import registry as leases
from keyfront.middleware.tokens.request import Request, current

from .cache_regions import View, without_own_name

#: Raised when what is kept with a value is of another form; part of each key.
FORM: Final = 1

#: In the metadata of a value, what it was made of.
MADE_OF: Final = "keyfront"

# The number of the last change before it, and what it was made of.
_MadeOf = tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]

_PLACES = {tag: place for place, tag in enumerate(FIXED)}
_LENGTH = struct.Struct("<I")

# Who reads what else than rows of the database is not known.
_CONTENT = frozenset({CONTENT})


class ByRows(ProxyBackend):
    """Values with what they were made of; it stands right before the backend.

    :param mangle: makes a key of the backend of one of Keystone's where there is no token cache;
        ``None``: they are the same
    :param name: returns a part of the keys, with another one of which all values are gone
    :param is_absent: whether there is no token cache, so that everything stays as it is
    :param of_value: returns what a value depends on, by its key and what was read for it; ``None``
        where that is not known
    :param is_known: whether a function reads nothing but what its statements show, by its name
    :param parse: returns the value that bytes for the backend were made of
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
        """Return a value that stands."""
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
        """Return a value that stands, of a backend that takes bytes."""
        view = self._view()
        if view is _AS_IT_IS:
            return self.proxied.get_serialized(self._mangle(key))
        value = NO_VALUE if view is None else self.proxied.get_serialized(self._key(key, view))
        if not isinstance(value, bytes):
            return NO_VALUE
        try:
            (length,) = _LENGTH.unpack_from(value)
            # Of what others may write, nothing is unpickled here that Keystone would not.
            made_of = json_text.parse(value[_LENGTH.size : _LENGTH.size + length])
            if type(made_of[0]) is not int:
                return NO_VALUE
            parts: Any = (made_of[0], *map(tuple, made_of[1:]))
            stands = self._stands(key, parts, view)
        except (struct.error, ValueError, TypeError, LookupError, AttributeError):
            return NO_VALUE  # damaged, or somebody else's
        return value[_LENGTH.size + length :] if stands else NO_VALUE

    def set(self, key: Any, value: Any) -> None:
        """Store a value, if it is known what it was made of."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.set(self._mangle(key), value)
            return
        made_of = self._made_of(key, value.payload, view)
        if made_of is not None:
            kept = CachedValue(value.payload, {**value.metadata, MADE_OF: made_of})
            self.proxied.set(self._key(key, view), kept)

    def set_serialized(self, key: Any, value: Any) -> None:
        """Store a value of a backend that takes bytes."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.set_serialized(self._mangle(key), value)
            return
        parsed = self._parse(value)
        # Who cannot see whether it is a token does not know what it depends on.
        made_of = None if parsed is NO_VALUE else self._made_of(key, parsed.payload, view)
        if made_of is not None:
            packed = json.dumps(made_of).encode()
            kept = _LENGTH.pack(len(packed)) + packed + value
            self.proxied.set_serialized(self._key(key, view), kept)

    def delete(self, key: Any) -> None:
        """Delete a value, which is not believed any more after the change that it goes for."""
        view = self._view()
        if view is _AS_IT_IS:
            self.proxied.delete(self._mangle(key))
        elif view is not None:
            self.proxied.delete(self._key(without_own_name(key), view))

    def get_mutex(self, key: Any) -> Any:
        """Return the lock of who computes a value; ``None``: dogpile.cache makes it."""
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
        """Return several values of a backend that takes bytes."""
        return [self.get_serialized(key) for key in keys]

    def set_serialized_multi(self, mapping: Mapping[Any, Any]) -> None:
        """Store several of them."""
        for key, value in mapping.items():
            self.set_serialized(key, value)

    def _view(self) -> Any:
        """Return the state that the present request shares things of; ``None``: none."""
        request = current.get()
        if request is None:
            # Nobody knows when its beginning was.
            return _AS_IT_IS if self._is_absent() else None
        return _AS_IT_IS if request.as_it_is else request.view

    def _key(self, key: str, view: View) -> str:
        return _hashed(f"{FORM}:{key}:{view.seen.generation:x}:{self._name().hex()}")

    def _stands(self, key: str, made_of: _MadeOf, view: View) -> bool:
        """Whether nothing that a value was made of has changed up to a view; notes it if so."""
        sequence, families, tags, followed = made_of
        if followed and (leases.leases is None or not leases.leases.stand(frozenset(followed))):
            return False
        numbers = view.numbers
        newest = max(numbers[_PLACES[family]] for family in (ALL, *families))
        if newest > sequence:
            # Something of these families has; whether it concerns this value its rows tell.
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
    """Return what tells a name of a region, which is another when another Keystone empties it.

    A Keystone under keyfront goes on emptying it for others, by a name that begins as the last.

    :param region: of Keystone's, with ``DistributedInvalidationStrategy`` if it has such names
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


# Where there is no token cache.
_AS_IT_IS: Final[Any] = object()

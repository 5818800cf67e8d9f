"""The cache of one worker, bounded by bytes: the least recently used entries are dropped first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Weighed(Protocol):
    """An entry that knows its size."""

    @property
    def size(self) -> int:
        """Bytes of memory that the entry takes."""
        ...


E = TypeVar("E", bound=Weighed)


class LRUCache(Generic[E]):
    """A cache of entries by key. A read takes no lock.

    :param limit: bytes that all entries together may take, 0 or more; 0 keeps nothing
    """

    __slots__ = ("_entries", "_forks", "_lock", "_pid", "evicted", "limit", "size")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: Bytes that the entries take.
        self.size = 0
        #: Number of entries that were dropped to make room for others.
        self.evicted = 0
        self._entries: OrderedDict[bytes, E] = OrderedDict()
        # For writers only; a hit takes no lock.
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._forks: dict[int, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> E | None:
        """Return the entry of a key and make it the most recently used; ``None`` without one."""
        entry = self._entries.get(key)
        if entry is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just removed it; the entry itself is still good
        return entry

    def put(self, key: bytes, entry: E) -> None:
        """Keep an entry, unless it alone is over a quarter of the limit; drop others for it."""
        if entry.size > self.limit // 4:
            return
        with self._own_lock():
            self._drop(key)
            self._entries[key] = entry
            self.size += entry.size
            while self.size > self.limit:
                _, oldest = self._entries.popitem(last=False)
                self.size -= oldest.size
                self.evicted += 1

    def drop(self, key: bytes) -> None:
        """Drop the entry of a key, if there is one."""
        if key in self._entries:
            with self._own_lock():
                self._drop(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._own_lock():
            self._entries.clear()
            self.size = 0

    def _own_lock(self) -> threading.Lock:
        """Return the lock; in a child a new one: a thread of the parent may have held the old."""
        pid = os.getpid()
        if self._pid != pid:
            # Not by Python's fork hooks, which not every server runs.
            with self._forks.setdefault(pid, threading.Lock()):
                if self._pid != pid:
                    if self._lock.locked():  # amid a change, so the size may be wrong
                        self._entries, self.size = OrderedDict(), 0
                    self._lock, self._pid = threading.Lock(), pid
        return self._lock

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry.size

"""The entries of one process: bounded by bytes, the least recently used go first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Weighed(Protocol):
    """What has a size."""

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        ...


E = TypeVar("E", bound=Weighed)


class Memory(Generic[E]):
    """Entries by key.

    :param limit: bytes that all entries together may take
    """

    __slots__ = ("_entries", "_forks", "_lock", "_pid", "evicted", "limit", "size")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: Bytes that are taken.
        self.size = 0
        #: Entries that had to go for others.
        self.evicted = 0
        self._entries: OrderedDict[bytes, E] = OrderedDict()
        # For writers only; a hit takes no lock.
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._forks: dict[int, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> E | None:
        """Return the entry and make it the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread has just removed it; the entry itself is still good
        return entry

    def put(self, key: bytes, entry: E) -> None:
        """Keep an entry, unless it alone is over a quarter of the limit."""
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
        """Forget an entry, if it is there."""
        if key in self._entries:
            with self._own_lock():
                self._drop(key)

    def clear(self) -> None:
        """Forget them all."""
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

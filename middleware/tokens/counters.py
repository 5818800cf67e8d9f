"""Counts of what the token cache did, of all processes of a node, in a mapped file.

Each process writes to a row of its own without a lock (:mod:`keyfront.common.counters`). Nothing
but ``keyfront tokens stats`` goes by these numbers.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from keyfront.common.counters import CounterRow, words_in_memory
from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped
from keyfront.common.process import lives
from keyfront.errors import CoordinatorError

#: What is counted, in the order of a row.
NAMES = (
    "hits",  # answered from this process's memory
    "node_hits",  # answered from what the workers share
    "misses",  # asked of Keystone
    "waits",  # waited for another request that asked the same
    "bypassed",  # asked of Keystone because the request must not be answered from a cache
    "not_kept",  # misses whose answer was not kept
    "known",  # first validations answered from what was known of token and caller
    "issued",  # tokens of which it was kept at their issue what a validation answers
)
HITS, NODE_HITS, MISSES, WAITS, BYPASSED, NOT_KEPT, KNOWN, ISSUED = range(1, len(NAMES) + 1)

# No count gets there.
_DAMAGED = 2**56

_ROW = 16
_ROWS = 256
_SIZE = (1 + _ROWS) * _ROW * 8


class Counters(CounterRow):
    """The counts of a node; the row of this process has its number first, then the counts.

    :param path: the file; made with mode 0600 if it is missing
    :param lock: held by whoever takes a row, over all processes that use the file
    :raises CoordinatorError: the file cannot be made or mapped
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        super().__init__(_ROW)
        self._path = path
        self._map()
        self._lock = lock
        self.claim()
        _all.add(self)

    def claim(self) -> None:
        """Take a row for this process, unless it has one.

        :raises CoordinatorError: the file is gone and cannot be made anew
        """
        if not self._file.is_there():
            self._map()
        elif self.row[0] == os.getpid() and max(self.row[1:]) <= _DAMAGED:
            return
        with self._lock:
            if max(max(self._words[place::_ROW]) for place in range(1, _ROW)) > _DAMAGED:
                self._words[:] = memoryview(bytes(_SIZE)).cast("Q")
            for row in range(1, 1 + _ROWS):
                owner = self._words[row * _ROW]
                if owner and lives(owner):
                    continue
                for place in range(1, _ROW):
                    self._words[place] += self._words[row * _ROW + place]
                    self._words[row * _ROW + place] = 0
                self._words[row * _ROW] = os.getpid()
                self.row = self._words[row * _ROW : (row + 1) * _ROW]
                return
        # More processes than rows: this one counts for itself.
        self.row = words_in_memory(_ROW)

    def repair(self) -> None:
        """Leave a damaged row to the next :meth:`claim`, which begins anew."""

    def _map(self) -> None:
        self._file = Mapped(self._path, _SIZE)
        self._words = memoryview(self._file.map).cast("Q")
        self.row = words_in_memory(_ROW)

    def statistics(self) -> dict[str, int]:
        """Return the sums over all processes, by name, and how many processes live."""
        return _sums(self._words.tolist())


def read(path: Path) -> dict[str, int]:
    """Return the statistics in a file, without taking part.

    :raises CoordinatorError: there is none, or it is not readable
    """
    return _sums(_words_of(path))


def processes(path: Path) -> list[int]:
    """Return the numbers of the living processes that have rows in a file, without taking part.

    :raises CoordinatorError: there is none, or it is not readable
    """
    return [owner for owner in _words_of(path)[_ROW::_ROW] if owner and lives(owner)]


def _words_of(path: Path) -> list[int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CoordinatorError(f"{path}: {error.strerror}") from None
    if len(data) != _SIZE:
        raise CoordinatorError(f"{path}: has {len(data)} bytes instead of {_SIZE}")
    return memoryview(data).cast("Q").tolist()


def _sums(words: list[int]) -> dict[str, int]:
    counts = {name: sum(words[place::_ROW]) for place, name in enumerate(NAMES, 1)}
    owners = words[_ROW::_ROW]
    return {**counts, "processes": sum(1 for owner in owners if owner and lives(owner))}


_all: weakref.WeakSet[Counters] = weakref.WeakSet()
"""The counters of this process, to be given rows of their own in a child."""


def claim_all() -> None:
    """Give the counters of a child process rows of their own; again is no harm."""
    for counters in _all:
        try:
            counters.claim()
        except CoordinatorError:
            counters.row = words_in_memory(_ROW)


os.register_at_fork(after_in_child=claim_all)

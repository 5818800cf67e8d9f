"""Counts that other processes may read: a row of unsigned 64-bit numbers for each process.

A count is an addition in mapped memory: no call, no lock, no system call. Two threads of a process
that count at the same instant may count one; nothing but statistics goes by these numbers.

Where a row lies is for those who count. The heartbeat has a file for each process, since services
of several users run on one machine and none may write what another reads. The processes of a node
are one user's and share a file (:class:`NodeCounters`): whoever may write one row may write them
all. What processes counted that have ended is kept in its first row, so that sums never fall.

``KEYFRONT_NODE`` names the folder for the files of a node, those of its servers and filters alike.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keyfront.errors import CoordinatorError, OptionError

from .mmap_file import Mapped
from .process import lives

if TYPE_CHECKING:
    from .file_lock import FileLock

#: The variable of the environment that names the folder of a node.
VARIABLE = "KEYFRONT_NODE"

# No count gets there.
_DAMAGED = 2**56


class CounterRow:
    """A row of counts.

    :param length: number of counts; they are in this process's memory until ``row`` is replaced by
        a part of a mapped file
    """

    __slots__ = ("__weakref__", "row")

    #: The counts: ``row[HITS] += 1``, which raises ``ValueError`` in a damaged file.
    row: memoryview[int]

    def __init__(self, length: int) -> None:
        self.row = words_in_memory(length)

    def count(self, place: int) -> None:
        """Count one; in a damaged file, none."""
        try:
            self.row[place] += 1
        except ValueError:  # somebody wrote a number into it that no count gets to
            self.repair()

    def repair(self) -> None:
        """Count from nothing: of a damaged row nothing is true."""
        for place in range(len(self.row)):
            self.row[place] = 0


def words_in_memory(length: int) -> memoryview[int]:
    """Return ``length`` unsigned 64-bit numbers, all 0, in this process's memory."""
    return memoryview(bytearray(length * 8)).cast("Q")


class Layout(NamedTuple):
    """The layout of a file of counts.

    :param row: words of a row, the first of which is the number of its process
    :param rows: processes that may count at a time, besides the first row, which is nobody's
    :param present: the places of a row that tell what is now, and end with their process
    """

    row: int
    rows: int = 256
    present: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        """The bytes of a file."""
        return (1 + self.rows) * self.row * 8

    def rows_of(self, path: Path) -> list[list[int]]:
        """Return the rows of a file, without taking part: the first is of those that ended.

        :raises CoordinatorError: there is none, or it is not readable
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CoordinatorError(f"{path}: {error.strerror}") from None
        if len(data) != self.size:
            raise CoordinatorError(f"{path}: has {len(data)} bytes instead of {self.size}")
        words = memoryview(data).cast("Q").tolist()
        return [words[start : start + self.row] for start in range(0, len(words), self.row)]


def node_folder() -> Path | None:
    """Return the folder that ``KEYFRONT_NODE`` names; ``None`` if it names none.

    :raises OptionError: it is not an absolute path
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if not text.startswith("/"):
        raise OptionError(VARIABLE, text, "an absolute path, of a folder that may be made")
    return Path(text)


class NodeCounters(CounterRow):
    """The counts of a node; the row of this process has its number first, then the counts.

    :param path: the file; made with mode 0600 if it is missing
    :param lock: held by whoever takes a row, over all processes that use the file
    :param layout: the same for all who use the file
    :raises CoordinatorError: the file cannot be made or mapped
    """

    __slots__ = ("_file", "_layout", "_lock", "_path", "_words")

    def __init__(self, path: Path, lock: FileLock, layout: Layout) -> None:
        super().__init__(layout.row)
        self._layout = layout
        self._path = path
        self._map()
        self._lock = lock
        self.claim()
        _all.add(self)

    def claim(self) -> None:
        """Take a row for this process, unless it has one.

        :raises CoordinatorError: the file is gone and cannot be made anew
        """
        width, present, me = self._layout.row, self._layout.present, os.getpid()
        if not self._file.is_there():
            self._map()
        elif self.row[0] == me and max(self.row[1:]) <= _DAMAGED:
            return
        with self._lock:
            words = self._words
            if max(max(words[place::width]) for place in range(1, width)) > _DAMAGED:
                words[:] = memoryview(bytes(self._layout.size)).cast("Q")
            for row in range(1, 1 + self._layout.rows):
                start = row * width
                owner = words[start]
                if owner and owner != me and lives(owner):
                    continue
                for place in range(1, width):
                    if place not in present:
                        words[place] += words[start + place]
                    words[start + place] = 0
                words[start] = me
                self.row = words[start : start + width]
                return
        # More processes than rows: this one counts for itself.
        self.row = words_in_memory(width)

    def repair(self) -> None:
        """Leave a damaged row to the next :meth:`claim`, which begins anew."""

    def rows(self) -> list[list[int]]:
        """Return the rows of all processes: the first is of those that ended."""
        words, width = self._words.tolist(), self._layout.row
        return [words[start : start + width] for start in range(0, len(words), width)]

    def _map(self) -> None:
        self._file = Mapped(self._path, self._layout.size)
        self._words = memoryview(self._file.map).cast("Q")
        self.row = words_in_memory(self._layout.row)


def owners(rows: list[list[int]]) -> list[int]:
    """Return the numbers of the living processes that have rows."""
    return [row[0] for row in rows[1:] if row[0] and lives(row[0])]


_all: weakref.WeakSet[NodeCounters] = weakref.WeakSet()
"""The counters of this process, to be given rows of their own in a child."""


def claim_all() -> None:
    """Give the counters of a child process rows of their own; again is no harm."""
    for counters in list(_all):
        try:
            counters.claim()
        except CoordinatorError:
            counters.row = words_in_memory(len(counters.row))


os.register_at_fork(after_in_child=claim_all)

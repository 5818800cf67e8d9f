"""Counts of the token cache, of all processes of a node, in a mapped file.

The file and its rows are those of :mod:`keyfront.common.counters`. Only ``keyfront tokens stats``
and ``keyfront metrics`` read these numbers.
"""

from __future__ import annotations

from pathlib import Path

from keyfront.common.counters import Layout, NodeCounters, claim_all, owners
from keyfront.common.file_lock import FileLock

from .invalidation.rules import FIXED

#: The names of the counts, in the order of a row.
NAMES = (
    "hits",  # answered from this process's memory
    "node_hits",  # answered from what the workers share
    "misses",  # asked of Keystone
    "waits",  # waited for another request that asked the same
    "bypassed",  # asked of Keystone because the request must not be answered from a cache
    "not_kept",  # misses whose answer was not kept
    "known",  # first validations answered from the facts about token and caller
    "issued",  # tokens whose facts were kept when they were issued
    "changes_refused",  # changes that were not committed, as others could not be told of them
    "not_followed",  # misses not kept because nobody followed the directory they were made of
    "directory_changes",  # told by directories that are followed
)
HITS, NODE_HITS, MISSES, WAITS, BYPASSED, NOT_KEPT, KNOWN, ISSUED = range(1, 9)
CHANGES_REFUSED, NOT_FOLLOWED, DIRECTORY_CHANGES = range(9, 1 + len(NAMES))

#: The reasons for which Keystone was asked again for a kept answer: its time was over (``time``),
#: a change of a family of tables (a tag of :data:`~.invalidation.rules.FIXED`), or a change of a
#: row that it was made of (``rows``: one user, project or token).
CAUSES = ("time", *FIXED, "rows")
#: The index in a row of the first of them.
ENDED = 1 + len(NAMES)

#: The reasons of what was bypassed: the request itself, more variants than are kept of one caller,
#: or epochs that could not be read.
REASONS = ("request", "variants", "coordinator")
#: The index in a row of the first of them: behind what other versions on the node count there.
BYPASSED_FOR = ENDED + len(CAUSES)

_ROW = 48
_ROWS = 256
_LAYOUT = Layout(_ROW, _ROWS)

__all__ = ["CAUSES", "NAMES", "REASONS", "Counters", "claim_all", "processes", "read"]


class Counters(NodeCounters):
    """The counts of a node.

    :param path: the file; made with mode 0600 if it is missing
    :param lock: the lock over all processes that use the file, held while one takes a row
    :raises CoordinatorError: the file cannot be made or mapped
    """

    __slots__ = ()

    def __init__(self, path: Path, lock: FileLock) -> None:
        super().__init__(path, lock, _LAYOUT)

    def statistics(self) -> dict[str, int]:
        """Return the sums over all processes, by name, and the living ones as ``processes``."""
        return _sums(self.rows())


def read(path: Path) -> dict[str, int]:
    """Return the statistics in a file, without taking part.

    :returns: the counts, as :meth:`Counters.statistics` returns them
    :raises CoordinatorError: there is none, or it is not readable
    """
    return _sums(_LAYOUT.rows_of(path))


def processes(path: Path) -> list[int]:
    """Return the numbers of the living processes that have rows in a file, without taking part.

    :raises CoordinatorError: there is none, or it is not readable
    """
    return owners(_LAYOUT.rows_of(path))


def _sums(rows: list[list[int]]) -> dict[str, int]:
    names = (
        *NAMES, *(f"ended_{cause}" for cause in CAUSES), *(f"bypassed_{why}" for why in REASONS)
    )  # fmt: skip
    counts = {name: sum(row[place] for row in rows) for place, name in enumerate(names, 1)}
    return {**counts, "processes": len(owners(rows))}

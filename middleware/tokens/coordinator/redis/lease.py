"""The mirror: the copy that a process keeps of a table in Redis, for ``consistency = lease``.

It holds the numbers of the slots that were asked for. Its *horizon* is a moment up to which every
change is known here; while that is no longer ago than the lease, an answer is checked without
Redis. Slots under a mark are left out, so that Redis is asked about them: an answer from before a
change whose stamp comes late or never must not stand here for longer than the lease either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence, Set

from ...epochs import Epoch, Slots

_NEVER = float("-inf")


class _Table:
    """Numbers of one generation. They grow or go, so a reader may come while they are set."""

    __slots__ = ("generation", "horizon", "marked", "numbers", "sequence")

    def __init__(self, generation: int, sequence: int, horizon: float) -> None:
        self.generation = generation
        #: The number of the last change that is in the numbers, as all before it are.
        self.sequence = sequence
        self.horizon = horizon
        self.numbers: dict[int, int] = {}
        #: Slots under a mark, at the horizon or since.
        self.marked: Set[int] = frozenset()


class Mirror:
    """The mirror of one process.

    :param lease: seconds for which a change may go unseen, 0.1 to 1
    """

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self._table = _Table(0, 0, _NEVER)

    @property
    def position(self) -> tuple[int, int]:
        """The generation, and the number of the last change that the mirror holds."""
        table = self._table
        return table.generation, table.sequence

    def is_behind(self) -> bool:
        """Return whether its horizon is longer ago than the lease."""
        return time.monotonic() - self._table.horizon > self.lease

    def verdict(self, epoch: Epoch, slots: Slots) -> bool | None:
        """Return whether ``slots`` have not changed since ``epoch``; ``None`` if that is not known.

        :param epoch: the epoch with which the answer was kept
        :param slots: the slots that it depends on
        """
        table = self._table
        if time.monotonic() - table.horizon > self.lease or table.generation != epoch[0]:
            return None
        try:
            return max(slots.read(table.numbers)) <= epoch[1]
        except KeyError:
            return None

    def learn(self, generation: int, sequence: int, numbers: Mapping[int, int]) -> None:
        """Add the numbers of slots, read when ``sequence`` was the number of the last change.

        :param generation: the table's generation then
        :param sequence: the number of its last change then
        :param numbers: numbers by slot, without slots under a mark
        """
        with self._lock:
            table = self._table
            if table.generation != generation:
                # Which of the two is the newer one the next look will tell.
                self._table = _Table(0, 0, _NEVER)
            elif sequence >= table.sequence:
                # Of those under a mark it may have been read before that.
                table.numbers.update(
                    (slot, n) for slot, n in numbers.items() if slot not in table.marked
                )

    def advance(
        self,
        asked: float,
        generation: int,
        sequence: int,
        changes: Mapping[int, Sequence[int]],
        marked: Set[int] = frozenset(),
    ) -> None:
        """Add the changes up to ``sequence``, and move the horizon.

        :param asked: the time of the question, in seconds of the monotonic clock
        :param generation: the table's generation
        :param sequence: the number of its last change
        :param changes: the slots of each change by its number; where one is missing the mirror
            starts anew
        :param marked: slots under a mark, read after that
        """
        with self._lock:
            table = self._table
            if asked < table.horizon:
                return
            missed = range(table.sequence + 1, sequence + 1)
            if table.generation != generation or any(one not in changes for one in missed):
                self._table = _Table(generation, sequence, asked)
                self._table.marked = marked
                return
            numbers = table.numbers
            for number in missed:
                for slot in changes[number]:
                    if numbers.get(slot, number) < number:
                        numbers[slot] = number
            table.marked = marked
            for slot in marked:
                numbers.pop(slot, None)
            # Not before: they say that the numbers are complete.
            table.sequence = max(table.sequence, sequence)
            table.horizon = asked

    def clear(self) -> None:
        """Drop all numbers."""
        self._table = _Table(0, 0, _NEVER)

    def after_fork(self) -> None:
        """Start anew: a thread of the parent may have been changing the mirror."""
        self._lock = threading.Lock()
        self.clear()

"""The record that a process keeps of a table in Redis, to notice that the table was set back.

In one generation numbers only grow, and no number returns after a later one. But a virtual machine
that is set back to a snapshot continues the same life of its Redis with the numbers of that time,
and anybody who may write to Redis may replace a number by an older one. So a process remembers the
last change that it has seen, with a name that tells it from another one of the same number; the
earlier generations; and the last number of each slot. Any answer must agree with all that was
remembered before it was asked for.

Threads may get answers in another order than the table was read in. An answer that was asked for
before another generation became known may be older or newer than that generation: it contradicts
nothing, and is not remembered.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...epochs import Slots
from .scripts import CHANGES

LOG = logging.getLogger(__name__)

#: The first number that Redis' program cannot tell from the next; no change has it.
LAST_NUMBER = 2**53

# Slots of a larger table are not remembered: eight bytes each, in every process.
_SLOTS = 2**20

# Number of former generations that are remembered.
_GENERATIONS = 64


class Seen(NamedTuple):
    """The last change that was seen; with generation 0, none was."""

    generation: int = 0
    sequence: int = 0
    #: The change's random name, which tells it from another change of the same number.
    change: str = ""
    #: The last generations before.
    past: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The change as an argument of Redis' program: generation, number and name."""
        return f"{self.generation:x} {self.sequence} {self.change}" if self.generation else ""

    @property
    def way(self) -> tuple[int, tuple[int, ...]]:
        """The generation, and those before."""
        return self.generation, self.past

    @property
    def field(self) -> str:
        """The name of the table's field with the slots and the name of the change."""
        return f"c{self.sequence}"


class _State(NamedTuple):
    seen: Seen
    #: The highest number of each slot that was seen in that generation.
    numbers: array[int]


class History:
    """The memory of one process of a table; several threads may use it.

    :param where: the name of the table in the log
    """

    def __init__(self, where: str) -> None:
        self._where = where
        # Replaced as a whole: the numbers are those of that generation.
        self._state = _State(Seen(), array("Q"))
        self._lock = threading.Lock()
        self._told = 0

    def after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()

    @property
    def seen(self) -> Seen:
        """The last change that was seen."""
        return self._state.seen

    def numbers(self, generation: int, slots: Slots) -> tuple[int, ...]:
        """Return the highest numbers of slots that were seen in a generation; empty without any.

        :param generation: the generation
        :param slots: the slots, in whose order the numbers are
        """
        state = self._state
        try:
            return slots.read(state.numbers)[1:] if generation == state.seen.generation else ()
        except IndexError:
            return ()

    def holds(self, before: Seen, now: Seen, line: str | None) -> bool:
        """Return whether a table still has the change that was the last one before it was asked.

        :param before: :attr:`seen` from before the question
        :param now: the last change that the table has now
        :param line: the table's field ``before.field``, if it has it
        """
        if before.generation != now.generation:
            return now.generation not in before.past
        if now.sequence < before.sequence:
            return False
        change = (line or "").rpartition(":")[2]
        forgotten = not change and now.sequence - before.sequence >= CHANGES
        return forgotten or change == before.change

    def grew(self, before: tuple[int, ...], numbers: Sequence[int]) -> bool:
        """Return whether no slot has a smaller number than before; a mark counts as grown.

        :param before: the result of :meth:`numbers` from before the question
        :param numbers: the numbers of the same slots now; below zero: under a mark
        """
        if not before or before == tuple(numbers):
            return True
        pairs = zip(before, numbers, strict=True)
        return all(number >= least or number < 0 for least, number in pairs)

    def is_new(self, now: Seen) -> bool:
        """Return whether a change is another one than the last that was seen."""
        return now[:3] != self._state.seen[:3]

    def note(
        self,
        before: Seen,
        now: Seen,
        slot_count: int,
        slots: Iterable[int] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Remember the last change of a table, and the numbers of slots.

        :param before: :attr:`seen` from before the question
        :param now: the last change of the table
        :param slot_count: number of slots of the table
        :param slots: the slots that were read
        :param numbers: their numbers, in the same order; below zero: under a mark
        """
        with self._lock:
            state = self._state
            last = state.seen
            if now.generation != last.generation:
                if before.way != last.way:
                    return  # which of the two is the newer one the next answer tells
                size = slot_count if slot_count <= _SLOTS else 0
                now = now._replace(past=_and(last.past, last.generation))
                state = self._state = _State(now, array("Q", bytes(8 * size)))
            elif now.sequence > last.sequence:
                state = self._state = _State(now._replace(past=last.past), state.numbers)
            highest = state.numbers
            for slot, number in zip(slots, numbers, strict=True):
                # No change has a larger one; nothing is fresh in such a slot anyway.
                if 0 < number < LAST_NUMBER and slot < len(highest) and highest[slot] < number:
                    highest[slot] = number

    def complain(self, before: Seen, generation: int) -> None:
        """Trust nothing any more in a generation that was set back, and log it once.

        :param before: :attr:`seen` from before the question whose answer shows it
        :param generation: the generation
        """
        with self._lock:
            last = self._state.seen
            if before.way == last.way:
                past = last.past
                if generation != last.generation:
                    past = _and(past, last.generation)
                self._state = _State(Seen(generation, LAST_NUMBER, "0", past), array("Q"))
            told, self._told = self._told, generation
        if generation != told:
            LOG.error(
                "%s: its numbers went back, so nothing that is kept stands: the server was set "
                "back to a snapshot, or somebody else writes there",
                self._where,
            )


def _and(past: tuple[int, ...], generation: int) -> tuple[int, ...]:
    """Return former generations with one more, the last ones of them."""
    return (*past, generation)[-_GENERATIONS:] if generation not in (0, *past) else past

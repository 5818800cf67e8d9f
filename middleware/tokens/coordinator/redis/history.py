"""What a process has seen of a table in Redis, so that it notices when that is set back.

In one generation numbers only grow, and none comes back that another has followed. A virtual
machine that is set back to a snapshot goes on in the same life, with the numbers of then, and who
may write to Redis may put an older number in the place of a newer one. So a process remembers the
last change that it has seen, by what tells it from another one of the same number, the generations
before, and the number of each slot that it was told. What it remembered before it asked, the answer
must still hold.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...epochs import Slots
from .scripts import CHANGES

LOG = logging.getLogger(__name__)

#: Numbers up to here are told apart by Redis' program; no change has it.
LAST_NUMBER = 2**53

# Slots of a larger table are not remembered: eight bytes each, in every process.
_SLOTS = 2**20

# How many generations are remembered.
_GENERATIONS = 64


class Seen(NamedTuple):
    """The last change that was seen; of no generation: none."""

    generation: int = 0
    sequence: int = 0
    #: What tells it from another change of the same number.
    change: str = ""
    #: The last generations before.
    past: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """As the program takes it."""
        return f"{self.generation:x} {self.sequence} {self.change}" if self.generation else ""

    @property
    def field(self) -> str:
        """The table's field that tells of it."""
        return f"c{self.sequence}"


class _State(NamedTuple):
    seen: Seen
    #: Of each slot the highest that was seen in that generation.
    numbers: array[int]


class History:
    """What one process has seen. It may be asked and told by several threads.

    :param where: the table, for the log
    """

    def __init__(self, where: str) -> None:
        self._where = where
        # Replaced as a whole: the numbers are those of that generation.
        self._state = _State(Seen(), array("Q"))
        self._told = 0

    @property
    def seen(self) -> Seen:
        """The last change."""
        return self._state.seen

    def numbers(self, generation: int, slots: Slots) -> tuple[int, ...]:
        """Return the numbers of slots as they were last seen; empty if they were not."""
        state = self._state
        try:
            return slots.read(state.numbers)[1:] if generation == state.seen.generation else ()
        except IndexError:
            return ()

    def holds(self, before: Seen, now: Seen, line: str | None) -> bool:
        """Whether a table still has the change that was the last one before it was asked.

        :param before: what :attr:`seen` was then
        :param now: the last one that it has now
        :param line: its field of the former
        """
        if before.generation != now.generation:
            return now.generation not in before.past
        if now.sequence < before.sequence:
            return False
        change = (line or "").rpartition(":")[2]
        forgotten = not change and now.sequence - before.sequence >= CHANGES
        return forgotten or change == before.change

    def grew(self, before: tuple[int, ...], numbers: Sequence[int]) -> bool:
        """Whether no slot has a smaller number than before; one under a mark shows none.

        :param before: from :meth:`numbers`, before they were asked for
        """
        if not before or before == tuple(numbers):
            return True
        pairs = zip(before, numbers, strict=True)
        return all(number >= least or number < 0 for least, number in pairs)

    def is_new(self, now: Seen) -> bool:
        """Whether a change is another one than the last that was seen."""
        return now[:3] != self._state.seen[:3]

    def note(
        self, seen: Seen, slot_count: int, slots: Iterable[int], numbers: Sequence[int]
    ) -> None:
        """Remember what a table holds."""
        state = self._state
        last = state.seen
        if seen.generation != last.generation:
            past = last.past
            if last.generation and last.generation not in past:
                past = (*past, last.generation)[-_GENERATIONS:]
            seen = seen._replace(past=past)
            size = slot_count if slot_count <= _SLOTS else 0
            state = self._state = _State(seen, array("Q", bytes(8 * size)))
        elif seen.sequence > last.sequence:
            state = self._state = _State(seen._replace(past=last.past), state.numbers)
        highest = state.numbers
        for slot, number in zip(slots, numbers, strict=True):
            # No change has a larger one; nothing is fresh in such a slot anyway.
            if 0 < number < LAST_NUMBER and slot < len(highest) and highest[slot] < number:
                highest[slot] = number

    def complain(self, generation: int) -> None:
        """Believe nothing of a generation any more that was set back, and say so once."""
        numbers, past = self._state.numbers, self._state.seen.past
        self._state = _State(Seen(generation, LAST_NUMBER, "0", past), numbers)
        if generation != self._told:
            self._told = generation
            LOG.error(
                "%s: its numbers went back, so nothing that is kept stands: the server was set "
                "back to a snapshot, or somebody else writes there",
                self._where,
            )

"""The epoch table in one piece of memory: its layout, its marks and stamps, and its checks.

Every method that writes is called under the coordinator's lock, by one process at a time. A process
may be killed between any two lines of it: the table is then either as before, or has a mark that
:meth:`Table.recover` completes, or fails :meth:`Table.fault` and is rebuilt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Iterator
from itertools import compress
from pathlib import Path

from ..epochs import ALL_SLOT, DIRTY, MARK_SECONDS, MARK_TAGS, OWNER_BYTES
from .mark_owners import beginning, begins

MAGIC = int.from_bytes(b"keyfront", "little")
#: Version of the layout, raised when it changes; a table of another layout is rebuilt.
LAYOUT = 2
WORD = 8

_MASK = 2**64 - 1
_MARK_NS = int(MARK_SECONDS * 1e9)

# Words of the header. Those up to the digest never change in the life of a table.
_MAGIC, _LAYOUT, _GENERATION, _SLOTS, _BOOT, _SETTLED = range(6)
_SECRET, _DIGEST, _FIXED_WORDS = 8, 12, 12
_SEQUENCE, _CHECKSUM, _CHANGES, _RECOVERED, _FLUSHES, _SERIAL, _WRITING, _ENDED = range(16, 24)
_HEADER_WORDS = 64

#: Changes that can be under way at once in all processes; one more is refused until one ends.
MARKS = 256
# A mark: the time in nanoseconds from which on its owner is looked for (0: a free place), serial
# number, number of slots, bytes of its owner, the owner, the slots.
_OWNER = 4
_MARK_HEAD = _OWNER + OWNER_BYTES // WORD
_MARK_WORDS = _MARK_HEAD + MARK_TAGS
_FIRST_SLOT = _HEADER_WORDS + MARKS * _MARK_WORDS
_PLACES = range(_HEADER_WORDS, _FIRST_SLOT, _MARK_WORDS)


def boot_word() -> int:
    """Return a number of this boot: the clock of the marks starts anew with each boot."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = ""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def size(slot_count: int) -> int:
    """Return the bytes that a table of ``slot_count`` slots takes."""
    return (_FIRST_SLOT + slot_count) * WORD


def _written(values: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the slots that were ever written, with their values: few of many."""
    numbers = values.tolist()
    return zip(compress(range(len(numbers)), numbers), filter(None, numbers), strict=True)


def _mix(slot: int, value: int) -> int:
    """Return a slot's part of the checksum; 0 while it was never written."""
    if value == 0:
        return 0
    mixed = ((value ^ (slot * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 32)


class Table:
    """An epoch table in a piece of memory.

    :param memory: the whole memory of a table that :meth:`make` has laid out, writable
    """

    __slots__ = ("_fixed", "_words", "generation", "name", "slot_count", "values")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._fixed = self._words[: _DIGEST + 2].tobytes()
        self.generation = self._words[_GENERATION]
        #: The word of the generation in memory, which shows junk that somebody wrote over it.
        self.name = self._words[_GENERATION : _GENERATION + 1]
        self.slot_count = self._words[_SLOTS]
        #: The words of the slots, read without a lock: an aligned word is read and written whole.
        self.values = self._words[_FIRST_SLOT:]

    @classmethod
    def make(cls, memory: memoryview, slot_count: int, settled: int) -> Table:
        """Lay out a new table, with a generation and a secret of its own.

        :param memory: writable, zeroed memory of :func:`size` bytes
        :param slot_count: number of slots
        :param settled: nanoseconds of the monotonic clock before which no change may be marked
        """
        words = memory.cast("Q")
        words[_MAGIC] = MAGIC
        words[_LAYOUT] = LAYOUT
        words[_GENERATION] = 1 + secrets.randbelow(2**63 - 1)
        words[_SLOTS] = slot_count
        words[_BOOT] = boot_word()
        words[_SETTLED] = settled
        memory[_SECRET * WORD : (_SECRET + 4) * WORD] = secrets.token_bytes(32)
        memory[_DIGEST * WORD : (_DIGEST + 2) * WORD] = cls._digest(memory)
        words[_SEQUENCE] = 1
        words.release()
        return cls(memory)

    @staticmethod
    def _digest(memory: memoryview) -> bytes:
        return hashlib.blake2b(memory[: _FIXED_WORDS * WORD], digest_size=16).digest()

    @classmethod
    def fault(cls, memory: memoryview) -> str | None:
        """Return the reason for which ``memory`` is no table of this boot and layout, or ``None``.

        :param memory: the whole memory
        :returns: a clause for the log, such as "it is too short"
        """
        if len(memory) < _FIRST_SLOT * WORD:
            return "it is too short"
        if len(memory) % WORD:
            return "it ends within a word"
        words = memory.cast("Q")
        try:
            if words[_MAGIC] != MAGIC:
                return "it is no epoch table"
            if words[_LAYOUT] != LAYOUT:
                return f"it has layout {words[_LAYOUT]}, this keyfront uses {LAYOUT}"
            if memory[_DIGEST * WORD : (_DIGEST + 2) * WORD] != cls._digest(memory):
                return "its header was changed"
            if size(words[_SLOTS]) != len(memory):
                return f"it has {len(memory)} bytes instead of {size(words[_SLOTS])}"
            if words[_BOOT] != boot_word():
                return "it is from before the machine started"
            checksum = 0
            newest = words[_SEQUENCE]
            for slot, value in _written(words[_FIRST_SLOT:]):
                checksum ^= _mix(slot, value)
                if value > newest and value != DIRTY:
                    return "a slot is newer than the table"
            # Not if a writer was killed in between: see mend().
            if checksum != words[_CHECKSUM] and not words[_WRITING]:
                return "its slots do not match their checksum"
            for place in _PLACES:
                first, count = place + _MARK_HEAD, words[place + 2]
                if words[place] and (
                    not 0 < count <= MARK_TAGS
                    or words[place + 3] > OWNER_BYTES
                    or max(words[first : first + count]) >= words[_SLOTS]
                ):
                    return "a mark in it is damaged"
        finally:
            words.release()
        return None

    def is_whole(self) -> bool:
        """Whether the part that never changes is as it was when this table was mapped."""
        return self._words[: _DIGEST + 2] == memoryview(self._fixed).cast("Q")

    def mend(self) -> None:
        """Make the checksum right if a writer was killed between a slot and its checksum."""
        words = self._words
        if words[_WRITING]:
            checksum = 0
            for slot, value in _written(self.values):
                checksum ^= _mix(slot, value)
            words[_CHECKSUM] = checksum
            words[_WRITING] = 0

    @property
    def secret(self) -> bytes:
        """The table's 32 random bytes, for keys and signatures of what depends on it."""
        return self._words[_SECRET : _SECRET + 4].tobytes()

    @property
    def settled(self) -> int:
        """Nanoseconds of the monotonic clock from which on changes may begin."""
        return self._words[_SETTLED]

    @property
    def ended(self) -> int:
        """Nanoseconds of the monotonic clock when another version's table was last removed."""
        return self._words[_ENDED]

    @ended.setter
    def ended(self, now: int) -> None:
        self._words[_ENDED] = now

    @property
    def sequence(self) -> int:
        """The number of the last complete change."""
        return self._words[_SEQUENCE]

    def begin(self, now: int) -> None:
        """Mark everything in a new table: changes that an older one had marked may commit yet.

        :param now: nanoseconds of the monotonic clock
        """
        self.mark((ALL_SLOT,), now - _MARK_NS, beginning(self.generation))

    def mark(self, slots: tuple[int, ...], now: int, owner: str = "") -> int | None:
        """Make ``slots`` dirty; return the mark's serial number, or ``None`` if there is no room.

        :param slots: at most :data:`~..epochs.MARK_TAGS` slots
        :param now: the time, in nanoseconds of the monotonic clock
        :param owner: the writer's name, up to :data:`~..epochs.OWNER_BYTES` bytes of ASCII
        :raises ValueError: the owner is too long or not ASCII
        """
        name = owner.encode("ascii")
        if len(name) > OWNER_BYTES:
            raise ValueError(f"{len(name)} bytes of owner, at most {OWNER_BYTES}")
        words = self._words
        self.mend()
        place = self._find(0)
        if place is None:
            return None
        serial = words[_SERIAL] = words[_SERIAL] + 1
        words[place + 1] = serial
        words[place + 2] = len(slots)
        words[place + 3] = len(name)
        padded = memoryview(name.ljust(OWNER_BYTES, b"\0")).cast("Q")
        words[place + _OWNER : place + _MARK_HEAD] = padded
        for index, slot in enumerate(slots, place + _MARK_HEAD):
            words[index] = slot
        # From here on the mark counts; a writer killed before has changed nothing.
        words[place] = now + _MARK_NS
        words[_WRITING] = 1
        for slot in slots:
            self._set(slot, DIRTY)
        words[_WRITING] = 0
        return serial

    def stamp(self, slots: Iterable[int], serial: int | None = None) -> None:
        """Give ``slots`` the next number, and free the mark ``serial`` if it is still there.

        :param slots: the slots of the change
        :param serial: the mark's serial number; ``None`` for a change without a mark
        """
        words = self._words
        self.mend()
        # A mark that was recovered meanwhile is gone; its slots are stamped once more.
        place = self._find(serial) if serial is not None else None
        number = words[_SEQUENCE] + 1
        # The number first: a fill that sees it starts after the commit.
        words[_SEQUENCE] = number
        words[_CHANGES] += 1
        busy = self._marked(besides=place)
        words[_WRITING] = 1
        for slot in slots:
            self._set(slot, DIRTY if slot in busy else number)
        words[_WRITING] = 0
        if place is not None:
            words[place] = 0

    def old_marks(self, now: int) -> list[tuple[int, str, float]]:
        """Return serial number, owner and age in seconds of each mark whose time is over.

        :param now: the time, in nanoseconds of the monotonic clock
        """
        words = self._words
        found = []
        for place in self._places():
            if words[place] <= now:
                owner = self._owner_of(place)
                # The one with which the table begins is looked at from its beginning on.
                age = (now - words[place] + (0 if begins(owner) else _MARK_NS)) / 1e9
                found.append((words[place + 1], owner, age))
        return found

    def recover(self, serials: Collection[int]) -> int:
        """Stamp the marks of these serial numbers that are still there; return the changes' number.

        The mark with which a table begins is no change, and is not counted.
        """
        words = self._words
        self.mend()
        found = 0
        for place in self._places():
            if words[place + 1] in serials:
                change = not begins(self._owner_of(place))
                self.stamp(self._slots_of(place), words[place + 1])
                found += change
                words[_CHANGES] -= not change
        words[_RECOVERED] += found
        return found

    def flush(self) -> None:
        """Make every answer stale."""
        self.stamp((ALL_SLOT,))
        self._words[_FLUSHES] += 1

    def statistics(self) -> dict[str, int]:
        """Return the table's counts by name, as :meth:`.Coordinator.statistics` has them."""
        words = self._words
        marks = sum(1 for place in self._places() if not begins(self._owner_of(place)))
        return {
            "changes": words[_CHANGES],
            "changes_under_way": marks,
            "changes_recovered": words[_RECOVERED],
            "flushes": words[_FLUSHES],
            "sequence": words[_SEQUENCE],
            "slots": self.slot_count,
        }

    def _find(self, serial: int) -> int | None:
        """Return the place of the mark ``serial``; with 0, a free place; ``None`` without one."""
        if not serial:
            deadlines = self._deadlines()
            return _PLACES[deadlines.index(0)] if 0 in deadlines else None
        for place in self._places():
            if self._words[place + 1] == serial:
                return place
        return None

    def _places(self) -> Iterator[int]:
        """Yield the places of the marks."""
        return compress(_PLACES, self._deadlines())

    def _deadlines(self) -> list[int]:
        """Return the deadlines of all places, read at once."""
        return self._words[_PLACES.start : _PLACES.stop : _PLACES.step].tolist()

    def _marked(self, besides: int | None) -> set[int]:
        found: set[int] = set()
        for place in self._places():
            if place != besides:
                found.update(self._slots_of(place))
        return found

    def _owner_of(self, place: int) -> str:
        owner = self._words[place + _OWNER : place + _MARK_HEAD].tobytes()[: self._words[place + 3]]
        return owner.decode("ascii", "replace")

    def _slots_of(self, place: int) -> list[int]:
        first = place + _MARK_HEAD
        return self._words[first : first + self._words[place + 2]].tolist()

    def _set(self, slot: int, value: int) -> None:
        words = self._words
        index = _FIRST_SLOT + slot
        words[_CHECKSUM] ^= _mix(slot, words[index]) ^ _mix(slot, value)
        words[index] = value

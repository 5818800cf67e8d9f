"""Leases: deadlines of answers that were made of something outside of the database.

A process that follows a directory announces its changes through the epochs. That it follows it,
and has missed nothing up to a moment, stands in a mapped file: a deadline for each directory that
is followed. Whoever checks an answer reads the deadline from memory, without a lock or a system
call. If the follower dies, stands still or is cut off, the deadline passes, and Keystone is asked.

A deadline is a claim that stays true: two processes that follow the same directory may both write.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped, boot_word
from keyfront.errors import CoordinatorError

LOG = logging.getLogger(__name__)

#: The file's name.
NAME: Final = "followed"

#: Seconds for which an answer stands after the moment up to which all changes are known.
SECONDS: Final = 0.8

_PLACES = 512
_WORDS = 1 + 2 * _PLACES
# The first word tells the boot, then come names, then deadlines.
_DEADLINES = 1 + _PLACES
_LOOK_SECONDS = 0.5


class Leases:
    """The leases of a node.

    :param folder: the folder of the files that the workers share
    :raises CoordinatorError: the file cannot be made or mapped
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = FileLock(folder / f"{NAME}.lock")
        self._looked = 0.0
        self._map()

    def _map(self) -> None:
        self._file = Mapped(self._path, _WORDS * 8)
        memory = memoryview(self._file.map)
        self._words = memory.cast("Q")
        #: The deadlines, in seconds of the monotonic clock, which all processes share.
        self.deadlines = memory[_DEADLINES * 8 :].cast("d")
        self._places: dict[str, int] = {}
        if self._words[0] != boot_word():
            with self._lock:
                if self._words[0] != boot_word():  # the clock has begun anew
                    self._words[:] = memoryview(bytes(_WORDS * 8)).cast("Q")
                    self._words[0] = boot_word()

    def look(self) -> None:
        """Map the file anew, if another one has taken its place; it looks twice a second at most.

        :raises CoordinatorError: the file cannot be made or mapped
        """
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            if not self._file.is_there():
                self._map()
            self._looked = now

    def grant(self, name: str, moment: float) -> None:
        """Set a lease: all changes of what is followed are known up to a moment.

        :param name: the name of what is followed, the same in all processes
        :param moment: the moment, in seconds of the monotonic clock; in the future: it need not be
            followed until then
        :raises CoordinatorError: the file cannot be used
        """
        self.look()
        place = self._place(name, make=True)
        if place >= 0:
            there = self.deadlines[place]
            # What is said to stand for longer is of one that need not be followed, or damaged.
            if not moment + SECONDS <= there <= time.monotonic() + 2 * SECONDS:
                self.deadlines[place] = moment + SECONDS

    def withdraw(self, name: str) -> None:
        """End a lease that was set to a moment in the future; one of a follower is left as it is.

        :param name: the name of what is followed
        :raises CoordinatorError: the file cannot be used
        """
        self.look()
        place = self._place(name, make=True)
        if place >= 0 and self.deadlines[place] > time.monotonic() + SECONDS:
            self.deadlines[place] = 0.0

    def until(self, name: str) -> float:
        """Return the deadline of answers that were made of what is followed.

        :param name: the name of what is followed
        :returns: seconds of the monotonic clock; 0 if nobody follows it
        """
        place = self._place(name)
        deadline = 0.0 if place < 0 else self.deadlines[place]
        return deadline if deadline > 0.0 else 0.0  # nor is a damaged one that is no number

    def stand(self, names: frozenset[str]) -> bool:
        """Return whether the leases of all these names stand at this moment."""
        now = time.monotonic()
        return all(now < self.until(name) for name in names)

    def standing(self) -> int:
        """Return the number of leases that stand now."""
        return _standing(self.deadlines)

    def _place(self, name: str, *, make: bool = False) -> int:
        place = self._places.get(name, -1)
        if place >= 0:
            return place
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        number = int.from_bytes(digest, "little") or 1
        place = self._found(number)
        if place < 0 and make:
            with self._lock:
                place = self._found(number)
                free = self._found(0)
                if place < 0 and free >= 0:
                    self.deadlines[free] = 0.0
                    self._words[1 + free] = number
                    place = free
        if place >= 0:
            self._places[name] = place
        return place

    def _found(self, number: int) -> int:
        try:
            return self._words[1 : 1 + _PLACES].tolist().index(number)
        except ValueError:
            return -1


def standing(folder: Path) -> int:
    """Return the number of leases of a node that stand now, without taking part.

    :param folder: the folder of the files that the workers share
    :returns: the number; 0 where there is no file, or one that cannot be read
    """
    try:
        words = array("Q", (folder / NAME).read_bytes())
    except (OSError, ValueError):
        return 0
    if len(words) != _WORDS or words[0] != boot_word():
        return 0
    return _standing(memoryview(words).cast("B")[_DEADLINES * 8 :].cast("d"))


def _standing(deadlines: Iterable[float]) -> int:
    now = time.monotonic()
    return sum(1 for deadline in deadlines if deadline > now)


class ProcessLeases:
    """The leases of this process: the one place that keeps them."""

    def __init__(self) -> None:
        self.leases: Leases | None = None

    def until(self, names: tuple[str, ...]) -> float:
        """Return the deadline of the lease that ends first.

        :param names: the names of what is followed, at least one
        :returns: seconds of the monotonic clock; 0 if one of them is not followed
        """
        leases = self.leases
        if leases is None:
            return 0.0
        return min(map(leases.until, names))

    def make(self, folder: Path) -> Leases | None:
        """Map the leases of a folder, and keep them for this process.

        :param folder: the folder of the files that the workers share
        :returns: the leases; ``None`` where the file cannot be made: then nothing is followed
        """
        try:
            self.leases = Leases(folder)
        except CoordinatorError as error:
            LOG.error("directories are not followed: %s", error)
            self.leases = None
        return self.leases


leases = ProcessLeases()
"""The leases of this process."""

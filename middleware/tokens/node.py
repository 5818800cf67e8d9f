"""What the workers of a node share: entries, who asks Keystone what, and counts."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable
from pathlib import Path

from keyfront.errors import CoordinatorError

from . import counters, store
from .counters import WAITS, Counters
from .entries import Entry
from .lock import FileLock
from .store import Store

LOG = logging.getLogger(__name__)

# Seconds between looks for another's answer: a tenth of what a validation takes at its fastest.
_FIRST_LOOK = 0.0005
_LONGEST_LOOK = 0.01

# Files in the folder.
_ANSWERS, _REFUSALS, _COUNTERS, _LOCK = "answers", "refusals", "counters", "node-lock"


class Node:
    """Shared by all workers that use the same folder.

    :param folder: of the epoch table
    :param size: bytes of entries, an eighth of it for refusals
    :param flight_timeout: seconds to wait for another request that asks the same
    :raises CoordinatorError: a file cannot be made
    """

    def __init__(self, folder: Path, *, size: int, flight_timeout: float) -> None:
        self._folder = folder
        self._size = size
        self._flight_timeout = flight_timeout
        self._lock = FileLock(folder / _LOCK)
        self.counters = Counters(folder / _COUNTERS, self._lock)
        self._answers: Store | None = None
        self._refusals: Store | None = None

    def start(self, secret: bytes) -> None:
        """Use the entries that go with an epoch table; those of another are dropped.

        :raises CoordinatorError: a file cannot be made
        """
        with self._lock:
            self._answers = self._refusals = None
            refusals = self._size // 8
            self._answers = Store(self._folder / _ANSWERS, self._size - refusals, secret)
            self._refusals = Store(self._folder / _REFUSALS, refusals, secret)

    def find(self, key: bytes) -> Entry | None:
        """Return the entry that some worker stored, whether or not it still stands."""
        for ring in (self._answers, self._refusals):
            packed = ring.get(key) if ring is not None else None
            if packed is None:
                continue
            try:
                return Entry.unpack(packed)
            except (ValueError, TypeError, struct.error):
                # Signed with our key, so it is another version's.
                return None
        return None

    def ask(self, key: bytes) -> bool:
        """Say that this request asks Keystone; ``False`` if another is doing so.

        :raises CoordinatorError: the lock is not to be had
        """
        if self._answers is None or not self._flight_timeout:
            return True
        with self._lock:
            return self._answers.ask(key, self._flight_timeout)

    def answered(self, key: bytes) -> None:
        """Say that asking has ended."""
        answers = self._answers
        if answers is None or not answers.asked(key):  # usually said by keep()
            return
        try:
            with self._lock:
                answers.answered(key)
        except CoordinatorError as error:  # others wait for flight_timeout, no longer
            LOG.warning("token cache: %s", error)

    def wait(self, key: bytes, stands: Callable[[Entry], bool]) -> Entry | None:
        """Wait for the answer that another request asks for; ``None`` if it brings none."""
        self.counters.row[WAITS] += 1
        deadline = time.monotonic() + self._flight_timeout
        pause = _FIRST_LOOK
        while self._answers is not None:
            asked = self._answers.asked(key) and time.monotonic() < deadline
            entry = self.find(key)
            if entry is not None and stands(entry):
                return entry
            if not asked:
                break
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOOK)
        return None

    def keep(self, key: bytes, entry: Entry) -> None:
        """Store an entry for all workers, and say that asking for it has ended."""
        answers, refusals = self._answers, self._refusals
        if answers is None or refusals is None:
            return
        packed = entry.pack()
        ring, other = (refusals, answers) if entry.negative else (answers, refusals)
        try:
            with self._lock:
                ring.put(key, packed)
                other.drop(key)
                answers.answered(key)
        except CoordinatorError as error:
            LOG.warning("token cache: %s", error)

    def renew(self, key: bytes, entry: Entry) -> None:
        """Store an entry again if it is about to be overwritten though it is in use."""
        ring = self._refusals if entry.negative else self._answers
        if ring is not None and ring.ages(key):
            self.keep(key, entry)

    def statistics(self) -> dict[str, int]:
        """Return counts by name."""
        return statistics(self._folder)


def statistics(folder: Path) -> dict[str, int]:
    """Return counts by name of the node that uses ``folder``, without taking part.

    :raises CoordinatorError: there are none, or they are not readable
    """
    counts = counters.read(folder / _COUNTERS)
    for name, file in (("answers", _ANSWERS), ("refusals", _REFUSALS)):
        counts |= {f"{name}_{key}": value for key, value in store.read(folder / file).items()}
    return counts

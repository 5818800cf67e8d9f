"""What the workers of a node share: entries, who asks Keystone what, and counts."""

from __future__ import annotations

import logging
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError

from . import counters
from . import ring as store
from .counters import WAITS, Counters
from .entries import FORM, Entry
from .epochs import DIGEST
from .ring import Store

LOG = logging.getLogger(__name__)

# Seconds between looks for another's answer: a tenth of what a validation takes at its fastest.
_FIRST_LOOK = 0.0005
_LONGEST_LOOK = 0.01

# Seconds to wait for the lock, and between looks at the files.
_LOCK_SECONDS = 0.1
_CHECK_SECONDS = 0.5

# What reading or writing a file that somebody wrote junk into may raise.
_DAMAGE = (ValueError, OverflowError, IndexError, TypeError, struct.error)

# Files in the folder. Those with entries are of one form of entry and one size: while workers are
# replaced by others with another one, each have their own.
_ANSWERS, _REFUSALS, _COUNTERS, _LOCK = "answers", "refusals", "counters", "node-lock"
_RING = re.compile(rf"({_ANSWERS}|{_REFUSALS})-[0-9a-f]+-\d+-\d+")


class Node:
    """Shared by all workers that use the same folder.

    Nothing here is needed for a right answer: what fails is logged, and Keystone is asked.

    :param folder: of the epoch table
    :param size: bytes of entries, an eighth of it for refusals
    :param flight_timeout: seconds to wait for another request that asks the same
    :raises CoordinatorError: a file cannot be made
    """

    def __init__(self, folder: Path, *, size: int, flight_timeout: float) -> None:
        self._folder = folder
        self._size = size
        self._flight_timeout = flight_timeout
        # A request does not wait for it longer than a good part of what asking Keystone takes.
        self._lock = FileLock(folder / _LOCK, seconds=_LOCK_SECONDS)
        self.counters = Counters(folder / _COUNTERS, FileLock(folder / _LOCK))
        self._secret = b""
        self._answers: Store | None = None
        self._refusals: Store | None = None
        self._checked = 0.0

    def start(self, secret: bytes) -> None:
        """Use the entries that go with an epoch table; those of another are dropped.

        :raises CoordinatorError: a file cannot be made
        """
        self._secret = secret
        with self._lock:
            self._answers = self._refusals = None
            refusals = self._size // 8
            form = f"{DIGEST}-{FORM}-{self._size}"
            answers = Store(self._folder / f"{_ANSWERS}-{form}", self._size - refusals, secret)
            self._refusals = Store(self._folder / f"{_REFUSALS}-{form}", refusals, secret)
            self._answers = answers
            for path in rings(self._folder):
                if not path.name.endswith(form):
                    # Who still has it mapped goes on with it, or makes it anew.
                    with suppress(FileNotFoundError):
                        path.unlink()

    def check(self) -> None:
        """Look, now and then, whether the files are still there, and make them anew if not.

        Before any of them is touched: a mapping that reaches beyond its file ends the process.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        try:
            self.counters.claim()
            for ring in (self._answers, self._refusals):
                if ring is None or not ring.is_whole():
                    LOG.warning("%s: the shared answers are gone, and made anew", self._folder)
                    self.start(self._secret)
                    return
        except CoordinatorError as error:
            LOG.warning("token cache: answers are not shared: %s", error)

    def find(self, key: bytes) -> Entry | None:
        """Return the entry that some worker stored, whether or not it still stands."""
        try:
            for ring in (self._answers, self._refusals):
                packed = ring.get(key) if ring is not None else None
                if packed is not None:
                    return Entry.unpack(packed)
        except _DAMAGE:
            self._checked = 0.0
        return None

    def ask(self, key: bytes) -> bool:
        """Say that this request asks Keystone; ``False`` if another is doing so."""
        answers = self._answers
        if answers is None or not self._flight_timeout:
            return True
        try:
            with self._lock:
                return answers.ask(key, self._flight_timeout)
        except (CoordinatorError, *_DAMAGE):
            return True

    def answered(self, key: bytes) -> None:
        """Say that asking has ended."""
        answers = self._answers
        try:
            if answers is not None and answers.asked(key):  # usually said by keep()
                with self._lock:
                    answers.answered(key)
        except (CoordinatorError, *_DAMAGE):
            pass  # others wait for flight_timeout, no longer

    def wait(self, key: bytes, stands: Callable[[Entry], bool]) -> Entry | None:
        """Wait for the answer that another request asks for; ``None`` if it brings none."""
        self.counters.count(WAITS)
        deadline = time.monotonic() + self._flight_timeout
        pause = _FIRST_LOOK
        while True:
            asked = self._is_asked(key) and time.monotonic() < deadline
            entry = self.find(key)
            if entry is not None and stands(entry):
                return entry
            if not asked:
                return None
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOOK)

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
            LOG.warning("token cache: an answer is not shared: %s", error)
        except _DAMAGE:
            self._checked = 0.0

    def renew(self, key: bytes, entry: Entry) -> None:
        """Store an entry again if it is about to be overwritten though it is in use."""
        ring = self._refusals if entry.negative else self._answers
        try:
            if ring is not None and ring.ages(key):
                self.keep(key, entry)
        except _DAMAGE:
            self._checked = 0.0

    def statistics(self) -> dict[str, int]:
        """Return counts by name."""
        return statistics(self._folder)

    def _is_asked(self, key: bytes) -> bool:
        try:
            return self._answers is not None and self._answers.asked(key)
        except _DAMAGE:
            return False


def statistics(folder: Path) -> dict[str, int]:
    """Return counts by name of the node that uses ``folder``, without taking part.

    :raises CoordinatorError: there are none, or they are not readable
    """
    counts = counters.read(folder / _COUNTERS)
    for name in (_ANSWERS, _REFUSALS):
        found = [path for path in rings(folder) if path.name.startswith(name)]
        if not found:
            raise CoordinatorError(f"{folder / name}: there is none")
        ring = store.read(max(found, key=lambda path: path.stat().st_ctime))
        counts |= {f"{name}_{key}": value for key, value in ring.items()}
    return counts


def rings(folder: Path) -> list[Path]:
    """Return the files with the entries of the workers that use ``folder``."""
    return [path for path in folder.iterdir() if _RING.fullmatch(path.name)]

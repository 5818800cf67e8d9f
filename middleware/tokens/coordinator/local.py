"""The coordinator of one node: an epoch table in a mapped file that all its processes share.

The file lies in a folder of its own, mode 0700, best on tmpfs. Reading takes no lock and no system
call; writing takes a file lock that the kernel releases if its holder is killed.

The file may vanish or be found damaged, and be made anew, while others still have the old one
mapped. So a mapping is trusted for :data:`LEASE_SECONDS` at a time, after which its file is looked
for again, and in a new file no change begins before all such leases on an older one have ended.

The marks of the older file are lost, and their writers may have been killed in commits that become
visible later. So a new file begins with a mark of everything, which stays until no transaction from
before is under way in the database (``mark_owners.py``).

Processes of another version, which number slots otherwise, have a file of their own beside it. A
change removes that file, before and after it is committed, so that those processes start anew, and
waits for their leases.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import ClassVar

from keyfront.common.file_lock import LOCK_SECONDS, FileLock
from keyfront.common.mmap_file import boot_word
from keyfront.errors import CoordinatorError

from ..epochs import (
    ALL_SLOT,
    DIGEST,
    DIRTY,
    MARK_SECONDS,
    MARK_TAGS,
    OWNER_BYTES,
    Epoch,
    Mark,
    Slots,
    settled_by_age,
)
from ..folder import check_folder
from ..invalidation.rules import FIXED
from .mark_owners import beginning, begins

LOG = logging.getLogger(__name__)

#: Slots of a new table, half a MiB: an answer with 20 slots shares one with the change of an
#: unrelated tag in 1 of 3000 cases.
SLOTS = 65536

#: Seconds for which a mapping is trusted without looking for its file again.
LEASE_SECONDS = 0.5
_LEASE = int(LEASE_SECONDS * 1e9)
# Nanoseconds before changes begin in a new file: the lease, and as much again to lay it out.
_SETTLE = 2 * _LEASE

# How often a new file is made, if it takes longer than the others wait for it.
_TRIES = 3

# Nanoseconds within which a file system may give two writes one time: some ticks of the kernel.
_TICK = 100_000_000

# Nanoseconds between looks for abandoned marks while something is dirty.
_RECOVER = 100_000_000

_ALL = Slots((ALL_SLOT,))

# Errors that junk in place of slots and numbers raises.
_DAMAGE = (IndexError, OverflowError, ValueError)

_PREFIX = "epochs-"
NAME = f"{_PREFIX}{DIGEST}"
_TABLE = re.compile(rf"{_PREFIX}[0-9a-f]+")
_LOCK_NAME = "lock"


class SharedMemory:
    """The coordinator of one node: an epoch table in a mapped file.

    :param folder: the table's folder, made with mode 0700 if it is missing
    :param create: if true, make the folder and the table if they are missing, and a damaged table
        anew; a process that only changes data attaches with ``False``, as nobody can have cached
        anything without a table
    :param slot_count: number of slots of a new table, 1024 to 2**24
    :param digest: the digest of tags and slots, in hexadecimal: part of the file's name
    :param trusted: numbers of the users in whose folders root takes part; ``None``: all
    :param settled: the function that tells whether a commit is over, see
        :attr:`.Coordinator.settled`
    :raises CoordinatorError: the folder or the table cannot be used; with ``create=False`` also
        when there is none
    """

    may_be_away: ClassVar[bool] = False

    def __init__(
        self,
        folder: Path,
        *,
        create: bool = True,
        slot_count: int = SLOTS,
        digest: str = DIGEST,
        trusted: set[int] | None = None,
        settled: Callable[[str, float], bool] = settled_by_age,
    ) -> None:
        self.folder = folder
        self._trusted = trusted
        self._path = folder / f"{_PREFIX}{digest}"
        self._create = create
        self._slot_count = slot_count
        self._table: Table | None = None
        self._identity = (0, 0)
        self._looked = 0
        self._recovered = 0
        self._complained = False
        self._closed = False
        # When the folder was last written into when there was no other table in it.
        self._alone = -1
        # Only who makes the table makes the lock, so that it is the service user's, not root's.
        self._lock = FileLock(folder / _LOCK_NAME, create=create)
        self.settled = settled
        with self._held():
            self._attach()
        if create:
            # As a rule nobody writes, and a new table can be used at once.
            self._recover_sometimes()

    @property
    def slot_count(self) -> int:
        """Number of slots of the table.

        :raises CoordinatorError: the table cannot be reached
        """
        return self._usable().slot_count

    @property
    def secret(self) -> bytes:
        """The 32 random bytes of the present table.

        :raises CoordinatorError: the table cannot be reached
        """
        return self._usable().secret

    def now(self) -> Epoch:
        """Return the present epoch.

        :raises CoordinatorError: the table cannot be reached
        """
        table = self._usable()
        return Epoch(table.generation, table.sequence)

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        """Return whether nothing in ``slots`` changed since ``epoch`` or is about to."""
        if time.monotonic_ns() - self._looked > _LEASE:
            self._look()
        table = self._table
        if table is None or table.name[0] != epoch[0]:
            return False
        try:
            newest = max(slots.read(table.values))
        except IndexError:
            return False  # of a larger table; somebody else says that they are of this one
        if newest <= epoch[1]:
            return True
        if newest == DIRTY:
            self._recover_sometimes()
        return False

    # There is no lease here.
    fresh_now = fresh

    def follow(self, digest: str) -> None:
        """Do nothing: whoever shares the file has the same table.

        :param digest: the digest of a table, not looked at
        """

    def snapshot(self) -> tuple[int, tuple[int, ...]]:
        """Return the generation, and the numbers of the slots of all fixed tags.

        :raises CoordinatorError: the table cannot be reached, or its header was changed
        """
        table = self._usable()
        sequence = table.sequence
        numbers = tuple(table.values[: len(FIXED)].tolist())
        if table.name[0] != table.generation:
            # What somebody wrote over it says that nothing has ever changed.
            raise CoordinatorError(f"{self._path}: its header was changed")
        if DIRTY in numbers:
            self._recover_sometimes()
        if max(numbers) > sequence:
            # They are read one after the other. What was completed meanwhile is under way here:
            # with its number, those that were read before it would be too old for that number.
            numbers = tuple(n if n <= sequence else DIRTY for n in numbers)
        return table.generation, numbers

    def mark(self, slots: Slots, owner: str = "", *, late: bool = False) -> Mark:
        """Announce a change of ``slots``; wait up to 5 seconds while it cannot be marked.

        :raises CoordinatorError: the table cannot be reached, or too many changes are under way
        :raises ValueError: the owner is over :data:`~..epochs.OWNER_BYTES` bytes or not ASCII
        """
        if len(owner) > OWNER_BYTES or not owner.isascii():
            raise ValueError(f"an owner is at most {OWNER_BYTES} bytes of ASCII")
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            full = False
            with self._held() as written:
                table = self._attach()
                # Slots beyond its end are of a table that was there before.
                fits = len(slots) <= MARK_TAGS and slots[-1] < table.slot_count
                wanted = slots if fits else _ALL
                now = time.monotonic_ns()
                wait = (table.settled - now) / 1e9
                if wait <= 0:
                    self._end_others(table, written)
                    serial = table.mark(wanted, now, owner)
                    if serial is not None:
                        return Mark(table.generation, serial, wanted)
                    full, wait, why = True, 0.01, "too many changes are under way at once"
                else:
                    why = "it was made anew, again and again"
            if full and self.recover():
                continue
            if time.monotonic() + wait > deadline:
                raise CoordinatorError(f"{self._path}: {why}; try again")
            time.sleep(wait)

    def stamp(self, mark: Mark) -> None:
        """Complete a change; return when nobody trusts a table that lacks it.

        :raises CoordinatorError: the table cannot be reached
        """
        with self._held() as written:
            table = self._attach()
            # In a table that was made meanwhile the mark is not; its slots are at the same places
            # only if there are as many, so a change from another table touches everything.
            known = mark.generation == table.generation
            table.stamp(mark.slots if known else _ALL, mark.serial if known else None)
            self._end_others(table, written)
        self._settle(table)

    def touch(self, slots: Slots) -> None:
        """Give ``slots`` a new number without a mark; return as :meth:`stamp` does.

        :raises CoordinatorError: the table cannot be reached
        """
        with self._held() as written:
            table = self._attach()
            table.stamp(slots if slots[-1] < table.slot_count else _ALL)
            self._end_others(table, written)
        self._settle(table)

    def flush(self) -> None:
        """Make every answer of the node stale.

        :raises CoordinatorError: the table cannot be reached
        """
        with self._held():
            table = self._attach()
            table.flush()
        self._settle(table)

    def recover(self) -> int:
        """Stamp the old marks whose commits are over by :attr:`settled`; return their number.

        :raises CoordinatorError: the table cannot be reached
        """
        with self._held():
            table = self._attach()
            table.mend()
            old = table.old_marks(time.monotonic_ns())
        return self._recover(table.generation, old)

    def statistics(self) -> Mapping[str, int]:
        """Return the table's counts by name, as :meth:`.Coordinator.statistics` has them.

        :raises CoordinatorError: the table cannot be reached
        """
        with self._held():
            return self._attach().statistics()

    def exchange(self, key: bytes, told: Sequence[int], after: str) -> None:
        """Return ``None``: there are no other nodes."""

    def close(self) -> None:
        """Detach from the table, which stays for others."""
        self._closed = True
        self._table = None
        self._lock.close()

    @contextmanager
    def _held(self) -> Iterator[int]:
        """Hold the lock, in a folder that is safe; it is made anew if it was removed.

        Yields the folder's time of change, in nanoseconds of Unix time.

        :raises CoordinatorError: the folder is not safe, the lock was not to be had, or the table
            holds junk and was removed
        """
        found = check_folder(self.folder, make=self._create, trusted=self._trusted)
        with self._lock:
            try:
                yield found.st_mtime_ns
            except _DAMAGE:
                # A new one is as good as none: nothing is fresh in it.
                self._table = None
                with suppress(OSError):
                    self._path.unlink()
                raise CoordinatorError(
                    f"{self._path}: somebody wrote into it; it is taken away, to be made anew"
                ) from None

    def _settle(self, table: Table) -> None:
        """Wait until nobody trusts an older or another file, which lacks this stamp."""
        wait = max(table.settled, table.ended + _LEASE) - time.monotonic_ns()
        if wait > 0:
            time.sleep(min(wait, _SETTLE) / 1e9)  # more is junk that somebody wrote there

    def _end_others(self, table: Table, written: int) -> None:
        # A table that came after that look was made beside this one: nothing is fresh in it.
        if written == self._alone:
            return  # nothing has come into the folder
        if end_others(self.folder, self._path.name):
            table.ended = time.monotonic_ns()
        elif time.time() * 1e9 - written > _TICK:
            self._alone = written

    def _usable(self) -> Table:
        if time.monotonic_ns() - self._looked > _LEASE:
            self._look()
        table = self._table
        if table is None:
            raise CoordinatorError(f"{self._path}: cannot be used; the log says why")
        return table

    def _look(self) -> None:
        """Renew the lease if the file is still the one that is mapped, else find another."""
        now = time.monotonic_ns()
        if self._is_mapped():
            self._looked = now
            return
        if self._closed:
            return
        self._table = None
        try:
            with self._held():
                self._attach()
            self._complained = False
            self._recovered = 0
            self._recover_sometimes()
        except CoordinatorError as error:
            if not self._complained:
                LOG.error("the token cache steps aside until this is mended: %s", error)
                self._complained = True
            # Not at every request: the file is looked for again when the lease would have ended.
            self._looked = now

    def _is_mapped(self) -> bool:
        table = self._table
        if table is None:
            return False
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        if found.st_size != size(table.slot_count):
            return False  # one more look at the mapping would end the process by SIGBUS
        # Junk in place of its header is seen here as well.
        return (found.st_dev, found.st_ino) == self._identity and table.is_whole()

    def _recover_sometimes(self) -> None:
        now = time.monotonic_ns()
        if now - self._recovered > _RECOVER:
            self._recovered = now
            # A reader does not wait for the lock: whoever has it may be completing that change.
            # Nor does it fail by junk, which whoever writes next takes away.
            with suppress(CoordinatorError, *_DAMAGE):
                if self._lock.attempt():
                    try:
                        table = self._attach()
                        table.mend()
                        old = table.old_marks(now)
                    finally:
                        self._lock.__exit__(None, None, None)
                    self._recover(table.generation, old)

    def _recover(self, generation: int, old: list[tuple[int, str, float]]) -> int:
        serials = {serial for serial, owner, age in old if self.settled(owner, age)}
        if not serials:
            return 0
        with self._held():
            table = self._attach()
            # Another one may be there by now, with marks of the same numbers.
            found = table.recover(serials) if table.generation == generation else 0
        if found:
            LOG.warning("%s: completed %d change(s) of writers that died", self._path, found)
        return found

    def _attach(self) -> Table:
        """Return the table in the file that is there now. Called under the lock."""
        # Before the look, as this process may stand still after it.
        looked = time.monotonic_ns()
        if self._is_mapped():
            assert self._table is not None
            self._looked = looked
            return self._table
        self._table = None
        try:
            memory, identity, reason = self._open()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise CoordinatorError(f"{self._path}: {error.strerror}") from None
            memory, identity, reason = None, (0, 0), None
            if error.errno == errno.ELOOP:
                reason = "it is a symbolic link"
        if memory is None:
            if reason is not None:
                LOG.warning("%s: refused, %s", self._path, reason)
            if not self._create:
                raise CoordinatorError(f"{self._path}: {reason or 'there is none'}")
            memory, identity = self._make()
            LOG.info("%s: made a new epoch table", self._path)
        self._identity = identity
        self._looked = looked
        table = Table(memory)
        table.mend()
        if not self._closed:  # a change that is under way is completed all the same
            self._table = table
        return table

    def _open(self) -> tuple[memoryview | None, tuple[int, int], str | None]:
        fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            identity = (found.st_dev, found.st_ino)
            if not stat.S_ISREG(found.st_mode):
                return None, identity, "it is no file"
            if found.st_uid not in (os.geteuid(), self.folder.stat().st_uid):
                return None, identity, "it belongs to another user"
            if stat.S_IMODE(found.st_mode) & 0o077:
                return None, identity, "others may read or write it; its mode must be 0600"
            if found.st_size == 0:
                return None, identity, "it is empty"
            memory = memoryview(mmap.mmap(fd, found.st_size))
        finally:
            os.close(fd)
        reason = Table.fault(memory)
        return (memory if reason is None else None), identity, reason

    def _make(self) -> tuple[memoryview, tuple[int, int]]:
        """Put a new table in place of whatever is there; return its memory, device and inode.

        It is made again if the machine stood still meanwhile: a worker must not fail to start for
        that.

        :raises CoordinatorError: the file cannot be made, or took too long each time
        """
        for _ in range(_TRIES):
            made = self._made()
            if made is not None:
                return made
        raise CoordinatorError(f"{self._path}: took too long to be made; try again")

    def _made(self) -> tuple[memoryview, tuple[int, int]] | None:
        """Put a new table there; ``None`` if it took too long to be used."""
        new = self._path.with_name(f"{self._path.name}.new")
        with suppress(OSError):
            new.unlink()
        try:
            fd = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                # Room for all of it now: a write into a full tmpfs would end the process.
                os.posix_fallocate(fd, 0, size(self._slot_count))
                memory = memoryview(mmap.mmap(fd, size(self._slot_count)))
                found = os.fstat(fd)
            finally:
                os.close(fd)
            begun = time.monotonic_ns()
            table = Table.make(memory, self._slot_count, begun + _SETTLE)
            table.begin(begun)
            os.rename(new, self._path)
        except OSError as error:
            raise CoordinatorError(
                f"{self._path}: cannot be made: {error.strerror}; "
                f"it needs {size(self._slot_count)} bytes"
            ) from None
        if time.monotonic_ns() - begun > _SETTLE - _LEASE:
            # Some process may trust the old file for longer than this one waits.
            with suppress(OSError):
                self._path.unlink()
            return None
        return memory, (found.st_dev, found.st_ino)


def _others(folder: Path, name: str) -> list[Path]:
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return [folder / other for other in found if _TABLE.fullmatch(other) and other != name]


def end_others(folder: Path, name: str = NAME) -> bool:
    """Remove the epoch tables of other versions; return whether there were any.

    :param folder: the folder of the tables
    :param name: the file name of the table that stays
    """
    found = _others(folder, name)
    for path in found:
        with suppress(FileNotFoundError):
            path.unlink()
        LOG.info("%s: taken away, with a change that its readers are not told of", path)
    return bool(found)


# The table in one piece of memory: its layout, its marks and stamps, and its checks.
#
# Every method that writes is called under the coordinator's lock, by one process at a time. A
# process may be killed between any two lines of it: the table is then either as before, or has a
# mark that Table.recover() completes, or fails Table.fault() and is rebuilt.

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
        """Return whether the part that never changes is as it was when this table was mapped."""
        return self._words[: _DIGEST + 2] == memoryview(self._fixed).cast("Q")

    def mend(self) -> None:
        """Complete what a writer had begun who was killed amid slots and their checksum."""
        words = self._words
        if words[_WRITING]:
            # A touch that has no mark: see stamp().
            marked = self._marked(besides=None)
            left = [s for s, value in _written(self.values) if value == DIRTY and s not in marked]
            if left:
                words[_SEQUENCE] += 1
            for slot in left:
                words[_FIRST_SLOT + slot] = words[_SEQUENCE]
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

    def stamp(self, slots: Collection[int], serial: int | None = None) -> None:
        """Give ``slots`` the next number, and free the mark ``serial`` if it is still there.

        :param slots: the slots of the change
        :param serial: the mark's serial number; ``None`` for a change without a mark
        """
        words = self._words
        self.mend()
        # A mark that was recovered meanwhile is gone; its slots are stamped once more.
        place = self._find(serial) if serial is not None else None
        number = words[_SEQUENCE] + 1
        busy = self._marked(besides=place)
        words[_WRITING] = 1
        # Without a mark they are not dirty yet, and what is made meanwhile of what stood before
        # would have the number and go on.
        for slot in slots:
            if words[_FIRST_SLOT + slot] != DIRTY:
                self._set(slot, DIRTY)
        # The number first: a fill that sees it starts after the commit.
        words[_SEQUENCE] = number
        words[_CHANGES] += 1
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

"""The files that the workers of a node share: entries, values of Keystone, questions and counts."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped
from keyfront.common.process import name_of, named_lives
from keyfront.errors import CoordinatorError

from . import counters, directory_leases
from .counters import WAITS, Counters
from .epochs import DIGEST
from .keys_and_entries import FORM, KEY_BYTES, Entry

LOG = logging.getLogger(__name__)

# Seconds between looks for another's answer: a tenth of what a validation takes at its fastest.
_FIRST_LOOK = 0.0005
_LONGEST_LOOK = 0.01

# Seconds to wait for the lock, and between looks at the files.
_LOCK_SECONDS = 0.1
_CHECK_SECONDS = 0.5

# What reading or writing a file that somebody wrote junk into may raise.
_DAMAGE = (ValueError, OverflowError, IndexError, TypeError, struct.error)

# Files in the folder. Those with entries are of one form of entry, one size and one configuration
# of Keystone: while workers are replaced by others with another one, each have their own.
_ANSWERS, _REFUSALS, _VALUES = "answers", "refusals", "values"
_SUBJECTS, _LISTINGS = "subjects", "listings"
_COUNTERS, _LOCK = "counters", "node-lock"
_RING_FILE = re.compile(
    rf"({_ANSWERS}|{_REFUSALS}|{_SUBJECTS}|{_LISTINGS}|{_VALUES})-[0-9a-f]+-\d+-\d+"
)

# Seconds for which no values are shared after the lock was not to be had: a request has many.
_PAUSE_SECONDS = 1.0


class NodeCache:
    """The memory that all workers share which use the same folder.

    Nothing here is needed for a right answer: an error is logged, and Keystone is asked.

    :param folder: the folder of the epoch table
    :param size: bytes of entries. An eighth of it is for refusals; ``subjects`` and ``listings``
        take parts of it that other entries cannot fill
    :param flight_timeout: seconds to wait for another request that asks the same, 0 or more; 0
        never waits
    :param values: bytes of values that Keystone computes; 0 shares none of them
    :param configured: bytes that identify code and configuration by which this process answers;
        only processes with the same ones share entries
    :param subjects: if true, a quarter of ``size`` is for facts about tokens: anybody can have many
        issued
    :param listings: if true, an eighth of ``size`` is for answers of other routes than validation:
        anybody can ask for a list in as many ways as he likes
    :raises CoordinatorError: the file of counts cannot be made or mapped
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: int,
        flight_timeout: float,
        values: int = 0,
        configured: bytes = b"",
        subjects: bool = True,
        listings: bool = True,
    ) -> None:
        self._folder = folder
        self._size = size
        self._sizes = {_REFUSALS: size // 8}
        if subjects:
            self._sizes[_SUBJECTS] = size // 4
        if listings:
            self._sizes[_LISTINGS] = size // 8
        self._sizes[_ANSWERS] = size - sum(self._sizes.values())
        self._values_size = values
        self._configured = configured
        self._left: list[Path] = []  # rings of others that were still in use
        self._flight_timeout = flight_timeout
        # A request does not wait for it longer than a good part of what asking Keystone takes.
        self._lock = FileLock(folder / _LOCK, seconds=_LOCK_SECONDS)
        self._patient_lock = FileLock(folder / _LOCK)
        self.counters = Counters(folder / _COUNTERS, FileLock(folder / _LOCK))
        self._secret = b""
        # All of them or none.
        self._rings: dict[str, Store] = {}
        self._values: Store | None = None
        self._values_pause = 0.0
        self._checked = 0.0

    def start(self, secret: bytes, *, patient: bool = False) -> None:
        """Use the entries that belong to an epoch table; those of another are dropped.

        :param secret: the 32 secret bytes of the epoch table
        :param patient: if true, wait 5 seconds for the lock, as another process may be making the
            files; else 0.1 seconds, as a request must
        :raises CoordinatorError: a file cannot be made or mapped, or the lock was not to be had
        """
        self._secret = secret
        with self._patient_lock if patient else self._lock:
            self._rings, self._values = {}, None
            # a keyed hash: the configuration has passwords, and a file's name is for everybody
            setup = hashlib.blake2b(self._configured, key=secret, digest_size=4).hexdigest()
            form = f"{DIGEST}{setup}-{FORM}"
            sizes = {**self._sizes, _VALUES: self._values_size}
            paths = {name: self._folder / f"{name}-{form}-{size}" for name, size in sizes.items()}
            made = {name: Store(paths[name], size, secret) for name, size in self._sizes.items()}
            if self._values_size:
                self._values = Store(paths[_VALUES], self._values_size, secret)
            self._rings = made
            self._left = [path for path in rings(self._folder) if path not in paths.values()]
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Remove the rings of workers that have gone, once nobody uses them any more."""
        self._left = [path for path in self._left if not _dropped(path)]

    def check(self) -> None:
        """Make the files anew if they are gone or damaged; it looks twice a second at most.

        It is called before any of them is touched: to read a mapping beyond the end of its file
        ends the process.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        try:
            self.counters.claim()
            self._drop_unused()
            rings = [*self._rings.values(), *([self._values] if self._values else [])]
            wanted = len(self._sizes) + bool(self._values_size)
            if len(rings) < wanted or not all(ring.is_whole() for ring in rings):
                LOG.warning("%s: the shared answers are gone, and made anew", self._folder)
                self.start(self._secret)
        except CoordinatorError as error:
            LOG.warning("token cache: answers are not shared: %s", error)

    def find(self, key: bytes, *, listing: bool = False) -> Entry | None:
        """Return the entry that some worker stored, whether or not it still stands.

        :param key: the request's key, from :meth:`.Keys.key`
        :param listing: true for another route than validation
        """
        rings = self._rings
        try:
            for name in (_LISTINGS if listing else _ANSWERS, _REFUSALS):
                packed = rings[name].get(key) if name in rings else None
                if packed is not None:
                    return Entry.unpack(packed)
        except _DAMAGE:
            self._checked = 0.0
        return None

    def ask(self, key: bytes) -> bool:
        """Note that this request asks Keystone, for others to wait; ``False`` if another does."""
        answers = self._rings.get(_ANSWERS)
        if answers is None or not self._flight_timeout:
            return True
        try:
            with self._lock:
                return answers.ask(key, self._flight_timeout)
        except (CoordinatorError, *_DAMAGE):
            return True

    def answered(self, key: bytes) -> None:
        """Note that the request which asked Keystone has ended, with an answer or without."""
        answers = self._rings.get(_ANSWERS)
        try:
            if answers is not None and answers.is_noted(key):  # usually said by keep()
                with self._lock:
                    answers.answered(key)
        except (CoordinatorError, *_DAMAGE):
            pass  # others wait for flight_timeout, no longer

    def wait(
        self, key: bytes, stands: Callable[[Entry], bool], *, listing: bool = False
    ) -> Entry | None:
        """Wait for the answer to the question of another request.

        :param key: the request's key
        :param stands: the function that tells whether an entry still stands
        :param listing: true for another route than validation
        :returns: the entry; ``None`` if the other request ended, or ``flight_timeout`` passed,
            without one that stands
        """
        self.counters.count(WAITS)
        deadline = time.monotonic() + self._flight_timeout
        pause = _FIRST_LOOK
        while True:
            asked = self._is_asked(key) and time.monotonic() < deadline
            entry = self.find(key, listing=listing)
            if entry is not None and stands(entry):
                return entry
            if not asked:
                return None
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOOK)

    def keep(self, key: bytes, entry: Entry, *, listing: bool = False) -> None:
        """Store an entry for all workers, and end the waiting for it.

        :param key: the request's key
        :param entry: the answer
        :param listing: true for another route than validation
        """
        rings = self._rings
        good, refusals = rings.get(_LISTINGS if listing else _ANSWERS), rings.get(_REFUSALS)
        if good is None or refusals is None:
            return
        packed = entry.pack()
        ring, other = (refusals, good) if entry.negative else (good, refusals)
        try:
            with self._lock:
                ring.put(key, packed)
                other.drop(key)
                rings[_ANSWERS].answered(key)
        except CoordinatorError as error:
            LOG.warning("token cache: an answer is not shared: %s", error)
        except _DAMAGE:
            self._checked = 0.0

    def renew(self, key: bytes, entry: Entry, *, listing: bool = False) -> None:
        """Store an entry that is in use again, if it is in the older half of its file."""
        good = _LISTINGS if listing else _ANSWERS
        ring = self._rings.get(_REFUSALS if entry.negative else good)
        try:
            if ring is not None and ring.ages(key):
                self.keep(key, entry, listing=listing)
        except _DAMAGE:
            self._checked = 0.0

    def packed(self, key: bytes, *, subject: bool = False) -> bytes | None:
        """Return the bytes that some worker kept with :meth:`keep_packed`; ``None`` without any.

        :param key: a key that no entry has
        :param subject: true for a fact about a token
        """
        ring = self._rings.get(_SUBJECTS if subject else _ANSWERS)
        try:
            return ring.get(key) if ring is not None else None
        except _DAMAGE:
            self._checked = 0.0
        return None

    def keep_packed(self, key: bytes, packed: bytes, *, subject: bool = False) -> None:
        """Keep bytes for all workers, among the entries.

        :param key: a key that no entry has
        :param packed: the bytes
        :param subject: true for a fact about a token, which is kept apart
        """
        ring = self._rings.get(_SUBJECTS if subject else _ANSWERS)
        if ring is None:
            return
        try:
            with self._lock:
                ring.put(key, packed)
        except CoordinatorError as error:
            LOG.warning("token cache: what is known of a token is not shared: %s", error)
        except _DAMAGE:
            self._checked = 0.0

    def value(self, name: str) -> bytes | None:
        """Return the value that some worker stored under a name; ``None`` without one."""
        self.check()
        ring = self._values
        try:
            return ring.get(self._value_key(name)) if ring is not None else None
        except _DAMAGE:
            self._checked = 0.0
        return None

    def keep_value(self, name: str, value: bytes) -> None:
        """Store a value for all workers.

        :param name: a name that no two values have, in all workers; it may hold secrets, as it is
            kept as a keyed hash
        :param value: the value, which is kept as it is and must hold no secret
        """
        self.keep_together([(name, value)])

    def keep_together(
        self, values: Sequence[tuple[str, bytes]], subject: tuple[bytes, bytes] | None = None
    ) -> None:
        """Store what one request shares, under one lock.

        :param values: the names and values, as :meth:`keep_value` takes them
        :param subject: a fact about a token, as :meth:`keep_packed` takes it
        """
        if not values and subject is None:
            return
        self.check()
        ring, now = self._values, time.monotonic()
        named = []
        if ring is not None and now >= self._values_pause:
            named = [(self._value_key(name), value) for name, value in values]
        subjects = None if subject is None else self._rings.get(_SUBJECTS)
        if not named and subjects is None:
            return
        try:
            with self._lock:
                if ring is not None:
                    for key, value in named:
                        ring.put(key, value)
                if subjects is not None and subject is not None:
                    subjects.put(*subject)
        except CoordinatorError as error:
            self._values_pause = now + _PAUSE_SECONDS
            if subjects is not None:
                LOG.warning("token cache: what is known of a token is not shared: %s", error)
            if named:
                LOG.warning("token cache: what Keystone computes is not shared: %s", error)
        except _DAMAGE:
            self._checked = 0.0

    def _value_key(self, name: str) -> bytes:
        data = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=KEY_BYTES, key=self._secret).digest()

    def statistics(self) -> dict[str, int]:
        """Return counts by name, as :func:`statistics` does."""
        return statistics(self._folder)

    def _is_asked(self, key: bytes) -> bool:
        try:
            answers = self._rings.get(_ANSWERS)
            return answers is not None and answers.asked(key)
        except _DAMAGE:
            return False


nodes: dict[Path, NodeCache] = {}
"""The nodes of this process by folder: the one place that keeps them."""


def statistics(folder: Path) -> dict[str, int]:
    """Return counts by name of the node that uses ``folder``, without taking part.

    :returns: the counts of :mod:`.counters`, ``directory_leases``, those that stand now, and of
        answers and refusals ``…_bytes``, ``…_bytes_limit`` and ``…_stored``
    :raises CoordinatorError: there are none, or they are not readable
    """
    counts = counters.read(folder / _COUNTERS)
    counts["directory_leases"] = directory_leases.standing(folder)
    for name in (_ANSWERS, _REFUSALS):
        found = [path for path in rings(folder) if path.name.startswith(name)]
        if not found:
            raise CoordinatorError(f"{folder / name}: there is none")
        ring = read(max(found, key=lambda path: path.stat().st_ctime))
        counts |= {f"{name}_{key}": value for key, value in ring.items()}
    return counts


def users(folder: Path) -> list[int]:
    """Return the process numbers of the processes that use ``folder``.

    A process whose mappings may not be read is believed. One that maps nothing of the folder only
    has the number of a former user, and is left out.

    :raises CoordinatorError: the file of counts is not readable
    """
    if not (folder / _COUNTERS).exists():
        return []
    return [pid for pid in counters.processes(folder / _COUNTERS) if _maps(pid, folder)]


def _maps(pid: int, folder: Path) -> bool:
    try:
        return f" {folder.resolve()}/" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def rings(folder: Path) -> list[Path]:
    """Return the files with the entries of the workers that use ``folder``."""
    return [path for path in folder.iterdir() if _RING_FILE.fullmatch(path.name)]


def _dropped(path: Path) -> bool:
    """Remove a ring if nobody uses it; return whether it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        os.close(fd)
    return True


# The entries that the processes of a node share: a ring in a mapped file.
#
# New entries go where the oldest ones are. An entry that is read when it is about to be reached is
# written anew, so the least recently used go first. A reader takes no lock: an entry that was
# overwritten, torn by a killed writer or tampered with does not have its signature, and is none.
#
# The file is of a given size from the start, and is made anew with each epoch table.

_HEADER_WORDS = 8
_HEAD, _STORED, _RING = 0, 1, 2
_DAMAGED = 2**63
# The head is the position at which the next entry begins; it never goes back.
_BUCKET = struct.Struct("<16sQQ")  # key, position + 1 (0: empty), length
_PROBES = 4
_SIGNATURE = 16

# One process asks for all: key, deadline in nanoseconds, length of the process's name, the name.
_FLIGHT = struct.Struct("<16sQB47s")
_FLIGHTS = 256

#: Bytes an entry takes on average, with one service in the catalog; sets the number of buckets.
_USUAL = 1024


class Store:
    """Packed entries by key, in a mapped file that all processes with the same secret share.

    Methods that write must be called under a lock over all processes.

    :param path: the file; an existing one of another size or secret is emptied
    :param size: bytes for entries
    :param secret: the 32 secret bytes of the epoch table
    :raises CoordinatorError: the file cannot be made or mapped
    """

    def __init__(self, path: Path, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        self._buckets = max(size // _USUAL * 2, 64)
        self._flights_at = _HEADER_WORDS * 8 + 32
        self._buckets_at = self._flights_at + _FLIGHTS * _FLIGHT.size
        self._ring_at = self._buckets_at + self._buckets * _BUCKET.size
        total = self._ring_at + size
        self._file = Mapped(path, total)
        self._use()
        self._map = self._file.map
        self._words = memoryview(self._map)[: _HEADER_WORDS * 8].cast("Q")
        self._owner = hashlib.blake2b(b"store", digest_size=32, key=secret).digest()
        if not self._is_ours():
            self._map[: self._ring_at] = bytes(self._ring_at)
            self._map[_HEADER_WORDS * 8 : self._flights_at] = self._owner
        self._words[_RING] = size

    def _use(self) -> None:
        """Take a shared lock, which this process and its forks hold: the file is in use."""
        with suppress(OSError):
            fd = os.open(self._file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            weakref.finalize(self, os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def is_whole(self) -> bool:
        """Return whether the file is still there, has its size and belongs to this secret."""
        return self._file.is_there() and self._is_ours()

    def _is_ours(self) -> bool:
        owner = self._map[_HEADER_WORDS * 8 : self._flights_at]
        # Words larger than any count are somebody's junk, and nothing could be stored any more.
        return owner == self._owner and max(self._words[:_RING]) < _DAMAGED

    def get(self, key: bytes) -> bytes | None:
        """Return the bytes stored under ``key``; ``None`` if they are gone or not whole."""
        found = self._find(key)
        if found is None:
            return None
        position, length = found
        start = self._ring_at + position % self._size
        signed = self._map[start : start + length]
        signature, packed = signed[:_SIGNATURE], signed[_SIGNATURE:]
        return packed if signature == self._sign(key, packed) else None

    def ages(self, key: bytes) -> bool:
        """Return whether an entry is in the older half of the ring, and should be stored again."""
        found = self._find(key)
        return found is not None and self._words[_HEAD] - found[0] > self._size // 2

    def put(self, key: bytes, packed: bytes) -> bool:
        """Store an entry in place of the oldest; ``False`` if it is over an eighth of the ring."""
        length = _SIGNATURE + len(packed)
        if length > self._size // 8:
            return False
        head = self._words[_HEAD]
        if head % self._size + length > self._size:
            head += self._size - head % self._size  # an entry is in one piece
        # The head first: from now on, what is overwritten below is out of the ring.
        self._words[_HEAD] = head + length
        start = self._ring_at + head % self._size
        self._map[start : start + length] = self._sign(key, packed) + packed
        at = self._bucket_for(key)
        _BUCKET.pack_into(self._map, at, key, head + 1, length)
        self._words[_STORED] += 1
        return True

    def drop(self, key: bytes) -> None:
        """Drop an entry, if it is there."""
        for at in self._probe(key):
            if self._map[at : at + len(key)] == key:
                self._map[at : at + _BUCKET.size] = bytes(_BUCKET.size)

    def ask(self, key: bytes, seconds: float) -> bool:
        """Note that this process asks Keystone; ``False`` if another does.

        :param key: the request's key
        :param seconds: seconds after which others stop waiting for this process
        """
        now = time.monotonic_ns()
        free = -1
        for at in self._flights(key):
            other, deadline, length, name = _FLIGHT.unpack_from(self._map, at)
            if deadline <= now or (other == key and _is_dead(name[:length])):
                free = at
            elif other == key:
                return False
        if free >= 0:
            deadline = now + int(seconds * 1e9)
            me = name_of(os.getpid()).encode()
            _FLIGHT.pack_into(self._map, free, key, deadline, len(me), me)
        return True  # with no room to say so, it asks all the same

    def asked(self, key: bytes) -> bool:
        """Return whether some living process is asking Keystone at present."""
        now = time.monotonic_ns()
        for at in self._flights(key):
            other, deadline, length, name = _FLIGHT.unpack_from(self._map, at)
            if other == key and deadline > now:
                return not _is_dead(name[:length])
        return False

    def is_noted(self, key: bytes) -> bool:
        """Return whether a process has noted that it asks Keystone; it may be dead or overdue."""
        return any(self._map[at : at + len(key)] == key for at in self._flights(key))

    def answered(self, key: bytes) -> None:
        """Note that the question to Keystone has ended, with an entry stored or not."""
        for at in self._flights(key):
            if self._map[at : at + len(key)] == key:
                self._map[at : at + _FLIGHT.size] = bytes(_FLIGHT.size)

    def _sign(self, key: bytes, packed: bytes) -> bytes:
        signer = hashlib.blake2b(key, digest_size=_SIGNATURE, key=self._secret)
        signer.update(packed)
        return signer.digest()

    def _probe(self, key: bytes) -> list[int]:
        first = int.from_bytes(key[:8], "little")
        return [
            self._buckets_at + (first + n) % self._buckets * _BUCKET.size for n in range(_PROBES)
        ]

    def _find(self, key: bytes) -> tuple[int, int] | None:
        for at in self._probe(key):
            if self._map[at : at + len(key)] == key:
                _, position, length = _BUCKET.unpack_from(self._map, at)
                position -= 1
                start = position % self._size
                # Whatever is there: nothing but the ring is read.
                if (
                    position < 0
                    or not _SIGNATURE <= length <= self._size - start
                    or position + self._size < self._words[_HEAD]
                ):
                    return None
                return position, length
        return None

    def _bucket_for(self, key: bytes) -> int:
        """Return the bucket of ``key``, or else that of the oldest entry it may take."""
        oldest, at_oldest = 2**64, -1
        for at in self._probe(key):
            other, position, _ = _BUCKET.unpack_from(self._map, at)
            if other == key:
                return at
            if position < oldest:
                oldest, at_oldest = position, at
        return at_oldest

    def _flights(self, key: bytes) -> list[int]:
        first = int.from_bytes(key[8:16], "little")
        return [
            self._flights_at + (first + n) % _FLIGHTS * _FLIGHT.size for n in range(_PROBES)
        ]


def _is_dead(name: bytes) -> bool:
    return named_lives(name.decode("ascii", "replace")) is False


def read(path: Path) -> dict[str, int]:
    """Return counts by name from a file, without taking part.

    :returns: ``bytes`` and ``bytes_limit``, and ``stored``: the entries ever stored
    :raises CoordinatorError: there is none, or it is not readable
    """
    try:
        with path.open("rb") as file:
            head, stored, size = struct.unpack("QQQ", file.read(24))
    except OSError as error:
        raise CoordinatorError(f"{path}: {error.strerror}") from None
    except struct.error:
        raise CoordinatorError(f"{path}: is too short") from None
    return {"bytes": min(head, size), "bytes_limit": size, "stored": stored}

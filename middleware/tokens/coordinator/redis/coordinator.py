"""The coordinator of many nodes: an epoch table in Redis or Valkey.

Keystone's nodes write it, the services' authtoken reads it. Each question to it is one round trip,
or, with a lease, is answered from a mirror that is at most a second old.

A table belongs to one life of one server (see ``connections.py``): after a restart, a failover,
an eviction, a flush, or when its numbers went back (see ``rollback_detection.py``), the first
writer makes a new generation, in which nothing older stands. In it no change begins while a process
may still trust an older generation, and nothing is fresh while a transaction may be under way in
the database that was marked in an older one (see ``mark_owners.py``).

Without Redis nothing is fresh. Changes are refused, or made, and Redis is told of them as soon as
it is back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from keyfront.common.file_lock import LOCK_SECONDS
from keyfront.common.poller import Poller
from keyfront.errors import CoordinatorError, NoEpochTableError

from ...epochs import (
    ALL_SLOT,
    DIGEST,
    DIRTY,
    MARK_SECONDS,
    MARK_TAGS,
    Epoch,
    Exchanged,
    Mark,
    Slots,
    settled_by_age,
)
from ...folder import check_folder
from ...invalidation.rules import FIXED
from ..local import SLOTS
from ..mark_owners import beginning
from .address import Address
from .connections import Link
from .lease import Mirror
from .outages import LEASE_SECONDS, UNTOLD, Answer, Contact
from .rollback_detection import LAST_NUMBER, History, Seen
from .scripts import CHANGES, EXCHANGE, FIRST_MARK, STEP_SECONDS

LOG = logging.getLogger(__name__)

# Seconds between looks for abandoned marks while something is dirty.
_RECOVER_SECONDS = 0.1
# Changes that a poll asks for in its first question.
_AHEAD = 16
# How often a table is looked at, or begun, before it counts as lost.
_TRIES = 3
# Tables that are remembered, of as many versions.
_TABLES = 4
# Seconds between looks at a new table, few enough that all of them count.
_STEP = STEP_SECONDS / 2
# Seconds that a change waits until a new table has settled, at most: those steps take longer than
# they count for where a machine is busy. uWSGI ends a worker over a stuck request after 30 or more.
_BEGIN_SECONDS = 15.0
_ALL = Slots((ALL_SLOT,))
_FIXED = Slots(range(len(FIXED)))
# Slots of a table.
_FEWEST, _MOST = 2 * len(FIXED) + 1, 2**24


class _Look(NamedTuple):
    """The values that were read from the table, all at one moment."""

    generation: int
    sequence: int
    slot_count: int
    #: The numbers of the slots that were asked for; below zero: a change is under way.
    numbers: list[int]


class _Head(NamedTuple):
    """The table's field ``head``, taken apart."""

    text: bytes
    life: bytes
    last: Seen
    slot_count: int

    @classmethod
    def of(cls, text: bytes) -> _Head:
        """Return the parts of a field ``head``.

        :raises ValueError: it is no such field
        """
        life, generation, slot_count, sequence, change = text.split(b" ")
        int(change, 16)
        last = Seen(int(generation, 16), int(sequence), change.decode("ascii"))
        count = int(slot_count)
        if not (0 < last.generation < 2**64 and last.sequence >= 0 and _FEWEST <= count <= _MOST):
            raise ValueError("out of range")
        return cls(text, life, last, count)


class _Table:
    """A table, and what this process remembers of it: no version's numbers are another's.

    :param address: the address of the server
    :param prefix: the beginning of its key
    :param digest: the digest of tags and slots, the end of its key
    """

    __slots__ = ("digest", "head", "history", "key", "known")

    def __init__(self, address: Address, prefix: str, digest: str) -> None:
        self.digest = digest.encode()
        self.key = f"{prefix}epochs:{digest}"
        self.history = History(f"{address} {self.key}")
        #: The field ``head`` that was last taken apart.
        self.head = _Head(b"", b"", Seen(), 0)
        #: The newest generation, and its number of slots.
        self.known: tuple[int, int] | None = None

    def know(self, generation: int, slot_count: int) -> None:
        """Note the newest generation; one that came late is none."""
        if generation == self.history.seen.generation:
            self.known = generation, slot_count


class Redis:
    """The coordinator of many nodes: an epoch table in Redis.

    It does not connect before the first question.

    :param address: the address of the server or of its sentinels
    :param create: if true, make a new generation where there is none, as Keystone's processes do;
        one that only reads needs no right to write
    :param prefix: the beginning of the names of the keys
    :param timeout: seconds to wait for each answer, 0.01 to 10
    :param lease: seconds for which a change may go unseen, up to :data:`LEASE_SECONDS`; ``None``:
        ask Redis each time
    :param allow: if true, changes are made while Redis is away; else they are refused
    :param bound: a phrase for the log: the time for which others may then go on with old answers
    :param folder: the folder of this node's own files, for :attr:`secret`
    :param slot_count: number of slots of a new table, 1024 to 2**24
    :param digest: the digest of tags and slots, in hexadecimal: part of the key's name
    """

    may_be_away: ClassVar[bool] = True

    def __init__(
        self,
        address: Address,
        *,
        create: bool = True,
        prefix: str = "keyfront:",
        timeout: float = 0.5,
        lease: float | None = None,
        allow: bool = False,
        bound: str = "their time limits",
        folder: Path | None = None,
        slot_count: int = SLOTS,
        digest: str = DIGEST,
    ) -> None:
        #: The address; its text has no password.
        self.address = address
        self._create = create
        self._prefix = prefix
        # By digest: those that were followed.
        self._tables = {digest: _Table(address, prefix, digest)}
        self._table = self._tables[digest]
        # The command that reads the list of tables that count.
        self._register = ("HMGET", f"{prefix}digests", "digests")
        self.settled: Callable[[str, float], bool] = settled_by_age
        self._allow = allow
        self._bound = bound
        self._folder = folder
        self._node_secret: bytes | None = None
        changes = "changes are made" if allow else "changes are refused"
        self._contact = Contact(
            address,
            self._table.key,
            f"{prefix}digests",
            history=self._table.history,
            timeout=timeout,
            meanwhile=f"Keystone is asked{f' and {changes}' if create else ''}",
            slot_count=slot_count,
        )
        self._mirror = None if lease is None else Mirror(min(lease, LEASE_SECONDS))
        self._poller: Poller | None = None
        if lease is not None:
            # A request that finds the mirror behind asks Redis itself.
            interval = min(lease, LEASE_SECONDS) / 2
            self._poller = Poller(self._poll, interval, name="keyfront-epochs")
        self._recovered = 0.0
        # The last generation in which this process has completed a change.
        self._begun = 0
        # Monotonic times when old marks were first seen here, by generation and serial number.
        self._met: dict[tuple[int, int], float] = {}
        self._closed = False
        self._pid = os.getpid()
        self._forks: dict[int, threading.Lock] = {}

    def __repr__(self) -> str:
        return f"<Redis {self.address} {self._table.key}>"

    @property
    def slot_count(self) -> int:
        """Number of slots of the table.

        :raises CoordinatorError: the table cannot be reached
        """
        known = self._table.known
        return self._found().slot_count if known is None else known[1]

    @property
    def secret(self) -> bytes:
        """32 secret bytes that the processes of this node share, others for each generation.

        :raises CoordinatorError: there is no folder, or they cannot be kept in it
        """
        if self._node_secret is None:
            if self._folder is None:
                raise CoordinatorError("this coordinator was given no folder for a secret")
            self._node_secret = node_secret(self._folder)
        known = self._table.known
        generation = known[0] if known else 0
        return hashlib.blake2b(
            generation.to_bytes(8, "little"), key=self._node_secret, digest_size=32
        ).digest()

    @property
    def lease(self) -> float:
        """Seconds for which a change may be unseen here after its response; 0 without a lease."""
        return 0.0 if self._mirror is None else self._mirror.lease

    def __str__(self) -> str:
        return f"Redis at {self.address}"

    def follow(self, digest: str) -> None:
        """Read the table of a digest from now on; a process that makes tables keeps its own.

        :param digest: the digest that Keystone's cache named with an answer: the slots of that
            answer are those of the table with this digest in its name
        """
        table = self._tables.get(digest)
        if self._create or table is self._table:
            return
        if table is None:
            new = _Table(self.address, self._prefix, digest)
            table = self._tables.setdefault(digest, new)  # another thread may be first
            for other in list(self._tables)[:-_TABLES]:
                self._tables.pop(other, None)
        self._table = table
        if self._mirror is not None:
            self._mirror.clear()

    @property
    def losses(self) -> int:
        """Number of times that this process has lost Redis."""
        return self._contact.losses

    def now(self) -> Epoch:
        """Return the present epoch.

        :raises NoEpochTableError: no Keystone has made a table there
        :raises CoordinatorError: Redis cannot be reached
        """
        found = self._found()
        return Epoch(found.generation, found.sequence)

    def fresh(self, epoch: Epoch, slots: Slots) -> bool:
        """Return whether nothing in ``slots`` changed since ``epoch`` or is about to."""
        mirror = self._mirror
        try:
            if mirror is None:
                return self._fresh(epoch, slots)
            verdict = mirror.verdict(epoch, slots)
            return self._renewed(mirror, epoch, slots) if verdict is None else verdict
        except CoordinatorError:
            return False

    def fresh_now(self, epoch: Epoch, slots: Slots) -> bool:
        """Do as :meth:`fresh`, but ask Redis, whatever the lease."""
        try:
            return self._fresh(epoch, slots)
        except CoordinatorError:
            return False

    def snapshot(self) -> tuple[int, tuple[int, ...]]:
        """Return the generation, and the numbers of the slots of all fixed tags.

        Redis is asked, whatever the lease: values that are made by them are shared.

        :raises CoordinatorError: Redis cannot be reached
        """
        found = self._found(_FIXED)
        if min(found.numbers) < 0:
            self._recover_sometimes()
        return found.generation, tuple(DIRTY if n < 0 else n for n in found.numbers)

    def mark(self, slots: Slots, owner: str = "", *, late: bool = False) -> Mark:
        """Announce a change of ``slots``; wait up to 15 seconds for a new table to settle.

        :raises CoordinatorError: Redis cannot be reached, and neither ``allow`` nor ``late`` is
            set; or too many changes are under way
        """
        try:
            return self._mark(slots if len(slots) <= MARK_TAGS else _ALL, owner)
        except CoordinatorError as error:
            if not (self._allow or late) or self._closed:
                raise
            if not (late or self._contact.owes):
                LOG.error(
                    "%s; changes are made all the same: other nodes and services may go on with "
                    "answers from before for %s",
                    error,
                    self._bound,
                )
            self._owe(UNTOLD)
            return UNTOLD

    def stamp(self, mark: Mark) -> None:
        """Complete a change; return when nobody trusts a table that lacks it.

        :raises CoordinatorError: Redis cannot be reached; it is told as soon as it is back
        """
        if mark.generation == UNTOLD.generation:
            # Told once more: Redis may have been told between the mark and the commit.
            self._owe(mark)
            with suppress(CoordinatorError):
                self._here().do(lambda link: None)
            return
        try:
            self._complete("stamp", mark.slots, f"{mark.generation:x}", mark.serial)
        except CoordinatorError:
            if not self._closed:
                self._owe(mark)
            raise

    def touch(self, slots: Slots) -> None:
        """Give ``slots`` a new number without a mark; return as :meth:`stamp` does.

        :raises CoordinatorError: Redis cannot be reached
        """
        self._complete("touch", slots if len(slots) <= MARK_TAGS else _ALL, "changes")

    def flush(self) -> None:
        """Make every answer of all nodes and services stale.

        :raises CoordinatorError: the table cannot be reached
        """
        self._complete("touch", _ALL, "flushes")

    def recover(self) -> int:
        """Stamp the old marks whose commits are over by :attr:`settled`; return their number.

        :raises CoordinatorError: Redis cannot be reached
        """
        answer = self._run("recover")
        generation, marks = answer.last.generation, answer.old
        # Redis' clock may have been set: of a mark's age counts what has passed here as well.
        now, before = time.monotonic(), self._met
        met = {(generation, one[0]): before.get((generation, one[0]), now) for one in marks}
        self._met = met  # another thread may do so as well
        serials = []
        for serial, owner, age in marks:
            here = now - met[generation, serial]
            # For the mark with which the table begins only this counts.
            name, seconds = beginning(f"{generation:x}"), here
            if serial != FIRST_MARK:
                name, seconds = owner, min(age / 1e6, MARK_SECONDS + here)
            if self.settled(name, seconds):
                serials.append(str(serial))
        if not serials:
            return 0
        found = self._run("recover", ",".join(serials), f"{generation:x}").found
        if found:
            LOG.warning("%s: completed %d change(s) of writers that died", self.address, found)
        return found

    def statistics(self) -> Mapping[str, int]:
        """Return the table's counts by name, as :meth:`.Coordinator.statistics` has them.

        :raises CoordinatorError: Redis cannot be reached
        """
        answer = self._run("count")
        under_way, changes, recovered, flushes = answer.counts
        return {
            "changes": changes,
            "changes_under_way": under_way,
            "changes_recovered": recovered,
            "flushes": flushes,
            "sequence": answer.last.sequence,
            "slots": answer.slot_count,
        }

    def exchange(self, key: bytes, told: Sequence[int], after: str) -> Exchanged:
        """Tell the other nodes of numbers, and return what they have told.

        :raises CoordinatorError: Redis cannot be reached
        """
        name, words = f"{self._prefix}told", [f"{number:x}" for number in told]
        said = self._here().do(
            lambda link: link.evaluate(EXCHANGE, (name,), key.hex(), after, *words)
        )
        try:
            others, now, place, more = said[:4]
            pairs = [value.split() for value in said[4:] if value]
            found = [(int(one, 16), max(0, int(now) - int(when)) / 1e3) for one, when in pairs]
            if not all(0 < number < 2**64 for number, _ in found):
                raise ValueError("out of range")
            its_key = bytes.fromhex(others.decode())
            if len(its_key) != len(key):
                raise ValueError("it has another length")
            return Exchanged(its_key, place.decode(), found, more == b"1")
        except ValueError:
            raise CoordinatorError(
                f"{self.address}: {name} holds what keyfront has not written; DEL removes it"
            ) from None

    def close(self) -> None:
        """Detach from the table, which stays for others."""
        self._closed = True
        self._contact.close()
        if self._poller is not None and self._mirror is not None:
            self._poller.stop()
            self._mirror.clear()

    # Reading

    def _fresh(self, epoch: Epoch, slots: Slots) -> bool:
        found = self._look(slots)
        if found is None or found.generation != epoch[0]:
            return False
        if min(found.numbers) < 0:
            self._recover_sometimes()
            return False
        return max(found.numbers) <= epoch[1]

    def _renewed(self, mirror: Mirror, epoch: Epoch, slots: Slots) -> bool:
        """Return whether ``slots`` are fresh, where the mirror could not tell.

        :raises CoordinatorError: Redis did not answer
        """
        self._here()
        if self._poller is not None and not self._closed:
            self._poller.start()
        if mirror.is_behind():
            self._poll()
            verdict = mirror.verdict(epoch, slots)
            if verdict is not None:
                return verdict
        found = self._look(slots)
        if found is None:
            mirror.clear()
            return False
        clean = {slot: n for slot, n in zip(slots, found.numbers, strict=True) if n >= 0}
        mirror.learn(found.generation, found.sequence, clean)
        if len(clean) < len(slots):
            self._recover_sometimes()
            return False
        return found.generation == epoch[0] and max(found.numbers) <= epoch[1]

    def _poll(self) -> None:
        """Bring the mirror up to date.

        :raises CoordinatorError: Redis did not answer
        """
        mirror = self._mirror
        if mirror is None or self._closed:
            return
        generation, base = mirror.position
        asked = time.monotonic()
        self._here()
        table = self._table
        seen = table.history.seen
        changes: dict[int, list[int]] = {}
        marked: set[int] = set()

        def ask(link: Link) -> _Look | None:
            changes.clear()
            marked.clear()
            numbers = range(base + 1, base + 1 + _AHEAD)
            more = ("marks", *(f"c{number}" for number in numbers))
            registered, values = self._read(link, table, "head", seen.field, *more)
            found = self._parsed(link, table, registered, values[:2], seen)
            if found is None:
                return None
            marks = values[2]
            if marks:
                serials = (b"m" + serial for serial in marks.split(b","))
                # One that is no longer there was stamped after this was asked.
                for line in filter(None, self._read(link, table, *serials)[1]):
                    marked.update(map(int, line.partition(b":")[2].split(b",")))
            if found.generation != generation:
                return found
            lines = values[3:]
            if numbers.stop <= found.sequence <= base + CHANGES:
                rest = range(numbers.stop, found.sequence + 1)
                lines += self._read(link, table, *(f"c{one}" for one in rest))[1]
            for number, line in enumerate(lines, base + 1):
                if line is not None and number <= found.sequence:
                    changes[number] = [int(n) for n in line.partition(b":")[0].split(b",")]
            return found

        try:
            found = self._contact.do(ask, reading=True)
        except ValueError:
            found = None
        if found is None:
            mirror.clear()
        else:
            mirror.advance(asked, found.generation, found.sequence, changes, marked)

    def _look(self, slots: Slots | None = None) -> _Look | None:
        """Return values of the table; ``None`` if there is none of this life of the server.

        :param slots: the slots whose numbers are wanted

        :raises CoordinatorError: Redis did not answer
        """
        self._here()
        table = self._table
        history = table.history
        for _ in range(_TRIES):
            before = history.seen.generation
            found = self._look_once(table, slots)
            now = history.seen.generation
            if now == before or (found is not None and found.generation == now):
                break
            # Another thread has heard of another generation meanwhile, which may be a newer one.
        return found

    def _look_once(self, table: _Table, slots: Slots | None) -> _Look | None:
        # The answer must still hold all that was seen before the question.
        seen = table.history.seen
        before = () if slots is None else table.history.numbers(seen.generation, slots)
        fields = ("head", seen.field, *(slots or ()))

        def ask(link: Link) -> _Look | None:
            registered, values = self._read(link, table, *fields)
            return self._parsed(link, table, registered, values, seen, slots, before)

        return self._contact.do(ask, reading=True)

    def _read(self, link: Link, table: _Table, *fields: Any) -> tuple[list[Any], list[Any]]:
        # The register first: a table that is named in it, and is there after that, was not begun
        # anew by its own, and not ended by others, in between.
        return link.read(self._register, "HMGET", table.key, *fields)

    def _found(self, slots: Slots | None = None) -> _Look:
        """Return values of the table as :meth:`_look`; make a table if there is none."""
        for _ in range(_TRIES):
            found = self._look(slots)
            if found is not None:
                return found
            if not self._create:
                raise NoEpochTableError(
                    f"{self.address}: no Keystone has begun a table {self._table.key} there"
                )
            self._run("look")
        raise CoordinatorError(f"{self.address}: the table was lost again and again")

    def _parsed(
        self,
        link: Link,
        table: _Table,
        registered: list[bytes | None],
        values: list[bytes | None],
        seen: Seen,
        slots: Slots | None = None,
        before: tuple[int, ...] = (),
    ) -> _Look | None:
        """Return the values that were read; ``None`` if they are from no table that counts.

        :param registered: the answer with the list of tables that count
        :param values: the values of the fields ``head`` and ``seen.field``, and of slots
        :param seen: the last change that was seen before the question
        :param slots: the slots that were read
        :param before: the numbers of the slots then, if they were seen
        """
        text, line = values[:2]
        if text is None or table.digest not in (registered[0] or b""):
            return None
        try:
            head = table.head if table.head.text == text else _Head.of(text)
            numbers = [int(value) if value else 0 for value in values[2:]]
            told = line.decode("ascii") if line else None
        except ValueError:
            return None
        now = head.last
        if head.life != link.life or now.sequence >= LAST_NUMBER:
            return None
        history = table.history
        if now.generation != seen.generation:
            before = ()
        if not (history.holds(seen, now, told) and history.grew(before, numbers)):
            history.complain(seen, now.generation)
            return None
        if history.is_new(now) or before != tuple(numbers):
            history.note(seen, now, head.slot_count, slots or (), numbers)
        table.head = head
        table.know(now.generation, head.slot_count)
        return _Look(now.generation, now.sequence, head.slot_count, numbers)

    # Writing

    def _mark(self, slots: Slots, owner: str) -> Mark:
        begun = time.monotonic()
        while True:
            answer = self._run("mark", ",".join(map(str, slots)), owner)
            serial, wait = answer.serial, answer.wait
            if serial > 0:
                return Mark(answer.last.generation, serial, Slots(answer.slots))
            limit, why = _BEGIN_SECONDS, "it was made anew, again and again"
            if serial < 0:
                wait, limit, why = 0.05, LOCK_SECONDS, "too many changes are under way at once"
                if self.recover():
                    continue
            if time.monotonic() + wait > begun + limit:
                raise CoordinatorError(f"{self.address}: {why}; try again")
            time.sleep(min(wait, _STEP))

    def _complete(self, deed: str, slots: Slots, *arguments: Any) -> None:
        """Give slots a new number, and return when nobody trusts an older table any more."""
        answer = self._run(deed, ",".join(map(str, slots)), *arguments, confirm=True)
        wait = answer.wait
        while wait > 0:
            time.sleep(min(wait, _STEP))
            try:
                wait = self._run("recover").wait
            except CoordinatorError:
                time.sleep(wait)
                return
        if answer.last.generation != self._begun:
            # As a rule nobody writes, and a new table can be used at once.
            self._begun = answer.last.generation
            self._recover_sometimes()

    def _recover_sometimes(self) -> None:
        now = time.monotonic()
        if self._create and now - self._recovered > _RECOVER_SECONDS:
            self._recovered = now
            with suppress(CoordinatorError):
                self.recover()

    def _run(self, deed: str, *arguments: Any, confirm: bool = False) -> Answer:
        answer = self._here().run(deed, *arguments, confirm=confirm)
        self._table.know(answer.last.generation, answer.slot_count)
        return answer

    def _owe(self, mark: Mark) -> None:
        self._here().owe(mark)
        if self._mirror is not None:
            self._mirror.clear()

    def _here(self) -> Contact:
        """Return the contact; after a fork, with locks and threads of this process."""
        pid = os.getpid()
        if self._pid != pid:
            # Not by Python's fork hooks, which not every server runs.
            with self._forks.setdefault(pid, threading.Lock()):
                if self._pid != pid:
                    self._contact.after_fork()
                    for table in list(self._tables.values()):
                        table.history.after_fork()
                    if self._poller is not None and self._mirror is not None:
                        self._poller.after_fork()
                        self._mirror.after_fork()
                    self._pid = pid
        return self._contact


# A secret of this node, for what its workers share; it is never sent anywhere.

NAME = "secret"
_SIZE = 32


def node_secret(folder: Path) -> bytes:
    """Return the 32 random bytes in ``folder``; the first caller makes the file with mode 0600.

    :param folder: the folder, made with mode 0700 if it is missing
    :raises CoordinatorError: the folder or the file cannot be used
    """
    check_folder(folder, make=True)
    path = folder / NAME
    try:
        with suppress(FileNotFoundError):
            return _read(path)
        new = folder / f"{NAME}.{secrets.token_hex(8)}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(_SIZE))
        finally:
            os.close(fd)
        try:
            with suppress(FileExistsError):  # another was first
                os.link(new, path)
        finally:
            new.unlink()
        return _read(path)
    except OSError as error:
        raise CoordinatorError(f"{path}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise CoordinatorError(f"{path}: others may read it; remove it, then restart")
        secret = os.read(fd, _SIZE + 1)
    finally:
        os.close(fd)
    if len(secret) != _SIZE:
        raise CoordinatorError(f"{path}: is not {_SIZE} bytes long; remove it, then restart")
    return secret

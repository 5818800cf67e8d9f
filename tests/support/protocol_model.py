"""A world for ``explorer.py``: workers, their epoch tables, Keystone's caches and a database.

The coordinators are :class:`SharedMemory` over the real :class:`Table`, with files that lie in this
process, a clock that stands still and a lock that is never waited for. What Keystone caches goes by
the real :class:`CacheViews` and :class:`ByRows`. One row of the database has a version, and each
change makes the next one; what is cached anywhere is the version that it was made from.

A transaction that was sent is committed by a process of its own, however late, and whether or not
its writer lives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dogpile.cache.api import NO_VALUE, CachedValue

from keyfront.errors import CoordinatorError
from keyfront.gateway.keystone import values_by_rows
from keyfront.gateway.keystone.cache_regions import CacheViews
from keyfront.gateway.keystone.values_by_rows import MADE_OF, ByRows
from keyfront.middleware.tokens import epochs
from keyfront.middleware.tokens.coordinator import local
from keyfront.middleware.tokens.coordinator.local import LEASE_SECONDS, SharedMemory, Table
from keyfront.middleware.tokens.coordinator.mark_owners import begins
from keyfront.middleware.tokens.epochs import DIRTY, MARK_SECONDS, Epoch, Mark, Slots, View
from keyfront.middleware.tokens.invalidation.rules import FIXED
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.request import Request, current
from support.explorer import Again, Disabled, Step, Steps, Violation

#: What a change of the row touches, and what an answer that shows it depends on.
CHANGED = ("any", "content", "projects", "grants:group", "project:p")
SHOWN = ("all", "project:p")
#: Keys of Keystone's caches: of the token and of the row.
TOKEN, ROW = "token", "row"
# What they are made of: that anything has changed since a token was kept says little.
_MADE_OF = {
    TOKEN: Reads(frozenset({"any"}), frozenset({"project:p"})),
    ROW: Reads(frozenset({"projects"}), frozenset({"project:p"})),
}
_SLOTS = 48
_PLACES = 4
_TAGS = 5
_OWNER_BYTES = 16
# How many of the fixed slots are read before somebody stands still: between two that change.
_READ = FIXED.index("projects") + 1

# What a request began with: the numbers of the fixed tags, what it has seen, what has settled.
_State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_ANEW: _State = ((), (), ())


@dataclass(frozen=True)
class Rules:
    """Which repairs are in force; all of them by default.

    :param from_the_beginning: what a request stores has the number of its beginning (hole 1)
    :param alone: after a commit of its own it shares nothing (hole 2)
    :param asks_owner: a mark is recovered only if its transaction is over (hole 4)
    :param begins_marked: a new table begins under a mark of everything, until the transactions of
        before are over (hole 4, when the table is lost with its writer)
    :param tables_apart: versions that number the slots differently have a table each (hole 13)
    :param from_one_moment: a request begins with the last change before it read the first slot
    :param late: the kind of request that keeps what it answers with the number of its end; none
    """

    from_the_beginning: bool = True
    alone: bool = True
    asks_owner: bool = True
    begins_marked: bool = True
    tables_apart: bool = True
    from_one_moment: bool = True
    late: str = ""


class _Clock:
    """Stands for ``time``."""

    def __init__(self) -> None:
        self.now = 1000 * 10**9

    def monotonic_ns(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return self.now / 1e9

    time = monotonic

    def sleep(self, seconds: float) -> None:
        raise _Sleeps(self.now + round(seconds * 1e9))


class _Sleeps(Exception):
    """Somebody sleeps until a time."""


class _Lock:
    """Is free: who holds it is not interrupted, but where that is looked at by the word."""

    def __init__(self, world: Cloud) -> None:
        self._world = world

    def attempt(self) -> bool:
        return not self._world.held

    def __enter__(self) -> None:
        if self._world.held:
            raise Disabled

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class _Words:
    """Notes what is written into the words of a table."""

    def __init__(self, words: memoryview, number: int, world: Cloud) -> None:
        self._words, self._number, self._world = words, number, world

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            for place, one in zip(range(index.start, index.stop), value, strict=True):
                self[place] = one
            return
        if self._world.by_word:
            self._world.written.append((self._number, index, self._words[index], value))
        self._words[index] = value


class _HalfRead:
    """A table of which somebody has read the last number and a part of the slots."""

    def __init__(self, table: Table, sequence: int, *numbers: int) -> None:
        self._table, self._numbers, self.sequence = table, numbers, sequence
        self.generation, self.name, self.values = table.generation, table.name, self

    def __getitem__(self, part: slice) -> _HalfRead:
        return self

    def tolist(self) -> list[int]:
        return [*self._numbers, *self._table.values[_READ : len(FIXED)]]


@dataclass
class _Name:
    """A file's name."""

    name: str
    disk: dict[str, int]

    def unlink(self) -> None:
        del self.disk[self.name]


class _Shared(SharedMemory):
    """An epoch table in files of this process."""

    world: Cloud
    mapped = 0
    version = 0

    def _attach(self) -> Table:
        table = super()._attach()
        if not isinstance(table._words, _Words):
            table._words = _Words(table._words, self.mapped, self.world)  # type: ignore[assignment]
        return table

    def _is_mapped(self) -> bool:
        mapped = self.mapped
        return bool(mapped and self.world.disk.get(self._path.name) == mapped)

    def _open(self) -> tuple[memoryview | None, tuple[int, int], str | None]:
        number = self.world.disk.get(self._path.name, 0)
        if not number:
            raise FileNotFoundError(2, "No such file")
        memory = memoryview(self.world.files[number])
        self.mapped = number
        return memory, (0, number), Table.fault(memory)

    def _make(self) -> tuple[memoryview, tuple[int, int]]:
        number = self.world.new_file()
        memory = memoryview(self.world.files[number])
        now = self.world.clock.now
        table = Table.make(memory, self._slot_count, now + local._SETTLE)
        if self.world.rules.begins_marked:
            table.begin(now)
        self.world.disk[self._path.name] = self.mapped = number
        return memory, (0, number)

    def _settle(self, table: Table) -> None:
        # A lease is over only when its time has passed, and here no time passes by itself.
        until = max(table.settled, table.ended + local._LEASE + 1)
        if until > self.world.clock.now:
            self.world.waiting[self.world.acting] = until

    def save(self) -> tuple[Any, ...]:
        return (self.mapped if self._table is not None else 0, self._looked, self._recovered)

    def load(self, state: tuple[Any, ...]) -> None:
        self.mapped, self._looked, self._recovered = state
        self._identity = (0, self.mapped)
        self._table = None
        if self.mapped:
            self._table = self.world.table(self.mapped)


class _Backend:
    """What memcached keeps."""

    def __init__(self, world: Cloud) -> None:
        self._world = world

    def get(self, key: str) -> Any:
        found = self._world._cache.get(key)
        return NO_VALUE if found is None else CachedValue(found[0], {MADE_OF: found[1]})

    def set(self, key: str, value: CachedValue) -> None:
        self._world._cache[key] = (value.payload, value.metadata[MADE_OF])


class Cloud:
    """The world.

    :attr:`by_word`: whether who holds the lock may be interrupted and killed between any two words
    that it writes, instead of between any two of its calls.
    """

    def __init__(self, rules: Rules, clock: _Clock) -> None:
        self.rules = rules
        self.clock = clock
        self.files: dict[int, bytearray] = {}
        self._tables: dict[int, Table] = {}
        #: Files by name: what is there under it now.
        self.disk: dict[str, int] = {}
        self.made = 0
        self.by_word = False
        self.written: list[tuple[int, int, int, int]] = []
        #: Who is interrupted in the middle of what it writes under the lock.
        self.held = ""
        self._left: tuple[tuple[int, int, int], ...] = ()
        self._value: Any = None
        self.acting = ""
        self._killed: frozenset[str] = frozenset()
        #: Until when a process sleeps.
        self.waiting: dict[str, int] = {}
        #: Requests by process: the state they share things of, and the least version they may show.
        self._requests: dict[str, tuple[_State | None, int]] = {}
        self._database = 0
        #: Transactions by process: on their way (0), or the version they made.
        self._transactions: dict[str, int] = {}
        #: Whose transactions have written, and are not over.
        self._writers: frozenset[str] = frozenset()
        #: Those who had when the database was first asked of an owner.
        self._older: dict[str, frozenset[str]] = {}
        #: Which process made a mark, by generation and serial number.
        self._owners: dict[tuple[int, int], str] = {}
        #: The last version of which a response told.
        self._told = 0
        #: The last version that was committed under a mark, by the mark's generation.
        self._under_mark: dict[int, int] = {}
        #: What is in Keystone's caches, with what it was made of, and what the filter keeps.
        self._cache: dict[str, tuple[int, Any]] = {}
        self._kept: frozenset[tuple[int, int, tuple[int, ...], int]] = frozenset()
        self.workers: dict[str, _Shared] = {}
        region = SimpleNamespace(key_mangler=None, actual_backend=None)
        self._views = CacheViews([region], lambda: self._coordinator)
        self._values: Any = ByRows(
            None, bytes, lambda: False, lambda payload, reads: reads, lambda function: True
        )
        self._values.proxied = _Backend(self)
        self._coordinator: _Shared | None = None

    def start(self, workers: dict[str, int], *, by_word: bool) -> None:
        """Start workers."""
        for name, version in workers.items():
            self.acting = name
            made = self.workers[name] = _Shared.__new__(_Shared)
            made.world, made.version = self, version
            digest = str(version if self.rules.tables_apart else 0)
            made.__init__(  # type: ignore[misc]
                Path("/"), slot_count=_SLOTS, digest=digest, settled=self.settled
            )
        # The tables have been there for long.
        self.clock.now += round(2 * LEASE_SECONDS * 1e9)
        self.by_word = by_word

    def new_file(self) -> int:
        """Return the number of a new file."""
        self.made += 1
        self.files[self.made] = bytearray(local.size(_SLOTS))
        self._tables.pop(self.made, None)
        return self.made

    def table(self, number: int) -> Table:
        """Return the table in a file."""
        made = self._tables.get(number)
        # Another one may have been there in another state.
        if made is not None and self.files[number].startswith(made._fixed):
            return made
        made = self._tables[number] = Table(memoryview(self.files[number]))
        made._words = _Words(made._words, number, self)  # type: ignore[assignment]
        return made

    # What explorer.World asks for

    def save(self) -> Any:
        used = {x.mapped for x in self.workers.values()} | set(self.disk.values())
        return (
            self.clock.now,
            tuple((number, bytes(self.files[number])) for number in sorted(used) if number),
            tuple(sorted(self.disk.items())),
            self.made,
            tuple(worker.save() for worker in self.workers.values()),
            (self.held, self._left, self._value),
            tuple(sorted(self._killed)),
            tuple(sorted(self.waiting.items())),
            tuple(self._requests.items()),
            self._database,
            tuple(sorted(self._transactions.items())),
            tuple(sorted(self._writers)),
            tuple((owner, tuple(sorted(x))) for owner, x in sorted(self._older.items())),
            tuple(sorted(self._owners.items())),
            self._told,
            tuple(sorted(self._under_mark.items())),
            tuple(sorted(self._cache.items())),
            tuple(sorted(self._kept)),
        )

    def load(self, state: Any) -> None:
        (
            self.clock.now, files, disk, self.made, workers, held, killed, waiting, requests,
            self._database, transactions, writers, older, owners, self._told, under_mark, cache,
            kept,
        ) = state
        for number, content in files:
            memory = self.files.get(number)
            if memory is None:
                memory = self.files[number] = bytearray(len(content))
            memory[:] = content
        self.disk = dict(disk)
        for worker, saved in zip(self.workers.values(), workers, strict=True):
            worker.load(saved)
        self.held, self._left, self._value = held
        self._killed = frozenset(killed)
        self.waiting = dict(waiting)
        self._requests = dict(requests)
        self._transactions = dict(transactions)
        self._writers = frozenset(writers)
        self._older = {owner: frozenset(x) for owner, x in older}
        self._owners = dict(owners)
        self._under_mark = dict(under_mark)
        self._cache = dict(cache)
        self._kept = frozenset(kept)

    def dead(self, process: str) -> bool:
        return _worker(process) in self._killed

    def act(self, process: str, step: Step) -> Any:
        self.acting = process
        self._coordinator = self.workers.get(_worker(process))
        if self.held == process:
            return self._go_on()
        until = self.waiting.pop(process, 0)
        if until > self.clock.now:
            self.clock.now = until
            raise Again
        self.written = []
        try:
            value = getattr(self, f"do_{step[0]}")(*step[1:])
        except _Sleeps as sleeps:
            self.waiting[process] = sleeps.args[0]
            raise Again from None
        if self.by_word and self.written and self._coordinator:
            # Take it all back; it is then written by the word.
            for number, index, before, _ in reversed(self.written):
                self._word(number, index, before)
            self._left = tuple((n, index, value) for n, index, _, value in self.written)
            self.held, self._value = process, value
            return self._go_on()
        return value

    def _go_on(self) -> Any:
        (number, index, value), *left = self._left
        self._word(number, index, value)
        self._left = tuple(left)
        if left:
            raise Again
        self.held, value, self._value = "", self._value, None
        return value

    def _word(self, number: int, index: int, value: int) -> None:
        self.files[number][index * 8 : index * 8 + 8] = value.to_bytes(8, "little")

    def check(self) -> None:
        """Whoever asks any living worker now is shown nothing from before a response.

        Nor from before what was committed, response or not: who read it has seen it. But where a
        table was lost or taken away, it is gone by until its lease is over: of what was committed
        meanwhile under a mark in another table, a response tells after that.
        """
        self.by_word, before = False, self.by_word
        try:
            for name, worker in self.workers.items():
                if name not in self._killed:
                    self.acting, self._coordinator = f"{name} check", worker
                    self._check(name, worker)
        finally:
            self.by_word = before

    def _check(self, name: str, worker: _Shared) -> None:
        for generation, sequence, numbers, version in self._kept:
            due = self._due(generation)
            if version < due and self._is_fresh(worker, Epoch(generation, sequence), numbers):
                raise Violation(f"{name} answers from the filter with version {version} of {due}")
        if not self._cache or self._database == 0:
            return
        request = Request()
        try:
            self._views.begin(request)
            if request.view is None:
                return
            with self._as(request):
                found = {key: self._values.get(key) for key in _MADE_OF}
        except Disabled:
            return
        due = self._due(request.view.seen.generation)
        for key, value in found.items():
            if value is not NO_VALUE and value.payload < due:
                raise Violation(f"{name} finds version {value.payload} of {due} as {key!r}")

    def _due(self, generation: int) -> int:
        """The least version that is shown by who goes by the table of a generation."""
        for number in self.disk.values():
            if Table(memoryview(self.files[number])).generation == generation:
                return self._database
        return max(self._told, self._under_mark.get(generation, 0))

    def check_end(self) -> None:
        """When what was abandoned is recovered, every living worker can keep answers again."""
        self.by_word = False
        living = [x for name, x in self.workers.items() if name not in self._killed]
        for _ in range(2):  # after the first, who has lost his table has a new one
            self.clock.now += round((MARK_SECONDS + 1) * 1e9)
            for worker in living:
                worker.now()
                worker.recover()
        for worker in living:
            self._coordinator = worker
            if not worker.fresh(worker.now(), self._slots((*SHOWN, *CHANGED))):
                raise Violation("nothing is fresh any more")

    @staticmethod
    def _is_fresh(worker: _Shared, epoch: Epoch, numbers: tuple[int, ...]) -> bool:
        try:
            return worker.fresh(epoch, Slots(numbers))
        except Disabled:
            return False  # it waits for the lock

    # What processes do

    def do_glance(self) -> tuple[int, ...]:
        """Read a part of the table's slots, and stand still."""
        self._note(Request(), self._told)
        table = self._here._usable()
        return (self._here.mapped, table.sequence, *table.values[:_READ].tolist())

    def do_begin(self, read: tuple[int, ...] = ()) -> None:
        """Begin a request in Keystone.

        :param read: what was read before it stood still
        """
        request = Request()
        with contextlib.ExitStack() as stack:
            if read:
                table = _HalfRead(self.table(read[0]), *read[1:])
                if not self.rules.from_one_moment:
                    table.sequence = DIRTY
                stack.enter_context(mock.patch.object(self._here, "_usable", lambda: table))
            self._views.begin(request)
        self._note(request, self._requests.get(self.acting, (None, self._told))[1])

    def do_ask(self) -> tuple[int, int] | None:
        """Begin a request that the filter cannot answer."""
        self._note(Request(), self._told)
        try:
            found = self._here.now()
        except CoordinatorError:
            return None
        return (found.generation, found.sequence)

    def do_look(self, key: str) -> int | None:
        """Look for a value in Keystone's caches."""
        with self._request():
            found = self._values.get(key)
            return None if found is NO_VALUE else found.payload

    def do_read(self) -> int:
        """Read the row."""
        return self._database

    def do_put(self, key: str, version: int) -> None:
        """Store what was made of the row in Keystone's caches."""
        with self._request() as request:
            if key == TOKEN and not self.rules.from_the_beginning:
                self._views.begin(request)
            request.kept[key] = _MADE_OF[key]
            self._values.set(key, CachedValue(version, {}))

    def do_keep(self, epoch: tuple[int, int] | None, version: int) -> None:
        """Answer, and keep the answer in the filter."""
        self.do_answer(version)
        if epoch is None:
            return
        if self.rules.late and self.acting.endswith(self.rules.late):
            found = self._here.now()
            epoch = (found.generation, found.sequence)
        numbers = self._slots(SHOWN)
        if self._here.fresh(Epoch(*epoch), numbers):
            self._kept |= {(*epoch, tuple(numbers), version)}

    def do_find(self) -> int | None:
        """Look for what is known of a token, and stands; the oldest, if there are several."""
        return min(
            (
                version
                for generation, sequence, numbers, version in self._kept
                if self._is_fresh(self._here, Epoch(generation, sequence), numbers)
            ),
            default=None,
        )

    def do_leave(self) -> None:
        """Leave a request to others."""
        self._end()

    def do_answer(self, version: int) -> None:
        """Answer with what was made of this version."""
        due = self._requests[self.acting][1]
        self._end()
        if version < due:
            raise Violation(f"answered with version {version}; when it began there was {due}")

    def do_mark(self) -> tuple[Any, ...] | None:
        """Announce a change, when it is written; ``None``: it must not be made."""
        self._writers |= {self.acting}
        try:
            mark = self._here.mark(self._slots(CHANGED), self.acting)
        except CoordinatorError:
            self._writers -= {self.acting}
            return None
        self._owners[mark.generation, mark.serial] = self.acting
        return (mark.generation, mark.serial, tuple(mark.slots))

    def do_send(self) -> None:
        """Send the database the commit."""
        self._transactions[self.acting] = 0

    def do_commit(self, process: str) -> None:
        """The database commits what was sent."""
        if self._transactions.get(process) != 0:
            raise Disabled
        self._database += 1
        self._transactions[process] = self._database
        self._writers -= {process}
        for (generation, _), owner in self._owners.items():
            if owner == process:
                self._under_mark[generation] = self._database

    def do_hear(self) -> int:
        """Hear from the database that it has committed."""
        return self._transactions[self.acting] or _disabled()

    def do_stamp(self, mark: tuple[Any, ...]) -> None:
        """Complete a change."""
        generation, serial, numbers = mark
        self._here.stamp(Mark(generation, serial, Slots(numbers)))
        request = Request()
        if not self.rules.alone:
            self._requests[self.acting] = (_ANEW, 0)
            return
        request.end_sharing()
        self._note(request, 0)

    def do_respond(self, version: int) -> None:
        """Send the response to a change."""
        self._told = max(self._told, version)
        self._end()

    def do_recover(self) -> None:
        """Complete what was abandoned, as whoever meets a mark does now and then."""
        with contextlib.suppress(CoordinatorError):
            self._here.recover()

    def do_kill(self, worker: str) -> None:
        """Kill a worker, with all it does."""
        self._killed |= {worker}
        if _worker(self.held) == worker:
            self.held, self._left, self._value = "", (), None  # the kernel lets go of the lock
        # What it has not sent is rolled back.
        self._writers -= {
            x for x in self._writers if _worker(x) == worker and x not in self._transactions
        }
        for process in [x for x in self._requests if _worker(x) == worker]:
            self._end(process)
        for process in [x for x in self.waiting if _worker(x) == worker]:
            del self.waiting[process]

    def do_pass(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += round(seconds * 1e9)

    def do_lose(self) -> None:
        """Remove the tables."""
        self.disk.clear()

    def settled(self, owner: str, age: float) -> bool:
        """Whether the owner of a mark is dead, and his transaction over."""
        if begins(owner):
            older = self._writers & self._older.get(owner, self._writers)
            self._older[owner] = older
            return not older
        return not self.rules.asks_owner or (self.dead(owner) and owner not in self._writers)

    def others(self, name: str) -> list[_Name]:
        """The files of other versions than this one's."""
        return [_Name(x, self.disk) for x in self.disk if x != name]

    @property
    def _here(self) -> _Shared:
        assert self._coordinator is not None
        return self._coordinator

    def _slots(self, tags: tuple[str, ...]) -> Slots:
        return _slots_of(tags, self._here.version)

    def _end(self, process: str = "") -> None:
        """Forget a request."""
        del self._requests[process or self.acting]

    def _note(self, request: Request, due: int) -> None:
        view: View | None = request.view
        state = None if view is None else (view.numbers, tuple(view.seen), tuple(view.settled))
        self._requests[self.acting] = (state, due)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Request]:
        state, _ = self._requests[self.acting]
        request = Request()
        if state is _ANEW:  # a rule that is not in force
            self._views.begin(request)
        elif state is not None:
            numbers, seen, settled = state
            request.view = View(self._here, numbers, Epoch(*seen), Epoch(*settled))
        with self._as(request):
            yield request

    @contextlib.contextmanager
    def _as(self, request: Request) -> Iterator[None]:
        token = current.set(request)
        try:
            yield
        finally:
            current.reset(token)


@functools.cache
def _slots_of(tags: tuple[str, ...], version: int) -> Slots:
    if not version:
        return epochs.slots(tags, _SLOTS)
    # Of another version, in which other identifiers share a slot.
    return epochs.slots([f"{tag}-" if ":" in tag else tag for tag in tags], _SLOTS)


def _worker(process: str) -> str:
    return process.partition(" ")[0]


def _disabled() -> int:
    raise Disabled


@contextlib.contextmanager
def cloud(rules: Rules, workers: dict[str, int], *, by_word: bool = False) -> Iterator[Cloud]:
    """A :class:`Cloud`, with small tables, until the block ends.

    :param workers: their names, and by which version of keyfront each numbers the slots
    """
    clock = _Clock()
    times = itertools.count()
    made = Cloud(rules, clock)
    random = SimpleNamespace(randbelow=lambda limit: made.made, token_bytes=bytes)
    first = local._HEADER_WORDS
    head = local._OWNER + _OWNER_BYTES // local.WORD
    last = first + _PLACES * (head + _TAGS)
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (local, "OWNER_BYTES", _OWNER_BYTES),
            (local, "_MARK_HEAD", head),
            (local, "_PLACES", range(first, last, head + _TAGS)),
            (local, "_FIRST_SLOT", last),
            (local, "boot_word", lambda: 1),
            (local, "secrets", random),
            (values_by_rows, "_hashed", str),
            (values_by_rows, "slots", lambda tags, count: made._slots(tuple(tags))),
            (local, "time", clock),
            (local, "_others", lambda folder, name: made.others(name)),
            # whose folder is never as it was, so that it is looked into each time
            (local, "check_folder", lambda folder, **options: SimpleNamespace(
                st_mtime_ns=next(times)
            )),
            (local, "FileLock", lambda path, create: _Lock(made)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        made.start(workers, by_word=by_word)
        yield made


# Processes


def fill(*, look: bool = True) -> Steps:
    """A validation that the filter cannot answer.

    :param look: whether Keystone has a cache
    """
    epoch = yield ("ask",)
    yield ("begin",)
    version = (yield ("look", TOKEN)) if look else None
    if version is None:
        version = (yield ("look", ROW)) if look else None
        if version is None:
            version = yield ("read",)
            if look:
                yield ("put", ROW, version)
        if look:
            yield ("put", TOKEN, version)
    yield ("keep", epoch, version)


def login(*, halts: bool = False) -> Steps:
    """Issues a token for what it has read before bcrypt.

    :param halts: whether it stands still while it begins
    """
    if halts:
        read = yield ("glance",)
        yield ("begin", read)
    else:
        yield ("begin",)
    version = yield ("look", ROW)
    if version is None:
        version = yield ("read",)
        yield ("put", ROW, version)
    yield ("put", TOKEN, version)
    yield ("answer", version)


def issue() -> Steps:
    """Issues a token, and keeps what a validation of it will say."""
    epoch = yield ("ask",)
    yield ("begin",)
    version = yield ("look", ROW)
    if version is None:
        version = yield ("read",)
        yield ("put", ROW, version)
    yield ("put", TOKEN, version)
    yield ("keep", epoch, version)


def first() -> Steps:
    """A first validation, which is answered from what is known if anything is."""
    epoch = yield ("ask",)
    version = yield ("find",)
    if version is None:
        yield ("leave",)
    else:
        yield ("keep", epoch, version)


def change(*, stores: bool = False) -> Steps:
    """Changes the row.

    :param stores: whether it then stores what it made of the row in Keystone's caches
    """
    if stores:
        yield ("begin",)
    mark = yield ("mark",)
    if mark is None:
        return
    yield ("send",)
    version = yield ("hear",)
    yield ("stamp", mark)
    if stores:
        yield ("put", ROW, version)
    yield ("respond", version)


def once(*steps: Any) -> Steps:
    """Does this."""
    for step in steps:  # noqa: UP028  (what came of it can be sent to no tuple)
        yield step

"""The turns of logins: how many run at a time on a node, and who is next.

Checking a password takes a core for a quarter of a second, so few may run at a time. Others wait a
short while in a place of their own, of which there are few as well; who finds none is refused at
once. Who waits is ordered: first those whose user has logged in from the same address before
(*known*), then by what address and user have taken lately, then by when they came. Turns and places
go to who comes first in this order, so that a flood of strangers waits behind the known, and
somebody who has taken much behind those who have not.

Nobody is refused for a short rush: for as long as :data:`RUSH` who finds no place, or has waited
for his turn in vain, runs all the same, as if there were no limit. A rush takes threads from
validations, so it ends early if it is a flood: if more passwords of strangers were wrong than right
in it. What took no time does not count, nor what was before, so that nobody ends a rush of others
but by taking more of its time than they do. The known who have not taken much run at any time, so
for them the limit is never worse than none.

What is counted for whom is chosen so that nobody can be kept out by others:

* an address pays for all of its logins, but only among the unknown;
* a user from an address pays for the logins of this pair: whoever tries a user's name elsewhere
  changes nothing for the user;
* a user by himself, and a project, pay for logins that succeeded, and so for nobody without the
  password.

All of it is in a mapped file of the node, by a hash with a key that the file has: it tells no names
and no addresses, and nobody can find out whose places he would share. Who is known is told to other
nodes by that hash (:mod:`.known_logins`), so these have the same key. The costs are a count-min
sketch (Cormode and Muthukrishnan, 2005) whose numbers halve every :data:`HALVED` seconds.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common.counters import VARIABLE
from keyfront.common.file_lock import FileLock
from keyfront.common.mmap_file import Mapped
from keyfront.common.process import started
from keyfront.errors import CoordinatorError

LOG = logging.getLogger("keyfront.gateway")

#: Seconds that a login waits for its turn.
WAIT = 2.0
#: Seconds after a refusal for which half of the turns and places are kept for the known.
PRESSED = 2.0
#: Seconds in which the cost of an address, user or project halves.
HALVED = 30.0
#: Seconds for which it is known that a user has logged in from an address.
KNOWN = 7 * 86400.0
# The first login of such a time tells other nodes again who is known.
_TOLD = 86400.0
#: Seconds for which more logins than there are turns and places are a rush, and no flood: as long
#: as requests may wait for their turn by default, so that a node that has just been started, and
#: knows nobody, refuses no more of those who come at once than it did without a limit.
RUSH = 5.0
#: Seconds for which it is a rush if more wrong passwords than right ones were checked, but too few
#: to tell. It goes on while none was checked: that may take long where many hash at once.
DOUBTFUL = 1.0
#: Seconds of turns, of which somebody has taken much if he took more than that lately.
MUCH = 1.0

# Seconds between two looks of who waits; more where many wait, since each look is at all of them.
_POLL = 0.01
_FEW = 16
# Seconds charged to a user at an address for a wrong password, besides what it took: whoever tries
# known users' passwords from where they are, behind one address, does not pass for them.
_WRONG = 2 * MUCH
# What is charged when a login comes; what it took is settled when it ends.
_ESTIMATE = 0.25
# Wrong passwords from which on a rush may be a flood, where fewer logins may run at a time.
_SPRAY = 3
# Seconds after which a turn belongs to a process that is stopped: no server lets a request run on.
_LONGEST = 120.0
# Seconds between two looks for processes that died over a turn; each reads a file of each holder.
_REAP = 0.25
# Seconds to wait for the file. It is held for microseconds.
_LOCK = 0.5

# Hashes that a process remembers to tell others, and that are learned under one lock.
_NEWS, _AT_ONCE = 1000, 64

_KEY = 16
# The key; when somebody was last refused; when dead holders were last looked for; since when, and
# when last, somebody found no place: a rush; how many wrong and right passwords of strangers were
# checked in it, where one that took less than an _ESTIMATE counts as a part of one.
_HEAD = struct.Struct(f"<{_KEY}sdddddd")
# A place: process, when that started, its number of the login, since when, cost, state, unknown.
_PLACE = struct.Struct("<QQQddBB6x")
_FREE, _RUNS, _WAITS, _OUT = range(4)
_MOST, _SPARE = 512, 32
# A cell of the sketch: seconds, and when they were that many.
_CELL = struct.Struct("<dd")
_WIDTH, _DEPTH = 1 << 12, 4
# A user who has logged in from an address: hash, and when.
_PAIR = struct.Struct("<Qd")
_PAIRS, _SHARED = 1 << 15, 8

_PLACES_AT = _HEAD.size
_CELLS_AT = _PLACES_AT + _MOST * _PLACE.size
_PAIRS_AT = _CELLS_AT + _WIDTH * _DEPTH * _CELL.size
_SIZE = _PAIRS_AT + (_PAIRS + _SHARED) * _PAIR.size
# Of this layout: a file of another one needs another name, or two versions of keyfront that run
# while one takes over from the other would replace each other's.
NAME = "logins"

_NO_KEY = bytes(_KEY)
_numbers = itertools.count(1)


class Login(NamedTuple):
    """The address, user and project of a login.

    :param address: the client's address, from the web server in front
    :param user: a text that names the user; empty if it is not known
    :param project: a text that names the project or domain of the login; empty without one
    """

    address: str
    user: str = ""
    project: str = ""


@dataclass(slots=True)
class Turn:
    """The turn of a login; it is given back by :meth:`LoginTurns.end`.

    :param at: its place in the table; -1: it has none, as there are too few, and does not count
    :param number: this process's number of it
    :param waits: true until it begins
    :param known: true if its user has logged in from its address before
    :param much: true if its address, or its user from there, has taken much lately
    :param may_pass: true if it begins even if there is no turn, after it has waited
    :param began: the time of its beginning, by the monotonic clock
    :param pause: seconds until it looks again whether it begins
    """

    table: _Table
    login: Login
    at: int
    number: int
    waits: bool
    known: bool
    much: bool
    may_pass: bool
    began: float
    pause: float = _POLL


class Refusal(NamedTuple):
    """The word that a login has no turn.

    :param much: true if its address, or its user from there, has taken much lately
    """

    much: bool


class LoginTurns:
    """The turns that the processes of a node give to logins.

    :param folder: the node's; ``None``: this process shares with nobody
    :param running: logins that may run at a time, from 1
    :param waiting: logins that may wait at a time, from 0
    :param processes: processes of the server, among which both are divided where they cannot be
        shared
    :param clock: seconds that never go back, the same for all processes of the machine
    :param sleep: waits for some seconds
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        running: int,
        waiting: int,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self._numbers = running, waiting, clock
        self._alone = _Table(
            bytearray(_SIZE), threading.Lock(), max(1, running // processes),
            waiting // processes, clock,
        )  # fmt: skip
        self._shared: _Table | None = None
        self._file: Mapped | None = None
        if folder is None:
            return
        self._lock = FileLock(folder / f"{NAME}.lock", seconds=_LOCK)
        try:
            self._file = Mapped(folder / NAME, _SIZE)
        except CoordinatorError as error:
            LOG.warning("%s = %s: logins are limited by each process: %s", VARIABLE, folder, error)

    def begin(self, login: Login) -> Turn | Refusal:
        """Return the turn of a login, after waiting for it if need be, or that it has none."""
        table = self._table()
        try:
            return self._begin(table, login)
        except CoordinatorError:  # who holds the file is stopped, or the disk is full
            return self._begin(self._alone, login)

    def end(self, turn: Turn, *, right: bool | None) -> None:
        """Give a turn back.

        :param right: true if the password was right; ``None`` if it was not checked
        """
        table = turn.table
        try:
            with table.lock:
                table.end(turn, right)
        except CoordinatorError:
            pass
        finally:
            table.free(turn)

    def news(self) -> tuple[bytes, list[int]]:
        """Return the key of hashes, and, once, those of users whom this process has come to know.

        :raises CoordinatorError: the node's file cannot be had
        """
        table = self._table()
        with table.lock:
            return table.key, table.news()

    def learn(self, key: bytes, hashes: Sequence[tuple[int, float]]) -> None:
        """Know those whom other nodes know.

        :param key: the key that made the hashes; hashes are made by it from now on, so those of
            another one are nobody's any more
        :param hashes: the hashes, each with the seconds since the user has logged in
        :raises CoordinatorError: the node's file cannot be had
        """
        table = self._table()
        for first in range(0, max(1, len(hashes)), _AT_ONCE):
            with table.lock:
                table.learn(key, hashes[first : first + _AT_ONCE])

    def _begin(self, table: _Table, login: Login) -> Turn | Refusal:
        with table.lock:
            turn = table.ask(login)
        if not isinstance(turn, Turn) or not turn.waits:
            return turn
        try:
            while turn.waits:
                self._sleep(turn.pause)
                with table.lock:
                    if table.is_over(turn):
                        return Refusal(turn.much)
        except BaseException:  # a greenlet is ended, or the file cannot be had
            table.free(turn)
            raise
        return turn

    def _table(self) -> _Table:
        """Return the node's table, also after somebody removed its file; else this process's."""
        file = self._file
        if file is None:
            return self._alone
        if self._shared is None or not file.is_there():
            try:
                self._file = file = Mapped(file.path, _SIZE)
            except CoordinatorError:
                return self._alone
            self._shared = _Table(file.map, self._lock, *self._numbers)
        return self._shared


class _Table:
    """The turns, costs and known users in a mapped file; its methods are called under its lock.

    :param memory: :data:`_SIZE` bytes of memory, 0 at first
    :param lock: over all threads and processes that have the memory
    """

    def __init__(
        self,
        memory: Any,
        lock: AbstractContextManager[object],
        running: int,
        waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self.lock = lock
        self._memory = memory
        self._running = running
        self._waiting = waiting
        self._clock = clock
        # Of those who are not known, while somebody is refused.
        self._strangers = max(1, running // 2)
        self._end = _PLACES_AT + min(_MOST, 2 * (running + waiting) + _SPARE) * _PLACE.size
        self._me = 0, 0
        self._news: deque[tuple[bytes, int]] = deque(maxlen=_NEWS)

    def ask(self, login: Login) -> Turn | Refusal:
        """Return a turn, which may have to wait, or a refusal."""
        now = self._clock()
        address, pair = self._address_and_pair(login)
        known = self._pair_at(pair, now)[1]
        others = self._user_and_project(login) if known else (address,)
        cost = max(self._cost(pair, now), *(self._cost(each, now) for each in others))
        mine = _order(not known, cost, now)
        runs, found = self._look(mine, now)
        much = cost >= MUCH
        may_pass = known and not much
        # In a flood there is always another stranger for a turn: waiting only takes their threads
        # from those that have to be refused.
        places = self._waiting // 2 if not known and self._is_pressed(now) else self._waiting
        if not runs and found.waiting >= places:
            if may_pass or self._is_rush(now):
                runs = True
            elif found.last is None or found.last <= mine:
                self._press(now)
                return Refusal(much)
            else:
                # Who is last of those who wait makes place, and finds out within a moment.
                self._press(now)
                self._memory[found.last_at + _STATE] = _OUT
        number = next(_numbers)
        if found.free < 0:
            self._press(now)
            if not may_pass:
                return Refusal(much)
            runs = True
        else:
            state = _RUNS if runs else _WAITS
            _PLACE.pack_into(
                self._memory, found.free, *self._who(), number, now, cost, state, not known
            )
        for each in (address, pair):
            self._pay(each, _ESTIMATE, now)
        return Turn(
            self, login, found.free, number, not runs, known, much, may_pass, now,
            _pause(found.waiting),
        )  # fmt: skip

    def is_over(self, turn: Turn) -> bool:
        """Return whether a turn that waits is to wait no longer, in vain; it may also begin."""
        now = self._clock()
        pid, _, number, since, cost, state, unknown = _PLACE.unpack_from(self._memory, turn.at)
        if (pid, number, state) != (os.getpid(), turn.number, _WAITS):
            self.free(turn)
            return True
        waited = now - since >= WAIT
        runs, found = self._look(_order(unknown, cost, since), now)
        turn.pause = _pause(found.waiting)
        if runs or (waited and (turn.may_pass or self._is_rush(now))):
            turn.waits = False
            turn.began = now
            _PLACE.pack_into(
                self._memory, turn.at, *self._who(), number, now, cost, _RUNS, unknown
            )
            return False
        if not waited:
            return False
        self._press(now)
        self.free(turn)
        return True

    def end(self, turn: Turn, right: bool | None) -> None:
        """Settle what a login took, and remember who it was if the password was right."""
        now = self._clock()
        address, pair = self._address_and_pair(turn.login)
        took = min(max(now - turn.began, 0.0), _LONGEST)
        for each in (address, pair):
            self._pay(each, took - _ESTIMATE, now)
        if right is None:
            return
        if not turn.known:
            self._count(right, min(took / _ESTIMATE, 1.0))
        if not right:
            self._pay(pair, _WRONG, now)
        elif turn.login.user:
            for each in self._user_and_project(turn.login):
                self._pay(each, took, now)
            self._know(pair, now)

    @property
    def key(self) -> bytes:
        """The key of the hashes."""
        key = bytes(self._memory[:_KEY])
        if key == _NO_KEY:
            key = os.urandom(_KEY)
            self._memory[:_KEY] = key
        return key

    def news(self) -> list[int]:
        """Return, once, the hashes of those who are known by the logins of this process."""
        key = self.key
        news = [pair for made_by, pair in self._news if made_by == key]
        self._news.clear()
        return news

    def learn(self, key: bytes, hashes: Sequence[tuple[int, float]]) -> None:
        """Know those of some hashes, with the seconds since when, and go by the hashes' key."""
        if key != self.key:
            self._memory[:_KEY] = key
        now = self._clock()
        for pair, ago in hashes:
            at, _, since = self._pair_at(pair, now)
            # Nor is anybody forgotten for one who was there earlier.
            if ago < KNOWN and since < now - ago:
                _PAIR.pack_into(self._memory, at, pair, now - ago)

    def _know(self, pair: int, now: float) -> None:
        at, known, since = self._pair_at(pair, now)
        if not known or since // _TOLD != now // _TOLD:
            self._news.append((self.key, pair))
        _PAIR.pack_into(self._memory, at, pair, now)

    def free(self, turn: Turn) -> None:
        """Make a turn's place free.

        It needs no lock: nobody else writes to the place of a living process but that it is out.
        """
        if turn.at < 0:
            return
        pid, _, number, *_ = _PLACE.unpack_from(self._memory, turn.at)
        if (pid, number) == (os.getpid(), turn.number):
            self._memory[turn.at + _STATE] = _FREE

    def _who(self) -> tuple[int, int]:
        pid = os.getpid()
        if self._me[0] != pid:
            self._me = pid, started(pid) or 0
        return self._me

    def _look(self, mine: _Order, now: float) -> tuple[bool, _Found]:
        """Return whether who has an order may run, and what there is."""
        found = self._found()
        allowed = self._may_run(mine, found, now)
        if (found.free < 0 or not allowed) and self._reap(now):
            found = self._found()
            allowed = self._may_run(mine, found, now)
        return allowed, found

    def _may_run(self, mine: _Order, found: _Found, now: float) -> bool:
        """Return whether there is room, and nobody before him."""
        if found.running >= self._running or (found.first is not None and found.first < mine):
            return False
        if not mine[0] or found.strangers < self._strangers:
            return True
        return not self._is_pressed(now)

    def _found(self) -> _Found:
        running = strangers = waiting = 0
        free = last_at = -1
        first: _Order | None = None
        last: _Order | None = None
        at = _PLACES_AT
        places = self._memory[at : self._end]
        for _, _, _, since, cost, state, unknown in _PLACE.iter_unpack(places):
            if state == _FREE or state > _OUT:  # the latter: it is damaged
                if free < 0:
                    free = at
            elif state == _RUNS:
                running += 1
                strangers += unknown
            elif state == _WAITS:
                waiting += 1
                order = _order(unknown, cost, since)
                if first is None or order < first:
                    first = order
                if last is None or order > last:
                    last, last_at = order, at
            at += _PLACE.size
        return _Found(running, strangers, waiting, free, first, last, last_at)

    def _reap(self, now: float) -> bool:
        """Free the places of processes that died or are stopped; false: none, or not looked."""
        key, pressed, looked, *full = _HEAD.unpack_from(self._memory)
        if 0 <= now - looked < _REAP:
            return False
        _HEAD.pack_into(self._memory, 0, key, pressed, now, *full)
        found = False
        living: dict[int, int | None] = {}
        for at in range(_PLACES_AT, self._end, _PLACE.size):
            pid, born, _, since, _, state, _ = _PLACE.unpack_from(self._memory, at)
            if state == _FREE:
                continue
            if pid not in living:
                living[pid] = started(pid)
            limit = WAIT + 1 if state == _WAITS else _LONGEST
            if living[pid] != born or not 0 <= now - since < limit:
                self._memory[at + _STATE] = _FREE
                found = True
        return found

    def _is_pressed(self, now: float) -> bool:
        """Return whether somebody was refused a moment ago."""
        pressed: float = _HEAD.unpack_from(self._memory)[1]
        return 0 <= now - pressed < PRESSED

    def _press(self, now: float) -> None:
        key, _, *others = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, key, now, *others)

    def _is_rush(self, now: float) -> bool:
        """Return whether it is not for long that somebody finds no place, as now."""
        key, pressed, looked, began, last, wrong, right = _HEAD.unpack_from(self._memory)
        if not (0 <= now - last < RUSH and began <= now):
            began, wrong, right = now, 0.0, 0.0
        _HEAD.pack_into(self._memory, 0, key, pressed, looked, began, now, wrong, right)
        if wrong > right and wrong >= max(_SPRAY, self._running):
            return False
        # One that is wrong alone is a mistake.
        lasts = min(DOUBTFUL, RUSH) if wrong > right + 1 else RUSH
        return now - began < lasts and not 0 <= now - pressed < PRESSED

    def _count(self, is_right: bool, part: float) -> None:
        """Count a stranger's password; what is no part of a rush the next one begins without."""
        *others, wrong, right = _HEAD.unpack_from(self._memory)
        more = (wrong, right + part) if is_right else (wrong + part, right)
        _HEAD.pack_into(self._memory, 0, *others, *more)

    def _address_and_pair(self, login: Login) -> tuple[int, int]:
        address = network(login.address)
        return self._hash("address", address), self._hash("pair", address, login.user)

    def _user_and_project(self, login: Login) -> tuple[int, int]:
        user = self._hash("user", login.user)
        return user, self._hash("project", login.project) if login.project else 0

    def _hash(self, *words: str) -> int:
        text = "\0".join(words).encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8, key=self.key).digest(), "little") or 1

    def _cost(self, number: int, now: float) -> float:
        """Return the seconds that an address, user or project has taken lately."""
        if not number:
            return 0.0
        return min([self._cell(at, now) for at in _cells(number)])

    def _cell(self, at: int, now: float) -> float:
        seconds, when = _CELL.unpack_from(self._memory, at)
        # Not so, it is damaged, or from before the machine was started.
        if not seconds:
            return 0.0
        if 0.0 <= seconds < 1e9 and 0.0 <= now - when < 1e9:
            halved: float = seconds * 2.0 ** (-(now - when) / HALVED)
            return halved
        return 0.0

    def _pay(self, number: int, seconds: float, now: float) -> None:
        if number:
            for at in _cells(number):
                sum_ = max(self._cell(at, now) + seconds, 0.0)
                _CELL.pack_into(self._memory, at, sum_, now)

    def _pair_at(self, pair: int, now: float) -> tuple[int, bool, float]:
        """Return the place of a user at an address, or where he may be put; true if he is known;
        and when who is there has logged in, -inf if nobody is."""
        oldest, when = -1, math.inf
        first = _PAIRS_AT + pair % _PAIRS * _PAIR.size
        for at in range(first, first + _SHARED * _PAIR.size, _PAIR.size):
            other, since = _PAIR.unpack_from(self._memory, at)
            good = other != 0 and 0.0 <= now - since < KNOWN
            if good and other == pair:
                return at, True, since
            if not good:
                # What others tell may be from before the clock's zero, the machine's start.
                since = -math.inf
            if since < when:
                oldest, when = at, since
        return oldest, False, when


# Whether he is unknown, what he has taken, and when he came.
_Order = tuple[bool, int, float]


class _Found(NamedTuple):
    """The logins in the places of the table.

    :param running: logins that run, of which ``strangers`` are of unknown users
    :param waiting: logins that wait
    :param free: a free place; -1: there is none
    :param first: the order of the first that waits
    :param last: the order of the last that waits, whose place is ``last_at``
    """

    running: int
    strangers: int
    waiting: int
    free: int
    first: _Order | None
    last: _Order | None
    last_at: int


_STATE = _PLACE.size - 8
# Of each row of the sketch: where it begins, and the bits of a hash that it goes by.
_ROWS = [(_CELLS_AT + row * _WIDTH * _CELL.size, 16 * row) for row in range(_DEPTH)]


def _order(unknown: bool, cost: float, since: float) -> _Order:
    """Return what comes before another if it is smaller."""
    # In steps, so that among those who have taken little who came first is first.
    return bool(unknown), int(cost / MUCH) if 0 <= cost < 1e9 else 0, since


def _pause(waiting: int) -> float:
    return _POLL * (1 + waiting // _FEW)


def _cells(number: int) -> list[int]:
    return [start + (number >> shift & _WIDTH - 1) * _CELL.size for start, shift in _ROWS]


@lru_cache(4096)
def network(address: str) -> str:
    """Return what an address is counted as: itself, of IPv6 the /64 that one client may have.

    :param address: any text; what is no address is counted as it is
    """
    try:
        found = ipaddress.ip_address(address.strip())
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return found.packed[:8].hex()
        found = found.ipv4_mapped
    return str(found)

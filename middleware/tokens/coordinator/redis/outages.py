"""The contact of this process with a Redis: questions, outages, and changes it has yet to be told.

If Redis does not answer, its caller waits for the time of one answer, and Redis counts as lost.
Then one caller a second tries it, and all others fail at once, until a try succeeds.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import redis

from keyfront.common.poller import Poller
from keyfront.errors import CoordinatorError

from ...epochs import ALL_SLOT, MARK_SECONDS, Mark, Slots
from .address import Address
from .connections import Link, Server, not_of_redis
from .rollback_detection import History, Seen
from .scripts import TABLE
from .sentinels import TRUST_SECONDS, Fixed, NoMajority, Sentinels

LOG = logging.getLogger(__name__)

T = TypeVar("T")

#: The longest lease, in seconds.
LEASE_SECONDS = 1.0

#: Seconds before a change may begin in a new generation: a reader may have heard of an older one
#: a lease ago, from a server that the sentinels had named TRUST_SECONDS before.
SETTLE_SECONDS = TRUST_SECONDS + LEASE_SECONDS + 0.25

# Changes that are told of one by one when Redis is back; if there are more, everything is touched.
_OWED = 64

_ALL = Slots((ALL_SLOT,))

#: The mark of a change that Redis was not told of: of no generation, and of everything.
UNTOLD = Mark(0, 0, _ALL)


class Answer(NamedTuple):
    """The answer of the program."""

    #: The last change of the table.
    last: Seen
    slot_count: int
    #: Seconds until changes may begin.
    wait: float
    #: True if the table was made anew, as it had been set back.
    went_back: bool
    #: The serial number of the mark that was made; 0 or below: none was.
    serial: int = 0
    #: Its slots.
    slots: tuple[int, ...] = ()
    #: Number of marks that were completed, and the old ones: serial number, owner, microseconds.
    found: int = 0
    old: tuple[tuple[int, str, int], ...] = ()
    #: The counts.
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, deed: str, said: Sequence[bytes]) -> Answer:
        """Return the answer to an action.

        :param deed: the action
        :param said: the values that Redis returned
        :raises ValueError: the program returns no such values; so does IndexError
        """
        generation, slot_count, sequence, wait, change = said[:5]
        name = change.decode("ascii")
        last = Seen(int(generation, 16), int(sequence), name.lstrip("-"))
        answer = cls(last, int(slot_count), int(wait) / 1e6, name.startswith("-"))
        more = said[5:]
        if deed == "mark":
            serial = int(more[0])
            slots = tuple(map(int, more[1].split(b","))) if serial > 0 else ()
            return answer._replace(serial=serial, slots=slots)
        if deed == "recover":
            marks = zip(more[1::3], more[2::3], more[3::3], strict=True)
            old = tuple((int(x), owner.decode("ascii", "replace"), int(y)) for x, owner, y in marks)
            return answer._replace(found=int(more[0]), old=old)
        if deed == "count":
            under_way, changes, recovered, flushes = map(int, more)
            return answer._replace(counts=(under_way, changes, recovered, flushes))
        return answer


class Contact:
    """The contact of this process with a Redis.

    :param address: the address of the server or of its sentinels
    :param key: the key of the table in Redis
    :param digests: the key in Redis that lists all tables
    :param history: the memory of this process of the table
    :param timeout: seconds to wait for each answer, above 0
    :param meanwhile: a clause for the log that says what is done without Redis
    :param slot_count: number of slots of a new table
    """

    def __init__(
        self,
        address: Address,
        key: str,
        digests: str,
        *,
        history: History,
        timeout: float,
        meanwhile: str,
        slot_count: int,
    ) -> None:
        self._address = address
        self._key = key
        self._digests = digests
        self._slot_count = slot_count
        self._history = history
        self._server = Server(address, timeout=timeout)
        self._masters: Fixed | Sentinels = Fixed(address)
        if address.master:
            self._masters = Sentinels(address, timeout=timeout)
        self._outage = Outage(str(address), meanwhile)
        self._owed: deque[Mark] = deque()
        self._paying = threading.Lock()
        self._payer = Poller(self._pay_alone, RETRY_SECONDS, name="keyfront-epochs")
        self._closed = False

    @property
    def losses(self) -> int:
        """Number of times that this process has lost Redis."""
        return self._outage.count

    @property
    def owes(self) -> bool:
        """True if there are changes of which Redis has yet to be told."""
        return bool(self._owed)

    def do(
        self, ask: Callable[[Link], T], *, reading: bool = False, confirm: bool = False
    ) -> T:
        """Return the result of ``ask`` with a link to the master.

        It is called twice if the first link turns out to be dead, or to lead elsewhere; so its
        effect may come about twice. A question that is not answered in time is asked again only
        where the link had been used before: a firewall may have forgotten it.

        :param ask: the function that asks by a link
        :param reading: true if it only reads
        :param confirm: true to make sure afterwards that it was the master that answered
        :raises CoordinatorError: Redis did not answer, or refused
        """
        if self._closed:
            raise self._is_closed()
        self._outage.check()
        since: float | None = None
        while True:
            link: Link | None = None
            try:
                link = self._server.take(self._masters.master(since=since))
                if self._owed:
                    self._pay(link)
                answer = ask(link)
                if confirm:
                    self._masters.confirm(link.address)
            except BaseException as error:
                if link is not None:
                    link.close()
                if not self._tries_again(error, since is None, reading, link):
                    raise
                since = time.monotonic()
            else:
                self._server.give_back(link)
                self._outage.end()
                if self._closed:
                    self._server.end()
                return answer

    def run(self, deed: str, *arguments: Any, confirm: bool = False) -> Answer:
        """Call the program of ``scripts.py`` in Redis.

        :param deed: the program's action: ``look``, ``mark``, ``stamp``, ``touch``, ``recover`` or
            ``count``
        :param arguments: the arguments of the action
        :param confirm: true to make sure afterwards that it was the master that ran it
        :raises CoordinatorError: Redis did not answer, or refused; it may have run it
        """
        return self.do(lambda link: self._evaluated(link, deed, *arguments), confirm=confirm)

    def owe(self, mark: Mark) -> None:
        """Tell Redis of a change as soon as it is back, before anything else is asked of it.

        :param mark: the change's mark, or :data:`UNTOLD`
        """
        self._owed.append(mark)
        if len(self._owed) > _OWED:
            self._owed.append(UNTOLD)
            while len(self._owed) > 1:
                self._owed.popleft()
        self._payer.start()

    def close(self) -> None:
        """End the contact; changes that are still owed are not told."""
        self._closed = True
        self._payer.stop()
        self._server.end()
        self._masters.close()

    def release(self) -> None:
        """Close the connections; they are made again when they are needed, as after a fork."""
        self._server.end()
        self._masters.release()

    def _is_closed(self) -> CoordinatorError:
        return CoordinatorError(f"{self._address}: this coordinator is closed")

    def after_fork(self) -> None:
        """Replace locks and threads that belong to the parent process."""
        self._outage.after_fork()
        self._paying = threading.Lock()
        self._payer.after_fork()

    def _evaluated(self, link: Link, deed: str, *arguments: Any) -> Answer:
        history = self._history
        before = history.seen
        fixed = (
            deed,
            f"{1 + secrets.randbelow(2**62 - 1):x}",
            self._slot_count,
            int(SETTLE_SECONDS * 1e6),
            int(MARK_SECONDS * 1e6),
            before.words,
        )
        said = link.evaluate(TABLE, (self._key, self._digests), *fixed, *arguments)
        try:
            answer = Answer.of(deed, said)
        except (ValueError, IndexError) as error:
            raise not_of_redis(error) from None
        now = answer.last
        if answer.went_back:
            history.complain(before, before.generation)
        if now.generation in before.past:
            history.complain(before, now.generation)  # the next call begins another one
        else:
            history.note(before, now, answer.slot_count)
        return answer

    def _pay(self, link: Link) -> None:
        """Tell Redis of the changes that are owed.

        :raises CoordinatorError: another thread is doing so
        """
        if not self._paying.acquire(blocking=False):
            raise CoordinatorError(f"{self._address}: is being told of changes")
        try:
            while self._owed:
                mark = self._owed[0]
                arguments = (",".join(map(str, mark.slots)), f"{mark.generation:x}", mark.serial)
                self._evaluated(link, "stamp", *arguments)
                self._masters.confirm(link.address)
                if self._owed and self._owed[0] is mark:
                    self._owed.popleft()
        finally:
            self._paying.release()

    def _pay_alone(self) -> None:
        if self._owed:
            self.do(lambda link: None)

    def _tries_again(
        self, error: BaseException, first: bool, reading: bool, link: Link | None
    ) -> bool:
        """Return whether to ask once more after ``error``; false for errors that are not of Redis.

        :param error: the error
        :param first: true for the first attempt
        :param reading: true if the question only reads
        :param link: the link that was asked, if there was one
        :raises CoordinatorError: Redis is lost, or refuses
        """
        if isinstance(error, redis.RedisError | OSError | UnicodeError):
            if self._closed:
                raise self._is_closed() from None
            said = str(error).partition(" script: ")[0] or type(error).__name__
            moved = isinstance(error, redis.ConnectionError | redis.ReadOnlyError)
            final = redis.BusyLoadingError | redis.AuthenticationError | NoMajority
            used = link is not None and link.rests_since is not None
            dead = moved or (isinstance(error, redis.TimeoutError) and used)
            if dead and first and not isinstance(error, final):
                self._server.end()
                return True
            if isinstance(error, redis.ResponseError) and not (moved or reading):
                raise CoordinatorError(f"{self._address}: {said}") from None
            self._server.end()
            raise self._outage.begin(said) from None
        return False


# While Redis is lost, nobody waits for it, and one caller a second tries it again.

#: Seconds between two tries of a Redis that is lost.
RETRY_SECONDS = 1.0


class Outage:
    """The state of a Redis that this process may have lost.

    :param where: the name of the Redis in the log
    :param meanwhile: a clause for the log that says what is done without Redis
    """

    def __init__(self, where: str, meanwhile: str) -> None:
        self._where = where
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._since: float | None = None
        self._next = 0.0
        self._why = ""
        #: Number of times that it was lost.
        self.count = 0

    def after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.Lock()

    @property
    def lasts(self) -> bool:
        """True if Redis is lost now."""
        return self._since is not None

    def check(self) -> None:
        """Return if Redis may be asked: it is not lost, or it is this caller's turn to try.

        :raises CoordinatorError: it is lost, and it is not this caller's turn
        """
        if self._since is None:
            return
        now = time.monotonic()
        if now >= self._next and self._lock.acquire(blocking=False):
            try:
                if now >= self._next:
                    self._next = now + RETRY_SECONDS
                    return
            finally:
                self._lock.release()
        raise CoordinatorError(f"{self._where}: {self._why}")

    def begin(self, why: str) -> CoordinatorError:
        """Note that Redis did not answer; return the error to be raised.

        :param why: the reason, for the log and the error
        """
        error = CoordinatorError(f"{self._where}: {why}")
        now = time.monotonic()
        self._why, self._next = why, now + RETRY_SECONDS
        if self._since is None:
            self._since = now
            self.count += 1
            LOG.error("%s; until it is back, %s", error, self._meanwhile)
        return error

    def end(self) -> None:
        """Note that Redis answered."""
        since, self._since = self._since, None
        if since is not None:
            LOG.warning("%s: back after %.1f s", self._where, time.monotonic() - since)

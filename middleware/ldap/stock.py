"""Opens, examines and closes the connections of a pool: all of it that may touch the network.

The pool's lock is taken for the accounts only. Whatever is raised, by whatever call, neither a
connection nor its place is lost.
"""

from __future__ import annotations

import enum
import logging
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from keyfront.errors import PoolClosedError

from .places import Member, Places

LOG = logging.getLogger(__name__)

C = TypeVar("C")

#: Connections that are opened together do not end together: up to this part of their lifetime is
#: taken off, at random.
LIFETIME_JITTER = 0.05


class Found(enum.Enum):
    """What came of looking at a connection."""

    FIT = "it may be lent"
    UNFIT = "it was closed at sight"
    DEAD = "it was closed as it did not answer, which may have taken long"


class Stock(Generic[C]):
    """What a pool does with one connection. The parameters are those of the pool."""

    def __init__(
        self,
        open: Callable[[float], C],
        close: Callable[[C], None],
        *,
        check: Callable[[C], None] | None,
        stale: Callable[[C], bool],
        abandon: Callable[[C], None],
        name: str,
        max_lifetime: float,
        clock: Callable[[], float],
    ) -> None:
        self._open = open
        self._close = close
        self._check = check
        self._stale = stale
        self._abandon = abandon
        self._name = name
        self._max_lifetime = max_lifetime
        self._clock = clock

    @property
    def checks(self) -> bool:
        """Whether the server can be asked over a connection."""
        return self._check is not None

    def open(self, places: Places[C], seconds: float) -> Member[C] | None:
        """Open a connection into a place that the caller has taken, and count it as lent.

        If anything is raised, the place has been given back.

        :return: ``None`` if the process was forked meanwhile, and this is the child
        :raises PoolClosedError: the pool was closed meanwhile
        """
        try:
            connection = self._open(seconds)
        except BaseException as error:
            with places.lock:
                places.counts.open_errors += 1
                places.last_error = str(error) or type(error).__name__
                places.give_back()
            raise
        now = self._clock()
        lifetime = self._max_lifetime * (1 - LIFETIME_JITTER * random.random())
        member = Member(connection, now, now + lifetime)
        try:
            with places.lock:
                here = places.pid == os.getpid()
                if here:
                    places.counts.opened += 1
                    places.lent[id(connection)] = member
                    places.failures, places.last_error = 0, ""
                    places.changed.notify_all()
        except BaseException:
            self.drop(places, member)
            raise
        if not here:
            self.abandon(connection)
            return None
        if places.closed:
            self.drop(places, member)
            raise self.closed_error(places)
        return member

    def look(self, places: Places[C], member: Member[C], check_after: float) -> Found:
        """See whether a lent connection works, and else close it: its place is the caller's then.

        :param check_after: seconds without a sign of life after which the server is asked
        """
        found = Found.UNFIT
        lost = expired = False
        try:
            now = self._clock()
            if member.retired:
                pass
            elif now >= member.expires_at:
                expired = True
            elif self._is_stale(member.connection):
                lost = True
            elif self._check is None or now - member.alive_at < check_after:
                return Found.FIT
            elif self._answers(member.connection):
                member.alive_at = self._clock()
                return Found.FIT
            else:
                found = Found.DEAD
                lost = True
        except BaseException:
            self.drop(places, member)
            raise
        self.discard(places, member, lost=lost, expired=expired)
        return found

    def examine(self, places: Places[C], member: Member[C], check_after: float) -> None:
        """Look at a connection if it is idle, and keep it so if it works."""
        with places.lock:
            idle = places.borrow(member)
        if not idle:
            return
        if self.look(places, member, check_after) is Found.FIT:
            self.pass_on(places, member)
        else:
            with places.lock:
                places.give_back()

    def pass_on(self, places: Places[C], member: Member[C]) -> None:
        """Hand a lent connection that was not used to the longest waiter, or keep it idle."""
        with places.lock:
            if places.is_open and not member.retired:
                del places.lent[id(member.connection)]
                places.put(member)
                return
        self.drop(places, member)

    def drop(
        self, places: Places[C], member: Member[C], *, expired: bool = False, evicted: bool = False
    ) -> None:
        """Close a lent connection, then give its place back."""
        self.discard(places, member, expired=expired, evicted=evicted)
        with places.lock:
            places.give_back()

    def discard(
        self,
        places: Places[C],
        member: Member[C],
        *,
        lost: bool = False,
        expired: bool = False,
        evicted: bool = False,
    ) -> None:
        """Close a lent connection. Its place is the caller's, unless something is raised."""
        with places.lock:
            places.lent.pop(id(member.connection), None)
            counts = places.counts
            counts.closed += 1
            counts.lost += lost
            counts.expired += expired
            counts.evicted += evicted
        try:
            self._close(member.connection)
        except Exception as error:
            LOG.debug("%s: closing a connection: %s", self._name, error)
        except BaseException:
            with places.lock:
                places.give_back()
            raise

    def abandon(self, connection: C) -> None:
        """Let go of a connection of the parent process."""
        with suppress(Exception):
            self._abandon(connection)

    def closed_error(self, places: Places[C]) -> PoolClosedError:
        """Return what is raised when the pool is not open."""
        state = "is closed" if places.closed else "was not opened; call open() first"
        return PoolClosedError(f"{self._name}: the pool {state}")

    def _is_stale(self, connection: C) -> bool:
        try:
            return self._stale(connection)
        except Exception:
            return True

    def _answers(self, connection: C) -> bool:
        assert self._check is not None
        try:
            self._check(connection)
        except Exception as error:
            LOG.info("%s: a connection was lost while it was idle: %s", self._name, error)
            return False
        return True

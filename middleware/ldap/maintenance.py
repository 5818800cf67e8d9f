"""What a pool's workers do: close what is too old, find what is dead, keep the minimum open."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Generic, TypeVar

from keyfront.errors import KeyfrontError, PoolClosedError

from .places import Member, Places
from .stock import Stock

LOG = logging.getLogger(__name__)

C = TypeVar("C")

#: The longest pause between two attempts to open a connection, in seconds.
MAX_RETRY_DELAY = 60.0

#: Part of a pause by which it is longer or shorter, at random: processes do not try in step.
RETRY_JITTER = 0.1

#: Seconds after which the idle connections are looked at, at the latest.
SWEEP_SECONDS = 60.0


class Upkeep(Generic[C]):
    """The upkeep of one pool, whose parameters these are."""

    def __init__(
        self,
        stock: Stock[C],
        *,
        name: str,
        min_size: int,
        max_idle: float,
        check_after: float,
        open_timeout: float,
        retry_delay: float,
        clock: Callable[[], float],
    ) -> None:
        self._stock = stock
        self._name = name
        self._min_size = min_size
        self._max_idle = max_idle
        self._check_after = check_after
        self._open_timeout = open_timeout
        self._retry_delay = retry_delay
        self._clock = clock

    def run(self, places: Places[C]) -> float:
        """Do all that is due; return the seconds until there is more."""
        try:
            self._sweep(places, self._clock())
            while self._grow(places):
                pass
            return self._delay(places, self._clock())
        except Exception:
            LOG.exception("%s: the upkeep failed", self._name)
            return self._retry_delay

    def _sweep(self, places: Places[C], now: float) -> None:
        with places.lock:
            # Two would evict one too many.
            if places.sweeping or not places.idle:
                return
            places.sweeping = True
        try:
            while unwanted := self._take_unwanted(places, now):
                self._stock.drop(places, unwanted, evicted=True)
            with places.lock:
                members = list(places.idle)
                # Those that stay are asked before the server finds them idle for too long.
                check_after = self._check_after if places.suspect else self._max_idle
                places.suspect = False
            for member in members:
                self._stock.examine(places, member, check_after)
        finally:
            places.sweeping = False

    def _take_unwanted(self, places: Places[C], now: float) -> Member[C] | None:
        with places.lock:
            if places.idle and places.size > self._min_size:
                longest = places.idle[0]
                if now - longest.idle_since >= self._max_idle:
                    places.borrow(longest)
                    return longest
        return None

    def _grow(self, places: Places[C]) -> bool:
        """Open one connection if there are too few; return whether to look again."""
        with places.lock:
            if (
                not places.is_open
                or places.size >= self._min_size
                or (places.failures and self._clock() < places.retry_at)
            ):
                return False
            places.size += 1
        failures = places.failures
        member, failure = None, None
        try:
            member = self._stock.open(places, self._open_timeout)
        except PoolClosedError:
            return False
        except Exception as error:
            failure = error
        if failure is not None:
            try:
                self._put_off(places, failures, failure)
            finally:
                failure = None  # or it would hold this frame, and this frame it
        if member is None:
            return False
        if failures:
            LOG.info("%s: connections can be opened again", self._name)
        self._stock.pass_on(places, member)
        return True

    def _put_off(self, places: Places[C], failures: int, error: Exception) -> None:
        """Try again later. Not called while ``error`` is handled: oslo.log would add it again."""
        delay = min(self._retry_delay * 2.0 ** min(failures, 60), MAX_RETRY_DELAY)
        delay *= 1 + RETRY_JITTER * (2 * random.random() - 1)
        with places.lock:
            places.failures = failures + 1
            places.retry_at = self._clock() + delay
        if not failures:
            # What is none of ours may need its trace.
            trace = None if isinstance(error, KeyfrontError) else error
            LOG.warning("%s: cannot open a connection: %s", self._name, error, exc_info=trace)

    def _delay(self, places: Places[C], now: float) -> float:
        with places.lock:
            due = now + min(SWEEP_SECONDS, self._max_idle / 8)
            for member in () if places.sweeping else places.idle:
                due = min(due, member.expires_at)
                if self._stock.checks:
                    due = min(due, member.alive_at + self._max_idle)
                if places.size > self._min_size:
                    due = min(due, member.idle_since + self._max_idle)
            if places.size < self._min_size:
                due = min(due, places.retry_at)
            # Never a busy loop, should something be due that cannot be done.
            return max(due - now, 0.01)

"""The queue for a pool's connections: who came first is served first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keyfront.errors import PoolFullError, PoolTimeoutError

from .places import Grant, Member, Places, Waiter
from .stock import Stock

C = TypeVar("C")


class Queue(Generic[C]):
    """The queue of one pool, whose parameters these are."""

    def __init__(
        self,
        stock: Stock[C],
        *,
        name: str,
        max_size: int,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._stock = stock
        self._name = name
        self._max_size = max_size
        self._max_waiting = max_waiting
        self._clock = clock

    def take(self, places: Places[C], deadline: float, timeout: float) -> Member[C] | Grant:
        """Return an idle connection or a place, or wait in turn for either."""
        waiter: Waiter[C] = Waiter()
        began = self._clock()
        try:
            with places.lock:
                if not places.is_open:
                    raise self._stock.closed_error(places)
                if places.idle:
                    return places.lend()
                if began >= deadline:
                    raise self.timeout_error(places, timeout)
                if places.size < self._max_size:
                    places.size += 1
                    return Grant.PLACE
                waiting = len(places.waiters)
                if self._max_waiting and waiting >= self._max_waiting:
                    raise PoolFullError(
                        f"{self._name}: all {self._max_size} connections are in use and {waiting} "
                        "requests wait already, which is max_waiting"
                    )
                places.waiters[waiter] = None
                places.counts.queued += 1
            waiter.signal.acquire(timeout=min(deadline - began, threading.TIMEOUT_MAX))
            with places.lock:
                places.counts.waited += self._clock() - began
                if waiter.grant is None:
                    del places.waiters[waiter]
                    raise self.timeout_error(places, timeout)
                return waiter.grant
        except BaseException:
            self._leave(places, waiter)
            raise

    def _leave(self, places: Places[C], waiter: Waiter[C]) -> None:
        """Leave the queue, and hand on what may have been granted at this very moment."""
        with places.lock:
            places.waiters.pop(waiter, None)
            grant = waiter.grant
            if grant is Grant.PLACE:
                places.give_back()
        if isinstance(grant, Member):
            self._stock.pass_on(places, grant)

    def timeout_error(self, places: Places[C], timeout: float) -> PoolTimeoutError:
        """Return what is raised when the time is over."""
        return PoolTimeoutError(
            f"{self._name}: no connection became free within {timeout:.3g} s: "
            f"{places.size} of {self._max_size} are in use and {len(places.waiters)} requests wait"
        )

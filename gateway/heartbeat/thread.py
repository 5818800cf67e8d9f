"""The thread of the heartbeats: native, alone in its process, and never waited for.

It sends and it sleeps. It logs nothing, reads nothing, connects nothing and calls nothing that may
be patched, because a greenlet may be frozen while it holds whatever that would need.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import deque

from . import native
from .amqp_connection import KeptConnection
from .counters import FAILURES, Counts

# Seconds after which the thread goes on when it could not even look what is due.
_AGAIN = 1.0


class HeartbeatThread:
    """Beats on all kept connections of this process, each when it is due.

    :param counts: the counts to add lateness to
    :param threaded: true for a native thread of its own; otherwise somebody calls :meth:`turn`
    """

    def __init__(self, counts: Counts, *, threaded: bool) -> None:
        self._counts = counts
        self._threaded = threaded
        self._pid = os.getpid()
        self._new: deque[KeptConnection] = deque()
        self._due: list[tuple[float, int, KeptConnection]] = []
        self._numbers = itertools.count()
        # Held while the thread sleeps; whoever lets it go wakes the thread.
        self._bell: native.Lock = native.allocate_lock()
        self._bell.acquire(False)
        self._running = False
        self._ending = False
        #: The last failure in the thread, for its owner to log: it cannot be logged there.
        self.failure: str | None = None

    @property
    def runs(self) -> bool:
        """True if the thread is there, or if somebody calls :meth:`turn` instead."""
        return self._running or not self._threaded

    def add(self, kept: KeptConnection) -> None:
        """Beat on a connection from now on.

        :raises RuntimeError: the thread cannot be started; :meth:`start` tries it again
        """
        self._new.append(kept)
        self.start()

    def start(self) -> None:
        """Start the thread unless it runs; what it beat on before, it beats on again.

        :raises RuntimeError: it cannot be started
        """
        if not self._threaded:
            return
        if not self._running:
            self._running = True
            try:
                native.start_new_thread(self._run, ())
            except BaseException:
                self._running = False
                self._counts.count(FAILURES)
                raise
        self._ring()

    def end(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._ending = True
        self._ring()

    def turn(self) -> float | None:
        """Beat on what is due; returns the seconds until the next is, ``None`` if there is none."""
        due = self._due
        while self._new:
            kept = self._new.popleft()
            heapq.heappush(due, (kept.written + kept.interval, next(self._numbers), kept))
        now: float = native.monotonic()
        while due:
            when, number, kept = due[0]
            late: float = now - when
            if late < -kept.early:
                return -late
            try:
                again = kept.beat(now)
            except ValueError:
                # Somebody wrote junk into the counts: that is no reason to stop.
                self._counts.repair()
                again = now + kept.interval
            except Exception as error:
                # This beat is lost; the others are not.
                self._failed(f"the thread that beats lost a beat by a {type(error).__name__}")
                again = now + kept.interval
            if again is None:
                heapq.heappop(due)
                continue
            self._counts.late(late)
            # Never twice in one turn: whoever holds a lock may need this thread to sleep.
            heapq.heapreplace(due, (max(again, now + 2 * kept.early), number, kept))
        return None

    def _run(self) -> None:
        try:
            while not self._ending:
                seconds: float | None = _AGAIN
                try:
                    seconds = self.turn()
                except Exception as error:
                    self._failed(f"the thread that beats lost a turn by a {type(error).__name__}")
                self._bell.acquire(True, -1 if seconds is None else seconds)
        except BaseException as error:
            self._failed(f"the thread that beats was ended by a {type(error).__name__}")
        finally:
            self._running = False

    def _failed(self, line: str) -> None:
        # A thread of the interpreter's own kind: nobody could be told of it from here.
        self.failure = line
        self._counts.count(FAILURES)

    def _ring(self) -> None:
        if self._bell.locked():
            try:
                self._bell.release()
            except RuntimeError:
                pass  # the thread was quicker

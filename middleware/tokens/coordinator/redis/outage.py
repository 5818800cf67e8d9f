"""Whether Redis is lost: then nobody waits for it, and one caller a second tries it again."""

from __future__ import annotations

import logging
import threading
import time

from keyfront.errors import CoordinatorError

LOG = logging.getLogger(__name__)

#: Seconds between two tries of a Redis that is lost.
RETRY_SECONDS = 1.0


class Outage:
    """What this process knows of it.

    :param where: the Redis, as the log names it
    :param meanwhile: what is done without it, as the log says it
    """

    def __init__(self, where: str, meanwhile: str) -> None:
        self._where = where
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._since: float | None = None
        self._next = 0.0
        self._why = ""
        #: How often it was lost.
        self.count = 0

    def after_fork(self) -> None:
        """Let go of what a thread of the parent may have held."""
        self._lock = threading.Lock()

    @property
    def lasts(self) -> bool:
        """Whether it is lost now."""
        return self._since is not None

    def check(self) -> None:
        """Return if Redis is to be asked: it is not lost, or it is this caller's turn to try.

        :raises CoordinatorError: it is lost, and others try
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
        """Note that it did not answer; return the error to be raised."""
        error = CoordinatorError(f"{self._where}: {why}")
        now = time.monotonic()
        self._why, self._next = why, now + RETRY_SECONDS
        if self._since is None:
            self._since = now
            self.count += 1
            LOG.error("%s; until it is back, %s", error, self._meanwhile)
        return error

    def end(self) -> None:
        """Note that it answered."""
        since, self._since = self._since, None
        if since is not None:
            LOG.warning("%s: back after %.1f s", self._where, time.monotonic() - since)

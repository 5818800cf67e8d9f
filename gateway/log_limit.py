"""Bounds the lines of one kind that a process logs a second, however many things fail at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class LogLimit:
    """The lines of one kind that this process has logged in the present second.

    :param per_second: lines at most, from 1
    :param clock: seconds that never go back
    """

    def __init__(
        self, per_second: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._logged = 0
        self._left_out = 0

    def admit(self) -> int | None:
        """Return the number of lines left out before this one; ``None`` if it is left out, too."""
        with self._lock:
            now = self._clock()
            if now >= self._until:
                self._until, self._logged = now + 1, 0
            if self._logged >= self._per_second:
                self._left_out += 1
                return None
            self._logged += 1
            left_out, self._left_out = self._left_out, 0
            return left_out

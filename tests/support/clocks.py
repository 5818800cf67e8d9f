"""A clock that a test sets, to be put in the place of a module's ``time``."""

from __future__ import annotations

import threading
import time


class Clock:
    """Stands for the module ``time``: who sleeps on it moves it on, and nobody waits.

    :param runs: whether it goes on by itself as well, for tests with threads
    """

    def __init__(self, *, runs: bool = False) -> None:
        self._runs = runs
        self._began = time.monotonic_ns()
        self._ahead = 1000 * 10**9
        self._lock = threading.Lock()

    def later(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._ahead += round(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self._ahead + (time.monotonic_ns() - self._began if self._runs else 0)

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def time(self) -> float:
        return 1_700_000_000 + self.monotonic()

    def sleep(self, seconds: float) -> None:
        self.later(seconds)
        time.sleep(0)

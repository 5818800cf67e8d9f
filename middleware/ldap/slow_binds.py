"""Keeps logins that nobody answers from taking every connection there is for logging in.

Where a part of a directory is elsewhere and away, a BIND of a user there waits for as long as it
may, and whoever knows a name can send many. So while others wait for a connection, the users of one
part have no more than half of them, once that part has answered nothing for two seconds: of those
that wait on, the rest give up, and more are not let in. What is answered, be it slowly, has all.

A part is what lies below one entry: the DN of each tells of which ones it is. Of other kinds of
names the domain counts (``jane@example.org``, ``EXAMPLE\\jane``).
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType

from keyfront.errors import DirectoryAnswerError, DirectoryBusyError, PoolFullError

#: Seconds without an answer after which a BIND is slow.
SLOW_SECONDS = 2.0
# Seconds between two looks of a slow one whether others wait.
_LOOK_SECONDS = 0.5
# Entries above a user's that count, and parts of which the last answer is known.
_DEPTH = 12
_PARTS = 1024

_COMMA = re.compile(r"\s*(?<!\\),\s*")


class Attempt:
    """A BIND that is under way, for a ``with`` block; how long it waits (``Patience``).

    :param binds: all of them
    :param name: the DN, or what else is bound
    """

    __slots__ = ("_binds", "_end", "began", "name")

    def __init__(self, binds: SlowBinds, name: str) -> None:
        self._binds = binds
        self.name = name
        self.began = time.monotonic()
        self._end = math.inf

    def __enter__(self) -> Attempt:
        self._binds.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        answered = error is None or isinstance(error, (DirectoryAnswerError, DirectoryBusyError))
        self._binds.leave(self, answered)

    def first(self, seconds: float | None) -> float:
        """Return for how long to wait at first, of all the seconds that there are."""
        self._end = math.inf if seconds is None else self.began + seconds
        return SLOW_SECONDS if seconds is None else min(seconds, SLOW_SECONDS)

    def more(self) -> float:
        """Return for how long to wait on; 0 for no more."""
        left = self._end - time.monotonic()
        if left <= 0 or not self._binds.goes_on(self):
            return 0.0
        return min(left, _LOOK_SECONDS)


class SlowBinds:
    """The BINDs that are under way in a pool.

    :param places: how many may be
    :param waited_for: whether somebody waits for a place
    """

    def __init__(self, places: int, waited_for: Callable[[], bool]) -> None:
        self._most = places // 2
        self._waited_for = waited_for
        self.after_fork()

    def after_fork(self) -> None:
        """Forget what threads of the parent have under way."""
        self._lock = threading.Lock()
        # Each is one step of the interpreter, so that no lock is taken where nothing is slow.
        self._running: dict[Attempt, None] = {}
        self._slow: dict[Attempt, None] = {}
        #: When a part last answered, by what is above the user.
        self._answered: dict[str, float] = {}

    def attempt(self, name: str) -> Attempt:
        """Return a context manager for one BIND."""
        return Attempt(self, name)

    def check(self, name: str) -> None:
        """Raise if a BIND would only wait with those that nobody answers.

        :raises PoolFullError: it would, and as many do as may
        """
        if not self._slow:
            return
        with self._lock:
            parts = _parts(_above(name))
            # Where what is above is silent, too, it is perhaps only for want of others who ask.
            above_answers = False
            for part in reversed(parts):
                silent, number = self._look(part)
                if silent and number >= self._most and (above_answers or part == parts[0]):
                    raise PoolFullError(
                        f"nobody answers for users below {part or 'the root'} at the moment, and "
                        f"{number} of them wait already"
                    )
                above_answers = not silent

    def enter(self, attempt: Attempt) -> None:
        """Note that a BIND is sent.

        :raises PoolFullError: as :meth:`check`
        """
        if self._slow:
            self.check(attempt.name)
        attempt.began = time.monotonic()
        self._running[attempt] = None

    def leave(self, attempt: Attempt, answered: bool) -> None:
        """Note that it is over."""
        self._running.pop(attempt, None)
        self._slow.pop(attempt, None)
        if answered:
            if len(self._answered) >= _PARTS:
                self._answered.clear()
            self._answered[_above(attempt.name)] = time.monotonic()

    def goes_on(self, attempt: Attempt) -> bool:
        """Return whether one that is slow may wait on; if not, it is over."""
        self._slow[attempt] = None
        if not self._waited_for():
            return True
        with self._lock:
            for part in _parts(_above(attempt.name)):
                silent, number = self._look(part)
                if silent and number > self._most:
                    self._running.pop(attempt, None)
                    return False
        return True

    def _look(self, part: str) -> tuple[bool, int]:
        """Return whether nobody answers for a part, and how many BINDs of it are slow."""
        since = time.monotonic() - SLOW_SECONDS
        slow = [
            x for x in list(self._running)
            if x.began <= since and part in _parts(_above(x.name))
        ]  # fmt: skip
        silent = bool(slow) and not any(
            at > since and part in _parts(above) for above, at in list(self._answered.items())
        )
        return silent, len(slow)


def _above(name: str) -> str:
    """Return the part of a name that users have in common; cheap, and folded by :func:`_parts`."""
    if "," in name:
        return name.partition(",")[2]
    if "@" in name:
        return "@" + name.rpartition("@")[2]
    return name.partition("\\")[0] + "\\" if "\\" in name else ""


@functools.lru_cache(maxsize=4096)
def _parts(above: str) -> tuple[str, ...]:
    """Return the parts of a directory that a user is of, the smallest first."""
    folded = _COMMA.split(above.strip().lower())
    own = [",".join(folded[depth:]) for depth in range(min(len(folded), _DEPTH))]
    return (*own, "") if own[-1] else tuple(own)

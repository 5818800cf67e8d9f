"""Notes where the time of a request goes, by the parts that take it, for whoever wants to know.

Token cache, directory, database and hash are in packages that do not know each other, and none of
them knows whether anybody asks: :mod:`keyfront.gateway.slow_requests` does. A context variable, so
that threads and greenlets have their own. Where nobody asks, a part costs one look at it.
"""

from __future__ import annotations

import contextvars
import time
from contextlib import nullcontext
from typing import Any

#: What is timed, in the order in which it is told, and the place of each.
TIMED = ("directory", "statements", "hash")
DIRECTORY, STATEMENTS, HASH = range(len(TIMED))


class RequestPhases:
    """The phases of one request."""

    __slots__ = ("began", "cache", "counts", "seconds")

    def __init__(self) -> None:
        #: Seconds of what was timed, as in :data:`TIMED`.
        self.seconds = [0.0, 0.0, 0.0]
        #: How often.
        self.counts = [0, 0, 0]
        #: What the token cache did with it, a count of ``keyfront tokens stats``; empty: nothing.
        self.cache = ""
        #: When the statement began that is under way (``time.perf_counter``).
        self.began = 0.0

    def add(self, part: int, seconds: float) -> None:
        """Note that something was done, and how long it took.

        :param part: a place in :data:`TIMED`
        """
        self.seconds[part] += seconds
        self.counts[part] += 1


current: contextvars.ContextVar[RequestPhases | None] = contextvars.ContextVar(
    "keyfront_request_phases", default=None
)
"""Those of the request that is being served; ``None`` where nobody asks."""

NOBODY = nullcontext()
"""What :func:`timed` returns where nobody asks; a look at :data:`current` spares that call."""


def timed(part: int) -> Any:
    """Return a context manager that notes how long its block took.

    :param part: a place in :data:`TIMED`
    """
    phases = current.get()
    return NOBODY if phases is None else _Timed(phases, part)


class _Timed:
    __slots__ = ("_began", "_part", "_phases")

    def __init__(self, phases: RequestPhases, part: int) -> None:
        self._phases = phases
        self._part = part

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._phases.add(self._part, time.perf_counter() - self._began)

"""Notes how a request spends its time: in the directory, in statements, in hashing passwords.

These parts are in packages that do not know each other, and none of them knows who reads the notes:
:mod:`keyfront.gateway.slow_requests` and :mod:`keyfront.gateway.traces` do. The notes are in a
context variable, so each thread and greenlet has its own. Where nobody reads them, a part only
looks whether there are any.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

#: The parts that are timed, in the order in which they are told, and the place of each.
TIMED = ("directory", "statements", "hash")
DIRECTORY, STATEMENTS, HASH = range(len(TIMED))


class RequestPhases:
    """The time that one request has spent in each part, and what the token cache did with it."""

    __slots__ = ("began", "cache", "cache_also", "cache_reason", "counts", "seconds")

    def __init__(self) -> None:
        #: Seconds that each part took, as in :data:`TIMED`.
        self.seconds = [0.0, 0.0, 0.0]
        #: The number of times that each was done.
        self.counts = [0, 0, 0]
        #: The token cache's outcome, a count of ``keyfront tokens stats``; empty: none.
        self.cache = ""
        #: The counts besides: why an answer that was kept had ended, that none was kept.
        self.cache_also: tuple[str, ...] = ()
        #: The reason for which it stepped aside.
        self.cache_reason = ""
        #: The beginning of the statement that is under way (``time.perf_counter``).
        self.began = 0.0

    def add(self, part: int, seconds: float, operation: str = "", error: str = "") -> None:
        """Note that something was done, and how long it took.

        :param part: an index of :data:`TIMED`
        :param seconds: the time that it took
        :param operation: the operation's name
        :param error: the class of the exception that it ended with
        """
        self.seconds[part] += seconds
        self.counts[part] += 1


current: contextvars.ContextVar[RequestPhases | None] = contextvars.ContextVar(
    "keyfront_request_phases", default=None
)
"""The phases of the request that is being served; ``None`` where nobody asks."""

NOBODY = nullcontext()
"""What :func:`timed` returns where nobody asks; a look at :data:`current` spares that call."""


def timed(part: int, operation: str = "") -> Any:
    """Return a context manager that notes the time that its block takes.

    :param part: an index of :data:`TIMED`
    :param operation: the name of the block's operation
    """
    phases = current.get()
    return NOBODY if phases is None else _Timed(phases, part, operation)


watches: dict[str, Callable[[Any], Any]] = {}
"""Wrappers of the parts that are applications, by the part's name; set before these are loaded.

Each is given the application and returns the one to be used in its place.
"""


def watched(part: str, application: Any) -> Any:
    """Return an application in the wrapper that :data:`watches` has for it, or as it is.

    :param part: ``token cache`` or ``keystone``
    """
    watch = watches.get(part)
    return application if watch is None else watch(application)


class _Timed:
    __slots__ = ("_began", "_operation", "_part", "_phases")

    def __init__(self, phases: RequestPhases, part: int, operation: str) -> None:
        self._phases = phases
        self._part = part
        self._operation = operation

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        seconds = time.perf_counter() - self._began
        self._phases.add(self._part, seconds, self._operation, kind.__name__ if kind else "")

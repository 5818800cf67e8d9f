"""Refuses requests that waited too long for a worker, with 503 and Retry-After.

A server's queue has a length, and what is queued takes milliseconds or seconds each: a queue that
is right for validations from the cache is a hundred times too long for logins. So the queue is
long, and what stood in it for more than ``KEYFRONT_QUEUE_TIMEOUT`` seconds is refused when its turn
comes, at next to no cost. Under overload the oldest requests, whose clients give up next, make
place for those that can still be answered in time, whatever a request costs.

How long it waited is told by the web server in front, in ``X-Request-Start``: seconds since 1970,
with ``t=`` before them or not; milliseconds and microseconds are known by their size. The web
server must set it, and not pass on what a client sends; without it, nothing is refused. The files
of ``keyfront render`` do both.

What was over before the first request was begun does not count: who came while the server was
stopped or replaced, loaded the application or forked its workers waited for the server, not for his
turn, and coming back would not help him.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from keyfront.common import ranges

from .error_body import answer_error, error_body

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

VARIABLE = "KEYFRONT_QUEUE_TIMEOUT"
_BUSY = error_body(503, "The request waited too long for its turn and was not begun.")
# The year 2286 in seconds; larger numbers are milliseconds, and those beyond it microseconds.
_SECONDS = 1e10


def from_environment() -> float:
    """Return the limit that ``KEYFRONT_QUEUE_TIMEOUT`` names, in seconds; 0 for none.

    :raises OptionError: it is not 0 or a number of seconds from 0.1 to 3600
    """
    return ranges.limit(VARIABLE, os.environ.get(VARIABLE, "0"), 0.1, 3600, "no limit")


def limit_queue(
    application: WSGIApplication,
    *,
    seconds: float,
    refusing: Callable[[WSGIApplication], WSGIApplication] | None = None,
    clock: Callable[[], float] = time.time,
    waited: Callable[[float], object] = lambda seconds: None,
    shed: Callable[[], object] = lambda: None,
) -> WSGIApplication:
    """Wrap an application so that requests which waited longer than ``seconds`` are answered 503.

    The wait is counted from the first request on that this process begins, or another one that was
    forked from it or from which it was forked after this call.

    :param seconds: 0.1 to 3600; 0 returns the application itself
    :param refusing: wraps the refusal as the application is wrapped already
    :param clock: seconds since 1970, of the same machine's clock as the web server's
    :param waited: told for how many seconds each request waited, where that is known
    :param shed: called for each that is refused
    """
    if not seconds:
        return application
    # When the first request was begun; 0: none was. Anonymous and shared, so that a worker that
    # replaces another one knows of it.
    first = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
    wait = ("Retry-After", str(max(1, round(seconds))))

    def refuse(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return answer_error(start_response, "503 Service Unavailable", _BUSY, wait)

    refused = refusing(refuse) if refusing else refuse

    def limiting(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        began = environ.get("HTTP_X_REQUEST_START")
        if began:
            now = clock()
            if not first[0]:
                first[0] = now
            turn = now - max(since_1970(began), first[0])
            waited(turn)
            if turn > seconds:
                shed()
                return refused(environ, start_response)
        return application(environ, start_response)

    return limiting


def since_1970(text: str) -> float:
    """Return the seconds since 1970 that a header tells; infinite if it makes no sense."""
    try:
        number = float(text.removeprefix("t="))
    except ValueError:
        return math.inf
    if math.isnan(number):
        return math.inf
    while _SECONDS < number < math.inf:
        number /= 1000
    return number

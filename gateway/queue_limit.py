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

While a queue stands, changes and lists make place for logins and validations. A queue stands once
nobody has waited for less than a part of the limit for as long as the limit, and until somebody has
waited for less than a quarter of that part. Then changes are refused after a quarter of the limit,
and what is read after a half. Logins, validations, revocations, health and the API's versions have
all of it, and in a shorter rush everything has. A wait that is long for all from the beginning on,
or for ten minutes, is taken for that of a web server whose clock is not this one, and changes
nothing.

An answer of the token cache costs no more than a refusal. So where Keystone is loaded by
:mod:`.keystone.application`, what is read is refused where Keystone would be asked, and what the
cache knows is answered whenever its turn comes.

What was over before the first request was begun does not count: who came while the server was
stopped or replaced, loaded the application or forked its workers waited for the server, not for his
turn, and coming back would not help him.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from keyfront.common import late_requests, ranges

from .error_body import answer_error, error_body

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

VARIABLE = "KEYFRONT_QUEUE_TIMEOUT"
_BUSY = error_body(503, "The request waited too long for its turn and was not begun.")
# The year 2286 in seconds; larger numbers are milliseconds, and those beyond it microseconds.
_SECONDS = 1e10
# Of the limit, what may be waited while the queue stands.
_CHANGES, _READS, _ALL = 0.25, 0.5, 1.0
# Of that, what is waited where the queue is short.
_SHORT = 0.25
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What the token cache may know.
_KEPT = frozenset({"GET", "HEAD"})
# Seconds for which a queue that stands is believed in.
_BELIEVED = 600.0
# Ways to log in and to validate, beside what is below /auth/; and what a path with more than one
# part ends with, below a prefix, that tells of versions or health.
_NEEDED = ("/auth", "/OS-OAUTH2/token", "/ec2tokens", "/s3tokens", "/v3", "/healthcheck")

behind_caches: list[WSGIApplication] = []
"""The applications that :func:`refuse_late` has wrapped in this process."""


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
    # Anonymous and shared, so that a worker that replaces another one knows of it.
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
    # The time when the first request was begun; 0: none was, as far as this process knows.
    first = 0.0
    queues = [
        (part, _Queue(memory[at : at + 2], part * seconds, seconds))
        for at, part in ((1, _CHANGES), (3, _READS))
    ]
    soonest = _CHANGES * seconds
    # Both 0 or 1. Unknown is the length of the queues until a request that came after the first one
    # has waited for less than that; waits is 1 while one of the queues may stand.
    unknown, waits = memory[5:6], memory[6:7]
    unknown[0] = waits[0] = 1.0
    wait = ("Retry-After", str(max(1, round(seconds))))

    def refuse(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        shed()
        return answer_error(start_response, "503 Service Unavailable", _BUSY, wait)

    refused = refusing(refuse) if refusing else refuse

    def limiting(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        nonlocal first
        began = environ.get("HTTP_X_REQUEST_START")
        if not began:
            return application(environ, start_response)
        now = clock()
        if not first or first > now:  # the latter: the clock was set back
            known = memory[0]
            first = memory[0] = known if 0.0 < known <= now else now
        came = since_1970(began)
        turn = now - (came if came > first else first)
        waited(turn)
        # Mostly nobody has waited for long, and neither queue is looked at.
        if turn <= soonest and not waits[0]:
            return application(environ, start_response)
        late = turn > seconds
        if not unknown[0]:
            for part, queue in queues:
                if queue.stands(turn, now) and _part(environ) <= part:
                    late = True
            # In this order, so that what another one sees meanwhile is not forgotten.
            waits[0] = 0.0
            if memory[1] or memory[3]:
                waits[0] = 1.0
        elif came >= first and turn <= soonest:
            unknown[0] = waits[0] = 0.0
        if not late:
            return application(environ, start_response)
        if behind_caches and _may_be_known(environ):
            # What wraps the refusal wraps the application, too: the body is read.
            environ[late_requests.ENVIRON_KEY] = refuse
            return application(environ, start_response)
        return refused(environ, start_response)

    return limiting


def by_queue(queues: Sequence[WSGIApplication], number: Callable[[], int]) -> WSGIApplication:
    """Return an application whose requests go to that of their queue.

    Where a server has several queues, what waits in one says nothing of the others: each has a
    :func:`limit_queue` of its own.

    :param queues: an application for each queue, at least one
    :param number: tells the index of the queue that this process takes requests from
    """
    if len(queues) == 1:
        return queues[0]

    def pick(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return queues[number()](environ, start_response)

    return pick


def refuse_late(application: WSGIApplication) -> WSGIApplication:
    """Wrap an application so that it refuses the requests that :func:`limit_queue` marked as late.

    :param application: the application behind those that answer from what they know
    """

    def refusing(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        late: WSGIApplication | None = environ.get(late_requests.ENVIRON_KEY)
        return (application if late is None else late)(environ, start_response)

    behind_caches.append(refusing)
    return refusing


class _Queue:
    """The time for which a queue has stood.

    :param memory: two times: since when nobody waited for less, or 0, and when that was last seen;
        shared by all processes
    :param most: seconds of a wait that is long
    :param patience: seconds after which the queue stands; also for how long nobody has to come
        until one that stood does no more
    """

    __slots__ = ("_memory", "_most", "_patience")

    def __init__(self, memory: memoryview[float], most: float, patience: float) -> None:
        self._memory = memory
        self._most = most
        self._patience = patience

    def stands(self, turn: float, now: float) -> bool:
        """Note how long a request has waited; true if that is long, and the queue stands."""
        memory = self._memory
        since = memory[0]
        is_long = turn > self._most
        if not is_long and not since:
            return False
        # Another thread or process may have looked at the clock later, and been here before.
        if abs(now - memory[1]) > self._patience:
            since = 0.0
        stands = bool(since) and self._patience < now - since < _BELIEVED
        # What is refused makes it shorter, and so it stays about as long as this for as long as
        # more comes than can be done. It has ended when it is short.
        if is_long or (stands and turn > self._most * _SHORT):
            if not since:  # else it is as it was, or somebody has just seen its end
                memory[0] = now
            memory[1] = now
        else:
            memory[0] = 0.0
        return stands and is_long


def _part(environ: WSGIEnvironment) -> float:
    """Return the part of the limit that a request may wait while the queue stands."""
    path = environ.get("PATH_INFO", "").rstrip("/")
    # Versions and health have one part at most, and so has the prefix that an API may be below.
    if path.count("/") < 2 or "/auth/" in path or path.endswith(_NEEDED):
        return _ALL
    return _READS if environ.get("REQUEST_METHOD") in _READING else _CHANGES


def _may_be_known(environ: WSGIEnvironment) -> bool:
    """Return whether a request may be answered by a token cache, and not by another application."""
    return environ.get("REQUEST_METHOD") in _KEPT and "/v3/" in environ.get("PATH_INFO", "")


def since_1970(text: str) -> float:
    """Return the seconds since 1970 that a header tells; infinite if it makes no sense."""
    try:
        number = float(text.removeprefix("t="))
    except ValueError:
        return math.inf
    if 0 <= number <= _SECONDS:
        return number
    if math.isnan(number):
        return math.inf
    while _SECONDS < number < math.inf:
        number /= 1000
    return number

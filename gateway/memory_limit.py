"""Replaces a worker that has grown beyond ``KEYFRONT_RELOAD_ON_RSS`` MiB, after its requests.

uWSGI has ``reload-on-rss`` for that, and opens, reads and closes ``/proc/self/stat`` at each
request for it, which is much beside an answer from the token cache. A worker grows by requests, but
not by much in a second, so here it looks once a second, when a request comes.

The worker ends as for any reload: running requests are finished, and uWSGI's master starts another.
Its first look is ten seconds after its first request, so that a limit below what a fresh worker
needs costs a restart now and then, and a line in the log each time, but not every request.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from keyfront.common import ranges
from keyfront.errors import OptionError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LOG = logging.getLogger("keyfront.gateway")

VARIABLE = "KEYFRONT_RELOAD_ON_RSS"
MOST = 1 << 20
_ALLOWED = f"an integer of MiB, 1 to {MOST}, or 0 for no limit"
# Seconds.
FIRST_LOOK = 10
INTERVAL = 1


def from_environment() -> int:
    """Return the limit that ``KEYFRONT_RELOAD_ON_RSS`` names, in MiB; 0 for none.

    :raises OptionError: it is not a number of MiB from 0 to 1048576
    """
    return ranges.whole(VARIABLE, os.environ.get(VARIABLE, "0"), 0, MOST, _ALLOWED)


def resident(pid: int | str = "self") -> int:
    """Return the bytes of a process in memory, shared ones included (proc(5), statm).

    :param pid: by default this one
    :raises OSError: the system does not tell, or the process has ended
    """
    with open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def limit_memory(
    application: WSGIApplication,
    *,
    mebibytes: int,
    reload: Callable[[], object],
    look: Callable[[], int] = resident,
    clock: Callable[[], float] = time.monotonic,
) -> WSGIApplication:
    """Wrap an application so that its process is replaced when it has grown beyond a limit.

    :param mebibytes: 1 to 1048576; 0 returns the application itself
    :param reload: has this process end after its requests; called once
    :param look: bytes of this process in memory
    :param clock: seconds
    :raises OptionError: the system does not tell how much that is
    """
    if not mebibytes:
        return application
    try:
        look()
    except OSError:
        raise OptionError(VARIABLE, mebibytes, "0 here: there is no /proc/self/statm") from None
    # The clock of a process starts with its first request: workers are forked from where this ran.
    due: float | None = None
    turn = threading.Lock()

    def next_look(now: float) -> float:
        if due is None:
            return now + FIRST_LOOK
        try:
            found = look() >> 20
        except OSError:  # no more files are to be had
            found = 0
        if found < mebibytes:
            return now + INTERVAL
        LOG.warning(
            "worker %d has %d MiB in memory and is replaced after its requests (%s = %d)",
            os.getpid(), found, VARIABLE, mebibytes,
        )  # fmt: skip
        reload()
        return math.inf

    def limiting(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        nonlocal due
        now = clock()
        if (due is None or now >= due) and turn.acquire(blocking=False):
            try:
                if due is None or now >= due:
                    due = next_look(now)
            finally:
                turn.release()
        return application(environ, start_response)

    return limiting

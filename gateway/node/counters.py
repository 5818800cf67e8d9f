"""Counts of what the processes of a node serve, in a mapped file of its folder.

A request costs four additions in mapped memory: no lock and no system call. What is under way is
what began and has not ended. For that to be exact each thread has places of its own, as two threads
that add to one place at the same instant may count one.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from keyfront.common.counters import VARIABLE, CounterRow, Layout, NodeCounters, claim_all
from keyfront.common.file_lock import FileLock
from keyfront.common.process import started
from keyfront.errors import CoordinatorError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LOG = logging.getLogger("keyfront.gateway")

# The places of a row. The first is the process's number.
(
    _BORN,  # when the process started, in the kernel's ticks: numbers of processes come again
    _LOADED,  # when it began to serve, in seconds since 1970; 0: it does not, as uWSGI's master
    WORKERS,  # processes that began to serve
    SHED,  # requests refused as they had waited too long
    GROWN,  # workers replaced as they had grown
    _QUEUED_MICROSECONDS,
) = range(1, 7)
# What this process last found of each part of health.PARTS: milliseconds since 1970, doubled, and
# one more if it was there.
_FOUND, _FOUND_COUNT = 7, 6
# Times that this process loaded the application, for itself or for those that it forks.
_LOADS = _FOUND + _FOUND_COUNT
# Of a process that takes nothing but logins when it was last seen to run, in milliseconds of a
# clock that never goes back; 0: it takes everything, or has just begun.
_SIGN = _LOADS + 1
# Logins refused as too many were under way.
LOGINS_REFUSED = _SIGN + 1
# By how many bits the microseconds have that a request waited for its turn.
_QUEUED, _LENGTHS = 16, 32
# For each thread, how many requests began and how many ended; the last is for all others.
_THREADS, _THREAD_COUNT = _QUEUED + _LENGTHS, 40
_ROW = _THREADS + 2 * _THREAD_COUNT

_LAYOUT = Layout(_ROW, present=frozenset({_BORN, _LOADED, *range(_FOUND, _LOADS), _SIGN}))
#: The file in a node's folder in which requests are counted.
NAME = "requests"
_READS = ("GET", "HEAD")


class Count(NamedTuple):
    """The counts of a node's processes.

    :param requests: requests that began, but for questions for health
    :param under_way: requests that have not ended
    :param waited: by ``i``, the number of requests that waited for their turn less than ``2 ** i``
        µs, and not less than half of it
    :param waited_seconds: seconds that requests waited, in all
    :param shed: requests refused as they had waited too long
    :param logins_refused: logins refused as too many were under way
    :param loads: times that the application was loaded
    :param started: processes that began to serve
    :param grown: processes replaced as they had grown
    :param workers: the numbers of the processes that serve
    :param loaded: the time when the last of them began to serve, in seconds since 1970; 0 without
        any
    :param found: for each part, in the order of health's, the seconds since 1970 when a worker last
        asked it, 0 for never, and true if it was there
    """

    requests: int
    under_way: int
    waited: tuple[int, ...]
    waited_seconds: float
    shed: int
    logins_refused: int
    loads: int
    started: int
    grown: int
    workers: tuple[int, ...]
    loaded: int
    found: tuple[tuple[float, bool], ...]


class NodeCounts(CounterRow):
    """The counts of this process, in memory of its own until :meth:`share`."""

    __slots__ = ("_shared",)

    def __init__(self) -> None:
        super().__init__(_ROW)
        self._shared: NodeCounters | None = None

    def share(self, folder: Path) -> None:
        """Count in a file of a folder, which is made with mode 0700 if it is missing.

        It is for a process that loads the application, which is counted.

        What cannot be shared is logged, and counted for this process alone: a server must not end
        over its statistics.
        """
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(folder / f"{NAME}.lock")
            self._shared = NodeCounters(folder / NAME, lock, _LAYOUT)
        except (OSError, CoordinatorError) as error:
            LOG.warning("%s = %s: nothing is counted there: %s", VARIABLE, folder, error)
            return
        self._adopt()
        self.count(_LOADS)

    def begin(self) -> None:
        """Count this process as one that serves; called in each, once it is forked."""
        self._adopt()
        self.row[_LOADED] = int(time.time())
        self.row[WORKERS] += 1

    def _adopt(self) -> None:
        if self._shared is not None:
            claim_all()
            self.row = self._shared.row
        self.row[_BORN] = started(os.getpid()) or 0

    def found(self, place: int, ok: bool) -> None:
        """Note whether a part is there, by its place in the order of health's.

        :param place: the part's place in the order of health's :data:`PARTS`, from 0
        :param ok: true if it is there
        """
        self.row[_FOUND + place] = int(time.time() * 1000) << 1 | ok

    def sign(self) -> None:
        """Note that this process, which takes nothing but logins, runs."""
        self.row[_SIGN] = int(time.monotonic() * 1000)

    def queued(self, seconds: float) -> None:
        """Count a request that waited so long for its turn."""
        micros = int(seconds * 1e6) if 0.0 < seconds < 1e3 else 0
        row = self.row
        try:
            row[_QUEUED + micros.bit_length()] += 1
            row[_QUEUED_MICROSECONDS] += micros
        except ValueError:  # damaged; the next process begins anew
            pass


def count_requests(
    application: WSGIApplication,
    counts: NodeCounts,
    elsewhere: Mapping[str, WSGIApplication] = MappingProxyType({}),
) -> WSGIApplication:
    """Wrap an application so that its requests are counted when they begin and when they end.

    One ends when its answer is complete: a list is when it is returned, anything else when the
    server closes it.

    :param elsewhere: by path, what answers GET and HEAD in its stead, and is not counted
    """
    places = itertools.chain(range(_THREADS, _ROW - 2, 2), itertools.repeat(_ROW - 2))
    thread = _per_thread()

    def counting(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in elsewhere and environ.get("REQUEST_METHOD") in _READS:
            return elsewhere[path](environ, start_response)
        try:
            place = thread.place
        except AttributeError:
            place = thread.place = next(places)
        row = counts.row
        try:
            row[place] += 1
        except ValueError:  # damaged
            return application(environ, start_response)
        try:
            answer = application(environ, start_response)
        except BaseException:
            row[place + 1] += 1
            raise
        if type(answer) is list:
            try:
                row[place + 1] += 1
            except ValueError:
                pass
            return answer
        return _Counted(answer, row, place + 1)

    return counting


class _Counted:
    """An answer that is counted when it is closed."""

    __slots__ = ("_answer", "_place", "_row")

    def __init__(self, answer: Iterable[bytes], row: memoryview[int], place: int) -> None:
        self._answer = answer
        self._row = row
        self._place = place

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._answer)

    def close(self) -> None:
        """End it (PEP 3333), by whichever thread; again is no harm."""
        place, self._place = self._place, 0
        try:
            close: Callable[[], object] | None = getattr(self._answer, "close", None)
            if close is not None:
                close()
        finally:
            if place:
                self._row[place] += 1


def _per_thread() -> Any:
    """Return an object with attributes of its own in each native thread."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return SimpleNamespace()  # greenlets of one thread never add at the same instant
    return threading.local()


def read(folder: Path) -> Count:
    """Return the counts of a node's processes, without taking part.

    :raises CoordinatorError: there is no node in the folder, or it is not readable
    """
    rows = _LAYOUT.rows_of(folder / NAME)
    living = _living(rows)
    workers = [row for row in living if row[_LOADED]]
    begun = [sum(row[_THREADS::2]) for row in living]
    ended = [sum(row[_THREADS + 1 :: 2]) for row in living]
    waited = tuple(sum(row[_QUEUED + bits] for row in rows) for bits in range(_LENGTHS))
    return Count(
        requests=sum(sum(row[_THREADS::2]) for row in rows),
        under_way=sum(max(one - other, 0) for one, other in zip(begun, ended, strict=True)),
        waited=waited,
        waited_seconds=sum(row[_QUEUED_MICROSECONDS] for row in rows) / 1e6,
        shed=sum(row[SHED] for row in rows),
        logins_refused=sum(row[LOGINS_REFUSED] for row in rows),
        loads=sum(row[_LOADS] for row in rows),
        started=sum(row[WORKERS] for row in rows),
        grown=sum(row[GROWN] for row in rows),
        workers=tuple(row[0] for row in workers),
        loaded=max((row[_LOADED] for row in workers), default=0),
        found=tuple(_last(row[_FOUND + part] for row in living) for part in range(_FOUND_COUNT)),
    )


def logins_silent(folder: Path, *, new: float) -> float:
    """Return for how many seconds no process that takes nothing but logins has been seen to run.

    0 where that is not known; infinite where there is none.

    :param folder: the node's folder
    :param new: the seconds until a process that has begun to serve has given a sign
    """
    try:
        living = _living(_LAYOUT.rows_of(folder / NAME))
    except CoordinatorError:
        return 0.0  # a server must not end over its statistics
    signs = [row[_SIGN] for row in living if row[_SIGN]]
    if signs:
        return time.monotonic() - max(signs) / 1000
    latest = max((row[_LOADED] for row in living), default=0)
    is_unknown = time.time() - latest <= new or len(living) == _LAYOUT.rows
    return 0.0 if is_unknown else math.inf


def _living(rows: list[list[int]]) -> list[list[int]]:
    # a number may be another process's by now
    return [row for row in rows[1:] if row[0] and started(row[0]) == row[_BORN]]


def _last(words: Iterable[int]) -> tuple[float, bool]:
    word = max(words, default=0)
    return (word >> 1) / 1000, bool(word & 1)

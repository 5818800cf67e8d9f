"""Sends requests at their times, whatever the server does: an open loop, as a process of its own.

A closed loop waits for a slow server and then counts the wait once; clients that know nothing of
each other do not wait (Tene's "coordinated omission"). So a latency here begins when the request
was due, not when it could be sent. One thread, epoll, nothing but the standard library.

Its standard input is what :func:`job` makes; on standard output it writes one JSON object. Requests
hold tokens: they pass through a file without a name, never through arguments.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import socket
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

# Seconds before a due time at which sleeping ends; epoll wakes up to a millisecond late.
_EARLY = 0.0005
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[^\r]*close", re.IGNORECASE)
_KINDS = {
    errno.EMFILE: "no descriptor",
    errno.ENFILE: "no descriptor",
    errno.EADDRNOTAVAIL: "no port",
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ETIMEDOUT: "connect timeout",
}


def job(
    address: tuple[str, int],
    wires: Sequence[bytes],
    schedule: Iterable[tuple[float, int]],
    *,
    start: float,
    patience: float = 30.0,
    limit: int = 400,
    sources: Sequence[str] = (),
    kept: bool = True,
    most: int = 0,
    niceness: int = 0,
) -> bytes:
    """Return what the process is to do.

    :param wires: requests, whole
    :param schedule: seconds after ``start``, ascending, and the place in ``wires``
    :param start: by the monotonic clock, which all processes of a machine share
    :param patience: seconds until a request without an answer has failed
    :param limit: the lowest status that is a failure
    :param sources: addresses that connections come from, in turn; default: the kernel's choice
    :param kept: true if connections are used again
    :param most: requests under way at most, those beyond it have failed; 0: any number
    :param niceness: 0 to 19, by which the sender leaves the processors to others
    """
    times, places = array("d"), array("I")
    for due, place in schedule:
        times.append(due)
        places.append(place)
    head = {
        "address": list(address),
        "wires": [wire.decode("latin-1") for wire in wires],
        "count": len(times),
        "start": start,
        "patience": patience,
        "limit": limit,
        "sources": list(sources),
        "kept": kept,
        "most": most,
        "niceness": niceness,
    }
    return json.dumps(head).encode() + b"\n" + times.tobytes() + places.tobytes()


class _Exchange:
    """A request under way, on a connection of its own."""

    __slots__ = (
        "answer", "body", "chunked", "close", "due", "fresh", "length", "over", "place", "sent",
        "socket", "status", "wire",
    )  # fmt: skip

    def __init__(self, place: int, wire: bytes, due: float) -> None:
        self.place = place
        self.wire = wire
        self.due = due
        self.sent = 0.0
        self.over = False
        self.socket: socket.socket | None = None
        self.begin(fresh=True)

    def begin(self, *, fresh: bool) -> None:
        self.fresh = fresh
        self.answer = bytearray()
        self.status = 0
        self.body = 0
        self.length: int | None = None
        self.chunked = False
        self.close = False

    def received(self, data: bytes) -> bool:
        """Take bytes of the answer; whether it is whole."""
        self.answer += data
        while not self.status:
            end = self.answer.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(self.answer[: end + 2])
            match = _STATUS.match(head)
            status = int(match[1]) if match else 0
            if 100 <= status < 200:
                del self.answer[: end + 4]
                continue
            self.status = status or 1
            self.body = end + 4
            self.close = bool(_CLOSE.search(head)) or head.startswith(b"HTTP/1.0")
            self.chunked = bool(_CHUNKED.search(head))
            length = _LENGTH.search(head)
            if self.wire.startswith(b"HEAD ") or status in (204, 304):
                self.length, self.chunked = 0, False
            elif length and not self.chunked:
                self.length = int(length[1])
        if self.chunked:
            return self.answer.endswith(b"0\r\n\r\n", max(self.body, len(self.answer) - 7))
        return self.length is not None and len(self.answer) - self.body >= self.length

    def ended(self) -> bool:
        """Return the connection was closed; whether the answer is whole by that."""
        self.close = True
        return bool(self.status) and not self.chunked and self.length is None


class Sender:
    """Sends one job.

    :param settings: the first line of the job, decoded
    """

    def __init__(
        self, settings: Mapping[str, Any], times: array[float], places: array[int]
    ) -> None:
        self._settings = settings
        self._address = tuple(settings["address"])
        self._family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._wires = [wire.encode("latin-1") for wire in settings["wires"]]
        self._sources: list[str] = settings["sources"]
        self._times = times
        self._places = places
        self._poll = select.epoll()
        self._running: dict[int, _Exchange] = {}
        self._idle: dict[int, socket.socket] = {}
        self._waiting: deque[_Exchange] = deque()
        self._turn = 0
        self._start = float(settings["start"])
        self.good = 0
        self.failures: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.latencies: Counter[int] = Counter()
        self.late: Counter[int] = Counter()
        self.by_place: dict[int, Counter[int]] = {}
        self.seconds: dict[int, list[int]] = {}

    def run(self) -> float:
        """Send everything and wait for all answers; returns the seconds that took."""
        clock, times = time.monotonic, self._times
        position, count = 0, len(times)
        patience = self._settings["patience"]
        most = self._settings["most"] or count
        while position < count or self._running:
            now = clock()
            while position < count and times[position] + self._start <= now:
                due = times[position] + self._start
                place = self._places[position]
                exchange = _Exchange(place, self._wires[place], due)
                if len(self._running) < most:
                    self._send(exchange, now)
                else:
                    self._fail(exchange, "too many under way")
                position += 1
                now = clock()
            while self._waiting and (
                self._waiting[0].over or self._waiting[0].sent + patience <= now
            ):
                exchange = self._waiting.popleft()
                if not exchange.over:
                    self._fail(exchange, "timeout")
            wake = now + 1.0
            if position < count:
                wake = min(wake, times[position] + self._start - _EARLY)
            if self._waiting:
                wake = min(wake, self._waiting[0].sent + patience)
            for descriptor, events in self._poll.poll(max(wake - now, 0.0), 256):
                self._event(descriptor, events)
        for idle in self._idle.values():
            idle.close()
        return clock() - self._start

    def _send(self, exchange: _Exchange, now: float) -> None:
        self.late[_rounded(now - exchange.due)] += 1
        exchange.sent = now
        self._waiting.append(exchange)
        while self._idle:
            descriptor, found = self._idle.popitem()
            exchange.begin(fresh=False)
            exchange.socket = found
            self._running[descriptor] = exchange
            self._write(descriptor, exchange)
            return
        self._connect(exchange)

    def _connect(self, exchange: _Exchange) -> None:
        exchange.begin(fresh=True)
        try:
            made = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            self._fail(exchange, _KINDS.get(error.errno or 0, "socket"))
            return
        exchange.socket = made
        try:
            if self._sources:
                self._turn = (self._turn + 1) % len(self._sources)
                made.bind((self._sources[self._turn], 0))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = made.connect_ex(self._address)
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            self._fail(exchange, _kind(code))
            return
        self._running[made.fileno()] = exchange
        self._poll.register(made.fileno(), select.EPOLLOUT)

    def _event(self, descriptor: int, events: int) -> None:
        exchange = self._running.get(descriptor)
        if exchange is None:
            idle = self._idle.pop(descriptor, None)
            if idle is not None:
                self._poll.unregister(descriptor)
                idle.close()
            return
        assert exchange.socket is not None
        if events & select.EPOLLOUT:
            code = exchange.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(exchange, _kind(code))
                return
            self._poll.modify(descriptor, select.EPOLLIN)
            self._write(descriptor, exchange)
            return
        try:
            data = exchange.socket.recv(262144)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(exchange, _kind(error.errno or 0))
            return
        if data:
            if exchange.received(data):
                self._answered(exchange)
        elif exchange.ended():
            self._answered(exchange)
        else:
            self._lost(exchange, "closed")

    def _write(self, descriptor: int, exchange: _Exchange) -> None:
        assert exchange.socket is not None
        try:
            # a request is shorter than what a socket's buffer holds
            if exchange.socket.send(exchange.wire) < len(exchange.wire):
                self._fail(exchange, "write")
        except OSError as error:
            self._lost(exchange, _kind(error.errno or 0))

    def _lost(self, exchange: _Exchange, kind: str) -> None:
        """Try a new connection if one that was kept broke: it may just have been closed."""
        if exchange.fresh or exchange.answer:
            self._fail(exchange, kind)
            return
        self._drop(exchange)
        self._connect(exchange)

    def _drop(self, exchange: _Exchange) -> None:
        if exchange.socket is not None:
            descriptor = exchange.socket.fileno()
            self._running.pop(descriptor, None)
            # leaves epoll by that
            exchange.socket.close()
            exchange.socket = None

    def _fail(self, exchange: _Exchange, kind: str) -> None:
        self._drop(exchange)
        self._end(exchange, good=False)
        self.failures[kind] += 1

    def _answered(self, exchange: _Exchange) -> None:
        descriptor = exchange.socket.fileno() if exchange.socket is not None else -1
        good = 100 < exchange.status < self._settings["limit"]
        taken = _rounded(time.monotonic() - exchange.due)
        self.statuses[exchange.status] += 1
        self.by_place.setdefault(exchange.place, Counter())[exchange.status] += 1
        if good:
            self.good += 1
            self.latencies[taken] += 1
        else:
            self.failures[f"status {exchange.status}" if exchange.status > 1 else "no HTTP"] += 1
        self._end(exchange, good=good)
        if exchange.close or not self._settings["kept"] or exchange.socket is None:
            self._drop(exchange)
        else:
            self._running.pop(descriptor)
            self._idle[descriptor] = exchange.socket

    def _end(self, exchange: _Exchange, *, good: bool) -> None:
        exchange.over = True
        second = max(int(time.monotonic() - self._start), 0)
        self.seconds.setdefault(second, [0, 0])[not good] += 1


def _kind(code: int) -> str:
    return _KINDS.get(code) or errno.errorcode.get(code, "unknown")


def _rounded(seconds: float) -> int:
    """Return microseconds with three digits that count, so that results stay small."""
    microseconds = max(int(seconds * 1e6), 0)
    step: int = 10 ** max(len(str(microseconds)) - 3, 0)
    return microseconds // step * step


def main(given: BinaryIO, out: Any) -> None:
    """Read a job, do it, and print what came of it."""
    settings = json.loads(given.readline())
    times, places = array("d"), array("I")
    times.frombytes(given.read(settings["count"] * times.itemsize))
    places.frombytes(given.read(settings["count"] * places.itemsize))
    if settings["niceness"]:
        os.nice(settings["niceness"])
    # what loading the job took is none of the generator's work
    before = time.process_time()
    sender = Sender(settings, times, places)
    seconds = sender.run()
    json.dump(
        {
            "good": sender.good,
            "failures": sender.failures,
            "statuses": sender.statuses,
            "latencies": sorted(sender.latencies.items()),
            "late": sorted(sender.late.items()),
            "by_place": [[place, dict(found)] for place, found in sender.by_place.items()],
            "timeline": [[second, *counts] for second, counts in sorted(sender.seconds.items())],
            "seconds": seconds,
            "cpu": time.process_time() - before,
        },
        out,
    )


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout)

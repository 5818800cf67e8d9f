"""Sends GET requests in a closed loop, as a process of its own: ``python -m … < orders``.

One order a line on standard input (JSON), one answer a line on standard output; it ends with its
input. What is sent comes in the order, so that a token is never among the arguments of a process.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TypedDict

#: Seconds until an answer that does not come counts as failed.
PATIENCE = 10.0
# Seconds between two looks for such answers.
_LOOK = 0.5
# Seconds that the last answers get when the time is over.
_DRAIN = 2.0


class Order(TypedDict):
    """An order to the generator: the request to send, and for how long."""

    port: int
    request: str
    connections: int
    warm: float
    """Seconds before the first answer counts."""
    seconds: float


class Result(TypedDict):
    """The result of an order."""

    answers: int
    """Answers below 400 that counted."""
    failed: int
    """Other answers, and connections that broke or took too long."""
    seconds: float
    latencies: list[float]
    """Seconds of each answer that counted."""
    busy: float
    """The part of the time in which this process computed."""


@dataclass
class _Exchange:
    """A request on a connection of its own, and the beginning of its answer."""

    connection: socket.socket
    started: float
    head: bytes = b""
    sent: bool = False


@dataclass
class _Loop:
    """Carries out one order: as many exchanges at a time as it says."""

    order: Order
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    latencies: list[float] = field(default_factory=list)
    failed: int = 0

    def start(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", self.order["port"]))
        exchange = _Exchange(connection, time.perf_counter())
        self.selector.register(connection, selectors.EVENT_WRITE, exchange)

    def step(self, exchange: _Exchange) -> bool:
        """Go on with an exchange; whether it ended."""
        try:
            if not exchange.sent:
                exchange.connection.sendall(self.order["request"].encode("latin-1"))
                exchange.sent = True
                self.selector.modify(exchange.connection, selectors.EVENT_READ, exchange)
                return False
            data = exchange.connection.recv(262144)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not exchange.head:
            exchange.head = data[:12]
        return not data

    def end(self, exchange: _Exchange, counts: bool) -> None:
        self.selector.unregister(exchange.connection)
        exchange.connection.close()
        if not counts:
            return
        if exchange.head[9:10] in (b"2", b"3"):
            self.latencies.append(time.perf_counter() - exchange.started)
        else:
            self.failed += 1

    def run(self) -> Result:
        cpu, whole = time.process_time(), time.perf_counter()
        begin = whole + self.order["warm"]
        finish = begin + self.order["seconds"]
        for _ in range(self.order["connections"]):
            self.start()
        look = whole + _LOOK
        while (now := time.perf_counter()) < finish:
            for key, _ in self.selector.select(min(finish, look) - now):
                if self.step(key.data):
                    self.end(key.data, time.perf_counter() >= begin)
                    self.start()
            if now > look:
                look = now + _LOOK
                self._give_up(now - PATIENCE)
        busy = (time.process_time() - cpu) / (time.perf_counter() - whole)
        self._drain()
        return {
            "answers": len(self.latencies),
            "failed": self.failed,
            "seconds": self.order["seconds"],
            "latencies": self.latencies,
            "busy": busy,
        }

    def _give_up(self, before: float) -> None:
        late = [key.data for key in self.selector.get_map().values() if key.data.started < before]
        for exchange in late:
            exchange.head = b""
            self.end(exchange, True)
            self.start()

    def _drain(self) -> None:
        """Await what is under way, so that nothing of it is left for the next order."""
        until = time.perf_counter() + _DRAIN
        while self.selector.get_map() and (now := time.perf_counter()) < until:
            for key, _ in self.selector.select(until - now):
                if self.step(key.data):
                    self.end(key.data, False)
        for key in list(self.selector.get_map().values()):
            self.end(key.data, False)
        self.selector.close()


def run(order: Order) -> Result:
    """Carry out one order."""
    return _Loop(order).run()


def main() -> None:
    """Carry out orders until the input ends."""
    try:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
            sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        pass


if __name__ == "__main__":
    main()

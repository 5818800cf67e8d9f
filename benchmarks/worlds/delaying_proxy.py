"""A TCP proxy on loopback that makes a server far away: each byte is late by the same time.

    python -m keyfront.benchmarks.worlds.delaying_proxy --target PORT

Prints its own port. Then each line of standard input is a delay in seconds, each way, for what
comes from then on (0 at first), and is printed again once it holds; ends with standard input.

A connection takes the two delays of TCP's handshake as well, before its first bytes go on: the
kernel lets a client in at once. It is as accurate as the kernel's timers, some 0.1 ms each way.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

HOST = "127.0.0.1"
CHUNK = 65536
BACKLOG = 1024


class Flow:
    """What goes one way of a connection.

    :param not_before: when the connection is there, by ``time.monotonic()``
    """

    __slots__ = ("ended", "last", "not_before", "other", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket, not_before: float) -> None:
        self.source = source
        self.sink = sink
        self.not_before = not_before
        self.last = 0.0
        self.ended = False
        self.other: Flow = self

    def write(self, data: bytes) -> None:
        """Pass something on that is due; nothing stands for the end."""
        try:
            if data:
                # the kernel's buffers hold more than a client of a directory leaves unread
                self.sink.sendall(data)
                return
            self.sink.shutdown(socket.SHUT_WR)
        except OSError:
            # whoever it was for has gone; the other way will end by itself
            pass
        if not data:
            self.ended = True


class DelayingProxy:
    """The proxy; :meth:`run` serves until ``commands`` ends.

    :param target: the port of a server on loopback
    :param commands: a descriptor that delays are read from
    :param told: called with each delay that holds from now on
    """

    def __init__(self, target: int, commands: int, told: Callable[[str], object]) -> None:
        self.delay = 0.0
        self._target = target
        self._commands = commands
        self._told = told
        self._line = b""
        self._running = True
        self._numbers = itertools.count()
        self._open: set[socket.socket] = set()
        self._due: list[tuple[float, int, Flow, bytes]] = []
        self._selector = selectors.EpollSelector()
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(commands, selectors.EVENT_READ, self._command)

    def run(self) -> None:
        """Serve."""
        waiting = [self._selector.fileno()]
        while self._running:
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            # epoll itself waits for whole milliseconds only
            select.select(waiting, [], [], timeout)
            for key, _ in self._selector.select(0):
                key.data()
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, flow, data = heapq.heappop(self._due)
                flow.write(data)
                if flow.ended and flow.other.ended:
                    for end in (flow.source, flow.sink):
                        self._open.discard(end)
                        end.close()

    def close(self) -> None:
        """End all connections; after :meth:`run`."""
        for end in (self._listener, *self._open):
            end.close()
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection((HOST, self._target))
        except OSError:
            client.close()
            return
        self._open |= {client, server}
        there = time.monotonic() + 2 * self.delay
        up, down = Flow(client, server, there), Flow(server, client, there)
        up.other, down.other = down, up
        for flow in (up, down):
            flow.sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(flow.source, selectors.EVENT_READ, lambda x=flow: self._read(x))

    def _read(self, flow: Flow) -> None:
        data = b""
        with suppress(OSError):
            data = flow.source.recv(CHUNK)
        if not data:
            self._selector.unregister(flow.source)
        # never before what was sent earlier, whatever the delay was then
        flow.last = max(max(time.monotonic(), flow.not_before) + self.delay, flow.last)
        heapq.heappush(self._due, (flow.last, next(self._numbers), flow, data))

    def _command(self) -> None:
        data = os.read(self._commands, CHUNK)
        self._running = bool(data)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self.delay = float(line)
            self._told(line.decode())


def main(arguments: list[str] | None = None) -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=int, required=True, metavar="PORT", help="on loopback")
    options = parser.parse_args(arguments)
    proxy = DelayingProxy(options.target, sys.stdin.fileno(), lambda text: print(text, flush=True))
    print(proxy.port, flush=True)
    proxy.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A distance to a server of this machine: a TCP proxy that passes everything on some time later.

It is a process of its own, so that it takes no time from the client that is measured. It is told
the port of the server, prints its own, then takes seconds each way from standard input, a line
each, and ends with it. The proxy that fails is one of tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator

from .ports import HOST
from .processes import LineProcess, told


class DelayProxy:
    """A running proxy.

    :ivar port: the port of loopback at which it listens
    """

    def __init__(self, process: LineProcess) -> None:
        self._process = process
        self.port = int(process.line())

    def delay(self, round_trip: float) -> None:
        """Have each round trip take so many seconds more, from now on.

        A new connection takes those of its handshake as well, before its first bytes arrive.
        """
        self._process.ask(round_trip / 2)


@contextlib.contextmanager
def delay_proxy(target_port: int) -> Iterator[DelayProxy]:
    """Run a proxy before a server until the block ends; at first it delays nothing."""
    with told([sys.executable, "-m", __name__, str(target_port)]) as process:
        yield DelayProxy(process)


class _Distance:
    """Seconds each way; all connections share it."""

    seconds = 0.0


class _End(asyncio.Protocol):
    """One end of a connection: what comes in here leaves at the other end when it is due."""

    other: _End
    transport: asyncio.Transport

    def __init__(self, distance: _Distance) -> None:
        self.distance = distance
        self.loop = asyncio.get_running_loop()
        self.opened = self._due = 0.0
        self._steps: deque[Callable[[], None]] = deque()
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def _later(self, step: Callable[[], None]) -> None:
        # one after the other, also when the distance gets smaller
        arrived = max(self.loop.time(), self.opened)
        self._due = max(self._due, arrived + self.distance.seconds)
        if not self._steps and self._due <= self.loop.time():
            step()
            return
        self._steps.append(step)
        self.loop.call_at(self._due, lambda: self._steps.popleft()())

    def data_received(self, data: bytes) -> None:
        self._later(lambda: self.other.transport.write(data))

    def eof_received(self) -> bool:
        self._later(self._end)
        return True

    def _end(self) -> None:
        self._ended = True
        if self.other._ended:
            self.transport.close()
            self.other.transport.close()
        elif not self.other.transport.is_closing():
            # Its peer may just have reset it, which the loop does not know yet.
            with contextlib.suppress(OSError):
                self.other.transport.write_eof()

    def reset(self) -> None:
        """End it with a RST."""
        end = self.transport.get_extra_info("socket")
        if end.fileno() >= 0:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._later(self.other.reset if error else self.other.transport.close)


class _Client(_End):
    """The client's end, which opens the server's."""

    def __init__(self, distance: _Distance, target_port: int) -> None:
        super().__init__(distance)
        self._target_port = target_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The kernel lets clients in without delay: the round trip of their connect is put before
        # their first bytes.
        self.opened = self.loop.time() + 2 * self.distance.seconds
        self.transport.pause_reading()
        self._opening = self.loop.create_task(self._open())

    async def _open(self) -> None:
        self.other = _End(self.distance)
        self.other.other = self
        try:
            await self.loop.create_connection(lambda: self.other, HOST, self._target_port)
        except OSError:
            self.reset()
        else:
            self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self.other, "transport"):
            super().connection_lost(error)


class _Selector(selectors.EpollSelector):
    """One that waits for less than a millisecond, too, in which epoll counts."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


async def _serve(target_port: int) -> None:
    distance, loop = _Distance(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(distance, target_port), HOST, 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        distance.seconds = float(line)
        print("ok", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector())) as runner:
        runner.run(_serve(int(sys.argv[1])))

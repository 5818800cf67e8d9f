"""A TCP proxy that fails on command: between a client and a server that are both real.

It delays, cuts, stalls, resets, vanishes or answers nonsense, switched while it runs. One thread
carries hundreds of connections. Run as a program it does so beside a client that it must take no
time from, or whose threads are green::

    python -m support.fault_proxy --target 3890 --delay 0.01

It prints its port, then takes the names of its methods, with arguments (of ``garbage`` in
hexadecimal), from standard input, one a line, and prints ``ok``, a number or ``error: …`` for
each. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import heapq
import itertools
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keyfront.benchmarks.servers.ports import bind_stable
from keyfront.benchmarks.servers.processes import LineProcess, told

# Seconds; a bound on a hang, not an expectation.
PATIENCE = 90.0
_BACKLOG = 4096
_CHUNK = 65536
# A direction that holds so many bytes reads no more.
_HELD = 4 << 20
_EOF = "eof"
_RESET = "reset"


class _Flow:
    """The bytes that go one way between two sockets, each part when it is due."""

    def __init__(self, proxy: FaultProxy, pair: _Pair, *, answers: bool) -> None:
        self.proxy, self.pair, self.answers = proxy, pair, answers
        self.queue: deque[tuple[float, bytes | str]] = deque()
        self.size = 0
        self.last_due = 0.0
        self.not_before = 0.0
        self.armed = False
        self.blocked = False
        self.ended = False

    def put(self, item: bytes | str) -> None:
        proxy = self.proxy
        due = max(time.monotonic(), self.not_before) + proxy.delay
        size, interval = proxy._trickle if self.answers else (0, 0.0)
        pieces: list[bytes | str] = [item]
        if size and isinstance(item, bytes):
            pieces = [item[x : x + size] for x in range(0, len(item), size)]
        for piece in pieces:
            self.last_due = max(due, self.last_due + interval)
            self.queue.append((self.last_due, piece))
            self.size += len(piece) if isinstance(piece, bytes) else 0
        self.flush()

    def flush(self) -> None:
        pair, proxy = self.pair, self.proxy
        while self.queue and not (self.blocked or proxy._hold or pair.is_held or pair.closed):
            sink = pair.client if self.answers else pair.server
            due, item = self.queue[0]
            if sink is None:
                self.queue.clear()
                self.size = 0
                return
            if due > time.monotonic():
                if not self.armed:
                    self.armed = True
                    heapq.heappush(proxy._timers, (due, next(proxy._numbers), self))
                return
            self.queue.popleft()
            if isinstance(item, bytes):
                self._send(sink, due, item)
            elif item == _RESET:
                pair.reset()
            else:
                self.ended = True
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                pair.close_if_done()

    def hurry(self) -> None:
        self.queue = deque((0.0, item) for _, item in self.queue)
        self.flush()

    def _send(self, sink: socket.socket, due: float, item: bytes) -> None:
        limit = self.pair.reset_after if self.answers else None
        allowed = item if limit is None else item[:limit]
        try:
            sent = sink.send(allowed) if allowed else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.pair.reset()
            return
        self.size -= sent
        if limit is not None:
            self.pair.reset_after = limit - sent
            if sent == limit:
                self.pair.reset()
                return
        if sent < len(item):
            self.queue.appendleft((due, item[sent:]))
            self.blocked = True
        self.pair.watch()


class _Pair:
    """One client and the server behind it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.client_open = True
        self.server: socket.socket | None = None
        self.server_open = True
        self.closed = False
        self.reset_after = proxy._reset_after
        # What has become of it by lose_at().
        self.lost, self.before = "", b""
        self.up = _Flow(proxy, self, answers=False)
        self.down = _Flow(proxy, self, answers=True)
        # The kernel lets clients in without delay: the round trip of their connect is put before
        # their first bytes.
        self.up.not_before = time.monotonic() + 2 * proxy.delay
        _prepare(client)
        server = socket.socket(proxy._family)
        _prepare(server)
        result = server.connect_ex(proxy.target)
        if result in (0, errno.EINPROGRESS):
            self.server = server
        else:
            server.close()
            self.down.put(_RESET)
        self.watch()

    @property
    def is_held(self) -> bool:
        """True if nothing of it is passed on any more."""
        return self.lost in ("silent", "held")

    def watch(self) -> None:
        """Ask the selector for what can be dealt with now."""
        if self.closed:
            return
        client = server = 0
        if self.client_open and self.up.size < _HELD:
            client |= selectors.EVENT_READ
        if self.server_open and self.down.size < _HELD:
            server |= selectors.EVENT_READ
        client |= selectors.EVENT_WRITE if self.down.blocked else 0
        server |= selectors.EVENT_WRITE if self.up.blocked else 0
        self.proxy._watch(self.client, client, self._on_client)
        if self.server is not None:
            self.proxy._watch(self.server, server, self._on_server)

    def _on_client(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.down.blocked = False
            self.down.flush()
        if mask & selectors.EVENT_READ and self.client_open and not self.closed:
            self._read(self.client, self.up, "request")
        self.watch()

    def _on_server(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.up.blocked = False
            self.up.flush()
        if mask & selectors.EVENT_READ and self.server_open and not self.closed:
            assert self.server is not None
            self._read(self.server, self.down, "response")
        self.watch()

    def _read(self, source: socket.socket, flow: _Flow, direction: str) -> None:
        item: bytes | str
        try:
            item = source.recv(_CHUNK) or _EOF
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            item = _RESET
        if isinstance(item, bytes):
            self.proxy._note_bytes(direction, len(item))
        elif flow is self.up:
            self.client_open = False
            self.proxy._note()
        else:
            self.server_open = False
        at = self.proxy._stall_at
        if at and flow is self.up and isinstance(item, bytes) and at in item:
            self.proxy._hold = True
        if isinstance(item, bytes) and self._is_lost(item, flow):
            return
        garbage = self.proxy._garbage
        if garbage is not None and isinstance(item, bytes):
            if flow is self.up:
                answer, close = garbage
                for part in (answer, _EOF) if close else (answer,):
                    self.down.put(part)
            return
        flow.put(item)

    def _is_lost(self, item: bytes, flow: _Flow) -> bool:
        """Do what :meth:`FaultProxy.lose_at` says with a part; return whether that is all."""
        data, fate, after = self.proxy._lose_at
        if flow is self.up and data and data in item and not self.lost and after in self.before:
            if fate not in ("unsent", "held"):
                flow.put(item)
            self.lost = fate
            if fate in ("unsent", "sent"):
                self.reset()
            self.proxy._note_loss()
            return True
        if flow is self.up and after and after in item:
            self.before = after
        if flow is self.down and self.lost == "unanswered":
            self.reset()
            return True
        return False

    def flush(self) -> None:
        """Pass on what is due, both ways."""
        self.up.flush()
        self.down.flush()
        self.watch()

    def hurry(self) -> None:
        """Pass on all at once, both ways, whatever its delay."""
        self.up.hurry()
        self.down.hurry()

    def close_if_done(self) -> None:
        if self.up.ended and self.down.ended:
            self.close()

    def reset(self) -> None:
        """End both sides with a RST."""
        for end in (self.client, self.server):
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end()

    def close(self) -> None:
        """End both sides with a FIN."""
        for end in (self.client, self.server):
            _drain(end)
        self._end()

    def forget_server(self) -> None:
        """End the server's side; the client's stays and nobody reads what it says."""
        if self.server is not None:
            self.proxy._watch(self.server, 0, self._on_server)
            _drain(self.server)
            self.server.close()
            self.server, self.server_open = None, False
            self.down.queue.clear()
            self.up.queue.clear()

    def _end(self) -> None:
        if self.closed:
            return
        for end, handler in ((self.client, self._on_client), (self.server, self._on_server)):
            if end is not None:
                self.proxy._watch(end, 0, handler)
                end.close()
        self.closed = True
        self.client_open = False
        self.proxy._pairs.discard(self)
        self.proxy._note()


def _prepare(end: socket.socket) -> None:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _drain(end: socket.socket | None) -> None:
    """Read what came, so that a close sends a FIN: with unread bytes it would be a RST."""
    with contextlib.suppress(OSError):
        while end is not None and end.recv(_CHUNK):
            pass


class FaultProxy:
    """A proxy at :attr:`port` for a server of this host; forwards until told otherwise.

    What a method says holds when it returns, for the connections of now and later unless it says
    otherwise. Each but :meth:`half_open` and :meth:`reset` replaces what was said before.

    :param target_port: the server's; it is connected to once for each client
    :param delay: seconds each way, see :attr:`delay`
    :param host: address to listen at; ``0.0.0.0`` for all of 127.0.0.0/8, among others
    """

    def __init__(
        self,
        target_port: int,
        *,
        target_host: str = "127.0.0.1",
        delay: float = 0.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.target = (target_host, target_port)
        #: Seconds that each part takes each way, settable. A new connection takes the two of its
        #: handshake as well, before its first bytes arrive.
        self.delay = delay
        self._family = socket.AF_INET6 if ":" in target_host else socket.AF_INET
        self._pairs: set[_Pair] = set()
        self._timers: list[tuple[float, int, _Flow]] = []
        self._numbers = itertools.count()
        self._hold = False
        self._stall_at = b""
        self._lose_at = (b"", "", b"")
        self._losses = 0
        self._garbage: tuple[bytes, bool] | None = None
        self._reset_after: int | None = None
        self._trickle = (0, 0.0)
        self._changed = threading.Condition()
        self._accepted = 0
        self._bytes = {"request": 0, "response": 0}
        self._commands: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._stopping = False
        self._fillers: dict[int, socket.socket] = {}
        self._handlers: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._listener = bind_stable(host)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._listen("open")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            # what is on its way arrives, an unbind for instance
            self._each(_Pair.hurry)
            self._stopping = True

        self._do(stop)
        self._thread.join(PATIENCE)
        for pair in list(self._pairs):
            pair.close()
        for end in (self._listener, self._bell, self._button, *self._fillers.values()):
            end.close()
        self._selector.close()

    def url(self, scheme: str = "ldap") -> str:
        """Return where clients connect to, by a name that :mod:`certificates` has certified."""
        return f"{scheme}://{'localhost' if scheme == 'ldaps' else '127.0.0.1'}:{self.port}"

    # What it does

    def forward(self, delay: float | None = None) -> None:
        """Pass everything on, what was held back too; `delay` in seconds each way."""
        self._mode(delay=delay)

    def trickle(self, size: int, interval: float) -> None:
        """Pass answers on in parts of `size` bytes, one each `interval` seconds."""
        self._mode(trickle=(size, interval))

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self._mode(listen="closed", then=lambda: self._each(_Pair.close))

    def stall(self) -> None:
        """Accept, and pass nothing on."""
        self._mode(hold=True)

    def stall_at(self, data: bytes) -> None:
        """Pass nothing on any more as soon as a part of a request holds `data`; before, all."""
        self._mode(stall_at=data)

    def lose_at(self, data: bytes, fate: str, *, after: bytes = b"") -> None:
        """Lose each connection of whose request a part holds `data`, and no other.

        :param fate: a word for what becomes of it. "unsent": it is reset, and the server gets
            nothing of that part; "sent": it is reset when the server was given the part;
            "unanswered": when the server answers the part, of which the client gets nothing;
            "silent": the server is given the part, and then nothing passes any more, as if the
            client's machine were lost; "held": the same, and the server is not given the part
        :param after: bytes that a part of the request before it has to hold; empty: nothing
        """
        assert fate in ("unsent", "sent", "unanswered", "silent", "held"), fate
        self._mode(lose_at=(data, fate, after))

    def black_hole(self) -> None:
        """Behave as a host that vanished: new connects get no answer, the old pass nothing on."""
        self._mode(hold=True, listen="full")

    def reset_after(self, size: int) -> None:
        """Reset each connection once `size` more bytes of answers have been passed on."""
        self._mode(reset_after=size)

    def garbage(self, data: bytes, *, close: bool = False) -> None:
        """Answer `data` to each part that a client sends; the server gets nothing.

        :param close: and end the connection then
        """
        self._mode(garbage=(bytes(data), close))

    def half_open(self) -> None:
        """Close the server's side of the connections of now; their clients learn nothing."""
        self._do(lambda: self._each(_Pair.forget_server))

    def reset(self) -> None:
        """Reset the connections of now."""
        self._do(lambda: self._each(_Pair.reset))

    # What it saw

    @property
    def connections(self) -> int:
        """Return the number of clients that are connected now."""
        with self._changed:
            return self._count()

    @property
    def accepted(self) -> int:
        """Return the number of clients that there ever were."""
        with self._changed:
            return self._accepted

    def received(self, direction: str) -> int:
        """Return how many bytes came, from clients ("request") or the server ("response")."""
        with self._changed:
            return self._bytes[direction]

    def catch_up(self) -> None:
        """Wait until it has done with what had come by now, and kept nothing of it at hand.

        It is at all that is ready before it obeys, and lets go of the last of it with the next.
        """
        for _ in range(2):
            self._do(lambda: None)

    def wait_for_connections(self, number: int) -> None:
        """Wait until exactly so many clients are connected."""
        self._wait(lambda: self._count() == number, f"{number} connections")

    def wait_for_accepted(self, number: int) -> None:
        """Wait until there ever were so many clients, or more."""
        self._wait(lambda: self._accepted >= number, f"{number} accepted")

    @property
    def losses(self) -> int:
        """Return how many connections :meth:`lose_at` has lost."""
        with self._changed:
            return self._losses

    def wait_for_losses(self, number: int) -> None:
        """Wait until so many connections were lost by :meth:`lose_at`, or more."""
        self._wait(lambda: self._losses >= number, f"{number} losses")

    def wait_for_bytes(self, direction: str, number: int) -> None:
        """Wait until so many bytes came, or more; counted from the beginning."""
        self._wait(lambda: self._bytes[direction] >= number, f"{number} bytes of {direction}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), (
                f"waited in vain for {what}: {self._count()} connections, {self._accepted} "
                f"accepted, bytes {self._bytes}"
            )

    def _count(self) -> int:
        return sum(pair.client_open for pair in self._pairs)

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note_bytes(self, direction: str, number: int) -> None:
        with self._changed:
            self._bytes[direction] += number
            self._changed.notify_all()

    def _note_loss(self) -> None:
        with self._changed:
            self._losses += 1
            self._changed.notify_all()

    # Its thread

    def _mode(
        self, *, delay: float | None = None, hold: bool = False, listen: str = "open",
        garbage: tuple[bytes, bool] | None = None, reset_after: int | None = None,
        trickle: tuple[int, float] = (0, 0.0), stall_at: bytes = b"",
        lose_at: tuple[bytes, str, bytes] = (b"", "", b""), then: Callable[[], None] = lambda: None,
    ) -> None:
        def change() -> None:
            self.delay = self.delay if delay is None else delay
            self._hold, self._garbage, self._trickle = hold, garbage, trickle
            self._reset_after, self._stall_at, self._lose_at = reset_after, stall_at, lose_at
            for pair in self._pairs:
                pair.reset_after = reset_after
            self._listen(listen)
            then()
            self._each(_Pair.flush)

        self._do(change)

    def _each(self, action: Callable[[_Pair], Any]) -> None:
        for pair in list(self._pairs):
            action(pair)

    def _do(self, command: Callable[[], None]) -> None:
        done = threading.Event()
        self._commands.append((command, done))
        with contextlib.suppress(BlockingIOError):
            self._button.send(b"x")
        assert done.wait(PATIENCE), "the proxy hangs"

    def _on_bell(self, _: int) -> None:
        self._bell.recv(_CHUNK)
        while self._commands:
            command, done = self._commands.popleft()
            command()
            done.set()

    def _watch(self, end: socket.socket, mask: int, handler: Callable[[int], None]) -> None:
        number = end.fileno()
        before = self._handlers.get(number, 0)
        if mask == before:
            return
        if not mask:
            self._selector.unregister(end)
            del self._handlers[number]
            return
        (self._selector.modify if before else self._selector.register)(end, mask, handler)
        self._handlers[number] = mask

    def _listen(self, state: str) -> None:
        """Have the listener accept ("open"), refuse ("closed") or ignore ("full") clients."""
        self._watch(self._listener, selectors.EVENT_READ * (state == "open"), self._on_accept)
        if state == "closed":
            # it keeps the port, and may listen again; it has not listened yet if that fails
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RD)
        else:
            self._listener.listen(_BACKLOG if state == "open" else 0)
        if state != "closed":
            self._on_accept(0)
        for filler in self._fillers.values():
            filler.close()
        self._fillers.clear()
        if state == "full":
            self._fill()

    def _fill(self) -> None:
        """Take the places in the queue of clients, until the kernel answers nobody."""
        while True:
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            try:
                filler.getpeername()
            except OSError:
                filler.close()
                return
            self._fillers[filler.getsockname()[1]] = filler

    def _on_accept(self, _: int) -> None:
        while True:
            try:
                client, address = self._listener.accept()
            except OSError:
                return
            if address[1] in self._fillers:
                client.close()
                continue
            pair = _Pair(self, client)
            with self._changed:
                self._pairs |= set() if pair.closed else {pair}
                self._accepted += 1
                self._changed.notify_all()

    def _poll(self) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._timers:
            return self._selector.select()
        timeout = max(self._timers[0][0] - time.monotonic(), 0.0)
        fileno = getattr(self._selector, "fileno", None)
        if fileno is None:
            return self._selector.select(timeout)
        # epoll itself counts in milliseconds, which is too coarse for a delay of one
        if timeout:
            select.select([fileno()], [], [], timeout)
        return self._selector.select(0)

    def _run(self) -> None:
        while not self._stopping:
            for key, mask in self._poll():
                # an earlier one of this round may have closed it
                if not isinstance(key.fileobj, int) and key.fileobj.fileno() >= 0:
                    key.data(mask)
            while self._timers and self._timers[0][0] <= time.monotonic():
                flow = heapq.heappop(self._timers)[2]
                flow.armed = False
                flow.flush()


class ProxyProcess:
    """A :class:`FaultProxy` in a process of its own, from :func:`proxy_process`."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process
        self.port = int(process.line())

    def url(self, scheme: str = "ldap") -> str:
        return f"{scheme}://{'localhost' if scheme == 'ldaps' else '127.0.0.1'}:{self.port}"

    def ask(self, command: str, *arguments: object) -> str:
        """Have it do something (``ask("forward", 0.01)``) or tell (``ask("connections")``)."""
        answer = self._process.ask(command, *arguments)
        assert not answer.startswith("error"), answer
        return answer


@contextlib.contextmanager
def proxy_process(target_port: int, *, delay: float = 0.0) -> Iterator[ProxyProcess]:
    """Run this file as a program until the block ends."""
    command = [sys.executable, "-m", __name__, "--target", str(target_port), "--delay", str(delay)]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with told(command, environment) as process:
        yield ProxyProcess(process)


def _obey(proxy: FaultProxy, line: str) -> object:
    """Carry out one line of standard input."""
    name, *words = line.split()
    if name.startswith("_") or not hasattr(proxy, name):
        raise ValueError(f"there is no {name}")
    found = getattr(proxy, name)
    if name == "garbage":
        return found(bytes.fromhex("".join(words)))
    if name in ("received", "wait_for_bytes"):
        return found(words[0], *map(int, words[1:]))
    if name == "delay" and words:
        proxy.delay = float(words[0])
        return None
    if not callable(found):
        return found
    return found(*(int(x) if x.isdigit() else float(x) for x in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, required=True, help="port of the server")
    parser.add_argument("--target-host", default="127.0.0.1", help="address of the server")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds each way")
    options = parser.parse_args()
    proxy = FaultProxy(options.target, target_host=options.target_host, delay=options.delay)
    with proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            try:
                answer = _obey(proxy, line)
            except Exception as error:
                answer = f"error: {error}"
            print("ok" if answer is None else answer, flush=True)


if __name__ == "__main__":
    main()

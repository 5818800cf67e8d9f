"""Beats and writes on one connection, in every order: what arrives is whole frames, or no beat.

The writers are greenlets that a scheduler of the test's own switches between, at each point where
a real one would wait; beats come at any of these points. The connection is a pair of sockets with
the smallest buffers there are, plain or with TLS.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import greenlet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfront.gateway.heartbeat import counters as counts
from keyfront.gateway.heartbeat import native
from keyfront.gateway.heartbeat.amqp_connection import FRAME, KeptConnection
from keyfront.gateway.heartbeat.thread import HeartbeatThread
from keyfront.gateway.heartbeat.tls import KeptTLSConnection
from keyfront.gateway.heartbeat.writer import make_writer
from support.certificates import certificates
from support.served import PATIENCE

# Seconds later than any beat is due.
LATER = 1e6
_HEAD = struct.Struct("!BHI")


class InterruptedWriteError(Exception):
    """What the transport raises in the middle of a frame."""


class Undoing(Exception):
    """Ends a greenlet that is not needed any more."""


def frame(number: int, size: int) -> bytes:
    """A frame of a body that can be told from others; it has beats in its content."""
    content = (number.to_bytes(4, "big") + FRAME * (size // len(FRAME) + 1))[: max(4, size)]
    return _HEAD.pack(3, 1, len(content)) + content + b"\xce"


def parse(stream: bytes) -> tuple[list[bytes], int, bytes]:
    """The frames but for beats, how many beats, and what remains at the end."""
    frames, beats, place = [], 0, 0
    while len(stream) - place >= _HEAD.size:
        kind, channel, size = _HEAD.unpack_from(stream, place)
        end = place + _HEAD.size + size + 1
        assert (kind, channel, size) == (8, 0, 0) or (kind, channel) == (3, 1), stream[place:][:40]
        if end > len(stream):
            break
        assert stream[end - 1] == 0xCE, stream[place:][:40]
        if kind == 8:
            beats += 1
        else:
            frames.append(stream[place:end])
        place = end
    return frames, beats, stream[place:]


class Short:
    """Stands in for a kept connection's socket and takes as many bytes as it is told to."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.room: int | None = None
        self.closed = 0

    def send(self, data: bytes, flags: int) -> int:
        if self.room == 0:
            raise BlockingIOError
        return int(self._real.send(data[: self.room], flags))

    def close(self) -> None:
        self.closed += 1
        self._real.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Plain:
    """A pair of sockets with small buffers."""

    in_pieces = True

    def __init__(self) -> None:
        self.client, self.server = socket.socketpair()
        for each in (self.client, self.server):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.row = memoryview(array("Q", [0] * 64))
        self.received = bytearray()

    def kept(self) -> KeptConnection:
        made = KeptConnection(self.client.fileno(), interval=0.001, timeout=30.0, row=self.row)
        made.sock = Short(made.sock)
        return made

    def shorten(self, kept: KeptConnection, room: int | None) -> None:
        """Have beats send that many bytes from now on."""
        kept.sock.room = room

    def put(self, data: memoryview) -> int:
        """Send some of it; 0 if there is no room now."""
        try:
            return self.client.send(data)
        except BlockingIOError:
            return 0

    def drain(self, most: int) -> bool:
        """Receive something; whether there was anything."""
        try:
            data = self.server.recv(most)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        self.received += data
        return bool(data)

    def close(self) -> None:
        self.client.close()
        self.server.close()


class WithTLS(Plain):
    """The same with OpenSSL at both ends, which sends records whole or remembers them.

    py-amqp hands it all that remains, again and again: what was begun with has to come again.
    """

    in_pieces = False

    def __init__(self, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
        super().__init__()
        ends = zip(contexts, (self.client, self.server), (False, True), strict=True)
        self.client, self.server = (
            context.wrap_socket(
                sock, server_side=side, do_handshake_on_connect=False,
                server_hostname=None if side else "localhost",
            )
            for context, sock, side in ends
        )  # fmt: skip
        waiting = [self.client, self.server]
        while waiting:
            for each in list(waiting):
                try:
                    each.do_handshake()
                    waiting.remove(each)
                except ssl.SSLWantReadError:
                    pass
        # tickets, which TLS 1.3 sends after it
        with pytest.raises(ssl.SSLWantReadError):
            self.client.recv(1)

    def kept(self) -> KeptConnection:
        return KeptTLSConnection(
            self.client.fileno(), tls=self.client._sslobj, blocks=False, interval=0.001,
            timeout=30.0, row=self.row,
        )  # fmt: skip

    def shorten(self, kept: KeptConnection, room: int | None) -> None:
        """OpenSSL is asked for whole records."""

    def put(self, data: memoryview) -> int:
        try:
            return self.client.send(data)
        except ssl.SSLWantWriteError:
            return 0


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    made = certificates(tmp_path_factory.mktemp("certificates"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server.certificate, made.server.key)
    return ssl.create_default_context(cafile=str(made.ca_file)), server


class World:
    """A connection, its writers, and what they do next by the choices of a test."""

    def __init__(self, wire: Plain) -> None:
        self.wire = wire
        self.kept = wire.kept()
        self.hub = greenlet.getcurrent()
        self.writer = make_writer(
            self.kept, self._send, pause=lambda _: self._switch(), inherited=ConnectionError
        )
        self.writing: list[Any] = []
        self.sent: list[bytes] = []
        self.piece = 4096
        self.interrupt = False
        self.interrupted = False
        self._number = 0
        self._passed = 0.0

    def _switch(self) -> None:
        self.hub.switch()

    def _wait(self) -> None:
        self._switch()
        if self.interrupt:
            self.interrupted = True
            raise InterruptedWriteError

    def _send(self, data: Any) -> None:
        """What the transport writes with: sends all, and lets others run whenever it waits."""
        view = memoryview(data)
        while view:
            part = view[: self.piece] if self.wire.in_pieces else view
            while not (sent := self.wire.put(part)):
                self._wait()
            view = view[sent:]
            self._wait()

    def _write(self, frames: list[bytes]) -> None:
        try:
            self.writer(memoryview(b"".join(frames)))
        except (InterruptedWriteError, Undoing):
            return
        self.sent += frames

    def begin(self, sizes: list[int]) -> None:
        """Another writer, with several frames in one write, as py-amqp has them."""
        frames = []
        for size in sizes:
            self._number += 1
            frames.append(frame(self._number, size))
        made = greenlet.greenlet(self._write)
        self.writing.append(made)
        made.switch(frames)

    def step(self, number: int) -> None:
        """Let a writer go on."""
        self.writing = [each for each in self.writing if not each.dead]
        if self.writing:
            self.writing[number % len(self.writing)].switch()

    def beat(self, later: float = LATER) -> float | None:
        """What the native thread does when so many seconds have passed, or more."""
        self._passed += later
        return self.kept.beat(native.monotonic() + self._passed)

    def finish(self) -> None:
        """Let all writers come to an end, and receive all."""
        self.interrupt = False
        for number in range(1_000_000):
            self.step(number)
            while self.wire.drain(1 << 20):
                pass
            if all(each.dead for each in self.writing):
                return
        raise AssertionError("a writer waits for ever")

    def abandon(self) -> None:
        """End all writers where they are."""
        for each in self.writing:
            if not each.dead:
                each.throw(Undoing)
        self.writing.clear()

    def undo(self) -> None:
        self.abandon()
        self.kept.close()
        self.wire.close()


@contextmanager
def world(wire: Plain) -> Iterator[World]:
    made = World(wire)
    try:
        yield made
    finally:
        made.undo()


SIZES = st.lists(st.integers(4, 9000), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("begin"), SIZES),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("beat"), st.sampled_from([0.0, LATER])),
    st.tuples(st.just("beat"), st.just(LATER)),
    st.tuples(st.just("piece"), st.integers(1, 20_000)),
    # a beat that is sent in part, and as many as it takes to fill the send buffer
    st.tuples(st.just("short"), st.sampled_from([0, 1, 3, 7])),
    st.tuples(st.just("flood"), st.integers(2, 30)),
    st.tuples(st.just("drain"), st.integers(1, 20_000)),
)


def do(world: World, name: str, value: Any) -> None:
    match name:
        case "begin":
            if sum(not each.dead for each in world.writing) < 3:
                world.begin(value)
        case "step":
            world.step(value)
        case "beat":
            world.beat(value)
        case "piece":
            world.piece = value
        case "short":
            world.wire.shorten(world.kept, value)
            world.beat()
            world.wire.shorten(world.kept, None)
        case "flood":
            for _ in range(value):
                world.beat()
        case "drain":
            world.wire.drain(value)


@pytest.fixture(scope="module", params=["plain", "tls"])
def wires(request: pytest.FixtureRequest) -> Callable[[], Plain]:
    if request.param == "plain":
        return Plain
    return partial(WithTLS, request.getfixturevalue("contexts"))


MANY = settings(max_examples=200, deadline=None)


@MANY
@given(steps=st.lists(STEPS, max_size=60))
def test_whatever_the_order_all_frames_are_whole(
    wires: Callable[[], Plain], steps: list[tuple[str, Any]]
) -> None:
    with world(wires()) as made:
        for name, value in steps:
            do(made, name, value)
        made.finish()
        # one more beat, and a write that finds what is left of it
        made.beat()
        made.begin([10])
        made.finish()
        frames, beats, rest = parse(bytes(made.wire.received))
        assert rest == b""
        assert frames == made.sent
        assert beats >= 1
        assert made.wire.row[counts.STOPPED] == 0
        assert made.kept.lock.acquire()
        made.kept.lock.give(None)


@MANY
@given(
    before=st.lists(STEPS, max_size=30),
    sizes=SIZES,
    more=st.integers(0, 5),
    after=st.lists(STEPS.filter(lambda step: step[0] != "begin"), max_size=30),
)
def test_after_a_write_that_was_interrupted_nothing_is_put_behind_it(
    wires: Callable[[], Plain], before: list[tuple[str, Any]], sizes: list[int], more: int,
    after: list[tuple[str, Any]],
) -> None:
    with world(wires()) as made:
        for name, value in before:
            do(made, name, value)
        made.begin(sizes)
        for _ in range(more):
            made.step(0)
        made.interrupt = True
        for each in list(made.writing):
            if not each.dead:
                each.switch()
            if made.interrupted:
                break
        if not made.interrupted:
            # all had been sent
            return
        assert made.kept.stopped
        assert made.wire.row[counts.STOPPED] == 1
        sent = made.wire.row[counts.BEATS]
        # whoever waited for his turn finds the connection broken, as py-amqp does
        made.abandon()
        for name, value in after:
            do(made, name, value)
        assert made.beat() is None
        assert made.wire.row[counts.BEATS] == sent
        while made.wire.drain(1 << 20):
            pass
        # whole frames, and then perhaps a part of one
        frames, _, _ = parse(bytes(made.wire.received))
        assert frames[: len(made.sent)] == made.sent


@MANY
@given(before=st.lists(STEPS, max_size=30), after=st.lists(STEPS, max_size=30))
def test_a_connection_that_is_closed_gets_no_beat(
    wires: Callable[[], Plain], before: list[tuple[str, Any]], after: list[tuple[str, Any]]
) -> None:
    with world(wires()) as made:
        for name, value in before:
            do(made, name, value)
        sent = made.wire.row[counts.BEATS]
        made.kept.close()
        assert made.kept.close() is None
        for name, value in after:
            do(made, name, value)
        made.finish()
        made.begin([10])
        made.finish()
        assert made.wire.row[counts.BEATS] == sent
        assert made.kept.sock.fileno() == -1
        # who writes on still does it by whole frames
        frames, _, rest = parse(bytes(made.wire.received))
        assert (frames, rest) == (made.sent, b"")


class BeingRead:
    """The lock of somebody who reads all the time; it is tried, and not over and over."""

    def __init__(self) -> None:
        self.tried = 0

    def acquire(self, blocking: bool = True) -> bool:
        assert not blocking
        self.tried += 1
        assert self.tried < 10, "the thread runs in a circle"
        return False


@pytest.mark.parametrize("interval", [0.001, 0.3, 7.7, 30.0])
def test_a_beat_that_finds_somebody_reading_comes_again_soon_but_not_at_once(
    interval: float, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    wire = WithTLS(contexts)
    kept: Any = wire.kept()
    kept.interval, kept.early = interval, interval * kept.early / kept.interval
    # long ago
    kept.written = kept.beaten = native.monotonic() - 100 * interval
    kept.reading = BeingRead()
    native_thread = HeartbeatThread(counts.Counts(None), threaded=False)
    native_thread.add(kept)
    try:
        again = native_thread.turn()
        assert kept.reading.tried == 1
        assert again is not None and 0 < again < interval
    finally:
        kept.close()
        wire.close()


def test_a_native_thread_that_beats_all_the_time_tears_nothing(
    wires: Callable[[], Plain]
) -> None:
    wire = wires()
    kept = wire.kept()
    ended = threading.Event()

    def beats() -> None:
        later = LATER
        while not ended.is_set():
            kept.beat(native.monotonic() + later)
            later += 1

    def send(data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[wire.put(view[:700]) :]
            wire.drain(50_000)

    writer = make_writer(kept, send, pause=native.sleep, inherited=ConnectionError)
    sent = []
    thread = threading.Thread(target=beats)
    deadline = native.monotonic() + PATIENCE
    # the threads take turns at any place
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        while len(sent) < 300 or wire.row[counts.BEATS] < 100 or not wire.row[counts.FLOWING]:
            assert native.monotonic() < deadline
            sent.append(frame(len(sent), len(sent) * 37 % 9000))
            writer(memoryview(sent[-1]))
            wire.drain(20_000)
    finally:
        ended.set()
        thread.join(PATIENCE)
        sys.setswitchinterval(interval)
    # what is left of the last beat
    wire.drain(1 << 20)
    sent.append(frame(0, 4))
    writer(memoryview(sent[-1]))
    while wire.drain(1 << 20):
        pass
    kept.close()
    wire.close()
    assert not thread.is_alive()
    frames, beats_seen, rest = parse(bytes(wire.received))
    assert rest == b""
    assert frames == sent
    assert beats_seen >= 100

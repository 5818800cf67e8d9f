"""The heartbeat: a beat, and a turn at which nothing is due; against py-amqp's own."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("amqp")

import amqp
from amqp.method_framing import frame_writer

from keyfront.gateway.heartbeat.amqp_connection import KeptConnection
from keyfront.gateway.heartbeat.counters import Counts
from keyfront.gateway.heartbeat.thread import HeartbeatThread

CONNECTIONS = 10
# Seconds: nothing comes due while it is measured.
LONG = 3600.0


class Wire(NamedTuple):
    """A TCP connection of loopback, both ends here."""

    near: socket.socket
    far: socket.socket

    def drain(self) -> None:
        """Take what was sent, so that there is room for more."""
        self.far.recv(4096)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        yield Wire(near, far)


@pytest.fixture
def stock(wire: Wire) -> Iterator[Any]:
    """py-amqp's connection as it is once connected, as far as a heartbeat looks at it."""
    connection = amqp.Connection()
    connection.heartbeat = LONG
    transport = amqp.transport.TCPTransport("127.0.0.1:5672", None)
    transport.sock = wire.near
    transport._write = wire.near.sendall
    connection._transport = transport
    connection._frame_writer = frame_writer(connection, transport)
    yield connection
    # it would shut a socket that is closed by then
    transport.sock = None


def test_beat_against_py_amqp(paired: Any, wire: Wire, stock: Any) -> None:
    """A heartbeat frame through a socket; the peer's taking it is in both."""
    kept = KeptConnection(wire.near.fileno(), interval=10.0, timeout=20.0, row=Counts(None).row)
    moments = itertools.count(int(kept.written) + 100, 100)

    def ours() -> None:
        kept.beat(next(moments))
        wire.drain()

    def theirs() -> None:
        stock.frame_writer(8, 0, None, None, None)
        wire.drain()

    paired(ours, theirs, limit=1.1)
    kept.close()


def test_turn_against_py_amqp(paired: Any, wire: Wire, stock: Any) -> None:
    """Looking after ten connections of which none is due, no slower than after one by py-amqp."""
    counts = Counts(None)
    native_thread = HeartbeatThread(counts, threaded=False)
    all_kept = [
        KeptConnection(wire.near.fileno(), interval=LONG, timeout=2 * LONG, row=counts.row)
        for _ in range(CONNECTIONS)
    ]
    for kept in all_kept:
        native_thread.add(kept)
    paired(native_thread.turn, stock.heartbeat_tick, limit=1.0)
    for kept in all_kept:
        kept.close()


def test_counts(counted: Any, wire: Wire) -> None:
    """A beat is one system call, and a turn without one is none."""
    kept = KeptConnection(wire.near.fileno(), interval=1e-3, timeout=1.0, row=Counts(None).row)
    moments = itertools.count(int(kept.written) + 100, 100)
    counted(syscalls_of_10_beats=counted.syscalls(lambda: kept.beat(next(moments))))


@pytest.mark.slow
def test_turn_in_instructions(instructions: Any, wire: Wire) -> None:
    counts = Counts(None)
    native_thread = HeartbeatThread(counts, threaded=False)
    fd = wire.near.fileno()
    native_thread.add(KeptConnection(fd, interval=LONG, timeout=2 * LONG, row=counts.row))
    instructions(native_thread.turn)

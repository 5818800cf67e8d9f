"""What the kernel tells of a connection, on real sockets in each state that matters."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyfront.gateway.heartbeat import tcp
from keyfront.gateway.heartbeat.tcp import CLOSED, State, look, look_at, plain_socket
from support.fault_proxy import FaultProxy

PATIENCE = 90.0
Pair = tuple[socket.socket, socket.socket]
SO_ATTACH_FILTER = 26  # asm-generic/socket.h


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Ours and the peer's end of a connection."""
    with connected(request.param) as ends:
        yield ends


@contextlib.contextmanager
def connected(family: int = socket.AF_INET, buffer: int | None = None) -> Iterator[Pair]:
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listener.listen()
        with socket.socket(family) as ours:
            if buffer:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            ours.connect(listener.getsockname())
            peer, _ = listener.accept()
            with peer:
                yield ours, peer


def seen(sock: socket.socket) -> State:
    state = look(sock.fileno())
    assert state is not None
    return state


def until(sock: socket.socket, condition: Callable[[State], bool]) -> State:
    """Look until it is so: the kernel carries packets when it likes, and tells nobody."""
    deadline = time.monotonic() + PATIENCE
    while not condition(state := seen(sock)):
        assert time.monotonic() < deadline, state
        time.sleep(0.002)
    return state


def vanish(sock: socket.socket) -> None:
    """Let nothing that comes reach a socket, not even its kernel's answers: ``ret #0``."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    sock.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
    )


def flags(sock: socket.socket) -> int:
    return fcntl.fcntl(sock.fileno(), fcntl.F_GETFL)


def test_of_a_fresh_connection(pair: Pair) -> None:
    state = seen(pair[0])
    assert state._replace(silent=0.0, silent_data=0.0) == State(
        established=True, silent=0.0, silent_data=0.0, unread=0, unsent=0, retransmits=0,
        probes=0, room=True,
    )  # fmt: skip
    assert 0 <= state.silent <= state.silent_data < PATIENCE


def test_counts_what_lies_unread(pair: Pair) -> None:
    ours, peer = pair
    peer.sendall(b"x" * 300)
    assert until(ours, lambda state: state.unread == 300).established
    ours.recv(100)
    assert seen(ours).unread == 200


def test_tells_data_from_acknowledgements(pair: Pair) -> None:
    # By how much the one is older than the other: both grow while this process stands still.
    ours, peer = pair
    assert until(ours, lambda state: state.silent_data > 0.2).silent > 0.1
    ours.sendall(b"ping")
    # loopback acknowledges when the peer reads
    peer.recv(4)
    until(ours, lambda state: state.unsent == 0 and state.silent_data - state.silent > 0.1)
    peer.sendall(b"pong")
    state = until(ours, lambda state: state.unread == 4)
    assert state.silent_data - state.silent < 0.1


def test_silence_grows_from_the_connect_if_nothing_ever_came(pair: Pair) -> None:
    ours, _ = pair
    before = seen(ours).silent_data
    assert until(ours, lambda state: state.silent_data > before + 0.05).silent > 0.05


def test_a_peer_that_closed(pair: Pair) -> None:
    ours, peer = pair
    peer.close()
    assert until(ours, lambda state: not state.established).unread == 0


def test_a_peer_that_closed_after_its_last_words(pair: Pair) -> None:
    ours, peer = pair
    peer.sendall(b"connection.close")
    peer.close()
    state = until(ours, lambda state: not state.established)
    assert state.unread >= 16
    assert ours.recv(100) == b"connection.close"


def test_a_peer_that_reset(pair: Pair) -> None:
    ours, peer = pair
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    until(ours, lambda state: not state.established)
    # a look takes nothing from whoever owns the socket, the pending error least of all
    with pytest.raises(ConnectionResetError):
        ours.recv(1)


def test_a_connection_that_we_shut(pair: Pair) -> None:
    ours, _ = pair
    ours.shutdown(socket.SHUT_RDWR)
    assert not seen(ours).established


def test_a_peer_that_vanished(pair: Pair) -> None:
    ours, peer = pair
    vanish(peer)
    ours.sendall(b"anybody?")
    state = until(ours, lambda state: state.retransmits >= 2)
    # established as far as anybody knows
    assert state.established
    assert state.unsent == 8
    assert state.silent >= 0.2
    assert state.room


@pytest.mark.parametrize("size", [8, 100_000])
@pytest.mark.parametrize("buffer", [None, 8192])
def test_a_queue_that_is_full_leaves_no_room(size: int, buffer: int | None) -> None:
    with connected(buffer=buffer) as (ours, peer):
        peer.setblocking(False)
        sent, deadline = 0, time.monotonic() + PATIENCE
        while (state := seen(ours)).room:
            assert time.monotonic() < deadline, (sent, state)
            with contextlib.suppress(BlockingIOError):
                for _ in range(1000):
                    sent += peer.send(b"x" * size)
        assert state.established
        assert state.unread > 1000
        # and it comes back with the room
        got, peer_left = 0, seen(peer).unsent
        assert peer_left > 0
        while got < sent:
            got += len(ours.recv(1 << 20))
        assert until(ours, lambda state: state.room).unread == 0
        assert until(peer, lambda state: state.unsent == 0).established


def test_without_the_window_room_is_told_from_memory() -> None:
    """As before Linux 6.2, where the structure is shorter."""
    shortened = 104

    class Older:
        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.fileno = sock, sock.fileno

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            is_info = (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
            return self.sock.getsockopt(level, option, min(size, shortened) if is_info else size)

    with connected(buffer=65536) as (ours, peer):
        older: Any = Older(ours)
        steady = seen(ours)
        state = look_at(older)
        assert state is not None
        assert state._replace(silent=0.0, silent_data=0.0) == steady._replace(
            silent=0.0, silent_data=0.0
        )
        peer.setblocking(False)
        deadline = time.monotonic() + PATIENCE
        # never later than the window closes
        while seen(ours).room:
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                peer.send(b"x" * 1000)
        closed = look_at(older)
        assert closed is not None and not closed.room and closed.unread > 1000


def test_a_proxy_that_stalls_and_one_that_loses_the_server() -> None:
    """The kernel of the proxy still answers: only the age of the data gives it away."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with FaultProxy(server.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port)) as ours:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(b"hello")
                    assert ours.recv(5) == b"hello"
                    proxy.stall()
                    peer.sendall(b"lost")
                    ours.sendall(b"asked")
                    state = until(ours, lambda state: state.silent_data > 0.2)
                    assert state.established and state.unread == 0 and state.room
                    proxy.half_open()
                    assert seen(ours).established


@pytest.mark.parametrize("blocking", [True, False])
def test_a_look_changes_nothing(blocking: bool) -> None:
    with connected() as (ours, peer):
        ours.setblocking(blocking)
        before, descriptors = flags(ours), len(os.listdir("/proc/self/fd"))
        peer.sendall(b"x")
        until(ours, lambda state: state.unread == 1)
        assert flags(ours) == before
        assert len(os.listdir("/proc/self/fd")) == descriptors
        ours.setblocking(True)
        assert ours.recv(2) == b"x"


def test_a_default_timeout_does_not_reach_the_connection() -> None:
    with connected() as (ours, _):
        before = flags(ours)
        socket.setdefaulttimeout(5)
        try:
            assert seen(ours).established
        finally:
            socket.setdefaulttimeout(None)
        assert flags(ours) == before


def test_closed_here() -> None:
    with connected() as (ours, _):
        plain = plain_socket(os.dup(ours.fileno()))
        fd = ours.detach()
        os.close(fd)
        # our duplicate keeps it
        state = look_at(plain)
        assert state is not None and state.established
        plain.close()
        assert look_at(plain) == CLOSED == look(fd) == look(-1)
        assert not CLOSED.established


def test_what_is_not_a_connection() -> None:
    ends = socket.socketpair()
    with ends[0], ends[1], open(os.devnull) as file:
        assert look(ends[0].fileno()) is None
        descriptors = len(os.listdir("/proc/self/fd"))
        assert look(file.fileno()) is None
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert look(datagrams.fileno()) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert look(listener.fileno()) is None
    with socket.socket() as unconnected:
        assert not seen(unconnected).established


def test_while_another_thread_closes() -> None:
    """The number may be another file's at any moment: nothing is raised, nothing leaks."""
    stop = threading.Event()
    numbers = array.array("i", [-1])
    failures: list[BaseException] = []

    def looking() -> None:
        try:
            while not stop.is_set():
                look(numbers[0])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=looking)
    with connected() as (ours, _), open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        thread.start()
        for turn in range(3000):
            numbers[0] = os.dup(ours.fileno() if turn % 2 else file.fileno())
            os.close(numbers[0])
        stop.set()
        thread.join(PATIENCE)
        assert len(os.listdir("/proc/self/fd")) == before
    assert failures == []


def test_reads_the_layout_of_linux_tcp_h() -> None:
    """Made by hand, each field with a value of its own at its offset."""
    info = bytearray(tcp._WHOLE.size)
    info[0], info[2], info[3] = 1, 5, 6
    for offset, value in ((44, 1), (48, 2), (52, 7000), (56, 3000), (228, 9), (232, 0)):
        struct.pack_into("=I", info, offset, value)

    class Made:
        def getsockopt(self, *_: int) -> bytes:
            return bytes(info)

        def fileno(self) -> int:
            return ours.fileno()

    with connected() as (ours, _):
        made: Any = Made()
        assert look_at(made) == State(True, 3.0, 7.0, 0, 0, 5, 6, False)
        struct.pack_into("=I", info, 232, 1)
        info[0] = 8
        assert look_at(made) == State(False, 3.0, 7.0, 0, 0, 5, 6, True)

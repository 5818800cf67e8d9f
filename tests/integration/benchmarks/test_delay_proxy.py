"""The distance that benchmarks put before a server."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from keyfront.benchmarks.servers.delay_proxy import _Distance, _End, delay_proxy
from support.served import PATIENCE, free_port


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets, and hangs up when its client does."""

    def talk(client: socket.socket) -> None:
        with client:
            while data := client.recv(65536):
                client.sendall(data)

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(client,)).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def connect(port: int) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", port), PATIENCE))


def read(client: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = client.recv(size - len(found))
        assert part, "it hung up"
        found += part
    return found


def test_a_round_trip_takes_longer_by_what_is_told(echo: int) -> None:
    with delay_proxy(echo) as proxy, connect(proxy.port) as client:
        for seconds in (0.4, 0.0):
            proxy.delay(seconds)
            start = time.monotonic()
            client.sendall(b"x")
            assert read(client, 1) == b"x"
            # never before; how much later goes by the machine
            assert time.monotonic() - start >= seconds
        proxy.delay(0.2)
        start = time.monotonic()
        with connect(proxy.port) as other:
            other.sendall(b"x")
            assert read(other, 1) == b"x"
        # that of the handshake, too
        assert time.monotonic() - start >= 0.4


def test_all_arrives_in_its_order_though_the_distance_gets_smaller(echo: int) -> None:
    sent = b"".join(hashlib.sha256(bytes([number % 256])).digest() * 64 for number in range(500))
    with delay_proxy(echo) as proxy, connect(proxy.port) as client:
        proxy.delay(0.2)

        def send() -> None:
            for at in range(0, len(sent), 5000):
                client.sendall(sent[at : at + 5000])
            client.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        proxy.delay(0.0)
        assert read(client, len(sent)) == sent
        thread.join(PATIENCE)
        # the server has hung up since the client did
        assert client.recv(1) == b""


def test_nobody_behind_it_is_nobody() -> None:
    with delay_proxy(free_port()) as proxy, connect(proxy.port) as client:
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_connections_that_are_over_leave_nothing(echo: int) -> None:
    with delay_proxy(echo) as proxy:
        for _ in range(1100):  # more than it may have descriptors, as a rule
            with connect(proxy.port) as client:
                client.sendall(b"x")
                assert read(client, 1) == b"x"


def test_an_end_that_the_loop_does_not_know_to_be_reset_is_no_error() -> None:
    async def reset_then_end() -> None:
        loop = asyncio.get_running_loop()
        ends = _End(_Distance()), _End(_Distance())
        ends[0].other, ends[1].other = ends[1], ends[0]
        with socket.create_server(("127.0.0.1", 0)) as server:
            for end in ends:
                await loop.create_connection(lambda end=end: end, *server.getsockname())
            server.accept()[0].close()
            peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        ends[0].eof_received()
        ends[1].transport.abort()

    asyncio.run(reset_then_end())

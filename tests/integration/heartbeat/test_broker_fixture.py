"""The RabbitMQ that other tests rely on does what they believe, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import psutil
import pytest

from keyfront.benchmarks.servers import rabbitmq
from support.broker import Broker, broker
from support.processes import runs
from support.served import PATIENCE


@contextlib.contextmanager
def connection(
    server: Broker, name: str = "", *, tls: bool = False, timeout: float = PATIENCE, **more: Any
) -> Iterator[kombu.Connection]:
    """An AMQP connection that nobody beats for."""
    options = {"read_timeout": timeout, "confirm_publish": True, **more.pop("options", {})}
    if name:
        options["client_properties"] = {"connection_name": name}
    if tls:
        assert server.certificates is not None
        ca_file = str(server.certificates.ca_file)
        more["ssl"] = {"ca_certs": ca_file, "server_hostname": "localhost"}
    url = server.amqp_url(tls=tls)
    client = kombu.Connection(url, connect_timeout=timeout, transport_options=options, **more)
    try:
        client.connect()
        yield client
        with contextlib.suppress(*client.connection_errors):
            client.release()
    finally:
        # also where nobody answers
        if client._connection and client._connection.transport:
            client._connection.transport.close()


@pytest.fixture
def name() -> str:
    return f"test_broker_fixture:{os.getpid()}:{uuid.uuid4()}"


def _raw(client: kombu.Connection) -> socket.socket:
    return client.connection.transport.sock


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_it_carries_messages_and_counts_connections(rabbit: Broker, name: str, tls: bool) -> None:
    with connection(rabbit, name, tls=tls) as client:
        with client.SimpleQueue(name, queue_opts={"auto_delete": True}) as queue:
            queue.put("hello")
            assert queue.get(timeout=PATIENCE).payload == "hello"
        port = _raw(client).getsockname()[1]
        assert rabbit.connections(name) == [port]
        assert port in rabbit.connections()
    rabbit.wait_for(lambda x: not x.connections(name), "the connection is closed")
    (seen,) = rabbit.seen(name)
    assert (seen.port, seen.name) == (port, name)
    counts = [rabbit.accepted, rabbit.missed, rabbit.closed_unexpectedly, rabbit.frame_errors]
    assert [count(name) for count in counts] == [1, 0, 0, 0]
    assert rabbit.accepted() >= 1


def test_its_counts_tell_what_went_wrong_on_whose_connection(rabbit: Broker, name: str) -> None:
    with connection(rabbit, f"{name} good") as good, connection(rabbit, f"{name} bad") as bad:
        with connection(rabbit, f"{name} worse") as worse:
            bad.channel()
            # a method frame, channel.flow, that ends in X
            _raw(bad).sendall(bytes.fromhex("01 0001 00000005 0014 0014 01") + b"X")
            _raw(worse).shutdown(socket.SHUT_RDWR)
            rabbit.wait_for(lambda x: x.frame_errors(name) == 1, "it has seen a bad frame")
            rabbit.wait_for(lambda x: x.closed_unexpectedly(name) == 1, "it has seen a hang-up")
        assert rabbit.frame_errors(f"{name} bad") == 1
        assert rabbit.closed_unexpectedly(f"{name} worse") == 1
        assert rabbit.accepted(name) == 3
        rabbit.wait_for(lambda x: len(x.connections(name)) == 1, "only the good one is open")
        assert rabbit.connections(name) == rabbit.connections(f"{name} good")
        assert good.connected


def test_a_client_that_never_beats_is_counted(rabbit: Broker, name: str) -> None:
    with connection(rabbit, f"{name} silent", heartbeat=1) as silent:
        with connection(rabbit, f"{name} without", heartbeat=0):
            assert silent.connection.heartbeat == 1
            rabbit.wait_for(lambda x: x.missed(name) == 1, "the silent one is closed")
            assert rabbit.missed(f"{name} silent") == 1
            rabbit.wait_for(lambda x: len(x.connections(name)) == 1, "one is left")


def test_its_memory_alarm_reaches_who_publishes(rabbit: Broker, name: str) -> None:
    events: list[str] = []
    options = {
        "confirm_publish": False,
        "on_blocked": lambda reason: events.append("blocked"),
        "on_unblocked": lambda: events.append("unblocked"),
    }
    with connection(rabbit, name, options=options) as client:
        producer = client.Producer(client.channel())
        rabbit.block()
        try:
            producer.publish("nobody reads it", routing_key=name)
            client.drain_events(timeout=PATIENCE)
            assert events == ["blocked"]
        finally:
            rabbit.unblock()
        client.drain_events(timeout=PATIENCE)
        assert events == ["blocked", "unblocked"]


def _put(client: kombu.Connection, text: str) -> None:
    with client.SimpleQueue("kept") as queue:
        queue.put(text)


def test_it_stops_and_starts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), broker(tmp_path) as server:
        port, own = server.port, server._own
        with connection(server) as client:
            _put(client, "first")
            server.kill()
            with pytest.raises(client.connection_errors):
                _put(client, "second")
        assert server.pid is None
        with pytest.raises(ConnectionRefusedError), connection(server):
            pass
        server.start()
        assert server.port == port
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        with connection(server) as client:
            with client.SimpleQueue("kept") as queue:
                assert queue.get(timeout=PATIENCE).payload == "first"
            server.pause()
            with pytest.raises((TimeoutError, *client.connection_errors)):
                with connection(server, timeout=0.5):
                    pass
            assert server.accepted() == 2
            local = _raw(client).getsockname()[1]
            assert local in server.connections()
            server.resume()
            _put(client, "third")
            server.stop()
            with pytest.raises(client.connection_errors):
                client.drain_events(timeout=PATIENCE)
        assert any(x.says("connection_forced") for x in server.seen() if x.port == local)
        assert server.pid is None
        raise ZeroDivisionError
    assert not any(map(runs, tree)), tree
    assert not own.exists()
    assert server.log.exists()
    assert not _mentions(own)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((server.host, port))


def _mentions(path: Path) -> list[psutil.Process]:
    """Processes that were told of a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if runs(process) and str(path) in str(process.environ()):
                found.append(process)
    return found


def test_it_ends_with_whoever_runs_it_and_takes_another_port(tmp_path: Path) -> None:
    """A test run that is killed leaves no process; a port that is taken is not waited for."""
    program = (
        "import sys, pathlib, socket\n"
        "from keyfront.benchmarks.servers import rabbitmq as broker\n"
        "taken, choose = socket.create_server(('127.0.0.1', 0)), broker.free_port\n"
        "ports = iter([taken.getsockname()[1]])\n"
        "broker.free_port = lambda: next(ports, None) or choose()\n"
        "with broker.broker(pathlib.Path(sys.argv[1])) as server:\n"
        "    assert server.port != taken.getsockname()[1]\n"
        "    server.pause()\n"
        "    print(server.pid, server._own, flush=True)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as runner:
        assert runner.stdout is not None
        pid, own = runner.stdout.readline().split()
        tree = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
        runner.kill()
    rabbitmq.wait_until(lambda: not any(map(runs, tree)), "they have ended")
    assert not _mentions(Path(own))
    # the one thing that a killed test run leaves
    subprocess.run(["rm", "-r", own], check=True)

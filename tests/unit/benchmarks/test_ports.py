"""Ports for servers that cannot bind port 0: nobody else is given them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keyfront.benchmarks.servers import ports
from keyfront.errors import ServerError


def _kernels() -> range:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    low, high = map(int, text.split())
    return range(low, high + 1)


def test_none_is_given_twice() -> None:
    # of several blocks
    found = [ports.free_port() for _ in range(250)]
    assert len(set(found)) == len(found)
    if _kernels().start > 12000:
        assert not set(found) & set(_kernels())


def test_processes_take_others() -> None:
    program = (
        "from keyfront.benchmarks.servers.ports import free_port\n"
        "print(*(free_port() for _ in range(250)), flush=True)\n"
        "input()\n"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    found = [ports.free_port()]
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as one,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None
            found += map(int, process.stdout.readline().split())
        found += [ports.free_port() for _ in range(250)]
        for process in (one, other):
            process.communicate("\n")
    assert len(set(found)) == len(found) == 751


def test_a_child_takes_others() -> None:
    program = (
        "import os\n"
        "from keyfront.benchmarks.servers.ports import free_port\n"
        "found = [free_port()]\n"
        "child = os.fork()\n"
        "found += [free_port() for _ in range(150)]\n"
        "# at once, as the other's line is in the same pipe\n"
        "os.write(1, (' '.join(map(str, found)) + '\\n').encode())\n"
        "child and os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    parent, child = (set(line.split()) for line in done.stdout.splitlines())
    assert len(parent) == len(child) == 151
    # what was claimed before the fork
    assert len(parent & child) == 1


def test_one_that_somebody_else_listens_at_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.bind_stable() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        free = ports.free_port()
        monkeypatch.setattr(ports, "_ports", iter([port, free]))
        assert ports.free_port() == free


def test_a_server_can_listen_where_a_socket_is_bound() -> None:
    with ports.bind_stable() as bound:
        address = bound.getsockname()
        with socket.create_server(address), socket.create_connection(address, 60):
            pass


def test_when_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_LOWEST", 65536)
    with pytest.raises(ServerError, match="are taken"):
        ports._claim_block()

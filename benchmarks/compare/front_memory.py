"""Memory of nginx and Apache: processes, slots for connections, and clients kept alive over TLS.

    python -m keyfront.benchmarks.compare.front_memory [--clients 500]

Starts nginx, Apache's event MPM and its prefork MPM one after the other on a free loopback port,
with TLS, and reads what they take before clients connect and after each has made one request and
stays connected (PSS: a page shared by n processes counts as 1/n in each). ``keyfront plan`` goes by
these figures (gateway/plan/costs.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.render import certificates
from keyfront.gateway.serve.lineups import Program

from ..lineups import servers
from ..worlds import processes
from ..worlds.ports import free_port

_REQUEST = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PREFORK = 40

_PREFORKED = {
    "ServerLimit": _PREFORK,
    "StartServers": _PREFORK,
    "MaxRequestWorkers": _PREFORK,
    "MinSpareServers": _PREFORK,
    "MaxSpareServers": _PREFORK + 1,
}


def _event(clients: int) -> dict[str, object]:
    return {
        "ServerLimit": 4,
        "StartServers": 4,
        "ThreadsPerChild": 32,
        "MaxRequestWorkers": 128,
        "MaxSpareThreads": 128,
        "AsyncRequestWorkerFactor": clients // 32 + 2,
    }


class Memory(NamedTuple):
    """The memory of a server's processes together, in MiB, without and with clients."""

    processes: int
    idle: float
    clients: int
    busy: float

    @property
    def client(self) -> float:
        """KiB of a client."""
        return (self.busy - self.idle) * 1024 / self.clients


def pss(master: int) -> tuple[int, float]:
    """Return how many a process and its children are, and the MiB they take together."""
    pids = processes.family(master)
    return len(pids), sum(processes.memory(pid)["Pss"] for pid in pids)


@contextlib.contextmanager
def connected(port: int, clients: int) -> Iterator[None]:
    """Clients that made one request each and stay."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.ExitStack() as stack:
        for _ in range(clients):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            client = stack.enter_context(context.wrap_socket(plain))
            client.sendall(_REQUEST)
            if not client.recv(4096):
                raise ServerError(f"the server at port {port} closed a connection unanswered")
        yield


def measure(program: Program, port: int, clients: int) -> Memory:
    """Run a server and read its memory.

    :raises ServerError: it does not start, or does not answer
    """
    with servers.started(program) as server:
        server.wait_for_port(port)
        before = (0, 0.0)

        def settled() -> bool:
            # all of its processes are there when nothing changes any more
            nonlocal before
            time.sleep(0.3)
            before, last = pss(server.pid), before
            return before[0] > 1 and before[0] == last[0] and abs(before[1] - last[1]) < 0.05

        server.wait_until(settled)
        count, idle = pss(server.pid)
        with connected(port, clients):
            return Memory(count, idle, clients, pss(server.pid)[1])


def candidates(folder: Path, clients: int) -> Iterator[tuple[str, Program, int, int]]:
    """Write the files of each server; gives its name, program, port and clients."""
    certificate, key = certificates.make(folder, "localhost")
    user = (programs.front_user() or (None,))[0]
    for slots in (1024, 16384):
        port = free_port()
        nginx = servers.nginx(
            folder,
            f"{processes.HOST}:{port} ssl",
            location=["return 404"],
            main={"worker_processes": 1, "worker_rlimit_nofile": slots},
            events={"worker_connections": slots},
            http={
                "keepalive_timeout": "75s",
                "ssl_certificate": certificate,
                "ssl_certificate_key": key,
            },
            access_log="off",
            user=user,
        )
        yield f"nginx, {slots} slots", nginx, port, min(clients, slots // 2)
    lines = [f'SSLCertificateFile "{certificate}"', f'SSLCertificateKeyFile "{key}"']
    for mpm, limits, most in (
        ("event", _event(clients), clients),
        ("prefork", _PREFORKED, _PREFORK - 1),
    ):
        port = free_port()
        apache = servers.apache(
            folder,
            f"{processes.HOST}:{port}",
            mpm=mpm,
            directives={**limits, "KeepAliveTimeout": 75},
            loaded=["ssl"],
            content=["SSLEngine on", *lines],
        )
        yield f"Apache {mpm}", apache, port, min(clients, most)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=500, help="connections (default 500)")
    options = parser.parse_args(arguments)
    print(f"{'':<20} processes  idle MiB  clients  with them  KiB a client")
    try:
        with tempfile.TemporaryDirectory(prefix="front-memory-", dir=temporary_parent()) as name:
            # a web server's own user has to reach its files
            os.chmod(name, 0o711)
            for label, program, port, clients in candidates(Path(name), options.clients):
                one = measure(program, port, clients)
                print(
                    f"{label:<20}{one.processes:>10}{one.idle:>10.1f}{one.clients:>9}"
                    f"{one.busy:>11.1f}{one.client:>14.1f}"
                )
    except KeyfrontError as error:
        print(f"front_memory: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

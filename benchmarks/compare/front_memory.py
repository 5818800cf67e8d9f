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
import grp
import os
import pwd
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.render import certificates

from ..worlds import processes

_REQUEST = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PREFORK = 40

_NGINX = """\
{user}
worker_processes 1;
worker_rlimit_nofile {slots};
daemon off;
pid {folder}/nginx.pid;
events {{ worker_connections {slots}; }}
http {{
    access_log off;
    keepalive_timeout 75s;
    client_body_temp_path {folder}/body;
    uwsgi_temp_path {folder}/uwsgi;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        location / {{ return 404; }}
    }}
}}
"""
_APACHE = """\
ServerRoot "{folder}"
DefaultRuntimeDir "{folder}"
PidFile "{folder}/apache.pid"
ServerName localhost
{user}
LoadModule mpm_{mpm}_module {modules}/mod_mpm_{mpm}.so
LoadModule authz_core_module {modules}/mod_authz_core.so
LoadModule ssl_module {modules}/mod_ssl.so
Listen 127.0.0.1:{port}
ErrorLog "{folder}/apache.log"
KeepAliveTimeout 75
SSLEngine on
SSLCertificateFile "{certificate}"
SSLCertificateKeyFile "{key}"
{processes}
"""
_EVENT = """\
ServerLimit 4
StartServers 4
ThreadsPerChild 32
MaxRequestWorkers 128
MaxSpareThreads 128
AsyncRequestWorkerFactor {factor}
"""
_PREFORKED = f"""\
ServerLimit {_PREFORK}
StartServers {_PREFORK}
MaxRequestWorkers {_PREFORK}
MinSpareServers {_PREFORK}
MaxSpareServers {_PREFORK + 1}
"""


class Memory(NamedTuple):
    """What a server's processes take together, in MiB, without and with clients."""

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


def measure(name: str, command: list[str], log: Path, port: int, clients: int) -> Memory:
    """Run a server and read its memory.

    :raises ServerError: it does not start, or does not answer
    """
    with processes.Process(name, command, log=log, stop=signal.SIGTERM) as server:
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


def servers(folder: Path, clients: int) -> Iterator[tuple[str, list[str], int, int]]:
    """Write the files of each server; gives its name, command, port and clients."""
    certificate, key = certificates.make(folder, "localhost")
    user = programs.front_user()
    values = {"folder": folder, "certificate": certificate, "key": key}
    if user is not None:
        os.chown(folder, pwd.getpwnam(user[0]).pw_uid, grp.getgrnam(user[1]).gr_gid)
    nginx = programs.system_program(("nginx",), "nginx")
    for slots in (1024, 16384):
        port = processes.free_port()
        config = folder / f"nginx-{slots}.conf"
        who = f"user {' '.join(user)};" if user else ""
        config.write_text(_NGINX.format(**values, user=who, slots=slots, port=port))
        command = [nginx, "-c", str(config), "-p", str(folder), "-e", str(folder / "nginx.log")]
        yield f"nginx, {slots} slots", command, port, min(clients, slots // 2)
    apache = programs.system_program(("apache2", "httpd"), "apache2-bin")
    modules = programs.apache_modules("mod_ssl.so", "apache2-bin")
    for mpm, limits, most in (
        ("event", _EVENT.format(factor=clients // 32 + 2), clients),
        ("prefork", _PREFORKED, _PREFORK - 1),
    ):
        port = processes.free_port()
        config = folder / f"{mpm}.conf"
        who = f"User {user[0]}\nGroup {user[1]}" if user else ""
        config.write_text(
            _APACHE.format(
                **values, user=who, modules=modules, mpm=mpm, port=port, processes=limits
            )
        )
        yield (
            f"Apache {mpm}", [apache, "-f", str(config), "-DFOREGROUND"], port,
            min(clients, most),
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=500, help="connections (default 500)")
    options = parser.parse_args(arguments)
    print(f"{'':<20} processes  idle MiB  clients  with them  KiB a client")
    try:
        with tempfile.TemporaryDirectory(prefix="front-memory-") as name:
            for label, command, port, clients in servers(Path(name), options.clients):
                one = measure(label, command, Path(name, "log"), port, clients)
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

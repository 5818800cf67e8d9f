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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.render import certificates

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
    """A process and its children: how many, and the MiB they take together."""
    children = Path(f"/proc/{master}/task/{master}/children").read_text(encoding="ascii").split()
    total = 0
    for pid in (str(master), *children):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return 1 + len(children), total / 1024


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


def measure(command: list[str], stop: signal.Signals, port: int, clients: int) -> Memory:
    """Run a server and read its memory.

    :raises ServerError: it does not start, or does not answer
    """
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Apache's prefork MPM ends its whole process group with it
        start_new_session=True,
    )
    try:
        _await(server, port)
        processes, idle = pss(server.pid)
        with connected(port, clients):
            return Memory(processes, idle, clients, pss(server.pid)[1])
    finally:
        server.send_signal(stop)
        server.communicate()


def _await(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 30
    before = (0, 0.0)
    while time.monotonic() < deadline:
        if server.poll() is not None:
            assert server.stderr is not None
            words = server.stderr.read().decode("utf-8", "replace").strip().splitlines()
            raise ServerError(f"{server.args!r} ended: {words[-1] if words else 'no word'}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            # all of its processes are there when nothing changes any more
            now = pss(server.pid)
            if now[0] > 1 and now[0] == before[0] and abs(now[1] - before[1]) < 0.05:
                return
            before = now
        time.sleep(0.3)
    raise ServerError(f"{server.args!r} does not answer")


def servers(
    folder: Path, clients: int
) -> Iterator[tuple[str, list[str], signal.Signals, int, int]]:
    """Each server's name, command, signal to stop, port and clients."""
    certificate, key = certificates.make(folder, "localhost")
    user = programs.front_user()
    values = {"folder": folder, "certificate": certificate, "key": key}
    if user is not None:
        os.chown(folder, pwd.getpwnam(user[0]).pw_uid, grp.getgrnam(user[1]).gr_gid)
    nginx = programs.system_program(("nginx",), "nginx")
    for slots in (1024, 16384):
        port = programs.claim("127.0.0.1:0", "127.0.0.1", 0)
        config = folder / f"nginx-{slots}.conf"
        who = f"user {' '.join(user)};" if user else ""
        config.write_text(_NGINX.format(**values, user=who, slots=slots, port=port))
        command = [nginx, "-c", str(config), "-p", str(folder), "-e", str(folder / "nginx.log")]
        yield f"nginx, {slots} slots", command, signal.SIGTERM, port, min(clients, slots // 2)
    apache = programs.system_program(("apache2", "httpd"), "apache2-bin")
    modules = programs.apache_modules("mod_ssl.so", "apache2-bin")
    for mpm, processes, most in (
        ("event", _EVENT.format(factor=clients // 32 + 2), clients),
        ("prefork", _PREFORKED, _PREFORK - 1),
    ):
        port = programs.claim("127.0.0.1:0", "127.0.0.1", 0)
        config = folder / f"{mpm}.conf"
        who = f"User {user[0]}\nGroup {user[1]}" if user else ""
        config.write_text(
            _APACHE.format(
                **values, user=who, modules=modules, mpm=mpm, port=port, processes=processes
            )
        )
        yield (
            f"Apache {mpm}", [apache, "-f", str(config), "-DFOREGROUND"], signal.SIGTERM, port,
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
            for label, command, stop, port, clients in servers(Path(name), options.clients):
                one = measure(command, stop, port, clients)
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

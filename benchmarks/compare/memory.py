"""Memory of uWSGI's workers, by when they load Keystone, and of nginx and Apache.

``fork`` makes a Keystone on SQLite in a temporary folder and serves it twice, as packaged: loaded
once and forked, and with ``lazy-apps`` loaded by each worker. Each time every worker answers at
least ``--requests`` requests, half ``GET /v3`` and half validations of one token, before the memory
is read: pages that requests write to are copied.

``front`` starts nginx, Apache's event MPM and its prefork MPM one after the other on a free
loopback port, with TLS, and reads what they take before clients connect and after each has made one
request and stays connected. ``keyfront plan`` goes by these figures (gateway/plan/costs.py).

PSS (proportional set size, /proc/PID/smaps_rollup) counts a page shared by n processes as 1/n in
each, so its sum over them is the memory they really take. RSS counts it n times.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from keyfront.common import programs
from keyfront.errors import ServerError
from keyfront.gateway.render import certificates
from keyfront.gateway.serve import lineups as serve_lineups
from keyfront.gateway.serve.lineups import Program

from .. import files
from ..lineups import stock_servers, uwsgi
from ..lineups.keystone import VALIDATION, VERSION, temporary
from ..lineups.uwsgi import Server
from ..results import Cell, Table
from ..servers import processes
from ..servers.ports import free_port, listening
from . import comparison
from .comparison import Comparison, Report

_REQUEST = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PREFORK = 40

_PREFORKED = dict.fromkeys(
    ("ServerLimit", "StartServers", "MaxRequestWorkers", "MinSpareServers"), _PREFORK
) | {"MaxSpareServers": _PREFORK + 1}


def _event(clients: int) -> dict[str, object]:
    return {
        "ServerLimit": 4,
        "StartServers": 4,
        "ThreadsPerChild": 32,
        "MaxRequestWorkers": 128,
        "MaxSpareThreads": 128,
        "AsyncRequestWorkerFactor": clients // 32 + 2,
    }


def ask(server: Server, token: str, stats: Path, requests: int, workers: int) -> None:
    """Send requests until every worker has answered so many.

    :param stats: the socket of uWSGI's own counts
    :raises ServerError: a worker answers too few, or not as it should
    """
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}
    fewest = 0
    for _ in range(200):
        for path, given in ((VERSION, {}), (VALIDATION, headers)):
            # more at a time than workers, so that all of them are woken
            for status, *_rest in server.answers(2 * workers, path, given):
                if status != 200:
                    raise ServerError(f"GET {path} is answered {status}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(stats))
            with client.makefile("rb") as answer:
                told = json.load(answer)
        fewest = min(worker["requests"] for worker in told["workers"])
        if fewest >= requests:
            return
    raise ServerError(f"a worker answered only {fewest} of {requests} requests")


def fork(workers: int, requests: int) -> Report:
    """Serve Keystone in both ways; return the table."""
    serve_lineups.check("uwsgi")
    rows: list[list[Cell]] = []
    with temporary() as (place, keystone):
        for label, lazy in (("before the fork", False), ("after (lazy-apps)", True)):
            folder = place / ("lazy" if lazy else "forked")
            folder.mkdir()
            state, environment = keystone.state, keystone.state.environment()
            with uwsgi.serving(state, folder, environment, lazy=lazy, processes=workers) as server:
                ask(server, keystone.token(server.url), folder / "stats.sock", requests, workers)
                pids = processes.family(server.process.pid)
                found = [processes.memory(pid) for pid in pids]
            pss, rss = ([one[kind] for one in found] for kind in ("Pss", "Rss"))
            figures = sum(pss), sum(rss), sum(pss[1:]) / workers
            rows.append([label, *(f"{x:.1f}" for x in figures)])
    columns = ["MiB of master and workers", "PSS", "RSS", "PSS a worker"]
    return Report([Table(name="fork", columns=columns, rows=rows)])


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


def run(program: Program, port: int, clients: int) -> list[Cell]:
    """Run a server; return its processes, their MiB, clients, MiB with them, KiB of each."""
    with stock_servers.started(program) as server:
        server.wait_until(lambda: port in listening())
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
            busy = pss(server.pid)[1]
    return [count, f"{idle:.1f}", clients, f"{busy:.1f}", f"{(busy - idle) * 1024 / clients:.1f}"]


def candidates(folder: Path, clients: int) -> Iterator[tuple[str, Program, int, int]]:
    """Write the files of each server; gives its name, program, port and clients."""
    certificate, key = certificates.make(folder, "localhost")
    tls = {"ssl_certificate": certificate, "ssl_certificate_key": key}
    user = (programs.front_user() or (None,))[0]
    for slots in (1024, 16384):
        port = free_port()
        nginx = stock_servers.nginx(
            folder,
            f"{processes.HOST}:{port} ssl",
            location=["return 404"],
            main={"worker_processes": 1, "worker_rlimit_nofile": slots},
            events={"worker_connections": slots},
            http={"keepalive_timeout": "75s", **tls},
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
        apache = stock_servers.apache(
            folder,
            f"{processes.HOST}:{port}",
            mpm=mpm,
            directives={**limits, "KeepAliveTimeout": 75},
            loaded=["ssl"],
            content=["SSLEngine on", *lines],
        )
        yield f"Apache {mpm}", apache, port, min(clients, most)


def front(clients: int) -> Report:
    """Measure each web server; return the table."""
    rows: list[list[Cell]] = []
    with files.folders() as (folder, _):
        # a web server's own user has to reach its files
        folder.chmod(0o711)
        for label, program, port, some in candidates(folder, clients):
            rows.append([label, *run(program, port, some)])
    columns = ["MiB", "processes", "idle", "clients", "with them", "KiB a client"]
    return Report([Table(name="front", columns=columns, rows=rows)])


COMPARISONS = {
    "fork": Comparison(
        title="Memory of uWSGI's workers, by when they load Keystone",
        measure=lambda options: fork(options.processes, options.requests),
        numbers=(("--processes", 8, "workers"), ("--requests", 20, "of a worker, at least")),
        distributions=("keystone", "uWSGI", "pyuwsgi"),
    ),
    "front": Comparison(
        title="Memory of web servers and their clients",
        measure=lambda options: front(options.clients),
        numbers=(("--clients", 500, "connections"),),
        programs=("nginx", "apache2"),
    ),
}
main = partial(comparison.main, "memory", __doc__, COMPARISONS)

if __name__ == "__main__":
    raise SystemExit(main())

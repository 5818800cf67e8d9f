"""Memory of uWSGI workers: the application loaded once and forked, against loaded by each worker.

    python -m keyfront.benchmarks.compare.fork_memory [--processes 8] [--requests 20]

Makes a Keystone on SQLite in a temporary folder and serves it twice with the same options but
``lazy-apps``. Each time every worker answers at least ``--requests`` requests, half ``GET /v3`` and
half validations of one token, before the memory is read: pages that requests write to are copied.

PSS (proportional set size, /proc/PID/smaps_rollup) counts a page shared by n processes as 1/n in
each, so its sum over master and workers is the memory they really take. RSS counts it n times.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common import programs
from keyfront.errors import MissingPartError, ServerError

BIN = Path(sys.executable).parent
PASSWORD = "measured"
APP = "keyfront.gateway.uwsgi:application"

# For an application that does not know the registry itself.
WRAPPER = """
from keyfront.common.fork import registry
registry.install()
from {module} import {name} as application
registry.loaded()
"""


class Memory(NamedTuple):
    """Sums over a uWSGI master and its workers, in MiB, and the requests they had answered."""

    pss: float
    rss: float
    worker_pss: float
    """Mean over the workers alone."""
    requests: int
    fewest: int
    """The requests of the worker that answered fewest."""


def make_state(folder: Path) -> dict[str, str]:
    """Bootstrap a Keystone in ``folder``; gives the environment that serves it.

    :raises ServerError: keystone-manage failed
    """
    (folder / "keystone.conf").write_text(
        f"[database]\nconnection = sqlite:///{folder}/keystone.db\n"
        f"[fernet_tokens]\nkey_repository = {folder}/fernet\n"
        f"[fernet_receipts]\nkey_repository = {folder}/fernet\n"
        f"[credential]\nkey_repository = {folder}/credential\n"
    )
    owner = ("--keystone-user", str(os.getuid()), "--keystone-group", str(os.getgid()))
    for command in (
        ("db_sync",),
        ("fernet_setup", *owner),
        ("credential_setup", *owner),
        ("bootstrap", "--bootstrap-password", PASSWORD),
    ):
        done = subprocess.run(
            [str(BIN / "keystone-manage"), "--config-file", f"{folder}/keystone.conf", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerError(f"keystone-manage {command[0]} failed: {done.stderr[-500:]}")
    return {**os.environ, "OS_KEYSTONE_CONFIG_DIR": str(folder), "PYTHONPATH": _path(folder)}


def _path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def served(
    folder: Path, environment: dict[str, str], app: str, processes: int, lazy: bool
) -> Iterator[tuple[int, str, Path]]:
    """A running uWSGI with all its workers loaded: the master's pid, the URL, the stats socket.

    :raises ServerError: uWSGI ended, or its workers were not ready within two minutes
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name = "lazy" if lazy else "forked"
    log, stats = folder / f"{name}.log", folder / f"{name}.stats"
    options = [
        *("--master", "--need-app", "--single-interpreter", "--enable-threads"),
        *("--py-call-uwsgi-fork-hooks", "--buffer-size=65535", "--processes", str(processes)),
        *("--http-socket", f"127.0.0.1:{port}", "--stats", str(stats), "--stats-no-cores"),
        *("--virtualenv", programs.python_home(), "--module", app),
        *(["--lazy-apps"] if lazy else []),
    ]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [str(BIN / "uwsgi"), *options],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    try:

        def ready() -> bool:
            if server.poll() is not None:
                raise ServerError(f"uWSGI ended: {log.read_text()[-800:]}")
            text = log.read_text()
            loads = processes if lazy else 1
            return text.count("WSGI app 0") >= loads and (
                text.count("spawned uWSGI worker") == processes
            )

        _wait(ready, f"{processes} workers of {app}")
        yield server.pid, f"http://127.0.0.1:{port}", stats
    finally:
        # the workers too, and when the master has died by itself
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"not ready after 120 s: {what}")
        time.sleep(0.1)


def ask(url: str, stats: Path, requests: int, processes: int) -> list[int]:
    """Send requests until every worker has answered ``requests``; gives the workers' counts."""
    login = {
        "auth": {
            "identity": {
                "methods": ["password"],
                "password": {
                    "user": {"name": "admin", "domain": {"id": "default"}, "password": PASSWORD}
                },
            },
            "scope": {"project": {"name": "admin", "domain": {"id": "default"}}},
        }
    }
    post = urllib.request.Request(
        f"{url}/v3/auth/tokens", json.dumps(login).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=60) as answer:
        token = answer.headers["X-Subject-Token"]
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}
    kinds = [
        urllib.request.Request(f"{url}/v3"),
        urllib.request.Request(f"{url}/v3/auth/tokens", headers=headers),
    ]

    def send(number: int) -> None:
        with urllib.request.urlopen(kinds[number % 2], timeout=60) as answer:
            answer.read()

    counts = [0]
    with ThreadPoolExecutor(2 * processes) as pool:
        for _ in range(200):
            # more at a time than workers, so that all of them are woken
            list(pool.map(send, range(4 * processes)))
            counts = [worker["requests"] for worker in _stats(stats)["workers"]]
            if min(counts) >= requests:
                return counts
    raise ServerError(f"a worker answered only {min(counts)} of {requests} requests")


def _stats(path: Path) -> Any:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with client.makefile("rb") as answer:
            return json.load(answer)


def memory(master: int, counts: list[int]) -> Memory:
    """Read the memory of ``master`` and its children, the workers."""
    workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    pss, rss = zip(*(_rollup(pid) for pid in (str(master), *workers)), strict=True)
    return Memory(
        sum(pss) / 1024,
        sum(rss) / 1024,
        sum(pss[1:]) / len(workers) / 1024,
        sum(counts),
        min(counts),
    )


def _rollup(pid: str) -> tuple[int, int]:
    """PSS and RSS of a process in KiB."""
    fields = dict(
        line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return int(fields["Pss:"]), int(fields["Rss:"])


def measure(app: str, processes: int, requests: int) -> dict[str, Memory]:
    """Memory by way of loading: ``before fork`` and ``after fork (lazy-apps)``.

    :raises MissingPartError: uWSGI or Keystone is not installed next to this Python
    :raises ServerError: a part did not start
    """
    for program, install in (("uwsgi", "uwsgi"), ("keystone-manage", "keystone")):
        if not (BIN / program).exists():
            raise MissingPartError(f"{BIN / program} is missing: pip install {install}")
    results = {}
    with tempfile.TemporaryDirectory(prefix="fork-memory-") as name:
        folder = Path(name)
        environment = make_state(folder)
        if not app.startswith("keyfront."):
            module, _, attribute = app.partition(":")
            wrapper = WRAPPER.format(module=module, name=attribute or "application")
            (folder / "measured.py").write_text(wrapper)
            app = "measured:application"
        for label, lazy in (("before fork", False), ("after fork (lazy-apps)", True)):
            with served(folder, environment, app, processes, lazy) as (master, url, stats):
                results[label] = memory(master, ask(url, stats, requests, processes))
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8, help="workers (default 8)")
    parser.add_argument("--requests", type=int, default=20, help="least per worker (default 20)")
    parser.add_argument("--app", default=APP, help=f"MODULE:NAME (default {APP})")
    options = parser.parse_args(arguments)
    results = measure(options.app, options.processes, options.requests)
    print(f"{options.app}, {options.processes} workers and their master, MiB")
    print(f"{'loaded':<24}{'PSS sum':>9}{'RSS sum':>9}{'PSS/worker':>12}{'requests':>10}{'min':>6}")
    for label, one in results.items():
        print(
            f"{label:<24}{one.pss:>9.1f}{one.rss:>9.1f}{one.worker_pss:>12.1f}"
            f"{one.requests:>10}{one.fewest:>6}"
        )
    before, after = results.values()
    print(
        f"{'ratio after / before':<24}{after.pss / before.pss:>9.2f}{after.rss / before.rss:>9.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

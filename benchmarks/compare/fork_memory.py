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
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.serve import lineups as serve_lineups

from ..lineups import uwsgi
from ..lineups.keystone import VALIDATION, VERSION, Keystone
from ..lineups.uwsgi import Server
from ..worlds import processes
from ..worlds.ports import free_port
from ..worlds.processes import HOST

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


@contextmanager
def served(
    folder: Path, environment: Mapping[str, str], app: str, processes: int, lazy: bool
) -> Iterator[tuple[Server, Path]]:
    """Run a uWSGI until the block ends; gives it with all workers loaded, and its stats socket.

    :raises ServerError: uWSGI ended, or its workers were not ready in time
    """
    own, port = folder / ("lazy" if lazy else "forked"), free_port()
    own.mkdir()
    stats = own / "stats"
    options = {
        "single-interpreter": "true",
        "py-call-uwsgi-fork-hooks": "true",
        "buffer-size": 65535,
        "processes": processes,
        "http-socket": f"{HOST}:{port}",
        "stats": stats,
        "stats-no-cores": "true",
        "module": app,
        **({"lazy-apps": "true"} if lazy else {}),
    }
    serving = uwsgi.serving(
        own, uwsgi.plain(options), port, environment, lazy=lazy, processes=processes
    )
    with serving as server:
        yield server, stats


def ask(server: Server, token: str, stats: Path, requests: int, processes: int) -> list[int]:
    """Send requests until every worker has answered so many; return the workers' counts.

    :raises ServerError: a worker answers too few, or not as it should
    """
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}
    counts = [0]
    for _ in range(200):
        for path, given in ((VERSION, {}), (VALIDATION, headers)):
            # more at a time than workers, so that all of them are woken
            for status, *_rest in server.answers(2 * processes, path, given):
                if status != 200:
                    raise ServerError(f"GET {path} is answered {status}")
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
    """Read the memory of a master and its children, the workers."""
    found = [processes.memory(pid) for pid in processes.family(master)]
    pss, rss = ([one[kind] for one in found] for kind in ("Pss", "Rss"))
    return Memory(sum(pss), sum(rss), sum(pss[1:]) / (len(pss) - 1), sum(counts), min(counts))


def measure(app: str, workers: int, requests: int) -> dict[str, Memory]:
    """Return the memory by way of loading: ``before fork`` and ``after fork (lazy-apps)``.

    :raises MissingPartError: uWSGI or Keystone is not installed next to this Python
    :raises ServerError: a part did not start
    """
    serve_lineups.check("uwsgi")
    results = {}
    with tempfile.TemporaryDirectory(prefix="fork-memory-", dir=temporary_parent()) as name:
        folder = Path(name)
        keystone = Keystone(folder / "state")
        keystone.make()
        path = os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**keystone.state.environment(), "PYTHONPATH": path}
        if not app.startswith("keyfront."):
            module, _, attribute = app.partition(":")
            wrapper = WRAPPER.format(module=module, name=attribute or "application")
            (folder / "measured.py").write_text(wrapper)
            app = "measured:application"
        for label, lazy in (("before fork", False), ("after fork (lazy-apps)", True)):
            with served(folder, environment, app, workers, lazy) as (server, stats):
                counts = ask(server, keystone.token(server.url), stats, requests, workers)
                results[label] = memory(server.process.pid, counts)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8, help="workers (default 8)")
    parser.add_argument("--requests", type=int, default=20, help="least per worker (default 20)")
    parser.add_argument("--app", default=APP, help=f"MODULE:NAME (default {APP})")
    options = parser.parse_args(arguments)
    try:
        results = measure(options.app, options.processes, options.requests)
    except KeyfrontError as error:
        print(f"fork_memory: {error}", file=sys.stderr)
        return 2
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

"""The load generators: programs of the system, each told what to do and read in its own words.

Which is right where, and what they cannot tell, docs/benchmarks.md says. wrk and siege get headers
from files, ab by its arguments, which every user of the machine can read. siege is told a number of
requests, since ended by its clock it may hang.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from keyfront.common import programs
from keyfront.common.machine import cores as all_cores
from keyfront.errors import OptionError, ServerError

from ..servers import processes
from ..servers.processes import Process
from . import sender, wrk
from .measured import CLOSED, OPEN, Load, Request, percentile

PATIENCE = 30
"""Seconds until an answer that does not come has failed."""

_PACKAGES = {"wrk": "wrk", "ab": "apache2-utils", "siege": "siege", "wrk-status": "wrk"}
CONSTANT = "constant"
GENERATORS = (*_PACKAGES, CONSTANT)
# More than any run sends.
_ENDLESS = 100_000_000
# The cores that a generator may run on; None: all.
_On: TypeAlias = Collection[int] | None
# By how much a trial of siege is outdone by the next at most.
_GROWTH = 50

_SIEGE = """\
limit = {connections}
failures = {endless}
parser = false
connection = close
protocol = HTTP/1.1
timeout = {patience}
json_output = true
logging = false
verbose = false
color = off
benchmark = true
{headers}
"""


def check(name: str) -> None:
    """Find out that a generator is there.

    :raises OptionError: there is none of this name
    """
    if name not in GENERATORS:
        raise OptionError("--generator", name, f"one of {', '.join(GENERATORS)}")
    if name != CONSTANT:
        _program(name)


def _program(name: str) -> str:
    return programs.system_program((name.partition("-")[0],), _PACKAGES[name])


def closed(
    name: str,
    request: Request,
    *,
    connections: int,
    seconds: int,
    most: int | None = None,
    cores: _On = None,
) -> Load:
    """Keep ``connections`` requests under way for ``seconds``.

    :param name: one of :data:`GENERATORS` but ``constant``
    :param most: good answers after which ``wrk``, and requests after which ``ab`` ends earlier, at
        least 1; ``siege`` sends so many however long they take, a whole number for each
        connection. ``wrk-status`` must have none
    """
    return _CLOSED[name](request, connections, seconds, most, cores)


def constant(request: Request, *, rate: float, seconds: float, cores: _On = None) -> Load:
    """Send ``rate`` requests per second at even distances for ``seconds``, whatever happens."""
    parts = urlsplit(request.url)
    job = sender.job(
        (parts.hostname or "", parts.port or 80),
        [wire("GET", request.url, request.headers)],
        ((number / rate, 0) for number in range(int(rate * seconds))),
        start=time.monotonic() + 0.5,
        patience=PATIENCE,
    )
    return sent(sending(job, CONSTANT, cores), seconds + 2 * PATIENCE)


def wire(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return a request as it is sent."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {target or '/'} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def sending(job: bytes, name: str, cores: _On = None) -> Process:
    """Start a sender on a job, made by :func:`.sender.job`."""
    command = [sys.executable, "-m", "keyfront.benchmarks.load.sender"]
    return Process(name, command, cores=cores, stdin=job)


def sent(process: Process, seconds: float) -> Load:
    """Return what a sender found.

    :param seconds: for which to wait at most
    """
    out, _, _ = processes.finished(process, seconds)
    return parse_sent(json.loads(out))


def parse_sent(found: dict[str, Any]) -> Load:
    """Read what a sender printed."""
    return Load(
        generator=CONSTANT,
        loop=OPEN,
        good=found["good"],
        failures=Counter(found["failures"]),
        seconds=found["seconds"],
        latencies=Counter(dict(found["latencies"])),
        generator_cpu=found["cpu"],
        late=percentile(dict(found["late"]), 0.99),
    )


def _finished(
    command: Sequence[str], request: Request, seconds: float, cores: _On, **more: Any
) -> tuple[str, float]:
    """Run a generator; return what it printed, and the CPU seconds it took."""
    process = Process(Path(command[0]).name, [*command, request.url], cores=cores, **more)
    out, _, cpu = processes.finished(process, seconds)
    return out, cpu


def _wrk(
    request: Request, connections: int, seconds: int, most: int | None, cores: _On,
    *, statuses: bool = False,
) -> Load:  # fmt: skip
    return wrk.run(
        request.url, request.headers, seconds=seconds, connections=connections,
        statuses=statuses, most=most, cores=cores,
    )  # fmt: skip


def _ab(request: Request, connections: int, seconds: int, most: int | None, cores: _On) -> Load:
    with tempfile.TemporaryDirectory(prefix="keyfront-ab-") as folder:
        table = Path(folder, "percentiles.csv")
        command = [_program("ab"), "-q", "-r", "-l", "-s", str(PATIENCE), "-e", str(table)]
        command += ["-c", str(connections), "-t", str(seconds), "-n", str(most or _ENDLESS)]
        for name, value in request.headers.items():
            command += ["-H", f"{name}: {value}"]
        out, cpu = _finished(command, request, seconds + 2 * PATIENCE, cores)
        rows = table.read_text(encoding="ascii") if table.exists() else ""
    return parse_ab(out, rows, cpu)


def parse_ab(output: str, percentiles: str, cpu: float) -> Load:
    """Read ab's report and the table that ``-e`` writes.

    ab counts a request with a wrong status as complete, and others as complete and failed.
    """
    figures = {}
    for line in output.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and name.strip():
            figures[name.strip()] = words[0]
    failures: Counter[str] = Counter()
    for line in output.splitlines():
        if line.strip().startswith("(Connect:"):
            for part in line.strip().strip("()").split(","):
                kind, _, number = part.partition(":")
                failures[kind.strip().lower()] = int(number)
    failures["status"] = int(figures.get("Non-2xx responses", 0))
    complete = int(figures.get("Complete requests", 0))
    failures = +failures
    if not failures and int(figures.get("Failed requests", 0)):
        failures["unknown"] = int(figures["Failed requests"])
    good = max(complete - failures.total(), 0)
    latencies: Counter[int] | None = None
    if good and not failures:
        # a hundredth of the answers at each percentile
        latencies = Counter()
        shares = {int(row[0]): float(row[1]) for row in csv.reader(percentiles.splitlines()[1:])}
        for percent in range(1, 101):
            found = shares.get(percent, 0.0)
            latencies[round(found * 1000)] += good * percent // 100 - good * (percent - 1) // 100
        latencies = +latencies
    return Load(
        generator="ab",
        loop=CLOSED,
        good=good,
        failures=failures,
        seconds=float(figures.get("Time taken for tests", 0.0)),
        latencies=latencies,
        generator_cpu=cpu,
    )


def _siege(request: Request, connections: int, seconds: int, most: int | None, cores: _On) -> Load:
    """Let each connection send as many requests as take about ``seconds``, found by trial.

    Ended by its clock (``-t``), siege 4.0 cancels its threads wherever they are
    (PTHREAD_CANCEL_ASYNCHRONOUS, until 4.1.4). One that is in malloc takes the lock of its arena
    with it, and all that free something there wait for ever.
    """
    with tempfile.TemporaryDirectory(prefix="keyfront-siege-") as folder:
        rc = Path(folder, "siegerc")
        rc.touch(mode=0o600)
        headers = [f"header = {name}: {value}" for name, value in request.headers.items()]
        settings = {"connections": max(connections, 255), "endless": _ENDLESS}
        rc.write_text(_SIEGE.format(**settings, patience=PATIENCE, headers="\n".join(headers)))
        command = [_program("siege"), "-R", str(rc), "-c", str(connections), "-r"]
        each = math.ceil(most / connections) if most else 1
        # a server may be slower than it was in the trial
        patience = 4 * seconds + 4 * PATIENCE
        while True:
            # it writes a folder of its own to the home folder
            told = [*command, str(each)]
            out, cpu = _finished(told, request, patience, cores, environment={"HOME": folder})
            found = parse_siege(out, cpu, len(cores) if cores else all_cores())
            if most or found.seconds >= seconds / 2:
                return found
            # it tells hundredths; what was refused at once tells little about what will not be
            each = math.ceil(each * min(seconds / max(found.seconds, 0.01), _GROWTH))


def parse_siege(output: str, cpu: float, threads: int = 1) -> Load:
    """Read siege's JSON, which other lines may stand before.

    :param threads: cores that siege may use
    """
    try:
        found = json.loads(output[output.index("{") :])
    except ValueError:
        raise ServerError(f"siege printed no result: {output[-300:]}") from None
    failures = Counter({"failed": int(found["failed_transactions"])})
    return Load(
        generator="siege",
        loop=CLOSED,
        good=int(found["successful_transactions"]),
        failures=+failures,
        seconds=float(found["elapsed_time"]),
        longest=float(found["longest_transaction"]) * 1000,
        generator_cpu=cpu,
        threads=threads,
    )


_CLOSED: dict[str, Callable[..., Load]] = {
    "wrk": _wrk,
    "wrk-status": partial(_wrk, statuses=True),
    "ab": _ab,
    "siege": _siege,
}

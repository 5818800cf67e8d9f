"""A flood of wrong passwords: who is still served, without and with a limit of logins.

    python -m keyfront.benchmarks.compare.login_flood [--seconds 20] [--tries 500] [--limit 2]

Makes a Keystone on SQLite in a temporary folder, with bcrypt's 12 rounds, and serves it twice by
the packaged uWSGI (2 processes of 2 threads): once without and once with ``KEYFRONT_LOGIN_LIMIT``.
Each time, for so many seconds quietly and for so many under a flood:

* a service validates one token 20 times a second, on a connection of its own each time;
* three users, who have logged in before, log in from addresses of their own, one each second in
  turn (``known``);
* another logs in each three seconds, from an address that has never been heard of (``newcomers``);
* in the flood another process tries ``--tries`` passwords a second, each from another address
  (127.64.0.0/10) and for one of 20 users that there are, those three among them: for a name that
  there is not, Keystone hashes nothing. At most 100 tries are under way at a time.

A login succeeds if it is answered 201 within ten seconds. Recovery is the time from the end of the
flood until a stranger's login, tried again each 0.1 s for a minute, succeeds. Clients, flood and
Keystone have the same cores, so what the flood takes to send counts as well: compare the columns.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from keyfront.common.counters import VARIABLE as NODE
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.login_limit import VARIABLE as LIMIT
from keyfront.gateway.serve import lineups as serve_lineups

from ..lineups import uwsgi
from ..lineups.keystone import VALIDATION, Keystone, ask, login
from ..worlds.ports import free_port
from ..worlds.processes import HOST

_PATIENCE = 10.0
_HOPELESS = 60.0
_USERS = ("anna", "berta", "clara")
_VICTIMS = (*_USERS, *(f"victim-{number}" for number in range(17)))
_NEWCOMER = "newcomer"
_PASSWORD = "right-and-long-enough"
# Threads of the flood: each waits for its answer, so fewer send less than was asked for.
_SENDERS = 100


@dataclass
class Phase:
    """What clients saw, quietly or in a flood.

    :param from_range: tells the newcomers' addresses of one phase from those of the other
    """

    from_range: int
    validations: list[float] = field(default_factory=list)
    failed: int = 0
    known: Counter[int] = field(default_factory=Counter)
    newcomers: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)


@dataclass
class Result:
    """One server's."""

    quiet: Phase
    flood: Phase
    tried: Counter[int]
    recovery: float


def _send(port: int, source: str, method: str, headers: dict[str, str], body: object) -> int:
    """Return the status of an answer; 0 for none."""
    try:
        with closing(
            HTTPConnection(HOST, port, timeout=_PATIENCE, source_address=(source, 0))
        ) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, VALIDATION, data, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
    except (OSError, HTTPException):
        return 0


def _paced(over: threading.Event, rate: float, act: Callable[[int], object]) -> None:
    """Act so many times a second, also if that takes long: no wait is left out of what is seen."""
    began = time.monotonic()
    number = 0
    while not over.wait(max(0.0, began + number / rate - time.monotonic())):
        act(number)
        number += 1


def _flood(port: int, rate: float, seconds: float, results: Any) -> None:
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def send(first: int) -> None:
        def attempt(number: int) -> None:
            one = first + _SENDERS * number
            source = f"127.{64 + (one >> 16) % 64}.{(one >> 8) % 256}.{one % 254 + 1}"
            user = _VICTIMS[one % len(_VICTIMS)]
            statuses[_send(port, source, "POST", {}, login(user, "wrong", None))] += 1

        _paced(over, rate / _SENDERS, attempt)

    threads = [threading.Thread(target=send, args=(one,)) for one in range(_SENDERS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    results.put(dict(statuses))


@contextmanager
def _clients(port: int, headers: dict[str, str], phase: Phase) -> Iterator[None]:
    over = threading.Event()

    def validate(number: int) -> None:
        began = time.perf_counter()
        if _send(port, "127.1.0.1", "GET", headers, None) == 200:
            phase.validations.append(time.perf_counter() - began)
        else:
            phase.failed += 1

    def log_in(number: int) -> None:
        which = number % len(_USERS)
        began = time.perf_counter()
        body = login(_USERS[which], _PASSWORD, None)
        phase.known[_send(port, f"127.2.0.{which + 1}", "POST", {}, body)] += 1
        phase.times.append(time.perf_counter() - began)

    def come(number: int) -> None:
        body = login(_NEWCOMER, _PASSWORD, None)
        source = f"127.{4 + phase.from_range}.0.{number % 250 + 1}"
        phase.newcomers[_send(port, source, "POST", {}, body)] += 1

    threads = [
        threading.Thread(target=_paced, args=(over, 20.0, validate)),
        threading.Thread(target=_paced, args=(over, 1.0, log_in)),
        threading.Thread(target=_paced, args=(over, 1 / 3, come)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _recovery(port: int) -> float:
    began = time.monotonic()
    body = login(_NEWCOMER, _PASSWORD, None)
    while _send(port, "127.3.0.1", "POST", {}, body) != 201:
        if time.monotonic() - began > _HOPELESS:
            return math.inf
        time.sleep(0.1)
    return time.monotonic() - began


def measure(keystone: Keystone, folder: Path, limit: int, seconds: float, tries: float) -> Result:
    """Return what clients of a server saw.

    :param limit: limit of logins at once; 0 for none
    :raises ServerError: it did not start, or does not answer as it should
    """
    folder.mkdir()
    port = free_port()
    environment = {
        **keystone.environment(folder, folder / "cache"),
        "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "12",
        NODE: str(folder / "node"),
        LIMIT: str(limit),
    }
    text = uwsgi.packaged(keystone.state, port, folder, threads=2)
    with uwsgi.serving(folder, text, port, environment) as server:
        headers = keystone.validation_headers(server.url)
        token = headers["X-Subject-Token"]
        for name in (*_VICTIMS, _NEWCOMER):
            if not ask(server.url, "GET", f"/v3/users?name={name}", token)["users"]:
                user = {"user": {"name": name, "password": _PASSWORD, "domain_id": "default"}}
                ask(server.url, "POST", "/v3/users", token, user)
        for number, name in enumerate(_USERS, 1):
            address = f"127.2.0.{number}"
            if _send(port, address, "POST", {}, login(name, _PASSWORD, None)) != 201:
                raise ServerError(f"{name} cannot log in")
        quiet, flood = Phase(0), Phase(1)
        with _clients(port, headers, quiet):
            time.sleep(seconds)
        results: Any = multiprocessing.Queue()
        flooding = multiprocessing.Process(target=_flood, args=(port, tries, seconds + 2, results))
        flooding.start()
        time.sleep(1)
        with _clients(port, headers, flood):
            time.sleep(seconds)
        # A second of the flood is left; its last answers may take as long as they want.
        time.sleep(1)
        recovery = _recovery(port)
        tried = Counter(results.get())
        flooding.join()
    return Result(quiet, flood, tried, recovery)


def _at(times: list[float], part: float) -> str:
    if not times:
        return "none"
    seconds = sorted(times)[min(len(times) - 1, int(part * len(times)))]
    return f"{seconds * 1e3:.1f} ms"


def _succeeded(logins: Counter[int]) -> str:
    return f"{logins[201]} of {logins.total()}"


def _recovered(result: Result) -> str:
    seconds = result.recovery
    return f"{seconds:.1f} s" if seconds < _HOPELESS else f"over {_HOPELESS:.0f} s"


def _print(results: dict[str, Result]) -> None:
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("validations, p50, quiet", lambda x: _at(x.quiet.validations, 0.5)),
        ("validations, p50, flood", lambda x: _at(x.flood.validations, 0.5)),
        ("validations, p99, quiet", lambda x: _at(x.quiet.validations, 0.99)),
        ("validations, p99, flood", lambda x: _at(x.flood.validations, 0.99)),
        ("validations sent, flood", lambda x: f"{len(x.flood.validations) + x.flood.failed}"),
        ("unanswered in 10 s", lambda x: f"{x.flood.failed}"),
        ("known users, quiet", lambda x: _succeeded(x.quiet.known)),
        ("known users, flood", lambda x: _succeeded(x.flood.known)),
        ("their p50, flood", lambda x: _at(x.flood.times, 0.5)),
        ("newcomers, quiet", lambda x: _succeeded(x.quiet.newcomers)),
        ("newcomers, flood", lambda x: _succeeded(x.flood.newcomers)),
        ("tries answered 401", lambda x: f"{x.tried[401]}"),
        ("tries refused", lambda x: f"{x.tried[429] + x.tried[503]}"),
        ("tries without an answer", lambda x: f"{x.tried[0]}"),
        ("recovery", _recovered),
    ]
    print(f"{'':<28}" + "".join(f"{name:>16}" for name in results))
    for label, show in rows:
        print(f"{label:<28}" + "".join(f"{show(one):>16}" for one in results.values()))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20, help="of each phase (default 20)")
    parser.add_argument("--tries", type=float, default=500, help="passwords a second (default 500)")
    parser.add_argument("--limit", type=int, default=2, help="logins at a time (default 2)")
    options = parser.parse_args(arguments)
    try:
        serve_lineups.check("uwsgi")
        with tempfile.TemporaryDirectory(prefix="login-flood-") as name:
            folder = Path(name)
            keystone = Keystone(folder / "state")
            keystone.make()
            results = {}
            for label, limit in (("without", 0), (f"limit {options.limit}", options.limit)):
                results[label] = measure(
                    keystone, folder / str(limit), limit, options.seconds, options.tries
                )
    except KeyfrontError as error:
        print(f"login_flood: {error}", file=sys.stderr)
        return 2
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    _print(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

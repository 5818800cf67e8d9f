"""A flood of wrong passwords: who is still served, without and with a limit of logins.

    python -m keyfront.benchmarks.compare.login_flood [--seconds 10] [--rounds 2] [--limit 2]
                                                      [--times 100 | --tries N] [--rate 100]
                                                      [--only LABEL]

Makes a Keystone on SQLite in a temporary folder, with bcrypt's 12 rounds, and serves it by the
packaged uWSGI (2 processes of 2 threads): without a limit of logins and with
``KEYFRONT_LOGIN_LIMIT``. First it counts how many logins a second that Keystone answers when four
clients do nothing else: its capacity. Then, in turn, for so many seconds each:

* *quiet*: a service validates one token ``--rate`` times a second, each on a connection of its own;
  three users, who have logged in before, log in from addresses of their own, one each second in
  turn (``known``); another logs in each three seconds, from an address that has never been heard
  of (``newcomers``);
* *aside*: the same, while the flood goes to another process on the same cores, which refuses each
  try at once without looking at it: what the flood's sender takes from clients and Keystone;
* *flood*: the same, and the flood goes to Keystone. Its first three seconds are the *onset*, in
  which nobody knows yet that it is one; in them only the service asks. In every other round it
  comes before *aside*.

The flood is ``--times`` the capacity (or ``--tries`` a second), at random times, each try from
another address (127.64.0.0/10) and for one of 20 users that there are, those three among them: for
a name that there is not, Keystone hashes nothing. At most 1000 tries are under way at a time. Its
sender and the process aside have the lowest priority (nice 19), and yet the same cores as Keystone
and its clients: compare *flood* with *aside*. The ratios of p99 are of the two phases of a round;
shown are their median, the lowest and the highest: p99 of one round rests on few answers.

A validation's time begins when it was due, so none is left out while the server or the client
stands still. A login succeeds if it is answered 201 within ten seconds. Recovery is the time from
the end of the flood until a stranger's login, tried again each 0.1 s for a minute, succeeds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from keyfront.common.counters import VARIABLE as NODE
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import KeyfrontError, ServerError
from keyfront.gateway.login_limit import VARIABLE as LIMIT
from keyfront.gateway.serve import lineups as serve_lineups

from ..lineups import uwsgi
from ..lineups.keystone import VALIDATION, Keystone, ask, login
from ..load import generators, sender
from ..load.measured import Load, percentile
from ..worlds import processes
from ..worlds.ports import free_port
from ..worlds.processes import HOST, Process
from .comparison import closed_rate
from .ratios import Spread

_PATIENCE = 10.0
_HOPELESS = 60.0
_USERS = ("anna", "berta", "clara")
_VICTIMS = (*_USERS, *(f"victim-{number}" for number in range(17)))
_NEWCOMER = "newcomer"
_PASSWORD = "right-and-long-enough"
# Tries under way at a time.
_MOST = 1000
_LOWEST = 19
# Seconds that a flood lasts before its phase begins, and for which its onset is looked at.
_LEAD = 3.0
_PHASES = ("quiet", "aside", "onset", "flood")


@dataclass
class Phase:
    """What clients saw in all rounds of a phase.

    :param validations: answers by their microseconds; what was not answered took ten seconds
    :param failed: validations without an answer, or with another one
    :param p99: milliseconds of each round
    """

    validations: Counter[int] = field(default_factory=Counter)
    failed: int = 0
    p99: list[float] = field(default_factory=list)
    known: Counter[int] = field(default_factory=Counter)
    newcomers: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)

    def validated(self, load: Load) -> None:
        """Add what the validating service saw in a round."""
        failed = load.failures.total()
        found = Counter(load.latencies)
        if failed:
            found[int(_PATIENCE * 1e6)] += failed
        self.failed += failed
        self.validations += found
        self.p99.append(percentile(found, 0.99))


@dataclass
class Result:
    """One server's."""

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in _PHASES})
    tried: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)


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


def _flooding(port: int, rate: float, seconds: float, begins: float) -> Process:
    """Start a flood."""
    chance = random.Random(rate)
    schedule: list[tuple[float, int]] = []
    due = chance.expovariate(rate)
    while due < seconds:
        schedule.append((due, len(schedule) % len(_VICTIMS)))
        due += chance.expovariate(rate)
    url = f"http://{HOST}:{port}{VALIDATION}"
    bodies = [json.dumps(login(name, "wrong", None)).encode() for name in _VICTIMS]
    job = sender.job(
        (HOST, port),
        [generators.wire("POST", url, {}, body) for body in bodies],
        schedule,
        start=begins,
        patience=_PATIENCE,
        sources=[
            f"127.{64 + (one >> 16) % 64}.{(one >> 8) % 256}.{one % 254 + 1}"
            for one in range(len(schedule) + 1)
        ],
        kept=False,
        most=_MOST,
        niceness=_LOWEST,
    )
    return generators.sending(job, "flood", None)


def _refuse_all(listening: socket.socket, parent: int) -> None:
    """Refuse each login, without looking at it, until the parent process has ended."""
    os.nice(_LOWEST)
    body = b'{"error": {"code": 503, "message": "No.", "title": "Service Unavailable"}}'
    answer = (
        b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    listening.settimeout(1)
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        with connection, suppress(OSError):
            connection.settimeout(_PATIENCE)
            # a try is sent whole, and is shorter than a segment of loopback
            connection.recv(65536)
            connection.sendall(answer)


@contextmanager
def _aside() -> Iterator[int]:
    """Give the port of a process that refuses each login."""
    with socket.create_server((HOST, 0), backlog=_MOST) as listening:
        process = multiprocessing.Process(
            target=_refuse_all, args=(listening, os.getpid()), daemon=True
        )
        process.start()
        try:
            yield listening.getsockname()[1]
        finally:
            process.kill()
            process.join()


@contextmanager
def _logins(port: int, phase: Phase, newcomers: int) -> Iterator[None]:
    """Have users log in.

    :param newcomers: part of the addresses of those who have never been there
    """
    over = threading.Event()

    def log_in(number: int) -> None:
        which = number % len(_USERS)
        began = time.perf_counter()
        body = login(_USERS[which], _PASSWORD, None)
        phase.known[_send(port, f"127.2.0.{which + 1}", "POST", {}, body)] += 1
        phase.times.append(time.perf_counter() - began)

    def come(number: int) -> None:
        body = login(_NEWCOMER, _PASSWORD, None)
        source = f"127.4.{newcomers}.{number % 250 + 1}"
        phase.newcomers[_send(port, source, "POST", {}, body)] += 1

    threads = [
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


def _recovery(port: int, source: str) -> float:
    """Return the seconds until somebody can log in from an address where he has not been before."""
    began = time.monotonic()
    body = login(_NEWCOMER, _PASSWORD, None)
    while _send(port, source, "POST", {}, body) != 201:
        if time.monotonic() - began > _HOPELESS:
            return math.inf
        time.sleep(0.1)
    return time.monotonic() - began


def _validating(
    port: int, headers: dict[str, str], rate: float, seconds: float, begins: float
) -> Process:
    """Start a service that validates a token."""
    url = f"http://{HOST}:{port}{VALIDATION}"
    schedule = [(number / rate, 0) for number in range(int(seconds * rate))]
    job = sender.job(
        (HOST, port),
        [generators.wire("GET", url, headers)],
        schedule,
        start=begins,
        patience=_PATIENCE,
        sources=["127.1.0.1"],
        kept=False,
    )
    return generators.sending(job, "validations", None)


@contextmanager
def _served(
    keystone: Keystone, folder: Path, environment: dict[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Serve a Keystone; gives its port, and the headers of a validation."""
    folder.mkdir()
    port = free_port()
    environment = {
        **keystone.environment(folder, folder / "cache"),
        "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "12",
        NODE: str(folder / "node"),
        **environment,
    }
    text = uwsgi.packaged(keystone.state, port, folder, threads=2)
    with uwsgi.serving(folder, text, port, environment) as server:
        headers = keystone.validation_headers(server.url)
        token = headers["X-Subject-Token"]
        for name in (*_VICTIMS, _NEWCOMER):
            if not ask(server.url, "GET", f"/v3/users?name={name}", token)["users"]:
                user = {"user": {"name": name, "password": _PASSWORD, "domain_id": "default"}}
                ask(server.url, "POST", "/v3/users", token, user)
        yield port, headers


def capacity(keystone: Keystone, folder: Path, seconds: float) -> float:
    """Return how many logins a second a server without a limit answers.

    :raises ServerError: it did not start, or does not answer as it should
    """
    with _served(keystone, folder, {LIMIT: "0"}) as (port, _):

        def log_in(number: int) -> None:
            body = login(_VICTIMS[number], _PASSWORD, None)
            if _send(port, f"127.5.0.{number + 1}", "POST", {}, body) != 201:
                raise ServerError(f"{_VICTIMS[number]} cannot log in")

        return closed_rate([partial(log_in, number) for number in range(4)], seconds)


def measure(
    keystone: Keystone,
    folder: Path,
    environment: dict[str, str],
    *,
    seconds: float,
    rounds: int,
    tries: float,
    rate: float,
) -> Result:
    """Return what clients of a server saw.

    :param environment: more of it, for the server
    :param seconds: the length of each phase
    :param tries: passwords a second
    :param rate: validations a second
    :raises ServerError: it did not start, or does not answer as it should
    """
    result = Result()
    with _served(keystone, folder, environment) as (port, headers), _aside() as aside:
        for number, name in enumerate(_USERS, 1):
            address = f"127.2.0.{number}"
            if _send(port, address, "POST", {}, login(name, _PASSWORD, None)) != 201:
                raise ServerError(f"{name} cannot log in")
        for number in range(rounds):
            order = ("quiet", "flood", "aside") if number % 2 else ("quiet", "aside", "flood")
            for part, name in enumerate(order):
                phase = result.phases[name]
                begins = time.monotonic() + 1.5
                lead = 0.0 if name == "quiet" else _LEAD
                flood = onset = None
                if name != "quiet":
                    target = port if name == "flood" else aside
                    flood = _flooding(target, tries, lead + seconds + 1, begins)
                if name == "flood":
                    onset = _validating(port, headers, rate, lead, begins)
                service = _validating(port, headers, rate, seconds, begins + lead)
                time.sleep(begins + lead - time.monotonic())
                with _logins(port, phase, 3 * number + part):
                    phase.validated(generators.sent(service, seconds + 3 * _PATIENCE))
                if onset is not None:
                    result.phases["onset"].validated(generators.sent(onset, 2 * _PATIENCE))
                    # its last answers may take as long as they want
                    time.sleep(max(0.0, begins + lead + seconds + 1 - time.monotonic()))
                    result.recovery.append(_recovery(port, f"127.3.0.{number % 250 + 1}"))
                if flood is not None:
                    out, _, _ = processes.finished(flood, 4 * _PATIENCE)
                    if name == "flood":
                        found = json.loads(out)
                        result.tried.update(found["statuses"])
                        result.tried.update(found["failures"])
    return result


def _at(times: list[float], part: float) -> str:
    if not times:
        return "none"
    seconds = sorted(times)[min(len(times) - 1, int(part * len(times)))]
    return f"{seconds * 1e3:.1f} ms"


def _succeeded(logins: Counter[int]) -> str:
    return f"{logins[201]} of {logins.total()}"


def _validations(label: str, part: float) -> Callable[[Result], str]:
    return lambda result: f"{percentile(result.phases[label].validations, part):.1f} ms"


def _ratio(over: str) -> Callable[[Result], str]:
    """Return what shows the flood's p99 over that of another phase."""

    def show(result: Result) -> str:
        pairs = zip(result.phases["flood"].p99, result.phases[over].p99, strict=True)
        return Spread.of([one / other for one, other in pairs]).text(2)

    return show


def _recovered(result: Result) -> str:
    seconds = max(result.recovery)
    return f"{seconds:.1f} s" if seconds < _HOPELESS else f"over {_HOPELESS:.0f} s"


def _print(results: dict[str, Result]) -> None:
    def flood(show: Callable[[Phase], str], name: str = "flood") -> Callable[[Result], str]:
        return lambda result: show(result.phases[name])

    rows: list[tuple[str, Callable[[Result], str]]] = []
    for part in (0.5, 0.99):
        for name in _PHASES:
            rows.append((f"validations, p{part * 100:.0f}, {name}", _validations(name, part)))
    rows += [
        ("p99 of flood / aside", _ratio("aside")),
        ("p99 of flood / quiet", _ratio("quiet")),
        ("validations in the flood", flood(lambda x: f"{x.validations.total()}")),
        ("not answered as they should", flood(lambda x: f"{x.failed}")),
        ("known users, quiet", flood(lambda x: _succeeded(x.known), "quiet")),
        ("known users, flood", flood(lambda x: _succeeded(x.known))),
        ("their p50, quiet", flood(lambda x: _at(x.times, 0.5), "quiet")),
        ("their p50, flood", flood(lambda x: _at(x.times, 0.5))),
        ("newcomers, quiet", flood(lambda x: _succeeded(x.newcomers), "quiet")),
        ("newcomers, flood", flood(lambda x: _succeeded(x.newcomers))),
        ("tries answered 401", lambda x: f"{x.tried['401']}"),
        ("tries refused", lambda x: f"{x.tried['429'] + x.tried['503']}"),
        ("tries without an answer", lambda x: f"{_unanswered(x.tried)}"),
        ("recovery", _recovered),
    ]
    print(f"{'':<30}" + "".join(f"{name:>24}" for name in results))
    for label, show in rows:
        print(f"{label:<30}" + "".join(f"{show(one):>24}" for one in results.values()))


def _unanswered(tried: Counter[str]) -> int:
    return sum(
        count
        for kind, count in tried.items()
        if not kind.isdigit() and not kind.startswith("status ")
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10, help="of each phase (default 10)")
    parser.add_argument("--rounds", type=int, default=2, help="of all phases (default 2)")
    parser.add_argument("--limit", type=int, default=2, help="logins at a time (default 2)")
    parser.add_argument(
        "--times", type=float, default=100, help="the flood, as a multiple of the capacity (100)"
    )
    parser.add_argument("--tries", type=float, help="passwords a second, instead of --times")
    parser.add_argument("--rate", type=float, default=100, help="validations a second (100)")
    parser.add_argument(
        "--only", action="append", choices=("without", "limit"), help="measure only this"
    )
    options = parser.parse_args(arguments)
    limit = str(options.limit)
    servers = {
        "without": {LIMIT: "0"},
        "limit": {LIMIT: limit},
    }
    try:
        serve_lineups.check("uwsgi")
        with tempfile.TemporaryDirectory(prefix="login-flood-", dir=temporary_parent()) as name:
            folder = Path(name)
            keystone = Keystone(folder / "state")
            keystone.make()
            tries = options.tries
            if not tries:
                found = capacity(keystone, folder / "capacity", options.seconds)
                tries = options.times * found
                print(f"capacity: {found:.1f} logins a second; the flood: {tries:.0f}")
            results = {
                label: measure(
                    keystone,
                    folder / label,
                    environment,
                    seconds=options.seconds,
                    rounds=options.rounds,
                    tries=tries,
                    rate=options.rate,
                )
                for label, environment in servers.items()
                if not options.only or label in options.only
            }
    except KeyfrontError as error:
        print(f"login_flood: {error}", file=sys.stderr)
        return 2
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    _print(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

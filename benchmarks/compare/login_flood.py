"""A flood of wrong passwords: who is still served, without and with a limit of logins.

Makes a Keystone on SQLite in a temporary folder, with bcrypt's 12 rounds, and serves it by the
packaged uWSGI (2 processes of 2 threads): without a limit of logins, with
``KEYFRONT_LOGIN_LIMIT``, and with that and one more process for logins alone, as by ``keyfront
render --login-processes 1``. First it counts how many logins a second that Keystone answers when
four clients do nothing else: its capacity. Then, in turn, for so many seconds each:

* *rush*: a service validates one token ``--rate`` times a second, each on a connection of its own;
  40 users, who have logged in before, log in at once, from addresses of their own. It is looked at
  for three seconds;
* *quiet*: the service goes on; three other users, who have logged in before, log in from addresses
  of their own, one each second in turn (``known``); another logs in each three seconds, from an
  address that has never been heard of (``newcomers``);
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

import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from keyfront.common.counters import VARIABLE as NODE
from keyfront.errors import ServerError
from keyfront.gateway.login_limit import OWN
from keyfront.gateway.login_limit import VARIABLE as LIMIT
from keyfront.gateway.serve import lineups as serve_lineups

from ..lineups import uwsgi
from ..lineups.keystone import VALIDATION, Keystone, login, temporary
from ..load import generators, sender
from ..load.arguments import say
from ..load.measured import Load, percentile
from ..results import Cell, Table
from ..servers import processes
from ..servers.ports import free_port
from ..servers.processes import HOST, Process
from . import comparison
from .comparison import Comparison, Report, closed_rate
from .ratios import Spread, by_round

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
# Those of a rush, each with his address.
_CROWD = [(f"127.6.0.{place}", name) for place, name in enumerate(2 * _VICTIMS, 1)]
_PHASES = ("rush", "quiet", "aside", "onset", "flood")


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


def _log_in(port: int, source: str, name: str) -> int:
    """Return the status of the answer to a right password; 0 for none."""
    body = login(name, _PASSWORD, None)
    return processes.status(port, VALIDATION, body, source=source, patience=_PATIENCE)


def _paced(rate: float, act: Callable[[int], object], over: threading.Event) -> None:
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
    bodies = [json.dumps(login(name, "wrong", None)).encode() for name in _VICTIMS]
    sources = [
        f"127.{64 + (one >> 16) % 64}.{(one >> 8) % 256}.{one % 254 + 1}"
        for one in range(len(schedule) + 1)
    ]
    wires = [_wire(port, "POST", {}, body) for body in bodies]
    return _sent(port, wires, schedule, begins, sources, most=_MOST, niceness=_LOWEST)


def _wire(port: int, method: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    return generators.wire(method, f"http://{HOST}:{port}{VALIDATION}", headers, body)


def _sent(
    port: int,
    wires: list[bytes],
    schedule: list[tuple[float, int]],
    begins: float,
    sources: Sequence[str],
    **told: int,
) -> Process:
    job = sender.job(
        (HOST, port), wires, schedule, start=begins, patience=_PATIENCE, sources=sources,
        kept=False, **told,
    )  # fmt: skip
    return generators.sending(job, "the sender")


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


def _logins(port: int, phase: Phase, newcomers: int) -> AbstractContextManager[object]:
    """Have users log in until a block ends.

    :param newcomers: part of the addresses of those who have never been there
    """
    def log_in(number: int) -> None:
        which = number % len(_USERS)
        began = time.perf_counter()
        phase.known[_log_in(port, f"127.2.0.{which + 1}", _USERS[which])] += 1
        phase.times.append(time.perf_counter() - began)

    def come(number: int) -> None:
        source = f"127.4.{newcomers}.{number % 250 + 1}"
        phase.newcomers[_log_in(port, source, _NEWCOMER)] += 1

    return comparison.meanwhile(partial(_paced, 1.0, log_in), partial(_paced, 1 / 3, come))


def _recovery(port: int, source: str) -> float:
    """Return the seconds until somebody can log in from an address where he has not been before."""
    began = time.monotonic()
    while _log_in(port, source, _NEWCOMER) != 201:
        if time.monotonic() - began > _HOPELESS:
            return math.inf
        time.sleep(0.1)
    return time.monotonic() - began


def _validating(
    port: int, headers: dict[str, str], rate: float, seconds: float, begins: float
) -> Process:
    """Start a service that validates a token."""
    schedule = [(number / rate, 0) for number in range(int(seconds * rate))]
    return _sent(port, [_wire(port, "GET", headers)], schedule, begins, ["127.1.0.1"])


@contextmanager
def _served(
    keystone: Keystone, folder: Path, limit: str, *, own: bool = False
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Serve a Keystone; gives its port, that of logins, and the headers of a validation."""
    folder.mkdir()
    environment = {
        **keystone.environment(folder, folder / "cache"),
        "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "12",
        NODE: str(folder / "node"),
        LIMIT: limit,
        OWN: str(int(own)),
    }
    how: dict[str, Any] = {}
    if own:
        how = {"login_port": free_port(), "processes": uwsgi.PROCESSES + 1}
    with uwsgi.serving(keystone.state, folder, environment, threads=2, **how) as server:
        headers = keystone.validation_headers(server.url)
        admin = keystone.admin(server.url)
        for name in (*_VICTIMS, _NEWCOMER):
            admin.made("user", name, password=_PASSWORD, domain_id="default")
        yield server.port, how.get("login_port", server.port), headers


def _rush(port: int, logins: int, headers: dict[str, str], rate: float, result: Result) -> Load:
    """Have many users log in at once; returns what the validating service saw meanwhile."""
    begins = time.monotonic() + 1.5
    service = _validating(port, headers, rate, _LEAD, begins)
    time.sleep(begins - time.monotonic())
    with ThreadPoolExecutor(len(_CROWD)) as pool:
        done = pool.map(lambda one: _log_in(logins, *one), _CROWD)
        result.phases["rush"].known.update(done)
    return generators.sent(service, 2 * _PATIENCE)


def capacity(keystone: Keystone, folder: Path, seconds: float) -> float:
    """Return how many logins a second a server without a limit answers."""
    with _served(keystone, folder, "0") as (port, _, _):

        def log_in(number: int) -> None:
            if _log_in(port, f"127.5.0.{number + 1}", _VICTIMS[number]) != 201:
                raise ServerError(f"{_VICTIMS[number]} cannot log in")

        return closed_rate([partial(log_in, number) for number in range(4)], seconds)


def measure(
    keystone: Keystone, folder: Path, limit: str, tries: float, options: Namespace, *, own: bool
) -> Result:
    """Return what clients of a server saw.

    :param limit: the limit of logins
    :param own: true if logins have a process of their own
    :param tries: passwords a second
    """
    seconds, rate = options.seconds, options.rate
    result = Result()
    with _served(keystone, folder, limit, own=own) as (port, logins, headers), _aside() as aside:
        there = [(f"127.2.0.{number}", name) for number, name in enumerate(_USERS, 1)]
        for source, name in (*there, *_CROWD):
            if _log_in(logins, source, name) != 201:
                raise ServerError(f"{name} cannot log in")
        for number in range(options.rounds):
            result.phases["rush"].validated(_rush(port, logins, headers, rate, result))
            order = ("quiet", "flood", "aside") if number % 2 else ("quiet", "aside", "flood")
            for part, name in enumerate(order):
                phase = result.phases[name]
                begins = time.monotonic() + 1.5
                lead = 0.0 if name == "quiet" else _LEAD
                flood = onset = None
                if name != "quiet":
                    target = logins if name == "flood" else aside
                    flood = _flooding(target, tries, lead + seconds + 1, begins)
                if name == "flood":
                    onset = _validating(port, headers, rate, lead, begins)
                service = _validating(port, headers, rate, seconds, begins + lead)
                time.sleep(begins + lead - time.monotonic())
                with _logins(logins, phase, 3 * number + part):
                    phase.validated(generators.sent(service, seconds + 3 * _PATIENCE))
                if onset is not None:
                    result.phases["onset"].validated(generators.sent(onset, 2 * _PATIENCE))
                    # its last answers may take as long as they want
                    time.sleep(max(0.0, begins + lead + seconds + 1 - time.monotonic()))
                    result.recovery.append(_recovery(logins, f"127.3.0.{number % 250 + 1}"))
                if flood is not None:
                    out, _, _ = processes.finished(flood, 4 * _PATIENCE)
                    if name == "flood":
                        found = json.loads(out)
                        result.tried.update(found["statuses"])
                        result.tried.update(found["failures"])
    return result


def figures(result: Result) -> dict[str, str]:
    """Return what is told of one server, by the words of a row."""
    found = {}
    for part in (0.5, 0.99):
        for name, phase in result.phases.items():
            shown = f"{percentile(phase.validations, part):.1f} ms"
            found[f"validations, p{part * 100:.0f}, {name}"] = shown
    flood = result.phases["flood"]
    for name in ("aside", "quiet"):
        pairs = by_round(flood.p99, result.phases[name].p99)
        found[f"p99 of flood / {name}"] = Spread.of(pairs).text(2)
    found["logins of the rush"] = _succeeded(result.phases["rush"].known)
    found["validations in the flood"] = str(flood.validations.total())
    found["not answered as they should"] = str(flood.failed)
    for name in ("quiet", "flood"):
        phase = result.phases[name]
        times = f"{statistics.median(phase.times) * 1e3:.1f} ms" if phase.times else "none"
        found |= {
            f"known users, {name}": _succeeded(phase.known),
            f"their p50, {name}": times,
            f"newcomers, {name}": _succeeded(phase.newcomers),
        }
    tried, seconds = result.tried, max(result.recovery)
    kinds = [kind for kind in tried if not (kind.isdigit() or kind.startswith("status "))]
    return found | {
        "tries answered 401": str(tried["401"]),
        "tries refused": str(tried["429"] + tried["503"]),
        "tries without an answer": str(sum(tried[kind] for kind in kinds)),
        "recovery": f"{seconds:.1f} s" if seconds < _HOPELESS else f"over {_HOPELESS:.0f} s",
    }


def _succeeded(logins: Counter[int]) -> str:
    return f"{logins[201]} of {logins.total()}"


def report(found: dict[str, Result]) -> Report:
    """Return the table."""
    told = [figures(one) for one in found.values()]
    rows: list[list[Cell]] = [[label, *(one[label] for one in told)] for label in told[0]]
    return Report([Table(name="flood", columns=["", *found], rows=rows)])


def _measured(options: Namespace) -> Report:
    serve_lineups.check("uwsgi")
    limit = str(options.limit)
    servers = comparison.chosen(
        {"without": ("0", False), "limit": (limit, False), "own": (limit, True)}, options.only
    )
    with temporary() as (folder, keystone):
        tries = options.tries
        if not tries:
            most = capacity(keystone, folder / "capacity", options.seconds)
            tries = options.times * most
            say(f"capacity: {most:.1f} logins a second; the flood: {tries:.0f}")
        return report(
            {
                label: measure(keystone, folder / label, limit, tries, options, own=own)
                for label, (limit, own) in servers.items()
            }
        )


COMPARISON = Comparison(
    title="A flood of wrong passwords",
    measure=_measured,
    numbers=(
        ("--seconds", 10, "of each phase"),
        ("--rounds", 2, "of all phases"),
        ("--limit", 2, "logins at a time"),
        ("--times", 100, "the flood, as a multiple of the capacity"),
        ("--tries", 0, "passwords a second, instead of --times; 0: by --times"),
        ("--rate", 100, "validations a second"),
    ),
    only="limit",
    distributions=("keystone", "uWSGI", "pyuwsgi", "bcrypt"),
)
main = partial(comparison.main, "login_flood", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

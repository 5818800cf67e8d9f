"""An overload of changes that lasts: who is answered, who is refused, and after how long.

Makes a Keystone on SQLite in a temporary folder and serves it by nginx and uWSGI as ``keyfront
render`` has them, with the token cache. First it counts how many changes of users a second it
makes while eight clients do nothing else: its capacity. Then changes come at ``--times`` the
capacity, whatever becomes of them. Ten seconds later, in which the queue has grown to what it will
be, ``--rate`` of each come every second for ``--seconds``:

* a validation that the token cache answers;
* one that Keystone is asked about, with a query of which the token cache keeps nothing;
* a list of services with a query of its own, so that Keystone is asked for it, too.

A request's time begins when it was due, and those are the times of what was answered, not of what
was refused. The changes of the first ten seconds are among the changes. Clients and servers have
the same cores.
"""

from __future__ import annotations

import itertools
import json
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial

from ..lineups.keystone import VALIDATION, ask, temporary
from ..lineups.lineup import TUNED, Lineup, served
from ..load import generators, sender
from ..load.arguments import say
from ..load.measured import Load, percentile
from ..results import Cell, Table
from ..servers.processes import HOST
from . import comparison
from .comparison import Comparison, Report, closed_rate

_USERS = 20
_CLIENTS = 8
_COUNTING = 5.0
_LEAD = 10.0
_PATIENCE = 30.0
_REFUSED = "status 503"


def _sent(
    port: int, name: str, wires: list[bytes], rate: float, seconds: float, begins: float
) -> Callable[[], Load]:
    """Begin to send requests in turn; return what waits for their answers."""
    schedule = [(number / rate, number % len(wires)) for number in range(int(seconds * rate))]
    job = sender.job((HOST, port), wires, schedule, start=begins, patience=_PATIENCE, kept=False)
    process = generators.sending(job, name)
    return lambda: generators.sent(process, _LEAD + seconds + 3 * _PATIENCE)


def capacity(url: str, token: str, users: list[str], seconds: float) -> float:
    """Return how many changes a second are made, with eight clients at a time.

    :param url: the server's URL, without a path
    :param token: an administrator's token
    :param users: the identifiers of users to change, at least eight
    :param seconds: seconds of the count
    """
    numbers = itertools.count()

    def change(user: str) -> None:
        body = {"user": {"description": str(next(numbers))}}
        ask(url, "PATCH", f"/v3/users/{user}", token, body)

    return closed_rate([partial(change, user) for user in users[:_CLIENTS]], seconds)


def measure(options: Namespace) -> dict[str, Load]:
    """Return what became of each kind of request."""
    seconds, times, rate = options.seconds, options.times, options.rate
    with (
        temporary(say) as (_, keystone),
        served(Lineup("nginx+uwsgi", TUNED, cached=True), keystone) as found,
    ):
        url, port = found.url, found.port
        headers = keystone.validation_headers(url)
        token = keystone.token(url)
        admin = keystone.admin(url)
        names = [admin.made("user", f"overload-{number}") for number in range(_USERS)]
        most = capacity(url, token, names, _COUNTING)
        say(f"{most:.0f} changes a second are made; {times * most:.0f} come")
        known = {"X-Auth-Token": token}
        change = json.dumps({"user": {"description": "changed"}}).encode()
        begins = time.monotonic() + 1.5
        wires = [generators.wire("PATCH", f"{url}/v3/users/{x}", known, change) for x in names]
        flood = _sent(port, "changes", wires, times * most, _LEAD + seconds, begins)
        begins += _LEAD
        lists = [f"{url}/v3/services?name={number}" for number in range(int(rate * seconds))]
        others = {
            "validations, known": [generators.wire("GET", url + VALIDATION, headers)],
            "validations, asked": [generators.wire("GET", f"{url}{VALIDATION}?asked", headers)],
            "lists": [generators.wire("GET", one, known) for one in lists],
        }
        ends = {
            name: _sent(port, name, wires, rate, seconds, begins) for name, wires in others.items()
        }
        loads = {name: end() for name, end in ends.items()}
        return {**loads, "changes": flood()}


def report(loads: dict[str, Load]) -> Report:
    """Return the table."""
    rows: list[list[Cell]] = []
    for name, load in loads.items():
        refused = load.failures[_REFUSED]
        counts = load.good + load.failed, load.good, refused, load.failed - refused
        times = (
            f"{percentile(load.latencies, part):.0f} ms" if load.latencies else None
            for part in (0.5, 0.99)
        )
        rows.append([name, *counts, *times])
    columns = ["", "sent", "answered", "refused", "other", "p50", "p99"]
    return Report([Table(name="overload", columns=columns, rows=rows)])


COMPARISON = Comparison(
    title="An overload of changes",
    measure=lambda options: report(measure(options)),
    numbers=(
        ("--seconds", 20, "how long to look"),
        ("--times", 3, "changes, by the capacity"),
        ("--rate", 4, "other requests a second"),
    ),
    distributions=("keystone", "uWSGI", "pyuwsgi"),
    programs=("nginx",),
)
main = partial(comparison.main, "overload", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

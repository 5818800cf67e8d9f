"""Measures how long clients wait at a reload: keyfront's, beside that of the server itself.

Each topology is served twice: with Keystone's and Debian's own settings, and as ``keyfront render``
has it (gevent: as ``keyfront serve``). The first is reloaded as its documents say, uWSGI by SIGHUP
and Apache by SIGUSR1 (``graceful``), the second by ``keyfront reload``. Meanwhile clients send
``GET /v3``, each on a connection of its own and with a pause after each answer, so that they wait
for the reload and not for one another.

Counted is who was under way between the signal and the moment at which the new application serves
alone. The goal is a p99 below a second with no answer missing and none but 200; what misses it in
every reload fails. Profile ``small`` and a single daemon of mod_wsgi are not measured: they pause
for as long as Keystone takes to load.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.errors import ServerError

from .. import proc
from ..lineups import lineup
from ..lineups.keystone import VERSION, Keystone, temporary
from ..lineups.lineup import SERVE, TOPOLOGIES, TUNED, Lineup, Served
from ..load.arguments import say
from ..results import Cell, Table
from ..servers.processes import family, status
from . import comparison
from .comparison import Comparison, Report
from .goals import MET, MISSED, UNCLEAR

PAUSE = 0.2
"""Seconds between an answer and the next request of the same client."""

GOAL_SECONDS = 1.0
_PATIENCE = 120.0
_REST_SECONDS = 3.0


class Answer(NamedTuple):
    """One request: when it began, by the monotonic clock, and what became of it."""

    begun: float
    seconds: float
    #: Of HTTP; 0 if there was no answer.
    status: int


class Reload(NamedTuple):
    """The clients' experience in some time: requests, seconds, and who got no answer or another."""

    requests: int
    p99: float
    longest: float
    failed: int
    #: Seconds from the signal until the new application served alone.
    took: float = 0.0

    @property
    def meets(self) -> bool:
        """True if it is as good as a reload has to be."""
        return not self.failed and self.p99 <= GOAL_SECONDS


def noticed(answers: Iterable[Answer], begin: float, end: float) -> Reload:
    """Sum up who was under way between two moments.

    :raises ServerError: nobody was
    """
    found = [x for x in answers if x.begun < end and x.begun + x.seconds > begin]
    if not found:
        raise ServerError("no request was under way in a reload")
    seconds = sorted(x.seconds for x in found)
    # the least that 99 % do not exceed
    p99 = seconds[math.ceil(0.99 * len(seconds)) - 1]
    failed = sum(x.status != 200 for x in found)
    return Reload(len(found), p99, seconds[-1], failed, end - begin)


def judge(reloads: Sequence[Reload]) -> str:
    """Say how the goal was met by all reloads of a line-up: met, missed, or by some only."""
    good = [one.meets for one in reloads]
    return MET if all(good) else UNCLEAR if any(good) else MISSED


class Clients:
    """Clients that ask while :meth:`asking` is open, each once at a time."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._answers: list[list[Answer]] = [[] for _ in range(count)]

    def asking(self) -> AbstractContextManager[object]:
        """Have them ask until a block ends."""
        return comparison.meanwhile(*(partial(self._ask, own) for own in self._answers))

    def _ask(self, answers: list[Answer], over: threading.Event) -> None:
        while not over.wait(PAUSE):
            begun = time.monotonic()
            found = status(self._port, VERSION, patience=_PATIENCE)
            answers.append(Answer(begun, time.monotonic() - begun, found))

    def until(self, moment: float) -> list[Answer]:
        """Wait until each has had an answer to a request of after this moment; return all.

        :raises ServerError: one of them hangs
        """
        deadline = time.monotonic() + _PATIENCE
        while any(not own or own[-1].begun < moment for own in self._answers):
            if time.monotonic() > deadline:
                raise ServerError(f"a client had no answer for {_PATIENCE:.0f} s after a reload")
            time.sleep(0.01)
        return [answer for own in self._answers for answer in own]


def _reload_stock(served: Served) -> None:
    """Reload as the server's documents say; return when none of the former processes is left."""
    # uWSGI is in front of nobody; of Apache with mod_wsgi there is no other program
    process = served.processes[0]
    former = set(family(process.pid)) - {process.pid}
    number = signal.SIGHUP if process.name == "uwsgi" else signal.SIGUSR1
    process.send(number)
    deadline = time.monotonic() + _PATIENCE
    while (
        any(Path(f"/proc/{pid}").exists() for pid in former) or status(served.port, VERSION) != 200
    ):
        served.check()
        if time.monotonic() > deadline:
            raise ServerError(f"{served.lineup}: not reloaded within {_PATIENCE:.0f} s")
        time.sleep(0.02)


def _reload_ours(served: Served) -> None:
    """Reload by keyfront's command."""
    (command,) = (one for one in served.programs if one.reload)
    assert command.reload is not None
    done = proc.ran(command.reload)
    if done.returncode:
        raise ServerError(f"{served.lineup}: {(done.stdout + done.stderr).strip()}")


def lineups(topology: str) -> tuple[Lineup, Lineup]:
    """Return what is compared: stock, and ours."""
    tuning = SERVE if topology == "gevent" else TUNED
    return Lineup(topology, "stock"), Lineup(topology, tuning, cached=True)


@contextmanager
def _serving(one: Lineup, keystone: Keystone) -> Iterator[Served]:
    with lineup.served(one, keystone, managed=True) as served:
        # every worker has answered once
        for _ in range(20):
            status(served.port, VERSION)
        yield served


def measure(
    one: Lineup, keystone: Keystone, *, clients: int, reloads: int
) -> tuple[Reload, list[Reload]]:
    """Serve a line-up and reload it under load.

    :returns: what clients noticed without a reload, and of each one
    """
    act = _reload_stock if one.tuning == "stock" else _reload_ours
    with _serving(one, keystone) as served:
        those = Clients(served.port, clients)

        def seen(act: Callable[[], object]) -> Reload:
            begin = time.monotonic()
            act()
            end = time.monotonic()
            return noticed(those.until(end), begin, end)

        with those.asking():
            rest = seen(partial(time.sleep, _REST_SECONDS))
            return rest, [seen(partial(act, served)) for _ in range(reloads)]


def row(name: str, rest: Reload, reloads: Sequence[Reload]) -> list[Cell]:
    """Return a row of the table: medians of the reloads, but for the sum of failures."""
    took, p99, longest = (
        statistics.median(getattr(one, field) for one in reloads)
        for field in ("took", "p99", "longest")
    )
    requests, failed = (sum(getattr(one, x) for one in reloads) for x in ("requests", "failed"))
    seconds = (f"{x:.2f}" for x in (rest.p99, p99, longest))
    return [name, f"{took:.1f}", *seconds, f"{failed} of {requests}"]


def _measured(options: Namespace) -> Report:
    rows, verdicts = [], []
    topologies = comparison.chosen(dict.fromkeys(TOPOLOGIES), options.only)
    with temporary() as (_, keystone):
        for topology in topologies:
            for one in lineups(topology):
                say(f"serving {one}")
                rest, found = measure(
                    one, keystone, clients=options.clients, reloads=options.reloads
                )
                rows.append(row(str(one), rest, found))
                if one.tuning != "stock":
                    goal = f"{topology}: p99 <= {GOAL_SECONDS:g} s and nobody failed"
                    verdicts.append((goal, judge(found)))
    columns = ["", "reload, s", "p99 without, s", "p99, s", "longest, s", "failed"]
    caption = (
        f"GET {VERSION}, {options.clients} clients, medians of {options.reloads} reloads: "
        f"`{options.command}`."
    )
    return Report([Table(name="reload", columns=columns, rows=rows, caption=caption)], verdicts)


COMPARISON = Comparison(
    title="What clients notice of a reload",
    measure=_measured,
    numbers=(("--clients", 50, "who ask"), ("--reloads", 2, "of each line-up")),
    only="nginx",
    distributions=("keystone", "uWSGI", "pyuwsgi", "mod_wsgi"),
    programs=("nginx", "apache2"),
)
main = partial(comparison.main, "reload", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

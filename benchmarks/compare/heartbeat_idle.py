"""Measures the cost of 300 AMQP connections kept alive: CPU of the thread, the service's requests.

    python -m keyfront.benchmarks.compare.heartbeat_idle [--rounds 12] [--seconds 120]

On one RabbitMQ of its own, for a process that is not patched (``none``) or patched by eventlet or
gevent:

- the CPU time of the heartbeat's thread, by the kernel's own clock of it, with 300 idle connections
  and a beat every 30 s, over ``--seconds``; and with a beat every 0.3 s, divided by 100, which
  leaves out what does not come with the beats but counts a hundred times as many;
- requests per second of a service under uWSGI, with one process, that has 300 connections kept,
  against the same without a connection, loaded by wrk in turns; both are started anew each round.

Medians are printed, and the ratio as a median over the pairs with the lowest and the highest. Ends
with status 1 if a goal was missed: see ``goals.py``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import ServerError

from ..lineups import uwsgi
from ..load import wrk
from ..load.measured import Load
from ..worlds import rabbitmq
from ..worlds.ports import free_port
from ..worlds.processes import HOST
from . import comparison, heartbeat_worker
from .comparison import say
from .goals import HEARTBEAT_PERCENT, HEARTBEAT_REQUESTS, MET, MISSED
from .heartbeat_worker import PATCHES, Task
from .ratios import Spread, by_round, in_words

ROUNDS = 12
QUICK_ROUNDS = 2
# Seconds. Several beats of each connection in the first, of the second a hundred times as many.
IDLE, QUICK_IDLE = 120, 20
FASTER = 100
FAST_SECONDS, QUICK_FAST_SECONDS = 15, 3
INTERVAL = 30.0
CONNECTIONS = 300
# Seconds of load, twice in a round, and how many requests are under way.
LOADED = 1
CLIENTS = 4


class Idle(NamedTuple):
    """The thread of one idle process."""

    percent: float
    """Of a core."""
    beats: float
    """Per second."""
    microseconds: float
    """Of CPU for each, all else that it does included."""


class Results(NamedTuple):
    """All that was measured, by the patch of the process."""

    direct: dict[str, Idle]
    """At the interval itself."""
    scaled: dict[str, Idle]
    """At a hundredth of it; the percentage and the beats are divided by 100."""
    rates: dict[str, list[float]]
    """Requests per second in each round, by side and patch: ``kept, gevent``."""


def look_at(port: int, patch: str, *, seconds: float, fast_seconds: float) -> tuple[Idle, Idle]:
    """Measure the thread of idle connections, at the interval and at a hundredth of it."""
    task = Task(port, patch=patch, connections=CONNECTIONS, interval=INTERVAL, seconds=seconds)
    direct = Idle(**heartbeat_worker.run("idle", task))
    fast = task._replace(interval=INTERVAL / FASTER, seconds=fast_seconds)
    found = Idle(**heartbeat_worker.run("idle", fast))
    return direct, found._replace(percent=found.percent / FASTER, beats=found.beats / FASTER)


@contextmanager
def served(folder: Path, task: Task) -> Iterator[str]:
    """Run the service under uWSGI; gives its URL.

    :raises MissingPartError: uWSGI is not installed
    :raises ServerError: it did not start
    """
    port = free_port()
    own = folder / f"{task.patch}-{task.installed}"
    own.mkdir(exist_ok=True)
    options = {
        "http-socket": f"{HOST}:{port}",
        "processes": 1,
        "lazy-apps": "true",
        "disable-logging": "true",
        "add-header": "Connection: close",
        "module": f"{__package__}.heartbeat_service",
    }
    environment = {"HEARTBEAT_TASK": json.dumps(task._asdict())}
    serving = uwsgi.serving(
        own, uwsgi.plain(options), port, environment, lazy=True, processes=1
    )
    with serving as server:
        ((status, _, _, body),) = server.answers(1, "/", {})
        if (status, body) != (200, "ok"):
            raise ServerError(f"the service answers with {status}")
        yield f"{server.url}/"


def load_services(port: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Load the service with and without connections in turns, in each model."""
    rates: dict[str, list[float]] = {}
    for patch in PATCHES:
        sides = {f"bare, {patch}": False, f"kept, {patch}": True}
        rates |= {name: [] for name in sides}
        # each round has new processes: what one has by chance is in the noise, not in the result
        for number in range(rounds):
            with ExitStack() as stack:
                urls = {
                    name: stack.enter_context(
                        served(
                            folder,
                            Task(port, patch, installed=kept, connections=CONNECTIONS),
                        )
                    )
                    for name, kept in sides.items()
                }
                for url in urls.values():
                    wrk.run(url, {}, seconds=1, connections=CLIENTS)
                for name, rate in in_turns(urls, odd=number % 2 == 1).items():
                    rates[name].append(rate)
        say(f"requests, {patch}: {rounds} rounds")
    return rates


def in_turns(urls: dict[str, str], *, odd: bool) -> dict[str, float]:
    """Load two services, ABBA, so that a machine that gets slower is slower for both.

    :raises ServerError: a request failed
    """
    seen: dict[str, list[Load]] = {name: [] for name in urls}
    first, second = reversed(urls) if odd else urls
    for name in (first, second, second, first):
        found = wrk.run(urls[name], {}, seconds=LOADED, connections=CLIENTS)
        if found.failed:
            raise ServerError(f"{found.failed} requests of {name} failed")
        seen[name].append(found)
    return {
        name: sum(one.good for one in each) / sum(one.seconds for one in each)
        for name, each in seen.items()
    }


def measure(rounds: int, seconds: float, fast_seconds: float) -> Results:
    """Measure all.

    :raises MissingPartError: RabbitMQ, wrk, uWSGI or another part is not installed
    :raises ServerError: a server did not start, or a request failed
    """
    wrk.program()
    programs.uwsgi_program()
    found = Results({}, {}, {})
    with tempfile.TemporaryDirectory(prefix="heartbeat-idle-") as name:
        folder = Path(name)
        folder.joinpath("broker").mkdir()
        with rabbitmq.broker(folder / "broker") as broker:
            for patch in PATCHES:
                found.direct[patch], found.scaled[patch] = look_at(
                    broker.port, patch, seconds=seconds, fast_seconds=fast_seconds
                )
                say(f"CPU of the thread, {patch}: {seconds:g} s and {fast_seconds:g} s")
            found.rates.update(load_services(broker.port, rounds, folder))
    return found


def table(results: Results) -> str:
    """Return the result as text of at most 100 columns."""
    title = f"{CONNECTIONS} idle connections"
    lines = [f"{title:<28}{'% of core':>10}{'beats/s':>10}{'us each':>10}"]
    for title, found in (
        (f"every {INTERVAL:g} s", results.direct),
        (f"every {INTERVAL / FASTER:g} s / {FASTER}", results.scaled),
    ):
        for patch, one in found.items():
            lines.append(
                f"{f'{title}, {patch}':<28}{one.percent:>10.4f}{one.beats:>10.2f}"
                f"{one.microseconds:>10.1f}"
            )
    lines += ["", f"{'requests per second':<28}{'bare':>10}{'kept':>10}{'ratio':>10}"]
    for goal in HEARTBEAT_REQUESTS:
        bare, kept = results.rates[goal.second], results.rates[goal.first]
        middle, _, spread = Spread.of(by_round(kept, bare)).text(3).partition(" ")
        lines.append(
            f"{goal.first.removeprefix('kept, '):<28}"
            f"{statistics.median(bare):>10.0f}{statistics.median(kept):>10.0f}{middle:>10} {spread}"
        )
    return "\n".join(lines)


def judge(results: Results) -> list[tuple[str, str]]:
    """Return each goal in words, and how it was met."""
    found = []
    for title, threads in (("direct", results.direct), ("scaled", results.scaled)):
        for patch, one in threads.items():
            verdict = MET if one.percent <= HEARTBEAT_PERCENT else MISSED
            text = f"CPU of the thread, {patch}, {title} <= {HEARTBEAT_PERCENT:g} %"
            found.append((f"{text}: {one.percent:.4f}", verdict))
    for goal in HEARTBEAT_REQUESTS:
        pairs = by_round(results.rates[goal.first], results.rates[goal.second])
        found.append(in_words(goal, pairs, "requests, "))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    parser.add_argument(
        "--rounds", type=comparison.at_least_one, metavar="N", help=f"an even number ({ROUNDS})"
    )
    parser.add_argument(
        "--seconds",
        type=comparison.at_least_one,
        metavar="N",
        help=f"that the thread is looked at ({IDLE})",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, {QUICK_IDLE} s"
    )
    options = parser.parse_args(arguments)
    return comparison.finish(
        "heartbeat_idle",
        lambda: measure(
            options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
            options.seconds or (QUICK_IDLE if options.quick else IDLE),
            QUICK_FAST_SECONDS if options.quick else FAST_SECONDS,
        ),
        table,
        judge,
    )


if __name__ == "__main__":
    sys.exit(main())

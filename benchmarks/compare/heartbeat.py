"""AMQP connections with the heartbeat and without: messages, idle connections, restarts.

Each has a RabbitMQ of its own, and each process (``heartbeat_worker``) is not patched (``none``),
or patched by eventlet or gevent. ``stock`` is what comes from PyPI, ``kept`` the same after
``heartbeat.install()``.

``instructions``: rates of a machine that does something else as well differ by more than what is
looked for, so two things are counted of a message, each the least of five: instructions that the
process executes for it, by valgrind's callgrind; and switches, how often the thread that publishes
waits, and how often any other of the process does, by the kernel, without valgrind. Ways are

    cast    by oslo.messaging's RPC casts, with confirms
    own     by py-amqp alone, over a connection of its own, without
    shared  the same by eight green threads over one connection, every tenth body of 100 kB; not in
            plain threads, which py-amqp's connections are not made for

and four processes

    stock   what comes from PyPI
    thread  the same beside a thread that waits and does nothing
    hooks   the heartbeat's hooks, and nobody who beats
    kept    the heartbeat as it is installed

What the hooks cost is ``hooks`` to ``stock``; what the second thread costs a program whose code is
the same is ``thread`` to ``stock``, and ``kept`` to ``hooks``; a goal is for ``kept`` to ``stock``.

``idle``: the CPU time of the heartbeat's thread for 300 idle connections, by the kernel's own clock
of it: with a beat every 30 s; and with one every 0.3 s, over an eighth of the time, divided by 100,
which leaves out what does not come with the beats but counts a hundred times as many.

``restart``: milliseconds of the first message after RabbitMQ has been killed and started again, by
oslo.messaging; between two messages nothing runs in the process but native threads, as in a uWSGI
worker without a request. There is no goal: how long stock takes is oslo.messaging's option
``kombu_reconnect_delay``, 1 s unless set. A process that is not patched may have found out by
itself meanwhile.

Goals are in ``goals.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common import programs
from keyfront.errors import MissingPartError

from .. import files
from ..load.arguments import say
from ..results import Cell, Table
from ..servers import rabbitmq
from ..servers.processes import told
from . import comparison, heartbeat_worker
from .comparison import Comparison, Report
from .goals import HEARTBEAT_PERCENT, MISSED
from .heartbeat_worker import EACH, PATCHES, WRITERS, Task
from .ratios import Ratio, Spread, at_most, in_words, spreads

# Steps of a process that are counted at a time: under valgrind all is some fifty times slower.
INSTRUCTED = {"cast": 100, "own": 400, "shared": 5}
# The same without valgrind.
SWITCHED = {"cast": 500, "own": 2000, "shared": 25}
# Messages of a step.
MESSAGES = {"cast": 1, "own": 1, "shared": WRITERS * EACH}
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "thread": {"thread": "idle"},
    "hooks": {"installed": True, "thread": "none"},
    "kept": {"installed": True},
}
CONNECTIONS = 300
INTERVAL = 30.0
FASTER = 100


class Case(NamedTuple):
    """A way to send messages in one concurrency model."""

    way: str
    patch: str


CASES = {
    f"{way}, {patch}": Case(way, patch)
    for way in MESSAGES
    for patch in PATCHES
    if (way, patch) != ("shared", "none")
}


class Count(NamedTuple):
    """What was counted of one process.

    :ivar instructions: instructions of a message
    :ivar own: switches of the thread that publishes, in a thousand messages
    :ivar others: switches of all other threads meanwhile
    """

    instructions: float
    own: float
    others: float


class Idle(NamedTuple):
    """The thread of one idle process.

    :ivar percent: CPU time, of a core
    :ivar beats: beats per second
    :ivar microseconds: CPU time for each, all else that it does included
    """

    percent: float
    beats: float
    microseconds: float


def _check() -> None:
    """Find out that the processes have what they import."""
    for module in ("oslo_messaging", "eventlet", "gevent"):
        programs.require_module(module, "experiments")


def instructions(cases: Mapping[str, Case]) -> Report:
    """Count what each process does; return the table, and how the goals were met."""
    _check()
    programs.require_module("pytest", "bench")
    from ..gate.worker import callgrind

    if callgrind.absent():
        raise MissingPartError(callgrind.absent())
    found: dict[str, dict[str, Count]] = {}
    with files.folders() as (folder, _), rabbitmq.broker(folder) as rabbit:
        for name, case in cases.items():
            found[name] = {side: _count(folder, rabbit.port, case, side) for side in VARIANTS}
            say(f"{name}: counted")
    return counted(found)


def _count(folder: Path, port: int, case: Case, side: str) -> Count:
    """Count what the process of one side does, once under valgrind and once without."""
    from ..gate.worker import callgrind

    over = "oslo" if case.way == "cast" else case.way
    task = Task(port, patch=case.patch, over=over, **VARIANTS[side])
    own = folder / f"{case.way}-{case.patch}-{side}"
    own.mkdir()
    calls, steps, each = (x[case.way] for x in (INSTRUCTED, SWITCHED, MESSAGES))
    # What is looked up by its hash takes more or less from process to process.
    under = ["env", "PYTHONHASHSEED=0", *callgrind.command(own)]
    heartbeat_worker.run("counted", task._replace(messages=calls), under=under)
    waited = heartbeat_worker.run("counted", task._replace(messages=steps))
    return Count(
        min(callgrind.totals(own).values()) / (calls * each),
        min(waited["own"]) / (steps * each) * 1000,
        min(waited["others"]),
    )


def counted(found: Mapping[str, Mapping[str, Count]]) -> Report:
    """Return what was counted of each case and variant as a table, and how the goals were met."""
    rows: list[list[Cell]] = []
    goals = []
    for name, counts in found.items():
        stock = counts["stock"].instructions
        for side, one in counts.items():
            more = "" if side == "stock" else f"{(one.instructions / stock - 1) * 100:+.1f} %"
            figures = round(one.instructions), more, round(one.own), round(one.others)
            rows.append([f"{name}: {side}", *figures])
        pair = (counts["kept"].instructions / stock,)
        goals.append(Ratio(f"kept, {name}", f"stock, {name}", "instructions", pair))
    columns = ["a message", "instructions", "to stock", "switches in 1000", "of other threads"]
    return Report([Table(name="instructions", columns=columns, rows=rows)], in_words([goals]))


def look_at(port: int, patch: str, seconds: float) -> dict[str, Idle]:
    """Measure the thread of idle connections, at the interval and at a hundredth of it."""
    task = Task(port, patch=patch, connections=CONNECTIONS, interval=INTERVAL, seconds=seconds)
    direct = Idle(**heartbeat_worker.run("idle", task))
    fast = task._replace(interval=INTERVAL / FASTER, seconds=seconds / 8)
    found = Idle(**heartbeat_worker.run("idle", fast))
    scaled = found._replace(percent=found.percent / FASTER, beats=found.beats / FASTER)
    return {
        f"every {INTERVAL:g} s, {patch}": direct,
        f"every {INTERVAL / FASTER:g} s / {FASTER}, {patch}": scaled,
    }


def idle(seconds: float) -> Report:
    """Look at the thread in each model; return the table, and how the goal was met.

    :raises ServerError: the thread does not beat
    """
    _check()
    found: dict[str, Idle] = {}
    with files.folders() as (folder, _), rabbitmq.broker(folder) as rabbit:
        for patch in PATCHES:
            found |= look_at(rabbit.port, patch, seconds)
            say(f"{patch}: looked at")
    rows: list[list[Cell]] = [
        [name, f"{one.percent:.4f}", f"{one.beats:.2f}", f"{one.microseconds:.1f}"]
        for name, one in found.items()
    ]
    columns = [f"{CONNECTIONS} idle connections", "% of a core", "beats/s", "us each"]
    verdicts = [
        at_most(name, HEARTBEAT_PERCENT, "% of a core", one.percent, over=MISSED)
        for name, one in found.items()
    ]
    return Report([Table(name="idle", columns=columns, rows=rows)], verdicts)


def restart(rounds: int) -> Report:
    """Let the broker die in each round; return the table."""
    _check()
    tasks = {
        f"{side}, {patch}": Task(0, patch=patch, installed=side == "kept")
        for patch in PATCHES
        for side in ("stock", "kept")
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    with files.folders() as (folder, _), rabbitmq.broker(folder) as rabbit, ExitStack() as stack:
        running = {}
        for name, task in tasks.items():
            command = heartbeat_worker.command("restart", task._replace(port=rabbit.port))
            who, log = f"the publisher ({name})", folder / f"{name}.log"
            running[name] = stack.enter_context(told(command, name=who, log=log))
            running[name].line()
        before = -1
        for number, name in comparison.in_turns(list(running), rounds):
            if number != before:
                before = number
                for each in running.values():
                    each.ask("publish")
                rabbit.restart()
            times[name].append(float(running[name].ask("publish")))
    found = {name: Spread.of(each) for name, each in times.items()}
    return Report([spreads("the first message", "ms", found)])


_PARTS = ("amqp", "oslo.messaging", "eventlet", "gevent")
COMPARISONS = {
    "instructions": Comparison(
        title="Instructions that the heartbeat adds to a message",
        measure=lambda options: instructions(comparison.chosen(CASES, options.only)),
        only="cast, none",
        distributions=_PARTS,
        programs=("valgrind",),
    ),
    "idle": Comparison(
        title=f"The heartbeat's thread with {CONNECTIONS} idle connections",
        measure=lambda options: idle(options.seconds),
        numbers=(("--seconds", 120, "that each thread is looked at, 20 at least"),),
        distributions=_PARTS,
    ),
    "restart": Comparison(
        title="The first message after a restart of RabbitMQ",
        measure=lambda options: restart(options.rounds),
        numbers=(("--rounds", 5, "restarts"),),
        distributions=_PARTS,
    ),
}
main = partial(comparison.main, "heartbeat", __doc__, COMPARISONS)

if __name__ == "__main__":
    raise SystemExit(main())

"""What the heartbeat adds to a publish, by instructions and by switches: it goes by no clock.

    python -m keyfront.benchmarks.compare.heartbeat_instructions [--quick]

Rates of a machine that does something else as well differ by more than what is looked for. So one
thread publishes to a RabbitMQ of its own over a kept connection, in the models of
``heartbeat_publish``, and two things are counted:

    instructions  that the process executes for a publish, by valgrind's callgrind
    switches      how often the thread that publishes waits, and how often any other thread of the
                  process does, by the kernel, in a process without valgrind

``cast`` is by oslo.messaging and its pool, with confirms; ``publish`` by py-amqp alone, without.
Four processes differ in one thing each:

    stock   what comes from PyPI
    thread  the same beside a thread that waits and does nothing
    hooks   the heartbeat's hooks, and nobody who beats
    kept    the heartbeat as it is installed

What the hooks cost is ``hooks`` to ``stock``; what the second thread costs a program whose code is
the same is ``thread`` to ``stock``, and ``kept`` to ``hooks``. Each count is the least of five.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.errors import MissingPartError

from ..gate.worker import callgrind
from ..worlds import rabbitmq
from . import comparison, heartbeat_worker
from .comparison import say
from .heartbeat_worker import PATCHES, Task

# Messages that are counted at a time: under valgrind all is some fifty times slower.
COUNTS = {"cast": 100, "publish": 400}
# The same without valgrind.
SWITCHES = {"cast": 500, "publish": 2000}
WAYS = {"cast": "oslo", "publish": "eight"}
SIDES: dict[str, dict[str, Any]] = {
    "stock": {},
    "thread": {"thread": "idle"},
    "hooks": {"installed": True, "thread": "none"},
    "kept": {"installed": True},
}


class Case(NamedTuple):
    """A way to publish in one concurrency model."""

    what: str
    patch: str

    def __str__(self) -> str:
        return f"{self.what}, {self.patch}"


class Count(NamedTuple):
    """What was counted of one process.

    :ivar instructions: instructions of a publish
    :ivar own: switches of the thread that publishes, in a thousand publishes
    :ivar others: switches of all other threads meanwhile
    """

    instructions: float
    own: float
    others: float


Counts = dict[Case, dict[str, Count]]
"""What was counted of each case, by side."""

CASES = [Case(what, patch) for what in WAYS for patch in PATCHES]


def measure(cases: Iterable[Case], sides: Iterable[str] = SIDES) -> Counts:
    """Count what each process does.

    :raises MissingPartError: valgrind, RabbitMQ, py-amqp or another part is not installed
    :raises ServerError: RabbitMQ did not start, or a message was not sent
    """
    if callgrind.absent():
        raise MissingPartError(callgrind.absent())
    found: Counts = {}
    with tempfile.TemporaryDirectory(prefix="heartbeat-instructions-") as folder:
        with rabbitmq.broker(Path(folder)) as broker:
            for case in cases:
                found[case] = {side: count(Path(folder), broker.port, case, side) for side in sides}
                say(f"{case}: counted")
    return found


def count(folder: Path, port: int, case: Case, side: str) -> Count:
    """Count what the process of one side does, once under valgrind and once without."""
    task = Task(port, patch=case.patch, over=WAYS[case.what], **SIDES[side])
    own = folder / f"{case.what}-{case.patch}-{side}"
    own.mkdir()
    calls = COUNTS[case.what]
    # What is looked up by its hash takes more or less from process to process.
    under = ["env", "PYTHONHASHSEED=0", *callgrind.command(own)]
    heartbeat_worker.run("counted", task._replace(messages=calls), under=under)
    messages = SWITCHES[case.what]
    waited = heartbeat_worker.run("counted", task._replace(messages=messages))
    return Count(
        min(callgrind.totals(own).values()) / calls,
        min(waited["own"]) / messages * 1000,
        min(waited["others"]),
    )


def table(found: Counts) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [f"{'':<20}{'side':<8}{'instructions':>14}{'to stock':>10}{'switches/1000':>15}"
             f"{'of others':>11}"]
    for case, sides in found.items():
        stock = sides["stock"].instructions
        for side, one in sides.items():
            more = "" if side == "stock" else f"{(one.instructions / stock - 1) * 100:+.1f} %"
            lines.append(
                f"{str(case) if side == 'stock' else '':<20}{side:<8}{one.instructions:>14.0f}"
                f"{more:>10}{one.own:>15.0f}{one.others:>11.0f}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Count and print the table; 2 if it cannot be counted."""
    parser = comparison.parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="casts of a process that is not patched only"
    )
    options = parser.parse_args(arguments)
    cases = CASES[:1] if options.quick else CASES
    return comparison.finish("heartbeat_instructions", lambda: measure(cases), table)


if __name__ == "__main__":
    sys.exit(main())

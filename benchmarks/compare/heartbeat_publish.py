"""Messages per second to RabbitMQ with the heartbeat and without, in each concurrency model.

    python -m keyfront.benchmarks.compare.heartbeat_publish [--rounds 12] [--only TEXT]

On one RabbitMQ of its own, eight threads (or greenlets) publish at once,

    eight   over a connection each, bodies of 1 kB, by py-amqp
    one     over one connection, every tenth body of 100 kB, by py-amqp
    oslo    by oslo.messaging's RPC casts and its connection pool, bodies of 1 kB

in a process that is not patched (``none``), or patched by eventlet or gevent; ``one`` in the last
two only, as py-amqp's connections are not made for plain threads. ``stock`` is what comes from
PyPI, ``kept`` is the same after ``heartbeat.install()``. Each is measured in a process of its own
in each round, the two of a pair one after the other, in turns which is first, so what a process has
by chance (addresses, hashes) is in the noise and not in the result.

Then the CPU time of one ``transport.write``: of a connection that is kept, and of one in the same
process that is left alone because it has no heartbeat, in turns.

Medians are printed, and the ratio as a median over the pairs with the lowest and the highest. Ends
with status 1 if a goal was missed: see ``goals.py``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from keyfront.errors import OptionError

from ..worlds import rabbitmq
from . import comparison, heartbeat_worker
from .comparison import say
from .goals import HEARTBEAT_GOALS
from .heartbeat_worker import PATCHES, Task
from .ratios import in_words, ratio

ROUNDS = 12
QUICK_ROUNDS = 2
# Messages in a round: a second or two.
COUNTS = {"eight": 30_000, "one": 6_000, "oslo": 4_000}
WRITES = 40_000


class Case(NamedTuple):
    """A case that is measured with and without the heartbeat."""

    over: str
    patch: str

    def name(self, side: str) -> str:
        """Return its name in goals and tables: ``kept, eight, gevent``."""
        return f"{side}, {self.over}, {self.patch}"


CASES = [
    Case(over, patch)
    for over in COUNTS
    for patch in PATCHES
    if (over, patch) != ("one", "none")
]
SIDES = ("stock", "kept")


class Sample(NamedTuple):
    """One process."""

    rate: float
    """Messages per second."""
    cpu: float
    """Microseconds of the process for each."""


Samples = dict[str, list[Sample]]
"""Each round, by the name of a case and a side."""

Writes = dict[str, list[float]]
"""Microseconds of each part of a run, ``kept`` and ``left``."""


def measure(rounds: int, cases: list[Case], *, part: int = 1) -> tuple[Samples, dict[str, Writes]]:
    """Measure each case in each round, and the writes of each model once.

    :param part: a so many-th of the usual messages
    :raises MissingPartError: RabbitMQ, py-amqp, eventlet, gevent or another part is not installed
    :raises ServerError: RabbitMQ did not start, or a message was not sent
    """
    samples: Samples = {case.name(side): [] for case in cases for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="heartbeat-publish-") as folder:
        with rabbitmq.broker(Path(folder)) as broker:
            for number in range(rounds):
                for case in cases:
                    for side in reversed(SIDES) if number % 2 else SIDES:
                        task = Task(
                            broker.port,
                            patch=case.patch,
                            installed=side == "kept",
                            over=case.over,
                            messages=COUNTS[case.over] // part,
                        )
                        found = heartbeat_worker.run("publish", task)
                        samples[case.name(side)].append(Sample(found["rate"], found["cpu"]))
                say(f"round {number + 1} of {rounds}")
            writes = {
                patch: heartbeat_worker.run(
                    "writes", Task(broker.port, patch=patch, messages=WRITES // part)
                )
                for patch in dict.fromkeys(case.patch for case in cases)
            }
    return samples, writes


def table(samples: Samples, writes: dict[str, Writes]) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [
        f"{'messages':<22}{'stock/s':>10}{'kept/s':>10}{'ratio':>8}{'':20}"
        f"{'stock us':>10}{'kept us':>10}"
    ]
    for goal in HEARTBEAT_GOALS:
        if goal.first not in samples:
            continue
        middle, _, spread = ratio(samples, *goal[:3]).spread(3).partition(" ")
        kept, stock = samples[goal.first], samples[goal.second]
        lines.append(
            f"{goal.first.removeprefix('kept, '):<22}"
            f"{_median(stock, 'rate'):>10.0f}{_median(kept, 'rate'):>10.0f}"
            f"{middle:>8} {spread:<19}"
            f"{_median(stock, 'cpu'):>10.1f}{_median(kept, 'cpu'):>10.1f}"
        )
    lines += ["", f"{'us of CPU for a write':<22}{'left':>10}{'kept':>10}{'more':>8}"]
    for patch, sides in writes.items():
        left, kept_us = statistics.median(sides["left"]), statistics.median(sides["kept"])
        more = [one - other for one, other in zip(sides["kept"], sides["left"], strict=True)]
        spread = f"({min(more):.2f} to {max(more):.2f})"
        lines.append(
            f"{patch:<22}{left:>10.2f}{kept_us:>10.2f}{statistics.median(more):>8.2f} {spread}"
        )
    return "\n".join(lines)


def _median(rounds: list[Sample], figure: str) -> float:
    return statistics.median([float(getattr(one, figure)) for one in rounds])


def judge(samples: Samples) -> list[tuple[str, str]]:
    """Return each goal that was measured in words, and how it was met."""
    return [
        in_words(goal, ratio(samples, *goal[:3]).pairs)
        for goal in HEARTBEAT_GOALS
        if goal.first in samples
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    parser.add_argument(
        "--rounds", type=comparison.at_least_one, metavar="N", help=f"an even number ({ROUNDS})"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='cases with this in their names, e.g. "one, "'
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, a tenth of the messages"
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)

    def measured() -> tuple[Samples, dict[str, Writes]]:
        cases = [case for case in CASES if options.only in case.name("kept")]
        if not cases:
            raise OptionError("--only", options.only, "in the name of a case: kept, one, gevent")
        return measure(rounds, cases, part=10 if options.quick else 1)

    return comparison.finish(
        "heartbeat_publish", measured, lambda found: table(*found), lambda found: judge(found[0])
    )


if __name__ == "__main__":
    sys.exit(main())

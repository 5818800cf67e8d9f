"""Milliseconds of the first message after RabbitMQ has been killed and started again.

    python -m keyfront.benchmarks.compare.heartbeat_restart [--rounds 5]

Six processes publish by oslo.messaging, not patched (``none``) or patched by eventlet or gevent, as
they come from PyPI (``stock``) and after ``heartbeat.install()`` (``kept``). Between two messages
nothing runs in them but native threads, as in a uWSGI worker without a request. Then RabbitMQ is
killed and started again, and each sends one message; all have lost their connections.

There is no goal: how long stock takes is oslo.messaging's option ``kombu_reconnect_delay``, 1 s
unless set. A process that is not patched may have found out by itself meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keyfront.errors import ServerError

from ..worlds import rabbitmq
from . import comparison, heartbeat_worker
from .comparison import say
from .heartbeat_publish import SIDES
from .heartbeat_worker import PATCHES, Task
from .ratios import Spread

ROUNDS = 5

Times = dict[str, list[float]]
"""Milliseconds in each round, by side and patch: ``kept, gevent``."""


class Publisher:
    """A process that publishes when told to."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log
        self._answer()

    def publish(self) -> float:
        """Have it send one message; gives the milliseconds.

        :raises ServerError: it failed
        """
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer())["milliseconds"])

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(encoding="utf-8", errors="replace")[-600:]
            raise ServerError(f"the publisher ({self._name}) ended: {end}")
        return line


@contextmanager
def publisher(name: str, task: Task, log: Path) -> Iterator[Publisher]:
    """Run one."""
    with log.open("w", encoding="utf-8") as out:
        process = heartbeat_worker.start("restart", task, out)
    try:
        yield Publisher(name, process, log)
    finally:
        process.kill()
        process.communicate()


def measure(rounds: int) -> Times:
    """Let the broker die in each round.

    :raises MissingPartError: RabbitMQ, oslo.messaging or another part is not installed
    :raises ServerError: RabbitMQ did not start, or a publisher failed
    """
    sides = {
        f"{side}, {patch}": Task(0, patch=patch, installed=side == "kept")
        for patch in PATCHES
        for side in SIDES
    }
    times: Times = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="heartbeat-restart-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.joinpath("broker").mkdir()
        broker = stack.enter_context(rabbitmq.broker(folder / "broker"))
        running = {}
        for name, task in sides.items():
            one = publisher(name, task._replace(port=broker.port), folder / f"{name}.log")
            running[name] = stack.enter_context(one)
        for number in range(rounds):
            for each in running.values():
                each.publish()
            broker.restart()
            for name in reversed(running) if number % 2 else running:
                times[name].append(running[name].publish())
            say(f"round {number + 1} of {rounds}")
    return times


def table(times: Times) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [f"{'ms of the first message':<26}{'median':>10}{'lowest':>10}{'highest':>10}"]
    for name, rounds in times.items():
        middle, low, high = Spread.of(rounds)
        lines.append(f"{name:<26}{middle:>10.1f}{low:>10.1f}{high:>10.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    parser.add_argument(
        "--rounds",
        type=comparison.at_least_one,
        default=ROUNDS,
        metavar="N",
        help=f"restarts ({ROUNDS})",
    )
    options = parser.parse_args(arguments)
    return comparison.finish("heartbeat_restart", lambda: measure(options.rounds), table)


if __name__ == "__main__":
    sys.exit(main())

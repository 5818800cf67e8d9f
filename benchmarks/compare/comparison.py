"""Runs a comparison: samples in rounds, its tables and goals, its result and exit status.

In each round every case is measured once, in the next round in the reverse order, so that what the
machine does meanwhile meets both sides of a ratio (``ratios.py``).
"""

from __future__ import annotations

import shlex
import signal
import statistics
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from keyfront.errors import KeyfrontError

from .. import results
from ..load.measured import Load, percentile
from . import goals
from .goals import Goal

Found = TypeVar("Found")


class Sample(NamedTuple):
    """One case in one round.

    :ivar server_cpu: CPU seconds that uWSGI's processes took
    """

    load: Load
    server_cpu: float

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.load.rate

    @property
    def p50(self) -> float:
        """Milliseconds within which half of all answers came."""
        return percentile(self.load.latencies or {}, 0.50)

    @property
    def p99(self) -> float:
        """Milliseconds within which 99 of 100 answers came."""
        return percentile(self.load.latencies or {}, 0.99)

    @property
    def cpu(self) -> float:
        """CPU seconds per good answer."""
        return self.server_cpu / self.load.good

    def described(self) -> dict[str, float]:
        """Return it for a result."""
        return {
            "requests": self.load.good,
            "seconds": self.load.seconds,
            "errors": self.load.failed,
            "p50_ms": self.p50,
            "p99_ms": self.p99,
            "server_cpu": self.server_cpu,
            "generator_cpu": self.load.generator_cpu,
        }


Samples = dict[str, list[Sample]]


class Row(NamedTuple):
    """One case over all rounds.

    :ivar rate: good answers per second, the median of the rounds
    :ivar p50: milliseconds, of all answers together
    :ivar cpu: microseconds of uWSGI's processes per answer
    :ivar generator: the part of one core that wrk took
    """

    rate: float
    p50: float
    p99: float
    errors: int
    cpu: float
    generator: float


def row(samples: Sequence[Sample]) -> Row:
    """Sum up one case."""
    latencies: Counter[int] = Counter()
    for sample in samples:
        latencies.update(sample.load.latencies or {})
    seconds = sum(sample.load.seconds for sample in samples)
    answers = sum(sample.load.good for sample in samples)
    return Row(
        statistics.median(sample.rate for sample in samples),
        percentile(latencies, 0.50),
        percentile(latencies, 0.99),
        sum(sample.load.failed for sample in samples),
        sum(sample.server_cpu for sample in samples) / answers * 1e6,
        sum(sample.load.generator_cpu for sample in samples) / seconds,
    )


def verdict_lines(verdicts: Mapping[Goal, str]) -> list[str]:
    """Return a line for each goal, for a terminal."""
    return [
        f"{verdict:<8} {goal.figure:<5} {goal.first} / {goal.second} {goal}"
        for goal, verdict in verdicts.items()
    ]


def thousands(value: float, *, hundreds_from: float = 1000) -> str:
    """Return as many digits as mean something, thousands apart.

    :param hundreds_from: the least value that is rounded to hundreds
    """
    return f"{round(value, -2 if value >= hundreds_from else 0):,.0f}".replace(",", " ")


def milliseconds(value: float) -> str:
    """Return as many digits as mean something."""
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def in_rounds(
    cases: Sequence[str],
    rounds: int,
    measure: Callable[[str], Sample],
    say: Callable[[str], None],
) -> Samples:
    """Measure each case in each round.

    :param measure: takes the name of a case
    """
    samples: Samples = {name: [] for name in cases}
    for number in range(rounds):
        rates = []
        for name in reversed(cases) if number % 2 else cases:
            sample = measure(name)
            samples[name].append(sample)
            rates.append(f"{name} {sample.rate:.0f}/s")
        say(f"round {number + 1} of {rounds}: {', '.join(rates)}")
    return samples


def closed_rate(deeds: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return how many deeds a second are done, by as many clients that do nothing else.

    :param deeds: the deed of each client, which is done again and again in a thread of its own
    :param seconds: seconds after which nobody begins another one
    :raises KeyfrontError: what a deed raises
    """
    over = threading.Event()

    def repeat(deed: Callable[[], object]) -> int:
        done = 0
        while not over.is_set():
            deed()
            done += 1
        return done

    with ThreadPoolExecutor(len(deeds)) as pool:
        began = time.monotonic()
        clients = [pool.submit(repeat, deed) for deed in deeds]
        over.wait(seconds)
        over.set()
        return sum(client.result() for client in clients) / (time.monotonic() - began)


def say(text: str) -> None:
    """Tell a line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def at_least_one(text: str) -> int:
    """Read a whole number from 1, as a type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError("must be a whole number from 1")
    return int(text)


def ends_in_order() -> None:
    """Take SIGTERM as Ctrl-C, so that what runs is taken down."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def parser(doc: str | None) -> ArgumentParser:
    """Return a parser that is described by the first line of a module's docstring."""
    return ArgumentParser(description=doc.splitlines()[0] if doc else None)


def add_rounds(parser: ArgumentParser, rounds: int, seconds: int, more: str = "") -> None:
    """Add ``--rounds`` and ``--seconds``.

    :param more: behind the help of the latter
    """
    for option, default, text in (
        ("--rounds", rounds, f"an even number (default {rounds})"),
        ("--seconds", seconds, f"per case (default {seconds}){more}"),
    ):
        parser.add_argument(option, type=at_least_one, default=default, help=text)


def add_results(parser: ArgumentParser) -> None:
    """Add what :func:`run` reads."""
    parser.add_argument("--results", type=Path, metavar="DIR", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help="print the tables of documents")


class Report(Protocol):
    """A module that tells a comparison."""

    TITLE: str
    DISTRIBUTIONS: tuple[str, ...]
    PROGRAMS: tuple[str, ...]

    def judge(self, samples: Any) -> Mapping[Goal, str]:
        """Say of each goal how it was met."""

    def table(self, samples: Any) -> str:
        """Return the result as text of at most 100 columns."""

    def tables(self, samples: Any, settings: Any) -> list[results.Table]:
        """Return the result as the documents show it."""

    def raw(self, samples: Any) -> list[results.Sample]:
        """Return every round of every case."""


def run(
    measure: Callable[[Any], Any], settings: Any, options: Namespace, report: Report
) -> int:
    """Measure, print and write; 1 if a goal was missed, 2 if it cannot be measured.

    :param measure: called with the settings; returns the samples
    :param settings: a named tuple with the property ``command``
    :param options: the arguments that :func:`add_results` adds, parsed
    """
    command = shlex.split(settings.command)
    name = command[2].rpartition(".")[2]
    try:
        if options.results:
            results.prepare(options.results)
        with results.Record(
            "comparison",
            name,
            title=report.TITLE,
            command=command,
            conditions=settings._asdict(),
            distributions=report.DISTRIBUTIONS,
            programs=report.PROGRAMS,
        ) as record:
            samples = measure(settings)
        verdicts = report.judge(samples)
        record.samples += report.raw(samples)
        record.tables += report.tables(samples, settings)
        for goal, verdict in verdicts.items():
            record.note(f"{goal.figure} of {goal.first} / {goal.second} {goal}: {verdict}")
        result = record.result()
        if options.results:
            say(f"written to {results.write(result, options.results)}")
    except KeyfrontError as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130
    say(f"{settings.command}\n{results.measured_on(result)}")
    if options.markdown:
        print("\n\n".join(map(results.markdown, result.tables)))
    else:
        print(report.table(samples))
    lines = goals.missed(verdicts)
    for line in lines:
        say(line)
    return 1 if lines else 0


def finish(
    name: str,
    measure: Callable[[], Found],
    table: Callable[[Found], str],
    judge: Callable[[Found], Sequence[tuple[str, str]]] = lambda found: (),
) -> int:
    """Measure and print; 1 if a goal was missed, 2 if it cannot be measured.

    :param name: the name of the script, for errors
    :param judge: returns each goal in words, and how it was met
    """
    try:
        found = measure()
    except KeyfrontError as error:
        say(f"{name}: {error}")
        return 2
    print(table(found))
    verdicts = judge(found)
    if verdicts:
        print()
    for text, verdict in verdicts:
        print(f"{verdict:<8} {text}")
    return int(any(verdict == goals.MISSED for _, verdict in verdicts))

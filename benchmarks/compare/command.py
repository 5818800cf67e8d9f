"""How a load benchmark ends: its tables, its result, its exit status."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from keyfront.errors import KeyfrontError

from .. import results
from . import goals


def at_least_one(text: str) -> int:
    """A whole number from 1, as a type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError("must be a whole number from 1")
    return int(text)


def terminated(number: int, frame: object) -> None:
    """Handle a signal by taking down what runs, as Ctrl-C does."""
    raise SystemExit(128 + number)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`run` reads."""
    parser.add_argument("--results", type=Path, metavar="DIR", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help="print the tables of documents")


def run(
    name: str,
    measure: Callable[[Any], Any],
    settings: Any,
    options: Namespace,
    *,
    report: ModuleType,
    judge: Callable[[Any], Mapping[goals.Goal, str]],
    say: Callable[[str], None],
) -> int:
    """Measure, print and write; 1 if a goal was missed, 2 if it cannot be measured.

    :param measure: called with the settings; returns the samples
    :param settings: a named tuple with the property ``command``
    :param options: what :func:`add_arguments` adds
    :param report: has ``TITLE``, ``DISTRIBUTIONS``, ``PROGRAMS``, ``table``, ``tables``, ``raw``
    """
    try:
        if options.results:
            results.prepare(options.results)
        with results.Record(
            "comparison",
            name,
            title=report.TITLE,
            command=shlex.split(settings.command),
            conditions=settings._asdict(),
            distributions=report.DISTRIBUTIONS,
            programs=report.PROGRAMS,
        ) as record:
            samples = measure(settings)
        verdicts = judge(samples)
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

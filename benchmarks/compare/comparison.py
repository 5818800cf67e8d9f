"""Runs a comparison: its options, its tables and goals on the terminal, its result, its status."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from keyfront.errors import KeyfrontError, OptionError

from .. import results
from ..load.arguments import ended_in_order, say
from ..results import Table
from .goals import MISSED
from .ratios import GOAL

Case = TypeVar("Case")
Figure = TypeVar("Figure")
# Cases that an error names, at most.
_SHOWN = 8


class Report(NamedTuple):
    """What a comparison found.

    :ivar verdicts: each goal in words, and how it was met
    :ivar samples: every round of every case
    """

    tables: Sequence[Table]
    verdicts: Sequence[tuple[str, str]] = ()
    samples: Sequence[results.Sample] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison, as its module declares it.

    :param title: a line for a reader of its result
    :param measure: takes the options, which have the ``command`` besides
    :param numbers: options that take whole numbers from 1: the name, the default, words of help
    :param flags: options that take nothing: the name, words of help
    :param only: an example for the option ``--only``, by which :func:`chosen` goes; default: none
    :param distributions: Python packages whose versions matter
    :param programs: programs of the system whose versions matter
    """

    title: str
    measure: Callable[[Namespace], Report]
    numbers: Sequence[tuple[str, int, str]] = ()
    flags: Sequence[tuple[str, str]] = ()
    only: str = ""
    distributions: Sequence[str] = ()
    programs: Sequence[str] = ()

    def add_options(self, parser: ArgumentParser) -> None:
        """Add what the comparison can be told."""
        for name, default, text in self.numbers:
            text += " (default %(default)s)"
            parser.add_argument(name, type=at_least_one, default=default, metavar="N", help=text)
        for name, text in self.flags:
            parser.add_argument(name, action="store_true", help=text)
        if self.only:
            text = f"cases with this in their names, as {self.only!r}"
            parser.add_argument("--only", default="", metavar="TEXT", help=text)
        text = "write all that was measured"
        parser.add_argument("--results", type=Path, metavar="DIR", help=text)
        parser.set_defaults(comparison=self)


def at_least_one(text: str) -> int:
    """Read a whole number from 1, as a type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError("must be a whole number from 1")
    return int(text)


def chosen(cases: Mapping[str, Case], only: str) -> dict[str, Case]:
    """Return the cases with a text in their names.

    :raises OptionError: there is none
    """
    found = {name: case for name, case in cases.items() if only in name}
    if not found:
        some = "; ".join(list(cases)[:_SHOWN])
        more = "; …" if len(cases) > _SHOWN else ""
        raise OptionError("--only", only, f"in the name of a case: {some}{more}")
    return found


def main(
    name: str,
    doc: str | None,
    kinds: Comparison | Mapping[str, Comparison],
    arguments: list[str] | None = None,
) -> int:
    """Measure, print and write; 1 if a goal was missed, 2 if it cannot be measured.

    :param name: the module's name; where it runs, its package's is before it
    :param doc: its docstring, which ``--help`` shows
    :param kinds: its comparison, or several by the first word of its arguments
    :param arguments: default: those of the command line
    """
    module = f"{__package__}.{name}"
    parser = ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=RawDescriptionHelpFormatter
    )
    if isinstance(kinds, Comparison):
        kinds.add_options(parser)
    else:
        several = parser.add_subparsers(required=True, metavar="|".join(kinds))
        for word, kind in kinds.items():
            kind.add_options(several.add_parser(word, help=kind.title))
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if not isinstance(kinds, Comparison):
        name = f"{name} {given[0]}"
    others = ("results", "comparison")
    conditions = {name: value for name, value in vars(options).items() if name not in others}
    command = ["python", "-m", module, *given]
    options.command = shlex.join(_without_results(command))
    comparison: Comparison = options.comparison
    try:
        if options.results:
            results.prepare(options.results)
        with (
            ended_in_order(),
            results.Record(
                "comparison",
                name,
                title=comparison.title,
                command=command,
                conditions=conditions,
                distributions=comparison.distributions,
                programs=comparison.programs,
            ) as record,
        ):
            report = comparison.measure(options)
        record.samples += report.samples
        record.tables += report.tables
        for text, verdict in report.verdicts:
            record.note(f"{text}: {verdict}")
        result = record.result()
        if options.results:
            say(f"written to {results.write(result, options.results)}")
    except KeyfrontError as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130
    say(f"{options.command}\n{results.folded(results.measured_on(result))}")
    # goals are judged below the tables, and not shown in them as well
    shown = [
        replace(one, columns=one.columns[:-1], rows=[row[:-1] for row in one.rows])
        if one.columns[-1] == GOAL
        else one
        for one in result.tables
    ]
    print("\n\n".join(map(results.plain, shown)))
    if report.verdicts:
        print()
    for text, verdict in report.verdicts:
        print(results.folded(f"{verdict:<8} {text}"))
    return int(any(verdict == MISSED for _, verdict in report.verdicts))


def _without_results(command: list[str]) -> list[str]:
    """Return a command without its option ``--results``: a folder of this machine."""
    kept = [word for word in command if not word.startswith("--results=")]
    if "--results" in kept:
        place = kept.index("--results")
        del kept[place : place + 2]
    return kept


def in_turns(cases: Sequence[Case], rounds: int) -> Iterator[tuple[int, Case]]:
    """Yield each case in each round, with the round's number, and tell when one is over.

    Every other round goes in the reverse order, so that what the machine does meanwhile meets both
    sides of a ratio (``ratios.py``).
    """
    for number in range(rounds):
        for case in reversed(cases) if number % 2 else cases:
            yield number, case
        say(f"round {number + 1} of {rounds}")


def in_rounds(
    cases: Sequence[str], rounds: int, measure: Callable[[str], Figure], *, warm: int = 0
) -> dict[str, list[Figure]]:
    """Measure each case in each round, in turns; return the figures of a case by its name.

    :param measure: takes the name of a case
    :param warm: rounds before them that are not counted
    """
    found: dict[str, list[Figure]] = {name: [] for name in cases}
    for number, name in in_turns(cases, warm + rounds):
        figure = measure(name)
        if number >= warm:
            found[name].append(figure)
    return found


@contextmanager
def meanwhile(*acts: Callable[[threading.Event], object]) -> Iterator[list[Future[object]]]:
    """Run functions, each in a thread of its own, until the block ends; gives what runs.

    :param acts: take an event, which is set when the block ends
    :raises Exception: what one of them raises, at the end of the block
    """
    over = threading.Event()
    with ThreadPoolExecutor(len(acts) or 1) as pool:
        running = [pool.submit(act, over) for act in acts]
        try:
            yield running
        finally:
            over.set()
    for one in running:
        one.result()


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
        try:
            over.wait(seconds)
        finally:
            over.set()
        return sum(client.result() for client in clients) / (time.monotonic() - began)

"""``keyfront plan``: prints the numbers of a node with their reasons.

With ``--measure`` it runs the application under the plan and its neighbours, and takes the best.
Exit status 0, 2 for bad input, 3 if something cannot be met.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import stat
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TextIO

from keyfront import __version__
from keyfront.common import ranges
from keyfront.errors import OptionError, StateError
from keyfront.gateway import application as loading
from keyfront.gateway.plan import GROUPS, Conflict, Number, Plan, plan
from keyfront.gateway.plan.measure import rounds
from keyfront.gateway.plan.measure.candidates import Candidate, candidates
from keyfront.gateway.plan.measure.results import (
    CandidateResult,
    Choice,
    choose_candidate,
    greenlets,
)
from keyfront.gateway.plan.measure.server import Application
from keyfront.gateway.serve import state

from . import workload as workload_arguments
from .serve import check_target

#: The exit status where the plan cannot be met.
CONFLICT = 3

_SHORT = {"seconds": " s", "bytes": " B", "MiB": " MiB", "MiB a process": " MiB"}
_GAP = "  "
_NAMES = 29
_WIDEST = 150
# The numbers that a measurement decides.
_MEASURED = ("uwsgi.processes", "uwsgi.threads")
_MEASURE_OPTIONS = ("--seconds", "--state", "--path", "--headers-file")
_BAR = 24
# Bytes of a file with headers.
_MOST_HEADERS = 65536
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x1f\x7f]*)")
_KEYSTONE = ("OS_KEYSTONE_CONFIG_DIR", "OS_KEYSTONE_CONFIG_FILES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Compute processes, queues, pools and timeouts for a machine, each with what it was "
        "computed from and what breaks beyond it. Nothing is changed. The exit status is 3 if "
        "something cannot be met."
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help="print these only, for example uwsgi nginx (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    workload_arguments.add_workload_arguments(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--measure",
        action="store_true",
        help="start the application (KEYFRONT_APP, or the Keystone of keyfront serve) under the "
        "plan and its neighbours, load them in turn, and take the best; needs uWSGI",
    )
    group.add_argument(
        "--seconds",
        metavar="N",
        help=f"that it takes in all, 10 to 3600 (default: {rounds.DEFAULT_SECONDS})",
    )
    group.add_argument(
        "--state", type=Path, metavar="DIR", help="the state folder of keyfront serve"
    )
    group.add_argument(
        "--path", metavar="/PATH", help="asked for by GET (default: /v3 of Keystone, otherwise /)"
    )
    group.add_argument(
        "--headers-file",
        type=Path,
        metavar="FILE",
        help="headers to send, one NAME: VALUE a line, for example X-Auth-Token",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Print the plan; returns the exit status.

    :raises OptionError: a figure is not one, or out of range
    :raises KeyfrontError: the application cannot be served
    """
    machine = workload_arguments.machine(arguments)
    workload = workload_arguments.workload(arguments)
    profile = workload_arguments.profile(arguments)
    made = plan(machine, workload, profile)
    choose(made, arguments.groups)
    _check_measure_options(arguments)
    measured = _measure(arguments, made, err) if arguments.measure else None
    if measured is not None and measured.taken is not None:
        taken = dataclasses.replace(
            workload, processes=measured.taken.processes, threads=measured.taken.threads
        )
        made = plan(machine, taken, profile)
    if arguments.json:
        out.write(as_json(made, choose(made, arguments.groups), measured))
    else:
        if measured is not None:
            out.write(measured.report())
        # who measures wants to know the outcome first, and may ask for more
        groups = arguments.groups or (_MEASURED if measured is not None else ())
        width = min(_WIDEST, shutil.get_terminal_size().columns)
        out.write(table(made, choose(made, groups), width=max(80, width)))
    out.flush()
    for conflict in made.conflicts:
        err.write(f"keyfront: {refusal(conflict)}\n")
    if measured is not None and not measured.choice.met:
        err.write(f"keyfront: latency cannot be met: {measured.choice.text}\n")
        return CONFLICT
    return CONFLICT if made.conflicts else 0


def choose(made: Plan, groups: Sequence[str]) -> list[Number]:
    """Return the numbers of some groups, ``uwsgi`` for example, or all; a name chooses one number.

    :param made: the plan
    :param groups: names of groups, or of single numbers; empty for all
    :raises OptionError: there is no such group
    """
    for group in groups:
        if group not in GROUPS and group not in made.numbers:
            raise OptionError("GROUP", group, f"one of {', '.join(GROUPS)}, or a number of one")
    return [
        number
        for number in made.numbers.values()
        if not groups or number.name in groups or _group(number.name) in groups
    ]


def refusal(conflict: Conflict) -> str:
    """Return in one line what cannot be met and which number must give."""
    return (
        f"{conflict.name} = {conflict.wanted:g} cannot be met, there is room for "
        f"{conflict.limit:g}: {conflict.gives}"
    )


def as_json(
    made: Plan, numbers: Sequence[Number], measured: Measured | None = None
) -> str:
    """Return the plan for programs, in JSON; keys are only ever added.

    :param made: the plan
    :param numbers: those of its numbers that are told
    :param measured: the result of ``--measure``, if there is one
    """
    content: dict[str, Any] = {
        "keyfront": __version__,
        "machine": dataclasses.asdict(made.machine),
        "workload": dataclasses.asdict(made.workload),
        "profile": made.profile.name,
        "numbers": {
            number.name: {
                "value": number.value,
                "unit": number.unit,
                "source": number.source,
                "breaks": number.breaks,
            }
            for number in numbers
        },
        "conflicts": [dataclasses.asdict(conflict) for conflict in made.conflicts],
    }
    if measured is not None:
        content["measurement"] = measured.as_dict()
    return json.dumps(content, indent=2) + "\n"


def table(made: Plan, numbers: Sequence[Number], *, width: int = 80) -> str:
    """Return the plan for people.

    :param width: columns, at least 80
    """
    source = (width - _NAMES - 2 * len(_GAP)) // 2
    widths = (_NAMES, source, width - _NAMES - source - 2 * len(_GAP))
    lines = [*textwrap.wrap(_heading(made), width), ""]
    lines += _row((["number"], ["computed from"], ["what breaks"]), widths)
    for group, members in groupby(numbers, key=lambda number: _group(number.name)):
        lines += ["", group]
        for number in members:
            cells = (
                _named(number),
                _wrapped(number.source, widths[1]),
                _wrapped(number.breaks, widths[2]),
            )
            lines += _row(cells, widths)
    for text in made.profile.gives_up:
        if text == made.profile.gives_up[0]:
            lines += ["", f"What profile {made.profile.name} does without:"]
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a cell; a name that is wider than it is broken where its words end."""
    return textwrap.wrap(
        " ".join(part for word in text.split() for part in _parts(word, width)), width
    )


def _parts(word: str, width: int) -> Iterator[str]:
    """Give parts of a word, two of which no line can hold: they stay apart."""
    part = ""
    for piece in re.findall(r"[^._]*[._]+|[^._]+$", word) if len(word) > width else (word,):
        if part and len(part) + len(piece) > width:
            yield part
            part = ""
        part += piece
    if part:
        yield part


def _heading(made: Plan) -> str:
    machine, workload = made.machine, made.workload
    parts = [
        f"{machine.cores} core{'s' * (machine.cores != 1)} ({machine.cores_from})",
        f"{machine.memory_mib} MiB ({machine.memory_from})",
        f"{workload.nodes} node{'s' * (workload.nodes != 1)}",
        f"profile {made.profile.name}",
        f"answers within {workload.latency:g} s",
    ]
    return f"keyfront {__version__} plans for " + ", ".join(parts)


def _group(name: str) -> str:
    return name.partition(".")[0]


def _named(number: Number) -> list[str]:
    """Return the lines of the first column: name and value, below a long name the value."""
    name = f"  {number.name.partition('.')[2]}"
    value = shown(number)
    if len(name) + 1 + len(value) <= _NAMES:
        return [f"{name}{value.rjust(_NAMES - len(name))}"]
    return [name, value.rjust(_NAMES)]


def shown(number: Number) -> str:
    """Return the value with its unit, if it needs one."""
    if number.value == 0 and number.source.startswith("off"):
        return "off"
    return f"{number.value}{_SHORT.get(number.unit, '')}"


def _row(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measurement and what follows from it."""

    path: str
    latency: float
    measurement: rounds.Measurement
    choice: Choice

    @property
    def taken(self) -> Candidate | None:
        """The workers to compute the plan with; ``None`` keeps the computed ones."""
        taken = self.choice.taken
        return None if taken == self.measurement.results[0].candidate else taken

    @property
    def bound(self) -> bool:
        """True if the load generator, and not the application, may be what was measured."""
        return self.measurement.generator_busy >= rounds.BOUND

    def report(self) -> str:
        """Return the measurement for people."""
        made = self.measurement
        names = [_candidate_name(result, index) for index, result in enumerate(made.results)]
        width = max(map(len, names))
        lines = [
            f"GET {self.path} with {made.connections} requests at a time, {made.rounds} rounds of "
            f"{made.seconds:.2f} s, in turn and back",
            "",
            f"{'':{width}}  a second       p50       p99  failed  x plan",
        ]
        first = made.results[0].rate
        for name, result in zip(names, made.results, strict=True):
            times = f"{result.rate / first:.2f}" if first else "-"
            lines.append(
                f"{name:{width}} {result.rate:9.1f} {_ms(result.within(0.5))} "
                f"{_ms(result.within(0.99))} {result.failed:7} {times:>7}"
            )
        lines += ["", *textwrap.wrap(self.choice.text, 80)]
        lines += textwrap.wrap(greenlets(made.results, self.choice, self.latency) or "", 80)
        if self.bound:
            text = f"the load generator computed {made.generator_busy:.0%} of the time: faster "
            lines += textwrap.wrap(f"{text} plans would look the same", 80)
        return "\n".join(lines) + "\n\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for programs."""
        made = self.measurement
        return {
            "path": self.path,
            "connections": made.connections,
            "rounds": made.rounds,
            "seconds": made.seconds,
            "generator_busy": made.generator_busy,
            "generator_bound": self.bound,
            "candidates": [
                {
                    "processes": result.candidate.processes,
                    "threads": result.candidate.threads,
                    "greenlets": result.candidate.greenlets,
                    "rates": list(result.rates),
                    "rate": result.rate,
                    "p50": result.within(0.5) if result.latencies else None,
                    "p99": result.within(0.99) if result.latencies else None,
                    "failed": result.failed,
                }
                for result in made.results
            ],
            "taken": str(self.choice.taken),
            "met": self.choice.met,
            "margin": self.choice.margin,
            "noise": self.choice.noise,
            "verdict": self.choice.text,
            "greenlets": greenlets(made.results, self.choice, self.latency),
        }


def _check_measure_options(arguments: argparse.Namespace) -> None:
    """Find out that no option of a measurement is given without one.

    :raises OptionError: one is
    """
    for option in _MEASURE_OPTIONS:
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value is not None and not arguments.measure:
            raise OptionError(option, value, "used with --measure")


def _measure(arguments: argparse.Namespace, plan: Plan, err: TextIO) -> Measured:
    """Measure the plan and its neighbours; nothing is left running.

    :raises OptionError: an option is out of range
    :raises KeyfrontError: the application cannot be served
    """
    seconds = str(rounds.DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds)
    bounds = rounds.SECONDS[0], rounds.SECONDS[-1]
    length = ranges.whole("--seconds", seconds, *bounds, "a number of seconds, 10 to 3600")
    application = _application(arguments)
    with _progress(err) as progress, _interrupted_by_sigterm():
        made = rounds.measure(candidates(plan), application, length, progress)
    return Measured(
        path=application.path,
        latency=plan.workload.latency,
        measurement=made,
        choice=choose_candidate(made.results, plan.workload.latency),
    )


def _application(arguments: argparse.Namespace) -> Application:
    target = os.environ.get(loading.TARGET_VARIABLE)
    keystone = target is None
    path = arguments.path or ("/v3" if keystone else "/")
    if not re.fullmatch(r"/[!-~]*", path):
        raise OptionError("--path", path, "a path that begins with / and has no blanks")
    headers = {} if arguments.headers_file is None else _headers(arguments.headers_file)
    environment: dict[str, str] = {}
    if arguments.state is not None or (
        keystone and not any(os.environ.get(name) for name in _KEYSTONE)
    ):
        folder = state.State(arguments.state or state.default_path())
        if not folder.check():
            raise StateError(
                f"{folder.path}: there is no Keystone to measure; run keyfront serve once, name "
                "another folder with --state, or set KEYFRONT_APP"
            )
        environment = folder.environment()
    target = target or loading.default_target()
    check_target(target)
    return Application(target=target, environment=environment, path=path, headers=headers)


def _headers(file: Path) -> dict[str, str]:
    """Return the headers in a file; no error shows what is in it."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_HEADERS:
            raise OptionError("--headers-file", file, "a file of at most 64 KiB")
        text = file.read_text(encoding="latin-1")
    except OSError as error:
        raise OptionError(
            "--headers-file", file, f"a file that can be read: {error.strerror}"
        ) from None
    if found.st_mode & stat.S_IROTH:
        raise OptionError("--headers-file", file, "readable by its owner only; chmod 600 makes it")
    headers: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _HEADER.fullmatch(line.strip())
        if match is None:
            raise OptionError("--headers-file", f"{file}, line {number}", "NAME: VALUE")
        headers[match[1]] = match[2].strip()
    return headers


@contextlib.contextmanager
def _progress(err: TextIO) -> Iterator[rounds.Progress]:
    """Show a bar on a terminal, and nothing elsewhere; gives the function that moves it."""
    if not err.isatty():
        yield lambda done, text: None
        return
    width = min(100, shutil.get_terminal_size().columns - 1)

    def show(done: float, text: str) -> None:
        done = min(1.0, max(0.0, done))
        full = round(done * _BAR)
        line = f"[{'#' * full}{'.' * (_BAR - full)}] {done:4.0%}  {text}"
        err.write(f"\r{line[:width]:{width}}")
        err.flush()

    try:
        yield show
    finally:
        err.write(f"\r{'':{width}}\r")
        err.flush()


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end a measurement as Ctrl-C does, so that programs it started are stopped."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _candidate_name(result: CandidateResult, index: int) -> str:
    return f"{result.candidate}{' (plan)' if index == 0 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:6.1f} ms" if seconds < 100 else f"{'-':>9}"

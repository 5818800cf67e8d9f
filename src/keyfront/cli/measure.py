"""What ``keyfront plan --measure`` does: tries the plan and its neighbours on the application."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import stat
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keyfront.errors import OptionError, StateError
from keyfront.gateway import application as loading
from keyfront.gateway.plan.compute import Plan
from keyfront.gateway.plan.measure import rounds
from keyfront.gateway.plan.measure.candidates import Candidate, candidates
from keyfront.gateway.plan.measure.results import Trial, Verdict, greenlets, judge
from keyfront.gateway.plan.measure.server import Application
from keyfront.gateway.serve import command, state

_OPTIONS = ("--seconds", "--state", "--path", "--headers-file")
_BAR = 24
# Bytes of a file with headers.
_MOST_HEADERS = 65536
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x1f\x7f]*)")
_KEYSTONE = ("OS_KEYSTONE_CONFIG_DIR", "OS_KEYSTONE_CONFIG_FILES")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measurement and what follows from it."""

    path: str
    latency: float
    measurement: rounds.Measurement
    verdict: Verdict

    @property
    def taken(self) -> Candidate | None:
        """What the plan shall be made with; ``None`` keeps the computed one."""
        taken = self.verdict.taken
        return None if taken == self.measurement.trials[0].candidate else taken

    @property
    def bound(self) -> bool:
        """Whether the load generator may be what was measured."""
        return self.measurement.generator_busy >= rounds.BOUND

    def report(self) -> str:
        """The measurement for people."""
        made = self.measurement
        names = [_name(trial, index) for index, trial in enumerate(made.trials)]
        width = max(map(len, names))
        lines = [
            f"GET {self.path} with {made.connections} requests at a time, {made.rounds} rounds of "
            f"{made.seconds:.2f} s, in turn and back",
            "",
            f"{'':{width}}  a second       p50       p99  failed  x plan",
        ]
        first = made.trials[0].rate
        for name, trial in zip(names, made.trials, strict=True):
            times = f"{trial.rate / first:.2f}" if first else "-"
            lines.append(
                f"{name:{width}} {trial.rate:9.1f} {_ms(trial.within(0.5))} "
                f"{_ms(trial.within(0.99))} {trial.failed:7} {times:>7}"
            )
        lines += ["", *textwrap.wrap(self.verdict.text, 80)]
        lines += textwrap.wrap(greenlets(made.trials, self.verdict, self.latency) or "", 80)
        if self.bound:
            text = f"the load generator computed {made.generator_busy:.0%} of the time: faster "
            lines += textwrap.wrap(f"{text} plans would look the same", 80)
        return "\n".join(lines) + "\n\n"

    def as_dict(self) -> dict[str, Any]:
        """The measurement for programs."""
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
                    "processes": trial.candidate.processes,
                    "threads": trial.candidate.threads,
                    "greenlets": trial.candidate.greenlets,
                    "rates": list(trial.rates),
                    "rate": trial.rate,
                    "p50": trial.within(0.5) if trial.latencies else None,
                    "p99": trial.within(0.99) if trial.latencies else None,
                    "failed": trial.failed,
                }
                for trial in made.trials
            ],
            "taken": str(self.verdict.taken),
            "met": self.verdict.met,
            "margin": self.verdict.margin,
            "noise": self.verdict.noise,
            "verdict": self.verdict.text,
            "greenlets": greenlets(made.trials, self.verdict, self.latency),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a measurement."""
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


def check(arguments: argparse.Namespace) -> None:
    """:raises OptionError: an option of a measurement is given without one"""
    for option in _OPTIONS:
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value is not None and not arguments.measure:
            raise OptionError(option, value, "used with --measure")


def run(arguments: argparse.Namespace, plan: Plan, err: TextIO) -> Measured:
    """Measure the plan and its neighbours; nothing is left running.

    :raises OptionError: an option is out of range
    :raises KeyfrontError: the application cannot be served
    """
    seconds = str(rounds.DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds)
    allowed = "a number of seconds, 10 to 3600"
    if not re.fullmatch(r"[0-9]{1,4}", seconds) or int(seconds) not in rounds.SECONDS:
        raise OptionError("--seconds", seconds, allowed)
    application = _application(arguments)
    with _progress(err) as progress, _interrupted_by_sigterm():
        made = rounds.measure(candidates(plan), application, int(seconds), progress)
    return Measured(
        path=application.path,
        latency=plan.workload.latency,
        measurement=made,
        verdict=judge(made.trials, plan.workload.latency),
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
    command.check_target(target)
    return Application(target=target, environment=environment, path=path, headers=headers)


def _headers(file: Path) -> dict[str, str]:
    """What a file says is sent; no error shows what is in it."""
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
    """A bar on a terminal; nothing elsewhere."""
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
    """Let SIGTERM end a measurement as Ctrl-C does, so that what was started is stopped."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _name(trial: Trial, index: int) -> str:
    return f"{trial.candidate}{' (plan)' if index == 0 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:6.1f} ms" if seconds < 100 else f"{'-':>9}"

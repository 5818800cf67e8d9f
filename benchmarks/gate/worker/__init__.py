"""The gate's other side: a pytest plugin that runs a test in a process of its own and is asked.

It is copied out of keyfront and given to a pytest of any environment, which may know neither
keyfront nor this release of it, so it needs Python's library and pytest only. What it does there
says ``KEYFRONT_GATE_MODE``: ``serve`` (time the candidate whenever asked to), ``instructions``
(have callgrind count it) or ``syscalls`` (mark where strace shall count).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, TextIO
from urllib.parse import quote

import pytest

from . import callgrind, clock

MODE, REQUESTS, ANSWERS = "KEYFRONT_GATE_MODE", "KEYFRONT_GATE_REQUESTS", "KEYFRONT_GATE_ANSWERS"
TOPS = "KEYFRONT_GATE_TOPS"
# The path of a file that is not there: looking for it is what a trace is divided by.
MARK = "/keyfront-gate/{}/{}"
# Counts of instructions and of system calls, of which the least is meant: what is done now and
# then, as looking at a file each half second, is in few of them.
ROUNDS = 5

Step = Callable[[], object]


# What follows in the test looks at results, and there are none here: it is skipped.
@pytest.fixture
def paired() -> Callable[..., NoReturn]:
    """Serve the candidate; the baseline of the same process is not asked for here."""

    def serve(candidate: Step, baseline: Step | None = None, **_: Any) -> NoReturn:
        if os.environ[MODE] == "serve":
            with open(int(os.environ[REQUESTS])) as requests, _answers() as answers:
                _serve(candidate, requests, answers)
        pytest.skip("served")

    return serve


@pytest.fixture
def instructions(request: pytest.FixtureRequest) -> Callable[..., NoReturn]:
    """Count the instructions of some calls."""

    def count(step: Step, *, calls: int = 100, **_: Any) -> NoReturn:
        if os.environ[MODE] == "instructions":
            with _answers() as answers:
                triggers = callgrind.measure(step, calls, ROUNDS)
                _tell(
                    answers, {"name": _address(request.node), "triggers": triggers, "calls": calls}
                )
        pytest.skip("counted")

    return count


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Mark the calls whose system calls are counted."""

    def syscalls(step: Step, *, calls: int = 10, **_: Any) -> NoReturn:
        # strace shows only ASCII as it is
        name = quote(_address(request.node))
        if os.environ[MODE] == "syscalls":
            for _each in range(calls):
                step()
            gc.collect()
            gc.disable()
            for _round in range(ROUNDS):
                os.access(MARK.format("begin", name), os.F_OK)
                for _each in range(calls):
                    step()
                os.access(MARK.format("end", name), os.F_OK)
            gc.enable()
        pytest.skip("counted")

    return SimpleNamespace(syscalls=syscalls)


def _address(item: pytest.Item) -> str:
    return f"{item.path}::{item.nodeid.partition('::')[2]}"


def _answers() -> TextIO:
    return open(int(os.environ[ANSWERS]), "w", closefd=False)


def _tell(answers: TextIO, what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _serve(step: Step, requests: TextIO, answers: TextIO) -> None:
    """Do what the requests say: ``calibrate NANOSECONDS``, ``time CALLS``, until they end."""
    step()
    tops = os.environ.get(TOPS, "").split(",")
    _tell(answers, {top: _place(top) for top in tops if top in sys.modules})
    with clock.undisturbed():
        for line in requests:
            what, _, value = line.partition(" ")
            if what == "calibrate":
                _tell(answers, clock.calibrate(step, int(value)))
            else:
                # the other side ran in between, on this processor
                step()
                _tell(answers, clock.batch(step, int(value)))


def _place(name: str) -> str:
    module = sys.modules[name]
    return module.__file__ or next(iter(module.__path__), "")

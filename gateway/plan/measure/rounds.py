"""The rounds of a measurement: all candidates run, and are loaded one after the other.

In turn and then back (ABBA), so that what changes slowly on the machine meets all of them alike.
Idle ones take no time of the cores.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from keyfront.common import unix_sockets
from keyfront.common.machine import cores
from keyfront.common.signals import held_back
from keyfront.errors import ServerError

from .candidates import Candidate
from .generator import Order, Result
from .results import CandidateResult
from .server import Application, Running, running, wait

DEFAULT_SECONDS = 60
SECONDS = range(10, 3601)
# The least of a candidate's time in a round of which anything can be told.
_LEAST_SLICE = 0.15
# An even number: every way there has its way back.
_ROUNDS = (4, 12)
# Seconds of a candidate's time in a round that more time is spent on rather than on more rounds.
_GOOD_SLICE = 1.2
_MOST_CONNECTIONS = 512
# Seconds left for stopping everything.
_REST = 2.5
#: The part of its time that a generator computes from which on it may be what is measured.
BOUND = 0.9

T = TypeVar("T")
#: A function that is told how far the measurement is, from 0 to 1, and the present step.
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of a measurement, and its circumstances.

    :param connections: requests in flight at a time
    :param seconds: counted of each candidate in each round
    :param generator_busy: the largest part of its time that a load generator computed
    """

    results: tuple[CandidateResult, ...]
    rounds: int
    seconds: float
    connections: int
    generator_busy: float


def measure(
    tried: Sequence[Candidate], application: Application, seconds: float, progress: Progress
) -> Measurement:
    """Load candidates in turn; returns when everything that was started has ended.

    :param tried: the candidates, the computed plan first
    :param seconds: time that it takes in all, at most, 10 to 3600
    :param progress: called before each step
    :raises ServerError: one does not start, or the time does not suffice
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:

        def begun(what: contextlib.AbstractContextManager[T]) -> T:
            # what a signal interrupts half begun would be left behind
            with held_back(signal.SIGINT, signal.SIGTERM):
                return stack.enter_context(what)

        parent = unix_sockets.temporary_parent()
        folder = Path(begun(tempfile.TemporaryDirectory(prefix="keyfront-plan-", dir=parent)))
        servers: list[Running] = []
        for number, candidate in enumerate(tried):
            progress((time.monotonic() - begin) / seconds, f"start {candidate}")
            own = folder / str(number)
            own.mkdir()
            servers.append(begun(running(candidate, application, own)))
            wait(servers[-1], application, begin + seconds / 2)
        load = begun(_generators())
        left = begin + seconds - _REST - time.monotonic()
        rounds, each = _divide(left, len(tried), seconds)
        connections = _connections(tried)
        results: list[list[Result]] = [[] for _ in tried]
        for turn in range(rounds):
            order = range(len(tried)) if turn % 2 == 0 else reversed(range(len(tried)))
            for index in order:
                done = (time.monotonic() - begin) / seconds
                progress(done, f"round {turn + 1} of {rounds}, {tried[index]}")
                # warm-up and the last answers take the rest
                what = Order(
                    port=servers[index].port,
                    request=application.request(),
                    connections=connections,
                    warm=each * 0.2,
                    seconds=each * 0.65,
                )
                results[index].append(load(what))
                servers[index].check()
        progress(1.0, "stop")
        # all at once: each takes a second
        for one in servers:
            one.stop()
    return Measurement(
        results=tuple(map(_result_of, tried, results)),
        rounds=rounds,
        seconds=each * 0.65,
        connections=connections,
        generator_busy=max(result["busy"] for one in results for result in one),
    )


def _divide(left: float, candidates: int, seconds: float) -> tuple[int, float]:
    """Return the number of rounds, and the seconds of each candidate in one."""
    least, most = _ROUNDS
    rounds = min(most, max(least, int(left / (candidates * _GOOD_SLICE)) // 2 * 2))
    each = left / (candidates * rounds)
    if each * 0.65 < _LEAST_SLICE:
        needed = seconds - left + candidates * least * _LEAST_SLICE / 0.65
        raise ServerError(
            f"--seconds = {seconds:g}: leaves no time to measure in, as starting {candidates} "
            f"candidates took {seconds - left:.1f} s; give at least {math.ceil(needed * 1.2)}"
        )
    return rounds, each


def _connections(tried: Sequence[Candidate]) -> int:
    slots = max(candidate.slots for candidate in tried if not candidate.greenlets)
    return max(4, min(_MOST_CONNECTIONS, 2 * slots))


@contextlib.contextmanager
def _generators() -> Iterator[Callable[[Order], Result]]:
    """Run processes that send requests, one for every four cores; gives the function that loads."""
    command = [sys.executable, "-P", "-m", "keyfront.gateway.plan.measure.generator"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    # Ctrl-C is for this process, which ends them by the end of their input
                    start_new_session=True,
                )
            )
            for _ in range(max(1, cores() // 4))
        ]
        for process in processes:
            stack.callback(process.kill)

        def load(order: Order) -> Result:
            share = math.ceil(order["connections"] / len(processes))
            line = json.dumps({**order, "connections": share}).encode() + b"\n"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return _together([_answer(process) for process in processes])

        yield load


def _answer(process: subprocess.Popen[bytes]) -> Result:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ServerError(f"the load generator (pid {process.pid}) ended by itself")
    result: Result = json.loads(line)
    return result


def _together(results: Sequence[Result]) -> Result:
    return Result(
        answers=sum(result["answers"] for result in results),
        failed=sum(result["failed"] for result in results),
        seconds=results[0]["seconds"],
        latencies=[latency for result in results for latency in result["latencies"]],
        busy=max(result["busy"] for result in results),
    )


def _result_of(candidate: Candidate, results: Sequence[Result]) -> CandidateResult:
    return CandidateResult(
        candidate=candidate,
        rates=tuple(result["answers"] / result["seconds"] for result in results),
        latencies=tuple(sorted(x for result in results for x in result["latencies"])),
        failed=sum(result["failed"] for result in results),
    )

"""Compares a test with itself in a release, each side in a process of its own.

Two processes that run the same code differ by about 1 %, since they lie differently in memory. So
one pair of processes may let a candidate pass, but never fail it: for that several fresh pairs
have to agree.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from keyfront.errors import BenchmarkError

from .child_processes import HERE, Place, StartError, Worker
from .outcome import Outcome
from .paired import control, measure
from .session import address
from .verdict import Verdict

if TYPE_CHECKING:
    from .session import GateSession

#: Pairs of processes that have to find a candidate too slow, before it is called so.
AGREE = 3
#: Pairs that may say otherwise, before it is called inconclusive.
DISAGREE = 2


def compare(session: GateSession, item: pytest.Item, *, seconds: float, new: str) -> Outcome:
    """Compare; fails the test if a side cannot be run.

    :param seconds: the seconds of each pair of processes, at most
    :param new: the reason for which the release may lack what is measured; else empty
    """
    assert session.release is not None
    try:
        release = session.release.place(session)
    except BenchmarkError as error:
        session.fail(error.message)
    node = address(item)
    rounds: list[Outcome] = []

    def measured(candidate: Worker, baseline: Worker) -> Outcome:
        return measure(item.nodeid, candidate, baseline, session.limit, seconds, session.seed)

    try:
        with ExitStack() as stack:
            first = stack.enter_context(Worker(session, release, node))
            candidate = stack.enter_context(Worker(session, HERE, node))
            try:
                first.wait()
            except StartError as error:
                if new and error.text:
                    return Outcome(item.nodeid, Verdict.NEW, session.limit, reason=new)
                session.fail(
                    f"{error.message}: if the release does not know it yet, say so by "
                    f'paired(..., new="why")\n{error.text}'
                )
            session.control_with(lambda: _control(session, first, release, node))
            candidate.wait()
            rounds.append(measured(candidate, first))
        while _undecided(rounds):
            with (
                Worker(session, HERE, node) as candidate,
                Worker(session, release, node) as baseline,
            ):
                candidate.wait()
                baseline.wait()
                rounds.append(measured(candidate, baseline))
    except StartError as error:
        session.fail(f"{error.message}\n{error.text}")
    return _together(rounds, session.release.name)


def _control(session: GateSession, first: Worker, release: Place, node: str) -> Outcome:
    with Worker(session, release, node) as second:
        second.wait()
        return control(first, second, session.seed)


def _undecided(rounds: list[Outcome]) -> bool:
    if rounds[0].verdict is not Verdict.FAIL:
        return False
    failed = sum(one.verdict is Verdict.FAIL for one in rounds)
    return failed < AGREE and len(rounds) - failed < DISAGREE


def _together(rounds: list[Outcome], name: str) -> Outcome:
    """Return the verdict of all pairs of processes, with the figures of the one in the middle."""
    failed = [one for one in rounds if one.verdict is Verdict.FAIL]
    chosen = sorted(failed or rounds, key=lambda one: one.interval.median)[len(failed) // 2]
    chosen.against = f"in {name}"
    chosen.rounds = [f"{one.ratio:.3f} {one.verdict}" for one in rounds]
    if failed and len(failed) < AGREE:
        chosen.verdict = Verdict.INCONCLUSIVE
        chosen.reason = "pairs of processes disagree"
    return chosen

"""The fixture ``paired``: a candidate against its baseline, judged by a limit on their ratio."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from .confidence_interval import Interval
from .outcome import Outcome
from .sampling import Here, Samples, Side, blocks, calibrated
from .session import Fixture
from .verdict import LEAST_SECONDS, LIMIT, MOST_SECONDS, Verdict, decide, judge
from .worker import clock

Step = Callable[[], object]

# Seconds that the control takes.
CONTROL_SECONDS = 0.5


class Paired(Fixture):
    """The value of the fixture, to be called once in a test."""

    name = "paired"

    def __call__(
        self,
        candidate: Step,
        baseline: Step | None = None,
        *,
        limit: float = LIMIT,
        seconds: float = MOST_SECONDS,
        new: str = "",
    ) -> Outcome:
        """Compare the times of two callables, and fail the test if the candidate is too slow.

        :param baseline: another implementation; with ``--gate-baseline`` it is not asked for,
            there the candidate is compared with itself in that release
        :param limit: the largest ratio of the candidate's time to the baseline's, greater than 0;
            0.2 says that it has to be five times as fast. Against a release it is always 1.03, or
            what ``--gate-limit`` says
        :param seconds: after which it is inconclusive, greater than 0
        :param new: the reason for which a release need not have what is measured; empty if it must
        :raises ValueError: an argument is outside its range
        """
        self._once()
        _check("limit", limit)
        _check("seconds", seconds)
        seconds = min(seconds, self._session.most_seconds)
        if self._session.untimed:
            candidate()
            if baseline is not None:
                baseline()
            outcome = Outcome(self._item.nodeid, Verdict.OFF, limit, reason=self._session.untimed)
        elif self._session.release is not None:
            from .release_comparison import compare

            outcome = compare(self._session, self._item, seconds=seconds, new=new)
        elif baseline is None:
            self._session.fail(
                f"{self._item.nodeid}: no baseline: give paired() another implementation, or run "
                "with --gate-baseline and a release"
            )
        else:
            sides, seed = (Here(candidate), Here(baseline)), self._session.seed
            self._session.control_with(lambda: control(Here(baseline), Here(baseline), seed))
            outcome = measure(self._item.nodeid, *sides, limit, seconds, seed)
        return self._session.conclude(self._item, outcome)


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} = {value}: must be greater than 0")


def _timed(
    candidate: Side, baseline: Side, seed: int, limit: float, most_seconds: float, least: float
) -> tuple[Verdict, Interval, Samples, float]:
    """Time two sides; returns the verdict, what it goes by, and the seconds it took.

    :param least: seconds before which no look is taken
    """
    start = time.monotonic()
    with clock.undisturbed():
        samples = calibrated(candidate, baseline, seed)
        pairs = blocks(candidate, baseline, samples)
        verdict, found = decide(pairs, limit=limit, most_seconds=most_seconds, least_seconds=least)
    return verdict, found, samples, time.monotonic() - start


def measure(
    name: str, candidate: Side, baseline: Side, limit: float, most_seconds: float, seed: int
) -> Outcome:
    """Time two sides until there is a verdict or no more time.

    :param seed: the seed of the order, made the gate's own by its name
    """
    seed ^= random.Random(name).getrandbits(31)
    bounds = limit, most_seconds, min(LEAST_SECONDS, most_seconds / 2)
    verdict, found, samples, spent = _timed(candidate, baseline, seed, *bounds)
    reason = "the time was over" if verdict is Verdict.INCONCLUSIVE else ""
    return Outcome(name, verdict, limit, found, samples, spent, reason=reason)


def control(first: Side, second: Side, seed: int) -> Outcome:
    """Compare two sides that are the same: what is found beyond 1 is the machine's, not theirs.

    Its limit is half of what :data:`LIMIT` leaves; FAIL says that the interval lies beyond it, on
    either side, so that this machine cannot be trusted now.
    """
    _, found, samples, spent = _timed(first, second, seed, LIMIT, CONTROL_SECONDS, CONTROL_SECONDS)
    half = math.sqrt(LIMIT)
    mirrored = Interval(-found.high, -found.median, -found.low)
    off = Verdict.FAIL in (judge(found, half), judge(mirrored, half))
    verdict = Verdict.FAIL if off else Verdict.PASS
    return Outcome("control (A/A)", verdict, half, found, samples, spent, against="itself")

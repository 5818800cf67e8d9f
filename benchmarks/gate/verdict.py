"""Decides whether a ratio is worse than its limit, better, or neither: looks at a growing sample.

A decision is taken only at certain numbers of values and when the time is over, and each look may
err by :data:`TAIL` on either side. So a change exactly at the limit is called worse with a chance
below 0.5 % (a test computes it, and one look more), one that is none,
with its ratio at 1, far less often; however long one looks.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Sequence

from .confidence_interval import Interval, interval

#: How many times its baseline's time a candidate may take.
LIMIT = 1.03
#: Numbers of blocks at which one looks; odd, so that the median is one of the values.
LOOKS = tuple(2**power - 1 for power in range(4, 14))
#: The chance of an error at one look, on one side.
TAIL = 0.0005
#: Seconds before the first decision: a burst of noise is over by then.
LEAST_SECONDS = 0.3
#: Seconds after which there is none.
MOST_SECONDS = 10.0


class Verdict(enum.StrEnum):
    """A judgement of a ratio."""

    PASS = "PASS"
    """The whole interval is within the limit."""
    FAIL = "FAIL"
    """The whole interval is beyond it."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The time was over before either was so."""
    NEW = "NEW"
    """There is nothing to compare with yet, and the test says why."""
    CHANGED = "CHANGED"
    """Another count than before, and the test says why."""
    MISSING = "NOT COUNTED"
    """What it takes to count is not installed here."""
    OFF = "NOT TIMED"
    """Times are not compared here: beside other processes of xdist, or switched off."""


def judge(found: Interval, limit: float) -> Verdict:
    """Say how an interval of log ratios lies to a limit."""
    if found.low > math.log(limit):
        return Verdict.FAIL
    if found.high <= math.log(limit):
        return Verdict.PASS
    return Verdict.INCONCLUSIVE


def decide(
    values: Iterable[float],
    *,
    limit: float = LIMIT,
    most_seconds: float = MOST_SECONDS,
    least_seconds: float = LEAST_SECONDS,
    looks: Sequence[int] = LOOKS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Verdict, Interval]:
    """Take log ratios until there is a verdict or no more time; returns it, and what is known.

    :param values: log ratios of independent blocks, without end
    :param limit: the limit of the ratio; greater than 0
    :param most_seconds: after which the last look is taken, and it may be inconclusive
    :param least_seconds: before which no look is taken
    :param looks: numbers of values, ascending; after the last it is inconclusive
    """
    seen: list[float] = []
    start = clock()
    for value in values:
        seen.append(value)
        elapsed = clock() - start
        over = elapsed >= most_seconds or len(seen) >= looks[-1]
        if over or (len(seen) in looks and elapsed >= least_seconds):
            found = interval(seen, TAIL)
            verdict = judge(found, limit)
            if over or verdict is not Verdict.INCONCLUSIVE:
                return verdict, found
    raise ValueError("there was nothing to look at, or it came to an end")

"""Computes the interval of a median by the sign test, with no assumption on the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Interval(NamedTuple):
    """A median and what it lies between; infinite where there are too few values to say."""

    low: float
    median: float
    high: float


def exactly(n: int, k: int, p: float) -> float:
    """Return the chance of ``k`` of ``n`` trials that succeed with chance ``p``, 0 < p < 1."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))


@cache
def sign_rank(n: int, tail: float) -> int:
    """Return the highest rank whose value exceeds the true median by a chance of at most ``tail``.

    Ranks count from 1; 0 if even the lowest of ``n`` values does so more often. This is the sign
    test: the value of rank r exceeds the median only if fewer than r values do not.
    """
    rank, chance = 0, exactly(n, 0, 0.5)
    while chance <= tail:
        rank += 1
        chance += exactly(n, rank, 0.5)
    return rank


def interval(values: Sequence[float], tail: float) -> Interval:
    """Return the median of some values, and the interval that misses the true one by 2 * ``tail``.

    :param values: at least one, independent of each other
    :param tail: the chance of a miss on each side, 0 < tail < 0.5
    """
    ordered = sorted(values)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    place = sign_rank(n, tail)
    if place == 0:
        return Interval(-math.inf, middle, math.inf)
    return Interval(ordered[place - 1], middle, ordered[n - place])

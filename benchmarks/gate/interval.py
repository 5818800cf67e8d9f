"""Computes the interval of a median, with no assumption on the noise.

Standard library only: the two distributions that are needed are sums of binomial terms.
"""

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


def _at_most(n: int, k: int, p: float) -> float:
    """Return the chance of at most ``k`` of ``n`` trials that succeed with chance ``p``."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    return min(sum(exactly(n, i, p) for i in range(k + 1)), 1.0)


@cache
def sign_rank(n: int, tail: float) -> int:
    """Return the highest rank whose value exceeds the true median by a chance of at most ``tail``.

    Ranks count from 1; 0 if even the lowest of ``n`` values does so more often. This is the sign
    test: the value of rank r exceeds the median only if fewer than r values do not.
    """
    low, high = 0, n // 2
    while low < high:
        middle = (low + high + 1) // 2
        if _at_most(n, middle - 1, 0.5) <= tail:
            low = middle
        else:
            high = middle - 1
    return low


@cache
def bootstrap_rank(n: int, tail: float) -> int:
    """Return the rank at which the bootstrap's distribution of the median reaches ``tail``.

    In closed form, without drawing: the median of ``n`` draws (odd) is at most the value of rank r
    if more than half of them are, and each is with chance r / n.
    """
    low, high = 1, n // 2 + 1
    while low < high:
        middle = (low + high) // 2
        if 1.0 - _at_most(n, n // 2, middle / n) >= tail:
            high = middle
        else:
            low = middle + 1
    return low


@cache
def rank(n: int, tail: float) -> int:
    """Return the rank of the lower end: the bootstrap's, or the sign test's if that is lower."""
    return min(sign_rank(n, tail), bootstrap_rank(n, tail))


def interval(values: Sequence[float], tail: float) -> Interval:
    """Return the median of some values, and the interval that misses the true one by 2 * ``tail``.

    :param values: at least one, independent of each other
    :param tail: the chance of a miss on each side, 0 < tail < 0.5
    """
    ordered = sorted(values)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    place = rank(n, tail)
    if place == 0:
        return Interval(-math.inf, middle, math.inf)
    return Interval(ordered[place - 1], middle, ordered[n - place])

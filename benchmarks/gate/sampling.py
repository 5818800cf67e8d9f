"""Takes pairs of times, interleaved: what disturbs the machine disturbs both sides alike."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .worker import clock

# Blocks on one processor, before the next one has its turn.
_BLOCKS_ON_ONE = 32


class Side(Protocol):
    """Something that can be timed: a callable of this process, or one of a worker."""

    pid: int
    """Whose processor is chosen; 0 for this thread."""

    def calibrate(self) -> int:
        """Return how many calls make a batch."""
        ...

    def batch(self, calls: int) -> int:
        """Nanoseconds of so many calls."""
        ...


class Here:
    """A callable of this process."""

    pid = 0

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def calibrate(self) -> int:
        return clock.calibrate(self._step)

    def batch(self, calls: int) -> int:
        return clock.batch(self._step, calls)


class Pair(NamedTuple):
    """Nanoseconds of a batch of each side, one right after the other."""

    candidate: int
    baseline: int


@dataclass
class Samples:
    """All pairs that were taken, in their order; two make a block.

    :ivar calls: calls in a batch of the candidate, and of the baseline
    :ivar seed: the number that the order of the blocks was drawn with
    """

    calls: tuple[int, int]
    seed: int
    pairs: list[Pair] = field(default_factory=list)

    def seconds(self, side: int) -> list[float]:
        """Return seconds per call in each batch of the candidate (0) or the baseline (1)."""
        return [pair[side] / self.calls[side] / 1e9 for pair in self.pairs]

    def ratios(self) -> list[float]:
        """Return the log ratio of each pair, candidate to baseline."""
        shift = math.log(self.calls[1] / self.calls[0])
        return [math.log(pair.candidate / pair.baseline) + shift for pair in self.pairs]


def blocks(candidate: Side, baseline: Side, samples: Samples) -> Iterator[float]:
    """Take blocks of two pairs without end, and yield the log ratio of each.

    A block is ABBA or BAAB, as the seed's coin falls: within it, neither side is earlier than the
    other, so that a drift of the machine's speed cancels out. What is yielded is the mean of its
    two pairs; blocks are independent of each other where pairs are not.
    """
    coin = random.Random(samples.seed)
    shift = math.log(samples.calls[1] / samples.calls[0])
    calls = samples.calls
    with _one_processor((candidate.pid, baseline.pid)) as move:
        while True:
            move()
            if coin.random() < 0.5:
                first = Pair(candidate.batch(calls[0]), baseline.batch(calls[1]))
                other = baseline.batch(calls[1])
                second = Pair(candidate.batch(calls[0]), other)
            else:
                other = baseline.batch(calls[1])
                first = Pair(candidate.batch(calls[0]), other)
                second = Pair(candidate.batch(calls[0]), baseline.batch(calls[1]))
            samples.pairs += (first, second)
            both = first.candidate * second.candidate / (first.baseline * second.baseline)
            yield math.log(both) / 2 + shift


def calibrated(candidate: Side, baseline: Side, seed: int) -> Samples:
    """Find out how many calls a batch takes: as many for both sides if they are about as fast."""
    calls = candidate.calibrate(), baseline.calibrate()
    if max(calls) <= 2 * min(calls):
        calls = min(calls), min(calls)
    return Samples(calls, seed)


@contextmanager
def _one_processor(pids: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Both sides on the same processor, on each in turns; as before when the block ends."""
    try:
        allowed = {pid: os.sched_getaffinity(pid) for pid in pids}
    except (AttributeError, OSError):
        allowed = {}
    common = sorted(set.intersection(*allowed.values())) if allowed else []
    moves = _turns(pids, common)
    try:
        yield lambda: next(moves)
    finally:
        for pid, processors in allowed.items():
            _place(pid, processors)


def _turns(pids: Sequence[int], processors: Sequence[int]) -> Iterator[None]:
    while True:
        for processor in processors or (None,):
            for number in range(_BLOCKS_ON_ONE):
                if number == 0 and processor is not None:
                    for pid in set(pids):
                        _place(pid, (processor,))
                yield


def _place(pid: int, processors: Iterable[int]) -> None:
    try:
        os.sched_setaffinity(pid, processors)
    except OSError:
        pass  # a container may forbid it, and a worker may have gone: that shows elsewhere

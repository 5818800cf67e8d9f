"""The outcome of one gate, a ratio or a count: lines for the terminal, and objects for a file."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from .confidence_interval import Interval
from .sampling import Samples
from .verdict import TAIL, Verdict

NANO = 1e9
UNKNOWN = Interval(-math.inf, 0.0, math.inf)


@dataclass
class Outcome:
    """The result of ``paired``.

    :ivar name: the test's node id
    :ivar limit: the limit of the ratio
    :ivar interval: the interval of the ratio's logarithm; without meaning if there are no samples
    :ivar samples: all pairs; ``None`` if nothing was timed
    :ivar seconds: the time that it took
    :ivar against: the baseline, in words
    :ivar reason: the reason for which it is no plain PASS or FAIL; empty otherwise
    :ivar title: the first line of what the test says of itself
    :ivar rounds: verdicts of further pairs of processes, the first included
    """

    name: str
    verdict: Verdict
    limit: float
    interval: Interval = UNKNOWN
    samples: Samples | None = None
    seconds: float = 0.0
    against: str = "in the same process"
    reason: str = ""
    rounds: list[str] = field(default_factory=list)
    title: str = ""

    @property
    def ratio(self) -> float:
        """The candidate's time in multiples of the baseline's: the median of the blocks."""
        return math.exp(self.interval.median)

    @property
    def low(self) -> float:
        """The interval's lower end, as a ratio."""
        return math.exp(self.interval.low)

    @property
    def high(self) -> float:
        """The interval's upper end, as a ratio."""
        return math.exp(self.interval.high)

    def line(self) -> str:
        """Return one line for the terminal's summary."""
        if self.samples is None:
            return f"{self.verdict:<13}{self.name}: {self.reason}"
        more = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.verdict:<13}{_times(self.ratio):>8} [{_times(self.low)}, {_times(self.high)}] "
            f"limit {self.limit:.4g}, {len(self.samples.pairs)} pairs, {self.seconds:.1f} s  "
            f"{self.name}{more}"
        )

    def failure(self) -> str:
        """Return what a failed test says."""
        if self.samples is None:
            return self.reason
        candidate, baseline = (statistics.median(self.samples.seconds(side)) for side in (0, 1))
        rounds = f"\npairs of processes: {', '.join(self.rounds)}" if self.rounds else ""
        more = f"\n{self.reason}" if self.reason else ""
        return (
            f"{self.verdict}: the candidate takes {_times(self.ratio)} times the baseline's time, "
            f"limit {self.limit:.4g}\n"
            f"interval {_times(self.low)} to {_times(self.high)} ({1 - 2 * TAIL:.1%}), "
            f"{len(self.samples.pairs)} pairs, batches of {self.samples.calls[0]} and "
            f"{self.samples.calls[1]} calls, seed {self.samples.seed}\n"
            f"candidate {_time(candidate)}, baseline {_time(baseline)} per call (medians), "
            f"baseline {self.against}{rounds}{more}"
        )

    def described(self) -> dict[str, Any]:
        """Return it for a file, with the raw pairs; no number where there is none."""
        plain = ("name", "title", "limit", "against", "reason", "rounds")
        found: dict[str, Any] = {name: getattr(self, name) for name in plain}
        found |= {"verdict": str(self.verdict), "seconds": round(self.seconds, 3)}
        if self.samples is None:
            return found
        return found | {
            "ratio": self.ratio,
            "low": self.low if math.isfinite(self.interval.low) else None,
            "high": self.high if math.isfinite(self.interval.high) else None,
            "confidence": 1 - 2 * TAIL,
            "calls": list(self.samples.calls),
            "seed": self.samples.seed,
            "candidate_seconds": statistics.median(self.samples.seconds(0)),
            "baseline_seconds": statistics.median(self.samples.seconds(1)),
            "pairs_ns": [list(pair) for pair in self.samples.pairs],
        }


def _times(ratio: float) -> str:
    """Three decimals, or of a small one two digits that say something."""
    return f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * NANO:.3g} ns"


@dataclass(frozen=True)
class Count:
    """One number of one test.

    :param name: the test's node id
    :param fixture: by which it was counted
    :param key: the thing that was counted; of instructions, the versions
    :param value: ``None`` if it was not counted
    :param recorded: ``None`` if nothing is
    :param reason: the reason for which it is no plain PASS or FAIL; empty otherwise
    """

    name: str
    fixture: str
    key: str
    verdict: Verdict
    value: int | None = None
    recorded: int | None = None
    reason: str = ""

    def line(self) -> str:
        """Return one line for the terminal's summary and for a failed test."""
        what = f"{self.key}: {self.value}" if self.value is not None else self.key
        was = f", recorded {self.recorded}" if self.recorded is not None else ""
        more = f" ({self.reason})" if self.reason else ""
        return f"{self.verdict:<13}{what}{was}{more}  {self.name}"

    def described(self) -> dict[str, Any]:
        """Return it for a file."""
        return {**asdict(self), "verdict": str(self.verdict)}

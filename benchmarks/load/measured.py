"""The figures of one run of a load generator, whichever it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CLOSED, OPEN = "closed", "open"
"""A closed loop sends the next request when one is answered, so it slows down with the server. An
open one sends at its times whatever happens, as clients that know nothing of each other do."""

# The share of its cores beyond which a generator, not the server, may have been the limit.
BUSY = 0.9
# Milliseconds by which an open loop may send too late, 99 of 100 times.
LATE = 10.0
# The same as a part of the latency it measures, if that is more.
LATE_SHARE = 0.1


class Request(NamedTuple):
    """The request that is repeated: a GET."""

    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One run.

    :param generator: its name
    :param loop: :data:`CLOSED` or :data:`OPEN`
    :param good: answers as wanted
    :param failures: the other requests, by kind: ``status 503``, ``connect``, ``timeout`` …
    :param seconds: for which it ran
    :param latencies: answers by their microseconds, of an open loop from the time at which they
        should have been sent; ``None`` if the generator does not tell them
    :param mixed: true if answers that failed are among the latencies
    :param longest: milliseconds of the slowest answer, if it is known
    :param generator_cpu: CPU seconds that the generator took
    :param threads: cores that the generator can use
    :param late: milliseconds within which an open loop sent 99 of 100 requests
    """

    generator: str
    loop: str
    good: int
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float
    latencies: Counter[int] | None = None
    mixed: bool = False
    longest: float | None = None
    generator_cpu: float
    threads: int = 1
    late: float | None = None

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def failed_share(self) -> float:
        """The share of requests that failed, 0 to 1."""
        everything = self.good + self.failed
        return self.failed / everything if everything else 0.0

    @property
    def generator_cores(self) -> float:
        """The number of cores that the generator kept busy."""
        return self.generator_cpu / self.seconds if self.seconds else 0.0

    @property
    def at_limit(self) -> bool:
        """True if the generator may have been the limit rather than what it measured."""
        busy = self.generator_cores >= BUSY * self.threads
        late = self.late or 0.0
        return busy or late > max(LATE, LATE_SHARE * (self.percentile(0.95) or 0.0))

    def percentile(self, fraction: float) -> float | None:
        """Return the milliseconds within which ``fraction`` of the good answers came, if known."""
        return percentile(self.latencies, fraction) if self.latencies and not self.mixed else None

    def sample(self) -> dict[str, Any]:
        """Return it for a result."""
        longest = self.longest
        if longest is None and self.latencies and not self.mixed:
            longest = max(self.latencies) / 1000
        more = {}
        if self.mixed and self.latencies:
            more = {"p99_with_failed_ms": percentile(self.latencies, 0.99)}
        return {
            "generator": self.generator,
            "loop": self.loop,
            "rate": round(self.rate, 2),
            "good": self.good,
            "failed": self.failed,
            "failures": dict(sorted(self.failures.items())),
            "seconds": round(self.seconds, 3),
            "p50_ms": self.percentile(0.50),
            "p95_ms": self.percentile(0.95),
            "p99_ms": self.percentile(0.99),
            "p999_ms": self.percentile(0.999),
            "longest_ms": longest,
            **more,
            "generator_cores": round(self.generator_cores, 3),
            "generator_limit": self.at_limit,
            "late_ms": self.late,
        }


def percentile(latencies: Mapping[int, int], fraction: float) -> float:
    """Return the milliseconds within which ``fraction`` of the answers came; 0 without answers.

    :param latencies: answers by their microseconds
    """
    wanted = fraction * sum(latencies.values())
    seen = 0
    for microseconds in sorted(latencies):
        seen += latencies[microseconds]
        if seen >= wanted:
            return microseconds / 1000
    return 0.0

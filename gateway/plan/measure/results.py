"""The results of the candidates, and the choice of the best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .candidates import Candidate

# A smaller gain is none, however steady it looks.
_LEAST_MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """A candidate and the answers it gave.

    :param rates: good answers per second, round by round
    :param latencies: seconds of all good answers, sorted
    :param failed: number of other answers, and of requests without any
    """

    candidate: Candidate
    rates: tuple[float, ...]
    latencies: tuple[float, ...]
    failed: int

    @property
    def rate(self) -> float:
        """Good answers per second, the median of the rounds."""
        return statistics.median(self.rates)

    def within(self, fraction: float) -> float:
        """Return the seconds within which a fraction of the answers came; infinite without any."""
        if not self.latencies:
            return float("inf")
        return self.latencies[min(len(self.latencies) - 1, int(fraction * len(self.latencies)))]

    def meets(self, latency: float) -> bool:
        """Return whether nothing failed and 99 of 100 answers came within ``latency`` seconds."""
        return not self.failed and self.within(0.99) <= latency


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The candidate to take, and why.

    :param taken: the fastest, or the computed plan if none is clearly faster
    :param met: true if ``taken`` answers within the latency target
    :param margin: the lead of the fastest over the computed plan; 0.1 is a tenth
    :param noise: half of the range of that margin over the rounds
    :param text: the same in words, one line
    """

    taken: Candidate
    met: bool
    margin: float
    noise: float
    text: str


def choose_candidate(results: Sequence[CandidateResult], latency: float) -> Choice:
    """Find the best by throughput among those that answer in time.

    One with greenlets is never taken: the plan's pools and memory are for threads.

    :param results: the computed plan first
    :param latency: seconds
    """
    computed = results[0]
    good = [one for one in results if one.meets(latency) and not one.candidate.greenlets]
    if not good:
        return Choice(
            taken=computed.candidate, met=False, margin=0.0, noise=0.0,
            text=f"none of them answers within {latency:g} s without failures: fewer connections, "
            "more cores or a longer latency target are needed",
        )
    best = max(good, key=lambda result: result.rate)
    if best is computed:
        return Choice(
            taken=computed.candidate, met=True, margin=0.0, noise=_spread(computed.rates),
            text=f"the computed plan is the best, {computed.candidate}; keep it",
        )
    if computed not in good:
        return Choice(
            taken=best.candidate, met=True, margin=0.0, noise=_spread(best.rates),
            text=f"{best.candidate} is the best; the computed plan does not answer within "
            f"{latency:g} s without failures",
        )
    ratios = [b / a for a, b in zip(computed.rates, best.rates, strict=True) if a]
    margin, noise = statistics.median(ratios) - 1, (max(ratios) - min(ratios)) / 2
    words = f"ahead by {margin:.1%}, with a noise of {noise:.1%} from round to round"
    # it must have been ahead in every round: the best of several looks better than it is
    if margin > max(noise, _LEAST_MARGIN) and min(ratios) > 1:
        return Choice(
            taken=best.candidate, met=True, margin=margin, noise=noise,
            text=f"{best.candidate} is the best, {1 + margin:.2f} times the computed plan: {words}",
        )
    return Choice(
        taken=computed.candidate, met=True, margin=margin, noise=noise,
        text=f"no clear winner, keep the computed plan: {best.candidate} is {words}",
    )


def greenlets(results: Sequence[CandidateResult], choice: Choice, latency: float) -> str | None:
    """Return a line on the candidate with greenlets if it is clearly ahead, otherwise ``None``.

    :param results: the results of all candidates
    :param choice: the candidate that was chosen
    :param latency: the seconds within which answers have to come
    """
    taken = next(result for result in results if result.candidate == choice.taken)
    for result in results:
        if not result.candidate.greenlets or not result.meets(latency):
            continue
        if min(result.rates) > max(taken.rates) * (1 + _LEAST_MARGIN):
            return (
                f"{result.candidate} would answer {result.rate / taken.rate:.2f} times as many, "
                "but the plan stays with threads: every greenlet may hold a connection of each "
                "pool; to serve with them: keyfront serve --server gevent"
                if taken.rate
                else f"only {result.candidate} would answer: keyfront serve --server gevent"
            )
    return None


def _spread(rates: Sequence[float]) -> float:
    middle = statistics.median(rates)
    return (max(rates) - min(rates)) / 2 / middle if middle else 0.0

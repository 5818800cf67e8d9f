"""The gate on this machine: it does not fail what is the same, and finds what is 5 % slower.

What is timed is a hot path of keyfront, a hit in the token cache: 105 hits against 100 are a
slowdown of exactly that. KEYFRONT_GATE_RUNS=30, on a machine of its own, has it judge that often,
and find what is slower in 95 of 100 runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import token_hit
from keyfront.benchmarks.compare.token_stand_in import Answers, request
from keyfront.benchmarks.gate.outcome import Outcome
from keyfront.benchmarks.gate.paired import measure
from keyfront.benchmarks.gate.sampling import Here
from keyfront.benchmarks.gate.verdict import LIMIT, Verdict

RUNS = int(os.environ.get("KEYFRONT_GATE_RUNS", "6"))
# Seconds: more than a decision takes, mostly even beside others.
MOST = 20.0 if "KEYFRONT_GATE_RUNS" in os.environ else 8.0


@pytest.fixture(scope="module")
def hits() -> Iterator[Callable[[int], Callable[[], None]]]:
    with token_hit.shared_folder() as folder:
        cache = token_hit.new_filter(Answers(), folder, 8)
        token_hit.fill(cache, 1)
        environ = request(0)

        def times(count: int) -> Callable[[], None]:
            def step() -> None:
                for _ in range(count):
                    token_hit.call(cache, environ.copy())

            return step

        yield times


@pytest.fixture
def busy() -> Iterator[None]:
    """Another process for each core, that wants all of it."""
    burn = "while True: sum(range(10000))"
    others = [
        subprocess.Popen(["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", burn])
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for other in others:
        other.kill()
        other.wait()


def judged(candidate: Callable[[], None], baseline: Callable[[], None], seed: int) -> Outcome:
    return measure(f"run {seed}", Here(candidate), Here(baseline), LIMIT, MOST, seed)


@pytest.mark.slow
def test_the_same_does_not_fail_beside_others(
    hits: Callable[[int], Callable[[], None]], busy: None
) -> None:
    found = [judged(hits(20), hits(20), seed) for seed in range(RUNS)]
    wrong = [outcome.line() for outcome in found if outcome.verdict is Verdict.FAIL]
    assert not wrong


@pytest.mark.slow
def test_a_slowdown_of_five_per_cent_is_never_called_none(
    hits: Callable[[int], Callable[[], None]]
) -> None:
    """Beside others the time may be over before it is found, and that is what is told then."""
    found = [judged(hits(105), hits(100), seed) for seed in range(RUNS)]
    lines = [outcome.line() for outcome in found]
    assert Verdict.PASS not in [outcome.verdict for outcome in found], lines
    if "KEYFRONT_GATE_RUNS" in os.environ:  # a machine of its own
        fails = [outcome for outcome in found if outcome.verdict is Verdict.FAIL]
        assert len(fails) >= 0.95 * RUNS, lines


@pytest.mark.slow
def test_a_doubled_time_is_found_beside_others(
    hits: Callable[[int], Callable[[], None]], busy: None
) -> None:
    outcome = judged(hits(40), hits(20), 1)
    assert outcome.verdict is Verdict.FAIL, outcome.line()

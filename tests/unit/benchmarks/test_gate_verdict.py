"""The gate's arithmetic: exact where it can be, and honest on machines that are simulated."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from keyfront.benchmarks.gate import confidence_interval, sampling, verdict
from keyfront.benchmarks.gate.confidence_interval import Interval
from keyfront.benchmarks.gate.verdict import LIMIT, LOOKS, TAIL, Verdict, decide, judge

RUNS = 500
# Chances below that are left out of sums.
LEAST = 1e-18


def false_failure_chance(looks: Sequence[int], tail: float, above: float = 0.5) -> float:
    """Return the exact chance that a median *at* a limit is called above it at any look.

    At each look of n values it is called so if the value of ``sign_rank(n, tail)`` is above the
    limit. That depends only on how many are, which is a random walk; so the chance is a sum, not an
    estimate. A median below the limit is called above it less often.

    :param looks: numbers of values at which one looks, ascending
    :param above: the chance of one value to be above the limit: 0.5 at the limit itself
    """
    # chance of each number of values above the limit, of runs that were not called yet
    walk = {0: 1.0}
    called, before = 0.0, 0
    for n in looks:
        step = n - before
        before = n
        chances = [confidence_interval.exactly(step, i, above) for i in range(step + 1)]
        more = [(i, chance) for i, chance in enumerate(chances) if chance > LEAST]
        after: dict[int, float] = {}
        for count, chance in walk.items():
            for i, part in more:
                after[count + i] = after.get(count + i, 0.0) + chance * part
        place = confidence_interval.sign_rank(n, tail)
        edge = n - place + 1 if place else n + 1
        called += sum(chance for count, chance in after.items() if count >= edge)
        walk = {count: one for count, one in after.items() if count < edge and one > LEAST}
    return called


class Machine:
    """Two sides on a noisy machine: jitter, a drifting speed, bursts, and lost time slices."""

    def __init__(self, seed: int, *, jitter: float = 0.02) -> None:
        self.now = 0.0
        self._dice = random.Random(seed)
        self._jitter = jitter
        self._drift = 0.0
        self._burst = 0

    def batch(self, seconds: float) -> int:
        dice = self._dice
        self._drift = 0.999 * self._drift + dice.gauss(0, 0.002)
        self._burst = self._burst - 1 if self._burst else 40 * (dice.random() < 0.002)
        took = seconds * math.exp(self._drift + dice.gauss(0, self._jitter))
        if self._burst:
            took *= 1 + dice.random()
        if dice.random() < 0.07:
            took += dice.choice((0.003, 0.004, 0.008))
        self.now += took
        return int(took * 1e9)


class Side:
    pid = 0

    def __init__(self, machine: Machine, seconds: float) -> None:
        self._machine, self._seconds = machine, seconds

    def calibrate(self) -> int:
        return 10

    def batch(self, calls: int) -> int:
        return self._machine.batch(self._seconds * calls)


def simulated(seed: int, ratio: float, *, jitter: float = 0.02) -> tuple[Verdict, float]:
    """The verdict on a candidate that takes ``ratio`` times as long, and its first block."""
    machine = Machine(seed, jitter=jitter)
    candidate, baseline = Side(machine, 3e-5 * ratio), Side(machine, 3e-5)
    samples = sampling.calibrated(candidate, baseline, seed)
    taken = sampling.blocks(candidate, baseline, samples)
    verdict, _ = decide(taken, clock=lambda: machine.now)
    return verdict, statistics.median(samples.ratios()[:6])


def test_the_same_code_fails_in_less_than_one_of_a_hundred_runs() -> None:
    results = [simulated(seed, 1.0) for seed in range(RUNS)]
    assert sum(verdict is Verdict.FAIL for verdict, _ in results) < RUNS * 0.01
    assert sum(verdict is Verdict.PASS for verdict, _ in results) > RUNS * 0.95
    # a gate of a few pairs' median would not hold on these machines
    assert sum(first > math.log(LIMIT) for _, first in results) > RUNS * 0.01


def test_a_change_just_at_the_limit_fails_as_seldom() -> None:
    dice = random.Random(5)
    looks = LOOKS[:7]
    fails = 0
    for _ in range(RUNS):
        values = iter(lambda: dice.gauss(math.log(LIMIT), 0.02), None)
        verdict, _ = decide(values, looks=looks, least_seconds=0, most_seconds=1e9)
        fails += verdict is Verdict.FAIL
    # 0.25 % by the exact chance: so many would be a chance of less than 0.1 %
    assert fails <= 6


def test_a_slowdown_of_five_per_cent_is_found() -> None:
    verdicts = [simulated(seed, 1.05)[0] for seed in range(RUNS // 2)]
    assert sum(verdict is Verdict.FAIL for verdict in verdicts) >= RUNS // 2 * 0.95
    assert Verdict.PASS not in verdicts


def test_the_chance_of_a_false_failure_is_what_it_is_said_to_be() -> None:
    chance = false_failure_chance(LOOKS, TAIL)
    # one look more comes with the end of the time
    assert 0.001 < chance < 0.005 - TAIL
    # a look at each of them errs on its own; together no more than their sum
    assert chance <= len(LOOKS) * TAIL
    # below the limit, where most values lie, next to never
    assert false_failure_chance(LOOKS, TAIL, above=0.3) < 1e-6


def test_the_exact_chance_agrees_with_counting_all_that_can_happen() -> None:
    looks, tail = (5, 11), 0.05
    called = 0
    for flips in itertools.product((0, 1), repeat=11):
        for n in looks:
            place = confidence_interval.sign_rank(n, tail)
            if place and sorted(flips[:n])[place - 1] == 1:
                called += 1
                break
    assert false_failure_chance(looks, tail) == pytest.approx(called / 2**11)


@pytest.mark.parametrize(("n", "tail"), [(15, 0.0005), (63, 0.0005), (101, 0.025), (8191, 0.0005)])
def test_the_sign_test_keeps_its_chance(n: int, tail: float) -> None:
    place = confidence_interval.sign_rank(n, tail)
    below = [math.comb(n, i) for i in range(place + 1)]
    assert Fraction(sum(below[:place]), 2**n) <= tail < Fraction(sum(below), 2**n)


@pytest.mark.parametrize("n", [15, 21, 63, 255])
def test_the_interval_is_not_narrower_than_the_bootstraps(n: int) -> None:
    draws = 20_000
    dice = random.Random(1)
    medians = sorted(sorted(dice.choices(range(1, n + 1), k=n))[n // 2] for _ in range(draws))
    assert confidence_interval.sign_rank(n, TAIL) <= medians[int(draws * TAIL)]


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    dice = random.Random(7)
    missed = 0
    for _ in range(2000):
        found = confidence_interval.interval([dice.lognormvariate(0, 1) for _ in range(31)], 0.025)
        missed += not found.low <= 1.0 <= found.high
    assert 0.01 < missed / 2000 < 0.05


def test_too_few_values_say_nothing() -> None:
    found = confidence_interval.interval([0.5, 0.7], TAIL)
    assert found == Interval(-math.inf, 0.6, math.inf)
    assert judge(found, LIMIT) is Verdict.INCONCLUSIVE


def test_the_limit_is_judged_by_the_whole_interval() -> None:
    edge = math.log(1.2)
    assert judge(Interval(edge + 0.01, edge + 0.02, edge + 0.03), 1.2) is Verdict.FAIL
    assert judge(Interval(edge - 0.03, edge - 0.02, edge), 1.2) is Verdict.PASS
    assert judge(Interval(edge - 0.01, edge + 0.02, edge + 0.03), 1.2) is Verdict.INCONCLUSIVE


def _endless(value: float) -> Iterator[float]:
    return itertools.cycle([value - 1e-6, value, value + 1e-6])


def test_no_decision_before_the_least_time_and_none_after_the_most() -> None:
    seconds = itertools.count()
    verdict, found = decide(
        _endless(1.0), least_seconds=100, most_seconds=1e9, clock=lambda: next(seconds)
    )
    assert verdict is Verdict.FAIL
    # the look at 63 came too early
    assert next(seconds) == 127 + 1
    seconds = itertools.count()
    verdict, found = decide(
        _endless(math.log(LIMIT)), least_seconds=0, most_seconds=40, clock=lambda: next(seconds)
    )
    assert verdict is Verdict.INCONCLUSIVE
    assert found.low <= math.log(LIMIT) <= found.high
    assert next(seconds) == 41


def test_the_last_look_ends_it() -> None:
    taken = itertools.count()
    edge = math.log(LIMIT)
    values = (edge + (1e-6 if next(taken) % 2 else -1e-6) for _ in itertools.count())
    verdict, _ = decide(values, least_seconds=0, most_seconds=1e9, looks=(15, 31))
    assert verdict is Verdict.INCONCLUSIVE
    assert next(taken) == 31


def test_nothing_to_look_at_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        verdict.decide([])


def test_the_end_of_the_time_is_a_look_too() -> None:
    for value, expected in ((1.0, Verdict.FAIL), (0.0, Verdict.PASS)):
        seconds = itertools.count()
        verdict, _ = decide(
            _endless(value), least_seconds=35, most_seconds=40, clock=lambda now=seconds: next(now)
        )
        assert verdict is expected
        assert next(seconds) == 41


class Slowing:
    """A machine that gets slower with each batch, so that whoever is timed later loses."""

    pid = 0

    def __init__(self, order: list[str], name: str) -> None:
        self._order, self._name = order, name

    def calibrate(self) -> int:
        return 4

    def batch(self, calls: int) -> int:
        self._order.append(self._name)
        return 1_000_000 * (1000 + len(self._order))


def test_a_drift_of_the_machine_cancels_out_in_a_block() -> None:
    order: list[str] = []
    samples = sampling.calibrated(Slowing(order, "A"), Slowing(order, "B"), 3)
    taken = sampling.blocks(Slowing(order, "A"), Slowing(order, "B"), samples)
    values = list(itertools.islice(taken, 40))
    assert {"".join(order[at : at + 4]) for at in range(0, 160, 4)} == {"ABBA", "BAAB"}
    assert max(map(abs, values)) < 1e-5
    # a pair by itself is not free of it
    assert min(abs(ratio) for ratio in samples.ratios()) > 1e-4


def test_the_order_is_the_seeds() -> None:
    def order(seed: int) -> list[str]:
        found: list[str] = []
        one, other = Slowing(found, "A"), Slowing(found, "B")
        samples = sampling.calibrated(one, other, seed)
        list(itertools.islice(sampling.blocks(one, other, samples), 20))
        return found

    assert order(1) == order(1) != order(2)


def test_sides_of_another_speed_have_batches_of_another_size() -> None:
    class Fixed(Slowing):
        def __init__(self, calls: int, nanoseconds: int) -> None:
            self._calls, self._each = calls, nanoseconds

        def calibrate(self) -> int:
            return self._calls

        def batch(self, calls: int) -> int:
            return calls * self._each

    fast, slow = Fixed(1000, 300), Fixed(10, 30_000)
    samples = sampling.calibrated(fast, slow, 1)
    assert samples.calls == (1000, 10)
    value = next(sampling.blocks(fast, slow, samples))
    assert value == pytest.approx(math.log(0.01))
    assert samples.ratios() == pytest.approx([value, value])
    assert samples.seconds(0) == pytest.approx([300e-9] * 2)
    assert sampling.calibrated(Fixed(100, 1), Fixed(51, 1), 1).calls == (51, 51)

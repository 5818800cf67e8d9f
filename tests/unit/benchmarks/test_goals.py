"""When a goal of the benchmarks counts as missed, and what a build makes of it."""

from __future__ import annotations

from collections import Counter

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import goals, ratios, token_validation
from keyfront.benchmarks.compare.goals import MET, MISSED, UNCLEAR, Goal
from keyfront.benchmarks.compare.loaded import Sample, Samples
from keyfront.benchmarks.compare.token_validation import CASES, RATIOS
from keyfront.benchmarks.load.measured import CLOSED, Load

AT_LEAST = Goal("one", "other", "rate", 0.9)
AT_MOST = Goal("one", "other", "p99", 2.0)


@pytest.mark.parametrize(
    ("goal", "ratios", "verdict"),
    [
        (AT_LEAST, [0.9, 0.95, 0.8], MET),
        (AT_LEAST, [0.89, 0.95, 0.8], UNCLEAR),
        (AT_LEAST, [0.89, 0.88, 0.8], MISSED),
        (AT_MOST, [2.0, 1.5, 9.0], MET),
        (AT_MOST, [2.1, 1.5, 9.0], UNCLEAR),
        (AT_MOST, [2.1, 2.2, 9.0], MISSED),
    ],
)
def test_missed_is_what_no_pair_meets(goal: Goal, ratios: list[float], verdict: str) -> None:
    assert goal.judge(ratios) == verdict


def test_every_goal_is_of_cases_that_are_measured_and_shown() -> None:
    for goal in goals.GOALS:
        assert {goal.first, goal.second} <= CASES.keys()
        assert (goal.first, goal.second) in RATIOS


def sample(rate: int, milliseconds: int) -> Sample:
    return Sample(
        Load(
            generator="wrk", loop=CLOSED, good=rate, seconds=1.0, generator_cpu=0.5,
            latencies=Counter({milliseconds * 1000: rate}),
        ),
        0.1,
    )  # fmt: skip


@pytest.fixture
def samples() -> Samples:
    """Two rounds: in the second one everything is half as fast."""
    rates = dict.fromkeys(CASES, 100) | {"bare": 10_000, "keyfront": 9_500}
    return {name: [sample(rate, 4), sample(rate // 2, 8)] for name, rate in rates.items()}


def test_a_ratio_is_taken_in_each_round(samples: Samples) -> None:
    for name in ("keyfront", "bare"):
        samples[name].append(sample(1000, 1))
    ratio = ratios.ratio(samples, "keyfront", "bare", "rate")
    assert ratio.pairs == (0.95, 0.95, 1.0)
    assert ratios.ratio(samples, "keyfront", "bare", "p99").pairs == (1.0, 1.0, 1.0)


def test_goals_are_judged_by_the_pairs(samples: Samples) -> None:
    verdicts = token_validation.report(samples, "").verdicts
    assert {verdict for _, verdict in verdicts} == {MET}
    samples["keyfront miss"] = [sample(97, 4), sample(48, 8)]
    verdicts = token_validation.report(samples, "").verdicts
    assert [text for text, verdict in verdicts if verdict == MISSED] == [
        "rate of keyfront miss / keystone miss >= 0.98: 0.96 (0.96 to 0.97)"
    ]


def test_the_tables_are_whole(samples: Samples) -> None:
    report = token_validation.report(samples, "the command")
    rates, ratios = report.tables
    text = results.markdown(rates)
    assert "| Keystone + keyfront | 7 100 | 4.0 | 8.0 | 0 | 14 | 0.50 | 95 |" in text
    assert "`the command`" in text
    rows = [line for line in results.markdown(ratios).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {5}
    wanted = "| 0.95 (0.95 to 0.95) | 1.00 (1.00 to 1.00) | rate >= 0.9, p99 <= 2 |"
    assert any(wanted in line for line in rows)
    assert all(len(line) <= 80 for line in results.plain(rates).splitlines())
    found = report.samples
    assert [one["requests"] for one in found if one["case"] == "keyfront"] == [9500, 4750]

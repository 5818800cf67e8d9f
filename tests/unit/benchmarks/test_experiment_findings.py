"""What an experiment's figures say: never better than they are."""

from __future__ import annotations

import pytest

from keyfront.benchmarks.experiments import findings
from keyfront.benchmarks.experiments.findings import BETTER, SAME, WORSE, Change, Point

POINTS = [
    Point("a", True, 10, 100.0, 0, 1000),
    Point("b", True, 10, 120.0, 3, 1000),
    Point("a", True, 200, 90.0, 0, 900),
    Point("b", True, 200, 90.0, 500, 1400),
    Point("ours", False, 10, 900.0, 0, 9000),
]


def change(stock: float, ours: float, **more: object) -> Change:
    return Change(
        what="Validations", stock=stock, stock_name="nginx", keyfront=ours, unit="a second", **more
    )


def test_the_best_stock_line_up_is_compared_with() -> None:
    assert findings.best_stock(POINTS, 10) == POINTS[1]
    # as many good answers: the one that refuses less
    assert findings.best_stock(POINTS, 200) == POINTS[2]
    assert findings.best_stock(POINTS, 5000) is None


def test_where_requests_begin_to_fail() -> None:
    assert findings.first_failing(POINTS, "b") == 200
    assert findings.first_failing(POINTS, "b", share=0.001) == 10
    assert findings.first_failing(POINTS, "a") is None


@pytest.mark.parametrize(
    ("stock", "ours", "more_is_better", "expected"),
    [
        (100, 900, True, BETTER),
        (100, 50, True, WORSE),
        (100, 105, True, SAME),
        (100, 95, True, SAME),
        (100, 50, False, BETTER),
        (100, 150, False, WORSE),
        (0, 0, False, SAME),
        (0, 3, False, WORSE),
        (0, 3, True, BETTER),
        (3, 0, False, BETTER),
        (3, 0, True, WORSE),
    ],
)
def test_worse_is_said_when_it_is_worse(
    stock: float, ours: float, more_is_better: bool, expected: str
) -> None:
    found = change(stock, ours, more_is_better=more_is_better)
    assert found.verdict == expected
    assert found.sentence.count(expected) == 1
    for other in {BETTER, WORSE} - {expected}:
        assert other not in found.sentence


def test_pairs_that_disagree_show_no_difference() -> None:
    assert change(100, 300, pairs=[0.9, 3.0, 3.1, 3.2, 3.0, 3.0]).verdict == SAME
    # a small one that every pair shows is one
    small = [1.03, 1.04, 1.05] * 2
    assert change(100, 104, pairs=small).verdict == BETTER
    assert change(100, 104, pairs=small, more_is_better=False).verdict == WORSE
    # fewer pairs may do so by chance
    assert change(100, 104, pairs=small[:5]).verdict == SAME


def test_short_points_on_a_busy_machine_show_little() -> None:
    assert findings.chance(quick=False, quiet=True) == findings.CHANCE
    rough = findings.chance(quick=True, quiet=True)
    assert findings.CHANCE < rough == findings.chance(quick=False, quiet=False)
    roughest = findings.chance(quick=True, quiet=False)
    assert roughest > rough
    assert change(10, 24, chance=roughest).verdict == SAME
    assert change(10, 24).verdict == BETTER
    assert change(20, 17600, chance=roughest).verdict == BETTER
    assert f"factor of {roughest:g}" in findings.changes([change(1, 2)], roughest).caption


def test_a_sentence_stands_alone() -> None:
    assert change(20, 17600).sentence == (
        "Validations: 17 600 a second with keyfront, 20 with nginx: better, 880 times as many."
    )
    found = change(1000, 1.25, more_is_better=False, because="It does not reconnect.")
    assert found.sentence.endswith("with nginx: better, 800 times less. It does not reconnect.")


def test_the_table_of_changes_has_a_cell_for_each_column() -> None:
    table = findings.changes([change(20, 17600), change(0, 0)])
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[1][table.columns.index("times")] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.0, "2"), (0.031, "0.03"), (8.14, "8.1"), (812.4, "812"), (28123, "28 100")],
)
def test_numbers_have_the_digits_that_mean_something(value: float, text: str) -> None:
    assert findings.number(value) == text


def test_rates_are_alike_as_far_as_single_runs_can_tell() -> None:
    assert findings.alike(100, 118)
    assert findings.alike(0, 0)
    assert not findings.alike(100, 130)
    assert not findings.alike(0, 1)


def test_what_was_not_tried_is_not_judged() -> None:
    verdicts = [findings.Finding("", "", "", holds).verdict for holds in (None, True, False)]
    assert verdicts == [findings.UNKNOWN, findings.AS_PUBLISHED, findings.OTHERWISE]

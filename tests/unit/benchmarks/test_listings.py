"""The table of what is read of an unchanged cloud."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import listings
from keyfront.benchmarks.compare.listings import NAMES, PATHS


def test_ratios_are_medians_round_by_round() -> None:
    rates = {NAMES[0]: [10.0, 20.0, 10.0], NAMES[1]: [20.0, 20.0, 30.0]}
    samples = {name: [dict.fromkeys(PATHS, x) for x in own] for name, own in rates.items()}
    (table,) = listings.report(samples).tables
    assert table.columns == ["a second", "Keystone + memcached", "Keystone + keyfront", "times"]
    assert table.rows == [[path, "10", "20", "2.0 (1.0 to 3.0)"] for path in PATHS]

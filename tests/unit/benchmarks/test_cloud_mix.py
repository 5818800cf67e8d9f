"""The table of the cloud's mix."""

from __future__ import annotations

from keyfront.benchmarks.compare import cloud_mix
from keyfront.benchmarks.compare.cloud_mix import NAMES, PHASES, Sample


def sample(seconds: float) -> Sample:
    return dict.fromkeys(PHASES, (100, seconds))


def test_rates_and_ratios_are_medians_round_by_round() -> None:
    samples = {
        "keystone": [sample(10), sample(20), sample(40)],
        "memcached": [sample(1), sample(4), sample(2)],
        "keyfront": [sample(0.5), sample(1), sample(1)],
    }
    assert tuple(samples) == NAMES
    head, _, *lines = cloud_mix.table(samples).split("\n")
    assert head == "| | logins/s | first/s | repeated/s | re-scopes/s | whole |"
    assert lines[0].startswith("| Keystone | 5 (0.1 times) | 5 (0.1 times) | ")
    assert lines[0].endswith("| 80.0 s (0.1 times as fast) |")
    assert lines[1].endswith("| 8.0 s (1 times as fast) |")
    assert lines[2].endswith("| 4.0 s (2 times as fast) |")
    assert lines[2].startswith("| Keystone + keyfront | 100 (2 times) |")

"""The comparison of wakeups beside a hash: it measures all cases, and gives the cores back."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("bcrypt")

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import hash_wakeups
from keyfront.gateway.keystone.password_hashing import slice_of


@pytest.mark.skipif(not slice_of(), reason="the kernel has no slices of a thread's own")
def test_all_cases_are_measured() -> None:
    cores = os.sched_getaffinity(0)
    (table,) = hash_wakeups.report(hash_wakeups.measure(1, 0.05)).tables
    assert [row[0] for row in table.rows] == [*hash_wakeups.CASES]
    assert max(map(len, results.plain(table).splitlines())) <= 80
    assert os.sched_getaffinity(0) == cores


def test_a_kernel_without_slices_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hash_wakeups, "slice_of", lambda: 0)
    assert hash_wakeups.main([]) == 2
    assert "Linux 6.12" in capsys.readouterr().err

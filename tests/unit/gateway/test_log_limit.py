"""Lines of one kind in a second, and the count of those that are left out."""

from __future__ import annotations

from keyfront.gateway.log_limit import LogLimit


def test_what_is_left_out_is_told_with_the_next_line() -> None:
    now = 100.0
    lines = LogLimit(2, clock=lambda: now)
    assert [lines.admit() for _ in range(5)] == [0, 0, None, None, None]
    now += 0.9
    assert lines.admit() is None
    now += 0.1
    assert [lines.admit() for _ in range(3)] == [4, 0, None]
    now += 60
    assert lines.admit() == 1

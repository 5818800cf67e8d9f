"""Puts what a gate timed into pytest-benchmark's session, as if it had timed it itself.

So its table, ``--benchmark-json``, ``--benchmark-save``, ``pytest-benchmark compare`` and its
histogram show both sides. Without pytest-benchmark, or where it is switched off, nothing happens.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from .outcome import Outcome


def add(config: pytest.Config, item: pytest.Item, outcome: Outcome) -> None:
    """Add the candidate and the baseline, in a group of their own."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or session.disabled or outcome.samples is None:
        return
    made: Any = importlib.import_module("pytest_benchmark.stats").Metadata
    for side, label in enumerate(("", " (baseline)")):
        spec = getattr(item, "callspec", None)
        fixture = SimpleNamespace(
            name=item.name + label,
            fullname=item.nodeid + label,
            group=item.nodeid,
            param=spec.id if spec else None,
            params=spec.params if spec else None,
            extra_info={} if side else {"gate": outcome.described()},
            cprofile_stats=None,
            has_error=False,
        )
        calls = outcome.samples.calls[side]
        entry = made(fixture, iterations=calls, options=_options())
        for pair in outcome.samples.pairs:
            entry.update(pair[side] / 1e9)
        session.benchmarks.append(entry)


def _options() -> dict[str, object]:
    """What pytest-benchmark notes of its own runs, as it was here."""
    return {"disable_gc": True, "timer": "perf_counter_ns", "warmup": True}

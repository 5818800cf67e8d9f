"""What a replay counts, without a server."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.benchmarks.load import replay, rewrite
from keyfront.benchmarks.load.access_log import Entry
from keyfront.benchmarks.results import Record


def test_a_beginning_that_was_late_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now, jobs = [0.0], []

    def job(*_: Any, **more: Any) -> bytes:
        # the first one takes longer than until its beginning
        now[0] += 0 if jobs else 100
        jobs.append(more["start"])
        return b""

    found = {
        "good": 2, "failures": {}, "seconds": 1.0, "latencies": [[1000, 2]], "late": [],
        "cpu": 0.1, "by_place": [[0, {"200": 2}]], "statuses": {"200": 2}, "timeline": [],
    }  # fmt: skip
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(replay.sender, "job", job)
    monkeypatch.setattr(replay.generators, "sending", lambda *_: nullcontext())
    monkeypatch.setattr(replay.processes, "finished", lambda *_: (json.dumps(found), "", 0.0))
    monkeypatch.setattr(
        replay.rewrite, "identity", lambda url, login: rewrite.Identity(url, "c", ["s"], {}, login)
    )
    todo = replay.Job([(at, Entry(at, "GET", "/v3", 200)) for at in (0.0, 0.1)])
    target = replay.Target("one", "http://127.0.0.1:1")
    with Record("replay", "x", title="T") as record:
        replay.replay(todo, [target], record, keystone=None, login={}, say=lambda _: None)
    assert len(jobs) == 2 and jobs[1] > 100
    (sample,) = record.samples
    assert sample["as_logged_share"] == 1

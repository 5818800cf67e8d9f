"""Results as measurements leave them, made up, for the tests of the report."""

from __future__ import annotations

from typing import Any

from keyfront.benchmarks.experiments import findings
from keyfront.benchmarks.experiments.findings import Change, Finding
from keyfront.benchmarks.results import Record, Result, Timeline

LINE_UPS = ("Apache, stock", "nginx, stock", "keyfront")


def experiment(name: str = "keystone-frontends", **conditions: Any) -> Result:
    """One with everything in it: closed and open loops, CPU, timelines, changes."""
    with Record(
        "experiment",
        name,
        title="Line-ups <compared>",
        command=["keyfront", "bench", "experiment", name],
        conditions=conditions,
        distributions=["pytest"],
    ) as record:
        for place, label in enumerate(LINE_UPS):
            for load in (10, 100, 1000):
                record.samples.append(_closed(label, load, 100.0 * (place + 1)))
                record.samples.append(_open(label, load, place))
        record.timelines += [
            Timeline(name="keyfront, 100: CPU uWSGI", unit="cores", points=[[0, 1.5], [1, 1.2]]),
            Timeline(
                name="keyfront, 100: token cache, hits", unit="requests", points=[[0, 0], [1, 90]]
            ),
        ]
        changed = [
            _change("Validations", 20, 17600),
            _change("Logins", 229, 380, more_is_better=False),
            _change("Lists", 20, 20.5),
            _change("Failures", 3, 0, more_is_better=False),
            _change("Waits", 2.1, 2.0, more_is_better=False),
        ]
        found = Finding("a", "b & c", "d", False)
        record.tables += [
            findings.comparison([found], "Published: somebody"),
            findings.changes(changed),
            findings.in_words(changed),
        ]
    return record.result()


def gates() -> Result:
    """The micro suite's."""
    with Record("micro", "suite", title="Gates", command=["keyfront", "bench", "micro"]) as record:
        for name, ratio, verdict in (("hit", 0.5, "PASS"), ("miss", 1.2, "FAIL")):
            record.samples.append(
                {
                    "kind": "ratio",
                    "name": name,
                    "operation": f"tokens: {name}",
                    "ratio": ratio,
                    "low": ratio * 0.97,
                    "high": ratio * 1.03,
                    "limit": 1.03,
                    "verdict": verdict,
                }
            )
    return record.result()


def _change(what: str, stock: float, ours: float, *, more_is_better: bool = True) -> Change:
    return Change(
        what=what,
        stock=stock,
        stock_name="nginx, stock",
        keyfront=ours,
        unit="a second" if more_is_better else "ms",
        more_is_better=more_is_better,
    )


def _closed(label: str, load: int, rate: float) -> dict[str, Any]:
    return {
        "label": label,
        "generator": "wrk",
        "loop": "closed",
        "connections": load,
        "rate": rate,
        "good": 1000,
        "failed": 100 if load == 1000 else 0,
        "p50_ms": 1.0,
        "p95_ms": 2.0,
        "p99_ms": 4.0,
        "p999_ms": None,
        "generator_cores": 0.4,
        "cpu": {"uWSGI": 1.0, "nginx": 0.2},
    }


def _open(label: str, load: int, place: int) -> dict[str, Any]:
    return {
        "label": label,
        "generator": "constant",
        "loop": "open",
        "offered": load,
        "rate": float(load),
        "good": load,
        "failed": place,
        "p50_ms": 1.0,
        "p95_ms": 3.0,
    }

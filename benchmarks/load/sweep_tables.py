"""The tables of a sweep: a row for each number of connections, a column for each line-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..results import Cell, Sample, Table
from .measured import OPEN

_LEGEND = "answers per second; in brackets the share of requests that failed"
_LIMITED = "; * the generator may have been the limit"
_SHORT = "; ~ fewer than two answers a connection, so measured too shortly"


def lineup_of(sample: Sample) -> str:
    """``nginx+uwsgi:tuned:cached``"""
    cache = "cached" if sample["cached"] else "plain"
    return f"{sample['topology']}:{sample['tuning']}:{cache}"


def tables(samples: Sequence[Sample]) -> list[Table]:
    """``throughput`` and ``latency`` of closed loops, ``rates`` of open ones; empty ones left out.

    In ``best`` each line-up has one row: its best point without a failure in a hundred requests.
    """
    closed = [sample for sample in samples if sample["loop"] != OPEN]
    constant = [sample for sample in samples if sample["loop"] == OPEN]
    found = [
        _grid(
            "throughput",
            "connections",
            closed,
            throughput,
            f"Closed loop: {_LEGEND}{_LIMITED}{_SHORT}.",
        ),
        _grid(
            "latency",
            "connections",
            closed,
            _latency,
            "Closed loop: median and 95th percentile of good answers, in milliseconds.",
        ),
        _grid(
            "rates",
            "offered per second",
            constant,
            _open,
            "Constant rate: good answers in percent, and their median and 95th percentile in "
            f"milliseconds from when they were due{_LIMITED}.",
        ),
        _best(closed),
    ]
    return [table for table in found if table.rows]


def _grid(
    name: str, by: str, samples: Sequence[Sample], cell: Callable[[Sample], Cell], caption: str
) -> Table:
    key = "rate_offered" if samples and samples[0]["loop"] == OPEN else "connections"
    names = list(dict.fromkeys(map(lineup_of, samples)))
    values = {(sample[key], lineup_of(sample)): cell(sample) for sample in samples}
    rows: list[list[Cell]] = [
        [point, *(values.get((point, one)) for one in names)]
        for point in sorted({sample[key] for sample in samples})
    ]
    return Table(name=name, columns=[by, *names], rows=rows, caption=caption)


def throughput(sample: Sample) -> str:
    """``812 (0.4 %)``"""
    everything = sample["good"] + sample["failed"]
    share = 100 * sample["failed"] / everything if everything else 0.0
    text = number(sample["rate"])
    if share:
        text += f" ({share:.1f} %)" if share >= 0.05 else " (<0.1 %)"
    if sample["good"] < 2 * sample["connections"]:
        text = f"~{text}"
    return text + ("*" if sample["generator_limit"] else "")


def _latency(sample: Sample) -> Cell:
    if sample["p50_ms"] is None:
        return None
    return f"{number(sample['p50_ms'])} / {number(sample['p95_ms'])}"


def _open(sample: Sample) -> str:
    everything = sample["good"] + sample["failed"]
    share = 100 * sample["good"] / everything if everything else 0.0
    text = f"{share:.4g} %"
    if sample["p50_ms"] is not None:
        text += f", {number(sample['p50_ms'])} / {number(sample['p95_ms'])}"
    return text + ("*" if sample["generator_limit"] else "")


def _best(samples: Iterable[Sample]) -> Table:
    best: dict[str, Sample] = {}
    for sample in samples:
        clean = sample["failed"] * 100 <= sample["good"]
        name = lineup_of(sample)
        if clean and (name not in best or sample["rate"] > best[name]["rate"]):
            best[name] = sample
    rows: list[list[Cell]] = [
        [
            sample["topology"],
            sample["tuning"],
            "on" if sample["cached"] else "off",
            number(sample["rate"]),
            sample["connections"],
            number(sample["p95_ms"]) if sample["p95_ms"] is not None else None,
        ]
        for sample in sorted(best.values(), key=lambda one: -one["rate"])
    ]
    return Table(
        name="best",
        columns=["line-up", "setting", "token cache", "answers/s", "connections", "p95, ms"],
        rows=rows,
        caption="The best point of each line-up at which at most 1 % failed.",
    )


def number(value: float) -> str:
    """Three digits that count: ``0.81``, ``8.1``, ``812``, ``8120``."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"

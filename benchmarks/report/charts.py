"""Which figures a result gives: by what its samples hold, whoever measured them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..load.sweep import lineup_of
from ..results import Result, Sample, Timeline
from .drawing import BAR, GLYPHS, LINE, MARKERS, SERIES, Drawn, Key, draw, folded, plain_log, tall

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
_PERCENTILES = (("p50_ms", "50"), ("p95_ms", "95"), ("p99_ms", "99"), ("p999_ms", "99.9"))
# More lines than colours cannot be told apart.
_MOST = len(SERIES)
_GROUPS = ("nginx", "Apache", "uWSGI", "mod_wsgi", "MariaDB", "RabbitMQ", "slapd", "generator")
CLOSED, OPEN = "closed", "open"
# Characters of a label on a line, wide and narrow.
_LABELS = (42, 18)


def of(result: Result) -> Iterator[Drawn]:
    """Return the figures of one result."""
    closed = [one for one in result.samples if one.get("loop") == CLOSED and one.get("connections")]
    opened = [one for one in result.samples if one.get("loop") == OPEN and _offered(one)]
    parts = _grouped(closed, _asked)
    for what, samples in parts.items():
        if len({one["connections"] for one in samples}) > 1:
            yield throughput(what, samples)
    for what, samples in _telling(parts):
        yield percentiles(what, samples)
    if opened:
        yield rates(opened)
    used = [one for one in result.samples if _cpu(one)]
    if used:
        yield cpu(used)


def over_time(result: Result) -> Iterator[Drawn]:
    """Return a figure for each part of what was sampled while the result was measured."""
    parts = _grouped(result.timelines, lambda one: one.name.rpartition(": ")[0])
    for title, found in parts.items():
        yield timelines(title, found)


def series(sample: Sample) -> str:
    """Return which line of a figure a sample is a point of."""
    if "label" in sample:
        return str(sample["label"])
    if "topology" in sample:
        return lineup_of(sample)
    parts = [sample[key] for key in ("target", "server", "module", "side") if key in sample]
    if sample.get("kernel"):
        parts.append(f"kernel {sample['kernel']}")
    return ", ".join(map(str, parts)) or str(sample.get("candidate", "measured"))


def _grouped(things: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for one in things:
        found.setdefault(key(one), []).append(one)
    return found


def _asked(sample: Sample) -> str:
    """Return the request and the generator of a sample: others do not go on one line with it."""
    words = [str(sample["what"])] if "what" in sample else []
    if "kept" in sample:
        words.append("kept connections" if sample["kept"] else "new connections")
    return ", ".join([*words, f"by {sample['generator']}"])


def _telling(parts: Mapping[str, list[Sample]]) -> Iterator[tuple[str, list[Sample]]]:
    """Return, of generators that asked for the same, the one that tells the most latencies."""
    best: dict[str, tuple[str, list[Sample]]] = {}
    for what, samples in parts.items():
        known = [one for one in samples if one.get("p50_ms") is not None]
        asked = what.rpartition("by ")[0]
        if known and (asked not in best or len(known) > len(best[asked][1])):
            best[asked] = what, known
    yield from best.values()


def _named(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    return dict(list(_grouped(samples, series).items())[:_MOST])


def _legend(names: Sequence[str]) -> list[Key]:
    return [Key(name, place, GLYPHS[place]) for place, name in enumerate(names)]


def _style(place: int) -> dict[str, Any]:
    return {"color": SERIES[place], "marker": MARKERS[place]}


def _share(sample: Sample) -> float:
    everything = sample["good"] + sample["failed"]
    return 100 * sample["failed"] / everything if everything else 0.0


def throughput(what: str, samples: Sequence[Sample]) -> Drawn:
    """Good answers a second against connections, and what failed on a second axis."""
    named = _named(samples)

    def plot(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        other = axes.twinx()
        other.spines.right.set_visible(True)
        other.grid(False)
        for place, one in enumerate(named.values()):
            points = sorted((x["connections"], x["rate"], _share(x)) for x in one)
            where, rate, failed = (list(column) for column in zip(*points, strict=True))
            style = _style(place)
            axes.plot(where, rate, **style)
            if any(failed):
                other.plot(where, failed, linestyle=":", linewidth=1.2, **style)
        axes.set_xscale("log")
        plain_log(axes, "x")
        ticks = sorted({x["connections"] for x in samples})
        axes.set_xticks(_thinned(ticks, 5 if narrow else 10))
        axes.set_xlabel("connections")
        axes.set_ylabel("good answers a second")
        highest = max(x["rate"] for x in samples)
        lowest = min((x["rate"] for x in samples if x["rate"] > 0), default=highest)
        if lowest and highest / lowest > 50:
            axes.set_yscale("log")
            plain_log(axes, "y")
        else:
            axes.set_ylim(bottom=0)
        other.set_ylabel("failed, % (dotted)")
        other.set_ylim(0, 105)

    return draw(
        f"Throughput and failures: {what}",
        plot,
        legend=_legend(list(named)),
        caption="A closed loop: each client waits for its answer before it asks again. Dotted: the "
        "share of requests that failed.",
    )


def _thinned(ticks: list[float], most: int) -> list[float]:
    """Return as many ticks as there is room for, apart from each other on a logarithmic axis."""
    kept = ticks[:1]
    for tick in ticks[1:]:
        if tick / kept[-1] >= (ticks[-1] / ticks[0]) ** (1 / most):
            kept.append(tick)
    return kept


def percentiles(what: str, samples: Sequence[Sample]) -> Drawn:
    """Latency percentiles of each line-up, at the most connections at which they are known.

    :param samples: those that tell latencies
    """
    chosen = {
        name: max(found, key=lambda one: float(one["connections"]))
        for name, found in _named(samples).items()
    }
    loads = sorted({one["connections"] for one in chosen.values()})

    def plot(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for place, one in enumerate(chosen.values()):
            known = [(text, one[key]) for key, text in _PERCENTILES if one.get(key)]
            axes.plot(*zip(*known, strict=True), **_style(place))
        axes.set_yscale("log")
        plain_log(axes, "y")
        axes.set_xlabel("percentile of good answers")
        axes.set_ylabel("ms")

    return draw(
        f"Latency at {' or '.join(map(str, loads))} connections: {what}",
        plot,
        legend=_legend(list(chosen)),
        caption="A closed loop tells the waits of its own clients only: while it waits for a slow "
        "answer it does not ask (coordinated omission). Refusals are left out.",
    )


def _offered(sample: Sample) -> float | None:
    found: float | None = sample.get("rate_offered") or sample.get("offered")
    return found


def rates(samples: Sequence[Sample]) -> Drawn:
    """Draw median, 95th percentile and the share answered against the rate that is offered."""
    named = _named(samples)

    def plot(figure: Figure, narrow: bool) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for place, one in enumerate(named.values()):
            style = _style(place)
            points = sorted(one, key=lambda x: _offered(x) or 0.0)
            where: list[Any] = [_offered(x) for x in points]
            upper.plot(where, [x["p50_ms"] for x in points], **style)
            upper.plot(where, [x["p95_ms"] for x in points], linestyle=":", **style)
            lower.plot(where, [100 - _share(x) for x in points], **style)
        upper.set_yscale("log")
        plain_log(upper, "y")
        upper.set_ylabel("ms: median,\np95 (dotted)")
        lower.set_ylabel("answered, %")
        lower.set_ylim(-3, 105)
        lower.set_xlabel("requests offered a second")
        lower.locator_params(axis="x", nbins=4 if narrow else 8)

    return draw(
        "Latency and success at constant rates",
        plot,
        legend=_legend(list(named)),
        caption="An open loop: requests are sent at their times whatever happens, and times are "
        "counted from when each was due.",
        heights=(4.2, 3.8),
    )


def _cpu(sample: Sample) -> dict[str, float]:
    """Cores by group of processes, the generator's with them."""
    told = sample.get("cpu_cores") or sample.get("cpu")
    found = dict(told) if isinstance(told, dict) else {}
    if found and "generator" not in found and sample.get("generator_cores"):
        found["generator"] = sample["generator_cores"]
    groups = {name.lower(): name for name in _GROUPS}
    return {groups.get(name.lower(), name): float(value) for name, value in found.items()}


def cpu(samples: Sequence[Sample]) -> Drawn:
    """Cores that each group of processes took, of each line-up where it answered the most."""
    best: dict[str, Sample] = {}
    for one in samples:
        name = series(one)
        if "what" in one and one["what"] != "load":
            name = f"{name}: {one['what']}"
        if name not in best or one.get("rate", 0) > best[name].get("rate", 0):
            best[name] = one
    names = list(best)[: 2 * _MOST]
    # the same colour for the same group in every figure
    groups = list(dict.fromkeys(group for name in names for group in _cpu(best[name])))
    known = list(dict.fromkeys((*_GROUPS, *groups)))
    groups = groups[:_MOST]

    def plot(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.grid(False, axis="y")
        left = [0.0] * len(names)
        for group in groups:
            values = [_cpu(best[name]).get(group, 0.0) for name in names]
            color, lines = SERIES[known.index(group) % _MOST], range(len(names))
            axes.barh(lines, values, left=left, height=0.55, color=color, edgecolor="none")
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(names)))
        axes.set_yticklabels([folded(name, _LABELS[narrow]) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("cores")

    return draw(
        "CPU by group of processes",
        plot,
        legend=[Key(group, known.index(group) % _MOST, BAR) for group in groups],
        caption="Of each line-up, at the point at which it answered the most.",
        heights=tall(names, _LABELS),
    )


def timelines(title: str, found: Sequence[Timeline]) -> Drawn:
    """Everything that was sampled in one part of a result, each unit in a panel of its own."""
    units = list(dict.fromkeys(one.unit for one in found))
    shown = list(found)[:_MOST]
    legend = [Key(one.name.rpartition(": ")[2], place, LINE) for place, one in enumerate(shown)]

    def plot(figure: Figure, narrow: bool) -> None:
        panels = figure.subplots(len(units), 1, sharex=True, squeeze=False)[:, 0]
        first = min((one.points[0][0] for one in shown if one.points), default=0.0)
        for place, one in enumerate(shown):
            axes = panels[units.index(one.unit)]
            when = [point[0] - first for point in one.points]
            axes.plot(when, [point[1] for point in one.points], color=SERIES[place])
        for axes, unit in zip(panels, units, strict=True):
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)
            axes.locator_params(axis="y", nbins=4)
        panels[-1].set_xlabel("seconds")

    height = 1.0 + 1.5 * len(units)
    return draw(title, plot, legend=legend, heights=(height, height))

"""The report of ``deploy_sweep``: the file it goes on from, and tables made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from keyfront.errors import OptionError

from . import surroundings
from .deploy_settings import OURS, RIVALS

SCHEMA = 1
Point = dict[str, Any]


def key(setting: str, cache: bool, connections: int) -> str:
    """What a point is called in the file."""
    return f"{setting}, cache {'on' if cache else 'off'}, {connections}"


class Results:
    """Points by their keys, written after each, so that an interrupted sweep goes on.

    :param path: ``None`` keeps them in memory
    :raises OptionError: there is a file, and it is none of ours
    """

    def __init__(self, path: Path | None, seconds: int) -> None:
        self._path = path
        self._content: dict[str, Any] = {
            "schema": SCHEMA,
            "environment": {
                **surroundings.described(),
                **surroundings.versions(("keystone", "uwsgi", "mod_wsgi"), ("nginx", "apache2")),
            },
            "seconds": seconds,
            "points": {},
        }
        if path is not None and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                same = found["schema"] == SCHEMA and found["seconds"] == seconds
            except (OSError, ValueError, KeyError, TypeError):
                same = False
            if not same:
                raise OptionError(
                    "--json", path, "a new file, or one of an earlier run with the same --seconds"
                )
            self._content = found

    @property
    def points(self) -> dict[str, Point]:
        found: dict[str, Point] = self._content["points"]
        return found

    def add(self, name: str, point: Point) -> None:
        self.points[name] = point
        if self._path is not None:
            draft = self._path.with_name(f".{self._path.name}.new")
            draft.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
            draft.replace(self._path)


def markdown(
    points: Mapping[str, Point], settings: Iterable[str], connections: Iterable[int]
) -> str:
    """A table for each, with and without the token cache; a cell for each point."""
    settings, connections = list(settings), list(connections)
    lines = []
    for cache in (True, False):
        title = "with" if cache else "without"
        lines += [
            f"Validations a second {title} the token cache; then p99 in ms, requests refused with "
            "503 and Retry-After (shed), and failures by kind:",
            "",
            f"| connections | {' | '.join(settings)} |",
            f"|---:|{'---|' * len(settings)}",
        ]
        for count in connections:
            cells = [_cell(points.get(key(name, cache, count))) for name in settings]
            lines.append(f"| {count} | {' | '.join(cells)} |")
        lines += ["", f"CPU in µs an answer, and memory in MiB, {title} the token cache:", ""]
        lines += [f"| connections | {' | '.join(settings)} |", f"|---:|{'---|' * len(settings)}"]
        for count in connections:
            cells = [_cost(points.get(key(name, cache, count))) for name in settings]
            lines.append(f"| {count} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    if "broken" in point:
        return "did not start"
    parts = [f"{point['rate']:.0f}/s", f"p99 {point['p99']:.0f}"]
    if point["shed"]:
        parts.append(f"shed {point['shed']}")
    parts += [f"**{kind} {count}**" for kind, count in point["failures"].items()]
    return ", ".join(parts)


def _cost(point: Point | None) -> str:
    if point is None or "broken" in point:
        return ""
    return f"{point['cpu']:.0f}, {point['memory']:.0f}"


def missed(points: Mapping[str, Point], *, latency: float, slower: float) -> list[str]:
    """A line for each promise that a point of ours breaks.

    No failure of any kind; without the cache refusals within the latency target; and, where the
    rival fails nobody, no less throughput than it.

    :param slower: the part of the rival's throughput that is still taken for noise
    """
    lines = []
    for name, point in points.items():
        setting, cache, _ = name.split(", ")
        if setting not in OURS:
            continue
        if "broken" in point:
            lines.append(f"missed: {name}: {point['broken']}")
            continue
        if point["failures"]:
            lines.append(f"missed: {name}: failures {point['failures']}")
        if cache == "cache on" and point["shed"]:
            lines.append(f"missed: {name}: {point['shed']} refused")
        # what is refused waited for the target, and then for its turn
        if point["p99"] > latency * 2000:
            lines.append(f"missed: {name}: p99 of {point['p99']:.0f} ms")
        rival = points.get(name.replace(setting, RIVALS[setting], 1), {})
        if rival.get("rate", 0) * slower > point["rate"]:
            lines.append(
                f"missed: {name}: {point['rate']:.0f}/s, {RIVALS[setting]} {rival['rate']:.0f}/s"
            )
    return lines

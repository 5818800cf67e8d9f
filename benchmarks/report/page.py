"""The report: one HTML page, whole in itself, made of results alone."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import jinja2

from keyfront.errors import OptionError

from .. import files, results
from ..experiments.findings import CHANGES, COMPARISON, WORDS, number
from ..results import Cell, Result
from . import answer as words
from . import charts
from .drawing import Drawn
from .forest import Branch, forest

_HERE = Path(__file__).parent
_KINDS = {"experiment": 0, "sweep": 1, "replay": 2, "micro": 3, "gate": 4}


def style() -> str:
    """Return the style sheet, which lies in the page itself."""
    return (_HERE / "page.css").read_text(encoding="utf-8")


def page(results: Sequence[Result]) -> str:
    """Return the page.

    :param results: the results, in any order
    """
    ordered = sorted(results, key=lambda one: (_KINDS.get(one.kind, 9), _place(one), one.name))
    found = words.answer(ordered)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("page.html.j2").render(
        style=style(),
        answer=found,
        verdicts=words.VERDICTS,
        hero=_hero(found),
        parts=[_part(one) for one in ordered],
        machines=_machines(ordered),
        versions=_versions(ordered),
        commands=list(dict.fromkeys(shlex.join(one.command) for one in ordered)),
    )


def _place(result: Result) -> int:
    """Experiments in the order in which they are run."""
    from ..experiments.run_experiments import NAMES

    return NAMES.index(result.name) if result.name in NAMES else len(NAMES)


def _hero(found: words.Answer) -> Drawn | None:
    branches = found.branches()
    if not branches:
        return None
    return forest(
        "How many times as good as the best stock line-up",
        branches,
        axis="times as good (1: the same)",
        caption="Round: better, diamond: no difference, square: worse. Figures where less is "
        "better are turned round. What was 0 on one side is no ratio, and is told below.",
        right_is_good=True,
        told=True,
    )


def _part(result: Result) -> dict[str, object]:
    """Return one result as the page shows it; its tables of statements are apart from others."""
    # the last two are what the page begins with
    shown = (COMPARISON, CHANGES, WORDS)
    figures = list(charts.of(result))
    gates = _gates(result)
    if gates is not None:
        figures.append(gates)
    return {
        "result": result,
        "anchor": re.sub(r"[^a-z0-9]+", "-", f"{result.kind} {result.name}".lower()).strip("-"),
        "command": shlex.join(result.command),
        "comparisons": [table for table in result.tables if table.name == COMPARISON],
        "figures": figures,
        "timelines": list(charts.over_time(result)),
        "tables": [table for table in result.tables if table.name not in shown],
    }


def _gates(result: Result) -> Drawn | None:
    """Return the forest of a result's gates, if it has any."""
    signs = {"PASS": 1, "FAIL": -1}
    branches = [
        Branch(
            str(one.get("operation", one["name"])),
            signs.get(one["verdict"], 0),
            one["ratio"],
            one["low"] or one["ratio"],
            one["high"] or one["ratio"],
            one["limit"],
        )
        for one in result.samples
        if one.get("ratio") and "limit" in one and "low" in one
    ]
    if not branches:
        return None
    return forest(
        "Gates: time taken as a multiple of the baseline's",
        branches,
        axis="ratio of times, with its interval",
        caption="A line is an interval that holds the true ratio; a gate passes if it ends left of "
        "the stroke, its limit. Round: passed, diamond: not decided, square: failed.",
        right_is_good=False,
    )


_FACTS = {
    "cpu": "CPU",
    "cores": "cores",
    "memory_mb": "memory, MB",
    "kernel": "kernel",
    "architecture": "architecture",
    "distribution": "distribution",
    "governor": "governor",
}


def _machines(results: Sequence[Result]) -> list[tuple[tuple[str, str], ...]]:
    """Return the facts of each machine that results were measured on."""
    found = [
        tuple((_FACTS[key], str(value)) for key, value in result.machine.items() if key in _FACTS)
        for result in results
    ]
    return list(dict.fromkeys(found))


def _versions(results: Sequence[Result]) -> list[tuple[str, str]]:
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for name, version in result.versions.items():
            found.setdefault(name, {})[version] = None
    return [(name, ", ".join(found[name])) for name in sorted(found, key=str.lower)]


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return _unbroken(number(value))
    return _unbroken(str(value))


def _unbroken(text: str) -> str:
    """Thousands stay on one line."""
    return re.sub(r"(?<=\d) (?=\d{3}\b)", "\N{NO-BREAK SPACE}", text)


NAME = "report.html"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``keyfront bench report``."""
    results.add_argument(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the page (default: {NAME} in that folder)"
    )


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Write the page; returns 0.

    :raises BenchmarkError: there are no results, or one is damaged, or the page cannot be written
    """
    folder: Path = arguments.results
    if not folder.is_dir():
        raise OptionError(
            "--results", folder, "a folder with results, as keyfront bench experiment all leaves it"
        )
    target: Path = arguments.output or folder / NAME
    text = page(results.read_all(folder))
    files.write(target, text)
    out.write(f"{target}\n")
    return 0

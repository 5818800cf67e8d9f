"""Runs the tests that tell most with the libraries of each OpenStack series, and writes the table.

    python tests/series/matrix.py                                # all; docs/compatibility.md
    python tests/series/matrix.py --series 2025.1 --python 3.11  # one environment
    python tests/series/matrix.py --table                        # only the table, of earlier runs

Which series, Pythons and tests there are stands in series.toml. Each environment is one of tox's
(``tox -e 2025.1-py312``); what it found is kept in ``.tox/series``. What the page says of others,
which were run elsewhere, stays. Ends with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / ".tox" / "series"
DOCUMENT = ROOT / "docs" / "compatibility.md"
START, END = "<!-- series -->", "<!-- /series -->"


@dataclass(frozen=True)
class Environment:
    """A series on a Python.

    :ivar series: such as ``2025.1``
    :ivar python: such as ``3.12``
    """

    series: str
    python: str

    @property
    def name(self) -> str:
        """Its name for tox."""
        return f"{self.series}-py{self.python.replace('.', '')}"

    def report(self, part: str) -> Path:
        """Return where the report of a part lies."""
        return RESULTS / f"{self.name}-{part.replace(' ', '-')}.xml"


def listed() -> dict[str, Any]:
    """Return what series.toml holds: ``series``, a list of tables, and ``parts``."""
    return tomllib.loads((HERE / "series.toml").read_text(encoding="utf-8"))


def environments(series: list[str] | None, pythons: list[str] | None) -> list[Environment]:
    """Return the environments that were asked for, newest series first.

    :raises SystemExit: none is of that name
    """
    found = [
        Environment(one["name"], python)
        for one in listed()["series"]
        for python in one["pythons"]
        if (not series or one["name"] in series) and (not pythons or python in pythons)
    ]
    if not found:
        raise SystemExit("series.toml lists no such series with such a Python")
    return found


def run(environment: Environment, parts: dict[str, list[str]], tox: str) -> None:
    """Install an environment and run its parts, each of which leaves a report.

    What does not install leaves no report, and is said by tox.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    for part in parts:
        environment.report(part).unlink(missing_ok=True)
    installed = subprocess.run([tox, "run", "--notest", "-e", environment.name], cwd=ROOT)
    if installed.returncode:
        return
    for part, tests in parts.items():
        words = ["--skip-pkg-install", "-e", environment.name, "--"]
        report = f"--junitxml={environment.report(part)}"
        subprocess.run([tox, "run", *words, "-q", report, *tests], cwd=ROOT)


def cell(report: Path) -> str:
    """Return what a part found, for the table: empty if it was not run."""
    if not report.exists():
        return ""
    passed = failed = 0
    for suite in ET.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    return f"**{failed} failed**, {passed}" if failed else str(passed)


def date(reports: list[Path]) -> str:
    """Return the day of the oldest of these reports."""
    suites = [one for path in reports for one in ET.parse(path).getroot().iter("testsuite")]
    return min(one.get("timestamp", "")[:10] for one in suites)


def table(
    found: list[Environment],
    parts: dict[str, list[str]],
    failed: Collection[tuple[Environment, str]] = (),
) -> str:
    """Return the table in Markdown: a row for each environment, a column for each part.

    :param failed: what was to be run and left no report
    """
    majors = {one["name"]: one["keystone"] for one in listed()["series"]}
    lines = [
        f"| OpenStack | Keystone | Python | {' | '.join(parts)} | run |",
        "|---" * 3 + "|---:" * len(parts) + "|---|",
    ]
    for one in found:
        reports = [one.report(part) for part in parts]
        made = [path for path in reports if path.exists()]
        where = [one.series, str(majors[one.series]), one.python]
        told = ["**failed**" if (one, part) in failed else cell(one.report(part)) for part in parts]
        cells = [*where, *told, date(made) if made else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_earlier(table: str, earlier: str) -> str:
    """Fill a table's empty cells from an earlier one, and leave out rows that stay empty.

    A row is known by its first three cells, a column by its name. The last is the day of the run:
    if something earlier was filled in, the earlier one.
    """

    def cells(text: str) -> list[list[str]]:
        lines = [line.strip()[1:-1].split("|") for line in text.strip().splitlines()]
        return [[cell.strip() for cell in line] for line in lines]

    columns, _, *rows = cells(table)
    names, *others = cells(earlier) or [[]]
    before = {tuple(row[:3]): dict(zip(names, row, strict=False)) for row in others}
    made = table.splitlines()[:2]
    for row in rows:
        old = before.get(tuple(row[:3]))
        if old is not None:
            *found, day = row
            past = [old.get(column, "") for column in columns]
            row = [new or was for new, was in zip(found, past, strict=False)]
            filled = row != found
            row.append(min(filter(None, (day, past[-1])), default="") if filled else day)
        if any(row[3:]):
            made.append(f"| {' | '.join(row)} |")
    return "\n".join(made)


def put_in(text: str, document: Path, start: str = START, end: str = END) -> None:
    """Write a table between two markers of a document; what only stands there stays.

    :raises SystemExit: it has no such markers
    """
    before, found, rest = document.read_text(encoding="utf-8").partition(start)
    old, ended, after = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"{document.name} has no {start} with an {end} behind it")
    text = with_earlier(text, old)
    document.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> int:
    """Run what is asked for; returns 1 if a test failed or could not be run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--series", action="append", help="one series; may be repeated")
    parser.add_argument("--python", action="append", help="one Python; may be repeated")
    parser.add_argument("--part", action="append", help="one part; may be repeated")
    parser.add_argument("--tox", default="tox", help="the tox to run (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="write the table of earlier runs")
    arguments = parser.parse_args()
    parts: dict[str, list[str]] = listed()["parts"]
    chosen = {name: parts[name] for name in arguments.part or parts if name in parts}
    if not chosen:
        raise SystemExit(f"--part is one of {', '.join(parts)}")
    asked = environments(arguments.series, arguments.python)
    if not arguments.table:
        for environment in asked:
            run(environment, chosen, arguments.tox)
    # What left no report is no reason to go by an earlier one.
    failed = {(x, part) for x in asked for part in chosen if not x.report(part).exists()}
    told = set() if arguments.table else failed
    put_in(table(environments(None, None), parts, told), DOCUMENT)
    reports = [cell(one.report(part)) for one in asked for part in chosen]
    return 1 if any("failed" in found or not found for found in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

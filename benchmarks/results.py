"""Results of measurements: one JSON format for the sweep, the replay, the gates and experiments.

A file holds one result and is named after it, ``KIND-NAME.json``; measuring again replaces it.
Reports and the tables of the documents are made from these files alone. Each says on which machine
and with which versions it was measured, by which command, under which conditions, and whether
others worked on the machine meanwhile; samples are kept raw. Durations are in seconds unless a
name says otherwise (``p95_ms``); times of the day are UTC.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, get_origin, get_type_hints

from keyfront.errors import BenchmarkError

from . import environment, files

SCHEMA = "keyfront-result/1"
"""Changes with the format; files of another schema are refused, never guessed at."""

KINDS = ("comparison", "experiment", "gate", "micro", "replay", "sweep")

FOLDER = Path("bench-results")
"""Where the command line keeps results unless told otherwise: in the current folder."""

Sample = dict[str, Any]
Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table ready for a document.

    :param name: the word that a document asks for it by, beside the result's kind and name
    :param rows: the rows, each as long as ``columns``; ``None`` stands for "not measured"
    :param caption: a line that a reader must know of it; empty for nothing
    """

    name: str
    columns: list[str]
    rows: list[list[Cell]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A figure over time.

    :param unit: the unit of the values, for example ``cores`` or ``connections``
    :param points: seconds since the result began, and the value
    """

    name: str
    unit: str
    points: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement, whole.

    :param kind: one of :data:`KINDS`
    :param name: unique within the kind
    :param title: one line for a reader
    :param command: the command that measures it again, as arguments
    :param began: ISO 8601, UTC
    :param seconds: the time that it took
    :param machine: the machine, from :func:`environment.described`
    :param versions: the versions of everything that took part
    :param others: the other programs, from :meth:`environment.Watch.described`
    :param conditions: the values that were set; plain ones, no secrets
    :param samples: each with the same meaning of names, raw
    :param notes: lines for a reader: what differs from what was to be measured, and why
    :param complete: false for what was interrupted and can be resumed
    """

    kind: str
    name: str
    title: str
    command: list[str]
    began: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    others: dict[str, Any]
    conditions: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def file_name(self) -> str:
        return file_name(self.kind, self.name)

    def table(self, name: str) -> Table | None:
        """Return the table of this name, if there is one."""
        return next((table for table in self.tables if table.name == name), None)


def tabled(
    name: str,
    samples: Iterable[Sample],
    columns: Mapping[str, str | Callable[[Sample], Cell]],
    caption: str = "",
) -> Table:
    """Return a table with a row for each sample.

    :param columns: by the name of each column, the key of its values in a sample, or what makes one
    """
    rows: list[list[Cell]] = [
        [one[of] if isinstance(of, str) else of(one) for of in columns.values()] for one in samples
    ]
    return Table(name=name, columns=list(columns), rows=rows, caption=caption)


def matching(samples: Iterable[Sample], **wanted: object) -> list[Sample]:
    """Return the samples with these values, in their order."""
    return [one for one in samples if all(one[key] == wanted[key] for key in wanted)]


def file_name(kind: str, name: str) -> str:
    """Return what the file of a result is called in its folder."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9+.=,_-]+', '_', name)}.json"


def add_argument(parser: ArgumentParser) -> None:
    """Add ``--results``, of every action of ``keyfront bench`` that reads or writes some."""
    text = "folder of results (default: %(default)s)"
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help=text)


#: Columns of a terminal.
WIDTH = 80
# Columns that the first cells have at least.
_FIRST = 20


def markdown(table: Table) -> str:
    """Return a table in Markdown, with its caption below."""
    numeric = [
        all(isinstance(row[place], int | float | None) for row in table.rows)
        for place in range(len(table.columns))
    ]
    lines = [
        _row(table.columns),
        "|" + "|".join("---:" if one else "---" for one in numeric) + "|",
        *(_row(["-" if cell is None else str(cell) for cell in row]) for row in table.rows),
    ]
    if table.caption:
        lines += ["", table.caption]
    return "\n".join(lines)


def plain(table: Table) -> str:
    """Return a table for a terminal, with its caption below.

    Where it is wider than that, names of columns are broken at blanks, then the first cells, and
    then the columns follow in parts that each begin with the first.
    """
    rows = [["-" if cell is None else str(cell) for cell in row] for row in table.rows]
    columns = list(zip(table.columns, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if _together(widths) > WIDTH:
        widths = [max(map(len, [*name.split(), *cells])) for name, *cells in columns]
        widths[0] = max(min(widths[0], WIDTH - _together([0, *widths[1:]])), _FIRST)
    parts: list[list[int]] = [[]]
    for place in range(1, len(widths)):
        if _together([widths[x] for x in (0, *parts[-1], place)]) > WIDTH and parts[-1]:
            parts.append([])
        parts[-1].append(place)
    blocks = [
        "\n".join(
            line
            for number, row in enumerate([table.columns, *rows])
            for line in _plain_row(row, [0, *part], widths, head=not number)
        )
        for part in parts
    ]
    caption = textwrap.wrap(table.caption or "", WIDTH)
    return "\n\n".join([*blocks, *(["\n".join(caption)] if caption else [])])


def _together(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _plain_row(
    row: Sequence[str], places: Sequence[int], widths: Sequence[int], *, head: bool
) -> Iterator[str]:
    """Yield the lines of a row; names of columns stand at the lowest, other cells at the first."""
    cells = [
        textwrap.wrap(row[place], max(widths[place], 1), break_on_hyphens=False) or [""]
        for place in places
    ]
    height = max(map(len, cells))
    for cell in cells:
        missing = [""] * (height - len(cell))
        cell[:] = [*missing, *cell] if head else [*cell, *missing]
    for first, *others in zip(*cells, strict=True):
        right = [f"{x:>{widths[place]}}" for x, place in zip(others, places[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *right]).rstrip()


def told(result: Result, path: Path) -> str:
    """Return what a command says of its result: tables, notes, and its file."""
    notes = [folded(f"note: {note}") for note in result.notes]
    last = f"\nwritten to {path}\nkeyfront bench report makes a page of it\n"
    return "\n".join([*(f"\n{plain(table)}" for table in result.tables), *notes, last])


def to(out: TextIO) -> Callable[[str], None]:
    """Return what writes a line of progress there at once, folded."""
    return lambda text: print(folded(text), file=out, flush=True)


def folded(text: str) -> str:
    """Return a line for a terminal, in several where it is too long; a path stays whole."""
    if len(text) <= WIDTH:
        return text
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class Record:
    """Collects a result while it is measured; as a context manager it knows how long that took.

    ::

        with Record("sweep", "nginx", title="…", conditions={"seconds": 10}) as record:
            record.samples.append({"connections": 10, "rate": 812.5})
        results.write(record.result(), folder)

    :param command: default: the command that runs
    :param distributions: Python packages whose versions matter
    :param programs: programs of the system whose versions matter
    """

    def __init__(
        self,
        kind: str,
        name: str,
        *,
        title: str,
        command: Sequence[str] | None = None,
        conditions: Mapping[str, Any] | None = None,
        distributions: Iterable[str] = (),
        programs: Iterable[str] = (),
    ) -> None:
        self._result = Result(
            kind=kind,
            name=name,
            title=title,
            command=list(command) if command is not None else environment.command_line(),
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=0.0,
            machine=environment.described(),
            versions=environment.versions(distributions, programs),
            others={},
            conditions=dict(conditions or {}),
        )
        self.conditions = self._result.conditions
        self.samples = self._result.samples
        self.tables = self._result.tables
        self.timelines = self._result.timelines
        self.notes = self._result.notes
        self._watch = environment.Watch()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()

    def sample(self, **values: Any) -> None:
        """Add a sample."""
        self.samples.append(values)

    def note(self, line: str) -> None:
        """Add a note, unless it is there."""
        if line not in self.notes:
            self.notes.append(line)

    def resume(self, before: Result) -> None:
        """Go on with an interrupted result: its samples, notes, timelines and time count, too."""
        self.samples[:0] = before.samples
        self.timelines[:0] = before.timelines
        self.notes[:0] = before.notes
        self._result = replace(self._result, began=before.began, seconds=before.seconds)

    def result(self, *, complete: bool = True) -> Result:
        """Return what was measured until now, or until the end of the ``with`` block."""
        return replace(
            copy.deepcopy(self._result),
            seconds=round(self._result.seconds + self._watch.seconds, 3),
            others=self._watch.described(),
            complete=complete,
        )


def write(result: Result, folder: Path) -> Path:
    """Write a result to its file, whole or not at all; returns the file.

    :raises BenchmarkError: the folder cannot be written to, or the result is no JSON
    """
    path = folder / result.file_name
    content = {"schema": SCHEMA, **asdict(result)}
    try:
        _check(content, path)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise BenchmarkError(f"{path}: cannot be written: {error}") from None
    prepare(folder)
    files.write(path, text)
    return path


def prepare(folder: Path) -> None:
    """Find out, before anything is measured, that results can be written to a folder; makes it.

    :raises BenchmarkError: they cannot
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BenchmarkError(f"{folder}: cannot be written to: {error.strerror}") from None


def measured_on(result: Result) -> str:
    """Return a line: day, machine, versions, and whether others worked on it meanwhile."""
    machine = result.machine
    named = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    busy = "" if result.others.get("quiet", True) else "; others worked on the machine meanwhile"
    unfinished = "" if result.complete else "; interrupted before its end"
    return (
        f"Measured on {result.began[:10]}: {machine.get('cpu', 'unknown CPU')}, "
        f"{machine.get('cores', '?')} cores, {named}{busy}{unfinished}."
    )


def read(path: Path) -> Result:
    """Read a result.

    :raises BenchmarkError: it cannot be read or is no result of this schema; names file and place
    """
    content = files.read_json(path)
    _check(content, path)
    content = {key: value for key, value in content.items() if key != "schema"}
    content["tables"] = [Table(**table) for table in content["tables"]]
    content["timelines"] = [Timeline(**timeline) for timeline in content["timelines"]]
    return Result(**content)


def read_all(folder: Path) -> list[Result]:
    """Return every result in a folder, by kind and name.

    :raises BenchmarkError: there is none, or a file is no result
    """
    paths = sorted(path for path in folder.glob("*.json") if path.name.startswith(_PREFIXES))
    if not paths:
        raise BenchmarkError(
            f"{folder}: there are no results; measure some, e.g. keyfront bench sweep --quick"
        )
    return sorted(map(read, paths), key=lambda result: (result.kind, result.name))


_PREFIXES = tuple(f"{kind}-" for kind in KINDS)
# The types of a result's fields; a number may be whole.
_TYPES: dict[str, Any] = {
    name: int | float if kind is float else get_origin(kind) or kind
    for name, kind in get_type_hints(Result).items()
}


def _check(content: object, path: Path) -> None:
    """:raises BenchmarkError: it is no result; names the place"""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise BenchmarkError(f"{path}: schema: must be {SCHEMA}; measure it again")
    _check_keys(content, {"schema", *_TYPES}, path, "")
    for key, kind in _TYPES.items():
        if not isinstance(content[key], kind):
            raise BenchmarkError(f"{path}: {key}: has the wrong type; measure it again")
    if content["kind"] not in KINDS:
        raise BenchmarkError(f"{path}: kind = {content['kind']}: must be one of {', '.join(KINDS)}")
    for key in ("command", "notes"):
        if not all(isinstance(line, str) for line in content[key]):
            raise BenchmarkError(f"{path}: {key}: must hold strings")
    for place, sample in enumerate(content["samples"]):
        if not isinstance(sample, dict):
            raise BenchmarkError(f"{path}: samples[{place}]: must be an object")
    for part, kind in (("tables", Table), ("timelines", Timeline)):
        for place, one in enumerate(content[part]):
            _check_keys(one, {each.name for each in fields(kind)}, path, f"{part}[{place}]")
    for place, table in enumerate(content["tables"]):
        if any(len(row) != len(table["columns"]) for row in table["rows"]):
            raise BenchmarkError(f"{path}: tables[{place}]: a row is not as long as the columns")
    for place, timeline in enumerate(content["timelines"]):
        if any(len(point) != 2 for point in timeline["points"]):
            raise BenchmarkError(f"{path}: timelines[{place}]: a point must be seconds and a value")


def _check_keys(content: object, expected: set[str], path: Path, where: str) -> None:
    if not isinstance(content, dict):
        raise BenchmarkError(f"{path}: {where}: must be an object")
    for key in sorted(expected.symmetric_difference(content)):
        state = "is missing" if key in expected else "is unknown"
        raise BenchmarkError(f"{path}: {where}{'.' if where else ''}{key}: {state}")

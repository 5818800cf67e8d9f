"""The doctor's report: for people at 80 columns, with and without colour, and for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from keyfront import __version__
from keyfront.gateway.keystone import series

from . import advice
from .checks.keystone import node_part
from .diagnosis import Diagnosis, Result
from .found import Found
from .machine_state import Live
from .redaction import shown, shown_line
from .registry import ERROR, INFO, LAYERS, LEVELS, WARNING, Check
from .settings import Place

_WIDTH = 80
_COLOURS = {ERROR: "\x1b[1;31m", WARNING: "\x1b[1;33m", INFO: "\x1b[1;36m", "right": "\x1b[32m"}
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_WORDS = {ERROR: "ERROR", WARNING: "WARN", INFO: "NOTE"}
_PLURALS = {ERROR: "error", WARNING: "warning", INFO: "note"}


class _Page:
    def __init__(self, colour: bool) -> None:
        self.colour = colour
        self.lines: list[str] = []

    def painted(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self.colour and colour else text

    def wrapped(self, text: str, first: str, rest: str, colour: str = "") -> None:
        lines = textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=first,
            subsequent_indent=rest,
            break_on_hyphens=False,
            break_long_words=False,
        )
        self.lines += [self.painted(line, colour) for line in lines or [first.rstrip()]]

    def head(self, text: str) -> None:
        self.lines += ["", self.painted(text, _BOLD)]


def text(made: Diagnosis, found: Found, *, colour: bool = False) -> str:
    """Return the report for people."""
    page = _Page(colour)
    counts = ", ".join(
        f"{made.count(level)} {_PLURALS[level]}{'s' * (made.count(level) != 1)}" for level in LEVELS
    )
    files = len(found.files.read)
    keystone = _keystone(found)
    served = f" for Keystone {keystone}" if keystone else ""
    page.wrapped(
        f"keyfront doctor {__version__}{served}: {counts}; "
        f"{len(made.right)} checks found nothing wrong, {files} file{'s' * (files != 1)} read",
        "",
        "",
        _BOLD,
    )
    for group in _grouped(made.results):
        _finding(page, group)
    if found.live is not None and found.live.phases:
        page.head("A login and a validation, in milliseconds")
        page.lines += _table(found.live)
    if found.live is not None:
        _what_runs(page, found, found.live)
    if made.right:
        page.head("Found right")
        for layer, checks in _by_layer(made.right):
            codes = " ".join(check.code for check in checks)
            page.wrapped(codes, f"  {layer:<15}", " " * 17)
    if made.unread:
        page.head("Could not be looked at")
        for one in made.unread:
            page.wrapped(f"{shown(one.what)}: {shown(one.why)}", "  ", "    ")
    steps = list(_steps(made.results))
    if steps:
        page.head("To do")
        for number, (file, lines, those) in enumerate(steps, 1):
            page.wrapped(
                f"{file or 'run, or decide'} ({' '.join(those)})", f"  {number:>2}. ", "      "
            )
            page.lines += [f"        {line}" for line in lines]
    if made.results:
        page.lines += ["", "Why, and where that is said: keyfront doctor --explain CODE"]
    return "\n".join(page.lines) + "\n"


def _keystone(found: Found) -> str | None:
    """Return the version of the Keystone found, with its series."""
    version = found.versions.get("keystone")
    return series.described(".".join(map(str, version))) if version else None


# Processes that are printed.
_PROCESSES = 20


def _what_runs(page: _Page, found: Found, live: Live) -> None:
    """Print Keystone's processes and the age of its keys."""
    if live.processes:
        page.head("Keystone's processes")
        page.lines.append(f"  {'pid':>8}  {'program':<16}{'MiB':>6}{'open files':>18}{'up':>10}")
        largest = sorted(live.processes, key=lambda one: -one.rss)
        for one in largest[:_PROCESSES]:
            files = f"{one.files[0]} of {one.files[1]}" if one.files else "-"
            up = _span(found.now - one.begun) if one.begun else "-"
            name = shown(one.name)[:15]
            page.lines.append(f"  {one.pid:>8}  {name:<16}{one.rss:>6}{files:>18}{up:>10}")
        if len(largest) > _PROCESSES:
            page.lines.append(
                f"  and {len(largest) - _PROCESSES} more of at most {largest[_PROCESSES].rss} MiB"
            )
    if any(repository.keys for repository in found.keys):
        page.head("Keys")
        for repository in found.keys:
            primary = repository.primary
            if primary is not None:
                age = _span(found.now - primary.changed)
                page.wrapped(
                    f"{shown(repository.path)}: {len(repository.keys)} keys, the primary "
                    f"{primary.number} is {age} old",
                    "  ",
                    "    ",
                )


def _span(seconds: float) -> str:
    """Return a span of time in its largest unit: ``12 s``, ``3.5 h``, ``40 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


#: The columns of the phases: a step, and what it is called.
_STEPS = {
    "login": "login",
    "first_validation": "validation",
    "repeated_validation": "repeated",
}


def _table(live: Live) -> Iterator[str]:
    """Give the lines of the phases: those that follow each other, their sum, the server's word."""
    steps = {step: name for step, name in _STEPS.items() if live.phases.get(step)}
    yield " " * 22 + "".join(f"{name:>12}" for name in steps.values())

    def row(name: str, values: list[float | None]) -> str:
        said = "".join(f"{'-' if x is None else format(x, '.1f'):>12}" for x in values)
        return f"  {name:<20}{said}"

    for name in dict.fromkeys(x for step in steps for x in live.phases[step]):
        yield row(name, [live.phases[step].get(name) for step in steps])
    yield row("together", [sum(live.phases[step].values()) for step in steps])
    for name in dict.fromkeys(x for step in steps for x in live.timings.get(step, ())):
        yield row(
            f"of it: {name[:12]}", [live.timings.get(step, {}).get(name) for step in steps]
        )
    if live.timings:
        yield "  (of it: as the server says by Server-Timing)"
    if "login" in live.request_ids:
        yield f"  the login in Keystone's log: {live.request_ids['login']}"


def _rounded(steps: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        step: {name: round(value, 2) for name, value in phases.items()}
        for step, phases in steps.items()
    }


def _grouped(results: list[Result]) -> list[list[Result]]:
    """Return the results of one check, level and harm together, in their order."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = (result.check.code, result.level, result.harm)
        groups.setdefault(key, []).append(result)
    return list(groups.values())


def _finding(page: _Page, group: list[Result]) -> None:
    check, level = group[0].check, group[0].level
    page.lines.append("")
    word = page.painted(f"{_WORDS[level]:<5}", _COLOURS[level])
    for number, result in enumerate(group):
        begin = len(page.lines)
        page.wrapped(shown(result.finding.what), f"{_WORDS[level]:<5} {check.code}  ", " " * 11)
        if number:
            page.lines[begin] = " " * 11 + page.lines[begin][11:]
        else:
            page.lines[begin] = word + page.lines[begin][5:]
        where = result.finding.where
        for place in where:
            # A file as a whole says nothing beside a line of it.
            if place.line or not any(x.line and x.path == place.path for x in where):
                page.lines.append(f"           {shown(place)}")
        following = group[number + 1].finding.lines if number + 1 < len(group) else ()
        if result.finding.lines != following:
            page.lines += [f"           + {shown_line(line)}" for line in result.finding.lines]
    page.wrapped(group[0].harm, " " * 11, " " * 11)
    page.lines.append(f"           {check.link}")


def _by_layer(checks: Iterable[Check]) -> Iterator[tuple[str, list[Check]]]:
    """Give the checks by the letter of their codes."""
    names = {
        "X": "across layers",
        "U": "uWSGI",
        "N": "nginx",
        "A": "Apache",
        "H": "HAProxy",
        "K": "Keystone",
        "L": "LDAP",
        "D": "database",
        "M": "caches",
        "S": "system",
        "F": "files",
        "R": "rendered",
        "V": "versions",
        "P": "running",
    }
    checks = list(checks)
    for letter, name in names.items():
        those = sorted(
            (check for check in checks if check.code[0] == letter), key=lambda check: check.code
        )
        if those:
            yield name, those


@dataclass
class _Step:
    """The work in one file: parts of lines, each after its mark or section."""

    parts: dict[str, dict[str, None]] = field(default_factory=dict)
    codes: dict[str, None] = field(default_factory=dict)


def _steps(results: list[Result]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the work to be done, file by file: the file, the lines, the codes; notes are left out.

    A section of an ini file, or a mark of :mod:`.advice`, stands once before its lines.
    """
    files: dict[str, _Step] = {}
    for result in results:
        finding = result.finding
        if result.level == INFO or not finding.lines:
            continue
        file = finding.file or (finding.where[0].path if finding.where else "")
        first = finding.lines[0]
        marked = advice.mark(first)
        plain = first.startswith("(") or first.split()[0].rpartition("/")[2] in _COMMANDS
        if file.startswith(("/proc", "/sys")) or plain:
            file = ""
        part = ""
        for line in finding.lines:
            marked = advice.mark(line)
            if marked is not None:
                file, part = marked.path, line
            elif line.startswith("["):
                part = line
            step = files.setdefault(file, _Step())
            step.codes[result.check.code] = None
            lines = step.parts.setdefault(part, {})
            if line != part:
                lines[line] = None
    for file, step in files.items():
        lines_ = []
        for part, lines in step.parts.items():
            lines_ += [part] if part and lines else []
            lines_ += lines
        yield shown(file), [shown_line(line) for line in lines_], list(step.codes)


_COMMANDS = frozenset(
    (
        "apt",
        "pip",
        "rm",
        "cp",
        "rsync",
        "chmod",
        "keystone-manage",
        "keyfront",
        "systemctl",
        "a2dismod",
        "nstat",
        "ss",
        "less",
        "df",
        "nsenter",
        "chronyc",
        "ls",
        "CREATE",
        "SHOW",
        "a2enmod",
        "dnf",
        "printf",
        "usermod",
        "grep",
    )
)


def as_json(made: Diagnosis, found: Found) -> str:
    """Return the report for programs; keys are only ever added."""
    content: dict[str, Any] = {
        "keyfront": __version__,
        "keystone": _keystone(found),
        "status": made.status,
        "counts": {level: made.count(level) for level in LEVELS},
        "findings": [
            {
                "code": result.check.code,
                "level": result.level,
                "what": shown(result.finding.what),
                "where": [_place(place) for place in result.finding.where],
                "harm": result.harm,
                "lines": [shown_line(line) for line in result.finding.lines],
                "link": result.check.link,
            }
            for result in made.results
        ],
        "right": [check.code for check in made.right],
        "not_looked_at": [{"what": shown(x.what), "why": shown(x.why)} for x in made.unread],
        "login_milliseconds": dict(found.live.login) if found.live else {},
        "login_phases": _rounded(found.live.phases) if found.live else {},
        "server_timing": _rounded(found.live.timings) if found.live else {},
        "request_ids": dict(found.live.request_ids) if found.live else {},
        "processes": [
            {
                "pid": one.pid,
                "name": shown(one.name),
                "mebibytes": one.rss,
                "open_files": one.files[0] if one.files else None,
                "most_files": one.files[1] if one.files else None,
                "begun": round(one.begun, 1) or None,
            }
            for one in (found.live.processes if found.live else ())
        ],
        "key_ages": {
            x.path: round(found.now - x.primary.changed, 1) for x in found.keys if x.primary
        },
        "node": node_part(found),
    }
    return json.dumps(content, indent=2) + "\n"


def unlike_a_node(content: object) -> str:
    """Return the fault by which JSON is not what :func:`as_json` gives of a node; empty if none."""
    node = content.get("node") if isinstance(content, dict) else None
    if not isinstance(node, dict):
        return "no part node"
    for name, kinds in (
        ("keys", (list,)),
        ("versions", (str,)),
        ("workers", (int,)),
        ("settings", (str,)),
        ("clocks", (int, float)),
    ):
        part = node.get(name, {})
        if not isinstance(part, dict) or not all(isinstance(x, kinds) for x in part.values()):
            return f"its node has another kind of {name}"
    keys = node.get("keys", {})
    if not all(isinstance(x, str) for digests in keys.values() for x in digests):
        return "its node has another kind of keys"
    return ""


def _place(place: Place) -> dict[str, Any]:
    return {"file": shown(place.path), "line": place.line or None}


def explained(check: Check, *, colour: bool = False) -> str:
    """Return all that is known of a check."""
    page = _Page(colour)
    page.wrapped(f"{check.code} ({check.level}): {check.holds}.", "", "", _BOLD)
    layers = ", ".join(LAYERS[layer] for layer in check.layers)
    for name, value in (
        ("if not", check.harm),
        ("why", check.explanation),
        ("looks at", layers),
        ("source", check.source),
    ):
        page.wrapped(value, f"{name:<10}", " " * 10)
    return "\n".join(page.lines) + "\n"

"""Access logs: what was asked of a Keystone, and when.

Only time, method, target and status are taken; nobody's address, name or token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from keyfront.common import json_text
from keyfront.errors import BenchmarkError

# Lines that may be something else, as a share: what a rotation cut, a message in between.
_UNREADABLE = 0.02
_COMBINED = re.compile(
    r'\S+ (?:\S+ \S+ )?\[([^\]]+)\] "([A-Z]+) (\S+)(?: HTTP/[0-9.]+)?" ([0-9]{3})\b'
)
_UWSGI = re.compile(
    r"\[pid: [^\]]*\] .*?\[([A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9]{2} [0-9:]{8} [0-9]{4})\] "
    r"([A-Z]+) (\S+) => generated .*\(HTTP/[0-9.]+ ([0-9]{3})\)"
)
# Characters of a line; a server that logs headers of 64 KiB, each as \xHH, writes no more.
_LONGEST = 1 << 19
_COMMON_TIME = "%d/%b/%Y:%H:%M:%S %z"
_FORMATS = "combined (nginx, Apache), uWSGI's or JSON"


class Entry(NamedTuple):
    """One request.

    :param at: seconds since 1970
    :param target: path and query
    :param status: the status of the answer
    """

    at: float
    method: str
    target: str
    status: int


def read(path: Path) -> list[Entry]:
    """Return all requests of a log, by their time.

    :raises BenchmarkError: it cannot be read, or is in no format that is known; names file and line
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse(iter(lambda: lines.readline(_LONGEST), ""), str(path))
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be read: {error.strerror}") from None


def parse(lines: Iterable[str], name: str = "log") -> list[Entry]:
    """Return the same of lines.

    :param name: for errors
    """
    found: list[Entry] = []
    wrong: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = parse_line(line)
        if entry is None:
            wrong.append(number)
        else:
            found.append(entry)
    if not found and not wrong:
        raise BenchmarkError(f"{name}: is empty; keyfront bench log writes one to try with")
    if len(wrong) > max(_UNREADABLE * (len(found) + len(wrong)), 0 if not found else 1):
        raise BenchmarkError(
            f"{name}:{wrong[0]}: is no line of an access log ({_FORMATS}); nor are "
            f"{len(wrong) - 1} other lines"
        )
    # a server writes a request when it ends
    return sorted(found, key=lambda entry: entry.at)


def parse_line(line: str) -> Entry | None:
    """Read one line; ``None`` if it is in no format that is known."""
    try:
        if line.startswith("{"):
            entry = _json(json_text.parse(line))
            # a time or status that no server writes
            possible = entry and math.isfinite(entry.at) and 100 <= entry.status <= 999
            return entry if possible else None
        match = _UWSGI.match(line)
        if match:
            # uWSGI writes the local time without its zone
            at = datetime.strptime(match[1], "%a %b %d %H:%M:%S %Y")
            return Entry(at.timestamp(), match[2], match[3], int(match[4]))
        return _combined(line)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _combined(line: str) -> Entry | None:
    match = _COMBINED.match(line)
    if not match:
        return None
    at = datetime.strptime(match[1], _COMMON_TIME)
    return Entry(at.timestamp(), match[2], match[3], int(match[4]))


def _json(found: dict[str, object]) -> Entry | None:
    if "access" in found:
        # uWSGI's, around its line
        entry = _combined(str(found["access"]))
        return entry and entry._replace(at=float(str(found.get("unix", entry.at))))
    at = datetime.fromisoformat(str(found["time"])).timestamp()
    # nginx writes when a request ended and how long it took; Apache when it began
    at -= float(str(found.get("seconds") or 0))
    return Entry(at, str(found["method"]), str(found["uri"]), int(str(found["status"])))


def spaced(entries: Sequence[Entry]) -> Iterator[tuple[float, Entry]]:
    """Return the seconds of each request since the first one.

    Where the log tells whole seconds only, the requests of one second are spread over it evenly,
    in their order: better than all at its beginning, though bursts within a second are lost.
    """
    if not entries:
        return
    first = entries[0].at
    whole = all(entry.at == int(entry.at) for entry in entries)
    for at, group in groupby(entries, key=lambda entry: entry.at):
        together = list(group)
        for place, entry in enumerate(together):
            yield at - first + (place / len(together) if whole else 0.0), entry

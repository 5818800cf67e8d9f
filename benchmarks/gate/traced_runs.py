"""Runs tests once more under strace or valgrind, all that are chosen in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pytest

from . import worker
from .child_processes import HERE, started, tail
from .session import address
from .worker import callgrind

if TYPE_CHECKING:
    from .session import GateSession

# Seconds; valgrind makes a program some ten times slower even where it counts nothing.
_PATIENCE = 900


Told = list[dict[str, Any]]


class Tool(NamedTuple):
    """A program that counts what tests do.

    :ivar absent: the reason why this machine has it not, empty if it has; a function of nothing
    :ivar before: the words before the command, by the folder of the run
    :ivar read: the counts by the address of a test, by that folder and what the tests told
    """

    absent: Callable[[], str]
    before: Callable[[Path], list[str]]
    read: Callable[[Path, Told], dict[str, Any]]


class Inside:
    """One such run; made when the first test asks for its result.

    :param kind: one of :data:`TOOLS`
    :ivar absent: the reason for which it cannot be made on this machine; empty if it was
    :ivar said: the end of what pytest said in it
    """

    def __init__(self, kind: str, session: GateSession, items: Sequence[pytest.Item]) -> None:
        self.said = ""
        self._found: dict[str, Any] = {}
        tool = TOOLS[kind]
        self.absent = tool.absent()
        if self.absent:
            return
        folder = session.folder / kind
        folder.mkdir()
        nodes = [address(item) for item in items]
        read, write = os.pipe()
        log, before = folder / "said", tool.before(folder)
        mode = {worker.MODE: kind, worker.ANSWERS: str(write)}
        with os.fdopen(read, "rb") as answers:
            with started(
                session, HERE, nodes, mode, log=log, pipes=(write,), before=before
            ) as process:
                try:
                    process.wait(_PATIENCE)
                except BaseException:
                    process.kill()
                    raise
            self.said = tail(log)
            told = [json.loads(line) for line in answers.read().splitlines()]
        self._found = tool.read(folder, told)

    def find(self, item: pytest.Item) -> Any:
        """Return what was counted of a test; ``None`` if it did not get that far."""
        return self._found.get(address(item))


def _no_strace() -> str:
    return "" if shutil.which("strace") else "strace is not installed: apt install strace"


def _syscalls(folder: Path, told: Told) -> dict[str, Any]:
    """Return those of the thread that makes the calls, by name, in the round that made fewest."""
    rounds: dict[str, list[Counter[str]]] = {}
    marks = re.escape(worker.MARK).replace(r"\{\}", "(.*?)", 1).replace(r"\{\}", "(.*)")
    mark = re.compile(rf'"{marks}"')
    call = re.compile(r"(\d+) +([a-z0-9_]+)\(")
    thread, now = "", Counter[str]()  # of the round that is open
    trace = folder / "trace"
    if not trace.is_file():
        return {}
    with trace.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = call.match(line)
            if found is None:
                continue
            edge = mark.search(line) if "/keyfront-gate/" in line else None
            if edge is not None and edge[1] == "begin":
                thread, now = found[1], Counter()
            elif edge is not None:
                # not at its beginning: a round in which the step raised has no end
                rounds.setdefault(unquote(edge[2]), []).append(now)
                thread = ""
            elif found[1] == thread:
                now[found[2]] += 1
    return {
        name: min(counts, key=Counter.total)
        for name, counts in rounds.items()
        if len(counts) == worker.ROUNDS
    }


def _instructions(folder: Path, told: Told) -> dict[str, Any]:
    """Return those of a call, as callgrind counts them."""
    totals = callgrind.totals(folder)
    found = {}
    for one in told:
        counts = [totals[trigger] for trigger in one["triggers"] if trigger in totals]
        if counts:
            found[one["name"]] = round(min(counts) / one["calls"])
    return found


TOOLS = {
    "syscalls": Tool(
        _no_strace,
        lambda folder: ["strace", "-f", "-qq", "-o", str(folder / "trace"), "--"],
        _syscalls,
    ),
    "instructions": Tool(callgrind.absent, callgrind.command, _instructions),
}

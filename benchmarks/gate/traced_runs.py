"""Runs tests once more under strace or valgrind, all that are chosen in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
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


class Inside(ABC):
    """One such run; made when the first test asks for its result.

    :ivar absent: the reason for which it cannot be made on this machine; empty if it was
    :ivar said: the end of what pytest said in it
    """

    kind = ""

    def __init__(self, session: GateSession, items: Sequence[pytest.Item]) -> None:
        self.said = ""
        self._found: dict[str, Any] = {}
        self.absent = self._absent()
        if self.absent:
            return
        folder = session.folder / self.kind
        folder.mkdir()
        nodes = [address(item) for item in items]
        read, write = os.pipe()
        log, before = folder / "said", self._before(folder)
        mode = {worker.MODE: self.kind, worker.ANSWERS: str(write)}
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
        self._found = self._read(folder, told)

    def find(self, item: pytest.Item) -> Any:
        """Return what was counted of a test; ``None`` if it did not get that far."""
        return self._found.get(address(item))

    @abstractmethod
    def _absent(self) -> str:
        """Return the reason why this machine cannot do it."""

    @abstractmethod
    def _before(self, folder: Path) -> list[str]:
        """Return what is put before the command."""

    @abstractmethod
    def _read(self, folder: Path, told: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what was counted, by address."""


class Syscalls(Inside):
    """System calls of the thread that makes the calls, by name, in the round that made fewest."""

    kind = "syscalls"

    def _absent(self) -> str:
        return "" if shutil.which("strace") else "strace is not installed: apt install strace"

    def _before(self, folder: Path) -> list[str]:
        return ["strace", "-f", "-qq", "-o", str(folder / "trace"), "--"]

    def _read(self, folder: Path, told: list[dict[str, Any]]) -> dict[str, Any]:
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


class Instructions(Inside):
    """Instructions per call, as callgrind counts them."""

    kind = "instructions"

    def _absent(self) -> str:
        return callgrind.absent()

    def _before(self, folder: Path) -> list[str]:
        return callgrind.command(folder)

    def _read(self, folder: Path, told: list[dict[str, Any]]) -> dict[str, Any]:
        totals = callgrind.totals(folder)
        found = {}
        for one in told:
            counts = [totals[trigger] for trigger in one["triggers"] if trigger in totals]
            if counts:
                found[one["name"]] = round(min(counts) / one["calls"])
        return found


INSIDES: dict[str, type[Inside]] = {"syscalls": Syscalls, "instructions": Instructions}

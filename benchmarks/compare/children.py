"""Processes that answer lines of JSON: the sides of a comparison that differ in a whole process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from keyfront.errors import ServerError

# Seconds until one that is told to end by the end of its input has done so.
_STOP_PATIENCE = 10


class Child:
    """A process that answers each line of JSON with one.

    :param name: the process, in errors
    :param log: the file of its standard error
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def ask(self, what: object) -> Any:
        """Return its answer to a line.

        :raises ServerError: it has ended; names the end of its log
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return a line that comes unasked, as the first one of a process that is ready.

        :raises ServerError: it has ended; names the end of its log
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"{self.name} ended: {self.tail()}")
        return json.loads(line)

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-600:]


def answers() -> IO[str]:
    """Return this process's way to who asks it; what else it prints goes to its log from now on."""
    found = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return found


@contextmanager
def child(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a process until the block ends.

    :param environment: its environment; default: that of this process
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            process_group=0,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Child(name, process, log)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_PATIENCE)
        process.kill()
        process.wait()
        process.stdout.close()

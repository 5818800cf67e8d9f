"""What another process prints, line by line, as it comes."""

from __future__ import annotations

import os
import select
import subprocess

from support.served import PATIENCE


class Lines:
    """The standard output of a process; nobody else may read it.

    :param process: one whose ``stdout`` is a pipe
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._unread = b""

    def next(self) -> str:
        """Wait for a line."""
        while b"\n" not in self._unread:
            self._read(PATIENCE)
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def after(self, *passed: str) -> str:
        """Wait for a line that is none of these."""
        while (line := self.next()) in passed:
            pass
        return line

    def drop(self) -> None:
        """Forget what it has printed so far: each whole line from now on is a new one."""
        while select.select([self._descriptor], [], [], 0)[0]:
            self._read(0)
        self._unread = self._unread.rpartition(b"\n")[2]

    def _read(self, seconds: float) -> None:
        assert select.select([self._descriptor], [], [], seconds)[0], "it stands still"
        part = os.read(self._descriptor, 65536)
        assert part, f"it has ended: {self._unread!r}"
        self._unread += part

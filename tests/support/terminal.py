"""A terminal: runs a command in a pty, and knows what its screen shows."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from support.served import PATIENCE

_HOME = "\x1b[H"
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """A running command and the screen that it writes to."""

    process: subprocess.Popen[bytes]
    master: int
    slave: int
    output: str = ""
    # what was read may end within a character
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=codecs.getincrementaldecoder("utf-8")
    )

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self.master, (lines, columns))

    def modes(self) -> list[object]:
        """What the terminal does with keys, as ``stty -a`` tells."""
        return list(termios.tcgetattr(self.slave))

    def more(self, seconds: float = 0.1) -> None:
        """Take what it has written."""
        while select.select([self.master], [], [], seconds)[0]:
            self.output += self._decoder.decode(os.read(self.master, 65536))
            seconds = 0

    def frames(self) -> list[list[str]]:
        """The lines of each whole frame that was drawn, the last one last."""
        drawn = self.output.split(_HOME)[1:]
        return [
            _SEQUENCE.sub("", frame).replace("\r", "").split("\n")
            for frame in drawn
            if "\x1b[J" in frame
        ]

    def until(self, condition: Callable[[list[str]], bool], what: str) -> list[str]:
        """Wait for a frame, of those drawn from now on; returns its lines."""
        self.more(0)
        before = len(self.frames())
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.more()
            for frame in self.frames()[before:]:
                if condition(frame):
                    return frame
            assert self.process.poll() is None, self.output[-3000:]
        raise AssertionError(f"waited in vain until {what}: {self.frames()[-1:]}")

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.more()  # one that waits to write does not end
            assert time.monotonic() < deadline, "it does not end"
        self.more(0)
        return self.process.returncode


@contextlib.contextmanager
def terminal(
    command: Sequence[str], *, columns: int = 80, lines: int = 24, **environment: str
) -> Iterator[Terminal]:
    """Run a command in a terminal of its own; what is left of it at the end is killed."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (lines, columns))

    def prepare() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    hidden = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=prepare,
        env={**kept, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    try:
        yield Terminal(process, master, slave)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(slave)
        os.close(master)

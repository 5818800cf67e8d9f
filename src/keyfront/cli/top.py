"""``keyfront top``: how this node is, live in a terminal.

What is read is what ``keyfront status`` reads, and in a thread of its own: a lock that a stopped
process holds, or a Redis that hangs, leaves the keys working and says for how long it has hung.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from keyfront.common import ranges
from keyfront.common.programs import require_module
from keyfront.errors import KeyfrontError, OptionError
from keyfront.gateway.heartbeat.counters import ProcessSums

from . import metrics
from .drain import add_file_argument
from .status import status

if TYPE_CHECKING:
    from rich.console import Console

    from .top_frame import Snapshot

_INTERVAL, _SHORTEST, _LONGEST = 2.0, 0.2, 60.0
# Seconds beyond its interval after which a reading hangs.
_HANGS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)
_KEYS = "q or Ctrl-C ends"
# What comes through the pipe besides the numbers of signals.
_HAS_READ = b"\0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Show how this node is, live: workers, requests, queue, token cache, LDAP and heartbeat, "
        "with what they did a second since the frame before. It reads what keyfront status reads. "
        "Run it as the user of the server, or root. q or Ctrl-C ends it."
    )
    add_file_argument(parser)
    metrics.add_source_arguments(parser)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        default=f"{_INTERVAL:g}",
        help="between two frames, 0.2 to 60 (default: %(default)s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame, of one interval, without a terminal; exit status as of keyfront "
        "status",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Show the node until it is ended, or print one frame; returns the exit status.

    :raises KeyfrontError: there is no such node, an option cannot be used, there is no terminal, or
        rich is not installed
    """
    interval = ranges.decimal("--interval", arguments.interval, _SHORTEST, _LONGEST)
    require_module("rich", "top")
    from rich.console import Console

    reader = Reader(lambda ended, times: status(arguments, ended, times))
    if arguments.once:
        return once(reader, Console(file=out, highlight=False), interval)
    if not (sys.stdin.isatty() and out.isatty()):
        raise OptionError(
            "--once", "(not given)", "given without a terminal; for programs there is keyfront "
            "status --json",
        )  # fmt: skip
    console = Console(file=out, highlight=False)
    if console.is_dumb_terminal:
        term = os.environ.get("TERM", "")
        raise OptionError("TERM", term, "that of a terminal whose cursor moves, or --once given")
    # A node that is not there is told at once, as the other commands tell it.
    metrics.node_folder(arguments, required=True)
    return watch(reader, console, interval)


class Reader:
    """Reads a node, and keeps what its last two readings found.

    :param read: returns what is known of the node, given the sums over processes that ended and a
        place for the times of its parts
    """

    def __init__(self, read: Callable[[ProcessSums, dict[str, float]], dict[str, Any]]) -> None:
        self._read = read
        self._ended = ProcessSums()
        #: The last two, the older first.
        self.snapshots: tuple[Snapshot | None, Snapshot | None] = (None, None)

    def read(self) -> None:
        """Read once; what cannot be read is told by the snapshot."""
        from .top_frame import Snapshot

        found: dict[str, Any] = {}
        times: dict[str, float] = {}
        error = ""
        try:
            found = self._read(self._ended, times)
        except (KeyfrontError, OSError) as raised:
            error = str(raised)
        clock = time.strftime("%H:%M:%S")
        taken = Snapshot(time.monotonic(), found, error, clock, times)
        self.snapshots = (self.snapshots[1], taken)


def once(reader: Reader, console: Console, interval: float) -> int:
    """Print the frame of one interval; returns 0, or 1 if the node is not well.

    :param interval: its seconds
    """
    from .top_frame import frame

    reader.read()
    time.sleep(interval)
    reader.read()
    before, now = reader.snapshots
    assert now is not None
    if now.error:
        raise KeyfrontError(now.error)
    text = frame(before, now, width=console.width)
    console.print(text, no_wrap=True, crop=False, overflow="ignore")
    return 0 if now.found["ok"] else 1


def watch(reader: Reader, console: Console, interval: float) -> int:
    """Show frames until q, SIGINT, SIGTERM or SIGHUP; returns the exit status.

    The terminal is as before when this returns, and while the process is stopped (SIGTSTP).

    :param interval: seconds between two frames
    """
    with _told_of_signals() as (signals, tell):
        readings = _Readings(reader, tell)
        while True:
            with _screen(console) as draw:
                ended = _show(readings, draw, interval, signals)
            if ended != signal.SIGTSTP:
                return 0 if ended in (0, signal.SIGINT) else 128 + ended
            # stopped by the default action, until the shell's fg
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, _noted)


class _Readings:
    """A thread in which a reader reads, one reading at a time."""

    def __init__(self, reader: Reader, tell: int) -> None:
        self.reader = reader
        self._tell = tell
        self._began = 0.0
        self._busy = False

    def begin(self) -> None:
        """Begin a reading, unless one hangs."""
        if not self._busy:
            self._busy, self._began = True, time.monotonic()
            threading.Thread(target=self._run, name="keyfront-top", daemon=True).start()

    def _run(self) -> None:
        try:
            self.reader.read()
        finally:
            self._busy = False
            with suppress(BlockingIOError):  # full: then it is read anyway
                os.write(self._tell, _HAS_READ)

    @property
    def hangs(self) -> float:
        """Seconds for which a reading has hung; 0 if none does."""
        seconds = time.monotonic() - self._began if self._busy else 0.0
        return seconds if seconds >= _HANGS else 0.0


Draw = Callable[["_Readings"], None]


def _show(readings: _Readings, draw: Draw, interval: float, signals: int) -> int:
    """Show frames until a key or a signal ends that; returns the signal's number, 0 for the key."""
    keys = sys.stdin.fileno()
    due = time.monotonic()
    draw(readings)
    while True:
        now = time.monotonic()
        if now >= due:
            readings.begin()
            due = max(due + interval, now)
            if readings.hangs:
                draw(readings)
        ready, _, _ = select.select([keys, signals], [], [], max(due - time.monotonic(), 0.0))
        if keys in ready:
            typed = os.read(keys, 1024)
            if not typed:
                return signal.SIGHUP
            if b"q" in typed or b"Q" in typed or b"\x03" in typed:
                return 0
        if signals in ready:
            told = os.read(signals, 1024)
            for number in told:
                if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
                    return number
            draw(readings)


def _noted(number: int, frame: object) -> None:
    """Do nothing: its number comes through the pipe (``signal.set_wakeup_fd``)."""


@contextmanager
def _told_of_signals() -> Iterator[tuple[int, int]]:
    """Yield a pipe that gives the number of each signal, and whatever else is told."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, _noted) for number in _SIGNALS}
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading, writing
    finally:
        # The pipe is left to the process's end: a reading that hangs writes to it when it is over.
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _screen(console: Console) -> Iterator[Draw]:
    """Take the terminal: yields what draws a frame; at the end it is as before."""
    from rich.console import ConsoleDimensions
    from rich.control import Control
    from rich.text import Text

    from .top_frame import frame

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)

    def draw(readings: _Readings) -> None:
        # not what the environment says, which stays when the window changes
        with suppress(OSError):  # it is gone: then reading its keys ends this
            found = os.get_terminal_size(console.file.fileno())
            console.size = ConsoleDimensions(found.columns or 80, found.lines or 24)
        # the last column stays free: some terminals begin a new line behind it
        width, height = max(console.width - 1, 1), console.height
        older, newer = readings.reader.snapshots
        note = _KEYS
        if hangs := readings.hangs:
            note = f"{_KEYS}; WHAT IS SHOWN IS OLD: a reading has hung for {hangs:.0f} s"
        if newer is None:
            text = Text(f"reading ... {note}"[:width])
        else:
            text = frame(older, newer, width=width, height=height, note=note)
        shown = text.split("\n", allow_blank=True)[:height]
        console.control(Control.home())
        for place, line in enumerate(shown):
            end = "\x1b[K\n" if place < len(shown) - 1 else "\x1b[K\x1b[J"
            line.truncate(width)
            console.print(line, end="", no_wrap=True, overflow="crop")
            console.file.write(end)
        console.file.flush()

    try:
        tty.setcbreak(keys, termios.TCSANOW)
        with console.screen(hide_cursor=True):
            yield draw
    finally:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(keys, termios.TCSAFLUSH, before)

"""Asks the parts that a server needs, each within its own time, without waiting for one that hangs.

Each part is asked in a thread of its own. What it said is good for a second, so that however many
ask for the health of a node, its database is asked once a second by each process. One that has not
answered in its time counts as away; nobody waits for it again until it has answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Seconds for which an answer is good.
KEPT = 1.0

Ask = Callable[[], None]


@dataclass(frozen=True)
class Finding:
    """The state of a part, as it was last seen.

    :param ok: true if it is there
    :param seconds: the time that its answer took, or has taken so far
    :param error: the reason for which it is not there, in one line for an operator
    """

    ok: bool
    seconds: float
    error: str = ""


@dataclass
class _Part:
    """A part, with what it said last and the question that is under way."""

    ask: Ask
    limit: float
    described: Callable[[BaseException], str]
    clock: Callable[[], float]
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_at: float | None = None
    answered: threading.Event | None = None
    finding: Finding | None = None
    found_at: float = 0.0

    def begin(self) -> None:
        """Ask, unless it is being asked or said something within the last second."""
        with self.lock:
            now = self.clock()
            fresh = self.finding is not None and now - self.found_at < KEPT
            if self.answered is not None or fresh:
                return
            answered = self.answered = threading.Event()
            self.asked_at = now
            asking = threading.Thread(
                target=self._ask, args=(now, answered), name="keyfront-check", daemon=True
            )
        try:
            asking.start()
        except RuntimeError as raised:  # there are too many; it is tried again
            self._found(self.described(raised), now, answered)

    def end(self) -> Finding:
        """Return what it says, or that it does not within its time."""
        with self.lock:
            answered, asked_at = self.answered, self.asked_at
        if answered is not None and asked_at is not None:
            left = asked_at + self.limit - self.clock()
            if not answered.wait(max(left, 0.0)):
                seconds = self.clock() - asked_at
                return Finding(False, seconds, f"no answer for {seconds:.1f} s")
        assert self.finding is not None
        return self.finding

    def _ask(self, began: float, answered: threading.Event) -> None:
        error = ""
        try:
            self.ask()
        except BaseException as raised:
            error = self.described(raised)
        self._found(error, began, answered)

    def _found(self, error: str, began: float, answered: threading.Event) -> None:
        with self.lock:
            now = self.clock()
            self.finding, self.found_at = Finding(not error, now - began, error), now
            self.answered = None
        answered.set()


class Checks:
    """The parts that a server needs.

    :param parts: by name, what raises where the part is not there, and the seconds it has
    :param described: makes a line of what it raised, without a secret
    :param clock: seconds that never go back
    """

    def __init__(
        self,
        parts: Mapping[str, tuple[Ask, float]],
        *,
        described: Callable[[BaseException], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._made = parts, described, clock
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew in a child: the threads that ask are its parent's."""
        parts, described, clock = self._made
        self._parts = {
            name: _Part(ask, limit, described, clock) for name, (ask, limit) in parts.items()
        }

    def findings(self) -> dict[str, Finding]:
        """Ask all parts at once, and return what is known of each by its name."""
        for part in self._parts.values():
            part.begin()
        return {name: part.end() for name, part in self._parts.items()}

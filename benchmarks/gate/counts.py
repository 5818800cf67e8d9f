"""What one exact count came to: a line for the terminal, an object for a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .decision import Verdict


@dataclass(frozen=True, kw_only=True)
class Count:
    """One number of one test.

    :param name: the test's node id
    :param fixture: by which it was counted
    :param key: what was counted; of instructions, with which versions
    :param value: ``None`` if it was not counted
    :param recorded: ``None`` if nothing is
    :param reason: why it is no plain PASS or FAIL; empty otherwise
    """

    name: str
    fixture: str
    key: str
    verdict: Verdict
    value: int | None = None
    recorded: int | None = None
    reason: str = ""

    def line(self) -> str:
        """One line for the terminal's summary, and what a failed test says."""
        what = f"{self.key}: {self.value}" if self.value is not None else self.key
        was = f", recorded {self.recorded}" if self.recorded is not None else ""
        more = f" ({self.reason})" if self.reason else ""
        return f"{self.verdict:<13}{what}{was}{more}  {self.name}"

    def described(self) -> dict[str, Any]:
        """For a file."""
        return {
            "name": self.name,
            "fixture": self.fixture,
            "key": self.key,
            "verdict": str(self.verdict),
            "value": self.value,
            "recorded": self.recorded,
            "reason": self.reason,
        }

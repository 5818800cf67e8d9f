"""Sums over processes whose counts end with them, as the heartbeat's do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Ended:
    """Sums over processes whose counts end with them: a sum never falls while this process lives.

    :ivar last: the counts of each process when it was last seen, by its file and number
    :ivar seen: true if there ever was a process
    """

    last: dict[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    seen: bool = False
    _sums: dict[str, int] = field(default_factory=dict)

    def add(self, living: Mapping[tuple[str, int], Mapping[str, int]]) -> dict[str, int]:
        """Return the sums over those that live and those that were seen and ended."""
        for whose, counts in self.last.items():
            # one of the same number that counts less is another
            again = living.get(whose)
            if again is None or any(again[name] < counts[name] for name in counts):
                for name, count in counts.items():
                    self._sums[name] = self._sums.get(name, 0) + count
        self.last = dict(living)
        self.seen = self.seen or bool(living)
        found = dict(self._sums)
        for counts in living.values():
            for name, count in counts.items():
                found[name] = found.get(name, 0) + count
        return found

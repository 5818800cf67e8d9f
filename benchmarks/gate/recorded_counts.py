"""The counts that are recorded beside a test file, ``test_x.py``'s in ``test_x.gate.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keyfront.errors import BenchmarkError

from .. import files

SCHEMA = "keyfront-gate-records/1"
KINDS = ("counted", "instructions")


class Records:
    """The content of one file: integers by kind, test, and a key.

    The key of ``counted`` says what was counted, that of ``instructions`` with which versions.
    """

    def __init__(self, path: Path, content: dict[str, dict[str, dict[str, int]]]) -> None:
        self.path = path
        self._content = content
        self._changed = False

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read a file; one that is not there holds nothing.

        :raises BenchmarkError: it cannot be read or is no such record
        """
        if not path.exists():
            return cls(path, {kind: {} for kind in KINDS})
        content = files.read_json(path)
        if not _is_record(content):
            raise BenchmarkError(f"{path}: is no record of counts of the schema {SCHEMA}")
        return cls(path, {kind: content[kind] for kind in KINDS})

    def get(self, kind: str, name: str) -> dict[str, int] | None:
        """Return what is recorded of a test; ``None`` if nothing is."""
        return self._content[kind].get(name)

    def put(self, kind: str, name: str, values: dict[str, int]) -> None:
        """Record a test's counts, instead of what was recorded."""
        if self._content[kind].get(name) != values:
            self._content[kind][name] = dict(values)
            self._changed = True

    def names(self) -> set[str]:
        """Return the tests something is recorded of."""
        return {name for kind in KINDS for name in self._content[kind]}

    def remove(self, names: list[str]) -> None:
        """Forget tests."""
        for kind in KINDS:
            for name in names:
                self._changed |= self._content[kind].pop(name, None) is not None

    def write(self) -> bool:
        """Write the file, whole or not at all, if anything changed; returns whether it did.

        :raises BenchmarkError: it cannot be written
        """
        if not self._changed:
            return False
        text = json.dumps({"schema": SCHEMA, **self._content}, indent=1, sort_keys=True) + "\n"
        files.write(self.path, text)
        self._changed = False
        return True


def _is_record(content: Any) -> bool:
    try:
        counts = [values for kind in KINDS for values in content[kind].values()]
        numbers = [value for values in counts for value in values.values()]
        known = content["schema"] == SCHEMA
    except (KeyError, TypeError, AttributeError):
        return False
    return known and all(type(value) is int and value >= 0 for value in numbers)

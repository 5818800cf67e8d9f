"""The fixture ``counted``: exact counts, equal to those recorded or changed for a reason."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .outcome import Count
from .session import Fixture, name_of
from .verdict import Verdict

KIND = "counted"
Value = int | Mapping[str, int] | None


@dataclass
class EventCount:
    """The number of times something happened in a block, until now."""

    count: int = 0


class Counted(Fixture):
    """The value of the fixture, to be called once in a test."""

    name = KIND
    _absent = ""

    def __call__(self, *, changed: str = "", **counts: Value) -> None:
        """Compare counts with those recorded, and fail the test at the first difference.

        :param changed: the reason for which they differ from now on; else empty
        :param counts: the numbers. A mapping counts several things of a kind and their sum;
            ``None`` is what could not be counted on this machine
        :raises ValueError: a count is no integer from 0
        """
        self._once()
        values = _flat(counts)
        absent = {key for key, value in counts.items() if value is None}
        records = self._session.records(self._item)
        name = name_of(self._item)
        recorded = records.get(KIND, name)
        found = [
            self._count(key, Verdict.MISSING, reason=self._absent or "not on this machine")
            for key in sorted(absent)
        ]
        if self._session.update:
            kept = {
                key: value
                for key, value in (recorded or {}).items()
                if key.partition(".")[0] in absent
            }
            records.put(KIND, name, {**kept, **values})
            found += [self._count(key, Verdict.PASS, value) for key, value in values.items()]
        elif recorded is None:
            reason = "nothing is recorded: was the test renamed? else run with --gate-update"
            found += [self._count(key, Verdict.FAIL, values[key], reason=reason) for key in values]
            if not found:
                found.append(self._count("counts", Verdict.FAIL, reason=reason))
        else:
            found += self._compared(values, recorded, absent, changed)
        self._session.count(self._item, found)

    def _compared(
        self, values: dict[str, int], recorded: dict[str, int], absent: set[str], changed: str
    ) -> Iterator[Count]:
        for key in sorted(values.keys() | recorded.keys()):
            if key.partition(".")[0] in absent:
                continue
            # a kind of which there was none is not written down
            default = 0 if "." in key else None
            value, was = values.get(key, default), recorded.get(key, default)
            if value == was:
                yield self._count(key, Verdict.PASS, value, was)
            elif changed:
                yield self._count(key, Verdict.CHANGED, value, was, reason=changed)
            else:
                reason = "" if None not in (value, was) else _one_sided(value)
                yield self._count(key, Verdict.FAIL, value, was, reason=reason)

    def syscalls(self, step: Callable[[], object], *, calls: int = 10) -> Mapping[str, int] | None:
        """Count the system calls of some calls, of the thread that makes them.

        The test is run once more in a process of its own under strace, where ``step`` is called
        that often to be warm, and that often again in each of five rounds. The round with the
        fewest is meant: what goes by a clock is in few of them.

        :returns: by name; ``None`` if strace is not installed
        """
        step()
        inside = self._session.inside("syscalls", KIND, self._item)
        self._absent = inside.absent
        if inside.absent:
            return None
        found: Counter[str] | None = inside.find(self._item)
        if found is None:
            self._session.fail(f"the test did not come that far under strace\n{inside.said}")
        return found

    @contextmanager
    def sql(self, engine: Any) -> Iterator[EventCount]:
        """Count the SQL statements that an engine of SQLAlchemy executes in the block."""
        from sqlalchemy import event

        count = EventCount()

        def executed(*_: object) -> None:
            count.count += 1

        event.listen(engine, "before_cursor_execute", executed)
        try:
            yield count
        finally:
            event.remove(engine, "before_cursor_execute", executed)

    @contextmanager
    def calls(self, owner: Any, name: str) -> Iterator[EventCount]:
        """Count the calls of a method or function in the block; they go on as before."""
        count = EventCount()
        real, made = getattr(owner, name), inspect.getattr_static(owner, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            count.count += 1
            return real(*arguments, **named)

        # a function of a class is given the instance it is called on, these are not
        bound = isinstance(owner, type) and isinstance(made, staticmethod | classmethod)
        with mock.patch.object(owner, name, staticmethod(counting) if bound else counting):
            yield count


def _flat(counts: Mapping[str, Value]) -> dict[str, int]:
    """Return each kind of a mapping under ``key.kind``, their sum under ``key``."""
    found: dict[str, int] = {}
    for key, value in counts.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            found[key] = sum(value.values())
            found |= {f"{key}.{kind}": number for kind, number in value.items()}
        else:
            found[key] = value
    for key, number in found.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"{key} = {number}: must be an integer from 0")
    return found


def _one_sided(value: int | None) -> str:
    return "it is recorded, but not counted" if value is None else "it is not recorded"

"""The fixture ``instructions``: what the processor executes in a call, as callgrind counts it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any

from .session import Fixture, name_of
from .verdict import Verdict

KIND = "instructions"
#: How many times the recorded count may be reached.
LIMIT = 1.02
CALLS = 100


class Instructions(Fixture):
    """The value of the fixture, to be called once in a test."""

    name = KIND

    def __call__(
        self,
        step: Callable[[], object],
        *,
        limit: float = LIMIT,
        calls: int = CALLS,
        depends: Iterable[str] = (),
    ) -> int | None:
        """Compare the instructions of a call with those recorded for the same versions.

        The test is run once more in a process of its own under valgrind, and the least of five
        counts is taken. That differs by 0.3 % from run to run, seldom by 1 %, and by more between
        builds of Python, so each has a record of its own; where there is none yet, that is told and
        fails nothing.

        :param limit: the largest ratio to the recorded count, 1 to 2
        :param calls: to count each time, and to call before to be warm; at least 1
        :param depends: distributions whose versions matter as well
        :returns: instructions per call; ``None`` where they cannot be counted
        :raises ValueError: an argument is outside its range
        """
        if not (math.isfinite(limit) and 1 < limit <= 2):
            raise ValueError(f"limit = {limit}: must be greater than 1, and 2 at most")
        if calls < 1:
            raise ValueError(f"calls = {calls}: must be at least 1")
        self._once()
        step()
        inside = self._session.inside(KIND, KIND, self._item)
        if inside.absent:
            self._tell("instructions", Verdict.MISSING, None, None, inside.absent)
            return None
        value: int | None = inside.find(self._item)
        if value is None:
            self._session.fail(f"the test did not come that far under valgrind\n{inside.said}")
        self._compare(value, key(depends), limit)
        return value

    def _compare(self, value: int, versions: str, limit: float) -> None:
        records = self._session.records(self._item)
        name = name_of(self._item)
        recorded = records.get(KIND, name)
        was = (recorded or {}).get(versions)
        verdict, reason = Verdict.PASS, ""
        if self._session.update:
            records.put(KIND, name, {**(recorded or {}), versions: value})
            was = None
        elif recorded is None:
            verdict = Verdict.FAIL
            reason = "nothing is recorded: was the test renamed? else run with --gate-update"
        elif was is None:
            verdict, reason = Verdict.NEW, "no record of these versions: --gate-update adds one"
        elif value > was * limit:
            verdict, reason = Verdict.FAIL, f"{value / was:.3f} times, limit {limit:g}"
        self._tell(versions, verdict, value, was, reason)

    def _tell(self, *count: Any) -> None:
        self._session.count(self._item, [self._count(*count)])


def key(depends: Iterable[str] = ()) -> str:
    """Return what a count depends on beside the code: interpreter, C library, versions.

    :raises importlib.metadata.PackageNotFoundError: one of ``depends`` is not installed
    """
    built = f"{platform.python_compiler()} {sysconfig.get_config_var('CONFIG_ARGS')}"
    parts = [
        f"{platform.python_implementation()} {platform.python_version()}",
        f"built {hashlib.sha256(built.encode()).hexdigest()[:8]}",
        platform.machine(),
        " ".join(platform.libc_ver()).strip() or "unknown C library",
        *(f"{name} {importlib.metadata.version(name)}" for name in sorted(depends)),
    ]
    return ", ".join(parts)

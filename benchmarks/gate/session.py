"""One run of pytest with gates: what was asked for, what was found, and what comes of it."""

from __future__ import annotations

import importlib
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from keyfront.errors import BenchmarkError

from .outcome import Count, Outcome
from .recorded_counts import Records
from .verdict import LIMIT, Verdict

if TYPE_CHECKING:
    from .release import Release
    from .traced_runs import Inside

SCHEMA = "keyfront-gate/1"
_WORSE = (Verdict.INCONCLUSIVE, Verdict.MISSING)


class GateSession:
    """Made when the first test asks for a gate, or an option of it is given.

    :ivar release: the release that ``--gate-baseline`` names; ``None`` if it was not given
    :ivar limit: the limit of a ratio to the release
    :ivar most_seconds: seconds that a decision may take; infinite: each test says so itself
    :ivar seed: the seed of the order of pairs
    :ivar untimed: the reason for which no times are compared; empty if they are
    :ivar all: the tests there are
    :ivar chosen: those of them that will run
    :ivar update: true if counts are recorded instead of compared
    :raises pytest.UsageError: an option is outside its range
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.limit = _number(config, "gate_limit", LIMIT, 1.005, 100.0)
        self.most_seconds = _number(config, "gate_seconds", math.inf, 0.1, 3600)
        self.seed = int(_number(config, "gate_seed", random.getrandbits(31), 0, 2**31 - 1))
        self.strict: bool = config.getoption("gate_strict")
        self.update: bool = config.getoption("gate_update")
        self.untimed = _untimed(config)
        self.outcomes: list[Outcome] = []
        self.counts: list[Count] = []
        self.control: Outcome | None = None
        self._notes: list[str] = []
        self._errors: list[str] = []
        self.all: list[pytest.Item] = []
        self.chosen: list[pytest.Item] = []
        self._records: dict[Path, Records] = {}
        self._insides: dict[str, Inside] = {}
        self._folder: Path | None = None
        json_file = config.getoption("gate_json")
        self._json = Path(json_file) if json_file else None
        if self._json is not None and not self._json.parent.is_dir():
            raise pytest.UsageError(f"--gate-json = {json_file}: its folder must exist")
        self.release: Release | None = None
        if config.getoption("gate_baseline"):
            from .release import Release

            self.release = Release(config.getoption("gate_baseline"), config.rootpath)

    @property
    def folder(self) -> Path:
        """A temporary folder of this run, of this user only."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gate-"))
        return self._folder

    def control_with(self, measure: Callable[[], Outcome]) -> None:
        """Have the machine compare something with itself, unless it has already."""
        if self.control is None:
            self.control = measure()

    def records(self, item: pytest.Item) -> Records:
        """Return the records beside a test's file; fail the test if the file is no such record."""
        path = item.path.with_suffix(".gate.json")
        if path not in self._records:
            try:
                self._records[path] = Records.read(path)
            except BenchmarkError as error:
                self.fail(error.message)
        return self._records[path]

    def inside(self, kind: str, fixture: str, item: pytest.Item) -> Inside:
        """Run all chosen tests of a fixture under strace or valgrind; once per kind."""
        from .traced_runs import Inside

        if kind not in self._insides:
            chosen = [one for one in self.chosen if fixture in getattr(one, "fixturenames", ())]
            self._insides[kind] = Inside(kind, self, chosen or [item])
        return self._insides[kind]

    @property
    def _off_by(self) -> float:
        """Return the ratio, from 1, that this machine's noise explains: 1 while it is trusted."""
        if self.control is None or self.control.verdict is not Verdict.FAIL:
            return 1.0
        low, _, high = self.control.interval
        return math.exp(max(high, -low))

    def conclude(self, item: pytest.Item, outcome: Outcome) -> Outcome:
        """Keep what ``paired`` found; fails the test if it has to.

        :raises pytest.fail.Exception: the verdict is FAIL, or with ``--gate-strict`` INCONCLUSIVE
        """
        if outcome.verdict is Verdict.FAIL and outcome.low <= outcome.limit * self._off_by:
            outcome.verdict = Verdict.INCONCLUSIVE
            outcome.reason = "it failed, but so did the control: this machine is too noisy now"
        doc = getattr(getattr(item, "obj", None), "__doc__", None) or ""
        outcome.title = doc.strip().partition("\n")[0]
        self.outcomes.append(outcome)
        item.user_properties.append(("gate", outcome.line()))
        _add_entries(self.config, item, outcome)
        if outcome.verdict is Verdict.FAIL or (self.strict and outcome.verdict in _WORSE):
            self.fail(outcome.failure())
        return outcome

    def count(self, item: pytest.Item, counts: Sequence[Count]) -> None:
        """Keep what ``counted`` or ``instructions`` found; fails the test if it has to."""
        self.counts += counts
        item.user_properties += [("gate", count.line()) for count in counts]
        bad = (Verdict.FAIL, *(_WORSE if self.strict else ()))
        wrong = [count.line() for count in counts if count.verdict in bad]
        if wrong:
            self.fail("\n".join(wrong))

    def fail(self, text: str) -> NoReturn:
        """End the test as failed, with this text and no traceback."""
        raise pytest.fail.Exception(text, pytrace=False) from None

    def finish(self) -> bool:
        """Write records and the file; returns whether nothing was wrong that no test showed."""
        try:
            self._errors += self._unused()
            if self.update:
                for records in self._records.values():
                    if records.write():
                        self._notes.append(f"recorded in {self._shown(records.path)}")
            if self._json is not None:
                text = json.dumps(self.described(), indent=1, allow_nan=False)
                self._json.write_text(text + "\n", encoding="utf-8")
        except BenchmarkError as error:
            self._errors.append(error.message)
        except OSError as error:
            self._errors.append(f"--gate-json = {self._json}: {error.strerror}")
        return not self._errors

    def _unused(self) -> list[str]:
        """Records of tests that are not there any more, where the whole file was collected."""
        # a test named by its id collects that one only
        if any("::" in argument for argument in self.config.args) or not self.all:
            return []
        present: dict[Path, set[str]] = {}
        for item in self.all:
            present.setdefault(item.path.with_suffix(".gate.json"), set()).add(name_of(item))
        found = []
        for path in present:
            if path not in self._records and not path.is_file():
                continue
            records = self._records.setdefault(path, Records.read(path))
            gone = sorted(records.names() - present[path])
            if self.update:
                records.remove(gone)
            else:
                found += [
                    f"{self._shown(path)}: there is no test {name} any more: if it was renamed or "
                    "removed on purpose, run with --gate-update"
                    for name in gone
                ]
        return found

    def _shown(self, path: Path) -> str:
        root = self.config.rootpath
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def described(self) -> dict[str, object]:
        """Return all that was found, for a file."""
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "baseline": self.release.name if self.release else None,
            "control": self.control.described() if self.control else None,
            "gates": [outcome.described() for outcome in self.outcomes],
            "counts": [count.described() for count in self.counts],
        }

    def lines(self) -> list[str]:
        """Return the lines of the terminal's summary."""
        order = {Verdict.FAIL: 0, Verdict.INCONCLUSIVE: 1}
        worst_first = sorted(self.outcomes, key=lambda one: order.get(one.verdict, len(order)))
        found = [outcome.line() for outcome in worst_first]
        if self.control is not None:
            found.append(self.control.line().replace("PASS", "    ", 1))
            if self.control.verdict is Verdict.FAIL:
                found.append(
                    f"the control is off: this machine is noisy now, and a gate fails only beyond "
                    f"{self._off_by:.3f} times its limit"
                )
        found += [count.line() for count in self.counts if count.verdict is not Verdict.PASS]
        same = sum(count.verdict is Verdict.PASS for count in self.counts)
        if same:
            found.append(f"{same} count{'s' if same > 1 else ''} as recorded")
        unclear = sum(outcome.verdict in _WORSE for outcome in self.outcomes)
        if unclear:
            found.append(
                f"WARNING: {unclear} inconclusive: run them again on a quieter machine, or give "
                "them more seconds; --gate-strict makes that a failure"
            )
        return [*found, *self._notes, *(f"ERROR {line}" for line in self._errors)]

    def close(self) -> None:
        """Leave nothing behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Fixture:
    """The value of a fixture of the gate, to be called once in a test.

    :ivar name: the name of the fixture
    """

    name = ""

    def __init__(self, session: GateSession, item: pytest.Item) -> None:
        self._session = session
        self._item = item
        self._used = False
        # a count of this test: what comes before its key is known
        self._count = partial(Count, item.nodeid, self.name)

    def _once(self) -> None:
        """Fail the test if this is called twice in it."""
        if self._used:
            self._session.fail(
                f"{self.name}() was called twice in this test: parametrize it, or count all at once"
            )
        self._used = True


def address(item: pytest.Item) -> str:
    """Return what another pytest finds a test by, wherever it takes its root to be."""
    return f"{item.path}::{name_of(item)}"


def name_of(item: pytest.Item) -> str:
    """Return a test's name within its file, by which counts are recorded."""
    return item.nodeid.partition("::")[2]


def _number(config: pytest.Config, name: str, default: float, least: float, most: float) -> float:
    text = config.getoption(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        option = "--" + name.replace("_", "-")
        raise pytest.UsageError(f"{option} = {text}: must be {least:g} to {most:.10g}")
    return value


def _untimed(config: pytest.Config) -> str:
    if config.getoption("gate_disable"):
        return "--gate-disable was given"
    if hasattr(config, "workerinput") or config.getoption("dist", "no") != "no":
        return "beside other processes of xdist times mean nothing"
    return ""


def _add_entries(config: pytest.Config, item: pytest.Item, outcome: Outcome) -> None:
    """Put what a gate timed into pytest-benchmark's session, as if it had timed it itself.

    So its table, ``--benchmark-json``, ``--benchmark-save``, ``pytest-benchmark compare`` and its
    histogram show both sides, in a group of their own. Without pytest-benchmark, or where it is
    switched off, nothing happens.
    """
    session = getattr(config, "_benchmarksession", None)
    if session is None or session.disabled or outcome.samples is None:
        return
    # what pytest-benchmark notes of its own runs, as it was here
    options = {"disable_gc": True, "timer": "perf_counter_ns", "warmup": True}
    made: Any = importlib.import_module("pytest_benchmark.stats").Metadata
    for side, label in enumerate(("", " (baseline)")):
        spec = getattr(item, "callspec", None)
        fixture = SimpleNamespace(
            name=item.name + label,
            fullname=item.nodeid + label,
            group=item.nodeid,
            param=spec.id if spec else None,
            params=spec.params if spec else None,
            extra_info={} if side else {"gate": outcome.described()},
            cprofile_stats=None,
            has_error=False,
        )
        calls = outcome.samples.calls[side]
        entry = made(fixture, iterations=calls, options=options)
        for pair in outcome.samples.pairs:
            entry.update(pair[side] / 1e9)
        session.benchmarks.append(entry)

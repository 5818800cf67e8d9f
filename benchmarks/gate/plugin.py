"""The gate as pytest sees it: options, fixtures, and a part of the summary.

pytest loads this in every session of an environment that has keyfront, so everything else of the
gate is imported when a test asks for a fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .counted import Counted
    from .instructions import Instructions
    from .paired import Paired
    from .session import GateSession

_SESSION = pytest.StashKey["GateSession"]()
_COLLECTED = pytest.StashKey[list[pytest.Item]]()
_FIXTURES = {"paired", "counted", "instructions"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "benchmarks as gates (keyfront)")
    group.addoption(
        "--gate-baseline",
        metavar="RELEASE",
        help="compare each paired() with itself in a release: a wheel, a source archive, a folder "
        "with sources, a virtual environment, NAME==VERSION, or a revision of this git repository",
    )
    group.addoption(
        "--gate-limit",
        metavar="RATIO",
        help="how many times the release's time is too much, 1.005 to 100 (default: 1.03)",
    )
    group.addoption(
        "--gate-seconds",
        metavar="SECONDS",
        help="what each paired() may take at most, 0.1 to 3600 (default: what the test says)",
    )
    group.addoption(
        "--gate-strict", action="store_true", help="INCONCLUSIVE and NOT COUNTED fail, too"
    )
    group.addoption("--gate-update", action="store_true", help="record the counts as they are now")
    group.addoption("--gate-disable", action="store_true", help="run, but compare no times")
    group.addoption("--gate-json", metavar="FILE", help="write all that was found, with raw pairs")
    group.addoption(
        "--gate-seed", metavar="N", help="order of the pairs, 0 to 2147483647 (default: drawn)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # a wrong option is told before any test runs
    names = ("gate_baseline", "gate_limit", "gate_seconds", "gate_seed", "gate_json")
    if any(config.getoption(name) is not None for name in names):
        _session(config)


def _session(config: pytest.Config) -> GateSession:
    found = config.stash.get(_SESSION, None)
    if found is None:
        from .session import GateSession

        found = config.stash[_SESSION] = GateSession(config)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember what there is before ``-k`` and ``-m`` leave some out."""
    config.stash[_COLLECTED] = list(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    collected = config.stash.get(_COLLECTED, [])
    if any(_FIXTURES.intersection(getattr(item, "fixturenames", ())) for item in collected):
        found = _session(config)
        found.all, found.chosen = collected, session.items


@pytest.fixture
def paired(request: pytest.FixtureRequest) -> Paired:
    """Compare the times of a candidate and a baseline: ``paired(candidate, baseline)``."""
    from .paired import Paired

    return Paired(_session(request.config), request.node)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Counted:
    """Compare exact counts with those recorded beside the test: ``counted(binds=1)``."""
    from .counted import Counted

    return Counted(_session(request.config), request.node)


@pytest.fixture
def instructions(request: pytest.FixtureRequest) -> Instructions:
    """Compare a count of instructions with the one recorded: ``instructions(step)``."""
    from .instructions import Instructions

    return Instructions(_session(request.config), request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash.get(_SESSION, None)
    if found is not None and not session.config.option.collectonly and not found.finish():
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = terminalreporter.config.stash.get(_SESSION, None)
    lines = found.lines() if found is not None else []
    if lines:
        terminalreporter.section("gate")
        for line in lines:
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    found = config.stash.get(_SESSION, None)
    if found is not None:
        found.close()

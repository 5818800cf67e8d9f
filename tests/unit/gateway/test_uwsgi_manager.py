"""uWSGI's manager: it hears a signal that comes at any moment, and ends over no trifle."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from keyfront.common.signals import taken
from keyfront.gateway.reload.uwsgi_manager import _SIGNALS, Manager, _Uwsgi


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager that has started no uWSGI yet, and takes its signals."""
    ini = tmp_path / "uwsgi.ini"
    ini.write_text(f"[uwsgi]\nsocket = {tmp_path}/socket\nstats = {tmp_path}/stats\n")
    manager = Manager(ini, "/nonexistent")
    with taken(_SIGNALS, manager._note, manager._wake_write):
        yield manager
    manager._clean()


def _lines(function: Any) -> list[int]:
    """Return the numbers of the lines with code of a function, its first one left out."""
    return sorted({line for _, _, line in function.__code__.co_lines() if line})[1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("line", _lines(Manager._step))
def test_a_signal_before_any_line_is_not_lost(
    manager: Manager, line: int, number: signal.Signals
) -> None:
    raised = []

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if frame.f_code is not Manager._step.__code__:
            return None
        if event == "line" and frame.f_lineno == line and not raised:
            raised.append(line)
            signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        manager._step()
    finally:
        sys.settrace(before)
    if not raised:
        # of what a manager without any uWSGI does not come to
        signal.raise_signal(number)
    manager._step()
    assert manager._stopping if number == signal.SIGTERM else manager._wanted


def test_a_log_that_takes_no_line_ends_nothing() -> None:
    script = f"from {Manager.__module__} import Manager; Manager._say('it serves')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", script], stderr=full, check=False)
    assert done.returncode == 0


def test_statistics_that_cannot_be_shown_end_nothing(
    manager: Manager, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stats.new").mkdir()
    sleeping = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    manager._coming = coming = _Uwsgi(sleeping, 1, 0.0)
    manager._take_over(coming, 0.0)
    assert manager._serving is coming
    assert sleeping.poll() is None
    assert "leads to the former statistics" in capfd.readouterr().err


def test_the_lines_are_those_of_the_step() -> None:
    lines, first = inspect.getsourcelines(Manager._step)
    assert len(_lines(Manager._step)) > 10
    assert set(_lines(Manager._step)) <= set(range(first, first + len(lines)))

"""Processes by their names: whether one lives, of this node or another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from keyfront.common import process
from keyfront.common.process import name_of, named_lives

# A program that prints its name.
_TELL = (
    "import os; from keyfront.common.process import name_of;"
    "print(name_of(os.getpid()), flush=True)"
)


@pytest.fixture
def dead() -> str:
    """A process that was and is no more."""
    return subprocess.check_output([sys.executable, "-c", _TELL], text=True).strip()


def test_this_process_lives() -> None:
    name = name_of(os.getpid())
    assert re.fullmatch(rf"[0-9a-f]{{12}}:{os.getpid()}:[0-9]+", name)
    assert named_lives(name)


def test_a_dead_process_and_another_one_with_its_number(dead: str) -> None:
    assert named_lives(dead) is False
    node, number, start = name_of(os.getpid()).split(":")
    assert named_lives(f"{node}:{number}:{int(start) - 1}") is False


def test_a_process_that_was_not_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        name = name_of(child.pid)
        assert named_lives(name)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert named_lives(name) is False
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("name", ["0123456789ab:1:5", "junk", "0123456789ab:x:5", ":"])
def test_of_a_process_elsewhere_nothing_is_known(name: str) -> None:
    assert named_lives(name) is None


def test_a_process_that_proc_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is one of its number is all that is known of it."""
    name = name_of(os.getpid())
    monkeypatch.setattr(process, "started", lambda pid: None)
    assert named_lives(name) is False
    monkeypatch.setattr(process, "hidden", lambda pid: True)
    assert named_lives(name) is None

"""Sockets have paths of at most 107 bytes; folders may have longer ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import APPS
from support.keystones import keystone_state, serve_as_is
from support.served import Served

LONG = "a-folder-of-a-long-name-" * 5


@pytest.fixture
def temporary(tmp_path: Path) -> str:
    """What ``TMPDIR`` says: a path in which no socket can be."""
    folder = tmp_path / f"tmp-{LONG}"
    folder.mkdir()
    return str(folder)


def _answers(served: Served) -> None:
    connection = served.connect()
    connection.request("GET", "/v3")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 200


def test_serves_and_reloads(temporary: str, tmp_path: Path) -> None:
    state = keystone_state(tmp_path / LONG)
    with serve_as_is(state, "nginx+uwsgi", environment={"TMPDIR": temporary}) as served:
        _answers(served)
        done = subprocess.run(
            [sys.executable, "-m", "keyfront", "reload", str(state / "run" / "uwsgi.ini")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        _answers(served)
    assert not os.listdir(temporary)


def test_measures_a_plan(temporary: str) -> None:
    """As far as the first candidate's answer, which comes when uWSGI has its sockets."""
    done = subprocess.run(
        [sys.executable, "-m", "keyfront", "plan", "--measure", "--seconds", "180"],
        env={
            **os.environ, "TMPDIR": temporary, "PYTHONPATH": str(APPS),
            "KEYFRONT_APP": "service_app:application",
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "GET / is answered 500; name another path" in done.stderr
    assert not os.listdir(temporary)

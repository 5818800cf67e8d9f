"""What the benchmarks make of wrk: what they tell it, and what they read from it."""

from __future__ import annotations

import json
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keyfront.benchmarks.load import wrk
from keyfront.benchmarks.load.measured import Load
from keyfront.errors import MissingPartError, ServerError

# Stands in for wrk: notes what it was told and reports three answers and two kinds of failure.
# Run by a shell: the interpreter's path may hold blanks, which a first line cannot.
WRK = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, sys
path = sys.argv[sys.argv.index("--script") + 1]
told = {{"arguments": sys.argv, "mode": os.stat(path).st_mode, "script": open(path).read()}}
json.dump(told, open({notes!r}, "w"))
print("Running 2s test")
print("summary 4 2000000 1")
print("failed connect 0")
print("failed read 2")
print("latency 100 3")
print("latency 9000 1")
sys.exit({status})
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the wrk of this test writes what it was told."""
    _install(tmp_path, monkeypatch, status=0)
    return tmp_path / "notes"


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, status: int) -> None:
    program = folder / "wrk"
    program.write_text(
        WRK.format(python=sys.executable, notes=str(folder / "notes"), status=status)
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))


def run(**options: Any) -> Load:
    headers = {"X-Auth-Token": "secret-token"}
    return wrk.run("http://127.0.0.1:1/", headers, seconds=2, connections=4, **options)


def test_counts_good_answers_and_errors(notes: Path) -> None:
    seen = run()
    assert (seen.good, seen.failed, seen.seconds, seen.rate) == (3, 3, 2.0, 1.5)
    assert seen.latencies == Counter({100: 3, 9000: 1})


def test_failures_are_told_by_status_if_wanted(notes: Path) -> None:
    run()
    assert "settings = {}" in json.loads(notes.read_text())["script"]
    run(statuses=True)
    assert "settings = {statuses = true}" in json.loads(notes.read_text())["script"]
    printed = "summary 9 1000000 5\nfailed read 2\nanswered refused 3\nanswered status_502 2\n"
    seen = wrk.parse(f"{printed}latency 100 9", 0.0)
    assert seen.failures == {"refused": 3, "status 502": 2, "read": 2}
    # refusals are among them: they tell nothing of good answers
    assert (seen.good, seen.percentile(0.5)) == (4, None)
    assert seen.sample()["p99_with_failed_ms"] == 0.1


def test_it_ends_with_so_many_answers_if_wanted(notes: Path) -> None:
    run(most=7)
    assert "settings = {most = 7}" in json.loads(notes.read_text())["script"]


def test_a_secret_is_in_no_argument_and_in_no_file_of_others(notes: Path) -> None:
    run()
    told = json.loads(notes.read_text())
    assert "secret-token" not in " ".join(told["arguments"])
    assert stat.S_IMODE(told["mode"]) == 0o600
    # as bytes in decimal: whatever is in a value, it stays one Lua string
    assert '"\\115\\101\\099\\114\\101\\116' in told["script"]
    assert not Path(told["arguments"][told["arguments"].index("--script") + 1]).exists()


def test_a_request_may_be_varied(notes: Path) -> None:
    run(vary="?a=")
    assert 'settings = {vary = "\\063\\097\\061"}' in json.loads(notes.read_text())["script"]


def test_a_failed_wrk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, status=1)
    with pytest.raises(ServerError, match=r"wrk failed with status 1.*; is the server at http"):
        run()


def test_a_missing_wrk_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(MissingPartError, match="run apt install wrk"):
        run()

"""``keyfront bench micro``: what it says of bad input, and what it makes of the gate's file."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.micro import run_pytest as command
from keyfront.benchmarks.results import Record
from keyfront.cli import main as cli
from keyfront.errors import MissingPartError

GATE = {
    "name": "test_tokens.py::test_hit_against_stock_keystone",
    "title": "A hit answers a validation.",
    "verdict": "PASS",
    "limit": 0.025,
    "against": "in the same process",
    "reason": "",
    "rounds": [],
    "seconds": 0.4,
    "ratio": 0.00123,
    "low": 0.0012,
    "high": None,
    "candidate_seconds": 1.1e-5,
    "baseline_seconds": 9.3e-3,
    "pairs_ns": [[300_000, 9_300_000]],
}
COUNT = {
    "name": "test_ldap.py::test_counts",
    "fixture": "counted",
    "key": "binds",
    "verdict": "FAIL",
    "value": 11,
    "recorded": 10,
    "reason": "",
}


def test_ratios_and_counts_become_samples_and_tables(tmp_path: Path) -> None:
    record = Record("micro", "suite", title="t", command=["keyfront", "bench", "micro"])
    off = {**GATE, "verdict": "NOT TIMED"}
    del off["ratio"]
    content = {"seed": 7, "control": GATE, "gates": [GATE, off], "counts": [COUNT]}
    command.fill(record, content)
    read = results.read(results.write(record.result(), tmp_path))
    assert [sample["kind"] for sample in read.samples] == ["ratio", "ratio", "count"]
    assert read.samples[0]["pairs_ns"] == [[300_000, 9_300_000]]
    assert read.samples[0]["operation"] == "tokens: hit against stock keystone"
    assert read.conditions["seed"] == 7
    assert "pairs_ns" not in read.conditions["control"]
    ratios, counts = read.table("ratios"), read.table("counts")
    assert ratios is not None and counts is not None
    assert ratios.rows == [
        ["tokens: hit against stock keystone", 11.0, 9300.0, 0.00123, "0.0012 to ?", 0.025, "PASS"]
    ]
    assert counts.rows == [["ldap: counts", "binds", 11, 10, "FAIL"]]


def test_nothing_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["bench", "micro", "-k", "no_such_thing", "--results", str(tmp_path / "results")]
    assert cli.main(wanted) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("keyfront: -k = no_such_thing: must be what is ")
    assert "Traceback" not in said.err
    assert not (tmp_path / "results").exists()


def test_a_suite_that_does_not_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["bench", "micro", "-k", "and", "--results", str(tmp_path / "results")]
    assert cli.main(wanted) == 2
    assert "the micro-benchmarks could not be run: pytest ended 4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["NONSENSE", "/nowhere/keyfront.whl", "--quiet"])
def test_a_baseline_that_is_none_is_told_before_anything_runs(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_pytest", None)
    results_at = tmp_path / "results"
    assert cli.main(["bench", "micro", f"--baseline={name}", "--results", str(results_at)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"keyfront: --baseline = {name}: must be a wheel, ")
    assert said.out == "" and not results_at.exists()


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "pytest_benchmark" else real(name),
    )
    arguments = cli._parser().parse_args(["bench", "micro", "--results", str(tmp_path)])
    with pytest.raises(MissingPartError, match="pytest_benchmark is not installed: run pip"):
        command.run(arguments, io.StringIO())


def test_nothing_but_what_runs_needs_pytest() -> None:
    """Keystone's environment mostly has none; what needs it says so."""
    program = """
import importlib, pkgutil, sys
sys.modules["pytest"] = None
from keyfront.benchmarks import compare
from keyfront.cli import main
from keyfront.cli.bench import ACTIONS
for action in ACTIONS.values():
    action.load()
for module in pkgutil.iter_modules(compare.__path__):
    importlib.import_module(f"{compare.__name__}.{module.name}")
sys.exit(main.main(["bench", "micro"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = "keyfront: pytest is not installed: run pip install 'keyfront[bench]'\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_what_is_recorded_has_its_test() -> None:
    """Here without running them: each record names a test that the file has."""
    for path in Path(command.__file__).parent.glob("*.gate.json"):
        test = path.with_name(path.name.removesuffix(".gate.json") + ".py").read_text()
        content = json.loads(path.read_text())
        for kind in ("counted", "instructions"):
            for name in content[kind]:
                assert f"def {name.partition('[')[0]}(" in test, (path.name, name)

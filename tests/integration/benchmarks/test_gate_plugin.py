"""The gate as a project meets it: pytest run on tests that use its fixtures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.pytest_runs import run, run_apart

pytest_plugins = ["pytester"]

# Twice as slow is found on any machine.
TIMED = """
    def work(n):
        return sum(range(n))

    def test_same(paired):
        found = paired(lambda: work(200), lambda: work(200), limit=1.5)
        assert found.ratio < 1.5

    def test_slower(paired):
        paired(lambda: work(400), lambda: work(200))
"""


def text(result: pytest.RunResult) -> str:
    return result.stdout.str() + result.stderr.str()


def test_a_slower_candidate_fails_with_the_numbers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_timed=TIMED)
    options = ("--gate-json=gate.json", "--gate-seed=7", "--benchmark-json=times.json")
    result = run_apart(pytester, *options)
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines(
        [
            r"FAIL: the candidate takes [1-3]\.\d{3} times the baseline's time, limit 1\.03",
            r"interval .* \(99\.9%\), \d+ pairs, batches of \d+ and \d+ calls, seed \d+",
            r"candidate .*s, baseline .*s per call \(medians\), baseline in the same process",
            r"=+ gate =+",
            r"FAIL +[1-3]\.\d{3} \[.*\] limit 1\.03, .* test_timed\.py::test_slower",
            r"PASS .* test_timed\.py::test_same",
            r" .* control \(A/A\)",
        ]
    )
    assert "Traceback" not in text(result)
    found = json.loads((pytester.path / "gate.json").read_text())
    assert (found["schema"], found["seed"]) == ("keyfront-gate/1", 7)
    same, slower = found["gates"]
    assert (same["verdict"], slower["verdict"]) == ("PASS", "FAIL")
    assert slower["low"] <= slower["ratio"] <= slower["high"]
    assert len(slower["pairs_ns"]) >= 30
    assert all(len(pair) == 2 and min(pair) > 0 for pair in slower["pairs_ns"])
    assert found["control"]["against"] == "itself"
    check_what_pytest_benchmark_reads(pytester.path / "times.json")


def check_what_pytest_benchmark_reads(path: Path) -> None:
    entries = {one["fullname"]: one for one in json.loads(path.read_text())["benchmarks"]}
    slow = entries["test_timed.py::test_slower"]
    base = entries["test_timed.py::test_slower (baseline)"]
    assert 1.2 < slow["stats"]["median"] / base["stats"]["median"] < 4
    assert slow["extra_info"]["gate"]["pairs_ns"]
    pairs = slow["extra_info"]["gate"]["pairs_ns"]
    for side, entry in enumerate((slow, base)):
        calls = entry["stats"]["iterations"]
        wanted = [pair[side] / calls / 1e9 for pair in pairs]
        assert entry["stats"]["data"] == pytest.approx(wanted)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", path, "--sort=name"],
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "test_slower (baseline)" in done.stdout


def test_without_a_baseline_it_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_new(paired):\n    paired(int)\n")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_new: no baseline: give paired() another implementation*"])


def test_what_is_not_decided_in_time_warns_or_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(paired):\n    paired(int, int, seconds=1e-9)\n")
    result = run(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["INCONCLUSIVE *[[]0, inf] *", "WARNING: 1 inconclusive: *"])
    strict = run(pytester, "--gate-strict", "--gate-json=out.json")
    strict.assert_outcomes(failed=1)
    (gate,) = json.loads((pytester.path / "out.json").read_text())["gates"]
    assert (gate["low"], gate["high"], gate["reason"]) == (None, None, "the time was over")


@pytest.mark.parametrize(
    ("off_by", "failed", "said"),
    [(50, 0, "INCONCLUSIVE *so did the control*"), (1.05, 1, "FAIL *test_slower*")],
)
def test_a_noisy_control_takes_back_what_it_may_explain(
    pytester: pytest.Pytester, off_by: float, failed: int, said: str
) -> None:
    pytester.makeconftest(
        f"""
        import math
        import keyfront.benchmarks.gate.paired as paired
        real = paired.control
        def off(*arguments):
            found = real(*arguments)
            found.verdict = paired.Verdict.FAIL
            found.interval = found.interval._replace(low=-math.log({off_by}), high=0.0)
            return found
        paired.control = off
        """
    )
    pytester.makepyfile(test_timed=TIMED)
    # what the conftest changes stays in its process
    result = run_apart(pytester)
    result.assert_outcomes(passed=2 - failed, failed=failed)
    result.stdout.fnmatch_lines([said, f"the control is off: *beyond {off_by:.3f} times its limit"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("paired(int, int, limit=0)", "limit = 0: must be greater than 0"),
        ("paired(int, int, seconds=float('nan'))", "seconds = nan: must be greater than 0"),
    ],
)
def test_a_wrong_argument_is_an_error(pytester: pytest.Pytester, call: str, said: str) -> None:
    pytester.makepyfile(f"def test_it(paired):\n    {call}\n")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *ValueError: {said}"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gate-limit=1", "--gate-limit = 1: must be 1.005 to 100"),
        ("--gate-seed=x", "--gate-seed = x: must be 0 to 2147483647"),
        ("--gate-json=no/where.json", "--gate-json = no/where.json: its folder must exist"),
    ],
)
def test_a_wrong_option_is_a_usage_error(pytester: pytest.Pytester, option: str, said: str) -> None:
    pytester.makepyfile("def test_it():\n    pass\n")
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_it_can_be_called_once_and_switched_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_twice(paired):
            paired(int, int)
            paired(int, int)
        """
    )
    result = run(pytester, "--gate-disable")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["paired() was called twice*", "NOT TIMED *test_twice: --gate-disable was given"]
    )


def test_it_costs_nothing_where_it_is_not_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it():
            ours = {name for name in sys.modules if name.startswith("keyfront.")}
            assert ours == {
                "keyfront.benchmarks", "keyfront.benchmarks.gate",
                "keyfront.benchmarks.gate.plugin",
            }
        """
    )
    result = run_apart(pytester, "-p", "no:benchmark")
    result.assert_outcomes(passed=1)
    assert "= gate =" not in text(result)


def test_it_needs_no_pytest_benchmark(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_timed=TIMED)
    result = run(pytester, "-p", "no:benchmark")
    result.assert_outcomes(passed=1, failed=1)

"""Counts as a project meets them: recorded beside the test, and kept to."""

from __future__ import annotations

import json
import shutil

import pytest

from support.pytest_runs import run

pytest_plugins = ["pytester"]

STRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
VALGRIND = pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")

COUNTED = """
    def test_login(counted):
        counted(binds=1, sql=3)
"""


def test_a_count_is_recorded_and_then_kept_to(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_counts=COUNTED)
    missing = run(pytester)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["FAIL *binds: 1 (nothing is recorded: was the test renamed?*"])
    assert not (pytester.path / "test_counts.gate.json").exists()
    updated = run(pytester, "--gate-update")
    updated.assert_outcomes(passed=1)
    updated.stdout.fnmatch_lines(["recorded in test_counts.gate.json"])
    same = run(pytester)
    same.assert_outcomes(passed=1)
    same.stdout.fnmatch_lines(["2 counts as recorded"])


def test_another_count_needs_a_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_counts=COUNTED)
    run(pytester, "--gate-update").assert_outcomes(passed=1)
    pytester.makepyfile(test_counts=COUNTED.replace("binds=1", "binds=2"))
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAIL *binds: 2, recorded 1  test_counts.py::test_login"])
    assert "sql" not in "".join(line for line in result.outlines if line.startswith("FAIL"))
    reason = 'binds=2, changed="a bind per group"'
    pytester.makepyfile(test_counts=COUNTED.replace("binds=1", reason))
    named = run(pytester)
    named.assert_outcomes(passed=1)
    named.stdout.fnmatch_lines(["CHANGED *binds: 2, recorded 1 (a bind per group) *"])


def test_what_is_no_longer_counted_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_counts=COUNTED)
    run(pytester, "--gate-update").assert_outcomes(passed=1)
    pytester.makepyfile(test_counts=COUNTED.replace("binds=1, ", ""))
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAIL *binds, recorded 1 (it is recorded, but not counted) *"])


def test_a_renamed_or_removed_test_is_an_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_counts=COUNTED)
    run(pytester, "--gate-update").assert_outcomes(passed=1)
    pytester.makepyfile(test_counts=COUNTED.replace("test_login", "test_entry"))
    renamed = run(pytester)
    renamed.assert_outcomes(failed=1)
    renamed.stdout.fnmatch_lines(
        [
            "FAIL *nothing is recorded: was the test renamed?*",
            "ERROR test_counts.gate.json: there is no test test_login any more: *",
        ]
    )
    pytester.makepyfile(test_counts=COUNTED + "\n    def test_other(counted):\n        pass\n")
    # left out on this run only, so not gone
    assert run(pytester, "-k", "other").ret == pytest.ExitCode.OK
    pytester.makepyfile(test_counts="def test_other(counted):\n    pass\n")
    removed = run(pytester)
    removed.assert_outcomes(passed=1)
    assert removed.ret == pytest.ExitCode.TESTS_FAILED
    run(pytester, "--gate-update").assert_outcomes(passed=1)
    assert "test_login" not in (pytester.path / "test_counts.gate.json").read_text()


def test_a_broken_record_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_counts=COUNTED)
    (pytester.path / "test_counts.gate.json").write_text('{\n"schema": \n')
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_counts.gate.json:3: is no JSON: *"])
    (pytester.path / "test_counts.gate.json").write_text('{"schema": "keyfront-gate-records/9"}')
    run(pytester).stdout.fnmatch_lines(["*is no record of counts of the schema *"])


def test_calls_and_statements_are_counted(pytester: pytest.Pytester) -> None:
    # here, too: the run would take it away with it
    pytest.importorskip("sqlalchemy")
    pytester.makepyfile(
        """
        import pytest
        sqlalchemy = pytest.importorskip("sqlalchemy")

        class Keystone:
            def ask(self, what):
                return what

            @staticmethod
            def add(a, b):
                return a + b

        def test_it(counted):
            engine = sqlalchemy.create_engine("sqlite://")
            one = Keystone()
            with counted.sql(engine) as sql, engine.connect() as connection:
                for _ in range(3):
                    connection.execute(sqlalchemy.text("select 1"))
            with counted.calls(Keystone, "ask") as asked, counted.calls(Keystone, "add") as added:
                assert one.ask("a") == "a" == Keystone().ask(what="a")
                assert Keystone.add(1, 2) == one.add(2, 1) == 3
            with counted.calls(one, "ask") as own:
                one.ask(1)
                Keystone().ask(1)
            assert one.ask(2) == 2 and "ask" not in vars(one)
            assert (sql.count, asked.count, added.count, own.count) == (3, 2, 2, 1)
            counted(sql=sql.count, asked=asked.count)
        """
    )
    run(pytester, "--gate-update").assert_outcomes(passed=1)


@STRACE
def test_system_calls_are_counted(pytester: pytest.Pytester) -> None:
    source = """
        import os

        def step():
            os.stat("/")

        def test_it(counted):
            counted(syscalls=counted.syscalls(step, calls=5))
    """
    pytester.makepyfile(test_calls=source)
    run(pytester, "--gate-update").assert_outcomes(passed=1)
    recorded = json.loads((pytester.path / "test_calls.gate.json").read_text())["counted"]
    ((name, counts),) = recorded.items()
    assert (name, counts.pop("syscalls")) == ("test_it", 5)
    assert list(counts.values()) == [5]
    pytester.makepyfile(test_calls=source.replace("stat", "getppid(); os.stat"))
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["FAIL *syscalls: 10, recorded 5 *", "FAIL *syscalls.getppid: 5, recorded 0 *"]
    )


@STRACE
def test_system_calls_of_other_threads_are_not_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import threading

        def step():
            other = threading.Thread(target=os.getppid)
            other.start()
            other.join()
            os.getuid()

        def test_it(counted):
            found = counted.syscalls(step, calls=3)
            assert found["getuid"] == 3
            assert "getppid" not in found
        """
    )
    run(pytester).assert_outcomes(passed=1)


@STRACE
def test_what_is_done_now_and_then_is_not_counted(pytester: pytest.Pytester) -> None:
    # as looking at a file when half a second has passed since the last look
    pytester.makepyfile(
        """
        import itertools
        import os

        calls = itertools.count(1)

        def step():
            os.getuid()
            if next(calls) in (8, 17):
                os.getppid()

        def test_it(counted):
            assert counted.syscalls(step, calls=5) == {"getuid": 5}
        """
    )
    run(pytester).assert_outcomes(passed=1)


@STRACE
def test_a_step_that_raises_is_not_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import itertools
        import os

        calls = itertools.count(1)

        def step():
            os.getuid()
            if next(calls) == 13:
                raise ValueError("not this time")

        def test_it(counted):
            counted.syscalls(step, calls=5)
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the test did not come that far under strace*"])


# Nothing is allocated: what that takes depends on what else lies in the allocator's pools.
HOT = """
    import itertools

    import pytest

    def step(count):
        for _ in itertools.repeat(None, count):
            abs(-1)

    @pytest.mark.parametrize("count", [500, 525, 501])
    def test_it(instructions, count):
        instructions(lambda: step(count), calls=20)
"""


@VALGRIND
@pytest.mark.slow
def test_instructions_are_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_hot=HOT)
    run(pytester, "--gate-update").assert_outcomes(passed=3)
    path = pytester.path / "test_hot.gate.json"
    recorded = json.loads(path.read_text())
    counts = recorded["instructions"]
    ((key, hot),) = counts["test_it[500]"].items()
    assert 1.04 < counts["test_it[525]"][key] / hot < 1.06
    # as if 525 had been 500 when it was recorded, and 501 had been recorded elsewhere
    counts["test_it[525]"][key] = hot
    counts["test_it[501]"] = {"CPython 2.7": hot}
    path.write_text(json.dumps(recorded))
    result = run(pytester)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.re_match_lines_random(
        [
            rf"FAIL +{key}: \d+, recorded {hot} \(1\.0[45]\d times, limit 1\.02\) .*525\]",
            rf"NEW +{key}: \d+ \(no record of these versions: .* adds one\) .*501\]",
            "1 count as recorded",
        ]
    )


def test_what_cannot_be_counted_here_is_told(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_hot=HOT,
        test_calls="""
        def test_it(counted):
            counted(binds=1, syscalls=counted.syscalls(int))
        """,
    )
    (pytester.path / "test_calls.gate.json").write_text(
        json.dumps(
            {
                "schema": "keyfront-gate-records/1",
                "counted": {"test_it": {"binds": 1, "syscalls": 5, "syscalls.read": 5}},
                "instructions": {},
            }
        )
    )
    monkeypatch.setenv("PATH", str(pytester.path))
    result = run(pytester)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines_random(
        ["NOT COUNTED  syscalls (strace is not installed*", "NOT COUNTED  instructions (*"]
    )
    run(pytester, "--gate-strict").assert_outcomes(failed=4)

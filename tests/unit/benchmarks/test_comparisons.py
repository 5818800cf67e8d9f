"""The way that every comparison is run, and the processes that some ask."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import comparison
from keyfront.benchmarks.compare.comparison import Comparison, Report
from keyfront.benchmarks.compare.goals import MET, MISSED, UNCLEAR
from keyfront.benchmarks.results import Table
from keyfront.benchmarks.servers.processes import told
from keyfront.errors import OptionError, ServerError

TABLE = Table(name="figures", columns=["case", "us"], rows=[["one", 7]])


DOC = "Measures nothing.\n\nMore."


def run(arguments: list[str], report: Report) -> int:
    def measure(options: Namespace) -> Report:
        assert options.rounds == 2
        return report

    numbers = (("--rounds", 3, "of nothing"),)
    nothing = Comparison(title="Nothing", measure=measure, numbers=numbers)
    return comparison.main("nothing", DOC, nothing, arguments)


@pytest.mark.parametrize(("verdict", "status"), [(MET, 0), (UNCLEAR, 0), (MISSED, 1)])
def test_only_what_is_missed_fails(
    verdict: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--rounds", "2"], Report([TABLE], [("a goal", verdict)])) == status
    assert capsys.readouterr().out == f"case  us\none    7\n\n{verdict:<8} a goal\n"


def test_help_says_what_is_measured_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"], Report([TABLE]))
    said = capsys.readouterr().out
    assert DOC in said and "--rounds N" in said


def test_all_that_was_measured_is_written(tmp_path: Path) -> None:
    arguments = ["--rounds", "2", "--results", str(tmp_path)]
    assert run(arguments, Report([TABLE], [("a goal", MET)], [{"case": "one", "us": 7}])) == 0
    found = results.read(tmp_path / "comparison-nothing.json")
    assert found.command[-4:] == arguments
    assert found.command[:3] == ["python", "-m", "keyfront.benchmarks.compare.nothing"]
    assert (found.conditions, found.notes) == ({"rounds": 2}, ["a goal: met"])
    assert (found.tables, found.samples) == ([TABLE], [{"case": "one", "us": 7}])


def test_sigterm_ends_a_measurement_in_order_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def measure(options: Namespace) -> Report:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    nothing = Comparison(title="Nothing", measure=measure)
    assert comparison.main("nothing", DOC, nothing, []) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_module_may_have_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {
        word: Comparison(title=word.title(), measure=lambda _: Report([TABLE]), only="one")
        for word in ("hits", "misses")
    }
    arguments = ["misses", "--only", "x y", "--results", str(tmp_path)]
    assert comparison.main("tokens", DOC, kinds, arguments) == 0
    found = results.read(tmp_path / "comparison-tokens_misses.json")
    assert (found.title, found.conditions) == ("Misses", {"only": "x y"})
    # the folder is of this machine
    assert "compare.tokens misses --only 'x y'\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        comparison.main("tokens", DOC, kinds, [])


def test_cases_are_chosen_by_their_names() -> None:
    cases = {"one, cold": 1, "one, warm": 2}
    assert comparison.chosen(cases, "warm") == {"one, warm": 2}
    with pytest.raises(OptionError, match="--only = hot: must be in the name of a case: one, cold"):
        comparison.chosen(cases, "hot")


def test_every_other_round_goes_in_the_reverse_order() -> None:
    assert list(comparison.in_turns("ab", 3)) == [
        *((0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")),
    ]


DOUBLES = """
import json, sys
print("null", flush=True)
for line in sys.stdin:
    if (number := json.loads(line)) == 3:
        sys.exit("three is too many")
    print(2 * number, flush=True)
"""


def test_a_child_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DOUBLES]
    log = tmp_path / "log"
    with told(command, dict(os.environ), name="the child", log=log) as made:
        assert made.line() == "null"
        assert [made.ask(1), made.ask(2)] == ["2", "4"]
        with pytest.raises(ServerError, match="the child has ended: three is too many"):
            made.ask(3)


def test_what_a_child_prints_besides_is_in_its_log(tmp_path: Path) -> None:
    script = (
        "import os; from keyfront.benchmarks.compare import keystone_worker\n"
        "out = keystone_worker.answers(); print('noise'); os.system('echo more')\n"
        f"out.write({json.dumps(json.dumps('answer'))} + '\\n'); out.flush(); input()"
    )
    with told([sys.executable, "-c", script], log=tmp_path / "log") as made:
        assert json.loads(made.line()) == "answer"
    assert {"noise", "more"} <= set((tmp_path / "log").read_text().split())

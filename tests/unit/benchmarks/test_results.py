"""The one format of results: what is written can be read, and what is no result is refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.benchmarks import environment, results
from keyfront.benchmarks.results import Record, Result, Table, Timeline
from keyfront.cli.main import main
from keyfront.errors import BenchmarkError


@pytest.fixture
def result() -> Result:
    with Record(
        "sweep", "a b/c", title="T", command=["keyfront"], distributions=["pytest", "no-such"]
    ) as record:
        record.samples.append({"connections": 10, "rate": 1.5})
        record.tables.append(Table(name="t", columns=["a", "b|c"], rows=[[1, None], [2, "x"]]))
        record.timelines.append(Timeline(name="l", unit="cores", points=[[0.0, 1.0]]))
        record.note("once")
        record.note("once")
    return record.result()


def test_what_is_written_is_read(result: Result, tmp_path: Path) -> None:
    path = results.write(result, tmp_path / "new")
    assert path.name == "sweep-a_b_c.json"
    assert results.read(path) == result
    assert results.read_all(path.parent) == [result]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_result_says_where_and_with_what(result: Result) -> None:
    assert result.versions["pytest"] == pytest.__version__
    assert "no-such" not in result.versions
    assert result.machine["cores"] >= 1
    assert result.notes == ["once"]
    assert set(result.others) >= {"other_cores", "stolen_cores", "load_before", "quiet"}


def test_a_resumed_result_counts_all_its_time(result: Result) -> None:
    before = replace(result, seconds=100.0, began="2026-01-01T00:00:00+00:00")
    with Record("sweep", "x", title="T") as record:
        record.resume(before)
    after = record.result(complete=False)
    assert after.seconds >= 100
    assert after.began == before.began
    assert after.notes == ["once"]
    assert not after.complete


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("schema", "other/1", "schema: must be"),
        ("kind", "sweeep", "kind = sweeep: must be one of"),
        ("samples", [1], r"samples\[0\]: must be an object"),
        ("samples", {}, "samples: has the wrong type"),
        ("notes", [1], "notes: must hold strings"),
        ("unheard", 1, "unheard: is unknown"),
        ("tables", [{"name": "t"}], r"tables\[0\].caption: is missing"),
        (
            "tables",
            [{"name": "t", "columns": ["a"], "rows": [[1, 2]], "caption": ""}],
            r"tables\[0\]: a row is not as long",
        ),
        ("timelines", [{"name": "t", "unit": "s", "points": [[1]]}], r"timelines\[0\]: a point"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(
    result: Result, tmp_path: Path, key: str, value: object, says: str
) -> None:
    path = results.write(result, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(BenchmarkError, match=f"{path}: {says}"):
        results.read(path)


def test_a_missing_key_is_told(result: Result, tmp_path: Path) -> None:
    path = results.write(result, tmp_path)
    content = json.loads(path.read_text())
    del content["machine"]
    path.write_text(json.dumps(content))
    with pytest.raises(BenchmarkError, match="machine: is missing"):
        results.read(path)


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "sweep-x.json"
    path.write_text('{\n"a": }')
    with pytest.raises(BenchmarkError, match=f"{path}:2: is no JSON"):
        results.read(path)


def test_an_impossible_figure_is_not_written(result: Result, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="cannot be written"):
        results.write(replace(result, samples=[{"rate": float("nan")}]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_results_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="keyfront bench sweep --quick"):
        results.read_all(tmp_path)


def test_markdown(result: Result) -> None:
    text = results.markdown(replace(result.tables[0], caption="C."))
    assert text.splitlines() == [
        "| a | b\\|c |", "|---:|---|", "| 1 | - |", "| 2 | x |", "", "C.",
    ]  # fmt: skip


def test_own_work_is_not_others() -> None:
    with environment.Watch() as watch:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    found = watch.described()
    # however long others let it wait
    assert found["own_cores"] * watch.seconds > 0.2
    # with what else runs, never more than there are
    assert found["other_cores"] <= environment.os.cpu_count() + 0.2


DOCUMENT = """# Title
<!-- bench sweep x t -->
old
<!-- /bench -->
end
"""


@pytest.fixture
def document(result: Result, tmp_path: Path) -> Path:
    results.write(replace(result, name="x"), tmp_path)
    path = tmp_path / "doc.md"
    path.write_text(DOCUMENT)
    return path


def tables(*arguments: object) -> int:
    return main(["bench", "tables", *map(str, arguments)])


def test_tables_of_documents_are_filled_in_and_checked(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables(document, "--results", document.parent, "--check") == 1
    assert document.read_text() == DOCUMENT
    assert tables(document, "--results", document.parent) == 0
    text = document.read_text()
    assert "| 2 | x |\n\nMeasured on 20" in text
    assert "old" not in text
    assert text.startswith("# Title\n<!-- bench sweep x t -->\n\n|")
    assert text.endswith(".\n\n<!-- /bench -->\nend\n")
    assert tables(document, "--results", document.parent, "--check") == 0
    assert "not up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- bench sweep y t -->\n<!-- /bench -->", ":1: there is no result sweep y; there "),
        ("\n<!-- bench sweep x u -->\n<!-- /bench -->", ":2: sweep x has no table u; it has: t"),
        ("<!-- bench sweep x t -->\nold", ":1: has no <!-- /bench --> behind it"),
        ("<!-- bench sweep -->\n<!-- /bench -->", ":1: must be <!-- bench KIND NAME TABLE -->"),
        (
            "<!-- bench sweep x t -->\n<!-- bench sweep x t -->\n<!-- /bench -->",
            ":1: has no <!-- /bench --> behind it",
        ),
    ],
)
def test_a_wrong_document_changes_nothing(
    document: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    wrong = document.with_name("wrong.md")
    wrong.write_text(text)
    assert tables(document, wrong, "--results", document.parent) == 2
    assert f"{wrong}{says}" in capsys.readouterr().err
    assert document.read_text() == DOCUMENT


WIDE = Table(
    name="wide",
    columns=["line-up", *(f"requests a second at {count} clients" for count in (1, 8, 64, 512))],
    rows=[
        ["nginx+uwsgi:tuned:cached by a name that is long beyond use", 1234.5, 2345.25, 1, None],
        ["uwsgi", 1, 2, 3, 4],
    ],
    caption="Words " * 30,
)


@pytest.mark.parametrize("columns", [2, 3, 5])
def test_a_table_fits_on_a_terminal(columns: int) -> None:
    table = replace(
        WIDE,
        columns=WIDE.columns[:columns] * 3,
        rows=[row[:columns] * 3 for row in WIDE.rows],
    )
    for made in (WIDE, table):
        text = results.plain(made)
        assert max(map(len, text.splitlines())) <= 80
        for word in {*" ".join(made.columns).split(), "1234.5", "uwsgi", "beyond"}:
            assert word in text


def test_a_table_that_fits_is_in_lines_of_its_rows() -> None:
    table = Table(name="t", columns=["what", "one way", "b"], rows=[["x", 1, None], ["yy", 10, 2]])
    assert results.plain(table).splitlines() == [
        "what  one way  b",
        "x           1  -",
        "yy         10  2",
    ]


def test_a_line_is_folded_and_a_path_is_not() -> None:
    assert results.folded("short") == "short"
    lines = results.folded(f"{'word ' * 20}/{'path/' * 20}").splitlines()
    assert [len(line) > 80 for line in lines] == [False, False, True]
    assert lines[1].startswith("  word")

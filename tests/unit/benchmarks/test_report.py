"""The report: it answers in words first, says what is worse, and is whole in itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from keyfront.benchmarks import results
from keyfront.benchmarks.experiments.findings import BETTER, SAME, WORSE
from keyfront.benchmarks.report import answer, charts, drawing, page
from keyfront.cli.main import main
from support.bench_results import LINE_UPS, experiment, gates

_EMPTY = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Checks that elements close in order, and keeps what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open:
            self.words.append(" ".join(data.split()))


@pytest.fixture(scope="module")
def text() -> str:
    return page.page([gates(), experiment(quick=True)])


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    return Reader(text)


def test_it_answers_in_words_first(read: Reader) -> None:
    start = read.words.index("What does keyfront change for me?", 1)
    told = read.words[start + 1]
    assert told.startswith("Of 5 figures measured here, keyfront makes 2 better and 1 worse; 2 ")
    assert read.words[start + 2].startswith("The greatest gain: validations: 17 600 a second")
    assert read.words[start + 3].startswith("The greatest loss: logins: 380 ms with keyfront")


def test_better_worse_and_neither_are_all_told(read: Reader) -> None:
    told = " ".join(read.words)
    for sentence in ("worse, 1.7 times.", "no difference that shows here.", "better, 880 times"):
        assert sentence in told


def test_nothing_is_fetched_and_nothing_runs(text: str, read: Reader) -> None:
    tags = {tag for tag, _, _ in read.attributes}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed"})
    for _, name, value in read.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href", "data", "action"):
            assert value.startswith("#"), value
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_every_link_leads_somewhere_and_ids_are_of_one(read: Reader) -> None:
    ids = Counter(value for _, name, value in read.attributes if name == "id")
    assert [one for one, count in ids.items() if count > 1] == []
    links = {v for _, name, v in read.attributes if name in ("href", "xlink:href")}
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_names_are_text_and_no_markup(text: str, read: Reader) -> None:
    assert "Line-ups <compared>" in read.words
    assert "<compared>" not in text


def test_colours_are_the_pages(text: str) -> None:
    body = text[text.index("<body>") :]
    assert re.findall(r"(?:fill|stroke|color)[:=]\s*\"?#[0-9a-fA-F]{3,6}", body) == []
    assert "\N{NO-BREAK SPACE}600 a second" in body
    assert text.count("prefers-color-scheme: dark") == 1


def test_all_kinds_of_figures_are_there(read: Reader) -> None:
    told = " ".join(read.words)
    for title in (
        "How many times as good as the best stock line-up",
        "Throughput and failures: by wrk",
        "Latency at 1000 connections: by wrk",
        "Latency and success at constant rates",
        "CPU by group of processes",
        "Gates: time taken as a multiple of the baseline's",
        "token cache, hits",
    ):
        assert title in told, title
    assert "failed, % (dotted)" in read.words
    assert all(label in read.words for label in LINE_UPS)


def test_machine_versions_and_commands_are_there(read: Reader) -> None:
    told = " ".join(read.words)
    assert f"pytest {pytest.__version__}" in told
    assert "keyfront bench experiment keystone-frontends keyfront bench micro" in told


def test_care_is_asked_for_where_it_is_due(read: Reader) -> None:
    assert any("this is the quick form" in line for line in read.words)
    calm = experiment()
    busy = replace(calm, others={**calm.others, "quiet": False}, complete=False)
    told = " ".join(answer.warnings([busy]))
    assert "Others worked on the machine" in told
    assert "not whole" in told
    assert answer.warnings([replace(calm, others={**calm.others, "quiet": True})]) == []


def test_without_comparisons_it_says_what_to_run() -> None:
    found = answer.answer([gates()])
    assert found.lines == []
    assert "keyfront bench experiment all --quick" in found.summary[0]
    assert page.page([gates()]).count("<h1>") == 1


def test_goodness_is_the_same_way_round_for_all() -> None:
    found = {line.what: line for line in answer.lines([experiment()])}
    assert found["Validations"].goodness == pytest.approx(880)
    assert found["Logins"].goodness == pytest.approx(229 / 380, rel=0.01)
    assert found["Waits"].goodness == pytest.approx(1.05, rel=0.01)
    # what went to nothing is no ratio, and yet told
    assert found["Failures"].goodness is None
    assert found["Failures"].verdict == BETTER
    assert [line.verdict for line in found.values()] == [BETTER, WORSE, SAME, BETTER, SAME]


def test_the_same_results_make_the_same_page() -> None:
    one = gates()
    assert page.page([one]) == page.page([one])


def test_a_result_without_points_makes_no_figure() -> None:
    assert list(charts.of(replace(experiment(), samples=[{"what": "x", "seconds": 1.0}]))) == []


def test_a_lone_rate_of_nothing_is_drawn() -> None:
    samples = [one | {"rate": 0.0, "good": 0} for one in experiment().samples]
    assert list(charts.of(replace(experiment(), samples=samples)))


def test_a_figure_has_text_that_can_be_read(text: str) -> None:
    found = drawing.draw("t", lambda figure, narrow: figure.subplots().set_xlabel("label here"))
    for one in (found.wide, found.narrow):
        assert ">label here<" in one
        assert "fill: var(--ink)" in one
    assert found.wide != found.narrow


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(experiment(), tmp_path)
    assert main(["bench", "report", "--results", str(tmp_path)]) == 0
    target = tmp_path / "report.html"
    assert capsys.readouterr().out == f"{target}\n"
    assert target.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("state", ["none", "empty", "damaged", "nowhere"])
def test_what_cannot_be_reported_is_one_line(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    more: list[str] = []
    if state != "none":
        folder.mkdir()
    if state == "damaged":
        (folder / "sweep-x.json").write_text("{")
    if state == "nowhere":
        results.write(experiment(), folder)
        more = ["--output", str(tmp_path / "no" / "page.html")]
    assert main(["bench", "report", "--results", str(folder), *more]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert str(tmp_path) in captured.err
    assert not (folder / "report.html").exists()

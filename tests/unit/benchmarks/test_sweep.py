"""The sweep: what is asked for, what is measured again after an interruption, and its tables."""

from __future__ import annotations

import io
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.lineups.lineup import Lineup, parse
from keyfront.benchmarks.load import generators, sweep
from keyfront.benchmarks.load.measured import CLOSED, OPEN, Load, Request
from keyfront.cli.main import main
from keyfront.errors import BenchmarkError, OptionError, ServerError


def settings(*arguments: str) -> sweep.Settings:
    parser = ArgumentParser()
    sweep.add(parser)
    return sweep.read(parser.parse_args(arguments))


def test_without_arguments_it_is_the_whole_grid() -> None:
    found = settings()
    assert len(found.lineups) == 7 * 2 * 2
    assert found.points[:3] == [10, 20, 30]
    assert found.points[9:12] == [100, 200, 300]
    assert found.points[-3:] == [1000, 2000, 5000]
    assert found.request == "projects"


def test_quick_and_published() -> None:
    quick = settings("--quick")
    assert [str(one) for one in quick.lineups] == [
        "nginx+uwsgi:stock:plain", "nginx+uwsgi:tuned:plain", "nginx+uwsgi:tuned:cached",
    ]  # fmt: skip
    chosen = settings("--quick", "--topology", "uwsgi", "--cache", "on")
    assert [str(one) for one in chosen.lineups] == ["uwsgi:stock:cached", "uwsgi:tuned:cached"]
    published = settings("--published", "--pause", "1")
    assert (published.seconds, published.warm_up, published.pause) == (120, 60, 1)


def test_points() -> None:
    assert settings("--points", "5,10-30/10,20").points == [5, 10, 20, 30]
    assert settings("--rates", "50,20").rates == [20, 50]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--points", "0"], "--points = 0: must be numbers from 1 to 60000"),
        (["--points", "10-20/0"], "--points = 10-20/0: must be"),
        (["--points", "1,,2"], "--points = 1,,2: must be"),
        (["--points", "70000"], "--points = 70000: must be"),
        (["--topology", "uwsgi,iis"], "--topology = iis: must be one of uwsgi, gevent"),
        (["--tuning", "best"], "--tuning = best: must be one of stock, tuned"),
        (["--cache", "maybe"], "--cache = maybe: must be one of off, on"),
        (["--seconds", "0"], "--seconds = 0: must be a whole number, 1 to 3600"),
        (["--pause", "-1"], "--pause = -1: must be a number, 0 to 600"),
        (["--pause", "601"], "--pause = 601: must be a number, 0 to 600"),
        (["--request", "x"], "--request = x: must be one of projects, validation"),
        (["--generator", "x"], "--generator = x: must be one of wrk"),
        (["--generator", "constant"], "--generator = constant: must be a closed loop"),
        (["--generator", "siege"], "--points = 5000: must be 1000 at most for siege"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # nothing has to be installed to be told
    monkeypatch.setattr(Lineup, "check", lambda self: None)
    monkeypatch.setattr(generators, "_program", lambda name: name)
    state = tmp_path / "state"
    options = ["--state", str(state), "--results", str(tmp_path / "results")]
    try:
        assert main(["bench", "sweep", *arguments, *options]) == 2
    except SystemExit as left:
        assert left.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_lineups_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lineup, "check", lambda self: None)
    assert parse("--target", "uwsgi") == Lineup("uwsgi", "tuned", False)
    assert parse("--target", "gevent:stock:cached") == Lineup("gevent", "stock", True)
    for wrong in ("iis", "uwsgi:stock:warm", "uwsgi:stock:plain:x"):
        with pytest.raises(OptionError, match="--target = "):
            parse("--target", wrong)


class Found:
    """A line-up that answers at once; some fail."""

    def __init__(self, lineup: Lineup) -> None:
        self.lineup = lineup
        self.seconds = 0.0
        self.url = "http://h"
        self.keystone = SimpleNamespace(token=lambda url: "a token")

    def cpu(self) -> dict[str, float]:
        self.seconds += 1
        return {"uwsgi": self.seconds}

    def cores(self, before: dict[str, float], seconds: float) -> dict[str, float]:
        return {"uwsgi": (self.cpu()["uwsgi"] - before["uwsgi"]) / seconds}

    def check(self) -> None:
        if self.lineup.topology == "gevent":
            raise ServerError("gevent ended")

    def settle(self) -> None: ...

    def memory(self) -> float:
        return 100.0


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was loaded, in order."""
    seen: list[tuple[Any, ...]] = []

    @contextmanager
    def served(lineup: Lineup, keystone: object, cores: object) -> Iterator[Found]:
        seen.append(("serve", str(lineup)))
        yield Found(lineup)

    def closed(
        name: str, request: Request, *, connections: int, seconds: int, cores: object
    ) -> Load:
        seen.append((name, connections, seconds))
        failures = Counter({"status": 5}) if connections > 100 else Counter()
        return Load(
            generator=name, loop=CLOSED, good=1000, failures=failures, seconds=2.0,
            latencies=Counter({4000: 1000}), generator_cpu=1.0,
        )  # fmt: skip

    def constant(request: Request, *, rate: float, seconds: float, cores: object) -> Load:
        seen.append(("constant", rate, seconds))
        return Load(
            generator="constant", loop=OPEN, good=10, seconds=1.0, latencies=None, generator_cpu=1
        )

    monkeypatch.setattr(sweep, "served", served)
    monkeypatch.setattr(sweep.generators, "closed", closed)
    monkeypatch.setattr(sweep.generators, "constant", constant)
    return seen


def swept(folder: Path, *lineups: str, **changes: Any) -> results.Result:
    wanted = [Lineup(*name.split(":")) for name in lineups]
    values = {"points": [10, 200], "rates": [50], "seconds": 2, "warm_up": 1, "pause": 0, **changes}
    asked = sweep.Settings(name="n", lineups=wanted, **values)
    return results.read(sweep.Sweep(asked, SimpleNamespace(), folder, io.StringIO()).run())


def test_every_point_is_measured_after_warming(
    loads: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    found = swept(tmp_path, "nginx+uwsgi:stock")
    assert loads == [
        ("serve", "nginx+uwsgi:stock:plain"), ("wrk", 200, 1), ("wrk", 200, 1),
        ("wrk", 10, 2), ("wrk", 200, 2), ("constant", 50, 2),
    ]  # fmt: skip
    assert [one["loop"] for one in found.samples] == [CLOSED, CLOSED, OPEN]
    assert found.samples[1]["failures"] == {"status": 5}
    assert found.samples[0]["cpu_cores"] == {"uwsgi": 0.5}
    assert "quiet" in found.samples[0]["others"]
    assert found.complete


def test_servers_that_close_are_loaded_by_ab(loads: list[tuple[Any, ...]], tmp_path: Path) -> None:
    swept(tmp_path, "uwsgi:stock", points=[10], rates=[])
    assert {one[0] for one in loads[1:]} == {"ab"}


def test_an_interrupted_sweep_goes_on_where_it_was(
    loads: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sweep.generators.constant

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.generators, "constant", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, "nginx+uwsgi:stock")
    partial = results.read(tmp_path / "sweep-n.json")
    assert not partial.complete
    assert len(partial.samples) == 2
    monkeypatch.setattr(sweep.generators, "constant", whole)
    loads.clear()
    found = swept(tmp_path, "nginx+uwsgi:stock", "nginx+uwsgi:tuned")
    assert loads[:4] == [
        ("serve", "nginx+uwsgi:stock:plain"), ("wrk", 200, 1), ("wrk", 200, 1), ("constant", 50, 2),
    ]  # fmt: skip
    assert len(found.samples) == 6
    assert found.complete
    assert found.began == partial.began
    loads.clear()
    swept(tmp_path, "nginx+uwsgi:stock", "nginx+uwsgi:tuned")
    assert not loads


def test_an_interrupted_sweep_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def keystone(*_: object) -> Iterator[None]:
        yield

    def run(_: sweep.Sweep) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "check", lambda _: None)
    monkeypatch.setattr(sweep.given, "keystone", keystone)
    monkeypatch.setattr(sweep.Sweep, "run", run)
    assert main(["bench", "sweep", "--results", str(tmp_path)]) == 130
    assert capsys.readouterr().out == "interrupted; nothing was measured yet\n"
    path = tmp_path / results.file_name("sweep", "keystone")
    path.touch()
    assert main(["bench", "sweep", "--results", str(tmp_path)]) == 130
    assert f"goes on with {path}\n" in capsys.readouterr().out


def test_other_conditions_are_not_mixed(loads: list[tuple[Any, ...]], tmp_path: Path) -> None:
    swept(tmp_path, "nginx+uwsgi:stock")
    with pytest.raises(BenchmarkError, match="was measured with seconds = 2, not 3; go on with"):
        swept(tmp_path, "nginx+uwsgi:stock", seconds=3)


def test_a_lineup_that_fails_is_told_and_the_others_go_on(
    loads: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    found = swept(tmp_path, "gevent:stock", "nginx+uwsgi:stock")
    assert found.notes[0] == "gevent:stock:plain: gevent ended"
    assert {one["topology"] for one in found.samples} == {"nginx+uwsgi"}
    with pytest.raises(BenchmarkError, match=r"nothing could be measured: .*gevent ended"):
        swept(tmp_path / "other", "gevent:stock")


def sample(lineup: Lineup, connections: int, rate: float, /, **changes: Any) -> results.Sample:
    return {
        "topology": lineup.topology, "tuning": lineup.tuning, "cached": lineup.cached,
        "connections": connections, "rate_offered": None, "loop": CLOSED, "rate": rate,
        "good": 1000, "failed": 0, "p50_ms": 1.25, "p95_ms": 20.0, "generator_limit": False,
        **changes,
    }  # fmt: skip


def test_tables() -> None:
    one, two = Lineup("uwsgi", "stock"), Lineup("uwsgi", "tuned", True)
    found = {
        table.name: table
        for table in sweep.tables(
            [
                sample(one, 10, 812.34),
                sample(one, 200, 900, failed=1000, p50_ms=None),
                sample(two, 10, 8.123, generator_limit=True),
                sample(two, 600, 7),
                sample(two, 0, 1, loop=OPEN, connections=None, rate_offered=50.0, failed=1),
            ]
        )
    }
    assert list(found) == ["throughput", "latency", "rates", "best"]
    assert found["throughput"].columns == ["connections", str(one), str(two)]
    assert found["throughput"].rows == [
        [10, "812", "8.12*"], [200, "900 (50.0 %)", None], [600, None, "~7"],
    ]  # fmt: skip
    assert found["latency"].rows[0] == [10, "1.25 / 20", "1.25 / 20"]
    assert found["latency"].rows[1] == [200, None, None]
    assert found["rates"].rows == [[50.0, "99.9 %, 1.25 / 20"]]
    assert [row[3:5] for row in found["best"].rows] == [["812", 10], ["8.12", 10]]
    assert sweep.tables([]) == []

"""The experiments' parts that need no server: findings, plans, counters, and what is refused."""

from __future__ import annotations

import io
import json
import threading
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keyfront.benchmarks.experiments import (
    apache_mpm,
    findings,
    isolation,
    keystone_frontends,
    ldap_pool,
    live_replay,
    run_experiments,
    small_nginx,
    timelines,
)
from keyfront.benchmarks.experiments.experiment import as_text
from keyfront.benchmarks.lineups import lineup
from keyfront.benchmarks.results import Table
from keyfront.benchmarks.servers import rabbitmq
from keyfront.cli.main import main
from keyfront.errors import OptionError
from support.served import PATIENCE


def front(lineup: str, connections: int, rate: float, failed: int = 0, **more: Any) -> Any:
    return {
        "lineup": lineup,
        "label": lineup,
        "stock": lineup != "keyfront",
        "what": keystone_frontends.LISTS,
        "connections": connections,
        "generator": "siege",
        "rate": rate,
        "good": 1000,
        "failed": failed,
        "cpu": {"uWSGI": 1.5, "nginx": 0.1},
        **more,
    }


def as_published() -> list[Any]:
    samples = []
    for load in keystone_frontends.SWEEP:
        samples += [
            front("apache stock", load, 20, 500 if load >= 200 else 0),
            front("nginx stock", load, 21, 500 if load >= 200 else 0),
            front("apache tuned", load, 22, 500 if load > 700 else 0),
            front("nginx tuned", load, 22),
            front("keyfront", load, 20),
        ]
    samples.append(front("nginx tuned", keystone_frontends.MOST, 22, generator="ab"))
    return samples


def verdicts(found: list[findings.Finding]) -> Counter[str]:
    return Counter(one.verdict for one in found)


def test_figures_as_published_are_found_so() -> None:
    found = keystone_frontends.findings(as_published())
    assert verdicts(found) == {findings.AS_PUBLISHED: 7}


def test_figures_that_are_otherwise_are_found_so() -> None:
    samples = as_published()
    for one in samples:
        if one["lineup"] == "nginx tuned":
            one["failed"] = 900
        if one["lineup"] == "apache stock":
            one["rate"] = 5
        one["cpu"] = {"nginx": 2.0}
    found = keystone_frontends.findings(samples)
    # stock ones fail from 200 and Apache's above 700 still
    assert verdicts(found) == {findings.AS_PUBLISHED: 3, findings.OTHERWISE: 4}


def test_the_quick_form_claims_nothing_that_it_did_not_try() -> None:
    samples = [
        front(name, keystone_frontends.QUICK_FEW, 20)
        for name in ("apache stock", "nginx stock", "apache tuned", "nginx tuned", "keyfront")
    ]
    samples += [
        front(name, keystone_frontends.QUICK_MANY, 20, failed, generator="wrk")
        for name, failed in (("nginx stock", 50), ("keyfront", 0))
    ]
    samples[0]["rate"] = 10
    found = keystone_frontends.findings(samples)
    assert verdicts(found)[findings.OTHERWISE] == 0
    assert "nginx fails from 150" in found[1].measured
    (fail,) = (one for one in keystone_frontends.changes(samples) if "that fail" in one.what)
    assert (fail.verdict, fail.stock_name) == (findings.BETTER, "nginx stock")


def test_a_list_that_keyfront_does_not_speed_up_is_said() -> None:
    found = keystone_frontends.changes(as_published())
    assert {one.verdict for one in found} == {findings.SAME}
    slower = [one | {"rate": 5} if one["lineup"] == "keyfront" else one for one in as_published()]
    assert findings.WORSE in {one.verdict for one in keystone_frontends.changes(slower)}


def test_the_line_ups_are_the_published_ones() -> None:
    found = keystone_frontends.settings()
    assert {name: one.size for name, one in found.items() if one.stock} == {
        "apache stock": (5, 1),
        "nginx stock": (10, 2),
        "apache tuned": (38, 4),
        "nginx tuned": (38, 5),
    }
    for one in found.values():
        if one.stock:
            numbers = lineup.NUMBERS[one.lineup.tuning]
            nginx = one.lineup.topology == "nginx+uwsgi"
            assert one.size == (numbers.uwsgi if nginx else numbers.mod_wsgi)
    assert found["nginx tuned"].database_connections == 200
    assert not found["keyfront"].stock
    few = keystone_frontends.settings(processes=1)
    assert {one.size for one in few.values() if one.stock} == {(1, 1), (1, 2), (1, 4), (1, 5)}
    assert few["nginx stock"].label == "nginx + uWSGI 1x2, stock"


def replayed(target: str, sources: int, loss: float, **more: Any) -> Any:
    return {
        "target": target,
        "kernel": live_replay.DEFAULT,
        "sources": sources,
        "rate": 500.0 * sources * (1 - loss),
        "loss": loss,
        "p95_ms": 3.0,
        "cpu": {"Apache": 1.0} if "Apache" in target else {"nginx": 0.3},
        **more,
    }


def test_a_live_stream_that_only_one_can_take_is_found() -> None:
    samples = [replayed(name, 1, 0.0) for name in live_replay.TARGETS]
    samples += [replayed(live_replay.APACHE, 2, 0.6), replayed(live_replay.NGINX, 2, 0.0)]
    samples.append(replayed(live_replay.KEYFRONT, 2, 0.2))
    found = live_replay.findings(samples)
    assert [one.verdict for one in found[:2]] == [findings.AS_PUBLISHED] * 2
    # settings that were not tried are not judged
    assert all(one.verdict == findings.UNKNOWN for one in found[-2:])
    lost = live_replay.changes(samples)[0]
    assert (lost.stock_name, lost.verdict) == (live_replay.NGINX, findings.WORSE)


def test_each_source_sends_the_same_at_the_same_times() -> None:
    one, five = (live_replay.schedule(200, 2.0, sources) for sources in (1, 5))
    assert sorted(five) == sorted(one * 5)
    assert [due for due, _ in one] == sorted(due for due, _ in one)
    assert 300 < len(one) < 500
    assert live_replay.schedule(200, 2.0, 1) == one


def test_resets_are_counted_for_the_process_that_had_the_connection() -> None:
    log = "".join(
        f"2026-01-01 00:00:00.0 [info] <0.{number}.0> {text}\n"
        for number, name in ((1, "mod_wsgi:71:aa-bb"), (2, "mod_wsgi:72:cc"))
        for text in (
            f"accepting AMQP connection <0.{number}.0> (127.0.0.1:{number} -> 127.0.0.1:5672)",
            f"Connection <0.{number}.0> (127.0.0.1:{number} -> 127.0.0.1:5672) has a "
            f"client-provided name: {name}",
            "missed heartbeats from client, timeout: 4s" if number == 1 else "closing it",
        )
    )
    names = rabbitmq.missed_names(log)
    assert names == ["mod_wsgi:71:aa-bb"]
    assert apache_mpm.resets(names, {71, 5}) == 1
    assert apache_mpm.resets(names, {72}) == 0


def test_a_faster_module_that_still_loses_connections_is_told() -> None:
    samples: list[Any] = []
    for module in apache_mpm.MODULES:
        for side in apache_mpm.SIDES:
            lost = 2 if side == "stock" else 0
            who = {"module": module, "side": side}
            samples.append({"what": "idle", "resets": lost, "first_message_ms": 1 + lost, **who})
            samples.append({"what": "load", "rate": 1000.0, **who})
    found = {one.what: one.verdict for one in apache_mpm.findings(samples)}
    assert found["event mends that"] == findings.OTHERWISE
    assert found["prefork: an idle service loses its AMQP connections"] == findings.AS_PUBLISHED
    assert apache_mpm.changes(samples)[0].verdict == findings.BETTER


def test_the_mix_is_told_call_by_call() -> None:
    samples = [
        {"what": "a user by id", "candidate": name, "seconds": seconds}
        for name, seconds in (("unpooled", 0.4), ("ldappool", 0.2), ("keyfront", 0.1))
    ]
    (row,) = ldap_pool.mix_table(samples).rows
    assert row == ["a user by id", 400.0, 200.0, 100.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("nginx", "nginx: worker process", "nginx"),
        ("apache2", "/usr/sbin/apache2-f/x", "Apache"),
        ("apache2", "(wsgi:keystone)-f/x", "mod_wsgi"),
        ("uwsgi", "", "uWSGI"),
        ("siege", "", "generator"),
        ("bash", "", None),
    ],
)
def test_processes_are_told_apart(name: str, line: str, expected: str | None) -> None:
    assert timelines.group(name, line) == expected


def test_a_watch_counts_what_the_kernel_does() -> None:
    asked = threading.Event()

    def answer() -> float:
        asked.set()
        return 42.0

    with timelines.Watch(0.0, {("answer", "things"): answer}) as watch:
        assert asked.wait(PATIENCE)
    assert watch.peaks["connections"] >= 0
    (line,) = (one for one in watch.timelines("t") if one.name == "t: answer")
    assert line.unit == "things"
    assert {value for _, value in line.points} == {42.0}


def test_outside_of_a_namespace_no_setting_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(isolation.INSIDE, raising=False)
    before = isolation.read_setting("net.core.somaxconn")
    with isolation.settings({"net.core.somaxconn": "77", "net.no.such": "1"}) as found:
        assert found.applied == {}
        assert set(found.refused) == {"net.core.somaxconn", "net.no.such"}
        assert isolation.read_setting("net.core.somaxconn") == before


def test_a_limit_that_cannot_be_set_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(small_nginx, "_CGROUPS", tmp_path / "none")
    with small_nginx.limited(1) as limit:
        limit.add(1)
        assert limit.refused
        assert limit.peak() is None


def test_a_folder_that_is_no_cgroup_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(small_nginx, "_CGROUPS", tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    with small_nginx.limited(1) as limit:
        assert limit.refused
    assert list(tmp_path.iterdir()) == []


def test_old_advice_is_named_when_it_is_gone() -> None:
    sample = {
        "server": "",
        "what": small_nginx.STATIC,
        "kept": True,
        "rate": 30000.0,
        "failed": 0,
        "peaks": {"TIME_WAIT": 5},
        "resident_mb": 60.0,
        "cgroup_peak_mb": None,
    }
    samples = [
        sample | {"server": server, "what": what, "kept": kept}
        for server in (small_nginx.STOCK, small_nginx.TUNED)
        for what in (small_nginx.STATIC, small_nginx.DYNAMIC)
        for kept in (False, True)
    ]
    refused = {"net.ipv4.tcp_tw_recycle": "this kernel does not have it"}
    found = {one.what: one for one in small_nginx.findings(samples, refused)}
    assert "tcp_tw_recycle" in found["kernel settings of the time"].measured
    assert found["static file of 13 bytes, tuned: a second"].verdict == findings.AS_PUBLISHED


def test_there_are_the_five() -> None:
    assert run_experiments.NAMES == (
        "keystone-frontends",
        "apache-mpm",
        "ldap-pool",
        "small-nginx",
        "live-replay",
    )
    assert all(one.source and one.title for one in run_experiments.EXPERIMENTS.values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "NAME = nothing"),
        (["ldap-pool", "--seconds", "0"], "--seconds = 0"),
        (["ldap-pool", "--seconds", "x"], "--seconds = x"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "experiment", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


def test_results_do_not_go_where_a_file_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given = Namespace(name="all", quick=True, seconds=None, sqlite=False, results=file)
    with pytest.raises(OptionError, match="--results"):
        run_experiments.run(given, io.StringIO())


def test_a_child_is_told_all_by_its_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(isolation, "raise_loopback", lambda: None)
    monkeypatch.setattr(run_experiments, "perform", lambda task, out: seen.append(task) or 0)
    monkeypatch.setattr(run_experiments.signal, "signal", lambda *_: None)
    given = io.StringIO(json.dumps({"names": ["x"]}))
    assert run_experiments.child(given, io.StringIO(), terminate=lambda: None) == 0
    assert seen == [{"names": ["x"]}]


def test_text_for_a_terminal_has_80_columns() -> None:
    rows: list[Any] = [["word " * 40, 1.5, None], ["x", "long" * 5, "y" * 10]]
    table = Table(name="t", columns=["a", "b", "c"], rows=rows, caption="c " * 100)
    finding = findings.Finding("what", "published " * 20, "measured", True)
    change = findings.Change(what="x " * 50, stock=1, stock_name="s", keyfront=9, unit="ms")
    changes = [findings.changes([change]), findings.in_words([change])]
    found = as_text([findings.comparison([finding], "c " * 60), *changes, table], ["note " * 50])
    assert max(map(len, found.splitlines())) <= 80
    assert "None" not in found
    assert "- what: as published. Published: published" in found
    assert ". Here: measured." in " ".join(found.split())

"""The quick form of each experiment, once, on real servers; no time is asserted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

pytest.importorskip("keystone")

from keyfront.benchmarks import results
from keyfront.benchmarks.experiments import run_experiments
from keyfront.benchmarks.experiments.findings import CHANGES, COMPARISON
from keyfront.benchmarks.lineups import stock_servers
from keyfront.cli.main import main
from keyfront.errors import MissingPartError

pytestmark = pytest.mark.slow

# What each experiment starts, beside Python's packages.
PROGRAMS = {
    "keystone-frontends": ("nginx", "apache2", "mariadbd", "siege", "ab", "wrk"),
    "apache-mpm": ("apache2", "ab", "rabbitmq-server"),
    "ldap-pool": ("slapd",),
    "small-nginx": ("nginx", "ab", "wrk"),
    "live-replay": ("nginx", "apache2"),
}
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"


def needs(name: str) -> None:
    for program in PROGRAMS[name]:
        if shutil.which(program, path=_PATH) is None:
            pytest.skip(f"{program} is not installed")
    if "apache2" in PROGRAMS[name]:
        try:
            stock_servers.as_ordinary_user()
        except MissingPartError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("name", run_experiments.NAMES)
def test_the_quick_form_leaves_a_result(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    needs(name)
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    assert main(["bench", "experiment", name, "--quick", "--results", str(tmp_path)]) == 0
    told = capfd.readouterr().out
    assert "published and measured" in told
    assert "what keyfront changes" in told

    (result,) = results.read_all(tmp_path)
    assert (result.kind, result.name, result.complete) == ("experiment", name, True)
    assert result.conditions["quick"] is True
    assert result.samples and result.timelines and result.notes
    comparison, changes = result.table(COMPARISON), result.table(CHANGES)
    assert comparison is not None and comparison.rows and "Published" in comparison.caption
    assert changes is not None and changes.rows
    SEEN[name](result)

    # nothing outlives it, and no token is in what it leaves
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before
    assert "gAAAA" not in (tmp_path / result.file_name).read_text()


def frontends(result: results.Result) -> None:
    assert len({one["lineup"] for one in result.samples}) == 5
    # the published fault: uWSGI's queue of 100 is full, and nginx refuses at once
    stock = [one for one in result.samples if one["lineup"] == "nginx stock"]
    assert any(one["failed"] for one in stock if one["connections"] > 120)
    # keyfront's holds them all, and as many are answered as there are clients
    ours = [one for one in result.samples if one["lineup"] == "keyfront"]
    assert not any(one["failed"] for one in ours)
    assert any(one["connections"] > 120 for one in ours)
    assert all(one["good"] >= one["connections"] for one in ours)
    names = {one.name.rpartition(": ")[2] for one in result.timelines}
    assert {"token cache, hits", "database connections"} <= names


def modules(result: results.Result) -> None:
    resets = {
        (one["module"], one["side"]): one["resets"]
        for one in result.samples
        if one["what"] == "idle"
    }
    assert all(count > 0 for (_, side), count in resets.items() if side == "stock")
    assert all(count == 0 for (_, side), count in resets.items() if side == "keyfront")


def pools(result: results.Result) -> None:
    for one in result.samples:
        if one["what"] == "tokens" and one["candidate"] == "keyfront":
            assert one["binds"] == one["tokens"]
    assert {one["what"] for one in result.samples} >= {"tokens", ldap_call}


ldap_call = "the groups of a user"


def bytes_of_nginx(result: results.Result) -> None:
    assert sum(one["good"] for one in result.samples) > 0
    assert all(one["failed"] == 0 for one in result.samples)


def replays(result: results.Result) -> None:
    assert {one["sources"] for one in result.samples} == {1, 5}
    assert all(one["good"] > 0 for one in result.samples)


SEEN = {
    "keystone-frontends": frontends,
    "apache-mpm": modules,
    "ldap-pool": pools,
    "small-nginx": bytes_of_nginx,
    "live-replay": replays,
}

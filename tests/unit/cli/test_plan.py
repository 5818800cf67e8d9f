"""keyfront plan: the table, JSON, the exit status, and what it says to bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from keyfront.cli import main as cli
from keyfront.cli import plan as plan_commands
from keyfront.errors import OptionError
from keyfront.gateway.plan.compute import GROUPS
from keyfront.gateway.plan.measure import rounds
from keyfront.gateway.plan.measure.candidates import Candidate
from keyfront.gateway.plan.measure.results import CandidateResult

MACHINE = ("--cores", "4", "--memory", "8G")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["plan", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_every_number_is_printed_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(capsys, *MACHINE)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    words = " ".join(out.split())
    for group in GROUPS:
        assert f"\n{group}\n" in out
    assert "processes 4 4 cores x 1, at most" in words
    assert out.splitlines()[3].split("  ")[0] == "number"


def test_a_wide_terminal_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = []
    for columns in ("80", "120", "1000", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        longest.append(max(map(len, run(capsys, *MACHINE)[1].splitlines())))
    assert longest[0] <= 80 < longest[1] <= 120 < longest[2] <= 150
    assert longest[3] <= 80, "narrower is not readable"


def test_a_name_is_broken_where_its_words_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "memcached", "mod_wsgi.listen_backlog", *MACHINE)
    ends = {line.rpartition("  ")[2] for line in out.splitlines()}
    assert {"memcache_pool_", "connection_get_timeout"} <= ends
    assert "apache.max_request_" in out and " workers " in out


def test_groups_and_single_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "sysctl", "uwsgi.listen", *MACHINE, "--json")
    assert list(json.loads(out)["numbers"]) == [
        "uwsgi.listen", "sysctl.somaxconn", "sysctl.tcp_max_syn_backlog"
    ]


def test_json_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, *MACHINE, "--json", "--nodes", "3", "--database-connections", "20",
        "--logins", "1.5", "--latency", "2.5", "--without-token-cache",
    )
    content = json.loads(out)
    assert content["machine"]["cores"] == 4
    assert content["machine"]["memory"] == 8 * 2**30
    assert content["workload"]["nodes"] == 3
    assert content["workload"]["logins"] == 1.5
    assert content["workload"]["latency"] == 2.5
    assert content["workload"]["token_cache"] is False
    for number in content["numbers"].values():
        assert set(number) == {"value", "unit", "source", "breaks"}
    (conflict,) = content["conflicts"]
    assert conflict["name"] == "database.connections"
    assert status == 3
    assert conflict["gives"] in err


def test_what_cannot_be_met_ends_with_3_and_names_what_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, *MACHINE, "--ldap-connections", "10")
    assert status == 3
    assert err == (
        "keyfront: ldap.connections = 32 cannot be met, there is room for 10: the directory's "
        "limit must be at least 32, or uwsgi.processes at most 1 a node instead of 4\n"
    )
    assert "ldap" in out, "the numbers are printed all the same"


def test_the_small_profile_says_what_it_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "memory", "--cores", "1", "--memory", "256M", "--profile", "small")
    assert status == 0
    assert "What profile small does without:" in out


def test_off_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "uwsgi.gevent", *MACHINE)
    assert out.splitlines()[6].split()[:2] == ["gevent", "off"]


def test_workers_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *MACHINE, "--processes", "3", "--threads", "5", "--json")
    numbers = json.loads(out)["numbers"]
    assert numbers["uwsgi.processes"]["value"] == 3
    assert numbers["uwsgi.threads"]["value"] == 5
    assert numbers["database.max_pool_size"]["value"] == 5
    assert numbers["uwsgi.threads"]["source"] == "given"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256M", 256 * 2**20), ("4G", 4 * 2**30), ("1.5g", 3 * 2**29), ("2TiB", 2**41),
        ("512MB", 512 * 2**20), ("1048576K", 2**30),
    ],
)
def test_sizes(capsys: pytest.CaptureFixture[str], text: str, size: int) -> None:
    _, out, _ = run(capsys, "sysctl", "--json", "--memory", text)
    assert json.loads(out)["machine"]["memory"] == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cores", "0"), "--cores = 0: must be a whole number, 1 to 1024"),
        (("--cores", "1025"), "--cores = 1025: must be a whole number, 1 to 1024"),
        (("--cores", "two"), "--cores = two: must be a whole number, 1 to 1024"),
        (("--cores", "-1"), "--cores = -1: must be a whole number, 1 to 1024"),
        (("--cores", "1.5"), "--cores = 1.5: must be a whole number, 1 to 1024"),
        (("--cores", "٣"), "--cores = ٣: must be a whole number, 1 to 1024"),
        (("--memory", "4"), "--memory = 4: must be a size from 128M to 64T, for example 4G"),
        (("--memory", "0M"), "--memory = 0M: must be a size from 128M to 64T, for example 4G"),
        (("--memory=-4G",), "--memory = -4G: must be a size from 128M to 64T, for example 4G"),
        (("--memory", "65T"), "--memory = 65T: must be a size from 128M to 64T, for example 4G"),
        (("--logins", "-1"), "--logins = -1: must be a number per second, 0 to 1000000"),
        (("--logins", "nan"), "--logins = nan: must be a number per second, 0 to 1000000"),
        (("--validations", "1e3"), "--validations = 1e3: must be a number per second, 0 to "),
        (("--database-connections", "0"), "--database-connections = 0: must be a whole number of"),
        (("--ldap-connections", "-3"), "--ldap-connections = -3: must be a whole number of"),
        (("--memcached-connections", "x"), "--memcached-connections = x: must be a whole"),
        (("--nodes", "0"), "--nodes = 0: must be a whole number, 1 to 1000"),
        (("--processes", "0"), "--processes = 0: must be a whole number, 1 to 4096"),
        (("--threads", "257"), "--threads = 257: must be a whole number, 1 to 256"),
        (("--latency", "0"), "--latency = 0.0: must be a number of seconds, 0.1 to 300"),
        (("--latency", ""), "--latency = : must be a number of seconds, 0.1 to 300"),
        (("--profile", "huge"), "--profile = huge: must be one of small, standard, large"),
        (("nginz",), "GROUP = nginz: must be one of uwsgi, token_cache"),
        (("--seconds", "20"), "--seconds = 20: must be used with --measure"),
        (("--path", "/"), "--path = /: must be used with --measure"),
        (("--measure", "--seconds", "9"), "--seconds = 9: must be a number of seconds, 10 to 3600"),
        (("--measure", "--seconds", "x"), "--seconds = x: must be a number of seconds, 10 to 3600"),
        (("--measure", "--path", "v3"), "--path = v3: must be a path that begins with /"),
        (("--measure", "--path", "/ x"), "--path = / x: must be a path that begins with /"),
        (("--measure", "--state", "/nowhere/x"), "/nowhere/x: there is no Keystone to measure"),
        (("--measure", "--headers-file", "/nowhere/x"), "--headers-file = /nowhere/x: must be a"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"keyfront: {message}")
    assert err.count("\n") == 1


def test_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--core", "2"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def headers(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    file = tmp_path / "headers"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_file_of_headers(tmp_path: Path) -> None:
    file = headers(tmp_path, "X-Auth-Token: a b\n\nX-Subject-Token:c  \n")
    assert plan_commands._headers(file) == {"X-Auth-Token": "a b", "X-Subject-Token": "c"}


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("X-Auth-Token: gAAAAAsecret", 0o644, "readable by its owner only"),
        ("gAAAAAsecret\n", 0o600, "headers, line 1: must be NAME: VALUE"),
        ("Good: x\nX Auth: gAAAAAsecret\n", 0o600, "headers, line 2: must be NAME: VALUE"),
        ("A: gAAAAAsecret\x01\n", 0o600, "line 1: must be NAME: VALUE"),
        ("A: gAAAAAsecret" * 10000, 0o600, "at most 64 KiB"),
    ],
)
def test_headers_that_are_refused_are_not_shown(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        plan_commands._headers(headers(tmp_path, text, mode))
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals() -> None:
    for out, shown in ((Terminal(), True), (io.StringIO(), False)):
        with plan_commands._progress(out) as progress:
            progress(0.5, "round 1")
        assert ("[############............]  50%  round 1" in out.getvalue()) == shown
        assert out.getvalue().strip("\r ") == "" or shown


def fake(
    monkeypatch: pytest.MonkeyPatch, *results: tuple[Candidate, float], p99: float = 0.01
) -> None:
    """Let a measurement say so."""
    results = tuple(
        CandidateResult(candidate=candidate, rates=(rate,) * 4, latencies=(p99,), failed=0)
        for candidate, rate in results
    )
    made = rounds.Measurement(
        results=results, rounds=4, seconds=0.5, connections=16, generator_busy=0.95
    )
    monkeypatch.setenv("KEYFRONT_APP", "wsgiref.simple_server:demo_app")
    monkeypatch.setattr(rounds, "measure", lambda *_: made)


def test_the_winner_becomes_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    four, eight = Candidate(processes=4, threads=2), Candidate(processes=4, threads=8)
    fake(monkeypatch, (four, 100), (eight, 300))
    status, out, _ = run(capsys, *MACHINE, "--measure", "--json")
    content = json.loads(out)
    assert status == 0
    assert content["numbers"]["uwsgi.threads"]["value"] == 8
    assert content["numbers"]["database.max_pool_size"]["value"] == 8
    assert content["measurement"]["margin"] == pytest.approx(2)
    assert content["measurement"]["generator_bound"]
    status, out, _ = run(capsys, *MACHINE, "--measure")
    assert "4 processes x 8 threads is the best, 3.00 times the computed plan" in out
    assert "the load generator computed 95% of the time" in out
    assert "\nuwsgi\n" in out
    assert "\nnginx\n" not in out


def test_a_target_that_nobody_meets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, (Candidate(processes=4, threads=2), 100), p99=9.0)
    status, _, err = run(capsys, *MACHINE, "--measure")
    assert status == plan_commands.CONFLICT
    assert err.startswith("keyfront: latency cannot be met: none of them answers within 5 s")

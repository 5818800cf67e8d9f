"""What the LDAP benchmarks count, compare and call missed, and the proxy that they measure by."""

from __future__ import annotations

import configparser
import io
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import (
    goals,
    in_process,
    keystone_process,
    keystone_worker,
    ldap_keystones,
    ldap_logins,
    ldap_operations,
)
from keyfront.benchmarks.compare.goals import LDAP_GOALS, MET, MISSED, UNCLEAR
from keyfront.benchmarks.compare.ldap_logins import CASES, RATIOS, Case, Sample
from keyfront.benchmarks.servers import slapd as directory
from keyfront.errors import MissingPartError, ServerError
from support.served import PATIENCE

SETTINGS = ldap_logins.Settings(tokens=8, rounds=2, logins=4, stock_logins=2)


def sample(seconds: float, *, uneven: int = 0) -> Sample:
    return Sample(4, 4 * seconds, 0.4, 0, 4, 8, uneven)


@pytest.fixture
def samples() -> dict[str, list[Sample]]:
    """Two rounds: a token takes 1 s without a pool, 0.5 s with ldappool and 0.05 s with ours."""
    seconds = {"unpooled": 1.0, "ldappool": 0.5, "keyfront": 0.05, "sql": 0.01}
    return {
        name: [sample(seconds[case.candidate.split()[0]])] * 2 for name, case in CASES.items()
    }


# Goals


def test_every_goal_is_of_cases_that_are_measured_and_shown() -> None:
    for goal in LDAP_GOALS:
        assert {goal.first, goal.second} <= CASES.keys()
        assert (goal.first, goal.second) in RATIOS
    assert not set(LDAP_GOALS) & set(goals.GOALS)


def verdicts(samples: dict[str, list[Sample]]) -> dict[str, str]:
    """How each goal was met, by its cases."""
    found = ldap_logins.report(samples, "").verdicts
    return {text.partition(" of ")[2].partition(" >= ")[0]: verdict for text, verdict in found}


BINDS = "keyfront / logins <= 1"


def test_goals_are_judged_by_the_rounds(samples: dict[str, list[Sample]]) -> None:
    found = verdicts(samples)
    assert found.keys() == {*(f"{goal.first} / {goal.second}" for goal in LDAP_GOALS), BINDS}
    assert set(found.values()) == {MET}
    samples["keyfront whole, one, 10 ms"] = [sample(0.21), sample(0.22)]
    samples["keyfront, many, 1 ms"] = [sample(0.49), sample(0.6)]
    found = verdicts(samples)
    assert found["keyfront whole, one, 10 ms / unpooled, one, 10 ms"] == MISSED
    assert found["keyfront whole, one, 10 ms / ldappool, one, 10 ms"] == MET
    assert found["keyfront, many, 1 ms / ldappool, many, 1 ms"] == UNCLEAR
    assert found["keyfront, many, 0 ms / ldappool, many, 0 ms"] == MET


def test_one_login_with_another_number_of_binds_is_enough(
    samples: dict[str, list[Sample]],
) -> None:
    # the stock driver's pool is a password cache: that is no goal of ours
    samples["ldappool, one, 0 ms"] = [sample(0.5, uneven=1)] * 2
    assert verdicts(samples)[BINDS] == MET
    samples["keyfront gevent, many, 50 ms"][1:] = [sample(0.05, uneven=1)]
    assert verdicts(samples)[BINDS] == MISSED


def test_what_was_not_measured_is_not_judged(samples: dict[str, list[Sample]]) -> None:
    few = {name: each for name, each in samples.items() if ", 10 ms" in name}
    assert {text.partition(" / ")[0] for text in verdicts(few)} == {
        "keyfront whole, one, 10 ms",
        "keyfront whole, many, 10 ms",
        "keyfront, many, 10 ms",
        "keyfront",
    }


def test_a_goal_in_microseconds_fails_no_build() -> None:
    def times(bind: float, connect: float) -> ldap_operations.Times:
        clients = {"keyfront": [bind] * 2, "python-ldap": [10.0] * 2, "ldap3": [100.0] * 2}
        return dict.fromkeys(ldap_operations.CALLS, clients) | {
            ldap_operations.CONNECT: clients | {"keyfront": [connect] * 2}
        }

    report = ldap_operations.report(times(60, 20))
    assert [verdict for _, verdict in report.verdicts] == [MET] * 3
    assert all(len(line) <= 80 for line in results.plain(report.tables[0]).splitlines())
    bind, search, connect = ldap_operations.report(times(61, 20.1)).verdicts
    assert bind == ("BIND <= 60 us: 61", UNCLEAR)
    assert (search[1], connect[1]) == (MET, MISSED)


# Reports


def test_a_row_is_per_token() -> None:
    one, other = Sample(4, 2.0, 0.4, 64, 64, 36, 0), Sample(4, 6.0, 0.8, 64, 64, 36, 0)
    assert ldap_logins.row([one, other]) == (1.0, pytest.approx(0.15), 16, 16, 9)


def test_the_tables_are_whole(samples: dict[str, list[Sample]]) -> None:
    report = ldap_logins.report(samples, "the command")
    logins, found = report.tables
    text = results.markdown(logins)
    assert (
        "| keyfront_ldap, one user, 10 ms | 25 | 50 | 100 | 0 | 1 | 2 | 20.0 (20.0 to 20.0) |"
    ) in text
    assert len(logins.rows) == len(CASES)
    assert len(found.rows) == len(RATIOS)
    assert sum(bool(row[2]) for row in found.rows) == len(LDAP_GOALS)
    assert "`the command`" in text
    assert all(len(line) <= 80 for line in results.plain(logins).splitlines())
    one = next(one for one in report.samples if one["case"] == "keyfront, one, 10 ms")
    assert one["round"] == 0
    assert one["binds"] == samples["keyfront, one, 10 ms"][0].binds


# What is done


def bench(settings: ldap_logins.Settings) -> ldap_logins.Bench:
    nowhere: Any = SimpleNamespace(port=1, ca_file=Path("/ca.pem"))
    return ldap_logins.Bench(settings, nowhere, nowhere, Path("/nowhere"))


def test_tokens_are_divided_over_the_rounds() -> None:
    settings = SETTINGS._replace(tokens=11, rounds=3)
    many = [bench(settings)._users(Case("keyfront", "many", 0), number) for number in range(3)]
    assert many == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    one = [bench(settings)._users(Case("keyfront", "one", 0), number) for number in range(3)]
    assert [len(each) for each in one] == [4, 4, 3]
    assert {user for each in one for user in each} == {0}


def test_logins_at_once_are_each_another_user() -> None:
    made = bench(SETTINGS)
    for candidate, count in (("keyfront gevent", 4), ("ldappool gevent", 2)):
        assert made._users(Case(candidate, "many", 50, True), 1) == list(range(count))
    # nobody who is measured has logged in on the same connection right before
    assert made.users - 1 not in range(max(SETTINGS.tokens, SETTINGS.logins))


class Fake:
    """A Keystone, a proxy and a slapd that note what is done; users 1 and 2 get no BIND."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def delay(self, seconds: float) -> None:
        self.done.append(seconds)

    def logins(self, bodies: list[Any], *, at_once: bool = False) -> keystone_process.Answers:
        names = [x["auth"]["identity"]["password"]["user"]["name"] for x in bodies]
        self.done.append((names, at_once))
        return keystone_process.Answers([], [], 2.0, 1.0)

    def authenticate(
        self, domain: str, pairs: list[Any], *, at_once: bool = False
    ) -> keystone_process.Answers:
        self.done.append(([name for name, _ in pairs], at_once))
        return keystone_process.Answers([], [], 2.0, 1.0)

    def mark(self) -> int:
        self.done.append("mark")
        return 5

    def counts(self, mark: int) -> directory.Counts:
        bound = directory.Counter({directory.user_dn(0): 1, directory.user_dn(3): 1})
        return directory.Counts(7, 8, 9, bound)


@pytest.mark.parametrize("driver", [False, True])
def test_a_case_is_warmed_up_counted_and_checked_by_user(driver: bool) -> None:
    fake: Any = Fake()
    made = bench(SETTINGS)
    made.slapd = made.proxy = fake
    seen = made.once(fake, Case("keyfront", "many", 10, driver=driver), 0)
    measured = ["user0", "user1", "user2", "user3"]
    assert fake.done == [0.01, (["user8"], False), "mark", (measured, False)]
    assert seen == Sample(4, 2.0, 1.0, 7, 8, 9, uneven=2)


def test_candidates_differ_in_driver_and_pool_only() -> None:
    nowhere: Any = SimpleNamespace(port=1, ca_file=Path("/with$dollar/ca.pem"))
    made = ldap_keystones.Keystones(Path("/nowhere"), nowhere, 2, users=1)
    found = {}
    for name in ("unpooled", "ldappool", "keyfront"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(made._domain(ldap_keystones.CANDIDATES[name], direct=False))
        options = dict(parser["ldap"])
        found[name] = (
            parser["identity"]["driver"], options.pop("use_pool"), options.pop("use_auth_pool"),
            options,
        )  # fmt: skip
    assert {name: each[:3] for name, each in found.items()} == {
        "unpooled": ("ldap", "false", "false"),
        "ldappool": ("ldap", "true", "true"),
        "keyfront": ("keyfront_ldap", "true", "true"),
    }
    first, *others = (each[3] for each in found.values())
    assert others == [first, first]
    assert first["url"] == "ldaps://127.0.0.1:2"
    assert first["tls_cacertfile"] == "/with$$dollar/ca.pem"


def test_operations_are_counted_from_the_mark_on(tmp_path: Path) -> None:
    log = tmp_path / "slapd.log"
    before = b"6b 0x7f conn=1000 fd=12 ACCEPT from IP=127.0.0.1:1 (IP=127.0.0.1:2)\n"
    log.write_bytes(before)
    slapd = directory.Slapd(1, 2, tmp_path, log)
    mark = slapd.mark()
    one = directory.user_dn(1).encode()
    with log.open("ab") as file:
        file.write(
            before
            + b"6b 0x7f conn=1000 fd=12 TLS established tls_ssf=256\n"
            + b'6b 0x7f conn=1000 op=0 BIND dn="%b" method=128\n' % one
            + b'6b 0x7f conn=1000 op=0 BIND dn="%b" mech=SIMPLE bind_ssf=0 ssf=256\n' % one
            + b"6b 0x7f conn=1000 op=0 RESULT tag=97 err=0 qtime=0.1 etime=0.1 text=\n"
            + b"6b 0x7f conn=1000 op=1 BIND anonymous mech=implicit bind_ssf=0 ssf=256\n"
            + b'6b 0x7f conn=1000 op=1 BIND dn="%b" method=128\n' % one
            + b'6b 0x7f conn=1000 op=2 SRCH base="ou=People" scope=1 filter="(cn=a)"\n'
            + b"6b 0x7f conn=1000 op=2 SRCH attr=cn mail\n"
            + b"6b 0x7f conn=1000 op=2 SEARCH RESULT tag=101 err=0 nentries=1 text=\n"
            + b"6b 0x7f conn=1000 op=3 UNBIND\n6b 0x7f conn=1000 fd=12 closed\n"
        )
    assert slapd.counts(mark) == (1, 2, 1, {directory.user_dn(1): 2})
    assert slapd.counts(0).connects == 2


def test_the_content_of_the_directory_has_every_user_once() -> None:
    lines = directory._ldif(3).splitlines()
    assert [x for x in lines if x.startswith("dn: uid=")] == [
        f"dn: {directory.user_dn(number)}" for number in range(3)
    ]
    assert sum(x.startswith("member: ") for x in lines) == 3


# The process of a Keystone


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Stands in for Keystone: gives a token to everybody but Mallory."""
    body = json.loads(environ["wsgi.input"].read() or b"null")
    if body == "mallory":
        start_response("401 Unauthorized", [])
        return [b"{}"]
    start_response("201 Created", [("X-Subject-Token", "token")])
    seen = [environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_X_AUTH_TOKEN")]
    return [json.dumps(seen).encode()]


def told(*lines: object) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    os.write(writing, "".join(json.dumps(line) + "\n" for line in lines).encode())
    os.close(writing)
    answers = io.StringIO()
    worker = keystone_worker.Worker(application)
    with open(reading, encoding="utf-8") as file:
        # one at a time, as the other side does
        for _ in lines:
            line = io.StringIO(file.readline())
            line.fileno = file.fileno  # type: ignore[method-assign]
            keystone_worker.serve(worker, line, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


class Told:
    """The worker, without a process."""

    name = "Keystone"

    def line(self) -> str:
        return "{}"

    def ask(self, line: str) -> str:
        return json.dumps(told(json.loads(line))[0])

    def tail(self) -> str:
        return "the log"


@pytest.fixture
def keystone() -> keystone_process.KeystoneProcess:
    process: Any = Told()
    return keystone_process.KeystoneProcess(process)


@pytest.mark.parametrize("at_once", [False, True])
def test_logins_that_fail_are_told(
    at_once: bool, keystone: keystone_process.KeystoneProcess
) -> None:
    with pytest.raises(
        ServerError, match=r"Keystone answers POST /v3/auth/tokens with 401: \{\} the log"
    ):
        keystone.logins(["alice", "mallory", "bob"], at_once=at_once)
    found = keystone.logins(["alice", "bob"], at_once=at_once)
    assert found.tokens == ["token"] * 2
    assert found.seconds > 0


def test_logins_at_once_are_all_under_way() -> None:
    together = threading.Barrier(5, timeout=PATIENCE)

    def step(_: int) -> dict[str, Any]:
        together.wait()
        return {"status": 200}

    done = keystone_worker.timed(step, list(range(5)), at_once=True)
    assert done["answers"] == [{"status": 200}] * 5


def test_an_exception_is_an_answer() -> None:
    def fail(_: int) -> dict[str, Any]:
        raise ValueError("no")

    (answer,) = keystone_worker.timed(fail, [1], at_once=False)["answers"]
    assert (answer["status"], answer["body"]) == (500, "ValueError: no")


def test_any_request_can_be_made(keystone: keystone_process.KeystoneProcess) -> None:
    found = keystone.request("PUT", "projects/p", "mine", {"project": {}})
    assert found == {"token": "token", "body": ["PUT", "/v3/projects/p", "mine"]}
    answer = in_process.request(application, "GET", "/v3?a=b", subject="other")
    assert (answer.status, answer.token) == (201, "token")
    assert json.loads(answer.body) == ["GET", "/v3", None]


# The commands


@pytest.mark.parametrize("module", [ldap_logins, ldap_operations])
def test_without_slapd_its_package_is_named(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise MissingPartError("slapd is not installed: run apt install slapd")

    monkeypatch.setattr(directory, "slapd_program", missing)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert module.main([]) == 2
    assert "apt install slapd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "3", "--rounds", "4"], "--rounds = 4: must be at most --tokens (3)"),
        (["--logins", "1"], "--stock-logins = 20: must be at most --logins (1)"),
        (["--only", "nothing"], "--only = nothing: must be in the name of a case"),
        (["--results", "/dev/null/x"], "/dev/null/x: cannot be written to: Not a directory"),
    ],
)
def test_options_that_make_no_sense_are_named(
    arguments: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert ldap_logins.main(arguments) == 2
    assert named in capsys.readouterr().err

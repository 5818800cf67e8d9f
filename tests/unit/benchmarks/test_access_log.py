"""Access logs: their formats, their spacing, the synthetic ones, and what becomes of a request."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from keyfront.benchmarks.load import access_log, rewrite, synthetic
from keyfront.benchmarks.load.access_log import Entry
from keyfront.cli.main import main
from keyfront.errors import BenchmarkError

AT = datetime.fromisoformat("2026-11-22T15:39:14+00:00").timestamp()
ID, OTHER = "0123456789abcdef" * 2, "f" * 64


@pytest.mark.parametrize(
    "line",
    [
        '127.0.0.1 - - [22/Nov/2026:15:39:14 +0000] "GET /v3 HTTP/1.1" 200 300 "-" "curl/8"',
        '::1 - jo [22/Nov/2026:16:39:14 +0100] "GET /v3 HTTP/1.0" 200 -',
        # ours for nginx, for Apache and for uWSGI
        '10.0.0.1 - - [22/Nov/2026:15:39:14 +0000] "GET /v3 HTTP/1.1" 200 3 "-" "x" 0.1 0.1 200 -',
        '10.0.0.1 [22/Nov/2026:15:39:14 +0000] "GET /v3 HTTP/1.1" 200 3 5ms worker 1',
        '{"time":"2026-11-22T15:39:15+00:00","method":"GET","uri":"/v3","status":"200",'
        '"seconds":"1.000"}',
        '{"time":"2026-11-22T15:39:14.000+0000","method":"GET","uri":"/v3","status":200,'
        '"microseconds":5000}',
        f'{{"unix":{AT:.0f},"access":"1.2.3.4 [22/Nov/2026:15:39:14 +0000] \\"GET /v3 HTTP/1.1\\" '
        '200 3 5ms worker 1"}',
    ],
)
def test_formats(line: str) -> None:
    assert access_log.parse_line(line) == Entry(AT, "GET", "/v3", 200)


def test_uwsgi_writes_the_local_time() -> None:
    at = datetime.fromtimestamp(AT).strftime("%a %b %e %H:%M:%S %Y")
    line = (
        f"[pid: 1|app: 0|req: 1/1] 127.0.0.1 () {{34 vars in 500 bytes}} [{at}] GET /v3?a=b => "
        "generated 3 bytes in 9 msecs (HTTP/1.1 200) 4 headers in 160 bytes (1 switches on core 0)"
    )
    assert access_log.parse_line(line) == Entry(AT, "GET", "/v3?a=b", 200)


@pytest.mark.parametrize(
    "line", ["junk", "{}", "{", '{"time":1}', '- - - [x] "GET / HTTP/1.1" 200', '"GET /" 200']
)
def test_other_lines_are_none(line: str) -> None:
    assert access_log.parse_line(line) is None


def line(second: int, target: str = "/v3") -> str:
    return synthetic.combined(Entry(AT + second, "GET", target, 200))


def test_a_line_between_is_passed_over_and_order_is_by_time() -> None:
    found = access_log.parse([line(2), "rotated", line(1), "", line(1, "/b")])
    assert [(entry.at - AT, entry.target) for entry in found] == [(1, "/v3"), (1, "/b"), (2, "/v3")]


def test_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join([line(1), "junk", "junk", line(2)]))
    with pytest.raises(BenchmarkError, match=f"{path}:2: is no line .* nor are 1 other lines"):
        access_log.read(path)
    path.write_text("junk")
    with pytest.raises(BenchmarkError, match=f"{path}:1: is no line"):
        access_log.read(path)
    path.write_text("\n")
    with pytest.raises(BenchmarkError, match="is empty; keyfront bench log"):
        access_log.read(path)
    with pytest.raises(BenchmarkError, match="No such file"):
        access_log.read(tmp_path / "missing")


def at(*times: float) -> list[float]:
    entries = [Entry(AT + one, "GET", "/", 200) for one in times]
    return [round(when, 6) for when, _ in access_log.spaced(entries)]


def test_requests_of_a_second_are_spread_over_it() -> None:
    assert at(0, 0, 0, 0, 3, 4, 4) == [0, 0.25, 0.5, 0.75, 3, 4, 4.5]


def test_exact_times_stay_as_they_are() -> None:
    assert at(0, 0.125, 0.125, 2) == [0, 0.125, 0.125, 2]
    assert at() == []


def synthesized(**options: object) -> list[Entry]:
    return list(synthetic.entries(**{"seconds": 300, "rate": 40, **options}))


def test_a_seed_makes_the_same_log_and_another_another() -> None:
    assert synthesized(seed=3) == synthesized(seed=3)
    assert synthesized(seed=3) != synthesized(seed=4)


def test_the_mix_and_the_rate_are_as_told() -> None:
    found = synthesized()
    # beside storms
    assert 0.9 * 12000 < len(found) < 1.5 * 12000
    validations = sum(one.target.startswith("/v3/auth/tokens") for one in found) / len(found)
    assert 0.7 < validations < 0.82
    assert all(later.at >= one.at for one, later in pairwise(found))
    users = Counter(one.target for one in found if "/users/" in one.target)
    assert users.most_common(1)[0][1] > 5 * users.total() / len(users)


def test_formats_can_be_read_again() -> None:
    found = synthesized(seconds=20)
    for written in synthetic.FORMATS.values():
        again = access_log.parse(map(written, found))
        assert [one[1:] for one in again] == [one[1:] for one in found]
        assert all(abs(one.at - two.at) <= 1 for one, two in zip(again, found, strict=True))


def test_log_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    options = ["--seconds", "5", "--format", "json"]
    assert main(["bench", "log", str(path), *options]) == 0
    capsys.readouterr()
    assert main(["bench", "log", *options]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert main(["bench", "log", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err
    for wrong in (["--rate", "0"], ["--seconds", "x"], ["--format", "xml"], ["--users", "-1"]):
        assert main(["bench", "log", *wrong]) == 2
        assert f"{wrong[0]} = {wrong[1]}: must be" in capsys.readouterr().err


def form(method: str, target: str, status: int = 200) -> rewrite.Form | None:
    return rewrite.form(Entry(AT, method, target, status))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (f"/v3/users/{ID}/projects?x=1", "/v3/users/{users}/projects?x=1"),
        (f"/v3/projects/{ID}/users/{OTHER}/roles", "/v3/projects/{projects}/users/{users}/roles"),
        ("/v3/domains/default", "/v3/domains/default"),
        (f"/v3/role_assignments?user.id={ID}&x", "/v3/role_assignments?user.id={users}&x"),
        (f"/v3/r?scope.project.id={ID}", "/v3/r?scope.project.id={projects}"),
        (f"/v3/users?domain_id={ID}", "/v3/users?domain_id={domains}"),
        ("/v3/auth/tokens?nocatalog", "/v3/auth/tokens?nocatalog"),
    ],
)
def test_ids_become_names(target: str, wanted: str) -> None:
    assert form("GET", target) == rewrite.Form("GET", wanted, False, False)


def test_what_would_change_the_target_is_left_out() -> None:
    for method, target in (
        ("POST", "/v3/users"), ("DELETE", "/v3/auth/tokens"), ("PATCH", f"/v3/users/{ID}"),
        ("PUT", "/v3/x"), ("POST", "/v3/auth/tokens/OS-PKI"),
    ):  # fmt: skip
        assert form(method, target) is None
    assert form("POST", "/v3/auth/tokens", 201) is not None


def wires() -> rewrite.Wires:
    login = {"auth": {"identity": {"password": {"user": {"name": "admin", "password": "right"}}}}}
    ids = {"users": "u" * 32}
    return rewrite.Wires(rewrite.Identity("http://h:1", "caller", ["s0", "s1"], ids, login))


def test_tokens_and_ids_are_the_targets() -> None:
    made = wires()
    validation, user = form("GET", "/v3/auth/tokens"), form("GET", f"/v3/users/{ID}")
    assert [made.place(validation, 200) for _ in range(4)] == [0, 1, 0, 1]
    assert made.wires[0].count(b"X-Auth-Token: caller\r\nX-Subject-Token: s1") == 1
    assert b"X-Subject-Token: s0" in made.wires[1]
    assert made.wires[made.place(user, 200)].startswith(b"GET /v3/users/" + b"u" * 32 + b" HTTP")
    assert made.logged[0] == {200: 2}


def test_what_was_refused_or_missing_is_again() -> None:
    made = wires()
    refused = made.wires[made.place(form("GET", "/v3/auth/tokens", 401), 401)]
    assert b"X-Auth-Token: nobody-issued-this" in refused
    missing = made.wires[made.place(form("GET", "/v3/auth/tokens", 404), 404)]
    assert b"X-Auth-Token: caller\r\nX-Subject-Token: nobody-issued-this" in missing
    gone = made.wires[made.place(form("GET", f"/v3/users/{ID}", 404), 404)]
    assert b"/v3/users/" + b"0" * 32 in gone
    login = made.wires[made.place(form("POST", "/v3/auth/tokens", 401), 401)]
    assert b"right" not in login
    assert b"admin" not in login
    assert b"right" in made.wires[made.place(form("POST", "/v3/auth/tokens", 201), 201)]


def test_answers_are_compared_with_the_log_by_their_class() -> None:
    logged = [Counter({200: 3, 404: 1}), Counter({201: 4})]
    assert rewrite.as_logged(logged, [(0, {"200": 4}), (1, {"200": 4})]) == 7 / 8
    assert rewrite.as_logged(logged, [(0, {"503": 4})]) == 0
    assert rewrite.as_logged([], []) == 0

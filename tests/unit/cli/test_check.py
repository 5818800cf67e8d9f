"""``keyfront check`` against servers that answer like Keystone, or do not."""

from __future__ import annotations

import datetime
import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.cli import credentials, tokens
from keyfront.cli import main as cli
from keyfront.cli.check import Report, _Server, check
from keyfront.errors import MissingPartError, OptionError, ServerError
from keyfront.middleware.tokens import tags_header
from keyfront.middleware.tokens.epochs import Epoch, Slots
from support.served import free_port

trustme = pytest.importorskip("trustme")

TOKEN = {
    "token": {
        "user": {"name": "joe", "domain": {"name": "Default"}},
        "project": {"name": "one"},
        "roles": [{"name": "reader"}, {"name": "member"}],
        "catalog": [{"type": "identity"}],
        "expires_at": "2026-11-24T00:00:00.000000Z",
    }
}
SECRET = "not to be shown"


class Keystone:
    """Answers logins and validations, and notes what it was sent.

    :param answers: the status of each answer, the last for all others
    :param told: what it says of how long an answer stands, if it is asked
    """

    def __init__(self, *answers: int, body: object = TOKEN, told: str | None = None) -> None:
        self.answers = list(answers) or [200]
        self.body = body
        self.told = told
        #: Seconds that each answer is on its way.
        self.distance = 0.0
        self.bodies: list[Any] = []
        #: More headers of each answer.
        self.headers: dict[str, str] = {}
        self.wait = threading.Event()
        self.wait.set()

    @contextmanager
    def serving(self, context: ssl.SSLContext | None = None) -> Iterator[str]:
        keystone = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                keystone.bodies.append(json.loads(self.rfile.read(length) or "null"))
                keystone.wait.wait(30)
                time.sleep(keystone.distance)
                answers = keystone.answers
                if not self.path.endswith("/auth/tokens"):  # the round trip
                    answers = [300]
                self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
                if keystone.told and tags_header.NAME in self.headers:
                    self.send_header(tags_header.NAME, keystone.told)
                self.send_header("X-Subject-Token", SECRET)
                self.send_header("Retry-After", "7")
                for name, value in keystone.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(json.dumps(keystone.body).encode())

            do_GET = do_POST = handle_one

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            scheme = "http" if context is None else "https"
            yield f"{scheme}://127.0.0.1:{server.server_port}"
        finally:
            self.wait.set()
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables of the openstack command."""
    for name in ("OS_CLOUD", "OS_AUTH_URL", "OS_USERNAME", "OS_PASSWORD", "OS_CACERT"):
        monkeypatch.delenv(name, raising=False)

    def say(url: str, **values: str) -> None:
        given = {"auth_url": url, "username": "joe", "password": SECRET, "project_name": "one"}
        for name, value in {**given, **values}.items():
            monkeypatch.setenv(f"OS_{name.upper()}", value)

    return say


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    # A busy machine is no reason to warn.
    status = cli.main(["check", "--warn", "3600", *words])
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    return status, said.out, said.err


def test_a_keystone_of_the_environment(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keystone = Keystone()
    with keystone.serving() as url:
        environ(url, user_domain_id="d")
        status, out, err = run(capsys)
    assert (status, err) == (0, "")
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert rows["user"] == "joe in Default"
    assert rows["roles"] == "member, reader"
    assert rows["project"] == "one"
    assert all(rows[name].startswith("ok, ") for name in ("login", "validation", "repeated"))
    assert max(map(len, out.splitlines())) <= 80
    assert keystone.bodies[0] == {
        "auth": {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"name": "joe", "domain": {"id": "d"}, "password": SECRET}},
            },
            "scope": {"project": {"name": "one", "domain": {"name": "Default"}}},
        }
    }
    # a login, two looks at how long the way is, a validation, five repeated, one of the cache
    assert keystone.bodies[1:] == [None] * 9


def test_for_programs(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with Keystone().serving() as url:
        environ(f"{url}/v3/")
        status, out, _ = run(capsys, "--json")
        found = json.loads(out)
        assert (status, found["status"], found["url"]) == (0, "ok", f"{url}/v3")
        assert list(found["milliseconds"]) == [
            "connection", "login", "round_trip", "first_validation", "repeated_validation",
        ]  # fmt: skip
        assert found["cache"] in ("unknown", "none")
        status, out, _ = run(capsys, "--json", "--warn", "0.001")
    if status:  # it may be quicker than that
        found = json.loads(out)
        assert (status, found["status"]) == (1, "warning")
        assert "more than 0.001 s" in found["warnings"][0]
    environ(f"http://127.0.0.1:{free_port()}")
    status, out, err = run(capsys, "--json")
    assert (status, err) == (2, "")
    assert json.loads(out)["status"] == "critical"


KEPT = tags_header.compose(tags_header.ASK, Epoch(1, 2), Slots((3, 4)), 1.8e9)


@pytest.mark.parametrize(
    ("told", "cached", "words"),
    [
        (KEPT, True, "from keyfront's token cache"),
        (tags_header.NONE, False, "not kept by the token cache"),
    ],
)
def test_the_token_cache_says_of_itself_whether_it_keeps_the_answer(
    told: str,
    cached: bool,
    words: str,
    environ: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However far away it is: all of its answers take the same time then."""
    keystone = Keystone(told=told)
    keystone.distance = 0.02
    with keystone.serving() as url:
        environ(url)
        status, out, err = run(capsys, "--json")
        assert (status, err) == (0, "")
        assert json.loads(out)["cached"] is cached
        assert words in run(capsys)[1]


@pytest.mark.parametrize(
    ("round_trip", "first", "repeated", "cached"),
    [
        (1.0, 48.0, 5.0, True),  # memcached under Keystone
        (21.0, 68.0, 25.0, True),  # the same, 20 ms away
        (1.0, 48.0, 42.0, False),  # none
        (201.0, 248.0, 242.0, False),
        (21.0, 29.0, 20.4, True),  # a token cache whose header is taken away
        (21.0, 20.8, 20.4, True),  # one that knows the first one, too
        (2.0, 2.2, 1.0, True),
    ],
)
def test_where_nobody_says_it_the_time_beyond_the_way_tells(
    round_trip: float, first: float, repeated: float, cached: bool
) -> None:
    report = Report("http://host:5000/v3")
    report.milliseconds.update(
        connection=1.0, login=300.0, round_trip=round_trip,
        first_validation=first, repeated_validation=repeated,
    )  # fmt: skip
    assert report.cached is cached


@pytest.mark.parametrize(
    ("keystone", "words"),
    [
        (Keystone(401), "answers 401 Unauthorized; is it the right user"),
        (Keystone(400), "answers 400 Bad Request; is it https:// there?"),
        (Keystone(503), "answers 503 Service Unavailable; it asks to come back in 7 s"),
        (Keystone(201, 500), "answers 500 Internal Server Error"),
        (Keystone(body=["no", "token"]), "answers with no token"),
        (Keystone(body={"token": {"user": {"name": "joe"}}}), "answers with no token"),
        (Keystone(body={"token": {**TOKEN["token"], "roles": 1}}), "answers with no token"),
        (Keystone(body={**TOKEN, "more": "x" * (5 << 20)}), "answers with no token"),
    ],
    ids=["refused", "http", "busy", "broken", "another", "half", "odd", "long"],
)
def test_a_keystone_that_does_not_work(
    keystone: Keystone,
    words: str,
    environ: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with keystone.serving() as url:
        environ(url)
        status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_name_does_not_steer_the_terminal(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    token = {**TOKEN["token"], "project": {"name": "one\x1b[2J\ntwo"}}
    with Keystone(body={"token": token}).serving() as url:
        environ(url)
        assert "project     one?[2J?two\n" in run(capsys)[1]


def test_a_keystone_that_does_not_answer(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keystone = Keystone()
    keystone.wait.clear()
    with keystone.serving() as url:
        environ(url)
        status, _, err = run(capsys, "--timeout", "0.05")
    assert status == 2
    assert "no answer within 0.05 s" in err
    environ(f"http://127.0.0.1:{free_port()}")
    status, _, err = run(capsys)
    assert status == 2
    assert "Connection refused" in err


def test_tls(
    environ: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = trustme.CA()
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=5)
    certificate = authority.issue_cert("127.0.0.1", not_after=ends)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with Keystone().serving(context) as url:
        environ(url)
        status, _, err = run(capsys)
        assert status == 2
        assert "its certificate is refused" in err
        assert "OS_CACERT" in err and "is it running" not in err
        environ(url.replace("127.0.0.1", "localhost"), cacert=str(tmp_path / "ca.pem"))
        status, _, err = run(capsys)
        assert status == 2
        assert "; OS_AUTH_URL has to have its name" in err and "OS_CACERT" not in err
        environ(url, cacert=str(tmp_path / "none.pem"))
        status, _, err = run(capsys)
        assert status == 2
        assert "none.pem: No such file" in err
        environ(url, cacert=str(tmp_path / "ca.pem"))
        status, out, _ = run(capsys)
        assert status == 1
        assert "TLSv1.3" in out
        assert "warning     the certificate ends in 5 days" in out
        environ(url, insecure="true")
        status, out, _ = run(capsys)
        assert status == 1
        assert "was not looked at" in out


def test_tokens_check_trusts_whom_the_variables_name(
    environ: Callable[..., None], tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with Keystone(body={"token": {"audit_ids": ["1"]}}).serving(context) as url:
        environ(url)
        with pytest.raises(ServerError, match=r"its certificate is refused: .*; name its CA by"):
            tokens._issued(url, {})
        environ(url, cacert=str(tmp_path / "ca.pem"))
        assert tokens._issued(url, {})[0] == SECRET
        with pytest.raises(ServerError, match="--keystone has to have its name"):
            tokens._issued(url.replace("127.0.0.1", "localhost"), {})
        environ(url, insecure="true")
        assert tokens._issued(url, {})[0] == SECRET


def test_https_where_there_is_no_tls() -> None:
    server = SimpleNamespace(_credentials=SimpleNamespace(url="https://k:5000/v3"), _timeout=1)
    for error in (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), ssl.SSLEOFError(8, "EOF")):
        said = str(_Server._failed(server, error))  # type: ignore[arg-type]
        assert said.startswith("https://k:5000/v3: no TLS: ")
        assert said.endswith("; is it http:// there?")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"auth_url": "keystone:5000"}, "OS_AUTH_URL = keystone:5000: must be as https://"),
        ({"auth_url": "http://joe:geheim@host"}, "OS_AUTH_URL = …: must be"),
        ({"auth_url": "http://host:x"}, "OS_AUTH_URL"),
        ({"username": ""}, "OS_USERNAME = (not set)"),
        ({"password": ""}, "OS_PASSWORD = (not set)"),
        ({"application_credential_id": "a"}, "OS_APPLICATION_CREDENTIAL_SECRET = (not set)"),
    ],
)
def test_variables_that_cannot_be_used(
    values: dict[str, str],
    words: str,
    environ: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ("http://127.0.0.1:1", **values)
    status, _, err = run(capsys)
    assert status == 2
    assert words in err
    assert "geheim" not in err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"application_credential_id": "a", "application_credential_secret": "s"},
            {
                "identity": {
                    "methods": ["application_credential"],
                    "application_credential": {"id": "a", "secret": "s"},
                }
            },
        ),
        ({"user_id": "u", "system_scope": "all"}, {"scope": {"system": {"all": True}}}),
        ({"user_id": "u", "project_id": "p"}, {"scope": {"project": {"id": "p"}}}),
        ({"user_id": "u", "domain_name": "d"}, {"scope": {"domain": {"name": "d"}}}),
    ],
)
def test_other_ways_to_log_in(values: dict[str, str], expected: dict[str, Any]) -> None:
    found = credentials.login({"password": "p", **values}, "{}")
    assert {name: found[name] for name in expected} == expected
    assert "credential" in str(found) or found["identity"]["password"]["user"] == {
        "id": "u", "password": "p",
    }  # fmt: skip


def test_a_cloud_of_clouds_yaml(
    environ: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("openstack")
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(tmp_path / "clouds.yaml"))
    keystone = Keystone()
    with keystone.serving() as url:
        (tmp_path / "clouds.yaml").write_text(
            "clouds:\n  here:\n    auth:\n"
            f"      auth_url: {url}\n      username: jim\n      password: {SECRET}\n"
            "      project_name: one\n"
        )
        assert run(capsys, "--os-cloud", "here")[0] == 0
        assert keystone.bodies[0]["auth"]["identity"]["password"]["user"]["name"] == "jim"
        monkeypatch.setenv("OS_CLOUD", "here")
        assert run(capsys)[0] == 0
    status, _, err = run(capsys, "--os-cloud", "there")
    assert status == 2
    assert "--os-cloud = there" in err


def test_without_openstacksdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openstack.config", None)
    with pytest.raises(MissingPartError, match="pip install openstacksdk"):
        credentials.of_cloud("here")


def test_nothing_secret_is_in_a_repr(environ: Callable[..., None]) -> None:
    environ("http://host:5000")
    assert repr(credentials.of_environment()) == "<Credentials for http://host:5000/v3>"
    with pytest.raises(OptionError):
        credentials.login({"username": "joe"}, "OS_{}")


def test_phases_and_what_the_server_says_of_itself() -> None:
    keystone = Keystone()
    keystone.headers = {
        "Server-Timing": 'db;dur=53.2, app;desc="a, b";dur=7, cache, evil\x7f;dur=1, x;dur=',
        "x-openstack-request-id": "req-0123abcd",
    }
    with keystone.serving() as url:
        auth = credentials.login({"username": "joe", "password": SECRET}, "{}")
        report = check(credentials.Credentials(f"{url}/v3", auth))
    assert list(report.phases) == ["login", "first_validation", "repeated_validation"]
    assert list(report.phases["login"]) == ["name lookup", "TCP", "first byte", "the rest"]
    for step, phases in report.phases.items():
        # The way to the server is a part of a login, and of the connection that is its own.
        assert sum(phases.values()) <= report.milliseconds[step] + report.milliseconds["connection"]
    assert report.timings["login"]["db"] == 53.2
    assert set(report.timings["login"]) <= {"db", "app"}
    assert report.request_ids["login"] == "req-0123abcd"
    assert report.waits_for == ""


def test_a_servers_word_of_itself_is_read_in_no_time_however_long_it_is() -> None:
    keystone = Keystone()
    keystone.headers = {"Server-Timing": "a;" * 30_000}
    with keystone.serving() as url:
        auth = credentials.login({"username": "joe", "password": SECRET}, "{}")
        report = check(credentials.Credentials(f"{url}/v3", auth))
    assert list(report.phases) == ["login", "first_validation", "repeated_validation"]
    assert report.timings == {}

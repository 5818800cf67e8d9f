"""``keyfront bench cloud`` against servers that answer like Keystone, or do not."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.load import cloud_users
from keyfront.cli import main as cli

SECRET = "the password of who asks"
OWN = "the password of a user who is there"
FEW = ("--users", "3", "--services", "2", "--rounds", "1")


class Keystone:
    """Answers what the mix and the making of its users ask, and can be told to fail.

    :ivar broken: by method and path (a pattern), what is answered instead: a status, or what is
        called with the content before the answer and may return one
    :ivar connection: of the thread that answers: how many requests came over its connection
    """

    def __init__(self) -> None:
        self.domains: dict[str, dict[str, Any]] = {}
        self.users: dict[str, dict[str, Any]] = {}
        self.projects: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, str] = {}
        self.roles = ["admin", "member", "service"]
        self.grants: set[tuple[str, str, str]] = set()
        self.asked: Counter[str] = Counter()
        self.secrets = {SECRET, OWN}
        self.broken: dict[str, int | Callable[[Any], int | None]] = {}
        self.lock = threading.Lock()
        self.connection = threading.local()
        self.url = ""

    @contextmanager
    def serving(self, context: ssl.SSLContext | None = None) -> Iterator[Keystone]:
        keystone = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # head and body at once: nobody waits for Nagle's algorithm
            wbufsize = -1

            def handle_one(self) -> None:
                keystone.connection.requests = getattr(keystone.connection, "requests", 0) + 1
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or "{}")
                status, token, content = keystone.answer(
                    self.command, self.path.removeprefix("/v3"), self.headers, body
                )
                if not status:
                    self.close_connection = True
                    return
                text = json.dumps(content).encode() if status != 204 else b""
                self.send_response(status)
                if token:
                    self.send_header("X-Subject-Token", token)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.server_port}/v3"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(
        self, method: str, path: str, headers: Any, body: Any
    ) -> tuple[int, str, dict[str, Any]]:
        with self.lock:
            what = f"{method} {re.sub('[0-9a-f]{32}', 'ID', path)}"
            self.asked[what] += 1
            for pattern, instead in self.broken.items():
                if re.fullmatch(pattern, what):
                    status = instead if isinstance(instead, int) else instead(body)
                    if status is not None:
                        return status, "", {}
            return self.right(method, path, headers, body)

    def right(
        self, method: str, path: str, headers: Any, body: Any
    ) -> tuple[int, str, dict[str, Any]]:
        if path == "/auth/tokens":
            return self.issue(body["auth"]) if method == "POST" else self.validate(headers)
        if self.tokens.get(headers["X-Auth-Token"], "") == "":
            return 401, "", {}
        path, _, query = path.partition("?")
        if path == "/roles":
            return 200, "", {"roles": [{"name": one, "id": f"id-of-{one}"} for one in self.roles]}
        if path == "/auth/projects":
            return 200, "", {"projects": [{"id": "first"}, {"id": "second"}]}
        _, kind, *rest = path.split("/")
        stored = {"domains": self.domains, "users": self.users, "projects": self.projects}[kind]
        if method == "GET":
            wanted = query.removeprefix("name=")
            return 200, "", {kind: [one for one in stored.values() if one["name"] == wanted]}
        if method == "POST":
            one = {**body[kind[:-1]], "id": uuid.uuid4().hex}
            stored[one["id"]] = one
            self.secrets.add(one.get("password", SECRET))
            return 201, "", {kind[:-1]: one}
        if method == "PUT":
            self.grants.add((rest[0], rest[2], rest[4]))
            return 204, "", {}
        if method == "PATCH":
            stored[rest[0]].update(body["domain"])
            return 200, "", {}
        if stored[rest[0]].get("enabled", True):
            return 403, "", {}
        del stored[rest[0]]
        for others in (self.users, self.projects):
            for one in [x for x in others.values() if x["domain_id"] == rest[0]]:
                del others[one["id"]]
        return 204, "", {}

    def issue(self, auth: Any) -> tuple[int, str, dict[str, Any]]:
        identity = auth["identity"]
        if identity["methods"] == ["token"]:
            user = self.tokens[identity["token"]["id"]]
        else:
            given = identity["password"]["user"]
            user = given.get("id") or given["name"]
            known = self.users.get(user, {}).get("password") or {"admin": SECRET}.get(user, OWN)
            if given["password"] != known:
                return 401, "", {}
        token = f"token {uuid.uuid4().hex}"
        self.tokens[token] = user
        self.secrets.add(token)
        project = auth["scope"]["project"].get("id", "first")
        return 201, token, {"token": {"project": {"id": project}}}

    def validate(self, headers: Any) -> tuple[int, str, dict[str, Any]]:
        caller = self.tokens.get(headers["X-Auth-Token"], "")
        roles = {role for _, user, role in self.grants if user == caller}
        if caller in self.users and "id-of-service" not in roles:
            return 403, "", {}
        return 200, "", {"token": {"roles": [{"name": "member"}]}}


@pytest.fixture
def keystone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Keystone]:
    with Keystone().serving() as served:
        environ(monkeypatch, tmp_path, served.url)
        yield served


def environ(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> None:
    for name in [name for name in os.environ if name.startswith("OS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AUTH_URL", url), ("USERNAME", "admin"), ("PASSWORD", SECRET), ("PROJECT_NAME", "admin"),
    ):  # fmt: skip
        monkeypatch.setenv(f"OS_{name}", value)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cloud_users, "_PATIENCE", 0.0)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command: its status, and what it printed."""

    def run(keystone: Keystone, *words: str) -> tuple[int, str, str]:
        status = cli.main(["bench", "cloud", *words])
        said = capsys.readouterr()
        files = "".join(path.read_text() for path in Path("bench-results").glob("*"))
        for secret in keystone.secrets:
            assert secret not in said.out + said.err + files
        return status, said.out, said.err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_the_mix(keystone: Keystone, run: Run) -> None:
    status, out, err = run(keystone, *FEW)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    result = results.read(Path("bench-results/comparison-cloud.json"))
    # of 3 users 2 services validate 3 tokens and then 3 others
    assert {one["phase"]: one["good"] for one in result.samples} == {
        "logins": 3, "first": 12, "repeated": 18, "re-scopes": 3,
    }  # fmt: skip
    assert [row[0:2] for row in result.tables[0].rows][-1] == ["the whole mix", 36]
    assert not any(one["failures"] for one in result.samples)
    assert not (keystone.domains or keystone.users or keystone.projects)
    assert "what was made is removed" in err
    # who makes and removes; each logs in once; alone; two rounds
    assert keystone.asked["POST /auth/tokens"] == 2 + 5 + 3 * 2 + 2 * (2 + 3 + 3)
    assert {role for *_, role in keystone.grants} == {"id-of-member", "id-of-service"}


def test_for_programs(keystone: Keystone, run: Run) -> None:
    status, out, _ = run(keystone, *FEW, "--json", "--name", "ours")
    found = json.loads(out)
    assert (status, found["schema"], found["name"]) == (0, results.SCHEMA, "ours")
    assert found["conditions"]["users"] == 3
    assert keystone.url not in out


def test_over_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with Keystone().serving(context) as keystone:
        environ(monkeypatch, tmp_path, keystone.url)
        status, _, err = run(keystone, *FEW)
        assert status == 2
        assert "its certificate is refused" in err and "OS_CACERT" in err
        monkeypatch.setenv("OS_CACERT", str(tmp_path / "ca.pem"))
        status, _, err = run(keystone, *FEW)
        assert (status, keystone.domains) == (0, {}), err


def test_what_fails_is_told(keystone: Keystone, run: Run) -> None:
    failures = iter([503, 0, 503])

    def fail(body: Any) -> int | None:
        # beyond the round that is not counted, and where a connection is kept, so that the one
        # that is lost is
        if keystone.asked["GET /auth/tokens"] <= 40 or keystone.connection.requests < 2:
            return None
        return next(failures, None)

    keystone.broken["GET /auth/tokens"] = fail
    status, out, _ = run(keystone, *FEW)
    result = results.read(Path("bench-results/comparison-cloud.json"))
    failed = result.table("failures")
    assert status == 1 and failed is not None
    # a connection that was kept is made anew, so the one that was lost was answered
    assert [row[1:] for row in failed.rows] == [["status 503", 2]]
    assert "status 503" in out
    assert not keystone.domains


@pytest.mark.parametrize(
    ("broken", "answer", "said"),
    [
        ("POST /auth/tokens", 401, "is the password right"),
        ("POST /domains", 403, "--users-file"),
        ("GET /roles", 403, "--users-file"),
        ("POST /users", 409, "a user was not made, Keystone answers 409"),
        ("GET /auth/tokens", 403, "--service-role"),
        ("GET /auth/tokens", 500, "status 500"),
    ],
)
def test_what_ends_it(
    keystone: Keystone, run: Run, broken: str, answer: int, said: str
) -> None:
    keystone.broken[broken] = answer
    status, out, err = run(keystone, *FEW)
    assert (status, out) == (2, "")
    assert said in err and "not removed" not in err
    assert not (keystone.domains or keystone.users)


def test_who_may_nothing_has_nothing_to_remove(keystone: Keystone, run: Run) -> None:
    keystone.broken[".*(domains|roles).*"] = 403
    status, _, err = run(keystone, *FEW)
    assert status == 2 and "--users-file" in err and "not removed" not in err
    del keystone.broken[".*(domains|roles).*"]
    keystone.broken[".*domains.*"] = 403
    status, _, err = run(keystone, *FEW)
    assert status == 2 and "--users-file" in err and "not removed" not in err


def test_what_was_made_unheard_is_removed(keystone: Keystone, run: Run) -> None:
    def make(body: Any) -> int:
        keystone.domains["d"] = {**body["domain"], "id": "d"}
        return 0

    keystone.broken["POST /domains"] = make
    status, _, err = run(keystone, *FEW)
    assert status == 2 and "a domain was not made: no answer" in err
    assert keystone.asked["DELETE /domains/d"] == 1 and not keystone.domains


def test_a_lost_server(keystone: Keystone, run: Run) -> None:
    def lose(body: Any) -> int | None:
        if keystone.asked["GET /auth/tokens"] < 30:
            return None
        keystone.broken[".*"] = 0
        return 0

    keystone.broken["GET /auth/tokens"] = lose
    status, out, err = run(keystone, *FEW, "--users", "9")
    assert (status, out) == (2, "")
    assert "8 requests in a row had no answer: no answer: connection lost" in err
    (domain,) = keystone.domains.values()
    assert f"openstack domain set --disable {domain['name']}" in err


def test_what_is_not_removed_is_an_error(keystone: Keystone, run: Run) -> None:
    keystone.broken["DELETE .*"] = 500
    status, _, err = run(keystone, *FEW)
    (domain,) = keystone.domains.values()
    assert status == 2
    assert f"openstack domain delete {domain['name']}" in err and "Keystone answers 500" in err


def test_an_interruption(keystone: Keystone, run: Run) -> None:
    # On a busy machine the main thread hears of a signal only after others had many turns: nobody
    # is answered until it has.
    interrupted = threading.Event()

    def heard(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def interrupt(body: Any) -> None:
        # Several ask at once: a number may be passed over.
        if keystone.asked["GET /auth/tokens"] >= 30 and not interrupted.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(60)

    keystone.broken["GET /auth/tokens"] = interrupt
    former = signal.signal(signal.SIGINT, heard)
    try:
        status, out, _ = run(keystone, "--users", "5", "--rounds", "1000")
    finally:
        signal.signal(signal.SIGINT, former)
    assert (status, out) == (130, "")
    assert not (keystone.domains or keystone.users)
    assert keystone.asked["GET /auth/tokens"] < 200


def users_file(path: Path, content: object, mode: int = 0o600) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


def test_users_who_are_there(keystone: Keystone, run: Run, tmp_path: Path) -> None:
    user = {"password": OWN, "project_name": "p"}
    content = {"users": [{"username": name, **user} for name in ("joe", "ann")]}
    keystone.broken["POST /domains"] = 403
    path = users_file(tmp_path / "users.json", content)
    status, _, err = run(keystone, "--users-file", str(path), "--rounds", "1", "--services", "3")
    assert status == 0, err
    result = results.read(Path("bench-results/comparison-cloud.json"))
    counts = {one["phase"]: one["good"] for one in result.samples}
    assert counts == {"logins": 2, "first": 12, "repeated": 18, "re-scopes": 2}
    assert keystone.asked["POST /domains"] == 0
    assert keystone.asked["GET /auth/projects"] == 2

    users_file(path, {**content, "services": [{"user_id": "nova", **user}]})
    assert run(keystone, "--users-file", str(path), "--rounds", "1")[0] == 0
    result = results.read(Path("bench-results/comparison-cloud.json"))
    assert {one["phase"]: one["good"] for one in result.samples}["first"] == 4


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ({"users": [{"username": "joe", "password": OWN}]}, 0o644, "chmod 600"),
        (f'{{"users":\n [{{"password": "{OWN}" oops', 0o600, "must be JSON (line 2)"),
        ({"users": []}, 0o600, "must be an object"),
        ({"users": [{"username": "joe"}], "user": []}, 0o600, "must be an object"),
        ({"users": [{"username": "joe", "password": 7}]}, 0o600, "must be an object"),
        ({"users": [{"username": "joe", "project_name": OWN}]}, 0o600, "users[0]: must be with"),
        ([OWN], 0o600, "must be an object"),
    ],
)  # fmt: skip
def test_a_file_of_users_that_cannot_be_used(
    keystone: Keystone, run: Run, tmp_path: Path, content: object, mode: int, said: str
) -> None:
    path = users_file(tmp_path / "users.json", content, mode)
    status, _, err = run(keystone, "--users-file", str(path))
    assert status == 2
    assert str(path) in err.replace("\n", "") and said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--users", "0"), "--users = 0: must be a whole number, 1 to 1000"),
        (("--clients", "many"), "--clients = many"),
        (("--changes", "10"), "--changes = 10: must be used with --side-by-side"),
        (("--side-by-side", "--os-cloud", "x"), "--os-cloud = x: must be used without"),
        (("--side-by-side", "--changes", "2000"), "--changes = 2000: must be a number, 0 to 1000"),
        (("--database", "mariadb"), "--database = mariadb: must be used with --side-by-side"),
        (("--side-by-side", "--database", "oracle"), "must be one of sqlite, mariadb"),
        (("--side-by-side", "--database-delay", "1"), "must be used with --database mariadb"),
        (("--users-file", "/nowhere"), "a file that can be read"),
    ],
)
def test_bad_input(keystone: Keystone, run: Run, words: tuple[str, ...], said: str) -> None:
    status, out, err = run(keystone, *words)
    assert (status, out) == (2, "")
    assert said in err
    assert keystone.asked.total() == 0

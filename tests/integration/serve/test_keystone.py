"""``keyfront serve`` with Keystone in each line-up: tokens, kept connections, state that stays.

Nothing here goes by a clock, so these tests may run beside others; ``test_serve`` has the rest.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

import pytest
from keystoneauth1 import session
from keystoneauth1.identity import v3

from keyfront.middleware.tokens import tags_header
from support.keystones import keystone_state
from support.served import PATIENCE, SHAPES, Served, serve, wait_for

# The quick form finds what is lost once in some hundred; 20000 by environment, for releases.
REQUESTS = int(os.environ.get("KEYFRONT_TEST_REQUESTS", "1000"))
CONNECTIONS = 8
BODY_SIZES = (1, 10, 1000, 4096, 16384, 65536, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("server", SHAPES)
def test_serves_keystone(oddly_named_state: tuple[Path, int], server: str) -> None:
    state, port = oddly_named_state
    # No front here says when a request came, so it is late only where a client says so.
    environment = {"KEYFRONT_SLOW_REQUEST": "0.001", "KEYFRONT_QUEUE_TIMEOUT": "0.1"}
    # test_traces has several processes with greenlets
    alone = server == "gevent"
    with serve(state, server, port=port, environment=environment, alone=alone) as served:
        _come_late(served, _issue_and_validate(served))
        _see_where_the_time_went(served)
        _ask_by_head(served)
        _send_deep_bodies(served)
        _send_what_is_refused(served, server)
        command = [sys.executable, "-m", "keyfront", "check", "--state", str(state)]
        # A login on a busy machine may take longer than the seconds that are warned of.
        checked = subprocess.run([*command, "--warn", "3600"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "validation  ok" in checked.stdout
        failures, statuses = _hammer(served, REQUESTS)
        assert not failures
        assert sum(statuses.values()) == REQUESTS // CONNECTIONS * CONNECTIONS
        assert statuses.keys() <= {200, 400, 401, 404, 411}, statuses
        assert "HARAKIRI" not in (served.log("uwsgi.log") if server != "mod_wsgi" else "")
        output = served.stop(signal.SIGINT)
    assert served.process.returncode == 0
    assert b"Traceback" not in output
    secret = served.password
    assert secret.encode() not in output
    for log in (state / "log").iterdir():
        text = log.read_text(errors="replace")
        assert secret not in text, log
        # of Keystone's libraries, to nobody's use
        assert "ventlet is deprecated" not in text, log
        assert "Truncating password" not in text, log


def _see_where_the_time_went(served: Served) -> None:
    """Of the login and the first validation."""
    text = served.log("keystone.log")
    parts = r"queue \d+, directory 0 \(0\), statements \d+ \(([1-9]\d*)\), hash \d+ \((\d)\)"
    login = re.search(rf"slow request: POST /v3/auth/tokens 201 took \d+ ms: {parts}", text)
    assert login is not None and login[2] == "1", text[-2000:]
    asked = re.search(
        r"slow request: GET /v3/auth/tokens 200 took .*; cache (misses|known); req-[0-9a-f-]{36}\n",
        text,
    )
    assert asked is not None, text[-2000:]


def _ask_by_head(served: Served) -> None:
    """Keystone is asked by HEAD and answers as to GET, without a body."""
    subject, caller = (_issue_and_validate(served) for _ in range(2))

    def ask(method: str, about: str) -> tuple[int, dict[str, str], bytes]:
        lines = [
            f"{method} /v3/auth/tokens HTTP/1.1", "Host: localhost", "Connection: close",
            f"X-Auth-Token: {caller}", f"X-Subject-Token: {about}",
        ]  # fmt: skip
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode())
            head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
        status, *headers = head.decode().split("\r\n")
        return int(status.split()[1]), dict(x.lower().split(": ", 1) for x in headers), body

    def same(about: str) -> int:
        by_get, by_head = ask("GET", about), ask("HEAD", about)
        assert by_get[0] == by_head[0]
        assert by_get[2] and not by_head[2]
        for name in ("content-type", "x-subject-token"):
            assert by_get[1].get(name) == by_head[1].get(name), name
        return by_head[0]

    assert same(subject) == 200
    assert same(f"{subject[:-4]}AAAA") == 404
    connection = served.connect()
    connection.request(
        "DELETE", "/v3/auth/tokens", headers={"X-Auth-Token": caller, "X-Subject-Token": subject}
    )
    assert connection.getresponse().status == 204
    connection.close()
    assert same(subject) == 404
    assert "slow request: HEAD /v3/auth/tokens" in served.log("keystone.log")


def _come_late(served: Served, token: str) -> None:
    """What waited too long is refused, but for what the cache knows."""

    def ask(method: str, path: str) -> int:
        connection = served.connect()
        headers = {"X-Auth-Token": token, "X-Subject-Token": token, "X-Request-Start": "t=1"}
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        refused = answer.read()
        connection.close()
        if answer.status == 503:
            assert answer.headers["Retry-After"] == "1"
            assert b"waited too long" in refused
        return answer.status

    # A process begins to count with its first request.
    for request in (("POST", "/v3/auth/tokens"), ("GET", "/v3/users"), ("GET", "/v3/services")):
        wait_for(lambda request=request: ask(*request) == 503, f"{request} is refused")
        assert ask("GET", "/v3/auth/tokens") == 200


def _send_deep_bodies(served: Served) -> None:
    """Deeply nested JSON is refused in Keystone's form, and no parser sees it."""
    for body in (b"[" * 110_000, b'{"auth":' * 13_000, b"[" * 101):
        for headers in ({"Content-Type": "application/json"}, {}):
            connection = served.connect()
            connection.request("POST", "/v3/auth/tokens", body, headers)
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            connection.close()
            assert (answer.status, error["code"], error["title"]) == (400, 400, "Bad Request")
            assert answer.headers["Content-Type"] == "application/json"
            assert "nested deeper than 100 levels" in error["message"]


# Status of nginx; Apache and uWSGI have others for some, and answer some.
REFUSED = [
    (400, b"GARBAGE"),
    (400, b"GET /v3 HTTP/1.1\r\nHost: a\r\nHost: b"),
    (400, b"GET /v3 HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000),
    (404, b"GET /keyfront-refusal/400 HTTP/1.1\r\nHost: a"),
    (404, b"GET /nothing HTTP/1.1\r\nHost: a"),
    (405, b"TRACE /v3 HTTP/1.1\r\nHost: a"),
    (405, b"FOO /v3 HTTP/1.1\r\nHost: a"),
    (413, b"POST /v3 HTTP/1.1\r\nHost: a\r\nContent-Length: 11000000"),
    (414, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: a"),
    (501, b"POST /v3 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip"),
    (505, b"GET /v3 HTTP/9.9\r\nHost: a"),
]


def _send_what_is_refused(served: Served, server: str) -> None:
    """What does not get as far as Keystone is refused in Keystone's form as well."""
    for status, head in REFUSED:
        if status in (414, 505) and server in ("uwsgi", "gevent"):
            continue  # uWSGI alone closes, and answers in any version
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as client:
            client.sendall(head + b"\r\n\r\n")
            answer = HTTPResponse(client)
            answer.begin()
            assert answer.status == status or server != "nginx+uwsgi", head[:80]
            assert answer.headers["Content-Type"] == "application/json", (answer.status, head[:80])
            content = json.loads(answer.read())
            if answer.status >= 400:
                assert content["error"]["code"] == answer.status
            answer.close()


def _issue_and_validate(served: Served) -> str:
    """Return the token."""
    auth = v3.Password(
        auth_url=served.url,
        username="admin",
        password=served.password,
        project_name="admin",
        user_domain_id="default",
        project_domain_id="default",
    )
    client = session.Session(auth=auth)
    token = client.get_token()
    about = {"X-Subject-Token": token, tags_header.NAME: tags_header.ASK}

    def is_kept() -> bool:
        answer = client.get(f"{served.url}/auth/tokens", headers=about)
        assert answer.json()["token"]["user"]["name"] == "admin"
        return bool(answer.headers[tags_header.NAME] != tags_header.NONE)

    # In a new folder nothing is before the database has no transaction from before left.
    wait_for(is_kept, "the token cache keeps an answer")
    assert client.get_endpoint(service_type="identity") == served.url
    client.session.close()
    assert token is not None
    return token


def _hammer(served: Served, requests: int) -> tuple[Counter[str], Counter[int]]:
    """Requests from clients that keep their connections, many of them refused early."""
    failures: Counter[str] = Counter()
    statuses: Counter[int] = Counter()

    def client(seed: int) -> None:
        choose = random.Random(seed)
        connection = served.connect()
        for _ in range(requests // CONNECTIONS):
            try:
                _one_request(connection, choose)
                answer = connection.getresponse()
                answer.read()
                statuses[answer.status] += 1
            except (OSError, HTTPException) as error:
                failures[f"{type(error).__name__}: {error}"] += 1
                connection.close()
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for done in [pool.submit(client, seed) for seed in range(CONNECTIONS)]:
            done.result()
    return failures, statuses


def _one_request(connection: HTTPConnection, choose: random.Random) -> None:
    kind = choose.random()
    body = b"x" * choose.choice(BODY_SIZES)
    json_type = {"Content-Type": "application/json"}
    if kind < 0.5:
        connection.request("GET", "/v3")
    elif kind < 0.75:
        connection.request("POST", "/v3/users", body=body, headers=json_type)
    elif kind < 0.95:
        connection.request("POST", "/nothing/here", body=body)
    else:
        connection.request(
            "POST", "/v3/auth/tokens", body=iter([body]), headers=json_type, encode_chunked=True
        )


def test_second_run_goes_on_and_fresh_starts_over(tmp_path: Path) -> None:
    """Each at a port of its own. The first one ``keyfront serve`` has made, and a copy of it.

    That it makes one where there is nothing, and in which files, is in ``test_database``.
    """
    own = keystone_state(tmp_path / "own")
    passwords = [(own / "admin-password").read_text().strip()]
    kept = (
        "\n# of the operator\n[identity]\nmax_password_length = 71\n"
        "[keyfront_token_cache]\nttll = 3\n"
    )
    with (own / "keystone.conf").open("a") as file:
        file.write(kept)
    for arguments in ((), ("--fresh",)):
        with serve(own, "uwsgi", arguments=arguments) as served:
            again = not arguments
            assert (b"as it is" if again else b"administrator") in served.output
            assert (kept in (own / "keystone.conf").read_text()) is again
            passwords.append(served.password)
            for path in (own / "openrc", own / "clouds.yaml", own / "admin-password"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            _issue_and_validate(served)
            if again:
                warned = r"WARNING .* nothing reads ttll in \[keyfront_token_cache\] \(.*:\d+\), "
                assert re.search(warned + r"did you mean ttl\?", served.log("keystone.log"))
            connection = served.connect()
            connection.request("GET", "/v3", headers={"Host": "evil.example"})
            version = json.loads(connection.getresponse().read())["version"]
            connection.close()
            assert version["links"][0]["href"] == f"{served.url}/"
    assert passwords[0] == passwords[1] != passwords[2]

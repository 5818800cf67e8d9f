"""Rendered files, served by the real servers: Keystone behind each line-up, and what clients do.

All line-ups speak TLS with one self-signed pair, and are made for a machine whose queues are small,
so that a test can fill them. They run at once, from the first test to the last; HAProxy's nodes are
two of them. Every test comes from loopback addresses of its own: logins are limited by address.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from support import APPS
from support.deployments import MACHINE, Deployment, deployed, in_turn, observed, settled
from support.programs import own_folder
from support.served import PATIENCE, as_ordinary_user, wait_for

NODES = ("nginx+uwsgi", "nginx+uwsgi-tcp", "apache+uwsgi", "mod_wsgi")
LINE_UPS = (*NODES, "haproxy")
IN_JSON = ("nginx+uwsgi-tcp", "mod_wsgi", "haproxy")
# HAProxy comes to its nodes from here; nobody else does.
BALANCER = "127.0.0.1"
OUTSIDE = {
    "X-User-Id": "outsider", "X-Roles": "outsider", "X-Service-Roles": "outsider",
    "X-Identity-Status": "outsider", "OpenStack-System-Scope": "outsider", "OIDC-ISS": "outsider",
    "X_User_Name": "outsider", "Forwarded": "for=outsider", "X-Forwarded-For": "192.0.2.99",
    "X-Forwarded-Proto": "outsider", "X-Forwarded-Host": "outsider", "X-Forwarded-Port": "1",
    "X-Forwarded-Prefix": "/outsider", "X-Request-Start": "t=1", "Remote-User": "outsider",
}  # fmt: skip
LIMIT = 114688
# More than the four places of two processes with two threads, and than the queues behind them.
CLIENTS = 80
# Logins of one address at a time; it may have three a second.
FLOOD = 60
# Descriptors of the four places' database connections (SQLite's three files), opened when needed.
ROOM = 12


class Running:
    """The line-ups, and what must not be found in their logs."""

    def __init__(self, password: str) -> None:
        self.by_name: dict[str, Deployment] = {}
        self.password = password
        self.secrets = {password, "outsider"}
        self.descriptors: dict[str, int] = {}
        self.pids: dict[str, set[int]] = {}
        self.balancer = ExitStack()


@pytest.fixture(scope="module")
def running(keystone_state: tuple[Path, int]) -> Iterator[Running]:
    state, _ = keystone_state
    found = Running((state / "admin-password").read_text().strip())
    with ExitStack() as stack:
        for name in LINE_UPS:
            folder = stack.enter_context(own_folder("site"))
            folder.chmod(0o711)
            found.by_name[name] = (found.balancer if name == "haproxy" else stack).enter_context(
                deployed(
                    folder, name, config=state, target="observed_app:application",
                    pair=found.by_name[NODES[0]].folder if found.by_name else None,
                    json_logs=name in IN_JSON, trusted=(BALANCER,) if name != "haproxy" else (),
                    nodes=tuple(found.by_name[x] for x in ("nginx+uwsgi", "apache+uwsgi"))
                    if name == "haproxy" else (),
                    # a daemon for each core: each has the application for itself
                    machine=replace(MACHINE, memory=2**30) if name == "mod_wsgi" else MACHINE,
                    environment={
                        "OBSERVED_APP": f"config:{folder}/keystone.ini",
                        "OBSERVED_LOADS": f"{folder}/loads", "PYTHONPATH": str(APPS),
                    },
                )
            )
        stack.push(found.balancer)
        for deployment in found.by_name.values():
            deployment.wait()
        for name, deployment in found.by_name.items():
            token = _log_in(deployment, found, _address())
            assert _validate(deployment, token, _address()) == 200
            found.pids[name] = {process.pid for process in deployment.family()}
            found.descriptors[name] = deployment.descriptors()
        yield found


@pytest.fixture(params=LINE_UPS)
def site(request: pytest.FixtureRequest, running: Running) -> Deployment:
    return running.by_name[request.param]


def _address() -> str:
    """A loopback address that no other test has."""
    return "127." + ".".join(str(2 + secrets.randbelow(252)) for _ in range(3))


def _login(password: str, name: str = "admin") -> bytes:
    domain = {"id": "default"}
    user = {"name": name, "domain": domain, "password": password}
    return json.dumps(
        {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": {"name": "admin", "domain": domain}},
            }
        }
    ).encode()


def _log_in(site: Deployment, running: Running, source: str) -> str:
    connection = site.connect(source)
    answer, body = in_turn(
        connection, "POST", "/v3/auth/tokens", body=_login(running.password),
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    connection.close()
    assert answer.status == 201, (answer.status, body)
    token = answer.headers["X-Subject-Token"]
    running.secrets.add(token)
    return token


def _validate(site: Deployment, token: str, source: str) -> int:
    connection = site.connect(source)
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}
    answer, _ = in_turn(connection, "GET", "/v3/auth/tokens", headers=headers)
    connection.close()
    return answer.status


def test_issues_and_validates(site: Deployment, running: Running) -> None:
    source = _address()
    token = _log_in(site, running, source)
    assert _validate(site, token, source) == 200
    assert _validate(site, f"{token[:-4]}AAAA", source) in (401, 404)
    # a token of one line-up is every other one's
    for other in running.by_name.values():
        assert _validate(other, token, source) == 200


def test_head_comes_as_head(site: Deployment, running: Running) -> None:
    """Keystone asks for another right to check a token than to read it."""
    source = _address()
    token, gone = (_log_in(site, running, source) for _ in range(2))
    with closing(site.connect(source)) as connection:

        def ask(method: str, about: str, path: str = "/v3/auth/tokens") -> HTTPResponse:
            headers = {"X-Auth-Token": token, "X-Subject-Token": about}
            answer, body = in_turn(connection, method, path, headers=headers)
            assert bool(body) == (method == "GET")
            return answer

        observed_head = ask("HEAD", token, "/observed/environ")
        assert observed_head.headers["X-Observed-Method"] == "HEAD"
        assert ask("DELETE", gone).status == 204
        for about, status in ((token, 200), (gone, 404), (f"{token[:-4]}AAAA", 404)):
            by_get, by_head = ask("GET", about), ask("HEAD", about)
            assert by_get.status == by_head.status == status
            for name in ("Content-Type", "X-Subject-Token"):
                assert by_get.headers[name] == by_head.headers[name], name


def test_check_by_variables_and_tls(site: Deployment, running: Running) -> None:
    """As an operator's monitoring asks, and the token cache tells that it keeps the answer."""
    told = {
        "AUTH_URL": f"{site.url}/v3", "CACERT": str(site.certificate), "USERNAME": "admin",
        "PASSWORD": running.password, "PROJECT_NAME": "admin", "USER_DOMAIN_ID": "default",
        "PROJECT_DOMAIN_ID": "default",
    }  # fmt: skip
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
    # A busy machine may take longer than what is warned of.
    checked = subprocess.run(
        [sys.executable, "-m", "keyfront", "check", "--json", "--warn", "3600"],
        env={**ours, **{f"OS_{name}": value for name, value in told.items()}},
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = json.loads(checked.stdout)
    assert (found["status"], found["cache"], found["tls"]) == ("ok", "keyfront", "TLSv1.3")
    assert found["project"] == "admin"
    assert running.password not in checked.stdout + checked.stderr


def test_says_who_comes(site: Deployment) -> None:
    """What only a server in front may say is its own word, whatever a client sends."""
    source = _address()
    connection = site.connect(source)
    seen = observed(connection, headers=OUTSIDE)["environ"]
    connection.close()
    assert isinstance(seen, dict)
    assert seen["HTTP_X_FORWARDED_FOR"] == source
    assert seen["HTTP_X_FORWARDED_PROTO"] == "https"
    assert not [name for name, value in seen.items() if "outsider" in value]
    assert seen.get("HTTP_X_FORWARDED_PORT", "") == ""
    assert seen["HTTP_X_REQUEST_START"] != "t=1"


def test_serves_no_other_host(site: Deployment) -> None:
    """Whose name would come back in links, and from a cache to somebody else."""
    connection = site.connect(_address())
    for host, status in (
        ("evil.example", 421), ("localhost.evil.example", 421), ("evil.example:5000", 421),
        ("evil-localhost", 421), ("localhost", 300), ("LOCALHOST:1234", 300),
    ):  # fmt: skip
        for path in ("/", "/observed/environ"):
            answer, body = in_turn(connection, "GET", path, headers={"Host": host})
            served = 200 if path.startswith("/observed") else 300
            assert answer.status == (421 if status == 421 else served), (host, path, body)
            assert answer.headers["Content-Type"].startswith("application/json")
            assert b"evil" not in body
            if answer.status == 421:
                assert json.loads(body)["error"]["code"] == 421
                assert answer.headers["Strict-Transport-Security"]
            elif path == "/":
                (link,) = json.loads(body)["versions"]["values"][0]["links"]
                assert link["href"].lower().startswith("https://localhost"), link
    answer, _ = in_turn(connection, "GET", "/healthcheck", headers={"Host": "192.0.2.1"})
    assert answer.status == 200, "a check by address"
    connection.close()
    answer = b"its turn"
    while b"its turn" in answer:  # as in_turn() has it
        with site.raw(_address()) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = _read(client)
    # Apache wants one from who has named one to TLS.
    assert answer.split(b" ", 2)[1] in (b"300", b"400"), answer


def test_tells_whether_it_is_ready(site: Deployment) -> None:
    """Of Keystone's parts, those that there are; through every line-up."""
    connection = site.connect(_address())
    answers: list[tuple[int, dict[str, Any]]] = []

    def ready(path: str) -> bool:
        answer, body = in_turn(connection, "GET", path)
        answers.append((answer.status, json.loads(body)))
        return answer.status == 200

    assert ready("/livez"), answers
    # on a busy machine a part may not answer in its time
    wait_for(lambda: ready("/readyz"), "it is ready", answers)
    told = answers[-1][1]
    if "parts" in told:
        assert all(part["ok"] for part in told["parts"].values()), told
        assert {"database", "keys"} <= told["parts"].keys()
    connection.close()


def test_is_not_ready_without_keys(running: Running, keystone_state: tuple[Path, int]) -> None:
    site = running.by_name["nginx+uwsgi"]
    (keys,) = [path for path in keystone_state[0].rglob("fernet*") if path.is_dir()]
    away = keys.with_name("away")
    told: list[tuple[int, dict[str, object]]] = []

    def missing() -> set[str]:
        """The parts that are not there; a busy machine adds what did not answer in its time."""
        connection = site.connect()
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        told.append((answer.status, content))
        found = {name for name, part in content["parts"].items() if not part["ok"]}
        assert answer.status == (503 if found else 200), told[-1]
        return found

    keys.rename(away)
    try:
        # Of two workers one may have looked a moment before the other.
        wait_for(lambda: missing() == {"keys"}, "the keys alone are missing", told)
    finally:
        away.rename(keys)
    wait_for(lambda: missing() == set(), "it is ready again", told)
    # What comes next goes through HAProxy, too, which asks the same.
    wait_for(lambda: _nodes(running) == ["UP", "UP"], "both nodes are up")


def test_takes_bodies_up_to_the_limit(site: Deployment) -> None:
    connection = site.connect(_address())
    for size in (100_000, LIMIT):
        assert observed(connection, "POST", body=b"x" * size)["body"] == size
    for size in (LIMIT + 1, 3_000_000):
        connection.close()
        connection.request("POST", "/observed/environ", body=b"x" * size)
        answer = connection.getresponse()
        assert answer.status == 413
        assert answer.headers["Content-Type"] == "application/json"
        assert json.loads(answer.read())["error"]["code"] == 413
    connection.close()


# What a server cannot read, or knows no way to serve: the status that each answers at once, and
# what else may be right, since servers differ.
HOST = b" HTTP/1.1\r\nHost: localhost"
REFUSED = [
    ((400,), b"GARBAGE"),
    ((404,), b"GET /keyfront-refusal/400" + HOST),
    ((404,), b"GET /nothing/here" + HOST),
    ((405,), b"TRACE /v3" + HOST),
    ((400, 414, 431), b"GET /" + b"x" * 80_000 + HOST),
    ((400, 411, 501), b"POST /v3" + HOST + b"\r\nTransfer-Encoding: gzip"),
    ((200, 300, 400, 505), b"GET /v3 HTTP/9.9\r\nHost: localhost"),
]


def test_refuses_by_itself_in_the_form_of_keystone(site: Deployment, running: Running) -> None:
    """It does not get as far as Keystone."""
    for statuses, head in REFUSED:
        with site.raw(_address()) as client:
            client.sendall(head + b"\r\n\r\n")
            answer = HTTPResponse(client)
            answer.begin()
            assert answer.status in statuses, (answer.status, head[:80])
            _assert_form(answer, site is running.by_name["haproxy"])
            answer.close()


def _assert_form(answer: HTTPResponse, haproxy: bool) -> None:
    """An answer's body is JSON that says its status; HAProxy's 400 is what it was compiled with."""
    text = answer.read()
    if answer.status == 400 and haproxy and text.startswith(b"<html><body><h1>400 Bad request"):
        return  # mux_h1.c, h1_send_error: no errorfile is asked
    assert answer.headers["Content-Type"] == "application/json", (answer.status, text[:80])
    content = json.loads(text)
    if answer.status >= 400:
        assert content["error"]["code"] == answer.status


def test_takes_headers_up_to_the_limit(site: Deployment, running: Running) -> None:
    """60 kB are a federation's; beyond the limit the server in front says so itself."""
    connection = site.connect(_address())
    seen = observed(connection, headers={"X-Claims": "c" * 60_000})["environ"]
    assert isinstance(seen, dict)
    assert len(seen["HTTP_X_CLAIMS"]) == 60_000
    connection.close()
    connection.request("GET", "/observed/environ", headers={"X-Claims": "c" * 80_000})
    answer = connection.getresponse()
    assert answer.status in (400, 431)
    _assert_form(answer, site is running.by_name["haproxy"])
    connection.close()


def test_waits_for_a_slow_body(site: Deployment) -> None:
    answer = b"its turn"
    while b"its turn" in answer:  # as in_turn() has it
        with site.raw(_address()) as connection:
            connection.sendall(
                b"POST /observed/environ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Length: 100000\r\n\r\n"
            )
            for _ in range(5):
                # slow is what it is about
                time.sleep(0.2)
                connection.sendall(b"x" * 20_000)
            answer = _read(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"body": 100000' in answer


def _read(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


def test_survives_clients_that_go(site: Deployment) -> None:
    """In the middle of a header, of a body and of an answer; more of them than there are places."""
    source = _address()
    head = b"POST /observed/sleep/0.05 HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Length: 100000\r\n\r\n"
    for sent in (head[:40], head + b"x" * 50_000, head + b"x" * 100_000):
        for _ in range(8):
            connection = site.raw(source)
            connection.sendall(sent)
            # a reset, as of a killed process
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    connection = site.connect(source)
    for _ in range(8):
        assert observed(connection)["body"] == 0
    connection.close()


@pytest.mark.parametrize("name", ("nginx+uwsgi", "nginx+uwsgi-tcp", "haproxy"))
def test_holds_back_a_flood_of_logins(name: str, running: Running) -> None:
    """Of one address; others log in, and the same address may do everything else."""
    site, source = running.by_name[name], _address()
    # SQLite, where failures of a user that exists are counted, takes one writer at a time
    body = _login("wrong " + secrets.token_hex(8), name="nobody")
    statuses: Counter[tuple[int, int]] = Counter()
    # All at once: were it for long, a busy machine would answer no more than are allowed in it.
    connected = threading.Barrier(FLOOD)

    def log_in(connection: HTTPConnection, spelling: int) -> int:
        # by another spelling of the path, too
        path = "/v3/auth/tokens" + "/" * spelling
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status == 429:
            assert int(answer.headers["Retry-After"]) > 0
            assert json.loads(text)["error"]["code"] == 429
        return answer.status

    def flood(number: int) -> None:
        connection = site.connect(source)
        connection.connect()
        connected.wait(PATIENCE)
        statuses[log_in(connection, number % 2), number % 2] += 1

    with ThreadPoolExecutor(FLOOD) as pool:
        list(pool.map(flood, range(FLOOD)))
    # on a busy machine one may have waited for longer than the second it is given
    assert {status for status, _ in statuses} <= {401, 429, 503}, statuses
    for spelling in (0, 1):
        assert statuses[429, spelling] > 10, statuses
    wait_for(lambda: log_in(site.connect(source), 0) == 401, "it may try again")
    connection = site.connect(source)
    observed(connection)
    connection.close()
    _log_in(site, running, _address())


def test_answers_or_refuses_under_overload(site: Deployment) -> None:
    """Four places and 80 clients: each is answered, or told when to come back."""
    outcomes: Counter[str] = Counter()
    here = threading.Barrier(CLIENTS)

    def client(number: int) -> None:
        try:
            connection = site.connect(f"127.3.{number}.1")
            here.wait(PATIENCE)
            # So long that there is a queue however slowly they come.
            connection.request("GET", "/observed/sleep/1")
            answer = connection.getresponse()
            answer.read()
            connection.close()
        except (OSError, HTTPException) as error:
            outcomes[repr(error)] += 1
            return
        outcome = str(answer.status)
        if answer.status == 503 and "Retry-After" not in answer.headers:
            outcome += " without Retry-After"
        outcomes[outcome] += 1

    def come() -> bool:
        outcomes.clear()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(1, CLIENTS + 1)))
        assert outcomes.total() == CLIENTS
        assert outcomes.keys() <= {"200", "503"}, outcomes
        assert outcomes["503"], outcomes
        return outcomes["200"] > 0

    # while the servers stand still for a second, all of those wait for too long
    wait_for(come, "some are answered")
    # and then all is well again
    connection = site.connect(_address())
    for _ in range(8):
        observed(connection)
    connection.close()


def test_speaks_modern_tls_only(site: Deployment) -> None:
    context = ssl.create_default_context(cafile=str(site.certificate))
    context.set_alpn_protocols(["h2", "http/1.1"])
    plain = socket.create_connection(("127.0.0.1", site.port), PATIENCE)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        assert connection.version() == "TLSv1.3"
        assert connection.selected_alpn_protocol() == "h2"
    context.set_alpn_protocols(["http/1.1"])
    # The groups of key exchange are those that are rendered, and no others.
    context.set_ecdh_curve("prime256v1")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection(("127.0.0.1", site.port), PATIENCE)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        assert connection.version() == "TLSv1.2"
        assert connection.cipher()[0].startswith("ECDHE-")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        other = ssl.create_default_context(cafile=str(site.certificate))
        other.minimum_version = other.maximum_version = version
        other.set_ecdh_curve("secp521r1")
        plain = socket.create_connection(("127.0.0.1", site.port), PATIENCE)
        with pytest.raises(OSError), other.wrap_socket(plain, server_hostname="localhost"):
            pass
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    plain = socket.create_connection(("127.0.0.1", site.port), PATIENCE)
    with pytest.raises(OSError), context.wrap_socket(plain, server_hostname="localhost"):
        pass
    connection = site.connect(_address())
    answer, _ = in_turn(connection, "GET", "/observed/environ")
    assert answer.headers["Strict-Transport-Security"] == "max-age=300"
    connection.close()


def test_balancer_sees_its_nodes(running: Running) -> None:
    wait_for(lambda: _nodes(running) == ["UP", "UP"], "both nodes are up")


def _nodes(running: Running) -> list[str]:
    """What HAProxy says of each of its nodes."""
    path = running.by_name["haproxy"].folder / "run" / "keyfront-haproxy.sock"
    lines = _told(path, "show stat").splitlines()
    return [x.split(",")[17] for x in lines if x.startswith("keyfront_nodes,node")]


def test_shuts_the_socket_to_others(running: Running) -> None:
    """Who can speak to uWSGI can run code as its user."""
    path = running.by_name["nginx+uwsgi"].folder / "run" / "app" / "uwsgi.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_statistics_show_no_request(running: Running) -> None:
    """Those of a core would be the headers of the request that it runs."""
    site = running.by_name["nginx+uwsgi"]
    _validate(site, _log_in(site, running, _address()), _address())
    path = site.folder / "run" / "app" / "stats.sock"
    assert not stat.S_IMODE(path.stat().st_mode) & 0o007
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        told = _read(client).decode()
    assert sum(worker["requests"] for worker in json.loads(told)["workers"]) > 0
    assert not [worker for worker in json.loads(told)["workers"] if worker.get("cores")]
    assert not [x for x in running.secrets if x in told]


@pytest.fixture
def small() -> Iterator[tuple[Deployment, dict[str, str]]]:
    """A mod_wsgi whose application loads in no time, and its environment."""
    with own_folder("site") as folder:
        folder.chmod(0o711)
        environment = {
            "OBSERVED_APP": "raising_app:application", "OBSERVED_LOADS": f"{folder}/loads",
            "PYTHONPATH": str(APPS),
        }
        with deployed(
            folder, "mod_wsgi", target="observed_app:application", environment=environment,
            machine=replace(MACHINE, memory=2**30),
        ) as site:
            site.wait()
            yield site, environment


def _wait_for_all(site: Deployment, processes: int) -> None:
    """One answers as soon as it can; what another loads then is not of the reload."""
    loaded: set[object] = set()

    def all_have_loaded() -> bool:
        with closing(site.connect(_address())) as connection:
            loaded.add(observed(connection)["pid"])
        return len(loaded) == processes

    wait_for(all_have_loaded, "each of them has answered")


def test_a_reload_of_mod_wsgi_keeps_nobody_waiting(
    small: tuple[Deployment, dict[str, str]]
) -> None:
    """Everybody is answered during each of the loads that it consists of, however long it takes."""
    site, environment = small
    processes = int(site.plan["mod_wsgi.processes"].value)
    assert processes > 1
    _wait_for_all(site, processes)
    descriptors = site.descriptors()
    loads = site.folder / "loads"
    loads.mkdir()
    reloading = subprocess.Popen(
        [
            *as_ordinary_user(), sys.executable, "-m", "keyfront", "reload",
            str(site.folder / "apache.conf"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )  # fmt: skip
    answers = [0] * 4
    over = threading.Event()

    def ask(number: int) -> None:
        source = _address()
        while not over.wait(0.05):  # the loads are to get on
            connection = site.connect(source)
            observed(connection)
            connection.close()
            answers[number] += 1

    held: set[str] = set()
    with ThreadPoolExecutor(len(answers)) as pool:
        clients = [pool.submit(ask, number) for number in range(len(answers))]

        def failed() -> bool:
            return any(client.done() for client in clients)

        def begun() -> set[str]:
            return {path.name for path in loads.iterdir() if path.name.isdigit()} - held

        try:
            while not failed():
                wait_for(lambda: begun() or reloading.poll() is not None, "it goes on")
                if not (new := begun()):
                    break
                before = list(answers)
                wait_for(
                    lambda before=before: failed() or all(
                        now > then + 5 for now, then in zip(answers, before, strict=True)
                    ),
                    "everybody is answered while one loads",
                )  # fmt: skip
                for name in new:
                    (loads / f"{name}.go").touch()
                held |= new
        finally:
            over.set()
            shutil.rmtree(loads)
        for client in clients:
            client.result()
    output, _ = reloading.communicate(timeout=PATIENCE)
    assert reloading.returncode == 0, output
    # a trial and each of the daemons
    assert len(held) == 1 + processes
    settled(site, descriptors + ROOM)
    assert not any("Traceback" in text for text in site.logs().values())


def test_two_reloads_of_mod_wsgi_go_one_after_the_other(
    small: tuple[Deployment, dict[str, str]]
) -> None:
    """Together they would end all daemons at once, and take each other's for their own."""
    site, environment = small
    processes = int(site.plan["mod_wsgi.processes"].value)
    _wait_for_all(site, processes)
    pid_file = next(site.folder.rglob("*apache.pid"))
    loads = site.folder / "loads"
    loads.mkdir()
    reloads: list[subprocess.Popen[str]] = []
    held: set[str] = set()

    def begun() -> set[str]:
        return {path.name for path in loads.iterdir() if path.name.isdigit()} - held

    def waits(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            opened = Path(f"/proc/{pid}/fd").iterdir()
            return any(os.path.samefile(x, pid_file) for x in opened if x.exists())
        return False

    try:
        for _ in range(2):
            reloads.append(
                subprocess.Popen(
                    [
                        *as_ordinary_user(), sys.executable, "-m", "keyfront", "reload",
                        str(site.folder / "apache.conf"),
                    ],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**os.environ, **environment},
                )
            )
            wait_for(lambda: waits(reloads[-1].pid), "it comes to the lock")
            wait_for(begun, "the first one tries the application")
        while any(one.poll() is None for one in reloads):
            wait_for(
                lambda: begun() or all(one.poll() is not None for one in reloads), "they go on"
            )
            new = begun()
            assert len(new) <= 1, "two load at once"
            held |= new
            for name in new:
                (loads / f"{name}.go").touch()
    finally:
        shutil.rmtree(loads)
        told = [one.communicate(timeout=PATIENCE)[0] for one in reloads]
    assert [one.returncode for one in reloads] == [0, 0], told
    assert " s of another reload\n" in told[1] and "another" not in told[0]
    # of each a trial and each of the daemons
    assert len(held) == 2 * (1 + processes)


def test_leaves_nothing_behind(running: Running) -> None:
    """After all of the above: the same processes, no descriptor too many, no temporary file."""
    # its connections to nodes stay for a while; its clients must be gone
    balancer = running.by_name["haproxy"].folder / "run" / "keyfront-haproxy.sock"
    wait_for(lambda: "\nCurrConns: 0\n" in _told(balancer), "HAProxy has no client")
    running.balancer.close()
    for name in NODES:
        site = running.by_name[name]
        settled(site, running.descriptors[name] + ROOM)
        if name.startswith("nginx"):
            assert {process.pid for process in site.family()} == running.pids[name]
        wait_for(
            lambda site=site: not any(x.is_file() for x in (site.folder / "cache").rglob("*")),
            "no temporary file is left",
        )


def _told(path: Path, command: str = "show info") -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(f"{command}\n".encode())
        return _read(client).decode()


def test_logs_hold_no_secret(site: Deployment, running: Running) -> None:
    name = next(key for key, value in running.by_name.items() if value is site)
    logs = site.logs()
    for log, text in logs.items():
        assert "Traceback" not in text, log
    # a failure must not show them either
    leaks = [log for log, text in logs.items() if any(x in text for x in running.secrets)]
    assert not leaks
    if name in IN_JSON:
        text = logs["haproxy.out" if name == "haproxy" else "access.log"]
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert {"client", "method", "uri", "status", "request_id"} <= lines[-1].keys()
        assert any(line["request_id"].startswith("req-") for line in lines)

"""Keystone behind the token cache answers as Keystone alone does, to the last byte.

Three uWSGI servers on one Keystone: stock, and two workers with the cache, each a server of its
own so that a request can be sent to the one that has not seen it. They listen on unix sockets, on
which uWSGI says the same of its own address whichever server it is.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keyfront.common.file_lock import FileLock
from keyfront.errors import OptionError
from keyfront.gateway.error_body import plain_error_body
from keyfront.middleware.tokens.counters import Counters
from keyfront.middleware.tokens.routes import Routes
from support.keystone_world import World
from support.keystones import keystone_state
from support.request_mix import CONFIGURATION, ROUTES, TOKENS, Ask, Cached, People, ask, mix
from support.served import PATIENCE, free_port

pytest.importorskip("keystone")

UWSGI = Path(sys.executable).with_name("uwsgi")
STOCK = "keystone.wsgi.api:application"
# What uWSGI ends with when need-app finds none.
NO_APP = 22

_REQUEST_ID = re.compile(rb"^req-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


@dataclass(frozen=True)
class Answer:
    """All that a server sent, but for the request identifier's value."""

    status: bytes
    headers: tuple[bytes, ...]
    body: bytes
    #: None if the server did not send one.
    request_id: bytes | None

    @classmethod
    def of(cls, data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        request_id = None
        for place, line in enumerate(lines):
            name, _, value = line.partition(b": ")
            if name.lower() == b"x-openstack-request-id":
                assert request_id is None, lines
                assert _REQUEST_ID.match(value), line
                lines[place], request_id = name, value
            elif name.lower() == b"date":
                lines[place] = name
        return cls(status, tuple(lines), body, request_id)

    def in_json(self) -> Answer:
        """An error of flask or oslo.middleware in the form that keyfront gives it."""
        words = [x.lower() for x in self.headers]
        kinds = (b"content-type: text/html", b"content-type: text/plain")
        status = int(self.status.split()[1])
        if status < 400 or not any(x.startswith(kinds) for x in words):
            return self
        body = plain_error_body(status)
        own = {
            b"content-type": b"Content-Type: application/json",
            b"content-length": b"Content-Length: %d" % len(body),
        }
        headers = [own.get(x.partition(b":")[0].lower(), x) for x in self.headers]
        return Answer(self.status, tuple(headers), body if self.body else b"", self.request_id)

    def differs(self, other: Answer) -> str:
        """What is not the same; empty if all is."""
        found = ""
        for name in ("status", "headers", "body"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                found += f"\n  {name} is {others!r}\n  instead of {mine!r}"
        return found

    def masked(self, *secrets: str) -> Answer:
        """Without what two tokens of one person do not have in common."""
        text = self.body
        for pattern in (rb'"audit_ids": \[[^]]*\]', rb'"(issued|expires)_at": "[^"]*"'):
            text = re.sub(pattern, b"masked", text)
        headers = list(self.headers)
        for secret in secrets:
            text = text.replace(secret.encode(), b"token")
            headers = [x.replace(secret.encode(), b"token") for x in headers]
        # Tokens are about as long as each other, not exactly.
        headers = [x for x in headers if not x.lower().startswith(b"content-length")]
        return Answer(self.status, tuple(headers), text, self.request_id)


class Server:
    """One uWSGI process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, request: Ask) -> Answer:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(str(self.path))
            client.sendall(request.wire())
            data = b""
            while part := client.recv(1 << 20):
                data += part
        return Answer.of(data)


@contextmanager
def running(
    folder: Path, name: str, *, environment: dict[str, str], port: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """A uWSGI on ``name``.sock, not waited for."""
    sockets = [str(folder / f"{name}.sock"), *([f"127.0.0.1:{port}"] if port else [])]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                UWSGI, "--strict", "--need-app", "--single-interpreter", "--threads=2",
                "--buffer-size=65535", "--virtualenv", sys.prefix, "--die-on-term",
                "--module=keyfront.gateway.uwsgi:application",
                *(f"--http-socket={x}" for x in sockets),
            ],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("KEYFRONT_")},
                # The order of roles, which Keystone takes out of sets, is that of the hashes.
                "PYTHONHASHSEED": "0",
                **environment,
            },
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(folder: Path, name: str, process: subprocess.Popen[bytes]) -> Server:
    server = Server(folder / f"{name}.sock")
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            server.send(ask("ready", "/"))
        except OSError:
            time.sleep(0.05)
        else:
            return server
    raise AssertionError((folder / f"{name}.log").read_text(errors="replace"))


@dataclass
class Keystones:
    """Stock Keystone, two workers with the cache, and what was made in it."""

    stock: Server
    workers: tuple[Server, Server]
    people: People
    counters: Counters

    def counted(self) -> Counter[str]:
        return Counter(self.counters.statistics())


@pytest.fixture(scope="module")
def keystones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keystones]:
    state, shared, port = _state(tmp_path_factory.mktemp("differential"), ROUTES)
    where = {"OS_KEYSTONE_CONFIG_DIR": str(state)}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(running(state, name, environment=more, port=tcp))
            for name, more, tcp in (
                ("stock", {"KEYFRONT_APP": STOCK, **where}, port),
                ("one", where, 0),
                ("two", where, 0),
            )
        }
        stock, one, two = (_ready(state, name, x) for name, x in processes.items())
        # All is made by stock Keystone; the others have cached nothing yet.
        password = (state / "admin-password").read_text().strip()
        world = World(f"http://127.0.0.1:{port}/v3", password)
        people = People(world, state / "fernet-keys")
        counters = Counters(shared / "counters", FileLock(shared / "node-lock"))
        yield Keystones(stock, (one, two), people, counters)


def _state(folder: Path, routes: tuple[str, ...]) -> tuple[Path, Path, int]:
    """A Keystone, the folder of its cache, and a free port."""
    shared = folder / "shared"
    state = keystone_state(
        folder / "state",
        extra=f"{CONFIGURATION}\n[keyfront_token_cache]\npath = {shared}\n"
        # Nothing may end while it is compared.
        f"ttl = 3000\nnegative_ttl = 3000\nroutes = {','.join(routes)}\n",
    )
    return state, shared, free_port()


# What is counted when a request is sent to the first worker, to the other, and to both again. What
# is known of token and caller by then goes by the requests before.
_COUNTS = {
    Cached.KEPT: ["misses|known", "node_hits|known", "hits", "hits"],
    Cached.SHARED: ["hits", "hits", "hits", "hits"],
}


def _four_times(keystones: Keystones, request: Ask) -> tuple[list[Answer], list[str]]:
    """Send to each worker twice, and say how each was answered."""
    answers, ways = [], []
    for worker in keystones.workers * 2:
        before = keystones.counted()
        answers.append(worker.send(request))
        ways.append("+".join(sorted(keystones.counted() - before)))
    return answers, ways


def _faults(request: Ask, stock: Answer, given: list[Answer], ways: list[str]) -> Iterator[str]:
    differences = {way: stock.differs(x) for x, way in zip(given, ways, strict=True)}
    for way, difference in differences.items():
        if difference:
            yield f"{request.name}, {way}:{difference}"
    if request.cached is Cached.ANYHOW:
        return
    wanted = _COUNTS.get(request.cached)
    hit = any("hits" in way or "known" in way for way in ways)
    right = wanted is not None and all(
        way in one.split("|") for way, one in zip(ways, wanted, strict=True)
    )
    if hit if wanted is None else not right:
        yield f"{request.name}: counted {ways}, which is not {request.cached.name}"


@pytest.mark.slow
def test_every_answer_is_keystones(keystones: Keystones) -> None:
    """All of the mix: unknown to the node, known to it, known to the worker; then mixed up."""
    asks = mix(keystones.people)
    # One at a time: two threads of stock Keystone may take each other's token for the caller's.
    with ThreadPoolExecutor(1) as pool:
        future = pool.map(keystones.stock.send, asks)
        ours = [_four_times(keystones, request) for request in asks]
        stock = [answer.in_json() for answer in future]
    faults = [
        fault
        for request, expected, (given, ways) in zip(asks, stock, ours, strict=True)
        for fault in _faults(request, expected, given, ways)
    ]
    identifiers = [x.request_id for given, _ in ours for x in given]

    # Now that all is kept: callers beside and after each other, in any order, in both workers.
    again = [
        (worker, place) for worker in keystones.workers for place in range(len(asks))
        if asks[place].cached in _COUNTS
    ]
    random.Random(1).shuffle(again)
    before = keystones.counted()
    with ThreadPoolExecutor(4) as pool:
        mixed = list(pool.map(lambda x: x[0].send(asks[x[1]]), again))
    for (_, place), answer in zip(again, mixed, strict=True):
        if difference := stock[place].differs(answer):
            faults.append(f"{asks[place].name}, mixed up:{difference}")
        identifiers.append(answer.request_id)
    counted = keystones.counted() - before
    print(len(asks), "requests;", dict(keystones.counted()))

    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)
    assert counted == {"hits": len(again)}
    found = [x for x in identifiers if x is not None]
    assert len(found) == len(set(found)) > len(again)


@pytest.mark.slow
def test_fresh_token_until_it_is_revoked(keystones: Keystones) -> None:
    """What changes something cannot be sent to both: each revokes a token of its own."""
    people, stock, (one, two) = keystones.people, keystones.stock, keystones.workers
    admin = people.tokens["admin"]

    def steps(first: Server, second: Server, token: str) -> Iterator[Answer]:
        for method, server in (
            ("GET", first), ("GET", second), ("HEAD", first), ("GET", first), ("DELETE", second),
            ("GET", first), ("GET", second), ("HEAD", first), ("HEAD", second), ("DELETE", first),
        ):  # fmt: skip
            for headers in ({"auth": admin}, {"auth": token}):
                if method == "DELETE" and headers["auth"] == token:
                    continue
                request = ask("fresh", subject=token, method=method, **headers)
                yield server.send(request).masked(token)

    expected = list(steps(stock, stock, people.fresh()))
    found = list(steps(one, two, people.fresh()))
    assert [x.differs(y) for x, y in zip(expected, found, strict=True)] == [""] * len(expected)
    assert expected[0].status == b"HTTP/1.1 200 OK" != expected[-1].status


@pytest.mark.slow
def test_tokens_are_issued_as_ever(keystones: Keystones) -> None:
    token, project = keystones.people.tokens["unscoped"], keystones.people.ids["project"]
    identity = {"methods": ["token"], "token": {"id": token}}
    body = json.dumps(
        {"auth": {"identity": identity, "scope": {"project": {"id": project}}}}
    ).encode()
    more = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    for target in (TOKENS, f"{TOKENS}?nocatalog"):
        request = ask("issue", target, method="POST", more=more, body=body)
        answers = []
        for server in (keystones.stock, *keystones.workers):
            answer = server.send(request)
            secret = dict(x.split(b": ", 1) for x in answer.headers if b": " in x)
            answers.append(answer.masked(secret[b"X-Subject-Token"].decode()))
        assert answers[0].status == b"HTTP/1.1 201 CREATED"
        assert [answers[0].differs(x) for x in answers[1:]] == ["", ""]


@pytest.mark.slow
def test_route_with_secrets_is_refused_at_start(tmp_path: Path) -> None:
    state, _, _ = _state(tmp_path, ("/v3/projects", "/v3/credentials"))
    environment = {"OS_KEYSTONE_CONFIG_DIR": str(state)}
    with running(state, "refused", environment=environment) as process:
        assert process.wait(PATIENCE) == NO_APP
    log = (state / "refused.log").read_text(errors="replace")
    assert "[keyfront_token_cache] routes = /v3/credentials" in log, log


@pytest.mark.parametrize(
    "route",
    [
        "/v3/credentials", "/v3/credentials/{id}", "/v3/users/{id}/credentials/OS-EC2",
        "/v3/users/{id}/OS-OAUTH1/access_tokens", "/v3/domains/{id}/config",
        # an {id} that stands for a word
        "/v3/{id}", "/v3/{id}/{id}", "/v3/users/{id}/{id}", "/v3/users/{id}/{id}/OS-EC2",
        "/v3/domains/{id}/{id}",
    ],
)  # fmt: skip
def test_no_route_shows_secrets(route: str) -> None:
    secret = [
        "/v3/credentials", "/v3/credentials/x", "/v3/users/x/credentials",
        "/v3/users/x/credentials/OS-EC2", "/v3/users/x/OS-OAUTH1/access_tokens",
        "/v3/domains/x/config",
    ]  # fmt: skip
    try:
        routes = Routes([route])
    except OptionError:
        return
    assert [x for x in secret if routes.families(x) is not None] == []

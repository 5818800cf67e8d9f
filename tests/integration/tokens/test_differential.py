"""Keystone behind the token cache answers as Keystone alone does, to the last byte.

Three uWSGI servers on one Keystone: stock, and two workers with the cache, each a server of its
own so that a request can be sent to the one that has not seen it. They listen on unix sockets, on
which uWSGI says the same of its own address whichever server it is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.hazmat.primitives.twofactor.totp import TOTP

from keyfront.common.file_lock import FileLock
from keyfront.errors import OptionError
from keyfront.gateway.error_body import plain_error_body
from keyfront.middleware.tokens.counters import Counters
from keyfront.middleware.tokens.routes import Routes
from support.keystone_world import VALIDATE, Client, Person, User, World, grant
from support.keystones import keystone_state
from support.request_mix import CONFIGURATION, ROUTES, TOKENS, Ask, Cached, People, ask, mix
from support.served import PATIENCE, free_port, wait_for

pytest.importorskip("keystone")

UWSGI = Path(sys.executable).with_name("uwsgi")
STOCK = "keystone.wsgi.api:application"
# All that need no certificate, as far as this Keystone has them.
_METHODS = "external password token oauth1 mapped application_credential ec2credential totp"
METHODS = ",".join(x for x in _METHODS.split() if entry_points(group=f"keystone.auth.{x}"))
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
    #: The administrator, by the first worker.
    world: World
    #: The same, by stock Keystone.
    stock_world: World

    def forget_issues(self) -> None:
        """Have stock Keystone read tokens that it has issued, as all others have to.

        It keeps them as they were issued, with their methods in the order of a set. In what any
        change but a deleted user, domain or trust leaves there, releases differ.
        """
        self.stock_world.call("DELETE", f"/users/{self.stock_world.user().id}")

    def counted(self) -> Counter[str]:
        return Counter(self.counters.statistics())


@pytest.fixture(scope="module")
def keystones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keystones]:
    state, shared, port = _state(tmp_path_factory.mktemp("differential"), ROUTES)
    port_of_one = free_port()
    where = {"OS_KEYSTONE_CONFIG_DIR": str(state)}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(running(state, name, environment=more, port=tcp))
            for name, more, tcp in (
                ("stock", {"KEYFRONT_APP": STOCK, **where}, port),
                ("one", where, port_of_one),
                ("two", where, 0),
            )
        }
        stock, one, two = (_ready(state, name, x) for name, x in processes.items())
        # All is made by stock Keystone; the others have cached nothing yet.
        password = (state / "admin-password").read_text().strip()
        world = World(f"http://127.0.0.1:{port}/v3", password)
        people = People(world, state / "fernet-keys")
        counters = Counters(shared / "counters", FileLock(shared / "node-lock"))
        world_of_one = World(f"http://127.0.0.1:{port_of_one}/v3", password)
        world_of_one.wait_until_kept()
        made = Keystones(stock, (one, two), people, counters, world_of_one, world)
        made.forget_issues()
        yield made


def _state(folder: Path, routes: tuple[str, ...]) -> tuple[Path, Path, int]:
    """A Keystone, the folder of its cache, and a free port."""
    shared = folder / "shared"
    state = keystone_state(
        folder / "state",
        extra=f"{CONFIGURATION}\n[auth]\nmethods = {METHODS}\n"
        f"[keyfront_token_cache]\npath = {shared}\n"
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

    token = people.fresh()
    keystones.forget_issues()
    expected = list(steps(stock, stock, token))
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


def _totp(world: World, user: User) -> dict[str, object]:
    """What proves that somebody has the device of a user, which is made."""
    key = os.urandom(20)
    blob = base64.b32encode(key).decode()
    world.make("credential", "/credentials", type="totp", blob=blob, user_id=user.id)
    passcode = TOTP(key, 6, SHA1(), 30).generate(int(time.time())).decode()
    return {"user": {"id": user.id, "passcode": passcode}}


def _both(world: World) -> str:
    """A token by password and device, at once."""
    user, project = world.user(), world.still_project
    world.call("PUT", grant("projects", project, "users", user.id, world.still_role))
    identity = {
        "methods": ["password", "totp"],
        "password": {"user": {"id": user.id, "password": user.password}},
        "totp": _totp(world, user),
    }
    return world._issue(identity, {"project": {"id": project}})


def _by_receipt(world: World) -> str:
    """A token by password, and then by device."""
    user, project = world.user(), world.still_project
    world.call("PUT", grant("projects", project, "users", user.id, world.still_role))
    options = {
        "multi_factor_auth_enabled": True, "multi_factor_auth_rules": [["password", "totp"]],
    }  # fmt: skip
    world.patch("user", f"/users/{user.id}", options=options)
    scope = {"project": {"id": project}}
    password = {"user": {"id": user.id, "password": user.password}}
    body = {"auth": {"identity": {"methods": ["password"], "password": password}, "scope": scope}}
    client = Client(world.base_url)
    try:
        first = client.request("POST", VALIDATE, {}, body)
    finally:
        client.close()
    assert first.status == 401
    receipt = {"Openstack-Auth-Receipt": first.headers["Openstack-Auth-Receipt"]}
    return world._issue({"methods": ["totp"], "totp": _totp(world, user)}, scope, receipt)


def _by_totp(world: World) -> str:
    person = world.person()
    identity = {"methods": ["totp"], "totp": _totp(world, person.user)}
    return world._issue(identity, {"project": {"id": person.project}})


def _scoped(world: World, **scope: Any) -> str:
    user = world.user()
    kind, target = ("system", "") if "system" in scope else ("domains", world.domain())
    if kind == "domains":
        scope = {"domain": target}
    world.call("PUT", grant(kind, target, "users", user.id, world.still_role))
    return world.issue(user, **scope)


def _by_group(world: World) -> str:
    user = world.user()
    for role in (world.still_role, world.second_role):
        group = world.group(user)
        world.call("PUT", grant("projects", world.still_project, "groups", group, role))
    return world.issue(user, project=world.still_project)


def _by_trust(world: World, **more: object) -> str:
    giver = world.person(world.still_role, world.second_role)
    taker = world.person().user
    return world.issue(
        taker, trust=world.trust(giver, taker, [world.still_role, world.second_role], **more)
    )


def _passed_on(world: World) -> str:
    giver = world.person()
    middle, last = world.person(), world.person().user
    trust = world.trust(
        giver, middle.user, [world.still_role], allow_redelegation=True, redelegation_count=2
    )
    between = Person(middle.user, giver.project, world.issue(middle.user, trust=trust))
    again = world.trust(between, last, [world.still_role], trustor_user_id=giver.user.id)
    return world.issue(last, trust=again)


def _by_credential(world: World, **more: object) -> str:
    return world.issue_for(world.credential(world.person(), **more))


def _by_oauth1(world: World) -> str:
    administrator = world.person(world.own_role["admin"])
    return world.oauth1(administrator, world.own_role["admin"])[2]


def _federated(world: World, *, scoped: bool) -> str:
    federation, group = world.federation(), world.group()
    for role in (world.still_role, world.second_role):
        world.call("PUT", grant("projects", world.still_project, "groups", group, role))
    federation.login(group)  # the first makes him
    token = federation.login(group, method="POST")
    return world.rescope(token, world.still_project) if scoped else token


def _by_ec2(world: World) -> str:
    person = world.person(world.own_role["member"])
    made = world.call(
        "POST", f"/users/{person.user.id}/credentials/OS-EC2", {"tenant_id": person.project},
        token=person.token,
    ).body["credential"]  # fmt: skip
    asked = {
        "access": made["access"], "host": "h", "verb": "GET", "path": "/",
        "params": {"SignatureVersion": "2", "SignatureMethod": "HmacSHA256"},
    }  # fmt: skip
    text = "GET\nh\n/\nSignatureMethod=HmacSHA256&SignatureVersion=2"
    signed = hmac.new(made["secret"].encode(), text.encode(), hashlib.sha256).digest()
    asked["signature"] = base64.b64encode(signed).decode()
    answer = world.call("POST", "/ec2tokens", {"ec2Credentials": asked})
    return str(answer.headers["X-Subject-Token"])


_END = "2099-01-01T00:00:00.123456Z"
#: Ways to log in, and whether what is issued is known from its issue; ``None``: not afterwards
#: either.
WAYS: dict[str, tuple[Callable[[World], str], bool | None]] = {
    "password": (lambda world: world.person(world.still_role, world.second_role).token, True),
    "password, unscoped": (lambda world: world.issue(world.user()), True),
    "password, domain": (_scoped, True),
    "password, system": (lambda world: _scoped(world, system=True), True),
    "password, by group": (_by_group, True),
    "token": (lambda world: world.rescope(world.issue(world.bystander.user), world.still_project),
              True),
    "totp": (_by_totp, True),
    "password and totp": (_both, True),
    "receipt": (_by_receipt, True),
    "application credential": (_by_credential, True),
    "application credential that ends": (
        lambda world: _by_credential(world, expires_at="2099-01-01T00:00:00"), True
    ),
    "application credential with access rules": (
        lambda world: _by_credential(
            world, access_rules=[{"service": "identity", "method": "GET", "path": "/v3/projects"}]
        ), None,
    ),
    "trust": (_by_trust, True),
    "trust, as trustee": (lambda world: _by_trust(world, impersonation=False), True),
    "trust that ends": (lambda world: _by_trust(world, expires_at=_END), True),
    "trust with uses": (lambda world: _by_trust(world, remaining_uses=3), True),
    # after which there is none
    "trust, its last use": (lambda world: _by_trust(world, remaining_uses=1), None),
    "trust that was passed on": (_passed_on, True),
    "oauth1": (_by_oauth1, True),
    "federated": (lambda world: _federated(world, scoped=True), True),
    # the login writes that he is a member, which is a change
    "federated, unscoped": (lambda world: _federated(world, scoped=False), False),
    # at another path
    "ec2": (_by_ec2, False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_known_of_an_issued_token_is_what_a_validation_says(
    keystones: Keystones, way: str
) -> None:
    """And what only some ways to log in would not do, and so is not known."""
    log_in, filled = WAYS[way]
    if way == "ec2" and "ec2credential" not in METHODS.split(","):
        # No token can say so: who has it in a cache since it was issued does, and others do not.
        pytest.skip("this Keystone has no method for what its ec2 tokens are issued by")
    one, admin = keystones.workers[0], keystones.world.admin
    token = log_in(keystones.world)
    # The administrator is known by then, or is again after what was made.
    one.send(ask("any", auth=admin, subject=keystones.people.fresh()))
    for version in ({}, {"OpenStack-Identity-Access-Rules": "1.0"}):
        for query in ("", "?allow_expired=1"):
            one.send(ask("admin", TOKENS, auth=admin, subject=admin, more=version))
            request = ask(way, TOKENS + query, auth=admin, subject=token, more=version)
            before = keystones.counted()
            given = one.send(request)
            counted = keystones.counted() - before
            assert keystones.stock.send(request).differs(given) == ""
            # what was asked of Keystone is known then
            first = not version and not query
            assert ("known" in counted) is (filled or (filled is False and not first)), counted


@pytest.mark.slow
def test_a_token_is_refused_for_its_trust_that_is_over(keystones: Keystones) -> None:
    """Both end at once, and Keystone looks for the trust first, as subject's and as caller's."""
    world, admin = keystones.world, keystones.world.admin
    taker = world.person().user

    def asks() -> list[Ask]:
        callers = {"subject": admin, "caller": token}
        return [ask(name, TOKENS, auth=one, subject=token) for name, one in callers.items()]

    for seconds in (3, 30):  # the second time on a machine that has too much to do
        until = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(time.time() + seconds))
        trust = world.trust(world.person(), taker, [world.still_role], expires_at=until)
        try:
            token = world.issue(taker, trust=trust)
        except AssertionError:
            continue
        before = [one.send(asks()[0]).status for one in keystones.workers]
        if before == [b"HTTP/1.1 200 OK"] * 2:
            break
    else:
        raise AssertionError("no token was had before its trust was over")
    first, _ = keystones.workers
    wait_for(lambda: b" 200 " not in first.send(asks()[0]).status, "the trust is over")
    for request in asks():
        expected = keystones.stock.send(request)
        assert b"Could not find trust" in expected.body
        for _ in range(2):
            assert [expected.differs(x.send(request)) for x in keystones.workers] == ["", ""]


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

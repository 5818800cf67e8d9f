"""Two nodes and two services under faults, and whether what clients saw may have happened.

Users, projects and domains are renamed, an endpoint is moved, roles are taken away and tokens
revoked, at both nodes, and read at both nodes and both services, while workers are killed, they and
a whole node frozen, Redis is killed, frozen and cut off, the clocks of Redis, nodes and services
set, and the database killed and frozen; meanwhile people log in, and their tokens are validated.
Everything is written down, and ``history.py`` judges it. A longer run::

    KEYFRONT_HISTORY_READS=1000000 pytest -s tests/integration/tokens/test_history.py

With ``KEYFRONT_HISTORY_SECONDS`` it ends after so long, however many it has read.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support import servers
from support.cluster import Cluster, cluster
from support.fault_proxy import FaultProxy
from support.history import History
from support.keystone_world import VALIDATE, Answer, Client, Person, World, grant, random_name
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE, Served, stats
from support.set_clock import SetClock

pytest.importorskip("keystone")
pytest.importorskip("keystonemiddleware")
pytestmark = pytest.mark.slow

#: Answers that are read at least.
READS = int(os.environ.get("KEYFRONT_HISTORY_READS", "800"))
SECONDS = float(os.environ.get("KEYFRONT_HISTORY_SECONDS", "inf"))
PEOPLE = 2
#: Seconds after which who waits for a change gives up; it may be made later.
ANSWERED = 1.5
#: Answers that are read between two changes of a kind, unless something breaks, and two faults. A
#: change costs Keystone as much as hundreds of answers from the cache.
CHANGES_EVERY = max(60, READS // 250)
FAULTS_EVERY = max(60, READS // 125)
#: Seconds between looks whether it is time.
PAUSE = 0.02
#: Seconds by which the nodes' clock is ahead at the beginning, and at most: a token lasts an hour.
BEGINS, AHEAD = 100.0, 600.0
ROLES = 3
READERS = 2


@dataclass
class Subject:
    """A person whose user, project and domain are renamed and whose roles are taken away.

    :param endpoint: one that is moved, in the catalog of all tokens
    :param tokens: those that are read, with their registers
    :param roles: in the order in which they are taken away; none is given back
    :param taken: how many of them were
    """

    person: Person
    endpoint: str
    tokens: dict[str, str] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    taken: int = 0

    @property
    def user(self) -> str:
        return f"user {self.person.user.id}"

    @property
    def project(self) -> str:
        return f"project {self.person.project}"

    @property
    def domain(self) -> str:
        return f"domain {self.person.user.domain}"

    @property
    def role(self) -> str:
        return f"first role of {self.person.user.id}"

    def shown(self, token: dict[str, Any]) -> list[tuple[str, object]]:
        """What a token's description shows, by register."""
        has = {x["id"] for x in token["roles"]}
        first = next((number for number, role in enumerate(self.roles) if role in has), None)
        return [
            (self.user, token["user"]["name"]),
            (self.project, token["project"]["name"]),
            (self.role, first),
            *((self.domain, token[kind]["domain"]["name"]) for kind in ("user", "project")),
            *(
                (_moved(endpoint["id"]), endpoint["url"])
                for service in token["catalog"]
                for endpoint in service["endpoints"]
                if endpoint["id"] == self.endpoint
            ),
        ]


class Insistent(World):
    """Repeats what was refused for now, until nothing is to be made ready any more.

    Redis counts as lost as soon as it takes its time.
    """

    insists = True

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: object
    ) -> Answer:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return super().send(method, path, headers, body)
            except AssertionError as error:
                refused = self.insists and ": 503 " in str(error)
                if not refused or time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE)


class Unanswered(Exception):
    """A change had no good answer."""


class Run:
    """Readers, changes and faults, until it is over.

    :param redis: the server whose faults they are
    :param proxy: by which nodes and services get to it
    :param database: kills and starts the nodes' own
    :param clocks: on the wall: the server's, the nodes' and the services'
    """

    def __init__(
        self, served: Cluster, redis: RedisServer, proxy: FaultProxy, database: servers.Restarts,
        clocks: Clocks,
    ) -> None:
        self.served, self.redis, self.proxy = served, redis, proxy
        self.database, self.clocks = database, clocks
        self.ahead = BEGINS
        self.history = History()
        self.began = time.monotonic()
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.answers: Counter[str] = Counter()
        #: Logins by node, of which a first validation was answered as well.
        self.logins: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self.doubtful: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        #: How often something broke, counted at its beginning.
        self.broken = 0
        first = served.nodes[0]
        self.world = Insistent(first.url, first.password)
        self.admin = self.world.admin
        service = self.world.make("service", "/services", name=random_name(), type=random_name())
        self.endpoint = self.world.make(
            "endpoint", "/endpoints", service_id=service, interface="public", url=_url()
        )
        # The change of a project takes time with what is in it, so each has its own.
        self.subjects = [self._subject() for _ in range(PEOPLE)]
        self.world.insists = False

    def _subject(self) -> Subject:
        world = self.world
        roles = [world.role() for _ in range(ROLES)]
        domain = world.domain()
        person = world.person(*roles, domain=domain, project=world.project(domain))
        made = Subject(person, self.endpoint, roles=roles)
        answer = world.call("GET", VALIDATE, headers={"X-Subject-Token": made.person.token})
        for register, value in made.shown(answer.token()):
            self.history.start(register, value)
        self._show(made, made.person.token)
        return made

    def _show(self, subject: Subject, token: str) -> str:
        register = f"token {sum(self.made.values())}-{random_name()}"
        self.history.start(register, "holds")
        subject.tokens[token] = register
        return register

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        """Do this again and again until it is over."""

        def loop() -> None:
            try:
                while not self.over.is_set():
                    work()
            except BaseException as failure:
                self.failures.append(failure)
                self.over.set()

        return threading.Thread(target=loop)

    # Reads

    def read(self, name: str, url: str, dice: random.Random) -> None:
        """Show a token somewhere, and note what the answer shows."""
        subject = dice.choice(self.subjects)
        token, register = dice.choice(list(subject.tokens.items()))
        parts = urlsplit(url)
        path, headers = "/", {"X-Auth-Token": token}
        if name.startswith("node"):
            path = f"{parts.path}{VALIDATE}"
            headers = {"X-Auth-Token": self.admin, "X-Subject-Token": token}
        lines = [f"GET {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += [f"{header}: {value}" for header, value in headers.items()]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode()
        began = time.monotonic()
        try:
            status, body = _ask((parts.hostname or "", parts.port or 0), request)
        except (OSError, ValueError):
            self.unanswered[name] += 1
            return
        if status == 200:
            shown = [(register, "holds"), *subject.shown(_described(body))]
        elif status == (404 if name.startswith("node") else 401):
            shown = [(register, "revoked")]
        elif status >= 500:
            self.unanswered[name] += 1
            return
        else:
            shown = [(register, f"status {status}")]
        self.history.read(began, name, shown)
        self.answers[name] += 1

    def log_in(self, name: str, url: str, dice: random.Random) -> None:
        """Log somebody in, have either node validate the token for the first time, note both."""
        subject = dice.choice(self.subjects)
        user = {"id": subject.person.user.id, "password": subject.person.user.password}
        identity = {"methods": ["password"], "password": {"user": user}}
        scope = {"project": {"id": subject.person.project}}
        body = {"auth": {"identity": identity, "scope": scope}}
        token = self._shown_by(f"login at {name}", url, subject, 201, {}, body)
        if token is not None:
            headers = {"X-Auth-Token": self.admin, "X-Subject-Token": token}
            for node in dice.sample(self.served.nodes, len(self.served.nodes)):
                if self._shown_by("first validation", node.url, subject, 200, headers) is not None:
                    self.logins[name] += 1
        seen = self.total + CHANGES_EVERY
        while self.total < seen and not self.over.wait(PAUSE):
            pass

    def _shown_by(
        self, what: str, url: str, subject: Subject, status: int, headers: dict[str, str],
        body: object = None,
    ) -> str | None:  # fmt: skip
        """Note what an answer shows, and return its token; ``None`` if there is none."""
        client = Client(url)
        began = time.monotonic()
        try:
            answer = client.request("GET" if body is None else "POST", VALIDATE, headers, body)
        except (OSError, HTTPException, ValueError):
            self.unanswered[what] += 1
            return None
        finally:
            client.close()
        if answer.status >= 500:
            self.unanswered[what] += 1
            return None
        assert answer.status == status, f"{what}: {answer.status} {answer.body}"
        self.history.read(began, what, subject.shown(answer.body["token"]))
        return str(answer.headers["X-Subject-Token"])

    # Changes

    def send(self, method: str, path: str, good: tuple[int, ...], **more: Any) -> None:
        """Ask either node for a change, once.

        :param good: statuses that say that it is made
        :param more: the request's body; ``headers`` are more of its headers
        :raises Unanswered: it may have been made, or may be later, or not
        """
        node = random.choice(self.served.nodes)
        connection = HTTPConnection("127.0.0.1", node.port, timeout=ANSWERED)
        headers = {"X-Auth-Token": self.admin, **more.pop("headers", {})}
        body = None
        if more:
            headers["Content-Type"], body = "application/json", json.dumps(more)
        try:
            connection.request(method, f"/v3{path}", body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            raise Unanswered(str(error)) from None
        finally:
            connection.close()
        if answer.status in good:
            return
        assert answer.status >= 500, f"{method} {path}: {answer.status} {content!r}"
        raise Unanswered(f"{answer.status}")

    def insist(self, method: str, path: str, **more: Any) -> None:
        """Ask for something to be taken away until it is, or until it is over."""
        good: tuple[int, ...] = (204,)
        while True:
            try:
                return self.send(method, path, good, **more)
            except Unanswered:
                if self.over.is_set():
                    raise
                good = (204, 404)  # one that had no answer may have been made
                time.sleep(PAUSE)

    def _change(self, kind: str, register: str, value: object, make: Callable[[], None]) -> bool:
        done = False
        with contextlib.suppress(Unanswered), self.history.change(register, value, "a node"):
            make()
            done = True
        (self.made if done else self.doubtful)[kind] += 1
        faults, seen = self.broken, self.total + CHANGES_EVERY
        # Of what breaks something is always in the middle of a change.
        while self.broken == faults and self.total < seen and not self.over.wait(PAUSE):
            pass
        return done

    def rename(self, kind: str, collection: str, subject: Subject) -> None:
        """Give a user, project or domain a name that nothing has had."""
        name = random_name()
        register = getattr(subject, kind)
        path = f"/{collection}/{register.partition(' ')[2]}"
        make = partial(self.send, "PATCH", path, (200,), **{kind: {"name": name}})
        self._change(f"{kind} renamed", register, name, make)

    def move(self) -> None:
        """Give the endpoint a URL that nothing has had."""
        url, path = _url(), f"/endpoints/{self.endpoint}"
        make = partial(self.send, "PATCH", path, (200,), endpoint={"url": url})
        self._change("endpoint moved", _moved(self.endpoint), url, make)

    def take_role(self, subject: Subject) -> None:
        """Take away the first of a person's roles that are left, and give another."""
        person, number = subject.person, subject.taken
        try:
            role = self.world.role()
            self.send("PUT", _grant(person, role), (204,))
        except _UNANSWERED:
            return
        subject.roles.append(role)
        make = partial(self.insist, "DELETE", _grant(person, subject.roles[number]))
        if self._change("role taken", subject.role, number + 1, make):
            subject.taken += 1

    def revoke(self, subject: Subject) -> None:
        """Revoke a token that readers have seen."""
        person = subject.person
        try:
            token = self.world.issue(person.user, project=person.project)
        except _UNANSWERED:
            return
        register = self._show(subject, token)
        seen = self.total + 20
        while self.total < seen and not self.over.wait(PAUSE):
            pass
        revoke = partial(self.insist, "DELETE", VALIDATE, headers={"X-Subject-Token": token})
        self._change("token revoked", register, "revoked", revoke)
        for old in list(subject.tokens)[1:-2]:  # the first is never revoked
            del subject.tokens[old]

    @property
    def total(self) -> int:
        """How many answers were read."""
        return sum(self.answers.values())

    # Faults

    def fault(self, name: str, fault: Callable[[], None]) -> None:
        """Let something break while changes are made, and then go well for a while."""
        self.broken += 1
        self.over.wait(random.uniform(0, 2 * PAUSE))
        fault()
        self.faults[name] += 1
        seen = self.total + FAULTS_EVERY
        while self.total < seen and not self.over.wait(PAUSE):
            pass

    def kill(self, served: Served) -> None:
        """Kill a worker; its master starts another."""
        _send(_worker(served), signal.SIGKILL)

    def freeze(self, longest: float, *pids: int) -> None:
        """Have processes do nothing for a while."""
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            self.over.wait(random.uniform(0.1, longest))
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)

    def cut_off(self, fault: Callable[[], None]) -> None:
        """Have nodes and services not get to Redis for a while."""
        fault()
        try:
            self.over.wait(random.uniform(0.05, 0.8))
        finally:
            self.proxy.forward()

    def set_nodes(self) -> None:
        """Set the nodes' clock forward. Set back, a Keystone by itself revokes no token that it
        has issued since, nor one of a node whose clock is ahead.
        """
        self.ahead += min(random.uniform(0.5, 20), (AHEAD - self.ahead) / 8)
        self.clocks.nodes.set(self.ahead)

    def set_services(self) -> None:
        """Set the services' clock, forward or back, by less than a token lasts."""
        self.clocks.services.set(random.uniform(-AHEAD / 2, AHEAD / 2))

    def break_something(self) -> None:
        """One of the faults that were had least."""
        proxy, redis = self.proxy, self.redis
        services, nodes = self.served.services, self.served.nodes
        faults: dict[str, Callable[[], None]] = {
            "node's worker killed": lambda: self.kill(random.choice(nodes)),
            "node's worker frozen": lambda: self.freeze(2.5, _worker(random.choice(nodes))),
            "node frozen": lambda: self.freeze(2.5, *_all(random.choice(nodes))),
            "service's worker killed": lambda: self.kill(random.choice(services)),
            "service's worker frozen": lambda: self.freeze(2.5, _worker(random.choice(services))),
            "database frozen": lambda: self.freeze(0.8, self.database.pid),
            "database killed": self.database,
            "Redis frozen": lambda: self.freeze(1.5, redis.pid),
            "Redis killed": redis.restart,
            "Redis' clock set": lambda: self.clocks.redis.set(random.uniform(-3600, 3600)),
            "nodes' clock set": self.set_nodes,
            "services' clock set": self.set_services,
            "Redis emptied": redis.client.flushall,
            "Redis cut off": lambda: self.cut_off(proxy.cut),
            "Redis silent": lambda: self.cut_off(proxy.stall),
            "Redis reset": lambda: self.cut_off(proxy.reset),
        }
        least = min(self.faults[name] for name in faults)
        name = random.choice([name for name in faults if self.faults[name] == least])
        self.fault(name, faults[name])

    # All of it

    def are_set(self) -> None:
        """Make sure that the clocks are other ones than the machine's."""
        token = self.world.call("GET", VALIDATE, headers={"X-Subject-Token": self.admin}).token()
        issued = datetime.fromisoformat(token["issued_at"])
        assert (issued - datetime.now(UTC)).total_seconds() > BEGINS / 2
        for served in self.served.services:
            for process in served.processes():
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
                assert "set_clock.so" in maps

    def go(self, reads: int) -> None:
        """Do it all at once until so many answers were read, and each fault was had."""
        threads = [self.thread(self.break_something)]
        for name, url in self.served.everywhere.items():
            for number in range(READERS):
                dice = random.Random(f"{name} {number}")
                threads.append(self.thread(partial(self.read, name, url, dice)))
        for node in self.served.nodes:
            name = f"node {node.port}"
            threads.append(self.thread(partial(self.log_in, name, node.url, random.Random(name))))
        # Of each kind one: a change ends most answers, and Keystone makes them anew.
        first, second = self.subjects
        for work in (
            partial(self.rename, "user", "users", first),
            partial(self.rename, "project", "projects", second),
            partial(self.rename, "domain", "domains", first),
            *(partial(self.take_role, subject) for subject in self.subjects),
            partial(self.revoke, second),
            self.move,
        ):
            threads.append(self.thread(work))
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        seen, hangs = 0, time.monotonic() + 10 * PATIENCE
        try:
            while not self.over.is_set():
                enough = self.total >= reads or time.monotonic() > end
                if enough and self.has_all():
                    break
                if self.total > seen and not enough:
                    seen, hangs = self.total, time.monotonic() + 10 * PATIENCE
                assert time.monotonic() < hangs, f"something never comes:\n{self}"
                time.sleep(PAUSE)
        finally:
            self.over.set()
            for thread in threads:
                thread.join(PATIENCE)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in threads), "something hangs"

    def has_all(self) -> bool:
        """Whether each fault and kind of change was had, and everybody was answered."""
        return (
            len(self.faults) >= FAULTS
            and len(self.made) == KINDS
            and min(self.made.values()) > 2
            and len(self.logins) == len(self.served.nodes)
            and len(self.answers) == len(self.served.everywhere)
            and min(self.answers.values()) > 20
        )

    def summary(self, faults: int) -> str:
        """All of it in one line.

        :param faults: what the checker found that cannot have happened
        """
        return (
            f"{self.total} answers with {self.history.reads} values of {self.history.registers}"
            f" registers, {self.logins.total()} logins, {self.made.total()} changes of"
            f" {len(self.made)} kinds, {self.doubtful.total()} without a good answer,"
            f" {self.faults.total()} faults of {len(self.faults)} kinds in"
            f" {time.monotonic() - self.began:.0f} s: {faults} that cannot have happened"
        )

    def __str__(self) -> str:
        def told(counts: Counter[str]) -> str:
            return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))

        return "\n".join(
            [
                f"{self.total} answers read ({told(self.answers)}), which showed"
                f" {self.history.reads} values; logins with first validations: {told(self.logins)};"
                f" without an answer: {told(self.unanswered)}",
                f"{sum(self.made.values())} changes ({told(self.made)}), and"
                f" {sum(self.doubtful.values())} without a good answer ({told(self.doubtful)})",
                f"{sum(self.faults.values())} faults ({told(self.faults)})",
            ]
        )


FAULTS = 16
KINDS = 6
# What of a Keystone under faults comes of asking it once for something that has to succeed.
_UNANSWERED = (Unanswered, AssertionError, OSError, HTTPException)


def _grant(person: Person, role: str) -> str:
    return grant("projects", person.project, "users", person.user.id, role)


def _ask(address: tuple[str, int], request: bytes) -> tuple[int, bytes]:
    """Send a request, and read its answer to the end of the connection.

    :raises ValueError: it is cut short
    """
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    head, separator, body = b"".join(parts).partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    if not separator or length is None or len(body) != int(length[1]):
        raise ValueError("the answer is cut short")
    return int(head.split(b" ", 2)[1]), body


@lru_cache(maxsize=1024)
def _described(body: bytes) -> dict[str, Any]:
    """A token's description, not to be changed; most answers have a body that was there before."""
    found: dict[str, Any] = json.loads(body)["token"]
    return found


def _worker(served: Served) -> int:
    """One of a server's workers; of one that is just being replaced, its master has the number."""
    workers = stats(served.state / "run" / "stats.sock")["workers"]
    assert isinstance(workers, list)
    return int(random.choice(workers)["pid"])


def _all(served: Served) -> list[int]:
    """A server's processes, as when its machine stands still."""
    return [process.pid for process in served.processes()]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _moved(endpoint: str) -> str:
    return f"endpoint {endpoint}"


def _url() -> str:
    return f"http://127.0.0.1:1/{random_name()}"


@dataclass
class Clocks:
    """Those on the wall that are set."""

    redis: SetClock
    nodes: SetClock
    services: SetClock

    @classmethod
    def make(cls, folder: Path) -> Clocks:
        folders = [folder / f"clock-{name}" for name in ("redis", "nodes", "services")]
        for one in folders:
            one.mkdir()
        return cls(*map(SetClock, folders))


def run(folder: Path, reads: int, service_options: str = "") -> Run:
    clocks = Clocks.make(folder)
    clocks.nodes.set(BEGINS)
    with (
        redis_server(folder / "redis", environment=clocks.redis.environment) as redis,
        FaultProxy(redis.port) as proxy,
    ):
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with cluster(
            folder, coordinator=url, coordinator_timeout=0.5, service_options=service_options,
            database_options=servers.OUTLIVES, environment=clocks.nodes.environment,
            service_environment=clocks.services.environment,
        ) as served:  # fmt: skip
            with servers.Restarts(served.database) as database:
                made = Run(served, redis, proxy, database, clocks)
                made.are_set()
                made.go(reads)
            return made


def test_what_clients_see_under_faults_may_have_happened(tmp_path: Path) -> None:
    found = run(tmp_path, READS)
    faults = found.history.faults()
    print(found.summary(len(faults)), found, sep="\n")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:5], str(found)])
    assert min(found.answers.values()) > 20
    assert len(found.answers) == 4
    assert len(found.logins) == 2

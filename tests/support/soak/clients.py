"""Who asks the site during the soak, what is changed meanwhile, and what everybody was answered.

Users log in by HAProxy, from Keystone's own tables and from the directory; their tokens are
validated at both nodes and by both services; projects are listed and tokens exchanged; wrong
passwords and unknown tokens are tried. Users and projects are renamed, roles taken away, tokens
revoked, and users deleted from both directories. What is read and changed goes into a history that
:mod:`support.history` judges; of each answer it is noted whether it was good, a refusal as there
may be one, or neither.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from support.directory import User as Person
from support.history import History
from support.keystone_world import VALIDATE, Answer, Client, User, World, grant, random_name
from support.served import PATIENCE
from support.soak.site import Node, Site

#: Seconds between two requests of a client, and between two changes of a kind.
PAUSE, CHANGE = 0.05, 0.7
#: Seconds after the directories' answer to a change from which on it is heeded (docs/ldap.md).
BOUND = 1.0
#: Tokens of a kind that are validated at a time.
TOKENS = 6
#: Seconds after which a client gives up.
GIVES_UP = 30.0
#: Seconds after which the tokens that last are replaced: they end after an hour, by clocks that are
#: set ahead sooner; and after which who was deleted comes back, as no request of before still runs.
RENEWED, BACK = 900.0, 3 * GIVES_UP
_PUBLIC = "balancer"


@dataclass(frozen=True)
class Seen:
    """An answer, or that there was none.

    :param moment: when the request was sent, in seconds of the monotonic clock
    :param status: of HTTP; 0 if the connection ended without an answer
    :param judged: "good", "refused" (503 with Retry-After or 429, of a server that cannot for now,
        and without it where nobody knows whether a change is made, which is said),
        "late" (502 and 504, of a front whose server did not answer), "none", or "wrong"
    """

    moment: float
    seconds: float
    where: str
    kind: str
    status: int
    judged: str


def judge(answer: Answer | None, good: tuple[int, ...]) -> str:
    """Say what an answer is worth; see :class:`Seen`."""
    if answer is None:
        return "none"
    if answer.status in good:
        return "good"
    if answer.status in (429, 503):
        knows = answer.headers["Retry-After"] or "Look whether it is made" in str(answer.body)
        return "refused" if knows else "wrong"
    return "late" if answer.status in (502, 504) else "wrong"


@dataclass
class Subject:
    """A user whose user and project are renamed and whose roles are taken away."""

    user: User
    project: str
    roles: list[str]
    taken: int = 0
    tokens: dict[str, str] = field(default_factory=dict)

    def shown(self, token: dict[str, Any]) -> list[tuple[str, object]]:
        has = {x["id"] for x in token["roles"]}
        first = next((number for number, role in enumerate(self.roles) if role in has), None)
        return [
            (f"user {self.user.id}", token["user"]["name"]),
            (f"project {self.project}", token["project"]["name"]),
            (f"first role of {self.user.id}", first),
        ]


class Clients:
    """All of them; :meth:`start` lets them go, :meth:`end` stops them.

    :param site: whom they ask
    :param dice: what they choose by
    :param pace: by how much longer than usual they wait between requests
    """

    #: The kinds of changes.
    KINDS = (
        "user renamed", "project renamed", "role taken", "token revoked",
        "deleted from the directory",
    )  # fmt: skip

    def __init__(self, site: Site, dice: random.Random, pace: float = 1.0) -> None:
        self.site, self.dice, self._pace = site, dice, pace
        self.history = History()
        self.seen: list[Seen] = []
        self.wrong: list[str] = []
        self.failures: list[BaseException] = []
        self.changes: Counter[str] = Counter()
        self.doubtful: Counter[str] = Counter()
        self.over = threading.Event()
        self.may_ask = threading.Event()
        self.may_ask.set()
        self._lock = threading.Lock()
        self._asking = 0
        self._threads: list[threading.Thread] = []
        node = site.nodes[0]
        self.world = world = World(node.url, node.password)
        self._password = node.password
        self.admin = world.admin
        self.subjects = [self._subject() for _ in range(2)]
        self._project, role = world.project(), world.role()
        groups = world.call("GET", f"/groups?domain_id={site.domain}").body["groups"]
        (everybody,) = [x["id"] for x in groups if x["name"] == "everybody"]
        world.call("PUT", grant("projects", self._project, "groups", everybody, role))
        self._renewed = time.monotonic()
        # Not the last one: a group keeps a member.
        self._people = list(site.directories[0].users[:-1])
        self._deleted: deque[tuple[float, Person, dict[str, list[bytes]]]] = deque()
        self._logged: dict[str, tuple[Person, str]] = {}

    def _subject(self) -> Subject:
        world = self.world
        roles = [world.role() for _ in range(3)]
        domain = world.domain()
        project = world.project(domain)
        person = world.person(*roles, domain=domain, project=project)
        made = Subject(person.user, project, roles)
        answer = world.call("GET", VALIDATE, headers={"X-Subject-Token": person.token})
        for register, value in made.shown(answer.token()):
            self.history.start(register, value)
        made.tokens[person.token] = self._register()
        return made

    def _register(self) -> str:
        name = f"token {random_name()}"
        self.history.start(name, "holds")
        return name

    # Running

    def start(self) -> None:
        """Let all of them go."""
        first, second = self.subjects
        for node in self.site.nodes:
            self._repeat(lambda x=node: x.drained or self.validate(x.name, x.url), PAUSE)
        for name, url in self.site.everywhere.items():
            if name.startswith("service"):
                self._repeat(lambda name=name, url=url: self.validate(name, url), PAUSE)
        for work in (self.log_in, self.log_in_by_directory, self.rescope, self.look_around):
            self._repeat(work, PAUSE)
        self._repeat(self.try_what_is_wrong, 4 * PAUSE)
        self._repeat(self.renew, CHANGE)
        for change in (
            lambda: self.rename("user", "users", first.user.id),
            lambda: self.rename("project", "projects", second.project),
            lambda: self.take_role(first),
            lambda: self.revoke(second),
            self.delete_from_directory,
        ):
            self._repeat(change, CHANGE)

    def end(self) -> None:
        """Stop them.

        :raises AssertionError: one hangs
        :raises BaseException: what ended one of them
        """
        self.over.set()
        self.may_ask.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    @contextlib.contextmanager
    def resting(self) -> Any:
        """Nobody asks anything while the block runs."""
        self.may_ask.clear()
        try:
            deadline = time.monotonic() + PATIENCE
            while self._asking and not self.over.is_set():
                assert time.monotonic() < deadline, "a client hangs"
                time.sleep(0.02)
            yield
        finally:
            self.may_ask.set()

    def _repeat(self, work: Callable[[], object], pause: float) -> None:
        def loop() -> None:
            try:
                while not self.over.is_set():
                    with self._lock:
                        asks = self.may_ask.is_set()
                        self._asking += asks
                    if asks:
                        try:
                            work()
                        finally:
                            with self._lock:
                                self._asking -= 1
                    self.over.wait(pause * self._pace)
            except BaseException as failure:
                self.failures.append(failure)
                self.over.set()

        thread = threading.Thread(target=loop)
        self._threads.append(thread)
        thread.start()

    # Asking

    def ask(
        self, where: str, url: str, kind: str, method: str, path: str, headers: dict[str, str],
        *, good: tuple[int, ...], body: object = None,
    ) -> Answer | None:  # fmt: skip
        """Ask once, and note what came of it; returns a good answer only."""
        began = time.monotonic()
        source = _address(self.dice) if where == _PUBLIC else ""
        answer = _once(url, method, path, headers, body, source)
        judged = judge(answer, good)
        if judged == "wrong" and where.startswith("service") and answer and answer.status == 503:
            judged = "refused"  # as keystonemiddleware says it, without Retry-After
        seen = Seen(
            began, time.monotonic() - began, where, kind, answer.status if answer else 0, judged
        )
        with self._lock:
            self.seen.append(seen)
            if judged == "wrong" and answer is not None:
                wrong = f"{where}: {method} {path}: {answer.status} {answer.body}"
                self.wrong.append(wrong)
                print(f"  WRONG at {began:.3f}: {wrong}", flush=True)
        return answer if judged == "good" else None

    def in_turn(self, what: str, **request: Any) -> Answer | None:
        """Ask HAProxy."""
        return self.ask(_PUBLIC, self.site.url, what, **request)

    def has_asked_everywhere(self) -> bool:
        """Whether everything was asked and changed by now."""
        with self._lock:
            places = {one.where for one in self.seen if one.judged == "good"}
        return set(self.changes) == set(self.KINDS) and {*self.site.everywhere, _PUBLIC} <= places

    def all_is_well(self) -> bool:
        """Log in by each way, and have all nodes and services validate the token; not noted."""
        subject = self.subjects[0]
        keystone = {"id": subject.user.id, "password": subject.user.password}
        last = self.site.directories[0].users[-1]  # never deleted
        ldap = {"name": last.cn, "password": last.password, "domain": {"id": self.site.domain}}
        for who, project in ((keystone, subject.project), (ldap, self._project)):
            source = _address(random.Random())
            answer = _once(self.site.url, "POST", VALIDATE, {}, _password(who, project), source)
            if answer is None or answer.status != 201:
                return False
            token = str(answer.headers["X-Subject-Token"])
            for name, url in self.site.everywhere.items():
                path, headers = "/", {"X-Auth-Token": token}
                if name.startswith("node"):
                    path, headers = VALIDATE, {"X-Auth-Token": token, "X-Subject-Token": token}
                found = _once(url, "GET", path, headers)
                if found is None or found.status != 200:
                    return False
        return True

    # Reads

    def validate(self, name: str, url: str) -> None:
        """Show a token somewhere, and note what the answer shows."""
        with self._lock:
            choices = [
                *((subject, token, register) for subject in self.subjects
                  for token, register in subject.tokens.items()),
                *((None, token, register) for token, (_, register) in self._logged.items()),
            ]  # fmt: skip
            subject, token, register = self.dice.choice(choices)
        path, headers, absent = "/", {"X-Auth-Token": token}, 401
        if name.startswith("node"):
            path, absent = VALIDATE, 404
            headers = {"X-Auth-Token": self.admin, "X-Subject-Token": token}
        began = time.monotonic()
        answer = self.ask(name, url, "validation", "GET", path, headers, good=(200, absent))
        if answer is None:
            return
        if answer.status == absent:
            self.history.read(began, name, [(register, "revoked")])
            return
        shown = [] if subject is None else subject.shown(answer.token())
        self.history.read(began, name, [(register, "holds"), *shown])

    def _login(self, subject: Subject) -> Answer | None:
        who = {"id": subject.user.id, "password": subject.user.password}
        return self.in_turn(
            "login", method="POST", path=VALIDATE, headers={}, good=(201,),
            body=_password(who, subject.project),
        )  # fmt: skip

    def log_in(self) -> None:
        """Log somebody in, and have a node validate the token for the first time."""
        with self._lock:
            subject = self.dice.choice(self.subjects)
        began = time.monotonic()
        answer = self._login(subject)
        if answer is None:
            return
        self.history.read(began, "a login", subject.shown(answer.token()))
        node = self._node()
        headers = {"X-Auth-Token": self.admin, "X-Subject-Token": answer.headers["X-Subject-Token"]}
        began = time.monotonic()
        found = self.ask(
            node.name, node.url, "first validation", "GET", VALIDATE, headers, good=(200,)
        )
        if found is not None:
            self.history.read(began, "a first validation", subject.shown(found.token()))

    def log_in_by_directory(self) -> None:
        """Log in somebody of the directory, whose token is validated until he is deleted."""
        with self._lock:
            if len(self._logged) >= TOKENS:
                return
            busy = {person.cn for person, _ in self._logged.values()}
            person = next(x for x in self._people if x.cn not in busy)
        who = {"name": person.cn, "password": person.password, "domain": {"id": self.site.domain}}
        answer = self.in_turn(
            "login, directory", method="POST", path=VALIDATE, headers={}, good=(201,),
            body=_password(who, self._project),
        )  # fmt: skip
        if answer is not None:
            register = self._register()
            with self._lock:
                self._logged[str(answer.headers["X-Subject-Token"])] = person, register

    def renew(self) -> None:
        """Replace the tokens that last, in time."""
        if time.monotonic() < self._renewed + RENEWED:
            return
        who = {"name": "admin", "domain": {"id": "default"}, "password": self._password}
        tokens = []
        for user, scope in (
            (who, {"name": "admin", "domain": {"id": "default"}}),
            *(({"id": x.user.id, "password": x.user.password}, {"id": x.project})
              for x in self.subjects),
        ):  # fmt: skip
            body = _password(user, "")
            body["auth"]["scope"]["project"] = scope
            answer = self.in_turn(
                "login", method="POST", path=VALIDATE, headers={}, good=(201,), body=body
            )
            if answer is None:
                return
            tokens.append(str(answer.headers["X-Subject-Token"]))
        self.admin = tokens[0]
        registers = [self._register() for _ in self.subjects]
        with self._lock:
            for subject, token, register in zip(
                self.subjects, tokens[1:], registers, strict=True
            ):
                subject.tokens = {token: register, **dict(list(subject.tokens.items())[1:])}
        self._renewed = time.monotonic()

    def rescope(self) -> None:
        """Exchange the administrator's token for another one."""
        body = {
            "auth": {
                "identity": {"methods": ["token"], "token": {"id": self.admin}},
                "scope": {"project": {"name": "admin", "domain": {"id": "default"}}},
            }
        }
        self.in_turn(
            "re-scope", method="POST", path=VALIDATE, headers={}, good=(201,), body=body
        )

    def look_around(self) -> None:
        """List what a dashboard lists."""
        path = self.dice.choice(("/projects", "/auth/projects", "/auth/catalog", "/services"))
        self.in_turn(
            "list", method="GET", path=path, headers={"X-Auth-Token": self.admin}, good=(200,)
        )

    def try_what_is_wrong(self) -> None:
        """Try a wrong password and an unknown token; what lets them in is wrong."""
        subject = self.subjects[0]
        who = {"id": subject.user.id, "password": "a wrong one"}
        self.in_turn(
            "wrong password", method="POST", path=VALIDATE, headers={}, good=(401,),
            body=_password(who, subject.project),
        )  # fmt: skip
        headers = {"X-Auth-Token": self.admin, "X-Subject-Token": f"gAAAAAB{random_name()}"}
        self.in_turn(
            "unknown token", method="GET", path=VALIDATE, headers=headers, good=(404,)
        )

    # Changes

    def _change(
        self, kind: str, register: str, value: object, method: str, path: str,
        *, good: tuple[int, ...], insists: bool = False, headers: dict[str, str] | None = None,
        body: object = None,
    ) -> bool:  # fmt: skip
        """Ask a node for a change; one without a good answer may be made, now or later, or not.

        :param insists: it is asked for until it is made
        """
        sent = {"X-Auth-Token": self.admin, **(headers or {})}
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(_Doubt), self.history.change(register, value, "a node"):
            while True:
                node = self._node()
                answer = self.ask(
                    node.name, node.url, kind, method, path, sent, good=good, body=body
                )
                if answer is not None:
                    break
                if not insists or self.over.is_set():
                    with self._lock:
                        self.doubtful[kind] += 1
                    raise _Doubt
                # A value that may be there or not is not given again.
                assert time.monotonic() < deadline, f"{kind}: not made for {PATIENCE:.0f} s"
                good = (*good, 404)  # an attempt without an answer may have been made
                time.sleep(PAUSE)
            with self._lock:
                self.changes[kind] += 1
            return True
        return False

    def _node(self) -> Node:
        """One that may be asked."""
        return self.dice.choice([x for x in self.site.nodes if not x.drained])

    def rename(self, kind: str, collection: str, own: str) -> None:
        """Give a user or project a name that nothing has had."""
        name = random_name()
        self._change(
            f"{kind} renamed", f"{kind} {own}", name, "PATCH", f"/{collection}/{own}",
            good=(200,), body={kind: {"name": name}},
        )  # fmt: skip

    def take_role(self, subject: Subject) -> None:
        """Take away the first of a user's roles that are left, and give another before that."""
        node = self._node()
        made = self.ask(
            node.name, node.url, "role made", "POST", "/roles",
            {"X-Auth-Token": self.admin}, good=(201,), body={"role": {"name": random_name()}},
        )  # fmt: skip
        if made is None:
            return
        role = made.body["role"]["id"]
        path = f"/projects/{subject.project}/users/{subject.user.id}/roles/"
        granted = self.ask(
            node.name, node.url, "role given", "PUT", path + role,
            {"X-Auth-Token": self.admin}, good=(204,),
        )  # fmt: skip
        if granted is None:
            return
        subject.roles.append(role)
        old = subject.roles[subject.taken]
        if self._change(
            "role taken", f"first role of {subject.user.id}", subject.taken + 1, "DELETE",
            path + old, good=(204,), insists=True,
        ):  # fmt: skip
            subject.taken += 1

    def revoke(self, subject: Subject) -> None:
        """Revoke a token that has been read for a while."""
        answer = self._login(subject)
        if answer is None:
            return
        token, register = str(answer.headers["X-Subject-Token"]), self._register()
        with self._lock:
            subject.tokens[token] = register
        self.over.wait(CHANGE)
        self._change(
            "token revoked", register, "revoked", "DELETE", VALIDATE, good=(204,), insists=True,
            headers={"X-Subject-Token": token},
        )  # fmt: skip
        with self._lock:
            for old in list(subject.tokens)[1:-TOKENS]:  # the first is never revoked
                del subject.tokens[old]

    def delete_from_directory(self) -> None:
        """Delete somebody from both directories, as a replicated one does."""
        with self._lock:
            found = next(iter(self._logged.items()), None)
        self._bring_back()
        if found is None:
            return
        token, (person, register) = found
        entry = self._insist(lambda: self.site.directories[0].read(person.dn, ["*"]))
        with self.history.change(register, "revoked", "the directory"):
            for server in self.site.directories:
                self._insist(lambda server=server: server.delete(person.dn))
            # The promise counts from the directory's answer.
            time.sleep(BOUND)
        self.over.wait(CHANGE)
        with self._lock:
            self.changes["deleted from the directory"] += 1
            self._people.remove(person)
            del self._logged[token]
        self._deleted.append((time.monotonic(), person, entry))

    def _bring_back(self) -> None:
        """Add somebody again who was deleted long ago: Keystone takes his old tokens then, too."""
        if not self._deleted or time.monotonic() < self._deleted[0][0] + BACK:
            return
        _, person, entry = self._deleted.popleft()
        for server in self.site.directories:
            self._insist(lambda server=server: server.add(person.dn, entry))
        with self._lock:
            self._people.append(person)

    def _insist(self, change: Callable[[], Any]) -> Any:
        import ldap

        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return change()
            except (ldap.NO_SUCH_OBJECT, ldap.ALREADY_EXISTS):
                return None  # done before the answer was lost
            except ldap.LDAPError:
                assert time.monotonic() < deadline, "a directory does not come back"
                time.sleep(PAUSE)


def _once(
    url: str, method: str, path: str, headers: dict[str, str], body: object = None,
    source: str = "",
) -> Answer | None:
    client = Client(url, GIVES_UP, source)
    try:
        return client.request(method, path, headers, body)
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        client.close()


def _address(dice: random.Random) -> str:
    """A loopback address: logins are limited by address, and a cloud's users have many."""
    return "127." + ".".join(str(dice.randint(2, 250)) for _ in range(3))


class _Doubt(Exception):
    """A change had no good answer."""


def _password(who: dict[str, Any], project: str) -> dict[str, Any]:
    identity = {"methods": ["password"], "password": {"user": who}}
    return {"auth": {"identity": identity, "scope": {"project": {"id": project}}}}

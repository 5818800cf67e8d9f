"""Users whom the directory disables, deletes or moves, while their tokens are being validated."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import processes
from support.directory import Directory, User, directory
from support.fault_proxy import FaultProxy
from support.following import SYNCPROV
from support.keystone_world import VALIDATE, Client, World, grant
from support.keystones import keystone_state, serve_as_is
from support.ldap_domains import domain_file, driver_options, make_domain
from support.served import Served, wait_for

pytest.importorskip("keystone")

# Seconds after the directory's answer to a change, from which on no request that begins is told of
# the state before it. It is what docs/ldap.md promises, and goes by leases: however slow the
# machine is, Keystone is asked sooner than that.
BOUND = 1.0


@dataclass
class Site:
    """A Keystone with several workers; its domain has two servers, each behind a proxy."""

    served: Served
    servers: list[Directory]
    proxies: list[FaultProxy]
    folder: Path
    world: World
    domain: str
    project: str
    role: str
    even: str = ""
    used: int = 4

    def user(self) -> User:
        """Return a user whom no other test has changed; an even one, who has the group's role."""
        self.used += 2
        return self.servers[0].users[self.used]

    def login(self, user: User) -> str:
        who = {"name": user.cn, "password": user.password, "domain": {"id": self.domain}}
        identity = {"methods": ["password"], "password": {"user": who}}
        scope = {"project": {"id": self.project}}
        client = Client(self.served.url)
        try:
            body = {"auth": {"identity": identity, "scope": scope}}
            answer = client.request("POST", "/auth/tokens", {}, body)
        finally:
            client.close()
        assert answer.status == 201, answer.body
        return str(answer.headers["X-Subject-Token"])

    def validate(self, token: str) -> int:
        headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
        client = Client(self.served.url)
        try:
            return client.request("GET", VALIDATE, headers).status
        finally:
            client.close()

    def counts(self) -> dict[str, int]:
        from keyfront.middleware.tokens import counters

        return counters.read(self.folder / "counters")

    def follower(self) -> int:
        """Return the number of the process that follows."""
        found: list[int] = []

        def look() -> bool:
            locks = Path("/proc/locks").read_text().splitlines()
            for number in range(4):
                with suppress(FileNotFoundError):
                    inode = os.stat(self.folder / f"follower.{number}").st_ino
                    for line in locks:
                        parts = line.split()
                        if parts[1] == "FLOCK" and parts[5].endswith(f":{inode}"):
                            found[:] = [int(parts[4])]
            return bool(found)

        wait_for(look, "somebody follows")
        return found[0]

    def is_kept(self, token: str) -> bool:
        """Whether the next validation of a token is answered from memory."""
        before = self.counts()
        assert self.validate(token) == 200
        return self.counts()["misses"] == before["misses"]

    def wait_until_kept(self, token: str) -> None:
        wait_for(lambda: all(self.is_kept(token) for _ in range(4)), "its answer is kept")


@dataclass
class Seen:
    """What clients of one token saw: when a request began, and what came of it."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until it goes on at full speed."""
        wait_for(lambda: len(self.answers) >= 20, "it is being validated")

    def last_yes(self) -> float:
        return max((began for began, status in self.answers if status == 200), default=0.0)


@contextmanager
def validating(site: Site, token: str, clients: int = 2) -> Iterator[Seen]:
    """Validate a token at full speed while the block runs."""
    seen, stop = Seen(), threading.Event()
    headers = {"X-Auth-Token": site.world.admin, "X-Subject-Token": token}

    def work() -> None:
        client = Client(site.served.url)
        while not stop.is_set():
            began = time.monotonic()
            try:
                seen.answers.append((began, client.request("GET", VALIDATE, headers).status))
            except OSError as error:  # its worker was killed
                seen.errors.append(str(error))
                client.close()
        client.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("following")
    files = folder / "domains"
    files.mkdir()
    tokens = folder / "tokens"
    extra = (
        "[identity]\ndomain_specific_drivers_enabled = true\n"
        f"domain_config_dir = {files}\n[keyfront_token_cache]\npath = {tokens}\n"
    )
    state = keystone_state(folder / "state", extra=extra)
    domain = make_domain(state, "one")
    one, two = (tmp_path_factory.mktemp(f"slapd-{x}") for x in (1, 2))
    with (
        directory(one, tls="both", users=60, **SYNCPROV) as first,
        directory(two, users=60, **SYNCPROV) as second,
        FaultProxy(first.port) as near,
        FaultProxy(second.port) as far,
    ):
        options = driver_options(
            first, url=f"{near.url()},{far.url()}", user_enabled_attribute="enabled"
        )
        del options["tls_cacertfile"]
        (files / "keystone.one.conf").write_text(domain_file(options))
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            project, role = world.project(), world.role()
            made = Site(
                served, [first, second], [near, far], tokens, world, domain, project, role
            )
            groups = world.call("GET", f"/groups?domain_id={domain}").body["groups"]
            (made.even,) = [x["id"] for x in groups if x["name"] == "even"]
            world.call("PUT", grant("projects", project, "groups", made.even, role))
            yield made


def on_all(site: Site, change: Callable[[Directory], Any]) -> None:
    for server in site.servers:
        change(server)


def disable(server: Directory, user: User) -> None:
    server.modify(user.dn, {"enabled": ["FALSE"]})


def delete(server: Directory, user: User) -> None:
    server.delete(user.dn)


def move(server: Directory, user: User) -> None:
    with server._as_root() as root:
        root.rename_s(user.dn, f"uid={user.uid}", newsuperior=f"ou=Services,{server.suffix}")


def rename(server: Directory, user: User) -> None:
    with server._as_root() as root:
        root.rename_s(user.dn, f"uid={user.uid}-former", delold=1)


def leave_group(server: Directory, user: User) -> None:
    dn = f"cn=even,{server.groups}"
    members = [x for x in server.read(dn)["member"] if x != user.dn.encode()]
    server.modify(dn, {"member": members})


CHANGES = [disable, delete, move, rename, leave_group]


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: str(x.__name__))
def test_a_change_counts_within_the_bound(
    site: Site, change: Callable[[Directory, User], None]
) -> None:
    user, other = site.user(), site.user()
    token, others = site.login(user), site.login(other)
    site.wait_until_kept(token)
    site.wait_until_kept(others)
    issued = site.login(user)  # nobody validates it before the change
    with validating(site, token) as seen:
        seen.wait()
        on_all(site, lambda server: change(server, user))
        changed = time.monotonic()
        wait_for(lambda: seen.answers[-1][1] != 200, "it is refused")
        time.sleep(0.5)
    assert seen.last_yes() <= changed + BOUND
    time.sleep(max(0.0, changed + BOUND - time.monotonic()))
    assert site.validate(issued) != 200
    # Nobody else is refused for it, and he is kept again.
    site.wait_until_kept(others)


def test_a_user_is_the_same_however_the_directory_writes_him(site: Site) -> None:
    """Keystone goes on by the id that he had when he first came, as it does in his tokens."""
    user = site.user()
    token = site.login(user)

    def in_capitals(server: Directory) -> None:
        with server._as_root() as root:
            root.rename_s(user.dn, f"uid={user.uid.upper()}", delold=1)

    on_all(site, in_capitals)
    time.sleep(BOUND)
    site.wait_until_kept(token)
    on_all(site, lambda server: disable(server, user))
    time.sleep(BOUND)
    assert 200 not in {site.validate(token) for _ in range(6)}


@pytest.mark.parametrize("fault", ["cut", "stall", "killed", "stopped"])
def test_a_change_counts_within_the_bound_under_faults(site: Site, fault: str) -> None:
    user, other = site.user(), site.user()
    token, others = site.login(user), site.login(other)
    site.wait_until_kept(token)
    issued = site.login(user)  # nobody validates it before the change
    follower = site.follower()
    with validating(site, token) as seen:
        seen.wait()
        if fault == "killed":
            os.kill(follower, signal.SIGKILL)
        elif fault == "stopped":
            processes.stop(follower)
        else:
            # Of the follower, the connections of the workers besides: what they asked before is
            # still kept.
            getattr(site.proxies[0], fault)()
        try:
            on_all(site, lambda server: disable(server, user))
            changed = time.monotonic()
            time.sleep(BOUND + 0.5)
        finally:
            site.proxies[0].forward()
            if fault == "stopped":
                wait_for(lambda: site.follower() != follower, "another one follows")
                os.kill(follower, signal.SIGCONT)
    late = [began for began, status in seen.answers if status == 200 and began > changed + BOUND]
    assert not late
    # Not before: it could come to the worker that stands still.
    assert site.validate(issued) != 200
    # Somebody follows again, and answers are kept.
    assert site.follower()
    site.wait_until_kept(others)


def test_what_a_request_finds_twice_is_followed(site: Site) -> None:
    """A request sends each search once, and may make several kept values of what it has found: here
    the roles on two projects, which somebody has by a group."""
    user = site.user()
    second = site.world.project()
    site.world.call("PUT", grant("projects", second, "groups", site.even, site.role))
    # It writes who he is, and so keeps nothing.
    token = site.login(user)
    client = Client(site.served.url)
    try:
        identity = {"methods": ["token"], "token": {"id": token}}
        body = {"auth": {"identity": identity, "scope": {"project": {"id": second}}}}
        answer = client.request("POST", "/auth/tokens", {}, body)
    finally:
        client.close()
    assert answer.status == 201, answer.body
    on_all(site, lambda server: leave_group(server, user))
    time.sleep(BOUND)
    assert 200 not in {site.validate(answer.headers["X-Subject-Token"]) for _ in range(6)}


def test_a_token_is_known_from_its_issue(site: Site) -> None:
    site.wait_until_kept(site.login(site.user()))  # the caller is known, too

    def known() -> bool:
        token = site.login(user)
        before = site.counts()
        assert site.validate(token) == 200
        return site.counts()["known"] > before["known"]

    user = site.user()
    wait_for(known, "a first validation is answered without Keystone")


def test_answers_are_kept_as_before(site: Site) -> None:
    """Others who change, and what nobody reads, cost no hit."""
    user = site.user()
    token = site.login(user)
    site.wait_until_kept(token)
    server = site.servers[0]
    kept: list[bool] = []

    def is_kept_often() -> bool:
        told = site.counts()["directory_changes"]
        enabled = "TRUE" if len(kept) % 2 else "FALSE"
        # The directory tells in this order: once the one is told, the other would have been.
        server.modify(user.dn, {"title": [str(len(kept))]})
        server.modify(server.users[1].dn, {"enabled": [enabled]})
        wait_for(lambda: site.counts()["directory_changes"] > told, "it is told")
        # Not where the follower has just stood still, and nobody knows. If it cost a hit at each
        # change, it would be the first answer of each worker.
        answers = [site.is_kept(token) for _ in range(4)]
        kept.append(all(answers))
        return kept.count(True) >= 10

    wait_for(is_kept_often, "the answers are kept", kept)
    server.modify(server.users[1].dn, {"enabled": ["TRUE"]})


def test_a_server_that_lags_has_a_lease_of_its_own(site: Site) -> None:
    """What was read from a replica that is behind ends when that one hears of the change."""
    user = site.user()
    token = site.login(user)
    site.wait_until_kept(token)
    # The workers go to the second one, which has not heard yet when the first one has.
    site.proxies[0].cut()
    try:
        site.wait_until_kept(token)
        disable(site.servers[0], user)
        assert site.validate(token) == 200
        site.wait_until_kept(token)
        disable(site.servers[1], user)
        changed = time.monotonic()
        with validating(site, token) as seen:
            wait_for(lambda: seen.answers and seen.answers[-1][1] != 200, "it is refused")
        assert seen.last_yes() <= changed + BOUND
    finally:
        site.proxies[0].forward()


def test_only_one_process_follows(site: Site) -> None:
    site.follower()
    with (site.folder / "follower.0").open("r+") as lock:
        held = False
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        assert not held


def test_a_directory_is_followed_by_the_password_that_its_domain_has_now(tmp_path: Path) -> None:
    """A domain's options may be in the database, and change while Keystone runs."""
    tokens = tmp_path / "tokens"
    state = keystone_state(
        tmp_path / "state",
        extra="[identity]\ndomain_specific_drivers_enabled = true\n"
        f"domain_configurations_from_database = true\n[keyfront_token_cache]\npath = {tokens}\n",
    )
    domain = make_domain(state, "one")
    folder = tmp_path / "slapd"
    folder.mkdir()
    with (
        directory(folder, tls="both", users=8, **SYNCPROV) as server,
        FaultProxy(server.port) as proxy,
    ):
        options = driver_options(server, url=proxy.url())
        del options["tls_cacertfile"]
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            ldap = {name: str(value) for name, value in options.items()}
            config = {"identity": {"driver": "keyfront_ldap"}, "ldap": ldap}
            world.call("PUT", f"/domains/{domain}/config", {"config": config})
            project, role = world.project(), world.role()
            site = Site(served, [server], [proxy], tokens, world, domain, project, role)
            users = world.call("GET", f"/users?domain_id={domain}").body["users"]
            (who,) = [x["id"] for x in users if x["name"] == server.users[0].cn]
            world.call("PUT", grant("projects", project, "users", who, role))
            site.wait_until_kept(site.login(server.users[0]))
            server.modify(server.service_dn, {"userPassword": ["another-secret"]})
            changed = {"config": {"ldap": {"password": "another-secret"}}}
            world.call("PATCH", f"/domains/{domain}/config", changed)
            proxy.cut()
            proxy.forward()
            site.wait_until_kept(site.login(server.users[0]))

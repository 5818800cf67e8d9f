"""A served Keystone whose users are in two directories, by ``driver = keyfront_ldap``."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dns.rcode
import pytest

from support.directory import Directory, User, directory
from support.dns_server import DNSServer
from support.keystone_world import VALIDATE, Answer, Client, World, grant
from support.keystones import keystone_state, serve_as_is
from support.ldap_domains import domain_file, driver_options, make_domain
from support.served import Served, wait_for

ONE, TWO = "one", "two"


@dataclass(frozen=True)
class Site:
    """A Keystone, and the directories of its domains ``one`` and ``two``."""

    served: Served
    directories: dict[str, Directory]
    domains: dict[str, str]
    project: str
    role: str

    def login(
        self, user: User | str, password: str | None = None, *, domain: str = ONE,
        project: str | None = None,
    ) -> Answer:
        """Ask for a token by name and password; by default the right one."""
        name = user if isinstance(user, str) else user.cn
        if password is None:
            assert isinstance(user, User)
            password = user.password
        who = {"name": name, "password": password, "domain": {"name": domain}}
        auth: dict[str, Any] = {"identity": {"methods": ["password"], "password": {"user": who}}}
        if project:
            auth["scope"] = {"project": {"id": project}}
        client = Client(self.served.url)
        try:
            return client.request("POST", "/auth/tokens", {}, {"auth": auth})
        finally:
            client.close()

    def binds(self, user: User, domain: str = ONE) -> int:
        """How many BINDs the directory got for a user since its start."""
        server = self.directories[domain]
        server.counts()  # all that was sent is in the log now
        text = f'BIND dn="{user.dn}" method=128'
        return server.log.read_text(encoding="utf-8", errors="replace").count(text)

    def searches(self, domain: str) -> int:
        """How often anybody searched in a directory, but for its root, which only tells of life."""
        server = self.directories[domain]
        server.counts()
        text = server.log.read_text(encoding="utf-8", errors="replace")
        return len(re.findall(rf'SRCH base="[^"]*{server.suffix}"', text))

    def wait_until_well(self, user: User, domain: str) -> None:
        """Wait until the workers, each of which has to see it, know that a directory is back."""

        def is_well() -> bool:
            return all(self.login(user, domain=domain).status == 201 for _ in range(8))

        wait_for(is_well, "the directory is back")

    def log(self) -> str:
        """All that the Keystone logged so far."""
        folder = self.served.state / "log"
        return "".join(x.read_text(errors="replace") for x in sorted(folder.iterdir()))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Directory]]:
    one, two = (tmp_path_factory.mktemp(f"slapd-{x}") for x in (ONE, TWO))
    with directory(one, tls="both", ppolicy=True) as first, directory(two, tls="both") as second:
        assert first.ca_file.read_bytes() != second.ca_file.read_bytes()
        yield {ONE: first, TWO: second}


@pytest.fixture(scope="module")
def names() -> Iterator[DNSServer]:
    with DNSServer() as server:
        yield server


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Directory], names: DNSServer
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("ldap-keystone")
    files = folder / "domains"
    files.mkdir()
    extra = (
        "[identity]\ndomain_specific_drivers_enabled = true\n"
        f"domain_config_dir = {files}\n[DEFAULT]\ninsecure_debug = false\n"
    )
    state = keystone_state(folder / "state", extra=extra)
    domains = {name: make_domain(state, name) for name in (ONE, TWO, "broken")}
    first, second = directories[ONE], directories[TWO]
    (files / f"keystone.{ONE}.conf").write_text(domain_file(driver_options(first)))
    # found by DNS, by StartTLS, and in pages
    names.srv("two.test", (0, 100, second.port, "localhost"), ttl=1)
    names.put("localhost", "A", "127.0.0.1")
    starttls = driver_options(second, url="ldap+srv://two.test", use_tls="true", page_size=5)
    own = f"max_waiting = 50\nnameservers = {names.address}\nsrv_domains = localhost"
    (files / f"keystone.{TWO}.conf").write_text(domain_file(starttls, own))
    broken = driver_options(second, tls_cacertfile=folder / "missing.pem")
    (files / "keystone.broken.conf").write_text(domain_file(broken))
    with serve_as_is(state, "uwsgi") as served:
        world = World(served.url, served.password)
        project, role = world.project(), world.role()
        groups = world.call("GET", f"/groups?domain_id={domains[ONE]}").body["groups"]
        (even,) = [x["id"] for x in groups if x["name"] == "even"]
        world.call("PUT", grant("projects", project, "groups", even, role))
        yield Site(served, directories, domains, project, role)


def test_a_login_by_password(site: Site) -> None:
    user = site.directories[ONE].users[1]
    answer = site.login(user)
    assert answer.status == 201, answer.body
    assert answer.body["token"]["user"]["name"] == user.cn
    assert answer.body["token"]["user"]["domain"]["id"] == site.domains[ONE]
    again = site.login(user)
    assert again.body["token"]["user"]["id"] == answer.body["token"]["user"]["id"]


def test_first_logins_of_one_user_at_the_same_time(site: Site) -> None:
    """Stock Keystone answers those with 409 that find that he was written down meanwhile."""
    user = site.directories[TWO].users[19]
    with ThreadPoolExecutor(4) as many:
        answers = list(many.map(lambda _: site.login(user, domain=TWO), range(4)))
    assert [answer.status for answer in answers] == [201] * 4, answers


def test_names_of_all_kinds(site: Site) -> None:
    for domain in (ONE, TWO):
        for user in site.directories[domain].odd_users:
            answer = site.login(user, domain=domain)
            assert answer.status == 201, (user, answer.body)
            assert answer.body["token"]["user"]["name"] == user.cn


def test_roles_by_the_groups_of_the_directory(site: Site) -> None:
    users = site.directories[ONE].users
    answer = site.login(users[2], project=site.project)
    assert answer.status == 201, answer.body
    assert [x["id"] for x in answer.body["token"]["roles"]] == [site.role]
    assert site.login(users[3], project=site.project).status == 401


def test_lists_and_members(site: Site) -> None:
    world = World(site.served.url, site.served.password)
    for domain in (ONE, TWO):
        server = site.directories[domain]
        listed = world.call("GET", f"/users?domain_id={site.domains[domain]}").body["users"]
        expected = {x.cn for x in [*server.users, *server.odd_users]}
        assert {x["name"] for x in listed} == expected
        groups = world.call("GET", f"/groups?domain_id={site.domains[domain]}").body["groups"]
        by_name = {x["name"]: x["id"] for x in groups}
        assert set(by_name) == {"admins", "even", "everybody"}
        members = world.call("GET", f"/groups/{by_name['even']}/users").body["users"]
        assert {x["name"] for x in members} == {x.cn for x in server.users[::2]}


@pytest.mark.parametrize("password", ["wrong", "", "sécret", "\0", "x" * 4000])
def test_a_wrong_password(site: Site, password: str) -> None:
    user = site.directories[TWO].users[4]
    before = site.binds(user, TWO)
    answer = site.login(user, password, domain=TWO)
    assert answer.status == 401
    assert "Retry-After" not in answer.headers
    # an empty one would have succeeded, as a bind of nobody, and some servers end one at a NUL
    assert site.binds(user, TWO) - before == (1 if password.strip("\0") else 0)


def test_nobody_of_that_name(site: Site) -> None:
    for name in ("nobody", "*", "User 1)(cn=*", "User*"):
        assert site.login(name, "x").status == 401


def test_each_login_is_one_bind(site: Site) -> None:
    server = site.directories[TWO]
    user, count = server.users[5], 6
    site.login(server.users[6], domain=TWO)
    before, searches = site.binds(user, TWO), site.searches(TWO)
    for _ in range(count):
        assert site.login(user, domain=TWO).status == 201
    assert site.binds(user, TWO) - before == count
    # by name, by id, and the groups; the stock driver sends nine searches without a cache
    assert count <= site.searches(TWO) - searches <= 3 * count


def test_a_locked_user_is_told_apart_in_the_log_only(site: Site) -> None:
    server = site.directories[ONE]
    user = server.users[7]
    server.lock(user.dn)
    locked, wrong = site.login(user), site.login(server.users[8], "wrong")
    assert (locked.status, wrong.status) == (401, 401)
    assert locked.body == wrong.body
    assert re.search(rf"LDAP login of {user.dn}: .*locked", site.log())
    server.unlock(user.dn)
    assert site.login(user).status == 201


def test_one_wrong_password_counts_once(site: Site) -> None:
    server = site.directories[ONE]
    user = server.users[9]
    for _ in range(3):
        site.login(server.users[10])
    site.login(user, "wrong")
    assert server.failures(user.dn) == 1


def test_a_password_that_must_be_changed_or_is_too_old(site: Site) -> None:
    server = site.directories[ONE]
    server.must_change(server.users[11].dn)
    server.expire(server.users[12].dn)
    for user, word in ((server.users[11], "must be changed"), (server.users[12], "expired")):
        assert site.login(user).status == 401
        assert re.search(rf"LDAP login of {user.dn}: .*{word}", site.log())


@pytest.mark.parametrize("domain", [ONE, TWO])
def test_a_change_of_password_counts_at_once(site: Site, domain: str) -> None:
    server = site.directories[domain]
    user = server.users[13]
    assert site.login(user, domain=domain).status == 201
    server.password(user.dn, "quite another")
    assert site.login(user, domain=domain).status == 401
    assert site.login(user, "quite another", domain=domain).status == 201


def test_a_user_who_is_deleted_is_gone_at_once(site: Site) -> None:
    server = site.directories[TWO]
    user = server.users[14]
    assert site.login(user, domain=TWO).status == 201
    server.delete(user.dn)
    assert site.login(user, domain=TWO).status == 401


def test_two_directories_at_once(site: Site) -> None:
    """Both have users of the same names; each is asked for its own, trusted by its own CA."""
    people = [(domain, user) for user in range(1, 5) for domain in (ONE, TWO)] * 5
    for domain, number in people[:8]:
        # Keystone notes a new user in its database, and SQLite has no room for two who do so
        assert site.login(site.directories[domain].users[number], domain=domain).status == 201
    before = {
        (domain, number): site.binds(site.directories[domain].users[number], domain)
        for domain, number in set(people)
    }

    def login(which: tuple[str, int]) -> tuple[int, str]:
        domain, number = which
        answer = site.login(site.directories[domain].users[number], domain=domain)
        return answer.status, answer.body["token"]["user"]["domain"]["id"]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(login, people))
    assert answers == [(201, site.domains[domain]) for domain, _ in people]
    for (domain, number), binds in before.items():
        user = site.directories[domain].users[number]
        assert site.binds(user, domain) - binds == people.count((domain, number))


def test_a_domain_with_a_broken_configuration_is_alone_with_it(site: Site) -> None:
    answer = site.login("User 1", "x", domain="broken")
    assert answer.status == 500
    assert "missing.pem" not in str(answer.body)
    assert re.search(r"\[ldap\] tls_cacertfile = \S+missing\.pem: must be", site.log())
    assert site.login(site.directories[ONE].users[1]).status == 201


def test_a_directory_that_is_gone_is_no_wrong_password(site: Site) -> None:
    server, other = site.directories[TWO], site.directories[ONE]
    user = server.users[15]
    token = site.login(user, domain=TWO).headers["X-Subject-Token"]
    server.kill()
    try:
        client = Client(site.served.url)
        validation = client.request(
            "GET", "/auth/tokens", {"X-Auth-Token": token, "X-Subject-Token": token}
        )
        client.close()
        assert validation.status == 503, validation.body
        for password in (user.password, "wrong"):
            answer = site.login(user, password, domain=TWO)
            assert answer.status == 503, answer.body
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.body["error"]["title"] == "Service Unavailable"
            assert "localhost" not in str(answer.body)
        # the other domain and the database go on
        assert site.login(other.users[1]).status == 201
        World(site.served.url, site.served.password).call("GET", "/projects")
        assert re.search(rf"LDAP: .*localhost:{server.port}", site.log())
    finally:
        server.start()
    site.wait_until_well(user, TWO)
    assert site.login(user, "wrong", domain=TWO).status == 401


def test_dns_that_is_gone_is_no_outage(site: Site, names: DNSServer) -> None:
    user = site.directories[TWO].users[17]
    assert site.login(user, domain=TWO).status == 201
    names.rcode = dns.rcode.SERVFAIL
    try:
        asked = names.count("SRV")
        wait_for(lambda: names.count("SRV") > asked, "it was looked up in vain")
        assert site.login(user, domain=TWO).status == 201
    finally:
        names.rcode = None


def test_a_directory_that_does_not_answer(site: Site) -> None:
    server = site.directories[TWO]
    user = server.users[16]
    assert site.login(user, domain=TWO).status == 201
    server.pause()
    try:
        answer = site.login(user, domain=TWO)
        assert answer.status == 503, answer.body
        assert answer.headers["Retry-After"]
    finally:
        server.resume()
    site.wait_until_well(user, TWO)


def test_a_wrong_password_of_the_service_is_no_wrong_password(
    site: Site, tmp_path: Path
) -> None:
    server = site.directories[TWO]
    user = server.users[17]
    state = keystone_state(
        tmp_path / "state",
        extra="[identity]\ndomain_specific_drivers_enabled = true\n"
        f"domain_config_dir = {tmp_path}\n",
    )
    make_domain(state, TWO)
    (tmp_path / f"keystone.{TWO}.conf").write_text(
        domain_file(driver_options(server, password="guessed"))
    )
    with serve_as_is(state, "uwsgi") as served:
        other = Site(served, site.directories, site.domains, "", "")
        assert other.login(user, domain=TWO).status == 500
        assert "the identity of [ldap] user was refused" in other.log()
        assert "guessed" not in other.log()


def test_a_configuration_from_the_database(site: Site, tmp_path: Path) -> None:
    server = site.directories[TWO]
    state = keystone_state(
        tmp_path / "state",
        extra="[identity]\ndomain_specific_drivers_enabled = true\n"
        "domain_configurations_from_database = true\n"
        "[domain_config]\nadditional_whitelisted_options = keyfront_ldap:[max_waiting]\n",
    )
    domain = make_domain(state, "three")
    with serve_as_is(state, "uwsgi") as served:
        world = World(served.url, served.password)
        options = driver_options(server)
        config = {
            "identity": {"driver": "keyfront_ldap"},
            "ldap": {name: str(value) for name, value in options.items()},
            "keyfront_ldap": {"max_waiting": 7},
        }
        world.call("PUT", f"/domains/{domain}/config", {"config": config})
        there = Site(served, {"three": server}, {"three": domain}, "", "")
        user = server.users[18]
        assert there.login(user, domain="three").status == 201
        assert there.login(user, "wrong", domain="three").status == 401
        # another directory from now on
        other = site.directories[ONE]
        changed = {"url": other.ldaps_url, "tls_cacertfile": str(other.ca_file)}
        world.call("PATCH", f"/domains/{domain}/config", {"config": {"ldap": changed}})
        moved = site.binds(other.users[18])
        assert there.login(other.users[18], domain="three").status == 201
        assert site.binds(other.users[18]) == moved + 1


def test_a_user_who_is_new_logs_in_without_redis(site: Site, tmp_path: Path) -> None:
    """What maps him and his groups to ids is written, and takes nothing from anybody.

    When the directory has disabled him he is refused, and nobody need be told of that either.
    """
    files = tmp_path / "domains"
    files.mkdir()
    directory = site.directories[ONE]
    (files / f"keystone.{ONE}.conf").write_text(
        domain_file(driver_options(directory, user_enabled_attribute="enabled"))
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        extra = (
            "[identity]\ndomain_specific_drivers_enabled = true\n"
            f"domain_config_dir = {files}\n[keyfront_token_cache]\n"
            f"coordinator = redis://127.0.0.1:{nobody.getsockname()[1]}\n"
        )
        state = keystone_state(tmp_path / "state", extra=extra)
        make_domain(state, ONE)
        with serve_as_is(state, "uwsgi") as served:
            there = Site(served, site.directories, {}, "", "")
            user = site.directories[ONE].users[2]
            first, second = there.login(user), there.login(user)
            assert first.status == second.status == 201, first.body
            assert first.body["token"]["user"]["id"] == second.body["token"]["user"]["id"]
            token, world = first.headers["X-Subject-Token"], World(served.url, served.password)

            def statuses() -> tuple[int, int]:
                """As the token that is asked about, and as the one that asks."""
                client = Client(served.url)
                try:
                    asked = {"X-Auth-Token": world.admin, "X-Subject-Token": token}
                    own = {"X-Auth-Token": token, "X-Subject-Token": token}
                    return (
                        client.request("GET", VALIDATE, asked).status,
                        client.request("GET", VALIDATE, own).status,
                    )
                finally:
                    client.close()

            assert statuses() == (200, 200)
            directory.modify(user.dn, {"enabled": ["FALSE"]})
            try:
                for _ in range(2):
                    assert statuses() == (404, 401)
            finally:
                directory.modify(user.dn, {"enabled": ["TRUE"]})


def test_no_password_in_any_log(site: Site) -> None:
    """Runs last: all that went before left its traces."""
    text = site.log() + site.served.output.decode(errors="replace")
    assert "LDAP login of" in text
    for server in site.directories.values():
        for secret in (server.service_password, *(x.password for x in server.users)):
            assert secret not in text

"""A directory's pool on real slapds: logins, outages, several servers, greenlets, forks."""

from __future__ import annotations

import datetime
import functools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ldap3
import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    OptionError,
    Verdict,
)
from keyfront.middleware.ldap import TLS, LDAPPool, pool_counters
from keyfront.middleware.ldap.protocol import controls, messages
from support.certificates import certificates
from support.directory import Directory, User, directory
from support.fault_proxy import FaultProxy, proxy_process
from support.output import Lines
from support.served import PATIENCE, wait_for

pytestmark = pytest.mark.usefixtures("nobody_gives_up", "refused_for_long")

# Seconds in which a server that is well answers, on a busy machine as well; others are waited for.
SOON = 6.0
KINDS = ("plain", "ldaps", "starttls")
ROOT = Path(__file__).parents[3]

Make = Callable[..., LDAPPool]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True, users=60) as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("second"), ppolicy=True, users=60) as made:
        yield made


@pytest.fixture
def d(served: Directory) -> Iterator[Directory]:
    if served.pid is None:
        served.start()
    served.mark()
    yield served
    if served.pid is None:
        served.start()


@pytest.fixture
def make(served: Directory) -> Iterator[Make]:
    pools = []

    def make(*urls: str, **options: Any) -> LDAPPool:
        options = {
            "bind_dn": served.service_dn, "bind_password": served.service_password,
            "min_size": 0, "timeout": PATIENCE, "connect_timeout": PATIENCE,
            "operation_timeout": PATIENCE, **options,
        }  # fmt: skip
        pools.append(LDAPPool(urls, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(0.0)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def secured(d: Directory, kind: str, **options: Any) -> dict[str, Any]:
    """The first URL, and TLS, for a kind of connection."""
    tls = TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls")
    return {"tls": tls, **options}


def url(d: Directory, kind: str) -> str:
    return d.ldaps_url if kind == "ldaps" else d.url


def refusal(pool: LDAPPool, name: str, password: str) -> Verdict:
    with pytest.raises(CredentialsError) as caught:
        pool.authenticate(name, password)
    return caught.value.verdict


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, or its error, when they all begin at once."""
    barrier = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)

    def run(n: int) -> None:
        barrier.wait(PATIENCE)
        try:
            found[n] = calls[n]()
        except Exception as error:
            found[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert None not in found
    return found


def logins(pool: LDAPPool, users: list[User], password: str = "") -> list[Any]:
    return together(
        [lambda user=user: pool.authenticate(user.dn, password or user.password)  # type: ignore
         for user in users]
    )  # fmt: skip


def kinds_of(found: list[Any]) -> Counter[str]:
    return Counter(type(each).__name__ for each in found)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def is_stopped(d: Directory) -> bool:
    """A signal takes effect a little later than it is sent."""
    states = Path(f"/proc/{d.pid}/task").glob("*/stat")
    return all(state.read_text().rpartition(")")[2].split()[0] == "T" for state in states)


# The service's own password

NEVER_BOUND = """
import sys
from keyfront.middleware.ldap import LDAPPool
with LDAPPool(sys.argv[1], bind_dn=sys.argv[2], bind_password="right", min_size=0) as pool:
    print(len(pool.search("dc=example,dc=org", 0).entries), flush=True)
"""

REFUSED = """
import sys, time
from keyfront.errors import CredentialsError
from keyfront.middleware.ldap import LDAPPool, service_refusals
service_refusals.HOLD_SECONDS = service_refusals._TURN_SECONDS = 100.0
url, dn = sys.argv[1:]
pool = LDAPPool(url, bind_dn=dn, bind_password="an old one", min_size=1)
print("begun", flush=True)
for line in sys.stdin:
    try:
        pool.search("dc=example,dc=org")
    except CredentialsError as error:
        print(error.verdict.name, flush=True)
"""


@pytest.fixture
def account(d: Directory, other: Directory) -> Iterator[dict[str, str]]:
    """An account of its own: what is refused of it is known on this node for a while."""
    name = f"cn=service{time.monotonic_ns()},ou=Services,{d.suffix}"
    role = {"objectClass": ["organizationalRole", "simpleSecurityObject"]}
    for each in (d, other):
        each.add(name, role | {"userPassword": ["right"]})
        each.mark()
    yield {"bind_dn": name, "bind_password": "right"}
    for each in (d, other):
        each.delete(name)


def test_all_processes_of_a_node_offer_a_refused_password_once(
    d: Directory, account: dict[str, str]
) -> None:
    command = [sys.executable, "-c", REFUSED, d.url, account["bind_dn"]]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    others = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        for each in others * 5:
            each.stdin.write("search\n")
            each.stdin.flush()
        for each in others:
            lines = [each.stdout.readline() for _ in range(6)]
            assert lines == ["begun\n"] + ["WRONG_PASSWORD\n"] * 5
        assert d.failures(account["bind_dn"]) == 1
        assert d.counts().binds == 1
    finally:
        for each in others:
            each.communicate()


def test_a_process_that_never_bound_meets_one_that_lags_first(
    d: Directory, other: Directory, make: Make, account: dict[str, str]
) -> None:
    """Nobody of the node has been taken yet: that stops neither it nor the others."""
    d.password(account["bind_dn"], "what it was before")
    d.mark()
    command = [sys.executable, "-c", NEVER_BOUND, f"{d.url},{other.url}", account["bind_dn"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stdout == "1\n", done.stderr
    for _ in range(2):
        assert make(d.url, other.url, **account).search(d.suffix, 0).entries
    assert d.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1


def test_one_address_of_a_name_lags(
    d: Directory, other: Directory, make: Make, account: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An Active Directory domain is one name and many controllers."""
    hosts = [f"127.0.1.{n}" for n in (1, 2)]
    with FaultProxy(d.port, host=hosts[0]) as one, FaultProxy(other.port, host=hosts[1]) as two:
        found = [(2, 1, 6, "", (hosts[n], x.port)) for n, x in enumerate((one, two))]
        look_up = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo",
            lambda host, *more, **options: found if host == "ad.example.org"
            else look_up(host, *more, **options),
        )  # fmt: skip
        d.password(account["bind_dn"], "what it was before")
        d.mark()
        for _ in range(3):
            pool = make("ldap://ad.example.org", **account)
            assert pool.search(d.suffix, 0).entries
            assert pool.get_stats()["servers_up"] == 1
        assert d.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1
        # Refused by both it is wrong, once each.
        other.password(account["bind_dn"], "another one")
        other.mark()
        for _ in range(3):
            pool._search_pool.retire(lambda connection: True)
            with pytest.raises(CredentialsError):
                pool.search(d.suffix)
        assert other.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1
        assert d.counts().binds_refused == 1


def test_a_new_password_of_the_service_needs_no_restart(
    d: Directory, make: Make, tmp_path: Path, account: dict[str, str]
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("right" + "\n")
    options = {**account, "bind_password": "", "bind_password_file": str(secret)}
    pools = [make(d.url, **options) for _ in range(2)]
    for number in range(2):
        for pool in pools:
            assert pool.search(d.suffix).entries
        d.password(account["bind_dn"], f"another-{number}")
        secret.write_text(f"another-{number}")
        for pool in pools:
            pool._search_pool.retire(lambda connection: True)
    d.mark()
    for pool in pools:
        together([functools.partial(pool.search, d.suffix) for _ in range(3)])
        assert pool.search(d.suffix).entries
        assert pool.get_stats()["searches_failed"] == 0
    # The old one was offered by one of them, as by then the node knew.
    assert d.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1
    # A file that is gone, or open to others, leaves what there was.
    secret.chmod(0o644)
    for pool in pools:
        pool._search_pool.retire(lambda connection: True)
        assert pool.search(d.suffix).entries


def test_a_replica_that_has_not_heard_of_a_password_is_passed_over(
    d: Directory, other: Directory, make: Make, account: dict[str, str]
) -> None:
    pool = make(d.url, other.url, **account)
    assert pool.search(d.suffix).entries
    d.password(account["bind_dn"], "what it was before")
    d.mark()
    for _ in range(3):
        pool._search_pool.retire(lambda connection: True)
        assert pool.search(d.suffix).entries
    assert d.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1
    assert pool.get_stats()["servers_up"] == 2
    # To a process that has never bound, too, and that keeps nobody else waiting.
    command = [sys.executable, "-c", NEVER_BOUND, f"{d.url},{other.url}", account["bind_dn"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stdout == "1\n", done.stderr
    assert d.counts().binds_refused == 1
    # Refused by both it is wrong.
    other.password(account["bind_dn"], "another one")
    other.mark()
    for _ in range(3):
        pool._search_pool.retire(lambda connection: True)
        with pytest.raises(CredentialsError):
            pool.search(d.suffix)
    assert other.wait_for(lambda counts: counts.binds_refused, "").binds_refused == 1
    assert d.counts().binds_refused == 1


# Logging in and searching


def test_everybody_by_name(d: Directory, make: Make, kind: str) -> None:
    searched = make(url(d, kind), search_base=d.people, **secured(d, kind))
    by_template = make(url(d, kind), user_dn="uid={}," + d.people, **secured(d, kind))
    people = d.users[:3] + d.odd_users
    for pool in (searched, by_template):
        for user in people:
            identity = pool.authenticate(user.uid, user.password)
            assert (identity.name, identity.server) == (user.uid, url(d, kind))
            assert pool.search(identity.dn, 0).entries[0][1]["mail"] == [user.mail.encode()]
            assert refusal(pool, user.uid, "wrong") is Verdict.WRONG_PASSWORD
            d.unlock(user.dn)
        # a filter or a DN is no name
        for name in ("*", "user*", "user0)(uid=*", d.users[0].dn, "user0,ou=People", "nobody"):
            verdict = refusal(pool, name, d.users[0].password)
            assert verdict in (Verdict.UNKNOWN_USER, Verdict.WRONG_PASSWORD)
        stats = pool.get_stats()
        assert (stats["auth_opened"], stats["auth_lost"]) == (1, 0)
        assert stats["search_opened"] == 1


def test_an_answer_has_a_bound(d: Directory, make: Make) -> None:
    pool = make(d.url, max_entries=59, max_answer=1, max_size=1)
    everybody = {"filter": "(objectClass=kfUser)", "attributes": ["uid"]}
    for page_size in (0, 7):
        with pytest.raises(DirectoryAnswerError, match=r"more than 59 entries \(max_entries\)"):
            pool.search(d.people, page_size=page_size, **everybody)
        assert pool.search(d.users[0].dn, 0).entries
    assert len(pool.search(d.people, filter="(uid=user1*)", page_size=3).entries) == 11
    groups = [f"cn=large{n},{d.groups}" for n in range(2)]
    kept = {"objectClass": ["kfGroup"], "ou": ["x" * 100_000]}
    try:
        for n, dn in enumerate(groups):
            d.add(dn, kept | {"cn": [f"large{n}"], "description": ["y" * 2_000_000] * (n == 0)})
        # One that is too large, and one of many values that are nothing each.
        with pytest.raises(DirectoryAnswerError, match=r"max_answer|more than 1048576"):
            pool.search(d.groups, 1, "(cn=large0)")
        d.modify(groups[1], {"businessCategory": [f"{n:x}" for n in range(20_000)]})
        with pytest.raises(DirectoryAnswerError, match=r"more than 1024 KiB \(max_answer\)"):
            for page_size in (0, 1):
                pool.search(d.groups, 1, "(cn=large1)", page_size=page_size)
        assert pool.search(d.users[0].dn, 0).entries
        assert make(d.url).search(d.groups, 1, "(cn=large*)").entries
    finally:
        for dn in groups:
            d.delete(dn)
    assert pool.servers[0].failures == 0
    assert pool.get_stats()["search_size"] <= 1


def test_one_entry_must_have_the_name(d: Directory, make: Make) -> None:
    pool = make(d.url, search_base=d.suffix, user_filter="(objectClass={})")
    assert refusal(pool, "inetOrgPerson", d.users[0].password) is Verdict.UNKNOWN_USER
    by_mail = make(d.url, search_base=d.suffix, user_filter="(|(uid={})(mail={}))")
    assert by_mail.authenticate(d.users[9].uid, d.users[9].password).dn == d.users[9].dn
    d.mark()
    nowhere = make(d.url, search_base="ou=Nowhere,dc=example,dc=org")
    with pytest.raises(DirectoryAnswerError) as caught:
        nowhere.authenticate("user0", d.users[0].password)
    assert caught.value.code == 32
    assert not isinstance(caught.value, CredentialsError)


def test_what_is_no_name_or_password_is_refused(d: Directory, make: Make) -> None:
    pool = make(d.url)
    user = d.users[0]
    pool.authenticate(user.dn, user.password)
    d.mark()
    # Some servers end a password at a NUL, and would take this one.
    for password in (f"{user.password}\0", f"{user.password}\0x".encode(), "\0"):
        assert refusal(pool, user.dn, password) is Verdict.WRONG_PASSWORD
        with pool.connection() as connection, pytest.raises(CredentialsError, match="NUL"):
            connection.bind(user.dn, password)
    with pytest.raises(OptionError, match="bind_password"):
        make(d.url, bind_password="a\0b")
    assert d.counts().binds_refused == 0
    # The server says invalidDNSyntax: it is a name that nobody has.
    assert refusal(pool, "no DN at all", user.password) is Verdict.UNKNOWN_USER
    assert pool.get_stats()["logins_failed"] == 0


def test_the_name_may_be_that_of_the_entry(d: Directory, make: Make) -> None:
    by_any = {"search_base": d.people, "user_filter": "(|(uid={})(mail={}))"}
    pool = make(d.url, **by_any, user_name_attribute="uid")
    user = d.users[5]
    for typed in (user.uid, user.uid.upper(), "mail5@EXAMPLE.org"):
        if typed.startswith("mail"):
            d.modify(user.dn, {"mail": ["mail5@example.org", "only-mine@example.org"]})
            typed = "ONLY-mine@example.org"
        found = pool.authenticate(typed, user.password)
        assert (found.dn, found.name) == (user.dn, user.uid)
    # One that says not whom, as it is not there or there twice, lets nobody in.
    for attribute in ("roomNumber", "mail"):
        pool = make(d.url, **by_any, user_name_attribute=attribute)
        with pytest.raises(CredentialsError, match=attribute) as caught:
            pool.authenticate(user.uid, user.password)
        assert caught.value.verdict is Verdict.UNKNOWN_USER
    d.modify(user.dn, {"mail": [user.mail]})


def test_a_login_is_one_bind(d: Directory, make: Make, kind: str) -> None:
    pool = make(url(d, kind), search_base=d.people, **secured(d, kind))
    pool.authenticate("user0", d.users[0].password)
    d.mark()
    for _ in range(3):
        pool.authenticate("user0", d.users[0].password)
    refusal(pool, "user1", "wrong")
    refusal(pool, "nobody", "wrong")
    refusal(pool, "user1", "")
    counts = d.wait_for(lambda counts: counts.binds_refused, "the refusal is in its log")
    assert (counts.binds, counts.binds_refused) == (4, 1)
    assert (counts.searches, counts.connects, counts.starttls) == (5, 0, 0)
    d.unlock(d.users[1].dn)


def test_fifty_at_once_are_fifty_binds(d: Directory, make: Make) -> None:
    pool = make(d.url, auth_max_size=8)
    users = d.users[:50]
    # eight idle connections, as somebody each
    assert kinds_of(logins(pool, users[:8])) == {"Identity": 8}
    d.mark()
    found = logins(pool, users)
    assert [each.dn for each in found] == [user.dn for user in users]
    assert kinds_of(logins(pool, users, "wrong")) == {"CredentialsError": 50}
    counts = d.wait_for(lambda counts: counts.binds_refused >= 50, "refusals are in its log")
    assert (counts.binds, counts.binds_refused) == (100, 50)
    stats = pool.get_stats()
    assert stats["auth_size"] <= 8
    assert stats["binds"] == 108
    # slapd may still learn of those that were closed before
    size = stats["auth_size"] + stats["search_size"]
    until(lambda: d.open_connections() == size, "slapd has as many")
    for user in users:
        assert d.failures(user.dn) == 1
        d.unlock(user.dn)


def test_the_third_wrong_password_locks_and_not_an_earlier_one(d: Directory, make: Make) -> None:
    victim = d.users[50]
    pool = make(d.url, auth_max_size=8)
    assert kinds_of(logins(pool, d.users[:8])) == {"Identity": 8}
    assert pool.get_stats()["auth_idle"] > 1
    d.mark()
    for attempt in (1, 2):
        assert refusal(pool, victim.dn, "wrong") is Verdict.WRONG_PASSWORD
        assert d.failures(victim.dn) == attempt
    # the right one still counts
    assert pool.authenticate(victim.dn, victim.password).dn == victim.dn
    assert d.failures(victim.dn) == 0
    for _ in range(3):
        refusal(pool, victim.dn, "wrong")
    assert refusal(pool, victim.dn, victim.password) is Verdict.LOCKED
    assert d.counts().binds == 7
    d.unlock(victim.dn)
    assert pool.authenticate(victim.dn, victim.password)


def test_nobody_is_locked_out_through_us(d: Directory, make: Make) -> None:
    """The directory locks after the third wrong password."""
    victim = d.users[8]
    pools = [make(d.url, max_refused_logins=2) for _ in range(2)]
    for n in range(10):
        with pytest.raises(CredentialsError):
            pools[n % 2].authenticate(victim.dn, "wrong", address="192.0.2.66")
    assert d.failures(victim.dn) == 2
    # He goes on, from where he is.
    assert pools[0].authenticate(victim.dn, victim.password, address="192.0.2.1").dn == victim.dn
    d.unlock(victim.dn)


def test_nor_by_one_name_in_many_spellings(d: Directory, make: Make) -> None:
    """slapd takes all of these for one user."""
    victim = d.users[56]
    wide = victim.uid.translate({x: x + 0xFEE0 for x in range(0x21, 0x7F)})
    rest = victim.dn.partition(",")[2]
    dns = [
        victim.dn, f"uid={wide},{rest}", f"userid=\\75{victim.uid[1:]}, {rest.upper()}",
        f"0.9.2342.19200300.100.1.1=\\55{victim.uid[1:]},{rest}", f'uid="{victim.uid}";{rest}',
    ]  # fmt: skip
    names = [victim.uid, victim.uid.upper(), wide, wide.upper()]
    for options, spellings in (({}, dns), ({"user_dn": f"uid={{}},{d.people}"}, names)):
        pool = make(d.url, **options)
        for each in spellings:
            pool.authenticate(each, victim.password)
        limited = make(d.url, max_refused_logins=2, **options)
        for each in spellings:
            with pytest.raises(CredentialsError):
                limited.authenticate(each, "wrong", address=f"192.0.2.{len(options)}")
        assert d.failures(victim.dn) == 2
        d.unlock(victim.dn)


def test_why_a_login_is_refused(d: Directory, make: Make) -> None:
    expired, reset, soon, grace = d.users[51:55]
    d.expire(expired.dn)
    d.must_change(reset.dn)
    d.expire_soon(soon.dn)
    d.expire(grace.dn, grace=True)
    pool = make(d.url)
    assert refusal(pool, expired.dn, expired.password) is Verdict.EXPIRED
    assert refusal(pool, reset.dn, reset.password) is Verdict.MUST_CHANGE
    seconds = pool.authenticate(soon.dn, soon.password).password_expiring
    assert seconds is not None
    assert 0 < seconds <= 86400
    assert pool.authenticate(grace.dn, grace.password).grace is not None
    silent = make(d.url, password_policy=False)
    assert silent.authenticate(soon.dn, soon.password).password_expiring is None
    assert silent.authenticate(reset.dn, reset.password)
    assert pool.get_stats()["auth_opened"] == 1


def test_changes_are_seen_at_once(d: Directory, make: Make) -> None:
    pool = make(d.url, search_base=d.people)
    dn = f"uid=brief,{d.people}"
    person = {"objectClass": ["inetOrgPerson"], "uid": ["brief"], "cn": ["B"], "sn": ["B"]}
    assert refusal(pool, "brief", "first") is Verdict.UNKNOWN_USER
    d.add(dn, {**person, "userPassword": ["first"]})
    assert pool.authenticate("brief", "first").dn == dn
    d.password(dn, "second")
    assert refusal(pool, "brief", "first") is Verdict.WRONG_PASSWORD
    assert pool.authenticate("brief", "second").dn == dn
    d.delete(dn)
    assert refusal(pool, "brief", "second") is Verdict.UNKNOWN_USER
    with pytest.raises(CredentialsError):
        pool.authenticate("brief", "first")
    assert pool.get_stats()["auth_opened"] == 1


def test_a_refused_service_is_not_locked(d: Directory, make: Make) -> None:
    pool = make(d.url, bind_password="wrong", min_size=3, search_base=d.people)
    found = together([lambda: pool.search(d.people, 0) for _ in range(20)])
    assert {each.verdict for each in found} == {Verdict.WRONG_PASSWORD}
    with pytest.raises(DirectoryUnavailableError, match=r"bind_dn or .* refused"):
        pool.authenticate("user0", d.users[0].password)
    counts = d.wait_for(lambda counts: counts.binds_refused, "the refusal is in its log")
    assert (counts.binds, counts.binds_refused) == (1, 1)
    assert d.failures(d.service_dn) == 1
    d.unlock(d.service_dn)


def test_pages_come_over_one_connection(d: Directory, make: Make) -> None:
    pool = make(d.url, max_size=4)
    everybody = {user.uid for user in d.users + d.odd_users}

    def page() -> set[str]:
        answer = pool.search(d.people, 1, attributes=["uid"], page_size=7)
        assert len(answer.entries) == len(everybody)
        return {found["uid"][0].decode() for _, found in answer.entries}

    assert page() == everybody
    pages = -(-len(everybody) // 7)
    d.mark()
    assert page() == everybody
    assert d.counts().searches == pages
    found = together([page for _ in range(12)])
    assert all(each == everybody for each in found)
    assert d.counts().searches == 13 * pages
    assert pool.get_stats()["search_size"] <= 4


def test_the_rest_of_ldap_by_ldap3(d: Directory, make: Make) -> None:
    pool = make(d.url, bind_dn=d.root_dn, bind_password=d.root_password, max_size=1)
    dn = d.users[30].dn
    with pool.connection() as connection:
        changes = {"description": [(ldap3.MODIFY_REPLACE, ["changed"])]}
        assert connection.ldap3.modify(dn, changes)
        assert connection.ldap3.search(dn, "(objectClass=*)")
        assert connection.ldap3.response
    assert pool.search(dn, 0).entries[0][1]["description"] == [b"changed"]
    with pool.connection() as connection:
        assert connection.ldap3.response is None  # what the last user asked
        assert connection.bound_as == d.root_dn
        connection.bind(dn, d.users[30].password)
    with pool.connection() as connection:
        assert connection.bound_as == d.root_dn
    assert pool.get_stats()["search_opened"] == 2


# Outages


def test_a_stopped_server_is_no_verdict(d: Directory, make: Make, kind: str) -> None:
    user = d.users[0]
    pool = make(url(d, kind), search_base=d.people, **secured(d, kind))
    direct = make(url(d, kind), **secured(d, kind))
    for _ in range(2):
        pool.authenticate("user0", user.password)
        direct.authenticate(user.dn, user.password)
        d.stop()
        for name, each in (("user0", pool), (user.dn, direct)):
            for password in (user.password, "wrong"):
                with pytest.raises(DirectoryUnavailableError):
                    each.authenticate(name, password)
        d.start()
        until(lambda: pool.get_stats()["servers_up"], "it is seen to be back")
        until(lambda: direct.get_stats()["servers_up"], "it is seen to be back")
        assert refusal(direct, user.dn, "wrong") is Verdict.WRONG_PASSWORD
    assert direct.get_stats()["servers_up"] == 1


def test_a_server_that_hangs_is_no_verdict(d: Directory, make: Make) -> None:
    user = d.users[0]
    pool = make(d.url, operation_timeout=SOON, connect_timeout=SOON)
    pool.authenticate(user.dn, user.password)
    d.pause()
    until(lambda: is_stopped(d), "all its threads are stopped")
    try:
        for _ in range(3):
            with pytest.raises(DirectoryUnavailableError):
                pool.authenticate(user.dn, user.password)
    finally:
        d.resume()
    until(lambda: pool.get_stats()["servers_up"], "it is seen to be back")
    assert pool.authenticate(user.dn, user.password)


def test_a_search_outlives_a_restart(d: Directory, make: Make) -> None:
    pool = make(d.url)
    pool.search(d.people, 0)
    d.kill()
    d.start()
    assert pool.search(d.people, 0).entries
    assert pool.authenticate(d.users[0].dn, d.users[0].password)


def test_a_connection_that_dies_unseen_is_asked_before_a_login(d: Directory, make: Make) -> None:
    user = d.users[0]
    with FaultProxy(d.port) as proxy:
        pool = make(proxy.url(), check_after=0.0, connect_timeout=SOON)
        pool.authenticate(user.dn, user.password)
        d.mark()
        proxy.half_open()
        assert pool.authenticate(user.dn, user.password).dn == user.dn
        assert d.counts().binds == 1
        assert pool.get_stats()["auth_lost"] == 1
        pool.close()


@pytest.mark.parametrize("fault", ["reset", "stall", "black_hole"])
def test_fifty_logins_while_the_first_of_two_servers_fails(
    d: Directory, other: Directory, make: Make, fault: str
) -> None:
    users = d.users[:50]
    with FaultProxy(d.port) as proxy:
        pool = make(proxy.url(), other.url, connect_timeout=SOON, operation_timeout=SOON,
                    auth_max_size=20, max_size=5)  # fmt: skip
        assert kinds_of(logins(pool, users)) == {"Identity": 50}
        other.mark()
        if fault == "reset":
            proxy.cut()
        else:
            getattr(proxy, fault)()
        began = time.monotonic()
        rounds = [kinds_of(logins(pool, users))]
        # those whose BIND was sent are lost; all others go to the second server
        while rounds[-1] != {"Identity": 50}:
            rounds.append(kinds_of(logins(pool, users)))
            assert time.monotonic() - began < PATIENCE
        assert all(set(each) <= {"Identity", "DirectoryTimeoutError", "DirectoryUnavailableError"}
                   for each in rounds), rounds  # fmt: skip
        assert len(rounds) <= 2, rounds
        stats = pool.get_stats()
        assert stats["auth_size"] <= 20
        assert stats["auth_lent"] == stats["auth_waiting"] == 0
        size = stats["auth_size"] + stats["search_size"]
        until(lambda: other.open_connections() == size, "the second has as many")
        assert stats["servers_down"] == 1
        # and back
        proxy.forward()
        until(lambda: pool.get_stats()["servers_up"] == 2, "the first is back")
        until(lambda: other.open_connections() == 0, "nothing is connected to the second")
        found = logins(pool, users)
        assert {each.server for each in found} == {proxy.url()}
        pool.close()
        proxy.wait_for_connections(0)


def test_nobody_is_let_in_by_a_server_of_another_name(
    d: Directory, make: Make, tmp_path: Path
) -> None:
    user = d.users[0]
    certified = certificates(tmp_path)
    with directory(tmp_path, tls="both", users=1, certificate=certified.wrong_host) as impostor:
        tls = TLS(ca_file=str(certified.ca_file))
        pool = make(impostor.ldaps_url, tls=tls, search_base=d.people)
        with pytest.raises(DirectoryTLSError, match="certificate is not accepted"):
            pool.search(d.people)
        for _ in range(2):
            # it is known by now, and is not asked again
            with pytest.raises(DirectoryUnavailableError, match="certificate is not accepted"):
                pool.authenticate("user0", user.password)
        start = make(impostor.url.replace("127.0.0.1", "localhost"),
                     tls=TLS(ca_file=str(certified.ca_file), start_tls=True))  # fmt: skip
        with pytest.raises(DirectoryTLSError):
            start.authenticate(user.dn, user.password)
        impostor_counts = impostor.counts()
        assert (impostor_counts.binds, impostor_counts.searches) == (0, 0)
        (report,) = pool.check()
        assert not report.reachable
        assert "certificate is not accepted" in str(report.error)
        # with another server it is only a detour
        trusted = TLS(ca_file=str(_both(tmp_path, certified.ca_file, d.ca_file)))
        both = make(impostor.ldaps_url, d.ldaps_url, tls=trusted)
        assert both.authenticate(user.dn, user.password).server == d.ldaps_url


def _both(folder: Path, *files: Path) -> Path:
    made = folder / "both.pem"
    made.write_bytes(b"".join(file.read_bytes() for file in files))
    return made


def test_reports_of_real_servers(d: Directory, other: Directory, make: Make) -> None:
    tls = TLS(ca_file=str(d.ca_file))
    pool = make(d.ldaps_url, d.url, "ldap://127.0.0.1:1", tls=tls, search_base=d.people)
    secure, plain, away = pool.check()
    assert secure.ok
    assert (secure.bind, secure.search, secure.paging) == (True, True, True)
    assert str(secure.tls).startswith("TLSv1.")
    assert secure.cipher
    assert secure.certificate_expires is not None
    assert secure.certificate_expires > datetime.datetime.now(datetime.UTC)
    assert plain.ok
    assert plain.tls is None
    assert (away.reachable, away.bind) == (False, None)
    assert "refused" in str(away.error)
    (wrong,) = make(d.url, bind_password="wrong").check()
    assert (wrong.reachable, wrong.bind, wrong.search) == (True, False, None)
    d.unlock(d.service_dn)
    (start,) = make(d.url, tls=TLS(ca_file=str(d.ca_file), start_tls=True)).check()
    assert start.ok
    assert start.tls
    (refused,) = make(other.url, tls=TLS(ca_file=str(d.ca_file), start_tls=True)).check()
    assert "StartTLS was refused" in str(refused.error)
    unverified = make(d.ldaps_url, tls=TLS(verify="never")).check()[0]
    assert unverified.ok
    assert unverified.certificate_expires is None
    assert "not verified" in next(x.text for x in unverified.checks if x.name == "certificate")


def test_a_forked_child_over_tls(d: Directory, make: Make) -> None:
    pool = make(d.ldaps_url, tls=TLS(ca_file=str(d.ca_file)), min_size=2)
    user = d.users[0]
    pool.wait()
    pool.authenticate(user.dn, user.password)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            identity = pool.authenticate(user.dn, user.password)
            found = pool.search(user.dn, 0).entries
            stats = pool.get_stats()
            code = 0 if identity and found and stats["logins"] == stats["auth_opened"] == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = pool.get_stats()["auth_opened"]
    assert pool.authenticate(user.dn, user.password)
    assert pool.search(user.dn, 0).entries
    assert pool.get_stats()["auth_opened"] == before


# Greenlets

GREEN = {
    "gevent": """
        from keyfront.gateway.greenlets import patch_gevent; patch_gevent()
        import gevent
        def together(call, items):
            jobs = [gevent.spawn(call, item) for item in items]
            gevent.joinall(jobs, raise_error=True)
            return [job.value for job in jobs]
        spawn = gevent.spawn
        """,
    "eventlet": """
        import warnings; warnings.simplefilter("ignore")
        import eventlet; eventlet.monkey_patch()
        def together(call, items):
            jobs = [eventlet.spawn(call, item) for item in items]
            return [job.wait() for job in jobs]
        spawn = eventlet.spawn
        """,
}

SCRIPT = """
import sys, time
from keyfront.middleware.ldap import LDAPPool, logins
url, size, *users = sys.argv[1:]
users = [user.split("\\t") for user in users]
logins.SLOW_SECONDS = 600.0  # however long nobody is answered here

def say(*words):
    print(*words, flush=True)

class Ticker:
    running = True
    def run(self):
        while self.running:
            say("tick")
            time.sleep(0.01)

def login(user):
    return pool.authenticate(user[0], user[1]).dn

patient = dict.fromkeys(("timeout", "connect_timeout", "operation_timeout"), 600.0)
pool = LDAPPool(url, min_size=0, auth_max_size=int(size), **patient)
login(users[0])
for _ in range(2):
    say("ready")
    sys.stdin.readline()
    ticker = Ticker()
    spawn(ticker.run)
    assert together(login, users) == [user[0] for user in users]
    ticker.running = False
    say("done")
stats = pool.get_stats()
say(*(int(stats[name]) for name in ("auth_size", "auth_opened", "binds")))
assert pool.close()
"""


@pytest.mark.parametrize("size", [50, 10])
@pytest.mark.parametrize("model", GREEN)
def test_fifty_logins_in_greenlets(d: Directory, model: str, size: int) -> None:
    """As many wait at once as there may be connections, and others run meanwhile."""
    users = d.users[:50]
    policy = controls.encode(controls.password_policy_control())
    binds = sorted(
        len(messages.bind_request(1, user.dn, user.password.encode(), policy)) for user in users
    )
    # What so many send, whoever they are, is more than one less could.
    needed = sum(binds[:size])
    assert needed > sum(binds[1 - size :])
    command = [sys.executable, "-c", textwrap.dedent(GREEN[model]) + SCRIPT]
    with (
        proxy_process(d.port) as proxy,
        subprocess.Popen(
            [*command, proxy.url(), str(size), *(f"{x.dn}\t{x.password}" for x in users)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdin is not None
            lines = Lines(process)
            for connects in (True, False):
                assert lines.after("tick") == "ready"
                asked = int(proxy.ask("received", "request"))
                proxy.ask("stall")
                process.stdin.write(b"go\n")
                process.stdin.flush()
                if connects:
                    proxy.ask("wait_for_accepted", size)
                else:
                    proxy.ask("wait_for_bytes", "request", asked + needed)
                lines.drop()
                for _ in range(5):
                    assert lines.next() == "tick"
                proxy.ask("forward")
                assert lines.after("tick") == "done"
            held, opened, sent = map(int, lines.after("tick").split())
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert held <= size
    assert opened <= size
    assert sent == 2 * len(users) + 1


def test_what_pools_did_reaches_other_processes(
    d: Directory, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a forked child, while it lives and afterwards."""
    monkeypatch.setenv("KEYFRONT_NODE", str(tmp_path))
    monkeypatch.setattr(pool_counters, "thread", pool_counters._Thread())
    pool = make(d.url)
    user = d.users[0]

    def told(name: str) -> int:
        return pool_counters.read(tmp_path)[name] if pool_counters.is_in_use(tmp_path) else 0

    pool.authenticate(user.dn, user.password)
    with pytest.raises(CredentialsError):
        pool.authenticate(user.dn, "wrong")
    names = ("credentials_refused", "logins_accepted", "binds", "servers_up")
    # One after the other.
    wait_for(lambda: [told(name) for name in names] == [1, 1, 2, 1], "all of it is told")
    child = os.fork()
    if not child:
        try:
            pool.authenticate(user.dn, user.password)
            wait_for(lambda: told("logins_accepted") == 2, "the child's is told, too")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert told("logins_accepted") == 2

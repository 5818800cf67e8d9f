"""Servers that die, hang, vanish and come back while fifty users log in; and answers cut short.

There are two slapds with the same users, each behind a proxy, some found by DNS. What counts:
nobody is told that a right password is wrong or a wrong one right, whatever the network does; each
BIND is sent once; an outage costs each connection at most one login; and nothing is left open.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dns.rcode
import psutil
import pytest

from keyfront.cli import main as cli
from keyfront.errors import (
    CredentialsError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
)
from keyfront.middleware.ldap import TLS, LDAPPool, discovery, logins
from keyfront.middleware.ldap.monitor import IDLE_SECONDS
from support.directory import Directory, directory
from support.dns_server import DNSServer
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, wait_for

# Seconds to connect, and for each operation, in the tests of many: no pause takes as long.
TIMEOUT = 5.0
# The same for a single operation that must fail for want of an answer.
SHORT = 0.3
# Seconds in which a server that is well answers, on a busy machine as well.
SOON = 6.0
LOGINS, SEARCHES = 50, 5
# Fewer than users, so that some always wait for a connection.
AUTH_SIZE, SEARCH_SIZE = 20, 4
# slapd's whole answer to a BIND: success, without a control.
BIND_SUCCESS = bytes.fromhex("300c02010161070a010004000400")


class Site:
    """A server and the proxy before it."""

    def __init__(self, d: Directory, proxy: FaultProxy) -> None:
        self.d = d
        self.proxy = proxy
        self.url = proxy.url()


@dataclass(frozen=True)
class Made:
    """Both servers, for all tests."""

    first: Directory
    second: Directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("slapd")  # of both, so that one authority is
    with directory(folder, tls="both") as first, directory(folder, tls="both") as second:
        yield Made(first, second)


@pytest.fixture
def sites(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Site]]:
    # What has no answer for longer is another matter, with a test of its own.
    monkeypatch.setattr(logins, "SLOW_SECONDS", 2 * TIMEOUT)
    for d in (made.first, made.second):
        d.wait_for(lambda _, d=d: d.open_connections() == 0, "all are gone")
        d.mark()
    with FaultProxy(made.first.port) as one, FaultProxy(made.second.port) as two:
        yield Site(made.first, one), Site(made.second, two)
    for d in (made.first, made.second):
        if d.pid is None:
            d.start()
        d.resume()


@pytest.fixture
def first(sites: tuple[Site, Site]) -> Site:
    return sites[0]


@pytest.fixture
def second(sites: tuple[Site, Site]) -> Site:
    return sites[1]


def make(*urls: str, **options: Any) -> LDAPPool:
    options = {
        "min_size": 0, "user_dn": f"uid={{}},{Directory.people}", "timeout": PATIENCE,
        "connect_timeout": TIMEOUT, "operation_timeout": TIMEOUT, "check_after": math.inf,
        **options,
    }  # fmt: skip
    return LDAPPool(urls, **options)


def sockets(*sites: Site) -> int:
    """How many connections to these this process has, by the kernel's word."""
    ports = {site.proxy.port for site in sites}
    found = psutil.Process().net_connections("tcp")
    return sum(each.raddr != () and each.raddr.port in ports for each in found)


# Many at a time


@dataclass(frozen=True)
class Outcome:
    """What came of one login or search."""

    began: float
    ended: float
    kind: str  # "right", "wrong" or "search"
    said: str  # "yes", "no", or the name of an error that is an outage
    server: str = ""

    @property
    def is_outage(self) -> bool:
        return self.said not in ("yes", "no")

    @property
    def is_true(self) -> bool:
        return self.said == ("no" if self.kind == "wrong" else "yes")


class Crowd:
    """Threads that log in, rightly and wrongly, and search, over and over."""

    def __init__(self, pool: LDAPPool) -> None:
        self._pool = pool
        self._ended = False
        #: In the order in which they ended.
        self.outcomes: list[Outcome] = []
        self.peak = collections.Counter[str]()
        self._threads = [
            threading.Thread(target=self._run, args=(n, work), daemon=True)
            for n, work in enumerate([self._login] * LOGINS + [self._search] * SEARCHES)
        ]
        self._threads.append(threading.Thread(target=self._sample, daemon=True))

    def __enter__(self) -> Crowd:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for each in self._threads:
            each.join(PATIENCE)
        assert not any(each.is_alive() for each in self._threads), "somebody hangs"

    def wait_for(self, condition: Callable[[Outcome], bool], number: int, since: float) -> None:
        """Wait until so many that began after a moment ended so."""

        def enough() -> bool:
            return sum(condition(each) for each in self.since(since)) >= number

        wait_for(enough, f"{number} outcomes are as they should be")

    def since(self, moment: float) -> list[Outcome]:
        """Those that began after a moment."""
        return [each for each in list(self.outcomes) if each.began > moment]

    def _run(self, n: int, work: Callable[[int], tuple[str, str, str]]) -> None:
        while not self._ended:
            began = time.monotonic()
            kind, said, server = work(n)
            self.outcomes.append(Outcome(began, time.monotonic(), kind, said, server))

    def _login(self, n: int) -> tuple[str, str, str]:
        wrong = n % 5 == 0
        user, password = f"user{n % 20}", f"secret-{n % 20}-Number{n % 20}"
        kind = "wrong" if wrong else "right"
        try:
            found = self._pool.authenticate(user, "not-it" if wrong else password)
            return kind, "yes", found.server
        except CredentialsError as error:
            return kind, "no", error.server or ""
        except DirectoryUnavailableError as error:
            return kind, type(error).__name__, ""

    def _search(self, n: int) -> tuple[str, str, str]:
        try:
            found = self._pool.search(Directory.people, 1, f"(uid=user{n % 20})", ["uid"])
        except DirectoryUnavailableError as error:
            return "search", type(error).__name__, ""
        expected = [(f"uid=user{n % 20},{Directory.people}", {"uid": [b"user%d" % (n % 20)]})]
        return "search", "yes" if found.items == expected else f"{found.items}", ""

    def _sample(self) -> None:
        while not self._ended:
            stats = self._pool.get_stats()
            for name in ("auth_size", "search_size"):
                self.peak[name] = max(self.peak[name], int(stats[name]))
            time.sleep(0.001)


@dataclass(frozen=True)
class Fault:
    """What happens to the first server, and what ends it."""

    name: str
    is_silent: bool
    strike: Callable[[Site], None]
    heal: Callable[[Site], None]


FAULTS = [
    Fault("killed", False, lambda site: site.d.kill(), lambda site: site.d.start()),
    Fault("stopped", False, lambda site: site.d.stop(), lambda site: site.d.start()),
    Fault("refusing", False, lambda site: site.proxy.cut(), lambda site: site.proxy.forward()),
    Fault("paused", True, lambda site: site.d.pause(), lambda site: site.d.resume()),
    Fault("stalled", True, lambda site: site.proxy.stall(), lambda site: site.proxy.forward()),
    Fault("gone", True, lambda site: site.proxy.black_hole(), lambda site: site.proxy.forward()),
]


def check_the_truth(outcomes: list[Outcome]) -> None:
    lies = [each for each in outcomes if not each.is_outage and not each.is_true]
    assert not lies
    # whatever else there is, is an outage by its own name, and nobody waited too long for it
    names = {each.said for each in outcomes if each.is_outage}
    assert names <= {"DirectoryUnavailableError", "DirectoryTimeoutError"}


def check_the_books(pool: LDAPPool, crowd: Crowd, *sites: Site) -> None:
    """All counts agree: the pool's, those of the set of servers, the kernel's and slapd's."""
    assert crowd.peak["auth_size"] <= AUTH_SIZE
    assert crowd.peak["search_size"] <= SEARCH_SIZE
    told: list[object] = []

    def agree() -> bool:
        # The worker that looks after the servers may have one in its hands.
        stats = pool.get_stats()
        size = int(stats["auth_size"] + stats["search_size"])
        known = [each.connections for each in pool.servers]
        told[:] = [(stats, known, sockets(*sites))]
        return all(
            stats[f"{kind}_lent"] == stats[f"{kind}_waiting"] == 0
            and stats[f"{kind}_size"] == stats[f"{kind}_idle"]
            and stats[f"{kind}_opened"] - stats[f"{kind}_closed"] == stats[f"{kind}_size"]
            for kind in ("auth", "search")
        ) and size == sum(known) == sockets(*sites)

    wait_for(agree, "all counts agree", told)
    for site, known in zip(sites, pool.servers, strict=True):
        assert known.url.text == site.url
        site.proxy.wait_for_connections(known.connections)
        if site.d.pid is not None:
            site.d.wait_for(
                lambda _, d=site.d, n=known.connections: d.open_connections() == n,
                "slapd has as many",
            )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_first_of_two_goes_away_and_comes_back(
    first: Site, second: Site, fault: Fault
) -> None:
    for site in (first, second):
        # a login takes a while, so that many are under way, and the machine has time
        site.proxy.forward(delay=0.02)
    pool = make(first.url, second.url, auth_max_size=AUTH_SIZE, max_size=SEARCH_SIZE)
    try:
        with Crowd(pool) as crowd:
            crowd.wait_for(lambda each: each.server == first.url, 2 * LOGINS, 0.0)
            crowd.wait_for(lambda each: each.kind == "search", SEARCHES, 0.0)
            assert pool.get_stats()["auth_size"] == AUTH_SIZE
            assert first.d.open_connections() <= AUTH_SIZE + SEARCH_SIZE
            assert not any(each.is_outage for each in crowd.outcomes)

            accepted = first.proxy.accepted
            struck = time.monotonic()
            fault.strike(first)
            gone = time.monotonic()
            crowd.wait_for(lambda each: each.server == second.url, 2 * LOGINS, gone)
            assert second.d.open_connections() <= AUTH_SIZE + SEARCH_SIZE
            tries = first.proxy.accepted - accepted
            state = pool.servers[0]
            assert state.state != "up"
            # Who waited in vain has told the others: nobody else tries it, but for the probes. Of
            # lost connections each may be opened again first.
            assert tries <= state.failures + 1 + (0 if fault.is_silent else AUTH_SIZE + SEARCH_SIZE)
            healed = time.monotonic()
            fault.heal(first)

            # and back, with all there is
            wait_for(lambda: pool.servers[0].state == "up", "the first is found up again")
            wait_for(lambda: not pool.servers[1].connections, "all have moved back")
            crowd.wait_for(lambda each: each.server == first.url, 2 * LOGINS, time.monotonic())
        check_the_truth(crowd.outcomes)
        check_the_books(pool, crowd, first, second)

        affected = [
            each for each in crowd.outcomes
            if each.ended > struck and (each.is_outage or each.server == second.url)
        ]  # fmt: skip
        # A connection that is lost says nothing of its server; a timeout, and a connect, does.
        known = min(
            each.ended for each in affected
            if each.said == "DirectoryTimeoutError" or each.server == second.url
        )  # fmt: skip
        # who began when it was known has an answer
        later = [each for each in crowd.since(known) if each.ended < healed]
        assert len(later) >= LOGINS
        assert not [each for each in crowd.since(known) if each.is_outage]
        assert {each.server for each in later if each.kind != "search"} == {second.url}
        # and of those who began before, each connection there was lost one at most
        lost = collections.Counter(each.kind == "search" for each in affected if each.is_outage)
        assert lost[False] <= AUTH_SIZE
        assert lost[True] <= SEARCH_SIZE
        # one timeout; the rest is for a slow machine
        assert known - struck < 3 * TIMEOUT
        assert pool.get_stats()["logins_failed"] == lost[False]
    finally:
        assert pool.close(PATIENCE)
    for site in (first, second):
        site.proxy.forward(delay=0.0)
        site.d.wait_for(lambda _, d=site.d: d.open_connections() == 0, "nothing is left open")
    assert sockets(first, second) == 0


@pytest.mark.parametrize("how", ["reset", "half_open"])
def test_connections_are_lost_and_the_server_is_well(
    first: Site, second: Site, how: str
) -> None:
    for site in (first, second):
        site.proxy.forward(delay=0.02)
    pool = make(first.url, second.url, auth_max_size=AUTH_SIZE, max_size=SEARCH_SIZE)
    try:
        with Crowd(pool) as crowd:
            crowd.wait_for(lambda each: each.server == first.url, 2 * LOGINS, 0.0)
            assert pool.get_stats()["auth_size"] == AUTH_SIZE
            getattr(first.proxy, how)()
            lost = time.monotonic()
            # all have been used by then: there are more users than connections
            crowd.wait_for(lambda each: each.is_true, 4 * LOGINS, lost + TIMEOUT)
            wait_for(lambda: pool.servers[0].state == "up", "the first is up")
        check_the_truth(crowd.outcomes)
        check_the_books(pool, crowd, first, second)
        outages = collections.Counter(
            each.kind == "search" for each in crowd.outcomes if each.is_outage
        )
        assert 0 < outages[False] <= AUTH_SIZE
        assert outages[True] <= SEARCH_SIZE
    finally:
        assert pool.close(PATIENCE)
    assert sockets(first, second) == 0


def test_what_is_opened_while_the_first_comes_back_leads_there_soon(
    first: Site, second: Site
) -> None:
    """Not only with the next look at servers that are all up."""
    user = first.d.users[1]
    first.proxy.cut()
    with (
        make(first.url, second.url, connect_timeout=PATIENCE, operation_timeout=PATIENCE) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        warm(pool, second.d)  # by which the first is known to be down
        accepted = second.proxy.accepted
        second.proxy.reset()
        second.proxy.stall()
        opening = threads.submit(pool.search, user.dn)
        second.proxy.wait_for_accepted(accepted + 1)
        first.proxy.forward()
        wait_for(lambda: pool.servers[0].state == "up", "the first is found up")
        assert not opening.done()
        second.proxy.forward()
        assert opening.result(PATIENCE).entries
        late = time.monotonic() + IDLE_SECONDS / 2
        while pool.servers[1].connections:
            assert time.monotonic() < late, "it still leads to the second"
            time.sleep(0.02)


def test_no_server_is_an_outage_for_all_and_costs_little(first: Site, second: Site) -> None:
    sites = (first, second)
    for site in sites:
        site.proxy.stall()
    users = [(x.uid, x.password, "not-it") for x in first.d.users] * 2

    def login(user: tuple[str, str, str]) -> str:
        with pytest.raises(DirectoryUnavailableError) as caught:
            pool.authenticate(user[0], user[1 + users.index(user) % 2])
        return str(caught.value)

    def tries(site: Site) -> int:
        """Connections there were, but for those of the worker that looks for it to come back."""
        accepted = site.proxy.accepted
        (known,) = (each for each in pool.servers if each.url.text == site.url)
        return accepted - known.failures - (known.state == "probing")

    with (
        make(first.url, second.url, auth_max_size=AUTH_SIZE) as pool,
        ThreadPoolExecutor(LOGINS) as threads,
    ):
        said = list(threads.map(login, users))
        assert all(first.url in each and second.url in each for each in said)
        assert all(tries(site) <= AUTH_SIZE for site in sites)
        # by now it is known, and nobody is asked in vain
        list(threads.map(login, users))
        assert all(tries(site) <= AUTH_SIZE for site in sites)
        assert pool.get_stats()["auth_size"] == 0
        assert (first.d.counts().binds, second.d.counts().binds) == (0, 0)

        second.proxy.forward()
        wait_for(lambda: pool.servers[1].state == "up", "the second is found up")
        right = [each[:2] for each in users]
        found = list(threads.map(lambda each: pool.authenticate(*each), right))
        assert {each.server for each in found} == {second.url}
        assert second.d.counts().binds == len(users)


# A name with many addresses


@pytest.mark.parametrize("number", [20, 40])
def test_a_name_may_have_many_addresses(
    made: Made, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As the name of an Active Directory domain has: one for each domain controller."""
    d = made.first
    assert d.tls_port
    look_up = socket.getaddrinfo

    def many(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        found = look_up("127.0.0.1", port, *arguments, **options)
        if host != "localhost":
            return found
        return [(*found[0][:4], (f"127.0.1.{n}", port)) for n in range(1, number + 1)]

    monkeypatch.setattr(socket, "getaddrinfo", many)
    with FaultProxy(d.tls_port, host="0.0.0.0", delay=3.0 / number) as proxy:
        tls = TLS(ca_file=str(d.ca_file))
        with make(proxy.url("ldaps"), tls=tls, connect_timeout=12.0) as pool:
            user = d.users[1]
            assert pool.authenticate(user.uid, user.password).name == user.uid
            assert pool.search(user.dn, 0).entries


# A part of the directory is away, and the server is well

REMOTE = f"ou=Remote,{Directory.suffix}"


@contextlib.contextmanager
def torn_apart(folder: Path, seconds: int) -> Iterator[tuple[Directory, FaultProxy]]:
    """A server that asks another one for the users below one entry; the way there is a proxy."""
    with FaultProxy(1) as way:
        extra = f"""
threads 64
moduleload back_ldap
database ldap
suffix "{REMOTE}"
uri {way.url()}
timeout bind={seconds}
"""
        with directory(folder, extra=extra) as made:
            yield made, way


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Directory, FaultProxy]]:
    with torn_apart(tmp_path_factory.mktemp("torn"), 1) as made:
        yield made


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_what_keeps_some_users_out_says_nothing_of_the_server(
    torn: tuple[Directory, FaultProxy], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody without a password moves a server's state, by a name whose BIND goes wrong or late."""
    d, way = torn
    getattr(way, fault)()
    strangers = [f"uid=user{n},{REMOTE}" for n in range(2)]
    said: list[str] = []
    done = threading.Event()

    def knock(stranger: str) -> None:
        while not done.is_set():
            with pytest.raises(DirectoryUnavailableError):
                pool.authenticate(stranger, "guessed", timeout=SHORT)
            said.append(stranger)

    with FaultProxy(d.port) as one, FaultProxy(d.port) as two:
        with make(one.url(), two.url(), user_dn=None) as pool:
            pool.authenticate(d.users[0].dn, d.users[0].password)
            accepted = two.accepted
            threads = [threading.Thread(target=knock, args=(x,)) for x in strangers]
            for thread in threads:
                thread.start()
            for n in itertools.count():
                user = d.users[n % len(d.users)]
                assert pool.authenticate(user.dn, user.password).server == one.url()
                with pytest.raises(CredentialsError):
                    pool.authenticate(user.dn, "not-it")
                if n > 50 and len(set(said)) == len(strangers) and len(said) > 12:
                    break
            done.set()
            for thread in threads:
                thread.join(PATIENCE)
            assert [each.failures for each in pool.servers] == [0, 0]
            assert pool.get_stats()["servers_up"] == 2
            assert two.accepted == accepted
        one.wait_for_connections(0)
    assert "is down" not in caplog.text


@pytest.mark.parametrize("names", ["one part", "many parts"])
def test_a_part_that_is_away_does_not_take_all_connections(
    tmp_path: Path, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many logins of users who nobody answers for, as anybody can send them."""
    # A machine that stands still for two seconds answers for nobody.
    monkeypatch.setattr(logins, "SLOW_SECONDS", 3 * logins.SLOW_SECONDS)
    size = 12
    done = threading.Event()
    said: collections.Counter[str] = collections.Counter()

    def knock(number: int) -> None:
        part = f"ou=p{number}," if names == "many parts" else ""
        while not done.is_set():
            try:
                pool.authenticate(f"uid=user{number},{part}{REMOTE}", "guessed")
            except DirectoryUnavailableError as error:
                said[type(error).__name__] += 1
                done.wait(0.05)

    with (
        torn_apart(tmp_path, 600) as (d, way),
        make(d.url, user_dn=None, auth_max_size=size, operation_timeout=600.0,
             timeout=PATIENCE, connect_timeout=PATIENCE) as pool,
    ):  # fmt: skip
        way.stall()
        threads = [
            threading.Thread(target=knock, args=(n,), daemon=True) for n in range(2 * size)
        ]  # it must not hang if this fails
        for thread in threads:
            thread.start()
        wait_for(lambda: pool.get_stats()["auth_waiting"] > 0, "all are taken")
        # Not for as long as an answer may take.
        for user in d.users[:10]:
            assert pool.authenticate(user.dn, user.password).dn == user.dn
        assert sum(said.values())
        wait_for(lambda: said["PoolFullError"] > 0, "the others are not let in")
        done.set()
        d.kill()
        for thread in threads:
            thread.join(PATIENCE)
        assert not pool._slow_binds._running and not pool._slow_binds._slow


def test_a_login_in_vain_has_the_server_asked(first: Site, second: Site) -> None:
    """Asked by a connection without a password; its silence is the verdict."""
    user = first.d.users[1]
    with make(first.url, second.url) as pool:
        warm(pool, first.d)
        first.proxy.stall()
        with pytest.raises(DirectoryTimeoutError):
            pool.authenticate(user.uid, "not-it", timeout=SHORT)
        wait_for(lambda: pool.servers[0].state != "up", "it is found down")
        assert pool.authenticate(user.uid, user.password).server == second.url
        first.proxy.forward()
        wait_for(lambda: pool.servers[0].state == "up", "it is found up")


# One at a time


def warm(pool: LDAPPool, d: Directory) -> None:
    """Have it open one connection to log in over."""
    pool.authenticate(d.users[0].uid, d.users[0].password)
    # Where a server is up again, the worker looks at what is idle.
    wait_for(lambda: pool.get_stats()["auth_idle"] == 1, "it is idle")


@pytest.mark.parametrize("kind", ["plain", "ldaps", "starttls"])
def test_a_restart_is_not_noticed(made: Made, kind: str) -> None:
    """What was idle meanwhile is seen to be dead before it is used: each BIND is sent once."""
    d = made.first
    tls = TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls")
    url = d.ldaps_url if kind == "ldaps" else d.url
    with make(url, tls=tls, min_size=2, auth_min_size=5) as pool:
        for end in (d.stop, d.kill):
            pool.wait()  # so that none is being opened, who would find it down
            end()
            d.start()
            d.mark()
            for n, user in enumerate(d.users):
                if n % 2:
                    assert pool.authenticate(user.uid, user.password).server == url
                else:
                    with pytest.raises(CredentialsError):
                        pool.authenticate(user.uid, "not-it")
                assert pool.search(user.dn, 0).entries
            assert d.counts().binds == len(d.users)
        stats = pool.get_stats()
        assert (stats["logins_failed"], stats["searches_failed"]) == (0, 0)
        assert pool.servers[0].failures == 0
    d.wait_for(lambda _: d.open_connections() == 0, "nothing is left open")


@pytest.mark.parametrize("how", ["reset", "closed"])
def test_half_an_answer_to_a_bind_is_none(first: Site, second: Site, how: str) -> None:
    user = first.d.users[1]
    with make(first.url, second.url) as pool:
        for size in range(len(BIND_SUCCESS)):
            for password in (user.password, "not-it"):
                warm(pool, first.d)
                first.d.mark()
                accepted = first.proxy.accepted
                before = pool.get_stats()
                if how == "reset":
                    first.proxy.reset_after(size)
                else:
                    first.proxy.garbage(BIND_SUCCESS[:size], close=True)
                with pytest.raises(DirectoryUnavailableError) as caught:
                    pool.authenticate(user.uid, password)
                assert not isinstance(caught.value, CredentialsError)
                assert pool.get_stats()["binds"] - before["binds"] == 1
                assert first.d.counts().binds == (1 if how == "reset" else 0)
                assert first.proxy.accepted == accepted
                assert pool.get_stats()["auth_size"] == 0
                first.proxy.forward()
        assert second.d.counts().binds == 0
        assert pool.get_stats()["logins_failed"] == 2 * len(BIND_SUCCESS)


def message(tag: int, content: str, number: int) -> bytes:
    """An LDAP message of so few bytes that a length is one."""
    inner = bytes.fromhex(content)
    body = bytes([2, 1, number, tag, len(inner)]) + inner
    return bytes([0x30, len(body)]) + body


NUMBERS = range(1, 10)
SUCCESS = "0a010004000400"
GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "tls": bytes.fromhex("15030100020228"),
    "zeros": bytes(64),
    "random": random.Random(4).randbytes(300),
    "endless": bytes.fromhex("3080") + BIND_SUCCESS,
    "huge": bytes.fromhex("3084ffffffff") + BIND_SUCCESS,
    "longer within": bytes.fromhex("300c02010361200a010004000400"),
    "success of what was not asked": message(0x61, SUCCESS, 99),
    "success of what was asked before": message(0x61, SUCCESS, 1),
    "success of an unbind": message(0x62, SUCCESS, 0),
    "success of an add": b"".join(message(0x69, SUCCESS, n) for n in NUMBERS),
    "success of an extension": b"".join(message(0x78, SUCCESS, n) for n in NUMBERS),
    "success without a code": b"".join(message(0x61, "0a0004000400", n) for n in NUMBERS),
    "a code that is text": b"".join(message(0x61, "04010004000400", n) for n in NUMBERS),
    "nothing but a code": b"".join(message(0x61, "0a0100", n) for n in NUMBERS),
    "a refusal that goes on": b"".join(message(0x61, "0a013104000400ff", n) for n in NUMBERS),
    "goodbye": message(
        0x78, "0a013404000400" + "8a16" + b"1.3.6.1.4.1.1466.20036".hex(), 0
    ),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_nonsense_is_an_outage(first: Site, second: Site, data: bytes) -> None:
    user = first.d.users[1]
    with make(first.url, second.url, operation_timeout=SOON) as pool:
        warm(pool, first.d)
        accepted = first.proxy.accepted
        first.d.mark()
        first.proxy.garbage(data)
        with pytest.raises(DirectoryUnavailableError) as caught:
            pool.authenticate(user.uid, user.password)
        assert caught.value.server == first.url
        assert isinstance(caught.value, (DirectoryProtocolError, DirectoryTimeoutError)) or (
            "ends the connection" in str(caught.value)
        )
        stats = pool.get_stats()
        assert (stats["binds"], stats["auth_size"]) == (2, 0)
        # the next one is not led there; whoever looks for it to come back sends no BIND
        with pytest.raises(CredentialsError):
            pool.authenticate(user.uid, "not-it")
        assert pool.authenticate(user.uid, user.password).server == second.url
        assert first.proxy.accepted - accepted <= pool.servers[0].failures + 1
        assert (first.d.counts().binds, second.d.counts().binds) == (0, 2)


def test_one_failure_is_enough_for_what_is_idle(first: Site, second: Site) -> None:
    user = first.d.users[1]
    with make(first.url, second.url, auth_min_size=3) as pool:
        pool.wait()
        accepted = first.proxy.accepted
        first.proxy.stall()
        with pytest.raises(DirectoryTimeoutError):
            pool.authenticate(user.uid, user.password, timeout=SHORT)
        for _ in range(5):
            assert pool.authenticate(user.uid, user.password).server == second.url
        tries = first.proxy.accepted - accepted
        assert tries <= pool.servers[0].failures + 1
        assert pool.get_stats()["logins_failed"] == 1


def test_a_connection_that_is_open_at_one_end_only(first: Site, second: Site) -> None:
    user = first.d.users[1]
    with make(first.url, second.url) as pool:
        warm(pool, first.d)
        first.d.mark()
        first.proxy.half_open()
        with pytest.raises(DirectoryTimeoutError):
            pool.authenticate(user.uid, user.password, timeout=SHORT)
        assert pool.get_stats()["auth_size"] == 0
        pool.authenticate(user.uid, user.password)
        assert first.d.counts().binds + second.d.counts().binds == 1
        assert (pool.get_stats()["binds"], pool.get_stats()["logins_failed"]) == (3, 1)


def test_one_is_found_before_a_login_if_it_was_idle_for_long(first: Site, second: Site) -> None:
    user = first.d.users[1]
    with make(first.url, second.url, check_after=0.0) as pool:
        warm(pool, first.d)
        first.d.mark()
        first.proxy.half_open()
        pool.authenticate(user.uid, user.password)
        stats = pool.get_stats()
        assert (stats["binds"], stats["logins_failed"], stats["auth_lost"]) == (2, 0, 1)
        assert first.d.counts().binds + second.d.counts().binds == 1


@pytest.mark.parametrize("kind", ["login", "search"])
def test_a_look_at_what_is_idle_leaves_time_for_the_other(
    first: Site, second: Site, kind: str
) -> None:
    """However long a server may take to be connected to."""
    user = first.d.users[1]
    options = {"connect_timeout": PATIENCE, "operation_timeout": PATIENCE, "timeout": 8.0}
    with make(first.url, second.url, check_after=0.0, **options) as pool:
        warm(pool, first.d)
        pool.search(user.dn, 0)
        first.proxy.stall()
        if kind == "login":
            assert pool.authenticate(user.uid, user.password).server == second.url
        else:
            with pool.connection() as connection:
                assert connection.server == second.url


def test_a_bind_that_was_sent_is_not_sent_again_but_a_search_is(
    first: Site, second: Site
) -> None:
    user = first.d.users[1]
    with make(first.url, second.url, operation_timeout=PATIENCE) as pool:
        warm(pool, first.d)
        pool.search(user.dn, 0)
        first.d.mark()

        def lose(ask: Callable[[], object]) -> Future[Any]:
            """Reset its connection when it was sent; then all is well again."""
            first.proxy.stall()
            sent = first.proxy.received("request")
            with ThreadPoolExecutor(1) as threads:
                asked = threads.submit(ask)
                first.proxy.wait_for_bytes("request", sent + 1)
                first.proxy.reset()
                first.proxy.forward()
            return asked

        assert lose(lambda: pool.search(user.dn, 0)).result().entries
        assert pool.get_stats()["searches_retried"] == 1
        assert first.d.counts().binds == 0

        warm(pool, first.d)
        before = pool.get_stats()["binds"]
        error = lose(lambda: pool.authenticate(user.uid, user.password)).exception()
        assert type(error) is DirectoryUnavailableError
        stats = pool.get_stats()
        assert (stats["binds"] - before, stats["logins_failed"]) == (1, 1)
        assert stats["searches_failed"] == 0
        # that of the warming, and of the other perhaps not even one
        assert first.d.counts().binds <= 2
        assert second.d.counts().binds == 0


def test_a_late_answer_is_not_that_of_the_next(first: Site) -> None:
    user = first.d.users[1]
    with make(first.url) as pool:
        for password, other, is_right in (
            (user.password, "not-it", False),
            ("not-it", user.password, True),
        ):
            wait_for(lambda: pool.servers[0].state == "up", "it is found up")
            warm(pool, first.d)
            first.proxy.stall()
            with pytest.raises(DirectoryTimeoutError):
                pool.authenticate(user.uid, password, timeout=SHORT)
            first.proxy.forward()
            wait_for(lambda: pool.servers[0].state == "up", "it is found up")
            if is_right:
                assert pool.authenticate(user.uid, other).name == user.uid
            else:
                with pytest.raises(CredentialsError):
                    pool.authenticate(user.uid, other)


def test_an_answer_that_trickles(first: Site) -> None:
    """Each byte comes in time; it is the whole that must."""
    user = first.d.users[1]
    with make(first.url) as pool:
        warm(pool, first.d)
        first.proxy.trickle(1, 0.002)
        assert pool.authenticate(user.uid, user.password, timeout=PATIENCE).name == user.uid
        with pytest.raises(CredentialsError):
            pool.authenticate(user.uid, "not-it", timeout=PATIENCE)
        assert pool.search(user.dn, 0, timeout=PATIENCE).entries[0][1]["uid"] == [b"user1"]
        first.proxy.trickle(1, SHORT / 3)
        first.d.mark()
        with pytest.raises(DirectoryTimeoutError):
            pool.authenticate(user.uid, user.password, timeout=SHORT)
        assert first.d.counts().binds == 1
        assert pool.get_stats()["auth_size"] == 0


@pytest.mark.parametrize("kind", ["ldaps", "starttls"])
@pytest.mark.parametrize("how", ["stalled", "trickling", "reset"])
def test_a_handshake_that_does_not_end(made: Made, kind: str, how: str) -> None:
    first, second = made.first, made.second
    first.mark()
    second.mark()
    user = first.users[1]
    tls = TLS(ca_file=str(first.ca_file), start_tls=kind == "starttls")
    assert first.tls_port
    with FaultProxy(first.tls_port if kind == "ldaps" else first.port) as proxy:
        url, other = proxy.url(), second.url
        if kind == "ldaps":
            url, other = proxy.url("ldaps"), second.ldaps_url
        if how == "stalled":
            proxy.stall()
        elif how == "trickling":
            proxy.trickle(1, SHORT / 5)
        else:
            # within the handshake: the answer to StartTLS has 14 bytes
            proxy.reset_after(100)
        expected = DirectoryTLSError if how == "reset" else DirectoryTimeoutError
        options = {"tls": tls, "connect_timeout": SOON}
        alone = {**options, "connect_timeout": SOON if how == "reset" else SHORT}
        with make(url, **alone) as pool, pytest.raises(expected) as caught:
            pool.authenticate(user.uid, user.password)
        assert caught.value.server == url
        with make(url, other, **options) as pool:
            assert pool.authenticate(user.uid, user.password).server == other
            with pytest.raises(CredentialsError):
                pool.authenticate(user.uid, "not-it")
            assert pool.servers[0].state != "up"
            assert pool.get_stats()["logins_failed"] == 0
        proxy.wait_for_connections(0)
    assert (first.counts().binds, second.counts().binds) == (0, 2)


# By names of DNS

DOMAIN = "example.test"
SRV = f"ldap+srv://{DOMAIN}"


class Names:
    """A domain in DNS, and the sites that it names."""

    def __init__(self, server: DNSServer, *sites: Site) -> None:
        self.server = server
        self.sites = sites
        for number, _ in enumerate(sites):
            server.put(f"ds{number}.{DOMAIN}", "A", "127.0.0.1")

    def url(self, site: Site) -> str:
        """What the server of a site is called by a pool that found it so."""
        return f"ldap://ds{self.sites.index(site)}.{DOMAIN}:{site.proxy.port}"

    def name(self, *sites: Site, ttl: int = 3600) -> None:
        """Name these, in the order of preference."""
        hosts = [(x.proxy.port, f"ds{self.sites.index(x)}.{DOMAIN}") for x in sites]
        self.server.srv(DOMAIN, *((n, 0, *host) for n, host in enumerate(hosts)), ttl=ttl)

    def pool(self, **options: Any) -> LDAPPool:
        return make(SRV, nameservers=self.server.address, **options)


@pytest.fixture
def names(first: Site, second: Site) -> Iterator[Names]:
    with DNSServer() as server:
        yield Names(server, first, second)


@pytest.fixture
def looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked up in vain, or may be old, is looked up again without a pause."""
    monkeypatch.setattr(discovery, "_FIRST_PAUSE", 0.0)


@pytest.mark.usefixtures("looked_up_at_once")
def test_dns_names_others_while_users_log_in(first: Site, second: Site, names: Names) -> None:
    for site in (first, second):
        site.proxy.forward(delay=0.01)
    names.name(first, ttl=1)
    pool = names.pool(auth_max_size=AUTH_SIZE, max_size=SEARCH_SIZE)

    def serves(site: Site) -> Callable[[Outcome], bool]:
        return lambda each: each.server == names.url(site)

    def moved(site: Site, other: Site) -> None:
        crowd.wait_for(serves(site), LOGINS, time.monotonic())
        wait_for(lambda: sockets(other) == 0, "nobody is connected to the other")
        crowd.wait_for(serves(site), 2 * LOGINS, time.monotonic())
        assert [each.url.text for each in pool.servers] == [names.url(site)]

    try:
        with Crowd(pool) as crowd:
            crowd.wait_for(serves(first), 2 * LOGINS, 0.0)
            names.name(second, ttl=1)
            moved(second, first)
            # DNS is lost: what was known is used, also by those who connect anew.
            names.server.rcode = dns.rcode.SERVFAIL
            wait_for(lambda: pool.get_stats()["lookups_failed"] > 0, "a lookup has failed")
            accepted = second.proxy.accepted
            assert pool._auth_pool.retire(lambda connection: True) > 0
            second.proxy.wait_for_accepted(accepted + 2)
            crowd.wait_for(serves(second), 2 * LOGINS, time.monotonic())
            names.name(first, ttl=1)
            names.server.rcode = None
            moved(first, second)
        check_the_truth(crowd.outcomes)
        assert not [each for each in crowd.outcomes if each.is_outage]
        assert crowd.peak["auth_size"] <= AUTH_SIZE
        assert pool.get_stats()["servers_up"] == 1
    finally:
        assert pool.close(PATIENCE)
    assert sockets(first, second) == 0


@pytest.mark.parametrize("options", [{"fail_back": False}, {"strategy": "balanced"}], ids=str)
def test_who_is_idle_moves_too(
    first: Site, second: Site, names: Names, options: dict[str, Any]
) -> None:
    """Whatever the order means, and never with fewer connections than there shall be."""
    names.name(first, ttl=1)
    with names.pool(min_size=2, auth_min_size=1, **options) as pool:
        pool.wait(PATIENCE)
        assert sockets(first) == 3
        names.name(second, ttl=1)
        wait_for(lambda: sockets(first) == 0, "the first is left")
        wait_for(lambda: sockets(second) == 3, "they lead to the second")
        assert pool.get_stats()["search_lost"] == pool.get_stats()["auth_lost"] == 0


@pytest.mark.usefixtures("looked_up_at_once")
def test_who_reaches_nobody_asks_dns_who_there_is(
    first: Site, second: Site, names: Names
) -> None:
    names.name(first)
    user = first.d.users[1]
    with names.pool() as pool:
        assert pool.authenticate(user.uid, user.password).server == names.url(first)
        names.name(second)
        first.proxy.cut()
        assert pool.authenticate(user.uid, user.password).server == names.url(second)
        assert pool.get_stats()["logins_failed"] == 0


@pytest.mark.usefixtures("looked_up_at_once")
def test_dns_that_does_not_answer_is_an_outage_in_time(
    first: Site, second: Site, names: Names
) -> None:
    names.name(second, first)
    names.server.silent = True
    user = first.d.users[1]
    with names.pool(connect_timeout=SHORT) as pool:
        for _ in range(2):
            with pytest.raises(DirectoryTimeoutError, match="no answer"):
                pool.authenticate(user.uid, user.password)
    names.server.silent = False
    with names.pool(timeout=SHORT, connect_timeout=PATIENCE) as pool:
        names.server.free.clear()
        with pytest.raises(DirectoryTimeoutError, match="no answer to the lookup"):
            pool.authenticate(user.uid, user.password)
        names.server.free.set()  # the same lookup serves the next one
        wait_for(lambda: bool(pool.servers), "it has ended")
        assert pool.get_stats()["lookups"] == 1
    with names.pool() as pool:
        assert pool.authenticate(user.uid, user.password).server == names.url(second)


def test_the_certificate_must_be_for_the_name_in_the_record(
    made: Made, names: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    d = made.first
    assert d.tls_port
    server, user = names.server, d.users[1]
    server.put("localhost", "A", "127.0.0.1")
    server.put(f"ds1.{DOMAIN}", "A", "127.0.0.1")
    secure = f"ldaps+srv://{DOMAIN}"
    options = {
        "tls": TLS(ca_file=str(d.ca_file)), "nameservers": server.address,
        "srv_domains": ["localhost", DOMAIN],
    }  # fmt: skip
    server.srv(DOMAIN, (0, 0, d.tls_port, "localhost"))
    with make(secure, **options) as pool:
        assert pool.authenticate(user.uid, user.password).server == d.ldaps_url
        (lookup, report) = pool.check()
        assert (lookup.ok, report.ok, report.url.text) == (True, True, d.ldaps_url)
    # Whoever forges the record has no certificate for the name that he puts there.
    server.srv(DOMAIN, (0, 0, d.tls_port, f"ds1.{DOMAIN}"))
    d.mark()
    with make(secure, **options) as pool:
        with pytest.raises(DirectoryTLSError, match=f"not valid for 'ds1.{DOMAIN}'"):
            pool.authenticate(user.uid, user.password)
    assert d.counts().binds == 0
    # With StartTLS it is the same.
    server.srv(DOMAIN, (0, 0, d.port, f"ds1.{DOMAIN}"))
    with make(SRV, **{**options, "tls": TLS(ca_file=str(d.ca_file), start_tls=True)}) as pool:
        with pytest.raises(DirectoryTLSError, match="not valid for"):
            pool.authenticate(user.uid, user.password)
    # And a command says all that.
    given = ["--nameserver", server.address, "--ca-file", str(d.ca_file)]
    server.srv(DOMAIN, (5, 7, d.tls_port, f"ds1.{DOMAIN}"), (0, 0, 1, "elsewhere.test"), ttl=77)
    assert cli.main(["ldap", "check", secure, *given]) == 1
    said = capsys.readouterr().out
    assert f"lookup          _ldap._tcp.{DOMAIN}, 1 found, for 77 s" in said
    assert f"server          ldaps://ds1.{DOMAIN}:{d.tls_port}, priority 5, weight 7" in said
    assert "not used: elsewhere.test: not in example.test; name others by --srv-domain" in " ".join(
        said.split()
    )
    assert f"not valid for 'ds1.{DOMAIN}'" in said
    server.srv(DOMAIN, (0, 0, d.tls_port, "localhost"))
    assert cli.main(["ldap", "check", secure, *given, "--srv-domain", "localhost"]) == 0
    assert d.ldaps_url in capsys.readouterr().out
    server.remove(f"_ldap._tcp.{DOMAIN}", "SRV")
    assert cli.main(["ldap", "check", secure, *given]) == 1
    assert f"_ldap._tcp.{DOMAIN} has no SRV records" in capsys.readouterr().out


def test_a_child_that_is_forked_during_a_lookup(first: Site, names: Names) -> None:
    names.name(first)
    user = first.d.users[1]
    names.server.free.clear()
    with names.pool(min_size=1) as pool:
        wait_for(lambda: names.server.count("SRV") == 1, "the parent asks")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                identity = pool.authenticate(user.uid, user.password)
                code = 0 if identity and pool.get_stats()["lookups"] == 1 else 2
            finally:
                os._exit(code)
        names.server.free.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.authenticate(user.uid, user.password).server == names.url(first)
        assert names.server.count("SRV") >= 2


GREEN = {
    "gevent": """
        from keyfront.gateway.greenlets import patch_gevent; patch_gevent()
        from gevent import spawn
        def wait(job): job.get()
        """,
    "eventlet": """
        import warnings; warnings.simplefilter("ignore")
        import eventlet; eventlet.monkey_patch()
        from eventlet import spawn
        def wait(job): job.wait()
        """,
}

SCRIPT = """
import sys, time
from keyfront.middleware.ldap import LDAPPool
url, nameserver, user_dn, user, password = sys.argv[1:]
patient = dict.fromkeys(("timeout", "connect_timeout", "operation_timeout"), 600.0)
pool = LDAPPool(url, nameservers=nameserver, user_dn=user_dn, min_size=0, **patient)

def login():
    return pool.authenticate(user, password).server

def tick():
    while True:
        print("tick", flush=True)
        time.sleep(0.01)

spawn(tick)
killed, *jobs = [spawn(login) for _ in range(10)]
time.sleep(0)
killed.kill()
for job in jobs:
    wait(job)
assert pool.get_stats()["lookups"] == 1
print(login(), flush=True)
assert pool.close()
"""


@pytest.mark.parametrize("model", GREEN)
def test_greenlets_go_on_during_a_lookup(first: Site, names: Names, model: str) -> None:
    names.name(first)
    names.server.free.clear()
    user = first.d.users[1]
    command = [sys.executable, "-c", textwrap.dedent(GREEN[model]) + SCRIPT]
    given = [SRV, names.server.address, f"uid={{}},{Directory.people}", user.uid, user.password]
    with subprocess.Popen([*command, *given], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            wait_for(lambda: names.server.count("SRV") == 1, "it asks")
            before = names.server.asked.copy()
            for _ in range(50):
                assert process.stdout.readline() == "tick\n"
            assert names.server.asked == before  # for one answer, however many want it
            names.server.free.set()
            said = process.communicate(timeout=PATIENCE)[0].split()
            assert process.returncode == 0
            assert set(said) == {"tick", names.url(first)}
        finally:
            process.kill()

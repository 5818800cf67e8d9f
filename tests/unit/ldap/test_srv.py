"""Servers by SRV records: what is asked of a real DNS server, and what comes of its answers."""

from __future__ import annotations

import collections
import logging
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import dns.rcode
import pytest

from keyfront.common.condition import Condition
from keyfront.errors import (
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    OptionError,
)
from keyfront.middleware.ldap import LDAPPool, wsgi
from keyfront.middleware.ldap.discovery import MOST_SERVERS, DiscoveredServer, Discovery
from keyfront.middleware.ldap.protocol import srv
from keyfront.middleware.ldap.protocol.srv import Answer, NoRecordsError, Resolver, Target
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.servers import ServerSet
from support.clocks import Clock
from support.dns_server import DNSServer
from support.served import PATIENCE, wait_for

DOMAIN = "example.test"
PLAIN = ServerURL.parse(f"ldap+srv://{DOMAIN}")
SECURE = ServerURL.parse(f"ldaps+srv://{DOMAIN}")
# Seconds in which the DNS server here answers, also on a machine that stands still.
SOON = PATIENCE
# Seconds of a lookup that must fail for want of an answer.
SHORT = 0.1


@pytest.fixture
def dns_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DNSServer]:
    # Asked once, should the machine stand still.
    monkeypatch.setattr(srv, "_TRY_SECONDS", PATIENCE)
    with DNSServer() as server:
        yield server


@pytest.fixture
def resolver(dns_server: DNSServer) -> Resolver:
    return Resolver([dns_server.address])


def texts(answer: Answer) -> set[tuple[str, int, int]]:
    return {(each.url.text, each.priority, each.weight) for each in answer.targets}


# What is asked


def test_the_records_of_a_domain(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.srv(
        DOMAIN, (10, 60, 389, "DS1.Example.test"), (20, 0, 3890, f"ds2.{DOMAIN}"), ttl=300
    )
    answer = resolver.servers(PLAIN, SOON)
    assert texts(answer) == {
        (f"ldap://ds1.{DOMAIN}:389", 10, 60),
        (f"ldap://ds2.{DOMAIN}:3890", 20, 0),
    }
    assert (answer.name, answer.ttl, answer.left_out) == (f"_ldap._tcp.{DOMAIN}", 300, ())
    assert dns_server.asked == [f"udp SRV _ldap._tcp.{DOMAIN}"]


def test_those_of_a_site(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.srv(f"hq._sites.{DOMAIN}", (0, 100, 389, f"dc1.{DOMAIN}"))
    answer = resolver.servers(ServerURL.parse(f"ldap+srv://hq._sites.{DOMAIN}"), SOON)
    assert texts(answer) == {(f"ldap://dc1.{DOMAIN}:389", 0, 100)}


def test_ldaps_has_records_of_its_own(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.put(f"_ldaps._tcp.{DOMAIN}", "SRV", f"0 1 6360 a.{DOMAIN}.")
    dns_server.srv(DOMAIN, (0, 1, 389, f"b.{DOMAIN}"))
    assert texts(resolver.servers(SECURE, SOON)) == {(f"ldaps://a.{DOMAIN}:6360", 0, 1)}


@pytest.mark.parametrize(("port", "used"), [(389, 636), (3268, 3269), (636, 636), (4000, 4000)])
def test_or_those_of_ldap_at_the_ports_of_ldaps(
    dns_server: DNSServer, resolver: Resolver, port: int, used: int
) -> None:
    dns_server.srv(DOMAIN, (0, 1, port, f"dc1.{DOMAIN}"))
    assert texts(resolver.servers(SECURE, SOON)) == {(f"ldaps://dc1.{DOMAIN}:{used}", 0, 1)}


def test_ldaps_that_is_not_there_is_not_looked_for_elsewhere(
    dns_server: DNSServer, resolver: Resolver
) -> None:
    dns_server.put(f"_ldaps._tcp.{DOMAIN}", "SRV", "0 0 0 .")
    dns_server.srv(DOMAIN, (0, 1, 389, f"b.{DOMAIN}"))
    assert resolver.servers(SECURE, SOON).targets == ()


def test_an_answer_that_is_too_long_for_udp(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.srv(DOMAIN, *((0, 0, 389, f"dc{n}.{DOMAIN}") for n in range(100)))
    dns_server.truncates = True
    assert len(resolver.servers(PLAIN, SOON).targets) == 100
    assert [each[:3] for each in dns_server.asked] == ["udp", "tcp"]


def test_the_shorter_time_to_live_of_an_alias_holds(
    dns_server: DNSServer, resolver: Resolver
) -> None:
    dns_server.put(f"_ldap._tcp.{DOMAIN}", "CNAME", "_ldap._tcp.ad.test.", ttl=7)
    dns_server.srv("ad.test", (0, 0, 389, f"dc1.{DOMAIN}"), ttl=300)
    answer = resolver.servers(PLAIN, SOON)
    assert (len(answer.targets), answer.ttl) == (1, 7)


def test_that_there_is_no_service(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.put(f"_ldap._tcp.{DOMAIN}", "SRV", "0 0 0 .", ttl=60)
    assert resolver.servers(PLAIN, SOON) == Answer(f"_ldap._tcp.{DOMAIN}", (), 60, ())


def test_that_there_are_no_records(dns_server: DNSServer, resolver: Resolver) -> None:
    for url in (PLAIN, SECURE):
        with pytest.raises(NoRecordsError, match=f"_ldap._tcp.{DOMAIN} has no SRV records"):
            resolver.servers(url, SOON)
    dns_server.put(f"_ldap._tcp.{DOMAIN}", "TXT", '"there is something else"')
    with pytest.raises(NoRecordsError):
        resolver.servers(PLAIN, SOON)


def test_servers_elsewhere_are_left_out(dns_server: DNSServer, resolver: Resolver) -> None:
    elsewhere = ("evil.test", f"not{DOMAIN}", f"{DOMAIN}.evil.test")
    dns_server.srv(
        DOMAIN, (0, 0, 389, f"dc1.{DOMAIN}"), *((0, 0, 389, host) for host in elsewhere)
    )
    answer = resolver.servers(PLAIN, SOON)
    assert texts(answer) == {(f"ldap://dc1.{DOMAIN}:389", 0, 0)}
    assert sorted(answer.left_out) == sorted(
        f"{host}: not in {DOMAIN}; srv_domains names others" for host in elsewhere
    )
    dns_server.srv(DOMAIN, (0, 0, 389, "evil.test"))
    with pytest.raises(DirectoryUnavailableError, match=r"no server that may be used: evil\.test"):
        resolver.servers(PLAIN, SOON)


@pytest.mark.parametrize(
    ("domains", "hosts"),
    [
        (["corp.test"], {"dc2.corp.test", "corp.test"}),
        ([".Corp.test.", DOMAIN], {f"dc1.{DOMAIN}", "dc2.corp.test", "corp.test"}),
        (["."], {f"dc1.{DOMAIN}", "dc2.corp.test", "corp.test", "xcorp.test"}),
    ],
)
def test_unless_their_domains_are_named(
    dns_server: DNSServer, domains: list[str], hosts: set[str]
) -> None:
    everywhere = (f"dc1.{DOMAIN}", "dc2.corp.test", "corp.test", "xcorp.test")
    dns_server.srv(DOMAIN, *((0, 0, 389, host) for host in everywhere))
    answer = Resolver([dns_server.address], domains).servers(PLAIN, SOON)
    assert {each.url.host for each in answer.targets} == hosts


def test_what_is_no_server_is_left_out(dns_server: DNSServer) -> None:
    dns_server.put(
        f"_ldap._tcp.{DOMAIN}", "SRV",
        f"0 0 0 a.{DOMAIN}.", "0 0 389 .", rf"0 0 389 a\032b.{DOMAIN}.", f"0 0 389 c.{DOMAIN}.",
        f"5 0 389 c.{DOMAIN}.",
    )  # fmt: skip
    answer = Resolver([dns_server.address], ["."]).servers(PLAIN, SOON)
    assert texts(answer) == {(f"ldap://c.{DOMAIN}:389", 0, 0)}
    assert len(answer.left_out) == 3


def test_of_many_that_are_left_out_some_are_told(
    dns_server: DNSServer, resolver: Resolver
) -> None:
    forged = [f"evil{number:03}.test" for number in range(300)]
    random.shuffle(forged)
    dns_server.truncates = True
    dns_server.srv(DOMAIN, *((0, 0, 389, host) for host in [*forged, f"dc1.{DOMAIN}"]))
    why = f"not in {DOMAIN}; srv_domains names others"
    told = (*(f"{host}: {why}" for host in sorted(forged)[:10]), "and 290 more")
    assert resolver.servers(PLAIN, SOON).left_out == told
    dns_server.srv(DOMAIN, *((0, 0, 389, host) for host in forged))
    with pytest.raises(DirectoryUnavailableError, match=f"may be used: {'; '.join(told)}$"):
        resolver.servers(PLAIN, SOON)


def test_dns_that_does_not_answer(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.silent = True
    for url in (PLAIN, SECURE):
        with pytest.raises(DirectoryTimeoutError, match=r"_tcp.*: no answer within 0.1 s"):
            resolver.servers(url, SHORT)


def test_dns_that_fails(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.rcode = dns.rcode.REFUSED
    with pytest.raises(DirectoryUnavailableError, match=r"failed: Do53:127.0.0.1@\d+: REFUSED"):
        resolver.servers(PLAIN, SOON)


def test_the_next_dns_server_is_asked(dns_server: DNSServer) -> None:
    dns_server.srv(DOMAIN, (0, 0, 389, f"dc1.{DOMAIN}"))
    with DNSServer() as other:
        other.rcode = dns.rcode.SERVFAIL
        both = Resolver([other.address, dns_server.address])
        assert len(both.servers(PLAIN, SOON).targets) == 1
        assert len(other.asked) == 1


def test_addresses_are_asked_of_the_same(dns_server: DNSServer, resolver: Resolver) -> None:
    dns_server.put(f"a.{DOMAIN}", "A", "192.0.2.1", "192.0.2.2")
    dns_server.put(f"a.{DOMAIN}", "AAAA", "2001:db8::1")
    found = resolver.addresses(f"a.{DOMAIN}", 389, SOON)
    assert found[0] == ("2001:db8::1", 389, 0, 0)
    assert set(found[1:]) == {("192.0.2.1", 389), ("192.0.2.2", 389)}
    with pytest.raises(OSError, match="it has no address") as none:
        resolver.addresses(f"b.{DOMAIN}", 389, SOON)
    dns_server.silent = True
    with pytest.raises(OSError, match="no answer within") as silent:
        resolver.addresses(f"a.{DOMAIN}", 389, SHORT)
    assert none.value.errno != silent.value.errno


# Options


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1", ("192.0.2.1", 53)),
        ("192.0.2.1:5353", ("192.0.2.1", 5353)),
        ("2001:db8::1", ("2001:db8::1", 53)),
        ("[2001:db8::1]", ("2001:db8::1", 53)),
        ("[2001:db8::1]:5353", ("2001:db8::1", 5353)),
    ],
)
def test_dns_servers(text: str, address: tuple[str, int]) -> None:
    assert srv._nameserver(text) == address


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("nameservers", value)
            for value in ("ns.example", "192.0.2.1:0", "192.0.2.1:x", "192.0.2.1:99999", "[::1]x")
        ),
        *(("srv_domains", value) for value in ("*.example", "_tcp.example", "192.0.2.1", "-")),
    ],
)
def test_what_is_out_of_range(option: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"{option} = ") as caught:
        LDAPPool(PLAIN.text, open=False, **{option: value})
    assert (caught.value.option, caught.value.value) == (option, value)


@pytest.mark.parametrize(
    ("option", "value"), [("nameservers", "192.0.2.1"), ("srv_domains", "example.org")]
)
def test_what_is_of_no_use_is_told(option: str, value: str) -> None:
    with pytest.raises(OptionError, match=rf"{option} = .*: must be left out without ldap\+srv"):
        LDAPPool("ldap://192.0.2.1", open=False, **{option: value})


BESIDE_EVENTLET = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import eventlet
import eventlet.support.greendns
from eventlet import hubs
from keyfront.middleware.ldap.protocol.srv import Resolver, import_dns
from keyfront.middleware.ldap.protocol.urls import ServerURL

before = {name: id(module) for name, module in sys.modules.items() if name.startswith("dns")}
told = []

def look_up():
    made = Resolver([sys.argv[1]])
    url = ServerURL.parse("ldap+srv://example.test")
    told.append([each.url.text for each in made.servers(url, 90.0).targets])
    told.append(made.addresses("ds1.example.test", 389, 90.0))
    told.append(hasattr(hubs._threadlocal, "hub"))
    dns = import_dns()
    told.append([x.time.__name__ for x in (dns.query, dns.resolver, dns.message)])

thread = threading.Thread(target=look_up)
thread.start()
thread.join()
print(told)
now = {name: id(module) for name, module in sys.modules.items() if name.startswith("dns")}
print(now == before)
"""


def test_a_thread_beside_eventlet_runs_none_of_it(dns_server: DNSServer) -> None:
    """Keystone imports eventlet, which replaces functions of dnspython in processes that it does
    not patch, too. In an ordinary thread they begin a hub: greenlets that end with their thread
    have corrupted memory."""
    pytest.importorskip("eventlet.support.greendns")
    dns_server.srv("example.test", (0, 0, 389, "ds1.example.test"))
    dns_server.put("ds1.example.test", "A", "192.0.2.7")
    for truncates in (False, True):  # by TCP as well
        dns_server.truncates = truncates
        done = subprocess.run(
            [sys.executable, "-c", BESIDE_EVENTLET, dns_server.address], capture_output=True,
            text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        expected = (
            "[['ldap://ds1.example.test:389'], [('192.0.2.7', 389)], False, "
            "['time', 'time', 'time']]\nTrue\n"
        )
        assert done.stdout == expected, done


def test_without_dnspython_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    monkeypatch.setattr(srv, "_copy", None)
    LDAPPool("ldap://192.0.2.1", open=False)
    message = r"pip install 'keyfront\[srv\]'"
    with pytest.raises(OptionError, match=f"urls = .*{message}"):
        LDAPPool(PLAIN.text, open=False)
    with pytest.raises(OptionError, match=f"ldap_auth: urls = .*{message}"):
        wsgi.filter_factory({}, urls=PLAIN.text, user_dn="uid={}")


def test_the_options_of_the_filter_reach_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="ldap_auth: nameservers = x"):
        wsgi.filter_factory({}, urls=SECURE.text, user_dn="uid={}", nameservers="x")
    with pytest.raises(OptionError, match=r"ldap_auth: srv_domains = _x\.y"):
        wsgi.filter_factory({}, urls=SECURE.text, user_dn="uid={}", srv_domains="a.b, _x.y")


# What a set of servers makes of it


class Names:
    """Answers lookups as DNS would, with what the test put there; each may be held up.

    It stands for a :class:`Resolver`.
    """

    finds_addresses = False

    def __init__(self) -> None:
        self.outcomes: dict[str, Answer | Exception] = {}
        self.asked: list[str] = []
        self.seconds: list[float] = []
        self.begun = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.at_once = self.most_at_once = 0

    def put(self, host: str, *targets: tuple[str, int, int], ttl: float = 600.0) -> None:
        found = tuple(Target(ServerURL.parse(text), a, b) for text, a, b in targets)
        self.outcomes[host] = Answer(f"_ldap._tcp.{host}", found, ttl, ())

    def servers(self, url: ServerURL, seconds: float) -> Answer:
        self.asked.append(url.host)
        self.seconds.append(seconds)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.set()
        assert self.free.wait(PATIENCE)
        self.at_once -= 1
        outcome = self.outcomes[url.host]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


A, B, C = (f"ldap://192.0.2.{number}" for number in (1, 2, 3))
DOWN = ConnectionRefusedError(111, "Connection refused")


class World:
    """A set of servers, the names it looks up, and a network where some are down."""

    def __init__(self, *urls: str, **options: Any) -> None:
        self.clock = Clock()
        self.names = Names()
        self.down: set[str] = set()
        self.calls: list[str] = []
        self.seconds: list[float] = []
        given: dict[str, Any] = {
            "connect_timeout": PATIENCE, "jitter": 0.0, "clock": self.clock.monotonic,
            "resolve": lambda host, port: [(host, port)], "random": random.Random(1),
            "resolver": self.names, **options,
        }  # fmt: skip
        parsed = [ServerURL.parse(url) for url in urls or (PLAIN.text,)]
        self.servers = ServerSet(parsed, **given)
        assert self.servers.discovery is not None
        self.discovery: Discovery = self.servers.discovery

    def connect(self, url: ServerURL, address: Any, seconds: float) -> ServerURL:
        self.calls.append(url.text.removesuffix(":389"))
        self.seconds.append(seconds)
        if self.calls[-1] in self.down:
            raise DOWN
        return url

    def open(self, timeout: float | None = None) -> str:
        """Open a connection, and return where it leads."""
        return self.servers.open(self.connect, timeout).text.removesuffix(":389")

    def look_up(self) -> None:
        """Have what is due looked up, to the end."""
        self.discovery.refresh()
        self.settle()

    def settle(self) -> None:
        """Wait for the end of a lookup."""
        wait_for(lambda: self.discovery._job is None, "the lookup has ended")

    def named(self) -> list[str]:
        return [each.url.text.removesuffix(":389") for each in self.servers.states()]


@pytest.fixture
def world() -> World:
    made = World()
    made.names.put(DOMAIN, (B, 20, 0), (A, 10, 0))
    return made


def no_answer() -> DirectoryTimeoutError:
    return DirectoryTimeoutError("the lookup: no answer within 5 s", server=PLAIN.text)


def test_nothing_is_looked_up_before_it_is_needed(world: World) -> None:
    assert (world.named(), world.names.asked) == ([], [])
    assert world.open() == A
    assert world.named() == [A, B]
    world.down.add(A)
    assert [world.open(), world.open()] == [B, B]
    assert world.names.asked == [DOMAIN]
    assert world.names.seconds == [PATIENCE]


def test_many_wait_for_one_lookup(world: World) -> None:
    world.names.free.clear()
    opened: list[str] = []
    threads = [threading.Thread(target=lambda: opened.append(world.open())) for _ in range(20)]
    for each in threads:
        each.start()
    wait_for(lambda: len(world.discovery._changed._waiters) == 20, "all wait")
    world.names.free.set()
    for each in threads:
        each.join(PATIENCE)
    assert opened == [A] * 20
    assert (world.names.asked, world.names.most_at_once) == ([DOMAIN], 1)


def test_who_has_less_time_does_not_wait_for_longer() -> None:
    world = World()
    world.names.put(DOMAIN, (A, 0, 0))
    world.names.free.clear()
    with pytest.raises(DirectoryTimeoutError, match=f"{PLAIN.host}: no answer to the lookup"):
        world.open(SHORT)
    world.names.free.set()
    assert world.open(PATIENCE) == A
    assert world.names.asked == [DOMAIN]  # it was not given up with him


def test_when_the_time_to_live_is_over_nobody_waits(world: World) -> None:
    assert world.open() == A
    assert world.servers.next_lookup() == 600.0
    world.clock.later(599.0)
    world.open()
    assert world.names.asked == [DOMAIN]
    world.names.free.clear()
    world.names.put(DOMAIN, (C, 0, 0), (A, 10, 0))
    world.clock.later(1.0)
    assert [world.open(), world.open()] == [A, A]
    assert world.servers.next_lookup() is None
    ended = threading.Event()
    world.discovery.ended = ended.set
    world.names.free.set()
    assert ended.wait(PATIENCE)
    assert world.open() == C
    assert world.names.asked == [DOMAIN] * 2


@pytest.mark.parametrize(("ttl", "used"), [(0.0, 1.0), (1e9, 86_400.0)])
def test_no_time_to_live_is_too_short_or_too_long(ttl: float, used: float) -> None:
    world = World()
    world.names.put(DOMAIN, (A, 0, 0), ttl=ttl)
    world.open()
    assert world.servers.next_lookup() == used


@pytest.mark.parametrize(
    "failure", [no_answer(), NoRecordsError("it has none"), ValueError("a fault of the library")]
)
def test_what_cannot_be_looked_up_stays(
    world: World, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world.open()
    world.names.outcomes[DOMAIN] = failure
    pauses = []
    world.clock.later(600.0)
    for _ in range(7):
        assert world.open() == A
        world.settle()
        pause = world.servers.next_lookup()
        assert pause is not None
        pauses.append(pause)
        world.clock.later(pause - 0.01)
        world.open()
        assert len(world.names.asked) == 1 + len(pauses)  # not before its time
        world.clock.later(0.02)
    for pause, expected in zip(pauses, (1, 2, 4, 8, 15, 15, 15), strict=True):
        assert expected * 0.9 <= pause <= expected * 1.1
    warned = [x.message for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "those known before are used" in warned[0]
    assert world.servers.lookups() == (8, 7)
    world.names.put(DOMAIN, (C, 0, 0))
    world.look_up()
    assert world.open() == C
    assert world.servers.lookup_failures() == []


def test_what_was_never_known_is_an_outage_with_its_reason() -> None:
    world = World()
    world.names.outcomes[DOMAIN] = DirectoryUnavailableError("refused", server=PLAIN.text)
    with pytest.raises(DirectoryUnavailableError) as caught:
        world.open()
    assert str(caught.value) == f"{PLAIN.text}: refused"
    assert caught.value.server == PLAIN.text
    # Whoever comes next is told at once, until it is tried again.
    world.names.put(DOMAIN, (A, 0, 0))
    with pytest.raises(DirectoryUnavailableError, match="refused"):
        world.open()
    assert world.names.asked == [DOMAIN]
    world.clock.later(1.2)
    assert world.open() == A


def test_that_there_is_no_service_is_an_answer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.open()
    world.names.put(DOMAIN)
    world.clock.later(600.0)
    world.look_up()
    with pytest.raises(DirectoryUnavailableError, match="says that there is no such service"):
        world.open()
    assert "says that there is no such service" in caplog.text
    assert world.servers.preferred(ServerURL.parse(A))  # nobody else is better


def test_who_reaches_no_server_has_them_looked_up(world: World) -> None:
    world.open()
    world.down = {A, B}
    world.names.put(DOMAIN, (C, 0, 0))
    world.clock.later(10.0)
    world.calls.clear()
    assert world.open() == C  # without an error
    assert world.calls == [A, B, C]
    assert world.named() == [C]


def test_but_not_over_and_over(world: World) -> None:
    world.open()
    world.down = {A, B}
    world.clock.later(10.0)
    for _ in range(3):
        with pytest.raises(DirectoryUnavailableError):
            world.open()
    assert len(world.names.asked) == 2
    world.clock.later(1.0)
    with pytest.raises(DirectoryUnavailableError):
        world.open()
    assert len(world.names.asked) == 3


def test_nobody_waits_for_dns_that_fails_if_servers_are_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.open()
    world.names.outcomes[DOMAIN] = no_answer()
    world.clock.later(600.0)
    world.look_up()
    world.down = {A, B}
    world.clock.later(1.2)
    world.names.free.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Condition, "wait_for", lambda *_: pytest.fail("somebody waits"))
        with pytest.raises(
            DirectoryUnavailableError, match=r"192.0.2.1.*192.0.2.2.*no answer within"
        ):
            world.open()
    assert world.names.at_once == 1
    world.names.free.set()
    world.settle()


def test_servers_that_are_named_no_more(world: World, caplog: pytest.LogCaptureFixture) -> None:
    servers, left = world.servers, ServerURL.parse(A)
    for _ in range(3):
        world.open()
    world.names.put(DOMAIN, (B, 0, 0))
    world.clock.later(600.0)
    world.look_up()
    assert world.named() == [B]
    assert servers.has_left(left)
    assert not servers.preferred(left)
    # Its three connections still tell of it, to nobody's harm.
    servers.succeeded(left)
    assert not servers.suspect(left)
    caplog.clear()
    servers.failed(left, DirectoryTimeoutError("no answer"))
    assert servers.avoided() == ({left}, {left})
    assert not servers.any_down
    assert caplog.records == []
    assert servers.next_check() is None
    # Where nobody else is up, it is better than nothing.
    servers.failed(ServerURL.parse(B), DirectoryTimeoutError("no answer"))
    assert not servers.has_left(left)
    assert servers.avoided()[1] == frozenset()
    # If it is named again it is what it was.
    world.names.put(DOMAIN, (A, 0, 0))
    world.clock.later(600.0)
    world.look_up()
    (state,) = servers.states()
    assert (state.state, state.connections) == ("down", 3)
    # And forgotten with its last connection.
    world.names.put(DOMAIN, (C, 0, 0))
    world.clock.later(600.0)
    world.look_up()
    for _ in range(4):
        servers.released(left)
    assert left not in servers._by_url
    servers.failed(left, DirectoryTimeoutError("no answer"))
    servers.succeeded(left)
    assert not servers.suspect(left)


def test_the_one_that_is_opened_while_it_leaves(world: World) -> None:
    def connect(url: ServerURL, address: Any, seconds: float) -> ServerURL:
        world.servers._replace([DiscoveredServer(ServerURL.parse(B), 0, 1.0)])
        return url

    left = world.servers.open(connect)
    assert left == ServerURL.parse(A)
    assert world.servers.has_left(left)
    world.servers.released(left)
    assert left not in world.servers._by_url


def test_a_site_first_and_then_the_domain() -> None:
    world = World(f"ldap+srv://hq._sites.{DOMAIN}", PLAIN.text, "ldap://192.0.2.9")
    world.names.put(f"hq._sites.{DOMAIN}", (B, 0, 100))
    world.names.put(DOMAIN, (A, 0, 100), (B, 0, 100), (C, 5, 0))
    # Who comes last is not taken for want of an answer.
    world.names.free.clear()
    opened: list[str] = []
    thread = threading.Thread(target=lambda: opened.append(world.open()))
    thread.start()
    wait_for(lambda: len(world.discovery._changed._waiters) == 1, "it waits")
    world.names.free.set()
    thread.join(PATIENCE)
    assert opened == [B]
    world.settle()
    assert world.named() == [B, A, C, "ldap://192.0.2.9"]
    assert [entry.tier for entry in world.discovery.entries()] == [0, 1, 2, 3]
    assert world.names.most_at_once == 1
    assert world.names.seconds == [PATIENCE / 2, PATIENCE]  # the rest of it, as none went by


def test_another_server_is_used_if_dns_does_not_answer_at_first() -> None:
    world = World(PLAIN.text, A, connect_timeout=SHORT)
    world.names.put(DOMAIN, (B, 0, 0))
    world.names.free.clear()
    assert world.open(PATIENCE) == A
    world.names.free.set()
    world.settle()
    assert world.open() == B


def test_nobody_waits_for_servers_that_would_come_after_others() -> None:
    world = World(A, PLAIN.text)
    world.names.put(DOMAIN, (B, 0, 0))
    world.names.free.clear()
    assert world.open() == A
    world.names.free.set()
    world.settle()
    assert world.named() == [A, B]


def test_a_domain_that_fails_does_not_hide_another() -> None:
    world = World(f"ldap+srv://hq._sites.{DOMAIN}", PLAIN.text)
    world.names.outcomes[f"hq._sites.{DOMAIN}"] = NoRecordsError("no site")
    world.names.put(DOMAIN, (A, 0, 100))
    assert world.open() == A


# The order


def drawn(*targets: tuple[str, int, int], seed: int) -> Discovery:
    names = Names()
    names.put(DOMAIN, *targets)
    made = Discovery(
        [PLAIN], names.servers, seconds=1.0, clock=Clock().monotonic, random=random.Random(seed),
        changed=lambda entries: None,
    )  # fmt: skip
    made._domains[PLAIN].answer = names.servers(PLAIN, 1.0)
    return made


def test_weights_are_chances() -> None:
    targets = ((A, 0, 60), (B, 0, 30), (C, 0, 10))
    orders = [
        tuple(entry.url.host[-1] for entry in drawn(*targets, seed=seed).entries())
        for seed in range(3000)
    ]
    first = collections.Counter(order[0] for order in orders)
    for host, chance in (("1", 0.6), ("2", 0.3), ("3", 0.1)):
        assert abs(first[host] / 3000 - chance) < 0.04
    # And so among those that are left.
    second = collections.Counter(order[1] for order in orders if order[0] == "1")
    assert abs(second["2"] / second.total() - 0.75) < 0.05


def test_weight_0_is_a_very_small_chance_and_alone_an_even_one() -> None:
    first = collections.Counter(
        drawn((A, 0, 0), (B, 0, 10), seed=seed).entries()[0].url.host for seed in range(3000)
    )
    assert 0 < first["192.0.2.1"] < 100
    even = collections.Counter(
        drawn((A, 0, 0), (B, 0, 0), seed=seed).entries()[0].url.host for seed in range(1000)
    )
    assert 400 < even["192.0.2.1"] < 600


def test_the_order_stays_while_others_come_and_go() -> None:
    hosts = [f"ldap://192.0.2.{number}" for number in range(1, 30)]
    world = World()
    world.names.put(DOMAIN, *((host, 0, 100) for host in hosts))
    world.open()
    before = world.named()
    gone, new = before[3], "ldap://192.0.2.200"
    kept = [host for host in reversed(hosts) if host != gone]
    world.names.put(DOMAIN, *((host, 0, 100) for host in (new, *kept)))
    world.clock.later(600.0)
    world.look_up()
    assert [host for host in world.named() if host != new] == [x for x in before if x != gone]
    assert new in world.named()


def test_the_preferred_ones_of_very_many_are_used() -> None:
    many = [(f"ldap://192.0.{n // 250}.{n % 250}", n // 50, 0) for n in range(500)]
    entries = drawn(*reversed(many), seed=1).entries()
    assert len(entries) == MOST_SERVERS
    assert {entry.tier for entry in entries} == {0, 1}


def test_the_load_is_balanced_within_a_priority_by_weight() -> None:
    world = World(strategy="balanced")
    world.names.put(DOMAIN, (A, 0, 300), (B, 0, 100), (C, 5, 100))
    opened = collections.Counter(world.open() for _ in range(400))
    assert opened.keys() == {A, B}
    assert abs(opened[A] - 300) <= 3
    assert world.servers.preferred(ServerURL.parse(B))
    assert not world.servers.preferred(ServerURL.parse(C))
    world.down = {A, B}
    assert world.open() == C


def test_one_of_many_has_a_quarter_of_the_time() -> None:
    world = World()
    world.names.put(DOMAIN, *((f"ldap://192.0.2.{n}", 0, 0) for n in range(1, 60)))
    world.open(4.0)
    assert world.seconds == [1.0]


# Forks, kills, ends


def test_a_forked_child_waits_for_no_lookup_of_its_parent(world: World) -> None:
    world.open()
    before = world.named()
    world.names.free.clear()
    world.names.begun.clear()
    world.names.put(DOMAIN, (C, 0, 0))
    world.clock.later(600.0)
    world.open()
    assert world.names.begun.wait(PATIENCE)
    parents = world.discovery._job
    world.servers.after_fork()
    assert sorted(world.named()) == sorted(before)
    world.names.put(DOMAIN, (B, 0, 0))
    world.servers.check(lambda *_: None)
    assert world.discovery._job is not parents
    world.names.free.set()
    world.settle()
    wait_for(lambda: world.names.at_once == 0, "the parent's has ended, too")
    assert world.named() == [B]
    assert world.servers.lookups() == (1, 0)


def test_children_draw_orders_of_their_own() -> None:
    world = World()
    world.names.put(DOMAIN, *((f"ldap://192.0.2.{n}", 0, 0) for n in range(1, 40)))
    world.open()
    before = world.named()
    world.servers.after_fork()
    assert sorted(world.named()) == sorted(before)
    assert world.named() != before


def test_without_a_thread_the_caller_looks_it_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert world.open() == A


def test_a_lookup_that_is_killed_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gevent kills a greenlet."""

    class Kill(BaseException):
        pass

    def killed(url: ServerURL, seconds: float) -> Answer:
        raise Kill

    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr(world.discovery, "_look_up", killed)
    with pytest.raises(DirectoryTimeoutError, match="no answer to the lookup"):
        world.open()
    monkeypatch.setattr(world.discovery, "_look_up", world.names.servers)
    assert world.open() == A


def test_a_pool_that_nobody_has_any_more_goes() -> None:
    pool = LDAPPool(PLAIN.text, min_size=0, nameservers="127.0.0.1:1")
    kept, servers = weakref.ref(pool), weakref.ref(pool._servers)
    assert pool.get_stats()["servers_up"] == 0
    del pool
    assert kept() is None  # at once: nothing of it leads back to it
    assert servers() is None

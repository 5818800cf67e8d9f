"""A connection to a real slapd: plain, LDAPS and StartTLS; in order, and through faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import ldap
import ldap.filter
import ldap3
import psutil
import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    Verdict,
)
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL
from support.certificates import certificates
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, wait_for

# Seconds for an operation that must fail for want of an answer.
SHORT = 0.3
KINDS = ("plain", "ldaps", "starttls")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True) as d:
        yield d


@pytest.fixture
def d(served: Directory) -> Directory:
    served.mark()
    return served


def connect(d: Directory, kind: str = "plain", port: int = 0, **options: Any) -> Connection:
    """Connect to it, or to a proxy of it at `port`."""
    scheme, host = ("ldaps", "localhost") if kind == "ldaps" else ("ldap", "127.0.0.1")
    port = port or (d.tls_port if kind == "ldaps" and d.tls_port else d.port)
    tls = TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls")
    options = {"tls": tls, "connect_timeout": PATIENCE, "timeout": PATIENCE, **options}
    return Connection.connect(ServerURL.parse(f"{scheme}://{host}:{port}"), **options)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connection(d: Directory, kind: str) -> Iterator[Connection]:
    made = connect(d, kind)
    yield made
    made.close()


@pytest.fixture
def proxy(d: Directory, kind: str) -> Iterator[FaultProxy]:
    target = d.tls_port if kind == "ldaps" and d.tls_port else d.port
    with FaultProxy(target) as made:
        yield made


# Logging in


def test_each_bind_is_one_bind(d: Directory, connection: Connection) -> None:
    assert not connection.readable()
    for n, user in enumerate(d.users + d.odd_users):
        connection.bind(user.dn, user.password)
        assert connection.bound_as == user.dn
        assert connection.extended("1.3.6.1.4.1.4203.1.11.3")[1] is not None
        with pytest.raises(CredentialsError) as caught:
            connection.bind(user.dn, "wrong" if n % 2 else b"\xff\0")
        assert caught.value.verdict is Verdict.WRONG_PASSWORD
        assert connection.bound_as is None
        assert not connection.readable()
        connection.bind(user.dn, user.password.encode())
        d.unlock(user.dn)
    d.mark()
    connection.bind(d.users[0].dn, d.users[0].password)
    with pytest.raises(CredentialsError):
        connection.bind(f"uid=nobody,{d.people}", "x")
    with pytest.raises(CredentialsError):
        connection.bind(d.users[0].dn, "")
    counts = d.counts()
    assert (counts.binds, counts.binds_refused, counts.connects) == (2, 1, 0)


def test_anonymous(d: Directory, connection: Connection) -> None:
    connection.bind("", "", allow_anonymous=True)
    assert connection.extended("1.3.6.1.4.1.4203.1.11.3") == (None, b"")


def test_why_a_password_is_refused(d: Directory) -> None:
    def verdict(user: Any, password: str) -> Verdict:
        with pytest.raises(CredentialsError) as caught:
            connection.bind(user.dn, password, password_policy=True)
        return caught.value.verdict

    connection = connect(d)
    locked, expired, reset, grace, soon, ended = d.users[:6]
    try:
        d.lock(locked.dn)
        assert verdict(locked, locked.password) is Verdict.LOCKED
        d.expire(expired.dn)
        assert verdict(expired, expired.password) is Verdict.EXPIRED
        d.must_change(reset.dn)
        assert verdict(reset, reset.password) is Verdict.MUST_CHANGE
        d.expire(grace.dn, grace=True)
        left = connection.bind(grace.dn, grace.password, password_policy=True).grace
        assert left is not None
        assert left >= 0
        d.expire_soon(soon.dn)
        seconds = connection.bind(soon.dn, soon.password, password_policy=True).password_expiring
        assert seconds is not None
        assert 0 < seconds <= 86400
        d.end_account(ended.dn)
        # slapd has no word for an account that ended
        assert verdict(ended, ended.password) is Verdict.LOCKED
        # without being asked the server tells nothing
        with pytest.raises(CredentialsError) as caught:
            connection.bind(locked.dn, locked.password)
        assert caught.value.verdict is Verdict.WRONG_PASSWORD
    finally:
        connection.close()
        for user in (locked, expired, reset, grace, soon, ended):
            d.modify(user.dn, {"pwdPolicySubentry": []})
            d.unlock(user.dn)
            d.password(user.dn, user.password)


# Searching


def searches(d: Directory) -> list[dict[str, Any]]:
    odd = [ldap.filter.escape_filter_chars(user.uid) for user in d.odd_users]
    return [
        {"base": d.suffix},
        {"base": d.people, "scope": 1, "filter": "(objectClass=inetOrgPerson)"},
        {"base": d.people, "filter": "(&(objectClass=*)(|(uid=user1)(uid=user2)))"},
        {"base": d.people, "filter": "uid=user1", "attributes": ["mail", "cn", "none"]},
        {"base": d.people, "filter": "(uid=user*)", "attributes": ["1.1"]},
        {"base": d.people, "filter": "(uid=user*)", "attributes": []},
        {"base": d.people, "filter": "(!(uid=user1*))", "attributes": ["*", "+"]},
        {"base": d.people, "filter": "(uid=user1)", "attrs_only": True},
        {"base": d.users[0].dn, "scope": 0},
        {"base": d.groups, "filter": f"(member={d.users[0].dn})", "attributes": ["CN"]},
        {"base": f"ou=Groups, {d.suffix}", "filter": "(cn>=a)"},
        {"base": "", "scope": 0, "attributes": ["supportedExtension", "objectClass"]},
        {"base": d.people, "filter": "(uid=nobody)"},
        *({"base": d.people, "filter": f"(uid={each})"} for each in odd),
        {"base": f"ou=nowhere,{d.suffix}"},
        {"base": "no dn"},
        {"base": d.suffix, "size_limit": 2},
        {"base": d.suffix, "time_limit": 30, "dereference": 3},
    ]


def by_libldap(url: str, search: dict[str, Any]) -> object:
    client = ldap.initialize(url)
    try:
        client.set_option(ldap.OPT_DEREF, search.get("dereference", 0))
        sent = client.search_ext(
            search["base"], search.get("scope", 2), search.get("filter", "(objectClass=*)"),
            search.get("attributes"), search.get("attrs_only", 0),
            sizelimit=search.get("size_limit", 0), timeout=search.get("time_limit", -1),
        )  # fmt: skip
        return client.result3(sent)[1]
    except ldap.LDAPError as error:
        return error.args[0]["result"], error.args[0].get("matched", "")
    finally:
        client.unbind_s()


def test_finds_what_libldap_finds(d: Directory, connection: Connection) -> None:
    for search in searches(d):
        try:
            found: object = connection.search(**search).items
        except DirectoryAnswerError as error:
            found = error.code, error.matched_dn
        assert found == by_libldap(d.url, search), search
        assert connection.usable
        assert not connection.readable()


def test_pages_are_the_whole(d: Directory, connection: Connection) -> None:
    whole = connection.search(d.suffix).items
    for size in (1, 3, len(whole), len(whole) + 1):
        assert connection.search(d.suffix, page_size=size).items == whole
    found, cookie = connection.search_page(d.suffix, page_size=5)
    assert found.items == whole[:5]
    found, cookie = connection.search_page(d.suffix, page_size=5, cookie=cookie)
    assert found.items == whole[5:10]
    assert cookie
    connection.search_page(d.suffix, page_size=0, cookie=cookie)
    with pytest.raises(DirectoryAnswerError, match="sizeLimitExceeded"):
        connection.search(d.suffix, page_size=3, size_limit=4)


def test_large_values_and_many_entries(d: Directory, connection: Connection) -> None:
    dn, large = f"cn=large,{d.suffix}", os.urandom(3_000_000)
    d.add(dn, {"objectClass": ["organizationalRole"], "cn": ["large"]})
    try:
        text = [b"%d " % n + b"x" * 5000 for n in range(200)]
        d.modify(dn, {"description": [large.hex(), *text]})
        ((_, found),) = connection.search(dn, 0).entries
        assert sorted(found["description"]) == sorted([large.hex().encode(), *text])
    finally:
        d.delete(dn)


def test_what_the_server_can_do(d: Directory, connection: Connection) -> None:
    d.mark()
    assert connection.supports("1.2.840.113556.1.4.319")
    assert not connection.supports("1.2.840.113556.1.4.1781")
    connection.ping()
    assert d.counts().searches == 2
    with pytest.raises(DirectoryAnswerError, match="protocolError"):
        connection.fast_bind()
    assert connection.usable


# ldap3 on the same socket


def test_ldap3_between_our_searches(d: Directory, connection: Connection) -> None:
    d.mark()
    connection.bind(d.root_dn, d.root_password)
    other = connection.ldap3
    dn = f"cn=shared,{d.suffix}"

    def ours() -> list[Any]:
        return connection.search(d.suffix, 2, "(cn=shared)", ["description"]).items

    assert ours() == []
    attributes = {"description": ["one"]}
    assert other.add(dn, "organizationalRole", attributes), other.result
    assert ours() == [(dn, {"description": [b"one"]})]
    assert other.modify(dn, {"description": [(ldap3.MODIFY_REPLACE, ["two"])]}), other.result
    assert ours() == [(dn, {"description": [b"two"]})]
    assert other.compare(dn, "description", "two")
    assert not other.compare(dn, "description", "one")
    assert ours() != []
    assert other.extend.standard.who_am_i() == f"dn:{d.root_dn}"
    assert other.modify_dn(dn, "cn=shared too"), other.result
    assert ours() == []
    assert other.search(d.people, "(uid=user1)", attributes=["cn"])
    assert other.response[0]["raw_attributes"]["cn"] == [b"User 1"]
    assert len(connection.search(d.people, 1).items) == len(d.users + d.odd_users)
    assert other.delete(f"cn=shared too,{d.suffix}"), other.result
    # refused, and told so in ldap3's way
    assert not other.delete(f"cn=shared too,{d.suffix}")
    assert other.result["description"] == "noSuchObject"
    user = d.users[0]
    assert other.extend.standard.modify_password(user.dn, None, "changed-secret")
    assert other.request is None
    connection.bind(user.dn, "changed-secret")
    d.password(user.dn, user.password)
    assert connection.usable
    assert not connection.readable()
    counts = d.counts()
    assert (counts.connects, counts.binds) == (0, 2)


def test_what_ldap3_loses_is_lost(d: Directory, kind: str, proxy: FaultProxy) -> None:
    connection = connect(d, kind, proxy.port)
    proxy.reset()
    with pytest.raises(DirectoryUnavailableError):
        connection.ldap3.compare(d.users[0].dn, "uid", "user0")
    assert not connection.usable
    connection.close()
    proxy.forward()
    connection = connect(d, kind, proxy.port, timeout=SHORT)
    proxy.stall()
    with pytest.raises(DirectoryTimeoutError):
        connection.ldap3.delete("cn=nobody")
    assert not connection.usable
    connection.close()


# TLS


def open_to(d: Directory) -> int:
    """How many sockets of this process are connected to it."""
    found = psutil.Process().net_connections("tcp")
    return sum(x.raddr != () and x.raddr.port in (d.port, d.tls_port) for x in found)


@pytest.mark.parametrize("which", ["wrong_host", "expired", "other_ca"])
def test_certificates_that_are_not_accepted(tmp_path: Path, which: str) -> None:
    wrong = getattr(certificates(tmp_path), which)
    with directory(tmp_path, tls="both", certificate=wrong, users=1) as d:
        for kind in KINDS[1:]:
            with pytest.raises(DirectoryTLSError, match="certificate is not accepted") as caught:
                connect(d, kind)
            assert caught.value.server in str(caught.value)
            assert open_to(d) == 0
            for verify in ("allow", "never"):
                tls = TLS(ca_file=str(d.ca_file), verify=verify, start_tls=kind == "starttls")
                connection = connect(d, kind, tls=tls)
                connection.bind(d.users[0].dn, d.users[0].password)
                connection.close()


def test_the_authority_must_be_given(d: Directory) -> None:
    for kind in KINDS[1:]:
        with pytest.raises(DirectoryTLSError, match="set ca_file to the CA"):
            connect(d, kind, tls=TLS(start_tls=kind == "starttls"))
    tls = TLS(ca_dir=str(d.certificates.ca_dir))
    connect(d, "ldaps", tls=tls).close()


def test_the_name_counts_and_not_the_address(d: Directory) -> None:
    assert d.tls_port
    tls = TLS(ca_file=str(d.ca_file))
    address = ("127.0.0.1", d.tls_port)
    for name in ("localhost", "localhost.", "127.0.0.1", "[::1]"):
        url = ServerURL.parse(f"ldaps://{name}:{d.tls_port}")
        Connection.connect(url, tls=tls, connect_timeout=PATIENCE, address=address).close()
    url = ServerURL.parse(f"ldaps://directory.example.org:{d.tls_port}")
    with pytest.raises(DirectoryTLSError, match=r"directory\.example\.org"):
        Connection.connect(url, tls=tls, connect_timeout=PATIENCE, address=address)


def test_a_server_that_wants_a_certificate(tmp_path: Path) -> None:
    ca_file = certificates(tmp_path).ca_file
    extra = f"TLSCACertificateFile {ca_file}\nTLSVerifyClient demand\n"
    with directory(tmp_path, tls="both", users=1, extra=extra) as d:
        pair = d.certificates.client
        for kind in KINDS[1:]:
            tls = TLS(
                ca_file=str(d.ca_file), start_tls=kind == "starttls",
                client_cert=str(pair.certificate), client_key=str(pair.key),
            )  # fmt: skip
            connection = connect(d, kind, tls=tls)
            connection.bind(d.users[0].dn, d.users[0].password)
            connection.close()
            # with TLS 1.3 it is only told when it reads
            with pytest.raises(DirectoryUnavailableError), closing(connect(d, kind)) as bare:
                bare.bind(d.users[0].dn, d.users[0].password)


def test_ldaps_where_there_is_none(d: Directory) -> None:
    with pytest.raises(DirectoryTLSError):
        connect(d, "ldaps", d.port)
    with closing(connect(d, "plain", d.tls_port or 0)) as connection:
        with pytest.raises(DirectoryUnavailableError):
            connection.bind(d.users[0].dn, d.users[0].password)


# Faults


def test_an_idle_connection_that_the_server_closes(tmp_path: Path) -> None:
    with directory(tmp_path, tls="both", users=1) as d:
        made = [connect(d, kind) for kind in KINDS]
        made += [connect(d, kind) for kind in KINDS]
        for connection in made[3:]:
            connection.bind(d.users[0].dn, d.users[0].password)
        assert not any(connection.readable() for connection in made)
        assert all(connection.usable for connection in made)
        d.stop()
        for connection in made:
            wait_for(connection.readable, "the end is seen")
            assert not connection.usable
            connection.close()


def test_a_server_that_is_killed_under_us(tmp_path: Path) -> None:
    with directory(tmp_path, tls="both", users=1) as d:
        made = [connect(d, kind) for kind in KINDS]
        d.kill()
        for connection in made:
            with pytest.raises(DirectoryUnavailableError) as caught:
                connection.bind(d.users[0].dn, d.users[0].password)
            assert not isinstance(caught.value, DirectoryTimeoutError)
            assert not connection.usable
            connection.close()
        with pytest.raises(DirectoryUnavailableError, match="refused"):
            connect(d)


def test_a_server_that_does_not_answer(d: Directory, kind: str) -> None:
    connection, other = connect(d, kind), connect(d, kind)
    d.pause()
    try:
        with pytest.raises(DirectoryTimeoutError, match="no answer within"):
            connection.search(d.suffix, timeout=SHORT)
        with pytest.raises(DirectoryTimeoutError):
            other.bind(d.users[0].dn, d.users[0].password, timeout=SHORT)
        if kind != "plain":
            with pytest.raises(DirectoryTimeoutError):
                connect(d, kind, connect_timeout=SHORT)
    finally:
        d.resume()
    d.wait_for(lambda counts: counts.binds == 1, "the BIND was seen")
    for each in (connection, other):
        assert not each.usable
        each.close()


def test_every_place_at_which_an_answer_can_be_cut(d: Directory, kind: str) -> None:
    target = d.tls_port if kind == "ldaps" and d.tls_port else d.port
    for size in (0, 1, 5, 20, 200, 2000):
        with FaultProxy(target) as proxy:
            connection = connect(d, kind, proxy.port)
            proxy.reset_after(size)
            with pytest.raises(DirectoryUnavailableError):
                connection.search(d.suffix, attributes=["*", "+"])
            assert not connection.usable
            connection.close()


def test_a_slow_server_has_one_deadline(d: Directory, kind: str, proxy: FaultProxy) -> None:
    connection = connect(d, kind, proxy.port)
    proxy.trickle(1, SHORT / 10)
    start = time.monotonic()
    with pytest.raises(DirectoryTimeoutError):
        connection.search(d.suffix, timeout=SHORT)
    assert SHORT <= time.monotonic() - start < PATIENCE / 2
    connection.close()


def test_delay_is_no_fault(d: Directory, kind: str, proxy: FaultProxy) -> None:
    proxy.forward(delay=0.02)
    connection = connect(d, kind, proxy.port)
    connection.bind(d.users[0].dn, d.users[0].password)
    assert len(connection.search(d.people, 1, page_size=10).items) > 10
    connection.close()


def test_a_host_that_vanished(d: Directory, kind: str, proxy: FaultProxy) -> None:
    connection = connect(d, kind, proxy.port, timeout=SHORT)
    proxy.black_hole()
    assert not connection.readable()
    for ask in (connection.ping, connection.ping):
        with pytest.raises(DirectoryUnavailableError):
            ask()
    connection.close()
    start = time.monotonic()
    with pytest.raises(DirectoryTimeoutError, match="no connection within"):
        connect(d, kind, proxy.port, connect_timeout=SHORT)
    assert time.monotonic() - start < PATIENCE / 2


def test_a_half_open_connection(d: Directory, kind: str, proxy: FaultProxy) -> None:
    connection = connect(d, kind, proxy.port)
    proxy.half_open()
    with pytest.raises(DirectoryTimeoutError):
        connection.bind(d.users[0].dn, d.users[0].password, timeout=SHORT)
    connection.close()


def test_garbage_over_the_wire(d: Directory, kind: str, proxy: FaultProxy) -> None:
    connection = connect(d, kind, proxy.port)
    proxy.garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(DirectoryUnavailableError):
        connection.bind(d.users[0].dn, d.users[0].password)
    assert not connection.usable
    connection.close()
    if kind == "starttls":
        with pytest.raises(DirectoryError):
            connect(d, kind, proxy.port)


def test_failures_leave_no_descriptor(d: Directory, kind: str, proxy: FaultProxy) -> None:
    proxy.forward()
    connect(d, kind, proxy.port).close()
    proxy.wait_for_connections(0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        proxy.forward()
        with closing(connect(d, kind, proxy.port)) as connection:
            proxy.reset_after(3)
            with pytest.raises(DirectoryUnavailableError):
                connection.search(d.suffix)
    if kind != "plain":
        for _ in range(10):
            with pytest.raises(DirectoryUnavailableError):
                connect(d, kind, proxy.port)
    proxy.cut()
    for _ in range(30):
        with pytest.raises(DirectoryUnavailableError):
            connect(d, kind, proxy.port)
    proxy.wait_for_connections(0)
    proxy.forward()
    made = connect(d, kind, proxy.port)
    made.close()
    proxy.wait_for_connections(0)
    deadline = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/fd")) > before:  # the proxy's are among them
        assert time.monotonic() < deadline


def test_a_child_leaves_its_parents_connection_alone(d: Directory, connection: Connection) -> None:
    connection.bind(d.users[0].dn, d.users[0].password)
    child = os.fork()
    if child == 0:
        try:
            connection.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not connection.readable()
    assert connection.search(d.users[0].dn, 0).entries
    assert d.counts().unbinds == 0


# Greenlets

GREEN = """
import sys, time
library, ca_file, dn, password, people, *urls = sys.argv[1:]
if library == "gevent":
    from keyfront.gateway.greenlets import patch_gevent; patch_gevent()
elif library == "eventlet":
    import warnings
    warnings.simplefilter("ignore")
    import eventlet
    eventlet.monkey_patch()
import socket, threading
from keyfront.errors import DirectoryTimeoutError, DirectoryUnavailableError
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL

def connect(kind, url, seconds):
    tls = TLS(ca_file=ca_file, start_tls=kind == "starttls")
    url = ServerURL.parse(url)
    return Connection.connect(url, tls=tls, connect_timeout=seconds, timeout=seconds)

for kind, url in zip(("plain", "ldaps", "starttls"), urls):
    made = connect(kind, url, 60)
    assert not made.readable(), kind
    made.bind(dn, password)
    assert not made.readable(), kind
    assert len(made.search(people, page_size=3).items) > 5
    assert made.ldap3.extend.standard.who_am_i() == "dn:" + dn
    assert not made.readable(), kind
    assert made.usable
    made.close()

# a server that says nothing stops one greenlet, and no other
ticks, over = [], threading.Event()
def tick():
    while not over.is_set():
        ticks.append(1)
        time.sleep(0.01)
def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
ticking = threading.Thread(target=tick)
ticking.start()
silent = socket.create_server(("127.0.0.1", 0))
for kind in ("plain", "ldaps", "starttls"):
    scheme = "ldaps" if kind == "ldaps" else "ldap"
    url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
    ends = []
    def ask(seconds):
        try:
            connect(kind, url, seconds).bind(dn, password)
        except DirectoryUnavailableError as error:
            ends.append(type(error))
    asking = threading.Thread(target=ask, args=(60,))
    asking.start()
    server, _ = silent.accept()
    assert server.recv(1)  # it has asked, and waits
    before = len(ticks)
    until(lambda: len(ticks) > before + 5)
    assert not ends, kind
    server.close()
    asking.join()
    assert ends.pop() is not DirectoryTimeoutError, kind
    ask(0.3)
    assert ends == [DirectoryTimeoutError], kind
    silent.accept()[0].close()
over.set()
ticking.join()
silent.close()
print("done")
"""


@pytest.mark.parametrize("library", ["threads", "gevent", "eventlet"])
def test_greenlets(d: Directory, library: str) -> None:
    user = d.users[0]
    done = subprocess.run(
        [
            sys.executable, "-c", GREEN, library, str(d.ca_file), user.dn, user.password,
            d.people, d.url, d.ldaps_url, d.url,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr

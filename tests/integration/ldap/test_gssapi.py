"""The service binds by Kerberos (SASL GSSAPI): a real KDC, a real slapd, one of each for all."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from keystone import exception
from oslo_config import cfg

from keyfront.cli import main as cli
from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryUnavailableError,
    KerberosError,
    Verdict,
)
from keyfront.middleware.ldap import TLS, Kerberos, LDAPPool, kerberos, service_account
from keyfront.middleware.ldap.kerberos import Tickets
from keyfront.middleware.ldap.keystone.driver import Identity
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.wsgi import pool_arguments
from keyfront.middleware.ldap.wsgi_options import read
from support.directory import SUFFIX, Directory, directory
from support.kerberos import KDC, REALM, find_gssapi, kdc
from support.served import PATIENCE, wait_for
from support.service_binds import KINDS, identity_of, keystone_conf, pools, refusal, url
from support.set_clock import SetClock

pytestmark = pytest.mark.usefixtures("refused_for_long")

# Whom slapd makes of whom: it knows two principals, and makes nobody of a third.
MAPPED = f"""
sasl-host localhost
sasl-realm {REALM}
sasl-cbinding tls-endpoint
authz-regexp "^uid=nobody,.*cn=gssapi,cn=auth$" ""
authz-regexp "^uid=([^/,]*)(/[^,]*)?,.*cn=gssapi,cn=auth$" "cn=$1,ou=Services,{SUFFIX}"
"""
SHORT = 0.3

Make = Callable[..., LDAPPool]


class World:
    """A KDC, a slapd that believes it, and a folder of Python with gssapi."""

    def __init__(self, centre: KDC, clock: SetClock, server: Directory, python: Path) -> None:
        self.kdc = centre
        self.clock = clock
        self.d = server
        self.python = python
        self._names = 0

    def service(self, name: str = "service") -> tuple[str, Kerberos]:
        """A new principal, with a keytab: its name, and what a pool needs."""
        self._names += 1
        principal = name if name == "nobody" else f"{name}/host{self._names}.example.org"
        return principal, Kerberos(keytab=str(self.kdc.keytab(f"k{self._names}", principal)))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("kerberos")
    python, clock = find_gssapi(folder / "python"), SetClock(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(python))
        # A second slapd, of another test, must not find another's.
        for name in ("KRB5_CLIENT_KTNAME", "KRB5CCNAME", "KRB5_KTNAME"):
            patched.delenv(name, raising=False)
        with kdc(folder, environment=clock.environment) as centre:
            patched.setenv("KRB5_CONFIG", str(centre.krb5_conf))
            keytab = centre.keytab("slapd", "ldap/localhost")
            known = {**centre.environment, "KRB5_KTNAME": str(keytab)}
            with directory(
                folder, tls="both", users=3, extra=MAPPED, environment=known
            ) as server:
                yield World(centre, clock, server, python)


@pytest.fixture
def world(shared: World) -> World:
    shared.d.mark()
    return shared


def secured(d: Directory, kind: str = "ldaps") -> TLS:
    return TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls")


def connect(d: Directory, kind: str = "ldaps") -> Connection:
    tls = secured(d, kind) if kind != "clear" else TLS()
    return Connection.connect(
        ServerURL.parse(url(d, kind)), tls=tls, connect_timeout=PATIENCE, timeout=PATIENCE
    )


def logged_in(options: Kerberos) -> Tickets:
    tickets = Tickets(options)
    tickets.log_in(PATIENCE)
    return tickets


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    with pools() as all_of_them:

        def make(options: Kerberos | None, *more: str, **others: Any) -> LDAPPool:
            urls = others.pop("urls", [*more, world.d.ldaps_url])
            others = {"tls": secured(world.d), **others}
            return all_of_them.make(
                world.d, urls, sasl_mechanism="GSSAPI", kerberos=options, **others
            )

        yield make


def renew_all(pool: LDAPPool) -> None:
    """Have each connection opened anew."""
    pool._search_pool.retire(lambda connection: True)


# A connection


@pytest.mark.parametrize("kind", KINDS)
def test_who_the_server_makes_of_a_principal(world: World, kind: str) -> None:
    d, (principal, options) = world.d, world.service()
    tickets = logged_in(options)
    assert tickets.who == f"{principal}@{REALM}"
    with closing(connect(d, kind)) as connection:
        assert connection.end_point.startswith(b"tls-server-end-point:")

        def bind() -> str:
            exchange = tickets.exchange("LocalHost", connection.end_point, PATIENCE)
            return connection.bind_gssapi(exchange)

        assert bind() == identity_of("service")
        assert connection.bound_as == connection.who_am_i() == identity_of("service")
        assert connection.search(d.suffix, 0).entries
        assert connection.ldap3.extend.standard.who_am_i() == identity_of("service")
        user = d.users[0]
        connection.bind(user.dn, user.password)
        assert connection.who_am_i().lower() == f"dn:{user.dn}".lower()
        assert bind() == identity_of("service")
    # Three rounds each.
    assert d.counts().sasl_binds == 6


def test_a_ticket_that_is_for_other_tls_is_refused(world: World) -> None:
    """As of somebody between who has a certificate that we trust."""
    tickets = logged_in(world.service()[1])
    with closing(connect(world.d)) as connection:
        other = connection.end_point[:-1] + bytes([connection.end_point[-1] ^ 1])
        with pytest.raises(CredentialsError) as caught:
            connection.bind_gssapi(tickets.exchange("localhost", other, PATIENCE))
        assert caught.value.verdict is Verdict.WRONG_TICKET
        assert caught.value.code == 49
        assert connection.bound_as is None
        connection.bind(world.d.users[0].dn, world.d.users[0].password)


def test_accepted_as_nobody(world: World, make: Make) -> None:
    pool = make(world.service("nobody")[1])
    for _ in range(2):
        error = refusal(pool)
        assert error.verdict is Verdict.WRONG_TICKET
        assert "GSSAPI was accepted, but as nobody (anonymous); map the principal" in str(error)
    with pytest.raises(DirectoryUnavailableError, match=r"Kerberos principal .* refused"):
        pool.authenticate("user0", world.d.users[0].password)
    assert world.d.counts().sasl_binds == 3
    assert pool.servers[0].state == "up"


# The pool


def test_the_service_has_a_keytab_and_users_have_passwords(world: World, make: Make) -> None:
    d, before = world.d, (world.kdc.issued("AS_REQ"), world.kdc.issued("TGS_REQ"))
    pool = make(world.service()[1])
    for user in d.users:
        assert pool.authenticate(user.uid, user.password).dn == user.dn
    with pytest.raises(CredentialsError) as caught:
        pool.authenticate(d.users[0].uid, "wrong")
    assert caught.value.verdict is Verdict.WRONG_PASSWORD
    for _ in range(3):
        renew_all(pool)
        with pool.connection() as connection:
            assert connection.who_am_i() == identity_of("service")
    assert d.counts().binds == len(d.users) + 1
    assert d.counts().sasl_binds == 3 * 4
    # One login and one ticket serve for all connections.
    assert world.kdc.issued("AS_REQ") - before[0] == 1
    assert world.kdc.issued("TGS_REQ") - before[1] == 1
    (report,) = pool.check()
    assert report.ok
    assert report.identity == identity_of("service")
    with closing(pool.dedicated(pool.urls[0], ("127.0.0.1", d.tls_port), PATIENCE)) as connection:
        assert connection.bound_as == identity_of("service")


def test_without_tls_only_if_it_is_wanted(world: World, make: Make) -> None:
    _, options = world.service()
    with pytest.raises(Exception, match="over TLS only"):
        make(options, urls=url(world.d, "clear"), tls=TLS())
    clear = Kerberos(keytab=options.keytab, without_tls=True)
    pool = make(clear, urls=url(world.d, "clear"), tls=TLS())
    with pool.connection() as connection:
        assert connection.end_point == b""
        assert connection.bound_as == identity_of("service")


def test_the_keytab_of_the_environment(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, options = world.service()
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", f"FILE:{options.keytab}")
    with make(None).connection() as connection:
        assert connection.bound_as == identity_of("service")
    monkeypatch.delenv("KRB5_CLIENT_KTNAME")
    # Or tickets that somebody else fetches.
    import gssapi.raw

    cache = f"FILE:{tmp_path / 'cache'}"
    store = {b"client_keytab": str(options.keytab).encode(), b"ccache": cache.encode()}
    gssapi.raw.acquire_cred_from(store, usage="initiate")
    with monkeypatch.context() as patched:
        patched.setenv("KRB5CCNAME", cache)
        for _ in range(2):
            with make(None).connection() as connection:
                assert connection.bound_as == identity_of("service")
    with pytest.raises(KerberosError, match=r"no keytab and no ticket; name .*kerberos_keytab"):
        make(None).search(SUFFIX, 0)


def test_a_principal_that_the_keytab_does_not_have(world: World, make: Make) -> None:
    _, options = world.service()
    wrong = Kerberos(keytab=options.keytab, principal="other/host.example.org")
    pool = make(wrong)
    words = f"the keytab {options.keytab} has no key of other/host.example.org; klist -k"
    with pytest.raises(KerberosError, match=words):
        pool.search(SUFFIX, 0)
    assert world.d.counts().connects == 0


def test_a_keytab_that_the_kdc_refuses_is_offered_once(
    world: World, make: Make, tmp_path: Path
) -> None:
    principal, options = world.service()
    shown = tmp_path / "keytab"
    shutil.copy2(str(options.keytab), shown)
    # New keys: those in the file are old.
    fresh = world.kdc.keytab("fresh", principal)
    before = world.kdc.asked("AS_REQ")
    pools = [make(Kerberos(keytab=str(shown))) for _ in range(2)]
    for pool in pools * 2:
        error = refusal(pool)
        assert error.verdict is Verdict.WRONG_TICKET
        assert f"the KDC refused the principal of {shown}" in str(error)
        assert "the keytab has the old ones" in str(error)
        assert error.server is None
    assert "it is not offered again for" in str(error)
    assert world.kdc.asked("AS_REQ") - before == 1
    assert world.d.counts().connects == 0
    # Another file is another one.
    shutil.copy2(fresh, tmp_path / "new")
    (tmp_path / "new").replace(shown)
    for pool in pools:
        with pool.connection() as connection:
            assert connection.bound_as == identity_of("service")
    # One who is gone is refused, too.
    world.kdc.administer(f"delprinc -force {principal}")
    other = make(Kerberos(keytab=str(fresh)))
    assert refusal(other).name == "KDC_ERR_C_PRINCIPAL_UNKNOWN"


def test_a_server_that_the_kdc_does_not_know(world: World, make: Make) -> None:
    d = world.d
    pool = make(world.service()[1], urls=f"ldaps://127.0.0.1:{d.tls_port}")
    words = r"Server ldap/127.0.0.1@EXAMPLE.ORG not found .* the URL must have the name"
    with pytest.raises(DirectoryUnavailableError, match=words):
        pool.search(SUFFIX, 0)
    # It is well, and who logs in by a DN does.
    assert pool.servers[0].state == "up"
    users = make(
        world.service()[1], urls=f"ldaps://127.0.0.1:{d.tls_port}", search_base=None,
        user_dn=f"uid={{}},{d.people}",
    )  # fmt: skip
    assert users.authenticate("user0", d.users[0].password).name == "user0"


def test_one_of_two_servers_is_of_no_use(world: World, make: Make) -> None:
    d = world.d
    pool = make(world.service()[1], f"ldaps://127.0.0.1:{d.tls_port}")
    for _ in range(2):
        renew_all(pool)
        with pool.connection() as connection:
            assert connection.server == d.ldaps_url
    assert pool.get_stats()["servers_up"] == 2


def test_a_silent_kdc(
    world: World, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps nobody longer than his time, and takes no server out of service."""
    d = world.d
    monkeypatch.setattr(service_account, "RENEWAL_SECONDS", SHORT)
    ready = make(world.service()[1])
    with ready.connection() as connection:
        assert connection.bound_as == identity_of("service")
    fresh = make(world.service()[1], timeout=SHORT)
    users = make(world.service()[1], search_base=None, user_dn=f"uid={{}},{d.people}", min_size=1)
    world.kdc.pause()
    try:
        with pytest.raises(DirectoryUnavailableError, match="no answer of the KDC"):
            fresh.search(SUFFIX, 0)
        assert users.authenticate("user0", d.users[0].password).name == "user0"
        # The ticket there is serves, also when it is time for another one.
        account = ready._search_connector.account
        before = account._tickets._login
        before.renew_at = 0.0
        for _ in range(2):
            renew_all(ready)
            with ready.connection() as connection:
                assert connection.who_am_i() == identity_of("service")
        for pool in (ready, fresh, users):
            assert pool.servers[0].state == "up"
    finally:
        world.kdc.resume()
    lines = [x.getMessage() for x in caplog.records if "is not renewed" in x.getMessage()]
    assert len(lines) == 1
    assert "no answer of the KDC within" in lines[0]
    monkeypatch.setattr(service_account, "RENEWAL_SECONDS", PATIENCE)
    monkeypatch.setattr(kerberos, "LATE_SECONDS", PATIENCE)
    # One that is fetched in time makes no noise.
    before.renew_at = 0.0

    def renewed() -> bool:
        renew_all(ready)
        assert ready.search(d.suffix, 0).entries
        return account._tickets._login is not before and not account._tickets.due

    wait_for(renewed, "there is another ticket")
    assert len([x for x in caplog.records if "is not renewed" in x.getMessage()]) == 1


GREENLETS = """
from keyfront.gateway.greenlets import patch_gevent; patch_gevent()
import sys
import gevent
from keyfront.middleware.ldap.kerberos import Kerberos, Tickets
tickets = Tickets(Kerberos(keytab=sys.argv[1]))
waiting = gevent.spawn(tickets.log_in, 90.0)
while not tickets._threads:
    gevent.sleep(0)
for _ in range(5):
    gevent.sleep(0.01)
print("it waits" if not waiting.ready() else waiting.exception)
waiting.kill()
"""


def test_a_silent_kdc_holds_up_no_greenlet(world: World) -> None:
    pytest.importorskip("gevent")
    _, options = world.service()
    path = os.pathsep.join(x for x in (str(world.python), os.environ.get("PYTHONPATH")) if x)
    world.kdc.pause()
    try:
        done = subprocess.run(
            [sys.executable, "-c", GREENLETS, str(options.keytab)], capture_output=True,
            text=True, timeout=PATIENCE, env={**os.environ, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
    finally:
        world.kdc.resume()
    assert done.stdout == "it waits\n", done


def test_clocks_that_are_apart(world: World, make: Make) -> None:
    """The KDC's, from which the client takes the time, and slapd's."""
    pool = make(world.service()[1])
    world.clock.set(7200)
    try:
        error = refusal(pool)
    finally:
        world.clock.set(0)
    assert error.verdict is Verdict.WRONG_TICKET
    assert error.code == 49
    # slapd says no more; its log does.
    assert "gss_accept_sec_context" in str(error)
    assert pool.servers[0].state == "up"


def test_a_server_that_wants_a_layer(world: World) -> None:
    tickets = logged_in(world.service()[1])
    d = world.d
    with directory(
        d.log.parent, users=1, extra=f"{MAPPED}\nsasl-secprops minssf=56",
        environment=d._environment,
    ) as strict:  # fmt: skip
        with closing(connect(strict, "clear")) as connection:
            with pytest.raises(DirectoryAnswerError, match="use ldaps:// or StartTLS") as caught:
                connection.bind_gssapi(tickets.exchange("localhost", b"", PATIENCE))
            assert caught.value.code == 8
            assert not connection.usable


# Keystone, the filter, the command


def conf(d: Directory, options: Kerberos, folder: Path) -> cfg.ConfigOpts:
    return keystone_conf(
        d, folder, f"sasl_mechanism = GSSAPI\nkerberos_keytab = {options.keytab}\n"
    )


def test_keystone(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d, (principal, options) = world.d, world.service()
    driver = Identity(conf(d, options, tmp_path))
    try:
        user = d.users[1]
        found = driver.get_user_by_name(user.cn, "default")
        assert driver.authenticate(found["id"], user.password)["id"] == user.uid
        with driver.pool.get().connection() as connection:
            assert connection.who_am_i() == identity_of("service")
    finally:
        driver.pool.get().close()
    world.kdc.administer(f"delprinc -force {principal}")
    driver = Identity(conf(d, options, tmp_path))
    try:
        caplog.set_level(logging.DEBUG)
        with pytest.raises(exception.LDAPInvalidCredentialsError):
            driver.get_user_by_name(d.users[1].cn, "default")
    finally:
        driver.pool.get().close()
    (line,) = [x.getMessage() for x in caplog.records if x.levelname == "ERROR"]
    assert line.startswith("LDAP: the service's Kerberos principal was refused: KDC_ERR_C_PRIN")


def test_the_filter(world: World) -> None:
    d, (_, options) = world.d, world.service()
    arguments = pool_arguments(
        read({
            "urls": d.ldaps_url, "search_base": d.people, "tls_ca_file": str(d.ca_file),
            "sasl_mechanism": "GSSAPI", "kerberos_keytab": str(options.keytab), "min_size": "0",
            "timeout": str(PATIENCE), "operation_timeout": str(PATIENCE),
            "connect_timeout": str(PATIENCE),
        })
    )  # fmt: skip
    with LDAPPool(**arguments) as pool:
        assert pool.authenticate("user0", d.users[0].password).name == "user0"
    assert d.counts().sasl_binds == 3


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any]]:
    """The status, and the checks of the servers."""
    status = cli.main(["ldap", "check", "--timeout", str(PATIENCE), "--json", *arguments])
    return status, [x for report in json.loads(capsys.readouterr().out) for x in report["checks"]]


def test_the_command_says_who_it_is(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    d, (principal, options) = world.d, world.service()
    shown = ("--ca-file", str(d.ca_file), "--sasl-gssapi", "--kerberos-keytab")
    status, checks = check(
        capsys, *shown, str(options.keytab), "--base", d.people, d.ldaps_url
    )
    assert status == 0
    (bind,) = [x for x in checks if x["name"] == "bind"]
    assert bind["identity"] == identity_of("service")
    assert "by SASL GSSAPI" in bind["text"]
    # The KDC is asked once, for all servers.
    world.kdc.administer(f"delprinc -force {principal}")
    before = world.kdc.asked("AS_REQ")
    status, checks = check(
        capsys, *shown, str(options.keytab), d.ldaps_url, f"ldaps://127.0.0.1:{d.tls_port}"
    )
    failed = [x for x in checks if x["state"] == "failed"]
    assert (status, [x["name"] for x in failed]) == (1, ["bind", "bind"])
    assert "not found in Kerberos database" in failed[1]["text"]
    assert world.kdc.asked("AS_REQ") - before == 1

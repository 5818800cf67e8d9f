"""The service binds by its client certificate (SASL EXTERNAL), on a real slapd."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from keystone import exception
from oslo_config import cfg

from keyfront.cli import main as cli
from keyfront.errors import (
    CredentialsError,
    DirectoryError,
    DirectoryUnavailableError,
    Verdict,
)
from keyfront.middleware.ldap import TLS, LDAPPool
from keyfront.middleware.ldap.keystone.driver import Identity
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.wsgi import filter_factory
from support.certificates import Pair
from support.directory import SUFFIX, Directory, directory
from support.served import PATIENCE, wait_for
from support.service_binds import KINDS, identity_of, keystone_conf, pools, refusal, url

pytestmark = pytest.mark.usefixtures("refused_for_long")

# As which slapd knows the certificates of `clients`: by their common names, and one as nobody.
MAPPED = f"""
TLSCACertificateFile %(ca)s
TLSVerifyClient %(verify)s
authz-regexp "cn=nobody,.*" ""
authz-regexp "cn=(service|second),.*" "cn=$1,ou=Services,{SUFFIX}"
"""

Make = Callable[..., LDAPPool]


class Clients:
    """An authority for clients, and their certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._other = trustme.CA()
        self.ca_file = folder / "clients-ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca_file))

    def pair(self, name: str, *, trusted: bool = True) -> Pair:
        """Issue a new certificate to a name."""
        made = (self._authority if trusted else self._other).issue_cert(name, common_name=name)
        number = len(list(self._folder.iterdir()))
        pair = Pair(*(self._folder / f"{name}-{number}.{kind}" for kind in ("pem", "key")))
        pair.key.touch(mode=0o600)
        made.private_key_pem.write_to_path(str(pair.key))
        made.cert_chain_pems[0].write_to_path(str(pair.certificate))
        return pair


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    return Clients(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, clients: Clients) -> Iterator[Directory]:
    extra = MAPPED % {"ca": clients.ca_file, "verify": "try"}
    with directory(
        tmp_path_factory.mktemp("slapd"), tls="both", users=3, extra=extra
    ) as made:
        yield made


@pytest.fixture(scope="module")
def unasking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    """One that asks nobody for a certificate, and so has no EXTERNAL."""
    with directory(tmp_path_factory.mktemp("unasking"), tls="both", users=3) as made:
        yield made


@pytest.fixture
def d(served: Directory) -> Directory:
    served.mark()
    return served


@pytest.fixture
def other(unasking: Directory) -> Directory:
    unasking.mark()
    return unasking


def secured(d: Directory, pair: Pair | None, kind: str = "ldaps") -> TLS:
    shown = {"client_cert": str(pair.certificate), "client_key": str(pair.key)} if pair else {}
    return TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls", **shown)


def connect(d: Directory, pair: Pair | None, kind: str = "ldaps") -> Connection:
    return Connection.connect(
        ServerURL.parse(url(d, kind)), tls=secured(d, pair, kind), connect_timeout=PATIENCE,
        timeout=PATIENCE,
    )  # fmt: skip


@pytest.fixture
def make() -> Iterator[Make]:
    with pools() as all_of_them:

        def make(d: Directory, pair: Pair | None, *more: str, **options: Any) -> LDAPPool:
            options = {"sasl_mechanism": "EXTERNAL", "tls": secured(d, pair), **options}
            return all_of_them.make(d, [*more, url(d, "ldaps")], **options)

        yield make


def replace(pair: Pair, by: Pair) -> None:
    """Put another pair in its place, as certbot does: one file after the other."""
    put(by.certificate, pair.certificate)
    put(by.key, pair.key)


def put(new: Path, old: Path) -> None:
    """Put a file in another's place: it may be as long, and written in the same moment."""
    fresh = old.with_suffix(".fresh")
    shutil.copy2(new, fresh)
    fresh.replace(old)


# A connection


@pytest.mark.parametrize("kind", KINDS)
def test_who_the_server_makes_of_a_certificate(d: Directory, clients: Clients, kind: str) -> None:
    with closing(connect(d, clients.pair("service"), kind)) as connection:
        assert connection.who_am_i() == ""
        assert connection.bind_external() == identity_of("service")
        assert connection.bound_as == connection.who_am_i() == identity_of("service")
        assert connection.search(d.suffix, 0).entries
        # what other programs are told
        assert connection.ldap3.extend.standard.who_am_i() == identity_of("service")
        user = d.users[0]
        connection.bind(user.dn, user.password)
        assert connection.who_am_i().lower() == f"dn:{user.dn}".lower()
        assert connection.bind_external() == identity_of("service")
    # the server asked for nothing more after what was sent at first
    assert d.counts().sasl_binds == 2


def test_one_that_is_in_no_map_has_its_own_name(d: Directory, clients: Clients) -> None:
    with closing(connect(d, clients.pair("stranger"))) as connection:
        assert connection.bind_external().startswith("dn:cn=stranger,")


def test_accepted_as_nobody(d: Directory, clients: Clients) -> None:
    with closing(connect(d, clients.pair("nobody"))) as connection:
        with pytest.raises(CredentialsError) as caught:
            connection.bind_external()
        assert caught.value.verdict is Verdict.NO_IDENTITY
        for words in (d.ldaps_url, "EXTERNAL was accepted, but as nobody", "authz-regexp"):
            assert words in str(caught.value)
        assert connection.bound_as is None
        assert connection.usable


def test_where_no_certificate_was_asked_for(
    d: Directory, other: Directory, clients: Clients
) -> None:
    for server, pair in ((other, clients.pair("service")), (d, None)):
        with closing(connect(server, pair)) as connection:
            with pytest.raises(CredentialsError) as caught:
                connection.bind_external()
            assert caught.value.verdict is Verdict.WRONG_CERTIFICATE
            assert caught.value.code == 7
            assert connection.bound_as is None
            connection.bind(server.users[0].dn, server.users[0].password)


# The pool


def test_the_service_is_its_certificate_and_users_have_passwords(
    d: Directory, clients: Clients, make: Make
) -> None:
    pool = make(d, clients.pair("service"))
    for user in d.users:
        assert pool.authenticate(user.uid, user.password).dn == user.dn
    with pytest.raises(CredentialsError) as caught:
        pool.authenticate(d.users[0].uid, "wrong")
    assert caught.value.verdict is Verdict.WRONG_PASSWORD
    with pool.connection() as connection:
        assert connection.who_am_i() == identity_of("service")
        # made another's, it is not lent again
        connection.bind(d.users[0].dn, d.users[0].password)
    with pool.connection() as connection:
        assert connection.who_am_i() == identity_of("service")
        # made the service's again, it is
        connection.bind_external()
    assert pool.search(d.suffix, 0).entries
    counts = d.counts()
    # each login one BIND, with a password; and one of ours
    assert counts.binds == len(d.users) + 2
    assert counts.sasl_binds == 3
    assert pool.servers[0].state == "up"


def test_a_server_that_demands_a_certificate_of_everybody(
    tmp_path: Path, clients: Clients, make: Make
) -> None:
    extra = MAPPED % {"ca": clients.ca_file, "verify": "demand"}
    with directory(tmp_path, tls="both", users=1, extra=extra) as server:
        pool = make(server, clients.pair("service"))
        assert pool.authenticate("user0", server.users[0].password).name == "user0"
        # Those who log in show the service's certificate as well, and the servers' probes.
        (report,) = pool.check()
        assert report.ok
        assert report.identity == identity_of("service")


def test_a_connection_of_ones_own(d: Directory, clients: Clients, make: Make) -> None:
    """As a follower of the directory has."""
    pool = make(d, clients.pair("service"))
    with closing(pool.dedicated(pool.urls[0], ("127.0.0.1", d.tls_port), PATIENCE)) as connection:
        assert connection.bound_as == identity_of("service")


def test_the_pool_says_that_it_is_nobody(d: Directory, clients: Clients, make: Make) -> None:
    pool = make(d, clients.pair("nobody"))
    for _ in range(3):
        error = refusal(pool)
        assert error.verdict is Verdict.NO_IDENTITY
        assert "as nobody (anonymous)" in str(error)
    # of a user nothing is known
    with pytest.raises(DirectoryUnavailableError, match=r"certificate was refused.* as nobody"):
        pool.authenticate("user0", d.users[0].password)
    (report,) = pool.check()
    assert report.bind is False
    assert report.error and "nobody" in report.error
    assert d.counts().sasl_binds == 1
    assert d.counts().binds == 0


PROCESS = """
import sys
from keyfront.errors import CredentialsError
from keyfront.middleware.ldap import TLS, LDAPPool, service_account, service_refusals
service_refusals.HOLD_SECONDS = service_refusals.MAX_HOLD_SECONDS
service_refusals._TURN_SECONDS = service_account._TURN_SECONDS = 90.0
url, ca, certificate, key = sys.argv[1:]
tls = TLS(ca_file=ca, client_cert=certificate, client_key=key)
pool = LDAPPool(
    url, sasl_mechanism="EXTERNAL", tls=tls, min_size=1, timeout=90.0, connect_timeout=90.0,
    operation_timeout=90.0,
)
print("begun", flush=True)
for line in sys.stdin:
    try:
        with pool.connection() as connection:
            print(connection.who_am_i(), flush=True)
    except CredentialsError as error:
        print(error.verdict.name, flush=True)
pool.close()
"""


def test_all_processes_of_a_node_offer_a_refused_certificate_once(
    other: Directory, clients: Clients
) -> None:
    pair = clients.pair("service")
    command = [
        sys.executable, "-c", PROCESS, f"ldaps://127.0.0.1:{other.tls_port}", str(other.ca_file),
        str(pair.certificate), str(pair.key),
    ]  # fmt: skip
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    others = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        for each in others * 3:
            each.stdin.write("search\n")
            each.stdin.flush()
        for each in others:
            lines = [each.stdout.readline() for _ in range(4)]
            assert lines == ["begun\n"] + ["WRONG_CERTIFICATE\n"] * 3
        assert other.counts().sasl_binds == 1
    finally:
        for each in others:
            each.communicate()


def test_one_of_two_servers_does_not_know_it(
    d: Directory, other: Directory, clients: Clients, make: Make
) -> None:
    """Such as a replica whose configuration is behind: it is passed over."""
    pair = clients.pair("service")
    both = d.certificates.folder.parent / f"both-{os.path.basename(pair.certificate)}"
    both.write_bytes(d.ca_file.read_bytes() + other.ca_file.read_bytes())
    tls = TLS(ca_file=str(both), client_cert=str(pair.certificate), client_key=str(pair.key))
    for _ in range(2):
        pool = make(d, pair, other.ldaps_url, tls=tls)
        for _ in range(2):
            pool._search_pool.retire(lambda connection: True)
            with pool.connection() as connection:
                assert connection.bound_as == identity_of("service")
        assert pool.get_stats()["servers_up"] == 2
    assert other.counts().sasl_binds == 1
    assert d.counts().sasl_binds == 4


def test_a_certificate_that_takes_anothers_place_needs_no_restart(
    d: Directory, clients: Clients, make: Make
) -> None:
    pair, second = clients.pair("service"), clients.pair("second")
    pool = make(d, pair)
    with pool.connection() as connection:
        assert connection.bound_as == identity_of("service")
    # For a moment the key is not that of the certificate: the pair of before goes on.
    put(second.certificate, pair.certificate)
    pool._search_pool.retire(lambda connection: True)
    with pool.connection() as connection:
        assert connection.bound_as == identity_of("service")
    put(second.key, pair.key)
    pool._search_pool.retire(lambda connection: True)
    with pool.connection() as connection:
        assert connection.bound_as == identity_of("second")
    # Both are the service's: whose it was is not closed for that.
    assert pool.search(d.suffix, 0).entries
    assert d.counts().sasl_binds == 3


def test_after_a_refusal_another_certificate_is_offered_at_once(
    d: Directory, clients: Clients, make: Make
) -> None:
    pair = clients.pair("nobody")
    pools = [make(d, pair) for _ in range(2)]
    for pool in pools:
        assert refusal(pool).verdict is Verdict.NO_IDENTITY
    assert d.counts().sasl_binds == 1
    replace(pair, clients.pair("service"))
    for pool in pools:
        with pool.connection() as connection:
            assert connection.bound_as == identity_of("service")
    assert d.counts().sasl_binds == 3
    # And one that is refused again is held again.
    replace(pair, clients.pair("nobody"))
    for pool in pools * 2:
        pool._search_pool.retire(lambda connection: True)
        assert refusal(pool).verdict is Verdict.NO_IDENTITY
    assert d.counts().sasl_binds == 4


def test_a_certificate_that_tls_refuses_is_an_outage(
    d: Directory, clients: Clients, make: Make
) -> None:
    """As GnuTLS does without a word. Nobody is bound, so nobody's account is at stake."""
    pair = clients.pair("service", trusted=False)
    pool = make(d, pair)
    with pytest.raises(DirectoryUnavailableError, match="client certificate"):
        pool.search(d.suffix, 0)
    assert d.counts().sasl_binds == 0
    (report,) = pool.check()
    assert not report.ok
    assert report.error and "client certificate" in report.error
    replace(pair, clients.pair("service"))

    def found() -> bool:
        with suppress(DirectoryUnavailableError):
            return bool(pool.search(d.suffix, 0).entries)
        return False

    wait_for(found, "it is tried again with the other certificate")


def test_a_socket_file_needs_no_certificate(tmp_path_factory: Any, make: Make) -> None:
    folder = tmp_path_factory.mktemp("s")  # a socket's path is short
    with directory(folder, users=1, socket_file=folder / "ldapi") as server:
        options = {"sasl_mechanism": "EXTERNAL", "min_size": 0, "timeout": PATIENCE}
        with LDAPPool(server.ldapi_url, search_base=server.people, **options) as pool:
            with pool.connection() as connection:
                own = f"gidNumber={os.getegid()}+uidNumber={os.geteuid()},cn=peercred"
                assert connection.who_am_i().lower().startswith(f"dn:{own}".lower())
            assert pool.authenticate("user0", server.users[0].password).name == "user0"


# Keystone, the filter, the command


def conf(d: Directory, pair: Pair, folder: Path) -> cfg.ConfigOpts:
    return keystone_conf(
        d, folder,
        f"sasl_mechanism = EXTERNAL\ntls_client_cert = {pair.certificate}\n"
        f"tls_client_key = {pair.key}\n",
    )  # fmt: skip


def test_keystone(d: Directory, clients: Clients, tmp_path: Path) -> None:
    driver = Identity(conf(d, clients.pair("service"), tmp_path))
    try:
        user = d.users[1]
        found = driver.get_user_by_name(user.cn, "default")
        assert driver.authenticate(found["id"], user.password)["id"] == user.uid
        with pytest.raises(AssertionError):
            driver.authenticate(found["id"], "wrong")
        with driver.pool.get().connection() as connection:
            assert connection.who_am_i() == identity_of("service")
        counts = d.counts()
        assert (counts.binds, counts.sasl_binds) == (2, 1)
    finally:
        driver.pool.get().close()


def test_keystone_says_that_the_certificate_is_nobodys(
    d: Directory, other: Directory, clients: Clients, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for server, name, words in (
        (d, "nobody", "as nobody (anonymous)"),
        (other, "service", "authMethodNotSupported (7)"),
    ):
        caplog.clear()
        driver = Identity(conf(server, clients.pair(name), tmp_path))
        try:
            with pytest.raises(exception.LDAPInvalidCredentialsError):
                driver.get_user_by_name("User 0", "default")
        finally:
            driver.pool.get().close()
        (line,) = [x.getMessage() for x in caplog.records if x.levelname == "ERROR"]
        assert line.startswith(f"LDAP: the service's certificate was refused: {server.ldaps_url}")
        assert words in line


def test_the_filter(d: Directory, clients: Clients) -> None:
    pair, seen = clients.pair("service"), []

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        seen.append(environ["REMOTE_USER"])
        start_response("200 OK", [])
        return []

    made = filter_factory(
        {}, urls=d.ldaps_url, search_base=d.people, tls_ca_file=str(d.ca_file),
        sasl_mechanism="EXTERNAL", tls_client_cert=str(pair.certificate),
        tls_client_key=str(pair.key), timeout=str(PATIENCE), operation_timeout=str(PATIENCE),
        connect_timeout=str(PATIENCE), min_size="0",
    )(application)  # fmt: skip
    statuses = []
    for password in (d.users[0].password, "wrong"):
        pair_of = base64.b64encode(f"user0:{password}".encode()).decode()
        environ = {
            "REQUEST_METHOD": "GET", "wsgi.url_scheme": "https", "PATH_INFO": "/",
            "HTTP_AUTHORIZATION": f"Basic {pair_of}",
        }  # fmt: skip
        made(environ, lambda status, headers: statuses.append(status))
    made.close()
    assert statuses == ["200 OK", "401 Unauthorized"]
    assert seen == ["user0"]
    assert d.counts().sasl_binds == 1


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    """The status, the checks of the one server, and the table."""
    command = ["ldap", "check", "--timeout", str(PATIENCE), *arguments]
    status = cli.main(command)
    table = capsys.readouterr().out
    assert cli.main([*command, "--json"]) == status
    (report,) = json.loads(capsys.readouterr().out)
    return status, report["checks"], table


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_says_who_it_is(
    d: Directory, clients: Clients, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    pair = clients.pair("service")
    status, checks, table = check(
        capsys, "--ca-file", str(d.ca_file), "--sasl-external", "--client-cert",
        str(pair.certificate), "--client-key", str(pair.key), "--base", d.people,
        *(["--start-tls"] if kind == "starttls" else []), url(d, kind),
    )  # fmt: skip
    assert status == 0, table
    (bind,) = [x for x in checks if x["name"] == "bind"]
    assert bind["identity"] == identity_of("service")
    assert bind["state"] == "ok"
    assert f"✓ bind            {identity_of('service')}, by SASL" in table
    assert {x["state"] for x in checks if x["name"] in ("search", "ping", "TLS")} == {"ok"}


def test_the_command_says_what_is_wrong(
    d: Directory, other: Directory, clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    for server, pair, words in (
        (d, clients.pair("nobody"), "EXTERNAL was accepted, but as nobody (anonymous)"),
        (other, clients.pair("service"), "authMethodNotSupported (7)"),
        (d, clients.pair("service", trusted=False), "client certificate"),
    ):
        status, checks, _ = check(
            capsys, "--ca-file", str(server.ca_file), "--sasl-external", "--client-cert",
            str(pair.certificate), "--client-key", str(pair.key), server.ldaps_url,
        )  # fmt: skip
        assert status == 1
        (failed,) = [x for x in checks if x["state"] == "failed"]
        assert failed["name"] == "bind"
        assert words in failed["text"]


def test_a_certificate_without_external_is_only_shown(
    d: Directory, clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = clients.pair("service", trusted=False)
    arguments = ("--ca-file", str(d.ca_file), d.ldaps_url, "--client-cert", str(pair.certificate))
    status, checks, _ = check(capsys, *arguments, "--client-key", str(pair.key))
    assert status == 1
    assert "bind" in [x["name"] for x in checks if x["state"] == "failed"]
    with pytest.raises(DirectoryError), closing(connect(d, pair)) as connection:
        connection.ping()

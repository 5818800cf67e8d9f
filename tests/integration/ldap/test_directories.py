"""Directories that are too slow, or need too much of the machine, for each run.

``tox -e directories`` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ldap.modlist
import pytest

from keyfront.errors import CredentialsError, Verdict
from keyfront.middleware.ldap import TLS, LDAPPool
from keyfront.middleware.ldap.change_notifications import Follower, Method, Subscription
from support import ds389
from support import samba as samba_dc
from support import unboundid as in_memory
from support.certificates import certificates
from support.following import Heard
from support.served import wait_for

pytestmark = pytest.mark.skipif(
    not os.environ.get("KEYFRONT_DIRECTORIES"),
    reason="takes a minute and root; tox -e directories runs it",
)

SAMBA_ATTRIBUTES = ("sAMAccountName", "cn", "userAccountControl", "mail")


class HeardOfSamba(Heard):
    user_class, group_class, id_attribute = b"user", b"group", "sAMAccountName"


class HeardOf389(Heard):
    user_class, group_class, id_attribute = b"inetOrgPerson", b"groupOfNames", "uid"


@dataclass
class Followed:
    server: Any
    heard: Heard


@contextmanager
def following(
    server: Any, heard: Heard, trees: tuple[str, ...], attributes: tuple[str, ...], method: Method
) -> Iterator[Followed]:
    with LDAPPool(server.url, bind_dn=server.service_dn, bind_password=server.service_password,
                  min_size=0) as pool:  # fmt: skip
        (url,) = pool.urls
        follower = Follower(
            "directory", lambda seconds: pool.dedicated(url, None, seconds),
            Subscription(trees, attributes, (method,)), heard,
        )  # fmt: skip
        follower.start()
        wait_for(lambda: heard.moment > 0, "it is followed")
        heard.settle()
        heard.take()
        yield Followed(server, heard)
        follower.stop()


@pytest.fixture(scope="module")
def samba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[samba_dc.Samba]:
    if reason := samba_dc.missing():
        pytest.skip(reason)
    with samba_dc.samba(tmp_path_factory.mktemp("samba")) as made:
        yield made


@pytest.fixture
def followed(samba: samba_dc.Samba) -> Iterator[Followed]:
    with following(samba, HeardOfSamba(), (samba.people,), SAMBA_ATTRIBUTES, "usn") as made:
        yield made


@pytest.fixture(scope="module")
def server_389(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ds389.Server]:
    if reason := ds389.missing():
        pytest.skip(reason)
    with ds389.ds389(tmp_path_factory.mktemp("ds389")) as made:
        yield made


def test_a_user_of_active_directory(followed: Followed) -> None:
    server, heard = followed.server, followed.heard
    dn = server.add_user("jane")
    heard.expect("jane")
    heard.settle()
    heard.take()
    with server.as_root() as root:
        root.modify_s(dn, [(2, "userAccountControl", [b"514"])])
        heard.expect("jane")
        heard.settle()
        assert set(heard.take()) == {"jane"}
        # what nobody reads
        root.modify_s(dn, [(2, "description", [b"another"])])
        heard.settle()
        assert heard.take() == []
        root.rename_s(dn, "CN=jane doe")
        heard.expect("jane")
        heard.settle()
        heard.take()
        moved = f"CN=jane doe,{samba_dc.SUFFIX}"
        root.rename_s(f"CN=jane doe,{server.people}", "CN=jane doe",
                      newsuperior=samba_dc.SUFFIX)  # fmt: skip
        heard.expect(None)
        root.rename_s(moved, "CN=jane doe", newsuperior=server.people)
        heard.expect("jane")
        heard.settle()
        heard.take()
        root.delete_s(f"CN=jane doe,{server.people}")
        heard.expect(None)


PASSWORD = "Correct-Horse-1"


@pytest.fixture(scope="module")
def samba_pool(samba: samba_dc.Samba) -> Iterator[LDAPPool]:
    with LDAPPool(samba.url, bind_dn=samba.service_dn, bind_password=samba.service_password,
                  min_size=0) as pool:  # fmt: skip
        yield pool


@pytest.mark.parametrize("name", ["{dn}", "{user}@example.test", "EXAMPLE\\{user}"])
def test_a_login_at_active_directory(
    samba: samba_dc.Samba, samba_pool: LDAPPool, name: str
) -> None:
    """By DN, by user principal name and by DOMAIN\\user."""
    user = f"login{len(name)}"
    who = name.format(dn=samba.add_user(user, PASSWORD), user=user)
    samba_pool.authenticate(who, PASSWORD)
    with pytest.raises(CredentialsError) as refused:
        samba_pool.authenticate(who, "another")
    assert refused.value.verdict is Verdict.WRONG_PASSWORD
    assert "data 52e" in refused.value.diagnostic


@pytest.mark.parametrize(
    ("name", "attribute", "value", "data", "verdict"),
    [
        ("no-hours", "logonHours", bytes(21), "530", Verdict.NOT_NOW),
        ("elsewhere", "userWorkstations", b"elsewhere", "531", Verdict.NOT_NOW),
        ("off", "userAccountControl", b"514", "533", Verdict.DISABLED),
        ("gone", "accountExpires", b"1", "701", Verdict.ACCOUNT_EXPIRED),
        ("new", "pwdLastSet", b"0", "773", Verdict.MUST_CHANGE),
        ("locked", "", b"", "775", Verdict.LOCKED),
    ],
)
def test_a_refused_login_at_active_directory(
    samba: samba_dc.Samba, samba_pool: LDAPPool, name: str, attribute: str, value: bytes,
    data: str, verdict: Verdict,
) -> None:  # fmt: skip
    dn = samba.add_user(name, PASSWORD)
    samba_pool.authenticate(dn, PASSWORD)
    if attribute:
        with samba.as_root() as root:
            root.modify_s(dn, [(2, attribute, [value])])
    else:
        with samba.lockout(2):
            for _ in range(2):
                with pytest.raises(CredentialsError):
                    samba_pool.authenticate(dn, "another")
    with pytest.raises(CredentialsError) as refused:
        samba_pool.authenticate(dn, PASSWORD)
    assert refused.value.verdict is verdict
    assert f"data {data}" in refused.value.diagnostic


def test_groups_of_active_directory(samba: samba_dc.Samba, samba_pool: LDAPPool) -> None:
    """Nested groups by the matching rule, 1100 members, a user by objectGUID."""
    dn = samba.add_user("nested", PASSWORD)
    inner, outer = (f"CN={name},{samba.people}" for name in ("inner", "outer"))
    many = [f"CN=contact{number},{samba.people}" for number in range(1100)]
    with samba.as_root() as root:
        for each in many:
            root.add_s(each, [("objectClass", [b"contact"])])
        for group, members in ((inner, [dn]), (outer, [inner, *many])):
            root.add_s(group, [("objectClass", [b"group"]),
                               ("member", [each.encode() for each in members])])  # fmt: skip
    chain = f"(&(objectClass=group)(member:1.2.840.113556.1.4.1941:={dn}))"
    found = samba_pool.search(samba.people, filter=chain, attributes=["cn"])
    assert {name for name, _ in found.entries} == {inner, outer}
    ((_, group),) = samba_pool.search(
        outer, 0, filter="(objectClass=group)", attributes=["member"]
    ).entries
    assert {value.decode() for value in group["member"]} == {inner, *many}
    ((_, user),) = samba_pool.search(
        dn, 0, filter="(objectClass=*)", attributes=["objectGUID"]
    ).entries
    (guid,) = user["objectGUID"]
    assert len(guid) == 16
    by_guid = "".join(f"\\{octet:02x}" for octet in guid)
    found = samba_pool.search(samba.people, filter=f"(objectGUID={by_guid})", attributes=["cn"])
    assert [name for name, _ in found.entries] == [dn]


def test_unboundid(tmp_path: Path) -> None:
    """Logins, a search in pages and StartTLS at a server of another make, written in Java."""
    if reason := in_memory.missing():
        pytest.skip(reason)
    made = certificates(tmp_path / "certificates")
    with in_memory.unboundid(tmp_path, made, 250) as port:
        for tls in (TLS(), TLS(ca_file=str(made.ca_file), start_tls=True)):
            with LDAPPool(
                f"ldap://127.0.0.1:{port}", bind_dn=in_memory.SERVICE_DN,
                bind_password=in_memory.PASSWORD, search_base=in_memory.PEOPLE, tls=tls,
            ) as pool:  # fmt: skip
                pool.authenticate("user7", in_memory.PASSWORD)
                with pytest.raises(CredentialsError) as refused:
                    pool.authenticate("user7", "another")
                assert refused.value.verdict is Verdict.WRONG_PASSWORD
                with pytest.raises(CredentialsError) as refused:
                    pool.authenticate("nobody", in_memory.PASSWORD)
                assert refused.value.verdict is Verdict.UNKNOWN_USER
                found = pool.search(
                    in_memory.PEOPLE, filter="(uid=*)", attributes=["uid"], page_size=100
                )
                assert len(found.entries) == 250
                (report,) = pool.check()
                assert all(each.state != "failed" for each in report.checks), report


def test_a_member_less_in_active_directory(followed: Followed) -> None:
    server, heard = followed.server, followed.heard
    dn = server.add_user("john")
    group = f"CN=ops,{server.people}"
    with server.as_root() as root:
        root.add_s(group, [("objectClass", [b"group"]), ("sAMAccountName", [b"ops"]),
                           ("member", [dn.encode()])])  # fmt: skip
        heard.settle()
        heard.take()
        root.modify_s(group, [(1, "member", [dn.encode()])])
        heard.expect(None)


@pytest.mark.parametrize("method", ["syncrepl", "psearch"])
def test_a_user_of_389(server_389: ds389.Server, method: Method) -> None:
    server, trees = server_389, (server_389.people, server_389.groups)
    dn = f"uid=jane,{server.people}"
    entry = {"objectClass": [b"inetOrgPerson"], "cn": [b"Jane"], "sn": [b"J"], "uid": [b"jane"]}
    attributes = ("uid", "cn", "nsAccountLock")
    with (
        following(server, HeardOf389(), trees, attributes, method) as followed,
        server.as_root() as root,
    ):
        heard = followed.heard
        root.add_s(dn, ldap.modlist.addModlist(entry))
        heard.expect("jane")
        heard.settle()
        heard.take()
        root.modify_s(dn, [(2, "nsAccountLock", [b"true"])])
        heard.expect("jane")
        heard.settle()
        assert heard.take() == ["jane"]
        root.modify_s(dn, [(2, "description", [b"another"])])
        heard.settle()
        assert heard.take() == []
        root.rename_s(dn, "uid=jane", newsuperior=server.old)
        heard.expect(None)
        heard.settle()
        heard.take()
        root.rename_s(f"uid=jane,{server.old}", "uid=jane", newsuperior=server.people)
        heard.settle()
        assert heard.take()
        root.rename_s(dn, "uid=joan")
        heard.expect(None)
        heard.settle()
        heard.take()
        root.delete_s(f"uid=joan,{server.people}")
        heard.expect(None)

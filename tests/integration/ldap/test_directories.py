"""Followers of directories that are too slow, or need too much of the machine, for each run.

``tox -e directories`` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ldap.modlist
import pytest

from keyfront.middleware.ldap import LDAPPool
from keyfront.middleware.ldap.follower import Follower, Method, Terms
from support import ds389
from support import samba as samba_dc
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
            Terms(trees, attributes, (method,)), heard,
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

"""A follower of a real slapd: what it tells, and what it never fails to tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ldap
import pytest

from keyfront.middleware.ldap import TLS, LDAPPool
from keyfront.middleware.ldap.change_notifications import METHODS, Follower, Subscription
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.following import SYNCPROV, Heard
from support.served import wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", **SYNCPROV) as made:
        yield made


class Site:
    """A follower behind a proxy."""

    def __init__(self, server: Directory, proxy: Any, pool: LDAPPool) -> None:
        self.server, self.proxy, self.pool = server, proxy, pool
        self.heard = Heard()
        (url,) = pool.urls
        trees = (server.people, server.groups)
        subscription = Subscription(trees, ("cn", "enabled", "uid"), tuple(METHODS))
        self.follower = Follower(
            "slapd", lambda seconds: pool.dedicated(url, None, seconds), subscription, self.heard
        )


@pytest.fixture
def site(server: Directory) -> Iterator[Site]:
    with (
        FaultProxy(server.port) as proxy,
        LDAPPool(proxy.url(), bind_dn=server.service_dn, bind_password=server.service_password,
                 min_size=0) as pool,
    ):  # fmt: skip
        made = Site(server, proxy, pool)
        made.follower.start()
        wait_for(lambda: made.heard.moment > 0, "it is followed")
        made.heard.settle()
        made.heard.take()
        yield made
        made.follower.stop()


def test_a_user_who_is_changed_is_named(site: Site) -> None:
    user = site.server.users[1]
    site.server.modify(user.dn, {"enabled": ["FALSE"]})
    site.heard.expect(user.uid)
    assert site.heard.take() == [user.uid]
    # what nobody reads is told to nobody
    site.server.modify(user.dn, {"description": ["another"]})
    site.server.password(user.dn, "another")
    site.heard.settle()
    assert site.heard.take() == []
    site.server.modify(user.dn, {"enabled": ["TRUE"]})
    site.heard.expect(user.uid)


def test_a_user_who_comes_and_goes(site: Site) -> None:
    dn = f"uid=newcomer,{site.server.people}"
    entry = {"objectClass": ["inetOrgPerson", "kfUser"], "uid": ["newcomer"], "cn": ["New"],
             "sn": ["Comer"]}  # fmt: skip
    site.server.add(dn, entry)
    site.heard.expect("newcomer")
    assert site.heard.take() == ["newcomer"]
    site.server.delete(dn)
    site.heard.expect(None)


@pytest.mark.parametrize("where", ["renamed", "moved", "container"])
def test_what_is_moved(site: Site, where: str) -> None:
    server = site.server
    user = server.users[2]
    with server._as_root() as root:
        if where == "renamed":
            root.rename_s(user.dn, "uid=other", delold=1)
            site.heard.expect(None)
            root.rename_s(f"uid=other,{server.people}", f"uid={user.uid}", delold=1)
        elif where == "moved":
            root.rename_s(user.dn, f"uid={user.uid}", newsuperior=f"ou=Services,{server.suffix}")
            site.heard.expect(None)
            gone = f"uid={user.uid},ou=Services,{server.suffix}"
            root.rename_s(gone, f"uid={user.uid}", newsuperior=server.people)
            site.heard.expect(user.uid)
        else:
            root.add_s(f"ou=Sales,{server.people}",
                       [("objectClass", [b"organizationalUnit"]), ("ou", [b"Sales"])])  # fmt: skip
            site.heard.settle()
            site.heard.take()
            root.rename_s(f"ou=Sales,{server.people}", "ou=Sales",
                          newsuperior=f"ou=Services,{server.suffix}")  # fmt: skip
            site.heard.expect(None)
            root.delete_s(f"ou=Sales,ou=Services,{server.suffix}")


def test_a_member_less(site: Site) -> None:
    dn = f"cn=even,{site.server.groups}"
    members = site.server.read(dn)["member"]
    site.server.modify(dn, {"member": members[1:]})
    site.heard.expect(None)
    site.server.modify(dn, {"member": members})


def test_what_is_changed_elsewhere_does_not_hold_moments_back(site: Site) -> None:
    """Each of it moves contextCSN; of what is deleted there, nobody is told anything."""
    server, begun = site.server, site.heard.begun
    dn = f"cn=printer,ou=Services,{server.suffix}"
    server.add(dn, {"objectClass": ["device"], "cn": ["printer"]})
    site.heard.settle()
    server.modify(dn, {"description": ["broken"]})
    site.heard.settle()
    site.heard.take()
    server.delete(dn)
    site.heard.expect(None)
    site.heard.settle()
    # A user who is deleted is told to the search of one tree only.
    user = f"uid=passing,{server.people}"
    entry = {"objectClass": ["inetOrgPerson", "kfUser"], "uid": ["passing"], "cn": ["P"],
             "sn": ["P"]}  # fmt: skip
    server.add(user, entry)
    site.heard.settle()
    server.delete(user)
    site.heard.settle()
    assert site.heard.begun == begun


def test_a_claimed_moment_has_no_change_before_it_that_was_not_told(site: Site) -> None:
    user = site.server.users[6]
    for count in range(50):
        site.heard.take()
        site.server.modify(user.dn, {"enabled": [str(count)]})
        site.heard.settle()
        told = site.heard.take()
        assert user.uid in told or None in told, count
    site.server.modify(user.dn, {"enabled": ["TRUE"]})
    site.heard.settle()


@pytest.mark.parametrize("fault", ["cut", "stall", "black_hole", "half_open", "pause"])
def test_no_moment_is_claimed_while_nothing_comes(site: Site, fault: str) -> None:
    if fault == "pause":
        site.server.pause()
    else:
        getattr(site.proxy, fault)()
    cut = time.monotonic()
    begun = site.heard.begun
    time.sleep(0.5)
    assert site.heard.moment <= cut
    if fault == "pause":
        site.server.resume()
        # its connection lives on, and nothing was lost
    else:
        user = site.server.users[3]
        site.server.modify(user.dn, {"enabled": ["FALSE"]})
        # What is claimed of a moment before that, says nothing of it.
        changed = time.monotonic()
        site.proxy.forward()
        wait_for(lambda: site.heard.moment > changed, "it is followed again")
        assert site.heard.begun > begun or user.uid in site.heard.told
        site.server.modify(user.dn, {"enabled": ["TRUE"]})
    site.heard.settle()


def test_what_could_not_be_told_ends_the_claim(site: Site) -> None:
    user = site.server.users[4]
    site.heard.refuses = True
    site.server.modify(user.dn, {"enabled": ["FALSE"]})
    changed = time.monotonic()
    time.sleep(0.5)
    assert site.heard.moment < changed
    site.heard.refuses = False
    site.heard.expect(None)
    site.heard.settle()
    site.server.modify(user.dn, {"enabled": ["TRUE"]})


def test_a_tree_that_is_gone(site: Site) -> None:
    server = site.server
    with server._as_root() as root:
        root.rename_s(server.groups, "ou=Elsewhere", delold=1)
        try:
            begun = site.heard.begun
            wait_for(lambda: site.heard.begun > begun, "it begins anew")
            site.heard.settle()  # a tree that is not there is followed as well
        finally:
            begun = site.heard.begun
            root.rename_s(f"ou=Elsewhere,{server.suffix}", "ou=Groups", delold=1)
    wait_for(lambda: site.heard.begun > begun, "it is followed with the tree")


def test_over_tls(server: Directory) -> None:
    with LDAPPool(server.ldaps_url, bind_dn=server.service_dn, min_size=0,
                  bind_password=server.service_password,
                  tls=TLS(ca_file=str(server.ca_file))) as pool:  # fmt: skip
        made = Site(server, None, pool)
        made.follower.start()
        wait_for(lambda: made.heard.moment > 0, "it is followed")
        made.heard.settle()
        made.heard.take()
        user = server.users[5]
        server.modify(user.dn, {"enabled": ["FALSE"]})
        made.heard.expect(user.uid)
        server.modify(user.dn, {"enabled": ["TRUE"]})
        made.follower.stop()


def test_limits_of_the_account(tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = {**SYNCPROV, "extra_database": "overlay syncprov\nlimits users size=5"}
    with (
        directory(tmp_path_factory.mktemp("limited"), **extra) as server,
        FaultProxy(server.port) as proxy,
        LDAPPool(proxy.url(), bind_dn=server.service_dn, bind_password=server.service_password,
                 min_size=0) as pool,
    ):  # fmt: skip
        made = Site(server, proxy, pool)
        made.follower.start()
        wait_for(lambda: made.heard.moment > 0, "it is followed")
        made.heard.settle()
        made.heard.take()
        user = server.users[1]
        server.modify(user.dn, {"enabled": ["FALSE"]})
        # nobody knows what he was before
        made.heard.expect(None)
        made.heard.take()
        server.modify(user.dn, {"enabled": ["TRUE"]})
        made.heard.expect(user.uid)
        assert made.heard.take() == [user.uid]
        made.follower.stop()


def test_a_directory_that_cannot_be_followed(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        directory(tmp_path_factory.mktemp("plain")) as server,
        FaultProxy(server.port) as proxy,
        LDAPPool(proxy.url(), bind_dn=server.service_dn, bind_password=server.service_password,
                 min_size=0) as pool,
    ):  # fmt: skip
        made = Site(server, proxy, pool)
        made.follower.start()
        wait_for(lambda: made.heard.reason != "", "it is said")
        made.follower.stop()
        assert made.heard.moment == 0.0
        with server._as_root() as root, pytest.raises(ldap.UNAVAILABLE_CRITICAL_EXTENSION):
            control = ldap.controls.RequestControl(METHODS["syncrepl"], True, b"0\x03\n\x01\x01")
            root.search_ext_s(server.people, 2, serverctrls=[control])

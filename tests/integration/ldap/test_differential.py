"""The stock LDAP code of Keystone and ours, asked the same on one slapd, answer the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keystone.conf.default
import keystone.conf.ldap
import ldap
import pytest
from keystone import exception
from keystone.common import driver_hints
from keystone.identity.backends.ldap import common
from keystone.identity.backends.ldap import core as stock_core
from ldap.controls.libldap import SimplePagedResultsControl
from oslo_config import cfg

from keyfront.middleware.ldap.keystone.driver import DirectoryUnavailable, Handler, Identity
from keyfront.middleware.ldap.keystone.handler import DriverPool, PoolHandler
from support.directory import Directory, User, directory
from support.served import PATIENCE

# What Keystone's exceptions ask of its own configuration.
keystone.conf.default.register_opts(keystone.conf.CONF)

ALIASES = f"ou=Aliases,{Directory.suffix}"
ELSEWHERE = f"ou=Elsewhere,{Directory.suffix}"
SITES = f"ou=Sites,{Directory.suffix}"
LIMIT = 7

SCOPES = (ldap.SCOPE_BASE, ldap.SCOPE_ONELEVEL, ldap.SCOPE_SUBTREE)
DEREFERENCES = (None, *range(4))

# What of an exception's dictionary anybody reads; the rest are numbers of messages.
READ = ("result", "desc", "info", "matched")


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    limits = f'limits dn.exact="uid=user1,{Directory.people}" size={LIMIT}'
    folder = tmp_path_factory.mktemp("slapd")
    with directory(folder, extra_database=limits, users=12) as server:
        fill(server)
        yield server


def fill(server: Directory) -> None:
    """Add what makes answers differ, if anything does."""
    for dn in (ALIASES, ELSEWHERE, SITES):
        server.add(dn, {"objectClass": ["organizationalUnit"], "ou": [dn[3:].partition(",")[0]]})
    server.add(f"ou=Inner,{SITES}", {"objectClass": ["organizationalUnit"], "ou": ["Inner"]})
    for place, uid in ((SITES, "site"), (f"ou=Inner,{SITES}", "inner")):
        person = {"objectClass": ["kfUser"], "uid": [uid], "cn": [f"At {uid}"], "sn": ["Site"]}
        server.add(f"uid={uid},{place}", person | {"enabled": ["FALSE"]})
    for number, user in enumerate((server.users[0], server.odd_users[0])):
        alias = {"objectClass": ["alias", "extensibleObject"], "uid": [f"alias{number}"]}
        server.add(f"uid=alias{number},{ALIASES}", alias | {"aliasedObjectName": [user.dn]})
    lost = {"objectClass": ["alias", "extensibleObject"], "uid": ["lost"]}
    server.add(f"uid=lost,{ALIASES}", lost | {"aliasedObjectName": [f"uid=no,{server.people}"]})
    for name in ("one", "two"):
        referral = {"objectClass": ["referral", "extensibleObject"], "uid": [name]}
        urls = [f"ldap://{name}.example.org/ou=x", f"ldap://{name}.example.net/"]
        server.add(f"uid={name},{ELSEWHERE}", referral | {"ref": urls})
    picture = bytes(range(256)) * 20
    first = server.users[2]
    server.modify(first.dn, {
        "jpegPhoto": [picture, b"\xff\xd8\x00"], "description": ["zwei", "eins", "é" * 3000],
        "mail": ["x@example.org", "a@example.org"], "cn": ["User 2", "Second Name"],
    })  # fmt: skip
    server.modify(server.users[3].dn, {"enabled": ["FALSE"]})
    server.modify(server.users[4].dn, {"enabled": []})
    server.modify(server.users[5].dn, {"businessCategory": ["512"]})
    server.modify(server.users[6].dn, {"businessCategory": ["514"]})
    server.add(f"cn=empty,{server.groups}", {"objectClass": ["kfGroup"], "cn": ["empty"]})
    odd = {"objectClass": ["kfGroup"], "cn": ["Grüße, (alle)*"], "ou": ["Grüße, (alle)*"]}
    members = [x.dn for x in server.odd_users] + [f"uid=gone,{server.people}"]
    server.add(f"cn=Grüße\\, (alle)*,{server.groups}", odd | {"member": members})
    enabled = [x.dn for x in server.users[:5]]
    emulation = {"objectClass": ["groupOfNames"], "cn": ["enabled_users"], "member": enabled}
    server.add(f"cn=enabled_users,{server.people}", emulation)


def conf(folder: Path, server: Directory, **ldap_options: object) -> cfg.ConfigOpts:
    """A configuration of Keystone for this slapd."""
    options: dict[str, object] = {
        "url": server.url,
        "user": server.service_dn,
        "password": server.service_password,
        "suffix": server.suffix,
        "user_tree_dn": server.people,
        "user_id_attribute": "uid",
        "user_name_attribute": "cn",
        "group_tree_dn": server.groups,
        "group_name_attribute": "cn",
        "chase_referrals": "false",
    } | ldap_options
    lines = [f"{name} = {value}" for name, value in options.items()]
    path = folder / "keystone.conf"
    path.write_text("\n".join(["[ldap]", *lines, ""]))
    made = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(made)
    made(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    return made


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """What a call returns or raises, in a form that can be compared."""
    try:
        return "returned", call()
    except ldap.LDAPError as error:
        about = dict(error.args[0])
        if about["result"] < 0:
            # libldap's own errors come with whatever errno was, and what the server said before
            about.pop("info", None)
            about.pop("matched", None)
        return "raised", type(error), {name: about.get(name) for name in READ}
    except Exception as error:
        return "raised", type(error), str(error)


# The interface beneath Keystone's code


@contextmanager
def handlers(
    folder: Path, server: Directory, *, page_size: int = 0, dereference: int | None = None,
    who: User | None = None,
) -> Iterator[tuple[common.LDAPHandler, common.LDAPHandler, DriverPool]]:
    """A handler on python-ldap and one on a pool."""
    dn, password = (who.dn, who.password) if who else (
        server.service_dn, server.service_password
    )  # fmt: skip
    stock = common.PythonLDAPHandler()
    pool = DriverPool(conf(folder, server, user=dn, password=password))
    ours = PoolHandler(pool)
    for handler in (stock, ours):
        handler.connect(
            server.url, page_size, dereference, tls_req_cert=ldap.OPT_X_TLS_DEMAND,
            chase_referrals=False,
        )
        handler.simple_bind_s(dn, password)
    try:
        yield stock, ours, pool
    finally:
        stock.unbind_s()
        ours.unbind_s()
        pool.get().close()


def bases(server: Directory) -> list[str]:
    spaced = server.people.replace(",", " , ")
    return [
        server.suffix, server.people, server.groups, ALIASES, ELSEWHERE, SITES, server.users[2].dn,
        server.odd_users[0].dn, server.odd_users[2].dn, server.odd_users[-1].dn,
        f"uid=alias0,{ALIASES}", f"uid=lost,{ALIASES}", f"uid=one,{ELSEWHERE}",
        spaced, server.people.replace("ou=", "OU= ").replace(",", ", "), server.people.upper(),
        f"uid=nobody,{server.people}", f"ou=no,ou=where,{server.suffix}", "dc=no,dc=where",
        "", "rubbish", "uid=,,", f"uid=a\\,b,{server.people}", f"uid=\\zz,{server.people}",
    ]  # fmt: skip


def filters(server: Directory) -> list[str]:
    found = [
        "(objectClass=*)", "objectClass=*", "(objectClass=inetOrgPerson)", "uid=user1",
        "(uid=user*)", "(uid=*1)", "(uid=*se*1*)", "(uid=u*r*0)", "(&(uid=user1)(objectClass=*))",
        "(|(uid=user1)(uid=user2)(cn=nobody))", "(!(uid=user1))", "(&)", "(|)",
        "(&(objectClass=kfUser)(!(enabled=FALSE)))", "(sn>=Number5)", "(sn<=Number3)",
        "(cn~=user)", "(uid:caseIgnoreMatch:=USER1)", "(uid:dn:=user1)", "(:caseIgnoreMatch:=x)",
        "(noSuchAttribute=x)", "(noSuchAttribute=*)", "( uid=user1 )", "(& (uid=user1) (sn=*) )",
        "(description=\\c3\\a9*)", "(uid=\\2a)", "(uid=\\5c*)", "(member=x)", "(uid= user1)",
        f"(member={server.users[0].dn})", "(cn=Zoë*)", "(cn=李雷)", "(sn=\\e6\\9d\\8e)",
        # no filters
        "(", ")", "((", "(uid)", "uid", "(uid=user1", "uid=user1)", "(&(uid=user1)", "(=x)",
        "(uid=\\zz)", "(uid=\\2)", "()", "(!)", "(!(uid=a)(uid=b))", "(uid=a)(uid=b)",
    ]  # fmt: skip
    for user in server.odd_users:
        found.append(f"(uid={ldap.filter.escape_filter_chars(user.uid)})")
        found.append(f"(cn={ldap.filter.escape_filter_chars(user.cn)})")
    return found


ATTRIBUTES: list[list[str] | None] = [
    None, [], ["*"], ["1.1"], ["uid"], ["UID", "Cn"], ["uid", "noSuchAttribute"], ["+"],
    ["jpegPhoto", "description"], ["*", "hasSubordinates"], ["1.1", "uid"], ["name"],
    ["userPassword"], ["uid", "uid"],
]  # fmt: skip


def test_every_base(slapd: Directory, tmp_path: Path) -> None:
    with handlers(tmp_path, slapd) as (stock, ours, _):
        for base in bases(slapd):
            for scope in SCOPES:
                arguments = (base, scope)
                assert outcome(lambda: ours.search_s(*arguments)) == outcome(  # noqa: B023
                    lambda: stock.search_s(*arguments)  # noqa: B023
                ), arguments


def test_every_filter(slapd: Directory, tmp_path: Path) -> None:
    kinds = set()
    with handlers(tmp_path, slapd) as (stock, ours, pool):
        for text in filters(slapd):
            arguments = (slapd.suffix, ldap.SCOPE_SUBTREE, text, ["uid"])
            expected = outcome(lambda: stock.search_s(*arguments))  # noqa: B023
            assert outcome(lambda: ours.search_s(*arguments)) == expected, text  # noqa: B023
            kinds.add(expected[0] if expected[0] == "returned" else expected[1])
        # they were not all refused, and whatever was refused did no harm
        assert kinds == {"returned", ldap.FILTER_ERROR}
        assert pool.get().get_stats()["search_lost"] == 0


def test_every_choice_of_attributes(slapd: Directory, tmp_path: Path) -> None:
    with handlers(tmp_path, slapd) as (stock, ours, _):
        for attributes in ATTRIBUTES:
            for attributes_only in (0, 1):
                arguments = (
                    slapd.people, ldap.SCOPE_SUBTREE, "(objectClass=*)", attributes,
                    attributes_only,
                )  # fmt: skip
                assert outcome(lambda: ours.search_s(*arguments)) == outcome(  # noqa: B023
                    lambda: stock.search_s(*arguments)  # noqa: B023
                ), arguments


@pytest.mark.parametrize("dereference", DEREFERENCES)
def test_every_dereference(slapd: Directory, tmp_path: Path, dereference: int | None) -> None:
    with handlers(tmp_path, slapd, dereference=dereference) as (stock, ours, _):
        assert ours.get_option(ldap.OPT_DEREF) == stock.get_option(ldap.OPT_DEREF)
        for base in (ALIASES, f"uid=alias0,{ALIASES}", f"uid=lost,{ALIASES}", slapd.suffix):
            for scope in SCOPES:
                arguments = (base, scope, "(uid=*)")
                assert outcome(lambda: ours.search_s(*arguments)) == outcome(  # noqa: B023
                    lambda: stock.search_s(*arguments)  # noqa: B023
                ), arguments


def test_queries_at_random(slapd: Directory, tmp_path: Path) -> None:
    chance = random.Random(20261121)
    places, texts = bases(slapd), filters(slapd)
    returned = 0
    with handlers(tmp_path, slapd) as (stock, ours, _):
        for _ in range(400):
            arguments = (
                chance.choice(places[:17]), chance.choice(SCOPES), chance.choice(texts),
                chance.choice(ATTRIBUTES), chance.choice((0, 1)),
            )  # fmt: skip
            expected = outcome(lambda: stock.search_s(*arguments))  # noqa: B023
            assert outcome(lambda: ours.search_s(*arguments)) == expected, arguments  # noqa: B023
            returned += expected[0] == "returned"
    assert returned > 100


def test_values_are_bytes_and_names_are_text(slapd: Directory, tmp_path: Path) -> None:
    with handlers(tmp_path, slapd) as (_, ours, _):
        ((dn, attributes),) = ours.search_s(slapd.odd_users[0].dn, ldap.SCOPE_BASE)
        assert (type(dn), dn) == (str, slapd.odd_users[0].dn)
        assert all(type(name) is str for name in attributes)
        assert attributes["uid"] == ["zoë".encode()]
        referrals = [x for x in ours.search_s(ELSEWHERE, ldap.SCOPE_SUBTREE) if x[0] is None]
        assert len(referrals) == 2
        assert all(isinstance(urls, list) and len(urls) == 2 for _, urls in referrals)


@pytest.mark.parametrize("page_size", [1, 3, 5, 1000])
def test_paging(slapd: Directory, tmp_path: Path, page_size: int) -> None:
    with handlers(tmp_path, slapd) as (stock, ours, pool):
        for base in (slapd.people, slapd.suffix, ELSEWHERE, f"ou=no,{slapd.suffix}"):
            for text in ("(objectClass=*)", "(uid=user1*)", "(uid=none)", "((("):
                both = []
                for handler in (stock, ours):
                    paged = common.KeystoneLDAPHandler(conn=handler)
                    paged.page_size = page_size
                    arguments = (base, ldap.SCOPE_SUBTREE, text, ["uid", "cn"])
                    both.append(outcome(lambda: paged.search_s(*arguments)))  # noqa: B023
                assert both[0] == both[1], (base, text)
        assert pool.get().get_stats()["search_lent"] == 0


def test_pages_one_by_one(slapd: Directory, tmp_path: Path) -> None:
    with handlers(tmp_path, slapd) as handled:
        seen = []
        for handler in handled[:2]:
            control = SimplePagedResultsControl(criticality=True, size=4, cookie="")
            pages = []
            while True:
                message = handler.search_ext(
                    slapd.people, ldap.SCOPE_SUBTREE, "(uid=*)", ["uid"], serverctrls=[control]
                )
                kind, data, _, controls = handler.result3(message)
                assert controls[0].controlType == SimplePagedResultsControl.controlType
                pages.append((kind, data))
                control.cookie = controls[0].cookie
                if not control.cookie:
                    break
            seen.append(pages)
        assert len(seen[0]) > 3
        assert seen[0] == seen[1]


def test_a_search_without_pages_by_search_ext(slapd: Directory, tmp_path: Path) -> None:
    with handlers(tmp_path, slapd) as handled:
        for size_limit in (0, 2):
            both = []
            for handler in handled[:2]:

                def ask(handler: Any = handler, limit: int = size_limit) -> Any:
                    message = handler.search_ext(
                        slapd.people, ldap.SCOPE_SUBTREE, "(uid=user*)", ["uid"], sizelimit=limit
                    )
                    kind, data, _, controls = handler.result3(message)
                    return kind, data, controls

                both.append(outcome(ask))
            assert both[0] == both[1]


@pytest.mark.parametrize("page_size", [0, 3])
def test_the_limit_of_the_server(slapd: Directory, tmp_path: Path, page_size: int) -> None:
    with handlers(tmp_path, slapd, who=slapd.users[1]) as (stock, ours, _):
        kinds = set()
        for text in ("(uid=user*)", "(uid=user1)", "(objectClass=*)"):
            arguments = (slapd.people, ldap.SCOPE_SUBTREE, text, ["uid"])
            assert outcome(lambda: ours.search_s(*arguments)) == outcome(  # noqa: B023
                lambda: stock.search_s(*arguments)  # noqa: B023
            )
            both = []
            for handler in (stock, ours):
                above = common.KeystoneLDAPHandler(conn=handler)
                above.page_size = page_size
                both.append(outcome(lambda: above.search_s(*arguments)))  # noqa: B023
            assert both[0] == both[1]
            kinds.add(both[0][1] if both[0][0] == "raised" else "returned")
        assert kinds & {exception.LDAPSizeLimitExceeded, ldap.SIZELIMIT_EXCEEDED}


@pytest.mark.parametrize(
    ("who", "password"),
    [
        ("uid=user1,ou=People,dc=example,dc=org", "wrong"),
        ("uid=nobody,ou=People,dc=example,dc=org", "x"),
        ("dc=no", "x"),
        ("rubbish", "x"),
        ("uid=user1,ou=People,dc=example,dc=org", "secret-1-Number1"),
        ("UID = user1 , ou=people , dc=example,dc=org", "secret-1-Number1"),
    ],
)
def test_binds(slapd: Directory, tmp_path: Path, who: str, password: str) -> None:
    with handlers(tmp_path, slapd) as (stock, ours, _):
        both = [
            outcome(lambda: handler.simple_bind_s(who, password) and None)  # noqa: B023
            for handler in (stock, ours)
        ]
        assert both[0] == both[1]


@pytest.mark.parametrize(
    "arguments",
    [
        (None, 2), ("dc=x", "sub"), ("dc=x", 7), ("dc=x", 2, b"(uid=x)"),
        ("dc=x", 2, "(uid=*)", "uid"),
        ("dc=x", 2, "(uid=*)", [b"uid"]), ("dc=x", 2, "(uid=*)", [1]), (b"dc=x", 2),
        ("dc=x\0", 2), ("dc=x", 2, "(uid=\0)"), ("dc=x", 2, None),
        ("dc=\udcff", 2),
    ],
)  # fmt: skip
def test_what_makes_no_sense(slapd: Directory, tmp_path: Path, arguments: Any) -> None:
    with handlers(tmp_path, slapd) as (stock, ours, pool):
        expected, found = outcome(lambda: stock.search_s(*arguments)), outcome(
            lambda: ours.search_s(*arguments)
        )
        assert expected[0] == found[0]
        if expected[0] == "raised":
            families = [(TypeError, ValueError), (ldap.LDAPError,)]
            assert any(issubclass(found[1], x) and issubclass(expected[1], x) for x in families)
        # whatever that was, the pool is well
        assert ours.search_s(slapd.people, ldap.SCOPE_BASE)
        assert pool.get().get_stats()["search_lent"] == 0


@pytest.mark.parametrize("text", ["", " "])
def test_a_filter_that_is_empty_is_refused_here(
    slapd: Directory, tmp_path: Path, text: str
) -> None:
    """libldap sends it, slapd takes it for no LDAP and hangs up; ours stays well."""
    with handlers(tmp_path, slapd) as (stock, ours, _):
        with pytest.raises(ldap.PROTOCOL_ERROR):
            stock.search_s(slapd.people, ldap.SCOPE_BASE, text)
        with pytest.raises(ldap.FILTER_ERROR):
            ours.search_s(slapd.people, ldap.SCOPE_BASE, text)
        assert ours.search_s(slapd.people, ldap.SCOPE_BASE)


# The interface above Keystone's code

CONFIGURATIONS: dict[str, dict[str, object]] = {
    "one": {},
    "sub": {"query_scope": "sub", "user_tree_dn": Directory.suffix},
    "paged": {"page_size": 3},
    "paged, sub": {"page_size": 2, "query_scope": "sub", "user_tree_dn": Directory.suffix},
    "no pool": {"use_pool": "false"},
    "identifiers not in the DN": {"user_id_attribute": "mail", "query_scope": "sub"},
    "several names": {"user_id_attribute": "cn", "user_name_attribute": "uid"},
    "user filter": {"user_filter": "(!(uid=user1*))", "group_filter": "(cn=e*)"},
    "broken filter": {"user_filter": "(uid=user1"},
    "spaces": {"user_tree_dn": Directory.people.replace(",", ", ")},
    "no such tree": {"user_tree_dn": f"ou=no,{Directory.suffix}"},
    "rubbish as tree": {"user_tree_dn": "rubbish", "group_tree_dn": "ou=,,"},
    "inverted": {"user_enabled_invert": "true"},
    "mask": {
        "user_enabled_attribute": "businessCategory", "user_enabled_mask": 2,
        "user_enabled_default": 512,
    },
    "emulation": {"user_enabled_emulation": "true"},
    "emulation, sub": {
        "user_enabled_emulation": "true", "query_scope": "sub", "page_size": 4,
        "user_enabled_emulation_dn": f"cn=even,{Directory.groups}",
    },
    "aliases": {
        "user_tree_dn": ALIASES, "alias_dereferencing": "always", "query_scope": "sub",
    },
    "aliases searching": {"user_tree_dn": ALIASES, "alias_dereferencing": "searching"},
    "aliases finding": {"user_tree_dn": f"uid=alias0,{ALIASES}", "alias_dereferencing": "finding"},
    "aliases never": {"user_tree_dn": ALIASES, "alias_dereferencing": "never"},
    "referrals": {"user_tree_dn": ELSEWHERE, "query_scope": "sub"},
    "referral as tree": {"user_tree_dn": f"uid=one,{ELSEWHERE}"},
    "member identifiers": {"group_members_are_ids": "true"},
    "other classes": {"user_objectclass": "kfUser", "group_objectclass": "kfGroup"},
    "more attributes": {
        "user_additional_attribute_mapping": "mail:email2,description:extra",
        "user_description_attribute": "description", "user_default_project_id_attribute": "sn",
        "user_attribute_ignore": "email",
    },
    "limited": {
        "user": f"uid=user1,{Directory.people}", "password": "secret-1-Number1",
    },
    "anonymous": {"user": "", "password": ""},
    "wrong service password": {"password": "wrong"},
    "nested": {"group_ad_nesting": "true"},
}  # fmt: skip


def hints(**filters: str) -> driver_hints.Hints:
    made = driver_hints.Hints()
    for name, value in filters.items():
        attribute, _, comparator = name.partition("__")
        made.add_filter(attribute, value, comparator or "equals")
    return made


def limited(count: int) -> driver_hints.Hints:
    made = driver_hints.Hints()
    made.set_limit(count)
    return made


Call = Callable[[Any], Any]


def calls(server: Directory) -> dict[str, Call]:
    """The driver API, on whoever there is and is not."""
    found: dict[str, Call] = {
        "list_users": lambda x: x.list_users(driver_hints.Hints()),
        "list_users, limited": lambda x: x.list_users(limited(3)),
        "list_groups": lambda x: x.list_groups(driver_hints.Hints()),
        "list_groups, contains": lambda x: x.list_groups(hints(name__contains="e")),
        "unknown filter": lambda x: x.list_users(hints(nothing="x")),
    }
    for comparator in ("equals", "contains", "startswith", "endswith"):
        for value in ("User 1", "user", "Zoë", "(Ops) *", "\\", "", "1"):
            found[f"list_users name {comparator} {value}"] = (
                lambda x, c=comparator, v=value: remaining(x.list_users, hints(**{f"name__{c}": v}))
            )
    people = [*server.users[:7], *server.odd_users]
    names = {user.uid for user in people} | {user.mail for user in people[2:4]}
    names |= {user.cn for user in people[:3]} | {"Second Name"}
    for name in (*names, "nobody", "", "*", "user*", "(", "a\\b", "site", "inner", "x" * 9000):
        found[f"get_user {name:.40}"] = lambda x, n=name: x.get_user(n)
        found[f"groups of {name:.40}"] = lambda x, n=name: x.list_groups_for_user(
            n, driver_hints.Hints()
        )
        found[f"in even? {name:.40}"] = lambda x, n=name: x.check_user_in_group(n, "even")
    for name in (*(user.cn for user in people), "nobody", "", "*", "at SITE", "USER 1"):
        found[f"by name {name}"] = lambda x, n=name: x.get_user_by_name(n, "default")
    for name in ("even", "everybody", "empty", "Grüße, (alle)*", "none", "", "*"):
        found[f"get_group {name}"] = lambda x, n=name: x.get_group(n)
        found[f"group by name {name}"] = lambda x, n=name: x.get_group_by_name(n, "default")
        found[f"members of {name}"] = lambda x, n=name: x.list_users_in_group(
            n, driver_hints.Hints()
        )
    for user in (*server.users[:4], *server.odd_users):
        found[f"authenticate {user.uid}"] = lambda x, u=user: x.authenticate(u.uid, u.password)
        found[f"wrong {user.uid}"] = lambda x, u=user: x.authenticate(u.uid, "wrong")
    for password in ("", None, "\0", "wrong\0", "é", 5):
        found[f"password {password!r}"] = lambda x, p=password: x.authenticate("user1", p)
    for name in ("nobody", "", None):
        found[f"authenticate {name!r}"] = lambda x, n=name: x.authenticate(n, "x")
    found["create"] = lambda x: x.create_user("x", {"name": "x"})
    found["delete"] = lambda x: x.delete_user("user1")
    found["change"] = lambda x: x.change_password("user1", "x")
    return found


# Here these are refused without a search for the user; there that may fail first.
AT_ONCE = {f"password {x!r}" for x in ("", None, 5)} | {f"authenticate {x!r}" for x in ("", None)}


def remaining(list_users: Call, asked: driver_hints.Hints) -> Any:
    """Also what the driver leaves to the layer above."""
    return list_users(asked), asked.filters


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_driver(slapd: Directory, tmp_path: Path, name: str) -> None:
    made = conf(tmp_path, slapd, **CONFIGURATIONS[name])
    # each connection has its own, so that nothing is left behind for the next configuration
    common.PooledLDAPHandler.connection_pools.clear()
    stock, ours = stock_core.Identity(made), Identity(made)
    try:
        assert isinstance(ours.user.get_connection(), Handler)
        kinds = set()
        for what, call in calls(slapd).items():
            expected = outcome(lambda: call(stock))  # noqa: B023
            found = outcome(lambda: call(ours))  # noqa: B023
            if what in AT_ONCE:
                assert found[1] is AssertionError
            else:
                assert found == expected, what
            kinds.add(expected[0])
        assert "raised" in kinds
        stats = ours.pool.get().get_stats()
        assert (stats["search_lent"], stats["auth_lent"]) == (0, 0)
    finally:
        common.PooledLDAPHandler.connection_pools.clear()
        ours.pool.get().close()


def test_no_connection_is_lost_in_an_outage(tmp_path: Path) -> None:
    """Not even those on which a search is at some page when the server is killed."""
    with directory(tmp_path, users=30) as server:
        driver = Identity(conf(tmp_path, server, page_size=2, pool_size=3))
        whole = len(driver.list_users(driver_hints.Hints()))
        stopped, noticed = threading.Event(), threading.Event()
        seen: list[tuple[int, int, int]] = []

        def list_users() -> tuple[int, int, int]:
            good = away = other = 0
            while not stopped.is_set():
                try:
                    good += len(driver.list_users(driver_hints.Hints())) == whole
                except DirectoryUnavailable:
                    away += 1
                    noticed.set()
                    stopped.wait(0.05)  # as a client would
                except Exception:
                    other += 1
            return good, away, other

        with ThreadPoolExecutor(6) as threads:
            running = [threads.submit(list_users) for _ in range(6)]
            try:
                for outages in range(4):
                    before = server.counts().searches
                    server.wait_for(lambda x, y=before: x.searches > y + 60, "all are at it")
                    if outages < 3:
                        server.kill()
                        noticed.clear()
                        assert noticed.wait(PATIENCE), "nobody finds it away"
                        server.start()
            finally:
                stopped.set()
            seen = [x.result(PATIENCE) for x in running]
        good, away, other = (sum(x) for x in zip(*seen, strict=True))
        assert good and away and not other, seen
        assert len(driver.list_users(driver_hints.Hints())) == whole
        stats = driver.pool.get().get_stats()
        assert stats["search_lent"] == 0
        assert stats["search_size"] <= 3
        assert driver.pool.get().close(PATIENCE)

"""The Keystones that ``ldap_logins`` compares: one process each, which differ in the driver, and in
one case in all that keyfront does for Keystone besides.

All of them have the same users in the same directory, as a domain with a driver of its own, and
Keystone's own users (the administrator, and one for comparison) in SQL. Each has a copy of one
SQLite database, in which every user has logged in before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfront.common import programs

from ..lineups import keystone
from ..servers import slapd as directory
from ..servers.processes import HOST
from .keystone_process import KeystoneProcess, keystone_process

DOMAIN, PROJECT, ROLE = "corp", "work", "member"
# A user of Keystone's own; hashing the password costs next to nothing.
LOCAL_USER, LOCAL_PASSWORD = "local", "local-secret"
_CHEAPEST = 4

_KEYSTONE = """\
[database]
connection = sqlite:///{database}{plugin}

[identity]
domain_specific_drivers_enabled = true
domain_config_dir = {domains}
password_hash_rounds = {rounds}

[keyfront_token_cache]
path = {shared}
"""
_CACHES_OFF = "[cache]\nenabled = false\n"
_DOMAIN = f"""\
[identity]
driver = {{driver}}

[ldap]
url = ldaps://{HOST}:{{port}}
tls_cacertfile = {{ca_file}}
user = {directory.SERVICE_DN}
password = {directory.SERVICE_PASSWORD}
suffix = {directory.SUFFIX}
user_tree_dn = {directory.PEOPLE}
user_objectclass = inetOrgPerson
user_id_attribute = uid
user_name_attribute = cn
group_tree_dn = {directory.GROUPS}
group_objectclass = groupOfNames
group_id_attribute = cn
group_name_attribute = cn
use_pool = {{pool}}
use_auth_pool = {{pool}}
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A Keystone that gets at its users in one way.

    :param driver: ``[identity] driver`` of the domain
    :param pool: ``[ldap] use_pool`` and ``use_auth_pool``
    :param gevent: true if the process is patched by gevent
    :param pipeline: true if it is served as keyfront does it, by its entrypoint, with its word in
        the database's URL and Keystone's own caches as they come; else by stock Keystone's own
    """

    label: str
    driver: str | None = "ldap"
    pool: bool = True
    gevent: bool = False
    pipeline: bool = False


CANDIDATES = {
    "unpooled": Candidate(label="stock driver, no pool", pool=False),
    "ldappool": Candidate(label="stock driver, ldappool"),
    "keyfront": Candidate(label="keyfront_ldap", driver="keyfront_ldap"),
    "keyfront whole": Candidate(
        label="keyfront_ldap and its pipeline", driver="keyfront_ldap", pipeline=True
    ),
    "unpooled gevent": Candidate(label="stock driver, no pool", pool=False, gevent=True),
    "ldappool gevent": Candidate(label="stock driver, ldappool", gevent=True),
    "keyfront gevent": Candidate(label="keyfront_ldap", driver="keyfront_ldap", gevent=True),
    "sql": Candidate(label="no LDAP: a user in SQL", driver=None),
}


class Keystones:
    """All Keystones of one measurement.

    :param folder: a folder of this user only; the caller deletes it
    :param slapd: the directory that the users are in
    :param port: the port at which the Keystones find it
    :param users: number of users who may log in
    """

    def __init__(self, folder: Path, slapd: directory.Slapd, port: int, *, users: int) -> None:
        self.folder = folder
        self.slapd = slapd
        self.port = port
        self.users = users
        self.keystone = keystone.Keystone(folder / "state")
        self._database = self.keystone.state.path / "keystone.sqlite"

    def prepare(self) -> None:
        """Make the Keystone that all are copies of."""
        programs.require_module("keystone", "keystone")
        for module in ("ldap", "ldappool", "ldap3"):
            programs.require_module(module, "ldap")
        self.keystone.make()
        with self._started("first", CANDIDATES["ldappool"]) as server:
            server.make_domain(DOMAIN)
            token = self.admin(server)
            admin = server.admin(token)
            place = admin.made("project", PROJECT, domain_id="default")
            role = admin.made("role", ROLE)
            admin.grant(role, place, admin.made("user", LOCAL_USER, password=LOCAL_PASSWORD))
            domains = server.request("GET", f"domains?name={DOMAIN}", token)["body"]["domains"]
            path = f"groups?domain_id={domains[0]['id']}"
            (group,) = server.request("GET", path, token)["body"]["groups"]
            grant = f"projects/{place}/groups/{group['id']}/roles/{role}"
            server.request("PUT", grant, token)
            server.logins([login(number) for number in range(self.users)])

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[dict[str, KeystoneProcess]]:
        """Run all candidates at once, each with a copy of what :meth:`prepare` made."""
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(self._started(name, CANDIDATES[name])) for name in names
            }

    def admin(self, server: KeystoneProcess) -> str:
        """Return a token of the administrator."""
        token: str = server.request("POST", "auth/tokens", None, self.keystone.login())["token"]
        return token

    @contextmanager
    def _started(self, name: str, candidate: Candidate) -> Iterator[KeystoneProcess]:
        folder = self.folder / name.replace(" ", "-")
        domains = folder / "domains"
        domains.mkdir(mode=0o700, parents=True)
        database = self._database
        if name in CANDIDATES:
            database = folder / "keystone.sqlite"
            _copy(self._database, database)
        if candidate.driver is not None:
            domains.joinpath(f"keystone.{DOMAIN}.conf").write_text(
                self._domain(candidate, direct=name not in CANDIDATES)
            )
        values = {
            "database": database,
            "plugin": "?plugin=keyfront" if candidate.pipeline else "",
            "domains": domains,
            "rounds": _CHEAPEST,
            "shared": folder / "tokens",
        }
        # what is not measured need not be slow: that is as Keystone comes
        usual = candidate.pipeline or name not in CANDIDATES
        text = _KEYSTONE.format(**_escaped(values)) + ("" if usual else _CACHES_OFF)
        options = [f"--{x}" for x in ("gevent", "pipeline") if getattr(candidate, x)]
        environment = self.keystone.configured(folder, text)
        with keystone_process(name, folder / "worker.log", environment, *options) as running:
            yield running

    def _domain(self, candidate: Candidate, *, direct: bool) -> str:
        values = {
            "driver": candidate.driver,
            "port": self.slapd.port if direct else self.port,
            "ca_file": self.slapd.ca_file,
            "pool": str(candidate.pool).lower(),
        }
        return _DOMAIN.format(**_escaped(values))


def login(number: int) -> dict[str, Any]:
    """Return what a user of the directory asks for a token with: name, password, a project."""
    name, password = directory.user_name(number), directory.user_password(number)
    return keystone.login(name, password, PROJECT, domain={"name": DOMAIN})


def credentials(number: int) -> tuple[str, str]:
    """Return the identifier of a user of the directory, for its driver, and the password."""
    return directory.user_name(number), directory.user_password(number)


def local_login() -> dict[str, Any]:
    """Return the same of Keystone's own user."""
    return keystone.login(LOCAL_USER, LOCAL_PASSWORD, PROJECT)


def _escaped(values: Mapping[str, object]) -> dict[str, str]:
    return {name: keystone.escaped(str(value)) for name, value in values.items()}


def _copy(source: Path, target: Path) -> None:
    """Copy a SQLite database whole, with what is in its log."""
    with sqlite3.connect(source) as old, sqlite3.connect(target) as new:
        old.backup(new)
        new.execute("PRAGMA journal_mode=WAL")
    old.close()
    new.close()

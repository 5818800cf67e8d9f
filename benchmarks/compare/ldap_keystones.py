"""The Keystones that ``ldap_logins`` compares: one process each, which differ in the driver, and in
one case in all that keyfront does for Keystone besides.

All of them have the same users in the same directory, as a domain with a driver of its own, and
Keystone's own users (the administrator, and one for comparison) in SQL. Each has a copy of one
SQLite database, in which every user has logged in before.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyfront.common import programs
from keyfront.errors import ServerError

from ..lineups import keystone
from ..worlds import slapd as directory
from ..worlds.processes import HOST

DOMAIN, PROJECT, ROLE = "corp", "work", "member"
# A user of Keystone's own; hashing the password costs next to nothing.
LOCAL_USER, LOCAL_PASSWORD = "local", "local-secret"
_CHEAPEST = 4
STOP_PATIENCE = 10

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
#: Keystone's own caches, by what ``--cache`` calls them.
CACHES = {
    "off": "[cache]\nenabled = false\n",
    # as Keystone comes: what one request asked for is remembered for that request
    "request": "",
    "memory": "[cache]\nbackend = dogpile.cache.memory\n",
}
_DOMAIN = """\
[identity]
driver = {driver}

[ldap]
url = ldaps://{host}:{port}
tls_cacertfile = {ca_file}
user = {user}
password = {password}
suffix = {suffix}
user_tree_dn = {people}
user_objectclass = inetOrgPerson
user_id_attribute = uid
user_name_attribute = cn
group_tree_dn = {groups}
group_objectclass = groupOfNames
group_id_attribute = cn
group_name_attribute = cn
use_pool = {pool}
use_auth_pool = {pool}
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


class Server:
    """A Keystone in a process of its own, asked by its standard input."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._answer()

    def make_domain(self, name: str) -> None:
        """Have it make a domain, before anybody has logged in: see :mod:`.ldap_worker`."""
        self._ask({"make domain": name})

    def logins(self, bodies: Sequence[object], *, at_once: bool = False) -> tuple[float, float]:
        """Have it give a token for each body; gives the seconds, and those of CPU time.

        :raises ServerError: it gave fewer
        """
        return self._timed({"logins": list(bodies), "at_once": at_once})

    def authenticate(self, users: Sequence[int], *, at_once: bool = False) -> tuple[float, float]:
        """Return the same of the driver alone: it finds the user and checks the password."""
        pairs = [(directory.user_name(one), directory.user_password(one)) for one in users]
        return self._timed({"authenticate": pairs, "domain": DOMAIN, "at_once": at_once})

    def _timed(self, what: object) -> tuple[float, float]:
        done = self._ask(what)
        if failures := done["failures"]:
            raise ServerError(f"{self.name}: {len(failures)} logins failed: {failures[0]}")
        return done["seconds"], done["cpu"]

    def request(
        self, method: str, path: str, token: str | None = None, body: object = None
    ) -> dict[str, Any]:
        """Make one request; return ``token`` and ``body`` of the answer."""
        done = self._ask({"request": [method, path, token, body]})
        if not 200 <= done["status"] < 300:
            raise ServerError(
                f"{self.name} answers {method} /v3/{path} with {done['status']}{self._tail()}"
            )
        return done

    def _ask(self, what: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"{self.name} ended{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return f": {self._log.read_text(errors='replace')[-600:]}"


class Keystones:
    """All Keystones of one measurement.

    :param folder: a folder of this user only; the caller deletes it
    :param slapd: the directory that the users are in
    :param port: the port at which the Keystones find it
    :param users: number of users who may log in
    :param cache: Keystone's own caches, one of :data:`CACHES`
    """

    def __init__(
        self, folder: Path, slapd: directory.Slapd, port: int, *, users: int, cache: str
    ) -> None:
        self.folder = folder
        self.slapd = slapd
        self.port = port
        self.users = users
        self.cache = cache
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
            project = {"project": {"name": PROJECT, "domain_id": "default"}}
            place = server.request("POST", "projects", token, project)["body"]["project"]["id"]
            local = {"user": {"name": LOCAL_USER, "password": LOCAL_PASSWORD}}
            user = server.request("POST", "users", token, local)["body"]["user"]["id"]
            role = server.request("GET", f"roles?name={ROLE}", token)["body"]["roles"][0]["id"]
            grant = f"projects/{place}/{{}}/{{}}/roles/{role}"
            server.request("PUT", grant.format("users", user), token)
            domains = server.request("GET", f"domains?name={DOMAIN}", token)["body"]["domains"]
            path = f"groups?domain_id={domains[0]['id']}"
            (group,) = server.request("GET", path, token)["body"]["groups"]
            server.request("PUT", grant.format("groups", group["id"]), token)
            server.logins([login(number) for number in range(self.users)])

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[dict[str, Server]]:
        """Run all candidates at once, each with a copy of what :meth:`prepare` made."""
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(self._started(name, CANDIDATES[name])) for name in names
            }

    def admin(self, server: Server) -> str:
        """Return a token of the administrator."""
        token: str = server.request("POST", "auth/tokens", None, self.keystone.login())["token"]
        return token

    @contextmanager
    def _started(self, name: str, candidate: Candidate) -> Iterator[Server]:
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
        log = folder / "worker.log"
        text = _KEYSTONE.format(**_escaped(values))
        # what is not measured need not be slow
        usual = candidate.pipeline or name not in CANDIDATES
        text += CACHES["request" if usual else self.cache]
        environment = {**os.environ, **self.keystone.configured(folder, text)}
        command = [sys.executable, "-m", f"{__package__}.ldap_worker"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *command,
                    *(["--gevent"] if candidate.gevent else []),
                    *(["--pipeline"] if candidate.pipeline else []),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                process_group=0,
            )
        try:
            yield Server(name, process, log)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_PATIENCE)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _domain(self, candidate: Candidate, *, direct: bool) -> str:
        values = {
            "driver": candidate.driver,
            "host": HOST,
            "port": self.slapd.port if direct else self.port,
            "ca_file": self.slapd.ca_file,
            "user": directory.SERVICE_DN,
            "password": directory.SERVICE_PASSWORD,
            "suffix": directory.SUFFIX,
            "people": directory.PEOPLE,
            "groups": directory.GROUPS,
            "pool": str(candidate.pool).lower(),
        }
        return _DOMAIN.format(**_escaped(values))


def login(number: int) -> dict[str, Any]:
    """Return what a user of the directory asks for a token with: name, password, a project."""
    name, password = directory.user_name(number), directory.user_password(number)
    return keystone.login(name, password, PROJECT, domain={"name": DOMAIN})


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

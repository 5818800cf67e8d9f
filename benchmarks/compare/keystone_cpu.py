"""CPU time and statements of what a cloud asks Keystone, in one process without a server.

Loads Keystone in a process of its own for each candidate: stock Keystone as it comes, the same with
memcached behind its own caches, and keyfront's packaged pipeline as it is by default. Each is
called as a web server calls it:

    first login of a day    each user logs in; his last day was another one, which Keystone writes,
                            and nothing that is his is in keyfront's memory: it has ended
    login                   and once more
    re-scope                each of these tokens is exchanged for one of another project
    first validation        each service validates each new token for the first time
    repeated                and once more
    asked of Keystone       by a query that keyfront does not know, so that Keystone answers
    issued elsewhere        a service validates a token for the first time that another node has
                            issued: it has the keys of this one, and has put nothing into caches
    user new here           the same of a user who was made there, and of whom this process and its
                            caches know nothing
    fresh worker            a validation in a process of its own, forked of one which has loaded
                            Keystone and answered nothing, as uWSGI forks its workers

What is told is the CPU time of this process for one request, system time included, and the
statements that SQLAlchemy executes for it, and how many of them write. The CPU time is the lowest
of the rounds' means: others who use the machine make it longer and never shorter. The first round
is not counted. Passwords are hashed as cheaply as bcrypt does, which is in a login's time, and told
beside it. memcached's own CPU time is not in it.
"""

from __future__ import annotations

import os
import sqlite3
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation.rules import ANY, CONTENT, name_tag, tag

from .. import files
from ..lineups.keystone import VALIDATION, Keystone, login
from ..load.arguments import say
from ..results import Cell, Table
from ..servers.memcached import memcached
from . import comparison
from .cloud_mix import EXTRA, hash_milliseconds
from .comparison import Comparison, Report
from .keystone_process import KeystoneProcess, Request, keystone_process
from .token_servers import CANDIDATES, check

NAMES = {"stock": "keystone", "memcached": "memcached", "keyfront": "keyfront"}
DAY, LOGIN, RESCOPE, FIRST, REPEATED, ASKED, ELSEWHERE, NEW, FRESH = PHASES = (
    *("first login of a day", "login", "re-scope", "first validation", "repeated"),
    *("asked of Keystone", "issued elsewhere", "user new here", "fresh worker"),
)
_UNKNOWN = "?allow_expired=0"
_PASSWORD = "a password of a usual length"
# The other node's own, which nobody else sees: without any it takes most of the time here.
_OWN_CACHE = "[cache]\nbackend = dogpile.cache.memory_pickle\n"

#: Of each phase, round by round: requests, CPU seconds, statements, statements that write.
Found = dict[str, list[tuple[int, float, int, int]]]


def log_in(name: str) -> dict[str, Any]:
    """Return the body of a user's login."""
    return login(name, _PASSWORD, "one")


def rescope(token: str, project: str) -> Request:
    """Return what exchanges a token for one of another project, told by its identifier."""
    identity = {"methods": ["token"], "token": {"id": token}}
    body = {"auth": {"identity": identity, "scope": {"project": {"id": project}}}}
    return Request("POST", VALIDATION, body=body)


@dataclass(frozen=True)
class Measured:
    """One candidate, and another node of its Keystone, which is a stock one.

    :param admin: the body of the administrator's login
    :param database: SQLite's file
    :param shared: the folder of keyfront's epochs; ``None`` for a candidate without
    """

    keystone: KeystoneProcess
    other: KeystoneProcess
    admin: dict[str, Any]
    database: Path
    shared: Path | None
    found: Found = field(default_factory=lambda: defaultdict(list))

    def run(self, *, rounds: int, users: int, services: int) -> Found:
        """Go through the phases in each round, after one that is not counted."""
        run = os.urandom(4).hex()
        names = [f"user-{run}-{number}" for number in range(users)]
        who = [f"service-{run}-{number}" for number in range(services)]
        (admin,) = self.keystone.logins([self.admin]).tokens
        (elsewhere,) = self.other.logins([self.admin]).tokens
        roles = {**dict.fromkeys(names, "member"), **dict.fromkeys(who, "service")}
        project = make_users(self.keystone, admin, roles)["two"]
        logins = [Request("POST", VALIDATION, body=log_in(name)) for name in names]
        self.keystone.ask(logins)
        for number in range(rounds + 1):
            callers = self.keystone.logins([log_in(name) for name in who]).tokens
            self._yesterday(names)
            self._phase(DAY, logins)
            tokens = self._phase(LOGIN, logins)
            others = self._phase(RESCOPE, [rescope(token, project) for token in tokens])
            # which services there are is known
            self.keystone.ask(_validations(callers, [admin]))
            for phase in (FIRST, REPEATED):
                self._phase(phase, _validations(callers, [*tokens, *others]))
            first = callers[:1]
            self._phase(ASKED, _validations(first, tokens, _UNKNOWN))
            known = self.other.ask(logins).tokens
            self._phase(ELSEWHERE, _validations(first, known))
            strangers = [f"stranger-{os.urandom(4).hex()}" for _ in names]
            make_users(self.other, elsewhere, dict.fromkeys(strangers, "member"))
            unknown = self.other.logins([log_in(name) for name in strangers]).tokens
            self._phase(NEW, _validations(first, unknown))
            self._phase(FRESH, _validations(first, others, _UNKNOWN), fresh=True)
            if not number:
                self.found.clear()
        return dict(self.found)

    def _phase(self, name: str, requests: list[Request], *, fresh: bool = False) -> list[str]:
        took = self.keystone.ask(requests, fresh=fresh)
        self.found[name].append((len(requests), took.cpu, took.statements, took.writes))
        return took.tokens

    def _yesterday(self, users: Sequence[str]) -> None:
        """Have everybody been here for the last time on another day, and nothing kept of users."""
        day = (datetime.now(UTC) - timedelta(1)).date().isoformat()
        tags = {ANY, CONTENT, "users", "groups", "members", "grants"}
        with sqlite3.connect(self.database) as database:
            database.execute("UPDATE user SET last_active_at = ?", (day,))
            for name in users:
                found = database.execute("SELECT user_id FROM local_user WHERE name = ?", (name,))
                tags |= {tag("user", found.fetchone()[0]), name_tag(name)}
        database.close()
        if self.shared is not None:
            coordinator = SharedMemory(self.shared, create=False)
            coordinator.touch(slots(tags, coordinator.slot_count))
            coordinator.close()


def _validations(callers: Sequence[str], tokens: Sequence[str], query: str = "") -> list[Request]:
    path = f"{VALIDATION}{query}"
    return [Request("GET", path, caller, None, token) for token in tokens for caller in callers]


def make_users(keystone: KeystoneProcess, admin: str, roles: dict[str, str]) -> dict[str, str]:
    """Make users with roles on two projects, which are made if they are not there.

    :param admin: a token of an administrator
    :param roles: the names of the users, each with that of his role
    :returns: the identifiers of the projects by name
    """
    made = keystone.admin(admin)
    projects = {name: made.made("project", name, domain_id="default") for name in ("one", "two")}
    for name, role in roles.items():
        given = made.made("role", role)
        user = made.made("user", name, password=_PASSWORD, domain_id="default")
        for project in projects.values():
            made.grant(given, project, user)
    return projects


@contextmanager
def measured(
    keystone: Keystone, folder: Path, text: str, *, shared: Path | None
) -> Iterator[Measured]:
    """Run a candidate and another node until the block ends.

    :param keystone: a Keystone on SQLite that is made
    :param folder: a folder for their files; made here
    :param text: more of keystone.conf
    :param shared: the folder of keyfront's epochs; ``None`` for a candidate without
    """
    other = folder / "other"
    other.mkdir(mode=0o700, parents=True)
    options = ["--forks", *(["--pipeline"] if shared else [])]
    with (
        keystone_process(
            "another Keystone", other / "log", keystone.configured(other, text + _OWN_CACHE)
        ) as node,
        keystone_process(
            folder.name, folder / "log", keystone.configured(folder, text), *options
        ) as candidate,
    ):
        database = keystone.state.path / "keystone.sqlite"
        yield Measured(candidate, node, keystone.login(), database, shared)


def measure(options: Namespace) -> dict[str, Found]:
    """Return what each candidate took."""
    check()
    names = comparison.chosen(NAMES, options.only)
    found = {}
    with ExitStack() as stack:
        folder, shared = stack.enter_context(files.folders())
        cache = stack.enter_context(memcached())
        keystone = Keystone(folder / "state")
        say("a Keystone is made")
        keystone.make()
        for name, candidate in names.items():
            own = shared / name if name == "keyfront" else None
            text = CANDIDATES[candidate].configuration(
                keystone, shared=shared / name, memcached=cache.address
            )
            say(f"{CANDIDATES[candidate].label} is asked")
            with measured(keystone, folder / name, text + EXTRA, shared=own) as running:
                found[name] = running.run(
                    rounds=options.rounds, users=options.users, services=options.services
                )
    return found


def report(found: dict[str, Found]) -> Report:
    """Return the table."""
    rows: list[list[Cell]] = []
    for phase in PHASES:
        cells: list[Cell] = []
        for phases in found.values():
            rounds = phases[phase]
            cpu = 1000 * min(cpu / requests for requests, cpu, _, _ in rounds)
            requests = sum(one[0] for one in rounds)
            every, writes = (sum(one[place] for one in rounds) / requests for place in (2, 3))
            writing = f", {writes:.3g} writing" if writes else ""
            cells.append(f"{cpu:.3g} ({every:.3g}{writing})")
        rows.append([phase, *cells])
    labels = [CANDIDATES[NAMES[name]].label for name in found]
    caption = f"The hash of the password takes {hash_milliseconds():.2g} ms of a login."
    columns = ["ms of CPU (statements)", *labels]
    return Report([Table(name="cpu", columns=columns, rows=rows, caption=caption)])


COMPARISON = Comparison(
    title="CPU time and statements of what a cloud asks Keystone",
    measure=lambda options: report(measure(options)),
    numbers=(
        ("--rounds", 5, "besides the first"),
        ("--users", 6, "who log in"),
        ("--services", 5, "that validate each token"),
    ),
    only="keyfront",
    distributions=("keystone", "SQLAlchemy"),
    programs=("memcached",),
)
main = partial(comparison.main, "keystone_cpu", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

"""CPU time and statements of what a cloud asks Keystone, in one process without a server.

    python -m keyfront.benchmarks.compare.keystone_cpu [--rounds 5] [--users 6] [--services 5]
        [--changes 0] [--candidates stock,memcached,keyfront] [--profile re-scope]

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

With ``--changes N`` something else is changed after every N requests: a user is made, or granted a
role elsewhere, as ``keystone-manage`` would.

What is told is the CPU time of this process for one request, system time included, and the
statements that SQLAlchemy executes for it, and how many of them write. The CPU time is the lowest
of the rounds' means: others who use the machine make it longer and never shorter. The first round
is not counted. Passwords are hashed as cheaply as bcrypt does, which is in a login's time, and told
beside it. memcached's own CPU time is not in it.
"""

from __future__ import annotations

import cProfile
import gc
import io
import json
import os
import pickle
import pstats
import subprocess
import sys
import tempfile
import time
import wsgiref.util
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import ServerError

from ..lineups.keystone import Keystone
from ..lineups.lineup import memory_folder
from ..worlds.memcached import memcached
from . import comparison
from .cloud_mix import EXTRA, hash_milliseconds
from .token_servers import CANDIDATES, check

NAMES = {"stock": "keystone", "memcached": "memcached", "keyfront": "keyfront"}
DAY, LOGIN, RESCOPE, FIRST, REPEATED, ASKED, ELSEWHERE, NEW, FRESH = PHASES = (
    *("first login of a day", "login", "re-scope", "first validation", "repeated"),
    *("asked of Keystone", "issued elsewhere", "user new here", "fresh worker"),
)
_MODULE = "keyfront.benchmarks.compare.keystone_cpu"
_TOKENS = "/v3/auth/tokens"
_UNKNOWN = "allow_expired=0"
_PASSWORD = "a password of a usual length"

#: Of each phase, round by round: requests, CPU seconds, statements, statements that write.
Found = dict[str, list[tuple[int, float, int, int]]]


class Client:
    """Calls an application, and counts what it takes.

    :param application: a WSGI callable
    """

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application = application
        self.cpu = 0.0
        self.profile: cProfile.Profile | None = None

    def __call__(
        self, method: str, path: str, token: str = "", body: object = None, *, subject: str = "",
        query: str = "",
    ) -> tuple[dict[str, str], Any]:  # fmt: skip
        """Return the headers of an answer and what it holds.

        :raises ServerError: it is not a good one
        """
        data = b"" if body is None else json.dumps(body).encode()
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REMOTE_ADDR": "127.0.0.1",
            "wsgi.input": io.BytesIO(data),
        }
        if data:
            environ |= {"CONTENT_LENGTH": str(len(data)), "CONTENT_TYPE": "application/json"}
        if token:
            environ["HTTP_X_AUTH_TOKEN"] = token
        if subject:
            environ["HTTP_X_SUBJECT_TOKEN"] = subject
        wsgiref.util.setup_testing_defaults(environ)
        seen: list[Any] = []

        def start_response(status: str, headers: Any, _: object = None) -> Callable[[bytes], None]:
            seen[:] = status, headers
            return lambda written: None

        with self.profile or nullcontext():
            begun = time.process_time()
            answer = self._application(environ, start_response)
            content = b"".join(answer)
            if hasattr(answer, "close"):
                answer.close()
            self.cpu += time.process_time() - begun
        status, headers = seen
        if not status.startswith("2"):
            raise ServerError(f"{method} {path}: {status}: {content.decode()[:200]}")
        return {name.lower(): value for name, value in headers}, json.loads(content or b"null")

    def log_in(self, name: str, password: str, project: str) -> str:
        """Return a new token."""
        domain = {"id": "default"}
        user = {"name": name, "domain": domain, "password": password}
        identity = {"methods": ["password"], "password": {"user": user}}
        return self._issued(identity, {"project": {"name": project, "domain": domain}})

    def rescope(self, token: str, project: str) -> str:
        """Return a token of another project, told by its identifier, in exchange for one."""
        identity = {"methods": ["token"], "token": {"id": token}}
        return self._issued(identity, {"project": {"id": project}})

    def _issued(self, identity: object, scope: object) -> str:
        body = {"auth": {"identity": identity, "scope": scope}}
        headers, _ = self("POST", _TOKENS, body=body)
        return headers["x-subject-token"]

    def validate(self, caller: str, token: str, query: str = "") -> None:
        """Validate a token."""
        self("GET", _TOKENS, caller, subject=token, query=query)


class Statements:
    """Counts what all engines of this process execute."""

    def __init__(self) -> None:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        self.all = self.writes = 0
        event.listen(Engine, "before_cursor_execute", self._count)

    def _count(self, connection: Any, cursor: Any, statement: str, *others: object) -> None:
        if statement == "BEGIN":  # SQLite's, which others send with the first statement
            return
        self.all += 1
        self.writes += statement.startswith(("INSERT", "UPDATE", "DELETE"))
        if os.environ.get("KEYFRONT_SHOW_STATEMENTS"):
            sys.stderr.write(f"    {' '.join(statement.split())}\n")


class OtherNode:
    """Stock Keystone in a process of its own, with the keys and the database of this one.

    :param password: the password of its administrator
    """

    def __init__(self, password: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keystone-cpu-")
        more = Path(self._folder.name) / "more.conf"
        # Its own, which nobody else sees: without any it takes most of the time here.
        more.write_text("[cache]\nbackend = dogpile.cache.memory_pickle\n", encoding="utf-8")
        files = os.environ.get("OS_KEYSTONE_CONFIG_FILES") or "keystone.conf"
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "--child", "other"],
            env={
                **os.environ,
                "OS_KEYSTONE_CONFIG_FILES": f"{files};{more}",
                "KEYFRONT_PASSWORD": password,
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tokens(self, names: list[str], *, new: bool = False) -> list[str]:
        """Return a token that it issues for each user.

        :param names: the names of the users
        :param new: if true, it makes these users first
        :raises ServerError: it has ended
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([names, new]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise ServerError(f"another Keystone ended with {self._process.wait()}")
        return list(json.loads(answer))

    def close(self) -> None:
        """Stop it."""
        # Processes that were forked have its standard input as well: it does not end by itself.
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    @staticmethod
    def serve(password: str) -> None:
        """Be that process: answer what :meth:`tokens` asks until nobody does."""
        from keystone.server import wsgi

        sys.argv = ["keystone"]
        client = Client(wsgi.initialize_public_application())
        admin = client.log_in("admin", password, "admin")
        for line in sys.stdin:
            names, new = json.loads(line)
            if new:
                make_users(client, admin, dict.fromkeys(names, "member"))
            tokens = [client.log_in(name, _PASSWORD, "one") for name in names]
            print(json.dumps(tokens), flush=True)


def make_users(client: Client, admin: str, roles: dict[str, str]) -> dict[str, str]:
    """Make users with roles on two projects, which are made if they are not there.

    :param client: the Keystone that is asked
    :param admin: a token of an administrator
    :param roles: the names of the users, each with that of his role
    :returns: the identifiers of the projects by name
    """
    projects = {p["name"]: p["id"] for p in client("GET", "/v3/projects", admin)[1]["projects"]}
    for name in ("one", "two"):
        if name not in projects:
            project = {"project": {"name": name, "domain_id": "default"}}
            projects[name] = client("POST", "/v3/projects", admin, project)[1]["project"]["id"]
    known = {r["name"]: r["id"] for r in client("GET", "/v3/roles", admin)[1]["roles"]}
    for name, role in roles.items():
        if role not in known:
            made = client("POST", "/v3/roles", admin, {"role": {"name": role}})[1]
            known[role] = made["role"]["id"]
        body = {"user": {"name": name, "password": _PASSWORD, "domain_id": "default"}}
        user = client("POST", "/v3/users", admin, body)[1]["user"]["id"]
        for place in ("one", "two"):
            granted = f"/v3/projects/{projects[place]}/users/{user}/roles/{known[role]}"
            client("PUT", granted, admin)
    return projects


class Measured:
    """One candidate, loaded in this process."""

    def __init__(self, given: Namespace) -> None:
        self._given = given
        self._other_node = OtherNode(given.password)
        self._client = Client(self._load())
        self._statements = Statements()
        self._master = self._fork_master()
        self._found: Found = defaultdict(list)
        self._requests = 0

    def _load(self) -> Any:
        sys.argv = ["keystone"]
        if self._given.child == "keyfront":
            from keyfront.gateway import application

            return application.load()
        from keystone.server import wsgi

        return wsgi.initialize_public_application()

    def run(self) -> Found:
        """Go through the phases in each round."""
        given, client = self._given, self._client
        admin = client.log_in("admin", given.password, "admin")
        users, services = self._make(admin)
        for number in range(given.rounds + 1):
            callers = [client.log_in(name, _PASSWORD, "one") for name in services]
            if not number:
                for user in users:
                    client.log_in(user, _PASSWORD, "one")
            self._yesterday()
            self._forget(users)
            with self._phase(DAY, number):
                for user in users:
                    self._ask(client.log_in, user, _PASSWORD, "one")
            with self._phase(LOGIN, number):
                tokens = [self._ask(client.log_in, user, _PASSWORD, "one") for user in users]
            with self._phase(RESCOPE, number):
                others = [self._ask(client.rescope, token, self._other) for token in tokens]
            pairs = [(caller, token) for token in (*tokens, *others) for caller in callers]
            for caller in callers:  # which services there are is known
                client.validate(caller, admin)
            with self._phase(FIRST, number):
                for caller, token in pairs:
                    self._ask(client.validate, caller, token)
            with self._phase(REPEATED, number):
                for caller, token in pairs:
                    self._ask(client.validate, caller, token)
            with self._phase(ASKED, number):
                for token in tokens:
                    self._ask(client.validate, callers[0], token, _UNKNOWN)
            elsewhere = self._other_node.tokens(users)
            with self._phase(ELSEWHERE, number):
                for token in elsewhere:
                    self._ask(client.validate, callers[0], token)
            strangers = [f"stranger-{os.urandom(4).hex()}" for _ in users]
            elsewhere = self._other_node.tokens(strangers, new=True)
            with self._phase(NEW, number):
                for token in elsewhere:
                    self._ask(client.validate, callers[0], token)
            self._fresh(callers[0], others, number)
        self._other_node.close()
        return dict(self._found)

    def _ask(self, deed: Callable[..., Any], *values: str) -> Any:
        self._requests += 1
        if self._given.changes and not self._requests % self._given.changes:
            self._change(self._requests // self._given.changes)
        return deed(*values)

    @contextmanager
    def _phase(self, name: str, number: int) -> Iterator[None]:
        gc.collect()
        self._client.cpu, self._statements.all, self._statements.writes = 0.0, 0, 0
        self._requests = 0
        profiled = self._given.profile == name and number
        if profiled:
            self._profile = getattr(self, "_profile", None) or cProfile.Profile(time.process_time)
            self._client.profile = self._profile
        yield
        self._client.profile = None
        if number:
            counts = self._statements.all, self._statements.writes
            self._found[name].append((self._requests, self._client.cpu, *counts))
        if profiled and number == self._given.rounds:
            self._tell(self._profile)

    def _tell(self, profile: cProfile.Profile) -> None:
        stats = pstats.Stats(profile, stream=sys.stderr)
        for order in ("tottime", "cumulative"):
            stats.sort_stats(order).print_stats(self._given.lines)

    def _fork_master(self) -> tuple[int, int]:
        """Fork a process that answers nothing itself; returns where to write and to read.

        For each caller and token that are written to it, it forks a worker that validates.
        """
        orders, order = os.pipe()
        result, results = os.pipe()
        if os.fork():
            os.close(orders)
            os.close(results)
            return order, result
        os.close(order)
        os.close(result)
        if self._given.child == "keyfront":
            from keyfront.common.fork import registry

            registry.install()
            registry.prepare()
        gc.collect()
        gc.freeze()
        with os.fdopen(orders, "rb") as file:
            while True:
                try:
                    asked = pickle.load(file)
                except EOFError:
                    os._exit(0)
                found = self._in_child(*asked)
                if not found:
                    os._exit(1)  # it has said why
                os.write(results, found)

    def _in_child(self, caller: str, token: str, profiled: bool) -> bytes:
        """Validate a token in a process that is forked for it; returns what that took, pickled."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            client, statements = self._client, self._statements
            client.cpu, statements.all, statements.writes = 0.0, 0, 0
            if profiled:
                client.profile = cProfile.Profile(time.process_time)
            client.validate(caller, token, _UNKNOWN)
            os.write(writer, pickle.dumps((client.cpu, statements.all, statements.writes)))
            if client.profile is not None:
                self._tell(client.profile)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            found = file.read()
        os.waitpid(pid, 0)
        return found

    def _fresh(self, caller: str, tokens: list[str], number: int) -> None:
        """Validate each token in a process of its own."""
        if not number:
            return
        order, result = self._master
        with os.fdopen(result, "rb", closefd=False) as file:
            counts = [0, 0.0, 0, 0]
            last = self._given.profile == FRESH and number == self._given.rounds
            for token in tokens:
                os.write(order, pickle.dumps((caller, token, last and token == tokens[-1])))
                one = pickle.load(file)
                counts = [counts[0] + 1, *map(sum, zip(counts[1:], one, strict=True))]
            self._found[FRESH].append(tuple(counts))  # type: ignore[arg-type]

    def _make(self, admin: str) -> tuple[list[str], list[str]]:
        """Make users and services, with roles on two projects."""
        run = os.urandom(4).hex()
        users = [f"user-{run}-{number}" for number in range(self._given.users)]
        services = [f"service-{run}-{number}" for number in range(self._given.services)]
        roles = {**dict.fromkeys(users, "member"), **dict.fromkeys(services, "service")}
        self._other = make_users(self._client, admin, roles)["two"]
        return users, services

    def _yesterday(self) -> None:
        """Have everybody been here for the last time on another day."""
        import sqlite3

        day = (datetime.now(UTC) - timedelta(1)).date().isoformat()
        with sqlite3.connect(self._given.database) as database:
            database.execute("UPDATE user SET last_active_at = ?", (day,))
        database.close()

    def _forget(self, users: list[str]) -> None:
        """End what keyfront has kept of users, as if they had last been here long ago."""
        if self._given.child != "keyfront":
            return
        import sqlite3

        from keyfront.middleware.tokens.epochs import slots
        from keyfront.middleware.tokens.invalidation.change_log import coordinators
        from keyfront.middleware.tokens.invalidation.rules import ANY, CONTENT, name_tag, tag

        tags = {ANY, CONTENT, "users", "groups", "members", "grants"}
        for name in users:
            with sqlite3.connect(self._given.database) as database:
                found = database.execute("SELECT user_id FROM local_user WHERE name = ?", (name,))
                tags |= {tag("user", found.fetchone()[0]), name_tag(name)}
            database.close()
        for coordinator in coordinators.all():
            coordinator.touch(slots(tags, coordinator.slot_count))

    def _change(self, number: int) -> None:
        """Change what no request shows, by an engine that tells of it as keystone-manage's."""
        import uuid

        import sqlalchemy as sa

        made = getattr(self, "_changing", None)
        if made is None:
            engine = sa.create_engine(self._given.url)
            tables = sa.MetaData()
            tables.reflect(engine, only=["user", "assignment", "role"])
            with engine.connect() as connection:
                role = connection.execute(sa.select(tables.tables["role"].c.id)).scalar()
            made = self._changing = engine, tables, role
        engine, tables, role = made
        before = self._statements.all, self._statements.writes
        one = uuid.uuid4().hex
        with engine.begin() as connection:
            if number % 2:
                row = {"id": one, "domain_id": "default", "enabled": True}
                connection.execute(tables.tables["user"].insert().values(**row))
            else:
                grant = {"type": "UserProject", "actor_id": one, "target_id": one}
                row = {**grant, "role_id": role, "inherited": False}
                connection.execute(tables.tables["assignment"].insert().values(**row))
        self._statements.all, self._statements.writes = before


def measure(given: Namespace) -> dict[str, Found]:
    """Return what each candidate took.

    :raises MissingPartError: memcached, pymemcache, uWSGI or Keystone is not installed
    :raises ServerError: a candidate does not answer as it should
    """
    check()
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="keystone-cpu-", dir=temporary_parent()) as folder,
        tempfile.TemporaryDirectory(prefix="keystone-cpu-", dir=memory_folder()) as shared,
        memcached() as cache,
    ):
        keystone = Keystone(Path(folder) / "state")
        comparison.say("a Keystone is made")
        keystone.make()
        database = keystone.state.path / "keystone.sqlite"
        for name in given.candidates:
            own = Path(folder) / name
            own.mkdir(mode=0o700)
            candidate = CANDIDATES[NAMES[name]]
            text = candidate.configuration(
                keystone, shared=Path(shared) / name, memcached=cache.address
            )
            plugin = f"?plugin=keyfront&keyfront_path={Path(shared) / name}"
            url = f"sqlite:///{database}{plugin if name == 'keyfront' else ''}"
            arguments = [
                *("--child", name, "--database", str(database), "--url", url),
                *("--rounds", str(given.rounds), "--users", str(given.users)),
                *("--services", str(given.services), "--changes", str(given.changes)),
                *("--profile", given.profile or "", "--lines", str(given.lines)),
            ]
            comparison.say(f"{candidate.label} is asked")
            done = subprocess.run(
                [sys.executable, "-m", _MODULE, *arguments],
                env={
                    **os.environ,
                    **keystone.configured(own, text + EXTRA + given.extra.replace("\\n", "\n")),
                    "KEYFRONT_PASSWORD": keystone.password,
                },
                stdout=subprocess.PIPE,
                check=False,
            )
            if done.returncode:
                raise ServerError(f"{candidate.label} ended with {done.returncode}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, Found]) -> str:
    """Return the result as a table of documents."""
    lines = [f"| ms of CPU (statements) | {' | '.join(PHASES)} |", "|---|" + "---:|" * len(PHASES)]
    for name, phases in found.items():
        cells = []
        for phase in PHASES:
            rounds = phases[phase]
            cpu = 1000 * min(cpu / requests for requests, cpu, _, _ in rounds)
            requests = sum(one[0] for one in rounds)
            every, writes = (sum(one[place] for one in rounds) / requests for place in (2, 3))
            writing = f", {writes:.3g} writing" if writes else ""
            cells.append(f"{cpu:.3g} ({every:.3g}{writing})")
        lines.append(f"| {CANDIDATES[NAMES[name]].label} | {' | '.join(cells)} |")
    lines.append(f"\nThe hash of the password takes {hash_milliseconds():.2g} ms of a login.")
    return "\n".join(lines)


def _candidates(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= NAMES.keys():
        raise ValueError(text)
    return names


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; 2 if it cannot be measured."""
    parser: ArgumentParser = comparison.parser(__doc__)
    for option, default, text in (
        ("--rounds", 5, "besides the first"),
        ("--users", 6, "who log in"),
        ("--services", 5, "that validate each token"),
    ):
        parser.add_argument(
            option,
            type=comparison.at_least_one,
            default=default,
            help=f"{text} (default {default})",
        )
    parser.add_argument("--changes", type=int, default=0, help="requests to a change of others")
    parser.add_argument("--candidates", type=_candidates, default=list(NAMES))
    parser.add_argument("--profile", help="a phase whose functions are told")
    parser.add_argument("--lines", type=int, default=60, help="of these")
    parser.add_argument("--extra", default="", help="more of keystone.conf")
    parser.add_argument("--child", choices=[*NAMES, "other"])
    parser.add_argument("--database")
    parser.add_argument("--url")
    given = parser.parse_args(arguments)
    if given.child:
        given.password = os.environ.pop("KEYFRONT_PASSWORD")
        if given.child == "other":
            OtherNode.serve(given.password)
            return 0
        print(json.dumps(Measured(given).run()))
        return 0
    return comparison.finish("keystone_cpu", lambda: measure(given), table)


if __name__ == "__main__":
    sys.exit(main())

"""What a cloud asks of Keystone: logins, first validations, repeated ones, re-scopes.

    python -m keyfront.benchmarks.compare.cloud_mix [--rounds 3] [--users 10] [--services 5]
        [--changes 10] [--database mariadb] [--database-delay 1] [--without-stock]

Makes a Keystone in a temporary folder, on SQLite or a MariaDB of its own, and serves it by uWSGI, 2
processes, in three candidates: stock Keystone as it comes, stock Keystone with memcached behind its
own caches, and keyfront's packaged pipeline with nothing else. In each round each candidate is
asked, with four connections at once, each new for each request:

    logins        each user logs in to a project
    first         each service validates each of these tokens for the first time
    repeated      and three times more
    re-scopes     each user exchanges his token for one of another project

and these new tokens are validated likewise, by every service once. The next round has the reverse
order of candidates. The first round fills caches and is not counted: a cloud has been up for long.
Services ask with tokens of their own. Passwords are hashed as cheaply as bcrypt does
(``password_hash_rounds = 4``): what a hash costs is the same for all and hides the rest.

With ``--changes N`` another process of the cloud changes N times a second what none of these
requests shows: it makes a user, and grants him a role on a project of his own, directly in the
database, as ``keystone-manage`` would. keyfront is told of that by the word in its URL.

With ``--database-delay MS`` each round trip to MariaDB takes so many milliseconds more, as over a
network, by a proxy before it. Keystone and all candidates have the same one.

What keyfront keeps ends after ``ttl`` seconds, 30 by default. Where stock Keystone without
memcached takes longer than that for its part of a round, keyfront finds nothing in its caches when
it is its turn: with ``--without-stock`` that candidate is left out.

Rates are medians over the rounds; ``times`` is the median of the ratios to stock Keystone with
memcached, round by round. Everything is on the same cores, the asking as well.

Below the first table stands the rate of first validations as a part of that of repeated ones: the
median over the rounds.

The second table is of CPU time: that of uWSGI and its workers, user and system, divided by the
requests of all rounds, and in brackets its part of what stock Keystone with memcached takes. It
hardly differs with what else the machine does. The hash of a password is in it, memcached is not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keyfront.errors import ServerError

from ..lineups.keystone import PROJECTS, VALIDATION, Keystone, ask, log_in, login
from ..lineups.lineup import memory_folder
from ..lineups.uwsgi import Server
from . import paired, token_servers
from .paired import say
from .token_servers import CANDIDATES, DATABASES, Servers, check

NAMES = ("keystone", "memcached", "keyfront")
PHASES = ("logins", "first", "repeated", "re-scopes")
AGAINST = "memcached"
CLIENTS = 4
REPEATED = 3
PASSWORD = "secret of a throw-away user"
#: The cache's own ``ttl``, in seconds, as by default: other benchmarks measure nothing but hits.
TTL = 30
#: More of keystone.conf, for all.
EXTRA = f"""
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
ttl = {TTL}
"""


@dataclass(frozen=True)
class Phase:
    """A phase of one candidate in one round."""

    #: How many requests.
    count: int
    #: In how many seconds.
    seconds: float
    #: And how many of the server's CPU.
    cpu: float

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.count + other.count, self.seconds + other.seconds, self.cpu + other.cpu
        )


#: Of one candidate in one round, by phase.
Sample = dict[str, Phase]


class Cloud:
    """Users and services of a Keystone.

    :param url: the URL of the server by which they are made
    :param keystone: the Keystone whose users they are
    :param users: how many
    :param services: how many, each with a token of its own
    :raises ServerError: one cannot be made
    """

    def __init__(self, url: str, keystone: Keystone, *, users: int, services: int) -> None:
        self.users = [f"user{number}" for number in range(users)]
        self.services = [f"service{number}" for number in range(services)]
        admin = keystone.token(url)
        roles = {r["name"]: r["id"] for r in ask(url, "GET", "/v3/roles", admin)["roles"]}
        projects = {}
        for name in ("one", "other", "services"):
            made = ask(url, "POST", PROJECTS, admin, {"project": {"name": name}})
            projects[name] = made["project"]["id"]
        self._other = projects["other"]
        for name in [*self.users, *self.services]:
            user = {"user": {"name": name, "password": PASSWORD}}
            made = ask(url, "POST", "/v3/users", admin, user)["user"]["id"]
            in_cloud = name in self.users
            role = roles["member" if in_cloud else "admin"]
            for project in ("one", "other") if in_cloud else ("services",):
                ask(url, "PUT", f"{PROJECTS}/{projects[project]}/users/{made}/roles/{role}", admin)
        # The first login of a day writes, and of two at once stock Keystone on SQLite refuses one.
        for name in [*self.users, *self.services]:
            log_in(url, self._login(name))

    def _login(self, name: str) -> dict[str, Any]:
        return login(name, PASSWORD, "one" if name in self.users else "services")

    def ask_everything(self, server: Server) -> Sample:
        """Go through the mix once.

        :param server: that is asked
        :raises ServerError: something was not answered as it should
        """
        url = server.url
        callers = [log_in(url, self._login(name)) for name in self.services]
        with ThreadPoolExecutor(CLIENTS) as pool:

            def timed(deed: Callable[..., Any], asked: Sequence[Any]) -> tuple[list[Any], Phase]:
                cpu, begun = server.cpu(), time.monotonic()
                found = list(pool.map(lambda values: deed(*values), asked))
                took = time.monotonic() - begun
                return found, Phase(len(asked), took, server.cpu() - cpu)

            def validate(caller: str, token: str) -> None:
                found = ask(url, "GET", VALIDATION, caller, subject=token)
                if not found["token"]["roles"]:
                    raise ServerError("a token without roles")

            def rescope(token: str) -> str:
                identity = {"methods": ["token"], "token": {"id": token}}
                scope = {"project": {"id": self._other}}
                return log_in(url, {"auth": {"identity": identity, "scope": scope}})

            logins = [(url, self._login(name)) for name in self.users]
            tokens, login_phase = timed(log_in, logins)
            pairs = [(caller, token) for token in tokens for caller in callers]
            _, first_phase = timed(validate, pairs)
            _, repeated_phase = timed(validate, pairs * REPEATED)
            others, rescope_phase = timed(rescope, [(token,) for token in tokens])
            again = [(caller, token) for token in others for caller in callers]
            _, again_phase = timed(validate, again)
        return {
            "logins": login_phase,
            "first": first_phase + again_phase,
            "repeated": repeated_phase,
            "re-scopes": rescope_phase,
        }


@contextmanager
def changed(url: str, each_second: float) -> Iterator[threading.Thread]:
    """Change what no request of the mix shows, until the block ends.

    :param url: SQLAlchemy's, of Keystone's database
    :param each_second: how many changes; 0: none
    :returns: the thread that does it
    :raises ServerError: a change was refused
    """
    import sqlalchemy as sa

    ended = threading.Event()
    failed: list[Exception] = []
    engine = sa.create_engine(url)
    tables = sa.MetaData()

    def change() -> None:
        user, assignment = tables.tables["user"], tables.tables["assignment"]
        with engine.connect() as connection:
            role = connection.execute(sa.select(tables.tables["role"].c.id)).scalar()
        number, one = 0, ""
        while not ended.wait(1 / each_second):
            with engine.begin() as connection:
                if number % 2:
                    grant = {"type": "UserProject", "actor_id": one, "target_id": one}
                    row = {**grant, "role_id": role, "inherited": False}
                    connection.execute(assignment.insert().values(**row))
                else:
                    one = uuid.uuid4().hex
                    row = {"id": one, "domain_id": "default", "enabled": True}
                    row["created_at"] = datetime.now(UTC).replace(tzinfo=None)
                    connection.execute(user.insert().values(**row))
            number += 1

    def run() -> None:
        try:
            change()
        except sa.exc.SQLAlchemyError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    if each_second:
        tables.reflect(engine, only=["user", "assignment", "role"])
        thread.start()
    try:
        yield thread
    finally:
        ended.set()
        if each_second:
            thread.join()
        engine.dispose()
    if failed:
        raise ServerError(f"the database was not changed: {failed[0]}")


def measure(
    rounds: int,
    users: int,
    services: int,
    changes: float = 0,
    *,
    database: str = DATABASES[0],
    delay: float = 0,
    names: Sequence[str] = NAMES,
) -> dict[str, list[Sample]]:
    """Go through the mix with each candidate in each round, after one that is not counted.

    :param changes: how many a second there are of what is not asked for
    :param database: one of ``DATABASES``
    :param delay: seconds that each round trip to it takes, besides its own
    :param names: the candidates; ``AGAINST`` among them
    :raises MissingPartError: memcached, pymemcache, uWSGI, MariaDB or Keystone is not installed
    :raises ServerError: a server did not start or does not answer as it should
    """
    check()
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="cloud-mix-") as folder,
        tempfile.TemporaryDirectory(prefix="cloud-mix-", dir=memory_folder()) as shared,
        tempfile.TemporaryDirectory(prefix="cloud-mix-") as data,
        token_servers.database(database, Path(data), delay=delay) as database_url,
    ):
        servers = Servers(Path(folder), Path(shared), extra=EXTRA, url=database_url)
        say("a Keystone and its servers start")
        with servers.running(names):
            say(f"{users} users and {services} services are made")
            cloud = Cloud(
                servers[AGAINST].url, servers.keystone, users=users, services=services
            )
            for number in range(rounds + 1):
                took = []
                for name in reversed(names) if number % 2 else names:
                    with changed(servers.database_url(name), changes):
                        sample = cloud.ask_everything(servers[name])
                    if number:
                        samples[name].append(sample)
                    took.append(f"{name} {whole(sample):.1f} s")
                what = f"round {number} of {rounds}" if number else "caches are filled"
                say(f"{what}: {', '.join(took)}")
    return samples


def whole(sample: Sample) -> float:
    """Return how many seconds the mix took."""
    return sum(phase.seconds for phase in sample.values())


def rate(sample: Sample, phase: str) -> float:
    """Return the requests a second of a phase."""
    return sample[phase].count / sample[phase].seconds


def first_of_repeated(sample: Sample) -> float:
    """Return the rate of first validations as a part of that of repeated ones."""
    return rate(sample, "first") / rate(sample, "repeated")


def cpu(samples: Sequence[Sample], phase: str | None = None) -> float:
    """Return the milliseconds of CPU of a request of a phase, or of the whole mix."""
    of = [sample[name] for sample in samples for name in ((phase,) if phase else PHASES)]
    return 1000 * sum(one.cpu for one in of) / sum(one.count for one in of)


def table(samples: dict[str, list[Sample]]) -> str:
    """Return the result as two tables of documents."""
    lines = [
        f"| | {' | '.join(f'{phase}/s' for phase in PHASES)} | whole |",
        "|---|" + "---:|" * (len(PHASES) + 1),
    ]
    for name, own in samples.items():
        cells = []
        for phase in PHASES:
            middle = statistics.median(rate(sample, phase) for sample in own)
            times = statistics.median(
                rate(sample, phase) / rate(other, phase)
                for sample, other in zip(own, samples[AGAINST], strict=True)
            )
            cells.append(f"{middle:.0f} ({times:.2g} times)")
        times = statistics.median(
            whole(other) / whole(sample)
            for sample, other in zip(own, samples[AGAINST], strict=True)
        )
        seconds = statistics.median(map(whole, own))
        cells.append(f"{seconds:.1f} s ({times:.2g} times as fast)")
        lines.append(f"| {CANDIDATES[name].label} | {' | '.join(cells)} |")
    parts = [
        f"{CANDIDATES[name].label} {statistics.median(map(first_of_repeated, own)):.2g}"
        for name, own in samples.items()
    ]
    lines += ["", f"First validations as a part of repeated ones: {', '.join(parts)}"]
    lines += ["", f"| CPU of a request | {' | '.join(PHASES)} | whole |"]
    lines.append("|---|" + "---:|" * (len(PHASES) + 1))
    for name, own in samples.items():
        cells = []
        for one in (*PHASES, None):
            took, other = cpu(own, one), cpu(samples[AGAINST], one)
            # What is too little for the clock is nothing.
            cells.append(f"{took:.2f} ms ({took / other:.2g})" if other else f"{took:.2f} ms")
        lines.append(f"| {CANDIDATES[name].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_world(parser: ArgumentParser) -> None:
    """Add the options of what is around the servers."""
    parser.add_argument(
        "--changes", type=float, default=0, help="changes of other things a second (default 0)"
    )
    parser.add_argument(
        "--database", choices=DATABASES, default=DATABASES[0], help="default %(default)s"
    )
    parser.add_argument(
        "--database-delay",
        type=float,
        default=0,
        metavar="MS",
        help="more milliseconds for each round trip to it (MariaDB; default 0)",
    )


def check_world(parser: ArgumentParser, given: Namespace) -> None:
    """End with an error if these options make no sense."""
    if not 0 <= given.changes <= 1000:
        parser.error(f"--changes {given.changes:g} is not between 0 and 1000")
    if not 0 <= given.database_delay <= 1000:
        parser.error(f"--database-delay {given.database_delay:g} is not between 0 and 1000")
    if given.database_delay and given.database == "sqlite":
        parser.error("--database-delay needs --database mariadb: SQLite is asked without a network")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; 2 if it cannot be measured."""
    parser = paired.parser(__doc__)
    for option, default, text in (
        ("--rounds", 3, "besides the first"),
        ("--users", 10, "who log in"),
        ("--services", 5, "that validate each token"),
    ):
        parser.add_argument(
            option, type=paired.at_least_one, default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--without-stock",
        action="store_true",
        help=f"leave out stock Keystone without memcached, so that a round takes less than {TTL} s",
    )
    add_world(parser)
    given = parser.parse_args(arguments)
    check_world(parser, given)
    paired.ends_in_order()
    return paired.finish(
        "cloud_mix",
        lambda: measure(
            given.rounds,
            given.users,
            given.services,
            given.changes,
            database=given.database,
            delay=given.database_delay / 1000,
            names=NAMES[1:] if given.without_stock else NAMES,
        ),
        table,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measures reads of an unchanged cloud: projects, users and role assignments.

    python -m keyfront.benchmarks.compare.listings [--rounds 3] [--users 30] [--requests 100]
        [--changes 10] [--database mariadb] [--database-delay 1]

Makes a Keystone in a temporary folder and serves it by uWSGI, 2 processes, in three candidates:
stock Keystone with memcached behind its own caches, keyfront's packaged pipeline as it is by
default, and the same without these routes in ``[keyfront_token_cache] routes``. In each round each
candidate is asked by an administrator, with four connections at once, each new for each request:

    GET /v3/projects            so often
    GET /v3/users/{id}          of one user after the other
    GET /v3/role_assignments    so often

The next round has the reverse order of candidates; the first one fills caches and is not counted.
With ``--changes N`` another process makes users and grants meanwhile, as in ``cloud_mix``: what
shows these has to be read again. ``--database`` and ``--database-delay`` are as there.

Rates are medians over the rounds, with the median of the ratios to stock Keystone with memcached,
round by round.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from keyfront.cli.credentials import Credentials
from keyfront.common.unix_sockets import temporary_parent

from ..lineups.keystone import PROJECTS, ask
from ..lineups.lineup import memory_folder
from ..load import cloud_users
from ..load.cloud_client import Client
from ..load.cloud_round import Settings
from . import cloud_mix, comparison, token_servers
from .cloud_mix import AGAINST, changed
from .comparison import say
from .ratios import Spread, by_round
from .token_servers import CANDIDATES, DATABASES, Servers, check

NAMES = (AGAINST, "keyfront", "keyfront no routes")
PATHS = (PROJECTS, "/v3/users/{id}", "/v3/role_assignments")

#: The answers a second of one candidate in one round, by path.
Sample = dict[str, float]


def ask_everything(url: str, token: str, users: list[str], requests: int) -> Sample:
    """Read everything so often.

    :param url: the server's URL, without a path
    :param token: an administrator's token
    :param users: the identifiers of the users that are asked for
    :param requests: number of requests for each path
    :raises ServerError: something was not answered as it should
    """
    found = {}
    with ThreadPoolExecutor(Settings().clients) as pool:
        for path in PATHS:
            one = itertools.cycle(users)
            paths = [path.format(id=next(one)) for _ in range(requests)]
            begun = time.monotonic()
            for _ in pool.map(lambda asked: ask(url, "GET", asked, token), paths):
                pass
            found[path] = requests / (time.monotonic() - begun)
    return found


def measure(
    rounds: int,
    users: int,
    requests: int,
    changes: float = 0,
    *,
    database: str = DATABASES[0],
    delay: float = 0,
) -> dict[str, list[Sample]]:
    """Read everything of each candidate in each round, after one that is not counted.

    :param users: number of users in the cloud
    :param changes: changes per second of other rows
    :param database: one of ``DATABASES``
    :param delay: seconds that each round trip to it takes, besides its own
    :raises MissingPartError: memcached, pymemcache, uWSGI, MariaDB or Keystone is not installed
    :raises ServerError: a server did not start or does not answer as it should
    """
    check()
    samples: dict[str, list[Sample]] = {name: [] for name in NAMES}
    with (
        tempfile.TemporaryDirectory(prefix="listings-", dir=temporary_parent()) as folder,
        tempfile.TemporaryDirectory(prefix="listings-", dir=memory_folder()) as shared,
        tempfile.TemporaryDirectory(prefix="listings-", dir=temporary_parent()) as data,
        token_servers.database(database, Path(data), delay=delay) as url,
    ):
        servers = Servers(Path(folder), Path(shared), extra=cloud_mix.EXTRA, url=url)
        say("a Keystone and its servers start")
        with servers.running(NAMES):
            say(f"{users} users are made")
            stock = servers[AGAINST].url
            admin = Credentials(f"{stock}/v3", servers.keystone.login()["auth"])
            with closing(Client(admin, timeout=Settings().timeout)) as client:
                cloud_users.Domain(client).make(users, 1)
            token = servers.keystone.token(stock)
            found = [user["id"] for user in ask(stock, "GET", "/v3/users", token)["users"]]
            for number in range(rounds + 1):
                for name in reversed(NAMES) if number % 2 else NAMES:
                    with changed(servers.database_url(name), changes):
                        sample = ask_everything(servers[name].url, token, found, requests)
                    if number:
                        samples[name].append(sample)
                say(f"round {number} of {rounds}" if number else "caches are filled")
    return samples


def table(samples: dict[str, list[Sample]]) -> str:
    """Return the result as a table of documents."""
    lines = [f"| | {' | '.join(PATHS)} |", "|---|" + "---:|" * len(PATHS)]
    for name, own in samples.items():
        cells = []
        for path in PATHS:
            rate = statistics.median(sample[path] for sample in own)
            against = [sample[path] for sample in samples[AGAINST]]
            times = Spread.of(by_round([sample[path] for sample in own], against))
            cells.append(f"{rate:.0f} ({times.median:.2g} times)")
        lines.append(f"| {CANDIDATES[name].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _add_world(parser: ArgumentParser) -> None:
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


def _check_world(parser: ArgumentParser, given: Namespace) -> None:
    """End with an error if these options make no sense."""
    if not 0 <= given.changes <= 1000:
        parser.error(f"--changes {given.changes:g} is not between 0 and 1000")
    if not 0 <= given.database_delay <= 1000:
        parser.error(f"--database-delay {given.database_delay:g} is not between 0 and 1000")
    if given.database_delay and given.database == "sqlite":
        parser.error("--database-delay needs --database mariadb: SQLite is asked without a network")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    for option, default, text in (
        ("--rounds", 3, "besides the first"),
        ("--users", 30, "of the cloud"),
        ("--requests", 100, "of each kind in a round"),
    ):
        parser.add_argument(
            option,
            type=comparison.at_least_one,
            default=default,
            help=f"{text} (default {default})",
        )
    _add_world(parser)
    given = parser.parse_args(arguments)
    _check_world(parser, given)
    comparison.ends_in_order()
    return comparison.finish(
        "listings",
        lambda: measure(
            given.rounds,
            given.users,
            given.requests,
            given.changes,
            database=given.database,
            delay=given.database_delay / 1000,
        ),
        table,
    )


if __name__ == "__main__":
    sys.exit(main())

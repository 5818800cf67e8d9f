"""Reads of an unchanged cloud: projects, a user and role assignments, beside memcached.

Makes a Keystone on SQLite in a temporary folder and serves it by uWSGI, 2 processes: stock Keystone
with memcached behind its own caches, and keyfront as it is by default. In each round an
administrator asks each of them with four connections at once, each new for each request:

    GET /v3/projects            so often
    GET /v3/users/{id}          of one user after the other
    GET /v3/role_assignments    so often

A first round fills caches and is not counted. With ``--changes`` another process makes ten users
and grants a second meanwhile, as in ``cloud_mix``: what shows these has to be read again.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from keyfront.cli.credentials import Credentials

from ..lineups.keystone import PROJECTS, ask
from ..load import cloud_users
from ..load.arguments import say
from ..load.cloud_client import Client
from ..load.cloud_round import Settings
from ..results import Cell, Table
from . import cloud_mix, comparison
from .cloud_mix import AGAINST, changed
from .comparison import Comparison, Report, in_rounds
from .ratios import Spread, by_round
from .token_servers import CANDIDATES, serving

NAMES = (AGAINST, "keyfront")
PATHS = (PROJECTS, "/v3/users/{id}", "/v3/role_assignments")

#: Changes a second with ``--changes``.
CHANGES = 10

#: The answers a second of one candidate in one round, by path.
Sample = dict[str, float]


def ask_everything(url: str, token: str, users: list[str], requests: int) -> Sample:
    """Read everything so often.

    :param url: the server's URL, without a path
    :param token: an administrator's token
    :param users: the identifiers of the users that are asked for
    :param requests: number of requests for each path
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


def measure(options: Namespace) -> dict[str, list[Sample]]:
    """Read everything of each candidate in each round, after one that is not counted."""
    say("a Keystone and its servers start")
    with serving(NAMES, extra=cloud_mix.EXTRA) as servers:
        stock = servers[AGAINST].url
        admin = Credentials(f"{stock}/v3", servers.keystone.login()["auth"])
        with closing(Client(admin, timeout=Settings().timeout)) as client:
            cloud_users.Domain(client).make(options.users, 1)
        token = servers.keystone.token(stock)
        users = [user["id"] for user in ask(stock, "GET", "/v3/users", token)["users"]]

        def once(name: str) -> Sample:
            with changed(servers.database_url(name), CHANGES if options.changes else 0):
                return ask_everything(servers[name].url, token, users, options.requests)

        return in_rounds(NAMES, options.rounds, once, warm=1)


def report(samples: dict[str, list[Sample]]) -> Report:
    """Return the rates, with the ratios to stock Keystone with memcached, round by round."""
    rows: list[list[Cell]] = []
    for path in PATHS:
        rates = {name: [sample[path] for sample in own] for name, own in samples.items()}
        times = Spread.of(by_round(rates[NAMES[1]], rates[AGAINST]))
        middle = (f"{statistics.median(rates[name]):.0f}" for name in NAMES)
        rows.append([path, *middle, times.text(1)])
    columns = ["a second", *(CANDIDATES[name].label for name in NAMES), "times"]
    return Report([Table(name="reads", columns=columns, rows=rows)])


COMPARISON = Comparison(
    title="Reads of an unchanged cloud",
    measure=lambda options: report(measure(options)),
    numbers=(
        ("--rounds", 3, "besides the first"),
        ("--users", 30, "of the cloud"),
        ("--requests", 100, "of each kind in a round"),
    ),
    flags=(("--changes", f"{CHANGES} changes of other things a second"),),
    distributions=("keystone", "uWSGI", "pyuwsgi", "pymemcache"),
    programs=("memcached",),
)
main = partial(comparison.main, "listings", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

"""What a cloud asks of Keystone: logins, first validations, repeated ones, re-scopes.

    python -m keyfront.benchmarks.compare.cloud_mix [--rounds 3] [--users 10] [--services 5]

Makes a Keystone on SQLite in a temporary folder and serves it by uWSGI, 2 processes, in three
candidates: stock Keystone as it comes, stock Keystone with memcached behind its own caches, and
keyfront's packaged pipeline with nothing else. In each round each candidate is asked, with four
connections at once, each new for each request:

    logins        each user logs in to a project
    first         each service validates each of these tokens for the first time
    repeated      and three times more
    re-scopes     each user exchanges his token for one of another project

and these new tokens are validated likewise, by every service once. The next round has the reverse
order of candidates. The first round fills caches and is not counted: a cloud has been up for long.
Services ask with tokens of their own. Passwords are hashed as cheaply as bcrypt does
(``password_hash_rounds = 4``): what a hash costs is the same for all and hides the rest.

Rates are medians over the rounds; ``times`` is the median of the ratios to stock Keystone with
memcached, round by round. Everything is on the same cores, the asking as well.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keyfront.errors import ServerError

from ..lineups.keystone import PROJECTS, VALIDATION, Keystone, ask, log_in, login
from ..lineups.lineup import memory_folder
from . import paired
from .paired import say
from .token_servers import CANDIDATES, Servers, check

NAMES = ("keystone", "memcached", "keyfront")
PHASES = ("logins", "first", "repeated", "re-scopes")
AGAINST = "memcached"
CLIENTS = 4
REPEATED = 3
PASSWORD = "secret of a throw-away user"
# The cache's own ttl, as it is by default: other benchmarks measure nothing but hits.
_EXTRA = """
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
ttl = 30
"""

#: Of one candidate in one round: how many requests of each phase, in how many seconds.
Sample = dict[str, tuple[int, float]]


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

    def ask_everything(self, url: str) -> Sample:
        """Go through the mix once.

        :raises ServerError: something was not answered as it should
        """
        callers = [log_in(url, self._login(name)) for name in self.services]
        with ThreadPoolExecutor(CLIENTS) as pool:

            def timed(deed: Callable[..., Any], asked: Sequence[Any]) -> tuple[list[Any], float]:
                begun = time.monotonic()
                found = list(pool.map(lambda values: deed(*values), asked))
                return found, time.monotonic() - begun

            def validate(caller: str, token: str) -> None:
                found = ask(url, "GET", VALIDATION, caller, subject=token)
                if not found["token"]["roles"]:
                    raise ServerError("a token without roles")

            def rescope(token: str) -> str:
                identity = {"methods": ["token"], "token": {"id": token}}
                scope = {"project": {"id": self._other}}
                return log_in(url, {"auth": {"identity": identity, "scope": scope}})

            logins = [(url, self._login(name)) for name in self.users]
            tokens, login_time = timed(log_in, logins)
            pairs = [(caller, token) for token in tokens for caller in callers]
            _, first_time = timed(validate, pairs)
            _, repeated_time = timed(validate, pairs * REPEATED)
            others, rescope_time = timed(rescope, [(token,) for token in tokens])
            again = [(caller, token) for token in others for caller in callers]
            _, again_time = timed(validate, again)
        return {
            "logins": (len(logins), login_time),
            "first": (len(pairs) + len(again), first_time + again_time),
            "repeated": (len(pairs) * REPEATED, repeated_time),
            "re-scopes": (len(others), rescope_time),
        }


def measure(rounds: int, users: int, services: int) -> dict[str, list[Sample]]:
    """Go through the mix with each candidate in each round, after one that is not counted.

    :raises MissingPartError: memcached, pymemcache, uWSGI or Keystone is not installed
    :raises ServerError: a server did not start or does not answer as it should
    """
    check()
    samples: dict[str, list[Sample]] = {name: [] for name in NAMES}
    with (
        tempfile.TemporaryDirectory(prefix="cloud-mix-") as folder,
        tempfile.TemporaryDirectory(prefix="cloud-mix-", dir=memory_folder()) as shared,
    ):
        servers = Servers(Path(folder), Path(shared), extra=_EXTRA)
        say("a Keystone and its servers start")
        with servers.running(NAMES):
            say(f"{users} users and {services} services are made")
            cloud = Cloud(
                servers["keystone"].url, servers.keystone, users=users, services=services
            )
            for number in range(rounds + 1):
                took = []
                for name in reversed(NAMES) if number % 2 else NAMES:
                    sample = cloud.ask_everything(servers[name].url)
                    if number:
                        samples[name].append(sample)
                    took.append(f"{name} {whole(sample):.1f} s")
                what = f"round {number} of {rounds}" if number else "caches are filled"
                say(f"{what}: {', '.join(took)}")
    return samples


def whole(sample: Sample) -> float:
    """Return how many seconds the mix took."""
    return sum(seconds for _, seconds in sample.values())


def rate(sample: Sample, phase: str) -> float:
    """Return the requests a second of a phase."""
    count, seconds = sample[phase]
    return count / seconds


def table(samples: dict[str, list[Sample]]) -> str:
    """Return the result as a table of documents."""
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
    return "\n".join(lines)


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
    given = parser.parse_args(arguments)
    paired.ends_in_order()
    return paired.finish(
        "cloud_mix", lambda: measure(given.rounds, given.users, given.services), table
    )


if __name__ == "__main__":
    sys.exit(main())

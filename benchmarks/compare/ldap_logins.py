"""The time of 500 password tokens from Keystone with its users in LDAP, by what keeps connections.

    python -m keyfront.benchmarks.compare.ldap_logins [--tokens 500] [--rounds 5] [--quick]

Repeats the experiment that made Keystone's pools known (mattfischer.com/blog/archives/624: one
user, 500 tokens in a row, ldaps) with one user and with 500, by

    unpooled    the stock driver, [ldap] use_pool = false
    ldappool    the stock driver, use_pool and use_auth_pool
    keyfront    the keyfront_ldap driver, with the same two options

on a slapd with LDAPS, behind a proxy that adds 0, 1 or 10 ms to each *round trip*, half of it each
way. Keystone is one process with SQLite; it is asked in the process, without a web server. Tokens
are for a project, by the user's name, from users who have logged in before. Connects, BINDs and
searches per token are counted in slapd's log.

Keystone's own caches are off by default, as they were in the experiment. ``--cache request``
leaves them as Keystone now comes: it remembers within one request. With ``--cache memory`` it
remembers between requests, too, and hardly asks a directory but for the BIND. What Keystone itself
takes in each case is told by the tokens of a user in SQL whose password is cheap to check.

Then the same at 50 ms in a process patched by gevent, all logins at once: 200 for keyfront. The
stock driver blocks the process in C, so its logins follow each other however many there are;
fewer are enough to find its rate (``--stock-logins``). What Keystone computes for a token is the
limit there, so the drivers alone are asked, too: to find a user and check the password.

The tokens of a case are divided over the rounds; every other round goes in the reverse order. A
ratio is taken in each round; its median is printed, with the lowest and the highest. Before each
case there is a login that is not counted, so that what is measured is a worker that runs.

Ends with status 1 if a goal was missed: see ``goals.py``. What Keystone computes is in all times,
so a slow or busy machine makes all ratios smaller.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from keyfront.common import programs
from keyfront.errors import OptionError

from ..worlds import slapd as directory
from ..worlds.fault_proxy import ProxyProcess, proxy_process
from . import command, ldap_report
from .ldap_keystones import CACHES, Keystones, Server, local_login, login
from .ldap_report import Settings
from .ldap_samples import CASES, ONE, Case, Sample, Samples, judge

TOKENS = 500
ROUNDS = 5
LOGINS = 200
STOCK_LOGINS = 20
QUICK_TOKENS = 20
QUICK_ROUNDS = 2
# In how many of the rounds, at most: one takes a minute.
ROUNDS_AT_ONCE = 3


def say(text: str) -> None:
    """A line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """All that runs for one measurement.

    :param folder: a folder of this user only; the caller deletes it
    """

    def __init__(
        self, settings: Settings, slapd: directory.Slapd, proxy: ProxyProcess, folder: Path
    ) -> None:
        self.settings = settings
        self.cases = {name: case for name, case in CASES.items() if settings.only in name}
        self.users = max(settings.tokens, settings.logins) + 1
        self.slapd = slapd
        self.proxy = proxy
        self.keystones = Keystones(
            folder, slapd, proxy.port, users=self.users, cache=settings.cache
        )

    def measure(self) -> dict[str, list[Sample]]:
        """Measure every case in each round."""
        settings = self.settings
        samples: dict[str, list[Sample]] = {name: [] for name in self.cases}
        names = list(dict.fromkeys(case.candidate for case in self.cases.values()))
        with self.keystones.running(names) as running:
            for number in range(settings.rounds):
                rates = []
                for name in reversed(self.cases) if number % 2 else self.cases:
                    case = self.cases[name]
                    if case.at_once and number >= ROUNDS_AT_ONCE:
                        continue
                    sample = self.once(running[case.candidate], case, number)
                    samples[name].append(sample)
                    rates.append(f"{name}: {1000 / sample.rate:.0f}")
                say(f"round {number + 1} of {settings.rounds}, ms per token: {'; '.join(rates)}")
        return samples

    def once(self, keystone: Server, case: Case, number: int) -> Sample:
        """Measure one case in one round."""
        who = self._users(case, number)
        self.proxy.delay(case.latency / 1000)
        local = case.candidate == "sql"
        # a worker that runs: its connection is open, nobody of the measured ones is on it
        keystone.logins([local_login() if local else login(self.users - 1)])
        mark = self.slapd.mark()
        if case.driver:
            seconds, cpu = keystone.authenticate(who, at_once=case.at_once)
        else:
            bodies = [local_login() if local else login(one) for one in who]
            seconds, cpu = keystone.logins(bodies, at_once=case.at_once)
        counts = self.slapd.counts(mark)
        uneven = sum(counts.bound[directory.user_dn(one)] != who.count(one) for one in set(who))
        return Sample(
            len(who), seconds, cpu, counts.connects, counts.binds, counts.searches, uneven
        )

    def _users(self, case: Case, number: int) -> list[int]:
        settings = self.settings
        if case.at_once:
            stock = not case.candidate.startswith("keyfront")
            return list(range(settings.stock_logins if stock else settings.logins))
        # what remains is spread over the first rounds
        each, more = divmod(settings.tokens, settings.rounds)
        first = number * each + min(number, more)
        whole = each + (number < more)
        return [0] * whole if case.users == ONE else list(range(first, first + whole))


def measure(settings: Settings) -> dict[str, list[Sample]]:
    """Set up, measure, and clear away.

    :raises MissingPartError: slapd, Keystone, gevent or another part is not installed
    :raises ServerError: a server did not start, or a login failed
    """
    directory.slapd_program()
    programs.require_module("gevent", "gevent")
    with tempfile.TemporaryDirectory(prefix="ldap-logins-") as name:
        folder = Path(name)
        for one in ("slapd", "keystones"):
            folder.joinpath(one).mkdir()
        users = max(settings.tokens, settings.logins) + 1
        with (
            directory.slapd(folder / "slapd", users) as slapd,
            proxy_process(slapd.port) as proxy,
        ):
            bench = Bench(settings, slapd, proxy, folder / "keystones")
            say(f"a Keystone is made, and each of {users} users logs in")
            bench.keystones.prepare()
            return bench.measure()


def _settings(arguments: list[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, meaning in (
        ("--tokens", f"of each case, in all (default {TOKENS})"),
        ("--rounds", f"that they are divided over (default {ROUNDS})"),
        ("--logins", f"at once, of keyfront, in each round (default {LOGINS})"),
        ("--stock-logins", f"the same of the stock driver (default {STOCK_LOGINS})"),
    ):
        parser.add_argument(name, type=command.at_least_one, metavar="N", help=meaning)
    parser.add_argument(
        "--cache", choices=CACHES, default="off", help="Keystone's own caches (default off)"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='cases with this in their names, e.g. ", 10 ms"'
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_TOKENS} tokens in {QUICK_ROUNDS} rounds, a tenth of the logins at once",
    )
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    part = 10 if options.quick else 1
    settings = Settings(
        tokens=options.tokens or (QUICK_TOKENS if options.quick else TOKENS),
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        cache=options.cache,
        logins=options.logins or LOGINS // part,
        stock_logins=options.stock_logins or STOCK_LOGINS // part,
        only=options.only,
    )
    return settings, options


def _check(settings: Settings) -> None:
    if settings.rounds > settings.tokens:
        raise OptionError("--rounds", settings.rounds, f"at most --tokens ({settings.tokens})")
    if settings.stock_logins > settings.logins:
        raise OptionError(
            "--stock-logins", settings.stock_logins, f"at most --logins ({settings.logins})"
        )
    if not any(settings.only in name for name in CASES):
        raise OptionError("--only", settings.only, "in the name of a case, as progress shows it")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; 1 if a goal was missed, 2 if it cannot be measured."""
    settings, options = _settings(arguments)
    # what runs is taken down as after Ctrl-C
    signal.signal(signal.SIGTERM, command.terminated)

    def checked(settings: Settings) -> Samples:
        _check(settings)
        return measure(settings)

    return command.run(
        "ldap_logins", checked, settings, options, report=ldap_report, judge=judge, say=say
    )


if __name__ == "__main__":
    sys.exit(main())

"""The time of 500 password tokens from Keystone with its users in LDAP, by what keeps connections.

Repeats the experiment that made Keystone's pools known (mattfischer.com/blog/archives/624: one
user, 500 tokens in a row, ldaps) with one user and with 500, by

    unpooled    the stock driver, [ldap] use_pool = false
    ldappool    the stock driver, use_pool and use_auth_pool
    keyfront    the keyfront_ldap driver, with the same two options
    keyfront whole
                the same behind keyfront's pipeline, which keeps Keystone's own reading in memory

on a slapd with LDAPS, behind a proxy that adds 0, 1 or 10 ms to each *round trip*, half of it each
way. Keystone is one process with SQLite; it is asked in the process, without a web server. Tokens
are for a project, by the user's name, from users who have logged in before. Connects, BINDs and
searches per token are counted in slapd's log.

Keystone's own caches are off, as they were in the experiment, but behind keyfront's pipeline. What
Keystone itself takes is told by the tokens of a user in SQL whose password is cheap to check.

Then the same at 50 ms in a process patched by gevent, all logins at once: 200 for keyfront. The
stock driver blocks the process in C, so its logins follow each other however many there are;
fewer are enough to find its rate (``--stock-logins``). What Keystone computes for a token is the
limit there, so the drivers alone are asked, too: to find a user and check the password.

The tokens of a case are divided over the rounds. Before each case there is a login that is not
counted, so that what is measured is a worker that runs. What Keystone computes is in all times, so
a slow or busy machine makes all ratios smaller.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import OptionError

from .. import files, results
from ..load.arguments import say
from ..results import Table
from ..servers import slapd as directory
from ..servers.delay_proxy import DelayProxy, delay_proxy
from . import comparison, ratios
from .comparison import Comparison, Report
from .goals import MET, MISSED, ONE_BIND
from .keystone_process import KeystoneProcess
from .ldap_keystones import CANDIDATES, DOMAIN, Keystones, credentials, local_login, login
from .ratios import Ratio, Spread

# In how many of the rounds, at most: one takes a minute.
ROUNDS_AT_ONCE = 3
# Of the experiment.
PUBLISHED = 500
# Milliseconds that are added to each round trip.
LATENCIES = (0, 1, 10)
FAR = 50
ONE, MANY = "one", "many"


@dataclass(frozen=True)
class Case:
    """One candidate under one load.

    :param users: ``one`` (the same user each time) or ``many`` (each login another's)
    :param latency: milliseconds added to each round trip
    :param at_once: true if all logins begin at once
    :param driver: true if the driver alone is asked, and no token is made
    """

    candidate: str
    users: str
    latency: int
    at_once: bool = False
    driver: bool = False

    @property
    def label(self) -> str:
        """The candidate, as tables show it."""
        return CANDIDATES[self.candidate].label


def name_of(candidate: str, users: str, latency: int, *, driver: bool = False) -> str:
    """Return what a case is called, in goals too."""
    return f"{candidate}{' driver' if driver else ''}, {users}, {latency} ms"


_CASES = [
    Case("sql", ONE, 0),
    *(
        Case(candidate, users, latency)
        for latency in LATENCIES
        for users in (ONE, MANY)
        for candidate in ("unpooled", "ldappool", "keyfront", "keyfront whole")
    ),
    *(
        Case(f"{candidate} gevent", MANY, FAR, True, driver)
        for driver in (False, True)
        for candidate in ("unpooled", "ldappool", "keyfront")
    ),
]
CASES = {name_of(one.candidate, one.users, one.latency, driver=one.driver): one for one in _CASES}
RATIOS = (
    *(
        (name_of(ours, users, latency), name_of(other, users, latency))
        for latency in LATENCIES
        for users in (ONE, MANY)
        for ours in ("keyfront", "keyfront whole")
        for other in ("unpooled", "ldappool")
    ),
    *(
        (
            name_of("keyfront gevent", MANY, FAR, driver=driver),
            name_of(f"{other} gevent", MANY, FAR, driver=driver),
        )
        for driver in (False, True)
        for other in ("unpooled", "ldappool")
    ),
)


class Sample(NamedTuple):
    """One case in one round."""

    tokens: int
    seconds: float
    """Wall time of all logins together."""
    cpu: float
    """CPU seconds of Keystone's process."""
    connects: int
    binds: int
    searches: int
    uneven: int
    """Users with more or fewer BINDs than logins."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Samples = Mapping[str, Sequence[Sample]]


class Row(NamedTuple):
    """One case over all rounds, per token; its seconds are the median of the rounds."""

    seconds: float
    cpu: float
    connects: float
    binds: float
    searches: float


def row(samples: Sequence[Sample]) -> Row:
    """Sum up one case, per token."""
    tokens = sum(sample.tokens for sample in samples)
    seconds = statistics.median(1 / sample.rate for sample in samples)
    summed = (sum(getattr(one, name) for one in samples) for name in Row._fields[1:])
    return Row(seconds, *(each / tokens for each in summed))


class Settings(NamedTuple):
    """The settings of a measurement; see the options of ``ldap_logins``."""

    tokens: int
    rounds: int
    logins: int
    stock_logins: int
    only: str = ""

    @property
    def users(self) -> int:
        """The number of users in the directory; the last is nobody of the measured ones."""
        return max(self.tokens, self.logins) + 1


def report(samples: Samples, command: str) -> Report:
    """Return the tables ``logins`` and ``ratios``, and how the goals were met."""
    found = list(ratios.ratios(samples, RATIOS))
    unpooled: dict[str, Ratio] = {
        one.first: one for (one,) in found if one.second.startswith("unpooled")
    }
    logins: list[list[results.Cell]] = []
    for name, each in samples.items():
        if not each:
            continue
        case, one, times = CASES[name], row(each), unpooled.get(name)
        load = "one user" if case.users == ONE else "each another user"
        load += ", the driver alone" * case.driver + ", at once, gevent" * case.at_once
        logins.append(
            [
                f"{case.label}, {load}, {case.latency} ms",
                f"{one.seconds * PUBLISHED:.0f}",
                f"{one.seconds * 1000:.0f}",
                f"{one.cpu * 1000:.0f}",
                *(f"{x:.2f}".rstrip("0").rstrip(".") for x in one[2:]),
                Spread.of(times.pairs).text(1) if times else None,
            ]
        )
    columns = [
        *("by, logins, added per round trip", f"{PUBLISHED} tokens, s", "per token, ms", "CPU, ms"),
        *("connects", "BINDs", "searches", "times as fast as no pool"),
    ]
    caption = (
        f"`{command}`: slapd and proxy on the same machine; Keystone on SQLite, in one process, "
        "its own caches: off."
    )
    uneven = any(
        sample.uneven
        for name, each in samples.items()
        if CASES[name].candidate.startswith("keyfront")
        for sample in each
    )
    # counted, not timed: one login with another number is enough to miss it
    one_bind = f"BINDs of {ONE_BIND.first} / {ONE_BIND.second} {ONE_BIND}"
    return Report(
        [
            Table(name="logins", columns=columns, rows=logins, caption=caption),
            ratios.table(found, {"rate": "times as fast"}, {}),
        ],
        [*ratios.in_words(found), (one_bind, MISSED if uneven else MET)],
        [
            {"case": name, "round": number, **sample._asdict()}
            for name, each in samples.items()
            for number, sample in enumerate(each)
        ],
    )


class Bench:
    """All that runs for one measurement.

    :param folder: a folder of this user only; the caller deletes it
    """

    def __init__(
        self, settings: Settings, slapd: directory.Slapd, proxy: DelayProxy, folder: Path
    ) -> None:
        self.settings = settings
        self.cases = {name: case for name, case in CASES.items() if settings.only in name}
        self.users = settings.users
        self.slapd = slapd
        self.proxy = proxy
        self.keystones = Keystones(folder, slapd, proxy.port, users=self.users)

    def measure(self) -> dict[str, list[Sample]]:
        """Measure every case in each round."""
        settings = self.settings
        samples: dict[str, list[Sample]] = {name: [] for name in self.cases}
        names = list(dict.fromkeys(case.candidate for case in self.cases.values()))
        with self.keystones.running(names) as running:
            for number, name in comparison.in_turns(list(self.cases), settings.rounds):
                case = self.cases[name]
                if not case.at_once or number < ROUNDS_AT_ONCE:
                    samples[name].append(self.once(running[case.candidate], case, number))
        return samples

    def once(self, keystone: KeystoneProcess, case: Case, number: int) -> Sample:
        """Measure one case in one round."""
        who = self._users(case, number)
        self.proxy.delay(case.latency / 1000)
        local = case.candidate == "sql"
        # a worker that runs: its connection is open, nobody of the measured ones is on it
        keystone.logins([local_login() if local else login(self.users - 1)])
        mark = self.slapd.mark()
        if case.driver:
            pairs = [credentials(one) for one in who]
            done = keystone.authenticate(DOMAIN, pairs, at_once=case.at_once)
        else:
            bodies = [local_login() if local else login(one) for one in who]
            done = keystone.logins(bodies, at_once=case.at_once)
        counts = self.slapd.counts(mark)
        uneven = sum(counts.bound[directory.user_dn(one)] != who.count(one) for one in set(who))
        return Sample(len(who), done.seconds, done.cpu, *counts[:3], uneven)

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


@contextmanager
def ready(settings: Settings, folder: Path) -> Iterator[Bench]:
    """Run a directory and a proxy before it until the block ends, and make the Keystone.

    :param folder: a folder of this user only; the caller deletes it
    """
    directory.slapd_program()
    for one in ("slapd", "keystones"):
        folder.joinpath(one).mkdir()
    with (
        directory.slapd(folder / "slapd", settings.users) as slapd,
        delay_proxy(slapd.port) as proxy,
    ):
        bench = Bench(settings, slapd, proxy, folder / "keystones")
        say(f"a Keystone is made, and each of {settings.users} users logs in")
        bench.keystones.prepare()
        yield bench


def _measured(options: Namespace) -> Report:
    if options.rounds > options.tokens:
        raise OptionError("--rounds", options.rounds, f"at most --tokens ({options.tokens})")
    if options.stock_logins > options.logins:
        raise OptionError(
            "--stock-logins", options.stock_logins, f"at most --logins ({options.logins})"
        )
    comparison.chosen(CASES, options.only)
    settings = Settings(**{name: getattr(options, name) for name in Settings._fields})
    programs.require_module("gevent", "gevent")
    with files.folders() as (folder, _), ready(settings, folder) as bench:
        return report(bench.measure(), options.command)


COMPARISON = Comparison(
    title="Logins of LDAP users through Keystone, by the driver",
    measure=_measured,
    numbers=(
        ("--tokens", 500, "of each case, in all"),
        ("--rounds", 5, "that they are divided over"),
        ("--logins", 200, "at once, of keyfront, in each round"),
        ("--stock-logins", 20, "the same of the stock driver"),
    ),
    only=", 10 ms",
    distributions=("keystone", "python-ldap", "ldappool", "gevent"),
)
main = partial(comparison.main, "ldap_logins", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

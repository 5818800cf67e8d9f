"""The time of 500 password tokens from Keystone with its users in LDAP, by what keeps connections.

    python -m keyfront.benchmarks.compare.ldap_logins [--tokens 500] [--rounds 5] [--quick]

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
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs
from keyfront.errors import OptionError

from .. import results
from ..results import Table
from ..worlds import slapd as directory
from ..worlds.delay_proxy import DelayProxy, delay_proxy
from . import comparison
from .comparison import say
from .goals import MET, MISSED, ONE_BIND, Goal
from .ldap_keystones import CACHES, CANDIDATES, Keystones, Server, local_login, login
from .ratios import Ratio, ratios
from .ratios import judge as judge_ratios

TITLE = "Logins of LDAP users through Keystone, by the driver"
DISTRIBUTIONS = ("keystone", "python-ldap", "ldappool", "gevent")
PROGRAMS = ()
TOKENS = 500
ROUNDS = 5
LOGINS = 200
STOCK_LOGINS = 20
QUICK_TOKENS = 20
QUICK_ROUNDS = 2
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


def _cases() -> dict[str, Case]:
    cases = [Case("sql", ONE, 0)]
    cases += [
        Case(candidate, users, latency)
        for latency in LATENCIES
        for users in (ONE, MANY)
        for candidate in ("unpooled", "ldappool", "keyfront", "keyfront whole")
    ]
    cases += [
        Case(f"{candidate} gevent", MANY, FAR, True, driver)
        for driver in (False, True)
        for candidate in ("unpooled", "ldappool", "keyfront")
    ]
    return {
        name_of(case.candidate, case.users, case.latency, driver=case.driver): case
        for case in cases
    }


CASES = _cases()

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
    """One case over all rounds."""

    tokens: int
    seconds: float
    """Per token: the median of the rounds."""
    cpu: float
    connects: float
    binds: float
    searches: float


def row(samples: Sequence[Sample]) -> Row:
    """Sum up one case, per token."""
    tokens = sum(sample.tokens for sample in samples)
    return Row(
        tokens,
        statistics.median(1 / sample.rate for sample in samples),
        sum(sample.cpu for sample in samples) / tokens,
        sum(sample.connects for sample in samples) / tokens,
        sum(sample.binds for sample in samples) / tokens,
        sum(sample.searches for sample in samples) / tokens,
    )


class Settings(NamedTuple):
    """The settings of a measurement; see the options of ``ldap_logins``."""

    tokens: int
    rounds: int
    cache: str
    logins: int
    stock_logins: int
    only: str = ""

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        more = f' --only "{self.only}"' if self.only else ""
        return (
            f"python -m keyfront.benchmarks.compare.ldap_logins --tokens {self.tokens} --rounds "
            f"{self.rounds} --cache {self.cache} --logins {self.logins} --stock-logins "
            f"{self.stock_logins}{more}"
        )


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    verdicts = judge_ratios(ratios(samples, RATIOS))
    uneven = sum(
        sample.uneven
        for name, each in samples.items()
        if CASES[name].candidate.startswith("keyfront")
        for sample in each
    )
    # counted, not timed: one login with another number is enough to miss it
    verdicts[ONE_BIND] = MISSED if uneven else MET
    return verdicts


def _rows(samples: Samples) -> Iterator[tuple[Case, Row, Ratio | None]]:
    """Yield each case with its time, and how many times as fast it was as without a pool."""
    against: dict[str, Ratio] = {}
    for (one,) in ratios(samples, RATIOS):
        if one.second.startswith("unpooled"):
            against[one.first] = one
    for name, each in samples.items():
        if each:
            yield CASES[name], row(each), against.get(name)


def _load(case: Case) -> str:
    users = "one user" if case.users == "one" else "each another user"
    if case.driver:
        users += ", the driver alone"
    return f"{users}, at once, gevent" if case.at_once else users


def table(samples: Samples) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [
        f"{'':<24}{'':<32}{'ms per':>8}{'CPU ms':>8}{'connects':>10}{'BINDs':>8}{'searches':>10}"
    ]
    before = ""
    for case, one, _ in _rows(samples):
        load = f"+{case.latency} ms, {_load(case)}"
        if load != before:
            lines.append(load)
            before = load
        lines.append(
            f"{'':<4}{case.label:<52}{one.seconds * 1000:>8.1f}{one.cpu * 1000:>8.1f}"
            f"{one.connects:>10.2f}{one.binds:>8.2f}{one.searches:>10.2f}"
        )
    lines += ["", f"{'times as fast: median of the rounds (lowest to highest)':<70}{'':>20}"]
    for (ratio,) in ratios(samples, RATIOS):
        names = f"{ratio.first} / {ratio.second}"
        lines.append(f"{names:<70}{ratio.spread(1):>24}")
    lines.append("")
    return "\n".join([*lines, *comparison.verdict_lines(judge(samples))])


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """Return the result as the documents show it: ``logins`` and ``ratios``."""
    logins: list[list[results.Cell]] = []
    for case, one, ratio in _rows(samples):
        logins.append(
            [
                f"{case.latency} ms",
                _load(case),
                case.label,
                f"{one.seconds * PUBLISHED:.0f} s",
                f"{one.seconds * 1000:.0f} ms",
                f"{one.cpu * 1000:.0f} ms",
                _count(one.connects),
                _count(one.binds),
                _count(one.searches),
                ratio.spread(1) if ratio else None,
            ]
        )
    verdicts = judge(samples)
    found: list[list[results.Cell]] = [
        [
            f"{each.first} / {each.second}",
            each.spread(1),
            f"{each.goal}: {verdicts[each.goal]}" if each.goal else None,
        ]
        for (each,) in ratios(samples, RATIOS)
    ]
    columns = [
        "added per round trip", "logins", "by", f"{PUBLISHED} tokens", "per token", "of it CPU",
        "connects", "BINDs", "searches", "times as fast as no pool",
    ]  # fmt: skip
    caption = (
        f"`{settings.command}`: slapd and proxy on the same machine; Keystone on SQLite, in one "
        f"process, its own caches: {settings.cache}."
    )
    spread = "times as fast: median of the rounds (lowest to highest)"
    return [
        Table(name="logins", columns=columns, rows=logins, caption=caption),
        Table(name="ratios", columns=[spread, "", "goal"], rows=found),
    ]


def raw(samples: Samples) -> list[results.Sample]:
    """Return every round of every case."""
    return [
        {"case": name, "round": number, **sample._asdict()}
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def _count(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Bench:
    """All that runs for one measurement.

    :param folder: a folder of this user only; the caller deletes it
    """

    def __init__(
        self, settings: Settings, slapd: directory.Slapd, proxy: DelayProxy, folder: Path
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
            delay_proxy(slapd.port) as proxy,
        ):
            bench = Bench(settings, slapd, proxy, folder / "keystones")
            say(f"a Keystone is made, and each of {users} users logs in")
            bench.keystones.prepare()
            return bench.measure()


def _settings(arguments: list[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = comparison.parser(__doc__)
    for name, meaning in (
        ("--tokens", f"of each case, in all (default {TOKENS})"),
        ("--rounds", f"that they are divided over (default {ROUNDS})"),
        ("--logins", f"at once, of keyfront, in each round (default {LOGINS})"),
        ("--stock-logins", f"the same of the stock driver (default {STOCK_LOGINS})"),
    ):
        parser.add_argument(name, type=comparison.at_least_one, metavar="N", help=meaning)
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
    comparison.add_results(parser)
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
    comparison.ends_in_order()

    def checked(settings: Settings) -> Samples:
        _check(settings)
        return measure(settings)

    return comparison.run(checked, settings, options, sys.modules[__name__])


if __name__ == "__main__":
    sys.exit(main())

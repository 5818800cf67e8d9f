"""The report of ``ldap_logins``: for a terminal, for the documents, and for a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import results
from ..results import Table
from .ldap_samples import CASES, Case, Ratio, Row, Samples, judge, ratios, row

TITLE = "Logins of LDAP users through Keystone, by the driver"
DISTRIBUTIONS = ("keystone", "python-ldap", "ldappool", "gevent")
PROGRAMS = ()
# The experiment's.
PUBLISHED = 500


class Settings(NamedTuple):
    """How it was measured; see the options of ``ldap_logins``."""

    tokens: int
    rounds: int
    cache: str
    logins: int
    stock_logins: int
    only: str = ""

    @property
    def command(self) -> str:
        """What measures the same again."""
        more = f' --only "{self.only}"' if self.only else ""
        return (
            f"python -m keyfront.benchmarks.compare.ldap_logins --tokens {self.tokens} --rounds "
            f"{self.rounds} --cache {self.cache} --logins {self.logins} --stock-logins "
            f"{self.stock_logins}{more}"
        )


def _rows(samples: Samples) -> Iterator[tuple[Case, Row, Ratio | None]]:
    """Each case with its time, and how many times as fast it was as without a pool."""
    against: dict[str, Ratio] = {}
    for one in ratios(samples):
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
    """The result as text of at most 100 columns."""
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
    for ratio in ratios(samples):
        lines.append(f"{ratio.first + ' / ' + ratio.second:<70}{_spread(ratio):>24}")
    lines.append("")
    for goal, verdict in judge(samples).items():
        lines.append(f"{verdict:<8} {goal.figure:<5} {goal.first} / {goal.second} {goal}")
    return "\n".join(lines)


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """The result as the documents show it: ``logins`` and ``ratios``."""
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
                _spread(ratio) if ratio else None,
            ]
        )
    verdicts = judge(samples)
    found: list[list[results.Cell]] = [
        [
            f"{each.first} / {each.second}",
            _spread(each),
            f"{each.goal}: {verdicts[each.goal]}" if each.goal else None,
        ]
        for each in ratios(samples)
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
    """Every round of every case."""
    return [
        {"case": name, "round": number, **sample._asdict()}
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def _count(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _spread(ratio: Ratio) -> str:
    return f"{ratio.median:.1f} ({min(ratio.pairs):.1f} to {max(ratio.pairs):.1f})"

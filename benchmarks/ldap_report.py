"""The report of ``ldap_logins``: for a terminal, for the documents, and for a file."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import token_report
from .ldap_samples import CASES, Case, Ratio, Row, Samples, judge, ratios, row

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
            f"python -m keyfront.benchmarks.ldap_logins --tokens {self.tokens} --rounds "
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


def markdown(samples: Samples, settings: Settings) -> str:
    """The result as the documents show it."""
    lines = [
        f"| added per round trip | logins | by | {PUBLISHED} tokens | per token | of it CPU "
        "| connects | BINDs | searches | times as fast as no pool |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, one, ratio in _rows(samples):
        lines.append(
            f"| {case.latency} ms | {_load(case)} | {case.label} | {one.seconds * PUBLISHED:.0f} s "
            f"| {one.seconds * 1000:.0f} ms | {one.cpu * 1000:.0f} ms | {_count(one.connects)} "
            f"| {_count(one.binds)} | {_count(one.searches)} | {_spread(ratio) if ratio else ''} |"
        )
    verdicts = judge(samples)
    lines += [
        "",
        "| times as fast: median of the rounds (lowest to highest) | | goal |",
        "|---|---:|---|",
    ]
    for each in ratios(samples):
        wanted = f"{each.goal}: {verdicts[each.goal]}" if each.goal else ""
        lines.append(f"| {each.first} / {each.second} | {_spread(each)} | {wanted} |")
    return "\n".join([*lines, "", described_in_words(settings)])


def described_in_words(settings: Settings) -> str:
    """One paragraph: the command, the machine, the versions."""
    facts = environment()
    return (
        f"`{settings.command}`, {facts['date']}: {facts['cpu']}, {facts['cores']} cores, slapd and "
        f"proxy on the same; Keystone {facts['keystone']} on SQLite, in one process, its own "
        f"caches: {settings.cache}; python-ldap {facts['python-ldap']}, ldappool "
        f"{facts['ldappool']}, Python {facts['python']}, keyfront {facts['keyfront']}."
    )


def described(samples: Samples, settings: Settings, seconds: float) -> dict[str, Any]:
    """All that was measured, for a file."""
    return {
        "schema": 1,
        "environment": environment(),
        "settings": settings._asdict(),
        "wall_seconds": round(seconds, 1),
        "cases": {
            name: {**row(each)._asdict(), "rounds": [sample._asdict() for sample in each]}
            for name, each in samples.items()
            if each
        },
        "ratios": {f"{one.first} / {one.second}": one.pairs for one in ratios(samples)},
        "goals": {
            f"{goal.figure} of {goal.first} / {goal.second} {goal}": verdict
            for goal, verdict in judge(samples).items()
        },
    }


def environment() -> dict[str, str | int]:
    """What the numbers were measured on."""
    facts = token_report.environment()
    del facts["uwsgi"]
    for name in ("python-ldap", "ldappool", "gevent"):
        facts[name] = importlib.metadata.version(name)
    return facts


def _count(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _spread(ratio: Ratio) -> str:
    return f"{ratio.median:.1f} ({min(ratio.pairs):.1f} to {max(ratio.pairs):.1f})"

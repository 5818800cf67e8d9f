"""The report of ``token_validation``: for a terminal, for the README, and for a result."""

from __future__ import annotations

from typing import NamedTuple

from .. import results
from ..lineups.uwsgi import PROCESSES
from ..results import Table
from .token_samples import CASES, TOKEN_CACHING_CASES, Ratio, Samples, judge, ratios, row
from .token_servers import CANDIDATES, CONNECTIONS

TITLE = "Validations of a token by Keystone, with and without keyfront's token cache"
DISTRIBUTIONS = ("keystone", "uWSGI", "pyuwsgi")
PROGRAMS = ("wrk", "memcached")


class Settings(NamedTuple):
    """How it was measured."""

    rounds: int
    seconds: int
    token_caching: bool = False
    threads: int = 1

    @property
    def command(self) -> str:
        """What measures the same again."""
        more = " --token-caching" if self.token_caching else ""
        more += f" --threads {self.threads}" if self.threads > 1 else ""
        return (
            f"python -m keyfront.benchmarks.compare.token_validation --rounds {self.rounds} "
            f"--seconds {self.seconds}{more}"
        )


def table(samples: Samples) -> str:
    """The result as text of at most 100 columns."""
    cases = CASES | TOKEN_CACHING_CASES
    lines = [
        f"{'':<50}{'answers/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'errors':>7}{'CPU us':>9}{'wrk':>6}"
    ]
    for name, each in samples.items():
        one = row(each)
        lines.append(
            f"{cases[name].label:<50}{one.rate:>10.0f}{_ms(one.p50):>9}{_ms(one.p99):>9}"
            f"{one.errors:>7}{one.cpu:>9.0f}{one.generator:>6.0%}"
        )
    lines.append("")
    lines.append(f"{'ratio of each pair (lowest to highest)':<54}{'answers/s':>22}{'p99':>22}")
    for rate, p99 in ratios(samples):
        name = f"{rate.first} / {rate.second}"
        lines.append(f"{name:<54}{_spread(rate):>22}{_spread(p99):>22}")
    lines.append("")
    for goal, verdict in judge(samples).items():
        lines.append(f"{verdict:<8} {goal.figure:<4} {goal.first} / {goal.second} {goal}")
    return "\n".join(lines)


def tables(samples: Samples, settings: Settings) -> list[Table]:
    """The result as the documents show it: ``rates`` and ``ratios``."""
    stock = row(samples["keystone"]).rate
    rates: list[list[results.Cell]] = []
    for name in ("keystone", "memcached", "keyfront", "bare", "keyfront kept", "bare kept"):
        one = row(samples[name])
        times = one.rate / stock
        rates.append(
            [
                CASES[name].label,
                _round(one.rate),
                f"{_ms(one.p50)} ms",
                f"{_ms(one.p99)} ms",
                one.errors,
                f"{times:.{0 if times >= 10 else 1}f}",
            ]
        )
    found: list[list[results.Cell]] = []
    for rate, p99 in ratios(samples):
        names = " / ".join((CASES | TOKEN_CACHING_CASES)[one].label for one in rate[:2])
        wanted = [f"{one.figure} {one.goal}" for one in (rate, p99) if one.goal is not None]
        found.append([names, _spread(rate), _spread(p99), ", ".join(wanted)])
    columns = ["validations of a token", "per second", "p50", "p99", "errors", "times Keystone"]
    caption = (
        f"`{settings.command}`: wrk with {CONNECTIONS} connections on the same cores; uWSGI "
        f"`http-socket` with {PROCESSES} processes of {settings.threads} thread(s), Keystone on "
        "SQLite."
    )
    spread = "ratio: median of the pairs (lowest to highest)"
    return [
        Table(name="rates", columns=columns, rows=rates, caption=caption),
        Table(name="ratios", columns=[spread, "per second", "p99", "goal"], rows=found),
    ]


def raw(samples: Samples) -> list[results.Sample]:
    """Every round of every case."""
    return [
        {
            "case": name,
            "kept": CANDIDATES[(CASES | TOKEN_CACHING_CASES)[name].candidate].kept,
            "round": number,
            **sample.described(),
        }
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _round(value: float) -> str:
    """Two or three digits that mean something, thousands apart."""
    return f"{round(value, -2 if value >= 1000 else 0):,.0f}".replace(",", " ")


def _spread(ratio: Ratio) -> str:
    low, high = min(ratio.pairs), max(ratio.pairs)
    digits = 3 if high < 0.1 else 2 if high < 10 else 0
    return f"{ratio.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

"""The report of ``token_validation``: for a terminal, for the README, and for a file."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from keyfront import __version__
from keyfront.gateway.serve import machine

from .token_candidates import CANDIDATES
from .token_samples import CASES, TOKEN_CACHING_CASES, Ratio, Samples, judge, ratios, row
from .token_servers import CONNECTIONS
from .uwsgi_server import PROCESSES


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
            f"python -m keyfront.benchmarks.token_validation --rounds {self.rounds} "
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


def markdown(samples: Samples, settings: Settings) -> str:
    """The result as the README shows it."""
    stock = row(samples["keystone"]).rate
    lines = [
        "| validations of a token | per second | p50 | p99 | errors | times Keystone |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in ("keystone", "memcached", "keyfront", "bare", "keyfront kept", "bare kept"):
        one = row(samples[name])
        times = one.rate / stock
        lines.append(
            f"| {CASES[name].label} | {_round(one.rate)} | {_ms(one.p50)} ms | {_ms(one.p99)} ms "
            f"| {one.errors} | {times:.{0 if times >= 10 else 1}f} |"
        )
    lines += [
        "",
        "| ratio: median of the pairs (lowest to highest) | per second | p99 | goal |",
        "|---|---:|---:|---|",
    ]
    for rate, p99 in ratios(samples):
        names = " / ".join((CASES | TOKEN_CACHING_CASES)[one].label for one in rate[:2])
        wanted = [f"{one.figure} {one.goal}" for one in (rate, p99) if one.goal is not None]
        lines.append(f"| {names} | {_spread(rate)} | {_spread(p99)} | {', '.join(wanted)} |")
    return "\n".join([*lines, "", described_in_words(settings)])


def described_in_words(settings: Settings) -> str:
    """One paragraph: the command, the machine, the versions."""
    facts = environment()
    return (
        f"`{settings.command}`, {facts['date']}: {facts['cpu']}, {facts['cores']} cores, wrk with "
        f"{CONNECTIONS} connections on the same cores; uWSGI {facts['uwsgi']} `http-socket` with "
        f"{PROCESSES} processes of {settings.threads} thread(s), Keystone {facts['keystone']} on "
        f"SQLite, Python {facts['python']}, keyfront {facts['keyfront']}."
    )


def described(samples: Samples, settings: Settings, seconds: float) -> dict[str, Any]:
    """All that was measured, for a file."""
    verdicts = {
        f"{goal.figure} of {goal.first} / {goal.second} {goal}": verdict
        for goal, verdict in judge(samples).items()
    }
    return {
        "schema": 2,
        "environment": environment(),
        "settings": {
            **settings._asdict(),
            "processes": PROCESSES,
            "connections": CONNECTIONS,
        },
        "wall_seconds": round(seconds, 1),
        "cases": {
            name: {
                **row(each)._asdict(),
                "kept": CANDIDATES[(CASES | TOKEN_CACHING_CASES)[name].candidate].kept,
                "rounds": [
                    {
                        "requests": sample.load.requests,
                        "seconds": sample.load.seconds,
                        "errors": sample.load.errors,
                        "p50": sample.p50,
                        "p99": sample.p99,
                        "server_cpu": sample.server_cpu,
                        "generator_cpu": sample.load.generator_cpu,
                    }
                    for sample in each
                ],
            }
            for name, each in samples.items()
        },
        "ratios": {
            f"{rate.first} / {rate.second}": {"rate": rate.pairs, "p99": p99.pairs}
            for rate, p99 in ratios(samples)
        },
        "goals": verdicts,
    }


def environment() -> dict[str, str | int]:
    """What the numbers were measured on."""
    model = "unknown"
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": machine.cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "keystone": importlib.metadata.version("keystone"),
        "keyfront": __version__,
        "uwsgi": _uwsgi_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _uwsgi_version() -> str:
    for name in ("uWSGI", "pyuwsgi"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _round(value: float) -> str:
    """Two or three digits that mean something, thousands apart."""
    return f"{round(value, -2 if value >= 1000 else 0):,.0f}".replace(",", " ")


def _spread(ratio: Ratio) -> str:
    low, high = min(ratio.pairs), max(ratio.pairs)
    digits = 3 if high < 0.1 else 2 if high < 10 else 0
    return f"{ratio.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

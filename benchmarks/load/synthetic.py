"""A made-up access log of a Keystone, for those who have none to replay: see docs/benchmarks.md.

Users and projects are asked for by Zipf's law, requests arrive by chance (Poisson) around a rate
that swings, with short storms. The same seed makes the same log.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from keyfront.common import ranges
from keyfront.errors import BenchmarkError, OptionError

from .access_log import Entry

START = datetime(2026, 1, 5, 9, 0, 0, tzinfo=UTC).timestamp()
"""A Monday morning; by default all logs begin then, so that a seed alone decides."""

# Seconds of the swing, and its share of the rate.
_PERIOD, _SWING = 60.0, 0.5
# A storm begins once in so many seconds, takes so many, and multiplies the rate.
_STORM_EVERY, _STORM_SECONDS, _STORM_TIMES = 90.0, 2.0, 4.0


class Kind(NamedTuple):
    """A kind of request.

    :param weight: its share, relative to the sum of all
    :param target: path and query, with ``{user}`` and ``{project}``
    """

    weight: float
    method: str
    target: str
    status: int


MIX = (
    Kind(58.0, "GET", "/v3/auth/tokens", 200),
    Kind(4.0, "GET", "/v3/auth/tokens?allow_expired=1", 200),
    Kind(1.2, "GET", "/v3/auth/tokens", 404),
    Kind(0.8, "GET", "/v3/auth/tokens", 401),
    Kind(11.0, "POST", "/v3/auth/tokens", 201),
    Kind(1.0, "POST", "/v3/auth/tokens", 401),
    Kind(7.0, "GET", "/v3", 200),
    Kind(3.0, "GET", "/", 300),
    Kind(4.0, "GET", "/v3/projects/{project}", 200),
    Kind(2.5, "GET", "/v3/users/{user}", 200),
    Kind(2.0, "GET", "/v3/auth/projects", 200),
    Kind(1.5, "GET", "/v3/projects", 200),
    Kind(1.0, "GET", "/v3/users/{user}/projects", 200),
    Kind(0.8, "GET", "/v3/role_assignments?user.id={user}", 200),
    Kind(0.7, "GET", "/v3/auth/catalog", 200),
    Kind(0.5, "GET", "/v3/endpoints?interface=public", 200),
    Kind(0.3, "GET", "/v3/services", 200),
    Kind(0.3, "GET", "/v3/roles?name=member", 200),
    Kind(0.2, "GET", "/v3/domains/default", 200),
    Kind(0.2, "DELETE", "/v3/auth/tokens", 204),
)


def entries(*, seconds: float, rate: float, seed: int = 1, users: int = 200) -> Iterator[Entry]:
    """Requests by their time.

    :param rate: requests per second, on average without storms
    :param users: number of users; there are half as many projects
    """
    chance = random.Random(seed)
    people, projects = (
        [f"{chance.getrandbits(128):032x}" for _ in range(count)]
        for count in (users, max(users // 2, 1))
    )
    storms = _storms(chance, seconds)
    weights = list(itertools.accumulate(kind.weight for kind in MIX))
    highest = rate * (1 + _SWING) * _STORM_TIMES
    at = 0.0
    while True:
        at += chance.expovariate(highest)
        if at >= seconds:
            return
        # thinned: of candidates at the highest rate, each is kept as often as the rate says
        if chance.random() * highest >= _rate(at, rate, storms):
            continue
        (kind,) = chance.choices(MIX, cum_weights=weights)
        target = kind.target.replace("{user}", _popular(chance, people))
        target = target.replace("{project}", _popular(chance, projects))
        yield Entry(START + at, kind.method, target, kind.status)


def _rate(at: float, rate: float, storms: list[float]) -> float:
    found = rate * (1 + _SWING * math.sin(2 * math.pi * at / _PERIOD))
    if any(begin <= at < begin + _STORM_SECONDS for begin in storms):
        found *= _STORM_TIMES
    return found


def _storms(chance: random.Random, seconds: float) -> list[float]:
    found: list[float] = []
    at = chance.expovariate(1 / _STORM_EVERY)
    while at < seconds:
        found.append(at)
        at += _STORM_SECONDS + chance.expovariate(1 / _STORM_EVERY)
    return found


def _popular(chance: random.Random, ids: list[str]) -> str:
    """Choose one of them: the n-th about 1/n as often as the first."""
    return ids[min(int(len(ids) ** chance.random()) - 1, len(ids) - 1)]


def combined(entry: Entry) -> str:
    """Return a line as nginx and Apache write it."""
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000")
    request = f"{entry.method} {entry.target} HTTP/1.1"
    return f'127.0.0.1 - - [{at}] "{request}" {entry.status} {_bytes(entry)} "-" "synthetic"'


def as_json(entry: Entry) -> str:
    """Return a line as keyfront's files for nginx write it; milliseconds stay."""
    at = datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="milliseconds")
    request = {"method": entry.method, "uri": entry.target, "protocol": "HTTP/1.1"}
    answer = {"status": str(entry.status), "bytes": str(_bytes(entry))}
    values = {"time": at, "client": "127.0.0.1", **request, **answer}
    return json.dumps(values, separators=(",", ":"))


def _bytes(entry: Entry) -> int:
    return 0 if entry.status == 204 else 300 if entry.status < 400 else 120


FORMATS: dict[str, Callable[[Entry], str]] = {"combined": combined, "json": as_json}


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Write a made-up access log of a Keystone with a realistic mix of requests, to be replayed "
        "with keyfront bench replay. The same seed makes the same log."
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a new file (default: standard output)"
    )
    for option, default, text in (
        ("--seconds", "600", "1 to 604800"),
        ("--rate", "20", "requests per second, 0.1 to 10000"),
        ("--users", "200", "1 to 100000"),
        ("--seed", "1", "any number"),
    ):
        text = f"{text} (default: %(default)s)"
        parser.add_argument(option, default=default, metavar="N", help=text)
    text = "combined has whole seconds, json milliseconds (default: %(default)s)"
    parser.add_argument("--format", default="combined", metavar="|".join(FORMATS), help=text)


def run(arguments: Namespace, out: TextIO) -> int:
    """Write it.

    :raises OptionError: an argument is wrong
    :raises BenchmarkError: the file is there already, or cannot be written
    """
    if arguments.format not in FORMATS:
        raise OptionError("--format", arguments.format, f"one of {', '.join(FORMATS)}")
    written = FORMATS[arguments.format]
    found = entries(
        seconds=ranges.whole("--seconds", arguments.seconds, 1, 604800),
        rate=ranges.decimal("--rate", arguments.rate, 0.1, 10000),
        seed=ranges.whole("--seed", arguments.seed, 0, 999_999_999),
        users=ranges.whole("--users", arguments.users, 1, 100000),
    )
    lines = (f"{written(entry)}\n" for entry in found)
    path = arguments.file
    if path is None:
        out.writelines(lines)
        return 0
    try:
        with path.open("x", encoding="ascii") as file:
            file.writelines(lines)
    except FileExistsError:
        raise BenchmarkError(f"{path}: is there already; name another file") from None
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from None
    out.write(f"written to {path}\n")
    return 0

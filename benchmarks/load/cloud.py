"""``keyfront bench cloud``: what a cloud asks of Keystone, asked of any Keystone.

The mix is that of :mod:`.cloud_round`. With ``--side-by-side`` three servers are started here and
compared: stock Keystone, the same with memcached, and keyfront.
"""

from __future__ import annotations

import json
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from keyfront.cli import credentials as who
from keyfront.cli.credentials import Credentials
from keyfront.common import ranges
from keyfront.errors import OptionError
from keyfront.gateway.serve.state import State

from .. import proc, results
from ..experiments.findings import CHANGES, WORDS
from ..results import Cell, Record, Result, Table
from . import arguments as given
from . import cloud_round, cloud_users
from .arguments import say
from .cloud_client import Client
from .cloud_round import LABELS, PHASES, TIMES, Alone, Mix, Round, Settings, digits

_NAME, _SIDE_BY_SIDE = "cloud", "cloud_mix"


def measure(
    credentials: Credentials, settings: Settings, users_file: str | None, service_role: str | None
) -> tuple[Alone, list[Round]]:
    """Ask a Keystone; what is made for it is removed, whichever way it ends.

    :param users_file: users that are there already; ``None`` to make some
    :param service_role: the role of services that are made; ``None`` for the usual one
    :returns: one request at a time, and the rounds that count
    :raises OptionError: the file of users cannot be used
    """
    maker = Client(credentials, timeout=settings.timeout)
    client = Client(credentials, timeout=settings.timeout)
    pid = State(credentials.state).holder() if credentials.state else None
    cpu = (lambda: proc.tree_seconds(pid)) if pid else None
    try:
        with ExitStack() as stack:
            if users_file is not None:
                population = cloud_users.read(Path(users_file), maker, settings.services)
            else:
                say(f"{settings.users} users and {settings.services} services are made")
                count = settings.users, settings.services
                made = cloud_users.made(maker, *count, say, service_role)
                population = stack.enter_context(made)
            mix = Mix(client, population, clients=settings.clients, cpu=cpu)
            say("everybody logs in once")
            alone, rounds = mix.prepare(), []
            for number in range(settings.rounds + 1):
                rounds.append(mix.ask())
                what = f"round {number} of {settings.rounds}" if number else "caches are filled"
                say(f"{what}: {cloud_round.seconds(rounds[-1]):.1f} s")
            if users_file is None:
                say("what was made is removed")
            return alone, rounds[1:]
    finally:
        client.close()
        maker.close()


def phases(rounds: Sequence[Round]) -> Table:
    """Return a table of one server's phases, all rounds together."""
    everything = cloud_round.total(rounds)
    return Table(
        name="phases",
        columns=["", "requests", "a second", "p50 ms", "p95 ms", "p99 ms", "CPU ms", "failed"],
        rows=[
            [
                LABELS[name],
                phase.count,
                digits(phase.rate),
                *(digits(phase.milliseconds(part)) for part in (0.50, 0.95, 0.99)),
                digits(phase.cpu_milliseconds),
                phase.failures.total(),
            ]
            for name, phase in everything.items()
        ],
    )


def failures(rounds: Sequence[Round]) -> Table | None:
    """Return a table of what failed, if anything did."""
    rows: list[list[Cell]] = [
        [LABELS[name], kind, times]
        for name, phase in cloud_round.total(rounds).items()
        if name in PHASES
        for kind, times in phase.failures.most_common()
    ]
    return Table(name="failures", columns=["failed", "why", "times"], rows=rows) if rows else None


def hash_in_words(alone: Alone) -> str:
    """Return what of a login the hash of the password is, as far as can be told from outside."""
    return (
        f"One at a time, a login takes {digits(alone.login)} ms and a re-scope "
        f"{digits(alone.rescope)}: the difference, {digits(alone.more)} ms, is for the most part "
        "the hash of the password."
    )


def add(parser: ArgumentParser) -> None:
    """Add the arguments of ``keyfront bench cloud``."""
    parser.description = (
        "Ask a Keystone what a cloud asks: users log in, services validate each new token first "
        "and repeatedly, users re-scope. It is the one that keyfront serve runs, or, with "
        "OS_AUTH_URL and the other variables of the openstack command or --os-cloud, any other. "
        "Users are made in a domain of their own, which is removed at the end. Ends with 1 if a "
        "request failed."
    )
    who.add_arguments(parser)
    usual = Settings()
    for option, default, text in (
        ("--users", usual.users, "who log in, 1 to 1000"),
        ("--services", usual.services, "that validate each token, 1 to 100"),
        ("--rounds", usual.rounds, "that are counted, 1 to 1000; one more goes before"),
        ("--clients", usual.clients, "requests at once, 1 to 256"),
        ("--timeout", usual.timeout, "seconds that an answer is waited for, 1 to 3600"),
    ):
        text += " (default %(default)s)"
        parser.add_argument(option, default=str(default), metavar="N", help=text)
    given.add_texts(
        parser,
        ("--users-file", "FILE", "users that are there already (docs/benchmarks.md)"),
        ("--service-role", "NAME", "of services that are made (default: service, else admin)"),
        ("--name", "NAME", f"of the result (default: {_NAME}, or {_SIDE_BY_SIDE})"),
    )
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    results.add_argument(parser)
    group = parser.add_argument_group("side by side")
    text = "start stock Keystone, stock Keystone with memcached, and keyfront, and compare them"
    group.add_argument("--side-by-side", action="store_true", help=text)
    given.add_texts(
        group,
        ("--changes", "N", "of other things a second meanwhile, 0 to 1000 (default 0)"),
        ("--database", "sqlite|mariadb", "that Keystone is on (default sqlite)"),
        ("--database-delay", "MS", "more for a round trip to MariaDB, 0 to 1000 (default 0)"),
    )
    text = "leave out stock Keystone without memcached, which takes most of the time"
    group.add_argument("--without-stock", action="store_true", default=None, help=text)


def run(arguments: Namespace, out: TextIO) -> int:
    """Ask, print the result and write it; 1 if a request failed."""
    settings = Settings(
        users=ranges.whole("--users", arguments.users, 1, 1000),
        services=ranges.whole("--services", arguments.services, 1, 100),
        rounds=ranges.whole("--rounds", arguments.rounds, 1, 1000),
        clients=ranges.whole("--clients", arguments.clients, 1, 256),
        timeout=ranges.whole("--timeout", arguments.timeout, 1, 3600),
    )
    asking = _side_by_side if arguments.side_by_side else _one
    with given.ended_in_order():
        result, heading, failed = asking(arguments, settings)
    path = results.write(result, arguments.results)
    if arguments.json:
        out.write(json.dumps({"schema": results.SCHEMA, **asdict(result)}, indent=1) + "\n")
    else:
        # the others are of the report's page
        tables = [table for table in result.tables if table.name not in (CHANGES, WORDS)]
        texts = [*result.notes, results.measured_on(result)]
        page = "\n\n".join(map(results.plain, tables))
        lines = [line for text in texts for line in textwrap.wrap(text, results.WIDTH)]
        out.write("\n".join([*heading, "", page, "", *lines]) + "\n")
    say(f"written to {path}\nkeyfront bench report makes a page of it")
    return 1 if failed else 0


def _asked(settings: Settings) -> str:
    return (
        f"{settings.users} users, {settings.services} services, {settings.clients} requests at "
        f"once, rounds: {settings.rounds} and one before"
    )


def _one(arguments: Namespace, settings: Settings) -> tuple[Result, list[str], bool]:
    beside = ("--changes", "--database", "--database-delay", "--without-stock")
    _refuse(arguments, beside, "used with --side-by-side")
    credentials = who.of_arguments(arguments)
    results.prepare(arguments.results)
    say(f"{credentials.url} is asked")
    with Record(
        "comparison",
        arguments.name or _NAME,
        title="What a cloud asks of Keystone",
        conditions={**asdict(settings), "repeated": TIMES, "tls": credentials.url[:5] == "https"},
    ) as record:
        users_file, service_role = arguments.users_file, arguments.service_role
        alone, rounds = measure(credentials, settings, users_file, service_role)
    record.conditions["alone_ms"] = alone._asdict()
    record.samples += cloud_round.samples(rounds)
    record.tables.append(phases(rounds))
    failed = failures(rounds)
    if failed is not None:
        record.tables.append(failed)
    record.note(hash_in_words(alone))
    record.note(cloud_round.most_in_words(rounds))
    return record.result(), [credentials.url, _asked(settings)], failed is not None


def _side_by_side(arguments: Namespace, settings: Settings) -> tuple[Result, list[str], bool]:
    from ..compare import cloud_mix
    from ..compare.token_servers import DATABASES

    others = ("--state", "--os-cloud", "--users-file", "--service-role")
    _refuse(arguments, others, "used without --side-by-side, which starts its own")
    [database] = given.choices("--database", [arguments.database or "sqlite"], DATABASES)
    if arguments.database_delay is not None and database == "sqlite":
        allowed = "used with --database mariadb: SQLite is asked without a network"
        raise OptionError("--database-delay", arguments.database_delay, allowed)
    servings = cloud_mix.Servings(
        changes=ranges.decimal("--changes", arguments.changes or "0", 0, 1000),
        database=database,
        delay=ranges.decimal("--database-delay", arguments.database_delay or "0", 0, 1000),
        stock=not arguments.without_stock,
    )
    results.prepare(arguments.results)
    name = arguments.name or _SIDE_BY_SIDE
    result, failed = cloud_mix.compare(settings, servings, name=name)
    return result, [_asked(settings)], failed


def _refuse(arguments: Namespace, options: Sequence[str], allowed: str) -> None:
    for option in options:
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value is not None:
            raise OptionError(option, value, allowed)

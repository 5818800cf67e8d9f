"""Compares Keystone, stock, with memcached and with keyfront, by what a cloud asks of it.

    keyfront bench cloud --side-by-side [--rounds 3] [--users 10] [--services 5] [--changes 10]
        [--database mariadb] [--database-delay 1] [--without-stock]

What is asked and told says docs/benchmarks.md. Each request is on a connection of its own, since
uWSGI closes them, and every other round goes in the reverse order. Passwords are hashed as cheaply
as bcrypt does: what a hash costs is the same for all and hides the rest. What ``--changes`` changes
is written directly into the database, as ``keystone-manage`` would; keyfront is told of that by the
word in its URL. Stock Keystone without memcached may take longer than keyfront's ``ttl`` of 30
seconds: then what it keeps has ended when it is its turn, unless ``--without-stock`` is given.

CPU time is that of uWSGI and its workers, user and system, divided by the requests of all rounds;
memcached's is not in it.
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from keyfront.cli.credentials import Credentials
from keyfront.errors import ServerError

from ..experiments.findings import Change, chance, in_words
from ..experiments.findings import changes as changes_table
from ..load import cloud_round, cloud_users
from ..load.arguments import say
from ..load.cloud_client import Client
from ..load.cloud_round import LABELS, LOGINS, PHASES, TIMES, WHOLE, Mix, Round, Settings, digits
from ..results import Cell, Record, Result, Table
from .comparison import meanwhile
from .token_servers import CANDIDATES, DATABASES, serving

NAMES = ("keystone", "memcached", "keyfront")
AGAINST, OURS = "memcached", "keyfront"
_HASH_ROUNDS = 4
#: The cache's own ttl, as it is by default: other benchmarks measure nothing but hits.
EXTRA = f"""
[identity]
password_hash_rounds = {_HASH_ROUNDS}
[keyfront_token_cache]
ttl = 30
"""

#: Of each candidate all rounds that count.
Rounds = Mapping[str, Sequence[Round]]


@contextmanager
def changed(url: str, each_second: float) -> Iterator[list[Future[object]]]:
    """Change what no request of the mix shows, until the block ends.

    :param url: SQLAlchemy's, of Keystone's database
    :param each_second: changes per second; 0: none
    :returns: what runs for it
    :raises ServerError: the database was not changed
    """
    import sqlalchemy as sa

    engine = sa.create_engine(url)
    tables = sa.MetaData()

    def change(over: threading.Event) -> None:
        user, assignment = tables.tables["user"], tables.tables["assignment"]
        with engine.connect() as connection:
            role = connection.execute(sa.select(tables.tables["role"].c.id)).scalar()
        number, one = 0, ""
        while not over.wait(1 / each_second):
            with engine.begin() as connection:
                if number % 2:
                    grant = {"type": "UserProject", "actor_id": one, "target_id": one}
                    row = {**grant, "role_id": role, "inherited": False}
                    connection.execute(assignment.insert().values(**row))
                else:
                    one = uuid.uuid4().hex
                    row = {"id": one, "domain_id": "default", "enabled": True}
                    row["created_at"] = datetime.now(UTC).replace(tzinfo=None)
                    connection.execute(user.insert().values(**row))
            number += 1

    if each_second:
        tables.reflect(engine, only=["user", "assignment", "role"])
    try:
        with meanwhile(*([change] if each_second else [])) as running:
            yield running
    except sa.exc.SQLAlchemyError as error:
        raise ServerError(f"the database was not changed: {error}") from None
    finally:
        engine.dispose()


@dataclass(frozen=True, kw_only=True)
class Servings:
    """The settings of the servers that stand side by side.

    :param changes: changes per second of rows that no request shows
    :param database: one of ``DATABASES``
    :param delay: milliseconds that each round trip to it takes, besides its own
    :param stock: true to have stock Keystone without memcached among them
    """

    changes: float = 0
    database: str = DATABASES[0]
    delay: float = 0
    stock: bool = True


def measure(settings: Settings, servings: Servings) -> Rounds:
    """Go through the mix with each candidate in each round, after one that is not counted."""
    names = NAMES if servings.stock else NAMES[1:]
    found: dict[str, list[Round]] = {name: [] for name in names}
    say("a Keystone and its servers start")
    delay = servings.delay / 1000
    with (
        serving(names, kind=servings.database, delay=delay, extra=EXTRA) as servers,
        ExitStack() as stack,
    ):
        admin = servers.keystone.login()["auth"]

        def client(name: str) -> Client:
            made = Client(Credentials(f"{servers[name].url}/v3", admin), timeout=settings.timeout)
            stack.callback(made.close)
            return made

        say(f"{settings.users} users and {settings.services} services are made")
        # The folder goes with all that is in it, so nothing has to be removed from it.
        population = cloud_users.Domain(client(names[0])).make(settings.users, settings.services)
        mixes = {
            name: Mix(client(name), population, clients=settings.clients, cpu=servers[name].cpu)
            for name in names
        }
        for mix in mixes.values():
            mix.prepare()
        for number in range(settings.rounds + 1):
            took = []
            for name in reversed(names) if number % 2 else names:
                with changed(servers.database_url(name), servings.changes):
                    one = mixes[name].ask()
                if number:
                    found[name].append(one)
                took.append(f"{name} {cloud_round.seconds(one):.1f} s")
            what = f"round {number} of {settings.rounds}" if number else "caches are filled"
            say(f"{what}: {', '.join(took)}")
    return found


def hash_milliseconds() -> float:
    """Return what the hash of a password takes here, of those that are made for the mix."""
    import bcrypt

    salt, took = bcrypt.gensalt(_HASH_ROUNDS), []
    for _ in range(20):
        begun = time.process_time()
        bcrypt.hashpw(b"a password of a usual length", salt)
        took.append(time.process_time() - begun)
    return 1000 * statistics.median(took)


def _times(found: Rounds, name: str, value: Callable[[Round], float]) -> list[float]:
    """Return a figure of a candidate as a multiple of that of stock Keystone with memcached."""
    pairs = zip(found[name], found[AGAINST], strict=True)
    return [value(one) / value(other) if value(other) else 0.0 for one, other in pairs]


def _cell(value: str, times: Sequence[float]) -> str:
    return f"{value} ({statistics.median(times):.2g})"


def rates(found: Rounds) -> Table:
    """Return requests a second, and how many times those of stock Keystone with memcached."""
    rows: list[list[Cell]] = []
    for name, rounds in found.items():
        row: list[Cell] = [CANDIDATES[name].label]
        for phase in PHASES:
            middle = statistics.median(one[phase].rate for one in rounds)
            times = _times(found, name, lambda one, phase=phase: one[phase].rate)  # type: ignore[misc]
            row.append(_cell(f"{middle:.0f}", times))
        times = _times(found, name, lambda one: 1 / cloud_round.seconds(one))
        row.append(_cell(f"{statistics.median(map(cloud_round.seconds, rounds)):.1f} s", times))
        rows.append(row)
    return Table(
        name="rates",
        columns=["a second", *PHASES, "whole mix"],
        rows=rows,
        caption="In brackets: times Keystone + memcached, the median of the rounds.",
    )


def first_in_words(found: Rounds) -> str:
    """Return the rate of first validations as a part of that of repeated ones."""
    parts = [
        f"{CANDIDATES[name].label} "
        f"{statistics.median(one['first'].rate / one['repeated'].rate for one in rounds):.2g}"
        for name, rounds in found.items()
    ]
    return f"First validations as a part of repeated ones: {', '.join(parts)}."


def cpu(found: Rounds, hash_ms: float) -> Table:
    """Return the CPU time of a request, of logins without the hash of the password as well."""
    rows: list[list[Cell]] = []
    for name, rounds in found.items():
        taken = {phase: one.cpu_milliseconds for phase, one in cloud_round.total(rounds).items()}
        login = taken.pop(LOGINS) or 0.0
        without = max(login - hash_ms, 0.0)
        row = [CANDIDATES[name].label, login, without, *taken.values()]
        rows.append([row[0], *(digits(one) for one in row[1:])])  # type: ignore[arg-type]
    return Table(
        name="cpu",
        columns=["CPU ms", LOGINS, "no hash", *PHASES[1:], WHOLE],
        rows=rows,
        caption=f"Of uWSGI, for a request. The hash takes {hash_ms:.2g} ms by itself, with "
        f"password_hash_rounds = {_HASH_ROUNDS}; Keystone's default of 12 takes 256 times that.",
    )


def latencies(found: Rounds) -> Table:
    """Return within how many milliseconds answers came."""
    rows: list[list[Cell]] = []
    for name, rounds in found.items():
        everything = cloud_round.total(rounds)
        parts = ((0.50, "p50"), (0.99, "p99"))
        for part, label in parts:
            values = [digits(everything[phase].milliseconds(part)) for phase in PHASES]
            rows.append([f"{CANDIDATES[name].label}, {label}", *values])
        failed = [everything[phase].failures.total() for phase in PHASES]
        if any(failed):
            rows.append([f"{CANDIDATES[name].label}, failed", *failed])
    return Table(name="latencies", columns=["ms", *PHASES], rows=rows)


def what_changes(found: Rounds, *, quick: bool, quiet: bool) -> list[Table]:
    """Return what keyfront changes, as the report begins with it.

    :param quick: true if the rounds are few
    :param quiet: true if nobody else used the machine
    """
    factor = chance(quick=quick, quiet=quiet)
    changes = []
    for phase in PHASES:
        values = {
            name: statistics.median(one[phase].rate for one in rounds)
            for name, rounds in found.items()
        }
        stock = max((name for name in found if name != OURS), key=lambda name: values[name])
        ours = zip(found[OURS], found[stock], strict=True)
        pairs = [one[phase].rate / other[phase].rate for one, other in ours]
        rates = values[stock], CANDIDATES[stock].label, values[OURS], "a second"
        what = f"The mix of a cloud: {LABELS[phase]}"
        changes.append(Change(what, *rates, pairs=pairs, chance=factor))
    return [changes_table(changes, factor), in_words(changes)]


def compare(settings: Settings, servings: Servings, *, name: str) -> tuple[Result, bool]:
    """Measure all candidates.

    :param name: the result's name
    :returns: the result, and whether a request failed
    """
    with Record(
        "comparison",
        name,
        title="What a cloud asks of Keystone: stock, with memcached, and keyfront",
        conditions={**asdict(settings), "repeated": TIMES, **asdict(servings)},
        distributions=("keystone", "uWSGI", "pyuwsgi", "pymemcache", "SQLAlchemy"),
        programs=("memcached", *(["mariadbd"] if servings.database == "mariadb" else [])),
    ) as record:
        found = measure(settings, servings)
    for candidate, rounds in found.items():
        record.samples += cloud_round.samples(rounds, candidate=candidate)
    record.tables += [rates(found), cpu(found, hash_milliseconds()), latencies(found)]
    record.note(first_in_words(found))
    record.note(f"{CANDIDATES[OURS].label}: {cloud_round.most_in_words(found[OURS])}")
    quiet = bool(record.result().others["quiet"])
    record.tables += what_changes(found, quick=settings.rounds < 3, quiet=quiet)
    failed = any(cloud_round.total(rounds)[WHOLE].failures for rounds in found.values())
    return record.result(), failed

"""One access log sent to several targets at once, each request at its time.

Every target has a sender of its own (an open loop), and all begin at the same moment. What came of
it stands side by side: what was lost, throughput, latency from when a request was due, and the CPU
time of those servers that were started here.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from keyfront.cli.credentials import login_of_environment
from keyfront.common import ranges
from keyfront.errors import BenchmarkError, MissingPartError, OptionError, StateError

from .. import results
from ..lineups import lineup
from ..lineups.keystone import Keystone
from ..lineups.lineup import Lineup, Served
from ..results import Cell, Record, Sample, Table, Timeline
from ..servers import processes
from ..servers.processes import Cores
from . import access_log, generators, rewrite, sender, synthetic
from . import arguments as given
from .access_log import Entry
from .sweep import asked, number

# What a replay counts as lost: no answer, or one that says the server could not.
LOST_STATUS = 500
NO_LOGIN = (
    "a login is needed for a target that is a URL: name its state folder with --state, or set "
    "OS_USERNAME, OS_PASSWORD and OS_PROJECT_NAME as for the openstack command"
)
# Requests per second for a second, before.
_WARM_RATE = 30
# Seconds until all senders have read their jobs.
_READY = 2.0


@dataclass(frozen=True)
class Target:
    """A server that requests go to.

    :param name: the server's name in results
    :param where: a line-up that is started for the replay, or ``http://HOST:PORT``
    """

    name: str
    where: Lineup | str


def target(text: str) -> Target:
    """Read ``[NAME=]http://HOST:PORT`` or ``[NAME=]TOPOLOGY[:TUNING[:cached|plain]]``.

    :raises OptionError: it is not of that form
    """
    name, mark, rest = text.partition("=")
    if not mark:
        name, rest = text, text
    if "://" not in rest:
        found = lineup.parse("--target", rest)
        return Target(name if mark else str(found), found)
    parts = urlsplit(rest)
    try:
        port = parts.port
    except ValueError:
        port = None
    wrong = parts.path not in ("", "/") or parts.query or parts.username
    if parts.scheme != "http" or not parts.hostname or not port or wrong:
        raise OptionError("--target", rest, "http://HOST:PORT without a path, or a line-up")
    return Target(name, rest.rstrip("/"))


@dataclass
class Job:
    """The requests of a log, once it is made ready.

    :ivar requests: seconds after the beginning, and the entry
    :ivar left_out: requests that would have changed the target
    """

    requests: list[tuple[float, Entry]] = field(default_factory=list)
    left_out: int = 0

    @property
    def seconds(self) -> float:
        return self.requests[-1][0] if self.requests else 0.0


def job(entries: Sequence[Entry], *, speed: float, seconds: float | None = None) -> Job:
    """Space a log's requests.

    :param speed: 2 sends them twice as fast
    :param seconds: stop after so many; default: the whole log
    :raises BenchmarkError: nothing in it can be replayed
    """
    found = Job()
    for at, entry in access_log.spaced(entries):
        if seconds is not None and at / speed > seconds:
            break
        if rewrite.form(entry) is None:
            found.left_out += 1
        else:
            found.requests.append((at / speed, entry))
    if not found.requests:
        raise BenchmarkError(
            f"the log has no request that can be replayed: {found.left_out} would change the target"
        )
    return found


@dataclass(frozen=True)
class _Aim:
    """A target that is ready, and when which request goes to it."""

    name: str
    url: str
    served: Served | None
    wires: rewrite.Wires
    schedule: list[tuple[float, int]]

    def job(self, start: float) -> bytes:
        parts = urlsplit(self.url)
        address = (parts.hostname or "", parts.port or 80)
        return sender.job(
            address, self.wires.wires, self.schedule, start=start, patience=generators.PATIENCE,
            limit=LOST_STATUS,
        )  # fmt: skip

    def sample(self, found: dict[str, Any], before: dict[str, float]) -> Sample:
        """Return what became of it.

        :param found: the figures that its sender printed
        :param before: CPU seconds of its programs until the beginning
        """
        outcome, cpu = generators.parse_sent(found), {}
        if self.served is not None:
            cpu = self.served.cores(before, outcome.seconds)
            self.served.check()
        return {
            "target": self.name,
            **outcome.sample(),
            "lost": outcome.failed,
            "lost_share": outcome.failed_share,
            "as_logged_share": rewrite.as_logged(self.wires.logged, found["by_place"]),
            "statuses": found["statuses"],
            "cpu_cores": cpu,
        }


def replay(
    todo: Job,
    targets: Sequence[Target],
    record: Record,
    *,
    keystone: Keystone | None,
    login: dict[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """Send a log to all targets; fills in samples, timelines and the table of a record.

    :param keystone: for targets that are line-ups
    :param login: the body of a login at targets that are URLs
    """
    cores = processes.split()
    if not cores.apart:
        record.note("the senders share their only core with the servers")
    if sum(isinstance(one.where, Lineup) for one in targets) > 1:
        record.note("the targets share the same cores, so each slows the other down")
    with ExitStack() as stack:
        aims = []
        for one in targets:
            say(f"{one.name}: {'starts' if isinstance(one.where, Lineup) else 'is asked'}")
            aims.append(stack.enter_context(_ready(one, todo, keystone, login, cores)))
        # all of them know when to begin only once all of them are there
        needed = _READY + len(todo.requests) / 200_000
        while True:
            start = time.monotonic() + needed
            jobs = [aim.job(start) for aim in aims]
            before = [aim.served.cpu() if aim.served else {} for aim in aims]
            if time.monotonic() <= start:
                break
            # this machine stood still, or is busy
            needed *= 2
        sending = [
            stack.enter_context(generators.sending(job, aim.name, cores.generator))
            for aim, job in zip(aims, jobs, strict=True)
        ]
        say(f"{len(todo.requests)} requests in {todo.seconds:.0f} s to {len(aims)} targets at once")
        wait = start - time.monotonic() + todo.seconds + 2 * generators.PATIENCE
        for aim, process, spent in zip(aims, sending, before, strict=True):
            found = json.loads(processes.finished(process, wait)[0])
            record.samples.append(aim.sample(found, spent))
            for place, what in ((1, "answered"), (2, "lost")):
                points = [[float(one[0]), float(one[place])] for one in found["timeline"]]
                name = f"{aim.name}: {what}"
                record.timelines.append(Timeline(name=name, unit="requests/s", points=points))
    record.tables[:] = [table(record.samples)]


@contextmanager
def _ready(
    one: Target, todo: Job, keystone: Keystone | None, login: dict[str, Any] | None, cores: Cores
) -> Iterator[_Aim]:
    with ExitStack() as stack:
        served = None
        if isinstance(one.where, Lineup):
            assert keystone is not None
            served = stack.enter_context(lineup.served(one.where, keystone, cores))
            # every worker loads Keystone's database before it counts
            request = asked(served, "projects")
            generators.constant(request, rate=_WARM_RATE, seconds=1, cores=cores.generator)
            served.settle()
            login = keystone.login()
        assert login is not None
        url = served.url if served else str(one.where)
        wires = rewrite.Wires(rewrite.identity(url, login))
        forms = ((at, rewrite.form(entry), entry.status) for at, entry in todo.requests)
        schedule = [(at, wires.place(form, status)) for at, form, status in forms if form]
        yield _Aim(one.name, url, served, wires, schedule)


def table(samples: Sequence[Sample]) -> Table:
    """Return the targets side by side."""

    def cores(one: Sample) -> Cell:
        cpu = one["cpu_cores"]
        return number(sum(cpu.values())) if cpu else None

    return results.tabled(
        "targets",
        samples,
        {
            "target": lambda one: one["target"] + "*" * one["generator_limit"],
            "requests": lambda one: one["good"] + one["lost"],
            "lost": lambda one: f"{100 * one['lost_share']:.3g} %",
            "answered as logged": lambda one: f"{100 * one['as_logged_share']:.3g} %",
            "answers/s": lambda one: number(one["rate"]),
            "p50, ms": lambda one: number(one["p50_ms"]),
            "p95, ms": lambda one: number(one["p95_ms"]),
            "p99, ms": lambda one: number(one["p99_ms"]),
            "CPU, cores": cores,
        },
        "Lost: no answer within 30 s, or 5xx. Latency counts from when a request was due. "
        "* its sender may have been the limit.",
    )


def login_of(keystone: Keystone | None) -> dict[str, Any]:
    """Return the login for targets that are URLs: a state folder's, or the openstack command's.

    :raises StateError: there is no Keystone in the folder
    :raises MissingPartError: there is neither
    """
    if keystone is None:
        try:
            return {"auth": login_of_environment()}
        except OptionError:
            raise MissingPartError(NO_LOGIN) from None
    if not keystone.state.check():
        raise StateError(f"{keystone.state.path}: has no Keystone; keyfront serve makes one")
    return keystone.login()


def record(name: str, log: str, todo: Job, speed: float) -> Record:
    """Return the record of a replay.

    :param log: the log that was replayed, in words
    """
    return Record(
        "replay",
        name,
        title=f"{log} to several targets at once",
        conditions={
            "log": log,
            "speed": speed,
            "requests": len(todo.requests),
            "left_out": todo.left_out,
            "log_seconds": round(todo.seconds * speed, 3),
        },
        distributions=("keystone", "uwsgi", "pyuwsgi", "mod_wsgi", "gevent"),
        programs=("nginx", "apache2"),
    )


TARGETS = ("nginx+uwsgi:stock:plain", "nginx+uwsgi:tuned:cached")
# Of the log that is made up when none is named.
SECONDS, QUICK_SECONDS, RATE = 60.0, 8.0, 10.0


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Send the requests of an access log to several targets at once, each at its time. Tokens "
        "and ids are replaced by those of the target; requests that would change it are left out, "
        "but for logins. A target on another host gets this load only if you name that host."
    )
    text = "combined (nginx, Apache), uWSGI's or JSON (default: a synthetic one of a minute)"
    parser.add_argument("log", nargs="?", type=Path, metavar="LOG", help=text)
    text = "http://HOST:PORT, or TOPOLOGY[:TUNING[:cached|plain]], which is started on loopback; "
    text += f"give several (default: {' and '.join(TARGETS)})"
    parser.add_argument("--target", action="append", metavar="[NAME=]URL|LINE-UP", help=text)
    given.add_texts(
        parser,
        ("--speed", "N", "2 is twice as fast, 0.01 to 1000 (default: 1)"),
        ("--seconds", "N", "stop after so many, 0.1 to 86400 (default: the whole log)"),
    )
    text = "a look: a synthetic log of some seconds"
    parser.add_argument("--quick", action="store_true", help=text)
    given.add_name(parser, "log")
    given.add_state(parser)
    results.add_argument(parser)


def run(arguments: Namespace, out: TextIO) -> int:
    """Replay, and print the table.

    :raises KeyfrontError: it cannot be replayed here, or an argument is wrong
    """
    speed = ranges.decimal("--speed", arguments.speed or "1", 0.01, 1000)
    seconds = None
    if arguments.seconds:
        seconds = ranges.decimal("--seconds", arguments.seconds, 0.1, 86400)
    targets = [target(text) for text in arguments.target or TARGETS]
    names = [one.name for one in targets]
    for name in names:
        if names.count(name) > 1:
            raise OptionError("--target", name, "named once; tell two by NAME=")
    if arguments.log is not None:
        entries = access_log.read(arguments.log)
        log = arguments.log.name
    else:
        length = (QUICK_SECONDS if arguments.quick else SECONDS) * speed
        entries = list(synthetic.entries(seconds=length, rate=RATE))
        log = f"a synthetic log, {RATE:g} requests/s"
    todo = job(entries, speed=speed, seconds=seconds)

    say = results.to(out)
    login = None
    if not all(isinstance(one.where, Lineup) for one in targets):
        login = login_of(Keystone(arguments.state) if arguments.state else None)
    results.prepare(arguments.results)
    with given.ended_in_order(), ExitStack() as stack:
        try:
            keystone: Keystone | None = None
            if any(isinstance(one.where, Lineup) for one in targets):
                keystone = stack.enter_context(given.keystone(arguments, say))
            with record(arguments.name, log, todo, speed) as recorded:
                if todo.left_out:
                    changing = f"{todo.left_out} requests that would change the target: left out"
                    recorded.note(changing)
                replay(todo, targets, recorded, keystone=keystone, login=login, say=say)
        except KeyboardInterrupt:
            say("interrupted; nothing was written")
            return 130
    result = recorded.result()
    path = results.write(result, arguments.results)
    out.write(results.told(result, path))
    return 0

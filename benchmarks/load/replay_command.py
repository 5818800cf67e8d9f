"""``keyfront bench replay``: its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from keyfront.errors import MissingPartError, OptionError

from .. import results
from ..lineups.keystone import Keystone
from ..lineups.lineup import Lineup
from . import access_log, replay, synthetic
from . import arguments as given

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
    parser.add_argument(
        "log",
        nargs="?",
        type=Path,
        metavar="LOG",
        help="combined (nginx, Apache), uWSGI's or JSON (default: a synthetic one of a minute)",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="[NAME=]URL|LINE-UP",
        help="http://HOST:PORT, or TOPOLOGY[:TUNING[:cached|plain]], which is started on loopback; "
        f"give several (default: {' and '.join(TARGETS)})",
    )
    parser.add_argument(
        "--speed", default="1", metavar="N", help="2 is twice as fast, 0.01 to 1000 (default: 1)"
    )
    parser.add_argument(
        "--seconds", metavar="N", help="stop after so many, 0.1 to 86400 (default: the whole log)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a look: a synthetic log of some seconds"
    )
    parser.add_argument(
        "--name", default="log", metavar="NAME", help="of the result (default: %(default)s)"
    )
    given.add_state(parser)
    results.add_argument(parser)


def run(arguments: Namespace, out: TextIO) -> int:
    """Replay, and print the table.

    :raises KeyfrontError: it cannot be replayed here, or an argument is wrong
    """
    speed = given.decimal("--speed", arguments.speed, 0.01, 1000)
    seconds = None
    if arguments.seconds:
        seconds = given.decimal("--seconds", arguments.seconds, 0.1, 86400)
    targets = [replay.target(text) for text in arguments.target or TARGETS]
    names = [target.name for target in targets]
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
    todo = replay.job(entries, speed=speed, seconds=seconds)

    def say(text: str) -> None:
        out.write(f"{text}\n")
        out.flush()

    for target in targets:
        if target.elsewhere:
            say(f"{target.name}: is another host; it gets the load since you named it")
    login = None
    if not all(isinstance(target.where, Lineup) for target in targets):
        login = replay.login_of(Keystone(arguments.state) if arguments.state else None)
        if login is None:
            raise MissingPartError(replay.NO_LOGIN)
    results.prepare(arguments.results)
    with given.ended_in_order(), ExitStack() as stack:
        try:
            keystone: Keystone | None = None
            if any(isinstance(target.where, Lineup) for target in targets):
                keystone = stack.enter_context(given.keystone(arguments, say))
            with replay.record(arguments.name, log, todo, speed) as record:
                if todo.left_out:
                    record.note(f"{todo.left_out} requests that would change the target: left out")
                replay.replay(
                    todo,
                    targets,
                    record,
                    keystone=keystone,
                    login=login,
                    say=say,
                )
        except KeyboardInterrupt:
            say("interrupted; nothing was written")
            return 130
    path = replay.write(record, arguments.results)
    result = results.read(path)
    for table in result.tables:
        say(f"\n{results.markdown(table)}")
    for note in result.notes:
        say(f"note: {note}")
    say(f"\nwritten to {path}")
    return 0

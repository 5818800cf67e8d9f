"""``keyfront bench sweep``: its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TextIO

from .. import results
from ..lineups import files
from ..lineups.lineup import CACHES, Lineup
from . import arguments as given
from . import generators, sweep

HIGHEST = 60000
# Three minutes on two cores at most, with the Keystone that it makes.
QUICK_LINEUPS = (
    Lineup("nginx+uwsgi", "stock", False),
    Lineup("nginx+uwsgi", "tuned", False),
    Lineup("nginx+uwsgi", "tuned", True),
)
QUICK_POINTS = "10,100"
QUICK = {"seconds": "4", "warm_up": "2", "pause": "0"}
DEFAULTS = {"seconds": "10", "warm_up": "10", "pause": "2"}
# What was published: two minutes a point, half a minute between, one of warming.
PUBLISHED = {"seconds": "120", "warm_up": "60", "pause": "30"}


def add(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Measure Keystone's throughput, latency and failures against connections, for each line-up "
        "of servers. Everything runs on loopback; the generator has a core of its own if there are "
        "two. An interrupted sweep goes on where it was when it is started again."
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME[,NAME]",
        help=f"of {', '.join(files.TOPOLOGIES)} (default: all)",
    )
    parser.add_argument(
        "--tuning",
        action="append",
        metavar="NAME[,NAME]",
        help=f"of {', '.join(files.TUNINGS)} (default: stock and tuned)",
    )
    parser.add_argument(
        "--cache",
        action="append",
        metavar="off|on",
        help="keyfront's token cache (default: off and on)",
    )
    parser.add_argument(
        "--points",
        metavar="N,N|FROM-TO/STEP",
        help="connections, 1 to 60000 (default: 10-100/10,100-1000/100,2000,5000)",
    )
    parser.add_argument(
        "--rates", metavar="N,N", help="constant rates too, in requests per second (default: none)"
    )
    parser.add_argument(
        "--request",
        default="projects",
        metavar="|".join(sweep.REQUESTS),
        help="what is asked: the published test's list of projects, or the validation of a token "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--generator",
        default="auto",
        metavar="NAME",
        help=f"of {', '.join(generators.GENERATORS[:-1])} (default: wrk, and ab for servers that "
        "close without saying so)",
    )
    parser.add_argument("--seconds", metavar="N", help="of each point, 1 to 3600 (default: 10)")
    parser.add_argument("--warm-up", metavar="N", help="seconds, 1 to 3600 (default: 10)")
    parser.add_argument(
        "--pause", metavar="N", help="seconds between points, 0 to 600 (default: 2)"
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="120 s a point, 30 s between, 60 s of warming, as published",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a look within three minutes: nginx and uWSGI, stock, tuned and with the cache",
    )
    parser.add_argument(
        "--name", default="keystone", metavar="NAME", help="of the result (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    given.add_state(parser)
    results.add_argument(parser)


def run(arguments: Namespace, out: TextIO) -> int:
    """Sweep, and print the tables.

    :raises KeyfrontError: it cannot run here, or an argument is wrong
    """
    settings = read(arguments)
    sweep.check(settings)
    results.prepare(arguments.results)

    def say(text: str) -> None:
        out.write(f"{text}\n")
        out.flush()

    path = arguments.results / results.file_name("sweep", settings.name)
    if arguments.fresh:
        path.unlink(missing_ok=True)
    with given.ended_in_order():
        try:
            with given.keystone(arguments, say) as found:
                path = sweep.Sweep(settings, found, arguments.results, out).run()
        except KeyboardInterrupt:
            say(f"interrupted; the same command goes on with {path}")
            return 130
    result = results.read(path)
    for table in result.tables:
        say("")
        say(results.markdown(table))
    for note in result.notes:
        say(f"note: {note}")
    say(f"\nwritten to {path}; keyfront bench report makes a page of it")
    return 0


def read(arguments: Namespace) -> sweep.Settings:
    """What the arguments ask for.

    :raises OptionError: one is wrong
    """
    defaults = DEFAULTS
    if arguments.published:
        defaults = PUBLISHED
    if arguments.quick:
        defaults = QUICK
    numbers = {name: getattr(arguments, name) or default for name, default in defaults.items()}
    chosen = (arguments.topology, arguments.tuning, arguments.cache)
    if arguments.quick and not any(chosen):
        wanted = list(QUICK_LINEUPS)
    else:
        wanted = sweep.lineups(
            given.choices("--topology", arguments.topology, files.TOPOLOGIES),
            given.choices("--tuning", arguments.tuning or ["stock,tuned"], files.TUNINGS),
            given.choices("--cache", arguments.cache, CACHES),
        )
    points = list(sweep.PUBLISHED_POINTS)
    text = arguments.points or (QUICK_POINTS if arguments.quick else "")
    if text:
        points = given.points("--points", text, HIGHEST)
    rates = given.points("--rates", arguments.rates, HIGHEST) if arguments.rates else []
    return sweep.Settings(
        name=arguments.name,
        lineups=wanted,
        points=points,
        rates=rates,
        request=arguments.request,
        seconds=given.whole("--seconds", numbers["seconds"], 1, 3600),
        warm_up=given.whole("--warm-up", numbers["warm_up"], 1, 3600),
        pause=given.decimal("--pause", numbers["pause"], 0, 600),
        generator=arguments.generator,
    )

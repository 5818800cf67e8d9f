"""Stock files of the field against those of ``keyfront render``, from 10 to 5000 connections.

    python -m keyfront.benchmarks.deploy_sweep [--quick] [--json FILE] [--markdown]

Makes one Keystone on SQLite in a temporary folder and serves it by one setting after the other (see
``deploy_settings.py``), with keyfront's token cache and without it, each loaded by wrk at a growing
number of kept connections: 10 to 100 by 10, to 1000 by 100, 2000 and 5000. Of each point it tells
good answers a second, what was refused with 503 and Retry-After (*shed*), failures by kind (other
statuses; connections that were refused, reset or timed out), p50 and p99 of all answers, CPU time
per answer and the servers' memory.

With ``--json`` each point is written as it is measured, and another run with the same file goes on
where it ended; a whole sweep takes about two hours. ``--quick`` takes 10, 100, 1000 and 5000
connections of six settings, some minutes.

wrk runs on the same cores. In its closed loop a connection that is refused asks again at once, so
beyond what a server can do refusals are many; what counts is that every request gets an answer.
More connections than files that a process may open (``ulimit -n``) cannot be measured.

Ends with status 1 if ours broke a promise: a failure of any kind, a refusal with the cache on, a
refusal later than twice the latency target, or less than nine tenths of the rival's throughput.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from keyfront.errors import KeyfrontError, OptionError, ServerError
from keyfront.gateway.serve import lineups as shapes

from . import deploy_load
from .deploy_report import Point, Results, key, markdown, missed
from .deploy_servers import Deployment, Deployments
from .deploy_settings import OURS, QUICK, STOCK
from .load import wrk

POINTS = (*range(10, 100, 10), *range(100, 1000, 100), 1000, 2000, 5000)
QUICK_POINTS = (10, 100, 1000, 5000)
SECONDS = 10
# Longer than the latency target, or nothing would be refused within a run.
QUICK_SECONDS = 8
# Of the rival's throughput: less is slower, more is noise.
NOISE = 0.9


def say(text: str) -> None:
    """A line of progress; the result alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(
    results: Results, settings: Sequence[str], points: Sequence[int], caches: Sequence[bool],
    seconds: int,
) -> float:
    """Measure what is not in the results yet; returns the latency target in seconds.

    :raises MissingPartError: wrk, a web server, uWSGI, mod_wsgi or Keystone is not installed
    :raises ServerError: Keystone could not be made, or wrk failed
    """  # fmt: skip
    wrk.program()
    for server in ("nginx+uwsgi", "apache+uwsgi"):
        shapes.check(server)
    with tempfile.TemporaryDirectory(prefix="deploy-sweep-") as folder:
        deployments = Deployments(Path(folder))
        todo = {
            (name, cache): left
            for cache in caches
            for name in settings
            if (left := [x for x in points if key(name, cache, x) not in results.points])
        }
        if todo:
            say("a Keystone is made")
            deployments.create()
        for (name, cache), left in todo.items():
            try:
                with deployments.running(name, cache=cache) as deployment:
                    for connections in left:
                        point = _once(deployments, deployment, connections, seconds)
                        results.add(key(name, cache, connections), point)
                        say(f"{key(name, cache, connections)}: {_line(point)}")
            except ServerError as error:
                # a stock setting may not survive; the others go on
                for connections in left:
                    if key(name, cache, connections) not in results.points:
                        results.add(key(name, cache, connections), {"broken": str(error)[:300]})
                say(f"{name}: {error}")
        return deployments.workload.latency


def _once(
    deployments: Deployments, deployment: Deployment, connections: int, seconds: int
) -> Point:
    before = deployment.cpu()
    seen = deploy_load.run(
        deployment.url(), deployments.headers, seconds=seconds, connections=connections
    )
    spent = deployment.cpu() - before
    described = seen.described()
    if not seen.statuses.total():
        # what is under way when a run ends is not counted, and it may be all
        described["failures"]["no answer"] = connections
    return {
        **described,
        "cpu": round(1e6 * spent / max(1, seen.statuses.total()), 1),
        "memory": round(deployment.memory(), 1),
    }


def _line(point: Point) -> str:
    return (
        f"{point['rate']:.0f}/s, p99 {point['p99']:.0f} ms, shed {point['shed']}, "
        f"failures {point['failures']}"
    )


def _enough_files(points: Sequence[int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(points) + 256
    if hard < wanted:
        raise OptionError(
            "--points", max(points), f"at most {hard - 256} here, by the limit on open files"
        )
    if soft < hard:
        # wrk's, and the servers', as LimitNOFILE= would
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _points(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError("must be numbers of connections, divided by commas")
    return tuple(map(int, parts))


def _names(text: str) -> tuple[str, ...]:
    known = (*STOCK, *OURS)
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if ours broke a promise, 2 if it cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="four points of six settings")
    parser.add_argument("--points", type=_points, metavar="N,...", help="connections")
    parser.add_argument("--settings", type=_names, metavar="NAME,...", help="only these")
    parser.add_argument("--cache", choices=("on", "off"), help="only one of the two")
    parser.add_argument(
        "--seconds", type=int, choices=range(1, 301), metavar="SECONDS",
        help=f"per point (default {SECONDS}, quick {QUICK_SECONDS})",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write to it, and go on from it")
    parser.add_argument("--markdown", action="store_true", help="print tables")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    points = options.points or (QUICK_POINTS if options.quick else POINTS)
    settings = options.settings or (QUICK if options.quick else (*STOCK, *OURS))
    caches = {"on": (True,), "off": (False,)}.get(options.cache, (True, False))
    # what runs is taken down as after Ctrl-C
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if options.json and not options.json.absolute().parent.is_dir():
            raise OptionError("--json", options.json, "a file in a folder that exists")
        _enough_files(points)
        results = Results(options.json, seconds)
        latency = measure(results, settings, points, caches, seconds)
    except KeyfrontError as error:
        say(f"deploy_sweep: {error}")
        return 2
    except KeyboardInterrupt:
        say("deploy_sweep: interrupted; another run with the same --json goes on")
        return 130
    if options.markdown:
        print(markdown(results.points, settings, points))
    else:
        for name, point in results.points.items():
            print(f"{name}: {point['broken'] if 'broken' in point else _line(point)}")
    lines = missed(results.points, latency=latency, slower=NOISE)
    for line in lines:
        say(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

"""``keyfront serve``: Keystone from nothing to answering, on this machine, with one command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from keyfront import __version__
from keyfront.common.programs import claim, front_user, parse_listen
from keyfront.errors import OptionError
from keyfront.gateway import application
from keyfront.gateway.serve import lineups, state, supervisor

from .parser import add_state_argument

_DEFAULT_LISTEN = "127.0.0.1:5000"
_DEFAULT_STOP_TIMEOUT = 30
_STOP_TIMEOUTS = range(1, 3601)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``keyfront serve``.

    :param state: the state folder
    :param listen: ``HOST:PORT``; port 0 takes a free one
    :param server: one of :data:`.lineups.SERVERS`
    :param fresh: delete the state folder first
    :param stop_timeout: seconds that running requests get on a stop, 1 to 3600
    :param target: the application, as in ``KEYFRONT_APP``; by default the packaged pipeline
    """

    state: Path
    listen: str = _DEFAULT_LISTEN
    server: str = "uwsgi"
    fresh: bool = False
    stop_timeout: int = _DEFAULT_STOP_TIMEOUT
    target: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Serve a Keystone on this machine until Ctrl-C. The first run makes it; later runs go on "
        "with the same state. SIGHUP reloads, SIGTERM stops."
    )
    add_state_argument(parser)
    parser.add_argument(
        "--listen",
        default=_DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="address to listen at; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--server",
        default="uwsgi",
        metavar="|".join(lineups.SERVERS),
        help="what serves it (default: %(default)s)",
    )
    parser.add_argument(
        "--stop-timeout",
        default=str(_DEFAULT_STOP_TIMEOUT),
        metavar="SECONDS",
        help="what running requests get when it stops, 1 to 3600 (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete the state folder first and start over"
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Serve Keystone as the command line says; returns the exit status.

    :raises KeyfrontError: see :func:`serve`
    """
    seconds = str(arguments.stop_timeout)
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise OptionError("--stop-timeout", seconds, "a number of seconds, 1 to 3600")
    options = Options(
        state=arguments.state or state.default_path(),
        listen=arguments.listen,
        server=arguments.server,
        fresh=arguments.fresh,
        stop_timeout=int(seconds),
        target=os.environ.get(application.TARGET_VARIABLE),
    )
    return serve(options, out)


class Progress:
    """Prints each step when it starts and, behind it, the seconds it took."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self._out.write(f"  {text} ... ")
        self._out.flush()
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self.line("")
            raise
        self.line(f"{time.monotonic() - start:.1f} s")

    def line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def check_target(target: str) -> None:
    """Find out that a target names something, without importing the application."""
    if target == application.default_target():
        return
    # uWSGI looks in its working folder, which is this one, too
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        application.check(target)
    finally:
        sys.path.remove(here)


def serve(options: Options, out: TextIO) -> int:
    """Serve Keystone until a signal; returns the exit status.

    :raises KeyfrontError: it cannot be served; nothing is left running or half-written
    """
    # everything that can be found wrong is found before anything is written
    if options.server not in lineups.SERVERS:
        raise OptionError("--server", options.server, f"one of {', '.join(lineups.SERVERS)}")
    if options.stop_timeout not in _STOP_TIMEOUTS:
        raise OptionError("--stop-timeout", options.stop_timeout, "a number of seconds, 1 to 3600")
    host, port = parse_listen(options.listen)
    target = options.target or application.default_target()
    check_target(target)
    lineups.check(options.server)
    folder = state.State(options.state)
    if not options.fresh:
        folder.check()
    port = claim(options.listen, host, port)
    address = supervisor.hostname_port(host, port)
    reach = supervisor.connect_host(host)
    endpoint = f"http://{supervisor.hostname_port(reach, port)}/v3"

    progress = Progress(out)
    keystone = importlib.metadata.version("keystone")
    progress.line(f"keyfront {__version__} serves Keystone {keystone} with {options.server}")
    with folder.locked():
        if options.fresh:
            folder.remove()
        # looked at again: another one may have made it just now
        _prepare(folder, folder.check(), endpoint, progress)
        runtime = Path(tempfile.mkdtemp(prefix="keyfront-"))
        try:
            # a web server's own user has to reach the socket inside
            runtime.chmod(0o711 if front_user() else 0o700)
            lineup = lineups.Lineup(
                state=folder,
                listen=address,
                target=target,
                runtime=runtime,
                stop_timeout=options.stop_timeout,
            )
            return _run(options, lineup, (reach, port, endpoint), progress)
        finally:
            shutil.rmtree(runtime, ignore_errors=True)


def _prepare(folder: state.State, usable: bool, endpoint: str, progress: Progress) -> None:
    if not usable:
        steps = folder.create(endpoint)
        text = next(steps, None)
        while text is not None:
            with progress.step(text):
                text = next(steps, None)
        return
    progress.line(f"  state folder {folder.path} ... as it is")
    folder.run.mkdir(mode=0o700, exist_ok=True)
    folder.log.mkdir(mode=0o700, exist_ok=True)
    if folder.endpoint() != endpoint:
        with progress.step(f"catalog moves to {endpoint}"):
            folder.bootstrap(endpoint)
            folder.write_configuration(endpoint)


def _run(
    options: Options, lineup: lineups.Lineup, where: tuple[str, int, str], progress: Progress
) -> int:
    reach, port, endpoint = where
    programs = lineups.programs(options.server, lineup)
    supervising = supervisor.Supervisor(programs, stop_timeout=options.stop_timeout)
    with supervising.signals():
        try:
            names = " in front of ".join(program.name for program in reversed(programs))
            with progress.step(f"start of {names}"):
                supervising.start()
                ready = supervising.wait_ready(reach, port, "/v3")
            if ready:
                _greet(lineup, endpoint, progress)
                supervising.watch()
        finally:
            with progress.step(f"stop, after running requests (up to {options.stop_timeout} s)"):
                supervising.stop()
    progress.line("Stopped. The next run goes on with the same state.")
    return 0


def _greet(lineup: lineups.Lineup, endpoint: str, progress: Progress) -> None:
    folder = lineup.state
    program = Path(sys.prefix, "bin", "keyfront")
    progress.line("")
    progress.line(f"Keystone answers at  {endpoint}")
    check = shlex.join([str(program), "check", "--state", str(folder.path)])
    progress.line(f"Try next             {check}")
    progress.line(f"For openstack        . {shlex.quote(str(folder.openrc))}")
    progress.line(f"Logs                 {folder.log}")
    progress.line("Stop with            Ctrl-C")
    progress.line("")

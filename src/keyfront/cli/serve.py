"""``keyfront serve``: Keystone from nothing to answering, on this machine, with one command."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from keyfront import __version__
from keyfront.common import ranges, unix_sockets
from keyfront.common.programs import claim, front_user, parse_listen
from keyfront.errors import OptionError
from keyfront.gateway import application
from keyfront.gateway.keystone import series
from keyfront.gateway.serve import database, lineups, state, supervisor

from .parser import add_state_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Serve a Keystone on this machine until Ctrl-C. The first run makes it; later runs go on "
        "with the same state. SIGHUP reloads, SIGTERM stops."
    )
    add_state_argument(parser)
    parser.add_argument(
        "--listen",
        default="127.0.0.1:5000",
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
        database.OPTION,
        metavar="URL|@FILE",
        help="the empty database of a MariaDB, MySQL or PostgreSQL that it makes its tables in, as "
        "mysql+pymysql://USER@HOST/NAME; a URL with a password goes into a file of mode 0600 "
        "(default: SQLite in the state folder)",
    )
    parser.add_argument(
        "--stop-timeout",
        default="30",
        metavar="SECONDS",
        help="what running requests get when it stops, 1 to 3600 (default: %(default)s)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="delete the state folder first and start over; what is in --database stays",
    )


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Serve Keystone until a signal; returns the exit status.

    :raises KeyfrontError: it cannot be served; nothing is left running or half-written
    """
    # everything that can be found wrong is found before anything is written
    allowed = "a number of seconds, 1 to 3600"
    seconds = ranges.whole("--stop-timeout", arguments.stop_timeout, 1, 3600, allowed)
    server = arguments.server
    folder = state.State(arguments.state or state.default_path())
    if server not in lineups.SERVERS:
        raise OptionError("--server", server, f"one of {', '.join(lineups.SERVERS)}")
    host, port = parse_listen(arguments.listen)
    target = os.environ.get(application.TARGET_VARIABLE) or application.default_target()
    check_target(target)
    lineups.check(server)
    chosen = database.read(arguments.database) if arguments.database else None
    if not arguments.fresh:
        folder.check()
    if chosen is not None:
        database.look(chosen)
    with claim(arguments.listen, host, port) as port:
        return _serve(arguments, folder, chosen, (host, port), target, seconds, Progress(out))


def _serve(
    arguments: argparse.Namespace,
    folder: state.State,
    chosen: database.Database | None,
    listen: tuple[str, int],
    target: str,
    stop_timeout: int,
    progress: Progress,
) -> int:
    host, port = listen
    server = arguments.server
    reach = supervisor.connect_host(host)
    endpoint = f"http://{supervisor.hostname_port(reach, port)}/v3"

    progress.line(f"keyfront {__version__} serves Keystone {series.installed()} with {server}")
    with folder.locked():
        if arguments.fresh:
            folder.remove()
        # looked at again: another one may have made it just now
        _prepare(folder, folder.check(), endpoint, chosen, progress)
        runtime = Path(tempfile.mkdtemp(prefix="keyfront-", dir=unix_sockets.temporary_parent()))
        try:
            # a web server's own user has to reach the socket inside
            runtime.chmod(0o711 if front_user() else 0o700)
            lineup = lineups.Lineup(
                state=folder,
                listen=supervisor.hostname_port(host, port),
                target=target,
                runtime=runtime,
                stop_timeout=stop_timeout,
            )
            exposed = server in lineups.ALONE and not supervisor.is_loopback(host)
            return _run(server, lineup, (reach, port, endpoint), progress, exposed)
        finally:
            shutil.rmtree(runtime, ignore_errors=True)


class Progress:
    """Prints each step when it starts and, behind it, the seconds it took.

    Where nothing can be printed, as into a file of a full disk, it goes on without a word.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self._print(f"  {text} ... ")
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self.line("")
            raise
        self.line(f"{time.monotonic() - start:.1f} s")

    def line(self, text: str) -> None:
        self._print(f"{text}\n")

    def _print(self, text: str) -> None:
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()


def check_target(target: str) -> None:
    """Find out that a target names something, without importing the application.

    :param target: the application, as in ``KEYFRONT_APP``
    :raises KeyfrontError: it names nothing; see :func:`.application.check`
    """
    if target == application.default_target():
        return
    # uWSGI looks in its working folder, which is this one, too
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        application.check(target)
    finally:
        sys.path.remove(here)


def _prepare(
    folder: state.State,
    usable: bool,
    endpoint: str,
    chosen: database.Database | None,
    progress: Progress,
) -> None:
    if chosen is not None and usable and not folder.uses(chosen):
        raise OptionError(
            database.OPTION, chosen,
            f"the one of {folder.config}, which this state was made with; name another folder with "
            "--state, or start over with --fresh",
        )  # fmt: skip
    if not usable:
        steps = folder.create(endpoint, chosen)
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
            folder.write_endpoint(endpoint)


def _run(
    server: str,
    lineup: lineups.Lineup,
    where: tuple[str, int, str],
    progress: Progress,
    exposed: bool,
) -> int:
    reach, port, endpoint = where
    programs = lineups.programs(server, lineup)
    supervising = supervisor.Supervisor(programs, stop_timeout=lineup.stop_timeout)
    with supervising.signals():
        try:
            names = " in front of ".join(program.name for program in reversed(programs))
            with progress.step(f"start of {names}"):
                supervising.start()
                ready = supervising.wait_ready(reach, port, "/v3")
            if ready:
                _greet(lineup, endpoint, progress, exposed)
                supervising.watch()
        finally:
            with progress.step(f"stop, after running requests (up to {lineup.stop_timeout} s)"):
                supervising.stop()
    progress.line("Stopped. The next run goes on with the same state.")
    return 0


def _greet(lineup: lineups.Lineup, endpoint: str, progress: Progress, exposed: bool) -> None:
    folder = lineup.state
    program = Path(sys.prefix, "bin", "keyfront")
    progress.line("")
    progress.line(f"Keystone answers at  {endpoint}")
    check = shlex.join([str(program), "check", "--state", str(folder.path)])
    progress.line(f"Try next             {check}")
    progress.line(f"For openstack        . {shlex.quote(str(folder.openrc))}")
    progress.line(f"Logs                 {folder.log}")
    if exposed:
        progress.line(
            "Put nginx in front   200 slow clients of the network stop this: --server nginx+uwsgi"
        )
    progress.line("Stop with            Ctrl-C")
    progress.line("")

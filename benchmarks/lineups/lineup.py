"""A line-up under measurement: its servers on their cores, their URL, and their CPU time."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from keyfront.common import programs as machine
from keyfront.common.programs import first_error
from keyfront.errors import OptionError, ServerError

from ..load.measured import Request
from . import files, processes
from .keystone import PATIENCE, VERSION, Keystone
from .processes import Cores, Process

HOST = "127.0.0.1"
# Seconds until the first answer: 38 processes on one core load Keystone one after the other.
START_PATIENCE = 300.0
# The same for an answer that will not change by waiting: 500, not 502 or 503.
ERROR_PATIENCE = 20.0
# Seconds that a server gets for what a load left in its queue, and an answer when that is done.
SETTLE_PATIENCE, SETTLED = 60.0, 1.0
CACHES = ("off", "on")


@dataclass(frozen=True, order=True)
class Lineup:
    """Who serves Keystone, how it is set, and whether keyfront's token cache answers.

    :param topology: one of :data:`files.TOPOLOGIES`
    :param tuning: one of :data:`files.TUNINGS`
    """

    topology: str
    tuning: str = "tuned"
    cached: bool = False

    def __str__(self) -> str:
        return f"{self.topology}:{self.tuning}:{'cached' if self.cached else 'plain'}"

    @property
    def closes(self) -> bool:
        """Whether it closes after each answer, without always saying so."""
        return self.topology in ("uwsgi", "gevent")

    def check(self) -> None:
        """:raises KeyfrontError: it cannot run here; says what to do"""
        files.check(self.topology, self.tuning)


def parse(option: str, text: str) -> Lineup:
    """Read ``TOPOLOGY[:TUNING[:cached|plain]]``.

    :raises OptionError: it is not of that form
    """
    topology, _, rest = text.partition(":")
    tuning, _, cache = rest.partition(":")
    if cache not in ("", "cached", "plain"):
        raise OptionError(option, text, "TOPOLOGY[:TUNING[:cached|plain]]")
    found = Lineup(topology, tuning or files.TUNED, cache == "cached")
    if found.topology not in files.TOPOLOGIES:
        raise OptionError(option, text, f"a URL, or one of {', '.join(files.TOPOLOGIES)}")
    found.check()
    return found


@dataclass
class Served:
    """A line-up that answers.

    :param url: without a path
    """

    lineup: Lineup
    url: str
    keystone: Keystone
    processes: list[Process] = field(default_factory=list)

    def cpu(self) -> dict[str, float]:
        """CPU seconds until now, by program."""
        return {process.name: process.cpu() for process in self.processes}

    def check(self) -> None:
        """:raises ServerError: a program ended; says why, as well as its log tells"""
        for process in self.processes:
            if process.poll() is not None:
                cause = first_error(process.log) if process.log else "unknown"
                raise ServerError(f"{self.lineup}: {process.name} ended: {cause}")

    def settle(self) -> None:
        """Wait until requests that a load left behind are done: their clients have gone.

        :raises ServerError: they are not within a minute, or a program ended
        """
        deadline = time.monotonic() + SETTLE_PATIENCE
        while True:
            begin = time.monotonic()
            status = _status(urlsplit(self.url).port or 80)
            if 0 < status < 500 and time.monotonic() - begin < SETTLED:
                return
            self.check()
            if begin > deadline:
                raise ServerError(
                    f"{self.lineup} still answers {status or 'nothing'} after "
                    f"{SETTLE_PATIENCE:.0f} s without load"
                )
            time.sleep(0.2)

    def projects(self) -> Request:
        """The request of the published test: the list of projects, with a fresh token."""
        token = self.keystone.token(self.url)
        return Request(f"{self.url}/v3/projects", {"X-Auth-Token": token})

    def validation(self) -> Request:
        """A service that validates a user's token."""
        headers = {
            "X-Auth-Token": self.keystone.token(self.url),
            "X-Subject-Token": self.keystone.token(self.url),
        }
        return Request(f"{self.url}/v3/auth/tokens", headers)


@contextmanager
def served(lineup: Lineup, keystone: Keystone, cores: Cores, *, name: str = "") -> Iterator[Served]:
    """Serve a Keystone until the block ends; it answers, but is not warm.

    :param keystone: one that is made
    :param name: tells line-ups apart that are served at the same time, in names of processes
    :raises KeyfrontError: it cannot be served here
    """
    lineup.check()
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(None))
        shared = stack.enter_context(_folder(_memory())) if lineup.cached else None
        ports = [machine.claim(f"{HOST}:0", HOST, 0) for _ in range(2)]
        room = files.Room(folder / "room", keystone.environment(folder, shared))
        place = files.Place(
            room=room,
            listen=f"{HOST}:{ports[0]}",
            upstream=f"{HOST}:{ports[1]}",
            cached=lineup.cached,
            cores=len(cores.servers),
        )
        found = Served(lineup, f"http://{HOST}:{ports[0]}", keystone)
        for program in files.programs(lineup.topology, lineup.tuning, place):
            process = Process(
                name + program.name,
                program.command,
                log=program.log,
                environment=program.environment,
                stop=program.stop,
                cores=cores.servers,
                files=processes.STOCK_FILES if lineup.tuning == "stock" else processes.FILES,
            )
            found.processes.append(stack.enter_context(process))
        _wait(found, ports[0])
        keystone.populate(found.url)
        yield found


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="keyfront-bench-", dir=parent))
    try:
        # a web server's own user has to reach the sockets inside
        path.chmod(0o711 if parent is None else 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _memory() -> Path | None:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


def _wait(found: Served, port: int) -> None:
    start = time.monotonic()
    while not 0 < (status := _status(port)) < 500:
        found.check()
        patience = ERROR_PATIENCE if status == 500 else START_PATIENCE
        if time.monotonic() - start > patience:
            logs = [process.log for process in found.processes if process.log]
            causes = "; ".join(first_error(log) for log in logs)
            says = f"answers {status}" if status else "does not answer"
            raise ServerError(f"{found.lineup} {says} after {patience:.0f} s: {causes}")
        time.sleep(0.05)


def _status(port: int) -> int:
    connection = HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("GET", VERSION, headers={"Connection": "close"})
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()

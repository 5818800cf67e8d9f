"""Servers of an experiment: started with a log, waited for, and ended with the experiment."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from keyfront.common.programs import first_error
from keyfront.errors import ServerError

from ..lineups.processes import FILES, Process
from ..worlds.delaying_proxy import HOST

# Seconds, for a busy machine: 38 mod_wsgi processes load Keystone two at a time.
START_PATIENCE = 240


class Running:
    """A server that runs.

    :ivar pid: of its first process
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.pid = process.pid
        self.log = log
        self._process = process

    def check(self) -> None:
        """:raises ServerError: it has ended; says why, as well as its log tells"""
        if self._process.poll() is not None:
            raise ServerError(f"{self._process.name} ended: {first_error(self.log)}")

    def wait(self, ready: Callable[[], bool], *, seconds: float = START_PATIENCE) -> None:
        """Wait until it is ready.

        :raises ServerError: it ended or was not ready in time
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self._process.name} is not ready after {seconds:.0f} s: "
                    f"{first_error(self.log)}"
                )
            time.sleep(0.05)

    def wait_answer(self, port: int, path: str = "/", *, seconds: float = START_PATIENCE) -> None:
        """Wait until ``GET path`` is answered below 500."""
        self.wait(lambda: 0 < status(port, path) < 500, seconds=seconds)


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stop: signal.Signals = signal.SIGTERM,
    folder: Path | None = None,
    files: int = FILES,
) -> Iterator[Running]:
    """Run a server until the block ends, or this process does, however it ends.

    :param files: descriptors it may have, unless the system allows fewer
    """
    with Process(
        name, command, log=log, environment=environment, stop=stop, folder=folder, files=files
    ) as process:
        yield Running(process, log)


def status(port: int, path: str, headers: Mapping[str, str] | None = None) -> int:
    """The status of one GET on loopback, 0 if there was no answer."""
    client = HTTPConnection(HOST, port, timeout=30)
    try:
        client.request("GET", path, headers={"Connection": "close", **(headers or {})})
        answer = client.getresponse()
        answer.read()
        return answer.status
    except (OSError, HTTPException):
        return 0
    finally:
        client.close()

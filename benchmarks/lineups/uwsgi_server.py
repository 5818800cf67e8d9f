"""A uWSGI that a benchmark loads: the packaged ini file with few changes, on a port of loopback.

uWSGI's ``http-socket`` closes after each answer, as packaged. One that keeps connections has
``http11-socket`` instead; then a connection occupies a thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from keyfront.common import programs as machine
from keyfront.common.templates import render
from keyfront.errors import ServerError
from keyfront.gateway import application
from keyfront.gateway.serve import lineups as shapes
from keyfront.gateway.serve.state import State

from ..load import wrk

HOST = "127.0.0.1"
PROCESSES = 2
# Seconds that a uWSGI gets to stop; it has nothing left to answer.
STOP_PATIENCE = 5
START_PATIENCE = 60


class Server(NamedTuple):
    """A running uWSGI."""

    port: int
    master: int
    log: Path

    def connect(self) -> HTTPConnection:
        return HTTPConnection(HOST, self.port, timeout=wrk.PATIENCE)

    def cpu(self) -> float:
        """CPU seconds of the master and its workers up to now."""
        try:
            children = Path(f"/proc/{self.master}/task/{self.master}/children").read_text()
            ticks = 0
            for pid in (str(self.master), *children.split()):
                # behind the name, which may hold blanks: utime and stime are fields 14 and 15
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            raise ServerError(f"uWSGI ended: {tail(self.log)}") from None
        return ticks / os.sysconf("SC_CLK_TCK")


def ini(
    state: State,
    port: int,
    folder: Path,
    *,
    module: str | None = None,
    lazy: bool = False,
    kept: bool = False,
    threads: int = 1,
) -> str:
    """Return the packaged ini file, with no request log.

    :param module: uWSGI's ``module``; ``None`` for keyfront's entrypoint
    :param lazy: whether each worker loads the application: nothing in it reopens what a fork must
        not share
    :param kept: whether connections are kept
    :raises ServerError: the packaged file is not as this expects
    """
    lineup = shapes.Lineup(
        state=state,
        listen=f"{HOST}:{port}",
        target=application.default_target(),
        runtime=folder,
        stop_timeout=1,
        processes=PROCESSES,
    )
    values = {**lineup.values(), "threads": threads, "stats_socket": folder / "stats.sock"}
    text = render("serve/uwsgi/keyfront.ini.j2", **values) + "\ndisable-logging = true\n"
    changes = {}
    if module is not None:
        changes["module = keyfront.gateway.uwsgi:application"] = f"module = {module}"
    if lazy:
        changes["lazy-apps = false"] = "lazy-apps = true"
    if kept:
        changes["\nhttp-socket = "] = "\nhttp11-socket = "
        changes["add-header = Connection: close\n"] = ""
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ServerError(f"the packaged uWSGI ini has changed: no single {old!r} in it")
        text = text.replace(old, new)
    return text


@contextmanager
def running(
    folder: Path, text: str, port: int, environment: Mapping[str, str], *, lazy: bool = False
) -> Iterator[Server]:
    """Run one until the block ends.

    :param folder: of its files; of this user only
    :param text: from :func:`ini`
    :raises ServerError: it does not start
    """
    file, log = folder / "uwsgi.ini", folder / "uwsgi.log"
    file.write_text(text)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [machine.uwsgi_program(), "--ini", str(file)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    try:
        # with lazy-apps a worker is there before its application
        _wait_for(process, log, "WSGI app 0 " if lazy else "spawned uWSGI worker", PROCESSES)
        yield Server(port, process.pid, log)
    finally:
        # the master first takes its workers down, so that no zombie is left to the system
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], log: Path, line: str, count: int) -> None:
    deadline = time.monotonic() + START_PATIENCE
    while log.read_text(errors="replace").count(line) < count:
        if process.poll() is not None:
            raise ServerError(f"uWSGI ended: {tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"uWSGI is not ready after {START_PATIENCE} s: {tail(log)}")
        time.sleep(0.05)


def await_port(process: subprocess.Popen[bytes], port: int, failed: Callable[[], str]) -> None:
    """Until another server, as memcached or Redis, takes connections.

    :param failed: says what went wrong
    :raises ServerError: it ended, or takes none
    """
    deadline = time.monotonic() + START_PATIENCE
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(failed()) from None
            time.sleep(0.02)


def tail(log: Path) -> str:
    """The end of a log, for an error."""
    return log.read_text(errors="replace")[-600:]

"""Runs the application as a candidate says, under uWSGI at a free port of the loopback address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from keyfront import __version__
from keyfront.common.machine import somaxconn
from keyfront.common.programs import (
    claim,
    first_error,
    python_home,
    stop_with_parent,
    uwsgi_program,
)
from keyfront.common.templates import render
from keyfront.errors import ServerError

from .candidates import Candidate

# Seconds: nothing that is worth waiting for runs when a candidate is stopped.
_STOP = 2
_HARAKIRI = 60
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class Application:
    """The application that is measured, and the request that measures it.

    :param target: its name, as in ``KEYFRONT_APP``
    :param environment: variables for the application besides this process's environment
    :param path: the path that is asked for by GET
    :param headers: headers of each request; never shown
    """

    target: str
    environment: Mapping[str, str]
    path: str
    headers: Mapping[str, str]

    def request(self) -> str:
        """Return the request as it is sent."""
        lines = [f"GET {self.path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""])


@dataclass(frozen=True, kw_only=True)
class Running:
    """A candidate whose application answers."""

    candidate: Candidate
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Find out that it still runs.

        :raises ServerError: it has ended by itself
        """
        if self.process.poll() is not None:
            raise ServerError(f"{self.candidate}: uWSGI ended by itself: {first_error(self.log)}")

    def stop(self) -> None:
        """Tell the server to stop, without waiting until it has."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def running(
    candidate: Candidate, application: Application, folder: Path
) -> Iterator[Running]:
    """Serve the application as the candidate says until the block ends; see :func:`wait`.

    :param folder: a folder of its own for configuration, log and sockets
    :raises ServerError: it cannot be started; says why
    """
    with claim("127.0.0.1:0", "127.0.0.1", 0) as port:
        with _serving(candidate, application, folder, port) as server:
            yield server


@contextlib.contextmanager
def _serving(
    candidate: Candidate, application: Application, folder: Path, port: int
) -> Iterator[Running]:
    log = folder / "uwsgi.log"
    ini = folder / "uwsgi.ini"
    ini.write_text(_configuration(candidate, application, folder, port), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [uwsgi_program(), "--ini", str(ini), "--disable-logging"],
            env={**os.environ, **application.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=stop_with_parent(),
        )
    server = Running(candidate=candidate, port=port, process=process, log=log)
    try:
        yield server
    finally:
        _end(server)


def _configuration(
    candidate: Candidate, application: Application, folder: Path, port: int
) -> str:
    return render(
        "serve/uwsgi/keyfront.ini.j2",
        version=__version__,
        target=application.target,
        virtualenv=python_home(),
        processes=candidate.processes,
        threads=candidate.threads,
        gevent=candidate.greenlets or None,
        listen=f"127.0.0.1:{port}",
        unix_socket=None,
        socket_group=None,
        backlog=min(_BACKLOG, somaxconn()),
        somaxconn=somaxconn(),
        harakiri=_HARAKIRI,
        stop_timeout=_STOP,
        stats_socket=folder / "stats.sock",
    )


def wait(server: Running, application: Application, until: float) -> None:
    """Wait until the application answers.

    :param server: the server
    :param application: the application that it loads
    :param until: the time by which it must have answered, by ``time.monotonic()``
    :raises ServerError: it does not start, or answers with an error; the message says why
    """
    while True:
        if server.process.poll() is not None:
            raise ServerError(
                f"{server.candidate}: uWSGI did not start: {first_error(server.log)}"
            )
        status = _status(application, server.port)
        if status is not None and status < 400:
            return
        if status is not None and status != 503:
            raise ServerError(
                f"GET {application.path} is answered {status}; name another path with --path, or "
                "give the headers it needs with --headers-file"
            )
        if time.monotonic() > until:
            state = f"is answered {status}" if status else "is not answered"
            raise ServerError(
                f"{server.candidate}: GET {application.path} {state} in half of the time; see "
                "whether it does when served, or give more with --seconds"
            )
        time.sleep(0.02)


def _status(application: Application, port: int) -> int | None:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", application.path, headers=dict(application.headers))
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _end(server: Running) -> None:
    server.stop()
    process = server.process
    try:
        process.wait(_STOP + 1.0)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""A uWSGI that a comparison loads, on a port of loopback.

uWSGI's ``http-socket`` closes after each answer, as packaged. One that keeps connections has
``http11-socket`` instead; then a connection occupies a thread.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.common import programs
from keyfront.common.templates import render, uwsgi_value
from keyfront.errors import ServerError
from keyfront.gateway import application
from keyfront.gateway.serve import lineups as serve_lineups
from keyfront.gateway.serve.state import State

from ..servers.ports import free_port
from ..servers.processes import HOST, Process

PROCESSES = 2
# Seconds until an answer that does not come is an error.
_PATIENCE = 30


class Server(NamedTuple):
    """A running uWSGI."""

    port: int
    process: Process
    log: Path

    @property
    def url(self) -> str:
        """Its URL without a path."""
        return f"http://{HOST}:{self.port}"

    def tail(self) -> str:
        """Return the end of its log, for an error."""
        return self.log.read_text(errors="replace")[-600:]

    def cpu(self) -> float:
        """Return the CPU seconds of the master and its workers up to now."""
        self.process.check()
        return self.process.cpu()

    def answers(
        self, count: int, path: str, headers: Mapping[str, str]
    ) -> list[tuple[int, str, list[tuple[str, str]], str]]:
        """Send so many GETs at once, so that no worker or thread answers two of them.

        :return: of each answer status, reason, headers and body
        """
        clients = [HTTPConnection(HOST, self.port, timeout=_PATIENCE) for _ in range(count)]
        found = []
        try:
            for client in clients:
                client.request("GET", path, headers=dict(headers))
            for client in clients:
                answer = client.getresponse()
                text = answer.read().decode()
                found.append((answer.status, answer.reason, answer.getheaders(), text))
        except (OSError, HTTPException) as error:
            raise ServerError(f"uWSGI does not answer: {error!r}: {self.tail()}") from None
        finally:
            for client in clients:
                client.close()
        return found


def packaged(
    state: State,
    port: int,
    folder: Path,
    *,
    module: str | None = None,
    lazy: bool = False,
    kept: bool = False,
    threads: int = 1,
    processes: int = PROCESSES,
    login_port: int = 0,
) -> str:
    """Return the packaged ini file, with no request log.

    :param module: uWSGI's ``module``; ``None`` for keyfront's entrypoint
    :param lazy: true if each worker loads the application: nothing in it reopens what a fork must
        not share
    :param kept: true if connections are kept
    :param login_port: a port for logins, of which the last process takes all, and nothing else
    :raises ServerError: the packaged file is not as this expects
    """
    lineup = serve_lineups.Lineup(
        state=state, listen=f"{HOST}:{port}", target=application.default_target(),
        runtime=folder, stop_timeout=1, processes=processes,
    )  # fmt: skip
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
    if login_port:
        others = ",".join(map(str, range(1, processes)))
        changes["thunder-lock = true"] = (
            f"http-socket = {HOST}:{login_port}\nmap-socket = 0:{others}\n"
            f"map-socket = 1:{processes}"
        )
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ServerError(f"the packaged uWSGI ini has changed: no single {old!r} in it")
        text = text.replace(old, new)
    return text


def plain(options: Mapping[str, object]) -> str:
    """Return an ini file that has nothing but a master, this Python and these options."""
    lines = ["[uwsgi]", "master = true", "need-app = true", "enable-threads = true"]
    lines.append(f"virtualenv = {uwsgi_value(programs.python_home())}")
    lines += [f"{name} = {uwsgi_value(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


@contextmanager
def serving(
    state: State,
    folder: Path,
    environment: Mapping[str, str],
    *,
    port: int = 0,
    lazy: bool = False,
    processes: int = PROCESSES,
    **more: Any,
) -> Iterator[Server]:
    """Run one with the packaged ini file until the block ends; all its workers are loaded.

    :param folder: the folder of its files; of this user only
    :param port: the port at which it listens; 0: a free one
    :param more: more arguments of :func:`packaged`
    """
    port = port or free_port()
    file, log = folder / "uwsgi.ini", folder / "uwsgi.log"
    file.write_text(packaged(state, port, folder, lazy=lazy, processes=processes, **more))
    # with lazy-apps a worker is there before its application
    line = "WSGI app 0 " if lazy else "spawned uWSGI worker"

    def ready() -> bool:
        return log.read_text(errors="replace").count(line) >= processes

    command = [programs.uwsgi_program(), "--ini", str(file)]
    # at once: it has nothing left to answer
    with Process(
        "uWSGI", command, log=log, environment=environment, folder=folder, stop=signal.SIGINT
    ) as process:
        process.wait_until(ready)
        yield Server(port, process, log)

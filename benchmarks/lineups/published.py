"""The line-ups of ``keystone-frontends``: as published, stock and tuned, and keyfront's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.common import programs as machine
from keyfront.common.machine import somaxconn
from keyfront.gateway import application
from keyfront.gateway.serve import lineups as shapes
from keyfront.gateway.serve.state import State

from ..experiments import processes
from ..experiments.keystone import Keystone
from ..worlds.delaying_proxy import HOST
from . import servers as fronts
from .processes import STOCK_FILES

STOCK = "keystone.wsgi.api:application"
# As published for the tuned line-ups.
SOMAXCONN = 8192
DESCRIPTORS = 655360


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Who serves Keystone, and how.

    :param label: as tables show it
    :param server: ``mod_wsgi``, ``nginx`` or ``keyfront``
    :param tuned: whether it is one of the published tuned ones
    :param database_connections: MariaDB's ``max_connections`` meanwhile
    :param apache: changes to Debian's Apache
    :param nginx: changes to Debian's nginx: ``main`` and ``events``
    :param uwsgi: more of uWSGI's ini file
    """

    label: str
    server: str
    processes: int = 0
    threads: int = 0
    tuned: bool = False
    database_connections: int = 100
    apache: Mapping[str, object] = field(default_factory=dict)
    nginx_main: Mapping[str, object] = field(default_factory=dict)
    nginx_events: Mapping[str, object] = field(default_factory=dict)
    uwsgi: Mapping[str, object] = field(default_factory=dict)

    @property
    def stock(self) -> bool:
        """Whether there is nothing of keyfront in it."""
        return self.server != "keyfront"


_TUNED_APACHE = {
    "StartServers": 2,
    "ServerLimit": 15,
    "MinSpareThreads": 200,
    "MaxSpareThreads": 225,
    "ThreadLimit": 225,
    "ThreadsPerChild": 35,
    "MaxRequestWorkers": 225,
    "MaxKeepAliveRequests": 500,
    "KeepAliveTimeout": 20,
}


def lineups(*, tuned_processes: int = 38) -> dict[str, Lineup]:
    """All of them, by name.

    :param tuned_processes: 38 as published; fewer need less memory and start sooner
    """
    tuned = tuned_processes
    return {
        "apache stock": Lineup(
            label="Apache + mod_wsgi 5x1, stock", server="mod_wsgi", processes=5, threads=1
        ),
        "nginx stock": Lineup(
            label="nginx + uWSGI 10x2, stock", server="nginx", processes=10, threads=2
        ),
        "apache tuned": Lineup(
            label=f"Apache + mod_wsgi {tuned}x4, tuned",
            server="mod_wsgi",
            processes=tuned,
            threads=4,
            tuned=True,
            database_connections=200,
            apache=_TUNED_APACHE,
        ),
        "nginx tuned": Lineup(
            label=f"nginx + uWSGI {tuned}x5, tuned",
            server="nginx",
            processes=tuned,
            threads=5,
            tuned=True,
            database_connections=200,
            nginx_main={"worker_rlimit_nofile": 30000},
            nginx_events={"worker_connections": 7000},
            uwsgi={"listen": 5000},
        ),
        "keyfront": Lineup(
            label="keyfront, as rendered (nginx + uWSGI)", server="keyfront", tuned=True
        ),
    }


def _descriptors(lineup: Lineup) -> int:
    return DESCRIPTORS if lineup.tuned else STOCK_FILES


@contextmanager
def served(folder: Path, lineup: Lineup, keystone: Keystone) -> Iterator[int]:
    """Serve Keystone with a line-up until the block ends; gives its port, which answers.

    :param folder: for the servers' files; made here
    :raises MissingPartError: a server is not installed; names the command
    :raises ServerError: one did not start
    """
    folder.mkdir(mode=0o711)
    port = machine.claim(f"{HOST}:0", HOST, 0)
    if keystone.database is not None:
        keystone.database.limit(lineup.database_connections)
    with ExitStack() as stack:
        if lineup.server == "keyfront":
            running = stack.enter_context(keyfront(folder, port, keystone.state))[-1]
        elif lineup.server == "nginx":
            running = _nginx(stack, folder, port, lineup, keystone)
        else:
            running = _apache(stack, folder, port, lineup, keystone)
        running.wait_answer(port, "/v3")
        yield port


def _workers(lineup: Lineup, keystone: Keystone, **options: object) -> fronts.Daemons:
    return fronts.Daemons(
        module=STOCK,
        processes=lineup.processes,
        threads=lineup.threads,
        environment=keystone.stock_environment(),
        options=options,
    )


def _nginx(
    stack: ExitStack, folder: Path, port: int, lineup: Lineup, keystone: Keystone
) -> processes.Running:
    socket = folder / "socket"
    listen = lineup.uwsgi.get("listen", 100)
    assert isinstance(listen, int)
    workers = _workers(lineup, keystone, listen=min(listen, somaxconn()))
    files = _descriptors(lineup)
    stack.enter_context(fronts.uwsgi(folder / "uwsgi", socket, workers, files=files))
    return stack.enter_context(
        fronts.nginx(
            folder / "nginx",
            port,
            location=fronts.uwsgi_pass(socket),
            main=lineup.nginx_main,
            events={**fronts.STOCK_NGINX_EVENTS, **lineup.nginx_events},
            files=files,
        )
    )


def _apache(
    stack: ExitStack, folder: Path, port: int, lineup: Lineup, keystone: Keystone
) -> processes.Running:
    setting = fronts.Apache(
        directives={**fronts.STOCK_EVENT, **fronts.STOCK_APACHE, **lineup.apache},
        content=fronts.mod_wsgi(folder, "keystone", _workers(lineup, keystone)),
    )
    front = fronts.apache(
        folder / "apache", port, setting, as_ordinary_user=True, files=_descriptors(lineup)
    )
    return stack.enter_context(front)


@contextmanager
def keyfront(
    folder: Path, port: int, state: State, target: str | None = None
) -> Iterator[list[processes.Running]]:
    """Serve with nginx and uWSGI as keyfront renders them, until the block ends.

    :param target: what is served (``KEYFRONT_APP``); default: Keystone behind the packaged pipeline
    """
    lineup = shapes.Lineup(
        state=state,
        listen=f"{HOST}:{port}",
        target=target or application.default_target(),
        runtime=folder,
        stop_timeout=2,
    )
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                processes.running(
                    program.name,
                    program.command,
                    program.log,
                    environment=program.environment,
                    stop=program.stop,
                )
            )
            for program in shapes.programs("nginx+uwsgi", lineup)
        ]

"""A line-up under measurement: who serves a Keystone, how it is set, on which cores.

What the topologies and settings are, docs/benchmarks.md says.
"""

from __future__ import annotations

import grp
import os
import pwd
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keyfront.common import machine, programs
from keyfront.common.machine import somaxconn
from keyfront.common.programs import first_error
from keyfront.errors import OptionError, ServerError
from keyfront.gateway import application
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import Workload
from keyfront.gateway.render import versions
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.serve import lineups as serve_lineups
from keyfront.gateway.serve.lineups import Program
from keyfront.gateway.serve.state import State

from .. import files
from ..servers.ports import free_port
from ..servers.processes import FILES, HOST, STOCK_FILES, Cores, Process, family, memory, status
from . import stock_servers
from .keystone import SECOND_PROJECT, VERSION, Keystone

# Seconds until the first answer, for a server that is slow, and for an answer that will not change
# by waiting: 500, not 502 or 503.
_START_PATIENCE, _ERROR_PATIENCE = 300.0, 20.0
# Seconds that a server gets for what a load left in its queue, and an answer when that is done.
_SETTLE_PATIENCE, _SETTLED = 60.0, 1.0
_STOCK_MODULE = "keystone.wsgi.api"
# Greenlets of a stock worker: uWSGI's manual and ours agree.
_GREENLETS = 100
_PLAIN = """\
[pipeline:main]
pipeline = keystone

[app:keystone]
use = egg:keyfront#keystone
"""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The settings of a line-up that is not keyfront's.

    :param uwsgi: processes and threads
    :param mod_wsgi: the same of its daemons
    :param backlog: uWSGI's ``listen``, 0 for its default of 100
    :param nginx: more directives of nginx's main context
    :param connections: nginx's ``worker_connections``
    :param apache: directives of Apache that differ from Debian's, those of the event MPM too
    """

    uwsgi: tuple[int, int]
    mod_wsgi: tuple[int, int]
    backlog: int = 0
    nginx: Mapping[str, object] = field(default_factory=dict)
    connections: int = 768
    apache: Mapping[str, object] = field(default_factory=dict)


NUMBERS = {
    "stock": Numbers(uwsgi=(4, 1), mod_wsgi=(5, 1)),
    "published-stock": Numbers(uwsgi=(10, 2), mod_wsgi=(5, 1)),
    "published-tuned": Numbers(
        uwsgi=(38, 5),
        mod_wsgi=(38, 4),
        backlog=5000,
        nginx={"worker_rlimit_nofile": 30000},
        connections=7000,
        apache={
            "ServerLimit": 15,
            "MinSpareThreads": 200,
            "MaxSpareThreads": 225,
            "ThreadLimit": 225,
            "ThreadsPerChild": 35,
            "MaxRequestWorkers": 225,
            "MaxKeepAliveRequests": 500,
            "KeepAliveTimeout": 20,
        },
    ),
}
TUNED = "tuned"
TUNINGS = ("stock", TUNED, "published-stock", "published-tuned")
#: What ``keyfront serve`` runs; an experiment has it, the sweep has not.
SERVE = "serve"
CACHES = ("off", "on")
# The line-up of ``keyfront render`` by topology; it makes none for greenlets.
_RENDERED = {
    "uwsgi": "uwsgi",
    "nginx+uwsgi": "nginx+uwsgi",
    "nginx+uwsgi-tcp": "nginx+uwsgi-tcp",
    "apache+uwsgi": "apache+uwsgi",
    "mod_wsgi-event": "mod_wsgi",
    "mod_wsgi-prefork": "prefork+mod_wsgi",
}
TOPOLOGIES = ("uwsgi", "gevent", *tuple(_RENDERED)[1:])


@dataclass(frozen=True, order=True)
class Lineup:
    """A line-up of servers with its settings, with or without keyfront's token cache.

    :param topology: one of :data:`TOPOLOGIES`
    :param tuning: one of :data:`TUNINGS`, or :data:`SERVE`
    """

    topology: str
    tuning: str = TUNED
    cached: bool = False

    def __str__(self) -> str:
        return f"{self.topology}:{self.tuning}:{'cached' if self.cached else 'plain'}"

    @property
    def closes(self) -> bool:
        """True if it closes after each answer, without always saying so."""
        return self.topology in ("uwsgi", "gevent")

    def check(self) -> None:
        """Find out, before anything is made, that it can run here.

        :raises OptionError: there is no such topology or tuning
        """
        topology = self.topology
        if topology not in TOPOLOGIES:
            raise OptionError("--topology", topology, f"one of {', '.join(TOPOLOGIES)}")
        if self.tuning not in (*TUNINGS, SERVE):
            raise OptionError("--tuning", self.tuning, f"one of {', '.join(TUNINGS)}")
        programs.require_module("keystone", "keystone")
        if "uwsgi" in topology or topology == "gevent":
            programs.uwsgi_program()
        if topology == "gevent":
            programs.require_module("gevent", "gevent")
        if topology.startswith("nginx"):
            programs.system_program(("nginx",), "nginx")
        if topology.startswith("apache"):
            programs.apache_modules("mod_proxy_uwsgi.so", "apache2-bin libapache2-mod-proxy-uwsgi")
        if topology.startswith("mod_wsgi"):
            programs.system_program(("apache2", "httpd"), "apache2-bin")
            programs.mod_wsgi_module()


def parse(option: str, text: str) -> Lineup:
    """Read ``TOPOLOGY[:TUNING[:cached|plain]]``.

    :raises OptionError: it is not of that form
    """
    topology, _, rest = text.partition(":")
    tuning, _, cache = rest.partition(":")
    if cache not in ("", "cached", "plain"):
        raise OptionError(option, text, "TOPOLOGY[:TUNING[:cached|plain]]")
    found = Lineup(topology, tuning or TUNED, cache == "cached")
    if found.topology not in TOPOLOGIES:
        raise OptionError(option, text, f"a URL, or one of {', '.join(TOPOLOGIES)}")
    found.check()
    return found


class Room(State):
    """A line-up's own folder for files, logs and sockets, beside a Keystone that several share.

    :param path: its folder; made here
    :param environment: the variables that name the Keystone to a process
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(path)
        self._environment = dict(environment)
        for folder in (self.path, self.run, self.log):
            # a web server's own user has to reach the sockets inside
            folder.mkdir(mode=0o711, parents=True)

    def environment(self) -> dict[str, str]:
        return dict(self._environment)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The surroundings that a line-up is made for.

    :param room: its folder
    :param listen: ``HOST:PORT`` of the foremost server
    :param upstream: ``HOST:PORT`` of uWSGI behind it, for those that use TCP there
    :param cached: true if keyfront's token cache answers
    :param cores: the cores of the servers
    :param processes: the processes of the application, instead of the published ones and of one for
        each core in :data:`SERVE`; 0 for those
    :param managed: true if a rendered uWSGI runs as its unit has it, by ``keyfront uwsgi``, so that
        it can be reloaded by the program's command; by itself it takes less memory
    """

    room: Room
    listen: str
    upstream: str
    cached: bool
    cores: int
    processes: int = 0
    managed: bool = False

    @property
    def target(self) -> str:
        """The target of keyfront's entrypoint: Keystone, with or without the token cache."""
        if self.cached:
            return application.default_target()
        return f"config:{self.room.write('run/plain.ini', _PLAIN)}"

    def module(self, server: str) -> tuple[str, dict[str, str]]:
        """Return the application of a stock server, ``module:name``, and its environment.

        :param server: ``uwsgi`` or ``mod_wsgi``
        """
        environment = self.room.environment()
        if not self.cached:
            return f"{_STOCK_MODULE}:application", environment
        environment[application.TARGET_VARIABLE] = self.target
        return f"keyfront.gateway.{server}:application", environment


def made(lineup: Lineup, place: Place) -> list[Program]:
    """Write the files of a line-up to its room; return its programs in the order they start.

    :raises OptionError: there is no such topology or tuning
    """
    lineup.check()
    if lineup.tuning == TUNED and lineup.topology in _RENDERED:
        found = _rendered(lineup.topology, place)
    elif lineup.tuning in (TUNED, SERVE):
        processes = (lineup.tuning == SERVE and place.processes) or place.cores
        found = served_files(lineup.topology, place.room, place.listen, place.target, processes)
    else:
        numbers = NUMBERS[lineup.tuning]
        if place.processes and lineup.tuning in ("published-stock", "published-tuned"):
            uwsgi, mod_wsgi = (
                (place.processes, threads) for _, threads in (numbers.uwsgi, numbers.mod_wsgi)
            )
            numbers = replace(numbers, uwsgi=uwsgi, mod_wsgi=mod_wsgi)
        return _stock(lineup.topology, numbers, place)
    # a measured server has no requests left that matter
    ends = {"nginx": signal.SIGTERM, "apache": signal.SIGTERM, "uwsgi": signal.SIGINT}
    prefix = stock_servers.as_ordinary_user() if "mod_wsgi" in lineup.topology else ()
    return [
        replace(
            one,
            stop=ends[one.name],
            command=[*prefix, *one.command],
            reload=[*prefix, *one.reload] if one.reload else None,
        )
        for one in found
    ]


def served_files(
    topology: str, state: State, listen: str, target: str, processes: int
) -> list[Program]:
    """Write what ``keyfront serve`` runs to a state folder; return its programs.

    :param target: the application that is served, as ``KEYFRONT_APP``
    :param processes: ``keyfront serve`` has one for each core
    """
    chosen = serve_lineups.Lineup(
        state=state, listen=listen, target=target, runtime=state.run, stop_timeout=2,
        processes=processes,
    )  # fmt: skip
    return serve_lineups.programs(topology, chosen)


def _rendered(topology: str, place: Place) -> list[Program]:
    """Write what ``keyfront render`` does, sized for the cores of a place."""
    run, log = place.room.run, place.room.log
    # whom a web server drops to; this user, if it is not root
    user, group = programs.front_user() or (
        pwd.getpwuid(os.geteuid()).pw_name,
        grp.getgrgid(os.getegid()).gr_name,
    )
    environment = place.room.environment()
    for name in ("app", "cache"):
        run.joinpath(name).mkdir()
    settings = Settings(
        folder=run,
        server=_RENDERED[topology],
        target=place.target,
        listen=place.listen,
        upstream=place.upstream,
        user=user,
        group=group,
        web_user=user,
        web_group=group,
        run_directory=run / "app",
        log_directory=log,
        cache_directory=run / "cache",
        config=Path(environment["OS_KEYSTONE_CONFIG_DIR"]),
        virtualenv=Path(programs.python_home()),
    )
    computed = plan(machine.read(cores=place.cores), Workload())
    for file in render(computed, settings, versions.find(settings.virtualenv)):
        path = run / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")

    def program(name: str, *command: str) -> Program:
        return stock_servers.program(name, command, log / f"{name}.log", environment)

    found = []
    reload = [sys.executable, "-m", "keyfront", "reload"]
    if "uwsgi" in topology and place.managed:
        ini, uwsgi = str(run / "uwsgi.ini"), programs.uwsgi_program()
        command = [*reload[:-1], "uwsgi", ini, "--program", uwsgi]
        found.append(replace(program("uwsgi", *command), reload=[*reload, ini]))
    elif "uwsgi" in topology:
        found.append(program("uwsgi", programs.uwsgi_program(), "--ini", str(run / "uwsgi.ini")))
    if topology.startswith("nginx"):
        nginx = programs.system_program(("nginx",), "nginx")
        command = [nginx, "-c", str(run / "nginx.conf"), "-e", str(log / "nginx.error.log")]
        found.append(program("nginx", *command, "-g", "daemon off;"))
    elif topology != "uwsgi":
        apache = programs.system_program(("apache2", "httpd"), "apache2-bin")
        made = program("apache", apache, "-f", str(run / "apache.conf"), "-DFOREGROUND")
        if topology.startswith("mod_wsgi"):
            made = replace(made, reload=[*reload, str(run / "apache.conf")])
        found.append(made)
    return found


def _stock(topology: str, numbers: Numbers, place: Place) -> list[Program]:
    """Write what a server's packages and Keystone's own files set."""
    run = place.room.run

    def apache(mpm: str, content: list[str], **more: Any) -> Program:
        named = {"mpm": mpm, "directives": _apache(mpm, numbers), "content": content, **more}
        return stock_servers.apache(run, place.listen, **named)

    if topology.startswith("mod_wsgi"):
        mpm = topology.rpartition("-")[2]
        processes, threads = numbers.mod_wsgi
        module, environment = place.module("mod_wsgi")
        lines = stock_servers.mod_wsgi(
            run, module, processes=processes, threads=threads, environment=environment
        )
        return [apache(mpm, [*lines, "LimitRequestBody 114688"], ordinary=True)]
    listens = {"nginx+uwsgi-tcp": place.upstream, "uwsgi": place.listen, "gevent": place.listen}
    upstream = listens.get(topology, str(run / "uwsgi.sock"))
    found = [_stock_uwsgi(topology, numbers, place, upstream)]
    if topology.startswith("nginx"):
        passed = upstream if topology.endswith("tcp") else f"unix:{upstream}"
        found.append(
            stock_servers.nginx(
                run,
                place.listen,
                location=stock_servers.uwsgi_pass(passed),
                main=numbers.nginx,
                events={"worker_connections": numbers.connections},
                user=(programs.front_user() or (None,))[0],
            )
        )
    elif topology.startswith("apache"):
        passed = f'ProxyPass "/" "unix:{upstream}|uwsgi://uwsgi-uds-keystone-public/" retry=0'
        found.append(apache("event", [passed], loaded=["proxy", "proxy_uwsgi"]))
    return found


def _apache(mpm: str, numbers: Numbers) -> dict[str, object]:
    if mpm == "event":
        return {**stock_servers.STOCK_EVENT, **stock_servers.STOCK_APACHE, **numbers.apache}
    kept = ("MaxKeepAliveRequests", "KeepAliveTimeout")
    changed = {name: numbers.apache[name] for name in kept if name in numbers.apache}
    return {**stock_servers.STOCK_PREFORK, **stock_servers.STOCK_APACHE, **changed}


def _stock_uwsgi(topology: str, numbers: Numbers, place: Place, listen: str) -> Program:
    """Write the uWSGI of Keystone's own ``httpd/keystone-uwsgi-public.ini``."""
    processes, threads = numbers.uwsgi
    module, environment = place.module("uwsgi")
    options: dict[str, object] = {
        "module": module,
        "buffer-size": 65535,
        "processes": processes,
        "threads": threads,
        "thunder-lock": "true",
        "lazy-apps": "true",
    }
    if topology == "gevent":
        options |= {"threads": 1, "gevent": _GREENLETS}
        if not place.cached:
            options["gevent-monkey-patch"] = "true"
    if numbers.backlog:
        # uWSGI refuses to start above what the kernel gives
        options["listen"] = min(numbers.backlog, somaxconn())
    if topology in ("uwsgi", "gevent"):
        options["http-socket"] = listen
    else:
        options |= {"socket": listen, "chmod-socket": 666}
    return stock_servers.uwsgi_workers(place.room.run, options, environment)


@dataclass
class Served:
    """A line-up that answers.

    :param url: the server's URL, without a path
    :param cache: the folder of its token cache; ``None`` without one
    """

    lineup: Lineup
    url: str
    keystone: Keystone
    cache: Path | None = None
    processes: list[Process] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds until now, by program."""
        return {process.name: process.cpu() for process in self.processes}

    def cores(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the cores that each program took in so many seconds.

        :param before: its CPU seconds at their beginning, from :meth:`cpu`
        """
        return {name: round((x - before[name]) / seconds, 3) for name, x in self.cpu().items()}

    def memory(self) -> float:
        """Return the MiB of all its processes, what they share counted once."""
        pids = [pid for process in self.processes for pid in family(process.pid)]
        return round(sum(memory(pid)["Pss"] for pid in pids), 1)

    def check(self) -> None:
        """Find out that all its programs run.

        :raises ServerError: one ended; says why, as well as its log tells
        """
        for process in self.processes:
            try:
                process.check()
            except ServerError as error:
                raise ServerError(f"{self.lineup}: {error}") from None

    def settle(self) -> None:
        """Wait until requests that a load left behind are done: their clients have gone.

        :raises ServerError: they are not within a minute, or a program ended
        """
        deadline = time.monotonic() + _SETTLE_PATIENCE
        while True:
            begin = time.monotonic()
            found = status(self.port, VERSION)
            if 0 < found < 500 and time.monotonic() - begin < _SETTLED:
                return
            self.check()
            if begin > deadline:
                raise ServerError(
                    f"{self.lineup} still answers {found or 'nothing'} after "
                    f"{_SETTLE_PATIENCE:.0f} s without load"
                )
            time.sleep(0.2)

    def _wait(self) -> None:
        start = time.monotonic()
        while not 0 < (found := status(self.port, VERSION)) < 500:
            self.check()
            patience = _ERROR_PATIENCE if found == 500 else _START_PATIENCE
            if time.monotonic() - start > patience:
                logs = [process.log for process in self.processes if process.log]
                causes = "; ".join(first_error(log) for log in logs)
                says = f"answers {found}" if found else "does not answer"
                raise ServerError(f"{self.lineup} {says} after {patience:.0f} s: {causes}")
            time.sleep(0.05)


@contextmanager
def served(
    lineup: Lineup,
    keystone: Keystone,
    cores: Cores | None = None,
    *,
    processes: int = 0,
    managed: bool = False,
) -> Iterator[Served]:
    """Serve a Keystone until the block ends; it answers, but is not warm.

    :param keystone: one that is made
    :param cores: on which the servers run; default: all
    :param processes: the processes of :class:`Place`
    :param managed: the setting of :class:`Place`
    """
    lineup.check()
    with ExitStack() as stack:
        folder, memory = stack.enter_context(files.folders())
        # a web server's own user has to reach the sockets inside
        folder.chmod(0o711)
        shared = memory if lineup.cached else None
        ports = [free_port() for _ in range(2)]
        place = Place(
            room=Room(folder / "room", keystone.environment(folder, shared)),
            listen=f"{HOST}:{ports[0]}",
            upstream=f"{HOST}:{ports[1]}",
            cached=lineup.cached,
            cores=len(cores.servers) if cores else machine.cores(),
            processes=processes,
            managed=managed,
        )
        found = Served(lineup, f"http://{HOST}:{ports[0]}", keystone, shared)
        for program in made(lineup, place):
            process = stock_servers.started(
                program,
                cores=cores.servers if cores else None,
                files=STOCK_FILES if lineup.tuning in ("stock", "published-stock") else FILES,
            )
            found.processes.append(stack.enter_context(process))
            found.programs.append(program)
        found._wait()
        # as in the published test there are two projects
        keystone.admin(found.url).made("project", SECOND_PROJECT)
        yield found

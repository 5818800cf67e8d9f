"""The files that the measured servers run on, and the commands that start them: all come from here.

``tuned`` is what ``keyfront render`` writes, and with greenlets what ``keyfront serve`` runs. The
others are what it is compared with: ``stock`` has the numbers of Debian's packages of nginx and
Apache and those of Keystone's own ``httpd/keystone-uwsgi-public.ini`` and ``wsgi-keystone.conf``;
``published-stock`` and ``published-tuned`` have the settings of Rackspace's comparison of
2016-07-05.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyfront.common import programs as machine
from keyfront.common.machine import somaxconn
from keyfront.common.templates import render
from keyfront.errors import MissingPartError, OptionError
from keyfront.gateway import application
from keyfront.gateway.serve import lineups as shapes
from keyfront.gateway.serve.lineups import Program
from keyfront.gateway.serve.state import State

from . import rendered

# What ends each at once: a measured server has no requests left that matter.
_END = {"nginx": signal.SIGTERM, "apache": signal.SIGTERM, "uwsgi": signal.SIGINT}
STOCK_MODULE = "keystone.wsgi.api"
# Greenlets of a stock worker: uWSGI's manual and ours agree.
_GREENLETS = 100
_PLAIN = """\
[pipeline:main]
pipeline = keystone

[app:keystone]
use = egg:keyfront#keystone
"""
_EVENT = {
    "StartServers": 2,
    "MinSpareThreads": 25,
    "MaxSpareThreads": 75,
    "ThreadLimit": 64,
    "ThreadsPerChild": 25,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
_PREFORK = {
    "StartServers": 5,
    "MinSpareServers": 5,
    "MaxSpareServers": 10,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
_KEPT = {"MaxKeepAliveRequests": 100, "KeepAliveTimeout": 5}


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a line-up that is not keyfront's is set to.

    :param uwsgi: processes and threads
    :param mod_wsgi: the same of its daemons
    :param backlog: uWSGI's ``listen``, 0 for its default of 100
    :param connections: nginx's ``worker_connections``
    :param descriptors: nginx's ``worker_rlimit_nofile``, 0 to leave it out
    :param event: of Apache's event MPM
    :param prefork: of Apache's prefork MPM
    :param kept: what Apache is told of kept connections
    """

    uwsgi: tuple[int, int]
    mod_wsgi: tuple[int, int]
    backlog: int = 0
    connections: int = 768
    descriptors: int = 0
    event: Mapping[str, int] = field(default_factory=lambda: dict(_EVENT))
    prefork: Mapping[str, int] = field(default_factory=lambda: dict(_PREFORK))
    kept: Mapping[str, int] = field(default_factory=lambda: dict(_KEPT))


NUMBERS = {
    "stock": Numbers(uwsgi=(4, 1), mod_wsgi=(5, 1)),
    "published-stock": Numbers(uwsgi=(10, 2), mod_wsgi=(5, 1)),
    "published-tuned": Numbers(
        uwsgi=(38, 5),
        mod_wsgi=(38, 4),
        backlog=5000,
        connections=7000,
        descriptors=30000,
        event={
            "StartServers": 2,
            "ServerLimit": 15,
            "MinSpareThreads": 200,
            "MaxSpareThreads": 225,
            "ThreadLimit": 225,
            "ThreadsPerChild": 35,
            "MaxRequestWorkers": 225,
            "MaxConnectionsPerChild": 0,
        },
        kept={"MaxKeepAliveRequests": 500, "KeepAliveTimeout": 20},
    ),
}
TUNED = "tuned"
TUNINGS = ("stock", TUNED, "published-stock", "published-tuned")


class Room(State):
    """A line-up's own folder for files, logs and sockets, beside a Keystone that several share.

    :param path: its folder; made here
    :param environment: what names the Keystone to a process
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(path)
        self._environment = dict(environment)
        for folder in (self.path, self.run, self.log):
            # a web server's own user has to reach the sockets inside
            folder.mkdir(mode=0o711)

    def environment(self) -> dict[str, str]:
        return dict(self._environment)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a line-up is made for.

    :param room: its folder
    :param listen: ``HOST:PORT`` of the foremost server
    :param upstream: ``HOST:PORT`` of uWSGI behind it, for those that use TCP there
    :param cached: whether keyfront's token cache answers
    :param cores: of the servers
    """

    room: Room
    listen: str
    upstream: str
    cached: bool
    cores: int

    @property
    def socket(self) -> Path:
        return self.room.run / "uwsgi.sock"


def _target(place: Place) -> str:
    """What keyfront's entrypoint serves: Keystone alone, or with the token cache before it."""
    if place.cached:
        return application.default_target()
    return f"config:{place.room.write('run/plain.ini', _PLAIN)}"


def _tuned(topology: str, place: Place) -> list[Program]:
    if topology in rendered.SERVERS:
        return rendered.programs(topology, place, _target(place))
    # keyfront render makes none for greenlets
    lineup = shapes.Lineup(
        state=place.room,
        listen=place.listen,
        target=_target(place),
        runtime=place.room.run,
        stop_timeout=30,
        processes=place.cores,
    )
    return shapes.programs(topology, lineup)


def _stock_uwsgi(place: Place, numbers: Numbers, **values: object) -> Program:
    processes, threads = numbers.uwsgi
    environment = place.room.environment()
    module = f"{STOCK_MODULE}:application"
    if place.cached:
        module = "keyfront.gateway.uwsgi:application"
        environment[application.TARGET_VARIABLE] = _target(place)
    text = render(
        "stock/uwsgi.ini.j2",
        **{
            "module": module,
            "virtualenv": machine.python_home(),
            "processes": processes,
            "threads": threads,
            "gevent": None,
            "patch": not place.cached,
            # uWSGI refuses to start above what the kernel gives
            "backlog": min(numbers.backlog, somaxconn()),
            "socket": None,
            "listen": place.listen,
            **values,
        },
    )
    return Program(
        name="uwsgi",
        command=[machine.uwsgi_program(), "--ini", str(place.room.write("run/uwsgi.ini", text))],
        log=place.room.log / "uwsgi.log",
        stop=_END["uwsgi"],
        reload=None,
        environment=environment,
    )


def _stock_nginx(place: Place, numbers: Numbers, upstream: str) -> Program:
    front = machine.front_user()
    text = render(
        "stock/nginx.conf.j2",
        user=front[0] if front else None,
        run=place.room.run,
        log=place.room.log,
        listen=place.listen,
        upstream=upstream,
        connections=numbers.connections,
        descriptors=numbers.descriptors,
    )
    program = machine.system_program(("nginx",), "nginx")
    config = place.room.write("run/nginx.conf", text)
    errors = place.room.log / "nginx.error.log"
    return Program(
        name="nginx",
        command=[program, "-c", str(config), "-p", str(place.room.run), "-e", str(errors)],
        log=place.room.log / "nginx.log",
        stop=_END["nginx"],
        reload=None,
    )


def _stock_apache(place: Place, numbers: Numbers, mpm: str, **values: object) -> Program:
    front = machine.front_user()
    processes, threads = numbers.mod_wsgi
    text = render(
        "stock/apache.conf.j2",
        **{
            "run": place.room.run,
            "log": place.room.log,
            "listen": place.listen,
            "modules": machine.apache_modules(f"mod_mpm_{mpm}.so", "apache2-bin"),
            "mpm": mpm,
            "directives": {
                **(numbers.event if mpm == "event" else numbers.prefork),
                **numbers.kept,
            },
            "user": front[0] if front else None,
            "group": front[1] if front else None,
            "virtualenv": machine.python_home(),
            "processes": processes,
            "threads": threads,
            "script": None,
            "mod_wsgi": None,
            "socket": place.socket,
            **values,
        },
    )
    program = machine.system_program(("apache2", "httpd"), "apache2-bin")
    config = place.room.write("run/apache.conf", text)
    return Program(
        name="apache",
        command=[program, "-f", str(config), "-DFOREGROUND"],
        log=place.room.log / "apache.log",
        stop=_END["apache"],
        reload=None,
    )


def _stock_mod_wsgi(place: Place, numbers: Numbers, mpm: str) -> list[Program]:
    environment = place.room.environment()
    module = STOCK_MODULE
    if place.cached:
        module = "keyfront.gateway.mod_wsgi"
        environment[application.TARGET_VARIABLE] = _target(place)
    text = render("stock/keystone.wsgi.j2", environment=environment, module=module)
    script = place.room.write("run/keystone.wsgi", text)
    loaded = machine.mod_wsgi_module()
    return [_stock_apache(place, numbers, mpm, script=script, mod_wsgi=loaded)]


_STOCK: dict[str, Callable[[Place, Numbers], list[Program]]] = {
    "uwsgi": lambda place, numbers: [_stock_uwsgi(place, numbers)],
    "gevent": lambda place, numbers: [_stock_uwsgi(place, numbers, threads=1, gevent=_GREENLETS)],
    "nginx+uwsgi": lambda place, numbers: [
        _stock_uwsgi(place, numbers, socket=place.socket),
        _stock_nginx(place, numbers, f"unix:{place.socket}"),
    ],
    "nginx+uwsgi-tcp": lambda place, numbers: [
        _stock_uwsgi(place, numbers, socket=place.upstream),
        _stock_nginx(place, numbers, place.upstream),
    ],
    "apache+uwsgi": lambda place, numbers: [
        _stock_uwsgi(place, numbers, socket=place.socket),
        _stock_apache(place, numbers, "event"),
    ],
    "mod_wsgi-event": lambda place, numbers: _stock_mod_wsgi(place, numbers, "event"),
    "mod_wsgi-prefork": lambda place, numbers: _stock_mod_wsgi(place, numbers, "prefork"),
}
TOPOLOGIES = tuple(_STOCK)


def programs(topology: str, tuning: str, place: Place) -> list[Program]:
    """Write the files of a line-up to its room; returns its programs in the order they start.

    :raises OptionError: there is no such topology or tuning
    :raises MissingPartError: something is not installed; names the command that installs it
    """
    check(topology, tuning)
    made = _tuned(topology, place) if tuning == TUNED else _STOCK[topology](place, NUMBERS[tuning])
    made = [replace(program, stop=_END[program.name]) for program in made]
    return [_as_ordinary_user(program) if "mod_wsgi" in topology else program for program in made]


def check(topology: str, tuning: str) -> None:
    """Find out, before anything is made, that a line-up can run here.

    :raises OptionError: there is no such topology or tuning
    :raises MissingPartError: something is not installed; names the command that installs it
    """
    if topology not in TOPOLOGIES:
        raise OptionError("--topology", topology, f"one of {', '.join(TOPOLOGIES)}")
    if tuning not in TUNINGS:
        raise OptionError("--tuning", tuning, f"one of {', '.join(TUNINGS)}")
    machine.require_module("keystone", "keystone")
    if "uwsgi" in topology or topology == "gevent":
        machine.uwsgi_program()
    if topology == "gevent":
        machine.require_module("gevent", "gevent")
    if topology.startswith("nginx"):
        machine.system_program(("nginx",), "nginx")
    if topology.startswith("apache"):
        machine.apache_modules("mod_proxy_uwsgi.so", "apache2-bin libapache2-mod-proxy-uwsgi")
    if topology.startswith("mod_wsgi"):
        machine.system_program(("apache2", "httpd"), "apache2-bin")
        machine.mod_wsgi_module()


def _as_ordinary_user(program: Program) -> Program:
    """Take root from a program; mod_wsgi runs no application as root.

    In a user namespace, so that files of root stay readable to it.
    """
    if os.geteuid() != 0:
        return program
    try:
        unshare = machine.system_program(("unshare",), "util-linux")
    except MissingPartError as error:
        raise MissingPartError(f"mod_wsgi runs no application as root: {error}") from None
    prefix = [unshare, "--user", "--map-user=1000", "--map-group=1000"]
    return replace(program, command=[*prefix, *program.command])

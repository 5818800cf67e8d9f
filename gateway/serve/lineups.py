"""The five server line-ups of ``keyfront serve``: their files, commands and signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyfront import __version__
from keyfront.common import programs as installed
from keyfront.common.counters import VARIABLE
from keyfront.common.machine import cores, somaxconn
from keyfront.common.templates import render
from keyfront.errors import OptionError

from .state import State

# Static here; each reason stands beside the number in the rendered file.
_THREADS = 2
GREENLETS = 100
HARAKIRI = 60
BACKLOG = 1024
_KEYFRONT = (sys.executable, "-m", "keyfront")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A server: its command, its log, and the signals that it takes.

    :param stop: the signal that lets running requests end
    :param reload: the command that loads the application anew; ``None`` if it need not take part
    """

    name: str
    command: list[str]
    log: Path
    stop: signal.Signals
    reload: list[str] | None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The values that the servers of a line-up are configured with.

    :param state: the state folder of the Keystone that is served
    :param listen: ``HOST:PORT`` that the foremost server listens at
    :param target: the application, as in ``KEYFRONT_APP``
    :param runtime: folder for sockets and pid files
    :param stop_timeout: seconds that running requests get when it stops
    :param processes: workers; by default one a core
    """

    state: State
    listen: str
    target: str
    runtime: Path
    stop_timeout: int
    processes: int = field(default_factory=cores)

    def values(self) -> dict[str, object]:
        """Return the values for the templates, by name."""
        front = installed.front_user()
        return {
            "version": __version__,
            "target": self.target,
            "listen": self.listen,
            "run": self.runtime,
            "log": self.state.log,
            "virtualenv": installed.python_home(),
            "processes": self.processes,
            "threads": _THREADS,
            "gevent": None,
            "harakiri": HARAKIRI,
            "stop_timeout": self.stop_timeout,
            "backlog": min(BACKLOG, somaxconn()),
            "somaxconn": somaxconn(),
            "unix_socket": None,
            "socket_group": front[1] if front else None,
            "user": front[0] if front else None,
            "group": front[1] if front else None,
            "stats_socket": self.state.run / "stats.sock",
        }

    def render(self, name: str, template: str, **values: object) -> Path:
        """Write a filled template to the state folder's ``run``; returns its path.

        :param name: the name of the file
        :param template: the template's path below ``keyfront/deploy``
        :param values: the values that it uses besides those of :meth:`values`
        """
        return self.state.write(f"run/{name}", render(template, **{**self.values(), **values}))

    @property
    def unix_socket(self) -> Path:
        """Return the path of the socket that uWSGI listens at behind a web server."""
        return self.runtime / "uwsgi.sock"


def _environment(lineup: Lineup) -> dict[str, str]:
    """Return the variables of what loads Keystone; another folder for counts is the user's to
    name."""
    node = os.environ.get(VARIABLE) or str(lineup.state.node)
    return {VARIABLE: node, **lineup.state.environment()}


def _uwsgi(lineup: Lineup, **values: object) -> Program:
    program = installed.uwsgi_program()
    python = sys.executable if installed.is_script(Path(program)) else None
    ini = lineup.render("uwsgi.ini", "serve/uwsgi/keyfront.ini.j2", python=python, **values)
    return Program(
        name="uwsgi",
        command=[*_KEYFRONT, "uwsgi", str(ini), "--program", program],
        log=lineup.state.log / "uwsgi.log",
        stop=signal.SIGTERM,
        reload=[*_KEYFRONT, "reload", str(ini)],
        environment=_environment(lineup),
    )


def _uwsgi_alone(lineup: Lineup) -> list[Program]:
    return [_uwsgi(lineup)]


def _uwsgi_gevent(lineup: Lineup) -> list[Program]:
    return [_uwsgi(lineup, gevent=GREENLETS)]


def _apache(lineup: Lineup, template: str, **values: object) -> Program:
    program = installed.system_program(("apache2", "httpd"), "apache2-bin")
    modules = installed.apache_modules("mod_mpm_event.so", "apache2-bin")
    config = lineup.render("apache.conf", template, modules=modules, **values)
    return Program(
        name="apache",
        command=[program, "-f", str(config), "-DFOREGROUND"],
        log=lineup.state.log / "apache.log",
        stop=signal.SIGWINCH,
        reload=None,
    )


def _mod_wsgi(lineup: Lineup) -> list[Program]:
    script = lineup.render(
        "keyfront.wsgi", "serve/apache/keyfront.wsgi.j2", environment=_environment(lineup)
    )
    module = installed.mod_wsgi_module()
    # one goes on while the other is replaced
    processes = max(2, lineup.processes)
    apache = _apache(
        lineup, "serve/apache/mod_wsgi.conf.j2", mod_wsgi=module, script=script, processes=processes
    )
    return [replace(apache, reload=[*_KEYFRONT, "reload", apache.command[2]])]


def _nginx_uwsgi(lineup: Lineup) -> list[Program]:
    program = installed.system_program(("nginx",), "nginx")
    template = "serve/nginx/nginx.conf.j2"
    config = lineup.render("nginx.conf", template, unix_socket=lineup.unix_socket)
    errors = lineup.state.log / "nginx.error.log"
    nginx = Program(
        name="nginx",
        command=[program, "-c", str(config), "-p", str(lineup.runtime), "-e", str(errors)],
        log=lineup.state.log / "nginx.log",
        stop=signal.SIGQUIT,
        reload=None,
    )
    return [_uwsgi(lineup, unix_socket=lineup.unix_socket), nginx]


def _apache_uwsgi(lineup: Lineup) -> list[Program]:
    apache = _apache(lineup, "serve/apache/proxy_uwsgi.conf.j2", unix_socket=lineup.unix_socket)
    return [_uwsgi(lineup, unix_socket=lineup.unix_socket), apache]


_BUILDERS: dict[str, Callable[[Lineup], list[Program]]] = {
    "uwsgi": _uwsgi_alone,
    "gevent": _uwsgi_gevent,
    "mod_wsgi": _mod_wsgi,
    "nginx+uwsgi": _nginx_uwsgi,
    "apache+uwsgi": _apache_uwsgi,
}
SERVERS = tuple(_BUILDERS)
#: Those in which nothing reads a slow request whole before a thread or greenlet gets it.
ALONE = ("uwsgi", "gevent")


def programs(server: str, lineup: Lineup) -> list[Program]:
    """Return the programs of a line-up, in the order they start; they stop in the reverse order.

    Writes their configuration to the state folder's ``run``.

    :param server: the name of the line-up, one of :data:`SERVERS`
    :param lineup: its settings
    :raises MissingPartError: something is not installed; names the command that installs it
    """
    return _BUILDERS[server](lineup)


def check(server: str) -> None:
    """Find out, before anything is written, that the parts of a line-up are installed.

    :raises MissingPartError: something is not; names the command that installs it
    """
    installed.require_module("keystone", "keystone")
    if server != "mod_wsgi":
        installed.uwsgi_program()
    if server == "gevent":
        installed.require_module("gevent", "gevent")
    if server == "nginx+uwsgi":
        installed.system_program(("nginx",), "nginx")
    if server in ("mod_wsgi", "apache+uwsgi"):
        installed.system_program(("apache2", "httpd"), "apache2-bin")
    if server == "apache+uwsgi":
        installed.apache_modules("mod_proxy_uwsgi.so", "libapache2-mod-proxy-uwsgi")
    if server == "mod_wsgi":
        installed.mod_wsgi_module()
        if os.geteuid() == 0:
            # mod_wsgi's own rule (mod_wsgi.c, wsgi_add_daemon_process)
            raise OptionError(
                "--server",
                "mod_wsgi",
                "another one when run as root, since mod_wsgi runs no application as root; "
                "or run keyfront as an ordinary user",
            )

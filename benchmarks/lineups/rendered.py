"""A measured line-up with the files of ``keyfront render``, sized for the cores it is given."""

from __future__ import annotations

import grp
import os
import pwd
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront.common import programs as machine
from keyfront.common.machine import read
from keyfront.gateway.plan.compute import plan
from keyfront.gateway.plan.workload import Workload
from keyfront.gateway.render import versions
from keyfront.gateway.render.lineups import render
from keyfront.gateway.render.settings import Settings
from keyfront.gateway.serve.lineups import Program

if TYPE_CHECKING:
    from .files import Place

#: The line-up of ``keyfront render`` by topology.
SERVERS = {
    "uwsgi": "uwsgi",
    "nginx+uwsgi": "nginx+uwsgi",
    "nginx+uwsgi-tcp": "nginx+uwsgi-tcp",
    "apache+uwsgi": "apache+uwsgi",
    "mod_wsgi-event": "mod_wsgi",
    "mod_wsgi-prefork": "prefork+mod_wsgi",
}


def programs(topology: str, place: Place, target: str) -> list[Program]:
    """Write the files to a place; return the programs in the order they start.

    :param target: what is served, as ``KEYFRONT_APP``
    :raises MissingPartError: something is not installed
    """
    folder = place.room.run
    user, group = _user()
    keystone = place.room.environment()
    for name in ("app", "cache"):
        folder.joinpath(name).mkdir()
    settings = Settings(
        folder=folder,
        server=SERVERS[topology],
        target=target,
        listen=place.listen,
        upstream=place.upstream,
        user=user,
        group=group,
        web_user=user,
        web_group=group,
        run_directory=folder / "app",
        log_directory=place.room.log,
        cache_directory=folder / "cache",
        config=Path(keystone["OS_KEYSTONE_CONFIG_DIR"]),
        virtualenv=Path(machine.python_home()),
    )
    computed = plan(read(cores=place.cores), Workload())
    for file in render(computed, settings, versions.find(settings.virtualenv)):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")
    return [_program(name, place) for name in _names(topology)]


def _names(topology: str) -> list[str]:
    front = {"nginx": "nginx", "apache": "apache", "mod_wsgi": "apache"}.get(
        topology.partition("+")[0].partition("-")[0]
    )
    return [*(["uwsgi"] if "uwsgi" in topology else []), *([front] if front else [])]


def _program(name: str, place: Place) -> Program:
    run, log = place.room.run, place.room.log
    if name == "uwsgi":
        command = [machine.uwsgi_program(), "--ini", str(run / "uwsgi.ini")]
    elif name == "nginx":
        nginx = machine.system_program(("nginx",), "nginx")
        errors = log / "nginx.error.log"
        command = [nginx, "-c", str(run / "nginx.conf"), "-e", str(errors), "-g", "daemon off;"]
    else:
        apache = machine.system_program(("apache2", "httpd"), "apache2-bin")
        command = [apache, "-f", str(run / "apache.conf"), "-DFOREGROUND"]
    return Program(
        name=name,
        command=command,
        log=log / f"{name}.log",
        stop=signal.SIGTERM,
        reload=None,
        environment=place.room.environment(),
    )


def _user() -> tuple[str, str]:
    """Whom a web server drops to; this user, if it is not root."""
    front = machine.front_user()
    return front or (
        pwd.getpwuid(os.geteuid()).pw_name,
        grp.getgrgid(os.getegid()).gr_name,
    )

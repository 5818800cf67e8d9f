"""nginx, Apache and uWSGI with the settings that a measurement names, and nothing else.

Everything that is not set keeps the default of Debian's package: :data:`STOCK_EVENT` is its
``mods-available/mpm_event.conf``, and so on. Each function writes a configuration of this user only
and returns the program that serves it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from keyfront.common import programs
from keyfront.common.templates import quoted
from keyfront.errors import MissingPartError
from keyfront.gateway.serve.lineups import Program

from .. import proc
from ..servers.processes import FILES, Process
from . import uwsgi

STOCK_EVENT: Mapping[str, object] = {
    "StartServers": 2,
    "MinSpareThreads": 25,
    "MaxSpareThreads": 75,
    "ThreadLimit": 64,
    "ThreadsPerChild": 25,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
STOCK_PREFORK: Mapping[str, object] = {
    "StartServers": 5,
    "MinSpareServers": 5,
    "MaxSpareServers": 10,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
STOCK_APACHE: Mapping[str, object] = {
    "Timeout": 300,
    "KeepAlive": "On",
    "MaxKeepAliveRequests": 100,
    "KeepAliveTimeout": 5,
}
STOCK_NGINX_EVENTS: Mapping[str, object] = {"worker_connections": 768}
STOCK_NGINX_HTTP: Mapping[str, object] = {
    "sendfile": "on",
    "tcp_nopush": "on",
    "types_hash_max_size": 2048,
    "gzip": "on",
}
#: What mod_wsgi serves is told by this in Apache's configuration.
WSGI_SCRIPT = "application.wsgi"

_APACHE = """\
ServerRoot {folder}
DefaultRuntimeDir {folder}
PidFile {pid}
ServerName localhost
LoadModule mpm_{mpm}_module {modules}/mod_mpm_{mpm}.so
LoadModule authz_core_module {modules}/mod_authz_core.so
{loaded}
Listen {listen}
{directives}
ErrorLog {errors}
LogLevel warn
CustomLog {accesses} "%h %l %u %t \\"%r\\" %>s %O \\"%{{Referer}}i\\" \\"%{{User-Agent}}i\\""
<Location "/">
    Require all granted
</Location>
{content}
"""
_NGINX = """\
pid {pid};
error_log {errors} warn;
daemon off;
{main}
events {{
{events}
}}
http {{
    default_type text/plain;
{http}
    server {{
        listen {listen};
        location / {{
{location}
        }}
    }}
}}
"""
# Those that nginx has under the same name in small letters, and the two others.
_UWSGI_PARAMETERS = {
    name: name.lower()
    for name in (
        *("QUERY_STRING", "REQUEST_METHOD", "CONTENT_TYPE", "CONTENT_LENGTH", "REQUEST_URI"),
        *("DOCUMENT_ROOT", "SERVER_PROTOCOL", "REMOTE_ADDR", "REMOTE_PORT", "SERVER_PORT"),
        "SERVER_NAME",
    )
} | {"PATH_INFO": "document_uri", "REQUEST_SCHEME": "scheme"}
_ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


def started(one: Program, *, files: int = FILES, cores: Collection[int] | None = None) -> Process:
    """Run a program until the block ends, or this process does.

    :param files: descriptors it may have, unless the system allows fewer
    :param cores: those it may run on; default: all
    """
    return Process(
        one.name, one.command, log=one.log, environment=one.environment, stop=one.stop,
        cores=cores, files=files,
    )  # fmt: skip


def program(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Program:
    """Return a program that ends by SIGTERM and cannot be reloaded."""
    return Program(
        name=name, command=list(command), log=log, stop=signal.SIGTERM, reload=None,
        environment=dict(environment or {}),
    )  # fmt: skip


def uwsgi_workers(
    folder: Path, options: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Program:
    """Write the ``uwsgi.ini`` of workers that load an application to a folder.

    :param options: the options of the ini file, beside those of :func:`.uwsgi.plain`
    :param environment: the environment of the application
    """
    ini = _written(folder / "uwsgi.ini", uwsgi.plain(options))
    command = [programs.uwsgi_program(), "--ini", str(ini)]
    made = program("uwsgi", command, folder / "uwsgi.log", environment)
    # a stop that waits for nothing: what is running is no longer wanted
    return replace(made, stop=signal.SIGINT)


def nginx(
    folder: Path,
    listen: str,
    *,
    location: Sequence[str],
    main: Mapping[str, object] | None = None,
    events: Mapping[str, object] = STOCK_NGINX_EVENTS,
    http: Mapping[str, object] = STOCK_NGINX_HTTP,
    access_log: str | None = None,
    user: str | None = None,
) -> Program:
    """Write ``nginx.conf`` to a folder.

    :param listen: the words of ``listen``
    :param location: the lines of ``location /``, without semicolons but within braces
    :param access_log: the words of ``access_log``; the default writes each request at once
    :param user: the user of its workers, where root starts it; default: root, which gets at any
        folder
    """
    found = programs.system_program(("nginx",), "nginx")
    root = {"user": user or "root"} if os.geteuid() == 0 else {}
    main = {"worker_processes": "auto", **root, **(main or {})}
    http = {**http, "access_log": access_log or quoted(folder / "nginx.access.log")}
    for kind in ("client_body", "uwsgi", "proxy", "fastcgi", "scgi"):
        http[f"{kind}_temp_path"] = quoted(folder / f"nginx-{kind}")
    errors = folder / "nginx.error.log"
    text = _NGINX.format(
        pid=quoted(folder / "nginx.pid"),
        errors=quoted(errors),
        main=_directives(main),
        events=_directives(events, 4),
        http=_directives(http, 4),
        listen=listen,
        location="\n".join(
            f"{'':12}{line}" + ("" if line.endswith("}") else ";") for line in location
        ),
    )
    config = _written(folder / "nginx.conf", text)
    command = [found, "-c", str(config), "-p", str(folder), "-e", str(errors)]
    return program("nginx", command, folder / "nginx.log")


def uwsgi_pass(upstream: str) -> list[str]:
    """Return the lines of a ``location`` that pass requests on to a uWSGI.

    :param upstream: ``HOST:PORT`` or ``unix:PATH``
    """
    given = (f"uwsgi_param {name} ${one}" for name, one in _UWSGI_PARAMETERS.items())
    return [f"uwsgi_pass {quoted(upstream)}", *given]


def _directives(values: Mapping[str, object], indent: int = 0) -> str:
    return "\n".join(f"{'':{indent}}{name} {value};" for name, value in values.items())


def apache(
    folder: Path,
    listen: str,
    *,
    mpm: str = "event",
    directives: Mapping[str, object],
    loaded: Sequence[str] = (),
    content: Iterable[str] = (),
    ordinary: bool = False,
) -> Program:
    """Write ``apache.conf`` to a folder.

    :param mpm: ``event`` or ``prefork``
    :param directives: the directives of the MPM and of the server, by name
    :param loaded: more modules, by name without ``_module``
    :param content: lines behind the rest
    :param ordinary: true if it must not run as root
    :raises MissingPartError: it must not run as root, and the kernel permits nothing else
    """
    found = programs.system_program(("apache2", "httpd"), "apache2-bin")
    modules = programs.apache_modules(f"mod_mpm_{mpm}.so", "apache2-bin")
    prefix = as_ordinary_user() if ordinary else ()
    front = None if ordinary else programs.front_user()
    user = {"User": front[0], "Group": front[1]} if front else {}
    text = _APACHE.format(
        folder=quoted(folder),
        pid=quoted(folder / "apache.pid"),
        errors=quoted(folder / "apache.error.log"),
        accesses=quoted(folder / "apache.access.log"),
        modules=modules,
        mpm=mpm,
        loaded="\n".join(f"LoadModule {name}_module {modules}/mod_{name}.so" for name in loaded),
        listen=listen,
        directives="\n".join(f"{name} {value}" for name, value in {**user, **directives}.items()),
        content="\n".join(content),
    )
    config = _written(folder / "apache.conf", text)
    command = [*prefix, found, "-f", str(config), "-DFOREGROUND"]
    return program("apache", command, folder / "apache.log")


def mod_wsgi(
    folder: Path, module: str, *, processes: int, threads: int, environment: Mapping[str, str]
) -> list[str]:
    """Return the lines for Apache that serve an application with mod_wsgi's daemons.

    :param folder: the folder of the script that mod_wsgi loads
    :param module: the module of the application, ``module:name``
    :param environment: the environment of the application
    """
    name, _, attribute = module.partition(":")
    script = _written(
        folder / WSGI_SCRIPT,
        "import json, os\n"
        f"os.environ.update(json.loads({json.dumps(dict(environment))!r}))\n"
        f"from {name} import {attribute} as application\n",
    )
    settings = {
        "processes": processes,
        "threads": threads,
        "python-home": quoted(programs.python_home()),
        "display-name": "%{GROUP}",
    }
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    return [
        f"LoadModule wsgi_module {quoted(programs.mod_wsgi_module())}",
        f"WSGIDaemonProcess application {words}",
        f"WSGISocketPrefix {quoted(folder / 'wsgi')}",
        "WSGIProcessGroup application",
        "WSGIApplicationGroup %{GLOBAL}",
        "WSGIPassAuthorization On",
        f"WSGIScriptAlias / {quoted(script)} process-group=application "
        "application-group=%{GLOBAL}",
    ]


@cache
def as_ordinary_user() -> tuple[str, ...]:
    """Return what to put before a command so that it does not run as root.

    mod_wsgi runs no application as root. In a user namespace files of root stay readable to it.

    :raises MissingPartError: the kernel or the machine does not permit it
    """
    if os.geteuid() != 0:
        return ()
    unshare = programs.system_program((_ORDINARY[0],), "util-linux")
    command = (unshare, *_ORDINARY[1:])
    if proc.ran([*command, "true"], 120).returncode:
        raise MissingPartError(
            "mod_wsgi does not run as root, and user namespaces are not permitted here: run it as "
            "an ordinary user"
        )
    return command


def _written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path

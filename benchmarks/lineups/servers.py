"""The servers of the experiments: nginx, Apache and uWSGI, set as published or as they come.

Only what a test varies or names is set; everything else keeps the default of Debian's package, and
is named there: ``STOCK_EVENT`` is its ``mods-available/mpm_event.conf``, and so on.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.common import programs as machine
from keyfront.common.templates import quoted, uwsgi_value
from keyfront.errors import MissingPartError

from ..experiments import isolation, processes
from ..experiments.processes import Running
from ..worlds.delaying_proxy import HOST
from .processes import FILES

STOCK_EVENT = {
    "StartServers": 2,
    "MinSpareThreads": 25,
    "MaxSpareThreads": 75,
    "ThreadLimit": 64,
    "ThreadsPerChild": 25,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
STOCK_PREFORK = {
    "StartServers": 5,
    "MinSpareServers": 5,
    "MaxSpareServers": 10,
    "MaxRequestWorkers": 150,
    "MaxConnectionsPerChild": 0,
}
STOCK_APACHE = {
    "Timeout": 300,
    "KeepAlive": "On",
    "MaxKeepAliveRequests": 100,
    "KeepAliveTimeout": 5,
}
STOCK_NGINX_EVENTS = {"worker_connections": 768}
STOCK_NGINX_HTTP = {"sendfile": "on", "tcp_nopush": "on", "types_hash_max_size": 2048}

_APACHE = """\
ServerRoot "{folder}"
DefaultRuntimeDir "{folder}"
PidFile "{folder}/apache.pid"
ServerName localhost
LoadModule mpm_{mpm}_module {modules}/mod_mpm_{mpm}.so
LoadModule authz_core_module {modules}/mod_authz_core.so
{loaded}
Listen {listen}
{directives}
ErrorLog "{folder}/error.log"
LogLevel warn
CustomLog "{folder}/access.log" "%h %l %u %t \\"%r\\" %>s %O"
<Location "/">
    Require all granted
</Location>
{content}
"""
_NGINX = """\
{user}worker_processes auto;
{main}
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
daemon off;
events {{
{events}
}}
http {{
    default_type text/plain;
    client_body_temp_path {folder}/body;
    uwsgi_temp_path {folder}/uwsgi;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
{http}
    server {{
        listen {listen};
        location / {{
{location}
        }}
    }}
}}
"""
_UWSGI_PARAMETERS = (
    "QUERY_STRING $query_string",
    "REQUEST_METHOD $request_method",
    "CONTENT_TYPE $content_type",
    "CONTENT_LENGTH $content_length",
    "REQUEST_URI $request_uri",
    "PATH_INFO $document_uri",
    "SERVER_PROTOCOL $server_protocol",
    "REQUEST_SCHEME $scheme",
    "REMOTE_ADDR $remote_addr",
    "REMOTE_PORT $remote_port",
    "SERVER_PORT $server_port",
    "SERVER_NAME $server_name",
)


@dataclass(frozen=True, kw_only=True)
class Daemons:
    """A group of mod_wsgi daemon processes, or of uWSGI workers.

    :param module: of the WSGI application, ``module:name``
    :param environment: of the application
    :param options: of ``WSGIDaemonProcess`` or of the ini file, beside processes and threads
    """

    module: str
    processes: int
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)


@contextmanager
def uwsgi(folder: Path, socket: Path, workers: Daemons, *, files: int = FILES) -> Iterator[Running]:
    """Run uWSGI at a unix socket until the block ends.

    :param folder: for its files; made here
    """
    folder.mkdir(mode=0o711)
    lines = [
        "[uwsgi]",
        "master = true",
        "need-app = true",
        "enable-threads = true",
        f"virtualenv = {uwsgi_value(machine.python_home())}",
        f"module = {workers.module}",
        f"processes = {workers.processes}",
        f"threads = {workers.threads}",
        f"socket = {socket}",
        "chmod-socket = 666",
        "buffer-size = 65535",
        "die-on-term = true",
        *(f"{name} = {value}" for name, value in workers.options.items()),
    ]
    ini = folder / "uwsgi.ini"
    ini.write_text("\n".join(lines) + "\n")
    with processes.running(
        "uWSGI",
        [machine.uwsgi_program(), "--ini", str(ini)],
        folder / "log",
        environment=workers.environment,
        # a stop that waits for nothing: what is running is no longer wanted
        stop=signal.SIGINT,
        folder=folder,
        files=files,
    ) as running:
        yield running


@contextmanager
def nginx(
    folder: Path,
    port: int,
    *,
    location: Sequence[str],
    main: Mapping[str, object] | None = None,
    events: Mapping[str, object] = STOCK_NGINX_EVENTS,
    http: Mapping[str, object] = STOCK_NGINX_HTTP,
    access_log: str | None = None,
    listen: str = "",
    files: int = FILES,
) -> Iterator[Running]:
    """Run nginx on loopback until the block ends.

    :param folder: for its files; made here
    :param location: the directives of ``location /``
    :param access_log: the arguments of ``access_log``; the default writes each request at once
    :param listen: what ``listen`` has behind the port, for example ``backlog=4096``
    """
    program = machine.system_program(("nginx",), "nginx")
    folder.mkdir(mode=0o711)
    log = access_log if access_log is not None else f"{folder}/access.log"
    text = _NGINX.format(
        folder=folder,
        # its own user could not get at the files of an experiment
        user="user root;\n" if os.geteuid() == 0 else "",
        main=_directives(main or {}),
        events=_directives(events, 4),
        http=_directives({**http, "access_log": log}, 4),
        listen=f"{HOST}:{port} {listen}".strip(),
        location="\n".join(
            f"{'':12}{line}" + ("" if line.endswith("}") else ";") for line in location
        ),
    )
    configuration = folder / "nginx.conf"
    configuration.write_text(text)
    command = [program, "-c", str(configuration), "-p", str(folder), "-e", f"{folder}/error.log"]
    with processes.running("nginx", command, folder / "log", folder=folder, files=files) as running:
        running.wait(lambda: folder.joinpath("nginx.pid").exists())
        yield running


def uwsgi_pass(socket: Path) -> list[str]:
    """What passes requests on to a uWSGI."""
    return [f"uwsgi_pass unix:{socket}", *(f"uwsgi_param {one}" for one in _UWSGI_PARAMETERS)]


def _directives(values: Mapping[str, object], indent: int = 0) -> str:
    return "\n".join(f"{'':{indent}}{name} {value};" for name, value in values.items())


@dataclass(frozen=True, kw_only=True)
class Apache:
    """How an Apache is set.

    :param directives: of the MPM and of the server, by name
    :param loaded: more modules, by name without ``_module``
    :param content: lines behind the rest
    """

    mpm: str = "event"
    directives: Mapping[str, object] = field(
        default_factory=lambda: {**STOCK_EVENT, **STOCK_APACHE}
    )
    loaded: Sequence[str] = ()
    content: Sequence[str] = ()


@contextmanager
def apache(
    folder: Path,
    port: int,
    setting: Apache,
    *,
    as_ordinary_user: bool = False,
    files: int = FILES,
) -> Iterator[Running]:
    """Run Apache on loopback until the block ends.

    :param folder: for its files; made here
    :raises MissingPartError: it must not run as root, and the kernel permits nothing else
    """
    program = machine.system_program(("apache2", "httpd"), "apache2-bin")
    modules = machine.apache_modules(f"mod_mpm_{setting.mpm}.so", "apache2-bin")
    folder.mkdir(mode=0o711)
    loaded = [f"LoadModule {name}_module {modules}/mod_{name}.so" for name in setting.loaded]
    prefix: Sequence[str] = ()
    user = []
    if as_ordinary_user:
        found = isolation.ordinary_user()
        if found is None:
            raise MissingPartError(
                "mod_wsgi does not run as root, and user namespaces are not permitted here: run it "
                "as an ordinary user"
            )
        prefix = found
    elif os.geteuid() == 0:
        front = machine.front_user()
        user = [f"User {front[0]}", f"Group {front[1]}"] if front else []
    text = _APACHE.format(
        folder=folder,
        modules=modules,
        mpm=setting.mpm,
        loaded="\n".join(loaded),
        listen=f"{HOST}:{port}",
        directives="\n".join(
            [*user, *(f"{name} {value}" for name, value in setting.directives.items())]
        ),
        content="\n".join(setting.content),
    )
    configuration = folder / "apache.conf"
    configuration.write_text(text)
    command = [*prefix, program, "-f", str(configuration), "-DFOREGROUND"]
    with processes.running(
        "Apache", command, folder / "log", folder=folder, files=files
    ) as running:
        yield running


def mod_wsgi(folder: Path, name: str, daemons: Daemons) -> list[str]:
    """The lines for Apache that serve an application with mod_wsgi daemons.

    :param folder: an existing one, for the script that mod_wsgi loads
    :raises MissingPartError: mod_wsgi is not installed; names the pip command
    """
    module, _, application = daemons.module.partition(":")
    script = folder / f"{name}.wsgi"
    script.write_text(
        "import json, os\n"
        f"os.environ.update(json.loads({json.dumps(dict(daemons.environment))!r}))\n"
        f"from {module} import {application} as application\n"
    )
    script.chmod(0o600)
    options = {
        "processes": daemons.processes,
        "threads": daemons.threads,
        "python-home": quoted(machine.python_home()),
        "display-name": "%{GROUP}",
        **daemons.options,
    }
    settings = " ".join(f"{key}={value}" for key, value in options.items())
    return [
        f"LoadModule wsgi_module {quoted(machine.mod_wsgi_module())}",
        f"WSGIDaemonProcess {name} {settings}",
        f"WSGISocketPrefix {folder}/wsgi",
        f"WSGIProcessGroup {name}",
        "WSGIApplicationGroup %{GLOBAL}",
        "WSGIPassAuthorization On",
        f"WSGIScriptAlias / {script} process-group={name} application-group=%{{GLOBAL}}",
    ]

"""Each server that the heartbeat is tested in, with ``amqp_service`` in one process of it.

A shape is a way to run a WSGI application: a server, and how it makes processes and threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from keyfront.common import programs
from support.served import PATIENCE, as_ordinary_user, free_port
from support.servers import _running

TESTS = Path(__file__).parent
# A uWSGI that gives a process no threads, unless told to: 2.0.26 is the last one.
WITHOUT_THREADS = "KEYFRONT_UWSGI_WITHOUT_THREADS"

_SCRIPT = """
import os
import sys

{preface}
os.environ.update({environment!r})
sys.path.insert(0, {tests!r})
{patch}
from {module} import application
"""
_PATCH = {
    "none": "",
    "eventlet": "import eventlet\neventlet.monkey_patch()\n",
    "gevent": "import gevent.monkey\ngevent.monkey.patch_all()\n",
}
_PASTE = """
[pipeline:main]
pipeline = heartbeat service

[filter:heartbeat]
use = egg:keyfront#heartbeat

[app:service]
paste.app_factory = amqp_service:app_factory
"""
_CONFIG = """
[keyfront_heartbeat]
enabled = true
"""
_APACHE = """
ServerRoot "{folder}"
DefaultRuntimeDir "{folder}"
PidFile "{folder}/apache.pid"
ServerName keyfront
LoadModule mpm_{mpm}_module {modules}/mod_mpm_{mpm}.so
LoadModule authz_core_module {modules}/mod_authz_core.so
LoadModule wsgi_module "{mod_wsgi}"
Listen 127.0.0.1:{port}
{processes}
ErrorLog "{folder}/log"
LogLevel warn
WSGISocketPrefix {folder}/wsgi
WSGIApplicationGroup %{{GLOBAL}}
WSGIScriptAlias / {script}
{daemon}
<Location "/">
    Require all granted
</Location>
"""
_PYTHON = 'WSGIPythonHome "{home}"'
_DAEMON = """
WSGIDaemonProcess service processes=1 threads={threads} python-home="{home}" lang=C.UTF-8
WSGIProcessGroup service
"""
_PREFORK = """
StartServers 1
MinSpareServers 1
MaxSpareServers 1
ServerLimit {children}
MaxRequestWorkers {children}
"""
_EVENT = """
StartServers 1
ServerLimit 1
ThreadsPerChild {children}
MinSpareThreads 1
MaxSpareThreads {children}
MaxRequestWorkers {children}
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way to run a WSGI application.

    :param command: what starts it, in a place
    :param patches: what makes sense to be patched in it
    :param threads: how many of its threads may serve requests
    :param hub_runs: between requests, the hub of this patching runs; ``None`` if none does
    :param entry: keyfront's module that has its entrypoint
    :param starved: threads of Python do not run between requests
    :param preface: what the script that is served does first
    """

    name: str
    command: Callable[[Place], list[str]]
    patches: tuple[str, ...] = ("none", "eventlet", "gevent")
    threads: int = 1
    hub_runs: str | None = None
    entry: str | None = None
    starved: bool = False
    preface: str = ""

    def unsafe(self, patch: str) -> bool:
        """Broken with this patching, whether or not connections are kept alive."""
        return patch != "none" and self.threads > 1

    def resets(self, patch: str) -> bool:
        """Stock oslo.messaging loses its connections in it."""
        return self.starved or patch not in ("none", self.hub_runs)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one server runs: its own folder, and the script it serves."""

    folder: Path
    script: Path


@dataclass
class Running:
    """A server that answers."""

    shape: Shape
    port: int
    pid: int
    log: Path

    @property
    def client_name(self) -> str:
        """A part of the names that oslo.messaging gives the connections of its process.

        Of its only one: each shape serves from one process.
        """
        return f":{self.pid}:"

    def get(self, path: str, **options: object) -> dict[str, Any]:
        """What it answers; a failure is an AssertionError."""
        return get(self.port, path, **options)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def get(port: int, path: str, **options: object) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", f"{path}?{query}")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, f"{path}: {answer.status} {body.decode(errors='replace')}"
        found: dict[str, Any] = json.loads(body)
        return found
    finally:
        connection.close()


def _uwsgi(*options: str, program: Callable[[], str] = programs.uwsgi_program) -> Any:
    def command(place: Place) -> list[str]:
        return [
            program(), "--http-socket", "127.0.0.1:0", "--master", "--processes", "1",
            "--wsgi-file", str(place.script), "--virtualenv", sys.prefix, "--need-app",
            "--single-interpreter", "--die-on-term", "--disable-logging", *options,
        ]

    return command


def uwsgi_without_threads() -> str | None:
    """The program, if there is one."""
    return os.environ.get(WITHOUT_THREADS)


def _apache(mpm: str, *, children: int, daemon_threads: int = 0) -> Any:
    def command(place: Place) -> list[str]:
        program = programs.system_program(("apache2", "httpd"), "apache2-bin")
        processes = (_PREFORK if mpm == "prefork" else _EVENT).format(children=children)
        daemon = _DAEMON if daemon_threads else _PYTHON
        port = free_port()
        config = place.folder / "apache.conf"
        config.write_text(
            _APACHE.format(
                folder=place.folder, script=place.script, port=port, mpm=mpm,
                modules=programs.apache_modules(f"mod_mpm_{mpm}.so", "apache2-bin"),
                mod_wsgi=programs.mod_wsgi_module(), processes=processes,
                daemon=daemon.format(threads=daemon_threads, home=sys.prefix),
            )
        )
        return [*as_ordinary_user(), program, "-f", str(config), "-DFOREGROUND"]

    return command


def _alone(server: str) -> Any:
    def command(_place: Place) -> list[str]:
        return [sys.executable, str(TESTS / "amqp_service.py"), "--server", server]

    return command


_TOLD = "import uwsgi\nuwsgi.has_threads = 0\n"
_UWSGI = "keyfront.gateway.uwsgi"
_MOD_WSGI = "keyfront.gateway.mod_wsgi"
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="uWSGI", command=_uwsgi(), entry=_UWSGI),
        Shape(name="uWSGI lazy-apps", command=_uwsgi("--lazy-apps"), entry=_UWSGI),
        Shape(name="uWSGI threads=4", command=_uwsgi("--threads", "4"), threads=4, entry=_UWSGI),
        Shape(
            name="uWSGI gevent=20", command=_uwsgi("--gevent", "20"), patches=("none", "gevent"),
            hub_runs="gevent", entry=_UWSGI,
        ),
        Shape(
            name="uWSGI without threads",
            command=_uwsgi(program=lambda: os.environ[WITHOUT_THREADS]),
            starved=True,
        ),
        Shape(
            name="uWSGI without threads, lazy-apps",
            command=_uwsgi("--lazy-apps", program=lambda: os.environ[WITHOUT_THREADS]),
            starved=True,
        ),
        # The next best where there is no such program: ours believes what it is told.
        Shape(
            name="uWSGI, told without threads", command=_uwsgi(),
            preface=_TOLD,
        ),
        Shape(
            name="uWSGI, told without threads, lazy-apps", command=_uwsgi("--lazy-apps"),
            preface=_TOLD,
        ),
        Shape(
            name="mod_wsgi daemon, prefork",
            command=_apache("prefork", children=4, daemon_threads=1), entry=_MOD_WSGI,
        ),
        Shape(
            name="mod_wsgi daemon, event",
            command=_apache("event", children=4, daemon_threads=1), entry=_MOD_WSGI,
        ),
        Shape(
            name="mod_wsgi daemon, event, threads=5", threads=5,
            command=_apache("event", children=4, daemon_threads=5), entry=_MOD_WSGI,
        ),
        Shape(
            name="mod_wsgi embedded, prefork", command=_apache("prefork", children=1),
            entry=_MOD_WSGI,
        ),
        Shape(
            name="mod_wsgi embedded, event", command=_apache("event", children=1),
            entry=_MOD_WSGI,
        ),
        Shape(
            name="mod_wsgi embedded, event, threads=5", threads=5,
            command=_apache("event", children=5), entry=_MOD_WSGI,
        ),
        Shape(
            name="eventlet.wsgi", command=_alone("eventlet"), patches=("none", "eventlet"),
            hub_runs="eventlet",
        ),
        Shape(
            name="gevent.pywsgi", command=_alone("gevent"), patches=("none", "gevent"),
            hub_runs="gevent",
        ),
        # only to call other servers from, and to be called
        Shape(name="wsgiref", command=_alone("wsgiref"), patches=("none",)),
    )
}


@contextlib.contextmanager
def starting(
    shape: Shape, folder: Path, environment: dict[str, str], *,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[Callable[[], Running]]:
    """Start a server; what this yields waits until it answers.

    Only from a thread that lives on: the kernel ends it with the thread that started it.

    :param folder: its own, where its log is left
    :param environment: of ``amqp_service``; what the way to install needs is added
    :param stop: what ends it; ``SIGKILL`` takes no time
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"KEYFRONT_APP": "amqp_service:application", **environment}
    if "eventlet" not in (environment.get("HB_PATCH"), shape.hub_runs):
        # oslo.messaging imports eventlet all the same: without a resolver that nobody asks, in half
        # of the time.
        environment["EVENTLET_NO_GREENDNS"] = "yes"
    install = environment.get("HB_INSTALL", "none")
    if install == "filter":
        (folder / "paste.ini").write_text(_PASTE)
        environment["HB_PASTE"] = str(folder / "paste.ini")
    if install == "entry":
        (folder / "service.conf").write_text(_CONFIG)
        environment["HB_CONFIG"] = str(folder / "service.conf")
        assert shape.entry is not None, f"{shape.name} has no entrypoint of ours"
    script = folder / "service.wsgi"
    module = (shape.entry or "") if install == "entry" else "amqp_service"
    script.write_text(
        _SCRIPT.format(
            preface=shape.preface, environment=environment, tests=str(TESTS), module=module,
            patch=_PATCH[environment.get("HB_PATCH", "none")],
        )
    )
    command = shape.command(Place(folder=folder, script=script))
    with _running(command, folder / "output", stop, environment=environment) as process:

        def ready() -> Running:
            deadline = time.monotonic() + 3 * PATIENCE
            while True:
                ended = process.poll() is not None
                try:
                    port = _port(folder)
                    pid = get(port, "/pid")["pid"]
                    # Apache's, where it also puts what the service writes
                    log = folder / "log"
                    return Running(shape, port, pid, log if log.exists() else folder / "output")
                except (OSError, HTTPException, LookupError) as error:
                    if ended or time.monotonic() > deadline:
                        printed = (folder / "output").read_text(errors="replace")
                        raise AssertionError(
                            f"{shape.name}: {error}; it printed: {printed}"
                        ) from error
                time.sleep(0.05)

        yield ready


@contextlib.contextmanager
def running(
    shape: Shape, folder: Path, environment: dict[str, str], *,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[Running]:
    """Run a server until the block ends; it answers when the block begins."""
    with starting(shape, folder, environment, stop=stop) as ready:
        yield ready()


def _port(folder: Path) -> int:
    """Where a server listens, from what it was told or says."""
    config = folder / "apache.conf"
    text = (config if config.exists() else folder / "output").read_text(errors="replace")
    found = re.search(
        r"^(?:Listen 127\.0\.0\.1:|uwsgi socket 0 bound to TCP address 127\.0\.0\.1:|)"
        r"(\d+)(?: \(port auto-assigned\).*)?$",
        text, re.MULTILINE,
    )
    if found is None:
        raise LookupError("it does not listen yet")
    return int(found[1])

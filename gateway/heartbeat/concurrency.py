"""Finds out which server runs this process, what has patched it, and what of that cannot work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from . import native


class Surroundings(NamedTuple):
    """The server that runs a process, and the libraries that have patched it."""

    #: ``uwsgi``, ``uwsgi gevent``, ``mod_wsgi daemon``, ``mod_wsgi embedded``, or a program's name.
    server: str
    #: Native threads that serve requests; ``None`` where the server does not tell.
    threads: int | None
    #: ``none``, ``eventlet``, ``gevent`` or both.
    patching: str

    @property
    def is_patched(self) -> bool:
        """True if sockets of this process belong to a hub."""
        return self.patching != "none"


def surroundings() -> Surroundings:
    """Return the surroundings as they are now; what is patched later is seen by looking again."""
    server, threads = _server()
    return Surroundings(server, threads, _patching())


def unsafe(around: Surroundings) -> list[str]:
    """Return a line for each combination that cannot work: what it is, what happens, what to do."""
    found = []
    uwsgi: Any = sys.modules.get("uwsgi")
    if "eventlet" in around.patching and "gevent" in around.patching:
        found.append(
            "eventlet and gevent have both patched this process: each waits in a hub that the"
            " other never runs; use one of them"
        )
    if around.server == "uwsgi gevent" and "eventlet" in around.patching:
        found.append(
            "uWSGI's gevent loop with a process patched by eventlet: eventlet's hub does not run"
            " there; take out the option gevent, or eventlet's monkey_patch()"
        )
    elif around.is_patched and around.server != "uwsgi gevent" and (around.threads or 1) > 1:
        found.append(
            f"{around.server} with {around.threads} threads in a process patched by"
            f" {around.patching}: a green thread cannot be switched to from another thread, and"
            " requests hang; use 1 thread and more processes"
        )
    if uwsgi is not None and not has_threads(uwsgi) and not uwsgi.masterpid():
        found.append(
            "uWSGI without threads and without a master: nothing runs between requests, so nobody"
            " can beat; set enable-threads = true, or master = true"
        )
    return found


def has_threads(uwsgi: Any) -> bool:
    """Return whether other threads of Python run while a worker of uWSGI waits for a request.

    They do since uWSGI 2.0.27; before that, only with ``enable-threads`` or ``threads``. A uWSGI
    without the function ``has_threads`` is judged by its version.

    :param uwsgi: the module ``uwsgi``
    """
    told = getattr(uwsgi, "has_threads", None)
    if told is not None:
        return bool(told)
    version = tuple(getattr(uwsgi, "version_info", ()))[:3]
    return version >= (2, 0, 27) or "enable-threads" in uwsgi.opt or "threads" in uwsgi.opt


def parent_is_idle() -> bool:
    """Return whether this process was forked from a master of uWSGI, which only loads applications.

    It may not have its number as a worker yet.
    """
    uwsgi: Any = sys.modules.get("uwsgi")
    return uwsgi is not None and uwsgi.masterpid() == os.getppid()


def pause_of(sock: Any) -> Callable[[float], object]:
    """Return the sleep that lets others run where a socket waits: a hub's, or the interpreter's."""
    for kind in type(sock).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("eventlet", "gevent"):
            sleep: Callable[[float], object] = sys.modules[package].sleep
            return sleep
    return cast("Callable[[float], object]", native.sleep)


def _server() -> tuple[str, int | None]:
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is not None:
        if "gevent" in uwsgi.opt:
            return "uwsgi gevent", 1
        return "uwsgi", _number(uwsgi.opt.get("threads", b"1"))
    mod_wsgi: Any = sys.modules.get("mod_wsgi")
    group = getattr(mod_wsgi, "process_group", None)
    if group is not None:
        server = "mod_wsgi daemon" if group else "mod_wsgi embedded"
        return server, _number(getattr(mod_wsgi, "threads_per_process", None))
    return os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "") or "python", None


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _patching() -> str:
    names = []
    eventlet: Any = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("socket"):
        names.append("eventlet")
    gevent: Any = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("socket"):
        names.append("gevent")
    return " and ".join(names) or "none"

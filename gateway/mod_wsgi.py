"""The entrypoint for Apache with mod_wsgi (``WSGIScriptAlias`` to a file that imports this).

A ``.wsgi`` file of one line is enough::

    from keyfront.gateway.mod_wsgi import application

Set ``KEYFRONT_APP`` in ``os.environ`` before that line, or in Apache's own environment, to serve
something else than Keystone (see :mod:`keyfront.gateway.application`).

mod_wsgi imports a script again at every request after a failed import. Under stock Keystone the
second import fails with ``ArgsAlreadyParsedError``, which hides the cause. Here a failed load is
kept: every request is answered 503 and logs the first error. Ten seconds later the next request
also asks mod_wsgi for a fresh daemon process, so that the service heals once the cause is gone.
The process is named after how the load went, for :mod:`keyfront.gateway.reload.daemons`.
"""

from __future__ import annotations

import os
import signal
import time

from keyfront.common.fork import registry

from . import login_limit, slow_requests
from .application import (
    RETRY_AFTER,
    FailedApplication,
    keep_connections,
    load_or_fail,
    pin_argv,
    reported,
)
from .node.installation import Node
from .queue_limit import from_environment, limit_queue
from .reload import daemons
from .server_error import answer_errors
from .traces import installation as traces


class _FreshProcess:
    """Ends this daemon process, for mod_wsgi to start another, once the wait is over."""

    def __init__(self) -> None:
        self._not_before = time.monotonic() + RETRY_AFTER
        self._asked = False

    def __call__(self) -> None:
        if self._asked or time.monotonic() < self._not_before:
            return
        self._asked = True
        # documented by mod_wsgi ("Restarting Daemon Processes"): SIGINT lets requests finish
        os.kill(os.getpid(), signal.SIGINT)


def _in_daemon_process() -> bool:
    try:
        import mod_wsgi
    except ImportError:
        return False
    return bool(getattr(mod_wsgi, "process_group", ""))


def _daemons() -> tuple[int, int]:
    """Return the largest number of processes, and the number of threads of each."""
    try:
        import mod_wsgi
    except ImportError:
        return 1, 1
    return (
        int(getattr(mod_wsgi, "maximum_processes", 1)),
        int(getattr(mod_wsgi, "threads_per_process", 1)),
    )


def _takes_logins() -> bool:
    """Return whether this is a daemon process that takes nothing but logins."""
    import mod_wsgi

    return bool(mod_wsgi.process_group == login_limit.GROUP)


def _is_of_reading(error: Exception) -> bool:
    """Return whether mod_wsgi has raised an error because a request's body broke off."""
    # It has no class of its own, and no errno; the words are those of server/wsgi_input.c.
    return isinstance(error, OSError) and "request data read error" in str(error)


pin_argv("mod_wsgi")
with reported():
    queue_timeout = from_environment()
    slow = slow_requests.from_environment()
    most_logins, own_processes = login_limit.from_environment(), login_limit.own_processes()
    node = Node()
    trace = traces.install(registry)
registry.install()
node.install(registry)
_loaded = load_or_fail(
    raising=False, on_request=_FreshProcess() if _in_daemon_process() else None
)
#: True if the application failed to load.
failed = isinstance(_loaded, FailedApplication)
_processes, _threads = _daemons()
_running, _waiting = login_limit.shares(
    most_logins, login_limit.room(_processes, _threads, own=own_processes)
)
_limited = login_limit.limit_logins(
    _loaded,
    turns=node.login_turns(running=_running, waiting=_waiting, processes=_processes),
    refused=node.login_refused,
)
application = node.wrap(
    trace(
        limit_queue(
            slow_requests.tell_slow(
                answer_errors(_limited, client_gone=_is_of_reading), seconds=slow
            ),
            seconds=queue_timeout,
            waited=node.queued,
            shed=node.shed,
        )
    ),
    _loaded,
    takes_logins=_takes_logins if own_processes and _in_daemon_process() else None,
)
keep_connections()
registry.loaded()
daemons.tell(failed=failed)

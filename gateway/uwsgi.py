"""The entrypoint for uWSGI: ``module = keyfront.gateway.uwsgi:application``.

What is served is named by ``KEYFRONT_APP`` (``env = KEYFRONT_APP=config:/etc/...`` in the ini
file; see :mod:`keyfront.gateway.application`); left out, Keystone behind the packaged pipeline.
The application's own command line is uWSGI's ``pyargv``, which stays as it is.

With ``gevent = N`` in the ini file, the standard library is patched before anything else is
imported. With ``need-app = true`` a failed load ends uWSGI with a status other than 0; without
it, every request is answered 503 and logs the first error. Stopping is bounded by
``worker-reload-mercy`` (see :mod:`keyfront.gateway.bounded_stop`).
"""

from __future__ import annotations

import os
import signal
from functools import partial

import uwsgi

if uwsgi.worker_id() > 0:
    # Under lazy-apps the worker loads with SIGHUP ignored: a stop or reload meanwhile would be lost
    # on it. Blocked, the signal waits (signal(7)) until bounded_stop takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

# the order of the imports is the point: patching comes before everything that holds a lock
if "gevent" in uwsgi.opt:
    from .greenlets import patch_gevent

    patch_gevent()

from keyfront.common.fork import registry

from . import bounded_stop, login_limit, memory_limit, queue_limit, slow_requests
from .application import keep_connections, load_or_fail, pin_argv, reported
from .node.installation import Node
from .request_body import read_whole
from .server_error import answer_errors
from .traces import installation as traces

if "pyargv" not in uwsgi.opt:
    pin_argv("uwsgi")

# behind a web server the uwsgi protocol carries a length, never chunks
_speaks_http = any(option in uwsgi.opt for option in ("http-socket", "https-socket"))

# also of a request that is refused for its wait: closing over unread bytes loses the answer
whole = partial(read_whole, read_chunk=uwsgi.chunked_read if _speaks_http else None)

with reported():
    queue_timeout, most_memory = queue_limit.from_environment(), memory_limit.from_environment()
    slow = slow_requests.from_environment()
    most_logins, own_processes = login_limit.from_environment(), login_limit.own_processes()
    node = Node()
    trace = traces.install(registry)
registry.install()
bounded_stop.install(registry)
node.install(registry)


def _reload() -> None:
    """Make uWSGI's master replace this worker."""
    node.grown()
    os.kill(os.getpid(), signal.SIGHUP)


_running, _waiting = login_limit.shares(
    most_logins, login_limit.room(uwsgi.numproc, uwsgi.cores, own=own_processes)
)
turns = node.login_turns(
    running=_running, waiting=_waiting, processes=own_processes or uwsgi.numproc
)
_loaded = load_or_fail(raising="need-app" in uwsgi.opt)
_limited = login_limit.limit_logins(_loaded, turns=turns, refused=node.login_refused)
_queued = partial(
    queue_limit.limit_queue,
    whole(slow_requests.tell_slow(answer_errors(_limited), seconds=slow)),
    seconds=queue_timeout,
    refusing=whole,
    waited=node.queued,
    shed=node.shed,
)
# The last processes have the queue of logins.
_queues = [_queued(), _queued()] if own_processes else [_queued()]
_others = uwsgi.numproc - own_processes


def _takes_logins() -> bool:
    """Return whether this worker takes nothing but logins."""
    return bool(uwsgi.worker_id() > _others)


application = node.wrap(
    trace(
        memory_limit.limit_memory(
            queue_limit.by_queue(_queues, _takes_logins),
            mebibytes=most_memory,
            reload=_reload,
        )
    ),
    _loaded,
    takes_logins=_takes_logins if own_processes else None,
)
keep_connections()
bounded_stop.install_last(registry)
registry.loaded()

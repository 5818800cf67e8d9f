"""Bounds the stop of a uWSGI worker by ``worker-reload-mercy``.

Since uWSGI 2.0.27 the usual graceful stop (``unix_signal:15 gracefully_kill_them_all``) waits for
running requests for ever: the master sits in its signal handler, where neither the mercy nor
harakiri is looked at (core/uwsgi.c, gracefully_kill_them_all). So each worker bounds itself: a
native thread takes the master's SIGHUP, starts a timer that ends the process a little before the
mercy is over, and passes the signal on to uWSGI's own handler, which lets the request finish.

The timer is :func:`faulthandler.dump_traceback_later`: it is native, so it fires even where a
library holds the interpreter for good, and its traceback in the log shows what the worker was
busy with (files and lines, no values).

The ini file needs the line ``hook-post-fork = unix_signal:40 gracefully_kill`` as the last of its
``hook-post-fork``: of an option that is given several times, :data:`uwsgi.opt` has the last one.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import uwsgi

from keyfront.common import interpreter

if TYPE_CHECKING:
    from keyfront.common.fork import ForkRegistry

LOG = logging.getLogger("keyfront.gateway")

# A real-time signal that uWSGI leaves alone; a number, since SIGRTMIN differs between C libraries.
_PASSED_ON = 40
_HOOK = f"unix_signal:{_PASSED_ON} gracefully_kill"

# uWSGI's own default (core/init.c)
_DEFAULT_MERCY = 60
# The master looks once a second for dead workers: ending a little early, the worker is found dead
# at the mercy's end and not a second behind it.
_MARGIN = 0.25


def _seconds_to_finish() -> float:
    """Return the seconds a worker has to finish its requests: uWSGI's ``worker-reload-mercy``."""
    value = uwsgi.opt.get("worker-reload-mercy", _DEFAULT_MERCY)
    return float(value)


def _hooked() -> bool:
    hooks = uwsgi.opt.get("hook-post-fork", ())
    if isinstance(hooks, bytes):
        hooks = (hooks,)
    return _HOOK.encode() in hooks


def install(registry: ForkRegistry) -> None:
    """Bound the stop of every worker from now on; of this one, if this process is a worker.

    Workers with greenlets are :func:`install_last`'s.
    """
    if "gevent" in uwsgi.opt:
        return
    if not _hooked():
        # without the hook the passed-on signal would kill the worker at once
        LOG.warning(
            "stop is not bounded: add 'hook-post-fork = %s' to the uWSGI ini file, below its other "
            "hook-post-fork",
            _HOOK,
        )
        # blocked for a loading worker (keyfront.gateway.uwsgi), and nobody here would take it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        return
    if uwsgi.worker_id() > 0:
        _bound_stop()
    else:
        registry.register("uwsgi stop", after=_bound_stop)
        # A stop that arrives while a worker is being forked waits in it until it can be heard
        # (signal(7)); uWSGI's own handlers would lose it, and its master would wait for ever.
        os.register_at_fork(before=_hold, after_in_parent=_release)


def _hold() -> None:
    if uwsgi.worker_id() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _release() -> None:
    if uwsgi.worker_id() == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def install_last(registry: ForkRegistry) -> None:
    """Bound the stop of workers with greenlets; call it when all else is registered.

    A handler after it that starts a thread, and so waits, would have the hub run before uWSGI's
    loop does, and then a stop would cut off running requests.
    """
    if "gevent" not in uwsgi.opt:
        return

    # uWSGI's gevent loop takes SIGHUP through the hub and then waits for requests without a bound
    # (plugins/gevent/gevent.c, py_uwsgi_gevent_graceful); a second watcher on the hub starts ours
    def watch() -> None:
        import gevent

        def in_loop() -> None:
            gevent.signal_handler(signal.SIGHUP, _start_timer)
            # blocked while the worker loaded (keyfront.gateway.uwsgi)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

        # The greenlet first runs in uWSGI's loop. A watcher made any earlier would be the first,
        # for which alone libev installs its handler, and uWSGI's own handler would then replace it.
        gevent.spawn(in_loop)

    registry.register("uwsgi stop", after=watch)


def _start_timer() -> None:
    seconds = max(_seconds_to_finish() - _MARGIN, _MARGIN)
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def _bound_stop() -> None:
    """Start the thread that waits for the master's SIGHUP. Runs in the worker's main thread."""
    # every thread started from here on inherits the mask, so the signal can only reach sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # The interpreter's own, whatever has patched the application: a green thread that waits for a
    # signal stops all others, and the number of a greenlet is no thread's.
    interpreter.start_new_thread(_wait, (interpreter.get_ident(),))


def _wait(main_thread: int) -> None:
    signal.sigwait({signal.SIGHUP})
    _start_timer()
    signal.pthread_kill(main_thread, _PASSED_ON)

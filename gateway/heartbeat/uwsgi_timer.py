"""Heartbeats by uWSGI's timer, for a uWSGI without threads, whose workers run only in requests.

The master's timer sends each worker a signal, which the worker takes between requests. There it
beats, and gives the hub and other threads some milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import concurrency

# Seconds that hub and threads get at each signal.
_TURN = 0.003

# The numbers of signals that are tried, from the last: programs take the first ones.
_LAST, _FIRST = 254, 200


def is_needed() -> bool:
    """Return whether other threads of Python stand still between requests in this uWSGI."""
    uwsgi: Any = sys.modules.get("uwsgi")
    return uwsgi is not None and not concurrency.has_threads(uwsgi)


def start(turn: Callable[[], object], *, seconds: float = 1.0) -> bool:
    """Make uWSGI call ``turn`` in every worker, between its requests.

    :param turn: the function
    :param seconds: seconds between two calls; a second where uWSGI has no finer timer
    :returns: true if it will be called; false without a master, or when no signal is free
    """
    uwsgi: Any = sys.modules["uwsgi"]
    if not uwsgi.masterpid():
        return False

    def handle(_: int) -> None:
        turn()
        # The module's own name: under eventlet and gevent it lets the hub run.
        sys.modules["time"].sleep(_TURN)

    # Each worker that loads for itself has a signal of its own: a handler is an address in it.
    worker = uwsgi.worker_id()
    receiver = f"worker{worker}" if worker else "workers"
    for number in (_LAST - worker,) if worker else range(_LAST, _FIRST, -1):
        known = uwsgi.signal_registered(number)
        if known and not worker:
            continue
        try:
            uwsgi.register_signal(number, receiver, handle)
            if not known:  # a worker that follows another of its number finds the timer running
                if hasattr(uwsgi, "add_ms_timer"):
                    uwsgi.add_ms_timer(number, int(seconds * 1000))
                else:
                    uwsgi.add_timer(number, max(int(seconds), 1))
        except ValueError:
            continue
        return True
    return False

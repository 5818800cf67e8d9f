"""Hashes passwords so that others go first, and under gevent in threads.

A hash takes a core for a quarter of a second, on purpose. It runs in long slices of that core
(:mod:`.password_slices`), so that a thread that wakes up for a validation has it at once. It gives
way to no greenlet, so under gevent it runs in a pool of native threads, one for each core, and the
worker's other greenlets go on; the request waits for it, as ever.

Only the arithmetic is done there, on bytes: ``hash`` and ``verify`` of the classes of
``keystone.common.password_hashers``, which let go of the interpreter for it. What they raise is
raised to the request as well. A thread is named after nothing and told of nowhere, so that no
password is in its name.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from .password_slices import in_long_slices

LOG = logging.getLogger(__name__)

_METHODS = ("hash", "verify")


def give_way(hashers: Any) -> None:
    """Have the classes that hash give way to others; once only.

    :param hashers: the classes, ``keystone.common.password_hashing.SUPPORTED_HASHERS``
    """
    monkey: Any = sys.modules.get("gevent.monkey")
    green = monkey is not None and monkey.is_module_patched("threading")
    classes = list(hashers or ())
    if not classes or any(not callable(getattr(x, y, None)) for x in classes for y in _METHODS):
        if green:
            text = "passwords are hashed in the workers' only thread: this Keystone is unknown"
            LOG.warning(text)
        return
    for hasher in classes:
        for name in _METHODS:
            original = getattr(hasher, name)
            if not hasattr(original, "keyfront_gives_way"):
                call = in_long_slices(original)
                call.keyfront_gives_way = True  # type: ignore[attr-defined]
                setattr(hasher, name, staticmethod(_aside(call) if green else call))


def _aside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*values: Any, **named: Any) -> Any:
        return run_aside(functools.partial(original, *values, **named))

    return call


def run_aside(deed: Callable[[], Any]) -> Any:
    """Return what a function returns, or raise what it raises, in a thread of gevent's pool.

    Where no thread can be started it runs in this one.

    :param deed: a function that lets go of the interpreter while it works
    """
    call = _Call(deed)
    try:
        _pool().apply(call.run)
    except RuntimeError:  # of the limit of threads; the call keeps its own errors
        taken = call.take()
        if taken is None:
            raise
        return taken()
    error, call.error = call.error, None
    if error is None:
        return call.value
    try:
        raise error
    finally:
        # its traceback holds this frame
        del error


class _Call:
    """A function that runs in another thread, at most once, and what came of it.

    gevent logs what a thread of its pool raises, so nothing is raised there.
    """

    __slots__ = ("_deed", "error", "value")

    def __init__(self, deed: Callable[[], Any]) -> None:
        self._deed: Callable[[], Any] | None = deed
        self.error: BaseException | None = None
        self.value: Any = None

    def take(self) -> Callable[[], Any] | None:
        """Return the function to whoever asks first; ``None`` to others.

        gevent may have it in a queue although no thread could be started for it.
        """
        deed, self._deed = self._deed, None
        return deed

    def run(self) -> None:
        """Run it."""
        deed = self.take()
        try:
            if deed is not None:
                self.value = deed()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            # neither this frame nor who is still queued keeps a password
            del deed


_pools: dict[tuple[int, int], Any] = {}


def _pool() -> Any:
    """Return this thread's pool of native threads, which a fork does not take with it."""
    gevent: Any = importlib.import_module("gevent")
    key = os.getpid(), id(gevent.get_hub())
    found = _pools.get(key)
    if found is None:
        for other in [one for one in _pools if one[0] != key[0]]:
            del _pools[other]
        pool: Any = importlib.import_module("gevent.threadpool").ThreadPool
        found = _pools[key] = pool(len(os.sched_getaffinity(0)))
    return found

"""Hashes passwords in threads of a lower priority than those that answer requests.

A hash takes a core for a quarter of a second, on purpose. What a service asks for meanwhile takes a
tenth of a millisecond, and on a machine whose cores all hash it waits for one of them, for many
times as long. So a hash runs in a thread that has a higher *niceness*
(``KEYFRONT_HASH_NICENESS``, 0 to 19; 0 hashes in the request's own thread, as Keystone does): the
kernel gives a core at once to who wants it for a moment. Who wants it all the time gets more of it
than the hash, three times as much with the default; so a login takes longer beside others that
compute. Its request waits for it, as ever.

Each hash has a thread of its own, which ends with it: against a hash it costs nothing, and there is
none that a fork would lose. Under gevent, hashes run in a pool of native threads, one for each
core, and the worker's other greenlets go on, which otherwise stand still while a password is
hashed.

Only the arithmetic is done there, on bytes: ``hash`` and ``verify`` of the classes of
``keystone.common.password_hashers``, which let go of the interpreter for it. What they raise is
raised by them here as well. A thread is named after nothing and told of nowhere, so that no
password is in its name.
"""

from __future__ import annotations

import _thread
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keyfront.common import ranges

LOG = logging.getLogger(__name__)

VARIABLE = "KEYFRONT_HASH_NICENESS"
#: Steps above the niceness of the process where the variable is not set. Of a core that another
#: thread wants as well, the hash then has a quarter; with 10 it would be a tenth.
DEFAULT = 5
_HIGHEST = 19
_METHODS = ("hash", "verify")


def from_environment() -> int:
    """Return the niceness that ``KEYFRONT_HASH_NICENESS`` adds; 0 for none.

    :raises OptionError: it is not a whole number from 0 to 19
    """
    text = os.environ.get(VARIABLE, str(DEFAULT))
    return ranges.whole(VARIABLE, text, 0, _HIGHEST, f"an integer, 0 to {_HIGHEST}; 0 for none")


def hash_aside(hashers: Any, niceness: int) -> None:
    """Have the classes that hash do so in threads of their own; once only.

    :param hashers: the classes, ``keystone.common.password_hashing.SUPPORTED_HASHERS``
    :param niceness: steps above the process's own, 1 to 19; 0 changes nothing
    """
    if not niceness:
        return
    classes = list(hashers or ())
    if not classes or any(not callable(getattr(x, y, None)) for x in classes for y in _METHODS):
        LOG.warning("passwords are hashed in requests' own threads: this Keystone is unknown")
        return
    for hasher in classes:
        for name in _METHODS:
            original = getattr(hasher, name)
            if not hasattr(original, "keyfront_aside"):
                setattr(hasher, name, staticmethod(_aside(original, niceness)))


def _aside(original: Callable[..., Any], niceness: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*values: Any, **named: Any) -> Any:
        return run_aside(functools.partial(original, *values, **named), niceness)

    call.keyfront_aside = True  # type: ignore[attr-defined]
    return call


def run_aside(deed: Callable[[], Any], niceness: int) -> Any:
    """Return what a function returns, or raise what it raises, in a thread of lower priority.

    Where no thread can be started it runs in this one.

    :param deed: a function that lets go of the interpreter while it works
    :param niceness: steps above the process's own, 1 to 19
    """
    call = _Call(deed, min(_HIGHEST, _niceness() + niceness))
    try:
        if _is_patched():
            _pool().apply(call.run)
        else:
            done = _thread.allocate_lock()
            done.acquire()
            _thread.start_new_thread(call.run, (done.release,))
            with done:
                pass
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

    __slots__ = ("_deed", "_target", "error", "value")

    def __init__(self, deed: Callable[[], Any], target: int) -> None:
        self._deed: Callable[[], Any] | None = deed
        self._target = target
        self.error: BaseException | None = None
        self.value: Any = None

    def take(self) -> Callable[[], Any] | None:
        """Return the function to whoever asks first; ``None`` to others.

        gevent may have it in a queue although no thread could be started for it.
        """
        deed, self._deed = self._deed, None
        return deed

    def run(self, tell: Callable[[], object] = lambda: None) -> None:
        """Run it, and tell when it is over."""
        deed = self.take()
        try:
            if deed is not None:
                self.value = _nicely(deed, self._target)
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            # neither this frame nor who is still queued keeps a password
            del deed
            tell()


def _nicely(deed: Callable[[], Any], target: int) -> Any:
    if _niceness() < target:
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, 0, target)
    return deed()


def _niceness() -> int:
    """Return the niceness of this thread: on Linux each has its own."""
    try:
        return os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:
        return 0


_pools: dict[tuple[int, int], Any] = {}


def _is_patched() -> bool:
    """Tell whether gevent has put greenlets in the place of threads."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


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

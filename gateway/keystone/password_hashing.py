"""Hashes passwords so that others go first: in long slices of a core, and under gevent in threads.

A hash computes for a quarter of a second, on purpose. Linux gives it the core in slices of some
milliseconds, and since 6.6 a thread that wakes up meanwhile, for a validation, waits for the end of
one. A thread may ask for slices of its own length since 6.12, by ``sched_setattr``: who wants
shorter ones, as all others do, then has the core as soon as it wakes up. So a hash asks for the
longest that there are. That gives it no less of the core than others have, needs no right, and is
taken back after it; a higher niceness would take its share, and only root could take it back. Of a
kernel that knows no such slices nothing is asked.

A hash gives way to no greenlet, so under gevent it runs in a pool of native threads, one for each
core, and the worker's other greenlets go on; the request waits for it, as ever. Only the arithmetic
is done there, on bytes: ``hash`` and ``verify`` of the classes of
``keystone.common.password_hashers``, which let go of the interpreter for it. What they raise is
raised to the request as well. A thread is named after nothing and told of nowhere, so that no
password is in its name.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger(__name__)

#: Nanoseconds of a slice; the kernel's longest.
LONGEST = 100_000_000

# The numbers of sched_setattr and sched_getattr: glibc has had functions of them only since 2.41.
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
# SCHED_OTHER and SCHED_BATCH, of which threads have slices.
_SLICED = (0, 3)

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


class Attributes(ctypes.Structure):
    """The first version of the kernel's ``struct sched_attr``."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def slice_of(thread: int = 0) -> int:
    """Return the nanoseconds of a thread's slices; 0 where the kernel does not say.

    :param thread: the kernel's number of it; 0: the one that asks
    """
    found = _attributes(thread)
    return found.runtime if found is not None and found.policy in _SLICED else 0


def in_long_slices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the thread that calls it has long slices meanwhile."""

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        before = slice_of()
        if before:
            _ask(LONGEST)
        try:
            return function(*values, **named)
        finally:
            if before:
                _ask(before)

    return call


def _ask(nanoseconds: int) -> None:
    """Set the slices of this thread, if the kernel lets it."""
    attributes = _attributes(0)
    if attributes is not None:
        attributes.runtime = nanoseconds
        _sched_attr(_NUMBERS[platform.machine()][0], 0, attributes)


def _attributes(thread: int) -> Attributes | None:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or sys.maxsize < 1 << 32:
        return None
    found = Attributes()
    size = ctypes.sizeof(found)
    return found if _sched_attr(numbers[1], thread, found, size) == 0 else None


@functools.cache
def _syscall() -> Any:
    # Not a CDLL, which gives the interpreter away for each call.
    function = ctypes.PyDLL(None).syscall
    number, pointer = ctypes.c_long, ctypes.POINTER(Attributes)
    function.argtypes = (number, number, pointer, number, number)
    function.restype = number
    return function


def _sched_attr(number: int, thread: int, attributes: Attributes, size: int = 0) -> int:
    answer: int = _syscall()(number, thread, ctypes.byref(attributes), size, 0)
    return answer

"""Hashes passwords in long slices of a core, so that threads that wake up have it at once.

A hash computes for a quarter of a second. Linux gives it the core in slices of some milliseconds,
and since 6.6 a thread that wakes up meanwhile, for a validation, waits for the end of one. A thread
may ask for slices of its own length since 6.12, by ``sched_setattr``: who wants shorter ones, as
all others do, then has the core as soon as it wakes up. So a hash asks for the longest that there
are. That gives it no less of the core than others have, needs no right, and is taken back after it;
a higher niceness would take its share, and only root could take it back.

Of a kernel that knows no such slices nothing is asked.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

#: Nanoseconds of a slice; the kernel's longest.
LONGEST = 100_000_000

# The numbers of sched_setattr and sched_getattr: glibc has had functions of them only since 2.41.
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
# SCHED_OTHER and SCHED_BATCH, of which threads have slices.
_SLICED = (0, 3)


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
        _call(_NUMBERS[platform.machine()][0], 0, attributes)


def _attributes(thread: int) -> Attributes | None:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or sys.maxsize < 1 << 32:
        return None
    found = Attributes()
    size = ctypes.sizeof(found)
    return found if _call(numbers[1], thread, found, size) == 0 else None


@functools.cache
def _syscall() -> Any:
    # Not a CDLL, which gives the interpreter away for each call.
    function = ctypes.PyDLL(None).syscall
    number, pointer = ctypes.c_long, ctypes.POINTER(Attributes)
    function.argtypes = (number, number, pointer, number, number)
    function.restype = number
    return function


def _call(number: int, thread: int, attributes: Attributes, size: int = 0) -> int:
    answer: int = _syscall()(number, thread, ctypes.byref(attributes), size, 0)
    return answer

"""Primitives of the interpreter itself, whatever has been monkey-patched, and whenever.

eventlet and gevent replace the functions in the modules ``_thread``, ``time`` and ``select``. A
fresh copy of such a module has the originals, made by the interpreter from its own code; neither
library needs to be asked, nor to be there.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol


class Lock(Protocol):
    """A lock of the interpreter (``_thread.lock``)."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def locked(self) -> bool: ...


def _fresh(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:  # not CPython
        raise ImportError(f"there is no module {name} in this interpreter", name=name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_thread = _fresh("_thread")
_time = _fresh("time")

#: ``_thread.allocate_lock`` of the interpreter.
allocate_lock = _thread.allocate_lock
#: ``_thread.start_new_thread`` of the interpreter: never joined, not even at exit.
start_new_thread = _thread.start_new_thread
#: ``time.sleep`` of the interpreter: it gives the interpreter lock to others, and no hub a turn.
sleep = _time.sleep
#: ``time.monotonic``, which nothing patches; here so that a beat goes through no patched module.
monotonic = _time.monotonic
#: ``select.poll`` of the interpreter.
poll = _fresh("select").poll

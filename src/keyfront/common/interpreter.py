"""Primitives of the interpreter itself, whatever has been monkey-patched, and whenever.

eventlet and gevent replace the functions in the modules ``_thread``, ``time`` and ``select``. A
fresh copy of such a module has the originals, made by the interpreter from its own code; neither
library needs to be asked, nor to be there.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def fresh(name: str) -> Any:
    """Return a copy of a module that is built into the interpreter.

    :param name: the module's name
    :raises ImportError: there is none
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:  # not CPython
        raise ImportError(f"there is no module {name} in this interpreter", name=name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_thread = fresh("_thread")

#: ``_thread.allocate_lock`` of the interpreter.
allocate_lock = _thread.allocate_lock
#: ``_thread.get_ident`` of the interpreter: the number of the native thread that calls it.
get_ident = _thread.get_ident
#: ``_thread.start_new_thread`` of the interpreter: never joined, not even at exit.
start_new_thread = _thread.start_new_thread

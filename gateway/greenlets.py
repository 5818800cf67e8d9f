"""Monkey patching for gevent, before anything else is imported.

A module imported too early keeps what patching would have replaced: a native lock that a greenlet
holds while it yields stops its whole worker, and a ``threading.local`` is one for all greenlets,
so a request sees another's data. gevent itself only warns in some of these cases. This module
refuses instead, and itself imports only what the interpreter has loaded already, and the errors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from keyfront.errors import ImportedTooEarlyError, MissingPartError

# Packages that keep primitives deep inside (in instances and closures), where _keeps cannot look.
_BLOCKING = frozenset(
    (
        *("alembic", "amqp", "dogpile", "httpcore", "httpx", "keystone", "keystoneauth1"),
        *("keystoneclient", "keystonemiddleware", "kombu", "ldap3", "ldappool", "memcache"),
        *("pymemcache", "pymysql", "redis", "requests", "sqlalchemy", "urllib3"),
    )
)

# gevent and what it is made of, uWSGI's own, and ours, where a native primitive is deliberate.
_HARMLESS = frozenset(("gevent", "greenlet", "keyfront", "uwsgi", "uwsgidecorators", "zope"))

# The names that patching replaces, by standard module; what this Python lacks is passed over.
_PRIMITIVES = {
    "_thread": ("allocate_lock", "start_new_thread", "_local"),
    "queue": ("Queue", "SimpleQueue"),
    "select": ("select", "poll", "epoll"),
    "socket": ("socket", "create_connection", "getaddrinfo", "socketpair"),
    "ssl": ("SSLContext", "SSLSocket", "create_default_context"),
    "subprocess": ("Popen",),
    "threading": ("Lock", "RLock", "local", "Condition", "Event", "Semaphore"),
    "time": ("sleep",),
}


def patch_gevent() -> bool:
    """Patch the standard library for gevent, unless uWSGI did (``gevent-early-monkey-patch``).

    Call it before the application or a library is imported.

    :returns: true if it patched, false if that was done already
    :raises MissingPartError: gevent is not installed
    :raises ImportedTooEarlyError: eventlet has patched, or a module that keeps blocking primitives
        is imported; the message names the modules
    """
    eventlet: Any = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.already_patched:
        raise ImportedTooEarlyError(
            "eventlet has already patched this process: gevent cannot; take out eventlet's"
            " monkey_patch() or uWSGI's gevent option"
        )
    try:
        monkey: Any = importlib.import_module("gevent.monkey")
    except ModuleNotFoundError:
        raise MissingPartError("gevent is not installed: pip install 'keyfront[gevent]'") from None
    if monkey.is_module_patched("socket"):
        return False
    early = _imported_too_early()
    if early:
        raise ImportedTooEarlyError(
            f"imported before gevent's monkey patching: {', '.join(early)}; import"
            " keyfront.gateway.uwsgi first, or set gevent-early-monkey-patch = true"
        )
    with _entry_points_listed_once():
        monkey.patch_all()
    return True


@contextmanager
def _entry_points_listed_once() -> Iterator[None]:
    """Have the block find entry points in one list.

    gevent looks for its plugins at each of 25 steps, and each time the metadata of all that is
    installed would be read: most of the time in which it patches.
    """
    metadata: Any = importlib.import_module("importlib.metadata")
    before, found = metadata.entry_points, metadata.entry_points()
    metadata.entry_points = lambda **chosen: found.select(**chosen)
    try:
        yield
    finally:
        metadata.entry_points = before


def _imported_too_early() -> list[str]:
    """Return the sorted names of the imported packages that patching now comes too late for.

    Those are the packages known to keep primitives deep inside, and every other package outside
    the standard library that has a primitive, a subclass of one or an instance of one in a
    module's globals.
    Modules that only use ``socket.socket`` by its full name are fine: gevent replaces that.
    """
    primitives, classes = _primitives()
    early = set()
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root in early or root in _HARMLESS or root in sys.stdlib_module_names:
            continue
        if root in _BLOCKING or root.startswith("oslo_") or _keeps(module, primitives, classes):
            early.add(root)
    return sorted(early)


def _primitives() -> tuple[set[int], tuple[type, ...]]:
    """Return the ids of the unpatched primitives, and the classes among them and of locks."""
    things = [
        getattr(sys.modules[module], name)
        for module, names in _PRIMITIVES.items()
        if module in sys.modules
        for name in names
        if hasattr(sys.modules[module], name)
    ]
    # Lock and RLock are functions that make instances of classes without a public name.
    locks = [type(make()) for make in things if getattr(make, "__name__", "") in _LOCK_MAKERS]
    return {id(thing) for thing in things}, (*(t for t in things if isinstance(t, type)), *locks)


_LOCK_MAKERS = ("allocate_lock", "lock", "RLock")


def _keeps(module: ModuleType, primitives: set[int], classes: tuple[type, ...]) -> bool:
    # Some packages put lazy objects into sys.modules: without a plain dict there is nothing to see.
    held = getattr(module, "__dict__", None)
    if not isinstance(held, dict):
        return False
    for value in list(held.values()):
        if id(value) in primitives or issubclass(type(value), classes):
            return True
        if issubclass(type(value), type) and any(base in classes for base in value.__mro__[1:]):
            return True
    return False

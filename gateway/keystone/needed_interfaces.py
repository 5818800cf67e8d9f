"""Imports what keyfront needs of Keystone, and refuses what looks different from what it needs.

Here is what our application factory needs; each other module of this package looks at what it
replaces itself, and refuses by :func:`incompatible`. docs/compatibility.md lists all.
"""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import inspect
import threading
from collections.abc import Callable
from typing import Any

from keyfront.errors import ImportedTooEarlyError, IncompatibleError, MissingPartError

from . import series


def import_keystone(name: str) -> Any:
    """Import a module of Keystone, or of what it requires.

    :param name: the module's dotted name
    :raises MissingPartError: Keystone is not installed
    :raises IncompatibleError: Keystone is installed without this module
    """
    try:
        importlib.import_module("keystone")
    except ModuleNotFoundError as error:
        if error.name != "keystone":
            raise
        raise MissingPartError(
            "Keystone is not installed; install it with: pip install 'keyfront[keystone]'"
        ) from error
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another module that fails to import is an error of its own and is shown as it is.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise incompatible(f"there is no module {error.name}") from error


def incompatible(difference: str) -> IncompatibleError:
    """Return the error that names this Keystone's version and what is not as expected.

    :param difference: a clause that says what is not as expected
    """
    try:
        version = series.installed()
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return IncompatibleError(
        f"Keystone {version} does not look as keyfront needs it: {difference}; use a Keystone of "
        f"OpenStack {', '.join(series.SERIES.values())}, or a newer keyfront"
    )


def checked_request_store() -> Any:
    """Return ``oslo_context``'s thread-local after checking that clearing it does what we need.

    :raises IncompatibleError: it is not there, is no thread-local, or is not what Keystone's
        request-local cache reads
    :raises ImportedTooEarlyError: it is a native thread-local although threads are patched, so
        all greenlets of a thread would share it
    """
    context = import_keystone("oslo_context.context")
    store = getattr(context, "_request_store", None)
    if not isinstance(store, threading.local):
        if type(store).__module__ == "_thread":
            raise ImportedTooEarlyError(
                "oslo_context.context was imported before monkey patching, so all greenlets would"
                " share one request context; patch first, then load Keystone"
            )
        raise incompatible("oslo_context.context._request_store is not a threading.local")

    # Try it: what is put there must be what get_current() finds, and gone when deleted.
    before = getattr(store, "context", None)
    probe = store.context = object()
    found = context.get_current()
    del store.context
    left = context.get_current()
    if before is not None:
        store.context = before
    if found is not probe or left is not None:
        raise incompatible("oslo_context.get_current() does not read _request_store.context")

    cache = import_keystone("keystone.common.cache._context_cache")
    proxy = getattr(cache, "_ResponseCacheProxy", None)
    if "get_current" not in _loaded_names(proxy, "_get_request_context"):
        raise incompatible(
            "the request-local cache (_ResponseCacheProxy._get_request_context) does not live in"
            " oslo_context's current context"
        )
    return store


def check_server_core(core: Any, middleware: type) -> None:
    """Check that ``core`` builds the application as we call it, with ``middleware`` in it.

    :param core: the module ``keystone.server.flask.core``
    :param middleware: the class whose ``token`` is made request-local
    :raises IncompatibleError: a function that we call is missing, or the class is not in use
    """
    for name in ("initialize_application", "_get_config_files"):
        if not callable(getattr(core, name, None)):
            raise incompatible(f"keystone.server.flask.core has no {name}()")
    if middleware not in getattr(core, "_KEYSTONE_MIDDLEWARE", ()):
        raise incompatible("AuthContextMiddleware is not in core._KEYSTONE_MIDDLEWARE")


def check_middleware(middleware: type) -> None:
    """Check what :func:`.application.make_token_request_local` relies upon.

    :param middleware: Keystone's ``AuthContextMiddleware``, not yet changed
    :raises IncompatibleError: a fact is otherwise; the error names it
    """
    name = middleware.__name__
    if any("token" in vars(base) for base in middleware.__mro__):
        raise incompatible(f"{name}.token already exists on the class")
    for method, operation, verb in (
        ("__init__", "STORE_ATTR", "assign"),
        ("fetch_token", "STORE_ATTR", "assign"),
        ("fetch_token", "LOAD_ATTR", "read"),
        ("fill_context", "LOAD_ATTR", "read"),
    ):
        if "token" not in _own_attributes(middleware, method, operation):
            raise incompatible(f"{name}.{method}() does not {verb} self.token")
    # Anything else that a request leaves on the shared instance would be the same hole again.
    for method in vars(middleware):
        if method == "__init__" or not inspect.isroutine(vars(middleware)[method]):
            continue
        others = set(_own_attributes(middleware, method, "STORE_ATTR")) - {"token"}
        if others:
            raise incompatible(f"{name}.{method}() assigns self.{min(others)}")
    # Each fetch_token() overwrites the one before. fill_context() must find the user's token,
    # not the service's, so the user's has to be fetched last.
    base = next((b for b in middleware.__mro__[1:] if "process_request" in vars(b)), None)
    names = _loaded_names(base, "process_request")
    order = [
        next((n for n in names[i:] if n in ("service_token", "user_token")), "")
        for i, called in enumerate(names)
        if called == "_do_fetch_token"
    ]
    if order != ["service_token", "user_token"]:
        raise incompatible(
            "keystonemiddleware's process_request() does not fetch the service's token first and"
            " the user's last"
        )


def _function(owner: object, method: str) -> Callable[..., Any] | None:
    """Return the Python function behind ``owner.method``, decorators removed; ``None`` if none."""
    try:
        found = inspect.unwrap(inspect.getattr_static(owner, method))
    except AttributeError:
        return None
    found = getattr(found, "__func__", found)
    return found if inspect.isfunction(found) else None


def _loaded_names(owner: object, method: str) -> list[str]:
    """Return the attribute names that a method loads from anything, in the order of its code."""
    function = _function(owner, method)
    if function is None:
        return []
    return [
        str(step.argval)
        for step in dis.get_instructions(function)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]


def _own_attributes(owner: type, method: str, operation: str) -> list[str]:
    """Return the attributes of ``self`` that a method loads or stores (``operation``)."""
    function = _function(owner, method)
    if function is None:
        return []
    found = []
    loaded: object = None
    for step in dis.get_instructions(function):
        if step.opname == operation and loaded == "self":
            found.append(str(step.argval))
        # From 3.13 one instruction may load two names; the last is on top of the stack.
        loaded = None
        if step.opname.startswith("LOAD_FAST"):
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return found

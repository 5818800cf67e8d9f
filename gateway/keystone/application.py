"""Keystone's own WSGI application as a paste application, with two of its holes closed.

Keystone hard-codes its middleware and ships no paste file. ``egg:keyfront#keystone`` is the last
element of the pipeline that we bring instead (entry point ``paste.app_factory``)::

    [app:keystone]
    use = egg:keyfront#keystone
    config_files = /etc/keystone/keystone.conf

The holes, seen in Keystone 30.0.0, both between requests that share a process:

* ``oslo_context`` keeps the request context in a thread-local that nothing clears, Keystone keeps
  its request-local cache in that context, and the caller's token is validated before the new
  context is made. So a thread answers from the cache of its previous request, and accepts a token
  once after it was revoked elsewhere. The context is dropped at the start of each request.
* ``AuthContextMiddleware`` keeps the caller's token as an attribute of the one instance that all
  threads share, so of two requests at once one can be served as the other's user. The attribute
  becomes local to the request.

The second reaches into a class of Keystone, so its shape is checked at start, and a Keystone that
looks different is refused (:class:`~keyfront.errors.IncompatibleError`) instead of served with a
hole that nobody sees. Importing this module does not import Keystone.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import inspect
import io
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from keyfront.common import request_phases
from keyfront.errors import ImportedTooEarlyError, PasteFileError
from keyfront.middleware.tokens.request import ENVIRON_KEY, Request, current
from keyfront.middleware.tokens.routes import TOKENS

from .. import queue_limit, slow_requests
from ..error_body import error_body, plain_error_body
from . import (
    first_request,
    needless_imports,
    needless_middleware,
    password_threads,
    token_cache,
)
from .database_loss import AWAY, DatabaseLoss
from .imports import import_keystone as _import
from .imports import incompatible as _incompatible

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

#: The options of the paste section.
OPTIONS = ("config_dir", "config_files")

_MIDDLEWARE = "keystone.server.flask.request_processing.middleware.auth_context"

# The caller's token of the request that runs in this thread or greenlet. A context variable and
# not a threading.local: greenlets have contexts of their own whether or not threads are patched.
_caller_token: contextvars.ContextVar[Any] = contextvars.ContextVar("keyfront_caller_token")


class RequestLocalToken:
    """The ``token`` attribute of ``AuthContextMiddleware``, local to the request.

    A data descriptor, so that it wins over the instance's dictionary: Keystone's methods go on
    writing and reading ``self.token``. ``None`` when the request has validated no token yet.
    """

    __slots__ = ()

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        """Return the token of this request; the descriptor itself when read from the class."""
        if instance is None:
            return self
        return _caller_token.get(None)

    def __set__(self, instance: object, value: Any) -> None:
        """Keep ``value`` for this request only."""
        _caller_token.set(value)


# Logins and validations ask for what there is of a user several times.
_READ_ONCE = frozenset({"POST", "GET", "HEAD"})

# Headers of Keystone's answer that are others in the one of a change that was refused.
_REPLACED = frozenset({"content-type", "content-length", "retry-after"})


class KeystoneApplication:
    """A WSGI application that drops the thread's previous request, then calls Keystone.

    A change that its database hooks refused is answered 503 with ``Retry-After``, and so is a
    request that the database fails for now (``database_loss.py``); without ``Retry-After`` if a
    commit was made, or may have been. An error in HTML or plain text, of flask or oslo.middleware,
    gets the JSON form of Keystone's.

    :param application: Keystone's WSGI application, middleware included
    :param request_store: the thread-local in which ``oslo_context`` keeps the request context
    :param begin: a function called with each request that the ``token_cache`` filter has not begun,
        before Keystone reads anything for it
    :param loss: the log of requests that fail because the database is away
    """

    __slots__ = ("_begin", "_loss", "_request_store", "application")

    def __init__(
        self,
        application: WSGIApplication,
        request_store: Any,
        begin: Callable[[Request], None] = lambda request: None,
        loss: DatabaseLoss | None = None,
    ) -> None:
        self.application = application
        self._request_store = request_store
        self._begin = begin
        self._loss = loss or DatabaseLoss()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        try:
            del self._request_store.context
        except AttributeError:
            pass  # the first request of this thread
        _caller_token.set(None)
        request = environ.get(ENVIRON_KEY)
        if request is None:
            request = Request()
            self._begin(request)
        request.recorded = True
        at_tokens = environ.get("PATH_INFO") == TOKENS
        login = at_tokens and environ.get("REQUEST_METHOD") == "POST"
        if at_tokens and environ.get("REQUEST_METHOD") in _READ_ONCE:
            request.users = {}
        request.connections = []
        given: list[Any] = []
        written: list[bytes] = []

        def start(status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
            given[:] = (status, headers) if error is None else (status, headers, error)
            return written.append

        body: Iterable[bytes] = ()
        before = current.set(request)
        try:
            # Keystone makes the whole answer here; nothing of it has left yet.
            body = self.application(environ, start)
        except Exception:
            # oslo.db hands on what a commit raises as an error of its own.
            if not (request.refused or request.lost):
                raise
        finally:
            current.reset(before)
            kept, request.connections = request.connections, None
            for connection in kept or ():
                connection.close()
        if request.refused:
            reason = f"The change was not completed because {request.refused}. Try again."
            return _unavailable(reason, given, body, start_response)
        # Keystone also answers 403 where it could not read what a change would be made to.
        if request.lost and (not given or given[0].startswith(("5", "403"))):
            self._loss.tell(request)
            loss = request.loss or AWAY
            reason, again = loss.reason, loss.again
            # A login can be repeated whatever it has written.
            if (request.unknown_commit or request.committed) and not login:
                what = "while it made the change"
                if request.committed:
                    what = "when it had made a part of the change"
                reason, again = (
                    f"The database failed {what}. Look whether it is made before you try again."
                ), 0
            return _unavailable(reason, given, body, start_response, again=again)
        # Keystone's own 503 tells no time: when the directory of its users is away, for example.
        if given and given[0].startswith("503") and not _says_when(given[1]):
            given[1] = [*given[1], ("Retry-After", "1")]
        if given and given[0] >= "4" and not _is_of_the_api(given[1]):
            _close(body)
            text = plain_error_body(int(given[0][:3]))
            own = {"content-type": "application/json", "content-length": str(len(text))}
            given[1] = [(n, own.get(n.lower(), v)) for n, v in given[1]]
            start_response(*given)
            return [] if environ.get("REQUEST_METHOD") == "HEAD" else [text]
        start_response(*given)
        return [*written, *body] if written else body


def _unavailable(
    reason: str,
    given: list[Any],
    body: Iterable[bytes],
    start_response: Callable[..., Any],
    *,
    again: int = 1,
) -> Iterable[bytes]:
    """Answer 503 in place of what Keystone has given.

    :param reason: the message for the client
    :param given: status and headers of Keystone's answer; empty if it raised
    :param body: the body of Keystone's answer, which is closed
    :param start_response: the server's function (PEP 3333)
    :param again: the value of ``Retry-After`` in seconds, after which clients may send the request
        again by themselves; 0 if they may not
    """
    _close(body)
    headers = [(n, v) for n, v in (given or ("", ()))[1] if n.lower() not in _REPLACED]
    headers.append(("Content-Type", "application/json"))
    if again:
        headers.append(("Retry-After", str(again)))
    text = error_body(503, reason)
    headers.append(("Content-Length", str(len(text))))
    start_response("503 Service Unavailable", headers)
    return [text]


def _is_of_the_api(headers: list[tuple[str, str]]) -> bool:
    """Return whether an error answer is of Keystone's API, not of flask or oslo.middleware."""
    for name, value in headers:
        if name.lower() == "content-type":
            return not value.startswith(("text/html", "text/plain"))
    return True


def _close(body: Iterable[bytes]) -> None:
    close = getattr(body, "close", None)
    if close is not None:
        close()


def _says_when(headers: list[tuple[str, str]]) -> bool:
    return any(name.lower() == "retry-after" for name, _ in headers)


def app_factory(global_conf: Mapping[str, str] | None, **local_conf: str) -> WSGIApplication:
    """Build Keystone's public application (entry point ``paste.app_factory``).

    Keystone's configuration is global to the process, so this is called once per process.

    :param global_conf: paste's ``[DEFAULT]``; only ``__file__`` is used, to name the file in errors
    :param local_conf: ``config_files``, a list separated by ``;``, and ``config_dir``, the folder
        that relative names in it (default ``keystone.conf``) are looked up in. With neither,
        Keystone's environment variables ``OS_KEYSTONE_CONFIG_FILES`` and
        ``OS_KEYSTONE_CONFIG_DIR`` say the same; with either, the environment is not read.
    :raises PasteFileError: an option that does not exist, or a list of files that is empty
    :raises OptionError: ``KEYFRONT_QUEUE_TIMEOUT`` has a value out of its range
    :raises MissingPartError: Keystone is not installed
    :raises IncompatibleError: this Keystone does not look as the repairs need it
    :raises ImportedTooEarlyError: ``oslo_context`` was imported before monkey patching
    """
    environment = _environment(global_conf or {}, local_conf)
    needless_imports.leave_out_warnings()
    needless_imports.list_entry_points_once()
    needless_imports.build_schemas_on_demand()
    with needless_imports.without_resolver():
        core = _import("keystone.server.flask.core")
    middleware = _import(_MIDDLEWARE).AuthContextMiddleware
    request_store = checked_request_store()
    check_server_core(core, middleware)
    make_token_request_local(middleware)
    database = token_cache.watch_database()
    application = core.initialize_application(
        name="public", config_files=core._get_config_files(environment)
    )
    views = token_cache.connect(database)
    if token_cache.leaves_out_work():
        from .repeated_work import know_what_is_a_coroutine

        needless_middleware.pass_by(application)
        know_what_is_a_coroutine(application)
    application = refuse_deep(application, limit=_largest_body())
    loss = DatabaseLoss()
    loss.watch()
    if slow_requests.from_environment() or request_phases.watches:
        slow_requests.watch_database()
        slow_requests.watch_hashes(_import("keystone.common.password_hashing"))
    password_threads.give_way(
        getattr(_import("keystone.common.password_hashing"), "SUPPORTED_HASHERS", ())
    )
    first_request.answer_one(application)
    with suppress(AttributeError):
        del request_store.context
    served: WSGIApplication = request_phases.watched(
        "keystone", KeystoneApplication(application, request_store, views.begin, loss)
    )
    return queue_limit.refuse_late(served) if queue_limit.from_environment() else served


def _largest_body() -> int:
    """Return the bytes of the largest request body that Keystone reads."""
    section = _import("keystone.conf").CONF.oslo_middleware
    # oslo.middleware's own default
    return int(getattr(section, "max_request_body_size", 114688))


def checked_request_store() -> Any:
    """Return ``oslo_context``'s thread-local after checking that clearing it does what we need.

    :raises IncompatibleError: it is not there, is no thread-local, or is not what Keystone's
        request-local cache reads
    :raises ImportedTooEarlyError: it is a native thread-local although threads are patched, so
        all greenlets of a thread would share it
    """
    context = _import("oslo_context.context")
    store = getattr(context, "_request_store", None)
    if not isinstance(store, threading.local):
        if type(store).__module__ == "_thread":
            raise ImportedTooEarlyError(
                "oslo_context.context was imported before monkey patching, so all greenlets would"
                " share one request context; patch first, then load Keystone"
            )
        raise _incompatible("oslo_context.context._request_store is not a threading.local")

    # Try it: what is put there must be what get_current() finds, and gone when deleted.
    before = getattr(store, "context", None)
    probe = store.context = object()
    found = context.get_current()
    del store.context
    left = context.get_current()
    if before is not None:
        store.context = before
    if found is not probe or left is not None:
        raise _incompatible("oslo_context.get_current() does not read _request_store.context")

    proxy = getattr(_import("keystone.common.cache._context_cache"), "_ResponseCacheProxy", None)
    if "get_current" not in _loaded_names(proxy, "_get_request_context"):
        raise _incompatible(
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
            raise _incompatible(f"keystone.server.flask.core has no {name}()")
    if middleware not in getattr(core, "_KEYSTONE_MIDDLEWARE", ()):
        raise _incompatible("AuthContextMiddleware is not in core._KEYSTONE_MIDDLEWARE")


def make_token_request_local(middleware: type) -> None:
    """Put :class:`RequestLocalToken` on ``middleware``, after checking its shape; once only.

    :param middleware: Keystone's ``AuthContextMiddleware``
    :raises IncompatibleError: the class does not keep the caller's token in ``self.token`` as
        Keystone 30 does, or keeps more of a request than that
    """
    if isinstance(vars(middleware).get("token"), RequestLocalToken):
        return
    check_middleware(middleware)
    middleware.token = RequestLocalToken()  # type: ignore[attr-defined]
    fill_context = middleware.fill_context  # type: ignore[attr-defined]

    @functools.wraps(fill_context)
    def let_in(self: Any, request: Any) -> None:
        fill_context(self, request)
        # What is read from here on is the answer's, and not the token's.
        own = current.get()
        if own is not None:
            own.reading = own.recording

    middleware.fill_context = let_in  # type: ignore[attr-defined]


def check_middleware(middleware: type) -> None:
    """Check the facts that :func:`make_token_request_local` relies upon.

    :param middleware: Keystone's ``AuthContextMiddleware``, not yet changed
    :raises IncompatibleError: a fact is otherwise; the error names it
    """
    name = middleware.__name__
    if any("token" in vars(base) for base in middleware.__mro__):
        raise _incompatible(f"{name}.token already exists on the class")
    for method, operation, verb in (
        ("__init__", "STORE_ATTR", "assign"),
        ("fetch_token", "STORE_ATTR", "assign"),
        ("fetch_token", "LOAD_ATTR", "read"),
        ("fill_context", "LOAD_ATTR", "read"),
    ):
        if "token" not in _own_attributes(middleware, method, operation):
            raise _incompatible(f"{name}.{method}() does not {verb} self.token")
    # Anything else that a request leaves on the shared instance would be the same hole again.
    for method in vars(middleware):
        if method == "__init__" or not inspect.isroutine(vars(middleware)[method]):
            continue
        others = set(_own_attributes(middleware, method, "STORE_ATTR")) - {"token"}
        if others:
            raise _incompatible(f"{name}.{method}() assigns self.{min(others)}")
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
        raise _incompatible(
            "keystonemiddleware's process_request() does not fetch the service's token first and"
            " the user's last"
        )


def _environment(
    global_conf: Mapping[str, str], local_conf: Mapping[str, str]
) -> dict[str, str] | None:
    """Turn paste options into Keystone's environment variables; ``None`` means the real ones."""
    where = f"{global_conf['__file__']}: " if "__file__" in global_conf else ""
    for key in local_conf:
        if key not in OPTIONS:
            # Not the value: whatever was meant by it, it may be a secret.
            raise PasteFileError(
                f"{where}egg:keyfront#keystone has no option {key!r}; allowed are"
                f" {' and '.join(OPTIONS)}"
            )
    if not local_conf:
        return None
    for key, value in local_conf.items():
        if not value.strip(" \t\n;"):
            # Empty would quietly mean Keystone's search in /etc.
            raise PasteFileError(
                f"{where}egg:keyfront#keystone: {key} is empty; give a path or remove the line"
            )
    return {
        "OS_KEYSTONE_CONFIG_DIR": local_conf.get("config_dir", ""),
        "OS_KEYSTONE_CONFIG_FILES": local_conf.get("config_files", ""),
    }


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


# Refuses JSON bodies that are nested deeper than anything Keystone knows, before it parses them.
#
# Python's parser recurses. A hundred kilobytes of ``[`` bring it to the interpreter's limit, and
# Keystone answers 500 with a traceback of a thousand lines in its log; no token is needed for that.

# Levels; the deepest body of Keystone's API has nine, and Python's limit is at some 900 there.
DEPTH = 100
# A string, or a bracket outside of one. Where a string does not end Keystone's parser gives up.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def refuse_deep(
    application: WSGIApplication, *, limit: int, depth: int = DEPTH
) -> WSGIApplication:
    """Wrap an application so that a JSON body which is nested too deep is answered 400.

    :param application: the WSGI application
    :param limit: bytes of the largest body that the application reads; it refuses larger ones
    :param depth: levels that a body may have, 1 or more
    """
    body = error_body(400, f"The request body is nested deeper than {depth} levels.")

    def checking(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        content = _read(environ, limit)
        if content is None or not is_deeper(content, depth):
            return application(environ, start_response)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response("400 Bad Request", headers)
        return [body]

    return checking


def is_deeper(content: bytes, depth: int) -> bool:
    """Return whether a JSON text has more levels than ``depth``; other texts may or may not.

    :param content: the text, in the encodings that ``json.loads`` accepts
    :param depth: levels, 1 or more
    """
    # most bodies have a few brackets, whatever is in their strings
    if content.count(b"[") + content.count(b"{") <= depth:
        return False
    # as json.loads() does; what cannot be decoded it refuses by itself
    text = content.decode(json.detect_encoding(content), "replace")
    level = 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            level += 1
            if level > depth:
                return True
        elif token[0] in "]}":
            level -= 1
    return False


def _read(environ: dict[str, Any], limit: int) -> bytes | None:
    """Return the body, which the application can read again; ``None`` if none is to be checked."""
    length = environ.get("CONTENT_LENGTH") or ""
    if length:
        if not (length.isascii() and length.isdigit()) or not 0 < int(length) <= limit:
            return None
        size = int(length)
    elif environ.get("wsgi.input_terminated"):
        size = limit + 1  # in chunks, which the server puts together; one too many is refused
    else:
        return None
    content: bytes = environ["wsgi.input"].read(size)
    environ["wsgi.input"] = io.BytesIO(content)
    return content

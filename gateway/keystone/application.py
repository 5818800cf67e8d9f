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
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from keyfront.common import request_phases
from keyfront.errors import PasteFileError
from keyfront.middleware.tokens.request import ENVIRON_KEY, Request, current
from keyfront.middleware.tokens.routes import TOKENS

from .. import queue_limit, slow_requests
from ..error_body import error_body, plain_error_body
from ..json_depth import WSGIApplication, refuse_deep
from . import (
    first_request,
    needless_imports,
    needless_middleware,
    password_hashing,
    token_cache_hooks,
)
from .database_loss import AWAY, DatabaseLoss
from .needed_interfaces import check_middleware, check_server_core, checked_request_store
from .needed_interfaces import import_keystone as _import

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
    database = token_cache_hooks.watch_database()
    application = core.initialize_application(
        name="public", config_files=core._get_config_files(environment)
    )
    views = token_cache_hooks.connect(database)
    if token_cache_hooks.leaves_out_work():
        from .repeated_work import know_what_is_a_coroutine

        needless_middleware.pass_by(application)
        know_what_is_a_coroutine(application)
    application = _look_at_bodies(application)
    loss = DatabaseLoss()
    loss.watch()
    if slow_requests.from_environment() or request_phases.watches:
        slow_requests.watch_database()
        slow_requests.watch_hashes(_import("keystone.common.password_hashing"))
    password_hashing.give_way(
        getattr(_import("keystone.common.password_hashing"), "SUPPORTED_HASHERS", ())
    )
    first_request.answer_one(application)
    with suppress(AttributeError):
        del request_store.context
    served: WSGIApplication = request_phases.watched(
        "keystone", KeystoneApplication(application, request_store, views.begin, loss)
    )
    return queue_limit.refuse_late(served) if queue_limit.from_environment() else served


def _look_at_bodies(application: WSGIApplication) -> WSGIApplication:
    """Wrap Keystone so that JSON which is nested too deep is refused."""
    # Most requests have no body, and pass what looks at one by.
    looking = refuse_deep(application, limit=_largest_body())

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH") or "0"
        if length != "0" or environ.get("wsgi.input_terminated"):
            return looking(environ, start_response)
        return application(environ, start_response)

    return answer


def _largest_body() -> int:
    """Return the bytes of the largest request body that Keystone reads."""
    section = _import("keystone.conf").CONF.oslo_middleware
    # oslo.middleware's own default
    return int(getattr(section, "max_request_body_size", 114688))


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

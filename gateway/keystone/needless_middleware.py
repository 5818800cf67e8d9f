"""Middleware before Keystone that a request passes by, where it would do nothing with it.

Keystone has four of oslo.middleware and osprofiler before its own. Each makes a request and two
responses of webob, also if it changes nothing, as mostly: no browser asks from another site, no
proxy is believed, the body is small, nobody profiles. Then the application behind it is called
itself. And two that every request needs do their work without webob.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

LOG = logging.getLogger(__name__)

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

#: A function that tells by a WSGI environment whether a middleware may do something with it.
Needed = Callable[[Mapping[str, Any]], bool]

# Digits of a body's length; what has more is left to the middleware.
_DIGITS = 9

# webob leaves the body of an answer to HEAD out, and an answer to OPTIONS is the middleware's own.
_OTHERS = frozenset({"HEAD", "OPTIONS"})

# What a middleware may call the application behind it.
_LEADS = ("application", "app", "_app")

_CALLS = frozenset(
    {
        *("process_request", "get_response", "application", "getfullargspec", "inspect"),
        "process_response",
    }
)


class _Known(NamedTuple):
    """A middleware that is known."""

    #: By the name of a method, all names that its code may use.
    methods: Mapping[str, frozenset[str]]
    #: Given the middleware, returns when it is needed; ``None`` if always.
    needed: Callable[[Any], Needed | None]


def _cors(middleware: Any) -> Needed | None:
    return lambda environ: "HTTP_ORIGIN" in environ


def _proxy(middleware: Any) -> Needed | None:
    if middleware._conf_get("enable_proxy_headers_parsing"):
        return None
    return lambda environ: False


def _size(middleware: Any) -> Needed | None:
    limit = middleware._conf_get("max_request_body_size")

    def needed(environ: Mapping[str, Any]) -> bool:
        length = environ.get("CONTENT_LENGTH") or ""
        return not (
            length.isascii()
            and length.isdigit()
            and len(length) <= _DIGITS
            and int(length) <= limit
        )

    return needed


def _profiler(middleware: Any) -> Needed | None:
    return lambda environ: "HTTP_X_TRACE_INFO" in environ or "HTTP_X_TRACE_HMAC" in environ


_NOTHING = frozenset[str]()

_KNOWN: Mapping[str, _Known] = {
    "oslo_middleware.cors.CORS": _Known(
        {
            "__call__": _CALLS,
            "process_request": _NOTHING,
            "process_response": frozenset(
                {
                    *("headers", "method", "_apply_cors_preflight_headers"),
                    "_apply_cors_request_headers",
                }
            ),
            "_apply_cors_request_headers": frozenset(
                {"headers", "_get_cors_config_by_origin", "InvalidOriginError", "join"}
            ),
        },
        _cors,
    ),
    "oslo_middleware.sizelimit.RequestBodySizeLimiter": _Known(
        {
            "__call__": frozenset(
                {
                    *("_conf_get", "content_length", "_", "LOG", "info", "webob", "exc"),
                    *("HTTPRequestEntityTooLarge", "LimitingReader", "body_file"),
                    *("get_response", "application"),
                }
            )
        },
        _size,
    ),
    "oslo_middleware.http_proxy_to_wsgi.HTTPProxyToWSGI": _Known(
        {
            "__call__": _CALLS,
            "process_request": frozenset({"_conf_get", "environ", "get", "_parse_rfc7239_header"}),
            "process_response": _NOTHING,
        },
        _proxy,
    ),
    "osprofiler.web.WsgiMiddleware": _Known(
        {
            "__call__": frozenset(
                {
                    *("_ENABLED", "enabled", "get_response", "application", "utils"),
                    *("signed_unpack", "headers", "get", "X_TRACE_INFO", "X_TRACE_HMAC"),
                    *("_HMAC_KEYS", "hmac_keys", "_trace_is_valid", "profiler", "init", "path"),
                    *("query_string", "method", "scheme", "Trace", "name", "clean"),
                }
            )
        },
        _profiler,
    ),
}


class PassedBy:
    """A WSGI application that calls a middleware only for requests that need it.

    :param middleware: the middleware
    :param application: the application behind it
    :param needed: a function that tells whether a request needs it
    """

    __slots__ = ("_needed", "application", "middleware")

    def __init__(
        self, middleware: WSGIApplication, application: WSGIApplication, needed: Needed
    ) -> None:
        self.middleware = middleware
        self.application = application
        self._needed = needed

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        if environ["REQUEST_METHOD"] in _OTHERS or self._needed(environ):
            return self.middleware(environ, start_response)
        return self.application(environ, start_response)


def pass_by(application: Any) -> list[str]:
    """Make requests pass by the middleware before a Keystone which they do not need.

    :param application: Keystone's flask application, with its middleware
    :returns: the names of the classes of such middleware; what is not known is left as it is, and
        so is all that has something else than webob's behind it, which makes an address absolute
        and an answer of webob's errors; what every request needs is made plain WSGI where that is
        known
    """
    chain: list[tuple[Any, str, Any, str]] = []
    holder, name = application, "wsgi_app"
    while True:
        middleware = getattr(holder, name, None)
        leads = next((x for x in _LEADS if x in _own(middleware)), None)
        if leads is None:
            break
        chain.append((holder, name, middleware, leads))
        holder, name = middleware, leads
    found = []
    while chain:
        holder, name, middleware, leads = chain.pop()
        behind = getattr(middleware, leads)  # as it will be
        needed = _when_needed(middleware)
        if needed is not None:
            if _is_by_webob(behind) or isinstance(behind, PassedBy | PlainRequestId):
                setattr(holder, name, PassedBy(middleware, behind, needed))
                found.append(_called(middleware))
        elif (made := _plain(middleware, behind)) is not None and (
            isinstance(made, PlainRequestId) or any(_is_by_webob(one) for *_, one, _ in chain)
        ):
            setattr(holder, name, made)
            found.append(_called(middleware))
    return found[::-1]


def _is_by_webob(application: object) -> bool:
    by_webob = importlib.import_module("webob.dec").wsgify
    return isinstance(inspect.getattr_static(application, "__call__", None), by_webob)


def _own(value: object) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


def _called(middleware: object) -> str:
    kind = type(middleware)
    return f"{kind.__module__}.{kind.__qualname__}"


def _when_needed(middleware: Any) -> Needed | None:
    known = _KNOWN.get(_called(middleware))
    if known is None:
        return None
    for method, names in known.methods.items():
        function = getattr(type(middleware), method, None)
        function = getattr(function, "func", function)  # webob's decorator
        code = getattr(function, "__code__", None)
        if code is None or not names.issuperset(code.co_names):
            return None
    return known.needed(middleware)


# What every request needs: its identifier, and who asks. oslo.middleware's ``RequestId`` and
# Keystone's ``AuthContextMiddleware`` make two responses of webob for each, and copy what is behind
# them into the second. What they do themselves is little: a header more, and the caller's token
# looked at. Here they do that, by their own code, and what is behind them answers as it does.
#
# An answer that webob would change is left to it: one with ``Location``, which it makes absolute,
# and that of an error of webob's.

_INBOUND = "HTTP_X_OPENSTACK_REQUEST_ID"

# webob completes or refuses others.
_WHOLE_STATUS = re.compile(r"[0-9]{3} ").match

# By the name of a method, all names that its code may use.
_REQUEST_ID: Mapping[str, frozenset[str]] = {
    "__call__": frozenset(
        {
            *("set_global_req_id", "context", "generate_request_id", "environ", "ENV_REQUEST_ID"),
            *("get_response", "application", "HTTP_RESP_HEADER_REQUEST_ID", "extend"),
            *("compat_headers", "headers", "add"),
        }
    ),
    "set_global_req_id": frozenset(
        {"headers", "get", "INBOUND_HEADER", "re", "match", "ID_FORMAT", "environ", "GLOBAL_REQ_ID"}
    ),
}
_AUTH_CONTEXT: Mapping[str, frozenset[str]] = {
    "__call__": frozenset({"process_request", "get_response", "_app", "process_response"}),
    "process_response": frozenset(),
}


class PlainRequestId:
    """oslo.middleware's ``RequestId`` without webob.

    :param middleware: the middleware
    :param application: the application behind it
    """

    __slots__ = ("_error", "_module", "_request", "application", "middleware")

    def __init__(self, middleware: Any, application: WSGIApplication) -> None:
        self.middleware = middleware
        self.application = application
        self._module = sys.modules[type(middleware).__module__]
        self._request = inspect.getattr_static(middleware, "__call__").RequestClass
        self._error = importlib.import_module("webob.exc").HTTPException

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        if environ["REQUEST_METHOD"] == "HEAD":
            answer: Iterable[bytes] = self.middleware(environ, start_response)
            return answer
        module = self._module
        if _INBOUND in environ:
            self.middleware.set_global_req_id(self._request(environ))
        own = module.context.generate_request_id()
        environ[module.ENV_REQUEST_ID] = own
        given: list[Any] = []
        written: list[bytes] = []

        def start(status: str, headers: Any, error: Any = None) -> Callable[[bytes], None]:
            if error is not None:
                raise error[1].with_traceback(error[2])
            given[:] = status, headers
            return written.append

        try:
            body = self.application(environ, start)
            if written or not given:
                try:
                    written.extend(body)
                finally:
                    if hasattr(body, "close"):
                        body.close()
                body = written
        except self._error as error:
            answer = error(environ, start_response)
            return answer
        status, headers = given[0], list(given[1])
        there = {name.lower() for name, _ in headers}
        for name in (module.HTTP_RESP_HEADER_REQUEST_ID, *self.middleware.compat_headers):
            if name.lower() not in there:
                headers.append((name, own))
        if "location" not in there and _WHOLE_STATUS(status):
            start_response(status, headers)
            return body
        response = self._request.ResponseClass(status=status, headerlist=headers, app_iter=body)
        answer = response(environ, start_response)
        return answer


class PlainAuthContext:
    """Keystone's ``AuthContextMiddleware`` without a response of webob.

    What is before it has to make addresses absolute, as webob's or :class:`PlainRequestId`.

    :param middleware: the middleware
    :param application: the application behind it
    """

    __slots__ = ("_app", "_error", "_request", "middleware")

    def __init__(self, middleware: Any, application: WSGIApplication) -> None:
        self.middleware = middleware
        self._app = application
        self._request = inspect.getattr_static(middleware, "__call__").RequestClass
        self._error = importlib.import_module("webob.exc").HTTPException

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        if environ["REQUEST_METHOD"] == "HEAD":
            answer: Iterable[bytes] = self.middleware(environ, start_response)
            return answer
        try:
            refusal = self.middleware.process_request(self._request(environ))
            application = refusal or self._app
            answer = application(environ, start_response)
        except self._error as error:
            answer = error(environ, start_response)
        return answer


def _plain(middleware: Any, application: Any) -> WSGIApplication | None:
    """Return a middleware without webob; ``None`` if it is none of the two, or looks different.

    :param middleware: the middleware
    :param application: the application behind it
    """
    kind = type(middleware)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "oslo_middleware.request_id.RequestId":
        expected = _goes_by(middleware, _REQUEST_ID) and not _matches_nothing_given(kind)
        made: type[PlainRequestId | PlainAuthContext] = PlainRequestId
    elif name == (
        "keystone.server.flask.request_processing.middleware.auth_context.AuthContextMiddleware"
    ):
        expected = _goes_by(middleware, _AUTH_CONTEXT) and not _uses_response(kind)
        made = PlainAuthContext
    else:
        return None
    if not expected:
        LOG.debug("%s does not look as expected, and is left as it is", name)
        return None
    return made(middleware, application)


def _goes_by(middleware: Any, methods: Mapping[str, frozenset[str]]) -> bool:
    """Return whether a middleware is webob's, and its methods use no other names than these."""
    if not _is_by_webob(middleware):
        return False
    for method, names in methods.items():
        function = inspect.getattr_static(middleware, method, None)
        function = getattr(function, "func", function)  # webob's decorator
        code = getattr(function, "__code__", None)
        if code is None or not names.issuperset(code.co_names):
            return False
    return True


def _matches_nothing_given(kind: type) -> bool:
    """Return whether a request without the header would be given an identifier of it."""
    module: Any = sys.modules[kind.__module__]
    header = f"HTTP_{module.INBOUND_HEADER.upper().replace('-', '_')}"
    return header != _INBOUND or module.re.match(module.ID_FORMAT, "") is not None


def _uses_response(kind: type) -> bool:
    """Return whether a middleware uses the response that webob makes with the request."""
    return any(
        "response" in getattr(code, "co_names", ())
        for one in kind.__mro__
        for value in vars(one).values()
        for code in (getattr(inspect.unwrap(value), "__code__", None),)
    )

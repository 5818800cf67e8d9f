"""Middleware before Keystone that a request passes by, where it would do nothing with it.

Keystone has four of oslo.middleware and osprofiler before its own. Each makes a request and two
responses of webob, also if it changes nothing, as mostly: no browser asks from another site, no
proxy is believed, the body is small, nobody profiles. Then the application behind it is called
itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

#: Whether a middleware may do something with a request, by its WSGI environment.
Needed = Callable[[Mapping[str, Any]], bool]

# Digits of a body's length; what has more is left to the middleware.
_DIGITS = 9

# webob leaves the body of an answer to HEAD out, and an answer to OPTIONS is the middleware's own.
_OTHERS = frozenset({"HEAD", "OPTIONS"})

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
        and an answer of webob's errors
    """
    by_webob = importlib.import_module("webob.dec").wsgify
    chain: list[tuple[Any, str]] = []
    holder, name = application, "wsgi_app"
    while True:
        middleware = getattr(holder, name, None)
        leads = next((x for x in ("application", "app") if x in _own(middleware)), None)
        if leads is None:
            break
        chain.append((holder, name))
        holder, name = middleware, leads
    found = []
    for holder, name in reversed(chain):  # what is behind one is as it will be
        middleware = getattr(holder, name)
        needed = _when_needed(middleware)
        behind: Any = getattr(middleware, "application", None)
        is_by_webob = isinstance(inspect.getattr_static(behind, "__call__", None), by_webob)
        if needed is not None and (is_by_webob or isinstance(behind, PassedBy)):
            setattr(holder, name, PassedBy(middleware, behind, needed))
            found.append(_called(middleware))
    return found[::-1]


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

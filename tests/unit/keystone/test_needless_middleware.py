"""Middleware before Keystone that a request passes by: no answer is another for it."""

from __future__ import annotations

import io
import wsgiref.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keystone")

import webob.dec
import webob.exc
from oslo_config import cfg
from oslo_middleware import cors, http_proxy_to_wsgi, request_id, sizelimit
from osprofiler import web

from keyfront.gateway.keystone.needless_middleware import PassedBy, pass_by

LIMIT = 100

NAMES = [
    "oslo_middleware.cors.CORS",
    "oslo_middleware.sizelimit.RequestBodySizeLimiter",
    "oslo_middleware.http_proxy_to_wsgi.HTTPProxyToWSGI",
    "osprofiler.web.WsgiMiddleware",
]

CASES: dict[str, dict[str, str]] = {
    "GET": {},
    "POST": {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "10"},
    "POST at the limit": {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(LIMIT)},
    "POST too large": {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(LIMIT + 1)},
    "POST of no known length": {"REQUEST_METHOD": "POST", "wsgi.input_terminated": "yes"},
    "POST with many digits": {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "0" * 20 + "10"},
    "POST with no number": {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "\u0665"},
    "HEAD": {"REQUEST_METHOD": "HEAD"},
    "OPTIONS": {"REQUEST_METHOD": "OPTIONS"},
    "preflight": {
        "REQUEST_METHOD": "OPTIONS",
        "HTTP_ORIGIN": "http://good.example",
        "HTTP_ACCESS_CONTROL_REQUEST_METHOD": "GET",
    },
    "another site": {"HTTP_ORIGIN": "http://good.example"},
    "a bad site": {"HTTP_ORIGIN": "http://bad.example"},
    "behind a proxy": {
        "HTTP_X_FORWARDED_PROTO": "https",
        "HTTP_X_FORWARDED_HOST": "front.example",
        "HTTP_X_FORWARDED_FOR": "192.0.2.1",
    },
    "profiled": {"HTTP_X_TRACE_INFO": "e30=", "HTTP_X_TRACE_HMAC": "junk"},
    "moved": {"PATH_INFO": "/moved"},
    "error": {"PATH_INFO": "/error", "REQUEST_METHOD": "POST", "CONTENT_LENGTH": "1"},
    "written": {"PATH_INFO": "/written"},
    "nothing": {"PATH_INFO": "/nothing", "REQUEST_METHOD": "DELETE"},
}


class Site:
    """A Keystone with its middleware, as its server makes it, and what reached it."""

    def __init__(self, *, proxies: bool = False, by_webob: bool = True) -> None:
        self.seen: list[dict[str, Any]] = []
        conf = cfg.ConfigOpts()
        conf([], project="keyfront-test", default_config_files=[])
        # as Keystone's own middleware
        inner = webob.dec.wsgify(lambda request: request.get_response(self._flask))
        application: Any = request_id.RequestId(inner, conf) if by_webob else self._flask
        application = web.WsgiMiddleware(application, hmac_keys="key", enabled=True)
        application = http_proxy_to_wsgi.HTTPProxyToWSGI(application, conf)
        conf.set_override("enable_proxy_headers_parsing", proxies, "oslo_middleware")
        application = sizelimit.RequestBodySizeLimiter(application, conf)
        conf.set_override("max_request_body_size", LIMIT, "oslo_middleware")
        application = cors.CORS(application, conf)
        application.add_origin(
            ["http://good.example"], True, ["X-Subject-Token"], 60, ["GET"], ["X-Auth-Token"]
        )
        self.flask = SimpleNamespace(wsgi_app=SimpleNamespace(app=application))

    def _flask(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        own = {name: value for name, value in environ.items() if not name.startswith("webob.")}
        own["body"] = own.pop("wsgi.input").read()
        self.seen.append(own)
        path = environ["PATH_INFO"]
        if path == "/error":
            raise webob.exc.HTTPConflict("no")
        status, headers = "201 CREATED", [("Content-Type", "application/json"), ("Vary", "x")]
        if path == "/moved":
            status, headers = "302 FOUND", [("Location", "elsewhere"), ("Content-Length", "4")]
        if path == "/nothing":
            start_response("204 NO CONTENT", [])
            return []
        write = start_response(status, headers)
        if path == "/written":
            write(b"writ")
        return [b"ten ", b"body"]

    def answer(self, given: dict[str, str]) -> tuple[Any, ...]:
        environ: dict[str, Any] = {"REMOTE_ADDR": "127.0.0.1", **given}
        environ["wsgi.input"] = io.BytesIO(b"x" * 10)
        environ.setdefault("PATH_INFO", "/v3")
        wsgiref.util.setup_testing_defaults(environ)
        environ.pop("wsgi.errors")
        told: list[Any] = []

        def start_response(status: str, headers: Any, *error: Any) -> Any:
            told[:] = status, sorted(headers)
            return lambda written: None

        try:
            body = b"".join(self.flask.wsgi_app.app(environ, start_response))
        except Exception as error:
            return type(error), str(error), self.seen
        return *told, body, self.seen


@pytest.fixture(autouse=True)
def same_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_id.context, "generate_request_id", lambda: "req-1")


@pytest.mark.parametrize("proxies", [False, True], ids=["", "proxies are believed"])
@pytest.mark.parametrize("case", CASES)
def test_no_answer_is_another(case: str, proxies: bool) -> None:
    plain, ours = Site(proxies=proxies), Site(proxies=proxies)
    passed = pass_by(ours.flask)
    assert passed == [name for name in NAMES if not (proxies and "proxy" in name)]
    assert ours.answer(CASES[case]) == plain.answer(CASES[case])


# What enters which; all others enter the limit of a body whose length they do not tell.
ENTERED = {
    "POST": [], "POST at the limit": [], "error": [],
    "HEAD": NAMES, "OPTIONS": NAMES, "preflight": NAMES,
    "another site": NAMES[:2], "a bad site": NAMES[:2],
    "profiled": [NAMES[1], NAMES[3]],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_request_passes_by_what_it_does_not_need(case: str) -> None:
    site = Site()
    pass_by(site.flask)
    entered: list[str] = []
    one = site.flask.wsgi_app.app
    while isinstance(one, PassedBy):

        def enter(environ: Any, start: Any, through: Any = one.middleware) -> Any:
            entered.append(f"{type(through).__module__}.{type(through).__qualname__}")
            return through(environ, start)

        one.middleware = enter
        one = one.application
    site.answer(CASES[case])
    assert entered == ENTERED.get(case, NAMES[1:2])


def test_what_has_something_else_than_webob_behind_it_is_left_as_it_is() -> None:
    plain, ours = Site(by_webob=False), Site(by_webob=False)
    assert pass_by(ours.flask) == NAMES[:3]
    for case in ("moved", "error"):
        assert ours.answer(CASES[case]) == plain.answer(CASES[case])


def test_what_is_not_known_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(cors.CORS):
        pass

    site = Site()
    first = site.flask.wsgi_app.app
    site.flask.wsgi_app.app = Other(first.application, cfg.ConfigOpts())
    assert pass_by(lambda environ, start_response: []) == []
    assert pass_by(site.flask) == NAMES[1:]
    assert type(site.flask.wsgi_app.app) is Other

    def process_response(self: Any, response: Any, request: Any = None) -> Any:
        response.headers["X-Time"] = str(self.clock())
        return response

    monkeypatch.setattr(cors.CORS, "process_response", process_response)
    assert pass_by(Site().flask) == NAMES[1:]


def test_this_keystone_has_them() -> None:
    core: Any = pytest.importorskip("keystone.server.flask.core")
    assert [one.ep for one in core._APP_MIDDLEWARE] == [
        "cors", "sizelimit", "http_proxy_to_wsgi", "osprofiler", "request_id",
    ]  # fmt: skip

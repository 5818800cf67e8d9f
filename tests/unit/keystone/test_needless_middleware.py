"""Middleware before Keystone that a request passes by: no answer is another for it."""

from __future__ import annotations

import io
import logging
import sys
import uuid
import wsgiref.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keystone")

import keystone.conf
import keystone.exception
import webob.dec
import webob.exc
from keystone.server.flask.request_processing.middleware import auth_context, url_normalize
from oslo_config import cfg
from oslo_context import context
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
PLAIN = [
    "oslo_middleware.request_id.RequestId",
    "keystone.server.flask.request_processing.middleware.auth_context.AuthContextMiddleware",
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
    "moved, HEAD": {"PATH_INFO": "/moved", "REQUEST_METHOD": "HEAD"},
    "a short status": {"PATH_INFO": "/short"},
    "no status": {"PATH_INFO": "/no-status"},
    "no answer": {"PATH_INFO": "/no-answer"},
    "an error of its own": {"PATH_INFO": "/raised"},
    "an error of its own, handed on": {"PATH_INFO": "/handed"},
    "an identifier of its own": {"PATH_INFO": "/identified"},
    "a slash at the end": {"PATH_INFO": "/v3/"},
    "identified": {"HTTP_X_OPENSTACK_REQUEST_ID": f"req-{uuid.UUID(int=7)}"},
    "badly identified": {"HTTP_X_OPENSTACK_REQUEST_ID": "req-7"},
    "a token": {"HTTP_X_AUTH_TOKEN": "good"},
    "a token of no user": {"HTTP_X_AUTH_TOKEN": "bad", "HTTP_ACCEPT_LANGUAGE": "de"},
    "a token, HEAD": {"HTTP_X_AUTH_TOKEN": "bad", "REQUEST_METHOD": "HEAD"},
    "a token, error": {"HTTP_X_AUTH_TOKEN": "fail", "PATH_INFO": "/moved"},
    "a service's token": {"HTTP_X_SERVICE_TOKEN": "bad", "PATH_INFO": "/error"},
    "an administrator": {"openstack.context": {"is_admin": True}},  # type: ignore[dict-item]
}


class Site:
    """A Keystone with its middleware, as its server makes it, and what reached it."""

    def __init__(self, *, proxies: bool = False, by_webob: bool = True) -> None:
        self.seen: list[dict[str, Any]] = []
        conf = cfg.ConfigOpts()
        conf([], project="keyfront-test", default_config_files=[])
        inner: Any = auth_context.AuthContextMiddleware(self._flask)
        inner.fetch_token = self._fetch
        inner = url_normalize.URLNormalizingMiddleware(inner)
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

    @staticmethod
    def _fetch(token: str, **named: object) -> Any:
        if token == "fail":
            raise RuntimeError("the database is away")
        raise auth_context.auth_token.InvalidToken("no")

    def _flask(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        own = {name: value for name, value in environ.items() if not name.startswith("webob.")}
        for name in ("keystone.token_auth", "keystone.oslo_request_context"):
            if name in own:
                values = vars(own[name]).items()
                own[name] = {key: value for key, value in values if key != "_lock"}
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
        if path == "/short":
            status = "200"
        if path == "/no-status":
            status = "none"
        if path == "/no-answer":
            return []
        if path == "/raised":
            raise OSError("mine")
        if path == "/handed":
            try:
                raise OSError("mine")
            except OSError:
                start_response(status, headers, sys.exc_info())
        if path == "/identified":
            headers.append(("X-OpenStack-Request-Id", "mine"))
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
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give Keystone options of its own: others of this process may have set theirs."""
    conf = cfg.ConfigOpts()
    for module in keystone.conf.conf_modules:
        module.register_opts(conf)
    for module in (auth_context, keystone.exception):
        monkeypatch.setattr(module, "CONF", conf)
    yield
    vars(context._request_store).pop("context", None)


@pytest.fixture(autouse=True)
def same_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_id.context, "generate_request_id", lambda: "req-1")


@pytest.mark.parametrize("proxies", [False, True], ids=["", "proxies are believed"])
@pytest.mark.parametrize("case", CASES)
def test_no_answer_is_another(case: str, proxies: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    plain, ours = Site(proxies=proxies), Site(proxies=proxies)
    passed = pass_by(ours.flask)
    assert passed == [name for name in NAMES + PLAIN if not (proxies and "proxy" in name)]
    answers, logs = [], []
    for site in (ours, plain):
        caplog.clear()
        answers.append(site.answer(CASES[case]))
        logs.append([(record.name, record.levelno, record.message) for record in caplog.records])
    assert answers[0] == answers[1]
    assert logs[0] == logs[1]


# What enters which; all others enter the limit of a body whose length they do not tell.
ENTERED = {
    "POST": [], "POST at the limit": [], "error": [],
    "HEAD": NAMES, "OPTIONS": NAMES, "preflight": NAMES,
    "moved, HEAD": NAMES, "a token, HEAD": NAMES,
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
    assert pass_by(site.flask) == NAMES[1:] + PLAIN
    assert type(site.flask.wsgi_app.app) is Other

    def process_response(self: Any, response: Any, request: Any = None) -> Any:
        response.headers["X-Time"] = str(self.clock())
        return response

    monkeypatch.setattr(cors.CORS, "process_response", process_response)
    assert pass_by(Site().flask) == NAMES[1:] + PLAIN


def test_no_request_makes_a_response_of_webob(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    pass_by(site.flask)
    made: list[object] = []
    monkeypatch.setattr(webob.Response, "__init__", lambda self, *_, **__: made.append(self))
    given = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "10"}
    assert site.answer(given)[2] == b"ten body"
    assert made == []


def _responds(self: Any, request: Any) -> Any:
    return request.response


def _clocked(self: Any, request: Any) -> Any:
    return self.clock()


@pytest.mark.parametrize(
    ("kind", "method", "other", "left"),
    [
        (auth_context.AuthContextMiddleware, "_validate_trusted_issuer", _responds, PLAIN[1]),
        (auth_context.AuthContextMiddleware, "process_response", _clocked, PLAIN[1]),
        (auth_context.AuthContextMiddleware, "__call__", _clocked, PLAIN[1]),
        (
            auth_context.AuthContextMiddleware, "__call__",
            webob.dec.wsgify(_clocked), PLAIN[1],
        ),
        (request_id.RequestId, "set_global_req_id", _clocked, PLAIN[0]),
        (request_id.RequestId, "__call__", webob.dec.wsgify(_clocked), PLAIN[0]),
    ],
)  # fmt: skip
def test_what_looks_different_stays_of_webob(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type,
    method: str,
    other: object,
    left: str,
) -> None:
    monkeypatch.setattr(kind, method, other, raising=False)
    caplog.set_level(logging.DEBUG)
    found = pass_by(Site().flask)
    assert left not in found
    assert next(name for name in PLAIN if name != left) in found
    assert f"{left} does not look as expected" in caplog.text


def test_an_identifier_that_nobody_sent_is_left_to_webob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_id, "ID_FORMAT", "")
    assert PLAIN[0] not in pass_by(Site().flask)


def test_nothing_before_the_authentication_makes_addresses_absolute() -> None:
    flask = SimpleNamespace(wsgi_app=auth_context.AuthContextMiddleware(lambda *_: []))
    assert pass_by(flask) == []


def test_this_keystone_has_them() -> None:
    core: Any = pytest.importorskip("keystone.server.flask.core")
    assert [one.ep for one in core._APP_MIDDLEWARE] == [
        "cors", "sizelimit", "http_proxy_to_wsgi", "osprofiler", "request_id",
    ]  # fmt: skip

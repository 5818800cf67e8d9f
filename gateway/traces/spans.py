"""The spans of a request: the front's, and below it those of token cache, Keystone and directory.

Their attributes are words of ours, numbers, and the request id that Keystone gave: nothing that a
client sent but the method and the fixed words of the path. No exception is recorded as an event,
whose message or frames could hold a secret; its class is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from keyfront.common.request_phases import (
    DIRECTORY,
    HASH,
    STATEMENTS,
    TIMED,
    RequestPhases,
    current,
)

from ..queue_limit import since_1970
from ..slow_requests import request_id

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# Others are told as the semantic conventions want it.
_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE")
)
_ERROR = Status(StatusCode.ERROR)
_READS = ("GET", "HEAD")
# Characters that have to be passed on (W3C Trace Context, 3.3.1.5); spans that wait keep them.
_LONGEST_STATE = 512
_PROPAGATOR = TraceContextTextMapPropagator()

# What the token cache counted, as a trace tells it: its outcome, and the reason.
_OUTCOMES = {
    "": ("hit", "worker"),
    "node_hits": ("hit", "node"),
    "known": ("first", "known"),
    "misses": ("miss", "unknown"),
}
_ENDED = "ended_"

#: The words of a path that a trace shows: the fixed parts of Keystone's paths
#: (``flask.Flask.url_map``, Keystone 27 to 30; a test compares them with that of the one that is
#: installed), and of what answers beside it. A word's form does not tell it from a name: with an
#: LDAP directory as the default domain ``/v3/users/alice`` has a user's.
WORDS: Final = frozenset(
    {
        "OS-EC2", "OS-ENDPOINT-POLICY", "OS-EP-FILTER", "OS-FEDERATION", "OS-INHERIT", "OS-OAUTH1",
        "OS-OAUTH2", "OS-PKI", "OS-REVOKE", "OS-SIMPLE-CERT", "OS-TRUST", "access_rules",
        "access_token", "access_tokens", "application_credentials", "auth", "authorize", "ca",
        "catalog", "certificates", "config", "consumers", "credentials", "default", "domains",
        "ec2tokens", "ecp", "endpoint_groups", "endpoints", "events", "groups", "healthcheck",
        "identity_providers", "implies", "inherited_to_projects", "limits", "mappings", "metadata",
        "model", "password", "policies", "policy", "projects", "protocols", "regions",
        "registered_limits", "request_token", "revoked", "role_assignments", "role_inferences",
        "roles", "s3tokens", "saml2", "service_providers", "services", "static", "system", "tags",
        "token", "tokens", "trusts", "users", "v2.0", "v3", "websso",
    }
)
# Longer ones are nobody's API.
_PARTS = 16


class TracerSource(Protocol):
    """An object that has the tracer of this process."""

    @property
    def tracer(self) -> Tracer | None:
        """The tracer; ``None`` before this process serves."""


class TracedPhases(RequestPhases):
    """The phases of a request that is traced.

    :param context: the context of the request's own span
    """

    __slots__ = ("asked_keystone", "context", "tracer")

    def __init__(self, tracer: Tracer, context: Context) -> None:
        super().__init__()
        self.tracer = tracer
        #: The context of the innermost span that is open.
        self.context = context
        self.asked_keystone = False

    @contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """Open a span below the innermost one until the block ends."""
        outer = self.context
        span = self.tracer.start_span(name, outer)
        self.context = set_span_in_context(span, outer)
        try:
            yield span
        except BaseException as error:
            _note_error(span, type(error).__name__)
            raise
        finally:
            self.context = outer
            span.end()

    def add(self, part: int, seconds: float, operation: str = "", error: str = "") -> None:
        """Note what was done; what a directory was asked gets a span of its own."""
        super().add(part, seconds)
        if part != DIRECTORY:
            return
        end = time.time_ns()
        span = self.tracer.start_span(
            f"directory {operation}".rstrip(),
            self.context,
            kind=SpanKind.CLIENT,
            attributes={"keyfront.directory.operation": operation},
            start_time=end - int(seconds * 1e9),
        )
        if error:
            _note_error(span, error)
        span.end(end)


def trace_requests(application: WSGIApplication, source: TracerSource) -> WSGIApplication:
    """Wrap an application so that each request has a span, which ends when it has answered.

    The parent is what ``traceparent`` names (W3C Trace Context); one that is malformed is none.
    """

    def tracing(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        tracer = source.tracer
        if tracer is None:
            return application(environ, start_response)
        method = environ["REQUEST_METHOD"]
        method = method if method in _METHODS else "_OTHER"
        path = route(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))
        span = tracer.start_span(
            f"{'HTTP' if method == '_OTHER' else method} {path}",
            _parent(environ),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": path,
                "url.scheme": "https" if environ.get("wsgi.url_scheme") == "https" else "http",
            },
        )
        if not span.is_recording():  # the sampler's choice
            return application(environ, start_response)
        came = environ.get("HTTP_X_REQUEST_START")
        if came:
            queued = time.time() - since_1970(came)
            if 0 <= queued < 86400:
                span.set_attribute("keyfront.queue.duration", round(queued, 6))
        given: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            given[:] = status, headers
            return start_response(status, headers, *error)

        before = current.set(TracedPhases(tracer, set_span_in_context(span, Context())))
        try:
            return application(environ, start)
        except BaseException as error:
            _note_error(span, type(error).__name__)
            raise
        finally:
            current.reset(before)
            if given:
                _note_answer(span, *given)
            span.end()

    return tracing


def _parent(environ: WSGIEnvironment) -> Context:
    told = environ.get("HTTP_TRACEPARENT")
    if told is None:
        return Context()
    state = environ.get("HTTP_TRACESTATE", "")
    carrier = {"traceparent": told, "tracestate": state if len(state) <= _LONGEST_STATE else ""}
    return _PROPAGATOR.extract(carrier, Context())


def _note_answer(span: Span, status: str, headers: list[tuple[str, str]]) -> None:
    try:
        code = int(status[:3])
    except ValueError:
        return
    span.set_attribute("http.response.status_code", code)
    found = request_id(headers)
    if found:
        span.set_attribute("openstack.request_id", found)
    if code >= 500:
        _note_error(span, str(code))


def _note_error(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(_ERROR)


def watch_token_cache(cache: WSGIApplication) -> WSGIApplication:
    """Wrap the token cache so that it has a span, which says what it did and why."""

    def watching(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        phases = current.get()
        if not isinstance(phases, TracedPhases):
            return cache(environ, start_response)
        with phases.span("token cache") as span:
            body = cache(environ, start_response)
            outcome, reason = _outcome(phases, environ["REQUEST_METHOD"])
            span.set_attribute("keyfront.cache.outcome", outcome)
            span.set_attribute("keyfront.cache.reason", reason)
            if outcome == "miss":
                span.set_attribute("keyfront.cache.kept", "not_kept" not in phases.cache_also)
            return body

    return watching


def _outcome(phases: TracedPhases, method: str) -> tuple[str, str]:
    counted = phases.cache
    if counted == "bypassed":
        return "bypass", phases.cache_reason
    if not counted and phases.asked_keystone:
        return "bypass", "route" if method in _READS else "method"
    outcome, reason = _OUTCOMES.get(counted, ("bypass", counted))
    if outcome == "miss":
        for name in phases.cache_also:
            if name.startswith(_ENDED):
                reason = name.removeprefix(_ENDED)
    return outcome, reason


def watch_keystone(keystone: WSGIApplication) -> WSGIApplication:
    """Wrap Keystone so that it has a span, which says how much of its time went into what."""

    def watching(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        phases = current.get()
        if not isinstance(phases, TracedPhases):
            return keystone(environ, start_response)
        phases.asked_keystone = True
        with phases.span("keystone") as span:
            try:
                return keystone(environ, start_response)
            finally:
                for part in (STATEMENTS, HASH):
                    name = f"keyfront.{TIMED[part]}"
                    span.set_attribute(f"{name}.count", phases.counts[part])
                    span.set_attribute(f"{name}.duration", round(phases.seconds[part], 6))

    return watching


def route(path: str) -> str:
    """Return a path with ``{id}`` for each part that is no word of Keystone's API."""
    parts = path.split("/", _PARTS)
    return "/".join([part if not part or part in WORDS else "{id}" for part in parts])

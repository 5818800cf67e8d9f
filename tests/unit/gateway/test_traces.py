"""Spans: what they are told of token cache, directory and answers, and where there are none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from keyfront.common import request_phases
from keyfront.common.fork import ForkRegistry
from keyfront.common.request_phases import DIRECTORY, HASH, current, timed, watched
from keyfront.errors import KeyfrontError, MissingPartError, OptionError
from keyfront.gateway.traces import export, installation, spans
from keyfront.gateway.traces.export import Sender
from support.token_worlds import World

REQUEST = {"REQUEST_METHOD": "GET", "PATH_INFO": "/v3/users", "wsgi.url_scheme": "https"}


class Traced:
    """A tracer whose spans are kept."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**options, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Any = provider.get_tracer("test")

    def ask(self, application: Any, **environ: Any) -> list[ReadableSpan]:
        """The spans of one request, in the order they ended."""
        self.exporter.clear()
        given: list[Any] = []
        traced = spans.trace_requests(application, self)
        traced({**REQUEST, **environ}, lambda *told: given.append(told))
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traced() -> Traced:
    return Traced()


def _answers(status: str, *, meanwhile: Callable[[], None] = lambda: None) -> Any:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        meanwhile()
        start_response(status, [("X-OpenStack-Request-Id", "gAAAA-secret")])
        return []

    return application


def test_what_a_client_sends_is_in_no_span(traced: Traced) -> None:
    (span,) = traced.ask(
        _answers("200 OK"), REQUEST_METHOD="gAAAA-secret", PATH_INFO="/v3/users/gAAAA-secret",
        QUERY_STRING="gAAAA-secret", HTTP_X_AUTH_TOKEN="gAAAA-secret",
        HTTP_X_REQUEST_START="gAAAA-secret", HTTP_HOST="gAAAA-secret",
    )  # fmt: skip
    assert span.name == "HTTP /v3/users/{id}"
    assert dict(span.attributes or {}) == {
        "http.request.method": "_OTHER", "http.route": "/v3/users/{id}", "url.scheme": "https",
        "http.response.status_code": 200,
    }  # fmt: skip
    assert "secret" not in span.to_json()


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("parent", "state", "continued", "passed"),
    [
        (PARENT, "a=b", True, "a=b"),
        (PARENT, "a=" + "b" * 200 + ",c=" + "d" * 400, True, ""),
        (PARENT, "nonsense", True, ""),
        (PARENT.upper(), "a=b", False, ""),
        (PARENT + "-more", "a=b", False, ""),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", "a=b", False, ""),
        ("", "a=b", False, ""),
        ("caf\u00e9\n", "a=b", False, ""),
    ],
)
def test_the_callers_trace(
    traced: Traced, parent: str, state: str, continued: bool, passed: str
) -> None:
    (span,) = traced.ask(_answers("200 OK"), HTTP_TRACEPARENT=parent, HTTP_TRACESTATE=state)
    assert span.context is not None
    assert (span.parent is not None) == continued
    assert span.context.trace_state.to_header() == passed


@pytest.mark.parametrize(("status", "failed"), [("404 NOT FOUND", False), ("503 X", True)])
def test_only_the_servers_errors_are_errors(traced: Traced, status: str, failed: bool) -> None:
    (span,) = traced.ask(_answers(status))
    assert (span.status.status_code is StatusCode.ERROR) == failed
    assert (span.attributes or {}).get("error.type") == ("503" if failed else None)


def test_an_exception_is_told_by_its_class_alone(traced: Traced) -> None:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        raise ValueError("gAAAA-secret")

    with pytest.raises(ValueError):
        traced.ask(spans.watch_token_cache(spans.watch_keystone(application)))
    found = traced.exporter.get_finished_spans()
    assert [span.name for span in found] == ["keystone", "token cache", "GET /v3/users"]
    for span in found:
        assert (span.attributes or {})["error.type"] == "ValueError"
        assert "secret" not in span.to_json()
    assert current.get() is None


def test_a_request_that_is_not_sampled_costs_its_parts_nothing() -> None:
    seen: list[Any] = []
    traced = Traced(sampler=ALWAYS_OFF)
    assert traced.ask(_answers("200 OK", meanwhile=lambda: seen.append(current.get()))) == []
    assert seen == [None]


def test_the_directory_is_told_of_by_operation(traced: Traced) -> None:
    def meanwhile() -> None:
        with timed(DIRECTORY, "search"), timed(HASH):
            pass
        with pytest.raises(OSError), timed(DIRECTORY, "bind"):
            raise OSError("cn=secret")

    keystone = spans.watch_keystone(_answers("200 OK", meanwhile=meanwhile))
    search, bind, below, front = traced.ask(keystone)
    assert (search.name, bind.name) == ("directory search", "directory bind")
    for span in (search, bind):
        assert span.parent is not None and below.context is not None
        assert span.parent.span_id == below.context.span_id
        assert span.start_time is not None and span.end_time is not None
        assert span.start_time <= span.end_time
    assert (bind.attributes or {})["error.type"] == "OSError"
    assert "secret" not in bind.to_json()
    assert (below.attributes or {})["keyfront.hash.count"] == 1
    assert front.status.status_code is not StatusCode.ERROR


class Cached:
    """The token cache, traced, in front of a Keystone that is."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.traced = Traced()
        self.cache = self.world.cache
        self.cache.application = spans.watch_keystone(self.world.keystone)
        self.front = spans.trace_requests(spans.watch_token_cache(self.cache), self.traced)

    def told(self, by: Any = None, **environ: Any) -> dict[str, Any]:
        """What the span of the cache tells of one request."""
        self.traced.exporter.clear()
        front: Any = self.front
        if by is not None:
            front = spans.trace_requests(spans.watch_token_cache(by), self.traced)
        self.world.get(by=front, **environ)
        found = {span.name: span for span in self.traced.exporter.get_finished_spans()}
        attributes = found["token cache"].attributes or {}
        return {name.removeprefix("keyfront.cache."): x for name, x in attributes.items()}


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Cached]:
    yield Cached(tmp_path)


def test_the_cache_says_what_it_did_and_why(cached: Cached) -> None:
    miss = {"outcome": "miss", "reason": "unknown", "kept": True}
    assert cached.told() == miss
    assert cached.told() == {"outcome": "hit", "reason": "worker"}
    other = cached.world.worker()
    assert cached.told(by=other) == {"outcome": "hit", "reason": "node"}
    cached.world.change("user:user-t")
    assert cached.told() == {**miss, "reason": "rows"}
    cached.world.keystone.unvouched = True
    assert cached.told(subject="u") == {**miss, "kept": False}
    assert cached.told(CONTENT_LENGTH="1") == {"outcome": "bypass", "reason": "request"}
    assert cached.told(QUERY_STRING="x=1") == {"outcome": "bypass", "reason": "variants"}
    assert cached.told(PATH_INFO="/v3/users") == {"outcome": "bypass", "reason": "route"}
    assert cached.told(REQUEST_METHOD="DELETE") == {"outcome": "bypass", "reason": "method"}


def test_off_nothing_is_wrapped_and_nothing_imported() -> None:
    program = (
        "import sys\n"
        "from keyfront.common import request_phases\n"
        "from keyfront.common.fork import ForkRegistry\n"
        "from keyfront.gateway.traces import installation\n"
        "registry = ForkRegistry()\n"
        "application = object()\n"
        "assert installation.install(registry)(application) is application\n"
        "assert request_phases.watched('keystone', application) is application\n"
        "assert not registry._entries and not request_phases.watches\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    environment = {"KEYFRONT_TRACES": "off"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("KEYFRONT_TRACES", "on")
    monkeypatch.setattr(request_phases, "watches", {})
    return monkeypatch


def test_on_the_parts_are_watched(switched_on: pytest.MonkeyPatch) -> None:
    application = _answers("200 OK")
    assert installation.install(ForkRegistry())(application) is not application
    assert watched("token cache", application) is not application
    assert watched("keystone", application) is not application


def test_without_the_extra(switched_on: pytest.MonkeyPatch) -> None:
    switched_on.delitem(sys.modules, "keyfront.gateway.traces.export", raising=False)
    switched_on.delattr("keyfront.gateway.traces.export", raising=False)
    switched_on.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingPartError, match=r"KEYFRONT_TRACES.*keyfront\[otel\]"):
        installation.install(ForkRegistry())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KEYFRONT_TRACES", "yes"),
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ],
)
def test_a_value_that_would_send_nothing(
    switched_on: pytest.MonkeyPatch, name: str, value: str
) -> None:
    switched_on.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name} = {value}"):
        installation.install(ForkRegistry())


def test_what_opentelemetry_refuses(switched_on: pytest.MonkeyPatch) -> None:
    """As its older releases do a timeout that is no number."""

    def refuse() -> None:
        raise ValueError("invalid literal: 'soon'")

    switched_on.setattr(export, "OTLPSpanExporter", refuse)
    with pytest.raises(KeyfrontError, match=r"KEYFRONT_TRACES = on.*OTEL_.*'soon'"):
        installation.install(ForkRegistry())


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "keystone"),
        ({"OTEL_SERVICE_NAME": "identity"}, "identity"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=identity"}, "identity"),
    ],
)
def test_the_service_has_a_name(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], service: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sender = Sender()
    assert sender.tracer is None
    sender.start()
    try:
        tracer: Any = sender.tracer
        assert tracer.resource.attributes["service.name"] == service
    finally:
        sender.stop()
    assert sender.tracer is None

"""A collector of traces for tests: takes OTLP over HTTP, keeps all bytes, decodes the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message


@dataclass(frozen=True)
class Span:
    """A span as it was sent."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    failed: bool
    seconds: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """What was sent to it."""

    url: str
    raw: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def named(self, name: str) -> list[Span]:
        """The spans of a name, in the order they came."""
        with self.lock:
            return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> dict[str, Span]:
        """The spans directly below one, by name."""
        with self.lock:
            return {span.name: span for span in self.spans if span.parent == parent.id}

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        found = []
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(part.resource.attributes)
            for scope in part.scope_spans:
                found += [_span(span, resource) for span in scope.spans]
        with self.lock:
            self.raw.append(body)
            self.spans += found


def _span(message: Message, resource: dict[str, Any]) -> Span:
    assert not message.events and not message.links
    return Span(
        name=message.name,
        kind=Message.SpanKind.Name(message.kind).removeprefix("SPAN_KIND_"),
        trace=message.trace_id.hex(),
        id=message.span_id.hex(),
        parent=message.parent_span_id.hex(),
        state=message.trace_state,
        failed=message.status.code == 2,
        seconds=(message.end_time_unix_nano - message.start_time_unix_nano) / 1e9,
        attributes=_values(message.attributes),
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextlib.contextmanager
def trace_receiver() -> Iterator[Receiver]:
    """Run one on a free port of 127.0.0.1 until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *details: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()

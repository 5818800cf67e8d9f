"""Sends spans to a collector by OTLP over HTTP, from a thread of each worker.

Everything is set by OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_BSP_*`` and so on:
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/). Spans wait in a
bounded queue, and what does not fit is dropped, so that a collector which is away costs no request.

Threads do not exist in the child of a fork, so a fork handler makes them in the worker, with a
provider of its own. What OpenTelemetry itself does after a fork would not do: its handler is
Python's, of which uWSGI does not know, and its resource would have the process id of the parent.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from keyfront import __version__
from keyfront.common import ranges
from keyfront.errors import KeyfrontError

#: Seconds that a worker which stops waits at most until its spans are sent.
FLUSH_SECONDS: Final = 2.0

# Whatever else is on a machine, this is what is served.
_SERVICE = "keystone"
_UNNAMED = "unknown_service"


class Sender:
    """The tracer of this process, and what sends its spans.

    :raises OptionError: a variable names an exporter or a protocol that is not here
    :raises KeyfrontError: OpenTelemetry refuses its variables
    """

    def __init__(self) -> None:
        #: ``None`` in a process that does not serve.
        self.tracer: Tracer | None = None
        self._running: _Running | None = None
        ranges.one_of(
            "OTEL_TRACES_EXPORTER", os.environ.get("OTEL_TRACES_EXPORTER") or "otlp", "otlp"
        )
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            ranges.one_of(name, os.environ.get(name) or "http/protobuf", "http/protobuf")
        try:
            # Also loads, before the fork, what the workers then share.
            OTLPSpanExporter()
            TracerProvider(resource=_resource(), shutdown_on_exit=False)
        except (ValueError, OSError) as error:
            raise KeyfrontError(
                f"KEYFRONT_TRACES = on: OpenTelemetry refuses one of its variables, OTEL_*: {error}"
            ) from error

    def start(self) -> None:
        """Begin to send, in a process that serves; one that was forked begins anew."""
        if self._running is None:
            atexit.register(self.stop)
        self._running = _Running()
        self.tracer = self._running.provider.get_tracer("keyfront", __version__)

    def stop(self) -> None:
        """Send what waits, for :data:`FLUSH_SECONDS` at most, and send nothing more."""
        running, self._running, self.tracer = self._running, None, None
        if running is not None:
            running.stop()


class _Running:
    """The provider of one process, its threads, and how they end."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.processor = BatchSpanProcessor(OTLPSpanExporter())
        self.provider.add_span_processor(self.processor)
        self._asked, self._done = threading.Event(), threading.Event()
        # Already now: Python 3.12 and later start no thread when the interpreter ends, and without
        # one nobody bounds how long OpenTelemetry waits for a collector.
        threading.Thread(target=self._end, name="keyfront traces stop", daemon=True).start()
        gevent: Any = sys.modules.get("gevent")
        uwsgi: Any = sys.modules.get("uwsgi")
        if gevent is not None and uwsgi is not None and "gevent" in uwsgi.opt:
            gevent.spawn(self._watch_stop, gevent)

    def stop(self) -> None:
        if self._pid == os.getpid():
            self._asked.set()
            self._done.wait(FLUSH_SECONDS)

    def _end(self) -> None:
        self._asked.wait()
        self.provider.shutdown()
        self._done.set()

    def _watch_stop(self, gevent: Any) -> None:
        """Flush from the stop signal on: uWSGI's greenlet workers end without ``atexit``."""
        def flush() -> None:
            while True:
                self.processor.force_flush()
                gevent.sleep(0.05)

        # The first watcher has to be uWSGI's (keyfront.gateway.bounded_stop): here its loop runs.
        gevent.signal_handler(signal.SIGHUP, flush)


def _resource() -> Resource:
    own: dict[str, str | int] = {"process.pid": os.getpid()}
    found = Resource.create()
    if str(found.attributes.get("service.name", _UNNAMED)).startswith(_UNNAMED):
        own["service.name"] = _SERVICE
    return found.merge(Resource(own))

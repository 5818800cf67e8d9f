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
import sys
import threading
from collections.abc import Callable
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
        self._ends = False
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
        if not self._ends:
            self._ends = True
            _at_exit(self.stop)
        uwsgi: Any = sys.modules.get("uwsgi")
        if uwsgi is not None and "gevent" in uwsgi.opt:
            import gevent

            # In uWSGI's loop: to start a thread is to wait for it, and meanwhile the hub would run
            # what has to come after uWSGI's own watchers (keyfront.gateway.bounded_stop).
            gevent.spawn(self._start)
        else:
            self._start()

    def _start(self) -> None:
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

    def stop(self) -> None:
        if self._pid == os.getpid():
            self._asked.set()
            self._done.wait(FLUSH_SECONDS)

    def _end(self) -> None:
        self._asked.wait()
        self.provider.shutdown()
        self._done.set()


def _at_exit(action: Callable[[], None]) -> None:
    """Register an action for the orderly end of this process; it may be called twice."""
    atexit.register(action)
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None:
        return
    # Its greenlet workers end without Python's atexit, and with this (plugins/gevent/gevent.c).
    previous = getattr(uwsgi, "atexit", None)

    def end() -> None:
        action()
        if previous is not None:
            previous()

    uwsgi.atexit = end


def _resource() -> Resource:
    own: dict[str, str | int] = {"process.pid": os.getpid()}
    found = Resource.create()
    if str(found.attributes.get("service.name", _UNNAMED)).startswith(_UNNAMED):
        own["service.name"] = _SERVICE
    return found.merge(Resource(own))

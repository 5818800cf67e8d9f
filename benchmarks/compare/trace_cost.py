"""Microseconds of CPU time that traces cost a hit in the token cache, in this process.

The same filled cache is asked in turns as it is (``off``: nothing is wrapped), with traces of which
the sampler takes none, of which it takes each twentieth, and with all of them, which is a span for
the request and one for the cache. What counts is the CPU time of this process with all of its
threads, so that encoding and sending is in it; the collector is another process. The queue is long
enough for all, and is sent before a turn ends. Prints the median over the rounds, with the lowest
and the highest, and the same of the ratio to ``off`` in each round.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from unittest import mock

from keyfront.common import programs

from ..results import Cell, Table
from ..servers.processes import told
from . import comparison
from .comparison import Comparison, Report
from .ratios import Spread, by_round
from .token_hit import Pipeline, call, fill, new_filter, shared_folder
from .token_stand_in import Answers, request

CALLS = 2_000
ENTRIES = 1_000

_COLLECTOR = """
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *details):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
sys.stdin.read()
"""

#: The variables of each line.
LINES: dict[str, dict[str, str]] = {
    "off": {},
    "none sampled": {"OTEL_TRACES_SAMPLER": "always_off"},
    "5 % sampled": {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.05"},
    "all sampled": {"OTEL_TRACES_SAMPLER": "always_on"},
}


def turn(cache: Pipeline, variables: dict[str, str], url: str) -> float:
    """Return microseconds of CPU time per hit, with what is sent of it.

    :param variables: OpenTelemetry's variables; without any, traces are off
    """
    from keyfront.gateway.traces import export, spans

    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_MAX_QUEUE_SIZE": str(4 * CALLS), **variables,
    }  # fmt: skip
    environs = [request(number % ENTRIES) for number in range(CALLS)]
    with mock.patch.dict(os.environ, given):
        sender = export.Sender()
        served = cache
        if variables:
            sender.start()
            served = spans.trace_requests(spans.watch_token_cache(cache), sender)
        began = time.process_time()
        for environ in environs:
            call(served, environ)
        sender.stop()
        return (time.process_time() - began) / CALLS * 1e6


def report(rounds: int) -> Report:
    """Measure each line in each round, after one that is not counted."""
    programs.require_module("opentelemetry", "otel")
    with shared_folder() as folder, told([sys.executable, "-c", _COLLECTOR]) as collector:
        url = f"http://127.0.0.1:{collector.line()}"
        cache = new_filter(Answers(), folder, 2 * ENTRIES)
        fill(cache, ENTRIES)
        # the first is for the processor's caches
        found = comparison.in_rounds(
            list(LINES), rounds, lambda name: turn(cache, LINES[name], url), warm=1
        )
    rows: list[list[Cell]] = [
        [name, Spread.of(one).text(1), Spread.of(by_round(one, found["off"])).text(1)]
        for name, one in found.items()
    ]
    return Report([Table(name="traces", columns=["traces", "us a hit", "times off"], rows=rows)])


COMPARISON = Comparison(
    title="What traces cost a hit",
    measure=lambda options: report(options.rounds),
    numbers=(("--rounds", 15, "turns of each"),),
    distributions=("opentelemetry-sdk",),
)
main = partial(comparison.main, "trace_cost", __doc__, COMPARISON)

if __name__ == "__main__":
    sys.exit(main())

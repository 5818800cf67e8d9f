"""The generators that the publications used, by name."""

from __future__ import annotations

from ..load import wrk
from ..load.outcome import CLOSED, Outcome, Request


def run(
    name: str,
    request: Request,
    *,
    connections: int,
    seconds: int,
    requests: int | None = None,
) -> Outcome:
    """interim"""
    load = wrk.run(
        request.url, request.headers, seconds=min(seconds, 3), connections=connections
    )
    return Outcome(
        generator=name,
        loop=CLOSED,
        good=load.requests,
        failures=load.failures,
        seconds=load.seconds,
        latencies=load.latencies if not load.failures["status"] else None,
        generator_cpu=load.generator_cpu,
    )

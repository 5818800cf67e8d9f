"""The chain of timeouts: whoever is nearer to the client waits longer."""

from __future__ import annotations

import math

from .reasons import Numbers
from .workload import Workload

# Seconds between two links: enough for an answer that is just being sent.
_MARGIN = 5
# Times the latency target after which a request is stuck rather than slow.
_STUCK = 12


def put_timeouts(numbers: Numbers, workload: Workload) -> None:
    """Add the timeouts: client > balancer > proxy > harakiri, stop > mercy, idle connections."""
    latency = workload.latency
    wait = max(1, math.ceil(latency))
    unit = "seconds"
    harakiri = numbers.put(
        "timeout.harakiri", min(3600, max(30, math.ceil(latency * _STUCK))), unit,
        f"{_STUCK} x the latency target of {latency:g} s, 30 to 3600",
        "Lower, slow requests are killed with all others of their worker; unset, a stuck request "
        "holds its worker for ever",
    )
    proxy = numbers.put(
        "timeout.proxy", harakiri + wait + _MARGIN, unit,
        f"harakiri {harakiri} + {wait} in the queue + {_MARGIN}",
        "At or below harakiri the client gets a 504 while the worker still computes",
    )
    balancer = numbers.put(
        "timeout.balancer", proxy + _MARGIN, unit, f"proxy {proxy} + {_MARGIN}",
        "At or below the proxy's the balancer answers 504 and calls a healthy node slow",
    )
    queue = numbers.put(
        "haproxy.queue_timeout", wait, unit, f"the latency target of {latency:g} s, rounded up",
        "Longer, clients wait for an answer that comes too late; after it they are answered 503",
    )
    numbers.put(
        "timeout.client", balancer + queue + _MARGIN, unit,
        f"balancer {balancer} + its queue {queue} + {_MARGIN}",
        "A client that gives up earlier leaves a request running that nobody reads, and retries it",
    )
    mercy = numbers.put(
        "timeout.mercy", max(10, min(300, harakiri // 2)), unit,
        f"half of harakiri {harakiri}, 10 to 300",
        "Lower, a restart cuts off requests that were nearly done; higher, it takes that long",
    )
    numbers.put(
        "timeout.stop", mercy + _MARGIN, unit, f"mercy {mercy} + {_MARGIN}",
        "At or below mercy systemd kills workers that are still answering (SIGKILL)",
    )
    numbers.put(
        "timeout.balancer_keepalive", 65, unit,
        "clients close idle connections after 60 s as a rule; + 5",
        "Whoever closes first must be the one that sends, or a request meets a closed connection",
    )
    numbers.put(
        "timeout.keepalive", 75, unit, "balancer_keepalive 65 + 10",
        "Below the balancer's, requests are sent into connections that were just closed: 502",
    )

"""Heartbeats that survive green threads: AMQP connections stay up while no hub runs.

A worker under uWSGI or mod_wsgi whose process is patched by eventlet or gevent runs its hub only
while it answers a request. In between nobody beats, RabbitMQ hangs up, and the next message pays
for it. Call :func:`install` once in such a process, or put the filter ``egg:keyfront#heartbeat``
into its paste pipeline, or set ``[keyfront_heartbeat] enabled = true`` for keyfront's entrypoints.
Nothing in oslo.messaging's configuration changes. ``keyfront heartbeat status`` shows what it does;
docs/heartbeat.md tells what is promised and what is not.

For connections of other kinds there is :func:`keepalive`.
"""

from __future__ import annotations

from .installation import install, install_if_enabled, remove, statistics
from .keepalive import Keepalive, keepalive

__all__ = [
    "Keepalive",
    "concurrency",
    "counters",
    "install",
    "install_if_enabled",
    "installation",
    "keepalive",
    "options",
    "remove",
    "statistics",
]

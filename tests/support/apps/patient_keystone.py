"""Keystone, whose workers send what waits of their traces for a minute when they stop.

Beside others a process may stand still for the two seconds that they have otherwise.
"""

from __future__ import annotations

from keyfront.gateway.application import default_target, load
from keyfront.gateway.traces import export

export.FLUSH_SECONDS = 60.0  # type: ignore[misc]

application = load(default_target())

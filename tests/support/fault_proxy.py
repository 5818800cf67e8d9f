"""The TCP proxy that fails on command; the benchmarks have it, too."""

from __future__ import annotations

from keyfront.benchmarks.worlds.fault_proxy import (
    FaultProxy,
    ProxyProcess,
    proxy_process,
)

__all__ = ["FaultProxy", "ProxyProcess", "proxy_process"]

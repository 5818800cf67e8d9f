"""Certificates that are right or wrong in one way each; the benchmarks have them, too."""

from __future__ import annotations

from keyfront.benchmarks.worlds.certificates import (
    WRONG_HOST,
    Certificates,
    Pair,
    certificates,
)

__all__ = ["WRONG_HOST", "Certificates", "Pair", "certificates"]

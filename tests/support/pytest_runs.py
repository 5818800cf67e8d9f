"""Runs pytest in a process of its own, on what a test has written."""

from __future__ import annotations

from pathlib import Path

import pytest

# Plugins that are installed here by chance, and import most of a second's work each time.
_WITHOUT = ("cacheprovider", "hypothesispytest", "requests_mock")


def run(pytester: pytest.Pytester, *arguments: str | Path) -> pytest.RunResult:
    """Run what lies in the folder of ``pytester``."""
    without = [part for name in _WITHOUT for part in ("-p", f"no:{name}")]
    return pytester.runpytest_subprocess(*without, *arguments, timeout=900)

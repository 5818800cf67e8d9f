"""Runs pytest with the gate on what a test has written."""

from __future__ import annotations

from pathlib import Path

import pytest

# All of the gate, now: pytester forgets what a test imports, but for what packages hold of it, so
# an error that is raised in the next test would be of another class than the one that is caught.
from keyfront.benchmarks.gate import plugin, session  # noqa: F401

# Plugins that are installed here by chance, and import most of a second's work each time.
_WITHOUT = ("cacheprovider", "hypothesispytest", "requests_mock", "pytest_cov")


def run(pytester: pytest.Pytester, *arguments: str | Path) -> pytest.RunResult:
    """Run what lies in the folder of ``pytester``, in this process and without other plugins.

    So are the processes that the gate starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        options = ("-p", "no:cacheprovider", *arguments)
        return pytester.runpytest_inprocess(*options, plugins=[plugin])


def run_apart(pytester: pytest.Pytester, *arguments: str | Path) -> pytest.RunResult:
    """Run it in a process of its own, with pytest-benchmark and the gate as pytest finds them."""
    without = [part for name in _WITHOUT for part in ("-p", f"no:{name}")]
    return pytester.runpytest_subprocess(*without, *arguments, timeout=900)

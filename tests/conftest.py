"""What holds for all tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Importing hypothesis takes a second: what does without has -p no:hypothesispytest.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # How long an example takes is the machine's affair: beside others some take a second.
        examples = int(os.environ.get("KEYFRONT_EXAMPLES", "100"))
        settings.register_profile(
            "unhurried",
            deadline=None,
            max_examples=examples,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("unhurried")

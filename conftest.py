"""Marks every test that starts servers, by the folder it lies in."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
STARTS_SERVERS = (TESTS / "integration", TESTS / "conformance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in STARTS_SERVERS):
            item.add_marker("integration")

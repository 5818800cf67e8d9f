"""How long the soak lasts, and where its report goes."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption(
        "--minutes", type=float, metavar="N",
        help="how long the soak lasts; by default until each fault was had once, at a lower rate",
    )  # fmt: skip
    group.addoption("--report", type=Path, metavar="FILE", help="the soak's page, HTML")

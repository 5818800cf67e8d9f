"""The pool's own limits, out of reach of a machine that stands still, for the tests that ask."""

from __future__ import annotations

import pytest

from keyfront.middleware.ldap import logins, service_account, service_refusals
from support.served import PATIENCE


@pytest.fixture
def refused_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is not offered again within a test, however long that takes, and neither is
    what somebody is just offering."""
    monkeypatch.setattr(service_refusals, "HOLD_SECONDS", service_refusals.MAX_HOLD_SECONDS)
    for module in (service_refusals, service_account):
        monkeypatch.setattr(module, "_TURN_SECONDS", PATIENCE)


@pytest.fixture
def nobody_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others who wait, should the machine stand still for as long as that takes."""
    monkeypatch.setattr(logins, "SLOW_SECONDS", PATIENCE)

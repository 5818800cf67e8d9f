"""First logins of one user of an identity provider that cross: stock Keystone refuses one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keystone")


def test_stock_keystone_refuses_one_of_them(play: Any) -> None:
    """The day that it does not, the repair is no longer needed."""
    assert play("simultaneous_logins", "stock", "same") == [
        {"first": 409, "second": 201, "works": False, "others": 200}
    ]


def test_both_are_let_in(play: Any) -> None:
    """And where the late one comes with another group, he was not new: what he lost ends."""
    same, another = play("simultaneous_logins", "ours", "same,another")
    assert same == {"first": 201, "second": 201, "works": True, "others": 200}
    # Until 2025.2 nobody loses a group by a login; it ends by time.
    from keystone.identity.shadow_backends.sql import ShadowUsers

    others = 404 if hasattr(ShadowUsers, "cleanup_stale_group_memberships") else 200
    assert another == {"first": 201, "second": 201, "works": True, "others": others}

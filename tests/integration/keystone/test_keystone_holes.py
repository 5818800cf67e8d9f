"""Two holes between requests of one process: open in Keystone's application, closed in ours.

Each scenario runs against both, and the stock application has to show the hole: the day it does
not, the repair is no longer needed, or the scenario no longer shows anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("keystone")


@pytest.mark.parametrize(("which", "once"), [("stock", 200), ("ours", 401)])
def test_revoked_token_shown_to_another_worker(play: Any, which: str, once: int) -> None:
    """Stock Keystone accepts it once more; ours never does."""
    assert play("keystone_holes", which, "revoked") == {
        "validated": 200,
        "revoked": 204,
        "once": once,
        "twice": 401,
    }


@pytest.mark.parametrize(("which", "crossed"), [("stock", 200), ("ours", 403)])
def test_token_of_a_request_in_another_thread(play: Any, which: str, crossed: int) -> None:
    """Stock Keystone serves a member as the administrator; ours refuses as it should."""
    assert play("keystone_holes", which, "crossed") == {
        "alone": 403,
        "admin": 200,
        "crossed": crossed,
    }


@pytest.mark.parametrize("which", ["stock", "ours"])
def test_service_token_never_replaces_the_users(play: Any, which: str) -> None:
    """Both tokens pass the same attribute, the user's last, so no repair is needed."""
    assert play("keystone_holes", which, "service_token") == {
        "member_by_admin": 403,
        "admin_by_member": 200,
        "bad_by_admin": 401,
        "none_by_admin": 401,
        "held": ["scenario-member", "admin"],
    }


def test_importing_the_factory_does_not_import_keystone(run_python: Callable[..., str]) -> None:
    """Every entrypoint imports the module, also those that serve something else."""
    heavy = ("keystone", "oslo_context", "flask")
    module = "keyfront.gateway.keystone.application"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert run_python("-c", code).strip() == "[]"

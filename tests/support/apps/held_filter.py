"""A paste filter that holds requests at named points inside Keystone, for as long as a test wants.

The test makes ``NAME.hold`` in the folder. The next request that comes to the point NAME takes it
away, says so by ``NAME.arrived`` and goes on when there is ``NAME.go``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Seconds; a bound on a hang.
_PATIENCE = 60.0


class Holds:
    """The points of one folder, as the test sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, name: str) -> None:
        """Hold the next request that comes to a point."""
        for word in ("arrived", "go"):
            (self._folder / f"{name}.{word}").unlink(missing_ok=True)
        (self._folder / f"{name}.hold").touch()

    def arrived(self, name: str) -> bool:
        return (self._folder / f"{name}.arrived").exists()

    def release(self, name: str) -> None:
        (self._folder / f"{name}.go").touch()

    def wait_here(self, name: str) -> None:
        """Called by Keystone: wait if the test wants it."""
        try:
            (self._folder / f"{name}.hold").unlink()
        except FileNotFoundError:
            return
        (self._folder / f"{name}.arrived").touch()
        deadline = time.monotonic() + _PATIENCE
        while not (self._folder / f"{name}.go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)


def _before(owner: Any, method: str, holds: Holds, name: str) -> None:
    original = getattr(owner, method)

    def held(*arguments: Any, **named: Any) -> Any:
        holds.wait_here(name)
        return original(*arguments, **named)

    setattr(owner, method, held)


def _after(owner: Any, method: str, holds: Holds, name: str) -> None:
    original = getattr(owner, method)

    def held(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        holds.wait_here(name)
        return result

    setattr(owner, method, held)


def filter_factory(global_conf: object, folder: str) -> Callable[[Any], Any]:
    """Build the filter; it stands before ``egg:keyfront#keystone``, which is loaded then."""

    def build(application: Any) -> Any:
        from keystone import notifications
        from keystone.assignment.core import Manager as Assignments
        from keystone.common import password_hashing
        from keystone.credential.backends.sql import Credential

        holds = Holds(Path(folder))
        # Scope and user have been read, the token is not made yet.
        _before(password_hashing, "check_password", holds, "login")
        # A user's grants and groups have been read, and nothing is made of them yet.
        _after(Assignments, "_get_group_ids_for_user_id", holds, "groups")
        # Committed, and not yet in Keystone's cache.
        _after(Credential, "update_credential", holds, "credential")
        _before(notifications.Audit, "created", holds, "created")

        def held(environ: dict[str, Any], start_response: Any) -> Any:
            answer = application(environ, start_response)
            holds.wait_here("answer")  # what it is made of has been read, and it is not kept yet
            return answer

        return held

    return build

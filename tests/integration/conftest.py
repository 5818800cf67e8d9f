"""What the integration tests share: one Keystone, made once and served in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from served import free_port, serve


@pytest.fixture(scope="session")
def keystone_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A state folder with a Keystone, and the port that its catalog names."""
    state = tmp_path_factory.mktemp("keystone") / "state"
    port = free_port()
    with serve(state, "uwsgi", port=port) as served:
        assert b"administrator" in served.output
    return state, port

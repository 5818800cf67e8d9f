"""The secret of a node: one for all its processes, and for nobody else."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.redis.coordinator import NAME, node_secret


def test_it_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    secret = node_secret(folder)
    assert len(secret) == 32
    assert node_secret(folder) == secret != node_secret(tmp_path / "other")
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_many_make_it_at_once(tmp_path: Path) -> None:
    start, found = threading.Barrier(8), []

    def make() -> None:
        start.wait()
        found.append(node_secret(tmp_path / "node"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize("trouble", ["open", "short", "link", "folder"])
def test_a_file_that_cannot_be_trusted(tmp_path: Path, trouble: str) -> None:
    folder = tmp_path / "node"
    secret = node_secret(folder)
    path = folder / NAME
    if trouble == "open":
        path.chmod(0o640)
    elif trouble == "short":
        path.write_bytes(secret[:31])
    elif trouble == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        path.mkdir(mode=0o700)
    with pytest.raises(CoordinatorError) as caught:
        node_secret(folder)
    assert str(folder) in str(caught.value)

"""docs/deploy.md in a Debian 12 that debootstrap makes, with its own apt, pip and Python.

Fetches some hundred MB for each line-up, so only where ``KEYFRONT_DEBIAN`` names a folder for the
root (made there once, 350 MB). ``test_walk`` is the cheap form; what is wrong with packages, their
extras and what their scripts do is seen here alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import debian_root, deploy_document

ROOT = Path(__file__).parents[3]
FOLDER = os.environ.get("KEYFRONT_DEBIAN")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="KEYFRONT_DEBIAN does not name a folder"),
]


@pytest.fixture(scope="module")
def root() -> Path:
    assert FOLDER
    path = Path(FOLDER).absolute() / "bookworm"
    path.parent.mkdir(parents=True, exist_ok=True)
    debian_root.make(path)
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheels")
    tree = folder / "tree"
    left = shutil.ignore_patterns(".git", ".tox", ".venv*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*pip, tree], check=True)
    return folder


@pytest.mark.parametrize("server", deploy_document.SERVERS)
def test_every_line_does_what_the_document_says(
    root: Path, wheels: Path, tmp_path: Path, server: str
) -> None:
    online, offline = deploy_document.walk(server)
    done = debian_root.run(online, offline, root=root, wheels=wheels, folder=tmp_path)
    for one in done:
        assert one.status == 0, f"{one.line}\n{one.output[-4000:]}"
        assert "does not provide the extra" not in one.output
    login = done[-1]
    assert re.search(r"^HTTP/\S+ 201", login.output), login.output
    assert re.search(r"^x-subject-token: \S+", login.output, re.IGNORECASE | re.MULTILINE)

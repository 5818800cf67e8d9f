"""A clone may lie anywhere: in a folder named keyfront, or with a blank and an umlaut.

What reads rendered files looks for words in text that holds the path of the clone's own Python.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Those that read files of servers, ours and others'.
READERS = ("benchmarks/test_lineups.py", "benchmarks/test_tokens.py", "render/test_settings.py")


@pytest.mark.once
def test_what_reads_rendered_files_takes_any_folder(tmp_path: Path) -> None:
    clone = tmp_path / "ü b/keyfront"
    clone.mkdir(parents=True)
    # The environment is the clone's own, as with make test.
    (clone / "python").symlink_to(sys.prefix)
    done = subprocess.run(
        [
            clone / "python/bin" / Path(sys.executable).name, "-m", "pytest", "-q", "-x",
            "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--basetemp", tmp_path / "tmp",
            *(ROOT / "tests/unit" / reader for reader in READERS),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout

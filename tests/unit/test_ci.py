"""What the continuous integration does to the environments that it tests in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LEFT = """
import site, sys
site.addpackage(sys.argv[1], "quick_end.pth", None)

class Left:
    def __del__(self):
        sys.stderr.write("freed")

Left.left = Left()
Left.left.cycle = Left.left
"""


@pytest.mark.parametrize(
    ("options", "looks"),
    [((), False), (("-X", "dev"), True), (("-W", "error"), True), (("-W", "default"), True)],
)
def test_a_process_looks_for_garbage_at_its_end_to_warn(
    options: tuple[str, ...], looks: bool
) -> None:
    command = [sys.executable, "-I", *options, "-c", LEFT, ROOT / ".ci"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stderr == ("freed" if looks else "")

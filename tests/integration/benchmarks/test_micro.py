"""The micro suite, once in its quick form: every gate holds on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keyfront.benchmarks import results

pytest.importorskip("pytest_benchmark")

PARTS = {
    *("authtoken", "epochs", "heartbeat", "ldap", "ldap_codec", "pipeline", "redis", "render"),
    "tokens",
}


@pytest.mark.slow
def test_the_quick_form_passes_and_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keyfront", "bench", "micro", "--quick"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()  # and nothing else is left behind
    found = results.read(path)
    assert (found.kind, found.name, found.complete) == ("micro", "suite", True)
    assert {sample["operation"].partition(":")[0] for sample in found.samples} <= PARTS
    ratios = [sample for sample in found.samples if sample["kind"] == "ratio"]
    assert len(ratios) > 10
    assert all(sample["pairs_ns"] and sample["title"] for sample in ratios)

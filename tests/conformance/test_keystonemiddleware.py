"""keystonemiddleware's own tests of its middleware, with ours in its place.

They come in its wheel. Each runs in a process of its own, as they configure oslo.config's global
object, patch clocks and the network, and mind no warnings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = (
    "keystonemiddleware.tests.unit.auth_token",
    "keystonemiddleware.tests.unit.test_access_rules",
)

# Before anything imports keystonemiddleware: as a service without a paste file does it.
PLUGIN = """\
from keyfront.middleware.tokens.authtoken.install import install

install()
"""
# Tells that the tests really ran with it.
WITNESS = """\
import atexit
from keyfront.middleware.tokens.authtoken.middleware import AuthProtocol

made = [0]
init = AuthProtocol.__init__


def counted(self, *arguments, **options):
    made[0] += 1
    init(self, *arguments, **options)


AuthProtocol.__init__ = counted
atexit.register(lambda: print("made by ours:", made[0]))
"""
# What takes most of the tests' time and is no part of them: two keys for each, and the source text
# of all who called, which testresources looks through for who is told how a test ends. And no
# deprecation is an error: tests of 13.0.0 use what oslo.utils of the same series has deprecated.
QUICK = """\
import functools
import inspect
import warnings
from cryptography.hazmat.primitives.asymmetric import rsa

rsa.generate_private_key = functools.cache(rsa.generate_private_key)
inspect.stack = functools.partial(inspect.stack, 0)
filterwarnings = warnings.filterwarnings


def quiet(action, *arguments, **options):
    filterwarnings("ignore" if action == "error" else action, *arguments, **options)


warnings.filterwarnings = quiet
"""
PATIENCE = 300


def run(folder: Path, *, ours: bool) -> tuple[dict[str, int], str]:
    """How many tests ended how, and all that was printed."""
    folder.mkdir()
    (folder / "ours.py").write_text(PLUGIN if ours else "")
    (folder / "witness.py").write_text(WITNESS)
    (folder / "quick.py").write_text(QUICK)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "ours", "-p", "witness", "-p", "quick",
            "--pyargs", *TESTS, "-q", "-p", "no:cacheprovider", "--assert=plain",
            f"--rootdir={folder}", "-c", "/dev/null", f"--basetemp={folder / 'temporary'}",
            "-W", "ignore",
        ],
        env={
            "PYTHONPATH": str(folder), "HOME": str(folder), "LANG": "C.UTF-8",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    last = next((x for x in reversed(done.stdout.splitlines()) if " passed" in x), "")
    counts = re.findall(r"(\d+) (passed|skipped|failed|errors?)", last)
    return {what: int(number) for number, what in counts}, printed


@pytest.mark.slow
def test_as_many_pass_with_ours(tmp_path: Path) -> None:
    stock, printed = run(tmp_path / "stock", ours=False)
    assert stock.get("passed", 0) >= 136 and stock.keys() <= {"passed", "skipped"}, printed
    assert "made by ours: 0" in printed
    found, printed = run(tmp_path / "ours", ours=True)
    assert found == stock, printed
    made = re.search(r"made by ours: (\d+)", printed)
    assert made is not None and int(made[1]) > 100, printed

"""Each module compiles and is imported on this Python without a warning of its own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import keyfront

ROOT = Path(keyfront.__file__).parent

# What loads an application when it is imported; and measurements, some of which are programs.
STARTS = (
    "keyfront.gateway.uwsgi", "keyfront.gateway.wsgi", "keyfront.gateway.mod_wsgi",
    "keyfront.benchmarks",
)  # fmt: skip

IMPORT = """
import importlib, pkgutil, sys, warnings
import keyfront

ours = keyfront.__path__[0]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    names = [x.name for x in pkgutil.walk_packages(keyfront.__path__, "keyfront.")]
    for name in names:
        if not name.startswith(tuple(sys.argv[1:])) and not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != "uwsgi":  # which only uWSGI's own processes have
                    raise
found = [str(x) for x in seen if x.filename.startswith(ours)]
assert not found, found
print(len(names))
"""


def test_each_compiles_without_a_warning() -> None:
    found = sorted(ROOT.rglob("*.py"))
    assert len(found) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in found:
            compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)


def test_each_is_imported_without_a_warning() -> None:
    """Those of others' modules are theirs: an older series is used with this Python, too."""
    command = [sys.executable, "-c", IMPORT, *STARTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100

"""Marks tests by the folder they lie in: those that start servers, and those that run once."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
# Measurements, whose modules are imported on each Python by test_packaging; arithmetic; what reads
# configuration files, which test_doctor runs on each as a command; documents, and source as text;
# all orders of a protocol's steps, taken one by one in one thread, which are each Python's.
ONCE = tuple(
    TESTS / "unit" / name
    for name in (
        "benchmarks", "plan", "doctor", "test_docs.py", "test_docstrings.py", "test_layers.py",
        "test_series.py", "tokens/test_protocol_model.py", "tokens/test_lease_model.py",
    )
)  # fmt: skip
STARTS_SERVERS = (TESTS / "integration", TESTS / "conformance")

# Of what is imported and collected hardly anything is ever let go.
gc.disable()

# It is .ci/test's for this process: one that a test starts is to find the plugins there are.
os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)

if not sys.prefix.isascii():
    # uWSGI takes no other path of a Python environment, and tests name this one to it.
    _folder = Path(tempfile.mkdtemp(prefix="keyfront-prefix-"))
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    _folder.chmod(0o711)
    _folder.joinpath("python").symlink_to(sys.prefix)
    sys.prefix = str(_folder / "python")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Else they are imported first, each of hundreds of tests is made, and then left out.
    if config.option.markexpr == "not once" and collection_path in ONCE:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in STARTS_SERVERS):
            item.add_marker("integration")
        if any(item.path.is_relative_to(place) for place in ONCE):
            item.add_marker("once")


def pytest_collection_finish() -> None:
    # What was imported and collected stays: the collector need not look at it again and again.
    gc.freeze()
    gc.enable()

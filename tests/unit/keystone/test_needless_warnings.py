"""What Keystone's libraries warn of to nobody's use is left out, and nothing else is."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfront.gateway.keystone import needless_imports

LOG = logging.getLogger("keystone.common.password_hashing")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with warnings.catch_warnings():
        filters = list(LOG.filters)
        yield
        LOG.filters[:] = filters


def test_only_what_is_about_no_password_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    needless_imports.leave_out_warnings()
    needless_imports.leave_out_warnings()
    assert len(LOG.filters) == 1
    with caplog.at_level("WARNING"):
        LOG.warning("Truncating password to algorithm specific maximum length %d characters.", 72)
        LOG.warning("Truncating user password to %d characters.", 72)
    assert caplog.messages == ["Truncating user password to 72 characters."]


def test_other_warnings_of_the_same_kind_stay() -> None:
    needless_imports.leave_out_warnings()
    warnings.warn("\nEventlet is deprecated. It is currently", Warning, stacklevel=1)
    with pytest.warns(Warning, match="Something else"):
        warnings.warn("Something else is deprecated.", Warning, stacklevel=1)


@pytest.mark.skipif(
    importlib.util.find_spec("keystone") is None, reason="Keystone is not installed"
)
def test_a_process_of_ours_that_imports_keystone_says_nothing_of_eventlet(tmp_path: Path) -> None:
    config = tmp_path / "keystone.conf"
    config.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/keystone.sqlite\n")
    main = "from keyfront.gateway.serve.keystone_manage import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, str(config)], input=json.dumps([["--version"], {}]) + "\n",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("keyfront-manage: "), done.stdout

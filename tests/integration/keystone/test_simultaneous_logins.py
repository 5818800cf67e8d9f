"""First logins of one user of an identity provider that cross: stock Keystone refuses one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.keystones import keystone_state

pytest.importorskip("keystone")

SCENARIO = Path(__file__).parent / "scenarios" / "simultaneous_logins.py"
PASSWORD = "scenario-secret"
CONFIG = """\
[DEFAULT]
use_stderr = false
log_file = {folder}/keystone.log
[database]
connection = sqlite:///{state}/keystone.sqlite
[fernet_tokens]
key_repository = {state}/fernet-keys
[fernet_receipts]
key_repository = {state}/fernet-keys
[credential]
key_repository = {state}/credential-keys
[identity]
password_hash_rounds = 4
[federation]
default_authorization_ttl = 60
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keystone")
    state = keystone_state(folder / "state")
    path = folder / "keystone.conf"
    path.write_text(CONFIG.format(folder=folder, state=state))
    manage = "from keystone.cmd.manage import main; main()"
    _run("-c", manage, "--config-file", path, "bootstrap", "--bootstrap-password", PASSWORD)
    return path


def _run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _play(which: str, scenario: str, config: Path) -> Any:
    return json.loads(_run(SCENARIO, which, scenario, config).splitlines()[-1])


def test_stock_keystone_refuses_one_of_them(config: Path) -> None:
    """The day that it does not, the repair is no longer needed."""
    assert _play("stock", "same", config) == [
        {"first": 409, "second": 201, "works": False, "others": 200}
    ]


def test_both_are_let_in(config: Path) -> None:
    """And where the late one comes with another group, he was not new: what he lost ends."""
    same, another = _play("ours", "same,another", config)
    assert same == {"first": 201, "second": 201, "works": True, "others": 200}
    assert another == {"first": 201, "second": 201, "works": True, "others": 404}

"""Scenarios that are played against Keystone's own application and ours, each in a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.imported import Imported
from support.keystones import keystone_state
from support.served import wait_for

SCENARIOS = Path(__file__).parent / "scenarios"
# keystone-manage, whether or not its script lies beside this interpreter.
MANAGE = "from keystone.cmd.manage import main; main()"
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
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[federation]
default_authorization_ttl = 60
"""

Play = Callable[[str, str, str], Any]


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs Python with some arguments, and returns what it prints."""

    def run(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def imported() -> Iterator[Imported]:
    """Runs Python in forks of a process that has imported Keystone, and none of keyfront."""
    with Imported("keystone.cmd.manage", "keystone.server.wsgi") as python:
        yield python


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory, imported: Imported) -> Play:
    """Plays a part of a scenario against ``stock`` or ``ours``, on a Keystone made once.

    Called with the script's name, with which, and with the part; returns what it prints as JSON.
    """
    folder = tmp_path_factory.mktemp("keystone")
    state = keystone_state(folder / "state")
    config = folder / "keystone.conf"
    config.write_text(CONFIG.format(folder=folder, state=state))

    def run(*arguments: object) -> str:
        done = imported.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # an administrator with the scenarios' password
    run("-c", MANAGE, "--config-file", config, "bootstrap", "--bootstrap-password", PASSWORD)
    # Tokens of the second in which a password was changed are refused.
    changed = int(time.time())
    wait_for(lambda: int(time.time()) > changed, "a second has passed")

    def play(script: str, which: str, part: str) -> Any:
        told = run(SCENARIOS / f"{script}.py", which, part, config)
        return json.loads(told.splitlines()[-1])

    return play

"""Two holes between requests of one process: open in Keystone's application, closed in ours.

Each scenario runs against both, and the stock application has to show the hole: the day it does
not, the repair is no longer needed, or the scenario no longer shows anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.keystones import keystone_state

pytest.importorskip("keystone")

SCENARIO = Path(__file__).parent / "scenarios" / "keystone_holes.py"
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
"""


@pytest.fixture(scope="session")
def keystone_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration file of a bootstrapped Keystone on SQLite, made once per session."""
    folder = tmp_path_factory.mktemp("keystone")
    state = keystone_state(folder / "state")
    config = folder / "keystone.conf"
    config.write_text(CONFIG.format(folder=folder, state=state))
    # an administrator with the scenarios' password
    _run("-c", MANAGE, "--config-file", config, "bootstrap", "--bootstrap-password", PASSWORD)
    return config


def _run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _play(which: str, scenario: str, config: Path) -> Any:
    return json.loads(_run(SCENARIO, which, scenario, config).splitlines()[-1])


@pytest.mark.parametrize(("which", "once"), [("stock", 200), ("ours", 401)])
def test_revoked_token_shown_to_another_worker(
    keystone_config: Path, which: str, once: int
) -> None:
    """Stock Keystone accepts it once more; ours never does."""
    assert _play(which, "revoked", keystone_config) == {
        "validated": 200,
        "revoked": 204,
        "once": once,
        "twice": 401,
    }


@pytest.mark.parametrize(("which", "crossed"), [("stock", 200), ("ours", 403)])
def test_token_of_a_request_in_another_thread(
    keystone_config: Path, which: str, crossed: int
) -> None:
    """Stock Keystone serves a member as the administrator; ours refuses as it should."""
    assert _play(which, "crossed", keystone_config) == {
        "alone": 403,
        "admin": 200,
        "crossed": crossed,
    }


@pytest.mark.parametrize("which", ["stock", "ours"])
def test_service_token_never_replaces_the_users(keystone_config: Path, which: str) -> None:
    """Both tokens pass the same attribute, the user's last, so no repair is needed."""
    assert _play(which, "service_token", keystone_config) == {
        "member_by_admin": 403,
        "admin_by_member": 200,
        "bad_by_admin": 401,
        "none_by_admin": 401,
        "held": ["scenario-member", "admin"],
    }


def test_importing_the_factory_does_not_import_keystone() -> None:
    """Every entrypoint imports the module, also those that serve something else."""
    heavy = ("keystone", "oslo_context", "flask")
    module = "keyfront.gateway.keystone.application"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert _run("-c", code).strip() == "[]"

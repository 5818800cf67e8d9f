"""How many statements logins, re-scopes and first validations execute: a bound for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from keyfront.benchmarks.compare import keystone_cpu
from keyfront.gateway.serve.state import State
from support.imported import Imported
from support.keystones import keystone_state

pytest.importorskip("keystone")

EXTRA = """
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[keyfront_token_cache]
path = {path}
# Nothing ends by the clock on a busy machine.
ttl = 3600
reuse = {reuse}
"""


class Counts(NamedTuple):
    """For one request, on average."""

    statements: float
    writes: float


def counted(folder: Path, imported: Imported, *, reuse: bool = True) -> dict[str, Counts]:
    """Each phase of ``keystone_cpu`` in a process that serves this Keystone."""
    extra = EXTRA.format(path=folder / "shared", reuse=reuse)
    state = keystone_state(folder / "state", extra=extra)
    database = state / "keystone.sqlite"
    arguments = [
        *("--child", "keyfront", "--database", str(database)),
        *("--url", f"sqlite:///{database}?plugin=keyfront&keyfront_path={folder / 'shared'}"),
        *("--rounds", "1", "--users", "2", "--services", "1"),
    ]
    password = (state / "admin-password").read_text().strip()
    environment = {
        **os.environ, **State(state).environment(), "KEYFRONT_PASSWORD": password,
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = imported.run("-m", keystone_cpu.__name__, *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    phases = json.loads(done.stdout.splitlines()[-1])
    assert phases.keys() == set(keystone_cpu.PHASES)
    return {
        phase: Counts(every / requests, writes / requests)
        for phase, [(requests, _, every, writes)] in phases.items()
    }


def test_little_is_read(tmp_path: Path, imported: Imported) -> None:
    found = counted(tmp_path, imported)
    # of a user of whom nothing is known, and who is written about: what is his own
    assert found[keystone_cpu.DAY].statements <= 4, found
    assert found[keystone_cpu.DAY].writes == 1, found
    # and of one who was here just now: his row, which has the hash of his password
    assert found[keystone_cpu.LOGIN] == (1, 0), found
    # whose groups and grants are known on each project since he logged in to one
    for phase in (
        keystone_cpu.RESCOPE, keystone_cpu.FIRST, keystone_cpu.REPEATED, keystone_cpu.ASKED,
        keystone_cpu.ELSEWHERE, keystone_cpu.FRESH,
    ):  # fmt: skip
        assert found[phase] == (0, 0), found
    # of one who was never here: he himself, his grants and his groups
    assert found[keystone_cpu.NEW].statements <= 3, found
    assert found[keystone_cpu.NEW].writes == 0, found


def test_without_reuse_keystone_does_all_of_its_work(
    tmp_path: Path, imported: Imported
) -> None:
    """Else what the other test bounds would be bounded by something else."""
    found = counted(tmp_path, imported, reuse=False)
    for phase in (keystone_cpu.DAY, keystone_cpu.LOGIN, keystone_cpu.RESCOPE, keystone_cpu.FIRST):
        assert found[phase].statements > 30, found

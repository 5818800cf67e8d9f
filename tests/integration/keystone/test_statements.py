"""How many statements logins, re-scopes and first validations execute: a bound for each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from keyfront.benchmarks.compare import keystone_cpu
from keyfront.benchmarks.lineups.keystone import Keystone
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


def counted(folder: Path, *, reuse: bool = True) -> dict[str, Counts]:
    """Each phase of ``keystone_cpu`` in a process that serves this Keystone."""
    shared = folder / "shared"
    extra = EXTRA.format(path=shared, reuse=reuse)
    keystone = Keystone(keystone_state(folder / "state", extra=extra))
    with keystone_cpu.measured(keystone, folder / "keyfront", "", shared=shared) as measured:
        phases = measured.run(rounds=1, users=2, services=1)
    assert phases.keys() == set(keystone_cpu.PHASES)
    return {
        phase: Counts(every / requests, writes / requests)
        for phase, [(requests, _, every, writes)] in phases.items()
    }


def test_little_is_read(tmp_path: Path) -> None:
    found = counted(tmp_path)
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


def test_without_reuse_keystone_does_all_of_its_work(tmp_path: Path) -> None:
    """Else what the other test bounds would be bounded by something else."""
    found = counted(tmp_path, reuse=False)
    for phase in (keystone_cpu.DAY, keystone_cpu.LOGIN, keystone_cpu.RESCOPE, keystone_cpu.FIRST):
        assert found[phase].statements > 30, found

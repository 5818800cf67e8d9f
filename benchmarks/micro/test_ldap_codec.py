"""LDAP messages, written and read, without a server: ours against ldap3's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("ldap3")

from keyfront.benchmarks.micro import ldap_codec

CASES = {case.name: case for case in ldap_codec.cases()}
# Times that ours is as fast, at least; far from what is measured, as ldap3's way may change.
TIMES = {"write a bind": 5, "write a search": 5, "read 1 entry, done": 3}


@pytest.mark.parametrize("name", CASES)
def test_codec_against_ldap3(paired: Any, name: str) -> None:
    """The same message, written or read, at least three times as fast."""
    paired(CASES[name].ours, CASES[name].theirs, limit=1 / TIMES.get(name, 3))


@pytest.mark.slow
def test_search_in_instructions(instructions: Any) -> None:
    instructions(ldap_codec.write_search)


@pytest.mark.slow
def test_entry_in_instructions(instructions: Any) -> None:
    instructions(partial(ldap_codec.read, ldap_codec.answer(1)))

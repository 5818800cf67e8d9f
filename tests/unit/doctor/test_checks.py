"""Each check fires on a machine that has its fault, and not on one that has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyfront.gateway.doctor import diagnosis  # noqa: F401  (fills the registry)
from keyfront.gateway.doctor.registry import CHECKS, LEVELS
from support.doctor.cases import _DOMAIN, CASES, LDAP_GALERA


def test_each_check_has_its_cases() -> None:
    assert sorted(CASES) == sorted(CHECKS)
    assert len(CHECKS) >= 70


@pytest.mark.parametrize("code", CASES)
def test_fires(code: str, tmp_path: Path) -> None:
    fires, _ = CASES[code]
    made = fires.diagnosis(tmp_path, code)
    assert [x.check.code for x in made.results], (made.unread, made.skipped)
    for result in made.results:
        assert result.level in LEVELS
        assert result.finding.what
        assert result.finding.lines or code in ("F01", "K14")


@pytest.mark.parametrize("code", CASES)
def test_does_not_fire(code: str, tmp_path: Path) -> None:
    _, quiet = CASES[code]
    made = quiet.diagnosis(tmp_path, code)
    assert [x.finding.what for x in made.results] == []
    # It was looked at, and not left out for want of something.
    assert [x.code for x in made.right] == [code], made.unread


@pytest.mark.parametrize("code", CHECKS)
def test_is_told_whole(code: str) -> None:
    check = CHECKS[code]
    assert check.harm.endswith(".")
    assert check.explanation.rstrip(")").endswith(".")
    assert check.source
    assert len(check.holds) < 100
    assert not re.search(r"[.:]$", check.holds)


def test_servers_found_by_dns_are_told_passwords_in_the_clear_too(tmp_path: Path) -> None:
    plain = LDAP_GALERA.swap(_DOMAIN, "ldaps://ldap1", "ldap+srv://ldap1")
    (result,) = plain.diagnosis(tmp_path / "plain", "L01").results
    assert "ldap+srv://ldap1" in result.finding.what
    assert "ldaps+srv://ldap1" in result.finding.lines[1]
    secure = LDAP_GALERA.swap(_DOMAIN, "ldaps://ldap1", "ldaps+srv://ldap1")
    assert not secure.diagnosis(tmp_path / "secure", "L01").results

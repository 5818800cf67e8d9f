"""Each check fires on a machine that has its fault, and not on one that has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyfront.gateway.doctor import diagnosis  # noqa: F401  (fills the registry)
from keyfront.gateway.doctor.registry import CHECKS, LEVELS
from support.doctor.cases import _DOMAIN, _PUPPET, CASES, LDAP_GALERA, RDO_PUPPET


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


def test_advice_on_a_daemon_fits_into_a_report(tmp_path: Path) -> None:
    """Apache reads a line that ends with a backslash on."""
    long = RDO_PUPPET.swap(_PUPPET, "request-timeout=45", "request-timeout=300 socket-timeout=60")
    (result,) = long.diagnosis(tmp_path, "X03").results
    assert result.finding.what.endswith("that Apache waits for the daemon (socket-timeout)")
    _, *lines = result.finding.lines
    assert len(lines) > 1
    assert all(len(line) <= 67 for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    words = "".join(line.removesuffix("\\") for line in lines).split()
    assert words[0] == "WSGIDaemonProcess"
    assert {"request-timeout=300", "socket-timeout=310"} <= set(words)


def test_what_is_rendered_is_installed_by_one_command(tmp_path: Path) -> None:
    fires, _ = CASES["R02"]
    (result,) = fires.diagnosis(tmp_path, "R02").results
    place = "/etc/sysctl.d/60-keyfront.conf"
    rendered = f"/etc/keyfront/system{place}"
    assert result.finding.what == f"{place} is another than was rendered"
    assert [str(one) for one in result.finding.where] == [rendered]
    assert result.finding.lines == (f"install -D -m 644 {rendered} \\", f"    {place}")


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

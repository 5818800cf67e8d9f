"""The tests of the LDAP backend that Keystone ships, on a real slapd: with our driver as with its.

They are written for a fake of python-ldap, in memory. Here they are sent to a slapd instead, by
the stock driver and by ours put in its place, each in a process and with a slapd of its own. Some
cannot pass there, with any driver; what counts is that each test ends the same way for both.

This file is both the test and, run as a program, what it runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import ldap
import pytest

# What Keystone's tests need and Keystone does not.
REQUIRED = ("testtools", "fixtures", "oslotest", "freezegun", "webtest", "lxml")

# Of keystone.tests.unit.test_backend_ldap. Of the first, all tests but those about projects and
# domains, which are in the database; of the others, which inherit the same, those of their own.
CLASSES = (
    "LDAPIdentity",
    "LDAPIdentityEnabledEmulation",
    "LDAPLimitTests",
    "LdapIdentityWithMapping",
    "LdapFilterTests",
    "LDAPMatchingRuleInChainTests",
)
WHOLE = ("LDAPIdentity", "LDAPLimitTests", "LdapFilterTests")

OURS, STOCK = "ours", "stock"


@pytest.mark.slow
def test_keystones_own_tests_end_the_same_way(tmp_path: Path) -> None:
    from support.directory import directory

    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"Keystone's tests need {name}: pip install 'keyfront[test]'")
    outcomes: dict[str, dict[str, list[str]]] = {}
    processes = {}
    folders = {which: tmp_path / which for which in (OURS, STOCK)}
    for folder in folders.values():
        (folder / "tmp").mkdir(parents=True)
    with directory(folders[OURS], users=0) as one, directory(folders[STOCK], users=0) as other:
        for which, server in ((OURS, one), (STOCK, other)):
            folder = folders[which]
            with (folder / "output").open("wb") as output:
                processes[which] = subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, which, server.url, folder / "json"],
                    cwd=folder,
                    env={**os.environ, "KEYSTONE_TEST_TEMP_DIR": str(folder / "tmp")},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        try:
            for which, process in processes.items():
                status = process.wait(1200)
                assert status == 0, (folders[which] / "output").read_text()[-5000:]
                outcomes[which] = json.loads((folders[which] / "json").read_text())
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
    differing = {
        name: (outcomes[STOCK].get(name), outcomes[OURS].get(name))
        for name in outcomes[STOCK].keys() | outcomes[OURS].keys()
        if (outcomes[STOCK].get(name) or [""])[0] != (outcomes[OURS].get(name) or [""])[0]
    }
    assert not differing, json.dumps(differing, indent=1)
    counts = Counter(outcome for outcome, *_ in outcomes[OURS].values())
    assert counts["passed"] >= 150, counts
    assert counts["failed"] <= 0.12 * counts["passed"], counts


def main(which: str, url: str, results: str) -> None:
    """Run the tests on the slapd at ``url`` and write how each ended."""
    from keystone.identity.backends import ldap as package
    from keystone.tests import unit
    from keystone.tests.unit import test_backend_ldap
    from keystone.tests.unit.ksfixtures import ldapdb

    from support.directory import Directory

    if which == OURS:
        from keyfront.middleware.ldap.keystone import driver as keystone_driver

        # where the entry point "ldap" and the tests themselves look
        for name in ("Identity", "UserApi", "GroupApi"):
            setattr(package, name, getattr(keystone_driver, name))

    def clear(fixture: Any) -> None:
        wipe(url, Directory)

    ldapdb.LDAPDatabase.clear = clear
    settings = {
        "url": url,
        "user": Directory.root_dn,
        "password": Directory.root_password,
        "suffix": Directory.suffix,
        "group_tree_dn": f"ou=UserGroups,{Directory.suffix}",
        "user_objectclass": "kfUser",
        "group_objectclass": "kfGroup",
    }

    suite = unittest.TestSuite()
    for name in CLASSES:
        base = getattr(test_backend_ldap, name)
        bases = (base,) if issubclass(base, unit.TestCase) else (base, unit.TestCase)

        def config_overrides(self: Any, base: type = base) -> None:
            base.config_overrides(self)  # type: ignore[attr-defined]
            self.config_fixture.config(group="ldap", **settings)

        kind = type(name, bases, {"config_overrides": config_overrides})
        elsewhere = set(dir(test_backend_ldap.ResourceTests))
        for test in unittest.TestLoader().getTestCaseNames(kind):
            if test in vars(base) or (name in WHOLE and test not in elsewhere):
                suite.addTest(kind(test))
    result = Outcomes()
    suite.run(result)
    Path(results).write_text(json.dumps(result.outcomes, indent=1))


def wipe(url: str, where: Any) -> None:
    """Leave two empty folders in the directory, where Keystone expects users and groups."""
    connection = ldap.initialize(url)
    connection.simple_bind_s(where.root_dn, where.root_password)
    found = connection.search_s(where.suffix, ldap.SCOPE_SUBTREE, attrlist=["1.1"])
    for dn in sorted((dn for dn, _ in found), key=len, reverse=True):
        if re.search(r"ou=User(s|Groups),", dn, re.IGNORECASE):
            connection.delete_s(dn)
    for name in (b"Users", b"UserGroups"):
        folder = [("objectClass", [b"organizationalUnit"]), ("ou", [name])]
        connection.add_s(f"ou={name.decode()},{where.suffix}", folder)
    connection.unbind_s()


class Outcomes(unittest.TestResult):
    """How each test ended, with the last line of why."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, list[str]] = {}

    def _note(self, test: Any, outcome: str, why: str = "") -> None:
        self.outcomes[f"{type(test).__name__}.{test._testMethodName}"] = [outcome, why[-600:]]

    def addSuccess(self, test: Any, details: Any = None) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: Any = None, details: Any = None) -> None:
        self._note(test, "skipped")

    def addFailure(self, test: Any, err: Any = None, details: Any = None) -> None:
        self._note(test, "failed", self._why(err, details))

    addError = addFailure

    def addExpectedFailure(self, test: Any, err: Any = None, details: Any = None) -> None:
        self._note(test, "skipped")

    def addUnexpectedSuccess(self, test: Any, details: Any = None) -> None:
        self._note(test, "passed")

    @staticmethod
    def _why(err: Any, details: Any) -> str:
        if err:
            return repr(err[1])
        return str(details["traceback"].as_text()) if "traceback" in (details or {}) else ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(*sys.argv[1:])

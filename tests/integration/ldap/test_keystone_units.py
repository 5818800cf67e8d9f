"""The tests of the LDAP backend that Keystone ships, on a real slapd: with our driver as with its.

They are written for a fake of python-ldap, in memory. Here they are sent to a slapd instead, by
the stock driver and by ours put in its place. Some cannot pass there, with any driver; what counts
is that each test ends the same way for both.

How they end with the stock driver of one Keystone is the same each time, and takes a minute: it is
in ``stock_outcomes.json`` for the Keystone that it names. With another one, or with

    KEYFRONT_STOCK_OUTCOMES=write pytest tests/integration/ldap/test_keystone_units.py

which writes that file anew, both run.

This file is both the test and, run as a program, what it runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
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

#: How each ends with the driver that comes with the Keystone named in it.
RECORD = Path(__file__).with_name("stock_outcomes.json")
WRITES = os.environ.get("KEYFRONT_STOCK_OUTCOMES") == "write"


@pytest.mark.slow
def test_keystones_own_tests_end_the_same_way(tmp_path: Path) -> None:
    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"Keystone's tests need {name}: pip install 'keyfront[test]'")
    stock = recorded()
    outcomes = run(tmp_path, (OURS,) if stock else (OURS, STOCK))
    ended = {name: outcome for name, (outcome, *_) in outcomes[OURS].items()}
    if stock is None:
        stock = {name: outcome for name, (outcome, *_) in outcomes[STOCK].items()}
        if WRITES:
            found = {"keystone": version("keystone"), "outcomes": dict(sorted(stock.items()))}
            RECORD.write_text(json.dumps(found, indent=1) + "\n")
    differing = {
        name: (stock.get(name), *(outcomes[which].get(name) for which in outcomes))
        for name in stock.keys() | ended.keys()
        if stock.get(name) != ended.get(name)
    }
    assert not differing, json.dumps(differing, indent=1)
    counts = Counter(ended.values())
    assert counts["passed"] >= 150, counts
    assert counts["failed"] <= 0.12 * counts["passed"], counts


def recorded() -> dict[str, str] | None:
    """Return how the tests of this Keystone end with its own driver, if that is written down."""
    if WRITES or not RECORD.exists():
        return None
    found = json.loads(RECORD.read_text())
    return found["outcomes"] if found["keystone"] == version("keystone") else None


def run(folder: Path, drivers: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return outcome and reason by test for each driver, each run on a slapd of its own."""
    from support.directory import directory

    processes = {}
    with contextlib.ExitStack() as stack:
        for which in drivers:
            place = folder / which
            (place / "tmp").mkdir(parents=True)
            server = stack.enter_context(directory(place, users=0))
            output = stack.enter_context((place / "output").open("wb"))
            processes[which] = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, which, server.url, place / "json"],
                cwd=place,
                env={**os.environ, "KEYSTONE_TEST_TEMP_DIR": str(place / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(processes[which].wait)
            stack.callback(processes[which].kill)
        for which, process in processes.items():
            assert process.wait(1200) == 0, (folder / which / "output").read_text()[-5000:]
    return {which: json.loads((folder / which / "json").read_text()) for which in drivers}


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
    copy_schema()
    # Three times in each test the entry points of all that is installed, for a third of the time.
    test_backend_ldap.entry_points = functools.cache(test_backend_ldap.entry_points)
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
            # The other one has Keystone look for the service of each entry that a test makes.
            self.config_fixture.config(notification_format="basic")

        kind = type(name, bases, {"config_overrides": config_overrides})
        elsewhere = set(dir(test_backend_ldap.ResourceTests))
        for test in unittest.TestLoader().getTestCaseNames(kind):
            if test in vars(base) or (name in WHOLE and test not in elsewhere):
                suite.addTest(kind(test))
    result = Outcomes()
    # What was imported stays, and a test's garbage is little: a tenth of the time to look through.
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    suite.run(result)
    Path(results).write_text(json.dumps(result.outcomes, indent=1))


def copy_schema() -> None:
    """Have each test's database, which is in memory, be a copy of one that has the tables.

    It would have each table made and dropped again, for a seventh of the time.
    """
    import fixtures
    from keystone.common import sql
    from keystone.tests.unit.ksfixtures.database import Database

    empty = sqlite3.connect(":memory:", check_same_thread=False)

    def set_up(self: Any) -> None:
        fixtures.Fixture.setUp(self)
        with sql.session_for_write() as session:
            self.engine = session.get_bind()
        self.addCleanup(sql.cleanup)
        with contextlib.closing(self.engine.raw_connection()) as connection:
            if not empty.execute("SELECT 1 FROM sqlite_master").fetchone():
                sql.ModelBase.metadata.create_all(bind=self.engine)
                connection.driver_connection.backup(empty)
            empty.backup(connection.driver_connection)

    Database.setUp = set_up


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

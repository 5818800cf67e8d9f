"""Placement's own API tests, with tokens of a real Keystone in the place of pretended ones.

Placement's tests take ``x-auth-token: admin`` for an administrator. Here that is a token of the
administrator of ``KEYSTONE_URL``, and our authtoken stands before placement. Files that pretend
other users, roles or scopes by headers, which authtoken takes away, are left out. Prints how many
passed, were skipped and failed.
"""

from __future__ import annotations

import os
import re
import sys
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keystoneauth1 import session
from keystoneauth1.identity import v3

from keyfront.middleware.tokens.authtoken.install import install

install()

from gabbi import driver  # noqa: E402
from placement import auth  # noqa: E402
from placement.tests.functional import test_api  # noqa: E402
from placement.tests.functional.fixtures import gabbits as fixtures  # noqa: E402

OWNER = {
    "username": "admin", "password": os.environ["KEYSTONE_PASSWORD"], "project_name": "admin",
    "user_domain_id": "default", "project_domain_id": "default",
}  # fmt: skip
PRETENDED = re.compile(r"x-auth-token: (.*)")
NAME = "PLACEMENT_TEST_TOKEN"


def usable(text: str) -> bool:
    """Whether all tokens of a file are the administrator's, and no header tells who he is."""
    pretends = re.search(r"(?i)^\s*(x-roles|x-tenant-id|openstack-system-scope):", text, re.M)
    return not pretends and set(PRETENDED.findall(text)) <= {"admin", "admin:admin"}


def with_keystone() -> None:
    """Have placement's fixture set up authtoken where it would trust whom it is told."""
    start, factory = fixtures.APIFixture.start_fixture, auth.filter_factory
    section = {"auth_type": "password", "auth_url": os.environ["KEYSTONE_URL"], **OWNER}

    def start_fixture(self: Any) -> None:
        start(self)
        fixtures.CONF.set_override("auth_strategy", "keystone", "api")

    fixtures.APIFixture.start_fixture = start_fixture
    auth.filter_factory = lambda common, **local: factory({**common, **section}, **local)


def main() -> int:
    """Run them; returns 1 if one failed."""
    with_keystone()
    login = v3.Password(auth_url=os.environ["KEYSTONE_URL"], **OWNER)
    os.environ[NAME] = str(session.Session(login).get_token())
    own = Path(test_api.__file__).with_name(test_api.TESTS_DIR)
    with TemporaryDirectory() as folder:
        for path in sorted(own.glob("*.yaml")):
            text = path.read_text(encoding="utf-8")
            if usable(text):
                text = PRETENDED.sub(f"x-auth-token: $ENVIRON['{NAME}']", text)
                Path(folder, path.name).write_text(text, encoding="utf-8")
        suite = driver.build_tests(
            folder, unittest.TestLoader(), host=None, test_loader_name="placement",
            intercept=fixtures.setup_app, fixture_module=fixtures,
        )  # fmt: skip
        result = unittest.TextTestRunner(sys.stdout, verbosity=0).run(suite)
    failed = len(result.failures) + len(result.errors)
    skipped = len(result.skipped)
    print(f"Passed: {result.testsRun - failed - skipped}\nSkipped: {skipped}\nFailed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

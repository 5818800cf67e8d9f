"""What is imported with the package, which each process that serves Keystone imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keyfront.middleware import ldap

# In a process of its own: here all of it is imported.
LIGHT = """
import sys
import keyfront.middleware.ldap.keystone
loaded = {name for name in sys.modules if name.startswith("keyfront.middleware.ldap.")}
assert loaded == {"keyfront.middleware.ldap.keystone"}, loaded
from keyfront.middleware.ldap import LDAPPool
assert LDAPPool is sys.modules["keyfront.middleware.ldap.directory"].LDAPPool
"""


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LDAPPool", "Identity", "ServerReport", "TLS"])
def test_each_name_is_found(name: str) -> None:
    found = getattr(ldap, name)
    assert (found.__name__, vars(ldap)[name]) == (name, found)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match=r"ldap' has no attribute 'Pool'"):
        ldap.Pool  # type: ignore[attr-defined]  # noqa: B018

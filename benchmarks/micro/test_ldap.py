"""Connections to a directory: checked out, bound, searched with; on a slapd of this machine.

Most of a BIND's and a search's time is slapd's, in ours and in theirs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("ldap")
pytest.importorskip("ldap3")
pytest.importorskip("ldappool")

import ldappool

from keyfront.benchmarks.compare import ldap_operations
from keyfront.benchmarks.servers.processes import HOST
from keyfront.benchmarks.servers.slapd import (
    PEOPLE,
    SERVICE_DN,
    SERVICE_PASSWORD,
    Slapd,
    user_dn,
    user_name,
    user_password,
)
from keyfront.middleware.ldap import LDAPPool

# Seconds until slapd has written what it answered into its log.
PATIENCE = 60


@pytest.fixture(scope="module")
def pool(directory: Slapd) -> Iterator[LDAPPool]:
    with LDAPPool(
        f"ldap://{HOST}:{directory.plain_port}",
        bind_dn=SERVICE_DN,
        bind_password=SERVICE_PASSWORD,
        user_dn=f"uid={{}},{PEOPLE}",
        min_size=2,
        auth_min_size=2,
        max_lifetime=86_400,
    ) as made:
        made.wait()
        yield made


@pytest.fixture(scope="module")
def theirs(directory: Slapd) -> Any:
    """ldappool as stock Keystone uses it."""
    return ldappool.ConnectionManager(
        f"ldap://{HOST}:{directory.plain_port}",
        SERVICE_DN,
        SERVICE_PASSWORD,
        size=10,
        max_lifetime=86_400,
    )


def test_checkout_against_ldappool(paired: Any, pool: LDAPPool, theirs: Any) -> None:
    """To borrow a connection and give it back, which nobody else wants."""

    def ours() -> None:
        with pool.connection():
            pass

    def ldappools() -> None:
        with theirs.connection(SERVICE_DN, SERVICE_PASSWORD):
            pass

    paired(ours, ldappools, limit=1.5)


def test_login_against_ldappool(paired: Any, pool: LDAPPool, theirs: Any) -> None:
    """A login of another user each time, which is a BIND in both, in C with ldappool."""
    numbers = itertools.cycle(range(ldap_operations.USERS))

    def ours() -> None:
        number = next(numbers)
        pool.authenticate(user_name(number), user_password(number))

    def ldappools() -> None:
        number = next(numbers)
        with theirs.connection(user_dn(number), user_password(number)):
            pass

    paired(ours, ldappools, limit=2)


@pytest.fixture(scope="module")
def steps(directory: Slapd) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        ours = ldap_operations.keyfront(directory, stack)
        theirs = ldap_operations.python_ldap(directory, stack)
        yield {name: (ours[name], theirs[name]) for name in ours}


@pytest.mark.parametrize("name", [ldap_operations.BIND, ldap_operations.SEARCH])
def test_operation_against_python_ldap(paired: Any, steps: dict[str, Any], name: str) -> None:
    """One operation on one connection: ours is in Python, theirs in C."""
    ours, theirs = steps[name]
    paired(lambda: ours(1), lambda: theirs(1), limit=2)


def test_counts(counted: Any, pool: LDAPPool, directory: Slapd) -> None:
    """A login is one BIND; a connection is opened by neither logins nor searches in turn."""
    pool.authenticate(user_name(0), user_password(0))
    pool.search(PEOPLE, filter=f"(uid={user_name(0)})")
    mark = directory.mark()
    for number in range(10):
        pool.authenticate(user_name(number), user_password(number))
        pool.search(PEOPLE, filter=f"(uid={user_name(number)})")
    found = _logged(directory, mark, 10)
    counted(connects=found.connects, binds=found.binds, searches=found.searches)


def test_counts_of_a_checkout(counted: Any, pool: LDAPPool) -> None:
    def step() -> None:
        with pool.connection():
            pass

    counted(syscalls_of_10_checkouts=counted.syscalls(step))


def _logged(directory: Slapd, mark: int, searches: int) -> Any:
    """Return what slapd logged, once the last search is in it."""
    deadline = time.monotonic() + PATIENCE
    while (found := directory.counts(mark)).searches < searches:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found

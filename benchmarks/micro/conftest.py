"""Fixtures that several files of the micro suite share."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keyfront.errors import MissingPartError

if TYPE_CHECKING:
    from keyfront.benchmarks.micro.subjects import Cache, Step
    from keyfront.benchmarks.servers.slapd import Slapd


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out with --quick")


@pytest.fixture(scope="session")
def cache() -> Iterator[Cache]:
    """Fill a token cache; nothing that is measured may change it."""
    pytest.importorskip("sqlalchemy")
    from keyfront.benchmarks.compare import token_hit
    from keyfront.benchmarks.compare.token_stand_in import Answers
    from keyfront.benchmarks.micro.subjects import ENTRIES, Cache

    with token_hit.shared_folder() as folder:
        keystone = Answers()
        made = token_hit.new_filter(keystone, folder, 2 * ENTRIES)
        token_hit.fill(made, ENTRIES)
        yield Cache(made, keystone, itertools.count(ENTRIES))


@pytest.fixture(scope="session")
def stock() -> Iterator[Step]:
    """A validation by stock Keystone."""
    pytest.importorskip("keystone")
    from keyfront.benchmarks.micro import subjects

    with subjects.stock_validation() as step:
        yield step


@pytest.fixture(scope="session")
def directory() -> Iterator[Slapd]:
    """A slapd with a few users, on loopback."""
    pytest.importorskip("trustme")
    from keyfront.benchmarks.servers.slapd import slapd

    with tempfile.TemporaryDirectory(prefix="bench-micro-") as folder:
        try:
            with slapd(Path(folder), 20) as server:
                yield server
        except MissingPartError as error:
            pytest.skip(error.message)

"""The authtoken filter of services: a hit against keystonemiddleware's own with its caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keystonemiddleware.auth_token")

from keyfront.benchmarks.compare.token_hit import call
from keyfront.benchmarks.micro.authtoken import Keystone, pipeline, request
from keyfront.benchmarks.micro.world import Step
from keyfront.benchmarks.worlds.memcached import memcached_at
from keyfront.errors import MissingPartError

# keystonemiddleware warns that its cache in the process is deprecated.
QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
def test_hit_against_keystonemiddleware(paired: Any) -> None:
    """A known token, with 15 services in its catalog, in a tenth of the time."""
    paired(hit(15), hit(15, ours=False), limit=1 / 10)


@QUIET
def test_hit_against_memcached(paired: Any, tmp_path: Path) -> None:
    """The same where keystonemiddleware has a memcached at a socket of this machine."""
    try:
        with memcached_at(tmp_path / "socket") as address:
            paired(hit(15), hit(15, ours=False, memcached=address), limit=1 / 10)
    except MissingPartError as error:
        pytest.skip(error.message)


@QUIET
def test_hit_whatever_the_catalog(paired: Any) -> None:
    """With sixty services in the catalog as with one."""
    paired(hit(60), hit(1), limit=1.25)


def hit(services: int, *, ours: bool = True, memcached: str = "") -> Step:
    """Return a request with a token that the filter knows."""
    keystone = Keystone(services)
    filtered = pipeline(keystone, ours=ours, memcached=memcached)
    call(filtered, request(1))
    asked = keystone.calls

    def step() -> None:
        call(filtered, request(1))

    step()
    assert keystone.calls == asked
    return step

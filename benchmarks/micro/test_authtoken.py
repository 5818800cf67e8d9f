"""The authtoken filter of services: a hit against keystonemiddleware's own with its cache."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keystonemiddleware.auth_token")

from keyfront.benchmarks.compare.authtoken_hit import KEYFRONT, LOCAL, Keystone, pipeline, request
from keyfront.benchmarks.compare.token_hit import call
from keyfront.benchmarks.micro.world import Step

# keystonemiddleware warns that its cache in the process is deprecated.
QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
def test_hit_against_keystonemiddleware(paired: Any) -> None:
    """A known token, with 15 services in its catalog, in a tenth of the time."""
    paired(hit(KEYFRONT, 15), hit(LOCAL, 15), limit=1 / 10)


@QUIET
def test_hit_whatever_the_catalog(paired: Any) -> None:
    """With sixty services in the catalog as with one."""
    paired(hit(KEYFRONT, 60), hit(KEYFRONT, 1), limit=1.25)


def hit(case: str, services: int) -> Step:
    """Return a request with a token that the filter knows."""
    keystone = Keystone(services)
    filtered = pipeline(case, keystone, "")
    call(filtered, request(1))
    asked = keystone.calls

    def step() -> None:
        call(filtered, request(1))

    step()
    assert keystone.calls == asked
    return step

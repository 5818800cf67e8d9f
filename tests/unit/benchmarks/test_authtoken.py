"""authtoken_hit measures hits, of all that its goals name."""

from __future__ import annotations

from typing import Any

import pytest

from keyfront.benchmarks.compare import authtoken_hit
from keyfront.benchmarks.compare.goals import AUTHTOKEN_GOALS
from keyfront.errors import ServerError


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authtoken_hit, "TOKENS", 3)
    # without a memcached the client finds nothing there
    monkeypatch.setattr(authtoken_hit, "CASES", (authtoken_hit.KEYFRONT, authtoken_hit.LOCAL))


def test_every_case_is_measured_in_every_round() -> None:
    samples = authtoken_hit.measure(2, 5, "")
    assert {len(found) for found in samples.values()} == {2}
    assert len(samples) == 2 * len(authtoken_hit.SERVICES)
    names = {x for goal in AUTHTOKEN_GOALS for x in (goal.first, goal.second)}
    assert names - samples.keys() == {authtoken_hit.label(authtoken_hit.MEMCACHED, 15)}
    samples[authtoken_hit.label(authtoken_hit.MEMCACHED, 15)] = [1e9, 1e9]
    assert authtoken_hit.judge(samples).keys() == set(AUTHTOKEN_GOALS)


def test_requests_that_are_no_hits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    make = authtoken_hit.pipeline

    def forgetful(*arguments: Any) -> Any:
        made = make(*arguments)
        made.validations.cache_time = made._token_cache._cache_time = -1
        return made

    monkeypatch.setattr(authtoken_hit, "CASES", (authtoken_hit.KEYFRONT,))
    monkeypatch.setattr(authtoken_hit, "pipeline", forgetful)
    with pytest.raises(ServerError, match="no hits"):
        authtoken_hit.measure(1, 5, "")

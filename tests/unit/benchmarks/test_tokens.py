"""What is measured is what is meant: hits that are hits, and a Keystone without keyfront."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import token_hit
from keyfront.benchmarks.compare.token_servers import (
    BARE,
    CANDIDATES,
    STOCK,
    Answer,
    Servers,
    comparable,
)
from keyfront.benchmarks.lineups import uwsgi
from keyfront.errors import ServerError


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_hit, "REPEATS", 2)


def test_hits_are_timed() -> None:
    times = token_hit.measure(3, calls=10, touches=2)
    assert 0 < times.low <= times.median <= times.high


def test_requests_that_are_no_hits_are_an_error() -> None:
    with pytest.raises(ServerError, match="20 of 20 requests were no hits"):
        token_hit.measure(3, calls=10, ttl=0.0)


def test_an_entry_weighs_about_what_the_memory_counts() -> None:
    asked, found, counted, shared = token_hit.weigh(200).values()
    # Who asked has also remembered which slots its tags have, up to a bound.
    assert 1000 < shared < min(asked, found)
    assert 0.8 < counted / found < 1.25


def test_stock_candidates_have_nothing_of_keyfront(tmp_path: Path) -> None:
    for name, candidate in CANDIDATES.items():
        servers = Servers(tmp_path, tmp_path, threads=1, extra="", url=None)
        text = candidate.configuration(
            servers.keystone, shared=Path("/dev/shm/x"), memcached="127.0.0.1:11211"
        )
        ini = uwsgi.packaged(servers.keystone.state, 5000, tmp_path, **candidate.served())
        if candidate.module is None:
            assert "path = /dev/shm/x\n" in text
            assert "connection" not in text
            assert "module = keyfront.gateway.uwsgi:application\n" in ini
        else:
            assert candidate.module in (STOCK, BARE)
            assert "keyfront" not in text.replace(str(tmp_path), "")
            assert f"connection = sqlite:///{tmp_path}/state/keystone.sqlite\n" in text
            assert f"\nmodule = {candidate.module}\n" in ini
        assert ("http11-socket = " in ini) == candidate.kept == name.endswith(" kept")
        assert ("Connection: close" in ini) != candidate.kept
        assert ("memcache_servers" in text) == ("memcached" in name)


def test_answers_differ_by_more_than_order_and_identifier() -> None:
    def answer(body: str, **headers: str) -> object:
        return comparable(Answer("200 OK", list(headers.items()), body))

    one = answer('{"roles": [1, 2]}', **{"x-openstack-request-id": "req-1"})
    assert one == answer('{"roles": [2, 1]}', **{"X-Openstack-Request-Id": "req-2"})
    assert one != answer('{"roles": [2, 1, 3]}')
    assert one != answer('{"roles": [1, 2]}', Vary="X-Auth-Token")

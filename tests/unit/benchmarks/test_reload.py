"""What the benchmark of reloads counts, and what it lets pass."""

from __future__ import annotations

import pytest

from keyfront.benchmarks.compare import reload
from keyfront.benchmarks.compare.goals import MET, MISSED, UNCLEAR
from keyfront.benchmarks.compare.reload import Answer, Reload, noticed
from keyfront.benchmarks.lineups.lineup import TOPOLOGIES
from keyfront.errors import ServerError


def test_who_was_under_way_counts() -> None:
    answers = [
        Answer(0.0, 0.5, 500),  # over before
        Answer(0.9, 0.2, 200),  # begun before, answered meanwhile
        *(Answer(1.0 + number / 100, 0.1, 200) for number in range(97)),
        Answer(1.5, 9.0, 200),  # waited for all of it
        Answer(1.6, 0.0, 0),  # refused
        Answer(2.0, 0.1, 503),  # after
    ]
    found = noticed(answers, 1.0, 2.0)
    assert found == Reload(100, 0.2, 9.0, 1, 1.0)
    assert noticed(answers, 1.0, 2.01).failed == 2


def test_a_pause_for_one_in_a_hundred_is_in_the_p99() -> None:
    answers = [Answer(1.0, 0.1, 200)] * 98 + [Answer(1.0, 5.0, 200)] * 2
    assert noticed(answers, 0.0, 2.0).p99 == 5.0
    with pytest.raises(ServerError, match="no request was under way"):
        noticed(answers, 7.0, 8.0)


def test_the_goal() -> None:
    good, slow = Reload(100, 1.0, 3.0, 0), Reload(100, 1.01, 3.0, 0)
    refused = Reload(100, 0.1, 0.1, 1)
    assert reload.judge([good, good]) == MET
    assert reload.judge([good, slow]) == reload.judge([refused, good]) == UNCLEAR
    assert reload.judge([slow, refused]) == MISSED


def test_a_row_has_medians_and_all_failures() -> None:
    rest = Reload(10, 0.02, 0.03, 0)
    found = [Reload(100, 1.0, 2.0, 3, 4.0), Reload(50, 3.0, 4.0, 1, 6.0)]
    row = reload.row("uwsgi:stock:plain", rest, found)
    assert row == ["uwsgi:stock:plain", "5.0", "0.02", "2.00", "3.00", "4 of 150"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_topology_is_stock_and_ours(topology: str) -> None:
    stock, ours = reload.lineups(topology)
    assert (stock.tuning, stock.cached) == ("stock", False)
    assert ours.tuning in ("tuned", "serve") and ours.cached
    ours.check()


def test_an_unknown_topology_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert reload.main(["--only", "iis"]) == 2
    told = capsys.readouterr().err
    assert "--only = iis: must be in the name of a case: uwsgi; gevent; nginx+uwsgi;" in told

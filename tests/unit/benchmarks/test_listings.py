"""The table of what is read of an unchanged cloud."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import listings
from keyfront.benchmarks.compare.listings import NAMES, PATHS
from keyfront.benchmarks.compare.token_servers import CANDIDATES
from keyfront.benchmarks.lineups.keystone import Keystone
from keyfront.middleware.tokens import options


def test_ratios_are_medians_round_by_round() -> None:
    rates = {
        NAMES[0]: [10.0, 20.0, 10.0], NAMES[1]: [20.0, 20.0, 30.0], NAMES[2]: [100.0, 200.0, 50.0],
    }
    samples = {name: [dict.fromkeys(PATHS, x) for x in own] for name, own in rates.items()}
    head, _, stock, plain, routes = listings.table(samples).split("\n")
    assert head == "| | /v3/projects | /v3/users/{id} | /v3/role_assignments |"
    assert stock == "| Keystone + memcached |" + " 10 (1 times) |" * 3
    assert plain == "| Keystone + keyfront |" + " 20 (2 times) |" * 3
    assert routes == "| the same, without `routes` |" + " 100 (10 times) |" * 3


def test_the_candidates_differ_in_the_routes_alone(tmp_path: Path) -> None:
    texts = []
    for name in NAMES[1:]:
        config = configparser.ConfigParser()
        config.read_string(
            CANDIDATES[name].configuration(Keystone(tmp_path), shared=tmp_path, memcached="")
        )
        texts.append(dict(config["keyfront_token_cache"]))
    assert "routes" not in texts[0]
    assert texts[1].pop("routes") == ""
    (routes,) = (x for x in options.TOKEN_CACHE if x.name == "routes")
    assert routes.default == list(PATHS)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("arguments", [["--database-delay", "1"], ["--users", "0"]])
def test_options_that_make_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        listings.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err

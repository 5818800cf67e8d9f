"""service_rates compares what it says, and believes no cache that goes on with a revoked token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.compare import service_application, service_rates
from keyfront.benchmarks.compare.goals import MET, MISSED, SERVICE_GOALS
from keyfront.benchmarks.compare.loaded import Sample, Samples
from keyfront.benchmarks.compare.service_rates import CANDIDATES, CASES, RATIOS, Services
from keyfront.benchmarks.load.measured import CLOSED, Load
from keyfront.errors import ServerError

RATES = {"bare": 1000, "lease": 950, "lease, no catalog": 960, "strict": 400, "memcached": 80}


def sample(rate: int) -> Sample:
    return Sample(
        Load(
            generator="wrk", loop=CLOSED, good=rate, seconds=1.0, latencies=Counter({250: rate}),
            generator_cpu=0.5,
        ),
        0.1,
    )  # fmt: skip


@pytest.fixture
def samples() -> Samples:
    return {name: [sample(RATES.get(name, 900))] * 2 for name in CASES}


def test_every_goal_is_of_cases_that_are_measured_and_shown() -> None:
    assert {case.candidate for case in CASES.values()} == CANDIDATES.keys()
    for goal in SERVICE_GOALS:
        assert (goal.first, goal.second) in RATIOS
    assert {name for pair in RATIOS for name in pair} <= CASES.keys()


def test_every_goal_is_judged_by_its_figure(samples: Samples) -> None:
    verdicts = service_rates.report(samples, "").verdicts
    assert [verdict for _, verdict in verdicts] == [MET] * len(SERVICE_GOALS)
    # as fast as ever, by other means
    samples["lease"] = [one._replace(server_cpu=0.2) for one in samples["lease"]]
    verdicts = service_rates.report(samples, "").verdicts
    assert [text for text, verdict in verdicts if verdict == MISSED] == [
        "CPU of lease / memcached <= 0.1: 0.17 (0.17 to 0.17)"
    ]


def test_the_tables_are_whole(samples: Samples) -> None:
    report = service_rates.report(samples, "the command")
    text = "\n".join(map(results.markdown, report.tables))
    assert "keyfront, Redis, lease | 950 | 0.250 | 0.250 | 0 | 105 | 0.50 | 12 |" in text
    assert "| 0.95 (0.95 to 0.95) | 1.05 (1.05 to 1.05) | rate >= 0.9 |" in text
    assert len(report.samples) == 2 * len(CASES)


def test_the_service_says_whose_token_it_was_given() -> None:
    told: list[Any] = []
    environ = {"HTTP_X_USER_ID": "somebody"}
    body = service_application.service(environ, lambda *what: told.append(what))
    assert list(body) == [b"somebody"]
    assert told == [("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "8")])]


@pytest.mark.parametrize("late", [name for name, x in CANDIDATES.items() if x.refuses is not None])
def test_who_goes_on_with_a_revoked_token_is_an_error(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services(tmp_path, tmp_path)
    services._server = SimpleNamespace(url="")  # type: ignore[assignment]
    asked: list[str] = []

    def answers(name: str, token: str) -> list[tuple[int, str]]:
        asked.append(name)
        return [(401, ""), (200 if name == late else 401, "")]

    monkeypatch.setattr(services, "_answers", answers)
    monkeypatch.setattr(service_rates, "ask", lambda *_, **__: {})
    monkeypatch.setattr(service_rates.time, "sleep", lambda _: None)
    with pytest.raises(ServerError, match=f"{late} answers 200 to a revoked token"):
        services.revoke()
    assert asked[0] == "strict"

"""keyfront status and keyfront ldap stats: all parts on one page, for people and programs."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest

from keyfront.cli import ldap, metrics, status
from keyfront.cli.parser import Parser
from keyfront.errors import CoordinatorError, KeyfrontError
from keyfront.gateway.heartbeat import counters as heartbeat
from keyfront.gateway.heartbeat.counters import ProcessSums
from keyfront.gateway.node.counters import NodeCounts, count_requests
from keyfront.gateway.node.health import PARTS
from keyfront.middleware.ldap import LDAPPool, pool_counters

DOCUMENT = Path(__file__).parents[3] / "docs/operate.md"


@pytest.fixture
def counts(tmp_path: Path) -> NodeCounts:
    made = NodeCounts()
    made.share(tmp_path / "node")
    made.begin()
    return made


@pytest.fixture(autouse=True)
def no_token_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of this machine is looked at."""
    monkeypatch.setattr("keyfront.cli.tokens.caches", list)


def _run(command: object, folder: Path, *words: str) -> tuple[int, str]:
    parser = Parser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    out = io.StringIO()
    action = [words[0]] if words[:1] == ("stats",) else []
    rest = [*words[len(action) :], "--node", str(folder / "node")]
    if not action:
        rest += ["--heartbeat", str(folder / "beats")]
    given = parser.parse_args([*action, *rest])
    return command.run(given, out, io.StringIO()), out.getvalue()  # type: ignore[attr-defined]


def _publish(folder: Path) -> None:
    """As a process with a pool does, whose server is down."""
    pool = LDAPPool("ldap://127.0.0.1:1", min_size=0, open=False)
    pool_counters.Publisher(folder / "node").publish([pool])


def test_a_node_in_service(tmp_path: Path, counts: NodeCounts) -> None:
    (tmp_path / "beats").mkdir(mode=0o700)
    count_requests(lambda *_: [], counts)({}, lambda *_: None)
    counts.queued(0.003)
    counts.found(PARTS.index("database"), True)
    code, text = _run(status, tmp_path)
    assert code == 0
    assert "in service" in text
    assert "4.096 ms  99 of 100 waited less" in text
    assert "token cache: not in use" in text
    assert "heartbeat: not in use" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    code, text = _run(status, tmp_path, "--json")
    found = json.loads(text)
    assert found["ok"]
    assert found["requests"]["requests"] == 1
    assert found["requests"]["queue_seconds_p99"] == pytest.approx(0.004096)
    assert found["requests"]["parts"]["database"]["ok"]
    assert found["tokens"] is found["ldap"] is found["heartbeat"] is None


def test_nothing_was_in_the_future(
    tmp_path: Path, counts: NodeCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may have been set back since."""
    (tmp_path / "beats").mkdir(mode=0o700)
    counts.found(PARTS.index("database"), True)
    then = time.time() - 90
    monkeypatch.setattr(time, "time", lambda: then)
    found = json.loads(_run(status, tmp_path, "--json")[1])["requests"]
    assert found["parts"]["database"]["seconds_ago"] == found["loaded_seconds_ago"] == 0


def test_what_was_known_is_a_hit() -> None:
    counts = {"hits": 2, "node_hits": 1, "known": 3, "misses": 2}
    others = ("changes", "changes_under_way", "changes_recovered", "answers_bytes")
    part = {**counts, **dict.fromkeys(others, 0), "answers_bytes_limit": 1}
    assert next(status._of_tokens(part)) == ("hit ratio", "75.00 %", "of 8 that may be cached")


def test_all_parts(tmp_path: Path, counts: NodeCounts) -> None:
    _publish(tmp_path)
    beats = heartbeat.Counts(tmp_path / "beats")
    try:
        code, text = _run(status, tmp_path)
    finally:
        beats.close()
    assert code == 0
    assert "search pool" in text
    assert "in 1 processes" in text


@pytest.mark.parametrize(
    ("fault", "said"),
    [("part", "in service, NOT OK"), ("workers", "NOT SERVING"), ("damaged", "NOT READ")],
)
def test_a_node_that_is_not_ok(
    tmp_path: Path, counts: NodeCounts, fault: str, said: str
) -> None:
    (tmp_path / "beats").mkdir(mode=0o700)
    if fault == "part":
        counts.found(PARTS.index("keys"), False)
    elif fault == "workers":
        counts.row[2] = 0
    else:
        (tmp_path / "node/requests").write_bytes(b"junk")
    code, text = _run(status, tmp_path)
    assert code == 1
    assert text.startswith(f"{tmp_path}/node: {said}\n")
    assert ("AWAY" in text) == (fault == "part")
    assert ("4 bytes instead of" in text) == (fault == "damaged")


def test_ldap_stats(tmp_path: Path, counts: NodeCounts) -> None:
    with pytest.raises(CoordinatorError, match="no process with an LDAP pool"):
        _run(ldap, tmp_path, "stats")
    _publish(tmp_path)
    code, text = _run(ldap, tmp_path, "stats")
    assert code == 0
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    found = json.loads(_run(ldap, tmp_path, "stats", "--json")[1])
    assert set(found) == {"processes", *pool_counters.PRESENT, *pool_counters.SUMS}
    assert (found["processes"], found["servers_up"], found["search_max_size"]) == (1, 1, 10)


def test_all_that_a_pool_counts_is_published() -> None:
    pool = LDAPPool("ldap://127.0.0.1:1", min_size=0, open=False)
    assert {*pool_counters.PRESENT, *pool_counters.SUMS} == pool.get_stats().keys()


def test_metrics_are_printed(tmp_path: Path, counts: NodeCounts) -> None:
    (tmp_path / "beats").mkdir(mode=0o700)
    code, text = _run(metrics, tmp_path)
    assert code == 0
    assert "keyfront_workers 1.0" in text


@pytest.mark.parametrize("address", ("nowhere", "unix:metrics", "unix:/" + "x" * 120))
def test_metrics_have_an_address(tmp_path: Path, counts: NodeCounts, address: str) -> None:
    (tmp_path / "beats").mkdir(mode=0o700)
    with pytest.raises(KeyfrontError, match="--listen"):
        _run(metrics, tmp_path, "--listen", address)


def test_the_document_has_the_names(tmp_path: Path, counts: NodeCounts) -> None:
    counts.queued(0.003)
    counts.found(PARTS.index("database"), True)
    beats = heartbeat.Counts(tmp_path / "beats")
    try:
        found = json.loads(_run(status, tmp_path, "--json")[1])
    finally:
        beats.close()
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (?:`(\w+)`|\(top\)) \| (.+) \|$", text, re.MULTILINE))
    assert {"", *found} - {"node", "draining", "ok"} <= rows.keys()
    told = {part: set(re.findall(r"`(\w+)`", words)) for part, words in rows.items()}
    assert {"node", "draining", "ok"} == told[""]
    requests = {*found["requests"], *found["requests"]["workers"][0]}
    requests |= set(found["requests"]["parts"]["database"])
    assert told["requests"] - {"queue"} == requests
    assert told["queue"] == set(found["queue"])
    assert told["heartbeat"] == set(found["heartbeat"])


def test_the_heartbeat_of_ended_processes_is_kept_for_who_asks_again(
    tmp_path: Path, counts: NodeCounts
) -> None:
    parser = Parser()
    status.add_arguments(parser)
    folders = ("--node", str(tmp_path / "node"), "--heartbeat", str(tmp_path / "beats"))
    given = parser.parse_args(folders)
    beats = heartbeat.Counts(tmp_path / "beats")
    beats.row[heartbeat.BEATS] = 7
    kept = ProcessSums()
    times: dict[str, float] = {}
    assert status.status(given, kept, times)["heartbeat"]["beats"] == 7
    assert times.keys() == {"requests", "queue", "tokens", "ldap", "heartbeat"}
    beats.close()
    found = status.status(given, kept)["heartbeat"]
    assert (found["beats"], found["processes"]) == (7, 0)
    assert status.status(given)["heartbeat"] is None


def test_the_state_folder_names_node_and_cache(tmp_path: Path) -> None:
    made = NodeCounts()
    (tmp_path / "run").mkdir()
    made.share(tmp_path / "run/node")
    made.begin()
    parser = Parser()
    status.add_arguments(parser)
    found = status.status(parser.parse_args(["--state", str(tmp_path)]))
    assert found["node"] == str(tmp_path / "run/node")
    assert found["tokens"]["error"].startswith(f"--state = {tmp_path}: must be the state folder")
    named = ["--state", str(tmp_path), "--node", str(tmp_path / "other")]
    assert status.status(parser.parse_args(named))["node"] == str(tmp_path / "other")

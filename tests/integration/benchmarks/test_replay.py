"""A log replayed to a real Keystone, by its URL and by a line-up that is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.lineups import lineup
from keyfront.benchmarks.lineups.keystone import Keystone
from keyfront.benchmarks.load import synthetic
from keyfront.benchmarks.servers import processes
from keyfront.cli.main import main


@pytest.fixture
def keystone(keystone_state: tuple[Path, int]) -> Keystone:
    return Keystone(keystone_state[0])


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["bench", "replay", *map(str, arguments)])
    out, error = capsys.readouterr()
    return status, out, error


def test_replay_to_two_targets_at_once(
    keystone: Keystone, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    password = keystone.state.password_file.read_text().strip()
    for name, value in {"USERNAME": "admin", "PASSWORD": password, "PROJECT_NAME": "admin"}.items():
        monkeypatch.setenv(f"OS_{name}", value)
    entries = list(synthetic.entries(seconds=8, rate=4))
    log = tmp_path / "access.log"
    log.write_text("".join(f"{synthetic.as_json(entry)}\n" for entry in entries))
    wanted = lineup.Lineup("uwsgi", "tuned", True)
    with lineup.served(wanted, keystone, processes.split()) as found:
        status, out, error = bench(
            capsys, log, "--speed", "4", "--results", tmp_path,
            "--target", f"first={found.url}", "--target", f"second={found.url}",
        )  # fmt: skip
    assert status == 0, (out, error)
    result = results.read(tmp_path / "replay-log.json")
    left_out = sum(entry.method == "DELETE" for entry in entries)
    assert result.conditions["left_out"] == left_out
    for sample in result.samples:
        assert sample["failures"] == {}, sample
        assert sample["good"] == len(entries) - left_out
        assert sample["as_logged_share"] == 1
    assert [sample["target"] for sample in result.samples] == ["first", "second"]
    assert {line.name for line in result.timelines} >= {"first: answered", "second: lost"}
    written = json.dumps(results.asdict(result)) + out + error
    assert password not in written
    assert "gAAAA" not in written


def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OS_PASSWORD", raising=False)
    log = tmp_path / "log"
    log.write_text(synthetic.combined(next(synthetic.entries(seconds=9, rate=5))))
    url = "http://127.0.0.1:1"
    for arguments, says in (
        ([log, "--target", "ftp://h:1"], "--target = ftp://h:1: must be http://HOST:PORT"),
        ([log, "--target", "http://h"], "--target = http://h: must be http://HOST:PORT"),
        ([log, "--target", f"{url}/v3"], "without a path"),
        ([log, "--target", "iis"], "--target = iis: must be a URL, or one of uwsgi"),
        ([log, "--target", url, "--target", url], "must be named once"),
        ([log, "--target", url, "--speed", "0"], "--speed = 0: must be a number, 0.01 to 1000"),
        ([log, "--target", url], "name its state folder with --state"),
        ([log, "--target", url, "--state", tmp_path / "none"], "none: has no Keystone"),
        ([tmp_path / "none", "--target", url], "cannot be read: No such file"),
    ):
        status, _, error = bench(capsys, *arguments, "--results", tmp_path / "results")
        assert status == 2
        assert says in error
        assert error.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_nobody_at_a_target_is_one_line(
    keystone: Keystone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state", keystone.state.path)
    status, _, error = bench(
        capsys, "--quick", "--target", "http://127.0.0.1:1", *state, "--results", tmp_path
    )
    assert status == 2
    assert "POST http://127.0.0.1:1/v3/auth/tokens: no answer" in error
    assert not list(tmp_path.iterdir())

"""``keyfront tokens``: which cache it finds, what it prints, what it empties."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.cli import main as cli
from keyfront.cli import tokens as token_commands
from keyfront.gateway.heartbeat.counters import Counts
from keyfront.gateway.node.counters import NodeCounts
from keyfront.middleware.tokens import node_cache
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.counters import BYPASSED_FOR, CAUSES, ENDED, HITS, MISSES
from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.node_cache import NodeCache

DIGEST = "[0-9a-f]" * 16
SHARED, INNER = f"/dev/shm/keyfront-{DIGEST}", f"/run/keyfront/tokens-{DIGEST}"


def _globs(folders: dict[str, list[str]]) -> Callable[[str], list[str]]:
    """Finds these folders by their pattern, and nothing else."""
    return lambda pattern: folders.get(pattern, [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with 3 hits and 1 miss, which this process uses."""
    monkeypatch.setattr(SharedMemory, "_settle", lambda self, table: None)
    folder = tmp_path / "shared"
    coordinator = SharedMemory(folder)
    node = NodeCache(folder, size=1 << 20, flight_timeout=1)
    node.start(coordinator.secret)
    node.counters.row[HITS] += 3
    node.counters.row[MISSES] += 1
    node.counters.row[ENDED + CAUSES.index("grants")] += 2
    node.counters.row[ENDED + CAUSES.index("rows")] += 3
    for place, count in enumerate((2, 0, 5)):
        node.counters.row[BYPASSED_FOR + place] += count
    yield folder


def test_stats_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokens", "stats", "--path", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = out.partition("\n\n")[0].splitlines()[1:]
    lines = {row[:12].strip(): row[12:].split()[0] for row in rows}
    assert lines["hits"] == "3"
    assert lines["misses"] == "1"
    assert lines["hit ratio"] == "75.00"
    assert lines["processes"] == "1"
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["rows", "3"], ["grants", "2"]]
    assert [line.split()[:2] for line in out.splitlines()[-6:-4]] == [
        ["coordinator", "5"], ["request", "2"],
    ]  # fmt: skip


def test_stats_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokens", "stats", "--json", "--path", str(folder)]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["hits"], counts["misses"], counts["changes"]) == (3, 1, 0)
    assert (counts["ended_grants"], counts["ended_users"]) == (2, 0)


def test_stats_of_a_cache_that_nobody_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    secret = SharedMemory(folder).secret
    NodeCache(folder, size=1 << 20, flight_timeout=1).start(secret)
    assert cli.main(["tokens", "stats", "--path", str(folder)]) == 0
    assert "hit ratio" not in capsys.readouterr().out


def test_flush(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = SharedMemory(folder)
    epoch, everything = coordinator.now(), slots(["all"], coordinator.slot_count)
    assert cli.main(["tokens", "flush", "--path", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert not coordinator.fresh(epoch, everything)
    assert coordinator.statistics()["flushes"] == 1


@pytest.mark.parametrize("action", ["stats", "flush"])
def test_no_cache_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert cli.main(["tokens", action, "--path", str(tmp_path / "none")]) == 2
    assert "there is no token cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("place", [SHARED, INNER, f"/tmp/keyfront-{DIGEST}", f"{SHARED}-[0-9]*"])
def test_the_only_cache_is_found(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    found: list[str] = []
    folders = {place: found}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", _globs(folders))
    assert cli.main(["tokens", "stats"]) == 2
    assert "is the service running?" in capsys.readouterr().err
    found.append(str(folder))
    assert cli.main(["tokens", "stats"]) == 0
    capsys.readouterr()
    another = tmp_path / "another"
    coordinator = SharedMemory(another)
    found.append(str(another))
    assert cli.main(["tokens", "stats"]) == 0
    said = capsys.readouterr()
    assert f"{another} is left out: no process uses it" in said.err
    assert f"token cache in {folder}\n" in said.out
    node = NodeCache(another, size=1 << 20, flight_timeout=1)
    node.start(coordinator.secret)
    assert cli.main(["tokens", "stats"]) == 2
    error = capsys.readouterr().err
    assert f"several token caches in use on this machine: {another}, {folder}" in error
    assert "; say which with --path, or" in error
    assert "must be" not in error
    node_folder = tmp_path / "node"
    NodeCounts().share(node_folder)
    assert cli.main(["status", "--node", str(node_folder)]) == 1
    # which has no --path
    assert "; say which with --tokens, or" in capsys.readouterr().out


_LEFT = """
import sys
from pathlib import Path
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.node_cache import NodeCache
folder = Path(sys.argv[1])
coordinator = SharedMemory(folder)
NodeCache(folder, size=1 << 20, flight_timeout=1).start(coordinator.secret)
"""


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A cache whose process has ended."""
    left = tmp_path / "dead"
    subprocess.run([sys.executable, "-c", _LEFT, str(left)], check=True)
    return left


@pytest.fixture
def all_caches(
    folder: Path, dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A cache in use and one that is dead are all there are on this machine."""
    found = [str(folder), str(dead)]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", _globs({SHARED: found}))
    return found


@pytest.mark.parametrize("action", ["stats", "flush", "prune", "check"])
def test_a_folder_that_is_no_state_folder(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tokens", action, "--state", str(tmp_path)]) == 2
    said = f"keyfront: --state = {tmp_path}: must be the state folder of a keyfront serve\n"
    assert capsys.readouterr().err == said


def test_dead_caches_are_said_to_be_dead(
    all_caches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dead = all_caches
    assert cli.main(["tokens", "stats"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"token cache in {folder}\n")
    assert said.err == (
        f"keyfront: {dead} is left out: no process uses it any more; remove it with keyfront "
        "tokens prune\n"
    )
    assert cli.main(["tokens", "stats", "--path", dead]) == 0
    assert "no process uses it any more" in capsys.readouterr().out.splitlines()[0]
    all_caches[0] = dead
    assert cli.main(["tokens", "stats"]) == 2
    error = capsys.readouterr().err
    assert "no process uses them any more" in error and "start the service" in error


def test_of_many_dead_caches_some_are_named(
    all_caches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dead = all_caches
    for number in range(4):
        all_caches.append(str(shutil.copytree(dead, tmp_path / f"dead{number}")))
    assert cli.main(["tokens", "stats"]) == 0
    three = f"{dead}, {tmp_path}/dead0, {tmp_path}/dead1 and 2 more"
    assert capsys.readouterr().err == (
        f"keyfront: {three} are left out: no process uses them any more; remove them with "
        "keyfront tokens prune\n"
    )
    all_caches.remove(folder)
    assert cli.main(["tokens", "stats"]) == 2
    assert capsys.readouterr().err.startswith(f"keyfront: {three}: no process uses them any more")


def test_prune_removes_the_dead_ones(
    all_caches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dead = map(Path, all_caches)
    (dead / "thesis.tex").write_text("years")
    assert cli.main(["tokens", "prune"]) == 0
    assert f"removed {dead}: " in capsys.readouterr().out
    assert [path.name for path in dead.iterdir()] == ["thesis.tex"], "not the cache's"
    assert len(list(folder.iterdir())) > 4
    assert cli.main(["tokens", "prune"]) == 0
    assert "no cache is dead; 1 in use" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["in use", "no cache"])
def test_prune_keeps_what_is_named_by_mistake(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    where = folder if what == "in use" else tmp_path
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["tokens", "prune", "--path", str(where)]) == 2
    error = capsys.readouterr().err
    assert ("is in use" if what == "in use" else "there is no token cache") in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_number_that_is_another_process_by_now(dead: Path) -> None:
    counters = dead / "counters"
    words = memoryview(bytearray(counters.read_bytes())).cast("Q")
    words[16] = os.getpid()
    counters.write_bytes(words)
    assert node_cache.users(dead) == []


def test_a_folder_of_another_part_is_no_cache(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = Counts(tmp_path / "keyfront-heartbeat-1000")
    (tmp_path / "file").touch()
    found = [str(folder), str(tmp_path / "keyfront-heartbeat-1000"), str(tmp_path / "file")]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", _globs({SHARED: found}))
    assert cli.main(["tokens", "stats"]) == 0
    assert str(folder) in capsys.readouterr().out
    counts.close()


def test_a_cache_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    found = [str(tmp_path / name) for name in ("keyfront-1234", "keyfront-heartbeat-1000")]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(token_commands.glob, "glob", _globs({SHARED: found}))
    monkeypatch.setattr(token_commands.Path, "stat", refused)
    assert token_commands.cache(path=None, config_file=None).folder == tmp_path / "keyfront-1234"


def test_the_cache_of_keyfront_serve_is_found(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("oslo_db")
    monkeypatch.setattr(token_commands.glob, "glob", lambda pattern: [])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = tmp_path / "keyfront" / "keystone.conf"
    config.parent.mkdir(mode=0o700)
    config.write_text(f"[keyfront_token_cache]\npath = {folder}\n")
    assert cli.main(["tokens", "stats"]) == 0
    assert str(folder) in capsys.readouterr().out


def test_a_keystone_conf_says_which(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("oslo_db")
    config = tmp_path / "keystone.conf"
    config.write_text(f"[keyfront_token_cache]\npath = {folder}\n")
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 0
    assert str(folder) in capsys.readouterr().out
    config.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/db\n")
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 2
    assert "/keyfront-" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no section\n", "[keyfront_token_cache]\nttl = soon\n"])
def test_a_keystone_conf_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    pytest.importorskip("oslo_db")
    config = tmp_path / "keystone.conf"
    if text is not None:
        config.write_text(text)
    assert cli.main(["tokens", "stats", "--config-file", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("keyfront: ")
    assert error.count("\n") == 1


def test_nodes_are_shown_a_token_when_the_other_process_has_loaded_keystone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they know of it would end by itself in that time, and hide who does not hear."""
    loaded = tmp_path / "loaded"
    program = f"""
open({str(loaded)!r}, "w").close()
print("ready", flush=True)
print("told", "/", input())
"""
    monkeypatch.setattr(token_commands, "_ANOTHER_PROCESS", program)
    asked = []

    def issued(url: str, who: object) -> tuple[str, str]:
        assert loaded.exists()
        return "token", "audit"

    def validated(node: token_commands.Node, token: str) -> int:
        asked.append(token)
        return 200

    monkeypatch.setattr(token_commands, "_issued", issued)
    monkeypatch.setattr(token_commands, "_validated", validated)
    coordinator = SharedMemory(folder)
    monkeypatch.setattr(coordinator, "fresh_now", lambda epoch, slots: False)
    node = token_commands.Node("http://node", "caller")
    found = token_commands._another_process(tmp_path / "conf", coordinator, [node], {}, 0.0)
    assert found.fault == "a token that it revoked is still good at http://node"
    assert set(asked) == {"token"}
    coordinator.close()

"""Files whose change ends answers, told once for a node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from oslo_config import cfg

from keyfront.middleware.tokens.watched_files import WatchedFiles, of_keystone


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "0").write_text("staged")
    return folder


def _replace(keys: Path) -> None:
    new = keys.with_name("new")
    new.write_text("staged")
    os.utime(new, ns=(0, (keys / "0").stat().st_mtime_ns))
    new.replace(keys / "0")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda keys: (keys / "1").touch(),
    "a file less": lambda keys: (keys / "0").unlink(),
    "another name": lambda keys: (keys / "0").rename(keys / "2"),
    "another file of the same time and size": _replace,
    "another time": lambda keys: os.utime(keys / "0", ns=(0, 5)),
    "another size": lambda keys: (keys / "0").write_text("more than it was"),
    "no folder": lambda keys: keys.rename(keys.with_name("gone")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_a_change(tmp_path: Path, keys: Path, change: str) -> None:
    """Of which one worker tells; to the others it is known then."""
    one, other = (WatchedFiles([keys, tmp_path / "policy"], tmp_path) for _ in range(2))
    assert one.changed() is None
    assert other.changed() is None
    CHANGES[change](keys)
    seen = one.changed()
    assert seen is not None
    assert other.changed() == one.changed() == seen  # as long as nobody has told of it
    one.note(seen)
    assert one.changed() is None
    assert other.changed() is None


def test_two_keystones_of_one_database_do_not_tell_each_other_for_ever(tmp_path: Path) -> None:
    one, other = (WatchedFiles([tmp_path / name], tmp_path) for name in ("public", "admin"))
    for _ in range(3):
        assert one.changed() is None
        assert other.changed() is None


def test_a_file_that_comes_later(tmp_path: Path) -> None:
    files = WatchedFiles([tmp_path / "policy"], tmp_path)
    assert files.changed() is None
    (tmp_path / "policy").touch()
    assert files.changed() is not None


def test_what_is_watched_of_a_keystone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there, and each place where oslo.config would find it if it came."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    conf = cfg.ConfigOpts()
    conf.register_opts(
        [cfg.StrOpt("policy_file", default="policy.yaml"), cfg.MultiStrOpt("policy_dirs")],
        "oslo_policy",
    )
    conf.register_opt(cfg.StrOpt("key_repository", default="/keys"), "fernet_tokens")
    file, folder = tmp_path / "etc" / "keystone.conf", tmp_path / "more"
    file.parent.mkdir()
    folder.mkdir()
    file.write_text("[oslo_policy]\npolicy_dirs = policy.d\n")
    conf(["--config-file", str(file), "--config-dir", str(folder)], project="keystone")
    watched = of_keystone(conf)
    assert {file, folder, Path("/keys")} <= watched
    places = [folder, file.parent, home / ".keystone", home, Path("/etc/keystone"), Path("/etc")]
    for name in ("policy.yaml", "policy.d"):
        assert {place / name for place in (*places, Path().absolute())} <= watched
        for place in places[:4]:
            place.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
            assert Path(conf.find_file(name)) in watched
            (place / name).unlink()

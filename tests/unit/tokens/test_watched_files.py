"""Files whose change ends answers, told once for a node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_what_is_watched_of_a_keystone(tmp_path: Path) -> None:
    conf = SimpleNamespace(
        config_file=["/etc/keystone/keystone.conf"],
        config_dir=None,
        fernet_tokens=SimpleNamespace(key_repository="/etc/keystone/fernet-keys"),
        oslo_policy=SimpleNamespace(policy_file="policy.yaml", policy_dirs=["policy.d"]),
        identity=SimpleNamespace(domain_config_dir=None),
        find_file=lambda name: f"/etc/keystone/{name}" if name == "policy.yaml" else None,
    )
    assert of_keystone(conf) == {
        Path("/etc/keystone/keystone.conf"),
        Path("/etc/keystone/fernet-keys"),
        Path("/etc/keystone/policy.yaml"),
        Path("policy.d").absolute(),
    }

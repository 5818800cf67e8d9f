"""The state folder: whose it is, what it is refused for, and how it is made and removed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from keyfront.errors import StateError
from keyfront.gateway.serve import state
from keyfront.gateway.serve.state import FORMAT, MARKER, State

ENDPOINT = "http://127.0.0.1:5000/v3"
STRANGER = 12345


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """A state folder that is not there yet, with a keystone-manage that does nothing."""
    monkeypatch.setattr(State, "keystone_manage", lambda self, *arguments, **environment: None)
    return State(tmp_path / "parent" / "keyfront")


def make(folder: State, endpoint: str = ENDPOINT) -> list[str]:
    return list(folder.create(endpoint))


def mark(folder: State, text: str) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / MARKER).write_text(text, encoding="utf-8")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refusal(folder: State, *, remove: bool) -> str:
    """What check() says; with ``remove``, remove() and locked() say the same."""
    with pytest.raises(StateError) as caught:
        folder.check()
    message = str(caught.value)
    assert "\n" not in message
    if remove:
        with pytest.raises(StateError) as caught:
            folder.remove()
        assert str(caught.value) == message
        with pytest.raises(StateError) as caught, folder.locked():
            raise AssertionError("locked")
        assert str(caught.value) == message
        assert not list(folder.path.parent.glob(".*.lock"))
    return message


def test_made_once_and_then_used(folder: State) -> None:
    assert folder.check() is False
    steps = make(folder)
    assert steps[0] == f"state folder {folder.path}"
    assert len(steps) == 4
    assert folder.check() is True
    assert folder.endpoint() == ENDPOINT
    assert json.loads((folder.path / MARKER).read_text())["format"] == FORMAT


def test_modes(folder: State) -> None:
    before = os.umask(0)
    try:
        make(folder)
        assert os.umask(0) == 0  # the caller's, as it was
    finally:
        os.umask(before)
    inside = list(folder.path.rglob("*"))
    assert {mode(path) for path in inside if path.is_dir()} == {0o700}
    # SQLite makes its own file, so the umask of the set-up is what keeps it from others
    assert {(path.name, mode(path)) for path in inside if path.is_file()} == {
        (path.name, 0o600) for path in inside if path.is_file()
    }
    assert (folder.path / "keystone.sqlite") in inside
    assert mode(folder.path) == 0o700


def test_an_empty_folder_is_taken_and_closed_to_others(folder: State) -> None:
    folder.path.mkdir(parents=True, mode=0o755)
    assert folder.check() is False
    make(folder)
    assert mode(folder.path) == 0o700


def test_write_leaves_no_half_file(folder: State, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    folder.write("openrc", "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StateError, match=r"openrc: cannot be written: No space"):
        folder.write("openrc", "new")
    assert folder.openrc.read_text() == "old"
    assert not list(folder.path.glob(".*.new"))


def test_password_is_only_where_it_belongs(folder: State) -> None:
    make(folder)
    password = folder.password_file.read_text().strip()
    assert len(password) >= 24
    holders = {
        path.name
        for path in folder.path.rglob("*")
        if path.is_file() and password in path.read_text(errors="replace")
    }
    assert holders == {"admin-password", "openrc", "clouds.yaml"}


def test_two_folders_have_two_passwords(folder: State) -> None:
    make(folder)
    other = State(folder.path.with_name("other"))
    make(other)
    assert folder.password_file.read_text() != other.password_file.read_text()


def test_dollars_in_the_path_survive_oslo_config(folder: State) -> None:
    odd = State(folder.path.with_name("a$HOME"))
    make(odd)
    text = odd.config.read_text()
    assert f"key_repository = {str(odd.path).replace('$', '$$')}/fernet-keys\n" in text


def test_interrupted_set_up_is_made_again(folder: State) -> None:
    steps = folder.create(ENDPOINT)
    next(steps)
    next(steps)
    steps.close()
    password = folder.password_file.read_text()
    (folder.path / "left over").touch()
    assert folder.check() is False
    make(folder)
    assert folder.check() is True
    assert folder.password_file.read_text() != password
    assert not (folder.path / "left over").exists()


def test_another_users_folder(folder: State, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    if os.geteuid() == 0:
        os.chown(folder.path, STRANGER, STRANGER)
        owner = str(STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        owner = state._user_name(os.getuid())
    message = refusal(folder, remove=True)
    assert message.startswith(f"{folder.path}: belongs to user {owner}; ")
    assert "--state" in message
    assert (folder.path / MARKER).exists()


def test_newer_format(folder: State) -> None:
    mark(folder, json.dumps({"keyfront": "9.8.7", "format": FORMAT + 1, "complete": True}))
    message = refusal(folder, remove=False)
    assert f"keyfront 9.8.7 (format {FORMAT + 1}, this one reads up to {FORMAT})" in message
    assert "--fresh" in message
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "null",
        "{}",
        '{"format": 1}',
        '{"format": "x", "complete": true}',
        "\xff",
    ],
)
def test_damaged_marker(text: str, folder: State) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / MARKER).write_bytes(text.encode("latin-1"))
    message = refusal(folder, remove=False)
    assert message.startswith(f"{folder.path / MARKER}: is damaged; ")
    assert "--fresh" in message
    folder.remove()
    assert not folder.path.exists()


def test_folder_that_is_not_ours(folder: State) -> None:
    folder.path.mkdir(parents=True)
    kept = folder.path / "thesis.tex"
    kept.write_text("years", encoding="utf-8")
    assert "is not empty and was not made by keyfront serve" in refusal(folder, remove=True)
    with pytest.raises(StateError):
        make(folder)
    assert kept.read_text(encoding="utf-8") == "years"
    assert list(folder.path.iterdir()) == [kept]


def test_file_in_its_place(folder: State) -> None:
    folder.path.parent.mkdir()
    folder.path.write_text("years", encoding="utf-8")
    assert "is not a folder" in refusal(folder, remove=True)
    assert folder.path.read_text(encoding="utf-8") == "years"


@pytest.mark.parametrize("there", [True, False], ids=["to a state folder", "to nothing"])
def test_link_in_its_place(there: bool, folder: State) -> None:
    real = State(folder.path.with_name("real"))
    folder.path.parent.mkdir()
    if there:
        make(real)
    folder.path.symlink_to(real.path)
    assert "is not a folder" in refusal(folder, remove=True)
    assert real.check() is there


def test_parent_that_is_a_file(folder: State) -> None:
    folder.path.parent.write_text("years", encoding="utf-8")
    assert "cannot be looked at: Not a directory" in refusal(folder, remove=True)


def test_remove(folder: State) -> None:
    folder.remove()
    make(folder)
    folder.remove()
    assert not folder.path.exists()
    folder.path.mkdir()
    folder.remove()
    assert folder.path.is_dir()


def test_lock_has_one_holder(folder: State) -> None:
    second = State(folder.path)
    with folder.locked():
        with pytest.raises(StateError) as caught, second.locked():
            raise AssertionError("locked twice")
        message = str(caught.value)
        assert message.startswith(
            f"{folder.path}: is in use by keyfront serve with pid {os.getpid()}; "
        )
        (lock,) = folder.path.parent.iterdir()
        assert mode(lock) == 0o600
        # not inside the folder: --fresh deletes that while it is held
        assert not folder.path.exists()
    with second.locked():
        pass


def test_lock_is_let_go_after_an_error(folder: State) -> None:
    with pytest.raises(ValueError, match="whatever"), folder.locked():
        raise ValueError("whatever")
    with folder.locked():
        pass


def test_locks_of_two_folders_are_two(folder: State) -> None:
    with folder.locked(), State(folder.path.with_name("other")).locked():
        assert len(list(folder.path.parent.iterdir())) == 2


def test_endpoint_of_nothing(folder: State) -> None:
    assert folder.endpoint() is None


def test_environment_names_the_configuration(folder: State) -> None:
    assert folder.environment() == {
        "OS_KEYSTONE_CONFIG_DIR": str(folder.path),
        "OS_KEYSTONE_CONFIG_FILES": "",
    }
    make(folder)
    assert folder.environment()["OS_KEYSTONE_CONFIG_FILES"] == "endpoint.conf;keystone.conf"


def test_another_endpoint_leaves_keystone_conf(folder: State) -> None:
    make(folder)
    with folder.config.open("a") as file:
        file.write("# of the operator\n")
    before = folder.config.read_bytes()
    folder.write_endpoint("http://127.0.0.1:5001/v3")
    assert folder.config.read_bytes() == before
    assert folder.endpoint() == "http://127.0.0.1:5001/v3"
    text = (folder.path / "endpoint.conf").read_text()
    assert "public_endpoint = http://127.0.0.1:5001\n" in text


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state.default_path() == Path("/home/someone/.local/state/keyfront")
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert state.default_path() == Path("/srv/state/keyfront")


def test_default_path_of_a_user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    with pytest.raises(StateError, match="--state"):
        state.default_path()

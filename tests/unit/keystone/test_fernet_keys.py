"""The keys of tokens are read when they are others, and only then."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyfront.errors import IncompatibleError
from keyfront.gateway.keystone import fernet_keys


class Keys:
    """Keystone's token formatter on a folder of keys, and how often it reads them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.read = 0
        keys = self

        class TokenFormatter:
            @property
            def crypto(self) -> Any:
                return keys.load_keys()

        self.formatters = SimpleNamespace(
            TokenFormatter=TokenFormatter,
            CONF=SimpleNamespace(fernet_tokens=SimpleNamespace(key_repository=str(folder))),
        )
        fernet_keys.keep_keys(self.formatters)

    def load_keys(self) -> dict[str, str]:
        self.read += 1
        return {path.name: path.read_text() for path in self.folder.iterdir()}

    def use(self) -> dict[str, str]:
        found: dict[str, str] = self.formatters.TokenFormatter().crypto
        return found

    def is_read(self) -> bool:
        """Whether the next use reads them, and gets what is there."""
        before = self.read
        assert self.use() == {path.name: path.read_text() for path in self.folder.iterdir()}
        return self.read > before


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    # The property of the stand-in goes by other names than Keystone's.
    monkeypatch.setattr(fernet_keys, "_GOES_BY", fernet_keys._GOES_BY | {"keys"})
    # What was written just now is as good as settled.
    monkeypatch.setattr(fernet_keys, "_SETTLED", -(10**18))
    found = Keys(tmp_path / "keys")
    for name in ("0", "1"):
        found.folder.joinpath(name).write_text(f"key {name}")
    yield found


def test_keys_are_read_once(keys: Keys) -> None:
    assert [keys.is_read() for _ in range(3)] == [True, False, False]


def test_a_key_that_comes_goes_or_is_another_is_seen_at_the_next_use(keys: Keys) -> None:
    folder = keys.folder

    def rotate() -> None:
        folder.joinpath("0.tmp").write_text("key 3")
        folder.joinpath("0").rename(folder / "2")
        folder.joinpath("0.tmp").rename(folder / "0")

    def written_over() -> None:
        before = folder.joinpath("1").stat()
        folder.joinpath("1").write_text("key 9")  # as long as it was
        # with the time that it had
        os.utime(folder / "1", ns=(before.st_atime_ns, before.st_mtime_ns))

    for change in (rotate, written_over, folder.joinpath("1").unlink):
        keys.use()
        assert not keys.is_read()
        time.sleep(0.02)  # longer than a tick of the file system's clock
        change()
        assert keys.is_read(), change


def test_a_link_to_another_folder_is_seen(keys: Keys, tmp_path: Path) -> None:
    """As Kubernetes exchanges secrets."""
    for number in ("one", "two"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "3").write_text(f"key of {number}")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    keys.folder.joinpath("3").symlink_to(link / "3")
    keys.use()
    assert not keys.is_read()
    link.unlink()
    link.symlink_to(tmp_path / "two")
    assert keys.use()["3"] == "key of two"


def test_another_folder_is_seen(keys: Keys, tmp_path: Path) -> None:
    keys.use()
    keys.folder = tmp_path / "others"
    keys.folder.mkdir(mode=0o700)
    keys.formatters.CONF.fernet_tokens.key_repository = str(keys.folder)
    assert keys.is_read()


def test_what_was_changed_just_now_may_be_changed_again_unseen(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks of file systems are coarse: of two changes in a tick the second does not show."""
    monkeypatch.setattr(fernet_keys, "_SETTLED", 2_000_000_000)
    # By the file system's clock, however long ago it is by now.
    written = max(path.stat().st_ctime_ns for path in (keys.folder, *keys.folder.iterdir()))
    monkeypatch.setattr(time, "time_ns", lambda: written + 1_000_000_000)
    assert [keys.is_read() for _ in range(3)] == [True, True, True]
    monkeypatch.setattr(time, "time_ns", lambda: written + 3_000_000_000)
    assert [keys.is_read() for _ in range(3)] == [True, False, False]


def test_of_keys_that_all_may_read_keystone_goes_on_to_complain(keys: Keys) -> None:
    keys.folder.chmod(0o755)
    assert [keys.is_read() for _ in range(3)] == [True, True, True]


def test_keys_that_are_gone_are_keystone_s_to_complain_of(keys: Keys) -> None:
    keys.use()
    for path in keys.folder.iterdir():
        path.unlink()
    keys.folder.rmdir()
    with pytest.raises(FileNotFoundError):
        keys.use()


def test_a_formatter_of_another_kind_is_left_alone() -> None:
    class Other:
        @property
        def crypto(self) -> Any:
            return SimpleNamespace(of="a hardware module").elsewhere

    before = Other.crypto
    fernet_keys.keep_keys(SimpleNamespace(TokenFormatter=Other))
    assert Other.crypto is before
    with pytest.raises(IncompatibleError, match=r"TokenFormatter\.crypto"):
        fernet_keys.keep_keys(SimpleNamespace())


def test_keystone_s_own_is_of_the_kind_that_is_known() -> None:
    formatters = pytest.importorskip("keystone.token.token_formatters")
    found = vars(formatters.TokenFormatter)["crypto"].fget
    kept = SimpleNamespace(
        TokenFormatter=type("TokenFormatter", (), {"crypto": property(found)}), CONF=None
    )
    if not hasattr(found, "keyfront"):  # as it is where another test has loaded it
        fernet_keys.keep_keys(kept)
        assert hasattr(vars(kept.TokenFormatter)["crypto"].fget, "keyfront")


def test_what_a_request_has_packed_it_does_not_decrypt() -> None:
    formatters = pytest.importorskip("keystone.token.token_formatters")
    fernet = pytest.importorskip("cryptography.fernet")
    from keyfront.middleware.tokens.request import Request, current

    class Crypto:
        """Counts what is decrypted."""

        decrypted = 0
        _keys = fernet.MultiFernet([fernet.Fernet(fernet.Fernet.generate_key())])
        encrypt = _keys.encrypt

        def decrypt(self, token: bytes) -> bytes:
            self.decrypted += 1
            data: bytes = self._keys.decrypt(token)
            return data

    crypto = Crypto()
    stock = formatters.TokenFormatter
    methods = {name: inspect.unwrap(vars(stock)[name]) for name in ("pack", "unpack")}
    formatter: Any = type("TokenFormatter", (stock,), {**methods, "crypto": crypto})
    fernet_keys._remember_packed(formatter)
    one = formatter()
    before = current.set(Request())
    try:
        token, other = one.pack(b"a token"), one.pack(b"another")
        assert one.unpack(other) == b"another"
        assert crypto.decrypted == 0
        assert one.unpack(token) == b"a token"
        assert crypto.decrypted == 1
    finally:
        current.reset(before)
    # in another request, and in none
    for request in (Request(), None):
        before = current.set(request)
        try:
            assert one.unpack(other) == b"another"
        finally:
            current.reset(before)
    assert crypto.decrypted == 3


def test_a_formatter_that_packs_otherwise_is_left_alone() -> None:
    class Formatter:
        def pack(self, payload: bytes) -> str:
            return self.hardware.sealed(payload)  # type: ignore[attr-defined, no-any-return]

        def unpack(self, token: str) -> bytes:
            return self.hardware.opened(token)  # type: ignore[attr-defined, no-any-return]

    before = Formatter.pack, Formatter.unpack
    fernet_keys._remember_packed(Formatter)
    assert (Formatter.pack, Formatter.unpack) == before

"""Where a Redis is, as the options name it, and that its password is shown nowhere."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import MissingPartError, OptionError
from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.coordinator.factory import coordinator_of
from keyfront.middleware.tokens.coordinator.redis import address as module
from keyfront.middleware.tokens.coordinator.redis.address import Address


def values(url: str | None, **others: Any) -> dict[str, Any]:
    return {x.dest: x.default for x in options.COORDINATOR} | {"coordinator": url, **others}


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://h", (("h", 6379),)),
        ("redis://h:1", (("h", 1),)),
        ("redis://:p%40ss@h:1/2", (("h", 1),)),
        ("rediss://user:p%2Fw@h.example.org:6390/2", (("h.example.org", 6390),)),
        ("redis://[::1]:7", (("::1", 7),)),
    ],
)
def test_a_server(url: str, found: tuple[tuple[str, int], ...]) -> None:
    address = Address.of(values(url))
    assert address.hosts == found
    assert address.tls == url.startswith("rediss")
    assert address.database == (2 if url.endswith("/2") else 0)
    if "%40" in url:
        assert (address.user, address.password) == ("", "p@ss")
    if "%2F" in url:
        assert (address.user, address.password) == ("user", "p/w")
    assert "p@ss" not in f"{address} {address!r}" and "p/w" not in f"{address} {address!r}"


def test_a_socket() -> None:
    address = Address.of(values("unix://user:secret@/run/redis/redis.sock?db=3"))
    assert (address.path, address.database) == ("/run/redis/redis.sock", 3)
    assert (address.user, address.password) == ("user", "secret")
    assert str(address) == "unix:///run/redis/redis.sock?db=3"


def test_a_socket_whose_path_is_too_long() -> None:
    with pytest.raises(OptionError, match=r"coordinator = /run/x+: must be .* 107 bytes") as caught:
        Address.of(values(f"unix://user:secret@/run/{'x' * 103}"))
    assert "secret" not in str(caught.value)


def test_sentinels(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlsplit(url: str) -> Any:
        assert not re.search(r",.*\[|\].*,", url), "newer Pythons refuse it"
        return urllib.parse.urlsplit(url)

    monkeypatch.setattr(module, "urlsplit", urlsplit)
    named = values(
        "redis://keystone:secret@s1,s2:1,[::2]:3/1",
        coordinator_sentinel_master="m",
        coordinator_sentinel_user="watcher",
        coordinator_sentinel_password="hush",
    )
    address = Address.of(named)
    assert address.hosts == (("s1", 26379), ("s2", 1), ("::2", 3))
    assert str(address) == "redis://s1:26379,s2:1,[::2]:3/1 (m)"
    assert "hush" not in repr(address) and "secret" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "h:6379",
        "http://:secret@h",
        "redis://",
        "redis://:secret@",
        "redis://:secret@h:0x10",
        "redis://:secret@h:70000",
        "redis://:secret@h/one",
        "redis://:secret@h/-1",
        "redis://:secret@h?db=1",
        "redis://:secret@h/0#secret",
        "redis://:secret@h1,h2",
        "redis://:secret@h1,,h2",
        "unix://:secret@",
        "unix://:secret@/",
        "unix://:secret@/x?db=a",
        "unix://:secret@/x?timeout=1",
        "redis://:sec/ret@h",
    ],
)
def test_what_cannot_be_meant(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        Address.of(values(url))
    assert str(caught.value).startswith("coordinator = (not shown): must be redis://")
    assert "secret" not in str(caught.value) and "sec/ret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    option = {f"coordinator_{name}": str(file)}
    for wrong in (option, {f"coordinator_{name}": str(tmp_path)}):
        with pytest.raises(OptionError, match=r"must be a file that can be read"):
            Address.of(values("rediss://h", **wrong))
    file.write_text("")
    with pytest.raises(OptionError, match=r"must be used with rediss://, or left out"):
        Address.of(values("redis://h", **option))
    if name == "key_file":
        with pytest.raises(OptionError, match="coordinator_cert_file"):
            Address.of(values("rediss://h", **option))
    else:
        assert getattr(Address.of(values("rediss://h", **option)), name) == str(file)


def test_none_is_named() -> None:
    assert coordinator_of(values(None), True) is None
    assert coordinator_of(values(""), False) is None


def test_the_client_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[redis\]'"):
        coordinator_of(values("redis://h"), True)


def test_it_connects_when_it_is_first_asked() -> None:
    pytest.importorskip("redis")
    coordinator = coordinator_of(values("redis://:secret@nowhere.invalid"), True)
    assert coordinator is not None
    assert "secret" not in repr(coordinator)
    coordinator.close()

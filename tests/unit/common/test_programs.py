"""What keyfront serve asks the machine: addresses, programs, modules."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfront.common import programs as machine
from keyfront.errors import MissingPartError, OptionError, ServerError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("localhost:65535", ("localhost", 65535)),
        ("[::1]:5000", ("::1", 5000)),
        ("[::]:00080", ("::", 80)),
    ],
)
def test_parse_listen(text: str, expected: tuple[str, int]) -> None:
    assert machine.parse_listen(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        ":",
        "5000",
        ":5000",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:http",
        "127.0.0.1:-1",
        "127.0.0.1:+1",
        "127.0.0.1: 1",
        "127.0.0.1:1_0",
        "127.0.0.1:٣",
        "127.0.0.1:65536",
        "1.2.3.4:99999",
        "127.0.0.1:" + "9" * 5000,
        "::1:5000",
        "[::1]",
        "[]:5000",
        "[::1:5000",
        "::1]:5000",
        "[localhost]:5000",
        "http://127.0.0.1:5000",
    ],
)
def test_parse_listen_refuses(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        machine.parse_listen(text)
    assert caught.value.option == "--listen"
    assert caught.value.value == text
    assert "HOST:PORT with a port from 0 to 65535" in str(caught.value)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_claim_keeps_a_free_port_for_a_server() -> None:
    with machine.claim("127.0.0.1:0", "127.0.0.1", 0) as port:
        assert port > 0
        with machine.claim(f"127.0.0.1:{port}", "127.0.0.1", port) as again:
            assert again == port
        # a server that starts, is stopped and starts again
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_claim_keeps_a_port_from_clients_and_servers() -> None:
    with machine.claim("127.0.0.1:0", "127.0.0.1", 0) as port, socket.socket() as client:
        # as the kernel does for who asks for none: by nobody else's leave
        with pytest.raises(OSError, match="in use"):
            client.bind(("127.0.0.1", port))


def test_claim_of_a_port_in_use(taken: int) -> None:
    with pytest.raises(ServerError) as caught:
        with machine.claim(f"127.0.0.1:{taken}", "127.0.0.1", taken):
            pass
    message = str(caught.value)
    assert message.startswith(f"--listen = 127.0.0.1:{taken}: address already in use; ")
    assert "127.0.0.1:0 for a free port" in message


def test_claim_of_an_address_of_another_machine() -> None:
    # 192.0.2.0/24 is for documentation only (RFC 5737)
    with pytest.raises(ServerError, match="cannot assign requested address"):
        with machine.claim("192.0.2.1:5000", "192.0.2.1", 5000):
            pass


@pytest.mark.parametrize("host", ["host.invalid", "a..b", "a" * 64, "999.1.1.1", "*"])
def test_claim_of_what_is_no_address(host: str) -> None:
    with pytest.raises(OptionError, match="must be an address of this machine"):
        with machine.claim(f"{host}:5000", host, 5000):
            pass


def test_claim_where_the_machine_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ServerError, match=r"\[::1\]:5000: address family not supported"):
        with machine.claim("[::1]:5000", "::1", 5000):
            pass


def test_claim_of_a_port_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ServerError, match="a port below 1024 needs root"):
        with machine.claim("127.0.0.1:80", "127.0.0.1", 80):
            pass


def test_system_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SYSTEM_PATH", str(tmp_path / "sbin"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(MissingPartError) as caught:
        machine.system_program(("apache2", "httpd"), "apache2-bin")
    assert str(caught.value) == "apache2 is not installed: run apt install apache2-bin"
    for place, name in (("sbin", "httpd"), ("bin", "httpd"), ("sbin", "apache2")):
        program = tmp_path / place / name
        program.parent.mkdir(exist_ok=True)
        program.touch(mode=0o755)
        assert machine.system_program(("apache2", "httpd"), "apache2-bin") == str(program)


def test_system_program_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert Path(machine.system_program(("sh",), "dash")).name == "sh"


def test_apache_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (tmp_path / "debian", tmp_path / "redhat")
    monkeypatch.setattr(machine, "_APACHE_MODULES", tuple(map(str, folders)))
    with pytest.raises(
        MissingPartError, match=r"mod_x\.so is not installed: run apt install x-bin"
    ):
        machine.apache_modules("mod_x.so", "x-bin")
    folders[1].mkdir()
    (folders[1] / "mod_x.so").touch()
    assert machine.apache_modules("mod_x.so", "x-bin") == str(folders[1])


def test_require_module() -> None:
    machine.require_module("json", "keystone")
    with pytest.raises(MissingPartError) as caught:
        machine.require_module("absent_module", "keystone")
    assert str(caught.value) == (
        "absent_module is not installed: run pip install 'keyfront[keystone]'"
    )


def test_uwsgi_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    program = tmp_path / "bin/uwsgi"
    program.parent.mkdir()
    installed = {"pyuwsgi"}

    def distribution(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return name

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[uwsgi\]'"):
        machine.uwsgi_program()
    program.touch()
    assert machine.uwsgi_program() == str(program)
    # a uwsgi of another Python beside this one is not ours
    installed.clear()
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[pyuwsgi\]'"):
        machine.uwsgi_program()


def test_mod_wsgi_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "require_module", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[mod-wsgi\]'"):
        machine.mod_wsgi_module()


def test_front_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.front_user() is None
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = machine.front_user()
    assert found is not None
    assert pwd.getpwnam(found[0]).pw_uid != 0

    def nobody(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(MissingPartError, match="a user to drop to"):
        machine.front_user()

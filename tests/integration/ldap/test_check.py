"""``keyfront ldap check`` against a real slapd, and against what is none."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.cli import main as cli
from support.certificates import Certificates, Pair
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, free_port

# Seconds for what must fail for want of an answer.
SHORT = 3.0


@pytest.fixture(scope="module")
def d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True) as made:
        yield made


@pytest.fixture
def secret(d: Directory, tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(d.service_password + "\n")
    path.chmod(0o600)
    return path


Check = Callable[..., tuple[int, dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Run it for programs and for people: the status, and the checks by name."""

    def run(
        *arguments: str, seconds: float = PATIENCE
    ) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        command = ["ldap", "check", "--timeout", f"{seconds:g}"]
        status = cli.main([*command, *arguments])
        table = capsys.readouterr().out
        assert max(map(len, table.splitlines())) <= 80, table
        assert cli.main([*command, "--json", *arguments]) == status
        (report,) = json.loads(capsys.readouterr().out)
        assert report["ok"] == (status == 0)
        found: dict[str, list[dict[str, Any]]] = {}
        for each in report["checks"]:
            found.setdefault(each["name"], []).append(each)
            mark = {"ok": "✓", "failed": "✗", "warning": "!", "note": " "}[each["state"]]
            lines = [x for x in table.splitlines() if x.startswith(f"  {mark} {each['name']}")]
            assert lines, table
        return status, found

    return run


def reason(found: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """The one thing that failed, and why."""
    ((name, text),) = [
        (each["name"], each["text"])
        for checks in found.values()
        for each in checks
        if each["state"] == "failed"
    ]
    assert "ldap://127" not in text  # the server is named above it
    return name, text


def test_all_is_well(d: Directory, secret: Path, check: Check) -> None:
    d.mark()
    status, found = check(
        "--ca-file", str(d.ca_file), "--bind-dn", d.service_dn, "--password-file", str(secret),
        d.ldaps_url,
    )  # fmt: skip
    assert status == 0
    states = {each["state"] for checks in found.values() for each in checks}
    assert states == {"ok", "note"}
    assert found["connect"][0]["address"] == f"127.0.0.1:{d.tls_port}"
    assert found["TLS"][0]["version"] == "TLSv1.3"
    assert found["TLS"][0]["cipher"].startswith("TLS_")
    certificate = found["certificate"][0]
    assert certificate["host"] == "localhost"
    assert 25 <= certificate["days"] <= 31
    assert found["bind"][0]["dn"] == d.service_dn
    assert found["search"][0]["base"] == d.suffix
    assert found["page"][0]["text"].startswith("2 pages of 1 entry")
    assert found["server"][0]["vendor"] == "OpenLDAP"
    assert found["naming contexts"][0]["contexts"] == [d.suffix]
    offered = {name: found[name][0]["offered"] for name in ("StartTLS", "paged results")}
    assert offered == {"StartTLS": True, "paged results": True}
    assert found["password policy"][0]["offered"] is True
    assert found["fast bind"][0]["offered"] is False
    ping = found["ping"][0]
    assert 0 < ping["best_milliseconds"] <= ping["median_milliseconds"]
    # once for programs, once for people
    counts = d.wait_for(lambda counts: counts.unbinds >= 2, "it has said goodbye")
    assert counts.binds == 2


def test_start_tls(d: Directory, check: Check) -> None:
    url = f"ldap://localhost:{d.port}"
    status, found = check("--start-tls", "--ca-file", str(d.ca_file), url)
    assert status == 0
    assert found["TLS"][0]["state"] == "ok"
    assert found["StartTLS"][0]["text"] == "in use"
    assert found["bind"][0]["text"].startswith("anonymous")


def test_a_password_in_the_clear_is_a_warning(d: Directory, secret: Path, check: Check) -> None:
    status, found = check("--bind-dn", d.service_dn, "--password-file", str(secret), d.url)
    assert status == 0
    assert [each["state"] for each in found["bind"]] == ["ok", "warning"]
    assert "in the clear" in found["bind"][1]["text"]
    assert "TLS" not in found


def test_an_unknown_ca(d: Directory, check: Check) -> None:
    status, found = check(d.ldaps_url)
    assert status == 1
    name, text = reason(found)
    assert name == "TLS"
    assert "--ca-file" in text
    assert "bind" not in found


@pytest.mark.parametrize(
    ("kind", "words"),
    [("wrong_host", "mismatch"), ("expired", "expired"), ("other_ca", "--ca-file")],
)
def test_a_bad_certificate_gets_no_password(
    d: Directory, secret: Path, tmp_path: Path, check: Check, kind: str, words: str
) -> None:
    bad: Pair = getattr(Certificates(d.ca_file.parent), kind)
    with directory(tmp_path, tls="both", users=1, certificate=bad) as other:
        other.mark()
        status, found = check(
            "--ca-file", str(d.ca_file), "--bind-dn", d.service_dn, "--password-file",
            str(secret), other.ldaps_url,
        )  # fmt: skip
        assert status == 1
        name, text = reason(found)
        assert name == "TLS"
        assert words in text
        assert other.counts().binds == 0


def test_a_refused_bind(d: Directory, tmp_path: Path, check: Check) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-secret")
    wrong.chmod(0o600)
    status, found = check("--bind-dn", d.users[0].dn, "--password-file", str(wrong), d.url)
    assert status == 1
    name, text = reason(found)
    assert name == "bind"
    assert "invalidCredentials (49)" in text
    assert [each["state"] for each in found["bind"]] == ["failed", "warning"]
    assert "in the clear" in found["bind"][1]["text"], "also one that is mistyped is told"
    # the rest that needs nobody is told
    assert found["ping"][0]["state"] == "ok"
    assert found["search"][0]["state"] == "warning"
    assert "page" not in found
    d.unlock(d.users[0].dn)


def test_a_base_that_is_not_there(d: Directory, check: Check) -> None:
    status, found = check("--base", f"ou=nowhere,{d.suffix}", d.url)
    assert status == 1
    assert reason(found)[0] == "search"
    assert "noSuchObject (32)" in reason(found)[1]
    assert check("--base", d.people, d.url)[1]["search"][0]["base"] == d.people


def test_a_password_that_is_about_to_expire(d: Directory, tmp_path: Path, check: Check) -> None:
    user = d.users[1]
    path = tmp_path / "password"
    path.write_text(user.password)
    path.chmod(0o600)
    d.expire_soon(user.dn)
    arguments = ("--bind-dn", user.dn, "--password-file", str(path))
    assert "its password expires in" in check(*arguments, d.url)[1]["bind"][0]["text"]
    d.expire(user.dn, grace=True)
    assert "has expired" in check(*arguments, d.url)[1]["bind"][0]["text"]


def test_nobody_is_there(check: Check) -> None:
    status, found = check(f"ldap://127.0.0.1:{free_port()}")
    assert status == 1
    assert reason(found) == ("connect", "no connection: Connection refused")
    status, found = check("ldap://does-not-exist.invalid", seconds=SHORT)
    assert status == 1
    assert "lookup" in reason(found)[1]


@pytest.mark.parametrize(
    ("fault", "where", "words"),
    [
        ("black_hole", "connect", "no connection within "),
        ("stall", "bind", f"within {SHORT:g} s"),
        ("garbage", "bind", "no LDAP"),
        ("reset_after", "bind", "reset"),
        ("cut", "connect", "refused"),
    ],
)
def test_a_server_that_fails(
    d: Directory, check: Check, fault: str, where: str, words: str
) -> None:
    arguments: dict[str, Any] = {"garbage": b"220 mail ESMTP\r\n", "reset_after": 5}
    with FaultProxy(d.port) as proxy:
        chosen = [arguments[fault]] if fault in arguments else []
        getattr(proxy, fault)(*chosen)
        silent = fault in ("black_hole", "stall")
        status, found = check(proxy.url(), seconds=SHORT if silent else PATIENCE)
    assert status == 1
    name, text = reason(found)
    assert name == where
    assert words in text
    assert "ping" not in found


def test_a_server_that_dies_in_between(d: Directory, check: Check) -> None:
    """The rest is not tried, and said not to be."""
    with FaultProxy(d.port) as proxy:
        proxy.reset_after(200)
        status, found = check(proxy.url())
    assert status == 1
    assert found["bind"][0]["state"] == "ok"
    assert found[""][0]["text"] == "the rest was not tried"


def test_an_address_that_does_not_answer_is_told(
    d: Directory, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        found = real("127.0.0.1", port, *rest, **more)
        if host != "localhost":
            return found
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        return [six, *found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    status, found = check(f"ldap://localhost:{d.port}")
    assert status == 0
    first, second = found["connect"]
    assert (first["state"], first["address"]) == ("warning", f"[::1]:{d.port}")
    assert (second["state"], second["address"]) == ("ok", f"127.0.0.1:{d.port}")


def test_a_socket_file(d: Directory, tmp_path: Path, check: Check) -> None:
    path = tmp_path / "ldapi"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        threads = [threading.Thread(target=_relay, args=(listening, d.port)) for _ in range(4)]
        for thread in threads:
            thread.start()
        quoted = str(path).replace("/", "%2F")
        status, found = check(f"ldapi://{quoted}")
        for thread in threads:
            thread.join(PATIENCE)
    assert status == 0
    assert found["connect"][0]["address"] == "socket"


def _relay(listening: socket.socket, port: int) -> None:
    """One connection to a socket file, handed on to a port."""
    listening.settimeout(PATIENCE)
    client, _ = listening.accept()
    with client, socket.create_connection(("127.0.0.1", port), PATIENCE) as server:

        def back() -> None:
            while data := server.recv(65536):
                client.sendall(data)

        thread = threading.Thread(target=back)
        thread.start()
        while data := client.recv(65536):
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)
        thread.join(PATIENCE)


@contextlib.contextmanager
def at_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run it at a terminal of its own, up to its question; with the other end of the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "keyfront", "ldap", "check", *arguments],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        assert process.stderr is not None
        asked = b""
        while not asked.endswith(b": "):
            part = process.stderr.read1()
            assert part, asked
            asked += part
        assert asked.startswith(b"Password of ")
        yield process, ours
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_password_typed_at_a_terminal(d: Directory) -> None:
    with at_a_terminal("--bind-dn", d.service_dn, d.url) as (process, terminal):
        os.write(terminal, d.service_password.encode() + b"\n")
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert f"✓ bind            {d.service_dn}" in out.decode()
    assert d.service_password.encode() not in out + err


def test_no_password_is_typed_at_a_terminal(d: Directory) -> None:
    with at_a_terminal("--bind-dn", d.service_dn, d.url) as (process, terminal):
        os.write(terminal, b"\x04")  # Ctrl-D
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, b"")
    assert b"left out if there is no password" in err
    assert b"Traceback" not in err

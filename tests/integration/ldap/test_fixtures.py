"""The slapd, the fault proxy and the certificates that the tests of the LDAP pool stand on."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ldap
import pytest
from ldap.controls.ppolicy import PasswordPolicyControl

from support import directory as directory_module
from support.certificates import WRONG_HOST, certificates
from support.directory import Counts, Directory, directory
from support.fault_proxy import FaultProxy, proxy_process
from support.served import PATIENCE, free_port

# Seconds in which nothing has to come; passing them costs a test that time, never its verdict.
SILENCE = 0.2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True) as d:
        yield d


@pytest.fixture
def d(served: Directory) -> Directory:
    served.mark()
    return served


def login(d: Directory, dn: str, password: str, url: str | None = None) -> str:
    """Bind once; what the server said, and what the password policy added."""
    client = ldap.initialize(url or d.url)
    sent = client.simple_bind(dn, password, serverctrls=[PasswordPolicyControl()])
    known = {PasswordPolicyControl.controlType: PasswordPolicyControl}
    try:
        controls = client.result3(sent, resp_ctrl_classes=known)[3]
        said = "yes"
    except ldap.INVALID_CREDENTIALS as error:
        controls = ldap.controls.DecodeControlTuples(error.args[0]["ctrls"], known)
        said = "no"
    finally:
        client.unbind_s()
    (policy,) = controls
    names = {0: "expired", 1: "locked", 2: "must change"}
    if policy.error is not None:
        said += f", {names[policy.error]}"
    if policy.timeBeforeExpiration is not None:
        said += ", expiring"
    if policy.graceAuthNsRemaining is not None:
        said += f", {policy.graceAuthNsRemaining} left"
    return said


# directory.py


def test_counts_what_others_did_and_not_itself(d: Directory) -> None:
    client = ldap.initialize(d.url)
    client.simple_bind_s(d.users[0].dn, d.users[0].password)
    assert len(client.search_s(d.people, ldap.SCOPE_ONELEVEL, "(uid=user1)", ["cn"])) == 1
    d.modify(d.users[0].dn, {"description": ["changed"]})
    assert d.read(d.users[0].dn)["description"] == [b"changed"]
    assert d.counts() == Counts(connects=1, binds=1, searches=1)
    assert d.open_connections() == 1
    client.unbind_s()
    d.wait_for(lambda counts: counts.closes == 1, "the client's connection is closed")
    assert d.counts() == Counts(connects=1, binds=1, searches=1, unbinds=1, closes=1)
    assert login(d, d.users[0].dn, "wrong") == "no"
    assert d.counts().binds_refused == 1
    d.mark()
    assert d.counts() == Counts()


def owed(path: Path, log: bytes, name: bytes, *, at_once: bool) -> set[str]:
    """What is owed when the log has been read, at once or a few bytes at a time."""
    read = directory_module._Log()
    for end in (len(log),) if at_once else (*range(0, len(log), 7), len(log)):
        path.write_bytes(log[:end])
        read.read(path)
    return read.owed(name)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_slapd_has_not_written_yet_is_waited_for(tmp_path: Path, at_once: bool) -> None:
    """An answer is sent before its line is written, and a connection served before its own."""
    asked = partial(owed, tmp_path / "log", at_once=at_once)
    ours = b'conn=1002 op=0 SRCH base="cn=keyfront-mark-7" scope=0\n'
    lines = [
        b"conn=1000 fd=12 ACCEPT from IP=127.0.0.1:1 (IP=127.0.0.1:2)\n",
        b'conn=1000 op=3 BIND dn="cn=a" method=128\n',
        b"conn=1000 op=3 RESULT tag=97 err=49 qtime=0.1 etime=0.2 text=\n",
        b"conn=1001 fd=13 ACCEPT from IP=127.0.0.1:3 (IP=127.0.0.1:2)\n",
        b'conn=1001 op=0 BIND dn="cn=b" method=128\n',
        b"conn=1001 fd=13 closed (connection lost)\n",
        b"conn=1002 fd=14 ACCEPT from IP=127.0.0.1:4 (IP=127.0.0.1:2)\n",
    ]
    missing = {0: {"conn=1000"}, 2: {"conn=1000 op=3"}, 3: {"conn=1001"}, 5: {"conn=1001 op=0"}}
    for without in range(len(lines) + 1):
        log = b"".join(x for n, x in enumerate(lines) if n != without) + ours
        expected = missing.get(without, set()) | ({"conn=1002"} if without == 6 else set())
        assert asked(log, b"cn=keyfront-mark-7") == expected, without
    assert asked(b"".join(lines) + ours, b"cn=keyfront-mark-70") == {"the search"}


def test_everybody_can_log_in(d: Directory) -> None:
    assert len(d.users) == 20
    for user in (*d.users, *d.odd_users):
        assert login(d, user.dn, user.password) == "yes", user.dn
        found = d.read(user.dn)
        assert (found["uid"], found["cn"]) == ([user.uid.encode()], [user.cn.encode()])
    assert login(d, d.service_dn, d.service_password) == "yes"
    assert d.groups_of(d.users[1]) == ["everybody"]
    members = d.read(f"cn=even,{d.groups}", ["member"])["member"]
    assert members == [user.dn.encode() for user in d.users[::2]]


def test_entries_come_and_go(d: Directory) -> None:
    dn = f"cn=empty,{d.groups}"
    d.add(dn, {"objectClass": ["kfGroup"], "cn": ["empty"]})
    assert "member" not in d.read(dn)
    d.delete(dn)
    with pytest.raises(ldap.NO_SUCH_OBJECT):
        d.read(dn)
    user = d.users[10]
    d.password(user.dn, "another")
    assert login(d, user.dn, user.password) == "no"
    assert login(d, user.dn, "another") == "yes"


@pytest.mark.parametrize(
    ("number", "change", "right", "wrong"),
    [
        (11, Directory.lock, "no, locked", "no, locked"),
        (12, Directory.must_change, "yes, must change", "no"),
        (13, Directory.expire, "no, expired", "no"),
        (14, Directory.expire_soon, "yes, expiring", "no"),
        (15, Directory.end_account, "no, locked", "no, locked"),
        (16, lambda d, dn: d.expire(dn, grace=True), "yes, 2 left", "no"),
    ],
)
def test_password_policy(
    d: Directory, number: int, change: Callable[[Directory, str], None], right: str, wrong: str
) -> None:
    user = d.users[number]
    assert login(d, user.dn, user.password) == "yes"
    change(d, user.dn)
    assert login(d, user.dn, user.password) == right
    assert login(d, user.dn, "wrong") == wrong


def test_lockout_after_three_failures(d: Directory) -> None:
    user = d.users[17]
    assert [login(d, user.dn, "wrong") for _ in range(2)] == ["no", "no"]
    assert login(d, user.dn, user.password) == "yes"
    assert d.failures(user.dn) == 0
    assert [login(d, user.dn, "wrong") for _ in range(3)] == ["no", "no", "no"]
    assert d.failures(user.dn) == 3
    assert login(d, user.dn, user.password) == "no, locked"
    d.unlock(user.dn)
    assert login(d, user.dn, user.password) == "yes"


def test_tls_both_ways(d: Directory) -> None:
    trusting = ssl.create_default_context(cafile=d.ca_file)
    by_folder = ssl.create_default_context(capath=str(d.certificates.ca_dir))
    for context in (trusting, by_folder):
        for name in ("localhost", "127.0.0.1", "::1"):
            with socket.create_connection(("127.0.0.1", d.tls_port), PATIENCE) as plain:
                with context.wrap_socket(plain, server_hostname=name) as client:
                    assert client.version() in ("TLSv1.2", "TLSv1.3")
    client = ldap.initialize(d.url)
    client.set_option(ldap.OPT_X_TLS_CACERTFILE, str(d.ca_file))
    client.set_option(ldap.OPT_X_TLS_NEWCTX, 0)
    client.start_tls_s()
    client.simple_bind_s(d.users[0].dn, d.users[0].password)
    assert (d.counts().starttls, d.counts().connects, d.counts().binds) == (1, 7, 1)
    client.unbind_s()
    url = f"ldaps://127.0.0.1:{d.tls_port}"
    client = ldap.initialize(url)
    client.set_option(ldap.OPT_X_TLS_CACERTFILE, str(d.ca_file))
    client.set_option(ldap.OPT_X_TLS_NEWCTX, 0)
    client.simple_bind_s(d.users[0].dn, d.users[0].password)
    client.unbind_s()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong-host", "ostname mismatch"),
        ("expired", "has expired"),
        ("other-ca-server", "unable to get local issuer"),
    ],
)
def test_wrong_certificates(tmp_path: Path, name: str, reason: str) -> None:
    made = certificates(tmp_path)
    context = ssl.create_default_context(cafile=made.ca_file)
    with directory(tmp_path, tls="both", users=1, certificate=made.named(name)) as d:
        with socket.create_connection(("127.0.0.1", d.tls_port), PATIENCE) as plain:
            with pytest.raises(ssl.SSLCertVerificationError, match=reason):
                context.wrap_socket(plain, server_hostname="localhost")
        if name == "wrong-host":
            with socket.create_connection(("127.0.0.1", d.tls_port), PATIENCE) as plain:
                context.wrap_socket(plain, server_hostname=WRONG_HOST).close()


def test_stop_kill_pause(tmp_path: Path) -> None:
    with directory(tmp_path, users=1, extra_database="limits users size=1") as d:
        user, port = d.users[0], d.port
        client = ldap.initialize(d.url)
        client.simple_bind_s(user.dn, user.password)
        with pytest.raises(ldap.SIZELIMIT_EXCEEDED):
            client.search_s(d.suffix, ldap.SCOPE_SUBTREE)
        d.add(f"cn=kept,{d.groups}", {"objectClass": ["kfGroup"], "cn": ["kept"]})
        for end in (d.stop, d.kill):
            end()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), PATIENCE)
            with pytest.raises(ldap.SERVER_DOWN):
                client.whoami_s()
            d.start()
            assert d.read(f"cn=kept,{d.groups}")["cn"] == [b"kept"]
            client = ldap.initialize(d.url)
        d.pause()
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as early:
            early.sendall(directory_module._search_request(d.suffix))
            early.settimeout(SILENCE)
            with pytest.raises(TimeoutError):
                early.recv(1)
            d.resume()
            early.settimeout(PATIENCE)
            assert early.recv(1)
        # over three lives of the server
        assert (d.counts().binds, d.counts().searches) == (1, 2)


def test_another_port_if_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = directory_module.free_port
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        tries = [squatter.getsockname()[1]]
        monkeypatch.setattr(
            directory_module, "free_port", lambda: tries.pop() if tries else find()
        )
        with directory(tmp_path, users=1) as d:
            assert d.port != squatter.getsockname()[1]
            assert not tries


# fault_proxy.py


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    threads, clients = [], []

    def talk(client: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                client.sendall(data)
        except OSError:
            pass
        client.close()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            clients.append(client)
            threads.append(threading.Thread(target=talk, args=(client,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield listener.getsockname()[1]
        # a thread in accept() keeps it open
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def connect(proxy: FaultProxy, timeout: float = PATIENCE) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout)


def ask(client: socket.socket, data: bytes = b"hello") -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def receive(client: socket.socket, size: int) -> bytes:
    answer = b""
    while len(answer) < size and (part := client.recv(65536)):
        answer += part
    return answer


def is_silent(client: socket.socket) -> bool:
    client.settimeout(SILENCE)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE)
    return False


def test_forwards_and_counts(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as one, connect(proxy) as other:
        assert ask(one) == ask(other) == b"hello"
        big = bytes(range(256)) * 40000
        sender = threading.Thread(target=one.sendall, args=(big,))
        sender.start()
        assert receive(one, len(big)) == big
        sender.join(PATIENCE)
        assert (proxy.connections, proxy.accepted) == (2, 2)
        assert proxy.received("request") == proxy.received("response") == len(big) + 10
        other.close()
        proxy.wait_for_connections(1)
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""
        proxy.wait_for_connections(0)


def test_delays(echo: int) -> None:
    with FaultProxy(echo, delay=0.05) as proxy, connect(proxy) as client:
        begin = time.monotonic()
        assert ask(client) == b"hello"
        first = time.monotonic() - begin
        assert ask(client) == b"hello"
        both = time.monotonic() - begin
        # the handshake and one exchange, then another
        assert first >= 0.19 and both >= first + 0.1
        proxy.trickle(1, 0.02)
        begin = time.monotonic()
        assert ask(client) == b"hello"
        assert time.monotonic() - begin >= 0.1 + 4 * 0.02


def test_nothing_is_overtaken_when_the_delay_changes(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as client:
        sent = b""
        for number, delay in enumerate((0.03, 0.0, 0.01, 0.0)):
            proxy.forward(delay)
            part = bytes([number]) * 1000
            client.sendall(part)
            sent += part
        assert receive(client, len(sent)) == sent


def test_stall_passes_on_later(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.stall()
        with connect(proxy) as new:
            for client in (old, new):
                client.sendall(b"held back")
            proxy.wait_for_bytes("request", 5 + 2 * 9)
            assert is_silent(old) and is_silent(new)
            proxy.forward()
            assert receive(old, 9) == receive(new, 9) == b"held back"


def test_black_hole_answers_nobody(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.black_hole()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                connect(proxy, SILENCE)
        old.sendall(b"lost?")
        assert is_silent(old)
        proxy.forward()
        assert receive(old, 5) == b"lost?"
        with connect(proxy) as new:
            assert ask(new) == b"hello"
        assert proxy.accepted == 2


def test_cut_refuses_until_told_otherwise(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.cut()
        assert old.recv(1) == b""
        assert proxy.connections == 0
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                connect(proxy)
        proxy.forward()
        with connect(proxy) as new:
            assert ask(new) == b"hello"


def test_half_open_keeps_the_client(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.half_open()
        old.sendall(b"anybody?")
        assert is_silent(old)
        assert proxy.connections == 1
        with connect(proxy) as new:
            assert ask(new) == b"hello"
        old.close()
        proxy.wait_for_connections(0)


def test_resets(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        proxy.reset_after(3)
        with connect(proxy) as new:
            new.sendall(b"hello")
            assert receive(new, 3) == b"hel"
            with pytest.raises(ConnectionResetError):
                new.recv(1)
        proxy.forward()
        with connect(proxy) as new:
            assert ask(new) == b"hello"


def test_garbage(echo: int) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as client:
        assert ask(client) == b"hello"
        proxy.garbage(b"\xff" * 9)
        client.sendall(b"hello")
        assert receive(client, 9) == b"\xff" * 9
        proxy.garbage(b"short", close=True)
        client.sendall(b"hello")
        assert receive(client, 9) == b"short"


def test_without_a_server() -> None:
    with FaultProxy(free_port()) as proxy:
        # by then, or as soon as it asks
        with pytest.raises(ConnectionResetError), connect(proxy) as client:
            client.recv(1)
        proxy.wait_for_accepted(1)
        proxy.wait_for_connections(0)


def test_as_a_program(echo: int) -> None:
    with proxy_process(echo, delay=0.001) as proxy, connect(proxy) as client:
        assert ask(client) == b"hello"
        assert proxy.ask("delay") == "0.001"
        assert proxy.ask("forward", 0.0) == "ok"
        assert proxy.ask("delay") == "0.0"
        assert proxy.ask("connections") == "1"
        assert proxy.ask("received", "response") == "5"
        proxy.ask("garbage", b"nonsense".hex())
        assert ask(client) == b"nonsense"
        with pytest.raises(AssertionError, match="there is no nothing"):
            proxy.ask("nothing")
        proxy.ask("cut")
        assert client.recv(1) == b""


def test_slapd_behind_a_proxy(d: Directory) -> None:
    with FaultProxy(d.port, delay=0.002) as proxy:
        assert login(d, d.users[0].dn, d.users[0].password, proxy.url()) == "yes"
        proxy.wait_for_connections(0)
    d.wait_for(lambda counts: counts.closes == 1, "the connection is closed")
    assert d.counts() == Counts(connects=1, binds=1, unbinds=1, closes=1)

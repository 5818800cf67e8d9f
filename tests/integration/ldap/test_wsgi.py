"""The ``ldap_auth`` filter in paste pipelines, behind real servers, before a real slapd."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import gc
import http.client
import json
import logging
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import wsgiref.simple_server
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import OptionError
from keyfront.middleware.ldap.wsgi import LDAPAuth
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, wait_for

loadapp = pytest.importorskip("paste.deploy").loadapp
pytest.importorskip("paste.urlmap")
pytest.importorskip("oslo_middleware")
pytestmark = pytest.mark.usefixtures("nobody_gives_up")

# What tells how a service sees a request: by oslo.context, and by the environ.
SERVICE = '''
import json, os
from oslo_context import context


def application(environ, start_response):
    length = int(environ.get("CONTENT_LENGTH") or 0)
    seen = context.RequestContext.from_environ(environ)
    names = ("REMOTE_USER", "AUTH_TYPE", "SCRIPT_NAME")
    kept = {k: v for k, v in environ.items() if k.startswith("HTTP_") or k in names}
    kept |= {"user": seen.user_id, "roles": seen.roles, "pid": os.getpid()}
    kept["body"] = len(environ["wsgi.input"].read(length))
    body = json.dumps(kept).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def factory(global_conf, **local):
    return application
'''

# In the manner of glance's.
PIPELINE = """
[DEFAULT]
debug = false

[composite:main]
use = egg:Paste#urlmap
/: api
/healthcheck: healthcheck

[app:healthcheck]
paste.app_factory = oslo_middleware:Healthcheck.app_factory
backends = disable_by_file
disable_by_file_path = %(here)s/disabled

[pipeline:api]
pipeline = request_id ldap_auth service

[filter:request_id]
paste.filter_factory = oslo_middleware:RequestId.factory

[app:service]
paste.app_factory = shown_service:factory

[filter:ldap_auth]
paste.filter_factory = keyfront.middleware.ldap.wsgi:filter_factory
"""


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True) as d:
        yield d


@pytest.fixture
def d(slapd: Directory) -> Directory:
    slapd.mark()
    return slapd


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shown_service.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("shown_service", None)


def options(d: Directory, **changes: str) -> dict[str, str]:
    found = {"urls": d.url, "user_dn": f"uid={{}},{d.people}", **changes}
    return {name: text for name, text in found.items() if text}


def paste_file(folder: Path, chosen: dict[str, str]) -> Path:
    path = folder / "api-paste.ini"
    path.write_text(PIPELINE + "".join(f"{k} = {v}\n" for k, v in chosen.items()))
    return path


class _Quiet(wsgiref.simple_server.WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


class _Threaded(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True


class Service:
    """A pipeline behind a server, asked over HTTP."""

    def __init__(self, port: int, application: Any = None) -> None:
        self.port = port
        self.filter: LDAPAuth = _find(application) if application else None  # type: ignore

    def ask(
        self, user: str | bytes | None = None, password: str = "", *, method: str = "GET",
        path: str = "/v2/images", headers: dict[str, str] | None = None, body: Any = None,
        chunked: bool = False,
    ) -> tuple[int, dict[str, str], Any]:
        sent = dict(headers or {})
        if user is not None:
            name = user if isinstance(user, bytes) else user.encode()
            pair = base64.b64encode(name + b":" + password.encode()).decode()
            sent["Authorization"] = f"Basic {pair}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, sent, encode_chunked=chunked)
            answer = connection.getresponse()
            text = answer.read()
            shown = json.loads(text) if text.startswith(b"{") else text
            return answer.status, dict(answer.getheaders()), shown
        finally:
            connection.close()

    def status(self, *arguments: Any, **keywords: Any) -> int:
        return self.ask(*arguments, **keywords)[0]


def _find(application: Any) -> LDAPAuth | None:
    """The filter, somewhere in what paste has built."""
    todo, seen = [application], set()
    while todo:
        each = todo.pop()
        if isinstance(each, LDAPAuth):
            return each
        if id(each) not in seen:
            seen.add(id(each))
            inside = getattr(each, "applications", None)
            todo += [app for _, app in inside] if inside else []
            todo += [each.application] if hasattr(each, "application") else []
    return None


@contextlib.contextmanager
def service(folder: Path, chosen: dict[str, str]) -> Iterator[Service]:
    application = loadapp(f"config:{paste_file(folder, chosen)}")
    server = wsgiref.simple_server.make_server("127.0.0.1", 0, application, _Threaded, _Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made = Service(server.server_port, application)
    try:
        assert made.filter is not None
        yield made
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
        made.filter.close()


# Who is let in


def test_a_login_is_one_bind_and_gets_an_identity(d: Directory, folder: Path) -> None:
    user = d.users[3]
    with service(folder, options(d)) as s:
        status, headers, seen = s.ask(
            user.uid, user.password, headers={"X-User-Id": "root", "X_Roles": "admin"}
        )
        assert status == 200
        assert headers["x-openstack-request-id"]
        assert seen["REMOTE_USER"] == seen["HTTP_X_USER"] == seen["HTTP_X_USER_NAME"] == user.uid
        assert seen["user"] == user.uid
        assert seen["roles"] == []
        assert "HTTP_AUTHORIZATION" not in seen
        assert d.counts().binds == 1
        for _ in range(9):
            assert s.status(user.uid, user.password) == 200
        counts = d.counts()
        assert (counts.binds, counts.connects) == (10, 1)


@pytest.mark.parametrize("way", ["ldap", "start_tls", "ldaps", "search", "search anonymously"])
def test_each_way_to_log_in(d: Directory, folder: Path, way: str) -> None:
    chosen = options(d)
    secure = {"tls_ca_file": str(d.ca_file)}
    if way == "start_tls":
        chosen |= secure | {"urls": f"ldap://localhost:{d.port}", "start_tls": "true"}
    elif way == "ldaps":
        chosen |= secure | {"urls": d.ldaps_url}
    elif way.startswith("search"):
        chosen = options(d, user_dn="", search_base=d.people, user_filter="(|(uid={})(mail={}))")
    if way == "search anonymously":
        chosen["user_name_attribute"] = "uid"
    if way == "search":
        secret = folder / "secret"
        secret.write_text(d.service_password + "\n")
        secret.chmod(0o600)
        chosen |= {"bind_dn": d.service_dn, "bind_password_file": str(secret)}
    with service(folder, chosen) as s:
        for user in [*d.users[:3], *d.odd_users]:
            expected = 200 if user.uid == user.uid.strip() else 401
            status, _, seen = s.ask(user.uid, user.password)
            assert status == expected, user
            if status == 200:
                assert seen["REMOTE_USER"] == user.uid
            assert s.status(user.uid, user.password + "x") == 401
            assert s.status(user.uid, "") == 401
            d.unlock(user.dn)
        assert s.status("nobody", "secret") == 401
        assert s.status("*", d.users[0].password) == 401
        assert s.status(d.users[0].dn, d.users[0].password) == 401
        assert s.status(d.root_dn, d.root_password) == 401
        if way.startswith("search"):
            user, twin = d.users[10], d.users[4]
            expected = user.mail if way == "search" else user.uid
            assert s.ask(user.mail, user.password)[2]["REMOTE_USER"] == expected
            assert twin.mail in [odd.mail for odd in d.odd_users]
            assert s.status(twin.mail, twin.password) == 401
        if way == "search":
            # a filter that finds two
            assert s.status(f"{d.users[0].uid})(uid=*", d.users[0].password) == 401


def test_refusals_are_alike_and_empty_passwords_are_not_sent(d: Directory, folder: Path) -> None:
    user = d.users[5]
    with service(folder, options(d)) as s:
        assert s.status(user.uid, user.password) == 200
        d.mark()
        refused = [s.ask(user.uid, "wrong"), s.ask("nobody", "wrong")]
        assert d.counts().binds == 2
        refused += [s.ask(user.uid, ""), s.ask(), s.ask(headers={"Authorization": "Basic ????"})]
        refused.append(s.ask(headers={"Authorization": "Negotiate YII="}))
        assert d.counts().binds == 2
    bodies = {json.dumps(body, sort_keys=True) for _, _, body in refused}
    challenges = {headers["WWW-Authenticate"] for _, headers, _ in refused}
    assert {status for status, _, _ in refused} == {401}
    assert len(bodies) == 1
    assert challenges == {'Basic realm="OpenStack", charset="UTF-8"'}
    d.unlock(user.dn)


def test_what_the_directory_says_counts_at_once(
    d: Directory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = d.users[6]
    with service(folder, options(d)) as s:
        assert s.status(user.uid, user.password) == 200
        d.password(user.dn, "another-secret")
        assert s.status(user.uid, user.password) == 401
        assert s.status(user.uid, "another-secret") == 200
        d.lock(user.dn)
        caplog.clear()
        with caplog.at_level(logging.INFO, "keyfront"):
            assert s.status(user.uid, "another-secret") == 401
        lines = [x.getMessage() for x in caplog.records if "login of" in x.getMessage()]
        assert len(lines) == 1
        assert re.search(rf"'{user.uid}' from 127\.0\.0\.1: ldap://.*: account locked$", lines[0])
        d.unlock(user.dn)
        d.must_change(d.users[7].dn)
        assert s.status(d.users[7].uid, d.users[7].password) == 401
        d.delete(user.dn)
        assert s.status(user.uid, "another-secret") == 401
    assert "another-secret" not in caplog.text


def test_a_name_in_latin_1_is_understood(d: Directory, folder: Path) -> None:
    user = d.odd_users[0]
    assert not user.uid.isascii()
    d.password(user.dn, "ascii-secret")
    with service(folder, options(d)) as s:
        assert s.ask(user.uid.encode("latin-1"), "ascii-secret")[2]["REMOTE_USER"] == user.uid
    d.password(user.dn, user.password)


def test_public_paths_and_the_rest_of_the_pipeline(d: Directory, folder: Path) -> None:
    chosen = options(d, public_paths="/versions, OPTIONS /*")
    with service(folder, chosen) as s:
        assert s.status(path="/healthcheck") == 200
        status, _, seen = s.ask(path="/versions", headers={"X-User": "root", "X-Roles": "admin"})
        assert (status, seen["user"], seen["roles"]) == (200, None, [])
        assert not {"REMOTE_USER", "HTTP_X_USER"} & set(seen)
        assert s.status(path="/v2/images", method="OPTIONS") == 200
        assert s.status(path="/versions", method="POST", body=b"x") == 401
        assert s.status(path="/versions/../v2/images") == 401
        assert s.status() == 401
    assert d.counts().binds == 0


def test_bodies_and_heads(d: Directory, folder: Path) -> None:
    user = d.users[8]
    with service(folder, options(d)) as s:
        status, _, seen = s.ask(user.uid, user.password, method="POST", body=b"x" * 100_000)
        assert (status, seen["body"]) == (200, 100_000)
        assert s.ask(method="HEAD")[::2] == (401, b"")
        assert s.ask(user.uid, user.password, method="HEAD")[::2] == (200, b"")


# When the directory fails


def test_an_outage_is_503_until_it_is_over(
    d: Directory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = d.users[9]
    with FaultProxy(d.port) as proxy:
        chosen = options(d, urls=proxy.url(), connect_timeout="60", operation_timeout="60")
        with service(folder, chosen) as s, caplog.at_level(logging.INFO, "keyfront"):
            assert s.status(user.uid, user.password) == 200
            proxy.cut()
            for password in (user.password, "wrong", "wrong"):
                status, headers, body = s.ask(user.uid, password)
                assert status == 503
                assert int(headers["Retry-After"]) > 0
                assert "WWW-Authenticate" not in headers
                assert body["error"]["code"] == 503
            # what is no login at all needs no directory
            assert s.status() == 401
            proxy.forward()
            wait_for(lambda: s.status(user.uid, user.password) == 200, "logins are checked again")
            assert s.status(user.uid, "wrong") == 401
    lines = [x for x in caplog.records if "answered 503" in x.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelname == "ERROR"
    d.unlock(user.dn)


@pytest.mark.parametrize("fault", ["stall", "garbage", "reset", "black_hole"])
def test_no_fault_is_a_wrong_password(d: Directory, folder: Path, fault: str) -> None:
    user = d.users[10]
    with FaultProxy(d.port) as proxy:
        chosen = options(d, urls=proxy.url(), connect_timeout="5", operation_timeout="5")
        with service(folder, chosen) as s:
            if fault != "black_hole":
                assert s.status(user.uid, user.password) == 200
            if fault == "garbage":
                proxy.garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            elif fault == "reset":
                proxy.reset_after(0)
            else:
                getattr(proxy, fault)()
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                asked = [
                    threads.submit(s.status, user.uid, password)
                    for password in (user.password, "wrong") * 4
                ]
                assert {x.result(PATIENCE) for x in asked} == {503}
            proxy.forward()
            wait_for(lambda: s.status(user.uid, user.password) == 200, "it has recovered")
    d.unlock(user.dn)


def test_a_pool_in_use_is_503_soon(d: Directory, folder: Path) -> None:
    user = d.users[11]
    with FaultProxy(d.port) as proxy:
        chosen = options(
            d, urls=proxy.url(), auth_max_size="1", timeout="60", max_waiting="1",
            operation_timeout="60", connect_timeout="60",
        )
        with service(folder, chosen) as s, concurrent.futures.ThreadPoolExecutor(4) as threads:
            assert s.status(user.uid, user.password) == 200
            assert s.filter.pool is not None
            # From now on only: opening the connection takes of it, too.
            s.filter.pool._auth_pool.timeout = 0.3
            before = proxy.received("request")
            proxy.stall()
            first = threads.submit(s.status, user.uid, user.password)
            proxy.wait_for_bytes("request", before + 10)
            status, headers, _ = s.ask(user.uid, user.password)
            assert (status, headers["Retry-After"]) == (503, "1")
            proxy.forward()
            assert first.result(PATIENCE) == 200
            assert s.status(user.uid, user.password) == 200


@pytest.mark.usefixtures("refused_for_long")
def test_a_service_that_is_refused_is_not_the_users_fault(
    d: Directory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = d.users[12]
    chosen = options(
        d, user_dn="", search_base=d.people, bind_dn=d.service_dn, bind_password="not-the-secret"
    )
    with service(folder, chosen) as s:
        assert [s.status(user.uid, user.password) for _ in range(5)] == [503] * 5
    # nor is it sent again and again, until the account is locked
    assert d.counts().binds == 1
    assert "bind_dn" in caplog.text
    assert "not-the-secret" not in caplog.text
    d.unlock(d.service_dn)


def test_many_wrong_logins_leave_nothing(d: Directory, folder: Path) -> None:
    user = d.users[13]
    with service(folder, options(d, auth_max_size="4")) as s:
        assert s.status(user.uid, user.password) == 200
        before = set(threading.enumerate())
        sizes = []
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                names = [f"nobody{n}" for n in range(1000)]
                assert set(threads.map(lambda name: s.status(name, "wrong"), names)) == {401}
            # The server's threads end after their answers.
            wait_for(lambda: set(threading.enumerate()) <= before, "all threads have ended")
            gc.collect()
            sizes.append(len(gc.get_objects()))
        pool = s.filter.pool
        assert pool is not None
        stats = pool.get_stats()
        assert stats["auth_size"] <= 4
        assert stats["auth_lent"] == 0
        assert sizes[1] - sizes[0] < 500
        assert s.status(user.uid, user.password) == 200
    assert d.counts().connects <= 5


# Loading


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"urls": "http://x"}, "ldap_auth: urls = http://x"),
        ({"user_dn": ""}, "ldap_auth: user_dn = (not set)"),
        ({"auth_max_size": "0"}, "ldap_auth: auth_max_size = 0"),
        ({"tls_ca_file": "/nowhere", "start_tls": "true"}, "ldap_auth: tls_ca_file = /nowhere"),
        ({"surprise": "x"}, "egg:keyfront#ldap_auth = surprise"),
    ],
)
def test_a_bad_section_ends_the_load(
    d: Directory, folder: Path, changes: dict[str, str], words: str
) -> None:
    path = paste_file(folder, options(d, **changes))
    with pytest.raises(OptionError) as caught:
        loadapp(f"config:{path}")
    assert str(caught.value).startswith(words)


def test_loading_connects_to_nothing(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"ldap://127.0.0.1:{nobody.getsockname()[1]}"
        path = paste_file(folder, {"urls": url, "user_dn": "uid={},dc=x"})
        before = set(threading.enumerate())
        loadapp(f"config:{path}")
        assert set(threading.enumerate()) <= before
        nobody.settimeout(0)
        with pytest.raises(BlockingIOError):
            nobody.accept()


# Behind uWSGI


@contextlib.contextmanager
def uwsgi(folder: Path, chosen: dict[str, str], target: str = "") -> Iterator[Service]:
    """Two worker processes, forked after the load, of four threads each.

    As the ini file does not ask for it, Python learns nothing of the fork.
    """
    program = Path(sys.executable).with_name("uwsgi")
    if not program.exists():
        pytest.skip("uwsgi is not installed")
    target = target or f"config:{paste_file(folder, chosen)}"
    log = folder / "uwsgi.log"
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("wb") as output:
        os.set_inheritable(listening.fileno(), True)
        port = listening.getsockname()[1]
        process = subprocess.Popen(
            [str(program), "--master", "--processes=2", "--threads=4", "--need-app",
             "--die-on-term", f"--http-socket=fd://{listening.fileno()}", "--http-chunked-input",
             "--buffer-size=65535", "--venv", sys.prefix, f"--pythonpath={folder}",
             "--module=keyfront.gateway.uwsgi:application"],
            env={**os.environ, "KEYFRONT_APP": target}, pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
        )  # fmt: skip
    made = Service(port)
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return made.status(path="/healthcheck") == 200
            except OSError:
                return False

        try:
            wait_for(answers, "uWSGI answers")
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed: {log.read_text()}") from None
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    assert "Traceback" not in text, text


def test_forked_workers_have_connections_of_their_own(d: Directory, folder: Path) -> None:
    chosen = options(d, urls=d.ldaps_url, tls_ca_file=str(d.ca_file), auth_max_size="4")
    both = [(user, right) for user in d.users[14:18] for right in (True, False)]
    with uwsgi(folder, chosen) as s, concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert d.counts().connects == 0

        def log_in(login: Any) -> tuple[int, int | None]:
            user, right = login
            password = user.password if right else "wrong"
            status, _, seen = s.ask(user.uid, password)
            assert status != 200 or seen["REMOTE_USER"] == user.uid
            return status, seen.get("pid")

        # wrong ones only twice, or the users are locked
        asked = [*both, *both, *([x for x in both if x[1]] * 40)]
        found = list(threads.map(log_in, asked))
        deadline = time.monotonic() + PATIENCE
        while len({pid for _, pid in found if pid}) < 2:  # one may have begun late
            assert time.monotonic() < deadline, "one of the workers does nothing"
            asked += [x for x in both if x[1]]
            found += threads.map(log_in, asked[len(found):])
        expected = [200 if right else 401 for _, right in asked]
        assert [status for status, _ in found] == expected
        counts = d.counts()
        assert counts.binds == len(asked)
        assert counts.connects <= 8
    d.wait_for(lambda counts: counts.closes >= counts.connects, "all connections are closed")
    for user in d.users[14:18]:
        d.unlock(user.dn)


OPENED = """
import sys
import threading
import time
from keyfront.errors import KeyfrontError
from keyfront.middleware.ldap import LDAPPool

pool = LDAPPool({url!r}, bind_dn={dn!r}, bind_password={password!r}, min_size=1, timeout=30)
# Its worker is at it, and in some workers' memory holds locks for ever.
account = pool._search_connector.account


def others():
    me = threading.get_ident()
    return {{x: (f.f_code, f.f_lasti) for x, f in sys._current_frames().items() if x != me}}


# And waits: a thread that runs at a fork which Python is not told of has the interpreter's lock in
# the workers' memory for ever, as no worker of uWSGI's could help.
before, times = None, 0
while times < 20:
    time.sleep(0.005)
    now = others()
    times = times + 1 if now == before and {until} else 0
    before = now
pool._servers._changed.lock.acquire()
pool._counts_lock.acquire()


def application(environ, start_response):
    status, said = "200 OK", b""
    if environ["PATH_INFO"] != "/healthcheck":
        try:
            pool.search({dn!r}, 0)
            pool.authenticate({dn!r}, {password!r})
            pool.get_stats()
        except KeyfrontError as error:
            status, said = "503 Away", str(error).encode()
    start_response(status, [("Content-Length", str(len(said)))])
    return [said]
"""


# What is under way at the fork: the sign of life before the first BIND; the BIND, for which the
# turn of the node is held.
UNDER_WAY = {
    "question": "account._trying",
    "bind": "any(turn._threads.locked() for turn in account._refusals._turns)",
}


@pytest.mark.parametrize("what", UNDER_WAY)
def test_a_pool_that_was_opened_before_a_fork_that_nobody_told_of(
    d: Directory, folder: Path, what: str
) -> None:
    with FaultProxy(d.port) as proxy:
        if what == "bind":
            proxy.stall_at(d.service_dn.encode())
        else:
            proxy.stall()
        text = OPENED.format(
            url=proxy.url(), dn=d.service_dn, password=d.service_password, until=UNDER_WAY[what]
        )
        (folder / "opened.py").write_text(text)
        with uwsgi(folder, {}, "opened:application") as s:
            proxy.forward()
            for _ in range(8):
                assert s.ask()[::2] == (200, b"")


def test_what_else_a_client_may_send(d: Directory, folder: Path) -> None:
    user = d.users[18]
    with uwsgi(folder, options(d)) as s:
        forged = {"X-User": "root", "X_User_Name": "root", "x-roles": "admin"}
        forged["Remote-User"] = "root"
        status, _, seen = s.ask(user.uid, user.password, headers=forged)
        assert (status, seen["user"], seen["roles"]) == (200, user.uid, [])
        assert "root" not in seen.values()
        chunks = [b"x" * 1000] * 20
        assert s.status(method="POST", body=iter(chunks), chunked=True) == 401
        assert (
            s.status(user.uid, user.password, method="POST", body=iter(chunks), chunked=True) == 200
        )
        for junk in (
            "Basic " + "A" * 60_000,
            "Basic " + base64.b64encode(b"\xff" * 5000).decode(),
            "Basic " + base64.b64encode(b"a" * 6000 + b":" + b"b" * 100).decode(),
            "Basic",
            "=" * 5000,
            "Digest username=\"root\"",
        ):
            assert s.status(headers={"Authorization": junk}) == 401, junk[:40]
        assert s.ask(method="HEAD")[::2] == (401, b"")
        # twice the same header
        with socket.create_connection(("127.0.0.1", s.port), PATIENCE) as client:
            pair = base64.b64encode(f"{user.uid}:{user.password}".encode())
            line = b"Authorization: Basic " + pair + b"\r\n"
            client.sendall(b"GET /v2 HTTP/1.0\r\nX-User: root\r\nX_User: root\r\n" + line + b"\r\n")
            answer = b""
            while part := client.recv(65536):
                answer += part
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["user"] == user.uid
        assert s.status(user.uid, user.password) == 200

"""The ``ldap_auth`` filter before a pool that is none: headers, names, answers, log, options."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import os
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    KeyfrontError,
    OptionError,
    PoolFullError,
    PoolTimeoutError,
    Verdict,
)
from keyfront.middleware.ldap import Kerberos
from keyfront.middleware.ldap import wsgi as ldap_filter
from keyfront.middleware.ldap import wsgi_options as ldap_auth_options
from keyfront.middleware.ldap.wsgi import (
    MAX_CREDENTIALS,
    LDAPAuth,
    Outage,
    credentials,
    filter_factory,
    is_secure,
    shown,
    strip,
)
from keyfront.middleware.ldap.wsgi_options import OPTIONS
from support.certificates import certificates
from support.served import PATIENCE

NAME, SECRET = "jane", "pass:wörd-of-jane"
USER_DN = "uid={},ou=People,dc=example,dc=org"
MINIMAL = {"urls": "ldaps://ds1.example.org", "user_dn": USER_DN}


def basic(name: str = NAME, password: str = SECRET, encoding: str = "utf-8") -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode(encoding)).decode()


class FakePool:
    """Knows one user; ``error`` is raised instead, where there is one."""

    def __init__(self) -> None:
        self.error: KeyfrontError | None = None
        self.asked: list[str] = []
        self.binds = 0

    def authenticate(self, name: str, password: str, *, address: str = "") -> object:
        self.binds += 1
        self.asked.append(name)
        if self.error is not None:
            raise self.error
        if (name, password) != (NAME, SECRET):
            raise CredentialsError(Verdict.WRONG_PASSWORD, server="ldap://ds1:389")
        return types.SimpleNamespace(name=name)

    def close(self, timeout: float) -> None:
        self.error = DirectoryUnavailableError("closed")


class Answer:
    def __init__(self) -> None:
        self.status = ""
        self.headers: dict[str, str] = {}
        self.body = b""

    def start(self, status: str, headers: list[tuple[str, str]], error: Any = None) -> None:
        assert not self.status
        self.status = status
        self.headers = dict(headers)
        assert len(headers) == len(self.headers)


class Served:
    """The filter before an application that keeps what it is given."""

    def __init__(self, **options: Any) -> None:
        self.pool = FakePool()
        self.made = 0
        self.environs: list[dict[str, Any]] = []
        self.look: Callable[[], None] = lambda: None
        options.setdefault("realm", "Here")
        self.filter = LDAPAuth(self.application, self.make, **options)

    def make(self) -> Any:
        self.made += 1
        return self.pool

    def application(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.environs.append(environ)
        self.look()
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"served"]

    def get(self, authorization: str | None = None, **environ: Any) -> Answer:
        answer = Answer()
        full = {
            "REQUEST_METHOD": "GET",
            "SCRIPT_NAME": "",
            "PATH_INFO": "/v2/images",
            "REMOTE_ADDR": "192.0.2.9",
            "wsgi.url_scheme": "https",
            **environ,
        }
        if authorization is not None:
            full["HTTP_AUTHORIZATION"] = authorization
        answer.body = b"".join(self.filter(full, answer.start))
        return answer


@pytest.fixture
def served() -> Served:
    return Served()


# Who is let in


def test_a_login_is_one_bind_and_becomes_the_identity(served: Served) -> None:
    answer = served.get(basic())
    assert (answer.status, answer.body) == ("200 OK", b"served")
    (environ,) = served.environs
    assert environ["REMOTE_USER"] == NAME
    assert environ["HTTP_X_USER"] == environ["HTTP_X_USER_NAME"] == NAME
    assert environ["AUTH_TYPE"] == "Basic"
    assert served.pool.binds == 1


def test_nothing_is_remembered_between_requests(served: Served) -> None:
    for _ in range(3):
        served.get(basic())
    assert served.pool.binds == 3
    served.pool.error = CredentialsError(Verdict.LOCKED)
    assert served.get(basic()).status == "401 Unauthorized"


def test_the_identity_has_the_headers_that_oslo_middleware_sets(served: Served) -> None:
    theirs = pytest.importorskip("oslo_middleware.basic_auth")
    bcrypt = pytest.importorskip("bcrypt")
    crypted = bcrypt.hashpw(b"x", bcrypt.gensalt(4)).decode()
    expected = theirs.auth_entry(f"{NAME}:{crypted}", b"x")
    served.get(basic())
    assert {key: served.environs[0][key] for key in expected} == expected


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Basic",
        "Basic ",
        "Basic !!!!",
        "Basic Og==",  # ":"
        "Basic OnB3",  # no name
        "Basic amFuZQ==",  # no colon
        "Basic amFuZTo=",  # no password
        "Basic amFuZTpw\x00",
        "Bearer amFuZTpw",
        "Basic amFuZTpw, Basic amFuZTpw",
        "Basic amFuZTp",
        "Basic\tamFuZTpw",
        "Basic zoë",
        "amFuZTpw",
        "Basic " + "A" * 4 * MAX_CREDENTIALS,
        "B" * 10_000_000,
        basic("jane\n"),
        basic("ja\0ne"),
        basic("ja\x7fne"),
        basic("ja\x85ne"),
        basic(NAME, "pass\0word"),
        basic(NAME, "pass\nword"),
        basic(NAME, "pass\x85word"),
        # to a directory all of these are jane
        basic(" jane"),
        basic("jane "),
        basic("jane  doe"),
        basic("\uff4aane"),
        basic("jane\u200b"),
        basic("ja\u00adne"),
        basic("ja\u034fne"),
        basic("jane\ufe0f"),
        basic("jane\u2028"),
        basic("jane\u00a0doe"),
        basic("\u202ejane"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_what_is_no_login_is_401_before_the_wire(served: Served, header: str | None) -> None:
    answer = served.get(header)
    assert answer.status == "401 Unauthorized"
    assert served.pool.binds == served.made == 0
    assert not served.environs


def test_all_refusals_are_the_same(served: Served) -> None:
    answers = [served.get(), served.get("Basic x"), served.get(basic("nobody"))]
    answers.append(served.get(basic(NAME, "wrong")))
    for verdict in Verdict:
        served.pool.error = CredentialsError(verdict, diagnostic="only for the log")
        answers.append(served.get(basic()))
    assert len({(x.status, x.body, *sorted(x.headers.items())) for x in answers}) == 1
    first = answers[0]
    assert first.headers["WWW-Authenticate"] == 'Basic realm="Here", charset="UTF-8"'
    assert first.headers["Content-Type"] == "application/json"
    assert int(first.headers["Content-Length"]) == len(first.body)
    error = json.loads(first.body)["error"]
    assert (error["code"], error["title"]) == (401, "Unauthorized")
    assert error["message"]


def test_the_realm_is_quoted() -> None:
    answer = Served(realm='a "b" \\ c').get()
    assert answer.headers["WWW-Authenticate"].startswith('Basic realm="a \\"b\\" \\\\ c", ')


def test_head_has_no_body(served: Served) -> None:
    answer = served.get(REQUEST_METHOD="HEAD")
    assert (answer.status, answer.body) == ("401 Unauthorized", b"")
    assert answer.headers["Content-Length"] == served.get().headers["Content-Length"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (basic("jane", "a:b:c"), ("jane", "a:b:c")),
        (basic("jane", ":"), ("jane", ":")),
        (basic("jane", " "), ("jane", " ")),
        (basic("jane", "pass word"), ("jane", "pass word")),
        (basic("李雷", "密码"), ("李雷", "密码")),
        (basic("zoë", "é"), ("zoë", "é")),
        (basic("zoë", "é", "latin-1"), ("zoë", "é")),
        (basic("zoe\u0308", "e\u0301"), ("zoë", "e\u0301")),
        (basic("o'neil (ops)*", "x"), ("o'neil (ops)*", "x")),
        (basic("Jane Doe", "x"), ("Jane Doe", "x")),
        ("basic " + basic()[6:], (NAME, SECRET)),
        ("BASIC    " + basic()[6:] + "  ", (NAME, SECRET)),
        (" \t" + basic(), (NAME, SECRET)),
    ],
)
def test_names_and_passwords_are_read_as_rfc_7617_says(
    header: str, expected: tuple[str, str]
) -> None:
    assert credentials(header) == expected


def test_a_name_that_is_no_utf_8_is_one_bind_only(served: Served) -> None:
    assert served.get(basic("zoë", "x", "latin-1")).status == "401 Unauthorized"
    assert served.pool.asked == ["zoë"]


def test_lower_case_is_for_the_login_and_for_the_service() -> None:
    served = Served(lower_case=True)
    assert served.get(basic("JANE")).status == "200 OK"
    assert served.pool.asked == [NAME]
    assert served.environs[0]["REMOTE_USER"] == NAME
    assert Served().get(basic("JANE")).status == "401 Unauthorized"


# What goes on to the application

FORGED = {
    "HTTP_X_USER": "root",
    "HTTP_X_USER_ID": "1",
    "HTTP_X_USER_NAME": "root",
    "HTTP_X_USER_DOMAIN_ID": "default",
    "HTTP_X_USER_DOMAIN_NAME": "Default",
    "HTTP_X_ROLES": "admin",
    "HTTP_X_ROLE": "admin",
    "HTTP_X_IDENTITY_STATUS": "Confirmed",
    "HTTP_X_IS_ADMIN_PROJECT": "True",
    "HTTP_X_SERVICE_CATALOG": "[]",
    "HTTP_X_SERVICE_ROLES": "service",
    "HTTP_X_TENANT": "1",
    "HTTP_X_AUTH_TOKEN": "admin:admin",
    "HTTP_X_STORAGE_TOKEN": "t",
    "HTTP_X_SERVICE_TOKEN": "t",
    "HTTP_X_FORWARDED_USER": "root",
    "HTTP_REMOTE_USER": "root",
    "HTTP_X_REMOTE_USER": "root",
    "HTTP_OPENSTACK_SYSTEM_SCOPE": "all",
    "REMOTE_USER": "root",
    "REDIRECT_REMOTE_USER": "root",
    "AUTH_TYPE": "Negotiate",
    "REDIRECT_HTTP_AUTHORIZATION": "Basic x",
}
INNOCENT = {
    "HTTP_HOST": "example.org",
    "HTTP_X_FORWARDED_FOR": "192.0.2.1",
    "HTTP_X_FORWARDED_PROTO": "https",
    "HTTP_X_OPENSTACK_REQUEST_ID": "req-1",
    "HTTP_X_SUBJECT_TOKEN": "t",
    "HTTP_ACCEPT": "*/*",
    "REMOTE_ADDR": "192.0.2.9",
    "CONTENT_LENGTH": "3",
}


@pytest.mark.parametrize("options", [{}, {"public_paths": [("GET", "/v2/images")]}])
def test_what_the_client_says_of_itself_does_not_go_on(options: Any) -> None:
    if options:
        paths = OPTIONS["public_paths"].read("/v2/images")
        options = {"public_paths": paths}
    served = Served(**options)
    assert served.get(basic(), **FORGED, **INNOCENT).status == "200 OK"
    (environ,) = served.environs
    ours = {"REMOTE_USER", "HTTP_X_USER", "HTTP_X_USER_NAME", "AUTH_TYPE"}
    left = set(environ) & {*FORGED, "HTTP_AUTHORIZATION"}
    assert left == (set() if options else ours)
    assert "root" not in environ.values()
    assert {key: environ[key] for key in INNOCENT} == INNOCENT


def test_all_that_auth_token_removes_is_removed() -> None:
    request = pytest.importorskip("keystonemiddleware.auth_token._request")
    names = list(request._AuthTokenRequest.blank("/")._all_auth_headers())
    assert len(names) > 30
    environ = {"HTTP_" + name.upper().replace("-", "_"): "forged" for name in names}
    strip(environ)
    assert environ == {}


def test_all_that_a_request_context_believes_is_removed() -> None:
    context = pytest.importorskip("oslo_context.context")
    believed = {key for keys in context._ENVIRON_HEADERS.values() for key in keys}
    assert len(believed) > 15
    environ = dict.fromkeys(believed, "forged")
    strip(environ)
    assert not [key for key in environ if not key.startswith("openstack.")]


def test_tokens_go_on_where_that_is_wanted() -> None:
    served = Served(keep_tokens=True)
    served.get(basic(), **FORGED)
    (environ,) = served.environs
    assert environ["HTTP_X_AUTH_TOKEN"] == "admin:admin"
    assert environ["HTTP_X_SERVICE_TOKEN"] == environ["HTTP_X_STORAGE_TOKEN"] == "t"
    assert "HTTP_X_SERVICE_ROLES" not in environ
    assert "HTTP_AUTHORIZATION" not in environ


def test_the_second_copy_of_eventlets_server_is_cleaned(served: Served) -> None:
    raw = (("Host", "x"), ("Authorization", basic()), ("X-User", "root"), ("x_roles", "admin"))
    served.get(basic(), headers_raw=raw)
    assert served.environs[0]["headers_raw"] == (("Host", "x"),)


@pytest.mark.parametrize("error", [None, CredentialsError(Verdict.LOCKED), PoolFullError("full")])
def test_no_password_is_left_while_or_after_a_request(
    served: Served, error: KeyfrontError | None, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "-".join(("unheard", "of", str(id(served))))
    served.pool.authenticate = authenticate = _Authenticate(secret, error)  # type: ignore

    def look() -> None:
        frame = sys._getframe().f_back
        while frame is not None and frame.f_code.co_name != "get":
            for name, value in frame.f_locals.items():
                assert secret not in repr(value), (frame.f_code, name)
                assert encoded not in repr(value), (frame.f_code, name)
            frame = frame.f_back

    served.look = look
    encoded = basic(NAME, secret)[6:]
    with caplog.at_level(logging.DEBUG):
        answer = served.get(f"Basic {encoded}")
    assert authenticate.right
    if error is None:
        assert served.environs
    assert secret not in caplog.text + str(answer.headers) + str(answer.body)
    kept = [served.filter, served.environs, caplog.records]
    assert secret not in "".join(_texts(kept))
    assert encoded not in "".join(_texts(kept))


class _Authenticate:
    """Leaves the password in the traceback, as a careless one would."""

    def __init__(self, secret: str, error: KeyfrontError | None) -> None:
        self.digest = hash(secret)
        self.error = error
        self.right = False

    def __call__(self, name: str, password: str, *, address: str = "") -> object:
        self.right = hash(password) == self.digest
        if self.error is not None:
            raise self.error
        return types.SimpleNamespace(name=name)


def _texts(roots: list[Any]) -> Iterator[str]:
    """All texts that can be reached, through frames as well."""
    seen, todo = set(), list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (types.ModuleType, type)):
            continue
        seen.add(id(each))
        if isinstance(each, str):
            yield each
        elif isinstance(each, bytes):
            yield each.decode("latin-1")
        elif not isinstance(each, (types.FunctionType, logging.Logger, logging.Handler)):
            todo += gc.get_referents(each)


# When logins cannot be checked


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (DirectoryUnavailableError("away"), "5"),
        (DirectoryTimeoutError("slow"), "5"),
        (DirectoryAnswerError(13, "confidentialityRequired"), "5"),
        (OptionError("ldap_auth: x", "y", "z"), "5"),
        (PoolTimeoutError("busy"), "1"),
        (PoolFullError("full"), "1"),
    ],
)
def test_an_outage_is_503_and_no_verdict(
    served: Served, error: KeyfrontError, seconds: str
) -> None:
    served.pool.error = error
    answer = served.get(basic())
    assert answer.status == "503 Service Unavailable"
    assert answer.headers["Retry-After"] == seconds
    assert "WWW-Authenticate" not in answer.headers
    assert json.loads(answer.body)["error"]["code"] == 503
    assert str(error) not in answer.body.decode()
    assert not served.environs
    assert served.get(basic(), REQUEST_METHOD="HEAD").body == b""


def test_a_mistake_of_ours_is_no_outage(served: Served) -> None:
    served.pool.error = ZeroDivisionError()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError) as caught:
        served.get(basic())
    (frame,) = [x.frame for x in caught.traceback if x.name == "_log_in"]
    assert SECRET not in str(frame.f_locals)


def test_an_outage_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    outage = Outage(clock=lambda: now[0])
    with caplog.at_level(logging.DEBUG):
        for _ in range(500):
            outage.failed("ds1 is away")
            now[0] += 0.01
            outage.answered()  # another server did answer: it is not over
        now[0] += 20
        for _ in range(3):
            outage.answered()
        outage.failed("ds2 is away")
    first, second, third = caplog.records
    assert (first.levelname, first.getMessage()) == (
        "ERROR",
        "ldap_auth: logins are answered 503: ds1 is away",
    )
    assert second.levelname == "WARNING"
    assert "500 were answered 503 in 5.0 s" in second.getMessage()
    assert "ds2" in third.getMessage()


def test_a_refusal_is_one_line_with_its_reason(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.pool.error = CredentialsError(Verdict.LOCKED, diagnostic="x", server="ldap://ds1:389")
    with caplog.at_level(logging.INFO):
        served.get(basic("bad' name"))
        served.get("Basic x")
        served.get()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "ldap_auth: login of 'bad? name' from 192.0.2.9: ldap://ds1:389: invalidCredentials (49): "
        "x: account locked"
    )


def test_a_login_that_is_right_logs_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        served.get(basic())
    assert not caplog.records


@pytest.mark.parametrize("text", ["a\nb", "a\u2028b", "a\x1b[31mb", "a\u202eb", "a'b", "x" * 9999])
def test_a_name_in_the_log_is_one_line(text: str) -> None:
    name = shown(text)
    assert name.isprintable()
    assert "'" not in name
    assert len(name) <= 103


def test_plain_http_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    served = Served()
    plain = {"wsgi.url_scheme": "http"}
    served.get(**plain)
    served.get(basic(), **plain, HTTP_X_FORWARDED_PROTO="https")
    served.get(basic(), **plain, HTTP_FORWARDED='for=192.0.2.1;proto="https"')
    assert not caplog.records
    for _ in range(3):
        served.get(basic(), **plain)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "X-Forwarded-Proto" in record.getMessage()
    assert not is_secure({**plain, "HTTP_X_FORWARDED_PROTO": "http, https"})


# What needs no login


@pytest.mark.parametrize(
    ("option", "method", "path", "is_public"),
    [
        ("/healthcheck", "GET", "/healthcheck", True),
        ("/healthcheck", "HEAD", "/healthcheck", True),
        ("/healthcheck", "POST", "/healthcheck", False),
        ("/healthcheck", "GET", "/healthcheck/", False),
        ("/healthcheck", "GET", "/healthcheck2", False),
        ("/healthcheck", "GET", "//healthcheck", False),
        ("OPTIONS /*", "OPTIONS", "/v2/images", True),
        ("OPTIONS /*", "GET", "/v2/images", False),
        ("* /public/*", "DELETE", "/public/a/b", True),
        ("* /public/*", "DELETE", "/public/", True),
        ("* /public/*", "DELETE", "/public", False),
        ("* /public/*", "DELETE", "/public/../v2/images", False),
        ("* /public/*", "DELETE", "/public/..", False),
        ("* /public/*", "DELETE", "/public/./x", False),
        ("* /public/*", "DELETE", "/public//x", False),
        ("/a, POST /b", "POST", "/b", True),
        ("/a, POST /b", "POST", "/a", False),
        ("/mounted/versions", "GET", "/mounted/versions", True),
        ("/", "GET", "/", True),
        ("/", "GET", "/v2/images", False),
    ],
)
def test_public_paths(option: str, method: str, path: str, is_public: bool) -> None:
    served = Served(public_paths=OPTIONS["public_paths"].read(option))
    mounted = path.startswith("/mounted")
    script, rest = ("/mounted", path.removeprefix("/mounted")) if mounted else ("", path)
    answer = served.get(REQUEST_METHOD=method, SCRIPT_NAME=script, PATH_INFO=rest)
    assert answer.status == ("200 OK" if is_public else "401 Unauthorized")
    assert served.made == 0


# Many requests


def test_ten_thousand_wrong_logins_take_no_memory(served: Served) -> None:
    def flood(start: int) -> None:
        for n in range(start, start + 5000):
            served.get(basic(f"user{n}", "x" * 2000))
            served.pool.asked.clear()

    flood(0)
    gc.collect()
    tracemalloc.start()
    try:
        flood(5000)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert served.pool.binds == 10_000
    assert grown < 100_000


def test_the_pool_is_made_once_by_the_first_login(served: Served) -> None:
    served.get()
    assert served.made == 0
    second = threading.Barrier(2)
    make = served.filter._make_pool

    def make_slowly() -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            second.wait(0.2)  # for another one that makes a pool
        return make()

    served.filter._make_pool = make_slowly
    threads = [threading.Thread(target=served.get, args=(basic(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert served.made == 1
    assert len(served.environs) == 8


def test_a_pool_that_cannot_be_made_is_an_outage_until_it_can(served: Served) -> None:
    def fail() -> Any:
        raise OptionError("ldap_auth: x", "y", "z")

    make = served.filter._make_pool
    served.filter._make_pool = fail
    assert served.get(basic()).status.startswith("503 ")
    served.filter._make_pool = make
    assert served.get(basic()).status == "200 OK"


def test_close(served: Served) -> None:
    served.filter.close()
    served.get(basic())
    served.filter.close(0)
    assert served.get(basic()).status.startswith("503 ")


# Options


def refusal(local: dict[str, str]) -> str:
    with pytest.raises(OptionError) as caught:
        filter_factory({}, **local)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_those_of_the_table() -> None:
    values = ldap_auth_options.read(MINIMAL)
    assert values["urls"] == ["ldaps://ds1.example.org"]
    assert (values["min_size"], values["auth_max_size"], values["timeout"]) == (0, 100, 10.0)
    assert values["public_paths"] == []
    searching = {"urls": "ldap://x", "search_base": "dc=x", "max_size": "1"}
    assert ldap_auth_options.read(searching)["min_size"] == 1


def test_values_reach_the_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the service\n")
    secret.chmod(0o640)
    made: list[dict[str, Any]] = []

    class Pool(FakePool):
        def __init__(self, **arguments: Any) -> None:
            super().__init__()
            made.append(arguments)

    monkeypatch.setattr(ldap_filter, "LDAPPool", Pool)
    local = {
        "url": "ldap://127.0.0.1:1,ldap://localhost\n ldapi://%2Frun%2Fslapd",
        "strategy": "balanced",
        "search_base": "ou=People,dc=x",
        "user_filter": "(&(uid={})(!(disabled=TRUE)))",
        "bind_dn": "cn=service,dc=x",
        "bind_password_file": str(secret),
        "tls_verify": "never",
        "start_tls": "no",
        "min_size": "2",
        "max_size": "3",
        "auth_min_size": "4",
        "auth_max_size": "5",
        "timeout": "6.5",
        "max_waiting": "7",
        "fast_bind": "never",
        "fail_back": "off",
        "realm": "x",
    }
    build = filter_factory({"debug": "true"}, **local)
    (checked,) = made
    assert checked.pop("open") is False
    application = build(lambda environ, start: [])
    assert len(made) == 1
    application._pool()
    assert made[1] == checked
    tls = checked.pop("tls")
    assert tls.verify == "never"
    assert checked["urls"] == ["ldap://127.0.0.1:1", "ldap://localhost", "ldapi://%2Frun%2Fslapd"]
    assert (checked["bind_password"], checked["bind_password_file"]) == ("", str(secret))
    assert checked["fast_bind"] is False
    assert checked["fail_back"] is False
    sizes = [checked[x] for x in ("min_size", "max_size", "auth_min_size", "auth_max_size")]
    assert sizes == [2, 3, 4, 5]
    assert (checked["timeout"], checked["max_waiting"]) == (6.5, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"urls": ""}, ["ldap_auth: urls", "ldaps://"]),
        ({"urls": "http://x"}, ["ldap_auth: urls", "http://x", "ldap://HOST"]),
        ({"urls": "ldap://x/dc=y"}, ["ldap_auth: urls"]),
        ({"url": "ldap://x"}, ["ldap_auth: url", "beside urls"]),
        ({"user_dn": "uid=jane"}, ["ldap_auth: user_dn", "uid=jane", "{}"]),
        ({"user_dn": "uid={},ou={}"}, ["ldap_auth: user_dn", "one {}"]),
        ({"search_base": "dc=x"}, ["ldap_auth: user_dn", "beside search_base"]),
        ({"max_size": "0"}, ["ldap_auth: max_size", "0", "from 1 to 10000"]),
        ({"max_size": "1e3"}, ["ldap_auth: max_size"]),
        ({"max_size": "²"}, ["ldap_auth: max_size"]),
        ({"auth_max_size": "-1"}, ["ldap_auth: auth_max_size"]),
        ({"auth_min_size": "101"}, ["ldap_auth: auth_min_size", "auth_max_size (100)"]),
        ({"min_size": "11"}, ["ldap_auth: min_size", "max_size (10)"]),
        ({"timeout": "0"}, ["ldap_auth: timeout", "0.01 to 600"]),
        ({"timeout": "nan"}, ["ldap_auth: timeout"]),
        ({"timeout": "soon"}, ["ldap_auth: timeout", "soon"]),
        ({"operation_timeout": "inf"}, ["ldap_auth: operation_timeout"]),
        ({"strategy": "random"}, ["ldap_auth: strategy", "ordered, balanced"]),
        ({"fast_bind": "True"}, ["ldap_auth: fast_bind", "auto, always, never"]),
        ({"start_tls": "maybe"}, ["ldap_auth: start_tls", "true or false"]),
        ({"start_tls": "true"}, ["ldap_auth: start_tls", "ldaps"]),
        ({"tls_verify": "hard"}, ["ldap_auth: tls_verify"]),
        ({"tls_ca_file": "/nowhere/ca.pem"}, ["ldap_auth: tls_ca_file", "/nowhere/ca.pem"]),
        ({"tls_ca_dir": "/nowhere"}, ["ldap_auth: tls_ca_dir", "/nowhere"]),
        ({"tls_client_key": "/nowhere"}, ["ldap_auth: tls_client_key", "its certificate"]),
        ({"tls_client_cert": "/nowhere"}, ["ldap_auth: tls_client_cert", "/nowhere"]),
        ({"sasl_mechanism": "PLAIN"}, ["ldap_auth: sasl_mechanism = PLAIN", "EXTERNAL, GSSAPI"]),
        ({"kerberos_keytab": "/x"}, ["ldap_auth: kerberos_keytab = /x", "without sasl_mechanism"]),
        ({"kerberos_without_tls": "perhaps"}, ["ldap_auth: kerberos_without_tls", "true or"]),
        ({"sasl_mechanism": "EXTERNAL"}, ["sasl_mechanism = EXTERNAL", "without search_base"]),
        ({"tls_ciphers": "NONE-SUCH"}, ["ldap_auth: tls_ciphers"]),
        ({"realm": "zoë"}, ["ldap_auth: realm", "ASCII"]),
        ({"realm": "a\nb"}, ["ldap_auth: realm"]),
        ({"name_case": "upper"}, ["ldap_auth: name_case", "typed, lower"]),
        ({"public_paths": "healthcheck"}, ["ldap_auth: public_paths", "healthcheck"]),
        ({"public_paths": "/a*"}, ["ldap_auth: public_paths"]),
        ({"public_paths": "/a/../b"}, ["ldap_auth: public_paths"]),
        ({"public_paths": "get /a"}, ["ldap_auth: public_paths"]),
        ({"bind_dn": "cn=x"}, ["ldap_auth: bind_password_file", "(not set)"]),
        ({"bind_dn": "cn=x", "bind_password": "pw"}, ["ldap_auth: bind_dn", "search_base"]),
        ({"bind_password": "pw"}, ["ldap_auth: bind_password", "without bind_dn"]),
        ({"bind_password": "hush\x01 pw"}, ["ldap_auth: bind_password = (hidden)"]),
        ({"max_sizes": "1"}, ["egg:keyfront#ldap_auth", "max_sizes", "auth_max_size"]),
        ({"user_filter": "(uid=x)"}, ["ldap_auth: user_filter", "{}"]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_options_are_refused_by_name(changes: dict[str, str], words: list[str]) -> None:
    message = refusal({**MINIMAL, **changes})
    for word in words:
        assert word in message
    assert " pw" not in message


def test_nothing_is_taken_for_granted() -> None:
    assert "ldap_auth: urls = (not set)" in refusal({"user_dn": USER_DN})
    assert "ldap_auth: user_dn = (not set)" in refusal({"urls": "ldap://x"})


def test_a_filter_is_checked_when_it_is_loaded() -> None:
    local = {"urls": "ldap://x", "search_base": "dc=x", "user_filter": "(&(uid={})"}
    assert "ldap_auth: user_filter = (&(uid={})" in refusal(local)


SEARCHING = {"urls": "ldap://localhost", "search_base": "dc=x", "bind_dn": "cn=s,dc=x"}


BY_CERTIFICATE = {"urls": "ldaps://x", "search_base": "dc=x", "sasl_mechanism": "EXTERNAL"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["ldap_auth: tls_client_cert = (not set)", "set with sasl_mechanism = EXTERNAL"]),
        ({"urls": "ldap://localhost"}, ["sasl_mechanism = EXTERNAL", "over TLS only, and ldap://"]),
        ({"bind_dn": "cn=x"}, ["ldap_auth: bind_dn = cn=x", "beside sasl_mechanism"]),
        ({"bind_password": "hush pw"}, ["bind_password = (hidden)", "beside sasl_mechanism"]),
        ({"bind_password_file": "/x"}, ["bind_password_file = /x", "beside sasl_mechanism"]),
    ],
)
def test_what_does_not_go_with_a_certificate(changes: dict[str, str], words: list[str]) -> None:
    message = refusal({**BY_CERTIFICATE, **changes})
    for word in words:
        assert word in message
    assert " pw" not in message


def test_a_keytab_reaches_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gssapi", "gssapi.raw"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(raw=None))
    keytab = tmp_path / "keytab"
    local = {**BY_CERTIFICATE, "sasl_mechanism": "GSSAPI", "kerberos_keytab": str(keytab)}
    assert f"ldap_auth: kerberos_keytab = {keytab}" in refusal(local)
    keytab.touch(0o600)
    arguments = ldap_filter.pool_arguments(ldap_auth_options.read(local))
    assert arguments["sasl_mechanism"] == "GSSAPI"
    assert arguments["kerberos"] == Kerberos(keytab=str(keytab))
    assert "over TLS only" in refusal({**local, "urls": "ldap://localhost"})


def test_a_certificate_reaches_the_pool(tmp_path: Path) -> None:
    pair = certificates(tmp_path).client
    local = {
        **BY_CERTIFICATE, "tls_client_cert": str(pair.certificate),
        "tls_client_key": str(pair.key),
    }  # fmt: skip
    arguments = ldap_filter.pool_arguments(ldap_auth_options.read(local))
    assert arguments["sasl_mechanism"] == "EXTERNAL"
    assert arguments["tls"].client_cert == str(pair.certificate)
    assert arguments["tls"].client_key == str(pair.key)
    assert ldap_filter.pool_arguments(
        ldap_auth_options.read({**BY_CERTIFICATE, "urls": "ldapi://%2Fx"})
    )


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "No such file"),
        (b"secret", 0o604, "its mode is 0604"),
        (b"secret", 0o620, "its mode is 0620"),
        (b"secret", 0o666, "chmod 0600"),
        (b"", 0o600, "one line in UTF-8"),
        (b"\n", 0o600, "one line in UTF-8"),
        (b"a\nb\n", 0o600, "one line"),
        (b"a\0b", 0o600, "one line"),
        (b"\xff\xfe", 0o600, "UTF-8"),
        (b"x" * 8193, 0o600, "8192 bytes"),
    ],
)
def test_the_file_of_the_password(
    tmp_path: Path, content: bytes | None, mode: int, words: str
) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    message = refusal({**SEARCHING, "bind_password_file": str(path)})
    assert message.startswith(f"ldap_auth: bind_password_file = {path}: must be ")
    assert words in message
    assert "secret" not in message


@pytest.mark.parametrize("kind", ["folder", "pipe", "no path"])
def test_the_file_of_the_password_is_a_file(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "it")
    if kind == "folder":
        os.mkdir(path, 0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path = "a" * 5000
    message = refusal({**SEARCHING, "bind_password_file": path})
    assert message.startswith("ldap_auth: bind_password_file = ")
    assert kind != "pipe" or message.endswith("a regular file")


def test_one_password_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("x")
    path.chmod(0o400)
    both = {**SEARCHING, "bind_password": "hush-hush", "bind_password_file": str(path)}
    message = refusal(both)
    assert "beside bind_password_file" in message
    assert "hush-hush" not in message


def test_passwords_that_would_cross_the_network_in_the_clear_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    filter_factory({}, urls="ldap://localhost ldap://127.0.0.1:1389", user_dn=USER_DN)
    filter_factory({}, urls="ldap://ds1.example.org", user_dn=USER_DN, start_tls="true")
    filter_factory({}, **MINIMAL)
    assert not caplog.records
    filter_factory({}, urls="ldap://ds1.example.org", user_dn=USER_DN)
    (record,) = caplog.records
    assert "ldap://ds1.example.org:389" in record.getMessage()


def test_every_option_explains_itself() -> None:
    for name, option in OPTIONS.items():
        assert option.help.endswith("."), name
        assert option.allowed, name

"""What Keystone's code gets from the handler and the driver, whatever a pool does beneath them."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flask
import keystone.conf.default
import keystone.conf.ldap
import ldap
import pytest
from keystone import exception
from keystone.common import driver_hints
from keystone.identity.backends.ldap import common
from ldap.controls.libldap import SimplePagedResultsControl
from oslo_config import cfg

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    FilterError,
    IncompatibleError,
    OptionError,
    PoolClosedError,
    PoolFullError,
    PoolTimeoutError,
    Verdict,
)
from keyfront.middleware.ldap.keystone.driver import (
    DirectoryUnavailable,
    Identity,
    takes_size_limit,
)
from keyfront.middleware.ldap.keystone.handler import PagedSearch, PoolHandler, translated
from keyfront.middleware.ldap.protocol.connection import SearchAnswer

# What Keystone's exceptions ask of its own configuration.
keystone.conf.default.register_opts(keystone.conf.CONF)

SERVER = "ldap://ldap1.example.org:389"
SECRET = "correct horse battery"
USER = ("uid=u,ou=Users,dc=x", {"cn": [b"u"], "sn": [b"User"], "mail": [b"u@x"]})
OUTAGES = [
    DirectoryUnavailableError("connection refused", server=SERVER),
    DirectoryTimeoutError("no answer within 5 s", server=SERVER),
    DirectoryProtocolError("that is no LDAP", server=SERVER),
    DirectoryTLSError("the certificate is not trusted", server=SERVER),
    PoolTimeoutError("search: no connection became free within 5 s"),
    PoolFullError("search: 10 are waiting"),
    PoolClosedError("search: closed"),
]


class Connection:
    """One that pages through what it is given."""

    def __init__(self, pages: list[Any]) -> None:
        self.pages = pages
        self.asked: list[tuple[int, bytes]] = []
        self.closed = False

    def budget(self) -> None:
        pass

    def search_page(self, *, page_size: int, cookie: bytes, **request: Any) -> tuple[Any, Any]:
        self.asked.append((page_size, cookie))
        if page_size == 0:
            return SearchAnswer([]), b""
        page = self.pages[int(cookie or b"0")]
        if isinstance(page, Exception):
            raise page
        following = int(cookie or b"0") + 1
        return SearchAnswer(page), b"%d" % following if self.pages[following:] else b""

    def close(self) -> None:
        self.closed = True


class Pool:
    """Answers as it is told, and counts what is lent."""

    def __init__(self) -> None:
        self.found: list[Any] | Exception = [USER]
        self.verdict: Exception | None = None
        self.pages: list[Any] = [[]]
        self.lent: list[Connection] = []
        self.returned: list[Connection] = []
        self.searches: list[dict[str, Any]] = []
        self.binds: list[tuple[str, Any]] = []
        self.failures: list[BaseException] = []

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        connection = Connection(self.pages)
        self.lent.append(connection)
        try:
            yield connection
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            if connection in self.lent:
                self.lent.remove(connection)
            self.returned.append(connection)

    def forget(self, connection: Connection) -> None:
        connection.close()
        self.lent.remove(connection)

    def search(self, **request: Any) -> Any:
        self.searches.append(request)
        if isinstance(self.found, Exception):
            raise self.found
        return SearchAnswer(self.found)

    def authenticate(self, dn: str, password: str | bytes, *, address: str = "") -> Any:
        self.binds.append((dn, password))
        if self.verdict is not None:
            raise self.verdict
        return SimpleNamespace(grace=None, password_expiring=None)


class Source:
    """In place of a ``DriverPool``."""

    def __init__(self) -> None:
        self.pool = Pool()

    def get(self) -> Pool:
        return self.pool

    def is_service(self, who: str, password: str) -> bool:
        return (who, password) == ("cn=service", "x")


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def handler(source: Source) -> PoolHandler:
    return PoolHandler(source)


def make_identity(folder: Path, text: str = "") -> tuple[Identity, Pool]:
    path = folder / "keystone.conf"
    path.write_text(f"[ldap]\nuser = cn=service\npassword = x\nsuffix = dc=x\n{text}\n")
    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    identity = Identity(conf)
    pool = Pool()
    identity.pool._pool = pool
    return identity, pool


@pytest.fixture
def identity(tmp_path: Path) -> tuple[Identity, Pool]:
    return make_identity(tmp_path)


# Exceptions


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_is_what_python_ldap_calls_it(error: DirectoryError) -> None:
    made = translated(error)
    timed_out = isinstance(error, DirectoryTimeoutError)
    assert type(made) is (ldap.TIMEOUT if timed_out else ldap.SERVER_DOWN)
    assert made.args[0]["info"] == str(error)
    assert made.args[0]["result"] == (-5 if timed_out else -1)
    assert made.args[0]["desc"] == ("Timed out" if timed_out else "Can't contact LDAP server")


@pytest.mark.parametrize(
    ("code", "name", "kind", "desc"),
    [
        (1, "operationsError", ldap.OPERATIONS_ERROR, "Operations error"),
        (3, "timeLimitExceeded", ldap.TIMELIMIT_EXCEEDED, "Time limit exceeded"),
        (4, "sizeLimitExceeded", ldap.SIZELIMIT_EXCEEDED, "Size limit exceeded"),
        (10, "referral", ldap.REFERRAL, "Referral"),
        (11, "adminLimitExceeded", ldap.ADMINLIMIT_EXCEEDED, "Administrative limit exceeded"),
        (16, "noSuchAttribute", ldap.NO_SUCH_ATTRIBUTE, "No such attribute"),
        (20, "attributeOrValueExists", ldap.TYPE_OR_VALUE_EXISTS, "Type or value exists"),
        (32, "noSuchObject", ldap.NO_SUCH_OBJECT, "No such object"),
        (34, "invalidDNSyntax", ldap.INVALID_DN_SYNTAX, "Invalid DN syntax"),
        (49, "invalidCredentials", ldap.INVALID_CREDENTIALS, "Invalid credentials"),
        (50, "insufficientAccessRights", ldap.INSUFFICIENT_ACCESS, "Insufficient access"),
        (68, "entryAlreadyExists", ldap.ALREADY_EXISTS, "Already exists"),
        (4711, "an unknown result code", ldap.LDAPError, "An unknown result code"),
    ],
)
def test_an_answer_is_what_python_ldap_calls_it(
    code: int, name: str, kind: type[Exception], desc: str
) -> None:
    made = translated(DirectoryAnswerError(code, name, "some words", "dc=x", server=SERVER))
    assert type(made) is kind
    about = {"result": code, "desc": desc, "ctrls": [], "info": "some words", "matched": "dc=x"}
    assert made.args == (about,)
    assert "info" not in translated(DirectoryAnswerError(code, name)).args[0]


def test_other_errors() -> None:
    error = DirectoryAnswerError(10, "referral", "", "", ["ldap://a", "ldap://b"])
    assert translated(error).args[0]["info"] == "Referral:\nldap://a"  # libldap names one
    assert type(translated(FilterError("no parenthesis"))) is ldap.FILTER_ERROR
    # must be changed first, said along with "success"
    changed = CredentialsError(Verdict.MUST_CHANGE, 0, "success")
    assert type(translated(changed)) is ldap.INVALID_CREDENTIALS
    # the service's, by whatever code: Keystone has one exception for it
    for code in (7, 48, 49):
        certificate = CredentialsError(Verdict.WRONG_CERTIFICATE, code, "some name")
        assert type(translated(certificate)) is ldap.INVALID_CREDENTIALS
    assert type(translated(CredentialsError(Verdict.NO_IDENTITY))) is ldap.INVALID_CREDENTIALS


# The handler


def test_it_is_all_of_the_interface(handler: PoolHandler) -> None:
    assert isinstance(handler, common.LDAPHandler)


def test_a_search(handler: PoolHandler, source: Source) -> None:
    handler.connect("ldap://x", 5, ldap.DEREF_ALWAYS, False, None, chase_referrals=True)
    referral = (None, ["ldap://elsewhere"])
    source.pool.found = [USER, referral]
    found = handler.search_s("dc=x", ldap.SCOPE_ONELEVEL, "(a=b)", ["cn"], 1)
    assert found == [USER, referral]
    assert isinstance(found, list)
    assert source.pool.searches == [
        {
            "base": "dc=x", "scope": 1, "filter": "(a=b)", "attributes": ["cn"],
            "attrs_only": True, "size_limit": 0, "dereference": ldap.DEREF_ALWAYS,
        }
    ]  # fmt: skip


def test_options(handler: PoolHandler, source: Source) -> None:
    assert handler.get_option(ldap.OPT_DEREF) == ldap.get_option(ldap.OPT_DEREF)
    handler.set_option(ldap.OPT_DEREF, ldap.DEREF_FINDING)
    assert handler.get_option(ldap.OPT_DEREF) == ldap.DEREF_FINDING
    handler.search_s("", 0)
    assert source.pool.searches[-1]["dereference"] == ldap.DEREF_FINDING
    handler.set_option(ldap.OPT_REFERRALS, 0)
    assert handler.get_option(ldap.OPT_REFERRALS) == 0
    version = ldap.get_option(ldap.OPT_PROTOCOL_VERSION)
    assert handler.get_option(ldap.OPT_PROTOCOL_VERSION) == version


def test_the_bind_of_the_service_costs_nothing(handler: PoolHandler, source: Source) -> None:
    handler.simple_bind_s("cn=service", "x")
    handler.search_s("dc=x", 2)
    assert not source.pool.binds and not source.pool.lent


def test_any_other_bind_is_sent_and_not_searched_with(
    handler: PoolHandler, source: Source
) -> None:
    handler.simple_bind_s("uid=u", "y")
    assert source.pool.binds == [("uid=u", "y")]
    for search in (handler.search_s, handler.search_ext):
        with pytest.raises(ldap.UNWILLING_TO_PERFORM):
            search("dc=x", 2)
    source.pool.verdict = CredentialsError(Verdict.WRONG_PASSWORD)
    with pytest.raises(ldap.INVALID_CREDENTIALS):
        handler.simple_bind_s("cn=service", "guess")


def test_an_argument_that_cannot_be_sent(handler: PoolHandler, source: Source) -> None:
    source.pool.found = OptionError("DN", "...", "text that UTF-8 can carry")
    with pytest.raises(ldap.PARAM_ERROR):
        handler.search_s("dc=x", 7)
    nonsense: list[tuple[Any, ...]] = [
        (None, 2), (b"dc=x", 2), ("dc=x", "sub"), ("dc=x", 2, b"(a=b)"),
        ("dc=x", 2, "(a=b)", "cn"), ("dc=x", 2, "(a=b)", [b"cn"]), ("dc=x", 2, "(a=b)", [None]),
    ]  # fmt: skip
    for arguments in nonsense:
        with pytest.raises(TypeError):
            handler.search_s(*arguments)
    for text in ("a\0", "\udcff"):
        for arguments in ((text, 2), ("dc=x", 2, text), ("dc=x", 2, "(a=b)", [text])):
            with pytest.raises(ValueError):
                handler.search_s(*arguments)


def test_references_come_last(handler: PoolHandler, source: Source) -> None:
    one, two = (None, ["ldap://1"]), (None, ["ldap://2"])
    other = ("uid=other", {})
    source.pool.found = [one, USER, two, other]
    assert handler.search_s("dc=x", 2) == [USER, other, one, two]


# Paging


def paged(size: int, cookie: bytes | str = "") -> list[Any]:
    return [SimplePagedResultsControl(criticality=True, size=size, cookie=cookie)]


def test_pages_come_over_one_connection(handler: PoolHandler, source: Source) -> None:
    source.pool.pages = [[USER], [USER, USER], [USER]]
    above = common.KeystoneLDAPHandler(conn=handler)
    above.page_size = 2
    assert len(above.search_s("dc=x", 2)) == 4
    (connection,) = source.pool.returned
    assert connection.asked == [(2, b""), (2, b"1"), (2, b"2")]
    assert not source.pool.lent and not connection.closed


def test_a_server_without_paging(handler: PoolHandler, source: Source) -> None:
    source.pool.pages = [[USER]]
    connection_class_page = Connection.search_page

    def search_page(self: Connection, **request: Any) -> tuple[Any, None]:
        return connection_class_page(self, **request)[0], None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "search_page", search_page)
        above = common.KeystoneLDAPHandler(conn=handler)
        above.page_size = 2
        assert len(above.search_s("dc=x", 2)) == 1
    assert above.page_size == 0
    assert not source.pool.lent


@pytest.mark.skipif(
    not takes_size_limit(common.KeystoneLDAPHandler), reason="Keystone 30 was the first to limit it"
)
def test_the_rest_is_given_up_with_size_0(handler: PoolHandler, source: Source) -> None:
    source.pool.pages = [[USER, USER], [USER, USER], [USER]]
    above = common.KeystoneLDAPHandler(conn=handler)
    above.page_size = 2
    assert len(above.search_s("dc=x", 2, sizelimit=3)) == 3
    (connection,) = source.pool.returned
    assert connection.asked[-1] == (0, b"2")
    assert not source.pool.lent and not connection.closed


@pytest.mark.parametrize("error", [OUTAGES[1], DirectoryAnswerError(4, "sizeLimitExceeded")])
@pytest.mark.parametrize("after", [0, 1])
def test_an_error_in_the_middle(
    handler: PoolHandler, source: Source, error: DirectoryError, after: int
) -> None:
    source.pool.pages = [*([[USER]] * after), error, [USER]]
    above = common.KeystoneLDAPHandler(conn=handler)
    above.page_size = 2
    with pytest.raises(ldap.LDAPError) as caught:
        above.search_s("dc=x", 2)
    assert type(caught.value) is type(translated(error))
    assert not source.pool.lent
    assert source.pool.failures == [error]


def first_page(handler: PoolHandler, source: Source) -> PagedSearch:
    source.pool.pages = [[USER], [USER]]
    message = handler.search_ext("dc=x", 2, serverctrls=paged(1))
    handler.result3(message)
    (connection,) = source.pool.lent
    assert not connection.closed
    return message


LEAVING: dict[str, Callable[[PoolHandler], object]] = {
    "unbind": PoolHandler.unbind_s,
    "another search": lambda x: x.search_ext("dc=x", 2, serverctrls=paged(1)),
}


@pytest.mark.parametrize("leave", LEAVING)
def test_left_before_the_end(handler: PoolHandler, source: Source, leave: str) -> None:
    message = first_page(handler, source)
    (connection,) = source.pool.lent
    LEAVING[leave](handler)
    # the server still has a cursor open on it
    assert connection.closed
    assert source.pool.returned == [connection]
    with pytest.raises(ldap.UNWILLING_TO_PERFORM):
        handler.unbind_s()
        handler.search_ext("dc=x", 2, serverctrls=paged(1, b"1"))
    assert message.over
    handler.unbind_s()
    assert not source.pool.lent


def test_forgotten_altogether(source: Source) -> None:
    first_page(PoolHandler(source), source)
    gc.collect()
    assert not source.pool.lent


def test_the_first_page_is_never_waited_for(handler: PoolHandler, source: Source) -> None:
    handler.search_ext("dc=x", 2, serverctrls=paged(1))
    handler.unbind_s()
    (connection,) = source.pool.returned
    assert not connection.closed and not connection.asked


def test_a_control_that_nobody_knows(handler: PoolHandler) -> None:
    with pytest.raises(ldap.NOT_SUPPORTED):
        handler.search_ext("dc=x", 2, serverctrls=[object()])


# The driver


def test_a_login_is_one_bind(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    user = driver.authenticate("u", SECRET)
    assert user["id"] == "u" and user["name"] == "User" and "dn" not in user
    assert pool.binds == [(USER[0], SECRET.encode())]


@pytest.mark.parametrize("password", ["", b"", None, 5, "\udcff", {}])
def test_what_is_no_password_never_gets_to_the_server(
    identity: tuple[Identity, Pool], password: Any
) -> None:
    driver, pool = identity
    with pytest.raises(AssertionError):
        driver.authenticate("u", password)
    assert not pool.binds


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_is_told_to_the_operator_only(
    identity: tuple[Identity, Pool], verdict: Verdict, caplog: pytest.LogCaptureFixture
) -> None:
    driver, pool = identity
    caplog.set_level("INFO")
    pool.verdict = CredentialsError(verdict, server=SERVER)
    with pytest.raises(AssertionError) as caught:
        driver.authenticate("u", SECRET)
    assert verdict.value not in str(caught.value)
    (record,) = [x for x in caplog.records if x.name.startswith("keyfront")]
    assert record.levelname == "INFO"
    for part in (verdict.value, SERVER, USER[0]):
        assert part in record.getMessage()


def test_nobody_of_that_name(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    pool.found = []
    for user_id in ("u", "", None):
        with pytest.raises(AssertionError):
            driver.authenticate(user_id, SECRET)
    assert not pool.binds


@pytest.mark.parametrize(
    "error",
    [*OUTAGES, DirectoryAnswerError(13, "confidentialityRequired", server=SERVER)],
    ids=lambda error: type(error).__name__,
)
def test_an_outage_is_no_verdict(
    identity: tuple[Identity, Pool], error: DirectoryError, caplog: pytest.LogCaptureFixture
) -> None:
    driver, pool = identity
    pool.verdict = error
    with pytest.raises(exception.LDAPServerConnectionError) as caught:
        driver.authenticate("u", SECRET)
    assert isinstance(caught.value, DirectoryUnavailable)
    assert (caught.value.code, caught.value.title) == (503, "Service Unavailable")
    assert SERVER not in str(caught.value)
    assert str(error) in caplog.text


CALLS: dict[str, Callable[[Identity], object]] = {
    "get_user": lambda x: x.get_user("u"),
    "authenticate": lambda x: x.authenticate("u", SECRET),
    "list_users": lambda x: x.list_users(driver_hints.Hints()),
    "get_group": lambda x: x.get_group("g"),
    "list_groups_for_user": lambda x: x.list_groups_for_user("u", driver_hints.Hints()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_of_searches(
    identity: tuple[Identity, Pool], error: DirectoryError, call: str
) -> None:
    driver, pool = identity
    pool.found = error
    with pytest.raises(DirectoryUnavailable):
        CALLS[call](driver)


def test_the_password_of_the_service_is_wrong(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    pool.found = CredentialsError(Verdict.WRONG_PASSWORD, server=SERVER)
    for call in CALLS.values():
        with pytest.raises(exception.LDAPInvalidCredentialsError):
            call(driver)


@pytest.mark.parametrize(
    "error", [CredentialsError(Verdict.LOCKED), OUTAGES[1]], ids=lambda error: type(error).__name__
)
def test_no_frame_below_keeps_the_password(
    identity: tuple[Identity, Pool], error: DirectoryError
) -> None:
    driver, pool = identity
    pool.verdict = error
    with pytest.raises(Exception) as caught:
        driver.authenticate("u", SECRET)
    # all exceptions to be got at from this one, and all frames that they keep
    seen: list[BaseException | None] = [caught.value]
    frames = 0
    for each in seen:
        if each is None:
            continue
        assert SECRET not in repr(each.args)
        found = [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_name == "authenticate":  # the driver's, and the pool's beneath
                frames += 1
                for name, value in frame.f_locals.items():
                    assert SECRET not in repr(value), name
                    found += [value] if isinstance(value, BaseException) else []
        seen += [x for x in found if x not in seen]
    assert frames == 1


def test_a_bind_by_a_connection_of_its_own(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    driver.user.get_connection("uid=u", SECRET, end_user_auth=True)
    assert pool.binds == [("uid=u", SECRET)]
    pool.verdict = CredentialsError(Verdict.WRONG_PASSWORD)
    with pytest.raises(exception.LDAPInvalidCredentialsError):
        driver.user.get_connection("uid=u", "guess", end_user_auth=True)
    pool.verdict = OUTAGES[0]
    with pytest.raises(DirectoryUnavailable):
        driver.user.get_connection("uid=u", SECRET, end_user_auth=True)


def test_users_and_groups_share_the_pool_of_their_driver_only(tmp_path: Path) -> None:
    first, _ = make_identity(tmp_path)
    second, _ = make_identity(tmp_path)
    assert first.user._owner is first.group._owner is first.pool
    assert first.pool is not second.pool


# Within a request


def test_a_request_asks_nothing_twice(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    application = flask.Flask("test")
    with application.test_request_context("/"):
        first = driver.get_user("u")
        first["name"] = "changed by the caller"
        again = driver.authenticate("u", SECRET)
        driver.authenticate("u", SECRET)
        assert len(pool.searches) == 1
        assert again["name"] == "User"
        # but each login is a bind
        assert len(pool.binds) == 2
        driver.get_user("other")
        assert len(pool.searches) == 2
    with application.test_request_context("/"):
        driver.get_user("u")
    assert len(pool.searches) == 3
    driver.get_user("u")
    driver.get_user("u")
    assert len(pool.searches) == 5


def test_what_is_found_again_is_nobody_elses(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    with flask.Flask("test").test_request_context("/"):
        for _ in range(3):
            ((_, attributes),) = driver.user.get_connection().search_s("dc=x", 2)
            assert attributes["cn"] == ["u"]
            attributes["cn"].append("changed")
            attributes["sn"] = []
    assert len(pool.searches) == 1


def test_two_drivers_in_a_request_do_not_mix(tmp_path: Path) -> None:
    first, pool = make_identity(tmp_path)
    second, other = make_identity(tmp_path)
    other.found = [("uid=u,ou=Users,dc=x", {"cn": [b"u"], "sn": [b"Another"]})]
    with flask.Flask("test").test_request_context("/"):
        assert first.get_user("u")["name"] == "User"
        assert second.get_user("u")["name"] == "Another"
    assert len(pool.searches) == len(other.searches) == 1


def test_an_error_is_not_remembered(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    with flask.Flask("test").test_request_context("/"):
        found, pool.found = pool.found, OUTAGES[0]
        with pytest.raises(DirectoryUnavailable):
            driver.get_user("u")
        pool.found = found
        assert driver.get_user("u")["id"] == "u"


def test_the_answer_to_an_outage_says_when_to_come_again(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    application = flask.Flask("test")
    pool.found = OUTAGES[0]

    @application.errorhandler(exception.Error)
    def render(error: exception.Error) -> tuple[str, int]:
        return str(error), error.code

    @application.get("/<status>")
    def view(status: str) -> tuple[str, int]:
        try:
            driver.get_user("u")
        except DirectoryUnavailable:
            if status == "503":
                raise
        return "all the same", int(status)

    with application.test_client() as client:
        answer = client.get("/503")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "Retry-After" not in client.get("/200").headers


# Keystone 27 to 29


def search_of_29(
    self: Any, base: str, scope: int, filterstr: str = "", attrlist: Any = None, attrsonly: int = 0
) -> Any:
    names = None if attrlist is None else [x for x in attrlist if x is not None]
    found = self.conn.search_s(base, scope, filterstr, names, attrsonly)
    return common.convert_ldap_result(found)


@pytest.fixture(params=["27 to 29", "from 30"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the two signatures that Keystone's own handler has."""
    takes_size_limit.cache_clear()
    if request.param != "from 30":
        monkeypatch.setattr(common.KeystoneLDAPHandler, "search_s", search_of_29)
    elif not takes_size_limit(common.KeystoneLDAPHandler):
        pytest.skip("this Keystone is older")
    yield request.param
    takes_size_limit.cache_clear()


def test_a_search_in_each_release(identity: tuple[Identity, Pool], release: str) -> None:
    driver, pool = identity
    assert takes_size_limit(common.KeystoneLDAPHandler) == (release == "from 30")
    assert driver.authenticate("u", SECRET)["id"] == "u"
    pool.found = [USER, ("uid=other", {"cn": [b"other"]})]
    with driver.user.get_connection() as handler:
        assert len(handler.search_s("dc=x", 2)) == 2
        assert len(handler.search_s("dc=x", 2, "(a=b)", ["cn"], 0, 1)) == 1


def limited(driver: Identity) -> Any:
    """Search as ``BaseLdap._ldap_get_limited`` of Keystone 29."""
    with driver.user.get_connection() as handler:
        message = handler.search_ext("dc=x", 2, "(a=b)", ["cn", None], serverctrls=paged(1))
        return handler.result3(message)


def test_a_limited_list(identity: tuple[Identity, Pool]) -> None:
    driver, pool = identity
    pool.pages = [[USER], [USER]]
    assert [dn for dn, _ in limited(driver)] == [USER[0]]
    with flask.Flask("test").test_request_context("/"):
        for _ in range(2):
            ((_, attributes),) = limited(driver)
            assert attributes["sn"] == ["User"]
            attributes["sn"] = []
    # the first one was outside of a request
    assert len(pool.returned) == 2 and not pool.lent


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_an_outage_in_a_limited_list(
    identity: tuple[Identity, Pool], error: DirectoryError, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, pool = identity
    pool.pages = [error]
    with pytest.raises(DirectoryUnavailable):
        limited(driver)
    assert not pool.lent

    def nobody() -> None:
        raise error

    monkeypatch.setattr(pool, "connection", nobody)
    with pytest.raises(DirectoryUnavailable):
        limited(driver)


@pytest.mark.parametrize("name", ["search_s", "search_ext", "result3"])
def test_a_keystone_of_another_shape_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    takes_size_limit.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(common.KeystoneLDAPHandler, name, lambda self, where, /, *more: None)
        with pytest.raises(IncompatibleError, match=rf"{name}\(\) takes where"):
            make_identity(tmp_path)
    make_identity(tmp_path)


# The configuration


def test_a_broken_domain_is_told_when_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keystone.conf"
    path.write_text("[ldap]\nurl = gopher://x\n")
    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    driver = Identity(conf)
    for call in (CALLS["get_user"], CALLS["authenticate"]):
        caplog.clear()
        with pytest.raises(exception.UnexpectedError) as caught:
            call(driver)
        assert caught.value.code == 500
        assert "[ldap] url = gopher://x: must be " in caplog.text


def test_keystones_own_configuration_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keystone.identity.backends.ldap import core

    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[], default_config_dirs=[])
    conf.set_override("url", "gopher://x", "ldap")
    monkeypatch.setattr(core, "CONF", conf)
    with pytest.raises(OptionError, match=r"\[ldap\] url = gopher://x"):
        Identity()


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("url = ldap://a.example.org,ldaps://b.example.org", ["ldap://a.example.org:389"]),
        ("url = ldap://a.example.org\nuse_tls = true\ntls_req_cert = never", []),
        ("url = ldap://localhost,ldap://127.0.0.2,ldap://[::1],ldapi://%2Frun%2Fx", []),
    ],
)
def test_passwords_in_the_clear_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warned: list[str]
) -> None:
    path = tmp_path / "keystone.conf"
    path.write_text(f"[ldap]\n{text}\n")
    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    Identity(conf)
    lines = [x.getMessage() for x in caplog.records if "in the clear" in x.getMessage()]
    assert [line.split(" go to ")[1].split(" ")[0] for line in lines] == warned


def test_the_database_may_set_our_options() -> None:
    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[], default_config_dirs=[])
    Identity.register_opts(conf)
    conf.set_override("max_waiting", 3, "keyfront_ldap")
    assert conf.keyfront_ldap.max_waiting == 3

"""No password outlives the call it was given to: every object of the process is looked at.

The passwords of these tests are never a constant or a variable of theirs, or the walk would find
those.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ldappool
import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    PoolClosedError,
    PoolTimeoutError,
    Verdict,
)
from keyfront.middleware.ldap import LDAPPool
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.service_account import ServiceAccount
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.served import PATIENCE, wait_for

SHORT = 0.3
KINDS = ("plain", "ldaps", "starttls")
_TEXT = (str, bytes, bytearray, memoryview)


# Other passwords for each test: what a failed one leaves behind is no matter of the next.
_SALT = [7000]


def _password(kind: int) -> str:
    return "-".join(format(x * (3 * _SALT[0] + kind), "x") for x in range(31, 37))


def secret() -> str:
    """The password of the user."""
    return _password(0)


def wrong() -> str:
    """Not the password of anybody."""
    return _password(1)


def services() -> str:
    """The password of the service."""
    return _password(2)


class Held:
    """A text or buffer with a password in it, which is not shown."""

    __slots__ = ("what",)

    def __init__(self, what: Any) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<{type(self.what).__name__} of {len(self.what)}>"


def holders(make: Callable[[], str]) -> list[Held]:
    """The texts and buffers of this process that have a password in them."""
    gc.collect()
    text = make()
    octets = text.encode()
    found: list[Any] = []
    level = gc.get_objects()
    level += _locals_of_threads()
    own = (id(text), id(octets))
    while level:
        deeper: list[Any] = []
        for each in gc.get_referents(*level):
            if isinstance(each, _TEXT):
                if isinstance(each, str):
                    held = text in each
                else:
                    try:
                        held = octets in bytes(each)
                    except ValueError:  # a memoryview that was released
                        continue
                if held and id(each) not in own and not any(each is one for one in found):
                    found.append(each)
            elif not gc.is_tracked(each):
                # what holds only texts and numbers is not in the list of all objects
                deeper.append(each)
        level = [each for each in deeper if gc.get_referents(each)]
    return [Held(each) for each in found]


def _referrers(held: Held) -> list[Any]:
    # What the walk saw of a thread is a dictionary at its frame, and goes with that.
    gc.collect()
    return [each for each in gc.get_referrers(held.what) if each is not held]


def _locals_of_threads() -> list[Any]:
    """The frames that run at present have no referents: their variables, in lists."""
    found: list[Any] = []
    frames = sys._current_frames()
    frames[threading.get_ident()] = sys._getframe(2)  # who asks, and not the walk itself
    for each in frames.values():
        frame: Any = each
        while frame is not None:
            found.append(list(frame.f_locals.values()))
            frame = frame.f_back
    return found


@pytest.fixture(scope="module")
def d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both") as made:
        yield made


@pytest.fixture(autouse=True)
def passwords(d: Directory) -> None:
    _SALT[0] += 1
    d.password(d.users[0].dn, secret())
    d.password(d.service_dn, services())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def proxy(d: Directory, kind: str) -> Iterator[FaultProxy]:
    with FaultProxy((kind == "ldaps" and d.tls_port) or d.port) as made:
        yield made


@pytest.fixture
def pool(d: Directory, kind: str, proxy: FaultProxy) -> Iterator[LDAPPool]:
    yield from make(d, proxy.url("ldaps" if kind == "ldaps" else "ldap"), kind == "starttls")


@pytest.fixture
def plain(d: Directory) -> Iterator[LDAPPool]:
    yield from make(d, d.url, False)


def make(d: Directory, url: str, start_tls: bool) -> Iterator[LDAPPool]:
    made = LDAPPool(
        url, bind_dn=d.service_dn, bind_password=services(), search_base=d.people,
        tls=TLS(ca_file=str(d.ca_file), start_tls=start_tls), min_size=0, auth_max_size=1,
        connect_timeout=PATIENCE, operation_timeout=PATIENCE, timeout=PATIENCE,
    )  # fmt: skip
    yield made
    made.close(0.0)


def refusal(pool: LDAPPool, name: str, password: Callable[[], Any], **options: Any) -> Any:
    """The error of a login, with its traceback and all the frames of that."""
    try:
        pool.authenticate(name, password(), **options)
    except DirectoryError as error:
        assert error.__traceback__ is not None
        return error
    raise AssertionError("it was let in")


def only_the_service_keeps_one(make: Callable[[], str] = services) -> ServiceAccount:
    seen: list[list[list[Any]]] = []

    def is_alone() -> bool:
        # A thread of the pool may be offering it at this moment.
        seen[:] = [[_referrers(held) for held in holders(make)]]
        return [[type(each) for each in kept] for kept in seen[0]] == [[ServiceAccount]]

    wait_for(is_alone, "only the service has it", seen)
    account = seen.pop()[0][0]
    assert isinstance(account, ServiceAccount)
    return account


def test_after_a_login(pool: LDAPPool) -> None:
    assert pool.authenticate("user0", secret()).name == "user0"
    assert pool.authenticate("user0", secret().encode()).name == "user0"
    # what else is reachable from the connections
    with pool.connection() as searching, pool._auth_pool.connection() as logging_in:
        assert searching.ldap3.bound
        assert logging_in.ldap3.bound
        assert holders(secret) == []
        only_the_service_keeps_one()
    assert holders(secret) == []


def test_after_a_refusal(pool: LDAPPool) -> None:
    error = refusal(pool, "user0", wrong)
    assert error.verdict is Verdict.WRONG_PASSWORD
    assert holders(wrong) == []
    unknown = refusal(pool, "nobody", lambda: wrong().encode())
    assert unknown.verdict is Verdict.UNKNOWN_USER
    assert holders(wrong) == []
    only_the_service_keeps_one()
    del error, unknown


FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "no answer": FaultProxy.stall,
    "closed": FaultProxy.cut,
    "reset amid the answer": lambda proxy: proxy.reset_after(1),
    "nonsense": lambda proxy: proxy.garbage(b"\x31\x05nonsense"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_after_an_outage(
    pool: LDAPPool, proxy: FaultProxy, d: Directory, fault: str, warm: bool
) -> None:
    pool._names._search_base = None  # the DN is given
    if warm:
        pool.authenticate(d.users[0].dn, secret())
    else:
        pool._login_connector._check_timeout = pool._dialer.connect_timeout = SHORT
        pool._servers._connect_timeout = SHORT
    FAULTS[fault](proxy)
    error = refusal(pool, d.users[0].dn, secret, timeout=SHORT)
    assert isinstance(error, DirectoryUnavailableError)
    if warm and fault == "no answer":
        assert isinstance(error, DirectoryTimeoutError)
        proxy.cut()  # it has the BIND, which it did not pass on
    proxy.catch_up()  # it may answer while it still has what it read
    assert holders(secret) == []
    only_the_service_keeps_one()


def test_after_an_answer_that_quotes_it(plain: LDAPPool, d: Directory) -> None:
    """What a server says is in the error, but not if that is the password."""
    plain._names._search_base = None
    with FaultProxy(d.port) as proxy:
        pool = LDAPPool(proxy.url(), min_size=0, fast_bind=False)
        pool.authenticate(d.users[0].dn, secret())
        said = f"{secret()} is not right".encode()
        body = b"\x0a\x01\x31\x04\x00\x04" + bytes([len(said)]) + said
        answer = b"\x61" + bytes([len(body)]) + body
        # the third message of the connection, after the ping and the first BIND
        proxy.garbage(b"\x30" + bytes([len(answer) + 3]) + b"\x02\x01\x03" + answer)
        del said, body, answer
        error = refusal(pool, d.users[0].dn, secret)
        assert isinstance(error, CredentialsError)
        pool.close()
        proxy.forward()
        proxy._garbage = None
    assert holders(secret) == []


def test_after_a_login_that_got_no_connection(plain: LDAPPool, d: Directory) -> None:
    with plain._auth_pool.connection():
        plain._auth_pool.timeout = 0.01
        error = refusal(plain, "user0", secret)
        assert type(error) is PoolTimeoutError
        assert holders(secret) == []
    plain.close()
    late = refusal(plain, "user0", secret)
    assert type(late) is PoolClosedError
    assert holders(secret) == []


def test_after_what_is_no_password(plain: LDAPPool) -> None:
    error = refusal(plain, "user0", lambda: secret() + "\ud800")
    assert isinstance(error, CredentialsError)
    with pytest.raises(TypeError) as caught:
        plain.authenticate("user0", bytearray(secret().encode()))  # type: ignore[arg-type]
    assert caught.value.__traceback__ is not None
    assert holders(secret) == []


def test_a_refused_service(d: Directory, kind: str) -> None:
    (pool,) = (LDAPPool(
        d.ldaps_url if kind == "ldaps" else d.url, bind_dn=d.service_dn, bind_password=wrong(),
        tls=TLS(ca_file=str(d.ca_file), start_tls=kind == "starttls"), search_base=d.people,
        timeout=PATIENCE,
    ),)  # fmt: skip
    errors = [refusal(pool, "user0", secret)]
    for _ in range(2):
        with pytest.raises(CredentialsError) as caught:
            pool.search("", 0)
        errors.append(caught.value)
    reports = pool.check()
    assert all(report.bind is False for report in reports)
    assert holders(secret) == []
    holder = only_the_service_keeps_one(wrong)
    assert wrong() not in repr(holder) + repr(errors) + repr(reports) + repr(pool)
    pool.close()


def test_the_same_walk_finds_it_in_ldappool(d: Directory) -> None:
    """The control: another pool, the same login, the same directory."""
    manager = ldappool.ConnectionManager(d.url, use_pool=True, size=2)
    with manager.connection(d.users[0].dn, secret()) as connection:
        assert connection.whoami_s()
    assert holders(secret)


def test_the_walk_finds_what_is_there() -> None:
    class Slots:
        __slots__ = ("kept",)

    slots = Slots()
    slots.kept = {"a": (1, [b"x" + secret().encode() + b"y"])}
    assert len(holders(secret)) == 1
    slots.kept = bytearray(secret().encode())
    assert len(holders(secret)) == 1
    slots.kept = memoryview(secret().encode())
    assert holders(secret)
    slots.kept = lambda: kept  # noqa: F821
    assert holders(secret) == []

    def fail(password: str) -> None:
        raise ValueError

    def closure(password: str) -> Callable[[], str]:
        return lambda: password

    slots.kept = closure(secret())
    assert len(holders(secret)) == 1
    slots.kept = None
    caught = None
    try:
        fail(secret())
    except ValueError as error:
        caught = error
    assert len(holders(secret)) == 1
    assert caught is not None
    caught = caught.with_traceback(None)
    assert holders(secret) == []

    begun, release = threading.Event(), threading.Event()

    def wait(password: str) -> None:
        begun.set()
        release.wait(PATIENCE)

    thread = threading.Thread(target=lambda: wait(secret()))
    thread.start()
    assert begun.wait(PATIENCE)
    assert len(holders(secret)) == 1
    release.set()
    thread.join()
    assert holders(secret) == []

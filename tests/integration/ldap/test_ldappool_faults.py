"""What ldappool 3.0.0 does wrong, and that ours does not: each test shows both, on one slapd.

Numbers are those of research/ldap.md, section 2.2. Its number 13, python-ldap's lock around each
connection, is a property and no fault: no test of it could fail on one side only. Of number 11,
statistics are shown by there being no call that returns any.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ldap
import ldappool
import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryUnavailableError,
    PoolClosedError,
    PoolFullError,
    PoolTimeoutError,
    Verdict,
)
from keyfront.middleware.ldap import TLS, LDAPPool
from support.directory import Directory, User, directory
from support.fault_proxy import FaultProxy
from support.output import Lines
from support.served import PATIENCE, wait_for
from support.stock_pool import StockPool

pytestmark = pytest.mark.usefixtures("nobody_gives_up")

ROOT = Path(__file__).parents[3]
MANY = 12
# Seconds in which a server that is well answers, on a busy machine as well.
SOON = 6.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), tls="both", ppolicy=True) as d:
        yield d


@pytest.fixture
def d(served: Directory) -> Iterator[Directory]:
    gc.collect()  # connections of earlier controls, which their errors hold
    served.wait_for(lambda _: served.open_connections() == 0, "all are gone")
    served.mark()
    yield served
    if served.pid is None:
        served.start()


@pytest.fixture
def proxy(d: Directory) -> Iterator[FaultProxy]:
    with FaultProxy(d.port) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MANY) as made:
        yield made


_numbers = itertools.count(1)


@pytest.fixture
def user(d: Directory) -> Iterator[User]:
    """Somebody who may be changed."""
    n = next(_numbers)
    uid, password = f"changing{n}", f"old-password-{n}"
    made = User(uid, uid, uid, f"{uid}@example.org", f"uid={uid},{d.people}", password)
    person = {"objectClass": ["inetOrgPerson"], "uid": [uid], "cn": [uid], "sn": [uid]}
    d.add(made.dn, {**person, "userPassword": [password]})
    yield made
    if d.pid is None:
        d.start()
    with contextlib.suppress(ldap.NO_SUCH_OBJECT):
        d.delete(made.dn)


class Ours(LDAPPool):
    """Our pool, with the patience of a test."""

    def __init__(self, *urls: str, **options: Any) -> None:
        patient = dict.fromkeys(("timeout", "connect_timeout", "operation_timeout"), PATIENCE)
        options = {**patient, "min_size": 0, "check_after": math.inf, **options}
        super().__init__(urls, **options)

    def login(self, dn: str, password: str) -> bool:
        try:
            self.authenticate(dn, password)
            return True
        except CredentialsError:
            return False

    @property
    def stats(self) -> dict[str, int | float]:
        return self.get_stats()


# 1. A pool for logins that is a password cache


def new_password(d: Directory, user: User) -> None:
    d.password(user.dn, "another")


def deleted(d: Directory, user: User) -> None:
    d.delete(user.dn)


def locked(d: Directory, user: User) -> None:
    d.lock(user.dn)


@pytest.mark.parametrize("change", [new_password, deleted, locked])
def test_a_password_is_not_remembered(
    d: Directory, user: User, change: Callable[[Directory, User], None]
) -> None:
    stock = StockPool(d.url)
    with Ours(d.url) as ours:
        assert stock.login(user.dn, user.password)
        assert ours.login(user.dn, user.password)
        change(d, user)

        d.mark()
        assert stock.login(user.dn, user.password), "the control"
        assert d.counts().binds == 0

        with pytest.raises(CredentialsError) as caught:
            ours.authenticate(user.dn, user.password)
        assert d.counts().binds == 1
        known = {locked: Verdict.LOCKED}
        assert caught.value.verdict is known.get(change, Verdict.WRONG_PASSWORD)


def test_nobody_logs_in_at_a_server_that_is_down(d: Directory, user: User) -> None:
    stock = StockPool(d.url)
    with Ours(d.url) as ours:
        assert stock.login(user.dn, user.password)
        assert ours.login(user.dn, user.password)
        d.stop()
        assert stock.login(user.dn, user.password), "the control"
        with pytest.raises(DirectoryUnavailableError):
            ours.login(user.dn, user.password)


# 2. One wrong password that is sent many times


def test_one_wrong_password_is_one_failed_bind(d: Directory, user: User) -> None:
    others = [(x.dn, x.password) for x in d.users[:8]]
    stock = StockPool(d.url)
    with stock.all_at_once(*others):
        pass
    d.mark()
    assert not stock.login(user.dn, "wrong")
    assert d.counts().binds == len(others) + 1, "the control"
    d.wait_for(lambda counts: counts.binds_refused == len(others) + 1, "all are refused")
    assert len(stock) == 0
    # three are enough for the policy: the user is locked out by one mistake
    assert not stock.login(user.dn, user.password)

    d.unlock(user.dn)
    with Ours(d.url, auth_min_size=len(others)) as ours:
        ours.wait()
        d.mark()
        assert not ours.login(user.dn, "wrong")
        assert d.counts().binds == 1
        d.wait_for(lambda counts: counts.binds_refused == 1, "it is refused")
        assert d.failures(user.dn) == 1
        assert ours.login(user.dn, user.password)
        assert ours.stats["auth_idle"] == len(others)
        assert d.counts().connects == 0


# 3. Passwords that are kept


def reaches(root: object, secret: str) -> bool:
    """Whether any object that can be reached from another has this text in it."""
    forms = (secret, secret.encode())
    seen = {id(root)}
    found = [root]
    while found:
        each = found.pop()
        if isinstance(each, str) and forms[0] in each:
            return True
        if isinstance(each, (bytes, bytearray)) and forms[1] in each:
            return True
        for other in gc.get_referents(each):
            # what a class or a module leads to is everything, this test too
            is_door = isinstance(other, (type, type(sys), type(reaches)))
            if id(other) not in seen and not is_door:
                seen.add(id(other))
                found.append(other)
    return False


def test_passwords_are_not_kept(d: Directory, user: User) -> None:
    stock = StockPool(d.url)
    with Ours(d.url, bind_dn=d.service_dn, bind_password=d.service_password) as ours:
        assert not reaches(stock, user.password)
        assert stock.login(user.dn, user.password)
        assert reaches(stock, user.password), "the control"

        assert reaches(ours, d.service_dn)  # there is a way to the connections
        assert ours.login(user.dn, user.password)
        assert not ours.login(user.dn, "a-wrong-password")
        assert ours.login(user.dn, user.password)
        ours.search(d.people)
        assert ours.stats["auth_idle"] == 1
        assert reaches(ours, user.dn)
        assert not reaches(ours, user.password)
        assert not reaches(ours, "a-wrong-password")


def test_what_nobody_needs_is_closed(d: Directory, user: User) -> None:
    """Else its password would be kept for good."""
    before = set(threading.enumerate())
    stock = StockPool(d.url, max_lifetime=0)
    assert stock.login(user.dn, user.password)
    # it is too old already, and nobody is there to close it
    assert (len(stock), d.open_connections()) == (1, 1), "the control"
    assert set(threading.enumerate()) <= before

    with Ours(d.url, max_idle=0.05) as ours:
        assert ours.login(user.dn, user.password)
        d.wait_for(lambda counts: counts.closes == 1, "ours has closed its connection")
        wait_for(lambda: ours.stats["auth_idle_evicted"] == 1, "it is counted")
        assert ours.stats["auth_size"] == 0


# 4. A lock that is held while the network is waited for


class Watched:
    """A lock that tells when somebody had to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_nobody_waits_behind_the_network_of_others(
    d: Directory, proxy: FaultProxy, threads: ThreadPoolExecutor
) -> None:
    one, two, three = ((x.dn, x.password) for x in d.users[:3])
    stock = StockPool(proxy.url())
    with stock.all_at_once(one, two):
        pass
    lock = stock._pool_lock = Watched(stock._pool_lock)
    proxy.stall()
    before = proxy.received("request")
    rebind = threads.submit(stock.login, *three)
    proxy.wait_for_bytes("request", before + 1)
    unrelated = threads.submit(stock.login, *one)  # nothing that the server would be asked for
    assert lock.waited_for.wait(PATIENCE), "the control"
    assert not unrelated.done()
    proxy.forward()
    assert rebind.result(PATIENCE)
    assert unrelated.result(PATIENCE)

    with Ours(proxy.url(), min_size=2, max_size=3, auth_min_size=1) as ours:
        ours.wait()
        proxy.stall()
        before, accepted = proxy.received("request"), proxy.accepted
        waiting = [threads.submit(ours.login, *three)]  # a BIND on a connection there is
        proxy.wait_for_bytes("request", before + 1)
        before = proxy.received("request")
        waiting.append(threads.submit(ours.search, d.people))
        proxy.wait_for_bytes("request", before + 1)
        waiting.append(threads.submit(ours.login, *one))  # a connection that is opened
        proxy.wait_for_accepted(accepted + 1)
        with ours.connection() as idle:
            waiting.append(threads.submit(ours.search, d.people))  # and one for searching
            proxy.wait_for_accepted(accepted + 2)
            assert ours.stats["search_lent"] == 2
        with ours.connection() as again:
            assert again is idle
        assert ours.stats["search_idle"] == 1
        assert not any(each.done() for each in waiting)
        proxy.forward()
        assert all(each.result(PATIENCE) for each in waiting)


# 5. A size that is none


def test_there_are_never_more_than_its_size(
    d: Directory, proxy: FaultProxy, threads: ThreadPoolExecutor
) -> None:
    users = [(x.dn, x.password) for x in d.users[:MANY]]
    proxy.stall()
    stock = StockPool(proxy.url(), size=2)
    logins = [threads.submit(stock.login, *each) for each in users]
    proxy.wait_for_accepted(MANY)
    proxy.forward()
    assert all(each.result(PATIENCE) for each in logins)
    assert len(stock) == d.open_connections() == MANY, "the control"

    proxy.stall()
    d.mark()
    accepted = proxy.accepted
    with Ours(proxy.url(), auth_max_size=2) as ours:
        logins = [threads.submit(ours.login, *each) for each in users]
        wait_for(lambda: ours.stats["auth_waiting"] == MANY - 2, "the others wait")
        proxy.wait_for_accepted(accepted + 2)
        assert ours.stats["auth_size"] == 2
        proxy.forward()
        assert all(each.result(PATIENCE) for each in logins)
        assert proxy.accepted == accepted + 2
        assert (d.counts().connects, d.counts().binds) == (2, MANY)
        assert (ours.stats["auth_opened"], ours.stats["auth_idle"]) == (2, 2)


# 6. No queue


def test_who_finds_no_connection_waits_for_one(d: Directory, threads: ThreadPoolExecutor) -> None:
    one, two = ((x.dn, x.password) for x in d.users[:2])
    stock = StockPool(d.url, size=1)
    with stock.connection(*one), pytest.raises(ldappool.MaxConnectionReachedError) as caught:
        # it gives up by itself, whatever Keystone's timeouts say
        threads.submit(stock.login, *two).result(PATIENCE)
    assert not isinstance(caught.value, ldap.LDAPError), "the control"

    with Ours(d.url, max_size=1, max_waiting=1) as ours:
        with ours.connection():
            waiter = threads.submit(ours.search, d.people)
            wait_for(lambda: ours.stats["search_waiting"] == 1, "it waits")
            with pytest.raises(PoolFullError, match="max_waiting"):
                ours.search(d.people)
            assert not waiter.done()
        assert waiter.result(PATIENCE).entries
        with ours.connection(), pytest.raises(PoolTimeoutError) as late:
            ours.connection(0.01).__enter__()
    assert isinstance(late.value, DirectoryUnavailableError)
    assert d.counts().connects == 2


# 7. StartTLS once more on each rebind, which ends the connection


def test_a_connection_with_starttls_is_used_again(d: Directory) -> None:
    users = [(x.dn, x.password) for x in d.users[:4]]
    stock = StockPool(d.url, use_tls=True, ca_file=d.ca_file)
    assert all(stock.login(*each) for each in users)
    counts = d.counts()
    assert (counts.connects, counts.starttls, counts.binds) == (4, 4, 4), "the control"

    d.mark()
    with Ours(d.url, tls=TLS(ca_file=str(d.ca_file), start_tls=True)) as ours:
        assert all(ours.login(*each) for each in users)
        counts = d.counts()
        assert (counts.connects, counts.starttls, counts.binds) == (1, 1, 4)


# 8. A server that dies is an AttributeError


def test_a_server_that_died_is_an_outage(d: Directory) -> None:
    one, two = ((x.dn, x.password) for x in d.users[:2])
    stock = StockPool(d.url)
    assert stock.login(*one)
    with Ours(d.url) as ours:
        assert ours.login(*one)
        assert ours.search(d.people).entries
        d.kill()

        with (
            pytest.raises(AttributeError, match="_l") as masked,
            stock.connection(*one) as connection,
        ):
            connection.search_s(d.people, ldap.SCOPE_BASE)
        assert isinstance(masked.value.__context__, ldap.SERVER_DOWN), "the control"

        for ask in (lambda: ours.search(d.people), lambda: ours.login(*two)):
            with pytest.raises(DirectoryUnavailableError) as caught:
                ask()
            assert d.url in str(caught.value)
        d.start()
        wait_for(lambda: ours.servers[0].state == "up", "it is found up again")
        assert ours.login(*two)
        assert ours.search(d.people).entries


# 9. Retries within retries at a server that does not answer


class Hurried(StockPool):
    """Gives up soon, but not at this server."""

    well = ""

    def _bind(self, connection: ldappool.StateConnector, *who: str) -> None:
        if connection._uri == self.well:
            connection.timeout = PATIENCE
            connection.set_option(ldap.OPT_NETWORK_TIMEOUT, PATIENCE)
        super()._bind(connection, *who)


def test_a_dead_server_is_asked_once(
    d: Directory, proxy: FaultProxy, threads: ThreadPoolExecutor
) -> None:
    users = [(x.dn, x.password) for x in d.users[:MANY]]
    urls = (proxy.url(), d.url)
    proxy.stall()
    stock = Hurried(",".join(urls), timeout=0.15, retry_delay=0.001)
    stock.well = d.url
    with stock.all_at_once(users[0]):
        proxy.wait_for_accepted(9)  # the control
        with stock.connection(*users[1]):
            # it has learnt nothing
            proxy.wait_for_accepted(18)
    proxy.catch_up()  # it has accepted all that there were

    accepted = proxy.accepted
    with Ours(*urls, connect_timeout=SOON, auth_max_size=MANY) as ours:

        def asked_in_vain() -> tuple[int, int]:
            """How often it was tried, and how often that was to be."""
            tries = proxy.accepted - accepted
            first = ours.servers[0]
            # the first time, and by the worker that looks for it to come back
            return tries, first.failures + (first.state == "probing")

        assert ours.login(*users[0])
        tries, most = asked_in_vain()
        assert 1 <= tries <= most
        d.mark()
        assert all(threads.map(lambda each: ours.login(*each), users))
        assert d.counts().binds == MANY
        # nobody else
        tries, most = asked_in_vain()
        assert tries <= most
        assert ours.stats["logins_failed"] == 0


# 10. Connections that are dropped and not closed


def test_a_refused_login_leaves_nothing_open(d: Directory, user: User) -> None:
    gc.disable()
    try:
        stock = StockPool(d.url)
        for _ in range(5):
            assert not stock.login(user.dn, "wrong")
            d.unlock(user.dn)
        # a cycle of error, frame and connection, until the garbage collector comes by
        assert (len(stock), d.open_connections()) == (0, 5), "the control"

        d.mark()
        already = d.open_connections()
        with Ours(d.url) as ours:
            for _ in range(5):
                assert not ours.login(user.dn, "wrong")
                d.unlock(user.dn)
            assert d.open_connections() - already == ours.stats["auth_size"] == 1
        d.wait_for(lambda counts: counts.closes == counts.connects == 1, "it is closed")
    finally:
        gc.enable()


def test_what_leaves_the_pool_is_closed_even_if_somebody_knows_it(d: Directory) -> None:
    made: list[ldappool.StateConnector] = []
    stock = StockPool(d.url, made=made.append)
    with stock.all_at_once(*((x.dn, x.password) for x in d.users[:3])):
        pass
    assert not stock.login(d.users[3].dn, "wrong")
    d.unlock(d.users[3].dn)
    assert len(stock) == 0
    assert d.open_connections() == 4, "the control"
    for each in made:
        each.unbind_ext_s()

    d.mark()
    service = {"bind_dn": d.service_dn, "bind_password": d.service_password}
    with Ours(d.url, **service) as ours, contextlib.ExitStack() as held:
        lent = [held.enter_context(ours.connection()) for _ in range(3)]
        for each in lent:
            with pytest.raises(CredentialsError):
                each.bind(d.users[3].dn, "wrong")
            d.unlock(d.users[3].dn)
        held.close()
        assert ours.stats["search_size"] == 0
        assert all(each.transport.raw is None for each in lent)
        d.wait_for(lambda counts: counts.closes == 3, "three are closed")


# 11. Neither fork guard nor drain nor statistics

AFTER_FORK = """
import json, os, sys
from keyfront.middleware.ldap import LDAPPool
from support.stock_pool import StockPool

which, url, base, *rest = sys.argv[1:]
service, other = rest[:2], rest[2:]
WHO = "1.3.6.1.4.1.4203.1.11.3"
if which == "stock":
    pool = StockPool(url)
    def who(as_whom):
        with pool.connection(*as_whom) as connection:
            return connection.whoami_s()
    def become(as_whom):
        with pool.connection(*as_whom):
            pass
else:
    pool = LDAPPool(url, bind_dn=service[0], bind_password=service[1], min_size=0)
    def who(as_whom):
        with pool.connection() as connection:
            return connection.extended(WHO)[1].decode()
    def become(as_whom):
        pool.authenticate(*as_whom)
        with pool.connection() as connection:
            connection.bind(*as_whom)
before = who(service)
child = os.fork()
if not child:
    try:
        become(other)
    except BaseException:
        os._exit(1)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(json.dumps([before, who(service), status]))
"""


def run(script: str, *arguments: str) -> Any:
    """What a script prints, from JSON."""
    with started(script, *arguments) as process:
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        return json.loads(output)


@contextlib.contextmanager
def started(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_child_leaves_the_connections_of_its_parent_alone(d: Directory) -> None:
    other = d.users[0]
    service, secret = d.service_dn, d.service_password
    arguments = (d.url, d.people, service, secret, other.dn, other.password)
    before, after, status = run(AFTER_FORK, "stock", *arguments)
    assert status == 0
    # the parent goes on under another name, over the one socket that both have
    assert (before, after) == (f"dn:{service}", f"dn:{other.dn}"), "the control"
    assert d.counts().connects == 1

    d.mark()
    before, after, status = run(AFTER_FORK, "ours", *arguments)
    assert status == 0
    assert before == after == f"dn:{service}"
    # one of the parent, and two of the child
    assert d.counts().connects == 3


def test_close_drains(d: Directory, user: User, threads: ThreadPoolExecutor) -> None:
    public = {name for name in vars(ldappool.ConnectionManager) if not name.startswith("_")}
    assert public == {"connection", "purge"}, "the control"
    stock = StockPool(d.url)
    assert stock.login(user.dn, user.password)
    stock.purge(user.dn)
    assert (len(stock), d.open_connections()) == (1, 1), "the control"
    del stock

    d.wait_for(lambda _: d.open_connections() == 0, "the control is gone")
    d.mark()
    ours = Ours(d.url, max_size=1)
    assert ours.login(user.dn, user.password)
    with ours.connection() as lent:
        assert (ours.stats["search_lent"], ours.stats["auth_idle"]) == (1, 1)
        waiter = threads.submit(ours.search, d.people)
        wait_for(lambda: ours.stats["search_waiting"] == 1, "one waits")
        assert not ours.close(0.0), "one is lent"
        with pytest.raises(PoolClosedError):
            waiter.result(PATIENCE)
        with pytest.raises(PoolClosedError):
            ours.login(user.dn, user.password)
        assert lent.search(d.people).entries, "whoever has one may end in peace"
        closing = threads.submit(ours.close, PATIENCE)
        assert not closing.done()
    assert closing.result(PATIENCE)
    counts = d.wait_for(lambda counts: counts.closes == 2, "both are closed")
    assert (counts.connects, counts.unbinds) == (2, 2)
    assert d.open_connections() == 0


# 12. Green threads that stand still

GREEN = """
import sys
model = sys.argv[1]
if model == "gevent":
    from keyfront.gateway.greenlets import patch_gevent; patch_gevent()
    import gevent
    spawn, sleep = gevent.spawn, gevent.sleep
else:
    import eventlet; eventlet.monkey_patch()
    spawn, sleep = eventlet.spawn, eventlet.sleep
from keyfront.middleware.ldap import LDAPPool
from support.stock_pool import StockPool

url, first, first_password, second, second_password = sys.argv[2:]
patient = dict.fromkeys(("timeout", "connect_timeout", "operation_timeout"), 600.0)
stock = StockPool(url)
ours = LDAPPool(url, min_size=0, **patient)
logins = (stock.login, ours.authenticate)
for login in logins:
    login(first, first_password)

def ticks_during(login):
    ticks, ended = 0, False
    def tick():
        nonlocal ticks
        while not ended:
            ticks += 1
            print("tick", flush=True)
            sleep(0.005)
    spawn(tick)
    sleep(0)  # it begins
    before = ticks
    assert login(second, second_password)
    ended = True
    return ticks - before

for login in logins:
    print("ready", flush=True)
    sys.stdin.readline()
    print(ticks_during(login), flush=True)
"""


@pytest.mark.parametrize("model", ["gevent", "eventlet"])
def test_green_threads_run_while_one_waits(d: Directory, proxy: FaultProxy, model: str) -> None:
    """How often another one ran while a login had no answer."""
    if importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    users = [text for x in d.users[:2] for text in (x.dn, x.password)]
    ran: list[int] = []
    with started(GREEN, model, proxy.url(), *users) as process:
        assert process.stdin is not None
        lines = Lines(process)
        for _ in range(2):
            assert lines.after("tick") == "ready"
            proxy.stall()
            sent = proxy.received("request")
            process.stdin.write(b"go\n")
            process.stdin.flush()
            proxy.wait_for_bytes("request", sent + 1)
            if not ran:
                time.sleep(0.3)  # in which it could run; none of it is a verdict
            else:
                lines.drop()
                for _ in range(10):
                    assert lines.next() == "tick"
            proxy.forward()
            ran.append(int(lines.after("tick")))
    stock, ours = ran
    assert stock == 0, "the control"
    assert ours >= 10

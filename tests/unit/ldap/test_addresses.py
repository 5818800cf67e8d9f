"""The addresses of an LDAP server's name: their order, their share of the time, their errors."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfront.errors import (
    CredentialsError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    Verdict,
)
from keyfront.middleware.ldap.protocol.addresses import Addresses, PassedOver, alternate, look_up
from keyfront.middleware.ldap.protocol.urls import ServerURL
from support.clocks import Clock
from support.served import PATIENCE, wait_for

A, B, C = (("192.0.2.1", 389), ("192.0.2.2", 389), ("192.0.2.3", 389))
X, Y = ("2001:db8::1", 389, 0, 0), ("2001:db8::2", 389, 0, 0)
URL = ServerURL.parse("ldap://ldap.example.org")


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Network:
    """What a name resolves to, and what happens at each address: it answers unless told."""

    def __init__(self, clock: Clock, *addresses: Any) -> None:
        self.clock = clock
        self.found = list(addresses)
        self.lookups: list[tuple[str, int]] = []
        self.outcomes: dict[Any, Exception] = {}
        self.calls: list[Any] = []
        self.shares: list[float] = []

    def resolve(self, host: str, port: int) -> list[Any]:
        self.lookups.append((host, port))
        return list(self.found)

    def connect(self, url: ServerURL, address: Any, seconds: float) -> Any:
        self.calls.append(address)
        self.shares.append(seconds)
        outcome = self.outcomes.get(address)
        if outcome is None:
            return address
        if isinstance(outcome, TimeoutError):
            self.clock.later(seconds)
        raise outcome

    def addresses(self, url: ServerURL = URL) -> Addresses:
        return Addresses(url, resolve=self.resolve, clock=self.clock.monotonic)


def refused() -> Exception:
    return ConnectionRefusedError(111, "Connection refused")


def test_families_take_turns() -> None:
    assert alternate([X, Y, A, B, C]) == [X, A, Y, B, C]
    assert alternate([A, B, X, C, Y]) == [A, X, B, Y, C]
    assert alternate([A, A, X, A]) == [A, X]
    assert alternate([]) == []


@given(st.lists(st.sampled_from([A, B, C, X, Y])))
def test_taking_turns_loses_none(addresses: list[Any]) -> None:
    found = alternate(addresses)
    assert set(found) == set(addresses)
    assert len(found) == len(set(found))
    assert found[:1] == addresses[:1]
    for family in (2, 4):
        mine = [address for address in found if len(address) == family]
        assert mine == [a for a in dict.fromkeys(addresses) if len(a) == family]


def test_the_first_that_answers(clock: Clock) -> None:
    network = Network(clock, X, A, B)
    network.outcomes[X] = refused()
    network.found = [X, Y, A, B]
    assert network.addresses().reach(network.connect, 3.0) == A
    assert network.calls == [X, A]
    assert network.lookups == [("ldap.example.org", 389)]


def test_each_has_its_share_of_what_is_left(clock: Clock) -> None:
    network = Network(clock, A, B, C)
    network.outcomes = {A: refused(), B: TimeoutError()}
    assert network.addresses().reach(network.connect, 3.0) == C
    # The first took no time, so two share all of it.
    assert network.shares == pytest.approx([1.0, 1.5, 1.5])


def test_a_single_address_has_all_the_time(clock: Clock) -> None:
    network = Network(clock, A)
    network.addresses().reach(network.connect, 3.0)
    assert network.shares == [3.0]


def test_all_together_keep_to_the_time(clock: Clock) -> None:
    network = Network(clock, X, A, Y, B, C)
    network.outcomes = {address: TimeoutError() for address in network.found}
    began = clock.monotonic()
    with pytest.raises(DirectoryTimeoutError, match="and 2 more addresses"):
        network.addresses().reach(network.connect, 5.0)
    assert clock.monotonic() - began == pytest.approx(5.0)
    # Each has a quarter of the time at least.
    assert network.calls == [X, A, Y, B]
    assert network.shares == pytest.approx([1.25] * 4)


def test_the_last_good_one_comes_first(clock: Clock) -> None:
    network = Network(clock, A, B, C)
    network.outcomes = {A: refused(), B: refused()}
    addresses = network.addresses()
    addresses.reach(network.connect, 3.0)
    network.calls.clear()
    assert addresses.reach(network.connect, 3.0) == C
    assert network.calls == [C]
    network.outcomes = {C: refused()}
    network.calls.clear()
    assert addresses.reach(network.connect, 3.0) == A
    assert network.calls == [C, A]


def test_a_name_is_looked_up_each_time(clock: Clock) -> None:
    """What answered last is no longer tried once DNS does not name it any more."""
    network = Network(clock, A)
    addresses = network.addresses()
    assert addresses.reach(network.connect, 3.0) == A
    network.found = [B, C]
    assert addresses.reach(network.connect, 3.0) == B
    assert network.calls == [A, B]
    assert len(network.lookups) == 2


def test_one_that_refuses_has_answered(clock: Clock) -> None:
    """No other address is asked: each would count against the account, up to its lockout."""
    network = Network(clock, A, B, C)
    network.outcomes = {A: refused(), B: CredentialsError(Verdict.WRONG_PASSWORD)}
    addresses = network.addresses()
    with pytest.raises(CredentialsError):
        addresses.reach(network.connect, 3.0)
    assert network.calls == [A, B]
    del network.outcomes[B]
    assert addresses.reach(network.connect, 3.0) == B
    assert network.calls == [A, B, B]


def test_one_that_passes_on_to_the_next(clock: Clock) -> None:
    """A domain controller that lags refuses the service's password; the domain is one name."""
    network = Network(clock, A, B, C)
    answer = CredentialsError(Verdict.WRONG_PASSWORD)
    network.outcomes = {A: PassedOver("lags", answer=answer), B: refused()}
    addresses = network.addresses()
    assert addresses.reach(network.connect, 3.0) == C
    assert network.calls == [A, B, C]
    network.outcomes[C] = PassedOver("no turn")
    with pytest.raises(PassedOver) as caught:
        addresses.reach(network.connect, 3.0)
    assert caught.value.answer is answer
    assert network.calls[3:] == [C, A, B]


def test_the_error_tells_of_each_address(clock: Clock) -> None:
    network = Network(clock, X, A)
    network.outcomes = {X: refused(), A: DirectoryTimeoutError("no answer", server=URL.text)}
    with pytest.raises(DirectoryUnavailableError) as caught:
        network.addresses().reach(network.connect, 3.0)
    assert str(caught.value) == (
        "ldap://ldap.example.org:389: [2001:db8::1]: Connection refused; 192.0.2.1: no answer"
    )
    assert caught.value.server == "ldap://ldap.example.org:389"
    assert caught.value.__context__ is None  # nor the frames of what failed


def test_a_numeric_host_is_not_repeated(clock: Clock) -> None:
    url = ServerURL.parse("ldap://192.0.2.1")
    network = Network(clock, A)
    network.outcomes = {A: refused()}
    with pytest.raises(DirectoryUnavailableError) as caught:
        network.addresses(url).reach(network.connect, 3.0)
    assert str(caught.value) == "ldap://192.0.2.1:389: Connection refused"


def test_of_many_addresses_a_few_are_named(clock: Clock) -> None:
    network = Network(clock, *[(f"192.0.2.{n}", 389) for n in range(1, 41)])
    network.outcomes = {address: refused() for address in network.found}
    with pytest.raises(DirectoryUnavailableError) as caught:
        network.addresses().reach(network.connect, 3.0)
    assert len(network.calls) == 40
    assert str(caught.value).endswith("192.0.2.3: Connection refused; and 37 more addresses")


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ((refused(), refused()), DirectoryUnavailableError),
        ((refused(), TimeoutError()), DirectoryTimeoutError),
        ((TimeoutError(), DirectoryTLSError("x")), DirectoryTimeoutError),
        ((DirectoryTLSError("x"), DirectoryTLSError("y")), DirectoryTLSError),
        ((DirectoryTLSError("x"), refused()), DirectoryUnavailableError),
        ((DirectoryProtocolError("x"),), DirectoryProtocolError),
    ],
)
def test_the_kind_of_error(
    clock: Clock, outcomes: tuple[Exception, ...], kind: type[Exception]
) -> None:
    network = Network(clock, *[A, B][: len(outcomes)])
    network.outcomes = dict(zip([A, B], outcomes, strict=False))
    with pytest.raises(DirectoryUnavailableError) as caught:
        network.addresses().reach(network.connect, 3.0)
    assert type(caught.value) is kind


def test_another_error_is_not_touched(clock: Clock) -> None:
    network = Network(clock, A, B)
    network.outcomes = {A: ZeroDivisionError()}
    with pytest.raises(ZeroDivisionError):
        network.addresses().reach(network.connect, 3.0)
    assert network.calls == [A]


def test_one_that_overruns_takes_it_from_the_others(clock: Clock) -> None:
    network = Network(clock, A, B, C)

    def slow(url: ServerURL, address: Any, seconds: float) -> Any:
        network.calls.append(address)
        clock.later(10)
        raise refused()

    with pytest.raises(DirectoryTimeoutError, match="no time left for 2 more"):
        network.addresses().reach(slow, 3.0)
    assert network.calls == [A]


def test_a_socket_file_has_no_address(clock: Clock) -> None:
    url = ServerURL.parse("ldapi://%2Frun%2Fslapd%2Fldapi")
    network = Network(clock)
    network.outcomes[None] = FileNotFoundError(2, "No such file or directory")
    addresses = network.addresses(url)
    with pytest.raises(DirectoryUnavailableError, match=r"ldapi: No such file or directory$"):
        addresses.reach(network.connect, 3.0)
    network.outcomes.clear()
    assert addresses.reach(network.connect, 3.0) is None
    assert network.lookups == []


# Looking names up


def failing(error: Exception) -> Callable[[str, int], list[Any]]:
    def resolve(host: str, port: int) -> list[Any]:
        raise error

    return resolve


@pytest.mark.parametrize("url", [URL, ServerURL.parse("ldap://192.0.2.1")])
@pytest.mark.parametrize(
    ("resolve", "reason"),
    [
        (failing(socket.gaierror(-2, "Name or service not known")), "Name or service not known"),
        (failing(UnicodeError("label too long")), "label too long"),
        (failing(RuntimeError()), "RuntimeError"),
        (lambda host, port: [], "it has no address"),
    ],
)
def test_a_lookup_that_fails(
    clock: Clock, url: ServerURL, resolve: Callable[[str, int], list[Any]], reason: str
) -> None:
    addresses = Addresses(url, resolve=resolve, clock=clock.monotonic)
    with pytest.raises(DirectoryUnavailableError) as caught:
        addresses.reach(lambda *arguments: pytest.fail("asked"), 3.0)
    assert str(caught.value) == f"{url.text}: the lookup of {url.host} failed: {reason}"
    assert type(caught.value) is DirectoryUnavailableError


def test_a_lookup_that_hangs_is_left_alone(clock: Clock) -> None:
    asked, release = threading.Event(), threading.Event()

    def resolve(host: str, port: int) -> list[Any]:
        asked.set()
        release.wait(PATIENCE)
        return [A]

    addresses = Addresses(URL, resolve=resolve, clock=time.monotonic)
    began = time.monotonic()
    with pytest.raises(DirectoryTimeoutError, match="no answer to the lookup of ldap"):
        addresses.reach(lambda *arguments: pytest.fail("asked"), 0.05)
    assert asked.wait(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    release.set()


class Names:
    """Finds ``found``, or raises ``error``; or, if it is held up, nothing before that ends."""

    def __init__(self) -> None:
        self.found: list[Any] = [A]
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def __call__(self, host: str, port: int) -> list[Any]:
        assert self.free.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self.found


def test_while_nobody_tells_what_was_known_is_used(clock: Clock) -> None:
    network, names = Network(clock, A, B), Names()
    addresses = Addresses(URL, resolve=names, clock=clock.monotonic)
    assert addresses.reach(network.connect, 3.0) == A
    for code in (socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM):
        names.error = socket.gaierror(code, "no answer")
        assert addresses.reach(network.connect, 3.0) == A
    names.error = None
    names.found = [B]
    assert addresses.reach(network.connect, 3.0) == B  # what is told counts at once
    names.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(DirectoryUnavailableError, match="Name or service not known"):
        addresses.reach(network.connect, 3.0)
    names.error = socket.gaierror(socket.EAI_AGAIN, "no answer")
    with pytest.raises(DirectoryUnavailableError, match="no answer"):
        addresses.reach(network.connect, 3.0)


def test_a_lookup_that_hangs_leaves_time_for_what_was_known() -> None:
    names = Names()
    addresses = Addresses(URL, resolve=names, clock=time.monotonic)
    addresses.reach(lambda *arguments: None, PATIENCE)
    names.free.clear()
    shares: list[float] = []
    addresses.reach(lambda url, address, share: shares.append(share), 2.0)
    (share,) = shares
    assert 0 < share <= 1.5
    names.found = [B]
    names.free.set()
    wait_for(lambda: addresses._known == [B], "its late answer counts")


def test_a_lookup_is_part_of_the_time(clock: Clock) -> None:
    network = Network(clock, A, B)

    def resolve(host: str, port: int) -> list[Any]:
        clock.later(1.0)
        return [A, B]

    addresses = Addresses(URL, resolve=resolve, clock=clock.monotonic)
    addresses.reach(network.connect, 3.0)
    assert network.shares == pytest.approx([1.0])


def test_without_a_thread_it_looks_up_itself(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    network = Network(clock, A)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert network.addresses().reach(network.connect, 3.0) == A


def test_a_numeric_host_needs_no_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("started"))
    for text in ("ldap://192.0.2.1", "ldap://[2001:db8::1]", "ldap://[fe80::1%25lo]"):
        network = Network(clock, A)
        assert network.addresses(ServerURL.parse(text)).reach(network.connect, 3.0) == A


# With sockets


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def dial(url: ServerURL, address: Any, seconds: float) -> Any:
    family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
    with socket.socket(family) as client:
        client.settimeout(seconds)
        client.connect(address)
        return client.getpeername()


@pytest.mark.parametrize("lead", ["::1", "127.0.0.1"])
def test_a_server_on_one_of_two_families(lead: str) -> None:
    """As ``localhost`` is on many machines: ::1 first, and slapd on 127.0.0.1 only."""
    with listening() as port:
        url = ServerURL.parse(f"ldaps://localhost:{port}")
        found: list[Any] = [("::1", port, 0, 0), ("127.0.0.1", port)]
        if lead != "::1":
            found.reverse()
        addresses = Addresses(url, resolve=lambda *arguments: found, clock=time.monotonic)
        began = time.monotonic()
        for _ in range(3):
            assert addresses.reach(dial, PATIENCE)[0] == "127.0.0.1"
        # Not a share of the time spent on ::1.
        assert time.monotonic() - began < PATIENCE / 4


def test_a_black_hole_costs_its_share() -> None:
    """Its backlog is full, so the kernel does not answer; once known it is not tried first."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening())
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.2", port))
        hole.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.2", port))
        url = ServerURL.parse(f"ldap://ldap.example.org:{port}")
        found = [("127.0.0.2", port), ("127.0.0.1", port)]
        calls: list[Any] = []

        def counted(url: ServerURL, address: Any, seconds: float) -> Any:
            calls.append(address[0])
            return dial(url, address, seconds)

        addresses = Addresses(url, resolve=lambda *arguments: found, clock=time.monotonic)
        assert addresses.reach(counted, 5.0)[0] == "127.0.0.1"
        assert addresses.reach(counted, 5.0)[0] == "127.0.0.1"
        assert calls == ["127.0.0.2", "127.0.0.1", "127.0.0.1"]


def hole_at(stack: contextlib.ExitStack, host: str, port: int) -> None:
    """An address whose kernel does not answer, as its backlog is full."""
    hole = stack.enter_context(socket.socket())
    hole.bind((host, port))
    hole.listen(0)
    for _ in range(8):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex((host, port))


def test_black_holes_are_passed_by() -> None:
    """Each costs the stagger, however many there are, and none is connected to twice."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening())
        for n in range(2, 8):
            hole_at(stack, f"127.0.0.{n}", port)
        # What comes after those is not begun.
        found = [(f"127.0.0.{n}", port) for n in (2, 3, 4, 5, 6, 7, 1, 8)]
        calls: list[Any] = []

        def adopt(url: ServerURL, address: Any, seconds: float) -> Any:
            calls.append(address)
            taken = stack.enter_context(address.take())
            return taken.getpeername()

        url = ServerURL.parse(f"ldap://ldap.example.org:{port}")
        addresses = Addresses(
            url, resolve=lambda *arguments: found, clock=time.monotonic, beside=True
        )
        began = time.monotonic()
        assert addresses.reach(adopt, PATIENCE) == ("127.0.0.1", port)
        assert time.monotonic() - began < PATIENCE / 4
        assert addresses.reach(adopt, PATIENCE) == ("127.0.0.1", port)
        assert calls == [("127.0.0.1", port)] * 2


def test_one_that_is_connected_and_silent_leaves_time_for_the_others() -> None:
    with listening() as port, contextlib.ExitStack() as stack:
        found = [(f"127.0.0.{n}", port) for n in range(1, 41)]
        for host, _ in found[1:]:
            made = stack.enter_context(socket.socket())
            made.bind((host, port))
            made.listen()
        shares: list[float] = []
        unused: list[Any] = []

        def silent(url: ServerURL, address: Any, seconds: float) -> Any:
            shares.append(seconds)
            unused.append(address)
            if len(shares) == 3:
                return tuple(address)
            raise DirectoryTimeoutError("no answer")

        url = ServerURL.parse(f"ldap://ldap.example.org:{port}")
        addresses = Addresses(
            url, resolve=lambda *arguments: found, clock=time.monotonic, beside=True
        )
        assert addresses.reach(silent, 80.0) == found[2]
        assert all(15 < share <= 20 for share in shares)
        # Nobody took the sockets: they are closed.
        assert [each.take() for each in unused] == [None] * 3


def test_all_that_fail_beside_each_other_are_told_of() -> None:
    with contextlib.ExitStack() as stack:
        with listening() as port:
            hole_at(stack, "127.0.0.2", port)
        found = [("127.0.0.1", port), ("127.0.0.2", port), ("127.0.0.3", port)]
        url = ServerURL.parse(f"ldap://ldap.example.org:{port}")
        addresses = Addresses(
            url, resolve=lambda *arguments: found, clock=time.monotonic, beside=True
        )
        with pytest.raises(DirectoryTimeoutError) as caught:
            addresses.reach(dial, 4.0)
    assert str(caught.value) == (
        f"{url.text}: 127.0.0.1: no connection: Connection refused; "
        "127.0.0.3: no connection: Connection refused; 127.0.0.2: no connection within 4 s"
    )


def test_the_resolver_of_the_system() -> None:
    assert look_up("127.0.0.1", 389) == [("127.0.0.1", 389)]
    assert look_up("::1", 389) == [("::1", 389, 0, 0)]
    with pytest.raises((OSError, UnicodeError)):
        look_up("x" * 64, 389)


def test_threads_at_once(clock: Clock) -> None:
    """Each finds one that answers, whichever was good last for another."""
    network = Network(clock, X, A, Y, B, C)
    network.outcomes = {X: refused(), Y: refused()}
    addresses = network.addresses()
    found: list[Any] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(50):
            network.found = dice.sample([X, A, Y, B, C], 5)
            found.append(addresses.reach(network.connect, 3.0))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 200
    assert set(found) <= {A, B, C}

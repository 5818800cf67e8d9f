"""A follower whose server changes its mind: what it says of itself, what it refuses, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyfront.errors import DirectoryAnswerError, DirectoryUnavailableError
from keyfront.middleware.ldap import change_notifications as module
from keyfront.middleware.ldap.change_notifications import METHODS, Follower, Method, Subscription
from keyfront.middleware.ldap.protocol import controls, messages
from keyfront.middleware.ldap.protocol.messages import Message
from support.following import Heard
from support.served import wait_for

TREE = "dc=x"


class Server:
    """What a server says; its searches go on for ever, and its questions are answered."""

    def __init__(self) -> None:
        self.offers: set[str] = {METHODS["psearch"]}
        self.root_error: int = 0
        #: The result of the searches that were to go on.
        self.refuses = 0
        #: Those with this in their controls are refused.
        self.refuses_controls = b""
        self.controls: list[bytes] = []
        self.away = False
        self.connections = self.asked = 0
        #: What it answers to a question for contextCSN.
        self.numbers: list[bytes] = []
        self.numbers_error = 0
        self._ended = 0
        self._last: Connection | None = None

    def notice(self, answer: Message, search: int = 0) -> None:
        """Send to one of the searches that are followed, the first by default."""
        assert self._last is not None
        answer.id = self._last.searches[search]
        self._last.answers.append(answer)

    def end(self) -> None:
        """End the connections there are."""
        self._ended = self.connections

    def is_over(self, number: int) -> bool:
        return number <= self._ended

    def connect(self, seconds: float) -> Any:
        if self.away:
            raise DirectoryUnavailableError("connection refused", server="x")
        self.connections += 1
        self._last = Connection(self)
        return self._last


class Connection:
    """One connection to it, as far as a follower uses it."""

    source = server = "ldap://x 192.0.2.1"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._number = server.connections
        self.answers: deque[Message] = deque()
        self._posted = 0
        self.searches: list[int] = []

    def supports(self, oid: str) -> bool:
        if self._server.root_error:
            raise DirectoryAnswerError(self._server.root_error, "refused", server="x")
        return oid in self._server.offers

    def search(self, base: str, scope: int, *, attributes: Any) -> Any:
        return type("Found", (), {"entries": [("", {"namingContexts": [TREE.encode()]})]})

    def post(
        self, base: str, scope: int, search: str, names: Any, *, encoded_controls: bytes = b"",
        timeout: float,
    ) -> int:  # fmt: skip
        self._posted += 1
        code = -1
        if scope == 0:
            code = 0
            if names == ("contextCSN",):
                code = self._server.numbers_error
                if self._server.numbers and not code:
                    entry = Message(self._posted, messages.ENTRY)
                    entry.dn, entry.controls = base, []
                    entry.attributes = {"contextCSN": list(self._server.numbers)}
                    self.answers.append(entry)
            else:
                self._server.asked += 1
        else:
            self.searches.append(self._posted)
            self._server.controls.append(encoded_controls)
            if self._server.refuses:
                code = self._server.refuses
            elif (named := self._server.refuses_controls) and named in encoded_controls:
                code = 12
            elif METHODS["syncrepl"].encode() in encoded_controls:
                stands = information(0xA2, cookie(*self._server.numbers))
                stands.id = self._posted
                self.answers.append(stands)
        if code >= 0:
            answer = Message(self._posted, messages.DONE)
            answer.code, answer.diagnostic, answer.matched_dn = code, "", ""
            answer.referrals, answer.controls = [], []
            self.answers.append(answer)
        return self._posted

    def take(self, seconds: float) -> Message | None:
        if self._server.is_over(self._number):
            raise DirectoryUnavailableError("the server closed the connection", server="x")
        if not self.answers:
            time.sleep(min(seconds, 0.005))
            return None
        return self.answers.popleft()

    def close(self) -> None:
        pass


def cookie(*numbers: bytes) -> bytes:
    return b"rid=000" + (b",csn=" + b";".join(numbers) if numbers else b"")


def information(tag: int, told: bytes) -> Message:
    """A Sync Info Message: of another cookie (0x80), or that the search stands (0xA2)."""
    content = told if tag == 0x80 else b"\x04" + bytes([len(told)]) + told
    answer = Message(0, messages.INTERMEDIATE)
    answer.oid, answer.value = controls.SYNC_INFO, bytes([tag, len(content)]) + content
    answer.controls = []
    return answer


def change(uid: str, told: bytes, state: int = controls.ADDED) -> Message:
    """The notice of a user who comes or goes."""
    content = b"\x0a\x01" + bytes([state]) + b"\x04\x10" + uid.encode().ljust(16)
    content += b"\x04" + bytes([len(told)]) + told
    answer = Message(0, messages.ENTRY)
    answer.dn = f"uid={uid},{TREE}"
    gone = state == controls.DELETED
    answer.attributes = {} if gone else {"objectClass": [b"kfUser"], "uid": [uid.encode()]}
    answer.controls = [(controls.SYNC_STATE, False, b"\x30" + bytes([len(content)]) + content)]
    return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, seconds in (("_FIRST_PAUSE", 0.01), ("_LONGEST_PAUSE", 0.02), ("BEAT_SECONDS", 0.01),
                          ("_REFUSED_SECONDS", 0.05), ("_LOOK_SECONDS", 0.05),
                          ("_REPEAT_SECONDS", 0.01), ("_SETTLING_SECONDS", 0.1)):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    return Server()


class Listener(Heard):
    """Counts how often it was said that there is no way."""

    said = 0
    objects = False
    begins_at = 0.0

    def begins(self, server: str) -> None:
        self.begins_at = time.monotonic()
        super().begins(server)

    def impossible(self, server: str, reason: str) -> None:
        self.said += 1
        if self.objects:
            raise DirectoryUnavailableError("it was followed before", server=server)
        super().impossible(server, reason)


@pytest.fixture
def heard(server: Server) -> Iterator[Listener]:
    made = Listener()
    yield made


def followed(
    server: Server, heard: Heard, *methods: Method, trees: tuple[str, ...] = (TREE,)
) -> Follower:
    subscription = Subscription(trees, ("cn",), methods or tuple(METHODS))
    made = Follower("x", server.connect, subscription, heard)
    made.start()
    return made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]


@pytest.mark.parametrize("code", [2, 12, 50, 53])
def test_a_refusal_is_tried_again(
    server: Server, heard: Listener, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuses = code
    follower = followed(server, heard)
    try:
        wait_for(lambda: heard.said > 20, "it is said again and again")
        assert "psearch" in heard.reason and not heard.begun
        assert len(warnings(caplog)) == 1, warnings(caplog)
        server.refuses = 0
        wait_for(lambda: heard.moment > 0, "it is followed")
        said = heard.said
        heard.settle()
        assert heard.said == said
    finally:
        follower.stop()


def test_what_was_followed_before_is_not_given_up(
    server: Server, heard: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    follower = followed(server, heard)
    try:
        wait_for(lambda: heard.moment > 0, "it is followed")
        heard.objects = True  # as the listener of the token cache does then
        connections = server.connections
        server.refuses = 53
        server.end()
        wait_for(lambda: server.connections > connections + 10, "it is tried again and again")
        moment = heard.moment
        assert heard.said
        assert len(warnings(caplog)) <= 3, warnings(caplog)
        time.sleep(0.1)
        assert heard.moment == moment
        server.refuses = 0
        begun = heard.begun
        wait_for(lambda: heard.moment > moment, "it is followed again")
        assert heard.begun == begun + 1
    finally:
        follower.stop()


def test_who_does_not_tell_what_he_offers_is_not_said_to_offer_nothing(
    server: Server, heard: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    server.root_error = 53
    follower = followed(server, heard)
    try:
        wait_for(lambda: server.connections > 10, "it is tried again and again")
        assert not heard.said and not heard.moment
        assert len(warnings(caplog)) == 1
        server.root_error = 0
        wait_for(lambda: heard.moment > 0, "it is followed")
    finally:
        follower.stop()


def test_a_server_that_offers_nothing_and_is_away(server: Server, heard: Listener) -> None:
    server.offers = set()
    follower = followed(server, heard)
    try:
        wait_for(lambda: heard.said > 5, "it is said")
        server.away = True
        said = heard.said
        # it offered nothing when it was asked last, and promised nothing more than that
        wait_for(lambda: heard.said > said + 20, "it is said on")
        server.away = False
        server.offers = {METHODS["psearch"]}
        wait_for(lambda: heard.moment > 0, "it is followed")
    finally:
        follower.stop()


def test_a_persistent_search_may_begin_later_than_it_is_sent(
    server: Server, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions are answered at once, and the search stands a good deal later."""
    monkeypatch.setattr(module, "_SETTLING_SECONDS", 0.5)
    began = time.monotonic()
    follower = followed(server, heard)
    try:
        wait_for(lambda: server.asked > 3, "questions are answered")
        # Somebody reads the state of before a change that nobody tells of.
        read = time.monotonic()
        if time.monotonic() < began + 0.5:
            assert heard.moment == 0.0
        wait_for(lambda: heard.moment > 0, "it is followed")
        assert heard.begins_at >= began + 0.5
        assert heard.begins_at > read
        assert heard.take()[0] is None  # what was read before it began is ended
    finally:
        follower.stop()


def test_the_sync_plugin_is_preferred(server: Server, heard: Listener) -> None:
    server.offers = {METHODS["psearch"], METHODS["syncrepl"]}
    follower = followed(server, heard)
    try:
        wait_for(lambda: server.controls != [], "it is searched")
        assert METHODS["syncrepl"].encode() in server.controls[0]
        server.refuses_controls = METHODS["syncrepl"].encode()
        server.end()
        wait_for(lambda: heard.moment > 0, "it is followed by the other one")
    finally:
        follower.stop()


def number(count: int, server: int = 1) -> bytes:
    return b"20260101000000.000000Z#%06x#%03x#000000" % (count, server)


@contextmanager
def syncrepl(
    server: Server, heard: Heard, *numbers: bytes, trees: tuple[str, ...] = (TREE,)
) -> Iterator[None]:
    """Follow slapd, which has this state, and tell nothing of the beginning."""
    server.offers = {METHODS["syncrepl"]}
    server.numbers = list(numbers)
    follower = followed(server, heard, trees=trees)
    try:
        wait_for(lambda: heard.moment > 0, "it is followed")
        heard.settle()
        heard.take()
        yield
    finally:
        follower.stop()


def answered(server: Server, *numbers: bytes) -> float:
    """Have changes answered to their author, up to these numbers; the notices come later."""
    server.numbers = list(numbers)
    return time.monotonic()


def no_moment_after(server: Server, heard: Heard, changed: float) -> bool:
    """Whether none is claimed after a change, though many questions are answered."""
    asked = server.asked
    wait_for(lambda: server.asked > asked + 20, "questions are answered")
    return heard.moment <= changed


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that waits for any notice."""
    monkeypatch.setattr(module, "_OWED_BEATS", 1 << 20)


@pytest.mark.usefixtures("patient")
def test_no_moment_is_claimed_before_the_notice_of_a_change(
    server: Server, heard: Listener
) -> None:
    """slapd's task for the search comes later than the answers to author and beat."""
    with syncrepl(server, heard, number(1)):
        changed = answered(server, number(3))
        assert no_moment_after(server, heard, changed)
        server.notice(change("one", cookie(number(2))))
        wait_for(lambda: "one" in heard.told, "it is told")
        assert no_moment_after(server, heard, changed)
        server.notice(change("two", cookie(number(3))))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
        assert heard.take() == ["one", "two"]
        assert server.connections == 1


@pytest.mark.usefixtures("patient")
def test_what_is_told_is_told_before_the_moment(server: Server, heard: Listener) -> None:
    told: list[tuple[bool, float]] = []
    claim = heard.alive

    def alive(name: str, moment: float) -> None:
        told.append(("one" in heard.told, moment))
        claim(name, moment)

    heard.alive = alive  # type: ignore[method-assign]
    with syncrepl(server, heard, number(1)):
        changed = answered(server, number(2))
        server.notice(change("one", cookie(number(2))))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
    assert all(known for known, moment in told if moment > changed)


@pytest.mark.usefixtures("patient")
def test_each_server_that_numbers_changes_counts(server: Server, heard: Listener) -> None:
    with syncrepl(server, heard, number(5, 1), number(1, 2)):
        changed = answered(server, number(5, 1), number(2, 2), number(1, 3))
        server.notice(change("one", cookie(number(6, 1))))
        assert no_moment_after(server, heard, changed)
        server.notice(change("one", cookie(number(2, 2))))
        assert no_moment_after(server, heard, changed)
        server.notice(change("one", cookie(number(1, 3))))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")


@pytest.mark.usefixtures("patient")
def test_a_change_elsewhere_moves_the_cookie_only(server: Server, heard: Listener) -> None:
    with syncrepl(server, heard, number(1)):
        changed = answered(server, number(2))
        assert no_moment_after(server, heard, changed)
        server.notice(information(0x80, cookie(number(2))))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
        assert heard.take() == []


@pytest.mark.usefixtures("patient")
def test_each_search_has_its_own_notices(server: Server, heard: Listener) -> None:
    trees = (f"ou=a,{TREE}", f"ou=b,{TREE}")
    with syncrepl(server, heard, number(1), trees=trees):
        changed = answered(server, number(2))
        server.notice(change("one", cookie(number(2))))
        assert no_moment_after(server, heard, changed)
        server.notice(information(0x80, cookie(number(2))), 1)
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
        # What is deleted in one tree is told to its search only, and counts for all.
        changed = answered(server, number(3))
        server.notice(change("one", cookie(number(3)), controls.DELETED))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
        assert heard.take()[-1] is None


def test_what_nobody_tells_of_counts_as_a_change_of_all(
    server: Server, heard: Listener
) -> None:
    """As what is deleted outside of the trees."""
    with syncrepl(server, heard, number(1)):
        changed = answered(server, number(2))
        wait_for(lambda: heard.moment > changed, "the moment is claimed")
        assert heard.take() == [None]
        heard.settle()
        assert heard.take() == [] and server.connections == 1
        # The notice comes after all.
        server.notice(change("one", cookie(number(2))))
        wait_for(lambda: "one" in heard.told, "it is told")


def test_a_server_without_numbers_goes_on(server: Server, heard: Listener) -> None:
    with syncrepl(server, heard):
        heard.settle()
        server.notice(change("one", cookie()))
        wait_for(lambda: "one" in heard.told, "it is told")


@pytest.mark.parametrize("code", [32, 50])
def test_a_server_that_never_told_its_numbers_goes_on(
    server: Server, heard: Listener, code: int
) -> None:
    server.numbers_error = code
    with syncrepl(server, heard, number(1)):
        heard.settle()
        assert server.connections == 1


@pytest.mark.parametrize("code", [51, 52])
def test_a_server_that_is_busy_has_not_said_that_it_has_no_numbers(
    server: Server, heard: Listener, code: int
) -> None:
    server.offers = {METHODS["syncrepl"]}
    server.numbers, server.numbers_error = [number(1)], code
    follower = followed(server, heard)
    try:
        wait_for(lambda: server.connections > 10, "it is tried again and again")
        assert not heard.moment
        server.numbers_error = 0
        wait_for(lambda: heard.moment > 0, "it is followed")
    finally:
        follower.stop()


def test_a_server_that_hides_its_numbers_is_asked_anew(server: Server, heard: Listener) -> None:
    with syncrepl(server, heard, number(1)):
        changed = answered(server)
        wait_for(lambda: heard.moment > changed, "it is followed without")
        assert heard.begun == 2 and server.connections == 2

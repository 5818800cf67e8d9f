"""A follower whose server changes its mind: what it says of itself, what it refuses, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from keyfront.errors import DirectoryAnswerError, DirectoryUnavailableError
from keyfront.middleware.ldap import follower as module
from keyfront.middleware.ldap.follower import METHODS, Follower, Method, Terms
from keyfront.middleware.ldap.protocol import messages
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
        self._ended = 0

    def end(self) -> None:
        """End the connections there are."""
        self._ended = self.connections

    def is_over(self, number: int) -> bool:
        return number <= self._ended

    def connect(self, seconds: float) -> Any:
        if self.away:
            raise DirectoryUnavailableError("connection refused", server="x")
        self.connections += 1
        return Connection(self)


class Connection:
    """One connection to it, as far as a follower uses it."""

    source = server = "ldap://x 192.0.2.1"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._number = server.connections
        self._answers: deque[Message] = deque()
        self._posted = 0

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
            self._server.asked += 1
        else:
            self._server.controls.append(encoded_controls)
            if self._server.refuses:
                code = self._server.refuses
            elif (named := self._server.refuses_controls) and named in encoded_controls:
                code = 12
        if code >= 0:
            answer = Message(self._posted, messages.DONE)
            answer.code, answer.diagnostic, answer.matched_dn = code, "", ""
            answer.referrals, answer.controls = [], []
            self._answers.append(answer)
        return self._posted

    def take(self, seconds: float) -> Message | None:
        if self._server.is_over(self._number):
            raise DirectoryUnavailableError("the server closed the connection", server="x")
        if not self._answers:
            time.sleep(min(seconds, 0.005))
            return None
        return self._answers.popleft()

    def close(self) -> None:
        pass


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


def followed(server: Server, heard: Heard, *methods: Method) -> Follower:
    terms = Terms((TREE,), ("cn",), methods or tuple(METHODS))
    made = Follower("x", server.connect, terms, heard)
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

"""The messages of one LDAP connection: numbered, sent, answered in time and matched.

One operation at a time. Whatever ends one early leaves the session unusable, for nobody knows what
is still to come.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
)

from . import requests as messages
from . import result_codes as verdicts
from .ber import MAX_INT
from .requests import Decoder, Message, ProtocolError
from .transport import Transport

START_TLS = "1.3.6.1.4.1.1466.20037"

Entry = tuple[str, dict[str, list[bytes]]]
Reference = tuple[None, list[str]]


class BindAnswer(NamedTuple):
    """What the server told of a password it took (draft-behera-ldap-password-policy)."""

    #: Seconds until it expires, if that is soon.
    password_expiring: int | None = None
    #: Logins left, if it has expired.
    grace: int | None = None


TAKEN = BindAnswer()


class SearchAnswer:
    """What a search found, in the order of arrival.

    :ivar items: ``(dn, {attribute: [values]})`` of entries and ``(None, [urls])`` of references
    """

    __slots__ = ("items",)

    def __init__(self, items: list[Entry | Reference]) -> None:
        self.items = items

    @property
    def entries(self) -> list[Entry]:
        """Entries only."""
        return [
            (dn, found) for dn, found in self.items if dn is not None and isinstance(found, dict)
        ]

    @property
    def referrals(self) -> list[str]:
        """URLs where more is to be found; nobody asks there."""
        return [url for dn, found in self.items if dn is None for url in found]


class Session:
    """What one server and we say to each other.

    :param server: as errors name it
    :param timeout: seconds for each operation, ``None`` for no limit
    :ivar opened_at: when, by ``time.monotonic()``
    :ivar usable: ``False`` while an operation is under way, and for good if one did not end well
    """

    __slots__ = (
        *("__weakref__", "_decoder", "_id", "_timeout"),
        *("opened_at", "server", "transport", "usable"),
    )

    def __init__(self, transport: Transport, server: str, timeout: float | None) -> None:
        self.transport = transport
        self.server = server
        self.opened_at = time.monotonic()
        self.usable = True
        self._timeout = timeout
        self._decoder = Decoder()
        self._id = 0

    def readable(self) -> bool:
        """Whether the idle connection has something to say, which is that it is lost.

        Asks nobody and does not wait. A connection that was readable is not usable any more.
        """
        if self.usable and (self._decoder.pending or self.transport.is_readable()):
            self.usable = False
        return not self.usable

    def next_id(self) -> int:
        """The number of the next message."""
        self._id = self._id % MAX_INT + 1
        return self._id

    def lend(self) -> None:
        """Begin an operation that is encoded, sent and read by others."""
        self._begin(None)
        if self._decoder.pending:
            raise self._broken("bytes that answer nothing")

    def give_back(self, rest: bytes) -> None:
        """End one, with what came after its answer."""
        self._decoder.feed(rest)
        self.usable = True

    def look_at(self, message: Message) -> None:
        """Look at what is no answer to the operation under way."""
        if message.is_notice:
            said = verdicts.refusal(message, "").message
            raise DirectoryUnavailableError(
                f"the server ends the connection: {said}", server=self.server
            )
        # late answers to what was abandoned, and notices of a kind we do not know (section 4.4)
        if not (
            0 < message.id < self._id or (message.id == 0 and message.tag == messages.EXTENDED)
        ):
            raise ProtocolError(f"{message!r} answers nothing that was asked")

    def _begin(self, timeout: float | None) -> None:
        """Start an operation. Whatever ends it early leaves the connection unusable."""
        if not self.usable:
            raise DirectoryUnavailableError("the connection is lost or closed", server=self.server)
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and seconds <= 0:
            raise DirectoryTimeoutError("no time was left to ask", server=self.server)
        self.usable = False
        self.transport.begin(seconds)

    def _collect(self, items: list[Entry | Reference], size_limit: int) -> Message:
        """Put what a search finds into ``items``, up to how it ended."""
        left = -1
        if size_limit:
            left = size_limit - sum(1 for item in items if item[0] is not None)
        target, decoder, transport = self._id, self._decoder, self.transport
        broken = ""
        try:
            while True:
                message = decoder.next()
                if message is None:
                    decoder.feed(transport.receive())
                elif message.id != target:
                    self.look_at(message)
                elif message.tag == messages.ENTRY:
                    if not left:
                        break
                    left -= 1
                    items.append((message.dn, message.attributes))
                elif message.tag == messages.DONE:
                    return message
                elif message.tag == messages.REFERENCE:
                    items.append((None, message.urls))
                elif message.tag != messages.INTERMEDIATE:
                    raise ProtocolError(f"a search was answered by {message!r}")
        except ProtocolError as error:
            broken = str(error)
        if broken:
            raise self._broken(broken)
        self._abandon()
        raise DirectoryAnswerError(
            4, verdicts.name_of(4), f"more than {size_limit} entries came", server=self.server
        )

    def _answer(self, tag: int) -> Message:
        """The one answer to what was just sent."""
        broken = ""
        try:
            while True:
                message = self._decoder.next()
                if message is None:
                    self._decoder.feed(self.transport.receive())
                elif message.id != self._id:
                    self.look_at(message)
                elif message.tag == tag:
                    return message
                elif message.tag != messages.INTERMEDIATE:
                    raise ProtocolError(f"{message!r} came instead of tag {tag}")
        except ProtocolError as error:
            broken = str(error)
        raise self._broken(broken)

    def _refuse(self, refused: DirectoryError | None) -> None:
        """End an operation that was answered: with an error, if it was refused."""
        self.usable = not isinstance(refused, DirectoryUnavailableError)
        if refused is not None:
            raise refused

    def _broken(self, what: str) -> DirectoryProtocolError:
        return DirectoryProtocolError(f"its answer is no LDAP: {what}", server=self.server)

    def _abandon(self) -> None:
        """Spare the server the rest of a search (RFC 4511 section 4.11), if it hears at once."""
        target = self._id
        try:
            self.transport.begin(0.0)
            self.transport.send(messages.abandon_request(self.next_id(), target))
        except DirectoryUnavailableError:
            pass

"""Makes an ``ldap3.Connection`` on the socket of one of ours, for what ours does not speak.

It takes message numbers from our sequence and bytes from our transport, so that both can be used in
turn. Whatever goes wrong in it leaves our connection unusable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ldap3
from ldap3.core.exceptions import LDAPOperationResult
from ldap3.strategy.sync import SyncStrategy
from ldap3.utils.asn1 import encode

from keyfront.errors import DirectoryError, DirectoryProtocolError

from .ber import SEQUENCE, ProtocolError, read_length
from .messages import MAX_MESSAGE, START_TLS, Decoder

if TYPE_CHECKING:
    from .connection import Connection


def share(ours: Connection) -> Any:
    """Make the ``ldap3.Connection``; it opens nothing and asks nothing."""
    host = "localhost" if ours.url.scheme == "ldapi" else ours.url.host
    server = ldap3.Server(
        host, port=ours.url.port or None, get_info=ldap3.NONE, allowed_referral_hosts=[]
    )
    server.next_message_id = ours.next_id
    made = ldap3.Connection(
        server,
        client_strategy=ldap3.SYNC,
        auto_bind=ldap3.AUTO_BIND_NONE,
        auto_referrals=False,
        auto_range=False,
        check_names=False,
        raise_exceptions=False,
        return_empty_attributes=False,
    )
    strategy = SharedStrategy(made, ours)
    made.strategy = strategy
    made.send, made.open = strategy.send, strategy.open
    made.get_response = strategy.get_response
    made.post_send_single_response = strategy.post_send_single_response
    made.post_send_search = strategy.post_send_search
    made.socket = ours.transport.raw
    made.closed, made.listening, made.bound = False, True, True
    return made


class SharedStrategy(SyncStrategy):
    """ldap3's way to send and receive, through our connection."""

    def __init__(self, connection: Any, ours: Connection) -> None:
        super().__init__(connection)
        self._ours = ours
        self._rest = bytearray()
        self._outstanding: dict[int, Any] = {}

    def open(self, reset_usage: bool = True, read_server_info: bool = True) -> None:
        """Refuse: it is open from the start, and when it is lost the pool has another one."""
        raise DirectoryError("it cannot be opened again", server=self._ours.server)

    def send(self, message_type: str, request: Any, controls: Any = None) -> Any:
        """Send a request, but not what only our connection may do."""
        if message_type == "bindRequest":
            # ldap3 keeps the password
            raise DirectoryError("a BIND is done by Connection.bind()", server=self._ours.server)
        if message_type == "extendedReq" and str(request["requestName"]) == START_TLS:
            raise DirectoryError("TLS begins with the connection", server=self._ours.server)
        if message_type == "unbindRequest":
            return None  # close() says it
        sent = super().send(message_type, request, controls)
        if message_type == "abandonRequest":
            self._outstanding.pop(sent, None)
            self._ours.usable = True  # nothing answers it
        return sent

    def sending(self, ldap_message: Any) -> None:
        """Send a message."""
        self._ours.lend()
        self._ours.transport.send(encode(ldap_message))

    def get_response(self, *arguments: Any, **keywords: Any) -> Any:
        """Wait for the answer; only if it came whole, the connection is usable again."""
        try:
            answer = super().get_response(*arguments, **keywords)
        except LDAPOperationResult:
            self._give_back()
            raise
        self._give_back()
        return answer

    def post_send_single_response(self, message_id: int) -> Any:
        """Wait for the answer to anything but a search, and keep nothing of the request."""
        try:
            return super().post_send_single_response(message_id)
        finally:
            # it may be a change of a password
            self.connection.request = None

    def receiving(self) -> list[bytes]:
        """Return one whole message that answers something."""
        broken = ""
        try:
            while True:
                size = _size(self._rest)
                if 0 < size <= len(self._rest):
                    message = bytes(self._rest[:size])
                    del self._rest[:size]
                    if self._is_answer(message):
                        return [message]
                else:
                    self._rest += self._ours.transport.receive()
        except ProtocolError as error:
            broken = str(error)
        raise DirectoryProtocolError(f"its answer is no LDAP: {broken}", server=self._ours.server)

    def _is_answer(self, message: bytes) -> bool:
        # ldap3 does not check what it reads
        decoder = Decoder()
        decoder.feed(message)
        decoded = decoder.next()
        if decoded is None or decoded.id != 0:
            return True
        self._ours.check_unasked(decoded)
        return False

    def _give_back(self) -> None:
        self._ours.give_back(bytes(self._rest))
        self._rest.clear()

    def _close_socket(self) -> None:
        self._ours.close()
        self.connection.socket = None
        self.connection.closed = True


def _size(data: bytearray) -> int:
    """Return the bytes of the message that begins here, 0 if that is not known yet."""
    if len(data) < 2:
        return 0
    if data[0] != SEQUENCE:
        raise ProtocolError(f"an answer begins with 0x{data[0]:02x}")
    size, start = data[1], 2
    if size > 127:
        size, start = read_length(bytes(data[:16]), 2, size)
        if start > len(data):
            return 0
    if size > MAX_MESSAGE:
        raise ProtocolError(f"an answer claims {size} bytes, more than {MAX_MESSAGE}")
    return start + size

"""Connects to servers, for the pools of a directory and for looking whether one is up."""

from __future__ import annotations

import math
import time

from keyfront.errors import DirectoryUnavailableError

from .protocol.addresses import Address
from .protocol.connection import Connection
from .protocol.requests import Message
from .protocol.session import Entry, Reference
from .protocol.tls import TLS
from .protocol.urls import ServerURL


class PoolConnection(Connection):
    """A connection that knows whether any part of an answer to a search has come.

    :ivar heard: since it was last set to ``False``
    """

    __slots__ = ("heard",)

    heard: bool

    def _search(self, items: list[Entry | Reference], request: bytes, size_limit: int) -> Message:
        try:
            done = super()._search(items, request, size_limit)
        except DirectoryUnavailableError:
            if items or self._decoder.pending:
                self.heard = True
            raise
        self.heard = True
        return done


class Dialer:
    """How servers are connected to.

    :param connect_timeout: seconds for a server
    :param operation_timeout: seconds for each operation on the connections made
    """

    def __init__(self, tls: TLS, connect_timeout: float, operation_timeout: float) -> None:
        self.tls = tls
        self.connect_timeout = connect_timeout
        self.operation_timeout = operation_timeout

    def connect(self, url: ServerURL, address: Address, seconds: float) -> PoolConnection:
        """Connect to one address, with TLS if that is wanted, and no more."""
        made = PoolConnection.connect(
            url,
            tls=self.tls,
            connect_timeout=seconds,
            timeout=None if math.isinf(self.operation_timeout) else self.operation_timeout,
            address=address,
        )
        assert isinstance(made, PoolConnection)
        made.heard = False
        return made

    def probe(self, url: ServerURL, address: Address, seconds: float) -> None:
        """See whether a server is up, without a BIND.

        :raises DirectoryUnavailableError: it is not
        """
        deadline = time.monotonic() + seconds
        made = self.connect(url, address, seconds)
        try:
            made.ping(deadline - time.monotonic())
        finally:
            made.close()

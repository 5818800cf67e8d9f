"""Opens, examines and closes the connections of one pool, and tells the servers how they fare."""

from __future__ import annotations

import time
from collections import deque

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
)

from .connector import Dialer, PoolConnection
from .monitor import Health
from .protocol.addresses import Address
from .protocol.connection import FAST_BIND, Connection
from .protocol.urls import ServerURL
from .servers import ServerSet
from .service_account import ServiceIdentity

# A server is not blamed if whoever asked waited for less than this.
_FAIR_SECONDS = 0.2


class Opener:
    """What a pool needs to know of its connections.

    :param servers: where they lead
    :param health: told when a server may have gone down
    """

    def __init__(self, servers: ServerSet, dialer: Dialer, health: Health) -> None:
        self._servers = servers
        self._dialer = dialer
        self._health = health
        self._ping_timeout = min(dialer.connect_timeout, dialer.operation_timeout)
        # Opened ahead, see `prepare`.
        self._spares: deque[PoolConnection] = deque()
        self._closed = False

    def open(self, seconds: float) -> PoolConnection:
        """Open a connection to the best server that can be reached.

        :raises DirectoryUnavailableError: no server answered in time
        :raises DirectoryAnswerError: one did, and refused
        """
        return self._spare() or self._open(seconds)

    def prepare(self) -> None:
        """Open a connection that the next :meth:`open` returns without waiting.

        :raises DirectoryError: as :meth:`open`
        """
        if not self._spares:
            self._spares.append(self._open(self._dialer.connect_timeout))
        if self._closed:
            self.close_spares()

    def close(self, connection: Connection) -> None:
        """Close a connection that was opened here."""
        self._servers.released(connection.url)
        connection.close()

    def close_spares(self) -> None:
        """Close what was opened ahead and not used; from now on, all of it."""
        self._closed = True
        while (spare := self._take()) is not None:
            self.close(spare)

    def is_stale(self, connection: PoolConnection) -> bool:
        """Whether an idle connection is lost, or leads to a server that is down while another is
        up; costs no round trip."""
        return connection.readable() or connection.url in self._health.avoided

    def ping(self, connection: PoolConnection) -> None:
        """Ask a connection's server for a sign of life.

        :raises DirectoryUnavailableError: there is none
        """
        since = time.monotonic()
        try:
            connection.ping(self._ping_timeout)
        except DirectoryUnavailableError as error:
            self.failed(connection, error, since)
            raise

    def answered(self, connection: Connection) -> None:
        """Take in that an operation was answered, be it by a refusal."""
        self._servers.succeeded(connection.url)

    def failed(
        self, connection: Connection, error: DirectoryUnavailableError, since: float
    ) -> None:
        """Take in that an operation was not, and tell the servers if that says something of one.

        :param since: when it began
        """
        fair = min(_FAIR_SECONDS, self._ping_timeout)
        hurried = isinstance(error, DirectoryTimeoutError) and time.monotonic() - since < fair
        if not (hurried or is_lost(connection, error)):
            self._servers.failed(connection.url, error, since=since)
            self._health.look()

    def after_fork(self) -> None:
        """Let go of what the parent opened."""
        while (spare := self._take()) is not None:
            spare.close()

    def _make_ready(self, made: PoolConnection, deadline: float) -> None:
        """Do what comes before its use; at least, have the server answer something.

        A stopped server accepts TCP connections. Better to learn that now, while another one can
        be asked, than from a BIND, which is sent once.
        """
        raise NotImplementedError

    def _open(self, seconds: float) -> PoolConnection:
        try:
            made = self._servers.open(self._connect, seconds)
        finally:
            self._health.look()
        self._health.opened(made.url)
        return made

    def _connect(self, url: ServerURL, address: Address, seconds: float) -> PoolConnection:
        deadline = time.monotonic() + seconds
        # The server before this one may just have failed: it is probed while this one is tried.
        self._health.look()
        made = self._dialer.connect(url, address, seconds)
        try:
            self._make_ready(made, deadline)
        except BaseException:
            made.close()
            raise
        return made

    def _spare(self) -> PoolConnection | None:
        while (spare := self._take()) is not None:
            if not self.is_stale(spare):
                return spare
            self.close(spare)
        return None

    def _take(self) -> PoolConnection | None:
        try:
            return self._spares.popleft()
        except IndexError:
            return None


class ServiceOpener(Opener):
    """Connections to search with, bound as the service."""

    def __init__(
        self, servers: ServerSet, dialer: Dialer, health: Health, identity: ServiceIdentity
    ) -> None:
        super().__init__(servers, dialer, health)
        self.identity = identity

    def is_fit(self, connection: PoolConnection) -> bool:
        """Whether a connection that comes back may be lent again: not if somebody made it
        another's; nor is what ldap3 left there for the next one."""
        connection.forget()
        return connection.usable and connection.bound_as == self.identity.bound_as

    def after_fork(self) -> None:
        super().after_fork()
        self.identity.after_fork()

    def _open(self, seconds: float) -> PoolConnection:
        deadline = time.monotonic() + seconds
        self.identity.begin(seconds)
        try:
            made = super()._open(deadline - time.monotonic())
        except CredentialsError as error:
            self.identity.refused(error)
            raise
        except BaseException:
            self.identity.failed()
            raise
        self.identity.accepted()
        return made

    def _make_ready(self, made: PoolConnection, deadline: float) -> None:
        self.identity.assume(made, deadline - time.monotonic())


class LoginOpener(Opener):
    """Connections to log in over.

    :param fast_bind: whether they use Active Directory's fast bind; ``"auto"``: where a server
        has it
    """

    def __init__(
        self, servers: ServerSet, dialer: Dialer, health: Health, fast_bind: bool | str
    ) -> None:
        super().__init__(servers, dialer, health)
        self._fast_bind = fast_bind
        # What the servers said of fast bind.
        self._fast: dict[ServerURL, bool] = {}

    def is_fit(self, connection: PoolConnection) -> bool:
        """Whether a connection that comes back may be lent again, whoever it is bound as."""
        return connection.usable

    def _make_ready(self, made: PoolConnection, deadline: float) -> None:
        fast = self._fast.get(made.url)
        if self._fast_bind != "auto":
            fast = bool(self._fast_bind)
        elif fast is None:
            fast = made.supports(FAST_BIND, timeout=deadline - time.monotonic())
            self._fast[made.url] = fast
        if fast:
            # Before any BIND (MS-ADTS 3.1.1.3.4.2.2).
            self._begin_fast_bind(made, deadline - time.monotonic())
        elif not (made.searches or made.url.scheme == "ldaps" or self._dialer.tls.start_tls):
            made.ping(deadline - time.monotonic())

    def _begin_fast_bind(self, made: PoolConnection, seconds: float) -> None:
        try:
            made.fast_bind(timeout=seconds)
        except DirectoryAnswerError:
            # Of several servers at one address, not all may have it.
            if self._fast_bind != "auto":
                raise
            self._fast[made.url] = False


def is_lost(connection: Connection, error: DirectoryError) -> bool:
    """Whether a connection ended, which says nothing of its server: many end idle ones."""
    if isinstance(error, (DirectoryTimeoutError, DirectoryProtocolError)):
        return False
    return connection.transport.is_readable()

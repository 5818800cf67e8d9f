"""Connectors: they open, check and close the connections of a directory's pools.

They note for each server whether it answers. A :class:`Dialer` connects to one address of one
server. A connector opens a connection for a pool: to the best server that can be reached, and ready
for use.
"""

from __future__ import annotations

import math
import time
from collections import deque

from keyfront.errors import (
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
)

from .monitor import Monitor
from .protocol.connection import FAST_BIND, Connection
from .protocol.messages import DEFAULT_LIMITS, Limits
from .protocol.tls import TLS
from .protocol.transport import Address
from .protocol.urls import ServerURL
from .servers import ServerSet
from .service_account import ServiceAccount

# Seconds of waiting below which a missing answer is not taken for the server's failure.
_FAIR_SECONDS = 0.2


class Dialer:
    """Connects to one address of a server, with the options of a pool.

    :param tls: certificates and StartTLS
    :param connect_timeout: seconds for a server, above 0
    :param operation_timeout: seconds for each operation on the connections made, above 0
    :param limits: limits of the answers to searches
    """

    def __init__(
        self,
        tls: TLS,
        connect_timeout: float,
        operation_timeout: float,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.tls = tls
        self.limits = limits
        self.connect_timeout = connect_timeout
        self.operation_timeout = operation_timeout

    def connect(self, url: ServerURL, address: Address, seconds: float) -> Connection:
        """Connect to one address within ``seconds``, with TLS if that is wanted, without a BIND.

        :param url: the server's URL, which names the server for TLS
        :param address: one of its addresses
        :param seconds: the time for all of it, above 0
        :raises DirectoryUnavailableError: nobody answered there, or TLS failed
        """
        return Connection.connect(
            url,
            tls=self.tls,
            connect_timeout=seconds,
            timeout=None if math.isinf(self.operation_timeout) else self.operation_timeout,
            address=address,
            limits=self.limits,
        )

    def probe(self, url: ServerURL, address: Address, seconds: float) -> None:
        """Check within ``seconds`` that a server is up, without a BIND.

        :param url: the server's URL
        :param address: one of its addresses
        :param seconds: the time for all of it, above 0
        :raises DirectoryUnavailableError: it is not up
        """
        deadline = time.monotonic() + seconds
        made = self.connect(url, address, seconds)
        try:
            made.ping(deadline - time.monotonic())
        finally:
            made.close()


class DirectoryConnector:
    """The base of both kinds of connectors (:class:`.pool.Connector`).

    :param servers: the servers that connections lead to
    :param dialer: the dialer, which connects to one of them
    :param monitor: the monitor, which is told when a server may have gone down
    """

    def __init__(self, servers: ServerSet, dialer: Dialer, monitor: Monitor) -> None:
        self.servers = servers
        self._dialer = dialer
        self._monitor = monitor
        self._check_timeout = min(dialer.connect_timeout, dialer.operation_timeout)
        # Opened ahead, see `prepare`.
        self._spares: deque[Connection] = deque()
        self._closed = False

    def open(self, seconds: float) -> Connection:
        """Open a connection to the best server that can be reached within ``seconds``.

        :param seconds: the time for all servers together, above 0
        :raises DirectoryUnavailableError: no server answered in time
        :raises DirectoryAnswerError: a server answered, and refused
        """
        return self._take_fresh_spare() or self._open(seconds)

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
        self.servers.released(connection.url)
        connection.close()

    def abandon(self, connection: Connection) -> None:
        """Close the descriptor of a connection that is the parent process's."""
        connection.close()

    def close_spares(self) -> None:
        """Close the connections that were opened ahead, and each one that is from now on."""
        self._closed = True
        while (spare := self._take_spare()) is not None:
            self.close(spare)

    def check(self, connection: Connection, seconds: float) -> None:
        """Ask a connection's server for a sign of life.

        :param connection: an idle connection
        :param seconds: time for it at most, besides ``connect_timeout``
        :raises DirectoryUnavailableError: there is no answer
        """
        since = time.monotonic()
        try:
            connection.ping(min(seconds, self._check_timeout))
        except DirectoryUnavailableError as error:
            if self._is_the_servers(connection, error, since):
                self._note_failure(connection, error, since)
            raise

    def is_stale(self, connection: Connection) -> bool:
        """Return whether an idle connection is lost, or leads to a server that is down while
        another is up; costs no round trip."""
        if connection.readable():
            return True
        avoided = self._monitor.avoided
        return connection.url in avoided if avoided else False

    def is_fit(self, connection: Connection) -> bool:
        """Return whether a connection that comes back may be lent again."""
        return connection.usable

    def answered(self, connection: Connection) -> None:
        """Note that an operation was answered, even if by a refusal."""
        if self.servers.any_down:
            self.servers.succeeded(connection.url)

    def failed(
        self, connection: Connection, error: DirectoryUnavailableError, since: float
    ) -> None:
        """Note that an operation was not answered, and that its server may be down.

        No answer in time, and "busy", may be due to the one entry that was asked for: a BIND as
        somebody whose part of the directory is away. Then the server is only suspected and asked
        in the background, so that nobody who only knows a name can take it out of service.

        :param connection: the connection of the operation
        :param error: the operation's error
        :param since: the operation's beginning, by ``time.monotonic()``
        """
        if not self._is_the_servers(connection, error, since):
            return
        silent = isinstance(error, DirectoryTimeoutError)
        if silent or isinstance(error, DirectoryBusyError):
            self._monitor.suspect(connection.url, silent=silent)
        else:
            self._note_failure(connection, error, since)

    def after_fork(self) -> None:
        """Close the parent's connections that were opened ahead."""
        while (spare := self._take_spare()) is not None:
            spare.close()

    def _is_the_servers(
        self, connection: Connection, error: DirectoryUnavailableError, since: float
    ) -> bool:
        """Return whether a failure is not due to a caller in a hurry or a lost connection."""
        fair = min(_FAIR_SECONDS, self._check_timeout)
        hurried = isinstance(error, DirectoryTimeoutError) and time.monotonic() - since < fair
        return not (hurried or is_lost(connection, error))

    def _note_failure(
        self, connection: Connection, error: DirectoryUnavailableError, since: float
    ) -> None:
        self.servers.failed(connection.url, error, since=since)
        self._monitor.update()

    def _make_ready(self, made: Connection, deadline: float) -> None:
        """Make a new connection ready for use; the server must at least answer something.

        A stopped server accepts TCP connections. That must show now, while another server can be
        asked, and not at a BIND, which is sent once.
        """
        raise NotImplementedError

    def _open(self, seconds: float) -> Connection:
        made: Connection | None = None
        try:
            try:
                made = self.servers.open(self._connect, seconds)
            finally:
                # Either may start a thread, and a greenlet be killed while it waits for that.
                self._monitor.update()
            self._monitor.opened(made.url)
        except BaseException:
            if made is not None:
                self.close(made)
            raise
        return made

    def _connect(self, url: ServerURL, address: Address, seconds: float) -> Connection:
        deadline = time.monotonic() + seconds
        # The server before this one may just have failed: it is probed while this one is tried.
        self._monitor.update()
        made = self._dialer.connect(url, address, seconds)
        try:
            self._make_ready(made, deadline)
        except BaseException:
            made.close()
            raise
        return made

    def _take_fresh_spare(self) -> Connection | None:
        while (spare := self._take_spare()) is not None:
            if not self.is_stale(spare):
                return spare
            self.close(spare)
        return None

    def _take_spare(self) -> Connection | None:
        try:
            return self._spares.popleft()
        except IndexError:
            return None


class SearchConnector(DirectoryConnector):
    """The connector of connections for searches, which are bound as the service.

    :param servers: the servers that connections lead to
    :param dialer: the dialer, which connects to one of them
    :param monitor: the monitor, which is told when a server may have gone down
    :param account: the service's identity, for this connector alone
    """

    def __init__(
        self, servers: ServerSet, dialer: Dialer, monitor: Monitor, account: ServiceAccount
    ) -> None:
        super().__init__(servers, dialer, monitor)
        self.account = account

    def is_fit(self, connection: Connection) -> bool:
        """Return whether a connection that comes back may be lent again: not if it was bound as
        another identity. Results that ldap3 left in it are removed."""
        connection.shared = None
        return connection.usable and connection.bound_as in self.account.identities

    def after_fork(self) -> None:
        """Close the parent's connections that were opened ahead, and replace its locks."""
        super().after_fork()
        self.account.after_fork()

    def _open(self, seconds: float) -> Connection:
        deadline = time.monotonic() + seconds
        made: Connection | None = None
        try:
            with self.account.attempt(seconds):
                made = super()._open(deadline - time.monotonic())
        except BaseException:
            if made is not None:
                self.close(made)
            raise
        return made

    def _make_ready(self, made: Connection, deadline: float) -> None:
        self.account.assume(made, deadline - time.monotonic())


class LoginConnector(DirectoryConnector):
    """The connector of connections for logins, whoever they are bound as.

    :param servers: the servers that connections lead to
    :param dialer: the dialer, which connects to one of them
    :param monitor: the monitor, which is told when a server may have gone down
    :param fast_bind: true to use Active Directory's fast bind; ``"auto"``: where a server has it
    """

    def __init__(
        self, servers: ServerSet, dialer: Dialer, monitor: Monitor, fast_bind: bool | str
    ) -> None:
        super().__init__(servers, dialer, monitor)
        self._fast_bind = fast_bind
        # By server, whether it has fast bind.
        self._fast: dict[ServerURL, bool] = {}

    def _make_ready(self, made: Connection, deadline: float) -> None:
        fast = self._fast.get(made.url)
        if self._fast_bind != "auto":
            fast = bool(self._fast_bind)
        elif fast is None:
            try:
                fast = made.supports(FAST_BIND, timeout=deadline - time.monotonic())
                self._fast[made.url] = fast
            except DirectoryAnswerError:
                fast = False  # it does not tell now; the next connection asks again
        if fast:
            # Before any BIND (MS-ADTS 3.1.1.3.4.2.2).
            self._begin_fast_bind(made, deadline - time.monotonic())
        elif not (made.searches or made.url.scheme == "ldaps" or self._dialer.tls.start_tls):
            made.ping(deadline - time.monotonic())

    def _begin_fast_bind(self, made: Connection, seconds: float) -> None:
        try:
            made.fast_bind(timeout=seconds)
        except DirectoryAnswerError:
            # Of several servers at one address, not all may have it.
            if self._fast_bind != "auto":
                raise
            self._fast[made.url] = False


def is_lost(connection: Connection, error: DirectoryError) -> bool:
    """Return whether an error says only that a connection was closed, as servers do with idle ones.

    :param connection: the connection that was used
    :param error: the error of the operation over it
    """
    if isinstance(error, (DirectoryTimeoutError, DirectoryProtocolError)):
        return False
    return connection.transport.is_readable()

"""A pool of connections to an LDAP directory, for searches and logins.

Searches go over connections that are bound as one identity, the service's. Logins have connections
of their own, which are never used for searches, as they are bound as the user of the last login. A
login is exactly one BIND each time; nothing is remembered of it, so the directory's present answer
counts, and when no server can be asked that is an error of its own, never a wrong password::

    with LDAPPool("ldaps://ds1.example.org, ldaps://ds2.example.org",
                  bind_dn="cn=app,dc=example,dc=org", bind_password=...,
                  search_base="ou=People,dc=example,dc=org") as pool:
        identity = pool.authenticate("jane", password)
        found = pool.search("dc=example,dc=org", filter="(mail=jane@example.org)")
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal, Self

from keyfront.common import ranges
from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryUnavailableError,
    OptionError,
)

from . import pool_counters
from .connector import Dialer, DirectoryConnector, LoginConnector, SearchConnector, is_lost
from .diagnose import ServerReport, Terms, examine_all
from .kerberos import Kerberos
from .logins import Identity, Names, SlowBinds, octets
from .monitor import Monitor
from .pool import ConnectionPool, Lease
from .protocol.connection import Connection, SearchAnswer
from .protocol.messages import Limits
from .protocol.srv import resolver_of
from .protocol.tls import TLS
from .protocol.transport import Address
from .protocol.urls import ServerURL
from .secret_file import read_secret
from .servers import ServerSet, ServerState
from .service_account import (
    EXTERNAL,
    CertificateAccount,
    KerberosAccount,
    ServiceAccount,
    check_sasl,
)
from .user_refusals import UserRefusals

_COUNTS = (
    *("searches", "searches_retried", "searches_failed"),
    *("logins", "logins_accepted", "binds", "credentials_refused", "logins_failed"),
)


class DirectoryLease(Lease[Connection]):
    """Lends a connection for a ``with`` block, and notes whether its server answered.

    :param pool: the pool that lends the connection
    :param connector: the connector, which notes whether the server answered
    :param timeout: seconds to wait for a connection; ``None`` for the pool's
    """

    __slots__ = ("_connector", "_since")

    def __init__(
        self,
        pool: ConnectionPool[Connection],
        connector: DirectoryConnector,
        timeout: float | None = None,
    ) -> None:
        self._pool = pool
        self._connector = connector
        self._timeout = timeout

    def __enter__(self) -> Connection:
        connection = self._connection = self._pool.checkout(self._timeout)
        self._since = time.monotonic()
        return connection

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection = self._connection
        try:
            if isinstance(error, DirectoryUnavailableError):
                # It may have come from elsewhere.
                told = not connection.usable or isinstance(error, DirectoryBusyError)
                if told and error.server == connection.server:
                    self._connector.failed(connection, error, self._since)
            elif (
                self._connector.servers.any_down
                and connection.usable
                and (error is None or isinstance(error, DirectoryAnswerError))
            ):
                self._connector.answered(connection)
        finally:
            # A killed greenlet or an interrupt may have left half an answer in the connection.
            killed = kind is not None and not issubclass(kind, Exception)
            self._pool.checkin(connection, killed)


class LDAPPool:
    """Connections to one directory, on one or more servers with the same content.

    All times are seconds; ``math.inf`` stands for never. All methods may be called by any thread
    or greenlet. In a forked child it has connections of its own.

    :param urls: URLs of the servers, in the order of preference; one text may name several, with
        commas or spaces between. A name stands for all its addresses. ``ldap+srv://DOMAIN`` and
        ``ldaps+srv://DOMAIN`` stand for the servers that the domain's SRV records name
        (:mod:`.protocol.srv`), at the time.
    :param nameservers: addresses of the DNS servers that are asked for these records, and for the
        addresses of the servers that they name; by default those of the system
    :param srv_domains: domains that the servers named by these records may be in; by default the
        one of the URL. ``.`` is any
    :param bind_dn: DN to bind for searches; by default none (anonymous)
    :param bind_password: its password; kept, since connections are opened at any time, and shown
        nowhere
    :param bind_password_file: a file with the password instead, which is read again when it is
        refused; only its owner may write it, and nobody but its group read it
    :param sasl_mechanism: ``EXTERNAL``: search with the identity that the servers give the client
        certificate of ``tls``, or with ``ldapi://`` the process's user, in place of ``bind_dn``;
        ``GSSAPI``: with the one that they give the service's Kerberos principal. Users log in by
        their passwords all the same.
    :param kerberos: keytab and principal for ``GSSAPI``
    :param tls: certificates and StartTLS
    :param strategy: ``ordered``: the first server that is up; ``balanced``: the one with the
        fewest connections of this pool
    :param min_size: connections for searching that are kept open, 0 to ``max_size``
    :param max_size: connections for searching, at least 1
    :param auth_min_size: connections for logins that are kept open, 0 to ``auth_max_size``
    :param auth_max_size: connections for logins, at least 1: the number of logins at once
    :param timeout: seconds to wait for a connection, opening it included; above 0
    :param max_waiting: requests that may wait for each kind of connection; 0 for any number
    :param max_lifetime: age at which a connection is closed, less up to 5 %; above 0
    :param auth_max_lifetime: age at which a connection for logins is closed; by default
        ``max_lifetime``
    :param max_idle: seconds after which an unused connection is closed, above 0. Choose less than
        what the servers and firewalls allow: Active Directory closes after 900.
    :param check_after: idle seconds after which a connection is asked for a sign of life before it
        is used, which is one round trip; 0 or more
    :param connect_timeout: seconds to connect to a server, all its addresses and TLS included;
        above 0, and finite
    :param operation_timeout: seconds for the answer to an operation, above 0
    :param max_answer: MiB that the answer to a search may take, of all pages together, 1 or more;
        64 bytes are counted for each value besides its own
    :param max_entries: entries of such an answer; 0 for any number
    :param user_dn: DN of every user, with ``{}`` for the name; see :class:`.names.Names`
    :param search_base: DN below which the user of a name is searched; without ``user_dn`` and it,
        the name given to :meth:`authenticate` is bound as it is
    :param user_filter: filter of that search, with ``{}`` for the name
    :param user_name_attribute: an attribute of the entry found, whose one value is the name of the
        user who logged in, instead of the name given
    :param password_policy: true to ask the server for the reason of a failed login, and for the
        time left of a password
    :param max_refused_logins: logins of one user from one address that the directory may refuse
        within ``refused_logins_seconds``; no more are sent then by any process of the node. 0: any
        number
    :param refused_logins_seconds: the time in which refused logins count, from the last of them
        on; above 0
    :param fast_bind: true to use Active Directory's fast bind for logins; ``auto``: where the
        server has it
    :param fail_back: true to close connections to a worse server, a few at a time, when a better
        one is up again
    :param name: name of the pool, for messages and threads; by default the first server's
    :param open: true to open the pool at once; otherwise :meth:`open` does
    :raises OptionError: a value is out of its range, or two contradict each other
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        nameservers: str | Sequence[str] = (),
        srv_domains: str | Sequence[str] = (),
        bind_dn: str = "",
        bind_password: str | bytes = "",
        bind_password_file: str | None = None,
        sasl_mechanism: Literal["EXTERNAL", "GSSAPI"] | None = None,
        kerberos: Kerberos | None = None,
        tls: TLS | None = None,
        strategy: Literal["ordered", "balanced"] = "ordered",
        min_size: int = 1,
        max_size: int = 10,
        auth_min_size: int = 0,
        auth_max_size: int = 100,
        timeout: float = 30.0,
        max_waiting: int = 0,
        max_lifetime: float = 3600.0,
        auth_max_lifetime: float | None = None,
        max_idle: float = 600.0,
        check_after: float = 30.0,
        connect_timeout: float = 5.0,
        operation_timeout: float = 30.0,
        max_answer: int = 128,
        max_entries: int = 100_000,
        user_dn: str | None = None,
        search_base: str | None = None,
        user_filter: str = "(uid={})",
        user_name_attribute: str | None = None,
        password_policy: bool = True,
        max_refused_logins: int = 0,
        refused_logins_seconds: float = 1800.0,
        fast_bind: bool | Literal["auto"] = False,
        fail_back: bool = True,
        name: str | None = None,
        open: bool = True,
    ) -> None:
        try:
            self._urls = _parsed(urls)
            resolver = resolver_of(self._urls, nameservers, srv_domains)
            tls = TLS() if tls is None else tls
            check_sasl(
                sasl_mechanism, self._urls, tls, bind_dn=bind_dn, password=bool(bind_password),
                password_file=bind_password_file, kerberos=kerberos,
            )  # fmt: skip
            read = None
            if bind_password_file is not None:
                if bind_password:
                    raise OptionError("bind_password", "(hidden)", "left out beside its file")
                read = functools.partial(read_secret, "bind_password_file", bind_password_file)
            texts = [url.text for url in self._urls]
            account: ServiceAccount
            if sasl_mechanism == EXTERNAL:
                account = CertificateAccount(tls, servers=texts)
            elif sasl_mechanism is not None:
                account = KerberosAccount(kerberos or Kerberos(), servers=texts)
            else:
                account = ServiceAccount(
                    bind_dn, read() if read else bind_password, read=read, servers=texts
                )
        finally:
            # The traceback of an error below keeps this frame.
            del bind_password
        for option, seconds in (
            ("timeout", timeout),
            ("max_lifetime", max_lifetime),
            ("max_idle", max_idle),
            ("operation_timeout", operation_timeout),
        ):
            ranges.above_zero(option, seconds)
        if auth_max_lifetime is None:
            auth_max_lifetime = max_lifetime
        ranges.above_zero("auth_max_lifetime", auth_max_lifetime)
        ranges.finite("connect_timeout", connect_timeout)
        ranges.zero_or_more("check_after", check_after)
        ranges.sizes(min_size, max_size)
        ranges.sizes(auth_min_size, auth_max_size, "auth_")
        ranges.count("max_waiting", max_waiting)
        ranges.count("max_entries", max_entries)
        ranges.count("max_refused_logins", max_refused_logins)
        ranges.above_zero("refused_logins_seconds", refused_logins_seconds)
        if ranges.count("max_answer", max_answer) < 1:
            raise OptionError("max_answer", max_answer, "a whole number of MiB, 1 or more")
        ranges.one_of("fast_bind", fast_bind, "auto", True, False)
        _check_tls(tls, self._urls)
        self._names = Names(
            user_dn=user_dn, search_base=search_base, user_filter=user_filter,
            name_attribute=user_name_attribute,
        )  # fmt: skip
        self._search_base = search_base
        self._password_policy = password_policy
        self._timeout = timeout
        self.name = name or self._urls[0].host
        self._servers = ServerSet(
            self._urls, strategy=strategy, connect_timeout=connect_timeout, resolver=resolver
        )
        self._resolver = resolver
        self._connect_timeout = connect_timeout
        limits = Limits(int(max_answer * (1 << 20)), max_entries)
        self._dialer = Dialer(tls, connect_timeout, operation_timeout, limits)
        self._monitor = Monitor(
            self._servers, self._dialer.probe, name=self.name, fail_back=fail_back,
            wait=connect_timeout,
        )  # fmt: skip
        basis = (self._servers, self._dialer, self._monitor)
        self._search_connector = SearchConnector(*basis, account)
        self._login_connector = LoginConnector(*basis, fast_bind)
        common: dict[str, Any] = {
            "max_waiting": max_waiting,
            "max_idle": max_idle,
            "check_after": check_after,
        }
        self._search_pool = self._make_pool(
            "search", self._search_connector,
            min_size=min_size, max_size=max_size, max_lifetime=max_lifetime, **common,
        )  # fmt: skip
        self._auth_pool = self._make_pool(
            "auth", self._login_connector,
            min_size=auth_min_size, max_size=auth_max_size, max_lifetime=auth_max_lifetime,
            **common,
        )  # fmt: skip
        self._user_refusals = None
        if max_refused_logins:
            self._user_refusals = UserRefusals(
                max_refused_logins, refused_logins_seconds, sorted(texts)
            )
        auth_pool = self._auth_pool
        self._slow_binds = SlowBinds(auth_max_size, lambda: auth_pool.is_waited_for)
        self._counts = dict.fromkeys(_COUNTS, 0)
        # Lookups that were told when the counts were last popped.
        self._popped = (0, 0)
        self._is_counted = False
        self._counts_lock = threading.Lock()
        self._pid = os.getpid()
        # By process: locks that no thread of a parent has held.
        self._in_child: dict[int, threading.Lock] = {}
        _all.add(self)
        if open:
            self.open()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self._search_pool}, {self._auth_pool}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Using it

    def authenticate(
        self,
        dn_or_name: str,
        password: str | bytes,
        *,
        timeout: float | None = None,
        address: str = "",
    ) -> Identity:
        """Check a password, by exactly one BIND that is never sent again.

        The name becomes a DN by ``user_dn`` or ``search_base``; without both it is taken for a DN,
        or another name that the server binds, such as a UPN. No reference to the password is left
        when this returns or raises. A user who does not exist, or not once, is refused sooner than
        one with a wrong password, by the round trip of the BIND: anybody who can measure that
        learns which names there are. With ``user_dn`` a BIND is sent for both.

        The search for the user takes up to ``operation_timeout``, and the wait for a free
        connection up to the pool's ``timeout``.

        :param dn_or_name: the user's name, or a DN
        :param password: the password; text is sent in UTF-8; an empty one is refused, and not sent
        :param timeout: seconds for the answer to the BIND; by default ``operation_timeout``. While
            others wait for a connection, users of a part of the directory that has answered nothing
            for two seconds have half of the connections; further logins of such users fail as in
            an outage
        :param address: the client's address, any text, for ``max_refused_logins``
        :raises CredentialsError: refused because of the user; its ``verdict`` is the reason, but
            ``WRONG_PASSWORD`` and ``UNKNOWN_USER`` are for the log only: show neither
        :raises DirectoryUnavailableError: no server answered, or the service's own identity was
            refused: nothing is known of the user
        :raises DirectoryAnswerError: a server refused BINDs as such, as without TLS
        """
        self._count("logins")
        try:
            secret = octets(password)
            dn, name = self._names.find(dn_or_name, self.search)
            self._slow_binds.check(dn)
            limit = self._user_refusals
            with (
                limit.attempt(dn, address, self._timeout) if limit else nullcontext(),
                DirectoryLease(self._auth_pool, self._login_connector) as connection,
                self._slow_binds.attempt(dn) as attempt,
            ):
                self._count("binds")
                answer = connection.bind(
                    dn, secret, timeout=timeout, password_policy=self._password_policy,
                    patience=attempt,
                )  # fmt: skip
            self._count("logins_accepted")
            return Identity(dn, name, connection.server, answer.password_expiring, answer.grace)
        except CredentialsError:
            self._count("credentials_refused")
            raise
        except DirectoryUnavailableError:
            self._count("logins_failed")
            raise
        finally:
            # No frame of an error's traceback may still have it.
            del password
            secret = b""

    def search(
        self,
        base: str,
        scope: int = 2,
        filter: str = "(objectClass=*)",
        attributes: Sequence[str] | None = None,
        *,
        attrs_only: bool = False,
        size_limit: int = 0,
        time_limit: int = 0,
        dereference: int = 0,
        page_size: int = 0,
        timeout: float | None = None,
    ) -> SearchAnswer:
        """Search as the service.

        The search is sent again, once, if its connection turns out to be dead before any of the
        answer came. All pages come over one connection.

        :param base: the DN at which the search begins
        :param scope: 0 the base itself, 1 the entries right below it, 2 the base and all below
        :param filter: filter in the form of RFC 4515
        :param attributes: attributes to be returned; ``None`` for all user attributes, ``["1.1"]``
            for none
        :param attrs_only: true to return attributes without their values
        :param size_limit: entries at most; 0 for no limit of the search's own
        :param time_limit: whole seconds that the server may take; 0 for no limit of ours
        :param dereference: aliases followed: 0 never, 1 below the base, 2 the base, 3 always
        :param page_size: entries that are fetched at a time (RFC 2696); 0 all at once
        :param timeout: seconds for all of the answer; by default ``operation_timeout``
        :raises DirectoryUnavailableError: no server answered, or no connection was free in time
        :raises CredentialsError: the service itself was refused: ``bind_dn`` and its password, its
            certificate or its Kerberos ticket
        :raises DirectoryAnswerError: a server refused, or a limit was reached: the server's,
            ``size_limit``, ``max_answer`` or ``max_entries``
        :raises FilterError: ``filter`` is no filter of RFC 4515
        """
        self._count("searches")
        retried = False
        try:
            while True:
                with self.connection() as connection:
                    try:
                        return connection.search(
                            base, scope, filter, attributes,
                            attrs_only=attrs_only, size_limit=size_limit, time_limit=time_limit,
                            dereference=dereference, page_size=page_size, timeout=timeout,
                        )  # fmt: skip
                    except DirectoryUnavailableError as error:
                        if retried or connection.heard or not is_lost(connection, error):
                            raise
                retried = True
                self._count("searches_retried")
        except DirectoryUnavailableError:
            self._count("searches_failed")
            raise

    def connection(self, timeout: float | None = None) -> DirectoryLease:
        """Return a context manager that lends a connection, bound as the service.

        It is a :class:`.connection.Connection`, whose ``ldap3`` has the operations that it lacks.
        No operation over it is ever repeated. If it is bound as another identity, it is closed when
        it comes back.

        :param timeout: seconds to wait for one; by default the pool's
        :raises DirectoryUnavailableError: none was to be had
        :raises CredentialsError: the service itself was refused
        """
        return DirectoryLease(self._search_pool, self._search_connector, timeout)

    def dedicated(self, url: ServerURL, address: Address, seconds: float) -> Connection:
        """Open a connection that is not the pool's, bound as the service; the caller closes it.

        :param url: one of :attr:`urls`
        :param address: one of its addresses
        :param seconds: time for all of it, above 0
        :raises DirectoryUnavailableError: nobody answered there
        :raises CredentialsError: the service was refused, now or a short while ago
        """
        self._enter()
        account = self._search_connector.account
        deadline = time.monotonic() + seconds
        made: Connection | None = None
        try:
            with account.attempt(seconds):
                made = self._dialer.connect(url, address, deadline - time.monotonic())
                account.assume(made, deadline - time.monotonic())
        except BaseException:
            if made is not None:
                made.close()
            raise
        return made

    def forget(self, connection: Connection) -> None:
        """Let the workers close a connection that :meth:`connection` lent; for finalizers only.

        :param connection: the lent connection
        """
        self._search_pool.forget(connection)

    def check(self) -> list[ServerReport]:
        """Examine each server, one after the other, over connections of its own.

        It is slow: it also asks servers that are known to be down, and waits for them.

        :returns: a report for each server, in the order of :attr:`urls`
        """
        self._enter()
        terms = Terms.of_pool(
            self._dialer, self._search_connector.account, self._search_base, self._resolver
        )
        return list(examine_all(self._urls, terms))

    # Its life

    @property
    def closed(self) -> bool:
        """True if it cannot be used: after :meth:`close`, and before :meth:`open`."""
        return self._search_pool.closed

    def open(self) -> None:
        """Open the pool for use, and let the workers open ``min_size`` and ``auth_min_size``.

        :raises PoolClosedError: it was closed; a closed pool stays closed
        """
        self._enter()
        self._search_pool.open()
        self._auth_pool.open()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until ``min_size`` and ``auth_min_size`` connections are open.

        :param timeout: seconds; by default the pool's
        :raises PoolTimeoutError: they are not open in time; the error names the last one
        :raises PoolClosedError: the pool is closed
        """
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        self._search_pool.wait(timeout)
        self._auth_pool.wait(max(deadline - time.monotonic(), 0.0))

    def close(self, timeout: float = 5.0) -> bool:
        """Close idle connections, fail waiting requests, and wait for lent connections.

        It may be called again.

        :param timeout: seconds to wait for lent connections
        :returns: true if all connections are closed; those still lent are when they come back
        """
        deadline = time.monotonic() + timeout
        self._enter()
        self._monitor.stop()
        done = self._search_pool.close(timeout)
        done &= self._auth_pool.close(max(deadline - time.monotonic(), 0.0))
        self._monitor.join(max(deadline - time.monotonic(), 0.0))
        self._search_connector.close_spares()
        self._login_connector.close_spares()
        return done

    # Its state

    @property
    def urls(self) -> list[ServerURL]:
        """The URLs of the servers, in the order of preference. Those that are looked up are the
        ones known now, of which there are none before the first use: see :meth:`look_up`."""
        self._enter()
        return [state.url for state in self._servers.states()]

    def look_up(self, timeout: float | None = None) -> list[ServerURL]:
        """Return the URLs of the servers, in the order of preference; where they are to be looked
        up and none is known yet, after that.

        :param timeout: seconds for it; by default ``connect_timeout``
        :raises DirectoryUnavailableError: none could be found
        """
        self._enter()
        return self._servers.look_up(self._connect_timeout if timeout is None else timeout)

    def addresses(self, url: ServerURL) -> list[tuple[Any, ...]]:
        """Return the addresses of one of the servers, as ``socket.getaddrinfo`` gives them.

        :param url: the server's URL
        :raises OSError: there are none, or no name server answers
        """
        return self._servers.addresses(url)

    @property
    def servers(self) -> list[ServerState]:
        """The state of each server as far as it is known, in the order of preference."""
        self._enter()
        return self._servers.states()

    @property
    def lookup_failures(self) -> list[str]:
        """Why servers could not be looked up last, one line for each domain: then those known
        before are used, if there are any."""
        return self._servers.lookup_failures()

    def get_stats(self) -> dict[str, int | float]:
        """Return present sizes, and counts since the start or since they were last popped.

        Names of the two pools' numbers begin with ``search_`` and ``auth_``, see
        :meth:`.pool.ConnectionPool.get_stats`. The others are ``servers_up``, ``servers_down``;
        ``searches`` by :meth:`search`, of these ``searches_retried`` were sent a second time, as
        the first connection was dead, and ``searches_failed`` ended in an outage; ``logins`` by
        :meth:`authenticate`, with any outcome: of these ``logins_accepted`` ended with the user's
        identity, ``credentials_refused`` with a verdict on the user, and ``logins_failed`` in an
        outage, so that nothing is known of the user; ``binds`` that logins sent; and ``lookups`` of
        servers in DNS, of these ``lookups_failed``.
        """
        return self._statistics(pop=False)

    def pop_stats(self) -> dict[str, int | float]:
        """Return the numbers of :meth:`get_stats`, and start the counts from 0."""
        return self._statistics(pop=True)

    def _statistics(self, *, pop: bool) -> dict[str, int | float]:
        self._enter()
        states = self._servers.states()
        up = sum(state.state == "up" for state in states)
        found: dict[str, int | float] = {"servers_up": up, "servers_down": len(states) - up}
        with self._counts_lock:
            found |= self._counts
            # Counted elsewhere: what was told is taken off.
            lookups, failed = self._servers.lookups()
            found["lookups"] = lookups - self._popped[0]
            found["lookups_failed"] = failed - self._popped[1]
            if pop:
                self._counts = dict.fromkeys(_COUNTS, 0)
                self._popped = lookups, failed
        for prefix, pool in (("search", self._search_pool), ("auth", self._auth_pool)):
            numbers = pool.pop_stats() if pop else pool.get_stats()
            found |= {f"{prefix}_{name}": value for name, value in numbers.items()}
        return found

    def _count(self, name: str) -> None:
        self._enter()
        if not self._is_counted:
            # At the first use: a server that forks has no thread before.
            self._is_counted = True
            pool_counters.thread.start()
        with self._counts_lock:
            self._counts[name] += 1

    def _make_pool(
        self, kind: str, connector: DirectoryConnector, **options: Any
    ) -> ConnectionPool[Connection]:
        this = weakref.ref(self)

        def after_fork() -> None:
            if (directory := this()) is not None:
                directory._enter()

        pool = ConnectionPool[Connection](
            connector, name=f"{self.name}-{kind}", timeout=self._timeout, after_fork=after_fork,
            **options,
        )  # fmt: skip
        self._monitor.watch(pool, connector)
        return pool

    def _enter(self) -> None:
        """Start anew in a forked child, even if Python's fork hooks did not run, as with uWSGI.

        Locks that threads of the parent held are replaced, and their operations dropped.
        """
        pid = os.getpid()
        if self._pid == pid:
            return
        with self._in_child.setdefault(pid, threading.Lock()):
            if self._pid != pid:
                self._after_fork()
                self._pid = pid

    def _after_fork(self) -> None:
        self._is_counted = False
        self._servers.after_fork()
        self._monitor.after_fork()
        self._search_connector.after_fork()
        self._login_connector.after_fork()
        self._slow_binds.after_fork()
        if self._user_refusals is not None:
            self._user_refusals.after_fork()
        # With a lock that no thread of the parent holds.
        self._counts_lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._popped = (0, 0)


def _parsed(urls: str | Sequence[str]) -> list[ServerURL]:
    """Read URLs: a sequence, or one text with commas or spaces between them.

    :raises OptionError: there is none, or one is no URL of an LDAP server
    """
    texts = urls.replace(",", " ").split() if isinstance(urls, str) else urls
    found = list(dict.fromkeys(ServerURL.parse(text, "urls") for text in texts))
    if not found:
        raise OptionError("urls", "(none)", "at least one LDAP URL")
    return found


def _check_tls(tls: TLS, urls: Sequence[ServerURL]) -> None:
    """Check that the options of TLS go with the URLs and that their files exist.

    :raises OptionError: StartTLS is wanted where it cannot be, or a file cannot be read
    """
    for url in urls:
        if tls.start_tls and url.scheme != "ldap":
            raise OptionError("start_tls", True, f"off with {url.scheme}:// ({url.text})")
    if tls.start_tls or any(url.scheme == "ldaps" for url in urls):
        tls.context()


_all: weakref.WeakSet[LDAPPool] = weakref.WeakSet()


def open_pools() -> list[LDAPPool]:
    """Return the pools of this process that can be used."""
    return [pool for pool in list(_all) if not pool.closed]


def _after_fork() -> None:
    for pool in _all:
        pool._enter()


os.register_at_fork(after_in_child=_after_fork)

"""The identity that a pool searches with, kept in one place: the service's DN and its password, or
what a server makes of its client certificate (SASL EXTERNAL) or its Kerberos ticket (SASL GSSAPI).

A password that the directory refuses is not offered again and again, nor is a certificate or, to
the KDC, a keytab: many directories would lock the service's account, for everybody who uses it.
What was refused is known to all processes of the node (:mod:`.service_refusals`). Where the
password is in a file, that is read again when it is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from keyfront.common.condition import Condition
from keyfront.errors import (
    CredentialsError,
    DirectoryBusyError,
    DirectoryTimeoutError,
    DirectoryUnavailableError,
    KerberosError,
    OptionError,
)

from .kerberos import RENEWAL_SECONDS, Kerberos, Tickets
from .protocol.addresses import PassedOver, is_numeric
from .protocol.connection import Connection
from .protocol.messages import password_octets
from .protocol.sasl_gssapi import GSSAPI
from .protocol.tls import TLS
from .protocol.urls import ServerURL
from .service_refusals import ServiceRefusals

LOG = logging.getLogger(__name__)

# Seconds that a process waits for another's BIND if its own password was accepted before.
_TURN_SECONDS = 1.0
# Seconds for which nobody connects after all that answered had refused it.
_REST_SECONDS = 1.0

#: A SASL mechanism by which a service may bind instead of by a password (RFC 4422 appendix A).
EXTERNAL = "EXTERNAL"
# What is offered to a server by which a socket file is connected to.
_PROCESS = b"the user of this process"


class ServiceAccount:
    """An identity for the pool's own use; without a DN it is anonymous.

    Until it has been accepted once, and after a refusal, one BIND at a time is sent, in all
    processes of the node; others wait for its outcome.

    A password that is refused by one server, or one address of a name, may not have come to that
    one yet: the next is asked. When another one refuses it too, it is wrong
    (:mod:`.service_refusals`).

    :param dn: DN to bind, or another name that the server accepts; empty for anonymous
    :param password: its password; text is sent in UTF-8
    :param read: a function that returns the present password, called when one was refused; it may
        raise ``OptionError``
    :param servers: URLs of the servers that it is offered to; refusals are then shared with the
        other processes of the node that offer it to the same ones
    :raises OptionError: only one of the two is given, or there is no UTF-8 for the password
    :ivar who: the identity's name in messages
    :ivar anonymous: true if no identity is bound
    :ivar identities: each ``bound_as`` of a connection that has this identity
    :cvar sasl: the SASL mechanism by which it binds; ``None`` for a password
    """

    sasl: str | None = None

    __slots__ = (
        *("_accepted", "_changed", "_password", "_read", "_refusals", "_resting", "_single"),
        *("_trying", "anonymous", "dn", "identities", "who"),
    )

    def __init__(
        self,
        dn: str,
        password: str | bytes,
        *,
        read: Callable[[], str] | None = None,
        servers: Sequence[str] = (),
    ) -> None:
        try:
            given = bool(password)
            secret = password_octets(password)
            if secret is None or b"\0" in secret:
                allowed = "text that UTF-8 can express, without NUL"
                raise OptionError("bind_password", "(hidden)", allowed)
            if dn and not given:
                # the server would take it for a wish to be nobody
                raise OptionError("bind_password", "(not set)", f"set, as bind_dn is {dn}")
            if given and not dn:
                raise OptionError("bind_dn", "(not set)", "set, as bind_password is")
            self._set_up(dn, secret, servers, who=dn, anonymous=not dn, read=read)
        finally:
            del password
            secret = b""
        self.identities |= {dn or None}

    def _set_up(
        self,
        dn: str,
        secret: bytes,
        servers: Sequence[str],
        *,
        who: str,
        anonymous: bool = False,
        read: Callable[[], str] | None = None,
    ) -> None:
        self.dn = dn
        self.who = who
        self.anonymous = anonymous
        self.identities: frozenset[str | None] = frozenset()
        self._password = secret
        del secret
        self._accepted = anonymous
        self._trying = False
        self._read = read
        # A name may stand for several servers.
        self._single = len(servers) <= 1 and all(
            url.scheme == "ldapi" or is_numeric(url.host) for url in map(ServerURL.parse, servers)
        )
        # Why nobody took it, and until when nobody is connected to in order to hear so again.
        self._resting: tuple[float, CredentialsError] | None = None
        known = bool(servers) and not anonymous
        self._refusals = ServiceRefusals((who, *sorted(servers)) if known else None)
        self._changed = Condition()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.who!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a service identity is not copied or pickled: it has a password")

    def assume(self, connection: Connection, timeout: float) -> None:
        """Give a connection this identity, by one BIND; nobody needs none, but is answered too.

        A second BIND is sent if the first was refused and the file has another password by now.

        :param timeout: seconds for the answer
        :raises CredentialsError: it was refused
        :raises PassedOver: it was refused by this server only, or nobody could be asked in time
        :raises DirectoryUnavailableError: nobody answered
        """
        if self.anonymous:
            connection.ping(timeout)
            return
        deadline = time.monotonic() + timeout
        alone = not self._accepted and self._refusals.shared
        if alone:
            # Who is alone keeps others waiting: not for a server that does not answer.
            self._see_alive(connection, timeout)
        # One after the other, so that a password that is not right any more is offered once.
        seconds = deadline - time.monotonic()
        with self._refusals.turn(seconds if alone else min(seconds, _TURN_SECONDS)) as mine:
            if alone and not mine:
                raise PassedOver(
                    f"another process's BIND as {self.who} was not answered in {timeout:.3g} s",
                    server=connection.server,
                )
            self._offer(connection, deadline)

    def _offer(self, connection: Connection, deadline: float) -> None:
        source, secret = connection.source, self._offered(connection)
        place = None if self._single else source
        refused = self._refusals.held(secret, source)
        try:
            if refused is None:
                refused = self._refusal(connection, secret, deadline)
                if refused is not None:
                    self._refusals.note(secret, refused, place)
            if refused is not None:
                fresh = self._another(secret)
                if fresh != secret and self._refusals.held(fresh, source) is None:
                    secret, refused = fresh, self._refusal(connection, fresh, deadline)
                    if refused is not None:
                        self._refusals.note(secret, refused, place)
                    self._password = secret
            if refused is None:
                self._refusals.forget(secret, source)
                return
            if self._refusals.held(secret) is None:
                # By this server alone: what is held of it is known.
                raise PassedOver(str(refused), server=None, answer=refused)
            raise refused
        finally:
            secret = fresh = b""

    def _offered(self, connection: Connection) -> bytes:
        """Return the secret that is offered over a connection."""
        return self._password

    def _another(self, secret: bytes) -> bytes:
        """Return the secret to offer over a connection on which ``secret`` was refused."""
        return self._read_again()

    def _see_alive(self, connection: Connection, seconds: float) -> None:
        """Check that a server answers within ``seconds``, before a BIND."""
        connection.ping(seconds)

    def _refusal(
        self, connection: Connection, secret: bytes, deadline: float
    ) -> CredentialsError | None:
        """Send a BIND and return the refusal; ``None`` if it was taken."""
        try:
            connection.bind(self.dn, secret, timeout=deadline - time.monotonic())
        except CredentialsError as error:
            return error.with_traceback(None)
        finally:
            del secret
        return None

    def _read_again(self) -> bytes:
        """Return the password that is in the file by now, or the one there is."""
        if self._read is not None:
            try:
                return password_octets(self._read()) or self._password
            except OptionError as error:
                LOG.warning("the password of %s cannot be read again: %s", self.who, error)
        return self._password

    @contextmanager
    def attempt(self, seconds: float) -> Iterator[None]:
        """Allow a BIND in a ``with`` block, and note its outcome.

        :param seconds: time to wait for another's BIND, if that is to tell first
        :raises CredentialsError: it is refused, or was refused a while ago and is not offered yet
        :raises DirectoryTimeoutError: another's BIND took too long
        """
        self.begin(seconds)
        with self._ended_by_errors():
            yield
        self.accepted()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except CredentialsError as error:
            self.refused(error)
            raise
        except BaseException:
            self.failed()
            raise

    def begin(self, seconds: float) -> None:
        """Get leave to send a BIND; its outcome has to be told, by one of the methods below.

        :param seconds: time to wait for another's BIND, if that is to tell first
        :raises CredentialsError: it was refused a while ago, and is not offered again yet
        :raises DirectoryTimeoutError: the other's took too long
        """
        if self.anonymous:
            return
        if (refused := self._held()) is not None:
            raise refused
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._accepted:
                now = time.monotonic()
                if (refused := self._held()) is not None:
                    raise refused
                if not self._trying:
                    self._trying = True
                    return
                if not self._changed.wait(deadline - now):
                    raise DirectoryTimeoutError(
                        f"the first BIND as {self.who} was not answered within {seconds:.3g} s"
                    )

    def accepted(self) -> None:
        """Note that the server took the BIND."""
        self._resting = None
        if self._accepted:
            return
        try:
            self._refusals.forget(self._password, "")
        finally:
            # Also where a greenlet is killed while it waits for the file: the others wait for this.
            with self._changed.surely():
                self._accepted = True
                self._trying = False
                self._changed.notify_all()

    def refused(self, error: CredentialsError) -> None:
        """Note that the server refused it: for a while, nobody offers it again."""
        if self.anonymous:
            return
        try:
            if self._single and self._refusals.held(self._password) is None:
                self._refusals.note(self._password, error)
            self._resting = (time.monotonic() + _REST_SECONDS, error.with_traceback(None))
        finally:
            with self._changed.surely():
                self._trying = False
                self._accepted = False
                self._changed.notify_all()

    def failed(self) -> None:
        """Note that nothing was learnt: the server did not answer the BIND."""
        if self._accepted:
            return
        with self._changed.surely():
            self._trying = False
            self._changed.notify_all()

    def _held(self) -> CredentialsError | None:
        """Return the reason not to offer it now, unless the file has another password by now."""
        refused = self._refusals.held(self._password)
        if refused is None and self._resting is not None:
            until, error = self._resting
            refused = error if time.monotonic() < until else None
        if refused is None:
            return None
        fresh = self._read_again()
        if fresh == self._password or self._refusals.held(fresh) is not None:
            return refused
        self._password = fresh
        self._accepted = False
        self._resting = None
        return None

    def after_fork(self) -> None:
        """Replace locks that threads of the parent may hold."""
        self._refusals.after_fork()
        self._changed = Condition()
        self._trying = False


class _SaslAccount(ServiceAccount):
    """The base of identities without a password. What is offered is told by a digest of its file,
    and another one is offered at once."""

    __slots__ = ()

    def _another(self, secret: bytes) -> bytes:
        # What is shown belongs to the connection: another one needs another connection.
        return secret

    def _held(self) -> CredentialsError | None:
        now = self._read_again()
        if now != self._password:
            # What was learnt of the one before says nothing of this one.
            self._password = now
            self._accepted = False
            self._resting = None
        return super()._held()

    def _note_identity(self, identity: str) -> None:
        """Note who the service is to a server."""
        if identity not in self.identities:
            self.identities |= {identity}


class CertificateAccount(_SaslAccount):
    """The identity that servers make of the client certificate, by SASL EXTERNAL; where a socket
    file is connected to, of the user of this process.

    A certificate that is refused is as a password that is: kept back on the node, and offered again
    at once when its file is another one.

    :param tls: has the certificate
    :param servers: URLs of the servers that it is offered to
    """

    sasl = EXTERNAL

    __slots__ = ("_tls",)

    def __init__(self, tls: TLS, *, servers: Sequence[str] = ()) -> None:
        # Nobody is shown it where only socket files are connected to.
        shown = any(ServerURL.parse(url).scheme != "ldapi" for url in servers)
        self._tls = tls if shown else None
        self._set_up("", b"", servers, who=EXTERNAL)

    def _offered(self, connection: Connection) -> bytes:
        self._password = connection.certificate or _PROCESS
        return self._password

    def _see_alive(self, connection: Connection, seconds: float) -> None:
        try:
            connection.ping(seconds)
        except DirectoryUnavailableError as error:
            raise doubted(connection, error) from None

    def _refusal(
        self, connection: Connection, secret: bytes, deadline: float
    ) -> CredentialsError | None:
        try:
            identity = bind_by_certificate(connection, deadline - time.monotonic())
        except CredentialsError as error:
            return error.with_traceback(None)
        self._note_identity(identity)
        return None

    def _read_again(self) -> bytes:
        return self._tls.prepared().certificate if self._tls is not None else _PROCESS


class KerberosAccount(_SaslAccount):
    """The identity that servers make of a Kerberos ticket, by SASL GSSAPI.

    The service logs in to the KDC before a server is connected to, and anew when half of its
    ticket's life is over; if that fails, the ticket there is serves to its end. A KDC that is away
    says nothing of the servers. One that refuses the keytab is not asked again with it for a while,
    by any process of the node.

    :param kerberos: the keytab and the principal
    :param servers: URLs of the servers
    :raises OptionError: python-gssapi is not installed, or the keytab cannot be read
    """

    sasl = GSSAPI

    __slots__ = ("_at_kdc", "_tickets")

    def __init__(self, kerberos: Kerberos, *, servers: Sequence[str] = ()) -> None:
        self._tickets = Tickets(kerberos)
        who = f"{GSSAPI} {kerberos.principal or kerberos.source}".rstrip()
        self._set_up("", b"", servers, who=who)
        # Apart from what servers refused: who waits for a KDC keeps nobody else.
        self._at_kdc = ServiceRefusals(("KDC", who) if servers else None)

    def begin(self, seconds: float) -> None:
        """Get leave to send a BIND, with a ticket for it.

        :param seconds: time to wait for the KDC, and for another's BIND
        :raises CredentialsError: a server or the KDC refused it a while ago, or the KDC does now
        :raises KerberosError: the KDC does not answer in time
        :raises DirectoryTimeoutError: another's BIND took too long
        """
        deadline = time.monotonic() + seconds
        super().begin(seconds)
        with self._ended_by_errors():
            if self._tickets.due:
                self._log_in(deadline)

    def _log_in(self, deadline: float) -> None:
        """Log in to the KDC; where there is a ticket yet, as far as that goes at once."""
        good = self._tickets.good
        if good:
            deadline = min(deadline, time.monotonic() + RENEWAL_SECONDS)
        try:
            self._take_turn(deadline)
        except (CredentialsError, KerberosError) as error:
            if not good:
                raise
            LOG.warning("the Kerberos ticket of %s is not renewed: %s", self._tickets.who, error)
            self._tickets.put_off()

    def _take_turn(self, deadline: float) -> None:
        offered = self._password
        with self._at_kdc.turn(max(deadline - time.monotonic(), 0.0)):
            if not self._tickets.due:
                return
            if (refused := self._at_kdc.held(offered)) is not None:
                raise refused
            try:
                self._tickets.log_in(deadline - time.monotonic())
            except CredentialsError as error:
                self._at_kdc.note(offered, error)
                raise
            self._at_kdc.forget(offered, "")

    def _offered(self, connection: Connection) -> bytes:
        return self._password

    def _refusal(
        self, connection: Connection, secret: bytes, deadline: float
    ) -> CredentialsError | None:
        reason = ""
        try:
            identity = bind_by_ticket(connection, self._tickets, deadline - time.monotonic())
        except CredentialsError as error:
            return error.with_traceback(None)
        except (KerberosError, DirectoryBusyError) as error:
            reason = str(error).removeprefix(f"{connection.server}: ")
        if reason:
            # It is of no use to the service, but well: who logs in may go on there.
            raise PassedOver(reason, server=connection.server)
        self._note_identity(identity)
        return None

    def _read_again(self) -> bytes:
        return self._tickets.keys()

    def after_fork(self) -> None:
        """Replace locks that threads of the parent may hold, and forget its ticket."""
        super().after_fork()
        self._at_kdc.after_fork()
        self._tickets.after_fork()


def bind_by_ticket(connection: Connection, tickets: Tickets, seconds: float) -> str:
    """Send a BIND by SASL GSSAPI within ``seconds``, and return who that is to the server.

    The ticket is for the name in the server's URL, and bound to the connection's TLS.

    :raises CredentialsError: it was refused, or accepted as nobody
    :raises KerberosError: there is no ticket for this server
    :raises DirectoryUnavailableError: nobody answered
    """
    deadline = time.monotonic() + seconds
    exchange = tickets.exchange(connection.url.tls_name, connection.end_point, seconds)
    return connection.bind_gssapi(exchange, timeout=deadline - time.monotonic())


def bind_by_certificate(connection: Connection, seconds: float | None = None) -> str:
    """Send a BIND by SASL EXTERNAL within ``seconds``, and return who that is to the server.

    :raises CredentialsError: it was refused, or accepted as nobody
    :raises DirectoryUnavailableError: nobody answered
    """
    try:
        return connection.bind_external(timeout=seconds)
    except DirectoryUnavailableError as error:
        raise doubted(connection, error) from None


def doubted(connection: Connection, error: DirectoryUnavailableError) -> DirectoryUnavailableError:
    """Return the error of what was asked first over a connection, with what it may be due to.

    A server that refuses a client certificate may just hang up: with TLS 1.3 after the handshake,
    as far as we see it, and with GnuTLS without a word.
    """
    if type(error) is not DirectoryUnavailableError or not connection.certificate:
        return error
    return DirectoryUnavailableError(
        f"{str(error).removeprefix(f'{connection.server}: ')}; it may not accept the client "
        "certificate",
        server=connection.server,
    )


def check_sasl(
    mechanism: str | None,
    urls: Sequence[ServerURL],
    tls: TLS,
    *,
    bind_dn: str = "",
    password: bool = False,
    password_file: str | None = None,
    kerberos: Kerberos | None = None,
) -> None:
    """Check that ``sasl_mechanism`` goes with the other options of a pool.

    :param mechanism: its value; ``None``: the service binds by its password, or not at all
    :param urls: URLs of the servers
    :param tls: certificates and StartTLS
    :param bind_dn: DN that is bound with a password
    :param password: true if there is one
    :param password_file: the file that it is in
    :param kerberos: the keytab and the principal, as far as they are given
    :raises OptionError: it is another one than EXTERNAL and GSSAPI, or one of them contradicts it
    """
    if kerberos is not None and mechanism != GSSAPI:
        for option, value in (
            ("kerberos_keytab", kerberos.keytab),
            ("kerberos_principal", kerberos.principal),
            ("kerberos_without_tls", kerberos.without_tls or None),
        ):
            if value is not None:
                allowed = f"left out without sasl_mechanism = {GSSAPI}"
                raise OptionError(option, value, allowed)
    if mechanism is None:
        return
    if mechanism not in (EXTERNAL, GSSAPI):
        raise OptionError("sasl_mechanism", mechanism, f"{EXTERNAL} or {GSSAPI}, or left out")
    who = "certificate" if mechanism == EXTERNAL else "ticket"
    beside = f"left out beside sasl_mechanism = {mechanism}: the {who} tells who binds"
    if bind_dn:
        raise OptionError("bind_dn", bind_dn, beside)
    if password:
        raise OptionError("bind_password", "(hidden)", beside)
    if password_file is not None:
        raise OptionError("bind_password_file", password_file, beside)
    if mechanism == GSSAPI:
        _check_gssapi(urls, tls, kerberos or Kerberos())
        return
    for url in urls:
        if url.scheme == "ldap" and not tls.start_tls:
            raise OptionError(
                "sasl_mechanism",
                mechanism,
                f"used over TLS only, and {url} is without: use ldaps:// or StartTLS",
            )
        if url.scheme != "ldapi" and not tls.client_cert:
            raise OptionError(
                "client_cert",
                "(not set)",
                f"set with sasl_mechanism = {EXTERNAL}, as the server takes the service's identity "
                "from it",
            )


def _check_gssapi(urls: Sequence[ServerURL], tls: TLS, kerberos: Kerberos) -> None:
    for url in urls:
        if url.scheme == "ldapi":
            allowed = f"used with servers that have a name, and {url} has none"
            raise OptionError("sasl_mechanism", GSSAPI, allowed)
        if url.scheme == "ldap" and not tls.start_tls and not kerberos.without_tls:
            raise OptionError(
                "sasl_mechanism",
                GSSAPI,
                f"used over TLS only, and {url} is without: use ldaps:// or StartTLS, or say "
                "kerberos_without_tls, and what is searched can be read and changed on the way",
            )
    kerberos.check()

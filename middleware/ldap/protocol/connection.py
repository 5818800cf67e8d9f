"""One connection to one directory server, for one thread at a time.

It speaks what the pool needs (BIND, search, StartTLS, extended operations) directly in BER; the
rest of LDAP goes through :attr:`Connection.ldap3`, on the same socket. Nothing is ever repeated,
and no referral is followed. No password outlives the call it was given to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    OptionError,
    Verdict,
)

from . import requests as messages
from . import result_codes as verdicts
from . import search_filter as filters
from .requests import Message, ProtocolError
from .session import START_TLS, TAKEN, BindAnswer, Entry, Reference, SearchAnswer, Session
from .tls import TLS
from .transport import Address, Transport
from .urls import ServerURL

#: Active Directory's fast bind (MS-ADTS 3.1.1.3.4.2.2).
FAST_BIND = "1.2.840.113556.1.4.1781"

_ANYTHING = filters.encode("(objectClass=*)")
_POLICY = messages.controls(messages.password_policy_control())
# What a server says it can do (RFC 4512 section 5.1; the last one is Microsoft's).
_ABILITIES = (
    "supportedControl",
    "supportedExtension",
    "supportedFeatures",
    "supportedCapabilities",
)


class Connection(Session):
    """Made by :meth:`connect`. Operations raise, besides what each tells:

    - :class:`DirectoryTimeoutError`, :class:`DirectoryProtocolError` or another
      :class:`DirectoryUnavailableError`: the server is away, ended the connection, or says ``busy``
      or ``unavailable``
    - :class:`DirectoryAnswerError`: the server refused; the connection can be used on
    - :class:`OptionError`: an argument cannot be sent; nothing was

    Their ``timeout`` is for the whole operation, in seconds; by default that of the connection.

    :ivar url: the server
    :ivar server: the server as messages name it
    :ivar opened_at: when, by ``time.monotonic()``
    :ivar usable: ``False`` while an operation is under way, and for good if one did not end well
    :ivar bound_as: the DN of the last BIND if that was taken; always ``None`` with fast bind, which
        leaves the connection anonymous
    :ivar binds: BINDs sent
    :ivar searches: searches sent, each page counted
    """

    __slots__ = ("_abilities", "_fast", "_ldap3", "binds", "bound_as", "searches", "url")

    def __init__(self, transport: Transport, url: ServerURL, timeout: float | None) -> None:
        super().__init__(transport, url.text, timeout)
        self.url = url
        self.bound_as: str | None = None
        self.binds = self.searches = 0
        self._abilities: frozenset[str] | None = None
        self._fast = False
        self._ldap3: Any = None

    @classmethod
    def connect(
        cls,
        url: ServerURL,
        *,
        tls: TLS,
        connect_timeout: float,
        timeout: float | None = None,
        address: Address | None = None,
    ) -> Connection:
        """Connect, with TLS if the URL or ``tls`` says so; nobody is bound yet.

        :param connect_timeout: seconds for all of it, but not for finding a name's addresses
        :param timeout: seconds for each operation later on, ``None`` for no limit
        :param address: one of ``socket.getaddrinfo``; by default the name's addresses in turn.
            Whichever it is, the certificate must be for the name in the URL.
        :raises DirectoryUnavailableError: nobody is there, or not in time
        :raises DirectoryTLSError: TLS or StartTLS failed, or the certificate is not trusted
        :raises OptionError: ``tls`` names bad files, or StartTLS is for another kind of URL
        """
        if tls.start_tls and url.scheme != "ldap":
            raise OptionError("start_tls", True, f"off with {url.scheme}://")
        context = tls.context() if tls.start_tls or url.scheme == "ldaps" else None
        transport = Transport(url)
        try:
            transport.begin(connect_timeout)
            transport.connect(address)
            made = cls(transport, url, timeout)
            if tls.start_tls:
                made._start_tls()
            if context is not None:
                transport.secure(context)
        except BaseException:
            transport.close()
            raise
        return made

    def bind(
        self,
        dn: str,
        password: str | bytes = b"",
        *,
        timeout: float | None = None,
        allow_anonymous: bool = False,
        password_policy: bool = False,
    ) -> BindAnswer:
        """Send one BIND (RFC 4511 section 4.2), whoever the connection is bound as already.

        An empty password is refused here: servers take it for a wish to be anonymous and say yes to
        any name (RFC 4513 section 5.1.2). So is a password without a name.

        :param dn: or what else the server takes for one
        :param password: text is sent in UTF-8
        :param allow_anonymous: whether both may be empty, to become nobody
        :param password_policy: ask for warnings and reasons
        :raises CredentialsError: refused because of the user, with the reason if the server tells
        """
        self.bound_as = None
        secret: bytes | None
        # No frame that the traceback of an error keeps may still have the password.
        try:
            secret = password if isinstance(password, bytes) else _octets(password)
            nobody = allow_anonymous and not dn and not secret
            if secret is None or not ((dn and secret) or nobody):
                raise _never_sent(self.server, dn, secret)
            controls = _POLICY if password_policy else b""
            request = messages.bind_request(self.next_id(), dn, secret, controls)
            self._begin(timeout)
            self.binds += 1
            self.transport.send(request)
            message = self._answer(messages.BIND)
            if message.code or message.controls:
                refused, answer = self._judge(message, secret, password_policy)
            else:
                refused, answer = None, TAKEN
        finally:
            password = secret = request = b""
        self._refuse(refused)
        if not self._fast:
            self.bound_as = dn
        return answer

    def fast_bind(self, *, timeout: float | None = None) -> None:
        """Make Active Directory check passwords without logging anybody in.

        From then on the connection is good for BINDs only, and stays anonymous whatever they say.
        It must come before any other BIND (MS-ADTS 3.1.1.3.4.2.2).

        :raises DirectoryAnswerError: the server does not have it, or somebody is bound
        """
        self.extended(FAST_BIND, timeout=timeout)
        self._fast = True

    def extended(
        self, oid: str, value: bytes | None = None, *, timeout: float | None = None
    ) -> tuple[str | None, bytes | None]:
        """Send an extended operation (RFC 4511 section 4.12); returns OID and value of the answer.

        :raises OptionError: it is StartTLS, which :meth:`connect` does
        """
        if oid == START_TLS:
            raise OptionError("oid", oid, "another one: TLS begins with the connection")
        request = messages.extended_request(self.next_id(), oid, value)
        self._begin(timeout)
        try:
            self.transport.send(request)
        finally:
            # it may be a change of a password
            del request, value
        message = self._answer(messages.EXTENDED)
        self._refuse(verdicts.refusal(message, self.server) if message.code else None)
        return message.oid, message.value

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
        """Search (RFC 4511 section 4.5), and wait for all of it.

        :param scope: 0 the base itself, 1 the entries right below it, 2 the base and all below
        :param filter: in the form of RFC 4515
        :param attributes: to be returned; ``None`` for all user attributes, ``["1.1"]`` for none
        :param attrs_only: without their values
        :param size_limit: entries at most, for the server and for us; 0 for no limit of ours
        :param time_limit: whole seconds that the server may take; 0 for no limit of ours
        :param dereference: aliases, 0 never, 1 below the base, 2 the base, 3 always
        :param page_size: fetch so many entries at a time (RFC 2696); 0 all at once
        :raises FilterError: the filter is none
        :raises DirectoryAnswerError: refused, or a limit was reached; what came is not kept
        """
        encoded = filters.encode(filter)
        options: dict[str, Any] = {
            "attrs_only": attrs_only,
            "size_limit": size_limit,
            "time_limit": time_limit,
            "dereference": dereference,
        }
        if page_size:
            options["controls"] = _page(page_size, b"")
        request = messages.search_request(
            self.next_id(), base, scope, encoded, attributes, **options
        )
        items: list[Entry | Reference] = []
        self._begin(timeout)
        done = self._search(items, request, size_limit)
        while page_size and (cookie := self._cookie(done)):
            # within the time that is left
            self.usable = False
            options["controls"] = _page(page_size, cookie)
            request = messages.search_request(
                self.next_id(), base, scope, encoded, attributes, **options
            )
            done = self._search(items, request, size_limit)
        return SearchAnswer(items)

    def search_page(
        self,
        base: str,
        scope: int = 2,
        filter: str = "(objectClass=*)",
        attributes: Sequence[str] | None = None,
        *,
        page_size: int,
        cookie: bytes = b"",
        attrs_only: bool = False,
        size_limit: int = 0,
        time_limit: int = 0,
        dereference: int = 0,
        timeout: float | None = None,
    ) -> tuple[SearchAnswer, bytes]:
        """Fetch one page (RFC 2696), and the cookie for the next one; empty after the last.

        The cookie is good on this connection only. All other arguments are those of
        :meth:`search`, and must be the same for each page.

        :param page_size: entries at most; 0 with a cookie lets the server forget the rest
        """
        request = messages.search_request(
            self.next_id(),
            base,
            scope,
            filters.encode(filter),
            attributes,
            attrs_only=attrs_only,
            size_limit=size_limit,
            time_limit=time_limit,
            dereference=dereference,
            controls=_page(page_size, cookie),
        )
        items: list[Entry | Reference] = []
        self._begin(timeout)
        done = self._search(items, request, size_limit)
        return SearchAnswer(items), self._cookie(done)

    def ping(self, timeout: float | None = None) -> None:
        """Ask the server for nothing, to see that it answers; a refusal is an answer as well."""
        self._ask_root(("1.1",), timeout)

    def supports(self, oid: str, *, timeout: float | None = None) -> bool:
        """Whether the server says it has a control, an extended operation or a feature.

        It is asked once; if it refuses to tell, it has none.
        """
        if self._abilities is None:
            self._abilities = frozenset(
                value.decode("ascii", "replace")
                for _, found in self._ask_root(_ABILITIES, timeout).entries
                for values in found.values()
                for value in values
            )
        return oid in self._abilities

    @property
    def ldap3(self) -> Any:
        """An ``ldap3.Connection`` on the same socket, for modify, add, delete, compare and others.

        Made when it is first asked for. It has no user and no password, follows no referral, reads
        no schema, takes the default timeout, and cannot bind. Results are ldap3's, in its
        ``result`` and ``response``; where the connection is lost, errors are ours.
        """
        if self._ldap3 is None:
            from .ldap3_strategy import share

            self._ldap3 = share(self)
        return self._ldap3

    def forget(self) -> None:
        """Drop what the last user of :attr:`ldap3` left there: requests, answers."""
        self._ldap3 = None

    def close(self) -> None:
        """Say goodbye if that can be done at once, and close. May be repeated; never raises."""
        farewell = messages.unbind_request(self.next_id()) if self.usable else b""
        self.usable = False
        self.bound_as = self._ldap3 = None
        self.transport.close(farewell)

    def __repr__(self) -> str:
        state = "usable" if self.usable else "not usable"
        return f"<Connection {self.server} as {self.bound_as!r}, {state}>"

    def _start_tls(self) -> None:
        """RFC 4511 section 4.14; nothing else is outstanding."""
        self.transport.send(messages.extended_request(self.next_id(), START_TLS))
        message = self._answer(messages.EXTENDED)
        if message.code:
            refused = verdicts.refusal(message, "").message
            raise DirectoryTLSError(f"StartTLS was refused: {refused}", server=self.server)
        if self._decoder.pending:
            # somebody in between would have it taken for a part of what is encrypted
            raise DirectoryTLSError(
                "more than the answer to StartTLS came in the clear", server=self.server
            )

    def _ask_root(self, attributes: Sequence[str], timeout: float | None) -> SearchAnswer:
        """Search the server's own entry; nothing if it refuses to show it."""
        items: list[Entry | Reference] = []
        request = messages.search_request(self.next_id(), "", 0, _ANYTHING, attributes)
        self._begin(timeout)
        try:
            self._search(items, request, 0)
        except DirectoryAnswerError:
            pass
        return SearchAnswer(items)

    def _search(self, items: list[Entry | Reference], request: bytes, size_limit: int) -> Message:
        """Do the search that was begun: add what is found to ``items``, return how it ended."""
        self.searches += 1
        self.transport.send(request)
        try:
            done = self._collect(items, size_limit)
        except DirectoryTimeoutError:
            self._abandon()
            raise
        self._refuse(verdicts.refusal(done, self.server) if done.code else None)
        return done

    def _cookie(self, done: Message) -> bytes:
        broken = ""
        try:
            return messages.paged_cookie(done.controls) or b""
        except ProtocolError as error:
            broken = str(error)
        self.usable = False
        raise self._broken(broken)

    def _judge(
        self, message: Message, secret: bytes, password_policy: bool
    ) -> tuple[DirectoryError | None, BindAnswer]:
        """What the answer to a BIND says."""
        said = (message.diagnostic, message.matched_dn, *message.referrals)
        shown = secret.decode("utf-8", "replace")
        quote = not shown or not any(shown in each for each in said)
        del secret, shown
        broken = ""
        try:
            refused = verdicts.bind_refusal(message, self.server, quote=quote)
            policy = messages.password_policy(message.controls) if password_policy else None
            return refused, BindAnswer(policy.expiring, policy.grace) if policy else TAKEN
        except ProtocolError as error:
            broken = str(error)
        raise self._broken(broken)


def _page(size: int, cookie: bytes) -> bytes:
    return messages.controls(messages.paged_control(size, cookie))


def _octets(password: str) -> bytes | None:
    """A password in UTF-8; ``None`` if it cannot be in any directory."""
    try:
        return password.encode()
    except UnicodeEncodeError:
        return None


def _never_sent(server: str, dn: str, secret: bytes | None) -> CredentialsError:
    if not dn:
        verdict, reason = Verdict.UNKNOWN_USER, "there is no name"
    elif secret is None:
        verdict, reason = Verdict.WRONG_PASSWORD, "it cannot be written in UTF-8"
    else:
        verdict, reason = Verdict.WRONG_PASSWORD, "it is empty"
    return CredentialsError(verdict, diagnostic=f"{reason}; nothing was sent", server=server)

"""One connection to one directory server, for one thread at a time.

Its messages are numbered, sent, answered in time and matched; one operation at a time. Whatever
ends one early leaves the connection unusable, for nobody knows what is still to come.

It speaks what the pool needs (BIND, search, StartTLS, extended operations) directly in BER; the
rest of LDAP goes through :attr:`Connection.ldap3`, on the same socket. Nothing is ever repeated,
and no referral is followed. No password outlives the call it was given to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    OptionError,
    Verdict,
)

from . import controls, messages, result_codes, search_filter
from .ber import MAX_INT, ProtocolError, TooLargeError, read_text
from .messages import (
    DEFAULT_LIMITS,
    MAX_MESSAGE,
    START_TLS,
    WHO_AM_I,
    Budget,
    Decoder,
    Limits,
    Message,
    password_octets,
)
from .sasl_gssapi import GSSAPI, MAX_ROUNDS, Exchange, NoPlainLayerError, end_point_of
from .tls import TLS
from .transport import Address, Transport
from .urls import ServerURL

#: Active Directory's fast bind (MS-ADTS 3.1.1.3.4.2.2).
FAST_BIND = "1.2.840.113556.1.4.1781"

_ANYTHING = search_filter.encode("(objectClass=*)")
_POLICY = controls.encode(controls.password_policy_control())
# What a server says it can do (RFC 4512 section 5.1; the last one is Microsoft's).
_ABILITIES = (
    "supportedControl",
    "supportedExtension",
    "supportedFeatures",
    "supportedCapabilities",
)


# An attribute of which not all values came.
_RANGE = re.compile(r"([^;]+);range=\d{1,9}-(\d{1,9}|\*)", re.IGNORECASE)

_PROTOCOL_ERROR, _NO_SUCH_OBJECT = 2, 32

# Authorization identities of nobody (RFC 4513 section 5.2.1.8).
_NOBODY = frozenset(("", "dn:", "u:"))
# What a server makes somebody of, by SASL mechanism.
_SUBJECTS = {"EXTERNAL": "subject of the certificate", GSSAPI: "principal"}

Entry = tuple[str, dict[str, list[bytes]]]
Reference = tuple[None, list[str]]


class Patience(Protocol):
    """Decides for how long an answer is waited for."""

    def first(self, seconds: float | None) -> float | None:
        """Return for how long to wait at first, of the seconds that there are."""

    def more(self) -> float:
        """Return for how long to wait on; 0 for no more."""


class BindAnswer(NamedTuple):
    """The server's remarks on a password it took (draft-behera-ldap-password-policy)."""

    #: Seconds until it expires, if that is soon.
    password_expiring: int | None = None
    #: Logins left, if it has expired.
    grace: int | None = None


TAKEN = BindAnswer()


class SearchAnswer:
    """The result of a search, in the order of arrival.

    :ivar items: ``(dn, {attribute: [values]})`` of entries and ``(None, [urls])`` of references
    :ivar source: the server that answered, as :attr:`Connection.source`
    """

    __slots__ = ("items", "source")

    def __init__(self, items: list[Entry | Reference], source: str = "") -> None:
        self.items = items
        self.source = source

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


class Connection:
    """A connection to one server, made by :meth:`connect`.

    Operations raise, besides what each tells:

    - :class:`DirectoryTimeoutError`, :class:`DirectoryProtocolError` or another
      :class:`DirectoryUnavailableError`: the server is away, or ended the connection
    - :class:`DirectoryBusyError`, also one of these: the server says that it cannot answer this;
      the connection can be used on
    - :class:`DirectoryAnswerError`: the server refused; the connection can be used on
    - :class:`OptionError`: an argument cannot be sent; nothing was

    Their ``timeout`` is for the whole operation, in seconds; by default that of the connection.

    :ivar url: the server
    :ivar server: the server's name in messages
    :ivar source: its URL and the address that was connected to, which tell it from other servers
        of its name
    :ivar opened_at: the time when it was opened, by ``time.monotonic()``
    :ivar usable: ``False`` while an operation is under way, and for good if one did not end well
    :ivar bound_as: the DN of the last BIND if that was taken, or what the server calls who it made
        of EXTERNAL or GSSAPI; always ``None`` with fast bind, which leaves the connection anonymous
    :ivar certificate: a digest of the file of the client certificate that TLS had to show; empty
        if there is none
    :ivar binds: BINDs sent
    :ivar searches: searches sent, each page counted
    :ivar heard: true if any part of the answer to the last search has come
    :ivar shared: the connection of :attr:`ldap3`, once somebody has asked for it
    """

    __slots__ = (
        *("__weakref__", "_abilities", "_decoder", "_fast", "_id", "_limits", "_timeout"),
        *("binds", "bound_as", "certificate", "heard", "opened_at", "searches", "server", "shared"),
        *("source", "transport", "url", "usable"),
    )

    def __init__(
        self,
        transport: Transport,
        url: ServerURL,
        timeout: float | None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.transport = transport
        self.url = url
        self.server = url.text
        self.source = f"{url.text} {transport.peer}"
        self.opened_at = time.monotonic()
        self.usable = True
        self.heard = False
        self.certificate = b""
        self._timeout = timeout
        self._limits = limits
        self._decoder = Decoder(
            max_message=min(limits.size, MAX_MESSAGE), max_memory=limits.size
        )
        self._id = 0
        self.bound_as: str | None = None
        self.binds = self.searches = 0
        self._abilities: frozenset[str] | None = None
        self._fast = False
        self.shared: Any = None

    @classmethod
    def connect(
        cls,
        url: ServerURL,
        *,
        tls: TLS,
        connect_timeout: float,
        timeout: float | None = None,
        address: Address = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Connection:
        """Connect, with TLS if the URL or ``tls`` says so; nobody is bound yet.

        :param connect_timeout: seconds for all of it, but not for finding a name's addresses
        :param timeout: seconds for each operation later on, ``None`` for no limit
        :param address: ``sockaddr`` of ``socket.getaddrinfo``; by default the name's addresses in
            turn. Whichever it is, the certificate must be for the name in the URL.
        :param limits: limits of the answer to each search
        :raises DirectoryUnavailableError: nobody is there, or not in time
        :raises DirectoryTLSError: TLS or StartTLS failed, or the certificate is not trusted
        :raises OptionError: ``tls`` names bad files, or StartTLS is for another kind of URL
        """
        if tls.start_tls and url.scheme != "ldap":
            raise OptionError("start_tls", True, f"off with {url.scheme}://")
        prepared = tls.prepared() if tls.start_tls or url.scheme == "ldaps" else None
        transport = Transport(url)
        try:
            transport.begin(connect_timeout)
            transport.connect(address)
            made = cls(transport, url, timeout, limits)
            if tls.start_tls:
                made._start_tls()
            if prepared is not None:
                made.certificate = prepared.certificate
                transport.secure(prepared.context)
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
        patience: Patience | None = None,
    ) -> BindAnswer:
        """Send one BIND (RFC 4511 section 4.2), whoever the connection is bound as already.

        An empty password is refused here: servers take it for a wish to be anonymous and say yes to
        any name (RFC 4513 section 5.1.2). So is a password without a name.

        :param dn: DN to bind, or what else the server takes for one
        :param password: text is sent in UTF-8
        :param allow_anonymous: let both be empty, to become nobody
        :param password_policy: ask for warnings and reasons
        :param patience: may have it end sooner than ``timeout``
        :raises CredentialsError: refused because of the user, with the reason if the server tells
        """
        self.bound_as = None
        secret: bytes | None
        # No frame that the traceback of an error keeps may still have the password.
        try:
            secret = password_octets(password)
            nobody = allow_anonymous and not dn and not secret
            if secret is None or b"\0" in secret or not ((dn and secret) or nobody):
                raise _never_sent(self.server, dn, secret)
            asked = _POLICY if password_policy else b""
            request = messages.bind_request(self.next_id(), dn, secret, asked)
            if patience is not None:
                timeout = patience.first(self._timeout if timeout is None else timeout)
            self._begin(timeout)
            self.binds += 1
            self.transport.send(request)
            message = self._answer(messages.BIND, patience)
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

    def bind_external(self, *, timeout: float | None = None) -> str:
        """Bind as whom the server makes of what is below LDAP: SASL EXTERNAL (RFC 4513 5.2.3).

        That is the client certificate of TLS, or the user of the process where a socket file is
        connected to. It takes two round trips, since a server that makes nobody of it says yes as
        well, and leaves the connection anonymous: so it is asked.

        :param timeout: seconds for all of it
        :returns: the identity, as :meth:`who_am_i` returns it
        :raises CredentialsError: refused, or accepted as nobody (``Verdict.NO_IDENTITY``)
        """
        deadline = self._deadline(timeout)
        self.bound_as = None
        message = self._bind_sasl("EXTERNAL", timeout)
        if message.code == result_codes.SASL_BIND_IN_PROGRESS:
            # Some ask for what was given already (RFC 4422 section 5).
            message = self._bind_sasl("EXTERNAL", self._left(deadline))
        self._judge_sasl(message, Verdict.WRONG_CERTIFICATE)
        return self._identify(message, "EXTERNAL", Verdict.NO_IDENTITY, deadline)

    def bind_gssapi(self, exchange: Exchange, *, timeout: float | None = None) -> str:
        """Bind by Kerberos: SASL GSSAPI (RFC 4752), without a security layer.

        Each side proves to the other who it is. It takes four round trips, the last of which asks
        who the server makes of it, as :meth:`bind_external` does.

        :param exchange: the client's side, with a ticket for this server
        :param timeout: seconds for all of it
        :returns: the identity, as :meth:`who_am_i` returns it; the principal, where the server does
            not know that
        :raises CredentialsError: refused, or accepted as nobody
        :raises DirectoryAnswerError: refused without TLS
        """
        deadline = self._deadline(timeout)
        self.bound_as = None
        message = self._bind_sasl(GSSAPI, timeout, exchange.first)
        for _ in range(MAX_ROUNDS - 1):
            if message.code != result_codes.SASL_BIND_IN_PROGRESS:
                break
            # Nothing else may come before the next step.
            self.usable = False
            response = self._next_step(exchange, message.value or b"")
            self.usable = True
            message = self._bind_sasl(GSSAPI, self._left(deadline), response)
        broken = ""
        if message.code == result_codes.SASL_BIND_IN_PROGRESS:
            broken = f"GSSAPI takes more than {MAX_ROUNDS} rounds"
        elif message.code == result_codes.SUCCESS and not exchange.finished:
            broken = "GSSAPI ended before the server had proved who it is"
        if broken:
            self.usable = False
            raise self._broken(broken)
        self._judge_sasl(message, Verdict.WRONG_TICKET)
        # Samba does not know the question (RFC 4511 section 4.12); it has nobody without a name.
        unasked = f"u:{exchange.principal}"
        return self._identify(message, GSSAPI, Verdict.WRONG_TICKET, deadline, unasked=unasked)

    @property
    def end_point(self) -> bytes:
        """The channel binding of TLS (RFC 5929); empty without TLS, or if there is none."""
        certificate = self.transport.certificate
        return end_point_of(certificate) if certificate else b""

    def who_am_i(self, *, timeout: float | None = None) -> str:
        """Ask the server whom the connection is bound as (RFC 4532).

        :returns: ``dn:`` and a DN, or ``u:`` and a name (RFC 4513 section 5.2.1.8); empty for
            nobody
        :raises DirectoryAnswerError: it does not tell
        """
        _, value = self.extended(WHO_AM_I, timeout=timeout)
        return read_text(value or b"")

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
        """Send an extended operation (RFC 4511 section 4.12).

        :param oid: OID of the operation
        :param value: its value, in BER
        :returns: OID and value of the answer
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
        self._refuse(result_codes.refusal(message, self.server) if message.code else None)
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

        :param base: the DN at which the search begins
        :param scope: 0 the base itself, 1 the entries right below it, 2 the base and all below
        :param filter: filter in the form of RFC 4515
        :param attributes: attributes to be returned; ``None`` for all user attributes, ``["1.1"]``
            for none
        :param attrs_only: true to return attributes without their values
        :param size_limit: entries at most, for the server and for us; 0 for no limit of ours
        :param time_limit: whole seconds that the server may take; 0 for no limit of ours
        :param dereference: aliases followed: 0 never, 1 below the base, 2 the base, 3 always
        :param page_size: entries that are fetched at a time (RFC 2696); 0 all at once
        :raises FilterError: ``filter`` is no filter of RFC 4515
        :raises DirectoryAnswerError: the server refused, or a limit was reached; entries that came
            are not kept
        """
        self.heard = False
        encoded = search_filter.encode(filter)
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
        budget = Budget(self._limits)
        self._begin(timeout)
        done = self._search(items, request, size_limit, budget)
        while page_size and (cookie := self._cookie(done)):
            # within the time that is left
            self.usable = False
            options["controls"] = _page(page_size, cookie)
            request = messages.search_request(
                self.next_id(), base, scope, encoded, attributes, **options
            )
            done = self._search(items, request, size_limit, budget)
        self._fetch_rest(items, attributes, budget)
        return SearchAnswer(items, self.source)

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
        budget: Budget | None = None,
    ) -> tuple[SearchAnswer, bytes]:
        """Fetch one page of results (RFC 2696).

        The cookie is good on this connection only. All other arguments are those of
        :meth:`search`, and must be the same for each page.

        :param page_size: entries at most; 0 with a cookie lets the server forget the rest
        :param budget: the result of :meth:`budget` for the first page, for all of them to count
            as one answer
        :returns: the entries, and the cookie for the next page, which is empty after the last
        """
        request = messages.search_request(
            self.next_id(),
            base,
            scope,
            search_filter.encode(filter),
            attributes,
            attrs_only=attrs_only,
            size_limit=size_limit,
            time_limit=time_limit,
            dereference=dereference,
            controls=_page(page_size, cookie),
        )
        items: list[Entry | Reference] = []
        budget = budget or self.budget()
        self._begin(timeout)
        done = self._search(items, request, size_limit, budget)
        following = self._cookie(done)
        self._fetch_rest(items, attributes, budget)
        return SearchAnswer(items, self.source), following

    def post(
        self,
        base: str,
        scope: int,
        filter: str,
        attributes: Sequence[str],
        *,
        encoded_controls: bytes = b"",
        timeout: float | None = None,
    ) -> int:
        """Send a search whose answers :meth:`take` returns one by one, as long as it goes on.

        From the first one on the connection serves for this only, for as many searches at a time
        as are posted.

        :param encoded_controls: controls encoded by :func:`.controls.encode`
        :returns: the number that its answers have
        :raises FilterError: ``filter`` is not one
        """
        request = messages.search_request(
            self.next_id(), base, scope, search_filter.encode(filter), attributes,
            controls=encoded_controls,
        )  # fmt: skip
        self.usable = False
        self.searches += 1
        self.transport.begin(self._timeout if timeout is None else timeout)
        self.transport.send(request)
        return self._id

    def take(self, seconds: float) -> Message | None:
        """Return the next answer to a search that was posted.

        :param seconds: time to wait for it; 0: return what has been received already
        :returns: ``None`` if none has come
        """
        broken = ""
        deadline = time.monotonic() + seconds
        try:
            while True:
                message = self._decoder.next()
                if message is not None:
                    if message.is_notice or message.id == 0:
                        self.check_unasked(message)
                        continue
                    return message
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self.transport.begin(left)
                self._decoder.feed(self.transport.receive())
        except DirectoryTimeoutError:
            return None
        except ProtocolError as error:
            broken = str(error)
        raise self._broken(broken)

    def budget(self) -> Budget:
        """Return the time that an answer may take in all."""
        return Budget(self._limits)

    def ping(self, timeout: float | None = None) -> None:
        """Ask the server for an empty entry, to see that it answers; a refusal is an answer too."""
        with suppress(DirectoryAnswerError):
            self._ask_root(("1.1",), timeout)

    def supports(self, oid: str, *, timeout: float | None = None) -> bool:
        """Return whether the server says it has a control, an extended operation or a feature.

        It is asked until it has told.

        :param oid: the OID of the control, operation or feature
        :param timeout: seconds to wait for the answer, ``None`` for the connection's own
        :raises DirectoryAnswerError: it refuses to tell
        """
        if self._abilities is None:
            self._abilities = frozenset(
                value.decode("ascii", "replace")
                for _, found in self._ask_root(_ABILITIES, timeout).entries
                for values in found.values()
                for value in values
            )
        return oid in self._abilities

    def readable(self) -> bool:
        """Return whether the idle connection can be read from, which means that it is lost.

        Asks nobody and does not wait. A connection that was readable is not usable any more.
        """
        if self.usable and (self._decoder.pending or self.transport.is_readable()):
            self.usable = False
        return not self.usable

    def next_id(self) -> int:
        """Return the number of the next message (RFC 4511 section 4.1.1.1)."""
        self._id = self._id % MAX_INT + 1
        return self._id

    def lend(self) -> None:
        """Begin an operation of ldap3's, which encodes, sends and reads it."""
        self._begin(None)
        if self._decoder.pending:
            raise self._broken("bytes that answer nothing")

    def give_back(self, rest: bytes) -> None:
        """End an operation of ldap3's, with the bytes that came after its answer."""
        self._decoder.feed(rest)
        self.usable = True

    def check_unasked(self, message: Message) -> None:
        """Ignore a message that answers nothing that is under way, or raise.

        :raises DirectoryUnavailableError: the server says that it ends the connection
        :raises ProtocolError: it answers nothing that was ever asked
        """
        if message.is_notice:
            said = result_codes.refusal(message, "").message
            raise DirectoryUnavailableError(
                f"the server ends the connection: {said}", server=self.server
            )
        # late answers to what was abandoned, and notices of a kind we do not know (section 4.4)
        if not (
            0 < message.id < self._id or (message.id == 0 and message.tag == messages.EXTENDED)
        ):
            raise ProtocolError(f"{message!r} answers nothing that was asked")

    @property
    def ldap3(self) -> Any:
        """An ``ldap3.Connection`` on the same socket, for modify, add, delete, compare and others.

        Made when it is first asked for. It has no user and no password, follows no referral, reads
        no schema, takes the default timeout, and cannot bind. Results are ldap3's, in its
        ``result`` and ``response``; where the connection is lost, errors are ours.
        """
        if self.shared is None:
            from .ldap3_strategy import share

            self.shared = share(self)
        return self.shared

    def forget(self) -> None:
        """Drop what the last user of :attr:`ldap3` left there: requests, answers."""
        self.shared = None

    def close(self) -> None:
        """Say goodbye if that can be done at once, and close. May be repeated; never raises."""
        farewell = messages.unbind_request(self.next_id()) if self.usable else b""
        self.usable = False
        self.bound_as = self.shared = None
        self.transport.close(farewell)

    def __repr__(self) -> str:
        state = "usable" if self.usable else "not usable"
        return f"<Connection {self.server} as {self.bound_as!r}, {state}>"

    def _begin(self, timeout: float | None) -> None:
        """Begin an operation. Whatever ends it early leaves the connection unusable."""
        if not self.usable:
            raise DirectoryUnavailableError("the connection is lost or closed", server=self.server)
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and seconds <= 0:
            raise DirectoryTimeoutError("no time was left to ask", server=self.server)
        self.usable = False
        self.transport.begin(seconds)

    def _bind_sasl(self, mechanism: str, timeout: float | None, response: bytes = b"") -> Message:
        """Send one BIND by SASL, with a response, and return the answer."""
        request = messages.sasl_bind_request(self.next_id(), mechanism, response)
        self._begin(timeout)
        self.binds += 1
        self.transport.send(request)
        message = self._answer(messages.BIND)
        self.usable = True
        return message

    def _next_step(self, exchange: Exchange, challenge: bytes) -> bytes:
        """Return the content of the next BIND of an exchange, or raise on behalf of the server."""
        broken = ""
        try:
            return exchange.answer(challenge)
        except NoPlainLayerError:
            pass
        except ProtocolError as error:
            broken = str(error)
        if broken:
            raise self._broken(broken)
        raise DirectoryAnswerError(
            8, result_codes.name_of(8), "it lets nobody in by GSSAPI without a security layer",
            server=self.server, advice="use ldaps:// or StartTLS",
        )  # fmt: skip

    def _judge_sasl(self, message: Message, verdict: Verdict) -> None:
        """Raise what the last answer of a BIND by SASL stands for, unless that is success.

        :param verdict: the verdict if it was refused as a wrong password would be
        """
        refused: DirectoryError | None = None
        broken = ""
        if message.code or message.controls:
            try:
                refused = result_codes.bind_refusal(message, self.server, sasl=verdict)
            except ProtocolError as error:
                broken = str(error)
        if broken:
            self.usable = False
            raise self._broken(broken)
        if refused is not None:
            raise refused

    def _identify(
        self, message: Message, mechanism: str, nobody: Verdict, deadline: float | None,
        *, unasked: str = "",
    ) -> str:  # fmt: skip
        """Return the identity that the server made of a BIND by SASL that it accepted.

        :param message: the answer to it
        :param nobody: the verdict if that is nobody
        :param unasked: the identity where the server does not know the question
        """
        told = ""
        try:
            identity = self.who_am_i(timeout=self._left(deadline))
        except DirectoryAnswerError as error:
            identity = unasked if error.code == _PROTOCOL_ERROR else ""
            told = f"it does not say as whom ({error.name}, {error.code})"
        if identity in _NOBODY:
            raise CredentialsError(
                nobody,
                message.code,
                result_codes.name_of(message.code),
                f"{mechanism} was accepted, but {told or 'as nobody (anonymous)'}; map the "
                f"{_SUBJECTS[mechanism]} to an entry there (OpenLDAP: authz-regexp)",
                server=self.server,
            )
        self.bound_as = identity
        return identity

    def _deadline(self, timeout: float | None) -> float | None:
        """Return the end of an operation of several messages that begins now."""
        seconds = self._timeout if timeout is None else timeout
        return None if seconds is None else time.monotonic() + seconds

    def _left(self, deadline: float | None) -> float | None:
        """Return the time that is left of an operation that is half done."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            self.usable = False
            raise DirectoryTimeoutError("no time was left to ask", server=self.server)
        return left

    def _collect(
        self, items: list[Entry | Reference], size_limit: int, budget: Budget
    ) -> Message:
        """Add what a search finds to ``items``, and return its last message."""
        left = -1
        if size_limit:
            left = size_limit - sum(1 for item in items if item[0] is not None)
        target, decoder, transport = self._id, self._decoder, self.transport
        ours = budget.entries >= 0 and not 0 <= left <= budget.entries
        allowed = left = budget.entries if ours else left
        broken = large = ""
        try:
            while True:
                message = decoder.next()
                if message is None:
                    data = transport.receive()
                    budget.received(len(data))
                    decoder.feed(data)
                elif message.id != target:
                    self.check_unasked(message)
                elif message.tag == messages.ENTRY:
                    if not left:
                        break
                    left -= 1
                    if budget.counting:
                        budget.entry(message)
                    items.append((message.dn, message.attributes))
                elif message.tag == messages.DONE:
                    if budget.entries >= 0:
                        budget.entries -= allowed - left
                    return message
                elif message.tag == messages.REFERENCE:
                    items.append((None, message.urls))
                elif message.tag != messages.INTERMEDIATE:
                    raise ProtocolError(f"a search was answered by {message!r}")
        except TooLargeError as error:
            large = str(error)
        except ProtocolError as error:
            broken = str(error)
        if broken:
            raise self._broken(broken)
        if ours and not large:
            large = str(budget.entries_error())
        self._abandon()
        if large:
            # Half of an answer is none.
            items.clear()
            raise DirectoryAnswerError(
                4, result_codes.name_of(4), f"the answer is too large: {large}", server=self.server
            )
        raise DirectoryAnswerError(
            4, result_codes.name_of(4), f"more than {size_limit} entries came", server=self.server
        )

    def _answer(self, tag: int, patience: Patience | None = None) -> Message:
        """Return the one answer to what was just sent."""
        broken = ""
        began = time.monotonic() if patience is not None else 0.0
        try:
            while True:
                message = self._decoder.next()
                if message is None:
                    try:
                        self._decoder.feed(self.transport.receive())
                    except DirectoryTimeoutError:
                        more = patience.more() if patience is not None else 0.0
                        if not more:
                            raise
                        self.transport.begin(more, since=began)
                elif message.id != self._id:
                    self.check_unasked(message)
                elif message.tag == tag:
                    return message
                elif message.tag != messages.INTERMEDIATE:
                    raise ProtocolError(f"{message!r} came instead of tag {tag}")
        except ProtocolError as error:
            broken = str(error)
        raise self._broken(broken)

    def _refuse(self, refused: DirectoryError | None) -> None:
        """End an operation that was answered: with an error, if it was refused."""
        self.usable = True
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

    def _start_tls(self) -> None:
        """Ask for TLS (RFC 4511 section 4.14); nothing else is outstanding."""
        self.transport.send(messages.extended_request(self.next_id(), START_TLS))
        message = self._answer(messages.EXTENDED)
        if message.code:
            refused = result_codes.refusal(message, "").message
            raise DirectoryTLSError(f"StartTLS was refused: {refused}", server=self.server)
        if self._decoder.pending:
            # somebody in between would have it taken for a part of what is encrypted
            raise DirectoryTLSError(
                "more than the answer to StartTLS came in the clear", server=self.server
            )

    def _ask_root(self, attributes: Sequence[str], timeout: float | None) -> SearchAnswer:
        """Search the server's own entry. "Busy" is said of the server itself here.

        :raises DirectoryAnswerError: it refuses to show it
        """
        busy = ""
        items: list[Entry | Reference] = []
        request = messages.search_request(self.next_id(), "", 0, _ANYTHING, attributes)
        self._begin(timeout)
        try:
            self._search(items, request, 0, self.budget())
        except DirectoryBusyError as error:
            busy = str(error).removeprefix(f"{self.server}: ")
        if busy:
            self.usable = False
            raise DirectoryUnavailableError(busy, server=self.server)
        return SearchAnswer(items)

    def _search(
        self,
        items: list[Entry | Reference],
        request: bytes,
        size_limit: int,
        budget: Budget,
    ) -> Message:
        """Do the search that was begun: add what is found to ``items``, return its last message."""
        self.searches += 1
        self.transport.send(request)
        try:
            done = self._collect(items, size_limit, budget)
        except DirectoryUnavailableError as error:
            if items or self._decoder.pending:
                self.heard = True
            if isinstance(error, DirectoryTimeoutError):
                self._abandon()
            raise
        self.heard = True
        self._refuse(result_codes.refusal(done, self.server) if done.code else None)
        return done

    def _fetch_rest(
        self, items: list[Entry | Reference], asked: Sequence[str] | None, budget: Budget
    ) -> None:
        """Ask for the values that a server kept back: ``member;range=0-1499``.

        Active Directory gives 1500 values at a time (MS-ADTS 3.1.1.3.1.3.3). Who asks for a range
        has what he asked for.
        """
        if asked is not None and any(";" in name for name in asked):
            return
        for dn, found in items:
            if dn is None or not isinstance(found, dict):
                continue
            for name in [name for name in found if ";" in name]:
                if (part := _RANGE.fullmatch(name)) is not None:
                    values = found.pop(name)
                    self._fetch_range(dn, part[1], part[2], values, budget)
                    # The name alone comes as well, without values.
                    found[part[1]] = [*found.get(part[1], ()), *values]

    def _fetch_range(
        self, dn: str, name: str, last: str, values: list[bytes], budget: Budget
    ) -> None:
        while last != "*":
            rest: list[Entry | Reference] = []
            self.usable = False
            request = messages.search_request(
                self.next_id(), dn, 0, _ANYTHING, [f"{name};range={int(last) + 1}-*"]
            )
            try:
                self._search(rest, request, 0, budget)
            except DirectoryAnswerError as error:
                if error.code != _NO_SUCH_OBJECT:
                    raise
                return  # deleted meanwhile
            following = "*"
            for _, found in rest:
                for other, more in found.items() if isinstance(found, dict) else ():
                    part = _RANGE.fullmatch(other)
                    if part is not None and part[1].lower() == name.lower():
                        values += more
                        following = part[2]
            if following != "*" and int(following) <= int(last):
                self.usable = False
                raise self._broken(f"the values of {name} after {last} end at {following}")
            last = following

    def _cookie(self, done: Message) -> bytes:
        broken = ""
        try:
            return controls.paged_cookie(done.controls) or b""
        except ProtocolError as error:
            broken = str(error)
        self.usable = False
        raise self._broken(broken)

    def _judge(
        self, message: Message, secret: bytes, password_policy: bool
    ) -> tuple[DirectoryError | None, BindAnswer]:
        """Return the error that the answer to a BIND stands for, and what the server said."""
        said = (message.diagnostic, message.matched_dn, *message.referrals)
        shown = secret.decode("utf-8", "replace")
        quote = not shown or not any(shown in each for each in said)
        del secret, shown
        broken = ""
        try:
            refused = result_codes.bind_refusal(message, self.server, quote=quote)
            policy = controls.password_policy(message.controls) if password_policy else None
            return refused, BindAnswer(policy.expiring, policy.grace) if policy else TAKEN
        except ProtocolError as error:
            broken = str(error)
        raise self._broken(broken)


def _page(size: int, cookie: bytes) -> bytes:
    return controls.encode(controls.paged_control(size, cookie))


def _never_sent(server: str, dn: str, secret: bytes | None) -> CredentialsError:
    if not dn:
        verdict, reason = Verdict.UNKNOWN_USER, "there is no name"
    else:
        verdict, reason = Verdict.WRONG_PASSWORD, messages.never_sent(secret)
    return CredentialsError(verdict, diagnostic=f"{reason}; nothing was sent", server=server)

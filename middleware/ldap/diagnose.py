"""Examines a directory server step by step, for ``LDAPPool.check()`` and ``keyfront ldap check``.

It connects as the pool does, with the same checks of certificates, and changes nothing. A password
is sent only over a connection that passed them.
"""

from __future__ import annotations

import datetime
import functools
import ssl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from keyfront.errors import DirectoryAnswerError, DirectoryError, OptionError

from .connector import Dialer
from .protocol.addresses import Addresses, Resolve, look_up
from .protocol.connection import FAST_BIND, TAKEN, BindAnswer, Connection
from .protocol.controls import PAGED_RESULTS, PASSWORD_POLICY
from .protocol.messages import START_TLS
from .protocol.srv import Resolver
from .protocol.transport import Address, Transport
from .protocol.urls import ServerURL
from .service_account import ServiceAccount

T = TypeVar("T")
State = Literal["ok", "failed", "warning", "note"]
OK: Final = "ok"
FAILED: Final = "failed"
WARNING: Final = "warning"
NOTE: Final = "note"

_PINGS = 5
# A certificate that ends sooner is worth a warning.
_SOON_DAYS = 14
_ACTIVE_DIRECTORY = "1.2.840.113556.1.4.800"
_ABILITIES = ("supportedControl", "supportedExtension", "supportedCapabilities")
_CONTEXTS = ("defaultNamingContext", "namingContexts")
_ABOUT = ("objectClass", "vendorName", "vendorVersion", *_CONTEXTS, *_ABILITIES)
_OFFERS = (
    ("StartTLS", START_TLS),
    ("paged results", PAGED_RESULTS),
    ("password policy", PASSWORD_POLICY),
    ("fast bind", FAST_BIND),
)


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one step, with a text for people and figures for programs.

    :ivar name: ``connect``, ``TLS``, ``certificate``, ``bind``, ``server``, ``naming contexts``,
        the name of something that a server may offer, ``search``, ``page``, ``ping``; of a domain
        that is looked up ``lookup``, and ``server`` for each server that it names
    :ivar text: one line for people; quotes what the server says as it is
    :ivar data: ``milliseconds`` if the step takes time, and what it found, by name
    """

    name: str
    state: State
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ServerReport:
    """The outcome of all steps for one server.

    Of its properties, ``None`` stands for what was not tried, or is not known.

    :ivar url: the server
    :ivar checks: the steps, in their order; one may have several lines
    """

    url: ServerURL
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, state: State, text: str, **data: Any) -> None:
        """Add a step with its outcome.

        :param name: the step's name, as in :class:`Check`
        :param state: its outcome
        :param text: one line for people
        :param data: figures for programs, by name
        """
        self.checks.append(Check(name, state, text, data))

    def fail(self, name: str, error: Exception) -> None:
        """Add a step that failed; its text does not repeat the server's name.

        :param name: the step's name, as in :class:`Check`
        :param error: the error that it ended with
        """
        self.add(name, FAILED, str(error).replace(f"{self.url.text}: ", ""))

    @property
    def ok(self) -> bool:
        """True if nothing failed. What a server does not offer, such as paging, is no failure."""
        return all(check.state != FAILED for check in self.checks)

    @property
    def error(self) -> str | None:
        """The first thing that went wrong, in one line."""
        return next((check.text for check in self.checks if check.state == FAILED), None)

    @property
    def server(self) -> str:
        """The server's URL."""
        return self.url.text

    @property
    def reachable(self) -> bool:
        """True if it could be connected to, TLS included."""
        return self._worked("connect") is True and self._worked("TLS") is not False

    @property
    def address(self) -> str | None:
        """The IP address that answered, or the path of the socket."""
        shown = self._found("connect", "address", str)
        if shown and self.url.scheme == "ldapi":
            return self.url.host
        return shown and shown.rpartition(":")[0].strip("[]")

    @property
    def tls(self) -> str | None:
        """The version, for example ``TLSv1.3``; ``None`` without TLS."""
        return self._found("TLS", "version", str)

    @property
    def cipher(self) -> str | None:
        """The cipher suite of TLS."""
        return self._found("TLS", "cipher", str)

    @property
    def certificate_expires(self) -> datetime.datetime | None:
        """The end of the server's certificate; only known if it was verified."""
        return self._found("certificate", "until", datetime.datetime)

    @property
    def bind(self) -> bool | None:
        """True if the identity was taken; ``None`` also if there is none, and so no BIND."""
        return self._worked("bind")

    @property
    def identity(self) -> str | None:
        """The identity that the server gives a client certificate or a Kerberos principal (SASL
        EXTERNAL, GSSAPI)."""
        return self._found("bind", "identity", str)

    @property
    def search(self) -> bool | None:
        """True if the base could be searched."""
        return self._worked("search")

    @property
    def paging(self) -> bool | None:
        """True if results come by pages (RFC 2696)."""
        offered = self._found("paged results", "offered", bool)
        return self._worked("page") if offered else offered

    @property
    def connect_ms(self) -> float | None:
        """Milliseconds to connect, TLS included."""
        step = "TLS" if self.tls else "connect"
        return self._found(step, "milliseconds", float) if self.reachable else None

    @property
    def bind_ms(self) -> float | None:
        """Milliseconds for the BIND; the pool's first one may wait for another process's."""
        return self._found("bind", "milliseconds", float)

    @property
    def search_ms(self) -> float | None:
        """Milliseconds for a search of one entry."""
        return self._found("search", "milliseconds", float)

    def _found(self, name: str, key: str, kind: type[T]) -> T | None:
        """Return a step's finding: its last line, after those of addresses that did not answer."""
        found = [x.data[key] for x in self.checks if x.name == name and key in x.data]
        return found[-1] if found and isinstance(found[-1], kind) else None

    def _worked(self, name: str) -> bool | None:
        if any(check.name == name and check.state == FAILED for check in self.checks):
            return False
        return None if self._found(name, "milliseconds", float) is None else True


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The dialer, the BIND and the base of the search with which all servers are examined.

    :ivar dialer: the dialer, which connects to them
    :ivar dn: DN to bind; empty for anonymous
    :ivar bind: a function that sends the BIND, with a password that only it knows; it returns
        ``None`` if it sent none
    :ivar base: DN to search; by default the first that the server names
    :ivar sasl: the mechanism if that BIND is by SASL, so that the server tells the identity
    :ivar resolver: the resolver of the servers of domains; ``None`` if no URL is of one
    """

    dialer: Dialer
    dn: str
    bind: Callable[[Connection], BindAnswer | None] = field(repr=False)
    base: str | None = None
    sasl: str | None = None
    resolver: Resolver | None = None

    @classmethod
    def of_pool(
        cls,
        dialer: Dialer,
        account: ServiceAccount,
        base: str | None,
        resolver: Resolver | None = None,
    ) -> Terms:
        """Return the terms of a pool: a BIND that is refused counts as one of the pool's own.

        :param dialer: opens the connections
        :param account: the service's account
        :param base: the DN to search; ``None``: the first that the server names
        :param resolver: looks up the servers of domains
        """

        def bind(connection: Connection) -> BindAnswer | None:
            if account.anonymous:
                return None
            with account.attempt(dialer.connect_timeout):
                account.assume(connection, dialer.connect_timeout)
            return TAKEN

        return cls(
            dialer=dialer, dn=account.dn, bind=bind, base=base, sasl=account.sasl,
            resolver=resolver,
        )  # fmt: skip


def examine_all(urls: Sequence[ServerURL], terms: Terms) -> Iterator[ServerReport]:
    """Examine servers, one after the other: of a domain that is looked up, the lookup, and then
    each server that its records name. Each server is examined once.

    :param urls: the URLs, in their order
    :param terms: the dialer, the BIND and the base of the search
    """
    named = frozenset(url for url in urls if not url.srv)
    seen: set[ServerURL] = set()
    for url in urls:
        resolve: Resolve = look_up
        found = [url]
        if url.srv:
            report, found = _look_up(url, terms)
            yield report
            if terms.resolver is not None and terms.resolver.finds_addresses:
                resolve = functools.partial(
                    terms.resolver.addresses, seconds=terms.dialer.connect_timeout
                )
        for server in found:
            if server not in seen and (server == url or server not in named):
                seen.add(server)
                yield examine(server, terms, resolve)


def _look_up(url: ServerURL, terms: Terms) -> tuple[ServerReport, list[ServerURL]]:
    """Look up the servers of a domain; returns the report of it, and the servers, by priority."""
    report = ServerReport(url)
    assert terms.resolver is not None, "URLs with srv need a resolver"
    start = time.perf_counter()
    try:
        answer = terms.resolver.servers(url, terms.dialer.connect_timeout)
    except (DirectoryError, OptionError) as error:
        report.fail("lookup", error)
        return report, []
    taken = _since(start)
    targets = sorted(answer.targets, key=lambda each: (each.priority, -each.weight, each.url.text))
    data = {"records": answer.name, "ttl": answer.ttl, "milliseconds": taken}
    if not targets:
        report.add("lookup", FAILED, f"{answer.name} says that there is no such service", **data)
    else:
        text = f"{answer.name}, {len(targets)} found, for {answer.ttl:.0f} s, {_ms(taken)}"
        report.add("lookup", OK, text, **data)
    for each in targets:
        text = f"{each.url.text}, priority {each.priority}, weight {each.weight}"
        report.add(
            "server", NOTE, text, url=each.url.text, priority=each.priority, weight=each.weight
        )
    for text in answer.left_out:
        report.add("server", WARNING, f"not used: {text}")
    return report, [each.url for each in targets]


def examine(url: ServerURL, terms: Terms, resolve: Resolve = look_up) -> ServerReport:
    """Examine one server over connections of its own; the report has what does not work.

    :param url: the server's URL
    :param terms: the dialer, the BIND and the base of the search
    :param resolve: a function that finds the addresses of its name and port
    """
    report = ServerReport(url)
    connection = _connect(report, terms.dialer, resolve)
    if connection is None:
        return report
    try:
        for name, step in _STEPS.items():
            if not connection.usable:
                report.add("", NOTE, "the rest was not tried")
                break
            try:
                step(report, connection, terms)
            except (DirectoryError, OptionError) as error:
                report.fail(name, error)
    finally:
        connection.close()
    return report


def _connect(report: ServerReport, dialer: Dialer, resolve: Resolve) -> Connection | None:
    url = report.url

    def touch(url: ServerURL, address: Address, seconds: float) -> tuple[Address, float]:
        transport = Transport(url)
        start = time.perf_counter()
        try:
            transport.begin(seconds)
            transport.connect(address)
        except DirectoryError as error:
            text = f"{_shown(address)}: {str(error).removeprefix(f'{url.text}: ')}"
            failed.append(Check("connect", WARNING, text, {"address": _shown(address)}))
            raise
        finally:
            transport.close()
        return address, _since(start)

    failed: list[Check] = []
    try:
        address, taken = Addresses(url, resolve=resolve, clock=time.monotonic).reach(
            touch, dialer.connect_timeout
        )
    except DirectoryError as error:
        report.fail("connect", error)
        return None
    report.checks += failed
    where = _shown(address)
    report.add("connect", OK, f"{where}, {_ms(taken)}", address=where, milliseconds=taken)
    start = time.perf_counter()
    try:
        connection = dialer.connect(url, address, dialer.connect_timeout)
    except (DirectoryError, OptionError) as error:
        report.fail("TLS" if dialer.tls.start_tls or url.scheme == "ldaps" else "connect", error)
        return None
    _show_tls(report, connection, _since(start))
    return connection


def _show_tls(report: ServerReport, connection: Connection, taken: float) -> None:
    secured = connection.transport.raw
    if not isinstance(secured, ssl.SSLSocket):
        return
    suite = (secured.cipher() or ("?",))[0]
    version = secured.version() or "?"
    text = f"{version}, {suite}, {_ms(taken)} to connect with it"
    report.add("TLS", OK, text, version=version, cipher=suite, milliseconds=taken)
    # Empty if the certificate was not verified.
    until = (secured.getpeercert() or {}).get("notAfter")
    if not isinstance(until, str):
        report.add("certificate", WARNING, "any is taken, it was not verified")
        return
    seconds = ssl.cert_time_to_seconds(until)
    ends = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    days = int((seconds - time.time()) // 86400)
    host = report.url.tls_name
    state: State = OK if days >= _SOON_DAYS else WARNING
    text = f"trusted, for {host}, until {ends:%Y-%m-%d} ({days} days)"
    report.add("certificate", state, text, host=host, until=ends, days=days)


def _bind(report: ServerReport, connection: Connection, terms: Terms) -> None:
    start = time.perf_counter()
    try:
        answer = terms.bind(connection)
    except DirectoryError as error:
        report.fail("bind", error)
        _warn_if_clear(report, terms)
        return
    taken = _since(start)
    if answer is None:
        report.add("bind", NOTE, "anonymous, without a BIND")
        return
    told = ""
    if answer.grace is not None:
        told = f"; its password has expired, {answer.grace} more logins"
    elif answer.password_expiring is not None:
        told = f"; its password expires in {answer.password_expiring / 86400:.1f} days"
    if terms.sasl:
        identity = connection.bound_as or ""
        text = f"{identity}, by SASL {terms.sasl}, {_ms(taken)}"
        report.add("bind", OK, text, identity=identity, milliseconds=taken)
        return
    text = f"{terms.dn or 'anonymous'}, {_ms(taken)}{told}"
    report.add("bind", WARNING if told else OK, text, dn=terms.dn, milliseconds=taken)
    _warn_if_clear(report, terms)


def _warn_if_clear(report: ServerReport, terms: Terms) -> None:
    """Say that a password could be read on its way, also one that was refused."""
    if terms.dn and not (terms.sasl or report.tls or report.url.scheme == "ldapi"):
        report.add("bind", WARNING, "the password went in the clear; use ldaps:// or start_tls")


def _ask_about(report: ServerReport, connection: Connection, terms: Terms) -> None:
    """Read the server's root entry, in which it describes itself (RFC 4512 section 5.1)."""
    found = connection.search("", 0, attributes=_ABOUT).entries
    about = {
        name.lower(): [value.decode("utf-8", "replace") for value in values]
        for name, values in (found[0][1] if found else {}).items()
    }
    vendor = _vendor(about)
    report.add("server", NOTE, vendor, vendor=vendor)
    contexts = list(dict.fromkeys(x for name in _CONTEXTS for x in about.get(name.lower(), [])))
    report.add("naming contexts", NOTE, "; ".join(contexts) or "none are shown", contexts=contexts)
    abilities = {oid for name in _ABILITIES for oid in about.get(name.lower(), [])}
    for name, oid in _OFFERS:
        text = "offered" if oid in abilities else "not offered"
        if name == "StartTLS" and terms.dialer.tls.start_tls:
            text = "in use"
        report.add(name, NOTE, text, offered=oid in abilities)


def _search(report: ServerReport, connection: Connection, terms: Terms) -> None:
    named = report._found("naming contexts", "contexts", list) or [None]
    base = named[0] if terms.base is None else terms.base
    if not base or report.bind is False:
        reason = "the bind failed" if base else "no search_base is given, and the server names none"
        report.add("search", WARNING, f"not tried: {reason}")
        return
    start = time.perf_counter()
    found = connection.search(base, 0, attributes=["1.1"]).entries
    taken = _since(start)
    if not found:
        who = connection.bound_as or "nobody in particular"
        raise DirectoryError(f"{base} is not shown to {who}; try another bind_dn")
    report.add("search", OK, f"{base}, {_ms(taken)}", base=base, milliseconds=taken)


def _page(report: ServerReport, connection: Connection, terms: Terms) -> None:
    """Fetch two pages of one entry each, as a long list would be fetched (RFC 2696)."""
    base = report._found("search", "base", str)
    if base is None or not report._found("paged results", "offered", bool):
        return
    start = time.perf_counter()
    pages, cookie = 0, b""
    while pages < 2 and (cookie or not pages):
        _, cookie = connection.search_page(base, attributes=["1.1"], page_size=1, cookie=cookie)
        pages += 1
    taken = _since(start)
    if cookie:
        try:
            connection.search_page(base, attributes=["1.1"], page_size=0, cookie=cookie)
        except DirectoryAnswerError:
            pass  # some do not know how to forget the rest
    report.add("page", OK, f"{pages} pages of 1 entry, {_ms(taken)}", milliseconds=taken)


def _ping(report: ServerReport, connection: Connection, terms: Terms) -> None:
    taken = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.ping()
        taken.append(_since(start))
    best, median = min(taken), statistics.median(taken)
    text = f"{_ms(best)} best, {_ms(median)} median of {_PINGS}"
    report.add("ping", OK, text, best_milliseconds=best, median_milliseconds=median)


_STEPS = {"bind": _bind, "root entry": _ask_about, "search": _search, "page": _page, "ping": _ping}


def _vendor(about: dict[str, list[str]]) -> str:
    name = " ".join(about.get("vendorname", []) + about.get("vendorversion", []))
    if name:
        return name
    if "OpenLDAProotDSE" in about.get("objectclass", []):
        return "OpenLDAP"
    if _ACTIVE_DIRECTORY in about.get("supportedcapabilities", []):
        return "Active Directory"
    return "does not say what it is"


def _shown(address: Address) -> str:
    if address is None:
        return "socket"
    return f"[{address[0]}]:{address[1]}" if len(address) == 4 else f"{address[0]}:{address[1]}"


def _since(start: float) -> float:
    return round((time.perf_counter() - start) * 1000, 3)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms"

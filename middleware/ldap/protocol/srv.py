"""Looks up the servers of a domain by its SRV records (RFC 2782), and their addresses.

``ldap+srv://DOMAIN`` is ``_ldap._tcp.DOMAIN``. ``ldaps+srv://DOMAIN`` is ``_ldaps._tcp.DOMAIN`` or,
where there is no such name, as in Active Directory, ``_ldap._tcp.DOMAIN``: its ports of LDAP
without TLS are then those of LDAPS. It asks by dnspython.

What the records say is not protected, so whoever can answer in place of DNS would choose the
servers. Those outside of the domain are left out, unless the operator names theirs, too: then even
somebody with a trusted certificate of his own gains nothing by it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from keyfront.errors import DirectoryTimeoutError, DirectoryUnavailableError, OptionError

from .urls import ServerURL

_ALLOWED_NAMESERVER = "the address of a DNS server: 192.0.2.1, 192.0.2.1:53 or [2001:db8::1]:53"
_MISSING = "a URL without +srv, unless dnspython is installed: pip install 'keyfront[srv]'"
_DNS_PORT = 53
# The port of LDAPS by that of LDAP: of the directory, and of Active Directory's global catalog.
_LDAPS_PORTS = {389: 636, 3268: 3269}
# Seconds that one DNS server has for an answer, before the next one is asked; or less, so that all
# are asked in the time there is.
_TRY_SECONDS = 2.0
_ROOT = "."
# Types of records that are asked for, and that may come beside them.
_KINDS = (
    *("A", "AAAA", "CNAME", "DNAME", "DNSKEY", "DS", "MX", "NAPTR", "NS", "NSEC", "NSEC3", "OPT"),
    *("PTR", "RRSIG", "SOA", "SRV", "SVCB", "TXT"),
)
# Of how many that are left out it is told; a forged answer has thousands.
_MOST_LEFT_OUT = 10


class Target(NamedTuple):
    """A server that a record names."""

    url: ServerURL
    #: The lowest first, 0 to 65535.
    priority: int
    #: Its part of the load among those of its priority, 0 to 65535.
    weight: int


class Answer(NamedTuple):
    """The answer to the lookup of a domain's servers."""

    #: The name of the records, as ``_ldap._tcp.example.org``.
    name: str
    #: The servers in no order; empty if the domain says that it has no such service.
    targets: tuple[Target, ...]
    #: Seconds for which it holds, 0 or more.
    ttl: float
    #: The reasons for which some were left out, one text each and in order; of many, the number.
    left_out: tuple[str, ...]


class NoRecordsError(DirectoryUnavailableError):
    """DNS has answered that there are no records of this name."""


class Resolver:
    """Asks DNS. It keeps nothing between two lookups, not even the system's configuration.

    :param nameservers: addresses of DNS servers, with their ports; by default those of the system
    :param domains: domains that targets may be in; by default that of the URL. ``.`` is any
    :raises OptionError: one is no address, or no name
    """

    def __init__(self, nameservers: Sequence[str] = (), domains: Sequence[str] = ()) -> None:
        self._nameservers = [_nameserver(text) for text in nameservers]
        self._domains = [_domain(text) for text in domains]

    @property
    def finds_addresses(self) -> bool:
        """True if addresses are asked of DNS servers of its own, and not of the system."""
        return bool(self._nameservers)

    def servers(self, url: ServerURL, seconds: float) -> Answer:
        """Look up the servers of a domain.

        :param url: its URL, with ``srv``
        :param seconds: time for all of it, above 0
        :raises NoRecordsError: there are none
        :raises DirectoryTimeoutError: DNS does not answer
        :raises DirectoryUnavailableError: DNS answers by an error, or by nothing that can be used
        """
        deadline = time.monotonic() + seconds
        if url.scheme == "ldaps":
            try:
                return self._records(url, "_ldaps", seconds)
            except NoRecordsError:
                pass
        return self._records(url, "_ldap", deadline - time.monotonic())

    def addresses(self, host: str, port: int, seconds: float) -> list[tuple[Any, ...]]:
        """Look up the addresses of a server, as ``socket.getaddrinfo`` gives them.

        :param host: a name
        :param port: 1 to 65535
        :param seconds: time for all of it, above 0
        :raises OSError: there are none, or DNS does not answer
        """
        dns = import_dns()
        name = dns.name.from_text(host if host.endswith(".") else f"{host}.")
        deadline = time.monotonic() + seconds
        found: list[tuple[Any, ...]] = []
        failed: socket.gaierror | None = None
        for kind in ("AAAA", "A"):
            try:
                left = max(deadline - time.monotonic(), 0.001)
                answer = self._made(dns, left).resolve(name, kind, lifetime=left, search=False)
            except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
                continue
            except (dns.exception.DNSException, OSError) as error:
                failed = socket.gaierror(socket.EAI_AGAIN, _words(dns, error, seconds))
                continue
            ending = (port, 0, 0) if kind == "AAAA" else (port,)
            found += [(record.address, *ending) for record in answer]
        if found:
            return found
        raise failed or socket.gaierror(socket.EAI_NONAME, "it has no address")

    def _records(self, url: ServerURL, service: str, seconds: float) -> Answer:
        dns = import_dns()
        name = f"{service}._tcp.{url.host}"
        failed: DirectoryUnavailableError
        try:
            left = max(seconds, 0.001)
            answer = self._made(dns, left).resolve(
                dns.name.from_text(f"{name}."), "SRV", lifetime=left, search=False
            )
            return self._read(url, name, answer)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            failed = NoRecordsError(f"{name} has no SRV records", server=url.text)
        except dns.exception.Timeout as error:
            text = f"the lookup of {name}: {_words(dns, error, seconds)}"
            failed = DirectoryTimeoutError(text, server=url.text)
        except (dns.exception.DNSException, OSError) as error:
            text = f"the lookup of {name} failed: {_words(dns, error, seconds)}"
            failed = DirectoryUnavailableError(text, server=url.text)
        raise failed

    def _read(self, url: ServerURL, name: str, answer: Any) -> Answer:
        ttl = min(answer.rrset.ttl, answer.chaining_result.minimum_ttl)
        records = list(answer)
        if len(records) == 1 and records[0].target.to_text() == _ROOT:
            # "The service is decidedly not available at this domain."
            return Answer(name, (), ttl, ())
        found: dict[ServerURL, Target] = {}
        left_out: list[str] = []
        for record in records:
            host = record.target.to_text().rstrip(".").lower()
            port = record.port
            if url.scheme == "ldaps" and name.startswith("_ldap."):
                port = _LDAPS_PORTS.get(port, port)
            target = ServerURL.of_target(url.scheme, host, port) if port else None
            if target is None:
                left_out.append(f"{host or _ROOT} port {port}: not the name of a server")
            elif not self._is_trusted(host, url):
                named = ", ".join(self._domains or [url.domain])
                left_out.append(f"{host}: not in {named}; srv_domains names others")
            else:
                # One that is named twice counts where it is preferred.
                new = Target(target, record.priority, record.weight)
                old = found.get(target, new)
                found[target] = min(old, new, key=lambda each: (each.priority, -each.weight))
        if not found:
            why = "; ".join(_some(left_out))
            raise DirectoryUnavailableError(
                f"{name} names no server that may be used: {why}", server=url.text
            )
        return Answer(name, tuple(found.values()), ttl, _some(left_out))

    def _is_trusted(self, host: str, url: ServerURL) -> bool:
        domains = self._domains or [url.domain]
        return any(
            domain == _ROOT or host == domain or host.endswith(f".{domain}") for domain in domains
        )

    def _made(self, dns: Any, seconds: float) -> Any:
        # Each time, as the system's configuration may have changed.
        made = dns.resolver.Resolver(configure=not self._nameservers)
        if self._nameservers:
            made.nameservers = [
                dns.nameserver.Do53Nameserver(address, port) for address, port in self._nameservers
            ]
        made.timeout = min(_TRY_SECONDS, seconds / (len(made.nameservers) + 1))
        return made


def _some(texts: Sequence[str]) -> tuple[str, ...]:
    """Sorted, as DNS answers in another order each time."""
    told, rest = sorted(texts)[:_MOST_LEFT_OUT], len(texts) - _MOST_LEFT_OUT
    return (*told, f"and {rest} more") if rest > 0 else tuple(told)


def resolver_of(
    urls: Sequence[ServerURL],
    nameservers: str | Sequence[str] = (),
    domains: str | Sequence[str] = (),
) -> Resolver | None:
    """Return the resolver of the servers of URLs; ``None`` if no URL is of a domain.

    :param urls: the URLs
    :param nameservers: addresses of DNS servers, as for :class:`Resolver`, or one text with commas
        or spaces between
    :param domains: domains that targets may be in, in the same forms
    :raises OptionError: one of them is out of its range or has no use, or dnspython is missing
    """
    given = {"nameservers": _listed(nameservers), "srv_domains": _listed(domains)}
    if any(url.srv for url in urls):
        made = Resolver(given["nameservers"], given["srv_domains"])
        import_dns()
        return made
    for option, values in given.items():
        if values:
            allowed = "left out without ldap+srv:// or ldaps+srv://"
            raise OptionError(option, " ".join(values), allowed)
    return None


def _listed(given: str | Sequence[str]) -> list[str]:
    return given.replace(",", " ").split() if isinstance(given, str) else list(given)


def import_dns() -> Any:
    """Return dnspython, which an extra brings: a copy of our own.

    eventlet, which Keystone imports, puts its own functions in the place of dnspython's in every
    process, patched or not. In a thread that is no greenlet's they begin a hub, which is torn
    down with the thread; greenlets that are torn down so have corrupted memory.

    :raises OptionError: it is not installed
    """
    with _copying:
        if _copy is None:
            _make_copy()
        return _copy


# The copy, and the lock over its making.
_copy: Any = None
_copying = threading.Lock()


def _after_fork() -> None:
    global _copying
    _copying = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _make_copy() -> None:
    global _copy
    others = _loaded()
    for name in others:
        del sys.modules[name]
    try:
        import dns.exception
        import dns.name
        import dns.nameserver
        import dns.rdata
        import dns.rdataclass
        import dns.rdatatype
        import dns.resolver

        # What is imported later would be of another copy; and in the midst of an answer a child
        # that is forked would wait for it for ever.
        made: Any = dns
        for name in _KINDS:
            if (kind := getattr(made.rdatatype.RdataType, name, None)) is not None:
                made.rdata.get_rdata_class(made.rdataclass.RdataClass.IN, kind)
        _copy = made
    except ImportError:
        raise OptionError("urls", "…+srv://…", _MISSING) from None
    finally:
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(others)


def _loaded() -> dict[str, Any]:
    """Return dnspython's modules by their names; those of None are kept from being imported."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "dns" and module is not None
    }


def _words(dns: Any, error: Exception, seconds: float) -> str:
    """Return in one line why a lookup failed."""
    if isinstance(error, dns.exception.Timeout):
        return f"no answer within {seconds:.3g} s"
    if isinstance(error, dns.resolver.NoResolverConfiguration):
        return "/etc/resolv.conf names no DNS server"
    if isinstance(error, dns.resolver.NoNameservers):
        return _of_nameservers(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


def _of_nameservers(error: Any) -> str:
    """Return the answer of each DNS server, or the reason why none could be asked."""
    told = []
    for nameserver, _, _, reason, _ in error.kwargs.get("errors") or ():
        text = os.strerror(reason.errno) if getattr(reason, "errno", None) else str(reason)
        told.append(f"{nameserver}: {text}")
    return "; ".join(dict.fromkeys(told)) or "there is no DNS server to be asked"


def _nameserver(text: str) -> tuple[str, int]:
    """Read the address of a DNS server.

    :raises OptionError: it is none
    """
    host, _, port = text.strip(), "", ""
    if host.startswith("["):
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    try:
        address = str(ipaddress.ip_address(host))
        number = int(port) if port else _DNS_PORT
        if not (0 < number < 65536 and port.isascii()):
            raise ValueError
    except ValueError:
        raise OptionError("nameservers", text, _ALLOWED_NAMESERVER) from None
    return address, number


def _domain(text: str) -> str:
    """Read the name of a domain; ``.`` is all of them.

    :raises OptionError: it is none
    """
    if text.strip() == _ROOT:
        return _ROOT
    try:
        found = ServerURL.parse(f"ldap+srv://{text.strip().lstrip('.')}")
        if found.host == found.domain:
            return found.domain
    except OptionError:
        pass
    raise OptionError("srv_domains", text, "the name of a domain, or . for any")

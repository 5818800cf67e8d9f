"""Reads the URLs of directory servers: ``ldap://``, ``ldaps://`` and ``ldapi://`` (RFC 4516), and
``ldap+srv://`` and ``ldaps+srv://``, of a domain whose SRV records name them (RFC 2782)."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass

from keyfront.errors import OptionError

_PORTS = {"ldap": 389, "ldaps": 636}
_ALLOWED = (
    "ldap://HOST, ldap://HOST:PORT, ldaps://HOST, ldaps://HOST:PORT, ldap+srv://DOMAIN, "
    "ldaps+srv://DOMAIN or ldapi://%2Fpath%2Fof%2Fsocket, and nothing after it"
)
_ALLOWED_SRV = (
    "ldap+srv://DOMAIN or ldaps+srv://DOMAIN, the name of a domain without a port, which its SRV "
    "records have, or ldaps+srv://SITE._sites.DOMAIN"
)
_SRV = "+srv"
_AUTHORITY = re.compile(r"(?:\[([^]]+)\]|([^][:/?#]+))(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
# Of a name in DNS, less what is put before a domain to ask for its servers.
_LONGEST_DOMAIN = 253 - len("_ldaps._tcp.")
# sockaddr_un of Linux
_LONGEST_PATH = 107


@dataclass(frozen=True, slots=True)
class ServerURL:
    """The URL of one server, or of a domain whose servers are looked up.

    :ivar scheme: ``ldap``, ``ldaps`` (TLS from the first byte) or ``ldapi`` (a local socket)
    :ivar host: a name or an address without brackets; the path of the socket for ``ldapi``; with
        ``srv`` what follows ``_ldap._tcp.`` in the name of the records
    :ivar port: 0 for ``ldapi``, and with ``srv``
    :ivar text: the URL with its port, for messages
    :ivar srv: true if it is a domain's: nobody can connect to it, but to whom its records name
    """

    scheme: str
    host: str
    port: int
    text: str
    srv: bool = False

    @classmethod
    def parse(cls, text: str, option: str = "url") -> ServerURL:
        """Read a URL.

        A base DN, attributes or a filter after the host are refused, as they would be ignored.

        :param option: name of the option that it was written into, for the error
        :raises OptionError: it is no such URL
        """
        scheme, _, rest = text.strip().partition("://")
        scheme = scheme.lower()
        rest = rest.removesuffix("/")
        if "@" in text:
            # what is before it may be a password
            raise OptionError(option, "...@...", _ALLOWED)
        if scheme.endswith(_SRV):
            error = OptionError(option, text, _ALLOWED_SRV)
            return cls._of_domain(scheme.removesuffix(_SRV), rest, error)
        if scheme == "ldapi" and (path := _path(rest)):
            quoted = urllib.parse.quote(path, safe="", errors="surrogateescape")
            return cls(scheme, path, 0, f"ldapi://{quoted}")
        found = _AUTHORITY.fullmatch(rest) if scheme in _PORTS else None
        if found:
            host = _address(found[1]) if found[1] else _name(found[2])
            port = int(found[3]) if found[3] else _PORTS[scheme]
            if host and 0 < port < 65536:
                shown = f"[{host}]" if found[1] else host
                return cls(scheme, host, port, f"{scheme}://{shown}:{port}")
        raise OptionError(option, text, _ALLOWED)

    @classmethod
    def _of_domain(cls, scheme: str, rest: str, error: OptionError) -> ServerURL:
        name = _name(rest).rstrip(".").lower()
        made = cls(scheme, name, 0, f"{scheme}{_SRV}://{name}", srv=True)
        numeric = name.replace(".", "").isdigit()
        if scheme not in _PORTS or not 0 < len(name) <= _LONGEST_DOMAIN or numeric:
            raise error
        if not made.domain:
            raise error
        return made

    @classmethod
    def of_target(cls, scheme: str, host: str, port: int) -> ServerURL | None:
        """Return the URL of a server that an SRV record names; ``None`` if its name is none.

        :param scheme: ``ldap`` or ``ldaps``
        :param host: the record's target
        :param port: 1 to 65535
        """
        name = host.rstrip(".").lower()
        if not _NAME.fullmatch(name):
            return None
        return cls(scheme, name, port, f"{scheme}://{name}:{port}")

    @property
    def domain(self) -> str:
        """The domain that SRV records are of: what follows the last label with an underscore."""
        labels = self.host.split(".")
        marked = [place for place, label in enumerate(labels) if label.startswith("_")]
        return ".".join(labels[marked[-1] + 1 :] if marked else labels)

    @property
    def address(self) -> tuple[str, int] | str:
        """Host and port, or the path of a local socket."""
        return self.host if self.scheme == "ldapi" else (self.host, self.port)

    @property
    def tls_name(self) -> str:
        """The name that the server's certificate must be for: without the interface of a link-local
        address, and without the dot that ends an absolute name."""
        return self.host.partition("%")[0].rstrip(".")

    @property
    def is_in_the_clear(self) -> bool:
        """True if what is sent there without StartTLS can be read on the way to another machine."""
        here = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return self.scheme == "ldap" and not here

    def __str__(self) -> str:
        return self.text


def _path(quoted: str) -> str:
    """Return the path of a local socket; empty if it is none."""
    path = urllib.parse.unquote(quoted, errors="surrogateescape")
    size = len(path.encode("utf-8", "surrogateescape"))
    fits = path.startswith("/") and "\0" not in path and size <= _LONGEST_PATH
    return path if fits and "/" not in quoted else ""


def _address(text: str) -> str:
    """Return an IPv6 address, with its interface if given (RFC 6874); empty if it is none."""
    try:
        return str(ipaddress.IPv6Address(text.replace("%25", "%")))
    except ValueError:
        return ""


def _name(text: str) -> str:
    """Return a name or an IPv4 address in ASCII; empty if it is none."""
    try:
        name = text.encode("idna").decode("ascii")
    except UnicodeError:
        return ""
    return name if _NAME.fullmatch(name) else ""

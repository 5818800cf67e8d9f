"""Reads the URLs of directory servers: ``ldap://``, ``ldaps://`` and ``ldapi://`` (RFC 4516)."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass

from keyfront.errors import OptionError

_PORTS = {"ldap": 389, "ldaps": 636}
_ALLOWED = (
    "ldap://HOST, ldap://HOST:PORT, ldaps://HOST, ldaps://HOST:PORT or "
    "ldapi://%2Fpath%2Fof%2Fsocket, and nothing after it"
)
_AUTHORITY = re.compile(r"(?:\[([^]]+)\]|([^][:/?#]+))(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
# sockaddr_un of Linux
_LONGEST_PATH = 107


@dataclass(frozen=True, slots=True)
class ServerURL:
    """The URL of one server.

    :ivar scheme: ``ldap``, ``ldaps`` (TLS from the first byte) or ``ldapi`` (a local socket)
    :ivar host: a name or an address without brackets; the path of the socket for ``ldapi``
    :ivar port: 0 for ``ldapi``
    :ivar text: the URL with its port, for messages
    """

    scheme: str
    host: str
    port: int
    text: str

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

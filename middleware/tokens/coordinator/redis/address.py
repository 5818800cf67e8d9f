"""The address of a Redis, read from the options that name it; shown without its password."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from keyfront.common import unix_sockets
from keyfront.errors import OptionError

_PORT = 6379
_SENTINEL_PORT = 26379

_FILES = ("ca_file", "cert_file", "key_file")

_ALLOWED = (
    "redis://[user:password@]host[:port][/db], the same with rediss:// for TLS, or "
    "unix://[user:password@]/path[?db=n]; several hosts, divided by commas, only with "
    "coordinator_sentinel_master"
)


@dataclass(frozen=True)
class Address:
    """The address of a Redis, or of the sentinels that know its master."""

    #: Hosts and ports: of the server, or of all sentinels.
    hosts: tuple[tuple[str, int], ...]
    #: The path of its unix socket, if it is reached by one.
    path: str = ""
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    #: The name of the master, where ``hosts`` are sentinels.
    master: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Address:
        """Return the address that the options ``coordinator…`` name.

        :param values: the values by name of the options
            :data:`~keyfront.middleware.tokens.options.COORDINATOR`
        :raises OptionError: a value is no such URL or does not go with another one, or a file
            cannot be read
        """
        master = values["coordinator_sentinel_master"] or ""
        # What is wrong in it is not repeated: a password may be anywhere.
        wrong = OptionError("coordinator", "(not shown)", _ALLOWED)
        try:
            parts, place = _split(values["coordinator"])
            hosts, path, database = _where(parts, place, _SENTINEL_PORT if master else _PORT)
        except ValueError:
            raise wrong from None
        if len(hosts) > 1 and not master:
            raise wrong
        if path and master:
            raise wrong
        unix_sockets.check("coordinator", path)
        user, password = _who(place)
        files = {name: values[f"coordinator_{name}"] or "" for name in _FILES}
        for name, file in files.items():
            if file and parts.scheme != "rediss":
                raise OptionError(f"coordinator_{name}", file, "used with rediss://, or left out")
            if file and not (os.path.isfile(file) and os.access(file, os.R_OK)):
                raise OptionError(f"coordinator_{name}", file, "a file that can be read")
        if files["key_file"] and not files["cert_file"]:
            raise OptionError("coordinator_cert_file", "(not set)", "set, as its key is")
        return cls(
            hosts,
            path,
            database,
            user,
            password,
            parts.scheme == "rediss",
            **files,
            master=master,
            sentinel_user=values["coordinator_sentinel_user"] or "",
            sentinel_password=values["coordinator_sentinel_password"] or "",
        )

    def __str__(self) -> str:
        """Return the address as a URL, without user and password."""
        if self.path:
            return f"unix://{self.path}?db={self.database}"
        hosts = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts
        )
        master = f" ({self.master})" if self.master else ""
        return f"redis{'s' if self.tls else ''}://{hosts}/{self.database}{master}"


def _split(url: str) -> tuple[Any, str]:
    """Return a URL's parts, but for user and hosts, and these.

    Newer Pythons, and Debian's 3.11, refuse a list of hosts of which one is in brackets.
    """
    scheme, slashes, rest = url.partition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(scheme + slashes + rest[len(place) :]), place


def _where(parts: Any, place: str, default: int) -> tuple[tuple[tuple[str, int], ...], str, int]:
    """Return hosts, path and database of a URL.

    :raises ValueError: it is no such URL
    """
    place = place.rpartition("@")[2]
    if parts.fragment:
        raise ValueError("fragment")
    if parts.scheme == "unix":
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
        if place or not parts.path.strip("/") or query.keys() - {"db"}:
            raise ValueError("unix")
        return (), unquote(parts.path), _number(query.get("db", ["0"])[-1])
    if parts.scheme not in ("redis", "rediss") or parts.query:
        raise ValueError("scheme")
    return tuple(_host(one, default) for one in place.split(",")), "", _number(
        parts.path.strip("/") or "0"
    )


def _host(text: str, default: int) -> tuple[str, int]:
    one = urlsplit(f"//{text.strip()}")  # checks the port, and knows what [::1] is
    if not one.hostname or "@" in text:
        raise ValueError("host")
    return one.hostname, one.port or default


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("database")
    return int(text)


def _who(place: str) -> tuple[str, str]:
    user, _, password = place.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)

"""What was found on a machine: the configuration of all layers, and what is known beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .keys import KeyRepository
from .readers.files import Files, Unread
from .readers.keystone import KeystoneConf
from .readers.systemd import Unit
from .readers.uwsgi import UwsgiConf
from .settings import Directive, Malformed, Place, Setting, Settings, Tree

if TYPE_CHECKING:
    from .live import Live
    from .rendered import RenderedFile
    from .schema import Schema

# oslo.config's, oslo.db's, oslo.cache's and Keystone's defaults that checks go by.
POOL_SIZE, MAX_OVERFLOW = 5, 50
MEMCACHE_POOL = 10
LDAP_POOL, LDAP_AUTH_POOL = 10, 100
BODY_SIZE = 114688
#: uWSGI's own (core/init.c of 2.0.31).
LISTEN, BUFFER_SIZE, MERCY = 100, 4096, 60

_MEMCACHE = ("memcache", "memcached")


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the operator tells, as no file of this machine does.

    :param nodes: machines that serve the same Keystone
    :param database_connections: the database's ``max_connections``
    :param ldap_connections: what the directory allows Keystone
    :param memcached_connections: memcached's ``-c``
    """

    nodes: int = 1
    database_connections: int | None = None
    ldap_connections: int | None = None
    memcached_connections: int | None = None


@dataclass(kw_only=True)
class Found:
    """The configuration of a machine; what was not found is ``None`` or empty."""

    files: Files
    told: Told = field(default_factory=Told)
    now: float = 0.0
    keystone: KeystoneConf | None = None
    uwsgi: list[UwsgiConf] = field(default_factory=list)
    nginx: Tree | None = None
    apache: Tree | None = None
    haproxy: Tree | None = None
    units: dict[str, Unit] = field(default_factory=dict)
    sysctl: Settings | None = None
    limits: Settings | None = None
    mysql: Settings | None = None
    memcached: Settings | None = None
    redis: Settings | None = None
    #: Configuration of proxies between Keystone and its database: MaxScale's, ProxySQL's.
    database_proxies: list[Settings] = field(default_factory=list)
    keys: list[KeyRepository] = field(default_factory=list)
    #: Versions by name: uwsgi, nginx, apache, haproxy, mod_wsgi, keystone, keystonemiddleware.
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: What was built into a server, by its name, where it could be asked.
    features: dict[str, frozenset[str]] = field(default_factory=dict)
    rendered: list[RenderedFile] = field(default_factory=list)
    live: Live | None = None
    schema: Schema | None = None
    #: What the doctor said of another node, and this one's own part for comparing.
    other_node: dict[str, Any] | None = None

    def has(self, layer: str) -> bool:
        """Tell whether a layer of :data:`~.registry.LAYERS` was found."""
        keystone = self.keystone
        if layer == "systemd":
            return bool(self.units)
        if layer == "kernel":
            return self.kernel("net.core.somaxconn") is not None or self.sysctl is not None
        if layer == "files":
            return bool(self.files.read)
        if layer == "database":
            return bool(keystone and keystone.last("database", "connection"))
        if layer == "ldap":
            return bool(self.ldap)
        if layer == "memcached":
            return bool(self.memcached or (keystone and self.uses_memcached))
        if layer == "node":
            return self.other_node is not None
        return bool(getattr(self, layer))

    @property
    def malformed(self) -> list[Malformed]:
        """The files that cannot be read as what they are."""
        return self.files.malformed

    @property
    def unread(self) -> list[Unread]:
        """What could not be looked at, and why."""
        return self.files.unread

    def at_least(self, name: str, *numbers: int) -> bool | None:
        """Tell whether a version is this or a later one; ``None`` if it is not known."""
        found = self.versions.get(name)
        return None if found is None else found >= numbers

    def before(self, name: str, *numbers: int) -> bool:
        """Tell whether a version is known to be older."""
        return self.at_least(name, *numbers) is False

    def kernel(self, name: str) -> int | None:
        """Return a setting of the running kernel; ``None`` if it cannot be read."""
        path = self.files.real(f"/proc/sys/{name.replace('.', '/')}")
        try:
            return int(path.read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def unit_of(self, word: str) -> Unit | None:
        """Return the unit whose command has a word, ``uwsgi`` for example, in its program."""
        for unit in self.units.values():
            if unit.name.endswith(".service") and re.search(word, unit.command.partition(" ")[0]):
                return unit
        return None

    def unit_of_uwsgi(self, conf: UwsgiConf) -> Unit | None:
        """Return the unit that starts a uWSGI, or the only one that starts any."""
        return self.units.get(conf.unit) if conf.unit else None

    @property
    def uses_memcached(self) -> bool:
        """Whether Keystone's caches lie in memcached."""
        conf = self.keystone
        return bool(
            conf
            and conf.on("cache", "enabled", True)
            and any(word in conf.text("cache", "backend") for word in _MEMCACHE)
        )

    @property
    def ldap(self) -> list[KeystoneConf]:
        """The configurations of domains whose users are in a directory."""
        return [conf for conf in self.identities if self._is_ldap(conf)]

    identities: list[KeystoneConf] = field(default_factory=list)

    @staticmethod
    def _is_ldap(conf: KeystoneConf) -> bool:
        return "ldap" in conf.text("identity", "driver")

    @property
    def workers(self) -> tuple[int, int]:
        """The processes and threads that serve Keystone on this node: uWSGI's or mod_wsgi's."""
        if self.uwsgi:
            return max((conf.processes, conf.threads) for conf in self.uwsgi)
        if self.apache:
            daemons = self.daemons
            if daemons:
                return max(
                    (int(x.get("processes", 1)), int(x.get("threads", 15))) for _, x in daemons
                )
        raise LookupError

    @property
    def daemons(self) -> list[tuple[Directive, dict[str, str]]]:
        """The daemons of mod_wsgi with their options."""
        found = []
        for directive in self.apache.all("wsgidaemonprocess") if self.apache else ():
            options = {
                name: value
                for name, _, value in (word.partition("=") for word in directive.args[1:])
            }
            for name in ("processes", "threads"):
                if not options.get(name, "1").isdigit():
                    del options[name]
            found.append((directive, options))
        return found

    @property
    def tls(self) -> Place | None:
        """Where TLS ends before Keystone; ``None`` if nothing says that it does."""
        for directive in self.nginx.all("listen") if self.nginx else ():
            if "ssl" in directive.args:
                return directive.place
        for directive in self.apache.all("sslengine") if self.apache else ():
            if directive.value.lower() == "on":
                return directive.place
        for directive in self.haproxy.all("bind") if self.haproxy else ():
            if "ssl" in directive.args:
                return directive.place
        return None

    def unix_upstreams(self) -> Iterator[tuple[str, Directive]]:
        """Give the unix sockets that nginx and Apache send requests to."""
        for directive in self.nginx.walk() if self.nginx else ():
            if directive.is_("server", "uwsgi_pass", "proxy_pass") and directive.args:
                match = re.search(r"unix:([^:;]+)", directive.args[0])
                if match and directive.inside is None:
                    yield match[1], directive
        for directive in self.apache.all("proxypass", "proxypassmatch") if self.apache else ():
            match = re.search(r"unix:([^|]+)\|", directive.value)
            if match:
                yield match[1], directive


def setting_text(found: Setting | None, default: str) -> str:
    """Return how a setting is spoken of: its value, or its default, which is said to be one."""
    return found.value if found is not None else f"{default}, the default"

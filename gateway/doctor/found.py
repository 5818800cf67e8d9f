"""The facts that were found on a machine: the configuration of all layers, and others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import routes
from .key_repositories import KeyRepository
from .readers.files import Files, Unread
from .readers.keystone import KeystoneConf
from .readers.systemd import Unit
from .readers.uwsgi import UwsgiConf
from .registry import UnknownError
from .settings import Directive, Malformed, Place, Setting, Settings, Tree, seconds

if TYPE_CHECKING:
    from .machine_state import Live
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
    """The facts that the operator gives, as no file of this machine holds them.

    :param nodes: the number of machines that serve the same Keystone
    :param database_connections: the database's ``max_connections``
    :param ldap_connections: the number of connections that the directory allows Keystone
    :param memcached_connections: memcached's ``-c``
    """

    nodes: int = 1
    database_connections: int | None = None
    ldap_connections: int | None = None
    memcached_connections: int | None = None
    #: Seconds between SIGTERM and SIGKILL that docker or Kubernetes gives a container.
    stop_seconds: int | None = None


@dataclass(frozen=True)
class Serving:
    """Processes that serve Keystone: those of one uWSGI, or of one daemon of mod_wsgi.

    :param threads: the requests that each process computes at a time
    """

    processes: int
    threads: int


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
    #: The features that were built into a server, by its name, where it could be asked.
    features: dict[str, frozenset[str]] = field(default_factory=dict)
    rendered: list[RenderedFile] = field(default_factory=list)
    live: Live | None = None
    schema: Schema | None = None
    #: The doctor's report of another node, and this one's own part for comparing.
    other_node: dict[str, Any] | None = None
    #: The limit of the memory of a control group, with the file that says so.
    memory_limit: tuple[int, Place] | None = None
    #: Layers whose files are there and may not be read, with the file.
    denied: dict[str, str] = field(default_factory=dict)
    #: Servers that nobody named, where nothing of Keystone is here: what they serve is others'.
    others: set[str] = field(default_factory=set)

    def has(self, layer: str) -> bool:
        """Return whether a layer of :data:`~.registry.LAYERS` was found."""
        keystone = self.keystone
        if layer in self.others:
            return False
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
        if layer == "server":
            return bool(self.uwsgi or self.daemons)
        if layer == "location":
            return bool(routes.nginx_passes(self))
        if layer == "mod_wsgi":
            return bool(routes.aliases(self))
        if layer == "pass":
            return bool(routes.apache_passes(self))
        if layer == "backend":
            return bool(routes.backends(self))
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
        """The paths that could not be looked at, and why."""
        return self.files.unread

    def at_least(self, name: str, *numbers: int) -> bool | None:
        """Return whether a version is this or a later one; ``None`` if it is not known."""
        found = self.versions.get(name)
        return None if found is None else found >= numbers

    def before(self, name: str, *numbers: int) -> bool:
        """Return whether a version is known to be older."""
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
        """True if Keystone's caches lie in memcached."""
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
    def serving(self) -> list[Serving]:
        """All that serves Keystone on this node: uWSGI's processes, or else mod_wsgi's.

        Of several files of uWSGI those count that a unit starts, if one is started so.
        """
        started = [conf for conf in self.uwsgi if conf.unit]
        if self.uwsgi:
            return [Serving(conf.processes, conf.threads) for conf in started or self.uwsgi]
        return [
            Serving(int(x.get("processes", 1)), int(x.get("threads", 15))) for _, x in self.daemons
        ]

    @property
    def workers(self) -> tuple[int, int]:
        """All processes that serve Keystone on this node, and the most threads that one has.

        :raises LookupError: neither uWSGI's nor mod_wsgi's configuration was found
        """
        serving = self.serving
        if not serving:
            raise LookupError
        return sum(x.processes for x in serving), max(x.threads for x in serving)

    @property
    def daemons(self) -> list[tuple[Directive, dict[str, str]]]:
        """The daemons of mod_wsgi that Keystone runs in, with their options."""
        found = []
        for directive in routes.daemons(self):
            options = {
                name: value
                for name, _, value in (word.partition("=") for word in directive.args[1:])
            }
            for name in ("processes", "threads"):
                if not re.fullmatch(r"\d{1,6}", options.get(name, "1")):
                    del options[name]
            found.append((directive, options))
        return found

    @property
    def tls(self) -> Place | None:
        """The place of a setting by which TLS ends before Keystone; ``None`` without one."""
        said = [x for x in (self.nginx.all("listen") if self.nginx else ()) if "ssl" in x.args]
        engines = self.apache.all("sslengine") if self.apache else ()
        said += [x for x in engines if x.value.lower() == "on"]
        said += [x for x in (self.haproxy.all("bind") if self.haproxy else ()) if "ssl" in x.args]
        return next((x.place for x in said if routes.concerns(self, x)), None)

    def unix_upstreams(self) -> Iterator[tuple[str, Directive]]:
        """Give the unix sockets that nginx and Apache send Keystone's requests to."""
        seen = set()
        for directive in routes.nginx_passes(self):
            assert self.nginx is not None
            for target, named in routes.nginx_targets(self.nginx, directive):
                match = re.match(r"unix:([^:;]+)", target)
                if match and named.place not in seen:
                    seen.add(named.place)
                    yield match[1], named
        for directive in routes.apache_passes(self):
            assert self.apache is not None
            for target in routes.apache_targets(self.apache, directive):
                if target.startswith("/"):
                    yield target, directive

    def stop_of(self, conf: UwsgiConf) -> tuple[float, Place, str] | None:
        """Return the time that a uWSGI is given to end: seconds, the place and the words for it.

        A container's engine, or else systemd; ``None`` where nothing says so.
        """
        for unit in self.units.values():
            if not re.search(r"\b(docker|podman)\b", unit.command) or not routes.is_keystones(
                f"{unit.name} {unit.command}"
            ):
                continue
            for known in reversed(unit.service.all("ExecStop", "ExecStart")):
                match = re.search(
                    r"(?:\s-t|--time|--timeout|--stop-timeout)[ =]?(\d{1,6})\b", known.value
                )
                if match:
                    engine = "podman" if "podman" in known.value else "docker"
                    return float(match[1]), known.place, f"{engine} {match[0].strip()}"
        if self.told.stop_seconds is not None:
            return float(self.told.stop_seconds), Place(conf.path), "--stop-seconds"
        owner = self.unit_of_uwsgi(conf)
        said = owner.service.last("TimeoutStopSec", "TimeoutSec") if owner else None
        spent = seconds(said.value) if said else None
        return (spent, said.place, said.name) if said and spent is not None else None

    @property
    def in_container(self) -> bool:
        """True if the files are those of a container, which has no systemd."""
        marks = ("/.dockerenv", "/run/.containerenv", "/run/secrets/kubernetes.io", "/kolla")
        return not self.units and any(self.files.exists(x) for x in marks)

    @property
    def debian(self) -> bool:
        """True if packages are apt's."""
        apache = self.apache.path if self.apache else ""
        return not apache.startswith("/etc/httpd") and not self.files.exists("/etc/redhat-release")

    def is_of_a_container(self, path: str) -> bool:
        """Return whether a file lies on the host of a container, and names paths in there."""
        return path.startswith("/etc/kolla/")

    def version(self, name: str) -> tuple[int, ...]:
        """Return a version.

        :raises UnknownError: it is not known
        """
        found = self.versions.get(name)
        if found is None:
            raise UnknownError(f"the version of {name}: --assume {name}=VERSION")
        return found


def setting_text(found: Setting | None, default: str) -> str:
    """Return a setting's value in words: the one that is set, or its default, called so."""
    return found.value if found is not None else f"{default}, the default"

"""The usual places of every layer's configuration, and the reading of all of them.

Known are Debian and its kin, Red Hat's RDO, a container of kolla and its host, OpenStack-Ansible's
venv, devstack, the folder of ``keyfront render`` and that of ``keyfront serve``.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.errors import KeyfrontError, OptionError

from ..render import versions as server_versions
from . import cgroups, key_repositories, rendered
from .found import Found, Told
from .readers import apache, haproxy, keystone, nginx, sections, systemd, uwsgi
from .readers.files import Files, Unread
from .registry import WITHIN, fault
from .routes import SERVED, names_keystone, serves_keystone
from .settings import Settings

_KEYSTONE = (
    "/etc/keystone/keystone.conf",
    "/etc/kolla/keystone/keystone.conf",
    "/usr/local/etc/keystone/keystone.conf",
)
_DIST = "/usr/share/keystone/keystone-dist.conf"
_UWSGI = (
    "/etc/keyfront/uwsgi.ini",
    "/etc/keystone/*uwsgi*.ini",
    "/etc/keystone/*uwsgi*.y*ml",
    "/etc/uwsgi/keystone*.ini",
    "/etc/uwsgi/apps-enabled/keystone*",
    "/etc/uwsgi/sites/keystone*",
    "/etc/uwsgi.d/keystone*.ini",
    "/etc/uwsgi/vassals/keystone*",
    "/etc/uwsgi-emperor/vassals/keystone*",
    "/etc/kolla/keystone/*uwsgi*.ini",
)
# What an emperor looks for in a folder.
_VASSALS = ("*.ini", "*.yml", "*.yaml", "*.json", "*.js")
_NGINX = ("/etc/nginx/nginx.conf", "/usr/local/etc/nginx/nginx.conf")
_APACHE = (
    "/etc/apache2/apache2.conf",
    "/etc/httpd/conf/httpd.conf",
    # Of federated logins, where uWSGI serves all others.
    "/etc/kolla/keystone-httpd/httpd-keystone.conf",
)
_HAPROXY = ("/etc/haproxy/haproxy.cfg", "/etc/kolla/haproxy/haproxy.cfg")
_MYSQL = ("/etc/mysql/my.cnf", "/etc/my.cnf", "/etc/kolla/mariadb/galera.cnf")
_MEMCACHED = ("/etc/memcached.conf", "/etc/sysconfig/memcached")
_REDIS = ("/etc/redis/redis.conf", "/etc/redis.conf", "/etc/kolla/redis/redis.conf")
_DATABASE_PROXIES = ("/etc/maxscale.cnf", "/etc/proxysql.cnf", "/etc/kolla/proxysql/proxysql.cnf")
_SYSCTL = (
    "/usr/lib/sysctl.d/*.conf",
    "/etc/sysctl.d/*.conf",
    "/run/sysctl.d/*.conf",
    "/etc/sysctl.conf",
)
_UNITS = re.compile(
    r"(keyfront-\w+|(openstack-|devstack@|kolla-|container-|podman-|docker-)?keystone[\w@.-]*|"
    r"uwsgi[\w@.-]*|nginx|apache2|httpd|haproxy|memcached)\.(service|socket)"
)
_ENVIRONMENTS = (
    "/var/lib/kolla/venv",
    "/openstack/venvs/keystone*",
    "/opt/stack/data/venv",
    "/opt/keyfront",
    "/var/lib/openstack",
    "/usr",
    "/usr/local",
)
_PACKAGES = ("keystone", "keystonemiddleware", "keyfront", "pymysql")
_VERSION = re.compile(r"(\d+(?:\.\d+)+)")


@dataclass(frozen=True, kw_only=True)
class Given:
    """The places that the operator names; what is not named is looked for.

    :param assumed: versions of servers and of Keystone by name
    """

    keystone: tuple[str, ...] = ()
    uwsgi: tuple[str, ...] = ()
    nginx: str = ""
    apache: str = ""
    haproxy: tuple[str, ...] = ()
    systemd: tuple[str, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)


def look(
    root: Path = Path("/"),
    given: Given | None = None,
    told: Told | None = None,
    now: float | None = None,
) -> Found:
    """Read the configuration of all layers.

    :param root: the root of the files: ``/``, or a folder with those of a container or of another
        machine
    :param now: the time, in seconds since 1970, that ages are counted to
    :raises OptionError: a file that was named cannot be read
    """
    given = given or Given()
    found = Found(files=Files(root), told=told or Told(), now=time.time() if now is None else now)
    for what, step in (
        ("units of systemd", _units),
        ("uWSGI", _uwsgi),
        ("Keystone", _keystone),
        ("web servers", _servers),
        ("what lies around the servers", _surroundings),
        ("key repositories", _repositories),
        ("versions", _versions),
        ("files of keyfront render", _rendered),
    ):
        try:
            step(found, given)
        except KeyfrontError:
            raise
        # Files have what nobody thought of. The other layers are read all the same.
        except Exception as error:
            said = f"it could not be read, which is a fault of keyfront: {fault(error)}"
            found.files.unread.append(Unread(what, said))
    return found


def _repositories(found: Found, given: Given) -> None:
    for section, path in (
        ("fernet_tokens", "/etc/keystone/fernet-keys"),
        ("credential", "/etc/keystone/credential-keys"),
    ):
        if found.keystone is not None:
            path = found.keystone.text(section, "key_repository", path).rstrip("/")
            repository = key_repositories.look(found.files, section, path)
            if repository is not None:
                found.keys.append(repository)


def _rendered(found: Found, given: Given) -> None:
    known = found.files.read + found.files.glob(
        "/etc/keyfront/*",
        "/etc/keyfront/system/etc/**/*",
        "/etc/tmpfiles.d/keyfront*",
        "/etc/sysusers.d/keyfront*",
        "/etc/logrotate.d/keyfront*",
    )
    found.rendered = rendered.look(found.files, list(dict.fromkeys(known)))


def _denied(found: Found, layer: str, path: str) -> None:
    """Note that a layer is there, and may not be read."""
    if any(x.what == path and x.denied for x in found.unread):
        found.denied[layer] = path


def _first(found: Found, *patterns: str) -> str:
    return next((path for path in found.files.glob(*patterns)), "")


def _named(found: Found, option: str, path: str) -> str:
    """Return a path that was named, absolute.

    :raises OptionError: it cannot be read
    """
    if found.files.root == Path("/"):
        path = str(Path(path).absolute())
    try:
        with found.files.resolved(path).open("rb"):
            return path
    except OSError as error:
        raise OptionError(option, path, f"a file that can be read ({error.strerror})") from None


def _units(found: Found, given: Given) -> None:
    for name in given.systemd:
        if "/" in name:
            unit = systemd.read_file(found.files, _named(found, "--systemd", name))
        else:
            unit = systemd.read(found.files, name if "." in name else f"{name}.service")
        if unit is None:
            raise OptionError("--systemd", name, "a unit of this machine, or a file with one")
        found.units[unit.name] = unit
    if given.systemd:
        return
    names: dict[str, None] = {}
    for folder in systemd.FOLDERS:
        for path in found.files.glob(f"{folder}/*.service", f"{folder}/*.socket"):
            names[path.rpartition("/")[2]] = None
        for path in found.files.glob(f"{folder}/*.service.d", f"{folder}/*.socket.d"):
            names[path.rpartition("/")[2].removesuffix(".d")] = None
    for name in sorted(names):
        if _UNITS.fullmatch(name) and "@." not in name:
            unit = systemd.read(found.files, name)
            if unit is not None:
                found.units[name] = unit


def _uwsgi(found: Found, given: Given) -> None:
    paths = [_named(found, "--uwsgi", path) for path in given.uwsgi]
    started: dict[str, tuple[str, list[str]]] = {}
    for unit in found.units.values():
        command = uwsgi.of_command(unit.command)
        if command is not None:
            started.setdefault(command[0], (unit.name, command[1]))
        elif unit.command.startswith("/etc/init.d/"):
            # Debian's unit calls the script that starts uWSGI.
            script = found.files.text(unit.command.split()[0], wanted=False) or ""
            for path in re.findall(r"^UWSGI_INI_PATH=(/\S+)$", script, re.MULTILINE):
                started.setdefault(path, (unit.name, []))
    vassals: set[str] = set()
    if not given.uwsgi:
        for path, name in _vassals(found, started):
            vassals.add(path)
            started[path] = (name, [])
        paths = [*started, *found.files.glob(*_UWSGI)]
    known: set[Path] = set()
    for path in dict.fromkeys(paths):
        real = found.files.resolved(path.partition(":")[0])
        if real in known:
            continue  # a link to it, as in apps-enabled
        known.add(real)
        name, words = started.get(path, ("", []))
        conf = uwsgi.read(found.files, path, words)
        if conf is None:
            _denied(found, "uwsgi", path)
            continue
        conf.unit = name
        conf.vassal = path in vassals or re.search(r"/(vassals|uwsgi\.d)/", path) is not None
        if not given.uwsgi and not serves_keystone(conf):
            continue
        if conf.settings.last("emperor") and not conf.settings.last(*SERVED):
            continue  # it serves nothing by itself
        alone = [unit.name for unit in found.units.values() if uwsgi.of_command(unit.command)]
        conf.unit = name or (alone[0] if given.uwsgi and len(alone) == 1 else "")
        for setting in conf.settings.all("env"):
            variable, _, value = setting.value.partition("=")
            conf.environment[variable] = value
        found.uwsgi.append(conf)
    surely = [conf for conf in found.uwsgi if names_keystone(conf)]
    if surely and not given.uwsgi:
        # Beside Keystone's, one that serves something else is somebody's own.
        found.uwsgi = [x for x in found.uwsgi if x in surely or not x.settings.last(*SERVED)]


def _vassals(
    found: Found, started: Mapping[str, tuple[str, list[str]]]
) -> list[tuple[str, str]]:
    """Return the files that an emperor starts a uWSGI for, each with the emperor's unit."""
    emperors = []
    for unit in found.units.values():
        if "uwsgi" in unit.command.partition(" ")[0]:
            named = re.findall(r"--emperor[ =](\S+)", unit.command)
            emperors += [(value, unit.name) for value in named]
    for path, (name, words) in started.items():
        conf = uwsgi.read(found.files, path, words)
        for setting in conf.settings.all("emperor") if conf else ():
            emperors.append((setting.value, name))
    vassals = []
    for value, name in emperors:
        folder = value.rstrip("/")
        patterns = [value] if re.search(r"[*?\[]", value) else [f"{folder}/{x}" for x in _VASSALS]
        vassals += [(path, name) for path in found.files.glob(*patterns)]
    return vassals


def _keystone(found: Found, given: Given) -> None:
    main = ""
    paths = [_named(found, "--keystone", path) for path in given.keystone]
    if not paths:
        folder = next(
            (x for conf in found.uwsgi if (x := conf.environment.get("OS_KEYSTONE_CONFIG_DIR"))), ""
        )
        candidates = [f"{folder.rstrip('/')}/keystone.conf"] if folder else []
        main = next((x for x in (*candidates, *_KEYSTONE) if found.files.exists(x)), "")
        if main:
            paths = [*found.files.glob(_DIST), main]
            paths += found.files.glob(f"{main.rpartition('/')[0]}/keystone.conf.d/*.conf")
            paths += found.files.glob("/etc/keyfront/keystone.conf")
            # oslo.config reads the operator's last but for the snippets; lines go into the former
            if paths[0] == _DIST:
                paths[0], paths[1] = paths[1], paths[0]
    found.keystone = keystone.read(found.files, paths) if paths else None
    operators = main or (paths[0] if paths else "")
    if operators and (found.keystone is None or operators not in found.keystone.paths):
        _denied(found, "keystone", operators)
        found.keystone = None
    if found.keystone is None:
        return
    if _DIST in found.keystone.paths:
        # Values of the distribution count only where the operator's file has none.
        for settings in found.keystone.settings.values():
            settings.sort(key=lambda setting: setting.place.path != _DIST)
    found.identities.append(found.keystone)
    if found.keystone.on("identity", "domain_specific_drivers_enabled"):
        folder = found.keystone.text("identity", "domain_config_dir", "/etc/keystone/domains")
        for path in found.files.glob(f"{folder.rstrip('/')}/keystone.*.conf"):
            domain = keystone.read(found.files, [path])
            if domain is not None:
                found.identities.append(domain)


def _servers(found: Found, given: Given) -> None:
    """Read the web servers and balancers."""
    files = found.files
    faults = len(files.unread) + len(files.malformed)
    path = (
        _named(found, "--nginx", given.nginx) if given.nginx else _configured(found, "nginx", "-c")
    )
    path = path or _first(found, *_NGINX)
    if path:
        found.nginx = nginx.read(files, path)
        if found.nginx is None:
            _denied(found, "nginx", path)
    path = (
        _named(found, "--apache", given.apache)
        if given.apache
        else _configured(found, "apache2|httpd", "-f") or _first(found, *_APACHE)
    )
    if path:
        found.apache = apache.read(files, path)
        if found.apache is None:
            _denied(found, "apache", path)
    paths = [_named(found, "--haproxy", one) for one in given.haproxy]
    if not paths:
        main = _configured(found, "haproxy", "-f") or _first(
            found, "/etc/keyfront/haproxy.cfg", *_HAPROXY
        )
        if main:
            folder = main.rpartition("/")[0]
            paths = [main, *files.glob(f"{folder}/services.d/*.cfg", f"{folder}/conf.d/*.cfg")]
    if paths:
        found.haproxy = haproxy.read(files, paths)
        if found.haproxy is None:
            _denied(found, "haproxy", paths[0])
    # With a Keystone here, a server may lead to it in a way that is not seen, or that could not be
    # read; with none, it is others'.
    parts = ("keystone", "uwsgi", *WITHIN)
    if len(files.unread) + len(files.malformed) == faults and not any(map(found.has, parts)):
        named = {"nginx": given.nginx, "apache": given.apache, "haproxy": given.haproxy}
        found.others = {name for name in named if getattr(found, name) and not named[name]}


def _configured(found: Found, program: str, option: str) -> str:
    """Return the file that a unit starts a server with, if it names one that is there."""
    unit = found.unit_of(program)
    words = unit.command.split() if unit else []
    for word, following in itertools.pairwise(words):
        if word == option and following.startswith("/") and found.files.exists(following):
            return following
    return ""


def _surroundings(found: Found, given: Given) -> None:
    """Read the surroundings of the servers: the kernel's settings, database, caches."""
    files = found.files
    paths = files.glob(*_SYSCTL)
    if paths:
        found.sysctl = Settings(paths[-1])
        for path in paths:
            text = files.text(path)
            for _, setting in sections.lines(files, path, text or "", bare=True):
                name = setting.name.lstrip("-").replace("/", ".")
                found.sysctl.settings.append(type(setting)(name, setting.value, setting.place))
    limits = files.glob("/etc/security/limits.conf", "/etc/security/limits.d/*.conf")
    if limits:
        found.limits = Settings(limits[0])
        for path in limits:
            one = sections.words(files, path)
            found.limits.settings += one.settings if one else []
    found.memory_limit = cgroups.memory_limit(files)
    path = _first(found, *_MYSQL)
    if path:
        found.mysql = sections.mysql(files, path)
    path = _first(found, *_MEMCACHED)
    if path:
        found.memcached = sections.words(files, path)
    path = _first(found, *_REDIS)
    if path:
        found.redis = sections.words(files, path)
    for path in files.glob(*_DATABASE_PROXIES):
        if path.endswith("maxscale.cnf"):
            proxy = sections.read(files, path)
        else:
            proxy = sections.words(files, path)
        if proxy is not None:
            found.database_proxies.append(proxy)


def _versions(found: Found, given: Given) -> None:
    folders = [x.rstrip("/") for conf in found.uwsgi for x in _environments(conf.settings)]
    folders += [options["python-home"] for _, options in found.daemons if "python-home" in options]
    folders += [
        unit.command.partition("/bin/")[0]
        for unit in found.units.values()
        if re.match(r"/\S+/bin/(uwsgi|keyfront)", unit.command)
    ]
    folders += found.files.glob(*_ENVIRONMENTS)
    if found.files.root == Path("/"):
        folders.append(sys.prefix)
        virtualenv = Path(
            next((x for x in folders if found.files.exists(f"{x}/bin/uwsgi")), sys.prefix)
        )
        for name, version in server_versions.find(virtualenv).by_name.items():
            if version.how == "found":
                found.versions[name] = version.numbers
                found.features[name] = version.features
    for name in _PACKAGES:
        for folder in dict.fromkeys(folders):
            for info in found.files.glob(
                *(
                    f"{folder}/lib{x}/python3*/{y}-packages/{name}-*{z}-info"
                    for x in ("", "64")
                    for y in ("site", "dist")
                    for z in (".dist", ".egg")
                )
            ):
                match = _VERSION.search(info.rpartition("/")[2])
                if match and name not in found.versions:
                    found.versions[name] = _numbers(match[1])
    for name, text in given.assumed.items():
        found.versions[name] = _numbers(text)


def _environments(settings: Settings) -> list[str]:
    return [setting.value for setting in settings.all("virtualenv")]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

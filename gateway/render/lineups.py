"""The line-ups of ``keyfront render``: which files each takes, and where they go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keyfront import __version__
from keyfront.common.programs import apache_modules
from keyfront.errors import MissingPartError, OptionError

from .. import login_limit
from .settings import Settings
from .versions import Versions
from .writer import SYSTEM, File, fill, with_header

if TYPE_CHECKING:
    from ..plan import Plan

#: The names of ``--server``.
SERVERS = (
    "nginx+uwsgi",
    "nginx+uwsgi-tcp",
    "apache+uwsgi",
    "mod_wsgi",
    "prefork+mod_wsgi",
    "uwsgi",
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A file that some line-ups take.

    :param path: below the folder
    :param source: the template below ``keyfront/deploy``
    :param title: the first line of its header
    :param when: tells whether a deployment takes it
    :param asks: the servers whose versions it depends on
    """

    path: str
    source: str
    title: str
    when: Callable[[Settings], bool]
    asks: tuple[str, ...] = ()


def _has_uwsgi(settings: Settings) -> bool:
    """Return whether uWSGI serves the application."""
    return not settings.server.endswith("mod_wsgi")


def _has_nginx(settings: Settings) -> bool:
    """Return whether nginx is in front."""
    return settings.server.startswith("nginx+")


def _has_apache(settings: Settings) -> bool:
    """Return whether Apache is in front, or serves the application itself."""
    return settings.server in ("apache+uwsgi", "mod_wsgi", "prefork+mod_wsgi")


def _has_mod_wsgi(settings: Settings) -> bool:
    """Return whether Apache serves the application itself."""
    return settings.server.endswith("mod_wsgi")


def _has_socket_unit(settings: Settings) -> bool:
    """Return whether systemd holds uWSGI's socket, so that a restart refuses nobody."""
    return _has_uwsgi(settings) and settings.server != "uwsgi"


def _searches_snippets(settings: Settings) -> bool:
    """Return whether Keystone looks for ``keystone.conf.d`` where its configuration is."""
    return settings.config == Path("/etc/keystone")


def always(_: Settings) -> bool:
    """Return true: every line-up takes the file."""
    return True


def _is(server: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.server == server


TEMPLATES = (
    Template(
        path="uwsgi.ini",
        source="production/uwsgi.ini.j2",
        title="uWSGI: the processes that run the application.",
        when=_has_uwsgi,
        asks=("uwsgi",),
    ),
    Template(
        path="nginx.conf",
        source="production/nginx.conf.j2",
        title="nginx in front of uWSGI.",
        when=_has_nginx,
        asks=("nginx",),
    ),
    *(
        Template(
            path="apache.conf",
            source=f"production/apache/{source}.conf.j2",
            title=title,
            when=_is(server),
            asks=asks,
        )
        for server, source, title, asks in (
            (
                "apache+uwsgi", "proxy_uwsgi", "Apache (event, mod_proxy_uwsgi) in front of uWSGI.",
                ("apache",),
            ),
            ("mod_wsgi", "mod_wsgi", "Apache (event, mod_wsgi).", ("apache", "mod_wsgi")),
            (
                "prefork+mod_wsgi", "prefork", "Apache (prefork, mod_wsgi).",
                ("apache", "mod_wsgi"),
            ),
        )
    ),
    Template(
        path="keyfront.wsgi",
        source="production/apache/keyfront.wsgi.j2",
        title="What mod_wsgi serves.",
        when=_has_mod_wsgi,
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-apache.service",
        source="production/systemd/keyfront-apache.service.j2",
        title="systemd: Apache.",
        when=_has_apache,
        asks=("apache",),
    ),
    Template(
        path="haproxy.cfg",
        source="production/haproxy/haproxy.cfg.j2",
        title="HAProxy in front of the nodes.",
        when=lambda settings: bool(settings.haproxy),
        asks=("haproxy",),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/haproxy.service.d/keyfront.conf",
        source="production/systemd/haproxy.service.conf.j2",
        title="systemd: HAProxy.",
        when=lambda settings: bool(settings.haproxy),
    ),
    Template(
        path="keystone.ini",
        source="paste/keystone.ini",
        title="The filters before Keystone (paste).",
        when=always,
    ),
    Template(
        path="service-paste.ini",
        source="production/service-paste.ini.j2",
        title="Filters for other services (paste).",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/keystone/keystone.conf.d/keyfront.conf",
        source="production/keystone.conf.j2",
        title="Keystone: pools and caches.",
        when=_searches_snippets,
    ),
    Template(
        path="keystone.conf",
        source="production/keystone.conf.j2",
        title="Keystone: pools and caches.",
        when=lambda settings: not _searches_snippets(settings),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-uwsgi.service",
        source="production/systemd/keyfront-uwsgi.service.j2",
        title="systemd: uWSGI.",
        when=_has_uwsgi,
        asks=("uwsgi",),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-uwsgi.socket",
        source="production/systemd/keyfront-uwsgi.socket.j2",
        title="systemd: uWSGI's socket.",
        when=_has_socket_unit,
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-metrics.service",
        source="production/systemd/keyfront-metrics.service.j2",
        title="systemd: what this node counts, for Prometheus.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/nginx.service.d/keyfront.conf",
        source="production/systemd/nginx.service.conf.j2",
        title="systemd: nginx.",
        when=_has_nginx,
        asks=("nginx",),
    ),
    Template(
        path=f"{SYSTEM}etc/sysctl.d/60-keyfront.conf",
        source="production/sysctl.conf.j2",
        title="The kernel's queues.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/sysusers.d/keyfront.conf",
        source="production/sysusers.conf.j2",
        title="The user that runs the application.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/tmpfiles.d/keyfront.conf",
        source="production/tmpfiles.conf.j2",
        title="Folders that the servers write to.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/logrotate.d/keyfront",
        source="production/logrotate.j2",
        title="Logs: kept for two weeks.",
        when=always,
    ),
)
#: Every path that some line-up has, below the folder.
PATHS = tuple(template.path for template in TEMPLATES)


def render(plan: Plan, settings: Settings, versions: Versions) -> list[File]:
    """Return the files of a line-up, in a fixed order.

    :param plan: the numbers of the node
    :param settings: the operator's settings, with the line-up's name
    :param versions: the versions of the servers that the files are for
    :raises OptionError: there is no such line-up, or it cannot do what the settings ask for
    """
    check(settings, plan)
    made = []
    for template in TEMPLATES:
        if not template.when(settings):
            continue
        body = fill(
            template.source,
            plan.numbers,
            plan=plan,
            settings=settings,
            versions=versions,
            version=__version__,
            socket_unit=_has_socket_unit(settings),
            alone=settings.server == "uwsgi",
            # what is under way now is answered by then
            retry_after=math.ceil(plan.workload.latency),
            login_group=login_limit.GROUP,
            login_paths="|".join(end.removeprefix("/") for end in login_limit.ENDS),
            **_apache(versions),
            in_home=_below(settings, "/home", "/root", "/run/user"),
            in_tmp=_below(settings, "/tmp", "/var/tmp"),
        )
        asked = "; ".join(str(versions[name]) for name in template.asks) or "any version"
        text = with_header(body, title=template.title, command=settings.command, versions=asked)
        made.append(File(path=template.path, text=text))
    return made


def check(settings: Settings, plan: Plan) -> None:
    """Check that the line-up of the settings exists and can do all that they demand.

    :param settings: the settings
    :param plan: the numbers of the node
    :raises OptionError: it does not exist, or cannot
    """
    if settings.server not in SERVERS:
        raise OptionError("--server", settings.server, f"one of {', '.join(SERVERS)}")
    if settings.server == "uwsgi" and settings.tls:
        raise OptionError(
            "--tls-certificate",
            settings.certificate,
            "left out with --server uwsgi, which reads keys as the application's user and knows "
            "no HTTP/2: take nginx+uwsgi or apache+uwsgi",
        )
    own = plan["uwsgi.login_processes"].value
    if own and settings.server == "uwsgi":
        allowed = "left out with --server uwsgi, where nobody in front tells logins apart"
        raise OptionError("--login-processes", own, allowed)
    if own and settings.login_socket == settings.socket:
        allowed = "another address or port than --upstream"
        raise OptionError("--login-upstream", settings.login_upstream, allowed)
    if own and _has_mod_wsgi(settings) and not plan["mod_wsgi.login_processes"].value:
        allowed = f"left out, or memory larger: {plan['mod_wsgi.login_processes'].source}"
        raise OptionError("--login-processes", own, allowed)


def _apache(versions: Versions) -> dict[str, str]:
    """Return the paths of Apache, its modules and mod_wsgi; Debian's if Apache is not here."""
    try:
        modules = apache_modules("mod_mpm_event.so", "apache2-bin")
    except MissingPartError:
        modules = "/usr/lib/apache2/modules"
    mod_wsgi = versions["mod_wsgi"].program
    return {
        "program": str(versions["apache"].program or "/usr/sbin/apache2"),
        "modules": modules,
        "mod_wsgi": str(mod_wsgi or f"{modules}/mod_wsgi.so"),
    }


def _below(settings: Settings, *roots: str) -> list[str]:
    """Return the sorted paths that a unit needs and that lie below one of ``roots``."""
    paths = (
        settings.folder,
        settings.virtualenv,
        settings.config,
        settings.run_directory,
        settings.log_directory,
    )
    return sorted(str(path) for path in paths if any(path.is_relative_to(x) for x in roots))

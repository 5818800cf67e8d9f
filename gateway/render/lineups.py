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

from .files import SYSTEM, File, fill, with_header
from .settings import Site
from .versions import Versions

if TYPE_CHECKING:
    from ..plan.compute import Plan

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
    :param when: whether this site takes it
    :param asks: the servers whose versions it depends on
    """

    path: str
    source: str
    title: str
    when: Callable[[Site], bool]
    asks: tuple[str, ...] = ()


def has_uwsgi(site: Site) -> bool:
    """Whether uWSGI serves the application."""
    return not site.server.endswith("mod_wsgi")


def has_nginx(site: Site) -> bool:
    """Whether nginx is in front."""
    return site.server.startswith("nginx+")


def has_apache(site: Site) -> bool:
    """Whether Apache is in front, or serves the application itself."""
    return site.server in ("apache+uwsgi", "mod_wsgi", "prefork+mod_wsgi")


def has_mod_wsgi(site: Site) -> bool:
    """Whether Apache serves the application itself."""
    return site.server.endswith("mod_wsgi")


def has_socket_unit(site: Site) -> bool:
    """Whether systemd holds uWSGI's socket, so that a restart refuses nobody."""
    return has_uwsgi(site) and site.server != "uwsgi"


def searches_snippets(site: Site) -> bool:
    """Whether Keystone looks for ``keystone.conf.d`` where its configuration is."""
    return site.config == Path("/etc/keystone")


def always(_: Site) -> bool:
    """Every line-up takes it."""
    return True


def _is(server: str) -> Callable[[Site], bool]:
    return lambda site: site.server == server


TEMPLATES = (
    Template(
        path="uwsgi.ini",
        source="site/uwsgi.ini.j2",
        title="uWSGI: the processes that run the application.",
        when=has_uwsgi,
        asks=("uwsgi",),
    ),
    Template(
        path="nginx.conf",
        source="site/nginx.conf.j2",
        title="nginx in front of uWSGI.",
        when=has_nginx,
        asks=("nginx",),
    ),
    *(
        Template(
            path="apache.conf",
            source=f"site/apache/{source}.conf.j2",
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
        source="site/apache/keyfront.wsgi.j2",
        title="What mod_wsgi serves.",
        when=has_mod_wsgi,
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-apache.service",
        source="site/systemd/keyfront-apache.service.j2",
        title="systemd: Apache.",
        when=has_apache,
        asks=("apache",),
    ),
    Template(
        path="haproxy.cfg",
        source="site/haproxy/haproxy.cfg.j2",
        title="HAProxy in front of the nodes.",
        when=lambda site: bool(site.haproxy),
        asks=("haproxy",),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/haproxy.service.d/keyfront.conf",
        source="site/systemd/haproxy.service.conf.j2",
        title="systemd: HAProxy.",
        when=lambda site: bool(site.haproxy),
    ),
    Template(
        path="keystone.ini",
        source="paste/keystone.ini",
        title="The filters before Keystone (paste).",
        when=always,
    ),
    Template(
        path="service-paste.ini",
        source="site/service-paste.ini.j2",
        title="Filters for other services (paste).",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/keystone/keystone.conf.d/keyfront.conf",
        source="site/keystone.conf.j2",
        title="Keystone: pools and caches.",
        when=searches_snippets,
    ),
    Template(
        path="keystone.conf",
        source="site/keystone.conf.j2",
        title="Keystone: pools and caches.",
        when=lambda site: not searches_snippets(site),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-uwsgi.service",
        source="site/systemd/keyfront-uwsgi.service.j2",
        title="systemd: uWSGI.",
        when=has_uwsgi,
        asks=("uwsgi",),
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/keyfront-uwsgi.socket",
        source="site/systemd/keyfront-uwsgi.socket.j2",
        title="systemd: uWSGI's socket.",
        when=has_socket_unit,
    ),
    Template(
        path=f"{SYSTEM}etc/systemd/system/nginx.service.d/keyfront.conf",
        source="site/systemd/nginx.service.conf.j2",
        title="systemd: nginx.",
        when=has_nginx,
        asks=("nginx",),
    ),
    Template(
        path=f"{SYSTEM}etc/sysctl.d/60-keyfront.conf",
        source="site/sysctl.conf.j2",
        title="The kernel's queues.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/sysusers.d/keyfront.conf",
        source="site/sysusers.conf.j2",
        title="The user that runs the application.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/tmpfiles.d/keyfront.conf",
        source="site/tmpfiles.conf.j2",
        title="Folders that the servers write to.",
        when=always,
    ),
    Template(
        path=f"{SYSTEM}etc/logrotate.d/keyfront",
        source="site/logrotate.j2",
        title="Logs: kept for two weeks.",
        when=always,
    ),
)
#: Every path that some line-up has, below the folder.
PATHS = tuple(template.path for template in TEMPLATES)


def render(plan: Plan, site: Site, versions: Versions) -> list[File]:
    """The files of a site's line-up, in a fixed order.

    :raises OptionError: there is no such line-up, or the site asks for what it cannot do
    """
    check(site)
    made = []
    for template in TEMPLATES:
        if not template.when(site):
            continue
        body = fill(
            template.source,
            plan.numbers,
            plan=plan,
            site=site,
            versions=versions,
            version=__version__,
            socket_unit=has_socket_unit(site),
            alone=site.server == "uwsgi",
            # what is under way now is answered by then
            retry_after=math.ceil(plan.workload.latency),
            **_apache(versions),
            in_home=_below(site, "/home", "/root", "/run/user"),
            in_tmp=_below(site, "/tmp", "/var/tmp"),
        )
        asked = "; ".join(str(versions[name]) for name in template.asks) or "any version"
        text = with_header(body, title=template.title, command=site.command, versions=asked)
        made.append(File(path=template.path, text=text))
    return made


def check(site: Site) -> None:
    """:raises OptionError: there is no such line-up, or the site asks for what it cannot do"""
    if site.server not in SERVERS:
        raise OptionError("--server", site.server, f"one of {', '.join(SERVERS)}")
    if site.server == "uwsgi" and site.tls:
        raise OptionError(
            "--tls-certificate",
            site.certificate,
            "left out with --server uwsgi, which reads keys as the application's user and knows "
            "no HTTP/2: take nginx+uwsgi or apache+uwsgi",
        )


def _apache(versions: Versions) -> dict[str, str]:
    """Where Apache and its modules are: Debian's places where it is not here."""
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


def _below(site: Site, *roots: str) -> list[str]:
    """The paths a unit needs that lie below one of these."""
    paths = (
        site.folder, site.virtualenv, site.config, site.run_directory, site.log_directory
    )  # fmt: skip
    return sorted(str(path) for path in paths if any(path.is_relative_to(x) for x in roots))

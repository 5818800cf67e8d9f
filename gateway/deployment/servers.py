"""The line-ups of ``keyfront render``: which files each takes, and where they go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keyfront import __version__
from keyfront.errors import OptionError

from .files import File, fill, with_header
from .site import Site
from .versions import Versions

if TYPE_CHECKING:
    from ..sizing.plan import Plan

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
    :param goes_to: where the system looks for it; empty if it is used where it lies
    """

    path: str
    source: str
    title: str
    when: Callable[[Site], bool]
    asks: tuple[str, ...] = ()
    goes_to: str = ""


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
)


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
        )
        asked = "; ".join(str(versions[name]) for name in template.asks) or "any version"
        text = with_header(body, title=template.title, command=site.command, versions=asked)
        made.append(File(path=template.path, text=text, goes_to=template.goes_to))
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

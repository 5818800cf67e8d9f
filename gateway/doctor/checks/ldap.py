"""Checks of logins by a directory (L): [ldap] of keystone.conf and of domains' files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..found import LDAP_AUTH_POOL, LDAP_POOL, Found
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check


@check(
    "L01",
    ERROR,
    "ldap",
    holds="Passwords reach the directory encrypted",
    harm="Whoever listens between Keystone and the directory reads every user's password.",
    source="RFC 4513, 5.1.3; keystone, [ldap] use_tls",
)
def in_the_clear(found: Found) -> Iterator[Finding]:
    """ldaps://, or ldap:// with use_tls (StartTLS). ldapi:// does not leave the machine."""
    for conf in found.ldap:
        urls = [x.strip() for x in conf.text("ldap", "url", "ldap://localhost").split(",")]
        plain = [
            x
            for x in urls
            if x.startswith(("ldap://", "ldap+srv://"))
            and not x.startswith(("ldap://localhost", "ldap://127.", "ldap://[::1]"))
        ]
        if plain and not conf.on("ldap", "use_tls"):
            yield Finding(
                what=f"url = {', '.join(plain)} without use_tls",
                where=(conf.place("ldap", "url"),),
                lines=(
                    "[ldap]",
                    f"url = {','.join(re.sub('^ldap(?=:|[+]srv:)', 'ldaps', x) for x in urls)}",
                ),
            )


@check(
    "L02",
    ERROR,
    "ldap",
    holds="The directory is known by its certificate",
    harm="Who stands between Keystone and the directory reads passwords, and says who may log in.",
    source="keystone, [ldap] tls_req_cert: demand is the default",
)
def verified(found: Found) -> Iterator[Finding]:
    """never and allow take any certificate."""
    for conf in found.ldap:
        known = conf.last("ldap", "tls_req_cert")
        if known is not None and known.value.lower() in ("never", "allow"):
            yield Finding(
                what=f"tls_req_cert = {known.value}",
                where=(known.place,),
                lines=(
                    "[ldap]",
                    "tls_req_cert = demand",
                    "tls_cacertfile = /etc/ssl/certs/ldap.pem",
                ),
            )


@check(
    "L03",
    WARNING,
    "ldap",
    holds="Long lists are fetched in pages",
    harm="Lists of users end with 500 or are cut: Active Directory gives 1000 entries at once.",
    source="keystone, [ldap] page_size 0: none; RFC 2696",
)
def pages(found: Found) -> Iterator[Finding]:
    """Without pages a directory with a size limit answers sizeLimitExceeded."""
    for conf in found.ldap:
        if conf.number("ldap", "page_size", 0) <= 0:
            yield Finding(
                what="page_size is not set",
                where=(conf.place("ldap", "page_size"),),
                lines=("[ldap]", "page_size = 500"),
            )


@check(
    "L04",
    ERROR,
    "ldap",
    holds="A directory that does not answer is given up",
    harm="Every login holds a worker for ever, until no request is answered.",
    source="keystone's defaults: connection_timeout -1, pool_connection_timeout -1",
)
def gives_up(found: Found) -> Iterator[Finding]:
    """-1 is without an end. harakiri of uWSGI or request-timeout of mod_wsgi end the worker then,
    with all other requests of it."""
    bounded = any(x.settings.number("harakiri", default=0) > 0 for x in found.uwsgi) or any(
        "request-timeout" in options for _, options in found.daemons
    )
    for conf in found.ldap:
        missing = [
            name
            for name in ("connection_timeout", "pool_connection_timeout")
            if conf.number("ldap", name, -1) <= 0
        ]
        if missing:
            yield Finding(
                what=f"{' and '.join(missing)} -1, the default: waits for ever",
                where=(conf.place("ldap", missing[0]),),
                level=WARNING if bounded else "",
                lines=("[ldap]", *(f"{x} = 10" for x in missing)),
            )


@check(
    "L05",
    WARNING,
    "ldap",
    holds="Connections to the directory are kept",
    harm="Each login and search makes a connection with TLS, and the directory's limit is met "
    "sooner.",
    source="docs/ldap.md; keystone, use_pool and use_auth_pool, true by default",
)
def pooled(found: Found) -> Iterator[Finding]:
    """A handshake costs more than the search."""
    for conf in found.ldap:
        for name in ("use_pool", "use_auth_pool"):
            if not conf.on("ldap", name, True):
                yield Finding(
                    what=f"{name} = false",
                    where=(conf.place("ldap", name),),
                    lines=("[ldap]", f"{name} = true"),
                )


@check(
    "L06",
    INFO,
    "ldap",
    holds="Pools are no larger than there are threads to use them",
    harm="None while all is well; after a fault each process opens up to all of them.",
    source="keystone's defaults 10 and 100 are for each process: docs/plan.md",
)
def pool_sizes(found: Found) -> Iterator[Finding]:
    """A thread has one search and one login at a time."""
    try:
        _, threads = found.workers
    except LookupError:
        raise UnknownError("the number of threads: --uwsgi FILE or --apache FILE") from None
    for conf in found.ldap:
        sizes = (
            conf.number("ldap", "pool_size", LDAP_POOL),
            conf.number("ldap", "auth_pool_size", LDAP_AUTH_POOL),
        )
        if max(sizes) > 4 * threads and max(sizes) > 10:
            yield Finding(
                what=f"pool_size {sizes[0]}, auth_pool_size {sizes[1]} for {threads} threads",
                where=(conf.place("ldap", "auth_pool_size"),),
                lines=("[ldap]", f"pool_size = {threads}", f"auth_pool_size = {threads}"),
            )


@check(
    "L07",
    ERROR,
    "ldap",
    holds="The directory's library does not log what it sends (debug_level)",
    harm="Passwords stand in the log.",
    source="keystone, [ldap] debug_level: OpenLDAP's; 4095 is everything, packets included",
)
def debug_level(found: Found) -> Iterator[Finding]:
    """OpenLDAP's library writes packets to standard error from level 2 on."""
    for conf in found.ldap:
        if conf.number("ldap", "debug_level", 0) > 0:
            yield Finding(
                what=f"debug_level = {conf.text('ldap', 'debug_level')}",
                where=(conf.place("ldap", "debug_level"),),
                lines=("[ldap]", "debug_level = 0"),
            )

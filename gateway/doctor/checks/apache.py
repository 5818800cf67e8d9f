"""Checks of Apache's configuration and of mod_wsgi's (A)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .. import routes
from ..advice import around, for_tree, instead
from ..found import Found
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Directive, Place, Tree, seconds
from .cross_layer import _mpm, _of_host, _quoted, _without, daemon_lines, folded
from .nginx import remote_ids
from .uwsgi import DEAD

_WSGI = "mod_wsgi, WSGIDaemonProcess: timeouts are not enabled by default, set them"
_SECRETS = re.compile(
    r"%\{(X-Auth-Token|X-Subject-Token|Authorization|Cookie)\}[io]", re.IGNORECASE
)


def _tree(found: Found) -> Tree:
    assert found.apache is not None
    return found.apache


def _number(tree: Tree, *names: str) -> tuple[int | None, Place]:
    known = tree.last(*names)
    if known is None or not known.value.isdigit():
        return None, Place(tree.path)
    return int(known.value[:12]), known.place


@check(
    "A01",
    ERROR,
    "apache",
    holds="MaxRequestWorkers is what ServerLimit and ThreadsPerChild hold",
    harm="Apache serves fewer clients than its configuration says, and the rest waits.",
    source="httpd, mpm_common: lowered to ServerLimit x ThreadsPerChild; openstack-helm: 25600 "
    "for 400",
)
def workers_fit(found: Found) -> Iterator[Finding]:
    """event and worker have ServerLimit processes (16 by default) of ThreadsPerChild threads (25).
    A MaxRequestWorkers above their product is lowered, with a line in the error log; one far below
    leaves memory for nothing."""
    tree = _tree(found)
    if _mpm(found) == "prefork" or not routes.leads(found, "apache"):
        return
    most, place = _number(tree, "maxrequestworkers", "maxclients")
    servers, servers_place = _number(tree, "serverlimit")
    threads, _ = _number(tree, "threadsperchild")
    product = (servers or 16) * (threads or 25)
    limit = tree.last("serverlimit")
    if most is not None and most > product:
        yield Finding(
            what=f"MaxRequestWorkers {most} above ServerLimit {servers or 16} x ThreadsPerChild "
            f"{threads or 25} = {product}",
            where=(place,),
            lines=for_tree(tree, limit, f"ServerLimit {-(-most // (threads or 25))}"),
        )
    elif servers is not None and product > 4 * (most or 400):
        yield Finding(
            what=f"ServerLimit {servers} x ThreadsPerChild {threads or 25} = {product} for "
            f"MaxRequestWorkers {most or '400, the default'}",
            where=(servers_place,),
            level=WARNING,
            lines=for_tree(tree, limit, f"ServerLimit {-(-(most or 400) // (threads or 25))}"),
        )


@check(
    "A02",
    WARNING,
    "apache",
    holds="Apache's processes live longer than some requests",
    harm="Processes and their connections are thrown away, every few seconds under load.",
    source="openstack-helm: MaxRequestsPerChild 128; puppet: 4000; httpd's default 0",
)
def connections_per_child(found: Found) -> Iterator[Finding]:
    """MaxConnectionsPerChild ends a process after so many connections: 0 is never, some thousands
    bound a leak. A process of event or worker has the connections of all its threads."""
    if not routes.leads(found, "apache"):
        return
    names = ("maxconnectionsperchild", "maxrequestsperchild")
    most, place = _number(_tree(found), *names)
    known = _tree(found).last(*names)
    if known is not None and most and most < 1000:
        yield Finding(
            what=f"MaxConnectionsPerChild {most}",
            where=(place,),
            lines=instead(known, "MaxConnectionsPerChild 0"),
        )


@check(
    "A03",
    WARNING,
    "apache",
    holds="Apache's MPM is event",
    harm="Each client that keeps its connection takes a process, and soon there is none left.",
    source="measured: 290 KiB a client under prefork, 71 under event: docs/plan.md",
)
def prefork(found: Found) -> Iterator[Finding]:
    """Prefork is needed only by modules that are not safe in threads, such as mod_php: where that
    is loaded, PHP moves to php-fpm first."""
    if _mpm(found) != "prefork" or any(x.path.endswith("apache.conf") for x in found.rendered):
        return
    if not routes.leads(found, "apache"):
        return
    php = next(
        (x for x in _tree(found).all("loadmodule") if re.match(r"php\d*_module", x.value)), None
    )
    if php is not None:
        yield Finding(
            what="mpm_prefork is loaded, which mod_php needs",
            where=(php.place,),
            lines=("(move PHP to php-fpm, or Keystone to a server of its own)",),
            level=INFO,
        )
        return
    directive = next(
        x for x in _tree(found).all("loadmodule") if x.args[:1] == ("mpm_prefork_module",)
    )
    if found.debian:
        lines: tuple[str, ...] = ("a2dismod mpm_prefork", "a2enmod mpm_event")
    else:
        module = " ".join(directive.args[1:]).replace("prefork", "event")
        lines = instead(directive, f"LoadModule mpm_event_module {module}")
    yield Finding(what="mpm_prefork is loaded", where=(directive.place,), lines=lines)


@check(
    "A04",
    ERROR,
    "mod_wsgi",
    holds="Keystone runs in mod_wsgi's main interpreter (%{GLOBAL})",
    harm="C modules of Keystone (cryptography, python-ldap) hang or crash the process.",
    source="mod_wsgi, Application Issues: Python simplified GIL state API",
)
def application_group(found: Found) -> Iterator[Finding]:
    """mod_wsgi makes a sub-interpreter for each script unless it is told %{GLOBAL}."""
    for alias in routes.aliases(found):
        option = next((x for x in alias.args if x.startswith("application-group=")), "")
        known = _for_script(found, alias, "wsgiapplicationgroup")
        value = option.partition("=")[2] or (known.value if known else "")
        if value.upper() != "%{GLOBAL}":
            yield Finding(
                what=f"WSGIApplicationGroup {value or '%{RESOURCE}, the default'}",
                where=((known or alias).place,),
                lines=_instead_or_beside(found, known, alias, "WSGIApplicationGroup %{GLOBAL}"),
            )


def _for_script(found: Found, alias: Directive, name: str) -> Directive | None:
    """Return the directive that holds for a WSGIScriptAlias: of its host, or the main server.

    Those of mod_wsgi may stand in a folder's or a path's block of the host as well.
    """
    tree, host = _tree(found), routes.host_of(alias)
    own = tree.all(name, inside=host) if host is not None else []
    main = [x for x in tree.all(name) if routes.host_of(x) is None]
    return next(reversed(own or main), None)


def _instead_or_beside(
    found: Found, known: Directive | None, beside: Directive, line: str
) -> tuple[str, ...]:
    """Return a line instead of a directive, or else in the block that another one is in."""
    if known is not None and routes.host_of(known) is routes.host_of(beside):
        return instead(known, line)
    return around(_tree(found), beside, line)


@check(
    "A05",
    ERROR,
    "mod_wsgi",
    holds="Keystone sees the Authorization header (WSGIPassAuthorization)",
    harm="OAuth1, EC2 signatures and bearer tokens are refused with 401.",
    source="keystone, doc/source/admin/oauth1.rst",
)
def pass_authorization(found: Found) -> Iterator[Finding]:
    """Apache keeps the header from applications by default."""
    for alias in routes.aliases(found):
        known = _for_script(found, alias, "wsgipassauthorization")
        if known is None or known.value.lower() != "on":
            yield Finding(
                what="WSGIPassAuthorization is not On",
                where=((known or alias).place,),
                lines=_instead_or_beside(found, known, alias, "WSGIPassAuthorization On"),
            )


@check(
    "A06",
    WARNING,
    "mod_wsgi",
    holds="mod_wsgi's daemons have timeouts",
    harm="A stuck request holds its thread for ever, and those that wait are never told.",
    source=_WSGI,
)
def timeouts(found: Found) -> Iterator[Finding]:
    """request-timeout ends what is stuck, queue-timeout answers what has waited too long: both are
    0, which is never, where nothing is said. graceful-timeout lets requests end when a process is
    replaced, 15 s where nothing is said."""
    for directive, options in found.daemons:
        names = ("request-timeout", "queue-timeout")
        missing = [name for name in names if not seconds(options.get(name, "0"))]
        missing += ["graceful-timeout"] * (seconds(options.get("graceful-timeout", "15")) == 0)
        if missing:
            yield Finding(
                what=f"WSGIDaemonProcess {directive.args[0]} without {', '.join(missing)}",
                where=(directive.place,),
                lines=instead(directive, *daemon_lines(found, directive, options)),
            )


def _written(directive: Directive) -> str:
    """Return a directive as Apache reads it again."""
    return " ".join((directive.name, *(_quoted(x) for x in directive.args)))


@check(
    "A07",
    ERROR,
    "mod_wsgi",
    holds="Keystone runs in a daemon of its own, whose name is given once",
    harm="Keystone runs inside Apache's own processes, or Apache does not start.",
    source="mod_wsgi, WSGIProcessGroup: without it, embedded mode",
)
def process_group(found: Found) -> Iterator[Finding]:
    """In embedded mode each of Apache's processes loads Keystone, and restarts it as it comes and
    goes."""
    tree = _tree(found)
    seen: dict[str, Directive] = {}
    for directive in tree.all("wsgidaemonprocess"):
        name = directive.args[0] if directive.args else ""
        if name in seen:
            rest = " ".join(_quoted(x) for x in directive.args[1:])
            yield Finding(
                what=f"WSGIDaemonProcess {name} is given twice",
                where=(directive.place, seen[name].place),
                lines=instead(directive, f"WSGIDaemonProcess {name}-2 {rest}".rstrip()),
            )
        seen[name] = directive
    for alias in routes.aliases(found):
        if not routes.groups_of(found, alias):
            own = [x.args[0] for x, _ in found.daemons] or ["keystone"]
            yield Finding(
                what="WSGIScriptAlias without WSGIProcessGroup: embedded mode",
                where=(alias.place,),
                lines=around(tree, alias, f"WSGIProcessGroup {own[0]}"),
            )


@check(
    "A08",
    WARNING,
    "mod_wsgi",
    holds="mod_wsgi computes two requests at a time at least",
    harm="One login, with its 0.4 s of a password's hash, makes everybody else wait.",
    source="openstack-helm: processes=1 threads=1; docs/plan.md",
)
def more_than_one(found: Found) -> Iterator[Finding]:
    """WSGIDaemonProcess has one process where nothing is said, which also takes Keystone away while
    it is replaced."""
    for directive, options in found.daemons:
        if int(options.get("processes", 1)) * int(options.get("threads", 15)) < 2:
            yield Finding(
                what=f"WSGIDaemonProcess {directive.args[0]} with one process of one thread",
                where=(directive.place,),
                lines=instead(directive, *daemon_lines(found, directive, options)),
            )


@check(
    "A09",
    WARNING,
    "mod_wsgi",
    holds="A graceful restart of Apache keeps mod_wsgi's socket",
    harm="After a graceful restart, as log rotation makes one, kept connections are answered 503.",
    source="https://bugs.launchpad.net/charm-keystone/+bug/1863232; mod_wsgi, WSGISocketRotation",
)
def socket_rotation(found: Found) -> Iterator[Finding]:
    """With WSGISocketRotation On, the default, each restart makes a new socket, and Apache's
    processes that still have clients ask for the old one."""
    tree = _tree(found)
    rotation = tree.last("wsgisocketrotation")
    for alias in routes.aliases(found):
        keepalive = _of_host(tree, alias, "keepalivetimeout")
        long = keepalive is not None and (seconds(keepalive.value) or 0) >= 30
        if found.daemons and long and (rotation is None or rotation.value.lower() == "on"):
            assert keepalive is not None
            yield Finding(
                what=f"WSGISocketRotation On{'' if rotation else ', the default,'} with "
                f"KeepAliveTimeout {keepalive.value}",
                where=(rotation.place if rotation else keepalive.place,),
                lines=for_tree(tree, rotation, "WSGISocketRotation Off"),
            )


@check(
    "A10",
    ERROR,
    "mod_wsgi",
    holds="mod_wsgi hands over whole bodies",
    harm="Bodies of logins arrive cut off, and are answered 400.",
    source="mod_wsgi, release notes 6.0.5",
)
def truncated_bodies(found: Found) -> Iterator[Finding]:
    """6.0.0 to 6.0.4 cut bodies with WSGIScriptReloading Off and no queue-timeout."""
    reloading = _tree(found).last("wsgiscriptreloading")
    if reloading is None or reloading.value.lower() != "off":
        return
    version = found.version("mod_wsgi")
    if not (6, 0, 0) <= version < (6, 0, 5):
        return
    for directive, options in found.daemons:
        if options.get("queue-timeout", "0") == "0":
            yield Finding(
                what=f"mod_wsgi {'.'.join(map(str, version))} without queue-timeout",
                where=(directive.place, reloading.place),
                lines=instead(directive, *daemon_lines(found, directive, options)),
            )


@check(
    "A11",
    ERROR,
    "pass",
    holds="A balancer's members come back at once (retry=0, or forcerecovery)",
    harm="After a restart of uWSGI users are answered 503 for a minute.",
    source="httpd, proxy_util.c: retry counts for members only; mod_proxy_balancer.c, "
    "force_recovery; measured with 2.4.71: 200 at once, 503 with forcerecovery=Off; devstack "
    "6ed53156",
)
def retry(found: Found) -> Iterator[Finding]:
    """A member that failed once is left out for 60 s. While all are left out forcerecovery, which
    is on where nothing is said, tries them all the same; so this is about forcerecovery=Off. On a
    plain ProxyPass retry=0 does nothing: it is never left out."""
    for directive in routes.apache_members(found):
        retry_ = next((x for x in directive.args if x.lower().startswith("retry=")), "")
        if retry_ != "retry=0" and _never_forced(found, directive):
            yield Finding(
                what=f"{directive} without retry=0",
                where=(directive.place,),
                lines=instead(directive, *folded([*_without(directive, "retry"), "retry=0"])),
            )
    yield from _retry_in_vain(found)


def _never_forced(found: Found, member: Directive) -> bool:
    """Return whether a balancer leaves out all of its members where all have failed."""
    block = member.around[-1]
    names = re.findall(r"balancer://([^/ >]+)", block.value)
    said = [x.value for x in block.inside or () if x.is_("proxyset")]
    said += [
        x.value
        for x in routes.apache_passes(found)
        if any(f"balancer://{name}" in x.value for name in names)
    ]
    return any("forcerecovery=off" in x.lower() for x in said)


def _retry_in_vain(found: Found) -> Iterator[Finding]:
    for directive in routes.apache_passes(found):
        if "retry=0" in directive.args and "balancer:" not in directive.value:
            yield Finding(
                what="retry=0 does nothing without a balancer",
                where=(directive.place,),
                lines=instead(directive, *folded(_without(directive, "retry"))),
                level=INFO,
                harm="None: httpd never leaves out the only server of a plain ProxyPass.",
            )


@check(
    "A12",
    WARNING,
    "pass",
    holds="Apache does not wait for ever for a connection to uWSGI",
    harm="While uWSGI is stuck all of Apache's threads wait, and nothing else is served either.",
    source="httpd, mod_proxy: acquire, connectiontimeout; devstack c3b0b903",
)
def proxy_bounds(found: Found) -> Iterator[Finding]:
    """acquire is in milliseconds how long a thread waits for a free connection of the pool,
    connectiontimeout in seconds how long for uWSGI to accept."""
    for directive in routes.apache_passes(found):
        if "uwsgi:" not in directive.value or not directive.is_("proxypass"):
            continue
        missing = [
            f"{name}={value}"
            for name, value in (("acquire", 1), ("connectiontimeout", 5))
            if f"{name}=" not in directive.value.lower()
        ]
        if missing:
            yield Finding(
                what="ProxyPass without " + ", ".join(x.partition("=")[0] for x in missing),
                where=(directive.place,),
                lines=instead(directive, f"{_written(directive)} {' '.join(missing)}"),
            )


@check(
    "A13",
    WARNING,
    "pass",
    holds="Apache knows of CVE-2024-24795",
    harm="Headers of an application may split an answer and show it to another client.",
    source="https://httpd.apache.org/security/vulnerabilities_24.html: fixed in 2.4.59",
)
def response_splitting(found: Found) -> Iterator[Finding]:
    """Several modules took headers of an answer as they were. Distributions mend it without a new
    number: then assume what they mended with --assume apache=2.4.59."""
    if not any("uwsgi:" in x.value for x in routes.apache_passes(found)):
        return
    version = found.version("apache")
    if version < (2, 4, 59):
        upgrade = "apt install --only-upgrade apache2-bin" if found.debian else "dnf upgrade httpd"
        yield Finding(
            what=f"httpd {'.'.join(map(str, version))} with mod_proxy_uwsgi",
            where=(Place(_tree(found).path),),
            lines=(upgrade,),
        )


@check(
    "A14",
    WARNING,
    "apache",
    holds="Apache takes the long headers of federated logins",
    harm="Federated logins end with 400: size of a request header field exceeds server limit.",
    source="httpd, LimitRequestFieldSize 8190; SAP sets 16380",
)
def field_size(found: Found) -> Iterator[Finding]:
    """Cookies of mod_auth_openidc, Mellon and Shibboleth hold sessions."""
    tree = _tree(found)
    federated = [
        x
        for x in tree.all("loadmodule")
        if x.args[:1] and x.args[0] in ("auth_openidc_module", "auth_mellon_module", "mod_shib")
    ]
    federated += _federated(tree)
    served = next(iter([*routes.apache_passes(found), *routes.aliases(found)]), None)
    known = (
        tree.last("limitrequestfieldsize")
        if served is None
        else _of_host(tree, served, "limitrequestfieldsize")
    )
    size = int(known.value[:12]) if known and known.value.isdigit() else 0
    place = known.place if known else Place(tree.path)
    if federated and (size or 8190) < 16380:
        yield Finding(
            what=f"LimitRequestFieldSize {size or '8190, the default'} with {federated[0].name}",
            where=(place, federated[0].place),
            lines=for_tree(tree, known, "LimitRequestFieldSize 16380"),
        )


@check(
    "A15",
    WARNING,
    "apache",
    holds="Apache says who the client is, and not the client",
    harm="Clients write any address into Keystone's log and audit.",
    source="keystone/server/flask/core.py: ProxyFix; mod_proxy_uwsgi and mod_wsgi add no header; "
    "httpd, mod_remoteip",
)
def forwarded_for(found: Found) -> Iterator[Finding]:
    """mod_proxy_http appends the address to X-Forwarded-For; mod_proxy_uwsgi and mod_wsgi hand on
    what the client sent. Where clients reach Apache themselves it writes the header anew. Behind a
    balancer that would name the balancer for everybody: there mod_remoteip takes the address from
    the balancer's header, and from nobody else's. Keystone goes by the last address, which is the
    balancer's word, so this is a note then: it is about those who reach Apache past it. A HAProxy
    of this machine that reads HTTP and has option forwardfor appends the right one, which is
    enough; of one that does not H01 tells."""
    tree = _tree(found)
    passes = [x for x in routes.apache_passes(found) if "uwsgi:" in x.value]
    served = [*passes, *routes.aliases(found)]
    if not served:
        raise UnknownError("nothing of Apache leads to Keystone's uWSGI or mod_wsgi")
    if routes.appends_address(found):
        return
    for directive in served[:1]:
        hosts = (routes.host_of(directive), None)
        known = [
            x
            for x in tree.all("requestheader", "remoteipheader")
            if routes.host_of(x) in hosts
            and (
                not x.is_("requestheader")
                or (len(x.args) > 1 and x.args[1].lower() == "x-forwarded-for")
            )
        ]
        if known:
            continue
        line = 'RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"'
        sign = _sign_of_balancer(found, hosts)
        if sign is None:
            yield Finding(
                what="X-Forwarded-For is handed on as the client sent it",
                where=(directive.place,),
                lines=around(tree, directive, line),
            )
        else:
            itself = next((_host_of_pass(x) for x in routes.to_itself(tree)), "")
            yield Finding(
                what="X-Forwarded-For is believed of whoever reaches Apache past the balancer"
                + ("; write its address for 192.0.2.1" if not itself else ""),
                where=(directive.place, sign),
                lines=around(
                    tree,
                    directive,
                    "RemoteIPHeader X-Forwarded-For",
                    f"RemoteIPInternalProxy {itself or '192.0.2.1'}",
                    line,
                ),
                level=INFO,
                harm="Who reaches Apache past the balancer writes any address into Keystone's log.",
            )


def _sign_of_balancer(found: Found, hosts: tuple[Directive | None, ...]) -> Place | None:
    """Return the place that shows that a balancer appends the address; ``None`` without one."""
    protocol = [x for x in _tree(found).all("remoteipproxyprotocol") if x.value.lower() == "on"]
    if protocol or any(map(routes.sends_proxy, routes.backends(found))):
        return None  # by the PROXY protocol, which leaves the client's header as it is
    for directive in _tree(found).all("logformat", "customlog", "setenvif", "setenvifnocase"):
        if routes.host_of(directive) in hosts and "x-forwarded-" in directive.value.lower():
            return directive.place
    for directive in routes.to_itself(_tree(found)):
        return directive.place
    return None


def _host_of_pass(directive: Directive) -> str:
    """Return the address that a pass of Apache to itself goes to, and comes from."""
    match = re.search(r"http://\[?([\d.a-fA-F:]+?|localhost)\]?:\d+", directive.value)
    return match[1].replace("localhost", "127.0.0.1") if match else ""


@check(
    "A16",
    ERROR,
    "apache",
    holds="Apache speaks TLS 1.2 or newer",
    harm="Passwords travel under a cipher that can be broken; some clients refuse to connect.",
    source="RFC 8996; Mozilla, Server Side TLS, guideline 5.8",
)
def tls_versions(found: Found) -> Iterator[Finding]:
    """all without -TLSv1 and -TLSv1.1 includes them where OpenSSL has them."""
    for directive in _tree(found).all("sslprotocol"):
        if not routes.concerns(found, directive):
            continue
        words = {x.lower().lstrip("+") for x in directive.args}
        everything = "all" in words and not {"-tlsv1", "-tlsv1.1"} <= words
        if everything or words & {"sslv3", "tlsv1", "tlsv1.1"}:
            yield Finding(
                what=str(directive),
                where=(directive.place,),
                lines=instead(directive, "SSLProtocol -all +TLSv1.2 +TLSv1.3"),
            )


@check(
    "A17",
    ERROR,
    "apache",
    holds="No token is written to Apache's log",
    harm="Whoever reads the log acts as the users whose tokens are in it.",
    source="httpd, mod_log_config; mod_dumpio",
)
def secrets_in_log(found: Found) -> Iterator[Finding]:
    """Tokens are in X-Auth-Token and X-Subject-Token; mod_dumpio writes bodies, with passwords."""
    for directive in _tree(found).all("logformat", "customlog", "dumpioinput"):
        match = _SECRETS.search(directive.value)
        if match or (directive.is_("dumpioinput") and directive.value.lower() == "on"):
            yield Finding(
                what=f"{directive.name} writes {match[1] if match else 'whole requests'}",
                where=(directive.place,),
                lines=instead(directive, _unsaid(directive)),
            )


def _federated(tree: Tree) -> list[Directive]:
    """Return the directives by which modules log users in and take their headers from clients."""
    modules = ("openid-connect", "auth-openidc", "oauth20", "mellon", "shibboleth")
    return [
        *tree.all("oidcprovidermetadataurl", "oidcproviderissuer", "oidcmetadatadir"),
        *tree.all("mellonenable"),
        *(x for x in tree.all("authtype") if x.value.lower() in modules),
    ]


def _unsaid(directive: Directive) -> str:
    """Return a directive without what is secret."""
    if directive.is_("dumpioinput"):
        return "DumpIOInput Off"
    words = [_SECRETS.sub("-", x).replace('"', r"\"") for x in directive.args]
    return " ".join((directive.name, *(f'"{x}"' if re.search(r'[\s"]', x) else x for x in words)))


@check(
    "A18",
    ERROR,
    "apache",
    "keystone",
    holds="Apache removes the headers that say who a federated user is",
    harm="Anybody logs in as any federated user, by a header.",
    source="keystone, remote_id_attribute; mod_auth_openidc scrubs its own prefix; docs/render.md",
)
def federation_headers(found: Found) -> Iterator[Finding]:
    """A remote_id_attribute that begins with HTTP_ is a header of the request. mod_auth_openidc
    removes a client's OIDC- headers where it authenticates (AuthType openid-connect, or
    auth-openidc); without it RequestHeader unset does."""
    tree = _tree(found)
    served = [*routes.apache_passes(found), *routes.aliases(found)]
    if _federated(tree):
        return
    if not served:
        raise UnknownError("nothing of Apache leads to Keystone")
    removed = {x.args[1].lower() for x in tree.all("requestheader") if len(x.args) > 1}
    for section, setting in remote_ids(found):
        name = setting.value.removeprefix("HTTP_").replace("_", "-")
        if name.lower() not in removed:
            yield Finding(
                what=f"[{section}] remote_id_attribute {setting.value} is what the client sends",
                where=(served[0].place, setting.place),
                lines=around(tree, served[0], f"RequestHeader unset {name} early"),
            )


@check(
    "A19",
    ERROR,
    "mod_wsgi",
    holds="The script of WSGIScriptAlias is there",
    harm="Every request is answered 404 or 500.",
    source="keystone 28.0.0 release notes, remove-wsgi-scripts; charms: "
    "/usr/bin/keystone-wsgi-public",
)
def script_is_there(found: Found) -> Iterator[Finding]:
    """keystone-wsgi-public and -admin went with Keystone 28. A file with the line from
    keystone.wsgi.api import application serves Keystone 27 and later."""
    for alias in routes.aliases(found):
        script = alias.args[1] if len(alias.args) > 1 else ""
        if not script.startswith("/") or re.search(r"[$%]", script):
            continue
        project, since, _ = DEAD.get(script.rpartition("/")[2], ("", 0, ""))
        # /var/www/cgi-bin has files of the same name, which are the operator's.
        absent = found.files.lacks(script)
        gone = bool(project) and found.at_least(project, since)
        if absent or (gone and not found.files.exists(script)):
            yield Finding(
                what=f"{script} is not there" + (f": gone since {project} {since}" if gone else ""),
                where=(alias.place,),
                lines=(
                    f"printf 'from keystone.wsgi.api import application\\n' > {script}"
                    if not found.before("keystone", 27)
                    else f"(install {script}, or correct WSGIScriptAlias)",
                ),
            )

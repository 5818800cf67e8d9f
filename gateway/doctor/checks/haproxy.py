"""Checks of HAProxy's configuration (H)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from .. import routes
from ..advice import instead, within
from ..found import Found
from ..registry import ERROR, WARNING, Finding, check
from ..routes import haproxy_lines, in_http_mode, sends_proxy, writes_header
from ..settings import Directive
from .nginx import remote_ids


@check(
    "H01",
    WARNING,
    "backend",
    holds="HAProxy tells Keystone the client's address",
    harm="Keystone's log and audit name the balancer, or what the client made up.",
    source="HAProxy, option forwardfor, send-proxy; keystone's ProxyFix believes the last address",
)
def forwardfor(found: Found) -> Iterator[Finding]:
    """option forwardfor appends the address. It belongs into the backend, the frontend or
    defaults. In TCP mode HAProxy reads no HTTP and writes no header. Where it sends plain HTTP on,
    it is set to mode http; where TLS ends behind it, it tells the address by send-proxy-v2, which
    Apache takes with RemoteIPProxyProtocol."""
    for section in routes.backends(found):
        if writes_header(found, section) or sends_proxy(section):
            continue
        if in_http_mode(section):
            yield Finding(
                what=f"{section} without option forwardfor",
                where=(section.place,),
                lines=within(section, "option forwardfor"),
            )
            continue
        if _tls_behind(found):
            lines = [
                line
                for x in section.inside or ()
                if x.is_("server")
                for line in instead(x, f"{x} send-proxy-v2")
            ]
            for host in _hosts(found):
                lines += within(host, "RemoteIPProxyProtocol On")
        else:
            lines = [
                line
                for block in dict.fromkeys([*routes.frontends(found, section), section])
                for line in within(
                    block,
                    "mode http",
                    *(("option forwardfor",) if block is section else ("option httplog",)),
                )
            ]
        yield Finding(
            what=f"{section} is in mode tcp, in which no X-Forwarded-For is written",
            where=(section.place,),
            lines=tuple(lines),
        )


def _hosts(found: Found) -> list[Directive]:
    """Return Apache's hosts that serve Keystone."""
    served = [*routes.apache_passes(found), *routes.aliases(found)]
    return list(dict.fromkeys(x for one in served if (x := routes.host_of(one)) is not None))


def _tls_behind(found: Found) -> bool:
    """Return whether TLS ends in the Apache behind HAProxy."""
    return any(
        x.is_("sslengine") and x.value.lower() == "on"
        for host in _hosts(found)
        for x in host.inside or ()
    )


@check(
    "H02",
    ERROR,
    "haproxy",
    holds="HAProxy's statistics and its socket are not open to everybody",
    harm="Whoever reaches them takes nodes out of the balancer.",
    source="HAProxy, stats socket ... level admin; stats admin",
)
def stats_exposed(found: Found) -> Iterator[Finding]:
    """A stats socket of level admin on TCP has no password; stats admin without stats auth
    neither."""
    assert found.haproxy is not None
    for directive in found.haproxy.all("stats"):
        words = directive.args
        if words[:1] == ("socket",) and len(words) > 1:
            address = words[1].removeprefix("ipv4@").removeprefix("ipv6@")
            local = address.startswith(("/", "127.", "localhost", "::1", "[::1]", "unix@", "fd@"))
            if not local and "admin" in words:
                yield Finding(
                    what=str(directive),
                    where=(directive.place,),
                    lines=instead(
                        directive, "stats socket /run/haproxy/admin.sock mode 660 level admin"
                    ),
                )
            mode = dict(itertools.pairwise(words)).get("mode", "")
            if local and re.fullmatch(r"[0-7]*[2367]", mode):
                kept = re.sub(r"\bmode \S+", "mode 660", str(directive))
                yield Finding(
                    what=str(directive), where=(directive.place,), lines=instead(directive, kept)
                )
        if (
            words[:1] == ("admin",)
            and directive.around
            and not any(
                x.is_("stats") and x.args[:1] == ("auth",)
                for x in directive.around[-1].inside or ()
            )
            and "TRUE" in words
        ):
            yield Finding(
                what=str(directive),
                where=(directive.place,),
                lines=within(directive.around[-1], "stats auth USER:PASSWORD"),
            )


@check(
    "H03",
    ERROR,
    "backend",
    holds="HAProxy has timeouts for connecting, the client and the server",
    harm="Connections of clients and nodes that are gone stay for ever, until none is left.",
    source="HAProxy warns of it at its start: missing timeouts",
)
def timeouts(found: Found) -> Iterator[Finding]:
    """All three are without an end where nothing is said."""
    for section in routes.backends(found):
        known = {x.args[0] for x in haproxy_lines(section) if x.name == "timeout" and x.args}
        missing = [x for x in ("connect", "server") if x not in known]
        if missing:
            yield _missing(section, missing)
        for front in routes.frontends(found, section):
            if not any(
                x.value.startswith("client ") for x in haproxy_lines(front) if (x.name == "timeout")
            ):
                yield _missing(front, ["client"])


def _missing(section: Directive, names: list[str]) -> Finding:
    return Finding(
        what=f"{section} without timeout {', '.join(names)}",
        where=(section.place,),
        lines=within(section, *(f"timeout {x} {'5s' if x == 'connect' else '90s'}" for x in names)),
    )


@check(
    "H04",
    ERROR,
    "backend",
    holds="HAProxy sends no login twice",
    harm="A login or a change that took long is made a second time by another node.",
    source="HAProxy, retry-on: all-retryable-errors, response-timeout",
)
def retry_on(found: Found) -> Iterator[Finding]:
    """A request whose answer is late or lost may have been made. Only what was not sent yet
    (conn-failure) may be tried again, or option disable-l7-retry keeps POST out."""
    for section in routes.backends(found):
        for directive in haproxy_lines(section):
            again = {"all-retryable-errors", "response-timeout", "empty-response", "junk-response"}
            if (
                directive.is_("retry-on")
                and again & set(directive.args)
                and not any("disable-l7-retry" in x.value for x in haproxy_lines(section))
            ):
                yield Finding(
                    what=str(directive),
                    where=(directive.place,),
                    lines=instead(directive, "retry-on conn-failure"),
                )


@check(
    "H05",
    WARNING,
    "backend",
    holds="HAProxy looks whether its nodes serve",
    harm="Users of a node that is gone are answered 503 until somebody notices.",
    source="HAProxy, server ... check",
)
def checked(found: Found) -> Iterator[Finding]:
    """Without check a server is up whatever happens."""
    for section in routes.backends(found):
        default = any(x.is_("default-server") and "check" in x.args for x in haproxy_lines(section))
        for directive in section.inside or ():
            if directive.is_("server") and "check" not in directive.args and not default:
                yield Finding(
                    what=f"{directive} without check",
                    where=(directive.place,),
                    lines=instead(directive, f"{directive} check"),
                )


@check(
    "H06",
    WARNING,
    "backend",
    holds="HAProxy knows its nodes by their certificates",
    harm="Somebody between balancer and node reads passwords.",
    source="HAProxy, server ... ssl verify none",
)
def verify(found: Found) -> Iterator[Finding]:
    """verify none encrypts to whoever answers."""
    for section in routes.backends(found):
        for directive in section.inside or ():
            words = directive.args
            if directive.is_("server") and "verify" in words and "none" in words:
                yield Finding(
                    what=str(directive),
                    where=(directive.place,),
                    lines=instead(
                        directive,
                        str(directive).replace(
                            "verify none", "verify required ca-file /etc/ssl/certs/nodes.pem"
                        ),
                    ),
                )


@check(
    "H07",
    ERROR,
    "backend",
    "keystone",
    holds="HAProxy before uWSGI removes the headers that say who a federated user is",
    harm="Anybody logs in as any federated user, by a header.",
    source="keystone, remote_id_attribute; HAProxy, http-request del-header; uWSGI hands on what "
    "comes",
)
def federation_headers(found: Found) -> Iterator[Finding]:
    """Where no web server stands between HAProxy and uWSGI nothing else removes what a client
    sends. A login that is federated has to come through a web server that sets the header."""
    if found.apache is not None or found.nginx is not None or not found.uwsgi:
        return
    if not any(
        conf.settings.all("http", "http-socket", "https", "https-socket") for conf in (found.uwsgi)
    ):
        return
    for section_name, setting in remote_ids(found):
        name = setting.value.removeprefix("HTTP_").replace("_", "-")
        for section in routes.backends(found):
            blocks = [section, *routes.frontends(found, section)]
            if not any(_deletes(x, name) for block in blocks for x in haproxy_lines(block)):
                yield Finding(
                    what=f"[{section_name}] remote_id_attribute {setting.value} is what the client "
                    "sends",
                    where=(section.place, setting.place),
                    lines=within(section, f"http-request del-header {name}"),
                )


def _deletes(directive: Directive, name: str) -> bool:
    words = [x.lower() for x in directive.args]
    return (
        directive.is_("http-request")
        and words[:1] in (["del-header"], ["set-header"])
        and len(words) > 1
        and (words[1] == name.lower() or ("beg" in words and name.lower().startswith(words[1])))
        and "if" not in words
    )

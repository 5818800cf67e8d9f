"""Checks of nginx's configuration (N)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..found import Found
from ..registry import ERROR, INFO, WARNING, Finding, check
from ..settings import Directive, Setting, Tree, size

_OIDC = re.compile(r"\b(openid|saml2|mapped)\b")
_PASSES = ("uwsgi_pass", "proxy_pass")
# What nginx finds by itself, or no longer knows.
_OBSOLETE = {
    "accept_mutex": "off by default since 1.11.3",
    "ssl": "listen ... ssl since 1.15.0, gone in 1.25.1",
    "spdy_headers_comp": "gone since 1.9.5",
    "epoll_events": "nginx knows better",
}
# The default, and what Debian and others write: nobody chose them.
_STOCK = ("512", "768", "1024")
_SECRETS = re.compile(
    r"\$(http_x_auth_token|http_x_subject_token|http_authorization|request_body|http_cookie|"
    r"sent_http_x_subject_token|upstream_http_x_subject_token)\b"
)


def _tree(found: Found) -> Tree:
    assert found.nginx is not None
    return found.nginx


def _passes(found: Found) -> list[Directive]:
    """Return the passes that go to Keystone, each in its location."""
    passes = [x for x in _tree(found).all(*_PASSES) if x.around]
    named = [
        x
        for x in passes
        if re.search(
            r"keystone|keyfront|identity|5000|35357",
            " ".join(
                [
                    x.value,
                    *(y.value for y in x.around),
                    *(
                        z.value
                        for y in x.around
                        if y.is_("server")
                        for z in y.inside or ()
                        if z.is_("listen", "server_name")
                    ),
                ]
            ),
        )
    ]
    return named or (passes if len(passes) == 1 else [])


@check(
    "N01",
    WARNING,
    "nginx",
    holds="nginx takes more than a few hundred clients",
    harm="Clients beyond wait or are refused: worker_connections are not enough.",
    source="nginx's default 512, Debian's 768; a request that is handed on takes two",
)
def worker_connections(found: Found) -> Iterator[Finding]:
    """Clients keep connections open between their requests, and each request takes a second one to
    uWSGI. keyfront plan nginx says how many this machine holds."""
    known = _tree(found).last("worker_connections")
    if known is None or known.value in _STOCK:
        yield Finding(
            what=f"worker_connections {known.value if known else '512, the default'}",
            where=(known.place,) if known else (),
            lines=("worker_connections 8192;",),
            file=_tree(found).path,
        )


@check(
    "N02",
    WARNING,
    "nginx",
    "keystone",
    holds="nginx takes the long headers of federated logins",
    harm="Federated logins end with 400 Request Header Or Cookie Too Large.",
    source="nginx's default: 4 buffers of 8k; mod_auth_openidc's and Shibboleth's cookies",
)
def header_buffers(found: Found) -> Iterator[Finding]:
    """A header has to fit into one buffer of large_client_header_buffers, 8k by default."""
    assert found.keystone is not None
    if not _OIDC.search(found.keystone.text("auth", "methods")):
        return
    known = _tree(found).last("large_client_header_buffers")
    if known is None or (size(known.args[-1]) or 0) < 16384:
        yield Finding(
            what=f"large_client_header_buffers {known.value if known else '4 8k, the default'}",
            where=(known.place,) if known else (),
            lines=("large_client_header_buffers 4 32k;",),
            file=_tree(found).path,
        )


@check(
    "N03",
    WARNING,
    "nginx",
    holds="uWSGI's response headers fit into nginx's buffer",
    harm="Answers with long headers are replaced by 502: upstream sent too big header.",
    source="nginx, uwsgi_buffer_size is 4k or 8k, a page",
)
def uwsgi_buffer(found: Found) -> Iterator[Finding]:
    """The headers of an answer have to fit into uwsgi_buffer_size: a token in X-Subject-Token, and
    cookies and redirections of federated logins, which hold whole URLs."""
    for directive in _passes(found):
        name = directive.name.replace("pass", "buffer_size")
        known = _tree(found).effective(directive.around[-1], name)
        if known is None or (size(known.value) or 0) <= 4096:
            yield Finding(
                what=f"{name} {known.value if known else '4k, the default'}",
                where=((known or directive).place,),
                lines=(f"{name} 32k;",),
            )


@check(
    "N04",
    ERROR,
    "nginx",
    holds="nginx sends no login twice",
    harm="A login or a change that took long is made a second time by another worker.",
    source="nginx, ngx_http_uwsgi_module, next_upstream: non_idempotent",
)
def next_upstream(found: Found) -> Iterator[Finding]:
    """POST /v3/auth/tokens and all changes are not repeatable: non_idempotent sends them again
    where the first answer was lost or late."""
    for directive in _tree(found).all("uwsgi_next_upstream", "proxy_next_upstream"):
        if "non_idempotent" in directive.args:
            rest = " ".join(x for x in directive.args if x != "non_idempotent") or "off"
            yield Finding(
                what=str(directive), where=(directive.place,), lines=(f"{directive.name} {rest};",)
            )


@check(
    "N05",
    INFO,
    "nginx",
    holds="max_fails stands where it does something",
    harm="None; but nobody is taken out of a single server's upstream, as the line seems to say.",
    source="nginx, ngx_http_upstream_module: parameters are ignored with a single server",
)
def max_fails(found: Found) -> Iterator[Finding]:
    """With one server in an upstream max_fails and fail_timeout are not looked at."""
    for upstream in _tree(found).all("upstream"):
        servers = [x for x in upstream.inside or () if x.is_("server")]
        if len(servers) == 1:
            words = [x for x in servers[0].args if x.startswith(("max_fails", "fail_timeout"))]
            if words:
                kept = " ".join(x for x in servers[0].args if x not in words)
                yield Finding(
                    what=f"{' '.join(words)} of the only server of {upstream.value}",
                    where=(servers[0].place,),
                    lines=(f"server {kept};",),
                )


@check(
    "N06",
    ERROR,
    "nginx",
    holds="nginx says who the client is, and not the client",
    harm="Clients write any address into Keystone's log and audit, and pass limits by address.",
    source="keystone/server/flask/core.py: ProxyFix(x_for=1, x_proto=1), always on",
)
def forwarded_for(found: Found) -> Iterator[Finding]:
    """Keystone believes the last X-Forwarded-For. uwsgi_pass and proxy_pass hand a client's header
    on unless it is set; $proxy_add_x_forwarded_for appends the address and is right as well."""
    for directive in _passes(found):
        uwsgi = directive.is_("uwsgi_pass")
        setter = "uwsgi_param" if uwsgi else "proxy_set_header"
        wanted = "HTTP_X_FORWARDED_FOR" if uwsgi else "X-FORWARDED-FOR"
        known = _sets(found, directive, setter, wanted)
        if known is None or known.args[1:] == ("$http_x_forwarded_for",):
            name = "HTTP_X_FORWARDED_FOR" if uwsgi else "X-Forwarded-For"
            yield Finding(
                what=f"{name} is handed on as the client sent it",
                where=(directive.place,),
                lines=(f"{setter} {name} $remote_addr;",),
            )


def _sets(found: Found, directive: Directive, setter: str, name: str) -> Directive | None:
    """Return the directive that sets a header in the block that holds for a pass."""
    for block in (*reversed(directive.around), None):
        inside = _tree(found).top if block is None else block.inside or []
        setters = [x for x in inside if x.is_(setter)]
        if setters:
            # A block with one of its own inherits none.
            return next((x for x in setters if x.args and x.args[0].upper() == name), None)
    return None


@check(
    "N07",
    WARNING,
    "nginx",
    holds="Logins are limited by address, and told so by 429",
    harm="One client that tries passwords takes all cores, and everybody else waits.",
    source="docs/plan.md: a login is 0.38 s of a core; nginx, ngx_http_limit_req_module",
)
def limit_req(found: Found) -> Iterator[Finding]:
    """A login costs as much as a thousand cached validations, by design: that is what keeps
    passwords safe. limit_req_status is 503 where nothing is said, which monitoring takes for an
    outage."""
    passes = _passes(found)
    if not passes:
        return
    tree = _tree(found)
    if not any(tree.effective(x.around[-1], "limit_req") for x in passes):
        # Or in a location for logins alone, whatever the others do.
        if not tree.all("limit_req"):
            yield Finding(
                what="nothing limits logins",
                where=(passes[0].place,),
                lines=(
                    'map "$request_method:$uri" $login { default ""; '
                    "~^POST:.*/auth/tokens$ $binary_remote_addr; }",
                    "limit_req_zone $login zone=logins:10m rate=5r/s;",
                    "limit_req_status 429;",
                    "limit_req zone=logins burst=25 nodelay;",
                ),
            )
        return
    status = tree.last("limit_req_status")
    if status is None:
        yield Finding(
            what="limit_req answers 503, the default",
            where=(tree.all("limit_req")[0].place,),
            lines=("limit_req_status 429;",),
        )


@check(
    "N08",
    INFO,
    "nginx",
    "versions",
    holds="Connections to an HTTP upstream are kept",
    harm="Each request opens a connection, and thousands of them wait in TIME_WAIT.",
    source="nginx CHANGES 1.29.7: HTTP/1.1 and keepalive by default",
)
def keepalive(found: Found) -> Iterator[Finding]:
    """Before 1.29.7 proxy_pass speaks HTTP/1.0 and closes. (uwsgi_pass never keeps a
    connection.)"""
    if not found.before("nginx", 1, 29, 7):
        return
    tree = _tree(found)
    for directive in _passes(found):
        if not directive.is_("proxy_pass") or "unix:" in directive.value:
            continue
        version = tree.effective(directive.around[-1], "proxy_http_version")
        if version is None or version.value != "1.1" or not tree.all("keepalive"):
            yield Finding(
                what="proxy_pass closes its connection after each request",
                where=(directive.place,),
                lines=(
                    "proxy_http_version 1.1;",
                    'proxy_set_header Connection "";',
                    "keepalive 32;",
                ),
            )


@check(
    "N09",
    INFO,
    "nginx",
    holds="No directive is there for an nginx of long ago",
    harm="None, or a warning at each start; newer releases refuse some of them.",
    source="nginx CHANGES; docs/plan.md, what is not copied",
)
def obsolete(found: Found) -> Iterator[Finding]:
    """nginx finds epoll by itself, and other switches are its defaults or gone."""
    for directive in _tree(found).walk():
        why = _OBSOLETE.get(directive.name)
        if directive.is_("use") and directive.value == "epoll":
            why = "nginx finds it by itself"
        if why and not (directive.is_("accept_mutex") and directive.value == "on"):
            yield Finding(
                what=f"{directive}: {why}", where=(directive.place,), lines=(f"# {directive};",)
            )


@check(
    "N10",
    ERROR,
    "nginx",
    holds="nginx speaks TLS 1.2 or newer",
    harm="Passwords travel under a cipher that can be broken; some clients refuse to connect.",
    source="RFC 8996; Mozilla, Server Side TLS, guideline 5.7",
)
def tls_versions(found: Found) -> Iterator[Finding]:
    """TLS 1.0 and 1.1 are deprecated since 2021, SSL 3 since 2015."""
    for directive in _tree(found).all("ssl_protocols"):
        old = [x for x in directive.args if x in ("SSLv2", "SSLv3", "TLSv1", "TLSv1.1")]
        if old:
            yield Finding(
                what=str(directive),
                where=(directive.place,),
                lines=("ssl_protocols TLSv1.2 TLSv1.3;",),
            )


@check(
    "N11",
    ERROR,
    "nginx",
    holds="No token or password is written to nginx's log",
    harm="Whoever reads the log acts as the users whose tokens are in it.",
    source="nginx, ngx_http_log_module; Keystone's own logs leave them out",
)
def secrets_in_log(found: Found) -> Iterator[Finding]:
    """Tokens are in X-Auth-Token and X-Subject-Token, passwords in the body of a login."""
    for directive in _tree(found).all("log_format"):
        match = _SECRETS.search(directive.value)
        if match:
            yield Finding(
                what=f"log_format {directive.args[0]} has ${match[1]}",
                where=(directive.place,),
                lines=(f"(remove ${match[1]} from log_format {directive.args[0]})",),
            )


@check(
    "N12",
    ERROR,
    "nginx",
    "keystone",
    holds="Clients cannot send the headers that say who a federated user is",
    harm="Anybody logs in as any federated user, by a header.",
    source="keystone, [federation] remote_id_attribute; docs/render.md, what is believed",
)
def federation_headers(found: Found) -> Iterator[Finding]:
    """A remote_id_attribute that begins with HTTP_ is a header of the request. What sets it has to
    remove the client's: mod_auth_openidc does, nginx does only if it is told."""
    for section, setting in remote_ids(found):
        name = setting.value
        for directive in _passes(found):
            uwsgi = directive.is_("uwsgi_pass")
            wanted = name if uwsgi else name.removeprefix("HTTP_").replace("_", "-")
            setter = "uwsgi_param" if uwsgi else "proxy_set_header"
            if not _sets(found, directive, setter, wanted.upper()):
                yield Finding(
                    what=f"[{section}] remote_id_attribute {name} is what the client sends",
                    where=(directive.place, setting.place),
                    lines=(f'{setter} {wanted} "";',),
                )


def remote_ids(found: Found) -> Iterator[tuple[str, Setting]]:
    """Give the sections whose ``remote_id_attribute`` is a request's header, and the setting."""
    assert found.keystone is not None
    for section in ("federation", "openid", "mapped", "saml2"):
        setting = found.keystone.last(section, "remote_id_attribute")
        if setting is not None and setting.value.startswith("HTTP_"):
            yield section, setting

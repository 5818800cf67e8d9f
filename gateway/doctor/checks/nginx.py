"""Checks of nginx's configuration (N)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ..advice import around, at_the_end, instead, within
from ..found import Found
from ..registry import ERROR, INFO, WARNING, Finding, check
from ..routes import appends_address, concerns, leads, nginx_passes, nginx_targets
from ..settings import Directive, Place, Setting, Tree, size

_OIDC = re.compile(r"\b(openid|saml2|mapped)\b")
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


def _instead_or_in(found: Found, known: Directive | None, block: str, line: str) -> tuple[str, ...]:
    """Return a line instead of a directive, or else in the block that it belongs into."""
    if known is not None:
        return instead(known, line)
    outer = _tree(found).last(block)
    return within(outer, line) if outer is not None else at_the_end(_tree(found).path, line)


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
    if not leads(found, "nginx"):
        return
    known = _tree(found).last("worker_connections")
    if known is None or known.value in _STOCK:
        yield Finding(
            what=f"worker_connections {known.value if known else '512, the default'}",
            where=(known.place,) if known else (Place(_tree(found).path),),
            lines=_instead_or_in(found, known, "events", "worker_connections 8192;"),
        )


@check(
    "N02",
    WARNING,
    "location",
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
    block = nginx_passes(found)[0].around[-1]
    known = _tree(found).effective(block, "large_client_header_buffers")
    if known is None or (size(known.args[-1]) or 0) < 16384:
        yield Finding(
            what=f"large_client_header_buffers {known.value if known else '4 8k, the default'}",
            where=(known.place,) if known else (Place(_tree(found).path),),
            lines=_instead_or_in(found, known, "http", "large_client_header_buffers 4 32k;"),
        )


@check(
    "N03",
    WARNING,
    "location",
    holds="uWSGI's response headers fit into nginx's buffer",
    harm="Answers with long headers are replaced by 502: upstream sent too big header.",
    source="nginx, uwsgi_buffer_size is 4k or 8k, a page",
)
def uwsgi_buffer(found: Found) -> Iterator[Finding]:
    """The headers of an answer have to fit into uwsgi_buffer_size: a token in X-Subject-Token, and
    cookies and redirections of federated logins, which hold whole URLs."""
    for directive in nginx_passes(found):
        name = directive.name.replace("pass", "buffer_size")
        known = _tree(found).effective(directive.around[-1], name)
        if known is None or (size(known.value) or 0) <= 4096:
            yield Finding(
                what=f"{name} {known.value if known else '4k, the default'}",
                where=((known or directive).place,),
                lines=instead(known, *_buffers(name, (known.around or directive.around)[-1]))
                if known is not None
                else within(directive.around[-1], *_buffers(name, directive.around[-1])),
            )


def _buffers(name: str, block: Directive) -> tuple[str, ...]:
    """Return the lines for a buffer of 32k; those of the body together have to hold two of it."""
    buffers = f"{name.partition('_')[0]}_buffers"
    more = () if any(x.is_(buffers) for x in block.inside or ()) else (f"{buffers} 8 32k;",)
    return (f"{name} 32k;", *more)


@check(
    "N04",
    ERROR,
    "location",
    holds="nginx sends no login twice",
    harm="A login or a change that took long is made a second time by another worker.",
    source="nginx, ngx_http_uwsgi_module, next_upstream: non_idempotent",
)
def next_upstream(found: Found) -> Iterator[Finding]:
    """POST /v3/auth/tokens and all changes are not repeatable: non_idempotent sends them again
    where the first answer was lost or late."""
    for handed in nginx_passes(found):
        name = handed.name.replace("pass", "next_upstream")
        directive = _tree(found).effective(handed.around[-1], name)
        if directive is not None and "non_idempotent" in directive.args:
            rest = " ".join(x for x in directive.args if x != "non_idempotent") or "off"
            yield Finding(
                what=str(directive),
                where=(directive.place,),
                lines=instead(directive, f"{directive.name} {rest};"),
            )


@check(
    "N05",
    INFO,
    "location",
    holds="max_fails stands where it does something",
    harm="None; but nobody is taken out of a single server's upstream, as the line seems to say.",
    source="nginx, ngx_http_upstream_module: parameters are ignored with a single server",
)
def max_fails(found: Found) -> Iterator[Finding]:
    """With one server in an upstream max_fails and fail_timeout are not looked at."""
    named = {x for one in nginx_passes(found) for _, x in nginx_targets(_tree(found), one)}
    for upstream in _tree(found).all("upstream"):
        if not named & set(upstream.inside or ()):
            continue
        servers = [x for x in upstream.inside or () if x.is_("server")]
        if len(servers) == 1:
            words = [x for x in servers[0].args if x.startswith(("max_fails", "fail_timeout"))]
            if words:
                kept = " ".join(x for x in servers[0].args if x not in words)
                yield Finding(
                    what=f"{' '.join(words)} of the only server of {upstream.value}",
                    where=(servers[0].place,),
                    lines=instead(servers[0], f"server {kept};"),
                )


@check(
    "N06",
    ERROR,
    "location",
    holds="nginx says who the client is, and not the client",
    harm="Clients write any address into Keystone's log and audit, and pass limits by address.",
    source="keystone/server/flask/core.py: ProxyFix(x_for=1, x_proto=1), always on",
)
def forwarded_for(found: Found) -> Iterator[Finding]:
    """Keystone believes the last X-Forwarded-For. uwsgi_pass and proxy_pass hand a client's header
    on unless it is set; $proxy_add_x_forwarded_for appends the address and is right as well.
    Behind a balancer that appends it, whose addresses set_real_ip_from names, it is right for all
    who come by it, and a note for the others; of a HAProxy of this machine H01 tells."""
    if appends_address(found):
        return
    for directive in nginx_passes(found):
        uwsgi = directive.is_("uwsgi_pass")
        block = directive.around[-1]
        kept = directive.name.replace("pass", "pass_request_headers")
        passed = _tree(found).effective(block, kept)
        if passed is not None and passed.value == "off":
            continue
        setter = "uwsgi_param" if uwsgi else "proxy_set_header"
        wanted = "HTTP_X_FORWARDED_FOR" if uwsgi else "X-FORWARDED-FOR"
        known = _sets(found, directive, setter, wanted)
        if known is None or known.args[1:] == ("$http_x_forwarded_for",):
            name = "HTTP_X_FORWARDED_FOR" if uwsgi else "X-Forwarded-For"
            yield Finding(
                what=f"{name} is handed on as the client sent it"
                + (", past the balancer" if _behind_balancer(found, block) else ""),
                where=(directive.place,),
                lines=_beside_setters(found, directive, setter, f"{setter} {name} $remote_addr;"),
                level=INFO if _behind_balancer(found, block) else "",
                harm="Who reaches nginx past the balancer writes any address into Keystone's log."
                if _behind_balancer(found, block)
                else "",
            )


def _behind_balancer(found: Found, block: Directive) -> bool:
    """Return whether nginx takes the client's address from what a balancer appended."""
    tree = _tree(found)
    header = tree.effective(block, "real_ip_header")
    return (
        tree.effective(block, "set_real_ip_from") is not None
        and header is not None
        and header.value.lower() == "x-forwarded-for"
    )


def _beside_setters(found: Found, directive: Directive, setter: str, line: str) -> tuple[str, ...]:
    """Return a line for the block whose headers hold for a pass.

    A location that has one of its own inherits none, uwsgi_params and their kin with them.
    """
    for block in reversed(directive.around):
        if any(x.is_(setter) for x in block.inside or []):
            return within(block, line)
    if any(x.is_(setter) for x in _tree(found).top):
        return at_the_end(_tree(found).path, line)
    return within(directive.around[-1], line)


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
    "location",
    holds="Logins are limited by address, and told so by 429",
    harm="One client that tries passwords takes all cores, and everybody else waits.",
    source="docs/plan.md: a login is 0.38 s of a core; nginx, ngx_http_limit_req_module",
)
def limit_req(found: Found) -> Iterator[Finding]:
    """A login costs as much as a thousand cached validations, by design: that is what keeps
    passwords safe. limit_req_status is 503 where nothing is said, which monitoring takes for an
    outage."""
    passes = nginx_passes(found)
    tree = _tree(found)
    # Or in a location for logins alone, whatever the others do.
    beside = [
        x for one in passes for block in one.around for x in tree.all("limit_req", inside=block)
    ]
    held = [x for one in passes if (x := tree.effective(one.around[-1], "limit_req"))]
    if not held and not beside:
        http = tree.last("http")
        zone = _login_zone(tree)
        lines: tuple[str, ...] = (
            'map "$request_method:$uri" $keystone_login {',
            '    default "";',
            '    "~^POST:.*/auth/tokens$" $binary_remote_addr;',
            "}",
            "limit_req_zone $keystone_login zone=keystone_logins:10m rate=5r/s;",
        )
        if not tree.all("limit_req_status"):
            lines += ("limit_req_status 429;",)
        outer = within(http, *lines) if http else at_the_end(tree.path, *lines)
        yield Finding(
            what="nothing limits logins",
            where=(passes[0].place,),
            lines=(
                *(() if zone else outer),
                *within(
                    passes[0].around[-1],
                    f"limit_req zone={zone or 'keystone_logins'} burst=25 nodelay;",
                ),
            ),
        )
        return
    known = (held or beside)[0]
    status = tree.effective(passes[0].around[-1], "limit_req_status")
    if status is None:
        yield Finding(
            what="limit_req answers 503, the default",
            where=(known.place,),
            lines=around(tree, known, "limit_req_status 429;"),
        )


def _login_zone(tree: Tree) -> str:
    """Return the zone for logins that is there and not used; empty if there is none."""
    maps = {
        x.args[1]
        for x in tree.all("map")
        if len(x.args) > 1 and any("auth/tokens" in str(y) for y in x.inside or ())
    }
    for directive in tree.all("limit_req_zone"):
        name = next((x for x in directive.args if x.startswith("zone=")), "")
        if name and directive.args[0] in maps:
            return name.removeprefix("zone=").partition(":")[0]
    return ""


@check(
    "N08",
    INFO,
    "location",
    holds="Connections to an HTTP upstream are kept",
    harm="Each request opens a connection, and thousands of them wait in TIME_WAIT.",
    source="nginx CHANGES 1.29.7: HTTP/1.1 and keepalive by default",
)
def keepalive(found: Found) -> Iterator[Finding]:
    """Before 1.29.7 proxy_pass speaks HTTP/1.0 and closes. (uwsgi_pass never keeps a
    connection.)"""
    tree = _tree(found)
    for directive in nginx_passes(found):
        if not directive.is_("proxy_pass") or "unix:" in directive.value:
            continue
        if found.version("nginx") >= (1, 29, 7):
            return
        version = tree.effective(directive.around[-1], "proxy_http_version")
        upstream = next(
            (
                x.around[-1]
                for _, x in nginx_targets(tree, directive)
                if x.around and x.around[-1].is_("upstream")
            ),
            None,
        )
        kept = upstream is not None and tree.all("keepalive", inside=upstream)
        if version is None or version.value != "1.1" or not kept:
            yield Finding(
                what="proxy_pass closes its connection after each request",
                where=(directive.place,),
                lines=_kept_open(tree, directive, upstream, bool(kept)),
            )


def _kept_open(
    tree: Tree, directive: Directive, upstream: Directive | None, kept: bool
) -> tuple[str, ...]:
    """Return the lines that keep connections: keepalive is an upstream's, and needs one."""
    lines: tuple[str, ...] = ()
    match = re.match(r"(https?://)([^/]+)(.*)", directive.args[0])
    if upstream is not None and not kept:
        # It has to stand after a method of balancing, and after the servers it looks best.
        lines += instead((upstream.inside or [upstream])[-1], *_again(upstream), "keepalive 32;")
    elif upstream is None and match is not None:
        http = next((x for x in directive.around if x.is_("http")), None)
        block = ("upstream keystone_kept {", f"    server {match[2]};", "    keepalive 32;", "}")
        lines += within(http, *block) if http else at_the_end(tree.path, *block)
        lines += instead(directive, f"proxy_pass {match[1]}keystone_kept{match[3]};")
    block_ = directive.around[-1]
    settings = ['proxy_set_header Connection "";']
    version = next((x for x in block_.inside or () if x.is_("proxy_http_version")), None)
    if version is None:
        settings.insert(0, "proxy_http_version 1.1;")
    elif version.value != "1.1":
        lines += instead(version, "proxy_http_version 1.1;")
    if not any(x.is_("proxy_set_header") for x in block_.inside or ()):
        # Its first line of this kind takes away those of the blocks around it: repeat them.
        outer = next(
            (
                [x for x in one.inside or () if x.is_("proxy_set_header")]
                for one in reversed(directive.around[:-1])
                if any(x.is_("proxy_set_header") for x in one.inside or ())
            ),
            [],
        )
        settings += [f"{_line(x)};" for x in outer]
    return (*lines, *within(block_, *settings))


def _again(upstream: Directive) -> tuple[str, ...]:
    inside = upstream.inside or []
    return (f"{_line(inside[-1])};",) if inside else ()


def _line(directive: Directive) -> str:
    """Return a directive as nginx reads it again."""
    words = []
    for word in directive.args:
        if word and not re.search(r"[\s;{}\"']", word):
            words.append(word)
        else:
            words.append(f"'{word}'" if "'" not in word else f'"{word.replace(chr(34), "")}"')
    return " ".join((directive.name, *words))


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
                what=f"{directive}: {why}",
                where=(directive.place,),
                lines=instead(directive, f"# {directive};"),
            )


@check(
    "N10",
    ERROR,
    "nginx",
    holds="nginx speaks TLS 1.2 or newer",
    harm="Passwords travel under a cipher that can be broken; some clients refuse to connect.",
    source="RFC 8996; Mozilla, Server Side TLS, guideline 5.8",
)
def tls_versions(found: Found) -> Iterator[Finding]:
    """TLS 1.0 and 1.1 are deprecated since 2021, SSL 3 since 2015."""
    for directive in _tree(found).all("ssl_protocols"):
        if not concerns(found, directive):
            continue
        old = [x for x in directive.args if x in ("SSLv2", "SSLv3", "TLSv1", "TLSv1.1")]
        if old:
            yield Finding(
                what=str(directive),
                where=(directive.place,),
                lines=instead(directive, "ssl_protocols TLSv1.2 TLSv1.3;"),
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
                lines=instead(directive, f"{_line(_unsaid(directive))};"),
            )


def _unsaid(directive: Directive) -> Directive:
    """Return a format without what is secret."""
    return replace(directive, args=tuple(_SECRETS.sub("-", x) for x in directive.args))


@check(
    "N12",
    ERROR,
    "location",
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
        for directive in nginx_passes(found):
            uwsgi = directive.is_("uwsgi_pass")
            wanted = name if uwsgi else name.removeprefix("HTTP_").replace("_", "-")
            setter = "uwsgi_param" if uwsgi else "proxy_set_header"
            if not _sets(found, directive, setter, wanted.upper()):
                yield Finding(
                    what=f"[{section}] remote_id_attribute {name} is what the client sends",
                    where=(directive.place, setting.place),
                    lines=_beside_setters(found, directive, setter, f'{setter} {wanted} "";'),
                )


def remote_ids(found: Found) -> Iterator[tuple[str, Setting]]:
    """Give the sections whose ``remote_id_attribute`` is a request's header, and the setting.

    Each protocol may have a section of its own, whatever it is called.
    """
    assert found.keystone is not None
    for (section, name), settings in found.keystone.settings.items():
        if name == "remote_id_attribute" and settings[-1].value.startswith("HTTP_"):
            yield section, settings[-1]

"""Checks of HAProxy's configuration (H)."""

from __future__ import annotations

from collections.abc import Iterator

from ..found import Found
from ..registry import ERROR, WARNING, Finding, check
from ..settings import Directive
from .cross_layer import _keystone_sections


def _lines(section: Directive) -> Iterator[Directive]:
    """Give the lines that hold in a section: its own, then those of its defaults."""
    for block in (section, *reversed(section.around)):
        yield from block.inside or ()


def _http(section: Directive) -> bool:
    mode = next((x.value for x in _lines(section) if x.name == "mode"), "tcp")
    return mode == "http"


@check(
    "H01",
    WARNING,
    "haproxy",
    holds="HAProxy tells Keystone the client's address",
    harm="Keystone's log and audit name the balancer, or what the client made up.",
    source="HAProxy, option forwardfor; keystone's ProxyFix believes the last address",
)
def forwardfor(found: Found) -> Iterator[Finding]:
    """option forwardfor appends the address. It belongs into the backend, the frontend or
    defaults."""
    assert found.haproxy is not None
    everywhere = [
        x
        for section in found.haproxy.top
        if section.is_("frontend")
        for x in section.inside or ()
        if x.value.startswith("forwardfor") or ("x-forwarded-for" in x.value.lower())
    ]
    for section in _keystone_sections(found):
        own = [
            x
            for x in _lines(section)
            if "forwardfor" in x.value or ("x-forwarded-for" in x.value.lower())
        ]
        if _http(section) and not own and not everywhere:
            yield Finding(
                what=f"{section} without option forwardfor",
                where=(section.place,),
                lines=("option forwardfor",),
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
                    lines=("stats socket /run/haproxy/admin.sock mode 660 level admin",),
                )
            if local and "mode" in words and words[words.index("mode") + 1][-1] in "2367":
                yield Finding(
                    what=str(directive),
                    where=(directive.place,),
                    lines=(f"stats socket {words[1]} mode 660 level admin",),
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
                what=str(directive), where=(directive.place,), lines=("stats auth USER:PASSWORD",)
            )


@check(
    "H03",
    ERROR,
    "haproxy",
    holds="HAProxy has timeouts for connecting, the client and the server",
    harm="Connections of clients and nodes that are gone stay for ever, until none is left.",
    source="HAProxy warns of it at its start: missing timeouts",
)
def timeouts(found: Found) -> Iterator[Finding]:
    """All three are without an end where nothing is said."""
    for section in _keystone_sections(found):
        known = {x.args[0] for x in _lines(section) if x.name == "timeout" and x.args}
        missing = [x for x in ("connect", "server") if x not in known]
        if section.is_("listen") and "client" not in known:
            missing.append("client")
        if missing:
            yield Finding(
                what=f"{section} without timeout {', '.join(missing)}",
                where=(section.place,),
                lines=tuple(f"timeout {x} {'5s' if x == 'connect' else '90s'}" for x in missing),
            )


@check(
    "H04",
    ERROR,
    "haproxy",
    holds="HAProxy sends no login twice",
    harm="A login or a change that took long is made a second time by another node.",
    source="HAProxy, retry-on: all-retryable-errors, response-timeout",
)
def retry_on(found: Found) -> Iterator[Finding]:
    """A request whose answer is late or lost may have been made. Only what was not sent yet
    (conn-failure) may be tried again, or option disable-l7-retry keeps POST out."""
    for section in _keystone_sections(found):
        for directive in _lines(section):
            again = {"all-retryable-errors", "response-timeout", "empty-response", "junk-response"}
            if (
                directive.is_("retry-on")
                and again & set(directive.args)
                and not any("disable-l7-retry" in x.value for x in _lines(section))
            ):
                yield Finding(
                    what=str(directive), where=(directive.place,), lines=("retry-on conn-failure",)
                )


@check(
    "H05",
    WARNING,
    "haproxy",
    holds="HAProxy looks whether its nodes serve",
    harm="Users of a node that is gone are answered 503 until somebody notices.",
    source="HAProxy, server ... check",
)
def checked(found: Found) -> Iterator[Finding]:
    """Without check a server is up whatever happens."""
    for section in _keystone_sections(found):
        default = any(x.is_("default-server") and "check" in x.args for x in _lines(section))
        for directive in section.inside or ():
            if directive.is_("server") and "check" not in directive.args and not default:
                yield Finding(
                    what=f"{directive} without check",
                    where=(directive.place,),
                    lines=(f"{directive} check",),
                )


@check(
    "H06",
    WARNING,
    "haproxy",
    holds="HAProxy knows its nodes by their certificates",
    harm="Somebody between balancer and node reads passwords.",
    source="HAProxy, server ... ssl verify none",
)
def verify(found: Found) -> Iterator[Finding]:
    """verify none encrypts to whoever answers."""
    for section in _keystone_sections(found):
        for directive in section.inside or ():
            words = directive.args
            if directive.is_("server") and "verify" in words and "none" in words:
                yield Finding(
                    what=str(directive),
                    where=(directive.place,),
                    lines=(
                        str(directive).replace(
                            "verify none", "verify required ca-file /etc/ssl/certs/nodes.pem"
                        ),
                    ),
                )

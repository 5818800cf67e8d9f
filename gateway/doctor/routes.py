"""The ways through a machine's servers to Keystone: passes, aliases, daemons, HAProxy's sections.

The same servers serve the dashboard, other services and anything else on the machine. Settings of
those are none of Keystone's faults, so checks ask here first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .settings import Directive, Tree

if TYPE_CHECKING:
    from .found import Found
    from .readers.uwsgi import UwsgiConf

_NAMES = re.compile(r"keystone|keyfront|identity", re.IGNORECASE)
# Keystone's ports, and those behind a balancer: Apache's of the charms, uWSGI's of the others.
_PORTS = frozenset(
    ("5000", "35357", "4990", "4980", "35347", "35337", "4987", "35344", "5001", "35358")
)
_PORT = re.compile(rf"(?<![\d.])(?:{'|'.join(sorted(_PORTS))})(?!\d)")
_OTHERS = re.compile(
    r"nova|glance|neutron|cinder|placement|heat|horizon|dashboard|swift|ironic|octavia|barbican|"
    r"designate|manila|magnum|aodh|gnocchi|ceilometer|trove|zun|mistral|grafana|prometheus|kibana|"
    r"skyline|rabbitmq|stats|galera|mariadb|mysql|postgres|pgsql|redis|memcache|proxysql|etcd|vault",
    re.IGNORECASE,
)
#: The directives of nginx and of Apache that hand a request on.
NGINX_PASSES = ("uwsgi_pass", "proxy_pass")
APACHE_PASSES = ("proxypass", "proxypassmatch")
ALIASES = ("wsgiscriptalias", "wsgiscriptaliasmatch")
#: The options of uWSGI that name an application.
SERVED = ("module", "wsgi-file", "mount", "callable")
SOCKETS = ("socket", "http-socket", "http11-socket", "https-socket", "http", "https")


def address(text: str) -> str:
    """Return an address in one spelling: a path, or ``127.0.0.1:PORT`` for this machine."""
    text = text.removeprefix("unix:").partition(",")[0].rstrip("/")
    if text.startswith("/"):
        # /var/run is a link to /run; the charms write unix:///var/...
        return re.sub(r"^/+(var/run/|)", lambda x: "/run/" if x[1] else "/", text)
    return re.sub(r"^(0\.0\.0\.0|localhost|\*|\[::1?\])?:", "127.0.0.1:", text)


def is_keystones(text: str) -> bool:
    """Return whether a name, a path or an address says that it is Keystone's."""
    return bool(_NAMES.search(text) or _PORT.search(text))


def is_others(text: str) -> bool:
    """Return whether a name or a path says that it is another service's."""
    return bool(_OTHERS.search(text)) and not _NAMES.search(text)


def serves_keystone(conf: UwsgiConf) -> bool:
    """Return whether a uWSGI serves Keystone; one that does not say what it serves may do so."""
    served = [x.value for x in conf.settings.all(*SERVED)]
    if any(_NAMES.search(x) for x in served):
        return True
    if any(_OTHERS.search(x) for x in served):
        return False
    return not is_others(f"{conf.path.rpartition('/')[2]} {conf.unit}")


def names_keystone(conf: UwsgiConf) -> bool:
    """Return whether a uWSGI's application, file or unit has Keystone's name."""
    served = [x.value for x in conf.settings.all(*SERVED)]
    return any(_NAMES.search(x) for x in (*served, conf.path.rpartition("/")[2], conf.unit))


def _sockets(found: Found) -> set[str]:
    return {address(x.value) for conf in found.uwsgi for x in conf.settings.all(*SOCKETS)}


def _chosen(
    candidates: list[Directive], leads: dict[int, list[str]], texts: list[str], found: Found
) -> list[Directive]:
    """Return those that lead to Keystone's uWSGI or are named after Keystone, or the only one."""
    sockets = _sockets(found)
    named = [
        one
        for number, one in enumerate(candidates)
        if is_keystones(texts[number]) or sockets & {address(x) for x in leads[number]}
    ]
    if named or len(candidates) != 1:
        return named
    return [] if is_others(texts[0]) else candidates


def nginx_targets(tree: Tree, directive: Directive) -> list[tuple[str, Directive]]:
    """Return the addresses behind a pass of nginx, each with the directive that names it."""
    text = re.sub(r"^(https?|uwsgis?)://", "", directive.args[0] if directive.args else "")
    text = text if text.startswith("unix:") else text.partition("/")[0]
    for upstream in tree.all("upstream"):
        if upstream.value == text:
            return [(x.args[0], x) for x in upstream.inside or () if x.is_("server") and x.args]
    return [(re.sub(r":/?$", "", text) if text.startswith("unix:") else text, directive)]


def nginx_passes(found: Found) -> list[Directive]:
    """Return nginx's passes that go to Keystone, each in its location."""
    tree = found.nginx
    if tree is None:
        return []
    passes = [x for x in tree.all(*NGINX_PASSES) if x.around and x.args]
    leads, texts = {}, []
    for number, one in enumerate(passes):
        leads[number] = [x for x, _ in nginx_targets(tree, one)]
        words = [one.value, *leads[number]]
        for block in one.around:
            words.append(block.value)
            if block.is_("server"):
                words += [x.value for x in block.inside or () if x.is_("listen", "server_name")]
        texts.append(" ".join(words))
    return _chosen(passes, leads, texts, found)


def apache_targets(tree: Tree, directive: Directive) -> list[str]:
    """Return the addresses behind a pass of Apache; those of a balancer's members for one."""
    url = next((x for x in directive.args if "://" in x or x.startswith("unix:")), "")
    match = re.match(r"balancer://([^/ ]+)", url)
    if match:
        blocks = [x for x in tree.all("proxy") if f"balancer://{match[1]}" in x.value]
        members = [x for block in blocks for x in tree.all("balancermember", inside=block)]
        return [target for one in members for target in apache_targets(tree, one)]
    match = re.match(r"unix:([^|]+)\|", url)
    if match:
        return [match[1]]
    match = re.match(r"\w+://([^/]+)", url)
    return [match[1]] if match else []


def host_of(directive: Directive) -> Directive | None:
    """Return the VirtualHost of Apache that a directive is in; ``None`` for the main server."""
    return next((x for x in reversed(directive.around) if x.is_("virtualhost")), None)


def _said_around(directive: Directive) -> str:
    """Return the words of a directive of Apache and of the blocks around it on whom they serve."""
    words = [directive.value]
    for block in directive.around:
        words.append(block.value)
        if block.is_("virtualhost"):
            words += [x.value for x in block.inside or () if x.is_("servername", "serveralias")]
    return " ".join(words)


def apache_passes(found: Found) -> list[Directive]:
    """Return Apache's passes that go to Keystone."""
    tree = found.apache
    if tree is None:
        return []
    passes = [x for x in tree.all(*APACHE_PASSES) if x.args and "!" not in x.args[:2]]
    leads = {number: apache_targets(tree, one) for number, one in enumerate(passes)}
    return _chosen(passes, leads, [_said_around(x) for x in passes], found)


def apache_members(found: Found) -> list[Directive]:
    """Return the members of the balancers that Apache's passes to Keystone name."""
    tree = found.apache
    names = {
        match[1]
        for one in apache_passes(found)
        if (match := re.search(r"balancer://([^/ ]+)", one.value))
    }
    if tree is None:
        return []
    blocks = tree.all("proxy")
    known = [x for x in blocks if any(f"balancer://{name}" in x.value for name in names)]
    known = known or [x for x in blocks if "balancer://" in x.value and is_keystones(x.value)]
    return [x for block in known for x in tree.all("balancermember", inside=block)]


def aliases(found: Found) -> list[Directive]:
    """Return the WSGIScriptAlias directives that serve Keystone."""
    tree = found.apache
    if tree is None:
        return []
    known = [x for x in tree.all(*ALIASES) if x.args]
    texts = [f"{_said_around(x)} {' '.join(groups_of(found, x))}" for x in known]
    return _chosen(known, {number: [] for number in range(len(known))}, texts, found)


def groups_of(found: Found, alias: Directive) -> list[str]:
    """Return the names of the process groups that a WSGIScriptAlias may run in."""
    tree = found.apache
    assert tree is not None
    option = next((x for x in alias.args if x.startswith("process-group=")), "")
    if option:
        return [option.partition("=")[2]]
    host = host_of(alias)
    if host is not None:
        within = tree.all("wsgiprocessgroup", inside=host)
        if within:
            return [x.value for x in within]
    # Of the main server: also those for a folder or a path.
    known = [x for x in tree.all("wsgiprocessgroup") if host_of(x) is None]
    return [x.value for x in known]


def daemons(found: Found) -> list[Directive]:
    """Return the WSGIDaemonProcess directives that Keystone runs in."""
    tree = found.apache
    if tree is None:
        return []
    known = [x for x in tree.all("wsgidaemonprocess") if x.args]
    served = aliases(found)
    names = {name for alias in served for name in groups_of(found, alias)}
    chosen = [x for x in known if x.args[0] in names]
    if chosen or not known:
        return chosen
    chosen = [x for x in known if is_keystones(_said_around(x))]
    return chosen or (known if len(known) == 1 and not is_others(_said_around(known[0])) else [])


def _binds(section: Directive) -> Iterator[str]:
    for directive in section.inside or ():
        if directive.is_("bind", "server"):
            words = directive.args[: 2 if directive.is_("server") else 1]
            yield from (x for x in words if ":" in x)


def _at_a_port(section: Directive) -> bool:
    return any(text.rpartition(":")[2] in _PORTS for text in _binds(section))


def backends(found: Found) -> list[Directive]:
    """Return HAProxy's sections with servers that serve Keystone: backend and listen."""
    if found.haproxy is None:
        return []
    sections = [
        one
        for one in found.haproxy.top
        if one.is_("backend", "listen") and any(x.is_("server") for x in one.inside or ())
    ]
    led_to = {
        name
        for one in found.haproxy.top
        if one.is_("frontend") and (_NAMES.search(one.value) or _at_a_port(one))
        for name in _led_to(one)
    }
    chosen = [
        one
        for one in sections
        if _NAMES.search(one.value)
        or (
            not is_others(one.value)
            and ((one.args[:1] and one.args[0] in led_to) or _at_a_port(one))
        )
    ]
    alone = len(sections) == 1 and not is_others(sections[0].value)
    return chosen or (sections if alone else [])


def _led_to(frontend: Directive) -> list[str]:
    """Return the names of the backends that a frontend sends to."""
    return [
        x.args[0]
        for x in frontend.inside or ()
        if x.is_("default_backend", "use_backend") and x.args
    ]


def frontends(found: Found, section: Directive) -> list[Directive]:
    """Return the frontends that send to a section; a ``listen`` is its own."""
    if section.is_("listen"):
        return [section]
    name = section.args[0] if section.args else ""
    return [
        one
        for one in (found.haproxy.top if found.haproxy else ())
        if one.is_("frontend") and name in _led_to(one)
    ]


def haproxy_lines(section: Directive) -> Iterator[Directive]:
    """Give the lines that hold in a section of HAProxy: its own, then those of its defaults."""
    for block in (section, *reversed(section.around)):
        yield from block.inside or ()


def in_http_mode(section: Directive) -> bool:
    """Return whether HAProxy reads HTTP in a section; in TCP mode it writes no header."""
    return next((x.value for x in haproxy_lines(section) if x.name == "mode"), "tcp") == "http"


def writes_header(found: Found, section: Directive) -> bool:
    """Return whether HAProxy writes X-Forwarded-For of all requests to a section."""
    if not in_http_mode(section):
        return False
    fronts = frontends(found, section)
    said = [any(_says(x) for x in haproxy_lines(front)) for front in fronts]
    return any(_says(x) for x in haproxy_lines(section)) or bool(said and all(said))


def _says(directive: Directive) -> bool:
    text = directive.value.lower()
    return "forwardfor" in text or ("set-header x-forwarded-for" in text)


def sends_proxy(section: Directive) -> bool:
    """Return whether HAProxy tells all servers of a section the address by its own protocol."""
    servers = [x for x in section.inside or () if x.is_("server")]
    defaults = [x for x in haproxy_lines(section) if x.is_("default-server")]

    def sends(one: Directive) -> bool:
        return any(word.startswith("send-proxy") for word in one.args)

    return any(map(sends, defaults)) or bool(servers and all(map(sends, servers)))


def appends_address(found: Found) -> bool:
    """Return whether a HAProxy of this machine writes the client's address, or is told to by H01.

    One that tells it by the PROXY protocol leaves the client's own header as it is.
    """
    sections = backends(found)
    return bool(sections) and not any(map(sends_proxy, sections))


def leads(found: Found, server: str) -> bool:
    """Return whether a web server leads to Keystone, or may do so: where nothing is seen to.

    :param server: ``nginx`` or ``apache``
    """
    nginx = bool(nginx_passes(found))
    apache = bool(apache_passes(found) or aliases(found))
    other = apache if server == "nginx" else nginx
    # A balancer leads to uWSGI by itself, and the web server beside it serves the dashboard.
    other |= bool(found.uwsgi) and bool(backends(found)) and not (nginx or apache)
    return (nginx if server == "nginx" else apache) or not other


def has_front(found: Found) -> bool:
    """Return whether a web server or balancer of this machine leads to Keystone."""
    return bool(nginx_passes(found) or apache_passes(found) or backends(found))


def to_itself(tree: Tree) -> list[Directive]:
    """Return Apache's passes to a port that it listens at itself, as a proxy of TLS has it."""
    own = {x.args[0].rpartition(":")[2] for x in tree.all("listen") if x.args}
    return [
        x
        for x in tree.all(*APACHE_PASSES)
        if (match := re.search(r"\bhttp://[^/ ]*?:(\d+)(?:/|\s|$)", x.value)) and match[1] in own
    ]


def concerns(found: Found, directive: Directive) -> bool:
    """Return whether a directive of a web server or balancer may hold for requests to Keystone.

    It does unless it stands in a block for others: a server of nginx, a host of Apache, a section
    of HAProxy. Where nothing leads to Keystone, all may.
    """
    blocks = (*directive.around, directive)
    inner = next((x for x in blocks if x.is_("server", "virtualhost", "frontend", "listen")), None)
    if inner is None or inner.inside is None:
        return True
    if inner.is_("server"):
        served = nginx_passes(found)
    elif inner.is_("virtualhost"):
        served = [*apache_passes(found), *aliases(found)]
        if found.apache is not None and served:
            served += to_itself(found.apache)
    else:
        sections = backends(found)
        return not sections or any(inner in frontends(found, x) for x in sections)
    return not served or any(inner in x.around for x in served)

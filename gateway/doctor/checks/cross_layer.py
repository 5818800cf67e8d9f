"""Checks across layers (X): what is right in each file and wrong between two of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..found import (
    BUFFER_SIZE,
    LISTEN,
    MAX_OVERFLOW,
    MEMCACHE_POOL,
    MERCY,
    POOL_SIZE,
    Found,
    setting_text,
)
from ..readers.uwsgi import UwsgiConf
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Directive, Place, Setting, seconds, size

_RESEARCH = "uWSGI 2.0.31, core/socket.c and core/init.c"
_SOCKETS = ("socket", "http-socket", "http11-socket", "https-socket", "http", "https")
# Seconds that nginx, Apache and HAProxy wait where nothing is set.
_NGINX_READ, _APACHE_TIMEOUT = 60, 60
_READ = ("uwsgi_read_timeout", "proxy_read_timeout")
# MiB that a worker of Keystone takes at least, measured: docs/plan.md.
_WORKER, _SHARED = 107, 97


def _kernel_queue(found: Found) -> tuple[int, Place]:
    """Return the longest queue that the kernel gives, and where that is set."""
    running = found.kernel("net.core.somaxconn")
    if running is not None:
        return running, Place("/proc/sys/net/core/somaxconn")
    setting = found.sysctl.last("net.core.somaxconn") if found.sysctl else None
    if setting is not None and setting.number is not None:
        return setting.number, setting.place
    raise UnknownError("net.core.somaxconn is not known: /proc is not to be read here")


@check(
    "X01",
    ERROR,
    "uwsgi",
    "kernel",
    holds="uWSGI's listen is within net.core.somaxconn",
    harm="uWSGI does not start, after the next boot at the latest.",
    source=_RESEARCH,
)
def listen_within_somaxconn(found: Found) -> Iterator[Finding]:
    """uWSGI compares its queue with net.core.somaxconn of its network namespace and refuses to
    start where it is longer; a container has a namespace of its own. Linux gives 4096 since 5.4,
    128 before."""
    most, place = _kernel_queue(found)
    for conf in found.uwsgi:
        listen = conf.settings.number("listen", default=LISTEN)
        if listen > most:
            yield Finding(
                what=f"listen = {listen} is above net.core.somaxconn {most}",
                where=(conf.settings.place("listen"), place),
                lines=(f"net.core.somaxconn = {listen}",),
                file="/etc/sysctl.d/60-keystone.conf",
            )


@check(
    "X02",
    ERROR,
    "uwsgi",
    "nginx",
    holds="nginx hands no more requests to a unix socket than its queue holds",
    harm="A burst of requests is answered 502 at once, and uWSGI's log says nothing.",
    source="measured: nginx 1.22 before a unix socket with listen 4, 6 of 12 requests got 502; "
    "nginx, src/event/ngx_event_connect.c",
)
def unix_queue(found: Found) -> Iterator[Finding]:
    """connect() to a unix socket whose queue is full fails at once (EAGAIN), where TCP tries again.
    Either the queue is long, or nginx has max_conns with a zone on the server of its upstream,
    below the queue and the threads together."""
    for path, directive in found.unix_upstreams():
        conf = _listening(found, path)
        if conf is None or any(word.startswith("max_conns=") for word in directive.args):
            continue
        if found.apache and directive in found.apache.all("proxypass", "proxypassmatch"):
            continue
        listen = conf.settings.number("listen", default=LISTEN)
        if listen <= LISTEN:
            known = conf.settings.last("listen")
            yield Finding(
                what=f"{path}: listen {setting_text(known, str(LISTEN))}, and nothing in nginx "
                "keeps requests back",
                where=(conf.settings.place("listen"), directive.place),
                lines=("listen = 4096",),
            )


def _listening(found: Found, path: str) -> UwsgiConf | None:
    for conf in found.uwsgi:
        if any(x.value.partition(",")[0] == path for x in conf.settings.all(*_SOCKETS)):
            return conf
    return None


@check(
    "X03",
    ERROR,
    "uwsgi",
    holds="The web server waits longer than uWSGI's harakiri",
    harm="Users get 504 while the worker goes on computing for nobody.",
    source="uWSGI, core/master_checks.c; nginx, ngx_http_uwsgi_module; docs/plan.md",
)
def proxy_waits_longer(found: Found) -> Iterator[Finding]:
    """Whoever is nearer to the client waits longer: then the last one ends a request, and everybody
    hears of it. At or below harakiri the front gives up first, the client tries again, and two
    workers compute what one client wants."""
    longest = [(value, conf) for conf in found.uwsgi if (value := _harakiri(conf))]
    if not longest:
        return
    harakiri, conf = max(longest, key=lambda pair: pair[0])
    for wait, place, line in _fronts(found):
        if wait <= harakiri:
            yield Finding(
                what=f"{line} of {wait:g} s is not above harakiri {harakiri} s",
                where=(place, conf.settings.place("harakiri")),
                lines=(_line(line, harakiri + 10),),
            )


def _line(name: str, value: int) -> str:
    """Return a directive in the syntax of its server."""
    if name in _READ:
        return f"{name} {value}s;"
    return f"{name} {value}" if name == "Timeout" else f"{name} {value}s"


def _harakiri(conf: UwsgiConf) -> int:
    return conf.settings.number("harakiri", "http-harakiri", default=0)


def _fronts(found: Found) -> Iterator[tuple[float, Place, str]]:
    """Give what the web servers before uWSGI wait: seconds, the place, the directive."""
    seen: set[Place] = set()
    tree = found.nginx
    for directive in tree.all("uwsgi_pass", "proxy_pass") if tree else ():
        assert tree is not None
        if not directive.around:
            continue
        name = "uwsgi_read_timeout" if directive.is_("uwsgi_pass") else "proxy_read_timeout"
        known = tree.effective(directive.around[-1], name)
        wait = _NGINX_READ if known is None else seconds(known.value)
        place = directive.place if known is None else known.place
        if wait is not None and place not in seen:
            seen.add(place)
            yield wait, place, name
    tree = found.apache
    for directive in tree.all("proxypass", "proxypassmatch") if tree else ():
        assert tree is not None
        option = next((x for x in directive.args if x.lower().startswith("timeout=")), "")
        known = tree.last("proxytimeout") or tree.last("timeout")
        place = directive.place if option or known is None else known.place
        text = option.partition("=")[2] or (known.value if known else str(_APACHE_TIMEOUT))
        wait = seconds(text)
        if wait is not None and place not in seen:
            seen.add(place)
            yield wait, place, "timeout" if option else known.name if known else "Timeout"


@check(
    "X04",
    WARNING,
    "haproxy",
    holds="HAProxy waits longer than the web server or harakiri behind it",
    harm="Users get 504 from the balancer, which calls a healthy node slow.",
    source="HAProxy, configuration.txt, timeout server; kolla-ansible has 60 s, charms 90 s",
)
def balancer_waits_longer(found: Found) -> Iterator[Finding]:
    """timeout server is the time between two bytes of the server: for a login it is how long the
    login takes. It has to be the longest of all but the client's."""
    inner = [(wait, place, name) for wait, place, name in _fronts(found)]
    inner += [
        (float(_harakiri(conf)), conf.settings.place("harakiri"), "harakiri")
        for conf in found.uwsgi
        if _harakiri(conf)
    ]
    if not inner or found.haproxy is None:
        return
    wait, place, name = max(inner)
    for section in _keystone_sections(found):
        known: Directive | None = None
        for directive in [section, *reversed(section.around)]:
            known = next(
                (
                    x
                    for x in reversed(directive.inside or [])
                    if x.name == "timeout" and x.args[:1] == ("server",) and len(x.args) > 1
                ),
                None,
            )
            if known is not None:
                break
        if known is None:
            continue
        server = seconds(known.args[1], "ms")
        if server is not None and server <= wait:
            yield Finding(
                what=f"timeout server {known.args[1]} is not above {name} {wait:g} s",
                where=(known.place, place),
                lines=(f"timeout server {int(wait) + 5}s",),
            )


def _keystone_sections(found: Found) -> list[Directive]:
    """Return HAProxy's sections with servers that serve Keystone; all if none says so."""
    if found.haproxy is None:
        return []
    sections = [
        one
        for one in found.haproxy.top
        if one.is_("backend", "listen") and any(x.is_("server") for x in one.inside or ())
    ]
    named = [one for one in sections if "keystone" in one.value or "keyfront" in one.value]
    return named or (sections if len(sections) == 1 else [])


@check(
    "X05",
    ERROR,
    "uwsgi",
    "systemd",
    holds="systemd waits longer for the end than uWSGI's worker-reload-mercy",
    harm="A restart kills workers that are still answering, and their requests are lost.",
    source="systemd.kill(5), systemd.service(5); kolla-ansible: 60 s for docker, 80 for uWSGI",
)
def stop_outlasts_mercy(found: Found) -> Iterator[Finding]:
    """TimeoutStopSec is after how long systemd sends SIGKILL, 90 s where nothing is said. Workers
    get worker-reload-mercy to end their requests, 60 s where nothing is said."""
    for conf in found.uwsgi:
        unit = found.unit_of_uwsgi(conf)
        known = unit.service.last("TimeoutStopSec", "TimeoutSec") if unit else None
        if unit is None or known is None:
            continue
        stop = seconds(known.value)
        mercy = conf.settings.number("worker-reload-mercy", default=MERCY)
        if stop and stop <= mercy:
            yield Finding(
                what=f"TimeoutStopSec {known.value} is not above worker-reload-mercy {mercy}",
                where=(known.place, conf.settings.place("worker-reload-mercy")),
                lines=("[Service]", f"TimeoutStopSec={mercy + 5}"),
            )


def _graceful(conf: UwsgiConf) -> Setting | None:
    hook = conf.settings.last("hook-master-start")
    return hook if hook and "gracefully_kill_them_all" in hook.value.split("#")[0] else None


@check(
    "X06",
    ERROR,
    "uwsgi",
    "systemd",
    holds="A graceful stop has an end: TimeoutStopSec, and KillMode that reaches the workers",
    harm="A stop waits for a stuck request for ever, or leaves workers behind that hold the "
    "socket.",
    source="measured: uWSGI 2.0.30 and 2.0.31, mercy 4, a request of 40 s: the master lives on at "
    "30 s; uWSGI, core/uwsgi.c gracefully_kill_them_all",
)
def stop_is_bounded(found: Found) -> Iterator[Finding]:
    """Since 2.0.27 uWSGI enforces neither worker-reload-mercy nor harakiri once the hook has told
    its workers to end. Only systemd's TimeoutStopSec ends it, and only KillMode=mixed or
    control-group reaches the workers then."""
    for conf in found.uwsgi:
        unit, hook = found.unit_of_uwsgi(conf), _graceful(conf)
        if unit is None or hook is None or found.before("uwsgi", 2, 0, 27):
            continue
        stop = unit.service.last("TimeoutStopSec", "TimeoutSec")
        if stop is not None and (stop.value == "infinity" or seconds(stop.value) == 0):
            yield Finding(
                what=f"TimeoutStopSec {stop.value}: nothing ends a graceful stop",
                where=(stop.place, hook.place),
                lines=("[Service]", "TimeoutStopSec=95"),
            )
        mode = unit.service.last("KillMode")
        no_orphans = conf.settings.on("no-orphans")
        if mode is not None and mode.value in ("process", "none") and not no_orphans:
            yield Finding(
                what=f"KillMode={mode.value}: only the master is ended, its workers stay",
                where=(mode.place,),
                lines=("[Service]", "KillMode=mixed"),
                level=WARNING,
            )


@check(
    "X07",
    ERROR,
    "keystone",
    "database",
    holds="All processes' database connections are within 80% of max_connections",
    harm="Under load requests fail with 500: Too many connections.",
    source="oslo.db's defaults 5 and 50; kolla-ansible has max_pool_size 1 and 10000 connections; "
    "docs/plan.md",
)
def database_connections(found: Found) -> Iterator[Finding]:
    """Each process has a pool of its own, and opens max_overflow more under load, but never more
    than it has threads. A fifth is for administrators, backups, and processes that start before
    others have ended."""
    conf = found.keystone
    assert conf is not None
    if conf.text("database", "connection").startswith("sqlite"):
        return
    most = _max_connections(found)
    if most is None:
        raise UnknownError("the database's max_connections: --database-connections N")
    processes, threads = _workers(found)
    pool = conf.number("database", "max_pool_size", POOL_SIZE)
    overflow = conf.number("database", "max_overflow", MAX_OVERFLOW)
    if pool == 0 or overflow < 0:
        each = threads
    else:
        each = min(threads, pool + overflow)
    total = found.told.nodes * processes * each
    if total > most[0] * 0.8:
        fits = max(0, int(most[0] * 0.8) // max(1, found.told.nodes * processes))
        yield Finding(
            what=f"{found.told.nodes} nodes x {processes} processes x {each} connections = "
            f"{total}, "
            f"above 80% of max_connections {most[0]}",
            where=(conf.place("database", "max_pool_size"), *most[1]),
            lines=(
                "[database]",
                f"max_pool_size = {max(1, min(pool, fits))}",
                f"max_overflow = {max(0, fits - max(1, min(pool, fits)))}",
            ),
        )


def _max_connections(found: Found) -> tuple[int, tuple[Place, ...]] | None:
    if found.told.database_connections is not None:
        return found.told.database_connections, ()
    known = found.mysql.last("max_connections") if found.mysql else None
    if known is not None and known.number is not None:
        return known.number, (known.place,)
    return None


def _workers(found: Found) -> tuple[int, int]:
    """Return the processes and threads that serve Keystone.

    :raises UnknownError: neither uWSGI's nor mod_wsgi's configuration was found
    """
    try:
        return found.workers
    except LookupError:
        raise UnknownError("the number of workers: --uwsgi FILE or --apache FILE") from None


@check(
    "X08",
    ERROR,
    "ldap",
    holds="All processes' connections to the directory are within its limit",
    harm="The directory refuses connections, and users cannot log in.",
    source="Keystone's defaults pool_size 10 and auth_pool_size 100, for each process and domain",
)
def ldap_connections(found: Found) -> Iterator[Finding]:
    """ldappool keeps pool_size connections for searches and auth_pool_size for logins, in each
    process: 110 by default, so sixteen processes may hold 1760."""
    if found.told.ldap_connections is None:
        raise UnknownError("how many connections the directory allows: --ldap-connections N")
    processes, threads = _workers(found)
    for conf in found.ldap:
        each = 0
        for use, name, default in (
            ("use_pool", "pool_size", 10),
            ("use_auth_pool", "auth_pool_size", 100),
        ):
            pooled = conf.on("ldap", use, True)
            each += min(threads, conf.number("ldap", name, default)) if pooled else threads
        total = found.told.nodes * processes * each
        if total > found.told.ldap_connections:
            yield Finding(
                what=f"{found.told.nodes} nodes x {processes} processes x {each} connections = "
                f"{total}, above the directory's {found.told.ldap_connections}",
                where=(conf.place("ldap", "pool_size"),),
                lines=("[ldap]", "pool_size = 1", "auth_pool_size = 1"),
            )


@check(
    "X09",
    WARNING,
    "keystone",
    "memcached",
    holds="A process has no more threads than connections to memcached",
    harm="Threads wait for each other's connection, up to 10 s, and requests with them.",
    source="oslo.cache: memcache_pool_maxsize 10, memcache_pool_connection_get_timeout 10; "
    "Debian's puppet default has 32 threads",
)
def memcached_pool(found: Found) -> Iterator[Finding]:
    """oslo_cache.memcache_pool has one pool a process. A thread that finds none free waits for
    memcache_pool_connection_get_timeout and then goes on without the cache."""
    conf = found.keystone
    assert conf is not None
    if "memcache_pool" not in conf.text("cache", "backend"):
        return
    pool = conf.number("cache", "memcache_pool_maxsize", MEMCACHE_POOL)
    _, threads = _workers(found)
    if threads > pool:
        yield Finding(
            what=f"{threads} threads share {pool} connections to memcached",
            where=(conf.place("cache", "memcache_pool_maxsize"),),
            lines=("[cache]", f"memcache_pool_maxsize = {threads}"),
        )


@check(
    "X10",
    ERROR,
    "uwsgi",
    "systemd",
    holds="The workers fit into the memory of their control group",
    harm="The kernel kills workers under load, with the requests that they were computing.",
    source="measured: 97 MiB that workers share and 20 each, or 107 each with lazy-apps: "
    "docs/plan.md",
)
def memory_fits(found: Found) -> Iterator[Finding]:
    """A worker that loads Keystone itself (lazy-apps) takes 107 MiB, one that was forked with
    Keystone loaded 20 and what it caches. MemoryMax counts all of the unit."""
    for conf in found.uwsgi:
        unit = found.unit_of_uwsgi(conf)
        limit = unit.service.last("MemoryMax", "MemoryLimit") if unit else None
        most = size(limit.value) if limit else None
        if limit is None or most is None:
            continue
        lazy = conf.settings.on("lazy-apps") or conf.settings.on("lazy")
        need = conf.processes * (_WORKER if lazy else 20) + (0 if lazy else _SHARED)
        if need > most >> 20:
            yield Finding(
                what=f"{conf.processes} workers need {need} MiB, MemoryMax is {limit.value}",
                where=(limit.place, conf.settings.place("processes")),
                lines=("[Service]", f"MemoryMax={need + need // 4}M"),
            )


@check(
    "X11",
    ERROR,
    "apache",
    holds="Nothing under Apache's prefork is patched by eventlet",
    harm="Heartbeats to RabbitMQ stop between requests, and the broker closes the connections.",
    source="https://bugs.launchpad.net/nova/+bug/1825584; oslo.messaging, heartbeat_in_pthread",
)
def prefork_with_eventlet(found: Found) -> Iterator[Finding]:
    """Green threads run only while something of their process runs; a prefork or daemon process
    between two requests is stopped in C code. oslo.messaging's heartbeat is a green thread there,
    unless heartbeat_in_pthread says otherwise."""
    assert found.apache is not None
    if _mpm(found) != "prefork":
        return
    for directive in found.apache.all("wsgiscriptalias"):
        script = directive.args[1] if len(directive.args) > 1 else ""
        text = found.files.text(script, wanted=False) if script.startswith("/") else None
        if text and re.search(r"eventlet|monkey_patch|nova[-.]", text):
            pthread = found.keystone and found.keystone.on(
                "oslo_messaging_rabbit", "heartbeat_in_pthread"
            )
            if not pthread:
                yield Finding(
                    what=f"{script} uses eventlet under prefork",
                    where=(directive.place,),
                    lines=("[oslo_messaging_rabbit]", "heartbeat_in_pthread = true"),
                    file=found.keystone.path if found.keystone else "",
                )


def _mpm(found: Found) -> str:
    assert found.apache is not None
    for directive in found.apache.all("loadmodule"):
        match = re.fullmatch(r"mpm_(\w+)_module", directive.args[0] if directive.args else "")
        if match:
            return match[1]
    return ""


@check(
    "X12",
    ERROR,
    "nginx",
    holds="nginx may open two files for each of its worker_connections",
    harm="Beyond half of the connections requests fail: Too many open files.",
    source="nginx, ngx_core_module; gixy-ng, worker_rlimit_nofile_vs_connections",
)
def open_files(found: Found) -> Iterator[Finding]:
    """A request that is handed on takes two connections, and each is an open file, beside logs and
    temporary files. The limit is worker_rlimit_nofile, or else that of the unit (LimitNOFILE, whose
    default is 1024 for the soft limit)."""
    tree = found.nginx
    assert tree is not None
    known = tree.last("worker_connections")
    connections = int(known.value) if known and known.value.isdigit() else 512
    rlimit = tree.last("worker_rlimit_nofile")
    unit = found.unit_of("nginx")
    limit = unit.service.last("LimitNOFILE") if unit else None
    if rlimit is not None and rlimit.value.isdigit():
        files, place = int(rlimit.value), rlimit.place
    elif limit is not None:
        text = limit.value.partition(":")[0]
        files, place = int(text) if text.isdigit() else 1 << 30, limit.place
    else:
        files, place = 1024, Place(tree.path)
    if files < 2 * connections:
        yield Finding(
            what=f"{files} open files for worker_connections {connections}",
            where=(place, known.place if known else Place(tree.path)),
            lines=(f"worker_rlimit_nofile {2 * connections + 64};",),
            file=tree.path,
        )


@check(
    "X13",
    ERROR,
    "uwsgi",
    holds="The web server sends to a socket at which uWSGI listens",
    harm="Every request is answered 502.",
    source="nginx, ngx_http_uwsgi_module; httpd, mod_proxy_uwsgi",
)
def socket_is_listened_at(found: Found) -> Iterator[Finding]:
    """The path that nginx or Apache names has to be one of uWSGI's, letter by letter."""
    paths = {
        x.value.partition(",")[0]: x for conf in found.uwsgi for x in conf.settings.all(*_SOCKETS)
    }
    units = {
        x.value for unit in found.units.values() for x in unit.section("Socket").all("ListenStream")
    }
    if not paths:
        return
    for path, directive in found.unix_upstreams():
        if path not in paths and path not in units and "%" not in path + "".join(paths):
            own = next((x for x in paths if x.startswith("/")), next(iter(paths)))
            if "keystone" not in path and "keyfront" not in path and "uwsgi" not in path:
                continue  # another service's
            yield Finding(
                what=f"{path} is no socket of uWSGI, which has {', '.join(sorted(paths))}",
                where=(directive.place, paths[own].place),
                lines=(str(directive).replace(path, own),),
            )


@check(
    "X14",
    ERROR,
    "uwsgi",
    "nginx",
    holds="nginx speaks the protocol that uWSGI's socket speaks",
    harm="Every request is answered 502, or uWSGI logs invalid request block size.",
    source="uWSGI, core/protocol.c: HTTP read as the uwsgi protocol is a block of 21573 bytes",
)
def protocol_fits(found: Found) -> Iterator[Finding]:
    """uwsgi_pass speaks to socket, proxy_pass to http-socket. The uwsgi protocol costs less, HTTP
    takes chunked bodies."""
    kinds = {_address(x.value): x for conf in found.uwsgi for x in conf.settings.all(*_SOCKETS)}
    assert found.nginx is not None
    for directive in found.nginx.all("uwsgi_pass", "proxy_pass"):
        for target in _targets(found, directive):
            setting = kinds.get(_address(target))
            if setting is None:
                continue
            http = setting.name != "socket"
            if http is directive.is_("uwsgi_pass"):
                right = f"proxy_pass http://{target};" if http else f"uwsgi_pass {target};"
                yield Finding(
                    what=f"{directive.name} to {target}, which is {setting.name} of uWSGI",
                    where=(directive.place, setting.place),
                    lines=(right,),
                )


def _address(text: str) -> str:
    text = text.removeprefix("unix:").partition(",")[0]
    return re.sub(r"^(0\.0\.0\.0|localhost|\*)?:", "127.0.0.1:", text)


def _targets(found: Found, directive: Directive) -> list[str]:
    """Return the addresses behind a pass: its own, or those of the upstream it names."""
    assert found.nginx is not None
    text = re.sub(r"^(https?|uwsgis?)://", "", directive.args[0] if directive.args else "")
    text = text if text.startswith("unix:") else text.partition("/")[0]
    for upstream in found.nginx.all("upstream"):
        if upstream.value == text:
            return [x.args[0] for x in upstream.inside or () if x.is_("server") and x.args]
    return [re.sub(r":/?$", "", text) if text.startswith("unix:") else text]


@check(
    "X15",
    WARNING,
    "keystone",
    holds="Behind a server that ends TLS Keystone goes by X-Forwarded-Proto",
    harm="Links in answers begin with http://, and clients follow them past TLS or not at all.",
    source="oslo.middleware, http_proxy_to_wsgi: enable_proxy_headers_parsing is false by default",
)
def proxy_headers(found: Found) -> Iterator[Finding]:
    """Keystone makes the links of its answers from public_endpoint, or else from the request as it
    came, which is HTTP behind a TLS proxy. enable_proxy_headers_parsing lets it believe the proxy;
    or public_endpoint is set."""
    conf = found.keystone
    assert conf is not None
    if found.tls is None or conf.last("default", "public_endpoint"):
        return
    if not conf.on("oslo_middleware", "enable_proxy_headers_parsing"):
        yield Finding(
            what="TLS ends in front, and enable_proxy_headers_parsing is off",
            where=(conf.place("oslo_middleware", "enable_proxy_headers_parsing"), found.tls),
            lines=("[oslo_middleware]", "enable_proxy_headers_parsing = true"),
        )


@check(
    "X16",
    WARNING,
    "haproxy",
    holds="The balancer's check does not wait in the workers' queue only to be told 200",
    harm="Under load all nodes fail their checks at once and are taken out; a broken one stays in.",
    source="oslo.middleware, healthcheck: [healthcheck] backends is empty; openstack-helm "
    "9a28908d5",
)
def health_check(found: Found) -> Iterator[Finding]:
    """/healthcheck is answered by a worker, so it waits behind all others' requests, and with no
    backends it says 200 whatever the database does. Give it time: a rise and fall over several
    checks and timeout check of the latency that users bear; and let it check something."""
    assert found.haproxy is not None
    conf = found.keystone
    if conf is not None and conf.text("healthcheck", "backends"):
        return
    for section in _keystone_sections(found):
        for directive in section.inside or ():
            checked = directive.is_("option") and directive.args[:1] == ("httpchk",)
            if checked and "/healthcheck" in directive.value and not _patient(section):
                yield Finding(
                    what="httpchk of /healthcheck: it waits in the queue, and checks nothing",
                    where=(directive.place,),
                    lines=("timeout check 10s", "default-server inter 5s fall 5 rise 2"),
                )


def _patient(section: Directive) -> bool:
    """Tell whether a backend's checks have a time of their own."""
    for block in (section, *section.around):
        for directive in block.inside or ():
            if directive.is_("timeout") and directive.args[:1] == ("check",):
                return True
    return False


@check(
    "X17",
    WARNING,
    "uwsgi",
    "memcached",
    holds="memcached takes the connections of all workers",
    harm="New connections hang, and each lookup in the cache takes its whole timeout.",
    source="memcached's default -c 1024; kolla-ansible has 5000",
)
def memcached_connections(found: Found) -> Iterator[Finding]:
    """Above -c memcached stops accepting until somebody leaves: connections hang instead of being
    refused, for all services that share it."""
    most = found.told.memcached_connections
    place: tuple[Place, ...] = ()
    known = found.memcached.last("-c") if found.memcached else None
    if most is None and known is not None and known.number is not None:
        most, place = known.number, (known.place,)
    if most is None:
        raise UnknownError("memcached's -c: --memcached-connections N")
    processes, threads = _workers(found)
    conf = found.keystone
    pool = conf.number("cache", "memcache_pool_maxsize", MEMCACHE_POOL) if conf else MEMCACHE_POOL
    total = found.told.nodes * processes * min(threads, pool)
    if total > most:
        yield Finding(
            what=f"{total} connections of {found.told.nodes} nodes, memcached takes {most}",
            where=place,
            lines=(f"-c {max(1024, 2 * total)}",),
        )


@check(
    "X18",
    WARNING,
    "nginx",
    holds="nginx takes bodies as large as Keystone takes, and no larger",
    harm="Long mappings or policies are refused 413, or anybody may fill the disk of the node.",
    source="oslo.middleware, sizelimit: max_request_body_size 114688",
)
def body_size(found: Found) -> Iterator[Finding]:
    """client_max_body_size is 1m where nothing is set, which is more than Keystone takes and does
    no harm. Below 114688 nginx refuses what Keystone would take; 0 is without a limit."""
    tree = found.nginx
    assert tree is not None
    most = (
        found.keystone.number("oslo_middleware", "max_request_body_size", 114688)
        if (found.keystone)
        else 114688
    )
    for directive in tree.all("client_max_body_size"):
        value = size(directive.value)
        if value is not None and (value == 0 or value < most):
            yield Finding(
                what=f"client_max_body_size {directive.value}, Keystone takes {most}",
                where=(directive.place,),
                lines=(f"client_max_body_size {most};",),
            )


@check(
    "X19",
    ERROR,
    "uwsgi",
    "keystone",
    holds="Threads have a database connection each",
    harm="Under load threads wait 30 s for each other's connection, then requests fail with 500.",
    source="SQLAlchemy, QueuePool; oslo.db, pool_timeout 30",
)
def database_pool(found: Found) -> Iterator[Finding]:
    """A thread has one transaction at a time, so a process that has more threads than max_pool_size
    and max_overflow together lets some wait. That is right only where the database allows no
    more."""
    conf = found.keystone
    assert conf is not None
    if not conf.last("database", "max_pool_size") and not conf.last("database", "max_overflow"):
        return
    pool = conf.number("database", "max_pool_size", POOL_SIZE)
    overflow = conf.number("database", "max_overflow", MAX_OVERFLOW)
    for uwsgi in found.uwsgi:
        if pool > 0 and overflow >= 0 and uwsgi.threads > pool + overflow:
            yield Finding(
                what=f"{uwsgi.threads} threads share {pool} + {overflow} connections",
                where=(conf.place("database", "max_overflow"), uwsgi.settings.place("threads")),
                lines=("[database]", f"max_overflow = {uwsgi.threads - pool}"),
            )


@check(
    "X20",
    INFO,
    "apache",
    "uwsgi",
    holds="Apache has as many workers as shall wait before uWSGI's unix socket",
    harm="Requests wait in Apache's threads, and clients beyond them cannot even connect.",
    source="measured: Apache's connect() to a full unix socket blocks its thread; httpd, mod_proxy",
)
def apache_is_the_queue(found: Found) -> Iterator[Finding]:
    """Before a unix socket Apache's threads are the queue: uWSGI sees no more requests than Apache
    has workers, so its listen does nothing beyond that."""
    assert found.apache is not None
    most = found.apache.last("maxrequestworkers", "maxclients")
    unix = [x for x in found.unix_upstreams() if x[1].is_("proxypass", "proxypassmatch")]
    if most is None or not most.value.isdigit() or not unix:
        return
    for path, directive in unix:
        conf = _listening(found, path)
        capacity = conf.processes * conf.threads if conf else 0
        if conf and int(most.value) < 2 * capacity:
            yield Finding(
                what=f"MaxRequestWorkers {most.value} for {capacity} requests at a time of uWSGI",
                where=(most.place, directive.place),
                lines=(f"MaxRequestWorkers {max(256, 8 * capacity)}",),
            )


@check(
    "X21",
    WARNING,
    "uwsgi",
    holds="What is believed of X-Forwarded-For was written by the server in front",
    harm="Logs and Keystone's audit name an address that the client made up.",
    source="keystone/server/flask/core.py: ProxyFix(x_for=1, x_proto=1) is always on; werkzeug",
)
def forwarded_for(found: Found) -> Iterator[Finding]:
    """Keystone believes the last X-Forwarded-For of every request. Where uWSGI itself can be
    reached from the network, or the server in front hands a client's header on, that is what the
    client says."""
    own = ("127.", "localhost", "[::1]", "/", "@", "fd://")
    for conf in found.uwsgi:
        front = bool(found.nginx or found.apache or found.haproxy)
        for setting in conf.settings.all("http-socket", "http", "https", "https-socket"):
            host = setting.value
            if front and not host.startswith(own) and "$" not in host and not _haproxy_only(found):
                yield Finding(
                    what=f"{setting.name} = {setting.value} is reached past the server in front",
                    where=(setting.place,),
                    lines=(
                        f"{setting.name} = 127.0.0.1:{host.partition(',')[0].rpartition(':')[2]}",
                    ),
                )


def _haproxy_only(found: Found) -> bool:
    """Tell whether the front is a balancer, which may run on another machine."""
    return found.haproxy is not None and not (found.nginx or found.apache)


@check(
    "X22",
    ERROR,
    "uwsgi",
    holds="buffer-size takes the headers that the server in front lets through",
    harm="Requests with long headers (OIDC, SAML, long Host lists) are answered 502 or 500.",
    source="uWSGI, core/protocol.c: invalid request block size; httpd: AH10259 above 65535",
)
def headers_fit(found: Found) -> Iterator[Finding]:
    """A request's headers come to uWSGI in one block, which has to fit into buffer-size: 4096 where
    nothing is set, 65535 at most."""
    if found.nginx is None:
        return
    known = found.nginx.last("large_client_header_buffers")
    most = 8192 if known is None else size(known.args[-1]) or 0
    for conf in found.uwsgi:
        setting = conf.settings.last("buffer-size")
        buffer = min(65535, conf.settings.number("buffer-size", default=BUFFER_SIZE))
        if (
            buffer < most
            and setting is not None
            and any(setting.place.path for _ in conf.settings.all("socket"))
        ):
            yield Finding(
                what=f"buffer-size {setting.value} is below nginx's {most} bytes of headers",
                where=(setting.place, known.place if known else Place(found.nginx.path)),
                lines=("buffer-size = 65535",),
            )

"""Checks across layers (X): what is right in each file and wrong between two of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import routes
from ..advice import for_tree, instead, within
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
from ..routes import haproxy_lines
from ..settings import Directive, Place, Setting, Tree, seconds, size

_RESEARCH = "uWSGI 2.0.31, core/socket.c and core/init.c"
# Seconds that nginx, Apache and HAProxy wait where nothing is set.
_NGINX_READ, _APACHE_TIMEOUT = 60, 60
# Columns of a line of advice, so that a report of 80 has room for it and its mark.
_ADVICE = 63
_READ = ("uwsgi_read_timeout", "proxy_read_timeout")
# What event and worker hold without another ServerLimit: 16 processes of 25 threads.
_EVENT = 400
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
        if directive.is_(*routes.APACHE_PASSES):
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
        sockets = {routes.address(x.value) for x in conf.settings.all(*routes.SOCKETS)}
        if routes.address(path) in sockets:
            return conf
    return None


@check(
    "X03",
    ERROR,
    "server",
    holds="The web server waits longer than uWSGI's harakiri or mod_wsgi's request-timeout",
    harm="Users get 504 while the worker goes on computing for nobody.",
    source="uWSGI, core/master_checks.c; nginx, ngx_http_uwsgi_module; mod_wsgi, "
    "WSGIDaemonProcess, socket-timeout; docs/plan.md",
)
def proxy_waits_longer(found: Found) -> Iterator[Finding]:
    """Whoever is nearer to the client waits longer: then the last one ends a request, and everybody
    hears of it. At or below harakiri the front gives up first, the client tries again, and two
    workers compute what one client wants. Before a daemon of mod_wsgi Apache waits socket-timeout,
    which is Timeout where nothing is said."""
    longest = [(value, conf) for conf in found.uwsgi if (value := _harakiri(conf))]
    if longest:
        harakiri, conf = max(longest, key=lambda pair: pair[0])
        for front in _fronts(found):
            if front.wait <= harakiri:
                yield Finding(
                    what=f"{front.name} of {front.wait:g} s is not above harakiri {harakiri} s",
                    where=(front.place, conf.settings.place("harakiri")),
                    lines=front.advised(harakiri + 10),
                )
    for bound in _request_timeouts(found):
        wait, known = before_daemon(found, bound.directive, bound.options)
        if wait <= bound.wait:
            yield Finding(
                what=f"request-timeout {bound.wait:g} is not below the {wait:g} s that Apache "
                f"waits for the daemon ({_named(known)})",
                where=(bound.directive.place, *((known.place,) if known else ())),
                lines=instead(
                    bound.directive,
                    *daemon_lines(found, bound.directive, bound.options),
                ),
            )


@dataclass(frozen=True)
class _Bound:
    """The time that a daemon of mod_wsgi lets a request take, in seconds."""

    wait: float
    directive: Directive
    options: dict[str, str]


def _request_timeouts(found: Found) -> list[_Bound]:
    bounds = []
    for directive, options in found.daemons:
        wait = seconds(options.get("request-timeout", "0"))
        if wait:
            bounds.append(_Bound(wait, directive, options))
    return bounds


def _named(known: Directive | None) -> str:
    """Return the name of what says how long Apache waits for a daemon."""
    if known is None:
        return "Timeout 60, the default"
    return "socket-timeout" if known.name.lower() == "wsgidaemonprocess" else known.name


def before_daemon(
    found: Found, daemon: Directive, options: dict[str, str]
) -> tuple[float, Directive | None]:
    """Return the time that Apache waits for a daemon, and the directive that says so."""
    own = seconds(options.get("socket-timeout", "0"))
    if own:
        return own, daemon
    tree = found.apache
    assert tree is not None
    served = next((x for x in routes.aliases(found)), daemon)
    known = _of_host(tree, served, "timeout")
    wait = seconds(known.value) if known else None
    return (wait, known) if wait is not None else (_APACHE_TIMEOUT, None)


def daemon_lines(
    found: Found, directive: Directive, options: dict[str, str]
) -> tuple[str, ...]:
    """Return a WSGIDaemonProcess with all that it lacks: the same for all checks of it."""
    wait, _ = before_daemon(found, directive, options)
    own = seconds(options.get("request-timeout", "0")) or 0
    more = {
        # Below what Apache waits for the daemon: X03.
        "request-timeout": f"{min(60, max(wait - 10, wait / 2, 1)):.0f}",
        "queue-timeout": "45",
        "graceful-timeout": "30",
    }
    missing = [f"{name}={value}" for name, value in more.items() if not options.get(name)]
    line = _without(directive, *(name for name in more if not options.get(name)))
    if int(options.get("processes", 1)) * int(options.get("threads", 15)) < 2:
        line = _without(directive, *more, "processes", "threads")
        kept = [f"{name}={options[name]}" for name in more if options.get(name)]
        missing = ["processes=4", "threads=2", *kept, *missing]
    if own and wait <= own:
        line = [word for word in line if not word.lower().startswith("socket-timeout=")]
        missing.append(f"socket-timeout={int(own) + 10}")
    return folded([*line, *missing])


def folded(words: Iterable[str]) -> tuple[str, ...]:
    """Return a directive of Apache in lines that fit into a report, continued by a backslash."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > _ADVICE:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return (*(f"{line} \\" for line in lines[:-1]), lines[-1])


def _without(directive: Directive, *options: str) -> list[str]:
    """Return the words of a directive without some of its options."""
    kept = [x for x in directive.args if x.partition("=")[0].lower() not in options]
    return [directive.name, *(_quoted(x) for x in kept)]


def _quoted(word: str) -> str:
    """Return a word as Apache reads it again."""
    return f'"{word}"' if not word or re.search(r"[\s\"]", word) else word


def _of_host(tree: Tree, directive: Directive, *names: str) -> Directive | None:
    """Return the directive that holds for a pass or an alias: its host's, or the main server's."""
    host = routes.host_of(directive)
    known = [x for x in tree.all(*names) if routes.host_of(x) in (host, None)]
    own = [x for x in known if host is not None and routes.host_of(x) is host]
    return next(reversed(own or known), None)


def _harakiri(conf: UwsgiConf) -> int:
    return conf.settings.number("harakiri", "http-harakiri", default=0)


@dataclass(frozen=True)
class _Front:
    """The time that a web server waits for uWSGI.

    :param wait: seconds
    :param place: the place of the directive, or of the pass that the default holds for
    :param name: the directive's name
    :param handed: the pass
    :param known: the directive that sets the time; ``None`` for the default
    """

    wait: float
    place: Place
    name: str
    handed: Directive
    known: Directive | None

    def advised(self, value: int) -> tuple[str, ...]:
        """Return the line that waits for so many seconds."""
        if self.name in _READ:
            line = f"{self.name} {value}s;"
            return (
                instead(self.known, line)
                if self.known is not None
                else within(self.handed.around[-1], line)
            )
        if self.name == "timeout":
            words = [*_without(self.handed, "timeout"), f"timeout={value}"]
            return instead(self.handed, *folded(words))
        if self.known is None:
            return instead(self.handed, *folded([*_without(self.handed), f"timeout={value}"]))
        return instead(self.known, f"{self.known.name} {value}")


def _fronts(found: Found) -> Iterator[_Front]:
    """Yield the times that the web servers before uWSGI wait for Keystone."""
    seen: set[Place] = set()
    for directive in routes.nginx_passes(found):
        assert found.nginx is not None
        name = "uwsgi_read_timeout" if directive.is_("uwsgi_pass") else "proxy_read_timeout"
        known = found.nginx.effective(directive.around[-1], name)
        wait = _NGINX_READ if known is None else seconds(known.value)
        place = directive.place if known is None else known.place
        if wait is not None and place not in seen:
            seen.add(place)
            yield _Front(wait, place, name, directive, known)
    for directive in routes.apache_passes(found):
        assert found.apache is not None
        option = next((x for x in directive.args if x.lower().startswith("timeout=")), "")
        known = _of_host(found.apache, directive, "proxytimeout") or _of_host(
            found.apache, directive, "timeout"
        )
        place = directive.place if option or known is None else known.place
        text = option.partition("=")[2] or (known.value if known else str(_APACHE_TIMEOUT))
        wait = seconds(text)
        if wait is not None and place not in seen:
            seen.add(place)
            name = "timeout" if option else known.name if known else "Timeout"
            yield _Front(wait, place, name, directive, None if option else known)


@check(
    "X04",
    WARNING,
    "backend",
    holds="HAProxy waits longer than the web server or harakiri behind it",
    harm="Users get 504 from the balancer, which calls a healthy node slow.",
    source="HAProxy, configuration.txt, timeout server, timeout client; kolla-ansible has 60 s, "
    "charms 90 s",
)
def balancer_waits_longer(found: Found) -> Iterator[Finding]:
    """timeout server is the time between two bytes of the server: for a login it is how long the
    login takes. It has to be the longest of all but the client's, which is not below it: in TCP
    mode a client that waits for its answer is silent as long as the server."""
    inner = [(front.wait, front.place, front.name) for front in _fronts(found)]
    inner += [
        (float(_harakiri(conf)), conf.settings.place("harakiri"), "harakiri")
        for conf in found.uwsgi
        if _harakiri(conf)
    ]
    inner += [(x.wait, x.directive.place, "request-timeout") for x in _request_timeouts(found)]
    longest = max(inner, default=None)
    for section in routes.backends(found):
        known = _timeout(section, "server")
        server = seconds(known.args[1], "ms") if known else None
        if longest and known is not None and server is not None and server <= longest[0]:
            yield Finding(
                what=f"timeout server {known.args[1]} is not above {longest[2]} {longest[0]:g} s",
                where=(known.place, longest[1]),
                lines=instead(known, f"timeout server {int(longest[0]) + 5}s"),
            )
        for front in routes.frontends(found, section):
            patience = _timeout(front, "client")
            client = seconds(patience.args[1], "ms") if patience else None
            if patience is None or client is None or known is None or server is None:
                continue
            if client < server:
                yield Finding(
                    what=f"timeout client {patience.args[1]} is below timeout server "
                    f"{known.args[1]}",
                    where=(patience.place, known.place),
                    lines=instead(patience, f"timeout client {known.args[1]}"),
                )
    if not inner:
        raise UnknownError(
            "what is behind HAProxy has no harakiri or request-timeout, or is on another machine"
        )


def _timeout(section: Directive, name: str) -> Directive | None:
    """Return the timeout that holds in a section of HAProxy, its defaults' included."""
    for block in (section, *reversed(section.around)):
        known = [
            x
            for x in block.inside or ()
            if x.is_("timeout") and x.args[:1] == (name,) and len(x.args) > 1
        ]
        if known:
            return known[-1]
    return None


@check(
    "X05",
    ERROR,
    "uwsgi",
    holds="systemd, docker or Kubernetes waits longer than uWSGI's worker-reload-mercy",
    harm="A restart kills workers that are still answering, and their requests are lost.",
    source="systemd.kill(5), systemd.service(5); docker stop; kolla-ansible: 60 s for docker, 80 "
    "for uWSGI",
)
def stop_outlasts_mercy(found: Found) -> Iterator[Finding]:
    """TimeoutStopSec is after how long systemd sends SIGKILL, 90 s where nothing is said; docker
    gives 10 s, Kubernetes terminationGracePeriodSeconds, 30. Workers get worker-reload-mercy to end
    their requests, 60 s where nothing is said. In a container nothing tells what its engine gives:
    --stop-seconds N does."""
    unknown = False
    for conf in found.uwsgi:
        mercy = conf.settings.number("worker-reload-mercy", default=MERCY)
        known = found.stop_of(conf)
        unknown |= known is None and (found.in_container or found.is_of_a_container(conf.path))
        if known is None or not known[0] or known[0] > mercy:
            continue
        stop, place, name = known
        lines: tuple[str, ...] = ("[Service]", f"TimeoutStopSec={mercy + 5}")
        if not name.startswith("Timeout"):
            lines = (f"worker-reload-mercy = {max(1, int(stop) - 5)}",)
        yield Finding(
            what=f"{name if ' ' in name else f'{name} {stop:g} s'} is not above "
            f"worker-reload-mercy {mercy}",
            where=(place, conf.settings.place("worker-reload-mercy")),
            lines=lines,
            file="" if name.startswith("Timeout") else conf.path,
        )
    if unknown:
        raise UnknownError("how long the container's engine waits: --stop-seconds N")


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
    processes, _ = _workers(found)
    pool = conf.number("database", "max_pool_size", POOL_SIZE)
    overflow = conf.number("database", "max_overflow", MAX_OVERFLOW)
    unbound = pool == 0 or overflow < 0
    each_of = [x.threads if unbound else min(x.threads, pool + overflow) for x in found.serving]
    per_node = sum(x.processes * each for x, each in zip(found.serving, each_of, strict=True))
    each = max(each_of)
    total = found.told.nodes * per_node
    if total > most[0] * 0.8:
        fits = max(0, int(most[0] * 0.8) // max(1, found.told.nodes * processes))
        yield Finding(
            what=f"{found.told.nodes} nodes x {processes} processes x up to {each} connections = "
            f"{total}, above 80% of max_connections {most[0]}",
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


# What a directory takes where nobody raised it: files that Debian's slapd may open.
_DIRECTORY = 1024


@check(
    "X08",
    ERROR,
    "ldap",
    holds="All processes' connections to the directory are within its limit",
    harm="The directory refuses connections, and users cannot log in.",
    source="Keystone's defaults pool_size 10 and auth_pool_size 100, for each process and domain; "
    "slapd's 1024 open files; Active Directory's MaxConnections 5000 for all of its clients",
)
def ldap_connections(found: Found) -> Iterator[Finding]:
    """ldappool keeps pool_size connections for searches and auth_pool_size for logins, in each
    process: 110 by default, so sixteen processes may hold 1760. Without --ldap-connections the
    1024 open files of a slapd as it comes are taken for the limit, which is a warning."""
    told = found.told.ldap_connections
    most = _DIRECTORY if told is None else told
    _workers(found)
    for conf in found.ldap:
        sizes = [
            conf.number("ldap", name, default) if conf.on("ldap", use, True) else None
            for use, name, default in (
                ("use_pool", "pool_size", 10),
                ("use_auth_pool", "auth_pool_size", 100),
            )
        ]
        # A pool keeps what one burst opened. A thread has one of each at a time.
        kept = 0
        for one in found.serving:
            each = sum(one.threads if size is None else min(one.threads, size) for size in sizes)
            kept += one.processes * each
        total = found.told.nodes * kept
        if total > most:
            said = f"the directory's {most}" if told is not None else f"{most}, slapd's files"
            yield Finding(
                what=f"{found.told.nodes} nodes hold up to {total} connections, above {said}",
                where=(conf.place("ldap", "pool_size"),),
                lines=("[ldap]", "pool_size = 1", "auth_pool_size = 1"),
                level="" if told is not None else WARNING,
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
    "server",
    holds="The workers fit into the memory of their control group",
    harm="The kernel kills workers under load, with the requests that they were computing.",
    source="measured: 97 MiB that workers share and 20 each, or 107 each with lazy-apps: "
    "docs/plan.md; Linux, cgroup-v2.rst, memory.max",
)
def memory_fits(found: Found) -> Iterator[Finding]:
    """A worker that loads Keystone itself (lazy-apps, mod_wsgi) takes 107 MiB, one that was forked
    with Keystone loaded 20 and what it caches. The limit is MemoryMax of the unit, or memory.max of
    the control group: a container's own, or with --live that of Keystone's processes."""
    known = False
    for conf in found.uwsgi:
        unit = found.unit_of_uwsgi(conf)
        limit = unit.service.last("MemoryMax", "MemoryLimit") if unit else None
        most = size(limit.value) if limit else None
        known |= unit is not None
        if limit is None or most is None:
            continue
        need = _memory(conf)
        if need > most >> 20:
            yield Finding(
                what=f"{conf.processes} workers need {need} MiB, MemoryMax is {limit.value}",
                where=(limit.place, conf.settings.place("processes")),
                lines=("[Service]", f"MemoryMax={need + need // 4}M"),
            )
    if found.memory_limit is not None:
        most, place = found.memory_limit
        need = sum(_memory(conf) for conf in found.uwsgi)
        if not found.uwsgi:
            need = _WORKER * found.workers[0]
        if need > most >> 20:
            fits = max(1, (most >> 20) * 4 // 5 // _WORKER)
            daemon = next((x for x, _ in found.daemons), None)
            if found.uwsgi or daemon is None:
                lines: tuple[str, ...] = (f"processes = {fits}",)
            else:
                words = [*_without(daemon, "processes"), f"processes={fits}"]
                lines = instead(daemon, *folded(words))
            yield Finding(
                what=f"{found.workers[0]} workers need {need} MiB, the control group has "
                f"{most >> 20}",
                where=(place, found.uwsgi[0].settings.place("processes"))
                if found.uwsgi
                else (place, *((daemon.place,) if daemon else ())),
                lines=lines,
                file=found.uwsgi[0].settings.place("processes").path if found.uwsgi else "",
            )
    elif not known:
        raise UnknownError("no unit and no control group with a limit is to be seen from here")


def _memory(conf: UwsgiConf) -> int:
    """Return the MiB that a uWSGI's workers need at least."""
    lazy = conf.settings.on("lazy-apps") or conf.settings.on("lazy")
    return conf.processes * (_WORKER if lazy else 20) + (0 if lazy else _SHARED)


@check(
    "X11",
    ERROR,
    "mod_wsgi",
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
    for directive in routes.aliases(found):
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
    if not routes.leads(found, "nginx"):
        return
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
        # N01 asks for more of these than a distribution's own.
        needed = 2 * max(connections, 8192 if connections <= 1024 else 0) + 64
        yield Finding(
            what=f"{files} open files for worker_connections {connections}",
            where=(place, known.place if known else Place(tree.path)),
            lines=for_tree(tree, rlimit, f"worker_rlimit_nofile {needed};"),
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
    """The path that nginx or Apache names for Keystone has to be one of uWSGI's, letter by letter.
    Other services' passes are not looked at."""
    paths = {
        x.value.partition(",")[0]: x
        for conf in found.uwsgi
        for x in conf.settings.all(*routes.SOCKETS)
    }
    units = {
        x.value for unit in found.units.values() for x in unit.section("Socket").all("ListenStream")
    }
    there = {routes.address(x) for x in (*paths, *units)}
    if not paths or "%" in "".join(paths):
        raise UnknownError("no file of uWSGI says where it listens")
    for path, directive in found.unix_upstreams():
        if routes.address(path) not in there and "%" not in path:
            own = next((x for x in paths if x.startswith("/")), "")
            setting = paths[own] if own else next(iter(paths.values()))
            yield Finding(
                what=f"{path} is no socket of Keystone's uWSGI, which has "
                f"{', '.join(sorted(paths))}",
                where=(directive.place, setting.place),
                lines=instead(directive, _ended(directive, str(directive).replace(path, own)))
                if own
                else (f"socket = {path}",),
                file="" if own else setting.place.path,
            )


def _ended(directive: Directive, line: str) -> str:
    """Return a line as its server ends it: nginx's with a semicolon."""
    return f"{line};" if directive.is_("server", *routes.NGINX_PASSES) else line


@check(
    "X14",
    ERROR,
    "uwsgi",
    "location",
    holds="nginx speaks the protocol that uWSGI's socket speaks",
    harm="Every request is answered 502, or uWSGI logs invalid request block size.",
    source="uWSGI, core/protocol.c: HTTP read as the uwsgi protocol is a block of 21573 bytes",
)
def protocol_fits(found: Found) -> Iterator[Finding]:
    """uwsgi_pass speaks to socket, proxy_pass to http-socket. The uwsgi protocol costs less, HTTP
    takes chunked bodies."""
    kinds = {
        routes.address(x.value): x
        for conf in found.uwsgi
        for x in conf.settings.all(*routes.SOCKETS)
    }
    assert found.nginx is not None
    for directive in routes.nginx_passes(found):
        for target, _ in routes.nginx_targets(found.nginx, directive):
            setting = kinds.get(routes.address(target))
            if setting is None:
                continue
            http = setting.name != "socket"
            if http is directive.is_("uwsgi_pass"):
                named = re.sub(r"^(https?|uwsgi)://", "", directive.args[0])
                right = f"proxy_pass http://{named};" if http else f"uwsgi_pass {named};"
                yield Finding(
                    what=f"{directive.name} to {target}, which is {setting.name} of uWSGI",
                    where=(directive.place, setting.place),
                    lines=instead(directive, right),
                )


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
    "backend",
    holds="The balancer's check has patience, and checks something",
    harm="Under load all nodes fail their checks at once and are taken out; a broken one stays in.",
    source="oslo.middleware, healthcheck: [healthcheck] backends is empty; openstack-helm "
    "9a28908d5; HAProxy, inter, fall, timeout check",
)
def health_check(found: Found) -> Iterator[Finding]:
    """/healthcheck is answered by a worker, so it waits behind all others' requests, and with no
    backends it says 200 whatever the database does. A node is taken out after fall checks (3) that
    each took longer than timeout check, or else inter (2 s): let that be ten seconds and more, and
    let something be checked, such as keyfront's /readyz, which waits in no queue of workers."""
    conf = found.keystone
    for section in routes.backends(found):
        checked = next(
            (
                x
                for x in haproxy_lines(section)
                if x.is_("option") and x.args[:1] == ("httpchk",) and "/healthcheck" in x.value
            ),
            None,
        )
        if checked is None:
            continue
        patience = _patience(section)
        if patience < _PATIENCE:
            yield Finding(
                what=f"{section}: httpchk of /healthcheck waits in the queue, and gives a node "
                f"{patience:g} s",
                where=(checked.place,),
                lines=within(section, "timeout check 10s", "default-server inter 5s fall 5 rise 2"),
            )
        if conf is not None and not conf.text("healthcheck", "backends"):
            yield Finding(
                what=f"{section}: /healthcheck checks nothing, [healthcheck] backends is empty",
                where=(checked.place, Place(conf.path)),
                lines=("[healthcheck]", "backends = disable_by_file"),
                file=conf.path,
                level=INFO,
                harm="A node whose database is away stays in, and no file takes one out.",
            )


# Seconds after which a check may take a node out.
_PATIENCE = 10


def _patience(section: Directive) -> float:
    """Return for how many seconds at least a node has to be silent to be taken out."""
    words: dict[str, str] = {}
    server: tuple[str, ...] = ()
    for directive in reversed(list(haproxy_lines(section))):
        if directive.is_("default-server"):
            words.update(itertools.pairwise(directive.args))
        if directive.is_("server"):
            server = directive.args
    words.update(itertools.pairwise(server))
    fall = int(words["fall"]) if words.get("fall", "").isdigit() else 3
    known = _timeout(section, "check")
    each = seconds(known.args[1], "ms") if known else seconds(words.get("inter", "2000"), "ms")
    return fall * (2.0 if each is None else each)


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
    "location",
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
        if found.keystone
        else 114688
    )
    for handed in routes.nginx_passes(found):
        directive = tree.effective(handed.around[-1], "client_max_body_size")
        value = size(directive.value) if directive else None
        if directive is not None and value is not None and (value == 0 or value < most):
            # One that stands further out holds for other services as well.
            own = directive in (handed.around[-1].inside or ())
            line = f"client_max_body_size {most};"
            yield Finding(
                what=f"client_max_body_size {directive.value}, Keystone takes {most}",
                where=(directive.place,),
                lines=instead(directive, line) if own else within(handed.around[-1], line),
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
    "pass",
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
                lines=instead(most, f"MaxRequestWorkers {min(_EVENT, max(256, 8 * capacity))}"),
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
        front = routes.has_front(found)
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
    """Return whether the front is a balancer, which may run on another machine."""
    return bool(routes.backends(found)) and not (
        routes.nginx_passes(found) or routes.apache_passes(found)
    )


@check(
    "X22",
    ERROR,
    "uwsgi",
    "location",
    holds="buffer-size takes the headers that the server in front lets through",
    harm="Requests with long headers (OIDC, SAML, long Host lists) are answered 502 or 500.",
    source="uWSGI, core/protocol.c: invalid request block size; httpd: AH10259 above 65535",
)
def headers_fit(found: Found) -> Iterator[Finding]:
    """A request's headers come to uWSGI in one block, which has to fit into buffer-size: 4096 where
    nothing is set, 65535 at most."""
    assert found.nginx is not None
    block = routes.nginx_passes(found)[0].around[-1]
    known = found.nginx.effective(block, "large_client_header_buffers")
    most = 8192 if known is None or not known.args else size(known.args[-1]) or 0
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


@check(
    "X23",
    INFO,
    "uwsgi",
    holds="Kubernetes' probes do not wait in the queue of the workers",
    harm="If it is the liveness probe: under load all pods are restarted, one after the other.",
    source="Kubernetes, livenessProbe: killed after failureThreshold (3) answers later than "
    "timeoutSeconds (1); SAP's helm charts: route-user-agent = ^kube-probe donotlog:",
)
def probed_by_kubelet(found: Found) -> Iterator[Finding]:
    """What a probe asks of uWSGI is answered by a worker, behind all other requests. A readiness
    probe may do so, with patience; a liveness probe that does kills what is only busy. It is seen
    by a rule of uWSGI's for kube-probe, or with --live by the logs of requests. keyfront's /livez
    waits in no queue."""
    for conf in found.uwsgi:
        module = conf.settings.last("module")
        if module is not None and module.value.startswith("keyfront."):
            continue
        rule = next(
            (
                x
                for x in conf.settings.settings
                if x.name.startswith("route-") and "kube-probe" in x.value
            ),
            None,
        )
        log = found.live.probed if found.live else ""
        place = rule.place if rule else Place(log) if log else None
        if place is not None:
            yield Finding(
                what="kube-probe asks the workers" + (f", {rule.name} says so" if rule else ""),
                where=(place,),
                lines=(
                    "(livenessProbe: tcpSocket, or keyfront's /livez)",
                    "(readinessProbe: timeoutSeconds 10, failureThreshold 5)",
                ),
            )

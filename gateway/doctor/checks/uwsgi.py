"""Checks of uWSGI's configuration (U)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..found import BUFFER_SIZE, Found, setting_text
from ..readers.uwsgi import UwsgiConf
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..routes import has_front
from ..settings import Place, Setting

_THINGS = "uWSGI, Things to know (best practices and issues)"
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\]|/|@|unix:|fd://)")
_HOOK = "hook-master-start = unix_signal:15 gracefully_kill_them_all"
#: Scripts that OpenStack no longer installs: project, the release, what is served instead.
DEAD = {
    "keystone-wsgi-public": ("keystone", 28, "keystone.wsgi.api:application"),
    "keystone-wsgi-admin": ("keystone", 28, "keystone.wsgi.api:application"),
    "nova-api-wsgi": ("nova", 33, "nova.wsgi.osapi_compute:application"),
    "nova-metadata-wsgi": ("nova", 33, "nova.wsgi.metadata:application"),
    "ironic-api-wsgi": ("ironic", 31, "ironic.wsgi:application"),
}
# Seen in public configurations, where uWSGI ignores them without strict.
_MISSPELT = {
    "py-callos-afterfork": "py-call-osafterfork",
    "enable-thread": "enable-threads",
    "thunder_lock": "thunder-lock",
    "lazy-app": "lazy-apps",
    "buffer_size": "buffer-size",
    "die_on_term": "die-on-term",
    "harakiri-timeout": "harakiri",
    "process": "processes",
    "thread": "threads",
    "max-worker-lifetime-deltas": "max-worker-lifetime-delta",
}


def _ours(conf: UwsgiConf) -> bool:
    """Return whether keyfront's entrypoint is served, which loads before the fork and cleans up."""
    module = conf.settings.last("module")
    return bool(module and module.value.startswith("keyfront."))


def _speaks(conf: UwsgiConf, *names: str) -> list[Setting]:
    return conf.settings.all(*(names or ("socket", "http-socket", "http", "https", "https-socket")))


@check(
    "U01",
    WARNING,
    "uwsgi",
    holds="buffer-size is given, and no more than 65535",
    harm="Requests with long headers are refused; a larger value is cut without a word.",
    source="uWSGI, core/uwsgi.c: a number of 16 bits; httpd/keystone-uwsgi-public.ini has 65535",
)
def buffer_size(found: Found) -> Iterator[Finding]:
    """A request's headers have to fit into one buffer, 4096 bytes where nothing is set: a token in
    a header, a cookie of OIDC or a chain of proxies is more. What is above 65535 is taken as
    65535."""
    for conf in found.uwsgi:
        known = conf.settings.last("buffer-size")
        value = conf.settings.number("buffer-size", default=BUFFER_SIZE)
        if known is None or value < 8192 or value > 65535:
            yield Finding(
                what=f"buffer-size {setting_text(known, str(BUFFER_SIZE))}",
                where=(conf.settings.place("buffer-size"),),
                lines=("buffer-size = 65535",),
            )


@check(
    "U02",
    ERROR,
    "uwsgi",
    holds="SIGTERM ends uWSGI (die-on-term)",
    harm="A stop by systemd or docker reloads instead, until it is killed with all its requests.",
    source=f"{_THINGS}; measured: without it SIGTERM is a brutal reload and never ends",
)
def die_on_term(found: Found) -> Iterator[Finding]:
    """systemd, docker and Kubernetes stop a service by SIGTERM, which for uWSGI means: reload at
    once, without waiting for requests. An emperor ends its vassals without a signal."""
    for conf in found.uwsgi:
        unit = found.unit_of_uwsgi(conf)
        signal = unit.service.last("KillSignal") if unit else None
        if signal is not None and signal.value in ("SIGQUIT", "SIGINT", "3", "2"):
            continue
        if not conf.settings.on("die-on-term") and not _hook(conf) and not conf.vassal:
            yield Finding(
                what="die-on-term is not set",
                where=(conf.settings.place("die-on-term"),),
                lines=("die-on-term = true", _HOOK),
            )


def _hook(conf: UwsgiConf) -> bool:
    return any(
        re.search(r"unix_signal:15\s+gracefully_kill_them_all", x.value)
        for x in conf.settings.all("hook-master-start")
    )


@check(
    "U03",
    WARNING,
    "uwsgi",
    holds="A stop waits for running requests (the hook of SIGTERM)",
    harm="Each restart cuts off the requests that are running.",
    source="measured: die-on-term alone, as OpenStack-Ansible has it, ends a running request at "
    "1 s",
)
def graceful_hook(found: Found) -> Iterator[Finding]:
    """die-on-term ends uWSGI at once. With the hook the master lets workers finish first; then
    something has to bound it, see X06."""
    for conf in found.uwsgi:
        if conf.settings.on("die-on-term") and not _hook(conf) and not conf.vassal:
            lost = conf.settings.last("hook-master-start")
            if lost is not None and "unix_signal:15" in lost.value:
                continue
            yield Finding(
                what="die-on-term without the hook that lets requests end",
                where=(conf.settings.place("die-on-term"),),
                lines=(_HOOK,),
            )


@check(
    "U04",
    ERROR,
    "uwsgi",
    holds="The hook of SIGTERM has its function on the same line, before any #",
    harm="Each restart cuts off the requests that are running.",
    source="sapcc/helm-charts, nova and placement: the function stands behind a #",
)
def hook_lost(found: Found) -> Iterator[Finding]:
    """uWSGI's ini has no comments at the end of a line: what follows is a part of the value, and a
    hook with an unknown function, or none, does nothing."""
    for conf in found.uwsgi:
        for hook in conf.settings.all("hook-master-start"):
            if hook.value.startswith("unix_signal:15") and not _hook(conf):
                yield Finding(
                    what=f"{hook.name} = {hook.value}", where=(hook.place,), lines=(_HOOK,)
                )


@check(
    "U05",
    WARNING,
    "uwsgi",
    holds="A stuck request has an end (harakiri)",
    harm="Requests that are stuck hold their workers for ever, until none is left.",
    source="no OpenStack deployer but SAP sets it; uWSGI, core/master_checks.c",
)
def harakiri(found: Found) -> Iterator[Finding]:
    """A directory or a database that accepts and never answers takes one worker after the other.
    harakiri ends a worker whose request takes longer; choose it well above what users wait."""
    for conf in found.uwsgi:
        if conf.settings.number("harakiri", default=0) <= 0:
            yield Finding(
                what="harakiri is not set",
                where=(conf.settings.place("harakiri"),),
                lines=("harakiri = 60",),
            )


@check(
    "U06",
    ERROR,
    "uwsgi",
    "versions",
    holds="Threads are used with a uWSGI whose threads can be stopped",
    harm="A stop or reload hangs until the next request comes, or for ever.",
    source="https://github.com/unbit/uwsgi/issues/2653, fixed in 2.0.27",
)
def threads_that_stop(found: Found) -> Iterator[Finding]:
    """2.0.25 and 2.0.26 no longer cancel threads that wait for a request."""
    for conf in found.uwsgi:
        threads = conf.settings.last("threads")
        version = found.version("uwsgi") if conf.threads > 1 else ()
        if threads and conf.threads > 1 and version in ((2, 0, 25), (2, 0, 26)):
            yield Finding(
                what=f"threads = {threads.value} with uWSGI 2.0.{version[2]}",
                where=(threads.place,),
                lines=("pip install --upgrade 'uwsgi>=2.0.27'",),
            )


@check(
    "U07",
    INFO,
    "uwsgi",
    holds="No HTTP router of uWSGI stands between the web server and the workers",
    harm="Each request takes one process and one copy more; before 2.0.27 a stop answers nothing.",
    source="https://github.com/unbit/uwsgi/issues/2656; uWSGI, HTTP: http is not http-socket",
)
def http_router(found: Found) -> Iterator[Finding]:
    """http = ... starts a router process, which hands requests to the workers over another socket.
    http-socket = ... lets workers speak HTTP themselves. With the graceful hook before 2.0.27 the
    router is ended first, and running requests get nothing."""
    for conf in found.uwsgi:
        for setting in conf.settings.all("http", "https"):
            worse = found.before("uwsgi", 2, 0, 27) and _hook(conf)
            if worse or has_front(found):
                yield Finding(
                    what=f"{setting.name} = {setting.value} is a router of its own",
                    where=(setting.place,),
                    lines=(f"{setting.name}-socket = {setting.value}",),
                    level=WARNING if worse else "",
                )


@check(
    "U08",
    ERROR,
    "uwsgi",
    "versions",
    holds="Python's threads run under uWSGI (enable-threads)",
    harm="Heartbeats to RabbitMQ and other background threads stand still, and connections drop.",
    source="uWSGI, Changelog 2.0.27: enable-threads is the default from then on",
)
def enable_threads(found: Found) -> Iterator[Finding]:
    """Before 2.0.27 uWSGI gives Python no threads unless enable-threads or threads is set."""
    for conf in found.uwsgi:
        if conf.settings.on("enable-threads") or conf.settings.last("threads"):
            continue
        if found.version("uwsgi") < (2, 0, 27):
            yield Finding(
                what="enable-threads is not set, and this uWSGI is older than 2.0.27",
                where=(conf.settings.place("enable-threads"),),
                lines=("enable-threads = true",),
            )


@check(
    "U09",
    ERROR,
    "uwsgi",
    holds="Workers share no connection that was opened before the fork",
    harm="Answers of memcached, the directory or the database reach the wrong worker.",
    source="devstack 542abbab: a memcached socket that was opened at the start was shared",
)
def lazy_apps(found: Found) -> Iterator[Finding]:
    """Without lazy-apps the application is loaded once and forked, with all that it opened.
    keyfront.gateway.uwsgi releases connections before the fork, so it needs no lazy-apps."""
    for conf in found.uwsgi:
        lazy = conf.settings.on("lazy-apps") or conf.settings.on("lazy")
        if conf.processes > 1 and not lazy and not _ours(conf):
            yield Finding(
                what=f"lazy-apps is not set, with {conf.processes} processes",
                where=(conf.settings.place("lazy-apps"),),
                lines=("lazy-apps = true",),
            )


@check(
    "U10",
    WARNING,
    "uwsgi",
    holds="uWSGI refuses options that it does not know (strict)",
    harm="A misspelt option is ignored: what it should have bounded is not bounded.",
    source="techatbloomberg.com, Configuring uWSGI for Production Deployment, 2019-07-12",
)
def strict(found: Found) -> Iterator[Finding]:
    """Without strict an unknown name is a variable of the file. start-time, which neutron reads, is
    such a name, so it goes with set-ph in a strict file."""
    for conf in found.uwsgi:
        if not conf.settings.on("strict") and not conf.settings.last("start-time"):
            yield Finding(
                what="strict is not set",
                where=(conf.settings.place("strict"),),
                lines=("strict = true",),
            )


@check(
    "U11",
    ERROR,
    "uwsgi",
    holds="uWSGI knows all options by their names",
    harm="The option does nothing, or with strict uWSGI does not start.",
    source="measured: [strict-mode] unknown config directive: start-time; GeoNode's "
    "py-callos-afterfork",
)
def misspelt(found: Found) -> Iterator[Finding]:
    """Names that are known to be mistaken, and start-time, which strict refuses."""
    for conf in found.uwsgi:
        for setting in conf.settings.settings:
            right = _MISSPELT.get(setting.name)
            if right:
                yield Finding(
                    what=f"{setting.name} is none of uWSGI's options",
                    where=(setting.place,),
                    lines=(f"{right} = {setting.value}",),
                )
        start = conf.settings.last("start-time")
        if start is not None and conf.settings.on("strict"):
            yield Finding(
                what="start-time with strict: uWSGI does not start",
                where=(start.place,),
                lines=(f"set-ph = start-time={start.value}",),
            )


@check(
    "U12",
    ERROR,
    "uwsgi",
    holds="uWSGI's statistics show no tokens to others",
    harm="Whoever reaches the port reads the tokens of running requests and acts as those users.",
    source="measured: the statistics of 2.0.31 print HTTP_X_AUTH_TOKEN of running requests; "
    "openstack-helm binds 0.0.0.0:1717",
)
def stats_exposed(found: Found) -> Iterator[Finding]:
    """The statistics server prints the variables of each core, headers included, to whoever
    connects. stats-no-cores leaves them out (since 2.0.21); a unix socket keeps others away."""
    for conf in found.uwsgi:
        stats = conf.settings.last("stats", "stats-server")
        if stats is None or conf.settings.on("stats-no-cores"):
            continue
        if not _LOOPBACK.match(stats.value):
            yield Finding(
                what=f"stats = {stats.value} without stats-no-cores",
                where=(stats.place,),
                lines=("stats = /run/uwsgi/stats.sock", "stats-no-cores = true"),
            )


@check(
    "U13",
    ERROR,
    "uwsgi",
    holds="The uwsgi protocol is spoken to this machine only",
    harm="Whoever reaches the port runs code as Keystone's user.",
    source=f"{_THINGS}: never expose a uwsgi socket to the public network",
)
def uwsgi_protocol_exposed(found: Found) -> Iterator[Finding]:
    """The variables of the uwsgi protocol (UWSGI_FILE among them) make uWSGI load code, so only the
    web server may reach it."""
    for conf in found.uwsgi:
        for setting in conf.settings.all("socket", "uwsgi-socket", "ssl-socket"):
            port = setting.value.rpartition(":")[2]
            if not _LOOPBACK.match(setting.value) and port.isdigit():
                yield Finding(
                    what=f"socket = {setting.value} is reached from the network",
                    where=(setting.place,),
                    lines=(f"socket = 127.0.0.1:{port}",),
                )


@check(
    "U14",
    WARNING,
    "uwsgi",
    holds="Only the web server's group may open uWSGI's socket",
    harm="Every user of the machine runs code as Keystone's user.",
    source="devstack writes chmod-socket = 666; uWSGI, core/socket.c",
)
def chmod_socket(found: Found) -> Iterator[Finding]:
    """Whoever opens the socket speaks the uwsgi protocol, see U13. It is about unix sockets in
    folders that others may enter. A group that web server and service share is enough. A uWSGI
    that systemd starts as root gives the socket away itself (chown-socket); one that is started as
    its own user may not, and the web server joins its group."""
    web = "www-data" if found.debian else ("nginx" if found.nginx else "apache")
    for conf in found.uwsgi:
        mode = conf.settings.last("chmod-socket")
        unix = [
            x
            for x in conf.settings.all("socket", "uwsgi-socket", "http-socket")
            if x.value.startswith("/") and _may_be_entered(found, x.value)
        ]
        if not unix:
            continue
        # HTTP has no variables of the server's: who opens the socket only passes the front by.
        http = all(x.name == "http-socket" for x in unix)
        if mode is not None and re.fullmatch(r"0?[0-7]{2}[2367]", mode.value or "666"):
            unit = found.unit_of_uwsgi(conf)
            user = unit.service.last("User") if unit else None
            lines: tuple[str, ...] = ("chmod-socket = 660",)
            if user is None or user.value in ("root", "0"):
                own = conf.settings.last("uid")
                lines += (f"chown-socket = {own.value if own else 'keystone'}:{web}",)
                said = f"chmod-socket = {mode.value}"
            else:
                group = unit.service.last("Group") if unit else None
                named = group.value if group else user.value
                said = f"chmod-socket = {mode.value}; {web} needs group {named} instead"
                lines += (f"; and run: usermod -a -G {named} {web}",)
            yield Finding(
                what=said,
                where=(mode.place,),
                lines=lines,
                level=INFO if http else "",
                harm="Every user of the machine reaches Keystone past the web server's limits."
                if http
                else "",
            )


def _may_be_entered(found: Found, path: str) -> bool:
    """Return whether others may enter a socket's folder; one that is not there yet may be."""
    try:
        return bool(found.files.resolved(path).parent.stat().st_mode & 0o001)
    except OSError:
        return True


@check(
    "U15",
    WARNING,
    "uwsgi",
    holds="uWSGI ends if Keystone cannot be loaded (need-app)",
    harm="Every request is answered 500 by a server that looks healthy, and nothing restarts it.",
    source="uWSGI, core/init.c; OpenStack-Ansible sets it",
)
def need_app(found: Found) -> Iterator[Finding]:
    """Without need-app uWSGI goes on with no application: no python application found. With it the
    start fails, systemd says so and tries again."""
    for conf in found.uwsgi:
        if not conf.settings.on("need-app"):
            yield Finding(
                what="need-app is not set",
                where=(conf.settings.place("need-app"),),
                lines=("need-app = true",),
            )


@check(
    "U16",
    ERROR,
    "uwsgi",
    holds="uWSGI has a master where it has several processes or hooks",
    harm="Workers that die are not replaced, and hooks and harakiri do nothing.",
    source="sapcc/helm-charts, neutron: master = false with a hook; uWSGI, core/uwsgi.c",
)
def master(found: Found) -> Iterator[Finding]:
    """The master starts workers anew, runs harakiri and the hooks of a stop."""
    for conf in found.uwsgi:
        if conf.settings.on("master"):
            continue
        reason = conf.settings.last("hook-master-start", "harakiri", "cheaper")
        if conf.processes > 1 or reason is not None:
            yield Finding(
                what=f"master is off, with {conf.processes} processes"
                + (f" and {reason.name}" if reason else ""),
                where=(conf.settings.place("master"),),
                lines=("master = true",),
            )


@check(
    "U17",
    WARNING,
    "uwsgi",
    holds="Workers are replaced one after the other, not all at once",
    harm="All workers restart in the same moment, and everybody waits until Keystone is loaded.",
    source="uWSGI 2.0.27 and later: max-requests-delta, max-worker-lifetime-delta",
)
def restarts_spread(found: Found) -> Iterator[Finding]:
    """Workers get equally many requests and are equally old, so they reach a common limit together.
    A delta shifts each of them."""
    for conf in found.uwsgi:
        for name in ("max-requests", "max-worker-lifetime"):
            known, delta = conf.settings.last(name), conf.settings.last(f"{name}-delta")
            if known is not None and (known.number or 0) > 0 and conf.processes > 1 and not delta:
                yield Finding(
                    what=f"{name} = {known.value} for all {conf.processes} workers alike",
                    where=(known.place,),
                    lines=(f"{name}-delta = {max(1, (known.number or 0) // 16)}",),
                )


@check(
    "U18",
    INFO,
    "uwsgi",
    holds="A worker that grows is replaced",
    harm="A leak fills the memory until the kernel kills a worker in the middle of its requests.",
    source="docs/gateway.md; uWSGI, core/utils.c",
)
def grows(found: Found) -> Iterator[Finding]:
    """reload-on-rss reads /proc at every request; KEYFRONT_RELOAD_ON_RSS costs nothing;
    max-worker-lifetime bounds a slow leak as well."""
    names = ("reload-on-rss", "evil-reload-on-rss", "reload-on-as", "max-worker-lifetime")
    for conf in found.uwsgi:
        bounded = conf.settings.last(*names) or "KEYFRONT_RELOAD_ON_RSS" in conf.environment
        if not bounded and not conf.settings.number("max-requests", default=0):
            yield Finding(
                what="nothing replaces a worker that grows",
                where=(Place(conf.path),),
                lines=("max-worker-lifetime = 86400", "max-worker-lifetime-delta = 5400"),
            )


@check(
    "U19",
    WARNING,
    "uwsgi",
    holds="cheaper goes by a queue that uWSGI can see",
    harm="No workers are added under load.",
    source="uWSGI, core/master_checks.c: the queue of AF_UNIX is not read; docs: TCP only",
)
def cheaper_backlog(found: Found) -> Iterator[Finding]:
    """uWSGI reads the length of its queue from TCP_INFO, so on a unix socket the backlog algorithm
    and cheaper-busyness-backlog-alert never see one."""
    for conf in found.uwsgi:
        known = conf.settings.last("cheaper-algo", "cheaper-busyness-backlog-alert")
        unix = [x for x in conf.settings.all("socket") if x.value.startswith("/")]
        if known and unix and ("backlog" in known.value or "backlog" in known.name):
            yield Finding(
                what=f"{known.name} = {known.value} with the unix socket {unix[0].value}",
                where=(known.place, unix[0].place),
                lines=("cheaper-algo = busyness",),
            )


@check(
    "U20",
    ERROR,
    "uwsgi",
    holds="What is served is there",
    harm="Keystone is not loaded: uWSGI does not start or answers 500.",
    source="keystone 28.0.0 release notes, remove-wsgi-scripts; keystone 27.0.0 has "
    "keystone.wsgi.api; nova 33",
)
def script_is_there(found: Found) -> Iterator[Finding]:
    """The scripts keystone-wsgi-public and -admin went with Keystone 28 (2025.2): serve the module
    keystone.wsgi.api instead, which came with 27 (2025.1). The module has to be in the virtualenv
    that uWSGI is told of."""
    for conf in found.uwsgi:
        for setting in conf.settings.all("wsgi-file", "mount", "module"):
            path = setting.value.rpartition("=")[2]
            if path.startswith("keystone.wsgi"):
                yield from _module(found, conf, setting)
                continue
            name = path.rpartition("/")[2]
            project, since, module = DEAD.get(name, ("", 0, ""))
            gone = project and found.at_least(project, since) and not found.files.exists(path)
            tested = path.startswith("/") and not found.is_of_a_container(conf.path)
            if gone or (tested and "%" not in path and found.files.lacks(path)):
                yield Finding(
                    what=f"{setting.name} = {setting.value} is not there"
                    + (f": gone since {project} {since}" if gone else ""),
                    where=(setting.place,),
                    lines=(_served_instead(found, setting, module or "keystone.wsgi.api"),),
                )


def _served_instead(found: Found, setting: Setting, module: str) -> str:
    if found.before("keystone", 27) and module.startswith("keystone"):
        return f"(install {setting.value.rpartition('=')[2]}, or correct {setting.name})"
    return f"module = {module if ':' in module else f'{module}:application'}"


def _module(found: Found, conf: UwsgiConf, setting: Setting) -> Iterator[Finding]:
    """Tell of a module that the installed Keystone lacks."""
    if found.before("keystone", 27):
        version = ".".join(map(str, found.versions["keystone"]))
        yield Finding(
            what=f"{setting.name} = {setting.value}: Keystone {version} has no such module, 27 is "
            "the first",
            where=(setting.place,),
            lines=("wsgi-file = /usr/bin/keystone-wsgi-public",),
        )
        return
    home = conf.settings.last("virtualenv")
    if home is None or conf.settings.last("pythonpath") or found.is_of_a_container(conf.path):
        return
    if has_keystone(found, home.value) is False:
        yield Finding(
            what=f"{setting.name} = {setting.value}: there is no keystone in {home.value}",
            where=(setting.place, home.place),
            lines=(f"{home.value.rstrip('/')}/bin/pip install keystone",),
        )


def has_keystone(found: Found, home: str) -> bool | None:
    """Return whether Keystone is installed in a virtualenv; ``None`` if that cannot be seen."""
    sites = found.files.glob(f"{home.rstrip('/')}/lib/python3*/site-packages")
    config = found.files.text(f"{home.rstrip('/')}/pyvenv.cfg", wanted=False) or ""
    if not sites or re.search(r"include-system-site-packages\s*=\s*true", config, re.IGNORECASE):
        return None
    # A plain install, an editable one, one of setuptools of long ago.
    names = ("keystone", "keystone-*-info", "__editable__*keystone*", "keystone*.egg*")
    return bool(found.files.glob(*(f"{site}/{name}" for site in sites for name in names)))


@check(
    "U21",
    ERROR,
    "systemd",
    holds="gunicorn and its kin are not given keystone.wsgi.api as it is",
    harm="The server ends at its start: unrecognized arguments.",
    source="measured: importing it with another program's sys.argv ends with SystemExit 2; "
    "oslo.config, CONF() parses sys.argv",
)
def foreign_command_line(found: Found) -> Iterator[Finding]:
    """Keystone reads the command line of its process when it is imported, and does not know that
    server's options. keyfront.gateway.wsgi hides them."""
    for unit in found.units.values():
        known = unit.service.last("ExecStart")
        if known and re.search(
            r"(gunicorn|granian|hypercorn|waitress)\S*\s.*keystone\.wsgi", known.value
        ):
            line = re.sub(
                r"keystone\.wsgi\.api(:application)?", "keyfront.gateway.wsgi", known.value
            )
            yield Finding(
                what=known.value, where=(known.place,), lines=("[Service]", f"ExecStart={line}")
            )


@check(
    "U22",
    ERROR,
    "uwsgi",
    "versions",
    holds="uWSGI was built with what its configuration uses",
    harm="uWSGI does not start, or serves without the rule.",
    source="measured: pyuwsgi's wheel has no SSL; a build without PCRE has no routes",
)
def built_in(found: Found) -> Iterator[Finding]:
    """A uWSGI that was compiled without the headers of OpenSSL or PCRE has no https or route
    options; pyuwsgi has no https."""
    known = found.features.get("uwsgi")
    for conf in found.uwsgi:
        for setting in conf.settings.settings:
            if not re.fullmatch(r"https(-socket|2)?|route(-[\w-]+)?", setting.name):
                continue
            if not known:
                raise UnknownError("what is built into uWSGI: it is not to be run here")
            if setting.name not in known:
                yield Finding(
                    what=f"{setting.name} is not built into this uWSGI",
                    where=(setting.place,),
                    lines=("pip install --force-reinstall --no-binary :all: uwsgi",),
                )


@check(
    "U23",
    INFO,
    "uwsgi",
    holds="uWSGI's log names clients, not the proxy",
    harm="The log says 127.0.0.1 of everybody, and nobody sees who floods the logins.",
    source="uWSGI, core/logging.c: log-x-forwarded-for; measured: 2.0.31 behind uwsgi_pass of "
    "nginx 1.22 logs the client",
)
def log_addresses(found: Found) -> Iterator[Finding]:
    """Of HTTP uWSGI knows the address of the connection alone; by the uwsgi protocol nginx and
    Apache tell it the client's (REMOTE_ADDR). log-x-forwarded-for is right behind a server that
    sets the header (X21, N06), and a lie without one. With disable-logging the web server's log has
    the addresses."""
    for conf in found.uwsgi:
        logs = not conf.settings.on("disable-logging") and not conf.settings.last(
            "log-format", "logformat"
        )
        front = has_front(found)
        trusted = conf.settings.on("log-x-forwarded-for")
        http = conf.settings.all("http-socket", "http", "https", "https-socket")
        if front and logs and http and not trusted:
            yield Finding(
                what="log-x-forwarded-for is not set behind a proxy",
                where=(Place(conf.path),),
                lines=("log-x-forwarded-for = true",),
            )
        elif trusted and not front and not found.files.exists("/.dockerenv"):
            yield Finding(
                what="log-x-forwarded-for is set, and no proxy was found here",
                where=(conf.settings.place("log-x-forwarded-for"),),
                lines=("log-x-forwarded-for = false",),
            )


@check(
    "U24",
    ERROR,
    "uwsgi",
    holds="The folders that uWSGI is told of are there",
    harm="uWSGI does not start.",
    source="uWSGI, plugins/python: !!! Python Home is not a directory; measured: 2.0.31 with a "
    "plugins-dir that is not there, with plugins and with need-plugin",
)
def folders_are_there(found: Found) -> Iterator[Finding]:
    """A virtualenv that was moved, a working folder. A folder of plugins that is not there ends
    the start with need-plugin only; uWSGI goes on with what is built into it otherwise."""
    for conf in found.uwsgi:
        for setting in conf.settings.all("virtualenv", "chdir", "plugins-dir", "plugin-dir"):
            path = setting.value
            plugins = setting.name.startswith("plugin")
            if found.is_of_a_container(conf.path):
                continue  # of the host: paths in there are the container's
            if path.startswith("/") and "%" not in path and found.files.lacks(path):
                spared = plugins and not conf.settings.last("need-plugin", "need-plugins")
                yield Finding(
                    what=f"{setting.name} = {path} is not there",
                    where=(setting.place,),
                    lines=(f"(make {path}, or correct {setting.name})",),
                    level=INFO if spared else "",
                    harm="None where Python is built into uWSGI, as in that of PyPI; otherwise "
                    "nothing is served."
                    if spared
                    else "",
                )


@check(
    "U25",
    WARNING,
    "uwsgi",
    holds="Two requests can be computed at a time at least",
    harm="One login, with its 0.4 s of a password's hash, makes everybody else wait.",
    source="docs/plan.md: a login takes 0.38 s of a core; openstack-helm has one process a pod",
)
def more_than_one(found: Found) -> Iterator[Finding]:
    """uWSGI starts a single process where nothing is said. keyfront plan says how many fit."""
    for conf in found.uwsgi:
        if conf.processes == 1 and conf.threads == 1:
            yield Finding(
                what="one process with one thread",
                where=(conf.settings.place("processes"),),
                lines=("processes = 4", "threads = 2"),
            )


@check(
    "U26",
    INFO,
    "uwsgi",
    holds="uWSGI takes its socket away when it ends (vacuum)",
    harm="A socket is left that nobody listens at: the web server answers 502 instead of 503.",
    source=f"{_THINGS}; techatbloomberg.com, Configuring uWSGI for Production Deployment",
)
def vacuum(found: Found) -> Iterator[Finding]:
    """Only sockets and pid files that uWSGI made itself are taken away."""
    for conf in found.uwsgi:
        made = [x for x in _speaks(conf) if x.value.startswith("/")]
        if made and not conf.settings.on("vacuum"):
            yield Finding(
                what=f"{made[0].value} stays when uWSGI ends",
                where=(made[0].place,),
                lines=("vacuum = true",),
            )


@check(
    "U27",
    INFO,
    "uwsgi",
    holds="Keystone runs in uWSGI's main interpreter (single-interpreter)",
    harm="C modules that know of one interpreter only hang or crash a worker.",
    source="uWSGI, plugins/python: each mounted application has an interpreter of its own",
)
def single_interpreter(found: Found) -> Iterator[Finding]:
    """One application is loaded into the main interpreter anyhow. A second one by mount gets a
    sub-interpreter, in which cryptography and python-ldap are not safe."""
    for conf in found.uwsgi:
        mounts = conf.settings.all("mount", "module", "wsgi-file")
        if not conf.settings.on("single-interpreter"):
            several = len({x.value for x in mounts}) > 1
            yield Finding(
                what="single-interpreter is not set"
                + (f", with {len(mounts)} applications" if several else ""),
                where=(conf.settings.place("single-interpreter"),),
                lines=("single-interpreter = true",),
                level=WARNING if several else "",
            )


@check(
    "U28",
    ERROR,
    "uwsgi",
    holds="workers with sockets of their own (map-socket) have no thunder-lock",
    harm="Who comes by one socket waits for ever while nobody comes by the other.",
    source="uWSGI, core/utils.c: wsgi_req_accept waits with the lock held; tried on 2.0.31",
)
def mapped_sockets(found: Found) -> Iterator[Finding]:
    """The lock is one for all workers, and who waits for a connection holds it. Without it all that
    wait for the same socket wake up at once, which costs little with few workers."""
    for conf in found.uwsgi:
        mapped = conf.settings.last("map-socket")
        if mapped and conf.settings.on("thunder-lock"):
            yield Finding(
                what=f"map-socket = {mapped.value} with thunder-lock",
                where=(mapped.place, conf.settings.place("thunder-lock")),
                lines=("thunder-lock = false",),
            )

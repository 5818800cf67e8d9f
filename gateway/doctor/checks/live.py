"""Checks of the running machine (P), with --live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..found import LISTEN, Found
from ..machine_state import Live
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Place, seconds
from .cross_layer import _fronts
from .keystone import CLOCKS_APART

_SMALL = 64 << 20
# Milliseconds that a login or a validation may take.
_SLOW = 2000


def _live(found: Found) -> Live:
    assert found.live is not None
    return found.live


@check(
    "P01",
    WARNING,
    "live",
    holds="The kernel has dropped no connection for a full queue",
    harm="Clients wait seconds for nothing, or are refused.",
    source="Linux, TcpExt ListenOverflows and ListenDrops, since the boot",
)
def listen_drops(found: Found) -> Iterator[Finding]:
    """All listening sockets of this network namespace, not Keystone's alone."""
    names = ("ListenOverflows", "ListenDrops")
    if not any(name in _live(found).counters for name in names):
        raise UnknownError("the kernel's counters: /proc/net/netstat cannot be read")
    for name in names:
        count = _live(found).counters.get(name, 0)
        if count:
            yield Finding(
                what=f"{name} {count} since the boot",
                where=(Place("/proc/net/netstat"),),
                lines=("nstat -az TcpExtListenOverflows TcpExtListenDrops", "ss -lnt"),
            )
            return


@check(
    "P02",
    ERROR,
    "live",
    holds="Queues of listening sockets have room",
    harm="New requests are refused at once, or in seconds.",
    source="ss(8): Recv-Q waits, Send-Q may",
)
def queues(found: Found) -> Iterator[Finding]:
    """A queue that is more than half full right now."""
    if not _live(found).queues:
        raise UnknownError("listening sockets: ss is not here, tells of none, or sees another root")
    for queue in _live(found).queues:
        if queue.most and queue.waiting > queue.most / 2:
            full = queue.waiting >= queue.most
            yield Finding(
                what=f"{queue.address}: {queue.waiting} of {queue.most} wait",
                level="" if full else WARNING,
                lines=("ss -lntxp", "keyfront plan uwsgi"),
            )


@check(
    "P03",
    ERROR,
    "live",
    holds="Connection tracking has room",
    harm="Packets of new connections are dropped, for all services of this machine.",
    source="Linux, nf_conntrack: table full, dropping packet",
)
def conntrack(found: Found) -> Iterator[Finding]:
    """Size it, or leave the port of the service out by notrack."""
    counters = _live(found).counters
    if "nf_conntrack_max" not in counters:
        raise UnknownError("nf_conntrack_max: nothing is tracked, or /proc cannot be read")
    count, most = counters.get("nf_conntrack_count", 0), counters["nf_conntrack_max"]
    if most and count > 0.8 * most:
        yield Finding(
            what=f"{count} of {most} connections are tracked",
            where=(Place("/proc/sys/net/netfilter/nf_conntrack_max"),),
            lines=(f"net.netfilter.nf_conntrack_max = {4 * most}",),
        )


@check(
    "P04",
    WARNING,
    "live",
    holds="Ports for connections to upstreams are left",
    harm="The web server cannot connect: Cannot assign requested address.",
    source="Linux, ip_local_port_range; TIME_WAIT lasts 60 s",
)
def time_wait(found: Found) -> Iterator[Finding]:
    """Keep connections to the upstream (N08), or use a unix socket, which needs no ports."""
    counters = _live(found).counters
    if "TIME_WAIT" not in counters:
        raise UnknownError("TIME_WAIT: /proc/net/sockstat cannot be read")
    count, ports = counters["TIME_WAIT"], counters.get("ports", 28232)
    if count > ports / 2:
        yield Finding(
            what=f"{count} connections in TIME_WAIT, {ports} ports",
            lines=("ss -tan state time-wait | awk '{print $4}' | sort | uniq -c | sort -n",),
        )


@check(
    "P05",
    ERROR,
    "live",
    holds="Processes are far from their limit of open files",
    harm="Requests fail: Too many open files.",
    source="/proc/PID/limits",
)
def open_files(found: Found) -> Iterator[Finding]:
    """The limit is LimitNOFILE of the unit."""
    if not any(one.files for one in _live(found).processes):
        raise UnknownError("open files: no process of Keystone is to be seen, or it is not ours")
    for one in _live(found).processes:
        if one.files and one.files[0] > 0.8 * one.files[1]:
            yield Finding(
                what=f"{one.name} ({one.pid}) has {one.files[0]} of {one.files[1]} files open",
                lines=("[Service]", f"LimitNOFILE={4 * one.files[1]}"),
            )


@check(
    "P06",
    WARNING,
    "live",
    holds="Keystone's processes leave memory to others",
    harm="The kernel kills a worker under load, with the requests that it was computing.",
    source="/proc/PID/statm; pages that are shared count for each process",
)
def memory(found: Found) -> Iterator[Finding]:
    """An upper bound: what was loaded before the fork is counted in each worker."""
    live = _live(found)
    if not live.processes or not live.memory:
        raise UnknownError("memory: no process of Keystone is to be seen here")
    total = sum(one.rss for one in live.processes)
    if live.memory and total << 20 > 0.9 * live.memory:
        yield Finding(
            what=f"{len(live.processes)} processes hold up to {total} MiB of {live.memory >> 20}",
            lines=("keyfront plan uwsgi memory",),
        )


@check(
    "P07",
    WARNING,
    "live",
    holds="The clock is synchronized, and agrees with those of Keystone's servers",
    harm="Tokens are refused as expired or not yet valid, and TOTP and SAML logins fail.",
    source="adjtimex(2), TIME_ERROR; RFC 9110, Date; memcached, stats; SQL, NOW",
)
def clock(found: Found) -> Iterator[Finding]:
    """A fernet token has its time in it; another node whose clock is behind refuses it. Compared
    are the Date of Keystone's answer to the login, the time of the database's server, and that of
    each memcached, which mostly run on the nodes."""
    live = _live(found)
    if live.synchronized is None and not live.clocks:
        raise UnknownError("the clock: neither the kernel nor another machine tells of it")
    if live.synchronized is False:
        install = "apt install chrony" if found.debian else "dnf install chrony"
        yield Finding(
            what="the kernel's clock is not synchronized",
            lines=(install, "chronyc tracking"),
        )
    for name, ahead in sorted(live.clocks.items()):
        if abs(ahead) > CLOCKS_APART:
            word = "ahead of" if ahead > 0 else "behind"
            yield Finding(
                what=f"this clock is {abs(ahead):.0f} s {word} that of {name}",
                level=ERROR,
                lines=("chronyc tracking", "chronyc makestep"),
            )


@check(
    "P08",
    WARNING,
    "live",
    holds="What runs is what is installed",
    harm="Half of the code is old and half is new: imports of a running worker fail, now and then.",
    source="the times of processes and of RECORD in dist-info",
)
def running_version(found: Found) -> Iterator[Finding]:
    """Reload after each upgrade: docs/running.md."""
    live = _live(found)
    if not live.processes or not live.installed:
        raise UnknownError(
            "processes of Keystone, or the packages that they run, are not to be seen"
        )
    old = [one for one in live.processes if live.installed and one.begun < live.installed]
    if old:
        yield Finding(
            what=f"{len(old)} processes are older than the packages that they run",
            lines=("systemctl reload keyfront-uwsgi",),
        )


@check(
    "P09",
    ERROR,
    "live",
    holds="There is room in /dev/shm, for logs and for the database",
    harm="Changes are refused with 503, or logs are lost.",
    source="docs/running.md",
)
def free_space(found: Found) -> Iterator[Finding]:
    """The token cache's shared part lies in /dev/shm or /run; docker gives a container 64 MiB
    there."""
    if not _live(found).disks:
        raise UnknownError("no folder's free space can be told")
    for folder, (free, part) in _live(found).disks.items():
        if part < 0.1 and (free < 16 * _SMALL or part < 0.03):
            yield Finding(
                what=f"{folder}: {free >> 20} MiB free, {part:.0%}",
                where=(Place(folder),),
                level="" if part < 0.03 else WARNING,
                lines=(f"df -h {folder}",),
            )


@check(
    "P10",
    WARNING,
    "live",
    holds="Logs tell of no lost connections",
    harm="Some users were answered 502 or nothing.",
    source="the last MiB of each log of the web servers, uWSGI and Keystone",
)
def logs(found: Found) -> Iterator[Finding]:
    """What the lines were about is in the log that is named."""
    if not _live(found).logs:
        raise UnknownError("logs: none is here that can be read")
    for said, (count, path) in sorted(_live(found).lines.items()):
        yield Finding(
            what=f"{count} lines say: {said}",
            where=(Place(path),),
            lines=(f"less {path}",),
            level=INFO if count < 10 else "",
        )


@check(
    "P11",
    ERROR,
    "live",
    holds="A login and a validation work, within two seconds",
    harm="Nobody can log in, or everybody waits.",
    source="keyfront check",
)
def login(found: Found) -> Iterator[Finding]:
    """As keyfront check does it, with the variables of an openrc, a cloud of clouds.yaml or the
    Keystone of keyfront serve. Its phases are printed: the name lookup, TCP, TLS, the first byte
    of the answer, the rest of it; and what a server tells of itself by Server-Timing."""
    live = _live(found)
    if not live.refused and not live.login:
        raise UnknownError("whom to log in as: OS_AUTH_URL and so on, --os-cloud, or --state")
    if live.refused:
        came = ", ".join(map(_phases, list(live.phases.values())[-1:]))
        said = f"; it ended while waiting for: {live.waited_for}" if live.waited_for else ""
        yield Finding(
            what=f"{live.refused}{said}" + (f" (before: {came})" if came else ""),
            lines=("keyfront check",),
        )
    for step, phases in live.phases.items():
        whole = sum(phases.values())
        if whole <= _SLOW:
            continue
        slowest = max(phases, key=lambda name: phases[name])
        request = live.request_ids.get(step)
        yield Finding(
            what=f"the {step.replace('_', ' ')} took {whole:.0f} ms, most of it {slowest}: "
            f"{_phases(phases)}",
            level=WARNING,
            lines=(f"grep {request} /var/log/keystone/*.log",) if request else ("keyfront check",),
        )


def _phases(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} ms" for name, value in phases.items())


@check(
    "P12",
    WARNING,
    "live",
    holds="Keystone's processes and this shell share /dev/shm",
    harm="keystone-manage of the host is not heard by the cache in the container.",
    source="docs/tokens.md: a container has a /dev/shm of its own",
)
def own_shm(found: Found) -> Iterator[Finding]:
    """Run keystone-manage in the container, or share a folder by keyfront_path of the URL."""
    live = _live(found)
    if not live.own_shm or not any(x.shm for x in live.processes):
        raise UnknownError("the /dev/shm of Keystone's processes: run this as root")
    other = [x for x in live.processes if x.shm and live.own_shm and x.shm != live.own_shm]
    if other:
        yield Finding(
            what=f"{other[0].name} ({other[0].pid}) has a /dev/shm of its own",
            lines=(f"nsenter -t {other[0].pid} -m keystone-manage ...",),
        )


@check(
    "P13",
    WARNING,
    "live",
    "server",
    holds="What waits while Keystone is loaded has room in the queue, and time",
    harm="A restart refuses requests that found the queue full, or answers 504 to those in it.",
    source="uWSGI's log: WSGI app ready in N seconds; the web servers' logs of requests",
)
def loading(found: Found) -> Iterator[Finding]:
    """While a restart loads Keystone, requests wait in the queue of the socket: as many as came in
    the busiest time of that length, which the logs tell. They wait as long as the load takes, which
    has to be well within what the web server and systemd wait for."""
    live = _live(found)
    if live.loading is None:
        raise UnknownError("how long Keystone takes to load: no log says ready in N seconds")
    took, log = live.loading
    queue, place = _queue(found)
    if live.busiest is not None and live.busiest[0] > 0.8 * queue:
        full = live.busiest[0] > queue
        yield Finding(
            what=f"{live.busiest[0]} requests came within the {took:g} s that Keystone takes to "
            f"load, the queue holds {queue}",
            where=(place, Place(live.busiest[1])),
            lines=("listen = 4096",) if found.uwsgi else (),
            level=ERROR if full else "",
        )
    waits = [(x.wait, x.place, x.name) for x in _fronts(found)]
    for _, options in found.daemons:
        known = seconds(options.get("queue-timeout", "0"))
        if known:
            waits.append((known, found.daemons[0][0].place, "queue-timeout"))
    for conf in found.uwsgi:
        unit = found.unit_of_uwsgi(conf)
        kind = unit.service.last("Type") if unit else None
        if unit is not None and kind is not None and kind.value.startswith("notify"):
            start = unit.service.last("TimeoutStartSec", "TimeoutSec")
            known = seconds(start.value) if start else 90.0
            if known:
                waits.append((known, start.place if start else Place(unit.path), "TimeoutStartSec"))
    for wait, where, name in sorted(waits)[:1]:
        if took > 0.8 * wait:
            yield Finding(
                what=f"Keystone takes {took:g} s to load, {name} is {wait:g} s",
                where=(where, Place(log)) if log.startswith("/") else (where,),
                lines=(f"(raise {name} to {int(2 * took)} s, or load less)",),
            )
    if live.busiest is None:
        raise UnknownError("how many requests wait meanwhile: no log of requests can be read")


def _queue(found: Found) -> tuple[int, Place]:
    """Return the shortest queue before Keystone, and where its length is said."""
    queues = [
        (conf.settings.number("listen", default=LISTEN), conf.settings.place("listen"))
        for conf in found.uwsgi
    ]
    for directive, options in found.daemons if not queues else ():
        text = options.get("listen-backlog", "")
        queues.append((int(text) if text.isdigit() else LISTEN, directive.place))
    return min(queues)

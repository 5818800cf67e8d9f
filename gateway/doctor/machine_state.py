"""Looks at the running machine: queues, the kernel's counters, processes, disks, clock, logs."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from keyfront.common import process

from . import cgroups
from .found import Found
from .readers.files import Unread

_PATIENCE = 10  # seconds for ss
_TAIL = 1 << 20  # bytes of a log's end
_LOGS = (
    "/var/log/keyfront/*error.log",
    "/var/log/nginx/*error.log",
    "/var/log/apache2/*error*.log",
    "/var/log/httpd/*error*log",
    "/var/log/uwsgi/*.log",
    "/var/log/uwsgi/app/*.log",
    "/var/log/keystone/*.log",
    "/var/log/kolla/keystone/*.log",
)
# What a log says of connections that were lost or refused, and how it is spoken of.
_LINES = {
    "connection reset by peer": re.compile(rb"[Cc]onnection reset by peer"),
    "queue full": re.compile(rb"listen queue of socket .* full|Resource temporarily unavailable"),
    "closed before the answer": re.compile(rb"upstream prematurely closed|Broken pipe"),
    "database gone": re.compile(rb"MySQL server has gone away|Lost connection to MySQL"),
    "too many open files": re.compile(rb"Too many open files"),
    "killed by harakiri": re.compile(rb"HARAKIRI"),
}
_SERVES = re.compile(r"uwsgi|wsgi:|mod_wsgi|keystone|keyfront")
_ACCESS = (
    "/var/log/keyfront/*access*.log",
    "/var/log/nginx/*access*.log",
    "/var/log/apache2/*access*.log",
    "/var/log/httpd/*access*log",
    "/var/log/kolla/keystone/*access*.log",
)
# What uWSGI says once an application is loaded, and how many of these count.
_READY = re.compile(rb"WSGI app \d+ \([^)]*\) ready in (\d{1,5}) seconds")
_LOADS = 64
# The time of a request: of nginx and Apache, of uWSGI.
_REQUEST = re.compile(
    rb"\[(\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d) |\[(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\] [A-Z]{3,7} "
)
_CLF, _UWSGI = "%d/%b/%Y:%H:%M:%S", "%a %b %d %H:%M:%S %Y"
# How many servers are asked for their time, and for how many seconds each.
_SERVERS, _QUICK = 16, 2.0
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


@dataclass(frozen=True)
class Queue:
    """A listening socket: how many wait, and how many may."""

    address: str
    waiting: int
    most: int


@dataclass(frozen=True)
class Process:
    """A process that serves Keystone.

    :param rss: MiB
    :param files: the files that it has open, and may; ``None`` if that cannot be read
    :param begun: the time of its start, in seconds since 1970
    :param shm: the device of its ``/dev/shm``; 0 if that cannot be read
    """

    pid: int
    name: str
    rss: int
    files: tuple[int, int] | None
    begun: float
    shm: int


@dataclass
class Live:
    """The state of the running machine, as far as it can be read."""

    queues: list[Queue] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    #: Bytes that are free, and the part of all, by folder.
    disks: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: Lines of logs by what they say: how many, and where the last was.
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)
    synchronized: bool | None = None
    memory: int = 0
    own_shm: int = 0
    #: The moment when Keystone's files were installed, in seconds since 1970.
    installed: float | None = None
    #: Milliseconds of each phase of a login; empty if none was tried.
    login: Mapping[str, float] = field(default_factory=dict)
    #: Milliseconds of the phases of the login and of the validations, as far as they came.
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: The server's own times (Server-Timing), in milliseconds.
    timings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: By which ids the requests are found in Keystone's log.
    request_ids: Mapping[str, str] = field(default_factory=dict)
    #: The reason for which the login failed; empty if it did not.
    refused: str = ""
    #: The phase in which it failed; empty if it was answered.
    waited_for: str = ""
    #: Seconds by which this machine's clock is ahead of others, by whose they are.
    clocks: dict[str, float] = field(default_factory=dict)
    #: The logs that were read.
    logs: list[str] = field(default_factory=list)
    #: Seconds that Keystone took to load, and the log that says so; ``None`` if none does.
    loading: tuple[float, str] | None = None
    #: The most requests that came within that time, and the log; ``None`` if none tells.
    busiest: tuple[int, str] | None = None
    #: A log of requests in which Kubernetes' probes stand; empty if none does.
    probed: str = ""


def look(found: Found) -> Live:
    """Look at the machine; what cannot be looked at is noted."""
    live = Live()
    live.counters = dict(_counters(found))
    live.queues = parse_queues(_sockets(found))
    live.processes = list(_processes(found))
    live.own_shm = _device("/dev/shm")
    live.memory = _limit(found)
    for folder in _folders(found):
        try:
            known = os.statvfs(found.files.real(folder))
        except OSError:
            continue
        if known.f_blocks:
            free = known.f_bavail * known.f_frsize
            live.disks[folder] = free, known.f_bavail / known.f_blocks
    live.lines = _lines(found, live)
    live.probed = next(
        (
            path
            for path in found.files.glob(*_ACCESS, *_uwsgi_logs(found))
            if b"kube-probe/" in (_tail(found, path) or b"")
        ),
        "",
    )
    live.loading = _loading(found)
    if live.loading is not None:
        live.busiest = _busiest(found, max(1, round(live.loading[0])))
    found.memory_limit = cgroups.memory_limit(found.files, [x.pid for x in live.processes])
    live.clocks = dict(_clocks(found))
    live.synchronized = _synchronized() if found.files.root == Path("/") else None
    live.installed = _installed(found)
    return live


def _counters(found: Found) -> Iterator[tuple[str, int]]:
    """Give counters of the kernel by name."""
    text = found.files.text("/proc/net/netstat", wanted=False) or ""
    rows = [line.split() for line in text.splitlines() if line.startswith("TcpExt:")]
    if len(rows) == 2:
        for name, value in zip(*rows, strict=False):
            if name in ("ListenOverflows", "ListenDrops"):
                yield name, int(value)
    match = re.search(
        r"^TCP:.*\btw (\d+)",
        found.files.text("/proc/net/sockstat", wanted=False) or "",
        re.MULTILINE,
    )
    if match:
        yield "TIME_WAIT", int(match[1])
    for name in ("nf_conntrack_count", "nf_conntrack_max"):
        value = found.kernel(f"net.netfilter.{name}")
        if value is not None:
            yield name, value
    ports = found.files.text("/proc/sys/net/ipv4/ip_local_port_range", wanted=False)
    if ports and len(ports.split()) == 2:
        low, high = map(int, ports.split())
        yield "ports", high - low + 1


def _sockets(found: Found) -> str:
    """Return the listening sockets, as ss shows them."""
    if found.files.root != Path("/"):
        return ""
    try:
        done = subprocess.run(
            ["ss", "-lntxH"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        found.unread.append(Unread("queues of sockets", "there is no ss: install iproute2"))
        return ""
    return done.stdout.decode(errors="replace")


def parse_queues(text: str) -> list[Queue]:
    """Return the queues in what ``ss -lntxH`` printed."""
    queues = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 5 and words[2].isdigit() and words[3].isdigit():
            queues.append(Queue(words[4], int(words[2]), int(words[3])))
    return queues


def _processes(found: Found) -> Iterator[Process]:
    root = found.files.real("/proc")
    try:
        numbers = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    except OSError:
        return
    unreadable = 0
    for pid in numbers:
        folder = root / str(pid)
        try:
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            pages = int((folder / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
        program = command.partition(" ")[0].rpartition("/")[2]
        known = _SERVES.search(program) or re.match(
            r"\(?wsgi:|\S*python\S* \S*(uwsgi|keyfront) ", command
        )
        if not known or pid == os.getpid() or " doctor" in command:
            continue
        files = None
        try:
            count = len(os.listdir(folder / "fd"))
            match = re.search(
                r"^Max open files\s+(\d+)", (folder / "limits").read_text(), re.MULTILINE
            )
            files = (count, int(match[1])) if match else None
        except OSError:
            unreadable += 1
        ticks = process.started(pid) or 0
        yield Process(
            pid,
            program or "?",
            pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            files,
            _boot(found) + ticks / os.sysconf("SC_CLK_TCK"),
            _device(f"/proc/{pid}/root/dev/shm"),
        )
    if unreadable:
        found.unread.append(
            Unread(
                f"open files of {unreadable} processes", "they are another user's: run this as root"
            )
        )


def _boot(found: Found) -> float:
    match = re.search(
        r"^btime (\d+)", found.files.text("/proc/stat", wanted=False) or "", re.MULTILINE
    )
    return float(match[1]) if match else 0.0


def _device(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0


def _limit(found: Found) -> int:
    """Return the machine's memory in bytes; 0 if it is not known."""
    match = re.search(
        r"^MemTotal:\s+(\d+)", found.files.text("/proc/meminfo", wanted=False) or "", re.MULTILINE
    )
    return int(match[1]) << 10 if match else 0


def _folders(found: Found) -> list[str]:
    folders = ["/dev/shm", "/var/log", "/run"]
    conf = found.keystone
    url = conf.text("database", "connection") if conf else ""
    if url.startswith("sqlite:////"):
        folders.append(url.removeprefix("sqlite:///").partition("?")[0].rpartition("/")[0])
    if found.mysql is not None:
        known = found.mysql.last("datadir")
        folders.append(known.value if known else "/var/lib/mysql")
    return folders


def _tail(found: Found, path: str) -> bytes | None:
    """Return the end of a log; ``None`` if it cannot be read, which is noted."""
    try:
        real = found.files.resolved(path)
        if not real.is_file():
            return None
        with real.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL)
    except OSError as error:
        found.files.cannot(path, error)
        return None


def _uwsgi_logs(found: Found) -> list[str]:
    """Return the files that uWSGI's configurations name for their logs."""
    named = [
        setting.value.removeprefix("file:")
        for conf in found.uwsgi
        for setting in conf.settings.all("logto", "logto2", "logger", "daemonize")
    ]
    return [path for path in named if path.startswith("/")]


def _loading(found: Found) -> tuple[float, str] | None:
    """Return the longest time that Keystone took to load, of the last times in uWSGI's logs."""
    texts = [(x, _tail(found, x)) for x in found.files.glob(*_uwsgi_logs(found), *_LOGS)]
    if found.files.root == Path("/"):
        texts += [(f"the journal of {conf.unit}", _journal(conf.unit)) for conf in found.uwsgi]
    seen = []
    for path, text in texts:
        seen += [(float(x), path) for x in _READY.findall(text or b"")[-_LOADS:]]
    return max(seen, default=None)


def _journal(unit: str) -> bytes:
    if not unit:
        return b""
    try:
        done = subprocess.run(
            ["journalctl", "-q", "-o", "cat", "-n", "5000", "--no-pager", "-u", unit],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout


def _busiest(found: Found, window: int) -> tuple[int, str] | None:
    """Return the most requests that came within a window of seconds, and the log that tells."""
    most: tuple[int, str] | None = None
    for path in found.files.glob(*_ACCESS, *_uwsgi_logs(found)):
        counts: dict[int, int] = {}
        for clf, uwsgis in _REQUEST.findall(_tail(found, path) or b""):
            text, form = (clf, _CLF) if clf else (uwsgis, _UWSGI)
            try:
                when = datetime.strptime(text.decode(), form).replace(tzinfo=UTC)
            except ValueError:
                continue
            second = int(when.timestamp())
            counts[second] = counts.get(second, 0) + 1
        for begin in counts:
            here = sum(counts.get(begin + x, 0) for x in range(min(window, 600)))
            if most is None or here > most[0]:
                most = here, path
    return most


def _clocks(found: Found) -> Iterator[tuple[str, float]]:
    """Give by how many seconds this clock is ahead of each memcached's, as it tells its time."""
    conf = found.keystone
    if conf is None or not found.uses_memcached:
        return
    servers = [
        (host, port)
        for host, port in map(
            memcached_address, conf.text("cache", "memcache_servers").split(",")[:_SERVERS]
        )
        if host and not is_here(host)
    ]
    told: dict[str, float | None] = {}

    def ask(host: str, port: int) -> None:
        told[host] = _ahead_of(host, port)

    # All at once: one that is silent costs its time only once.
    threads = [threading.Thread(target=ask, args=x, daemon=True) for x in servers]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + 3 * _QUICK
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    for host, ahead in sorted(told.copy().items()):
        if ahead is not None:
            yield f"memcached at {host}", ahead


def memcached_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``inet:HOST:PORT`` or ``inet6:[HOST]:PORT``.

    :returns: no host for a socket or for what is none
    """
    text = re.sub(r"^inet6?:", "", text.strip())
    match = re.fullmatch(r"\[?([^\[\]/]+?)\]?(?::(\d{1,5}))?", text)
    if match is None or text.startswith(("unix:", "/")):
        return "", 0
    return match[1], int(match[2] or 11211)


def is_here(host: str) -> bool:
    """Return whether a host is this machine: its clock tells nothing."""
    return host in ("", "localhost", "::1") or host.startswith("127.")


def _ahead_of(host: str, port: int) -> float | None:
    begun = time.time()
    try:
        with socket.create_connection((host, port), _QUICK) as made:
            made.settimeout(_QUICK)
            made.sendall(b"stats\r\n")
            text = b""
            while b"END\r\n" not in text and len(text) < 1 << 16:
                piece = made.recv(4096)
                if not piece:
                    break
                text += piece
                if time.time() - begun > 2 * _QUICK:
                    return None
    except OSError:
        return None
    match = re.search(rb"STAT time (\d{1,12})\r", text)
    # It tells whole seconds: half of one is what to expect of the rest.
    return (begun + time.time()) / 2 - int(match[1]) - 0.5 if match else None


def _lines(found: Found, live: Live) -> dict[str, tuple[int, str]]:
    counts: dict[str, tuple[int, str]] = {}
    for path in found.files.glob(*_uwsgi_logs(found), *_LOGS):
        text = _tail(found, path)
        if text is None:
            continue
        live.logs.append(path)
        for name, pattern in _LINES.items():
            number = len(pattern.findall(text))
            if number:
                counts[name] = counts.get(name, (0, ""))[0] + number, path
    return counts


def _synchronized() -> bool | None:
    """Ask the kernel whether its clock is synchronized (adjtimex without modes changes nothing)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _installed(found: Found) -> float | None:
    """Return when Keystone, keyfront or uWSGI was last installed into a place that is served
    from."""
    times = []
    homes = [x.value for conf in found.uwsgi for x in conf.settings.all("virtualenv")]
    homes += [options["python-home"] for _, options in found.daemons if "python-home" in options]
    for home in homes:
        for path in found.files.glob(
            *(
                f"{home}/lib/python3*/site-packages/{name}-*.dist-info/RECORD"
                for name in ("keystone", "keyfront", "uwsgi", "keystonemiddleware")
            )
        ):
            try:
                times.append(found.files.resolved(path).stat().st_mtime)
            except OSError:
                continue
    return max(times, default=None)

"""The web servers and the balancer in front: nginx, Apache, mod_wsgi's timeouts, HAProxy."""

from __future__ import annotations

import math

from keyfront.common.machine import Machine

from . import costs
from .numbers import Sheet, count
from .profile import Profile
from .workload import Workload

# Bytes that uWSGI holds of a request's headers and variables (16 bits).
_UWSGI_BUFFER = 65535
# What is left of it for the headers of a client.
HEADER = 61440
BODY = 114688
# Descriptors for listening sockets, logs and temporary files.
_SPARE_FILES = 64


def put_fronts(sheet: Sheet, machine: Machine, workload: Workload, profile: Profile) -> None:
    """What stands before the application."""
    _limits(sheet)
    _uwsgi(sheet)
    _nginx(sheet, machine, workload)
    _apache(sheet, machine, profile)
    _mod_wsgi(sheet, machine, workload)
    _haproxy(sheet, workload)


def _limits(sheet: Sheet) -> None:
    sheet.put(
        "limits.body", BODY, "bytes", "[oslo_middleware] max_request_body_size's default",
        "A larger body Keystone itself refuses with 413",
    )
    sheet.put(
        "limits.header", HEADER, "bytes",
        f"uWSGI's {_UWSGI_BUFFER} - {_UWSGI_BUFFER - HEADER} for its own variables; OIDC and SAML "
        "send tens of thousands",
        "Beyond it uWSGI drops the request; nginx and mod_proxy_uwsgi answer 500",
    )


def _uwsgi(sheet: Sheet) -> None:
    harakiri = sheet["timeout.harakiri"]
    sheet.put(
        "uwsgi.harakiri", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Unset, a stuck request holds its worker for ever",
    )
    sheet.put(
        "uwsgi.buffer_size", _UWSGI_BUFFER, "bytes", "the largest that 16 bits hold",
        "uWSGI clamps more without a word; its default of 4096 refuses tokens in headers",
    )
    sheet.put(
        "uwsgi.socket_timeout", min(30, harakiri), "seconds", f"30, at most harakiri {harakiri}",
        "Longer, a client that stalls holds a thread; its default of 4 cuts off slow uploads",
    )
    mercy = sheet["timeout.mercy"]
    sheet.put(
        "uwsgi.worker_reload_mercy", mercy, "seconds", f"timeout.mercy {mercy}",
        "At or above timeout.stop systemd kills first",
    )


def _nginx(sheet: Sheet, machine: Machine, workload: Workload) -> None:
    workers, clients = sheet["nginx.worker_processes"], sheet["front.clients"]
    in_flight = sheet["nginx.in_flight"]
    # the kernel does not spread connections evenly over workers
    uneven = 2 if workers > 1 else 1
    share = math.ceil((clients + in_flight) * uneven / workers)
    connections = 64 * math.ceil((share * 16 / 15 + 16) / 64)
    sheet.put(
        "nginx.worker_connections", connections, "connections a worker",
        f"({clients} clients + {in_flight} to uWSGI) x {uneven} (uneven) / "
        f"{count(workers, 'worker')} = {share}, + 1/16 that nginx keeps free, + 16",
        "Beyond it nginx closes connections unanswered; a proxied request takes two",
    )
    files = sheet.put(
        "nginx.worker_rlimit_nofile", 2 * connections + _SPARE_FILES, "files",
        f"2 x worker_connections {connections} + {_SPARE_FILES}: a buffered body is a file, too",
        "Fewer, and accept() fails (too many open files)",
    )
    sheet.put(
        "nginx.header_buffers", 1, "buffers", "one line or many: no more than limits.header in all",
        "More are held by every connection that sends large headers",
    )
    sheet.put(
        "nginx.header_buffer_size", HEADER, "bytes", f"limits.header {HEADER}",
        "Larger ones nginx answers with 400, and a long URL with 414",
    )
    capacity = sheet["capacity.logins"]
    told = math.ceil((workload.logins or 0) / workload.nodes)
    rate = sheet.put(
        "nginx.login_rate", max(1, capacity // 2, told), "requests a second and address",
        f"half of the {capacity} logins a second of this node"
        + (f", at least the {told} expected" if told else ""),
        "Without it one address could keep the node from all others; it gets 429 with Retry-After",
    )
    sheet.put(
        "nginx.login_burst", max(rate, math.floor(rate * workload.latency)), "requests",
        f"{rate} a second x {workload.latency:g} s, what is answered in time",
        "The rest of a burst would be answered too late",
    )
    sheet.put(
        "limits.nofile", files, "files", f"nginx.worker_rlimit_nofile {files}; this process may "
        f"have {machine.nofile}",
        "Fewer, and accept() and open() fail; systemd's LimitNOFILE= sets it, limits.conf does not",
    )
    somaxconn = sheet["sysctl.somaxconn"]
    sheet.put(
        "sysctl.tcp_max_syn_backlog", somaxconn, "connections", f"sysctl.somaxconn {somaxconn}",
        "Beyond it new connections fall back to SYN cookies",
    )


def _apache(sheet: Sheet, machine: Machine, profile: Profile) -> None:
    room = sheet["memory.limit"] / 4
    wanted = 64 if profile.name == "small" else min(4096, max(128, 64 * machine.cores))
    wanted = min(wanted, max(16, sheet["nginx.in_flight"]))
    by_memory = max(16, int(room / costs.APACHE_THREAD))
    most = min(wanted, by_memory)
    threads = 64 if most >= 256 else 32 if most >= 64 else 16
    servers = max(1, most // threads)
    workers = servers * threads
    sheet.put(
        "apache.threads_per_child", threads, "threads", f"{most} in all; ThreadLimit's default 64",
        "A child that crashes takes that many requests with it",
    )
    sheet.put(
        "apache.server_limit", servers, "processes",
        f"{most} threads / {threads} ({wanted} wanted, at most {by_memory} in {room:.0f} MiB)",
        "MaxRequestWorkers is cut to ServerLimit x ThreadsPerChild",
    )
    sheet.put(
        "apache.max_request_workers", workers, "threads", f"{servers} x {threads}",
        "Further requests wait in the kernel's queue (apache.listen_backlog)",
    )
    sheet.put(
        "apache.start_servers", max(1, math.ceil(servers / 2)), "processes",
        f"half of {count(servers, 'process')}", "Fewer, and the first requests wait for a fork",
    )
    spare = sheet.put(
        "apache.min_spare_threads", threads if servers > 1 else threads // 2, "threads",
        "one process" if servers > 1 else "half of the one process",
        "Fewer, and a burst waits for a fork",
    )
    sheet.put(
        "apache.max_spare_threads", max(workers, spare + threads), "threads",
        "all of them: a process that ends in a lull is missed in the next burst",
        "Lower, Apache ends processes and forks them again",
    )
    clients = max(workers, min(sheet["front.clients"], int(room * 1024 / costs.APACHE_CLIENT)))
    sheet.put(
        "apache.async_request_worker_factor", math.ceil(clients / workers), "connections a thread",
        f"{clients} clients / {workers} threads (front.clients {sheet['front.clients']}, at most "
        f"{room:.0f} MiB at {costs.APACHE_CLIENT} KiB each)",
        "With the default of 2 kept idle connections keep new ones out",
    )
    sheet.put(
        "apache.listen_backlog", sheet["uwsgi.listen"], "connections",
        f"uwsgi.listen {sheet['uwsgi.listen']}",
        "Beyond it clients try again after 1, 3, 7 s; over somaxconn the kernel cuts it silently",
    )
    children = max(8, min(wanted, int(room / costs.APACHE_PREFORK)))
    sheet.put(
        "apache.prefork_max_request_workers", children, "processes",
        f"{wanted} wanted, at most {room:.0f} MiB / {costs.APACHE_PREFORK:g}",
        "Further requests wait in the kernel's queue; a kept idle connection holds a process",
    )
    low = sheet.put(
        "apache.prefork_start_servers", max(2, children // 8), "processes", f"{children} / 8",
        "Fewer, and the first requests wait for a fork",
    )
    sheet.put(
        "apache.prefork_min_spare_servers", low, "processes", f"{children} / 8",
        "Fewer, and a burst waits for a fork",
    )
    sheet.put(
        "apache.prefork_max_spare_servers", max(low + 1, children // 2), "processes",
        f"{children} / 2", "Lower, Apache ends processes and forks them again",
    )
    sheet.put(
        "apache.header_field_size", HEADER, "bytes", f"limits.header {HEADER}",
        "Larger ones Apache answers with 400; its default of 8190 is too small for OIDC and SAML",
    )


def _mod_wsgi(sheet: Sheet, machine: Machine, workload: Workload) -> None:
    workers, harakiri = sheet["apache.max_request_workers"], sheet["timeout.harakiri"]
    wait, mercy = max(1, math.ceil(workload.latency)), sheet["timeout.mercy"]
    sheet.put(
        "mod_wsgi.listen_backlog", max(1, min(workers, machine.somaxconn)), "connections",
        f"apache.max_request_workers {workers}, which is how many can wait",
        "Fewer, and Apache's threads retry the connection until connect-timeout",
    )
    sheet.put(
        "mod_wsgi.queue_timeout", wait, "seconds", f"the latency target of {workload.latency:g} s",
        "Longer, clients wait for an answer that comes too late; after it they get 504",
    )
    sheet.put(
        "mod_wsgi.request_timeout", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Off (the default), a stuck request holds its thread for ever",
    )
    sheet.put(
        "mod_wsgi.connect_timeout", wait, "seconds",
        f"the latency target of {workload.latency:g} s",
        "Longer, Apache's threads pile up before a daemon that restarts",
    )
    sheet.put(
        "mod_wsgi.socket_timeout", sheet["timeout.proxy"], "seconds",
        f"timeout.proxy {sheet['timeout.proxy']}",
        "Shorter than request-timeout, the client gets a 504 while the daemon still computes",
    )
    sheet.put(
        "mod_wsgi.graceful_timeout", mercy, "seconds", f"timeout.mercy {mercy}",
        "Lower, a restart cuts off requests that were nearly done",
    )
    sheet.put(
        "mod_wsgi.shutdown_timeout", 5, "seconds", "mod_wsgi's default, after graceful-timeout",
        "Longer has no effect when Apache stops: it kills daemons after 3 s",
    )
    sheet.put(
        "mod_wsgi.deadlock_timeout", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Longer, a process that holds the interpreter for ever answers nobody for that long",
    )
    sheet.put(
        "mod_wsgi.maximum_requests", 0, "requests",
        "off: mod_wsgi has no delta, so daemons would restart at the same time",
        "Set, caches are lost and requests wait for Keystone to load",
    )


def _haproxy(sheet: Sheet, workload: Workload) -> None:
    clients, in_flight = sheet["front.clients"], sheet["nginx.in_flight"]
    sheet.put(
        "haproxy.maxconn", min(1_000_000, clients * workload.nodes), "connections",
        f"{clients} clients x {count(workload.nodes, 'node')}",
        "Further clients wait in the kernel's queue; each takes about 34 KiB here",
    )
    sheet.put(
        "haproxy.server_maxconn", in_flight, "connections", f"nginx.in_flight {in_flight}",
        "More, and the node answers 503 although another one may be free",
    )

"""The web servers and the balancer in front: nginx, Apache, mod_wsgi's timeouts, HAProxy."""

from __future__ import annotations

import math

from keyfront.common.machine import Machine

from . import costs
from .reasons import Numbers, count
from .workload import Profile, Workload

# Bytes that uWSGI holds of a request's headers and variables (16 bits).
_UWSGI_BUFFER = 65535
# The bytes of it that are left for the headers of a client.
_HEADER = 61440
BODY = 114688
# Descriptors for listening sockets, logs and temporary files.
_SPARE_FILES = 64


def put_nginx_and_apache(
    numbers: Numbers, machine: Machine, workload: Workload, profile: Profile
) -> None:
    """Add the numbers of the servers in front of the application."""
    _limits(numbers)
    _uwsgi(numbers)
    _nginx(numbers, machine, workload)
    _apache(numbers, machine, profile)
    _mod_wsgi(numbers, machine, workload)
    _haproxy(numbers, workload)


def _limits(numbers: Numbers) -> None:
    numbers.put(
        "limits.body", BODY, "bytes", "[oslo_middleware] max_request_body_size's default",
        "A larger body Keystone itself refuses with 413",
    )
    numbers.put(
        "limits.header", _HEADER, "bytes",
        f"uWSGI's {_UWSGI_BUFFER} - {_UWSGI_BUFFER - _HEADER} for its own variables; OIDC and SAML "
        "send tens of thousands",
        "Beyond it uWSGI drops the request; nginx and mod_proxy_uwsgi answer 500",
    )


def _uwsgi(numbers: Numbers) -> None:
    harakiri = numbers["timeout.harakiri"]
    numbers.put(
        "uwsgi.harakiri", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Unset, a stuck request holds its worker for ever",
    )
    numbers.put(
        "uwsgi.buffer_size", _UWSGI_BUFFER, "bytes", "the largest that 16 bits hold",
        "uWSGI clamps more without a word; its default of 4096 refuses tokens in headers",
    )
    numbers.put(
        "uwsgi.socket_timeout", min(30, harakiri), "seconds", f"30, at most harakiri {harakiri}",
        "Longer, a client that stalls holds a thread; its default of 4 cuts off slow uploads",
    )
    mercy = numbers["timeout.mercy"]
    numbers.put(
        "uwsgi.worker_reload_mercy", mercy, "seconds", f"timeout.mercy {mercy}",
        "At or above timeout.stop systemd kills first",
    )


def _nginx(numbers: Numbers, machine: Machine, workload: Workload) -> None:
    workers, clients = numbers["nginx.worker_processes"], numbers["front.clients"]
    in_flight = numbers["nginx.in_flight"] + numbers["nginx.login_in_flight"]
    # the kernel does not spread connections evenly over workers
    uneven = 2 if workers > 1 else 1
    share = math.ceil((clients + in_flight) * uneven / workers)
    connections = 64 * math.ceil((share * 16 / 15 + 16) / 64)
    numbers.put(
        "nginx.worker_connections", connections, "connections a worker",
        f"({clients} clients + {in_flight} to uWSGI) x {uneven} (uneven) / "
        f"{count(workers, 'worker')} = {share}, + 1/16 that nginx keeps free, + 16",
        "Beyond it nginx closes connections unanswered; a proxied request takes two",
    )
    files = numbers.put(
        "nginx.worker_rlimit_nofile", 2 * connections + _SPARE_FILES, "files",
        f"2 x worker_connections {connections} + {_SPARE_FILES}: a buffered body is a file, too",
        "Fewer, and accept() fails (too many open files)",
    )
    numbers.put(
        "nginx.header_buffers", 1, "buffers", "one line or many: no more than limits.header in all",
        "More are held by every connection that sends large headers",
    )
    numbers.put(
        "nginx.header_buffer_size", _HEADER, "bytes", f"limits.header {_HEADER}",
        "Larger ones nginx answers with 400, and a long URL with 414",
    )
    capacity = numbers["capacity.logins"]
    told = math.ceil((workload.logins or 0) / workload.nodes)
    rate = numbers.put(
        "nginx.login_rate", max(1, capacity // 2, told), "requests a second and address",
        f"half of the {capacity} logins a second of this node"
        + (f", at least the {told} expected" if told else ""),
        "Without it one address could keep the node from all others; it gets 429 with Retry-After",
    )
    numbers.put(
        "nginx.login_burst", max(rate, math.floor(rate * workload.latency)), "requests",
        f"{rate} a second x {workload.latency:g} s, what is answered in time",
        "The rest of a burst would be answered too late",
    )
    numbers.put(
        "limits.nofile", files, "files", f"nginx.worker_rlimit_nofile {files}; this process may "
        f"have {machine.nofile}",
        "Fewer, and accept() and open() fail; systemd's LimitNOFILE= sets it, limits.conf does not",
    )
    somaxconn = numbers["sysctl.somaxconn"]
    numbers.put(
        "sysctl.tcp_max_syn_backlog", somaxconn, "connections", f"sysctl.somaxconn {somaxconn}",
        "Beyond it new connections fall back to SYN cookies",
    )


def _apache(numbers: Numbers, machine: Machine, profile: Profile) -> None:
    room = numbers["memory.limit"] / 4
    served = 64 if profile.name == "small" else min(4096, max(128, 64 * machine.cores))
    served = min(served, max(16, numbers["nginx.in_flight"]))
    # A client whose headers are slow holds a thread: two hundred of them leave some.
    wanted = served if profile.name == "small" else max(served, 256)
    wanted = min(wanted, max(16, numbers["nginx.in_flight"]))
    by_memory = max(16, int(room / costs.APACHE_THREAD))
    most = min(wanted, by_memory)
    threads = 64 if most >= 256 else 32 if most >= 64 else 16
    servers = max(1, most // threads)
    workers = servers * threads
    numbers.put(
        "apache.threads_per_child", threads, "threads", f"{most} in all; ThreadLimit's default 64",
        "A child that crashes takes that many requests with it",
    )
    numbers.put(
        "apache.server_limit", servers, "processes",
        f"{most} threads / {threads} ({wanted} wanted, at most {by_memory} in {room:.0f} MiB)",
        "MaxRequestWorkers is cut to ServerLimit x ThreadsPerChild",
    )
    numbers.put(
        "apache.max_request_workers", workers, "threads", f"{servers} x {threads}",
        "Further requests wait in the kernel's queue (apache.listen_backlog)",
    )
    numbers.put(
        "apache.start_servers", max(1, math.ceil(servers / 2)), "processes",
        f"half of {count(servers, 'process')}", "Fewer, and the first requests wait for a fork",
    )
    spare = numbers.put(
        "apache.min_spare_threads", threads if servers > 1 else threads // 2, "threads",
        "one process" if servers > 1 else "half of the one process",
        "Fewer, and a burst waits for a fork",
    )
    numbers.put(
        "apache.max_spare_threads", max(workers, spare + threads), "threads",
        "all of them: a process that ends in a lull is missed in the next burst",
        "Lower, Apache ends processes and forks them again",
    )
    clients = max(workers, min(numbers["front.clients"], int(room * 1024 / costs.APACHE_CLIENT)))
    numbers.put(
        "apache.async_request_worker_factor", math.ceil(clients / workers), "connections a thread",
        f"{clients} clients / {workers} threads (front.clients {numbers['front.clients']}, at most "
        f"{room:.0f} MiB at {costs.APACHE_CLIENT} KiB each)",
        "With the default of 2 kept idle connections keep new ones out",
    )
    numbers.put(
        "apache.listen_backlog", numbers["uwsgi.listen"], "connections",
        f"uwsgi.listen {numbers['uwsgi.listen']}",
        "Beyond it clients try again after 1, 3, 7 s; over somaxconn the kernel cuts it silently",
    )
    children = max(8, min(served, int(room / costs.APACHE_PREFORK)))
    numbers.put(
        "apache.prefork_max_request_workers", children, "processes",
        f"{served} wanted, at most {room:.0f} MiB / {costs.APACHE_PREFORK:g}",
        "Further requests wait in the kernel's queue; a kept idle connection holds a process",
    )
    low = numbers.put(
        "apache.prefork_start_servers", max(2, children // 8), "processes", f"{children} / 8",
        "Fewer, and the first requests wait for a fork",
    )
    numbers.put(
        "apache.prefork_min_spare_servers", low, "processes", f"{children} / 8",
        "Fewer, and a burst waits for a fork",
    )
    numbers.put(
        "apache.prefork_max_spare_servers", max(low + 1, children // 2), "processes",
        f"{children} / 2", "Lower, Apache ends processes and forks them again",
    )
    numbers.put(
        "apache.header_field_size", _HEADER, "bytes", f"limits.header {_HEADER}",
        "Larger ones Apache answers with 400; its default of 8190 is too small for OIDC and SAML",
    )


def _mod_wsgi(numbers: Numbers, machine: Machine, workload: Workload) -> None:
    workers, harakiri = numbers["apache.max_request_workers"], numbers["timeout.harakiri"]
    wait, mercy = max(1, math.ceil(workload.latency)), numbers["timeout.mercy"]
    numbers.put(
        "mod_wsgi.listen_backlog", max(1, min(workers, machine.somaxconn)), "connections",
        f"apache.max_request_workers {workers}, which is how many can wait",
        "Fewer, and Apache's threads retry the connection until connect-timeout",
    )
    numbers.put(
        "mod_wsgi.queue_timeout", wait, "seconds", f"the latency target of {workload.latency:g} s",
        "Longer, clients wait for an answer that comes too late; after it they get 504",
    )
    numbers.put(
        "mod_wsgi.request_timeout", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Off (the default), a stuck request holds its thread for ever",
    )
    numbers.put(
        "mod_wsgi.connect_timeout", wait, "seconds",
        f"the latency target of {workload.latency:g} s",
        "Longer, Apache's threads pile up before a daemon that restarts",
    )
    numbers.put(
        "mod_wsgi.socket_timeout", numbers["timeout.proxy"], "seconds",
        f"timeout.proxy {numbers['timeout.proxy']}",
        "Shorter than request-timeout, the client gets a 504 while the daemon still computes",
    )
    numbers.put(
        "mod_wsgi.graceful_timeout", mercy, "seconds", f"timeout.mercy {mercy}",
        "Lower, a restart cuts off requests that were nearly done",
    )
    numbers.put(
        "mod_wsgi.shutdown_timeout", mercy, "seconds", f"timeout.mercy {mercy}",
        "Lower, a reload cuts off requests; when Apache stops it kills daemons after 3 s anyway",
    )
    numbers.put(
        "mod_wsgi.deadlock_timeout", harakiri, "seconds", f"timeout.harakiri {harakiri}",
        "Longer, a process that holds the interpreter for ever answers nobody for that long",
    )
    numbers.put(
        "mod_wsgi.maximum_requests", 0, "requests",
        "off: mod_wsgi has no delta, so daemons would restart at the same time",
        "Set, caches are lost and requests wait for Keystone to load",
    )


def _haproxy(numbers: Numbers, workload: Workload) -> None:
    clients, in_flight = numbers["front.clients"], numbers["nginx.in_flight"]
    logins = numbers["nginx.login_in_flight"]
    numbers.put(
        "haproxy.maxconn", min(1_000_000, clients * workload.nodes), "connections",
        f"{clients} clients x {count(workload.nodes, 'node')}",
        "Further clients wait in the kernel's queue; each takes about 34 KiB here",
    )
    numbers.put(
        "haproxy.server_maxconn", in_flight + logins, "connections",
        f"nginx.in_flight {in_flight}" + (f" + nginx.login_in_flight {logins}" if logins else ""),
        "More, and the node answers 503 although another one may be free",
    )

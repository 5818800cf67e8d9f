"""The processes that run the application: as many as cores and memory allow, and their queue."""

from __future__ import annotations

import math

from keyfront.common.machine import MIB, Machine

from .. import login_limit
from . import costs
from .budgets import fits
from .reasons import Numbers, count
from .workload import Profile, Workload

# The part of the memory that the web server in front may take.
_FRONT = 4
# The part of the memory that the answers which workers share may take.
_NODE_CACHE = 16
# MiB of cached answers a worker below which the cache is not made to give more workers room.
_LEAST_CACHE = 4
# More nginx workers than this bring nothing: each passes on tens of thousands of requests a second.
_MOST_NGINX = 32
# Seconds between the restarts of two workers that are recycled by age.
_APART = 60
_DAY = 86400


def put_workers(numbers: Numbers, machine: Machine, workload: Workload, profile: Profile) -> None:
    """Add uWSGI's and mod_wsgi's processes, within memory and for the workload."""
    limit = numbers.put(
        "memory.limit", profile.memory(machine.memory) // MIB, "MiB",
        f"{profile.memory_share:.0%} of {machine.memory_mib} MiB ({machine.memory_from})"
        + (f", at most {profile.most_memory // MIB}" if profile.most_memory else "")
        + f" with profile {profile.name}",
        "Beyond it the kernel kills the largest process, mostly a worker in the middle of requests",
    )
    front = _front(numbers, machine, profile, limit)
    _processes(numbers, machine, workload, profile, limit, front)
    threads = _threads(numbers, workload)
    _mod_wsgi(numbers, machine, profile, limit - math.ceil(front), threads)
    _logins(numbers, machine, workload)
    _capacity(numbers, machine, workload)
    _queue(numbers, machine, workload)
    _recycling(numbers, profile)
    _reload(numbers, profile, limit)


def _front(numbers: Numbers, machine: Machine, profile: Profile, limit: int) -> float:
    """Add nginx's processes and the clients it holds; returns the MiB that they take."""
    room = limit / _FRONT
    by_memory = int((room / 8 - costs.NGINX_MASTER) / costs.NGINX_WORKER)
    wanted = min(machine.cores, _MOST_NGINX)
    workers = max(1, min(wanted, by_memory))
    numbers.put(
        "nginx.worker_processes", workers, "processes",
        f"{count(machine.cores, 'core')} ({machine.cores_from}), at most {_MOST_NGINX}"
        + (f" and an eighth of {room:.0f} MiB" if workers < wanted else ""),
        "More only take memory and turns on the cores",
    )
    base = costs.NGINX_MASTER + workers * costs.NGINX_WORKER
    clients = max(64, min(profile.clients, int((room - base) * 1024 / costs.CLIENT)))
    numbers.put(
        "front.clients", clients, "connections",
        f"profile {profile.name}: {profile.clients}"
        + (f", at most what {room:.0f} MiB hold at {costs.CLIENT} KiB each"
           if clients < profile.clients else ""),
        "Further clients wait in the kernel until one has gone, then are reset",
    )
    return base + clients * costs.CLIENT / 1024


def _threads(numbers: Numbers, workload: Workload) -> int:
    value, reason = 2, "one computes while the other waits for the database"
    if workload.threads is not None:
        value, reason = workload.threads, "given"
    elif workload.ldap:
        value, reason = 4, "one computes while three wait for the directory"
        processes = numbers["uwsgi.processes"]
        if not fits(workload, processes, 4) and fits(workload, processes, 2):
            value, reason = 2, "not 4 as otherwise with LDAP, so that pools keep their budgets"
    threads = numbers.put(
        "uwsgi.threads", value, "threads a process", reason,
        "More queue for the interpreter lock and hold connections; one alone may lose a request "
        "on a reload",
    )
    numbers.put(
        "uwsgi.gevent", 0, "greenlets a process",
        "off: Keystone computes, and a greenlet that computes stops all others of its worker",
        "Each greenlet may hold a connection of every pool",
    )
    return threads


def _processes(
    numbers: Numbers,
    machine: Machine,
    workload: Workload,
    profile: Profile,
    limit: int,
    front: float,
) -> None:
    given, own = workload.processes, workload.login_processes
    wanted = given or max(machine.cores, profile.least_processes) + own
    node_cache = numbers.put(
        "token_cache.node_memory", max(4, min(profile.node_cache, limit // _NODE_CACHE)), "MiB",
        f"profile {profile.name}: {profile.node_cache}, at most 1/{_NODE_CACHE} of {limit}",
        "It is taken from /run or /dev/shm, of which a container has 64 MiB by default",
    )
    fixed = costs.SHARED + costs.OWN + node_cache + math.ceil(front)
    cache = profile.cache
    while (fit := _fit(limit - fixed, profile, cache)) < wanted and cache > _LEAST_CACHE:
        cache = max(_LEAST_CACHE, cache // 4)
    worker = costs.OWN + profile.growth + cache
    processes = numbers.put(
        "uwsgi.processes", given or max(1, min(wanted, fit)), "processes",
        ("given" if given else f"{count(machine.cores, 'core')} x 1")
        + (f", at least {wanted - own}" if wanted - own > machine.cores and not given else "")
        + (f", and {own} for logins" if own and not given else "")
        + f", at most {max(fit, 0)} by memory: ({limit} - {fixed}) MiB / {worker}",
        "More take turns on the cores, and each holds memory and connections",
    )
    numbers.put(
        "uwsgi.login_processes", own, "of the processes",
        "given, for logins and nothing else" if own else "off: all take all requests",
        "Without, validations wait behind logins where more come than there are threads",
    )
    if own >= processes:
        numbers.refuse(
            "uwsgi.login_processes", own + 1, processes,
            f"uwsgi.processes must be at least {own + 1}, and memory holds {processes}; or "
            f"--login-processes at most {processes - 1}",
        )
    numbers.put(
        "token_cache.memory", cache, "MiB a process",
        f"profile {profile.name}: {profile.cache}"
        + (", less so that more workers fit" if cache < profile.cache else ""),
        "More takes memory from workers; less, and more validations are asked of Keystone",
    )
    total = numbers.put(
        "memory.total_estimate", fixed + processes * worker, "MiB",
        f"{costs.SHARED} shared + {costs.OWN} master + {node_cache} node cache + "
        f"{math.ceil(front)} nginx + {count(processes, 'process')} x {worker}",
        "Over memory.limit workers are killed in the middle of requests",
    )
    if total > limit:
        numbers.refuse(
            "memory.total_estimate", total, limit,
            _memory_gives(total, processes, fit, profile),
        )


def _memory_gives(total: int, processes: int, fit: int, profile: Profile) -> str:
    words = f"memory must be at least {math.ceil(total / profile.memory_share)} MiB for "
    words += count(processes, "process")
    if profile.most_memory is not None and total > profile.most_memory // MIB:
        words += " and --profile standard"
    if fit >= 1:
        return f"{words}, or uwsgi.processes at most {fit}"
    return words if profile.most_memory is not None else f"{words}, or --profile small"


def _fit(room: float, profile: Profile, cache: int) -> int:
    return math.floor(room / (costs.OWN + profile.growth + cache))


def _mod_wsgi(
    numbers: Numbers, machine: Machine, profile: Profile, limit: int, threads: int
) -> None:
    cache = numbers["token_cache.memory"]
    daemon = costs.ALONE + profile.growth + cache
    fit = (limit - numbers["token_cache.node_memory"]) // daemon
    own = numbers["uwsgi.login_processes"]
    all_take = numbers["uwsgi.processes"] - own
    logins = own if own < fit else 0
    # With its own for logins it may have no more than uWSGI: connections are counted by those.
    wanted = all_take if own else max(2, all_take)
    numbers.put(
        "mod_wsgi.processes", max(1, min(wanted, fit - logins)), "processes",
        f"uwsgi.processes {all_take}"
        + ("" if own else ", at least 2, so that one answers while the other is replaced")
        + f", at most {max(fit - logins, 0)} by memory: a daemon loads Keystone by "
        f"itself and takes {daemon} MiB",
        "More take turns on the cores, and each holds memory and connections",
    )
    numbers.put(
        "mod_wsgi.login_processes", logins, "processes more",
        f"uwsgi.login_processes {own}" if logins == own
        else f"off, for memory holds {max(fit, 0)} daemons, and one is for all else",
        "Without, validations wait behind logins; of one, logins wait while it is replaced",
    )
    numbers.put(
        "mod_wsgi.threads", threads, "threads a process", f"uwsgi.threads {threads}",
        "More queue for the interpreter lock and hold connections",
    )


def _logins(numbers: Numbers, machine: Machine, workload: Workload) -> None:
    processes, threads = numbers["uwsgi.processes"], numbers["uwsgi.threads"]
    own = numbers["uwsgi.login_processes"]
    room = login_limit.room(processes, threads, own=own)
    busy = min(machine.cores, processes)
    value = min(room if workload.ldap else min(busy, room), login_limit.MOST)
    where = f"{own} x {threads}" if own else f"three quarters of {processes} x {threads}"
    numbers.put(
        "uwsgi.login_limit", value, "logins at a time on this node",
        f"{where} threads, as logins wait for the directory"
        if workload.ldap
        else f"{count(busy, 'core')}, of which each checks one password at a time, at most "
        f"{where} threads",
        "More make each slower, and in a flood of logins validations wait behind them; fewer leave "
        "cores idle when many log in",
    )


def _login_cost(workload: Workload) -> float:
    """Return the CPU seconds of a login; a directory checks passwords on its own machine."""
    return costs.LOGIN + (0 if workload.ldap else costs.PASSWORD_HASH)


def _validation_cost(workload: Workload) -> float:
    """Return the CPU seconds of a validation, on average."""
    if not workload.token_cache:
        return costs.VALIDATION
    return costs.CACHED_VALIDATION + workload.first_validations * costs.FIRST_VALIDATION


def _capacity(numbers: Numbers, machine: Machine, workload: Workload) -> None:
    busy = min(machine.cores, numbers["uwsgi.processes"])
    login, validation = _login_cost(workload), _validation_cost(workload)
    parts = f"{costs.LOGIN:g} s" + ("" if workload.ldap else f" + bcrypt {costs.PASSWORD_HASH:g} s")
    numbers.put(
        "capacity.logins", max(1, math.floor(busy / login)), "a second on this node",
        f"{count(busy, 'core')} / ({parts}) of computing, if it does nothing else",
        "More wait in the queue until they are refused",
    )
    how = (
        f"{costs.CACHED_VALIDATION * 1000:g} ms cached, {100 * workload.first_validations:.4g}% at "
        f"{costs.FIRST_VALIDATION * 1000:g} ms more" if workload.token_cache
        else f"{costs.VALIDATION * 1000:g} ms without the token cache"
    )
    numbers.put(
        "capacity.validations", max(1, math.floor(busy / validation)), "a second on this node",
        f"{count(busy, 'core')} at {how}, if it does nothing else",
        "More wait in the queue until they are refused",
    )
    logins, validations = workload.logins or 0, workload.validations or 0
    demand = (logins * login + validations * validation) / workload.nodes
    if demand > busy * costs.BUSY:
        needed = math.ceil(demand / costs.BUSY)
        what = "cores" if busy == machine.cores else "processes that memory allows"
        numbers.refuse(
            "uwsgi.processes", needed, busy,
            f"{what} must be at least {needed} a node instead of {busy} ({costs.BUSY:.0%} busy), "
            f"or nodes at least {math.ceil(demand * workload.nodes / (busy * costs.BUSY))} "
            f"instead of {workload.nodes}, or fewer logins and validations",
        )
    if logins and login > workload.latency:
        numbers.refuse(
            "latency", login, workload.latency,
            f"the latency target must be at least {login:g} s: a login computes that long"
            + ("" if workload.ldap else ", or [identity] password_hash_rounds must be lower"),
        )


def _queue(numbers: Numbers, machine: Machine, workload: Workload) -> None:
    processes, threads = numbers["uwsgi.processes"], numbers["uwsgi.threads"]
    busy = min(machine.cores, processes)
    logins, validations = workload.logins or 0, workload.validations or 0
    if logins + validations == 0:
        mean, mix = _validation_cost(workload), "a validation"
    else:
        share = logins / (logins + validations)
        mean = share * _login_cost(workload) + (1 - share) * _validation_cost(workload)
        mix = "a request of the load given"
    answered = max(16, math.floor(busy * workload.latency / mean))
    wanted = min(answered, numbers["front.clients"], 65535)
    listen = numbers.put(
        "uwsgi.listen", max(1, min(wanted, machine.somaxconn)), "connections",
        f"{count(busy, 'core')} x {workload.latency:g} s / {mean * 1000:.3g} ms ({mix}) = "
        f"{answered}, at most front.clients {numbers['front.clients']} and net.core.somaxconn "
        f"{machine.somaxconn}",
        "What waits longer is answered too late; above somaxconn uWSGI does not start",
    )
    own = numbers["uwsgi.login_processes"]
    numbers.put(
        "nginx.in_flight", listen + max(0, processes - own) * threads, "requests",
        f"uwsgi.listen {listen} + {processes - own} x {threads} threads",
        "A full unix socket answers 502 at once; this bound answers 503 with Retry-After first",
    )
    numbers.put(
        "nginx.login_in_flight", listen + own * threads if own else 0, "logins",
        f"uwsgi.listen {listen} + {own} x {threads} threads of their own"
        if own
        else "off, as uwsgi.login_processes",
        "As nginx.in_flight",
    )
    kernel = max(4096, 1 << (wanted - 1).bit_length())
    numbers.put(
        "sysctl.somaxconn", min(kernel, 65535), "connections",
        f"the queue that is wanted, {wanted}, rounded up to a power of two; Linux's default is "
        f"4096, here it is {machine.somaxconn}",
        "Lower than uwsgi.listen, and uWSGI does not start; it is per network namespace",
    )


def _recycling(numbers: Numbers, profile: Profile) -> None:
    processes = numbers["uwsgi.processes"]
    cache, node_cache = numbers["token_cache.memory"], numbers["token_cache.node_memory"]
    numbers.put(
        "uwsgi.reload_on_rss", costs.SHARED + node_cache + costs.OWN + profile.growth + cache,
        "MiB",
        f"{costs.SHARED} + {node_cache} shared (RSS counts them in each) + {costs.OWN} own + "
        f"{cache} cache + {profile.growth} growth",
        "Higher, all workers together no longer fit; lower, healthy ones are restarted",
    )
    numbers.put(
        "uwsgi.max_requests", 0, "requests",
        "off: memory and age recycle; counting would restart workers when load is highest",
        "Set, cached answers are lost; up to uWSGI 2.0.26 a worker with threads may hang on it",
    )
    numbers.put(
        "uwsgi.max_requests_delta", 0, "requests", "off, as uwsgi.max_requests",
        "Without it workers that share the load evenly would restart at the same time",
    )
    delta = max(_APART, min(_DAY // 4, _DAY // (4 * processes)))
    numbers.put(
        "uwsgi.max_worker_lifetime", _DAY, "seconds", "once a day",
        "Shorter, caches and pools are built anew for nothing",
    )
    numbers.put(
        "uwsgi.max_worker_lifetime_delta", delta, "seconds",
        f"a quarter of a day over {count(processes, 'process')}, at least {_APART}",
        "Without it all workers restart in the same second",
    )


def _reload(numbers: Numbers, profile: Profile, limit: int) -> None:
    """Add what a second uWSGI takes that loads the new application while the first one serves."""
    processes = numbers["uwsgi.processes"]
    taken = numbers["memory.total_estimate"] - processes * profile.growth
    second = costs.MANAGER + costs.SHARED + (1 + processes) * costs.OWN
    room = limit * 9 // 10
    fits = taken + second <= room
    sums = (
        f"{costs.MANAGER} keyfront uwsgi + {costs.SHARED} shared + {1 + processes} x {costs.OWN}, "
        f"beside the first one's {taken} without growth; 9/10 of memory.limit are {room}"
    )
    numbers.put(
        "uwsgi.reload_memory", second if fits else 0, "MiB",
        sums if fits else f"off, for it does not fit: {second} = {sums}",
        "Off, a reload ends the workers first: who comes waits until the application is loaded",
    )

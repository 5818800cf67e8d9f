"""``keyfront status``: how this node is, all parts on one page."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from keyfront.errors import KeyfrontError
from keyfront.gateway.memory_limit import resident
from keyfront.gateway.node import counters, drain
from keyfront.gateway.node.health import PARTS

from . import heartbeat, metrics
from .drain import add_file_argument

if TYPE_CHECKING:
    from keyfront.gateway.heartbeat.counters import ProcessSums

_LABEL = 18
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Print how this node is: workers, requests, health, token cache, LDAP and heartbeat. Run "
        "it as the user of the server, or root. Exit status 1 if no worker runs, a part is away, "
        "or the counts of one cannot be read."
    )
    add_file_argument(parser)
    metrics.add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Print how the node is; returns the exit status.

    :raises KeyfrontError: there is no such node
    """
    found = status(arguments)
    if arguments.json:
        out.write(json.dumps(found, indent=2) + "\n")
    else:
        for line in _lines(found):
            out.write(f"{line}\n")
    return 0 if found["ok"] else 1


def status(
    arguments: argparse.Namespace,
    ended: ProcessSums | None = None,
    times: MutableMapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return all that is known of a node, by part; a part that is not in use is ``None``, and one
    whose counts cannot be read has an ``error``. docs/operate.md has the names.

    :param ended: keeps what processes with a heartbeat counted that have ended since, for who asks
        again; by default only those are counted that live
    :param times: told when each part was read, by the clock of :func:`time.monotonic`
    :raises KeyfrontError: there is no such node
    """
    from keyfront.middleware.ldap import pool_counters as ldap

    folder = metrics.node_folder(arguments, required=True)
    assert folder is not None
    found: dict[str, Any] = {"node": str(folder), "draining": drain.is_draining(folder)}
    counted = cache(lambda: counters.read(folder))
    for name, read in (
        ("requests", lambda: _requests(counted())),
        ("queue", lambda: _queue(counted())),
        ("tokens", lambda: _tokens(arguments)),
        ("ldap", lambda: dict(ldap.read(folder)) if ldap.is_in_use(folder) else None),
        ("heartbeat", lambda: _heartbeat(arguments, ended)),
    ):
        try:
            found[name] = read()
        except KeyfrontError as error:
            found[name] = {"error": str(error)}
        except OSError as error:
            found[name] = {"error": f"{error.filename or name}: {error.strerror or error}"}
        if times is not None:
            times[name] = time.monotonic()
    requests = found["requests"]
    parts = requests.get("parts", {}).values()
    found["ok"] = (
        not any("error" in (found[part] or ()) for part in ("requests", "tokens", "ldap"))
        and bool(requests.get("workers"))
        and all(part["ok"] for part in parts)
    )
    return found


def _requests(found: counters.Count) -> dict[str, Any]:
    now = time.time()
    counted = sum(found.waited)
    return {
        "workers": list(_workers(found.workers)),
        "loaded_seconds_ago": _age(now, found.loaded) if found.loaded else None,
        "requests": found.requests,
        "in_progress": found.under_way,
        "shed": found.shed,
        "logins_refused": found.logins_refused,
        "loads": found.loads,
        "workers_started": found.started,
        "workers_outgrown": found.grown,
        "queue_seconds_mean": found.waited_seconds / counted if counted else None,
        "queue_seconds_p99": p99(found.waited),
        "parts": {
            part: {"ok": ok, "seconds_ago": _age(now, when)}
            for part, (when, ok) in zip(PARTS, found.found, strict=False)
            if when
        },
    }


def _age(now: float, when: float) -> int:
    # The workers' clock may have been ahead, as before it was set.
    return max(0, round(now - when))


def _queue(found: counters.Count) -> dict[str, Any] | None:
    """Return the times that requests waited for a worker; ``None`` where nobody measures it."""
    counted = sum(found.waited)
    if not counted and not found.shed:
        return None
    return {
        "requests": counted,
        "shed": found.shed,
        "seconds": found.waited_seconds,
        "seconds_mean": found.waited_seconds / counted if counted else None,
        "seconds_p99": p99(found.waited),
        "by_microseconds": {str(2**bits): count for bits, count in enumerate(found.waited)},
    }


def _workers(pids: Iterable[int]) -> Iterator[dict[str, int]]:
    for pid in pids:
        with suppress(OSError, IndexError):  # it has just ended
            yield {"pid": pid, "memory_bytes": resident(pid)}


def p99(waited: Sequence[int]) -> float | None:
    """Return the bound below which 99 of 100 waited, a power of two of microseconds."""
    total, seen = sum(waited), 0
    for bits, count in enumerate(waited):
        seen += count
        if total and seen * 100 >= total * 99:
            return float(2**bits / 1e6)
    return None


def _tokens(arguments: argparse.Namespace) -> dict[str, int] | None:
    counts = metrics.token_counts(arguments)
    return None if counts is None else dict(counts)


def _heartbeat(arguments: argparse.Namespace, ended: ProcessSums | None) -> dict[str, Any] | None:
    from keyfront.gateway.heartbeat.counters import NAMES, read_all

    processes = read_all(heartbeat.folders(arguments.heartbeat))
    if not processes and (ended is None or not ended.seen):
        return None
    counted = [name for name in NAMES if name != "connections"]
    sums = {name: sum(process[name] for process in processes) for name in counted}
    if ended is not None:
        living = {
            (str(process["path"]), int(process["pid"])): {name: process[name] for name in counted}
            for process in processes
        }
        sums |= ended.add(living)
    return {
        "processes": len(processes),
        "connections": sum(process["connections"] for process in processes),
        **sums,
        "late_seconds": max((process["lateness_worst"] for process in processes), default=0.0),
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['node']}: {_state(found)}"
    for title, part, rows in (
        ("requests", found["requests"], _of_requests),
        ("token cache", found["tokens"], _of_tokens),
        ("LDAP", found["ldap"], _of_ldap),
        ("heartbeat", found["heartbeat"], _of_heartbeat),
    ):
        yield ""
        if part is None:
            yield f"{title}: not in use"
        elif "error" in part:
            yield f"{title}: {part['error']}"
        else:
            yield f"{title}:"
            for label, value, meaning in rows(part):
                yield f"  {label:<{_LABEL}}{value:>12}  {meaning}".rstrip()


def _state(found: Mapping[str, Any]) -> str:
    if "error" in found["requests"]:
        return "NOT READ"
    if not found["requests"]["workers"]:
        return "draining, NOT SERVING" if found["draining"] else "NOT SERVING"
    state = "draining" if found["draining"] else "in service"
    return state if found["ok"] else f"{state}, NOT OK"


Row = tuple[str, object, str]


def _of_requests(part: Mapping[str, Any]) -> Iterator[Row]:
    memory = [worker["memory_bytes"] / _MIB for worker in part["workers"]]
    yield "workers", len(memory), f"the largest has {max(memory, default=0):.0f} MiB in memory"
    if part["loaded_seconds_ago"] is not None:
        yield "loaded", f"{part['loaded_seconds_ago']} s", "ago, the newest of them"
    yield "requests", part["requests"], "since the node's folder was made"
    yield "in progress", part["in_progress"], "now"
    if part["queue_seconds_p99"] is not None:
        yield "queue", f"{1000 * part['queue_seconds_p99']:.4g} ms", "99 of 100 waited less"
    yield "shed", part["shed"], "refused, as they had waited too long"
    yield "logins refused", part["logins_refused"], "as too many were under way"
    yield "outgrown", part["workers_outgrown"], "workers replaced for their memory"
    for name, one in part["parts"].items():
        yield name, "there" if one["ok"] else "AWAY", f"asked {one['seconds_ago']} s ago"


def _of_tokens(part: Mapping[str, Any]) -> Iterator[Row]:
    hits = part["hits"] + part["node_hits"] + part["known"]
    asked = hits + part["misses"]
    if asked:
        yield "hit ratio", f"{100 * hits / asked:.2f} %", f"of {asked} that may be cached"
    yield "changes", part["changes"], f"{part['changes_under_way']} under way"
    yield "recovered", part["changes_recovered"], "completed for processes that died"
    share = part["answers_bytes"] / part["answers_bytes_limit"]
    yield "answers", f"{100 * share:.1f} %", "of what the workers share is taken"


def _of_ldap(part: Mapping[str, Any]) -> Iterator[Row]:
    yield "processes", part["processes"], "with a pool"
    yield "servers up", part["servers_up"], f"{part['servers_down']} down, as each process sees"
    refused, failed = part["credentials_refused"], part["logins_failed"]
    yield "logins", part["logins_accepted"], f"accepted; {refused} refused, {failed} in an outage"
    for pool in ("search", "auth"):
        size, limit = part[f"{pool}_size"], part[f"{pool}_max_size"]
        text = f"of {limit} connections; {part[f'{pool}_waiting']} wait for one"
        yield f"{pool} pool", size, text


def _of_heartbeat(part: Mapping[str, Any]) -> Iterator[Row]:
    yield "connections", part["connections"], f"in {part['processes']} processes"
    yield "dead peers", part["dead_peers"], f"{part['reconnections']} connections replaced"
    yield "late", f"{part['late_seconds']:.3g} s", "at worst"

"""What the site's processes and connections take, at rest: it must not grow with what happened."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psutil

from keyfront.benchmarks.servers.processes import memory
from support.soak.site import Site


@dataclass(frozen=True)
class Rest:
    """One look while nobody asks anything.

    :param moment: in seconds of the monotonic clock
    :param figures: by their names; MiB, descriptors, threads, connections, processes
    """

    moment: float
    figures: dict[str, float]


def look(site: Site) -> Rest:
    """Count what everything takes now."""
    found: dict[str, float] = {}
    for node in site.nodes:
        _add(found, f"{node.name}, uWSGI", node.uwsgi())
        (_, nginx) = node.deployment.processes
        _add(found, f"{node.name}, nginx", [nginx, *nginx.children(recursive=True)])
    for number, served in enumerate(site.services, 1):
        _add(found, f"service {number}", served.processes())
    _add(found, "HAProxy", site.balancer.family())
    found["connections to MariaDB"] = _mariadb(site)
    found["connections to Redis"] = float(len(site.redis.client.client_list()))
    found["connections to RabbitMQ"] = float(len(site.broker.connections()))
    for number, server in enumerate(site.directories, 1):
        found[f"connections to directory {number}"] = float(server.open_connections())
    return Rest(time.monotonic(), found)


def _add(found: dict[str, float], name: str, processes: list[psutil.Process]) -> None:
    """Add the largest of its processes, and how many there are."""
    most: dict[str, float] = {"MiB": 0.0, "descriptors": 0.0, "threads": 0.0}
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            count += 1
            most["MiB"] = max(most["MiB"], memory(process.pid)["Rss"])
            most["descriptors"] = max(most["descriptors"], float(process.num_fds()))
            most["threads"] = max(most["threads"], float(process.num_threads()))
    for kind, value in most.items():
        found[f"{name}: {kind}"] = value
    found[f"{name}: processes"] = float(count)


def _mariadb(site: Site) -> float:
    (row,) = site.database.ask("SHOW STATUS LIKE 'Threads_connected'")
    return float(row["Value"])

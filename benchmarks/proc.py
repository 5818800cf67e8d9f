"""Runs programs to their end; reads of processes and TCP sockets in ``/proc`` (proc(5))."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, LISTEN = "01", "0A"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def ran(
    command: Sequence[str | Path], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that reads nothing to its end; its output is text, whatever it writes.

    :param seconds: the time after which it is killed; ``None``: never
    :raises OSError: it cannot be run
    :raises subprocess.TimeoutExpired: it took longer
    """
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=seconds, check=False,
    )  # fmt: skip


class Process(NamedTuple):
    """A living process.

    :ivar cpu: CPU seconds, with those of the children it has waited for
    :ivar resident: bytes; what is shared counts in each process
    """

    pid: int
    parent: int
    name: str
    cpu: float
    resident: int


def tree(root: int) -> list[Process]:
    """Return a process, if it lives, and its living descendants, each behind its parent."""
    pids = [entry.path for entry in os.scandir("/proc") if entry.name.isdigit()]
    everybody = [one for one in map(_read, pids) if one is not None]
    children: dict[int, list[Process]] = {}
    for one in everybody:
        children.setdefault(one.parent, []).append(one)
    found = [one for one in everybody if one.pid == root]
    for one in found:
        found += children.get(one.pid, [])
    return found


def family(pid: int) -> list[int]:
    """Return the numbers of a process and its living descendants, itself first."""
    return [one.pid for one in tree(pid)]


def tree_seconds(root: int) -> float:
    """Return the CPU seconds of a process, its living descendants, and all they have waited for."""
    return sum(one.cpu for one in tree(root))


def _read(folder: str) -> Process | None:
    try:
        line = Path(folder, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name may hold blanks and brackets; behind it: state, parent, ...
    head, _, rest = line.rpartition(") ")
    pid, _, name = head.partition(" (")
    fields = rest.split()
    cpu = sum(map(int, fields[11:15])) / _TICKS
    return Process(int(pid), int(fields[1]), name, cpu, int(fields[21]) * _PAGE)


def state(pid: int) -> str:
    """Return the state of a process or thread as ``ps`` names it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def memory(pid: int) -> dict[str, float]:
    """Return the MiB that a process takes: ``Pss``, shared pages in parts, and ``Rss``, whole.

    A process that has ended takes none.
    """
    found = {"Pss": 0.0, "Rss": 0.0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, kib = line.split()[:2]
            if name[:-1] in found:
                found[name[:-1]] = int(kib) / 1024
    return found


class Socket(NamedTuple):
    """A TCP socket of IPv4: its address in hexadecimal, the ports of both ends, its state."""

    address: str
    port: int
    peer: int
    state: str


def sockets() -> set[Socket]:
    """Return all TCP sockets of IPv4; once each, though the kernel may tell of one twice."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, how = line.split()[:4]
        address, port = local.split(":")
        found.add(Socket(address, int(port, 16), int(remote.partition(":")[2], 16), how))
    return found

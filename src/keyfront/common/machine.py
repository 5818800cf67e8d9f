"""The machine that there is to share out: cores, memory, and the kernel's limits.

Inside a container the figures of the host are not what a process may use: the smallest limit among
its control group (version 1 or 2) and all groups above it counts, and its CPU affinity.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from keyfront.errors import OptionError

CORES = range(1, 1025)
MIB = 2**20
MIN_MEMORY = 128 * MIB
MAX_MEMORY = 64 * 2**40
# net.core.somaxconn since Linux 5.4
_DEFAULT_SOMAXCONN = 4096
# fs.nr_open, above which no process may go
_MOST_FILES = 1048576


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to plan for, or the part of it that a control group may use.

    :param cores: 1 to 1024
    :param memory: bytes, 128 MiB to 64 TiB
    :param somaxconn: ``net.core.somaxconn`` of the network namespace
    :param nofile: the hard limit on open files of a process
    :param cores_from: the origin of the cores, in words
    :param memory_from: the origin of the memory, in words
    :raises OptionError: cores or memory are out of range
    """

    cores: int
    memory: int
    somaxconn: int = _DEFAULT_SOMAXCONN
    nofile: int = _MOST_FILES
    cores_from: str = "given"
    memory_from: str = "given"

    def __post_init__(self) -> None:
        if self.cores not in CORES:
            raise OptionError("--cores", self.cores, "a whole number, 1 to 1024")
        if not MIN_MEMORY <= self.memory <= MAX_MEMORY:
            raise OptionError(
                "--memory", f"{self.memory / MIB:.0f}M", "a size from 128M to 64T, for example 4G"
            )

    @property
    def memory_mib(self) -> int:
        return self.memory // MIB


def read(
    *, cores: int | None = None, memory: int | None = None, root: Path = Path("/")
) -> Machine:
    """Look at this machine, as far as a figure is not given.

    :param memory: bytes
    :param root: the folder of ``proc`` and ``sys``
    :raises OptionError: a figure is out of range
    """
    found_cores, cores_from = (cores, "given") if cores is not None else _cores(root)
    found_memory, memory_from = (memory, "given") if memory is not None else _memory(root)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return Machine(
        cores=found_cores,
        memory=found_memory,
        somaxconn=somaxconn(root),
        nofile=_MOST_FILES if hard == resource.RLIM_INFINITY else hard,
        cores_from=cores_from,
        memory_from=memory_from,
    )


def cores(root: Path = Path("/")) -> int:
    """Return the cores this process may use: its affinity or control groups' quota, rounded up."""
    return _cores(root)[0]


def somaxconn(root: Path = Path("/")) -> int:
    """Return the longest listen queue that the kernel gives (``net.core.somaxconn``)."""
    try:
        return int(_text(root / "proc/sys/net/core/somaxconn"))
    except (OSError, ValueError):
        return 128


def _cores(root: Path) -> tuple[int, str]:
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    # rounded up: rounded down, a part of what is paid for would never be used
    granted = max(1, math.ceil(min(quotas, default=allowed)))
    if granted < allowed:
        return granted, f"control group's quota of {min(quotas):g}"
    return allowed, "CPU affinity"


def _quota(group: Path) -> float | None:
    """Return the cores that a group may use at a time; ``None`` if it sets no limit."""
    try:
        if (group / "cpu.max").exists():
            limit, period = _text(group / "cpu.max").split()
            return None if limit == "max" else int(limit) / int(period)
        limit = _text(group / "cpu.cfs_quota_us")
        return None if int(limit) <= 0 else int(limit) / int(_text(group / "cpu.cfs_period_us"))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _memory(root: Path) -> tuple[int, str]:
    physical = _physical(root)
    limits = [limit for group in _groups(root, "memory") for limit in _limits(group)]
    smallest = min(limits, default=physical)
    if smallest < physical:
        return smallest, "control group's limit"
    return physical, "physical memory"


def _limits(group: Path) -> Iterator[int]:
    # beyond memory.high a group is slowed down until it is of no use
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        try:
            yield int(_text(group / name))
        except (OSError, ValueError):  # not there, or "max"
            continue


def _physical(root: Path) -> int:
    try:
        for line in _text(root / "proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            if name == "MemTotal":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    raise OptionError("--memory", "(not given)", "a size, since /proc/meminfo does not tell it")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it, in versions 1 and 2."""
    try:
        memberships = _text(root / "proc/self/cgroup").splitlines()
        mounts = _text(root / "proc/self/mountinfo").splitlines()
    except OSError:
        return
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for mounted, top in _mounted(mounts, controller if number != "0" else None):
            # in a container the mount may show only a part of the tree
            inside = PurePosixPath(path)
            if inside.is_relative_to(mounted):
                inside = inside.relative_to(mounted)
            parts = [part for part in inside.parts if part != "/"]
            if ".." in parts:
                parts = []
            for length in range(len(parts), -1, -1):
                yield root.joinpath(top.lstrip("/"), *parts[:length])


def _mounted(mounts: list[str], controller: str | None) -> Iterator[tuple[str, str]]:
    """Yield root and mount point of a version 1 controller, or of version 2 for ``None``."""
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        wanted = kind[0] == "cgroup2" if controller is None else kind[0] == "cgroup"
        if wanted and (controller is None or controller in kind[2].split(",")):
            yield fields[3], fields[4]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()

"""What a process may use: control groups of both versions, CPU affinity, the kernel's limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keyfront.common import machine
from keyfront.common.machine import MIB, Machine
from keyfront.errors import OptionError

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


class FakeRoot:
    """A ``/`` with as much of ``proc`` and ``sys`` as is put there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.put("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB\n")
        self.put("proc/sys/net/core/somaxconn", "1024\n")

    def put(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def groups(self, memberships: str, *mounts: str) -> None:
        self.put("proc/self/cgroup", memberships)
        self.put("proc/self/mountinfo", "".join(f"{mount}\n" for mount in mounts))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return FakeRoot(tmp_path)


def test_this_machine() -> None:
    found = machine.read()
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert found.cores == machine.cores()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.memory <= physical
    assert found.somaxconn == int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert found.nofile >= 1


def test_without_control_groups(root: FakeRoot) -> None:
    found = machine.read(root=root.path)
    assert (found.cores, found.cores_from) == (8, "CPU affinity")
    assert (found.memory, found.memory_from) == (8192 * MIB, "physical memory")
    assert found.somaxconn == 1024


def test_somaxconn_that_cannot_be_read(tmp_path: Path) -> None:
    assert machine.somaxconn(tmp_path) == 128


def test_version_2(root: FakeRoot) -> None:
    root.groups("0::/a/b\n", V2)
    root.put("sys/fs/cgroup/a/b/memory.max", "max\n")
    root.put("sys/fs/cgroup/a/b/memory.high", f"{2048 * MIB}\n")
    root.put("sys/fs/cgroup/a/b/cpu.max", "250000 100000\n")
    found = machine.read(root=root.path)
    assert (found.memory, found.memory_from) == (2048 * MIB, "control group's limit")
    assert (found.cores, found.cores_from) == (3, "control group's quota of 2.5")


def test_the_smallest_limit_of_all_groups_above_counts(root: FakeRoot) -> None:
    root.groups("0::/a/b/c\n", V2)
    root.put("sys/fs/cgroup/a/b/c/memory.max", f"{4096 * MIB}\n")
    root.put("sys/fs/cgroup/a/b/memory.max", f"{512 * MIB}\n")
    root.put("sys/fs/cgroup/a/memory.max", f"{1024 * MIB}\n")
    root.put("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n")
    root.put("sys/fs/cgroup/a/cpu.max", "100000 100000\n")
    found = machine.read(root=root.path)
    assert found.memory == 512 * MIB
    assert found.cores == 1


def test_a_container_that_sees_its_own_group_at_the_top(root: FakeRoot) -> None:
    # without a cgroup namespace: the path is the host's, and the mount shows that part of it
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
    root.groups("0::/docker/abc/inner\n", mount)
    root.put("sys/fs/cgroup/memory.max", f"{768 * MIB}\n")
    assert machine.read(root=root.path).memory == 768 * MIB
    root.put("sys/fs/cgroup/inner/memory.max", f"{256 * MIB}\n")
    assert machine.read(root=root.path).memory == 256 * MIB


def test_a_path_outside_of_what_is_mounted(root: FakeRoot) -> None:
    root.groups("0::/../../other\n", V2)
    root.put("sys/fs/cgroup/memory.max", f"{640 * MIB}\n")
    assert machine.read(root=root.path).memory == 640 * MIB


def test_version_1(root: FakeRoot) -> None:
    root.groups("4:memory:/m\n2:cpu,cpuacct:/c\n0::/\n", V1_MEMORY, V1_CPU)
    root.put("sys/fs/cgroup/memory/m/memory.limit_in_bytes", f"{1024 * MIB}\n")
    root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    root.put("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "150000\n")
    root.put("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000\n")
    root.put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    root.put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    found = machine.read(root=root.path)
    assert found.memory == 1024 * MIB
    assert found.cores == 2


def test_version_1_without_limits(root: FakeRoot) -> None:
    root.groups("4:memory:/\n", V1_MEMORY)
    root.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.read(root=root.path).memory_from == "physical memory"


@pytest.mark.parametrize("text", ["", "x", "100000", "100000 0", "a b", "1 2 3"])
def test_a_quota_that_is_none(root: FakeRoot, text: str) -> None:
    root.groups("0::/\n", V2)
    root.put("sys/fs/cgroup/cpu.max", text)
    assert machine.cores(root.path) == 8


def test_a_quota_above_the_affinity(root: FakeRoot) -> None:
    root.groups("0::/\n", V2)
    root.put("sys/fs/cgroup/cpu.max", "6400000 100000")
    assert machine.cores(root.path) == 8


def test_a_tiny_quota_is_one_core(root: FakeRoot) -> None:
    root.groups("0::/\n", V2)
    root.put("sys/fs/cgroup/cpu.max", "1000 100000")
    assert machine.cores(root.path) == 1


def test_what_is_given_is_not_looked_for(tmp_path: Path) -> None:
    found = machine.read(cores=64, memory=512 * MIB, root=tmp_path)
    assert (found.cores, found.memory_mib, found.cores_from) == (64, 512, "given")


def test_memory_that_cannot_be_told(root: FakeRoot) -> None:
    root.put("proc/meminfo", "MemFree: 1 kB\n")
    with pytest.raises(OptionError, match="--memory"):
        machine.read(root=root.path)
    (root.path / "proc/meminfo").unlink()
    with pytest.raises(OptionError, match="--memory"):
        machine.read(root=root.path)


@pytest.mark.parametrize(
    ("cores", "memory", "option"),
    [
        (0, 4096, "--cores"),
        (-1, 4096, "--cores"),
        (1025, 4096, "--cores"),
        (1, 127, "--memory"),
        (1, 64 * 2**20 + 1, "--memory"),
    ],
)
def test_out_of_range(cores: int, memory: int, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        Machine(cores=cores, memory=memory * MIB)
    assert caught.value.option == option

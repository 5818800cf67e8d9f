"""``--profile small``: nginx, uWSGI and Keystone together within 256 MiB, token cache included."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from keyfront.common.machine import MIB, Machine
from keyfront.gateway.plan.workload import SMALL, Workload
from support import keystones
from support.deployments import Deployment, deployed
from support.programs import own_folder, ready
from support.served import wait_for

LIMIT = 256
# Addresses that log in, each a client of its own: logins are limited by address.
CLIENTS = 8
VALIDATIONS = 40


@contextmanager
def limited(mebibytes: int) -> Iterator[Path | None]:
    """A memory control group below this process's own; ``None`` where none can be made."""
    group = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            top, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        made = top / path.lstrip("/") / f"keyfront-small-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / name).write_text(str(mebibytes * MIB))
        except OSError:
            made.rmdir()  # the controller is not on here
            continue
        group = made
        break
    try:
        yield group
    finally:
        if group is not None:
            for pid in members(group):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not members(group), "the group is empty")
            group.rmdir()


def members(group: Path) -> set[int]:
    """The processes in a group; who has ended and is not collected yet is none of them."""
    return set(map(int, (group / "cgroup.procs").read_text().split()))


def killed(group: Path) -> int:
    """How often the kernel ended a process of the group for its memory."""
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            told = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(told["oom_kill"])
    raise AssertionError(f"{group} tells nothing")


def pss(pid: int) -> tuple[float, float]:
    """MiB of a process, what it shares divided by those that share it; of it shared memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    told = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
    return int(told["Pss"]) / 1024, int(told.get("Pss_Shmem", 0)) / 1024


def request(
    site: Deployment, source: str, method: str, path: str, body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The status, and the token that was issued."""
    connection = site.connect(source)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("X-Subject-Token", "")
    finally:
        connection.close()


def answers(site: Deployment) -> None:
    assert request(site, "127.7.0.1", "GET", "/v3")[0] == 200


def log_in(site: Deployment, source: str, password: str) -> str:
    """A token. One login at a time: SQLite locks out who would write at the same moment."""
    user = {"name": "admin", "domain": {"id": "default"}, "password": password}
    scope = {"project": {"name": "admin", "domain": {"id": "default"}}}
    identity = {"methods": ["password"], "password": {"user": user}}
    login = json.dumps({"auth": {"identity": identity, "scope": scope}}).encode()
    headers = {"Content-Type": "application/json"}
    status, token = request(site, source, "POST", "/v3/auth/tokens", login, headers)
    assert status == 201
    return token


def reads(site: Deployment, source: str, token: str) -> list[int]:
    """Validates often, and reads what is not cached."""
    mine = {"X-Auth-Token": token, "X-Subject-Token": token}
    return [
        request(site, source, "GET", path, headers=mine)[0]
        for path in ("/v3/auth/tokens",) * VALIDATIONS + ("/v3/users", "/v3/auth/catalog")
    ]


@pytest.mark.slow
def test_keystone_is_served_within_256_mib(tmp_path: Path) -> None:
    with (
        own_folder("small") as folder,
        tempfile.TemporaryDirectory(prefix="keyfront-small-", dir="/dev/shm") as tokens,
        limited(LIMIT) as group,
    ):
        folder.chmod(0o711)
        # where it is by default, in memory
        cache = f"[keyfront_token_cache]\npath = {tokens}/cache\n"
        state = keystones.keystone_state(tmp_path / "state", extra=cache)
        password = (state / "admin-password").read_text().strip()
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] if group else []
        machine = Machine(cores=2, memory=LIMIT * MIB)
        with deployed(
            folder, "nginx+uwsgi", config=state, machine=machine, profile=SMALL, prefix=enter,
            workload=Workload(latency=60),  # however busy this machine is, nobody is refused
        ) as site:  # fmt: skip
            assert not site.plan.conflicts
            ready(lambda: answers(site), *site.foremost, (OSError, AssertionError))
            sources = [f"127.7.0.{number + 2}" for number in range(CLIENTS)]
            held = [log_in(site, source, password) for source in sources]
            with ThreadPoolExecutor(CLIENTS) as pool:
                statuses = list(pool.map(lambda *who: reads(site, *who), sources, held))
            assert statuses == [[200] * (VALIDATIONS + 2)] * CLIENTS
            family = site.family()
            # what several share counts once in all
            parts = {f"{process.pid} {process.name()}": pss(process.pid) for process in family}
            mapped = sum(shmem for _, shmem in parts.values())
            cached = sum(file.stat().st_blocks * 512 for file in Path(tokens).rglob("*")) / MIB
            total = sum(all_of_it for all_of_it, _ in parts.values()) + max(0, cached - mapped)
            assert total < LIMIT, (parts, cached)
            assert all(psutil.pid_exists(process.pid) for process in family)
            if group is not None:
                assert killed(group) == 0
                # the servers are in it, all of them
                assert {process.pid for process in family} <= members(group)
            print(f"{total:.0f} MiB of {LIMIT}, {site.plan['memory.total_estimate'].value} planned")

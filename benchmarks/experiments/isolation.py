"""A network and a process tree of its own for an experiment, where the kernel permits it.

In them the experiment's sockets and their counters are its own, kernel settings can be changed
without touching the machine, and nothing outlives it, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .. import proc

# netdevice(7)
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SYSCTL = Path("/proc/sys")
_OWN = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]

INSIDE = "KEYFRONT_EXPERIMENT_NAMESPACE"
"""Set in the environment of what runs in a namespace of its own."""


@cache
def prefix() -> tuple[str, ...] | None:
    """Return the words before a command that gets namespaces of its own; ``None`` if it cannot."""
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ("unshare", *root, *_OWN)
    try:
        done = proc.ran([*command, "true"], 120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if done.returncode == 0 else None


def inside() -> bool:
    """Return whether this process runs in a network namespace of its own."""
    return os.environ.get(INSIDE) == "1"


def raise_loopback() -> None:
    """Switch loopback on, which is off in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh22x", answer)[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def read_setting(name: str) -> str | None:
    """Return a kernel setting (``net.core.somaxconn``); ``None`` if the kernel has no such."""
    try:
        return " ".join(_path(name).read_text(encoding="ascii").split())
    except OSError:
        return None


class Settings(NamedTuple):
    """Which kernel settings were asked for, and which of them are in force.

    :ivar applied: by name, as the kernel shows them now
    :ivar refused: by name, why not
    """

    applied: dict[str, str]
    refused: dict[str, str]


@contextmanager
def settings(wanted: Mapping[str, str]) -> Iterator[Settings]:
    """Have kernel settings in force within the block, in this network namespace only.

    Outside of one nothing is changed. What the kernel does not have or does not let be changed is
    told, not raised: old advice names settings that are gone.
    """
    found, before = Settings({}, {}), {}
    try:
        for name, value in wanted.items():
            current = read_setting(name)
            if current is None:
                found.refused[name] = "this kernel does not have it"
            elif not inside():
                found.refused[name] = "no network namespace of its own is permitted here"
            else:
                try:
                    _path(name).write_text(value, encoding="ascii")
                except OSError as error:
                    found.refused[name] = error.strerror or "refused"
                else:
                    before[name] = current
                    found.applied[name] = read_setting(name) or ""
        yield found
    finally:
        for name, value in before.items():
            _path(name).write_text(value, encoding="ascii")


def _path(name: str) -> Path:
    return _SYSCTL / name.replace(".", "/")

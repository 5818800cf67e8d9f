"""Runs command lines in a Debian 12 of its own, as debootstrap makes it: its apt, pip and Python.

Started as a program by :func:`run` in new mount and process namespaces, it lays a folder over the
root that debootstrap made, so that the next run begins with the same. Lines that fetch packages run
with this machine's network, the others without any but their own loopback. There is no systemd that
runs: a stand-in starts what the units say. MariaDB is started as its package would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.clean_root import NAME, Done, shell, write_stand_in

_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
_PATIENCE = 3600  # seconds, a bound on a hang
_MIRROR = "http://deb.debian.org/debian"
_STAND_INS = "usr/local/keyfront-tests"
_PATH = f"/{_STAND_INS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# As Debian's package starts it, with little memory.
_MARIADB = (
    "install -d -o mysql -g root /run/mysqld && (setsid runuser -u mysql -- mariadbd"
    " --innodb-buffer-pool-size=32M >/run/mariadb.log 2>&1 &)"
    " && timeout 60 bash -c 'until [ -S /run/mysqld/mysqld.sock ]; do sleep 0.1; done'"
)


def make(root: Path) -> None:
    """Make the root, unless it is there."""
    if (root / "debootstrap").exists():  # one that was not finished
        shutil.rmtree(root)
    if not root.exists():
        command = ["debootstrap", "--include=ca-certificates", "bookworm", str(root), _MIRROR]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(
    online: Sequence[str], offline: Sequence[str], *, root: Path, wheels: Path, folder: Path
) -> list[Done]:
    """Run lines of a shell one after the other; ends with the first that fails.

    :param online: those that fetch packages
    :param offline: the others, in a shell of their own, after MariaDB was started
    :param root: from :func:`make`; it is not changed
    :param wheels: a folder in which pip finds this keyfront
    :param folder: on a disk with some GB: what the lines change, and what is handed over
    """
    if os.geteuid() != 0:
        pytest.skip("only root can change into a root of its own")
    task = folder / "lines.json"
    task.write_text(json.dumps([list(online), [_MARIADB, *offline]]))
    subprocess.run(
        [*_UNSHARE, sys.executable, __file__, str(folder), str(root), str(wheels)],
        check=True, cwd="/", timeout=_PATIENCE,
    )  # fmt: skip
    done = [Done(*words) for words in json.loads((folder / "done.json").read_text())]
    for name in ("upper", "work"):  # more than a GB
        shutil.rmtree(folder / name)
    return done


def _enter(folder: Path, lower: Path, wheels: Path) -> None:
    """Make the root and go into it; what it shows of this machine is read-only or of no disk."""

    def mount(*words: str | Path) -> None:
        subprocess.run(["mount", *words], check=True)

    mount("--make-rprivate", "/")
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    layers = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
    root = folder / "root"
    mount("-t", "overlay", "-o", layers, "overlay", root)
    mount("-t", "proc", "proc", root / "proc")
    for name in ("dev", "run", "tmp"):
        mount("-t", "tmpfs", "tmpfs", root / name)
    (root / "tmp").chmod(0o1777)
    for name in ("null", "zero", "full", "random", "urandom"):
        (root / "dev" / name).touch()
        mount("--bind", Path("/dev", name), root / "dev" / name)
    (root / "dev/shm").mkdir(mode=0o1777)
    (root / "dev/shm").chmod(0o1777)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    # How this machine gets to packages.
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for path in (wheels, Path(os.environ.get("PIP_CERT") or wheels)):
        target = root / path.relative_to("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount("--bind", "-o", "ro", path, target)
    # Programs that stand in, where they are found first.
    (root / _STAND_INS).mkdir()
    for name in ("sysctl", "systemctl"):
        write_stand_in(root / _STAND_INS / name, "/usr/bin/python3")
    # This Python's own files are not there any more.
    os.chroot(root)
    os.chdir("/")


def _prepare(wheels: Path) -> None:
    """Set what the lines find: variables, names, and that packages start no service."""
    # A service's package starts nothing where this says so.
    policy = Path("/usr/sbin/policy-rc.d")
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    os.environ.clear()
    os.environ.update(
        kept, PATH=_PATH, HOME="/root", LANG="C.UTF-8", DEBIAN_FRONTEND="noninteractive",
        PIP_FIND_LINKS=str(wheels),
    )  # fmt: skip
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"\n127.0.0.1 localhost {NAME}\n")


def main() -> None:
    """Be the program that :func:`run` starts."""
    folder, root, wheels = map(Path, sys.argv[1:])
    online, offline = json.loads((folder / "lines.json").read_text())
    # It is written to from inside.
    descriptor = os.open(folder, os.O_RDONLY)
    _enter(folder, root, wheels)
    result = Path(f"/proc/self/fd/{descriptor}/done.json")
    _prepare(wheels)
    if not shell(["bash"], online, result)[-1].status:
        shell(["unshare", "--net", "bash"], ["ip link set lo up", *offline], result)


if __name__ == "__main__":
    main()

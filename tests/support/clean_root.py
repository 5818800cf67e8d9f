"""Runs command lines in a root of their own: this machine's files, with all changes kept in memory.

Started as a program by :func:`run` in new mount, network and process namespaces, it lays a file
system in memory over the root, and puts small programs of its own before those that need what is
not there: packages (apt-get, pip), a service manager (systemctl) and MariaDB's client. What they
stand for is not tested by them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

NAME = "cloud.example.org"
_UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
_SIZE = "900m"
_PATIENCE = 1200  # seconds, a bound on a hang
# Debian's users and folders that packages make.
_USERS = "www-data", "mysql"

# The programs that stand in, by name. Each is run by the tests' own Python.
_STAND_INS = {
    # The packages are those of this machine; see bindep.txt.
    "apt-get": "",
    # Only the file that was rendered: the others of the machine are not ours to set.
    "sysctl": """
import subprocess, sys
sys.exit(subprocess.call(["/usr/sbin/sysctl", "-q", "-p", "/etc/sysctl.d/60-keyfront.conf"]))
""",
    "mariadb": """
import sys, pymysql
assert sys.argv[1] == "-e", sys.argv
with pymysql.connect(unix_socket="/run/mysqld/mysqld.sock", user="root") as connection:
    for statement in sys.argv[2].split(";"):
        connection.cursor().execute(statement)
""",
    # A pip of an environment's own takes three seconds of a processor, and nobody would ask it.
    "python3": """
import os, sys
words = sys.argv[1:]
if words[:2] == ["-m", "venv"]:
    words.append("--without-pip")
python = f"{sys.base_prefix}/bin/python3"
os.execv(python, [python, *words])
""",
    # What pip does with the wheel and the index: the packages of the tests' own environment become
    # those of the new one. The extras have to be keyfront's, in the spelling of its metadata.
    "keyfront-pip": """
import importlib.metadata, re, shutil, sys
from pathlib import Path
assert sys.argv[1] == "install", sys.argv
home = Path("/opt/keyfront")
provided = importlib.metadata.metadata("keyfront").get_all("Provides-Extra")
for extra in re.search(r"keyfront\\\\[(.*)\\\\]", " ".join(sys.argv))[1].split(","):
    assert extra in provided, f"keyfront does not provide the extra {extra!r}"
(site,) = home.glob("lib/python3*/site-packages")
site.joinpath("tests.pth").write_text(f"import site; site.addsitedir({SITE!r})\\\\n")
for name in ("keyfront", "keystone-manage"):
    (point,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    script = home / "bin" / name
    module, _, attribute = point.value.partition(":")
    head = f"#!{home}/bin/python\\\\nimport sys\\\\n"
    script.write_text(f"{head}from {module} import {attribute}\\\\nsys.exit({attribute}())\\\\n")
    script.chmod(0o755)
if "uwsgi]" in sys.argv[2]:
    shutil.copy(Path(PREFIX, "bin/uwsgi"), home / "bin")
if "mod-wsgi" in sys.argv[2]:
    for name in Path(SITE).glob("mod_wsgi*"):
        shutil.copytree(name, site / name.name)
""",
    # Starts what a unit says, as its user and after what it wants first.
    "systemctl": """
import os, re, shlex, socket, subprocess, sys, time
from pathlib import Path

def settings(name):
    # Ours, or that of a package.
    units = [Path(folder, name) for folder in ("/etc/systemd/system", "/lib/systemd/system")]
    text = next((unit.read_text() for unit in units if unit.exists()), "")
    for more in sorted(Path("/etc/systemd/system", name + ".d").glob("*.conf")):
        text += more.read_text()
    found = {}
    for key, value in re.findall(r"^(\\\\w+)=(.*)$", text, re.M):
        if value: found.setdefault(key, []).append(value)
        else: found[key] = []
    return found

def start(name):
    if name.endswith(".socket"):
        return  # its service makes the socket by itself
    unit = settings(name if "." in name else name + ".service")
    for folder in unit.get("RuntimeDirectory", []):
        path = Path("/run", folder)
        path.mkdir(exist_ok=True)
        subprocess.run(["chown", f"{unit['User'][0]}:{unit['Group'][0]}", path], check=True)
    prefix = []
    if "User" in unit:
        groups = ",".join([*unit["Group"], *unit.get("SupplementaryGroups", [])])
        ids = ",".join(subprocess.run(["getent", "group", x], capture_output=True, text=True,
                       check=True).stdout.split(":")[2] for x in groups.split(","))
        prefix = ["setpriv", "--reuid", unit["User"][0], "--regid", unit["Group"][0],
                  "--groups", ids, "--bounding-set=-all", "--no-new-privs"]
    for line in unit.get("ExecStartPre", []):
        subprocess.run(shlex.split(line.lstrip("+")), check=True)
    log = open(f"/run/{name}.log", "wb")
    command = [*prefix, *shlex.split(unit["ExecStart"][-1])]
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(f"/run/{name}.notify")
    Path(f"/run/{name}.notify").chmod(0o666)
    told.settimeout(0.1)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd="/",
        start_new_session=True, env={**os.environ, "NOTIFY_SOCKET": f"/run/{name}.notify"})
    Path(f"/run/{name}.pid").write_text(str(process.pid))
    said, until = b"", time.monotonic() + 300
    kind = unit["Type"][-1]
    if kind == "forking":
        process.wait(300)
    while kind == "notify" and b"READY=1" not in said and process.poll() is None:
        assert time.monotonic() < until, f"{name} is not ready"
        try:
            said = told.recv(4096)
        except TimeoutError:
            pass
    told.close()
    Path(f"/run/{name}.notify").unlink()
    if process.poll():
        sys.exit(f"{name} ended: " + Path(f"/run/{name}.log").read_text())

words = [x for x in sys.argv[1:] if not x.startswith("-")]
if words[0] == "restart" or (words[0] == "enable" and "--now" in sys.argv):
    for name in words[1:]:
        start(name)
""",
}


class Done(NamedTuple):
    """A command line that was run: its status and what it printed."""

    line: str
    status: int
    output: str


def run(lines: Sequence[str], folder: Path) -> list[Done]:
    """Run lines of a shell one after the other in one shell; ends with the first that fails.

    Skips the test where such a root cannot be had.

    :param folder: for what is handed over
    """
    if os.geteuid() != 0:
        pytest.skip("only root can lay a file system over the root")
    for name in ("unshare", "ip", "setpriv", "curl", "systemd-sysusers", "systemd-tmpfiles"):
        if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"{name} is not installed")
    task = folder / "lines.json"
    task.write_text(json.dumps(list(lines)))
    command = [*_UNSHARE, sys.executable, __file__, str(folder)]
    made = subprocess.run(
        [*command, "--try"], capture_output=True, text=True, check=False, cwd="/"
    )
    if made.returncode:
        why = (made.stderr.strip().splitlines() or ["no reason was given"])[-1]
        pytest.skip(f"no file system can be laid over the root here: {why}")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", timeout=_PATIENCE
    )
    result = folder / "done.json"
    assert result.exists(), done.stdout + done.stderr
    return [Done(*words) for words in json.loads(result.read_text())]


def _enter(folder: Path) -> None:
    """Make the root and go into it."""

    def mount(*words: str | Path) -> None:
        subprocess.run(["mount", *words], check=True)

    top = folder / "top"
    top.mkdir(exist_ok=True)
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", top)
    for name in ("upper", "work", "root"):
        (top / name).mkdir()
    layers = f"lowerdir=/,upperdir={top}/upper,workdir={top}/work"
    mount("-t", "overlay", "-o", layers, "overlay", top / "root")
    root = top / "root"
    mount("--rbind", "/dev", root / "dev")
    mount("-t", "proc", "proc", root / "proc")
    for name in ("run", "tmp"):
        mount("-t", "tmpfs", "tmpfs", root / name)
    # What is handed over, and the tests' own packages, wherever they lie.
    for path in {folder, *map(Path, _folders())}:
        target = root / path.relative_to("/")
        target.mkdir(parents=True, exist_ok=True)
        mount("--bind", path, target)
        # Other users have to get there.
        for parent in target.parents:
            if parent.is_relative_to(root):
                parent.chmod(parent.stat().st_mode | 0o011)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.chroot(root)
    os.chdir("/")


def _folders() -> list[str]:
    """Return the folders of the tests' own Python."""
    import keyfront

    sources = {str(Path(path).resolve()) for path in keyfront.__path__}
    # An editable installation links to the single files.
    sources.add(str(Path(str(keyfront.__file__)).resolve().parents[2]))
    return [sys.base_prefix, sys.prefix, *sources]


def write_stand_in(path: Path, python: str) -> None:
    """Write the program that stands in for the one of this name.

    :param python: what runs it
    """
    values = f"SITE = {sysconfig.get_path('purelib')!r}\nPREFIX = {sys.prefix!r}\n"
    text = f"#!{python}\n{values}{_STAND_INS[path.name]}"
    path.write_text(text.replace("\\\\", "\\"))
    path.chmod(0o755)


def _prepare() -> None:
    """Put the programs that stand in to where they are found first, and start MariaDB."""
    stand_ins = Path("/usr/local/keyfront-tests")
    stand_ins.mkdir()
    for name in _STAND_INS:
        write_stand_in(stand_ins / name, sys.executable)
    os.environ.clear()
    os.environ["PATH"] = f"{stand_ins}:{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    os.environ["HOME"] = "/root"
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write(f"\n127.0.0.1 localhost {NAME}\n")
    for name in ("keystone", "keyfront"):
        shutil.rmtree(Path("/etc", name), ignore_errors=True)
    shutil.rmtree("/opt/keyfront", ignore_errors=True)
    # Of MariaDB's client, which need not be here: mariadb-install-db asks it for options.
    printer = Path("/usr/bin/my_print_defaults")
    if not printer.exists():
        printer.write_text("#!/bin/sh\n")
        printer.chmod(0o755)
    data, run = Path("/var/lib/keyfront-mariadb"), Path("/run/mysqld")
    run.mkdir(mode=0o755)
    small = ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M"]
    subprocess.run(
        ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db",
         "--auth-root-authentication-method=socket", "--user=root", *small],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.Popen(
        ["mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-networking",
         "--socket=/run/mysqld/mysqld.sock", "--innodb-flush-log-at-trx-commit=0", *small],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(
        ["bash", "-c", "until [ -S /run/mysqld/mysqld.sock ]; do sleep 0.1; done"],
        check=True, timeout=300,
    )  # fmt: skip


def main() -> None:
    """Be the program that :func:`run` starts."""
    folder = Path(sys.argv[1])
    _enter(folder)
    if "--try" in sys.argv:
        return
    _prepare()
    shell(["bash"], json.loads((folder / "lines.json").read_text()), folder / "done.json")


def shell(command: Sequence[str], lines: Sequence[str], result: Path) -> list[Done]:
    """Give lines to one shell, since they set variables for those after them.

    Ends with the first that fails.

    :param result: what was done is added to this file, line by line
    :returns: what is in it
    """
    done = [Done(*x) for x in json.loads(result.read_text())] if result.exists() else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in lines:
            process.stdin.write(f"{{ {line}\n}} </dev/null; status=$?; echo; echo ended: $status\n")
            process.stdin.flush()
            output = ""
            for said in process.stdout:
                if said.startswith("ended: "):
                    break
                output += said
            else:
                said = "ended: 255"
            done.append(Done(line, int(said.split()[1]), output))
            result.write_text(json.dumps(done))
            if done[-1].status:
                break
        process.stdin.close()
    return done


if __name__ == "__main__":
    main()

"""Bad input to the command line: status 2, one line that helps, and nothing written or lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keyfront.gateway.serve.state import FORMAT, MARKER

ROOT = os.geteuid() == 0
STRANGER = 12345
# Seconds; only a hang takes that long.
TIMEOUT = 60

# Read by each Python that a test starts: takes modules, distributions and programs away from it.
SITECUSTOMIZE = """
import importlib.machinery, os, shutil, sys

hidden = set(os.environ.get("HIDE", "").split())
finder, which = importlib.machinery.PathFinder, shutil.which

class Without(finder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in hidden else finder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context=None):
        if context is not None and context.name and context.name.lower() in hidden:
            return iter(())
        return finder.find_distributions(context)

def without(name, mode=os.F_OK | os.X_OK, path=None):
    return None if name in hidden else f"/usr/sbin/{name}"

sys.meta_path[sys.meta_path.index(finder)] = Without
shutil.which = without
"""


@dataclass
class Place:
    """A folder that a test looks at whole, and a command line that is run in it."""

    top: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.top / "home" / "state"

    @property
    def files(self) -> Path:
        return self.top / "files"

    def paste(self, text: str, name: str = "app.ini") -> str:
        path = self.files / name
        path.write_text(text, encoding="utf-8")
        self.environment["KEYFRONT_APP"] = f"config:{path}"
        return str(path)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, sys.executable, "-m", "keyfront", *arguments],
            env=self.variables(),
            cwd=self.files,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    def variables(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KEYFRONT_", "OS_"))}
        return {
            **kept,
            "HOME": str(self.top / "home"),
            "TMPDIR": str(self.top),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }


def snapshot(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file with its mode, owner and content."""
    found = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        readable = stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK)
        content = path.read_bytes() if readable else b""
        found[str(path.relative_to(top))] = (status.st_mode, status.st_uid, content)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    for name in ("home", "files", "site"):
        (tmp_path / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Place(tmp_path, server.getsockname()[1])
    (tmp_path / "home").chmod(0o700)


# Each prepares a place and returns the arguments beside --state and --listen, if any.
Prepare = Callable[[Place], list[str]]


def options(*arguments: str) -> Prepare:
    return lambda place: list(arguments)


def port_in_use(place: Place) -> list[str]:
    return ["--listen", f"127.0.0.1:{place.port}"]


def marker(content: str, *arguments: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.state.mkdir()
        (place.state / MARKER).write_text(content, encoding="utf-8")
        return list(arguments)

    return prepare


def folder_not_ours(*arguments: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.state.mkdir()
        (place.state / "thesis.tex").write_text("years", encoding="utf-8")
        return list(arguments)

    return prepare


def file_in_its_place(place: Place) -> list[str]:
    place.state.write_text("years", encoding="utf-8")
    return []


def without_override(place: Place) -> None:
    """Make file modes count for root, too."""
    if ROOT:
        place.prefix = [setpriv(), "--bounding-set=-dac_override,-dac_read_search"]


def setpriv() -> str:
    found = shutil.which("setpriv")
    if found is None:
        pytest.skip("setpriv (util-linux) is not installed")
    return found


def folder_of_another(*arguments: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        if not ROOT:
            pytest.skip("only root can give a folder to another user")
        content = json.dumps({"keyfront": "0", "format": FORMAT, "complete": True})
        marker(content)(place)
        os.chown(place.state, STRANGER, STRANGER)
        return [*arguments, "--listen", "127.0.0.1:0"]

    return prepare


def parent_unwritable(place: Place) -> list[str]:
    without_override(place)
    (place.top / "home").chmod(0o500)
    return ["--listen", "127.0.0.1:0"]


def paste(text: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.paste(text)
        return []

    return prepare


def paste_missing(place: Place) -> list[str]:
    Path(place.paste("")).unlink()
    return []


def paste_unreadable(place: Place) -> list[str]:
    path = Path(place.paste("[app:main]\nuse = egg:keyfront#keystone\n"))
    path.chmod(0)
    without_override(place)
    return []


def target(value: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        place.environment["KEYFRONT_APP"] = value
        return []

    return prepare


def hidden(names: str, *arguments: str) -> Prepare:
    def prepare(place: Place) -> list[str]:
        (place.top / "site/sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        place.environment.update(PYTHONPATH=str(place.top / "site"), HIDE=names)
        return list(arguments)

    return prepare


NEWER = json.dumps({"keyfront": "9.8.7", "format": FORMAT + 1, "complete": True})
PORTS = "HOST:PORT with a port from 0 to 65535"
SECONDS = "a number of seconds, 1 to 3600"
SERVERS = "must be one of uwsgi, gevent, mod_wsgi, nginx+uwsgi, apache+uwsgi"

# Name, what prepares it, and the words of the line; {state}, {files} and {port} are filled in.
CASES: list[tuple[str, Prepare, list[str]]] = [
    (
        "port in use",
        port_in_use,
        ["--listen = 127.0.0.1:{port}: address already in use", "127.0.0.1:0 for a free port"],
    ),
    ("no address of this machine", options("--listen", "192.0.2.1:5000"), ["192.0.2.1:5000"]),
    ("no name", options("--listen", "a..b:5000"), ["--listen = a..b:5000: must be an address"]),
    ("listen x", options("--listen", "x"), ["--listen = x: must be", PORTS]),
    ("port too high", options("--listen", "1.2.3.4:99999"), ["1.2.3.4:99999: must be", PORTS]),
    ("port far too high", options("--listen", "1.2.3.4:" + "9" * 5000), [PORTS]),
    ("server apache", options("--server", "apache"), ["--server = apache", SERVERS]),
    ("stop at once", options("--stop-timeout", "0"), ["--stop-timeout = 0: must be", SECONDS]),
    ("stop abc", options("--stop-timeout", "abc"), ["--stop-timeout = abc: must be", SECONDS]),
    ("stop -1", options("--stop-timeout=-1"), ["--stop-timeout = -1: must be", SECONDS]),
    ("stop late", options("--stop-timeout", "99999999"), ["= 99999999: must be", SECONDS]),
    ("stop never", options("--stop-timeout", "9" * 5000), ["must be", SECONDS]),
    ("unknown option", options("--liste", "x"), ["unrecognized arguments", "--help"]),
    ("two lines of one", options("a\nb"), ["unrecognized arguments: a b", "--help"]),
    ("value missing", options("--server"), ["argument --server: expected one argument"]),
    ("state of a newer version", marker(NEWER), ["{state}", "keyfront 9.8.7", "--fresh"]),
    ("damaged state", marker("no JSON"), ["{state}/" + MARKER, "is damaged", "--fresh"]),
    ("folder not ours", folder_not_ours(), ["{state}: is not empty", "--state"]),
    (
        "folder not ours, fresh",
        folder_not_ours("--fresh", "--listen", "127.0.0.1:0"),
        ["{state}: is not empty", "--state"],
    ),
    ("file in its place", file_in_its_place, ["{state}: is not a folder", "--state"]),
    ("folder of another", folder_of_another(), ["{state}: belongs to user 12345", "--state"]),
    (
        "folder of another, fresh",
        folder_of_another("--fresh"),
        ["{state}: belongs to user 12345", "--state"],
    ),
    ("parent unwritable", parent_unwritable, ["cannot be written to: Permission denied"]),
    ("paste file missing", paste_missing, ["{files}/app.ini: there is no such paste file"]),
    ("paste file unreadable", paste_unreadable, ["{files}/app.ini: ", "Permission denied"]),
    ("paste file garbage", paste("[app:main]\ngarbage\n"), ["{files}/app.ini, line 2: neither"]),
    (
        "paste file names nothing",
        paste("[pipeline:main]\npipeline = absent\n"),
        ["{files}/app.ini, line 2: [pipeline:main] pipeline: absent is not defined"],
    ),
    (
        "paste file names an absent module",
        paste("[app:main]\npaste.app_factory = absent:app\n"),
        ["{files}/app.ini, line 2: [app:main] paste.app_factory: there is no module absent"],
    ),
    ("relative paste file missing", target("config:a.ini"), ["{files}/a.ini: there is no such"]),
    (
        "module missing",
        target("nothing:here"),
        ["KEYFRONT_APP = nothing:here", "no module nothing"],
    ),
    ("bad form", target("nothing"), ["KEYFRONT_APP = nothing: must be config:FILE[#NAME]"]),
    ("unknown scheme", target("http://x"), ["KEYFRONT_APP = http://x: must be config:FILE[#NAME]"]),
    ("egg not installed", target("egg:no-such"), ["KEYFRONT_APP = egg:no-such", "not installed"]),
    (
        "entry point missing",
        target("egg:keyfront#absent"),
        ["KEYFRONT_APP = egg:keyfront#absent", "no entry point absent"],
    ),
    ("without Keystone", hidden("keystone"), ["keystone", "pip install 'keyfront[keystone]'"]),
    ("without uWSGI", hidden("uwsgi pyuwsgi"), ["uWSGI", "pip install 'keyfront[uwsgi]'"]),
    (
        "without gevent",
        hidden("gevent", "--server", "gevent"),
        ["gevent", "pip install 'keyfront[gevent]'"],
    ),
    (
        "without mod_wsgi",
        hidden("mod_wsgi", "--server", "mod_wsgi"),
        ["mod_wsgi", "pip install 'keyfront[mod-wsgi]'"],
    ),
    (
        "without nginx",
        hidden("nginx", "--server", "nginx+uwsgi"),
        ["nginx is not installed: run apt install nginx"],
    ),
    (
        "without Apache",
        hidden("apache2 httpd", "--server", "apache+uwsgi"),
        ["apache2 is not installed: run apt install apache2-bin"],
    ),
]


@pytest.mark.parametrize(("_", "prepare", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_input(_: str, prepare: Prepare, words: list[str], place: Place) -> None:
    arguments = prepare(place)
    if "--listen" not in arguments:
        # should a check be missing, the run ends here and not in a server
        arguments += ["--listen", f"127.0.0.1:{place.port}"]
    before = snapshot(place.top)
    done = place.run("serve", "--state", str(place.state), *arguments)
    check_refusal(done)
    for word in words:
        word = word.replace("{state}", str(place.state)).replace("{files}", str(place.files))
        assert word.replace("{port}", str(place.port)) in done.stderr
    assert snapshot(place.top) == before


def check_refusal(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2, done
    assert re.fullmatch(r"keyfront[^\n]*: [^\n]+\n", done.stderr), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_no_command(place: Place) -> None:
    for arguments in ([], ["absent"]):
        done = place.run(*arguments)
        check_refusal(done)
        assert "COMMAND" in done.stderr


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (options(), "there is no Keystone here yet; run keyfront serve first"),
        (folder_not_ours(), "was not made by keyfront serve"),
        (marker(NEWER), "keyfront 9.8.7"),
    ],
)
def test_check_without_a_keystone(prepare: Prepare, words: str, place: Place) -> None:
    prepare(place)
    before = snapshot(place.top)
    done = place.run("check", "--state", str(place.state))
    check_refusal(done)
    assert words in done.stderr
    assert snapshot(place.top) == before


def test_user_without_a_home(place: Place) -> None:
    if not ROOT:
        pytest.skip("only root can become a user that the machine does not know")
    caps = "+dac_read_search"  # Python itself may lie in a folder that is closed to others
    place.prefix = [setpriv(), f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    place.prefix += [f"--inh-caps={caps}", f"--ambient-caps={caps}", "env", "--unset=HOME"]
    place.prefix += ["--unset=XDG_STATE_HOME"]
    done = place.run("check")
    check_refusal(done)
    assert "no home folder" in done.stderr
    assert "--state" in done.stderr


OLD = """
import runpy, sys
class Version(tuple):
    major, minor = 3, 10
sys.version_info = Version((3, 10, 4, "final", 0))
sys.argv = ["keyfront", "serve"]
runpy.run_module("keyfront", run_name="__main__")
"""


def old_pythons() -> list[str]:
    """Real old interpreters of this machine that run; the check must hold in their grammar."""
    found = (shutil.which(f"python3.{minor}") for minor in (8, 9, 10))
    works = "import sys; sys.exit(sys.version_info >= (3, 11))"
    return [
        python
        for python in found
        if python and subprocess.run([python, "-c", works], capture_output=True).returncode == 0
    ]


def test_python_too_old(place: Place) -> None:
    faked = subprocess.run(
        [sys.executable, "-c", OLD],
        env=place.variables(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    check_refusal(faked)
    assert faked.stderr == "keyfront: needs Python 3.11 or later, this is 3.10\n"
    import keyfront

    source = Path(keyfront.__file__).parent
    for python in old_pythons():
        real = subprocess.run(
            [python, "-m", "keyfront", "serve"],
            env={**place.variables(), "PYTHONPATH": str(source.parent)},
            cwd=place.files,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        check_refusal(real)
        assert "needs Python 3.11 or later, this is 3." in real.stderr


def interrupt_in_set_up(place: Place) -> subprocess.CompletedProcess[str]:
    """Send SIGINT once the set-up works on the database."""
    command = [sys.executable, "-m", "keyfront", "serve"]
    process = subprocess.Popen(
        [*command, "--state", str(place.state), "--listen", "127.0.0.1:0"],
        env=place.variables(),
        cwd=place.files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # in the background of some shells and CI runners SIGINT is ignored, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    try:
        seen = b""
        while b"database" not in seen:
            read = os.read(process.stdout.fileno(), 4096)
            assert read, (seen, process.communicate(timeout=TIMEOUT))
            seen += read
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(
        process.args, process.returncode, (seen + rest).decode(), errors.decode()
    )


def test_ctrl_c_during_the_set_up(place: Place) -> None:
    passwords = set()
    for _ in range(2):
        done = interrupt_in_set_up(place)
        assert done.returncode == 130, done
        assert re.fullmatch(r"keyfront: interrupted[^\n]*\n", done.stderr), done.stderr
        assert "Traceback" not in done.stdout
        assert json.loads((place.state / MARKER).read_text())["complete"] is False
        passwords.add((place.state / "admin-password").read_text())
    # the second run began again instead of going on with half a Keystone
    assert len(passwords) == 2

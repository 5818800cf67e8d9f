"""``keyfront serve`` in each line-up: stopping, reloading."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil
import pytest

from keyfront.gateway.reload import daemons
from support import APPS
from support.processes import catches, command_line, parent, runs
from support.served import PATIENCE, SHAPES, WITH_UWSGI, Served, serve, stats, wait_for

CONNECTIONS = 8
# Seconds between an answer and its client's next request: without, clients alone occupy all cores.
BREATH = 0.01
# Of a stop, in seconds, long enough for a request that ends meanwhile though the machine stands
# still, and what a busy one may take beyond it: together less than the 30 s that a stop takes at
# most without being told, and than the minute after which a request is ended.
MERCY, BUSY = 8, 20


def _held(folder: Path, server: str, mercy: int) -> dict[str, object]:
    return {
        "environment": {
            "KEYFRONT_APP": "waiting_app:application",
            "HOLD_FOLDER": str(folder),
            "PYTHONPATH": str(APPS),
        },
        "arguments": ("--stop-timeout", str(mercy)),
    }


class _Request(threading.Thread):
    """A request in flight, and what became of it."""

    def __init__(self, served: Served, path: str, headers: dict[str, str] | None = None) -> None:
        super().__init__()
        self._connection = served.connect()
        self._path = path
        self._headers = headers or {}
        self.status: int | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            answer.read()
            self.status = answer.status
        except (OSError, HTTPException) as error:
            self.error = error
        finally:
            self._connection.close()


def _alive_after(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still run then; one that only waits to be collected does not."""
    deadline = time.monotonic() + seconds
    while (left := list(filter(runs, family))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("server", SHAPES)
def test_stop_is_bounded(oddly_named_state: tuple[Path, int], tmp_path: Path, server: str) -> None:
    """A stop lets requests end, cuts off the one that does not, and leaves no process."""
    state, port = oddly_named_state
    with serve(state, server, port=port, **_held(tmp_path, server, MERCY)) as served:  # type: ignore[arg-type]
        ends = _Request(served, "/hold/ends")
        never = _Request(served, "/hold/never")
        for name in ("ends", "never"):
            wait_for((tmp_path / f"{name}.held").exists, f"{name} is in the application")
        family = served.processes()
        served.process.send_signal(signal.SIGTERM)
        # uWSGI's or Apache's own word that the stop has begun is not needed: the request is in
        (tmp_path / "ends.go").touch()
        ends.join()
        assert ends.status == 200
        assert not _alive_after(family, MERCY + BUSY)
        never.join()
        # uWSGI just closes; the web servers say so in their own ways
        assert never.status in (None, 500, 502, 503, 504)


@pytest.mark.parametrize("server", ("uwsgi", "gevent"))
def test_uwsgi_bounds_its_own_stop(
    keystone_state: tuple[Path, int], tmp_path: Path, server: str
) -> None:
    """The same without keyfront's supervisor: only uWSGI is told to stop, as systemd would."""
    state, port = keystone_state
    with serve(state, server, port=port, **_held(tmp_path, server, MERCY)) as served:  # type: ignore[arg-type]
        never = _Request(served, "/hold/never")
        wait_for((tmp_path / "never.held").exists, "the request is in the application")
        family = served.processes()
        os.kill(served.process.pid, signal.SIGSTOP)  # it must not help
        try:
            served.masters("uwsgi").send_signal(signal.SIGTERM)
            assert not _alive_after(family, MERCY + BUSY)
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        never.join()
        log = served.log("uwsgi.log").rpartition("graceful shutdown")[2]
        assert "Timeout (" in log
        # a greenlet that waits is on no thread's stack
        assert "waiting_app.py" in log or server == "gevent"


@pytest.mark.parametrize(("server", "told"), [("gevent", True), ("nginx+uwsgi", False)])
def test_what_slow_clients_stop_says_so_where_others_reach_it(
    keystone_state: tuple[Path, int], tmp_path: Path, server: str, told: bool
) -> None:
    state, port = keystone_state
    options = _held(tmp_path, server, 3)
    options["arguments"] = (*options["arguments"], "--listen", f"0.0.0.0:{port}")  # type: ignore[misc]
    with serve(state, server, port=port, **options) as served:  # type: ignore[arg-type]
        assert (b"\nPut nginx in front  " in served.output) is told


class _Load:
    """Loads of the application, which wait until the test says so; the first ones need not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._go = folder / "load.go"
        self.go()

    def go(self) -> None:
        self._go.touch()

    def hold(self) -> None:
        self._go.unlink(missing_ok=True)
        self._known = self._begun()

    def wait(self) -> None:
        wait_for(lambda: self._begun() - self._known, "the new application is being loaded")

    def go_one(self) -> None:
        """Wait for the next load, and let it go on alone."""
        self.wait()
        (begun,) = self._begun() - self._known
        self._known.add(begun)
        begun.with_name(f"{begun.name}.go").touch()

    def _begun(self) -> set[Path]:
        return {path for path in self._folder.glob("load-*") if not path.suffix}


class _Clients:
    """They send one request after the other, and keep their connections as far as they may."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(CONNECTIONS)]
        self.failures: list[str] = []
        self.answers: list[bytes] = []

    def __enter__(self) -> _Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        connection = self._served.connect()
        while not self._over.is_set():
            try:
                connection.request("POST", "/", body=b"x" * 1000)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    self.failures.append(f"{answer.status}")
                self.answers.append(body)
            except (OSError, HTTPException) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                connection.close()
            self._over.wait(BREATH)
        connection.close()

    def go_on(self) -> set[bytes]:
        """Wait until each has had many answers from now on; return the workers of the last ones."""
        before = len(self.answers)
        wait_for(lambda: len(self.answers) > before + 14 * CONNECTIONS, "they are answered")
        return set(self.answers[-10 * CONNECTIONS :])


@pytest.mark.parametrize("server", WITH_UWSGI)
def test_a_reload_keeps_nobody_waiting(
    keystone_state: tuple[Path, int], tmp_path: Path, server: str
) -> None:
    """Nobody waits for a load however long it takes, nor for one that fails."""
    state, port = keystone_state
    options = _held(tmp_path, server, 10)
    options["environment"]["HOLD_LOAD"] = "1"  # type: ignore[index]
    load = _Load(tmp_path)
    with serve(state, server, port=port, **options) as served, _Clients(served) as clients:  # type: ignore[arg-type]

        def said(word: str) -> bool:
            return word in served.more()

        for _ in range(2):
            clients.go_on()
            old = _all(served)
            load.hold()
            served.process.send_signal(signal.SIGHUP)
            load.wait()
            assert clients.go_on() <= old
            load.go()
            wait_for(lambda: said("reloaded in"), "it says that it has reloaded")
            wait_for(lambda old=old: not clients.go_on() & old, "only fresh workers answer")
        old = _all(served)
        load.hold()
        served.process.send_signal(signal.SIGHUP)
        load.wait()
        (tmp_path / "load.fail").touch()
        wait_for(lambda: said("not reloaded, the former goes on"), "it says that it has not")
        wait_for(lambda: said("RuntimeError: load.fail is there"), "it says why")
        assert clients.go_on() <= old
        # one that is interrupted by a stop
        (tmp_path / "load.fail").unlink()
        served.process.send_signal(signal.SIGHUP)
        load.wait()
        clients.__exit__()
        served.stop()
    assert not clients.failures


def test_a_reload_of_mod_wsgi_keeps_nobody_waiting(
    keystone_state: tuple[Path, int], tmp_path: Path
) -> None:
    """One daemon after the other, and only if the application loads at all."""
    state, port = keystone_state
    options = _held(tmp_path, "mod_wsgi", 10)
    options["environment"]["HOLD_LOAD"] = "1"  # type: ignore[index]
    load = _Load(tmp_path)
    with serve(state, "mod_wsgi", port=port, **options) as served, _Clients(served) as clients:  # type: ignore[arg-type]
        config = (state / "run" / "apache.conf").read_text()
        number = int(re.search(r"\bprocesses=(\d+)", config)[1])  # type: ignore[index]

        def all_loaded() -> bool:
            # On a busy machine one may answer while another has not begun to load, or does not
            # even call itself a daemon yet.
            found = _daemons(served)
            return len(found) == number and all(map(_loaded, found))

        wait_for(all_loaded, "all daemons have loaded")
        old = {b"%d" % daemon.pid for daemon in _daemons(served)}
        assert len(old) > 1
        assert clients.go_on() <= old
        load.hold()
        served.process.send_signal(signal.SIGHUP)
        load.wait()
        assert clients.go_on() <= old
        load.go_one()  # the trial
        for _ in old:
            load.wait()
            clients.go_on()
            load.go_one()
        wait_for(lambda: "reloaded in" in served.more(), "it says that it has reloaded")
        new = {b"%d" % daemon.pid for daemon in _daemons(served)}
        assert not new & old and len(new) == len(old)
        wait_for(lambda: clients.go_on() <= new, "only fresh daemons answer")
        load.hold()
        served.process.send_signal(signal.SIGHUP)
        load.wait()
        (tmp_path / "load.fail").touch()
        wait_for(lambda: "not reloaded, the former goes on" in served.more(), "it says why")
        assert b"RuntimeError: load.fail is there" in served.output
        assert clients.go_on() <= new
    assert not clients.failures


def _all(served: Served) -> set[bytes]:
    """Return who may answer now, whether or not he has by chance."""
    return {b"%d" % one.pid for one in served.processes()}


def _daemons(served: Served) -> list[psutil.Process]:
    apache = served.masters("apache2")
    return [x for x in apache.children() if "".join(command_line(x)).startswith("(wsgi:")]


def _loaded(daemon: psutil.Process) -> bool:
    return Path(f"/proc/{daemon.pid}/comm").read_text().strip() == daemons.LOADED


def test_a_reload_outlives_what_is_killed(
    keystone_state: tuple[Path, int], tmp_path: Path
) -> None:
    """The new uWSGI while it loads: the former goes on. The former one: the new one follows."""
    state, port = keystone_state
    options = _held(tmp_path, "nginx+uwsgi", 10)
    options["environment"]["HOLD_LOAD"] = "1"  # type: ignore[index]
    load = _Load(tmp_path)
    with serve(state, "nginx+uwsgi", port=port, **options) as served:  # type: ignore[arg-type]
        old = served.masters("uwsgi")
        program = old.cmdline()[:1]

        def loading() -> psutil.Process:
            load.hold()
            served.process.send_signal(signal.SIGHUP)
            load.wait()
            (found,) = (
                x for x in served.processes()
                if parent(x) == old.ppid() and command_line(x)[:1] == program and x != old
            )
            return found

        loading().kill()
        wait_for(lambda: "not reloaded" in served.more(), "it says so")
        assert b"SIGKILL" in served.output
        with _Clients(served) as clients:
            clients.go_on()
        new = loading()
        old.kill()
        wait_for(lambda: "the next one is being loaded" in served.log("uwsgi.log"), "it is noticed")
        waiting = _Request(served, "/")
        load.go()
        waiting.join()
        assert waiting.status == 200
        assert new.is_running()
        assert not clients.failures


def test_pyuwsgi_reloads_with_its_own_python(
    keystone_state: tuple[Path, int], tmp_path: Path
) -> None:
    """By itself it would go on with the Python that the environment's link leads to.

    Also when only its own master is told, as by whoever runs the rendered file without keyfront.
    """
    state, port = keystone_state
    home = tmp_path / "venv"
    # a pip of its own would take three seconds of a processor
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = str(home / "bin/python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "pyuwsgi"], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # All else is that of the tests' own environment.
    rest = sysconfig.get_path("purelib")
    (site / "rest.pth").write_text(f"import site; site.addsitedir({rest!r})\n")
    held = _held(tmp_path, "uwsgi", 10)

    def answered_by() -> int | None:
        try:
            with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
                connection.request("GET", "/")
                return int(connection.getresponse().read())
        except (OSError, HTTPException):
            return None

    def reloads(tell: Callable[[signal.Signals], None]) -> None:
        before = answered_by()
        assert before is not None
        tell(signal.SIGHUP)
        wait_for(lambda: not psutil.pid_exists(before), "the old worker has ended")
        wait_for(answered_by, "a fresh worker answers")

    with serve(state, "uwsgi", port=port, python=python, **held) as served:  # type: ignore[arg-type]
        rendered = (served.state / "run/uwsgi.ini").read_text()
        assert "pyuwsgi" in rendered
        reloads(served.process.send_signal)
    own = _own_ini(rendered, tmp_path, lazy=False, prefix=home)
    with _alone(own, held, program=home / "bin/uwsgi") as uwsgi:
        wait_for(answered_by, "it answers")
        wait_for(lambda: catches(uwsgi.pid, signal.SIGHUP), "it takes signals")
        reloads(uwsgi.send_signal)
        assert uwsgi.poll() is None


def test_statistics_show_no_token(keystone_state: tuple[Path, int], tmp_path: Path) -> None:
    state, port = keystone_state
    with serve(state, "uwsgi", port=port, **_held(tmp_path, "uwsgi", 3)) as served:  # type: ignore[arg-type]
        request = _Request(served, "/hold/slow", {"X-Auth-Token": "gAAAA-a-secret"})
        wait_for((tmp_path / "slow.held").exists, "the request is in the application")
        path = state / "run" / "stats.sock"
        told: list[str] = []

        def is_told() -> bool:
            # uWSGI's master makes it when its workers are at work already
            with suppress(OSError):
                told.append(json.dumps(stats(path)))
            return bool(told)

        wait_for(is_told, "uWSGI tells its statistics")
        assert b"Put nginx in front" not in served.output, "it listens on loopback"
        (tmp_path / "slow.go").touch()
        request.join()
        assert request.status == 200
        # the folder admits nobody else
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert '"workers"' in told[0]
    assert "gAAAA-a-secret" not in told[0]


@pytest.mark.parametrize("end", (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
def test_nothing_is_left_running(
    keystone_state: tuple[Path, int], tmp_path: Path, end: signal.Signals
) -> None:
    """Also when the supervisor itself is killed."""
    state, port = keystone_state
    held = _held(tmp_path, "nginx+uwsgi", 10)
    with serve(state, "nginx+uwsgi", port=port, **held) as served:  # type: ignore[arg-type]
        family = served.processes()
        assert len(family) > 3
        served.process.send_signal(end)
        assert not _alive_after(family, PATIENCE)


@pytest.fixture(scope="module")
def rendered(
    keystone_state: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """What ``keyfront serve`` renders for a uWSGI, by the name of its line-up."""
    state, port = keystone_state

    @cache
    def found(server: str) -> str:
        options = _held(tmp_path_factory.mktemp("rendered"), server, 3)
        with serve(state, server, port=port, **options):  # type: ignore[arg-type]
            return (state / "run" / "uwsgi.ini").read_text()

    return found


def test_a_stop_while_workers_load_is_not_lost(
    keystone_state: tuple[Path, int], tmp_path: Path
) -> None:
    """A lazy worker has SIGHUP ignored while it loads; uWSGI alone would wait for it for ever."""
    state, port = keystone_state
    options = _held(tmp_path, "gevent", 3600)
    options["environment"]["HOLD_LOAD"] = "1"  # type: ignore[index]
    with serve(state, "gevent", port=port, until=b"start of uwsgi", **options) as served:  # type: ignore[arg-type]
        wait_for(lambda: len(list(tmp_path.glob("load-*"))) > 1, "both workers load")
        family = served.processes()
        master = served.masters("uwsgi")
        # the supervisor must not help
        served.process.send_signal(signal.SIGSTOP)
        try:
            master.send_signal(signal.SIGTERM)
            wait_for(
                lambda: "graceful shutdown" in served.log("uwsgi.log").rpartition("spawned")[2],
                "the master has told its workers",
            )
            (tmp_path / "load.go").touch()
            assert not _alive_after(family, PATIENCE)
        finally:
            served.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_stop_while_it_loads_is_not_lost(
    rendered: Callable[[str], str], tmp_path: Path, lazy: bool
) -> None:
    """With nobody to send it again: uWSGI itself ignores it until its master's loop begins."""
    options = _held(tmp_path, "uwsgi", 3)
    options["environment"]["HOLD_LOAD"] = "1"  # type: ignore[index]
    load = _Load(tmp_path)
    load.hold()
    with _alone(_own_ini(rendered("uwsgi"), tmp_path, lazy=lazy), options) as uwsgi:
        load.wait()
        uwsgi.terminate()
        load.go()
        assert uwsgi.wait(PATIENCE) == 0


@pytest.mark.parametrize("server", ["uwsgi", "gevent"])
def test_a_stop_before_a_lazy_worker_loads_is_not_lost(
    rendered: Callable[[str], str], tmp_path: Path, server: str
) -> None:
    """Between its fork and the first line of ours it is uWSGI's, which forgets what it is told."""
    options = _held(tmp_path, server, 3)
    ini = _own_ini(rendered(server), tmp_path, lazy=True)
    wait = f"cd {tmp_path}; touch forked-$PPID; while ! [ -e loads ]; do sleep 0.02; done"
    (tmp_path / "wait.sh").write_text(wait)
    wait = f"hook-post-fork = exec:/bin/sh {tmp_path}/wait.sh"
    text = ini.read_text()
    first = "hook-post-fork = "
    ini.write_text(text.replace(first, f"{wait}\n{first}", 1))
    with _alone(ini, options) as uwsgi:
        wait_for(lambda: len(list(tmp_path.glob("forked-*"))) > 1, "all workers are forked")
        uwsgi.terminate()
        workers = psutil.Process(uwsgi.pid).children()
        wait_for(lambda: all(_hung_up(worker.pid) for worker in workers), "they are told to end")
        (tmp_path / "loads").touch()
        assert uwsgi.wait(PATIENCE) == 0


def _hung_up(pid: int) -> bool:
    """Return whether a SIGHUP waits in a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[1], 16) & 1)  # type: ignore[index]


def _own_ini(rendered: str, folder: Path, *, lazy: bool, prefix: str | Path = sys.prefix) -> Path:
    """Write what was rendered to a file that outlives the server."""
    # what it names for the environment may end with the server
    virtualenv = f"virtualenv = {prefix}"
    text = re.sub("^virtualenv = .*", lambda _: virtualenv, rendered, flags=re.MULTILINE)
    path = folder / "own.ini"
    path.write_text(text.replace("lazy-apps = false", f"lazy-apps = {str(lazy).lower()}"))
    return path


@contextmanager
def _alone(
    ini: Path, options: dict[str, object], program: Path = Path(sys.prefix, "bin", "uwsgi")
) -> Iterator[subprocess.Popen[bytes]]:
    """Run uWSGI with a file; kill what is left of it."""
    uwsgi = subprocess.Popen(
        [str(program), "--ini", str(ini)],
        env={**os.environ, **options["environment"]},  # type: ignore[dict-item]
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield uwsgi
    finally:
        if uwsgi.poll() is None:
            for process in psutil.Process(uwsgi.pid).children(recursive=True):
                process.kill()
            uwsgi.kill()
            uwsgi.wait()


def test_lazy_workers_without_the_hook_still_stop(
    keystone_state: tuple[Path, int], rendered: Callable[[str], str], tmp_path: Path
) -> None:
    """An ini file of the operator's own, without our hook: unbounded, but no worse than stock."""
    state, _ = keystone_state
    lines = rendered("uwsgi").splitlines()
    text = "\n".join(x for x in lines if not x.startswith("hook-post-fork"))
    own = _own_ini(text, tmp_path, lazy=True)
    with _alone(own, _held(tmp_path, "uwsgi", 3)) as uwsgi:

        def all_loaded() -> bool:
            try:
                workers = stats(state / "run" / "stats.sock")["workers"]
            except OSError:
                return False
            return all(worker["accepting"] for worker in workers)  # type: ignore[attr-defined]

        wait_for(all_loaded, "every worker is loaded")
        uwsgi.terminate()
        uwsgi.wait(PATIENCE)

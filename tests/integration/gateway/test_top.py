"""``keyfront top`` in a terminal, over a served Keystone: its frames, keys, sizes and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from support import keystones
from support.served import Served, serve, wait_for
from support.terminal import Terminal, terminal

TOP = [sys.executable, "-m", "keyfront", "top", "--interval", "0.2"]


def _login(served: Served) -> str:
    domain = {"id": "default"}
    user = {"name": "admin", "domain": domain, "password": served.password}
    scope = {"project": {"name": "admin", "domain": domain}}
    identity = {"methods": ["password"], "password": {"user": user}}
    body = {"auth": {"identity": identity, "scope": scope}}
    answer = requests.post(f"{served.url}/auth/tokens", json=body, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.headers["X-Subject-Token"]


def _validate(served: Served, token: str) -> Callable[[], None]:
    client = requests.Session()
    headers = {"X-Auth-Token": token, "X-Subject-Token": token}

    def ask() -> None:
        for _ in range(20):
            answer = client.get(f"{served.url}/auth/tokens", headers=headers, timeout=60)
            assert answer.status_code == 200

    return ask


def _ends(screen: Terminal, modes: list[object], status: int = 0) -> None:
    """It ended, and the terminal is as it was."""
    assert screen.end() == status, screen.output[-2000:]
    assert screen.modes() == modes
    assert screen.output.rstrip().endswith("\x1b[?1049l\x1b[?25h"), screen.output[-200:]
    assert "Traceback" not in screen.output


def _shows(words: str) -> Callable[[list[str]], bool]:
    return lambda frame: any(words in line for line in frame)


class Site(NamedTuple):
    """A served Keystone, and the command that looks at it."""

    served: Served
    command: list[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for all tests; the last stops it."""
    folder = tmp_path_factory.mktemp("top")
    state = keystones.keystone_state(folder / "state")
    (folder / "beats").mkdir(mode=0o700)
    with serve(state, "uwsgi", port=keystones.port_of(state)) as served:
        yield Site(served, [*TOP, "--state", str(state), "--heartbeat", str(folder / "beats")])


def test_a_reading_that_hangs(site: Site) -> None:
    """A lock that a stopped process holds hangs the reading; the keys work, and it is said."""
    served, command = site
    _login(served)
    folder = _token_cache(served.state)
    hold = (
        "import sys, pathlib, time\n"
        "from keyfront.middleware.tokens.coordinator.local import SharedMemory\n"
        "with SharedMemory(pathlib.Path(sys.argv[1]), create=False)._held():\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with terminal(command) as screen:
        modes = screen.modes()
        screen.until(_shows("TOKEN CACHE"), "it is there")
        holder = subprocess.Popen(
            [sys.executable, "-c", hold, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stdin is not None
            holder.stdout.readline()
            screen.until(_shows("WHAT IS SHOWN IS OLD"), "it says that it hangs")
            screen.resize(100, 30)
            screen.until(_shows("TOKEN CACHE"), "it is drawn all the same")
            screen.type(b"q")
            _ends(screen, modes)
        finally:
            holder.communicate(b"")


def test_a_served_keystone(site: Site) -> None:
    """Its rates, sizes, keys; then what cannot be read, and its end."""
    served, command = site
    state = served.state
    token = _login(served)
    ask = _validate(served, token)
    outputs = []
    with terminal(command) as screen:
        modes = screen.modes()
        screen.until(_shows("in the last"), "there are rates")
        assert screen.modes() != modes

        def busy(frame: list[str]) -> bool:
            ask()
            found = [re.search(r"repeated, worker +([\d.]+) +\d", line) for line in frame]
            return any(one and float(one[1]) > 0 for one in found)

        frame = screen.until(busy, "the hits are seen")
        assert all(len(line) <= 79 for line in frame) and len(frame) <= 24
        for words in ("REQUESTS", "WORKERS", "TOKEN CACHE", "CHANGES", "q or Ctrl-C ends"):
            assert any(words in line for line in frame), words
        for words in ("LDAP", "HEARTBEAT", "queue"):  # not in use here
            assert not any(words in line for line in frame), words

        screen.resize(130, 50)
        screen.until(lambda frame: max(map(len, frame)) > 80, "it uses the room")
        screen.resize(50, 12)
        screen.until(lambda frame: len(frame) <= 12 and max(map(len, frame)) < 50, "it is smaller")
        screen.resize(80, 24)
        screen.until(_shows("TOKEN CACHE"), "all is there again")

        # keys of no meaning
        screen.type(b"xyz\x1b[A")
        screen.until(_shows("in the last"), "it goes on")
        screen.type(b"q")
        _ends(screen, modes)
        outputs.append(screen.output)

    with terminal(command) as screen:
        modes = screen.modes()
        screen.until(_shows("TOKEN CACHE"), "it is there")
        screen.type(b"\x03")
        _ends(screen, modes)

    with terminal(command) as screen:
        modes = screen.modes()
        screen.until(_shows("TOKEN CACHE"), "it is there")
        (state / "run/node/draining").touch()
        screen.until(_shows("DRAINING"), "it drains")
        (state / "run/node/draining").unlink()
        counts = state / "run/node/requests"
        # as another version's, or damaged
        size = counts.stat().st_size
        os.truncate(counts, size - 8)
        frame = screen.until(_shows("bytes instead of"), "it cannot be read")
        assert "NOT READ" in frame[0] and any("TOKEN CACHE" in line for line in frame)
        os.truncate(counts, size)
        screen.until(_shows("WORKERS"), "it can be read again")
        served.stop()
        screen.until(_shows("NO WORKER RUNS"), "the server has stopped")
        screen.process.send_signal(signal.SIGTERM)
        _ends(screen, modes, 128 + signal.SIGTERM)
        outputs.append(screen.output)
    for output in outputs:
        assert token not in output and served.password not in output


def _token_cache(state: Path) -> Path:
    from keyfront.cli.tokens import cache

    return cache(path=None, config_file=state / "keystone.conf").folder


def test_without_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(TOP, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "keyfront status --json" in done.stderr and len(done.stderr.splitlines()) == 1
    with terminal(TOP, TERM="dumb") as screen:
        assert screen.end() == 2
        assert "TERM = dumb" in screen.output
    none = str(tmp_path / "none")
    with terminal([*TOP, "--node", none, "--tokens", none], columns=200) as screen:
        screen.until(_shows("No such file"), "it says that there is none")
        (tmp_path / "none").mkdir()
        wait_for(lambda: screen.process.poll() is None, "it waits for one")
        screen.type(b"q")
        assert screen.end() == 0

"""keyfront plan --measure on real servers: it finds the best plan, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support import APPS
from support.processes import runs
from support.served import PATIENCE, wait_for

# Candidates: 1 process of 2, 4 and 8 threads, 2 processes of 2 threads, and gevent.
ARGUMENTS = ("--measure", "--processes", "1", "--threads", "2", "--memory", "4G")
# Half of it is there to start them in. On a machine that stands still no candidate is too late.
LONG = ("--seconds", "40", "--latency", "60")


class Measuring:
    """Runs the command in a temporary folder of its own, and looks what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(APPS)
        }
        (folder / "tmp").mkdir()
        self.headers = folder / "headers"
        self.headers.write_text("X-Auth-Token: the-only-good-token\n")
        self.headers.chmod(0o600)

    def start(self, target: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "keyfront", "plan", *ARGUMENTS, *arguments],
            env={**self.environment, "KEYFRONT_APP": target},
            cwd=APPS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # what started the tests in the background may have it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, target: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(target, *arguments)
        out, err = process.communicate(timeout=2 * PATIENCE)
        return process.returncode, out, err

    def left(self) -> list[object]:
        """Return the processes and files of a measurement."""
        return [*(self.folder / "tmp").iterdir(), *self.processes()]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of a measurement."""
        mine = str(self.folder)
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and mine in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def measuring(tmp_path: Path) -> Iterator[Measuring]:
    made = Measuring(tmp_path)
    yield made
    assert made.left() == []


@pytest.mark.slow
def test_what_waits_gets_threads(measuring: Measuring) -> None:
    status, out, err = measuring.run(
        "sleeping_app:sleeping", "--headers-file", str(measuring.headers), *LONG, "--json",
    )
    assert (status, err) == (0, "")
    assert "the-only-good-token" not in out
    content = json.loads(out)
    made = content["measurement"]
    first, *_ = made["candidates"]
    assert (first["processes"], first["threads"], first["failed"]) == (1, 2, 0)
    assert len(first["rates"]) == made["rounds"] >= 4
    (best,) = (x for x in made["candidates"] if (x["processes"], x["threads"]) == (1, 8))
    # four times the threads wait four times as often; a median has two rounds beside it
    assert best["rate"] > 2 * first["rate"]
    if _disturbed(first["rates"], best["rates"]):
        assert made["verdict"].startswith("no clear winner, keep the computed plan")
        assert "1 process x 8 threads is ahead by" in made["verdict"]
        taken = 2
    else:
        assert made["taken"] == "1 process x 8 threads"
        assert made["margin"] > max(1, made["noise"])
        taken = 8
    assert content["numbers"]["uwsgi.threads"]["value"] == taken


def _disturbed(first: list[float], best: list[float]) -> bool:
    """Whether the machine stood still for a good part of a slice: who cannot tell says so."""
    lead = [b / a for a, b in zip(first, best, strict=True) if a]
    margin = statistics.median(lead) - 1
    return min(lead) <= 1 or margin <= (max(lead) - min(lead)) / 2


@pytest.mark.slow
def test_what_is_locked_gets_processes(measuring: Measuring) -> None:
    status, out, err = measuring.run("sleeping_app:locked", *LONG)
    assert (status, err) == (0, "")
    # The first by the medians; a machine that stands still for half of a slice in one of the rounds
    # leaves no clear winner, which it says.
    told = " ".join(out.split())
    assert re.search("2 processes x 2 threads is (the best|ahead by)", told), out
    assert ("is the best" in told) != ("no clear winner" in told), out
    assert "1 process x 2 threads (plan)" in out
    assert out.splitlines()[0].startswith("GET / with ")
    assert max(map(len, out.splitlines())) <= 80


def test_a_path_that_is_refused(measuring: Measuring) -> None:
    status, out, err = measuring.run("sleeping_app:sleeping", "--path", "/v3/x")
    assert (status, out) == (2, "")
    assert err == (
        "keyfront: GET /v3/x is answered 401; name another path with --path, or give the headers "
        "it needs with --headers-file\n"
    )


def test_an_application_that_does_not_load(measuring: Measuring, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such luck')\n")
    measuring.environment["PYTHONPATH"] = str(tmp_path)
    status, out, err = measuring.run("broken:application")
    assert (status, out) == (2, "")
    assert err.startswith("keyfront: 1 process x 2 threads: uWSGI did not start: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "asked"),
    # while the first candidate starts; while they are loaded, when it was asked more often
    [(signal.SIGTERM, 1), (signal.SIGINT, 100)],
)
def test_it_can_be_interrupted(
    measuring: Measuring, tmp_path: Path, number: signal.Signals, asked: int
) -> None:
    told = tmp_path / "told"
    measuring.environment["TELL"] = str(told)
    process = measuring.start("sleeping_app:sleeping", "--headers-file", str(measuring.headers))
    wait_for(lambda: told.exists() and told.stat().st_size >= asked * 6, "it was asked")
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("keyfront: interrupted")


def test_its_servers_end_with_it_however_it_ends(measuring: Measuring, tmp_path: Path) -> None:
    told = tmp_path / "told"
    measuring.environment["TELL"] = str(told)
    process = measuring.start("sleeping_app:sleeping", "--headers-file", str(measuring.headers))
    wait_for(told.exists, "it was asked")
    assert len(psutil.Process(process.pid).children(recursive=True)) >= 2
    process.kill()
    process.communicate(timeout=PATIENCE)
    # those, too, that were forked after that look
    wait_for(lambda: not any(map(runs, measuring.processes())), "its servers have ended")
    # only the folder stays, which nobody was left to remove
    shutil.rmtree(tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()

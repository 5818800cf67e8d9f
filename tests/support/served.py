"""Runs ``keyfront serve`` for the integration tests, and takes it down again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from keyfront.benchmarks.servers.ports import free_port as free_port
from support.processes import command_line, kill, parent, runs
from support.readable import readable

SHAPES = ("uwsgi", "gevent", "nginx+uwsgi", "apache+uwsgi", "mod_wsgi")
WITH_UWSGI = SHAPES[:-1]
# Seconds; a bound on a hang, not an expectation.
PATIENCE = 90.0

_USER_NAMESPACE = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


@cache
def _namespaces_allowed() -> bool:
    try:
        done = subprocess.run([*_USER_NAMESPACE, "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def as_ordinary_user() -> list[str]:
    """What to put before a command so that it does not run as root.

    Inside a user namespace root's files stay readable, wherever the suite was unpacked.
    """
    if os.geteuid() != 0:
        return []
    if not _namespaces_allowed():
        pytest.skip("mod_wsgi does not run as root, and user namespaces are not allowed here")
    return _USER_NAMESPACE


@dataclass
class Served:
    """A running ``keyfront serve``."""

    process: subprocess.Popen[bytes]
    state: Path
    port: int
    output: bytes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v3"

    @property
    def password(self) -> str:
        return (self.state / "admin-password").read_text().strip()

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def log(self, name: str) -> str:
        return (self.state / "log" / name).read_text(errors="replace")

    def more(self) -> str:
        """What it has printed since it was ready."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while readable(descriptor, 0):
            part = os.read(descriptor, 65536)
            if not part:
                break
            self.output += part
        return self.output.partition(b"Stop with")[2].decode()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def masters(self, name: str) -> psutil.Process:
        """The process that runs this program and was not started by the same program."""
        found = {x.pid: x for x in self.processes() if name in "".join(command_line(x)[:1])}
        for process in found.values():
            if parent(process) not in {0, *found}:
                return process
        raise AssertionError(f"no {name} among {self.processes()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> bytes:
        """Stop it and return all it printed."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=PATIENCE)
        self.output += rest
        return self.output


@contextlib.contextmanager
def serve(
    state: Path, server: str, *, port: int = 0, environment: dict[str, str] | None = None,
    arguments: tuple[str, ...] = (), until: bytes = b"Stop with", python: str = sys.executable,
    alone: bool = False,
) -> Iterator[Served]:
    """Run ``keyfront serve`` until the block ends; it answers when the block begins.

    :param alone: have uWSGI serve with one process, as on a machine with one core: with greenlets
        each loads Keystone for itself, which takes two seconds of a processor
    """
    prefix = as_ordinary_user() if server == "mod_wsgi" else []
    if alone:
        core = random.choice(sorted(os.sched_getaffinity(0)))
        prefix = ["taskset", "--cpu-list", str(core), *prefix]
    process = subprocess.Popen(
        [
            *prefix, python, "-m", "keyfront", "serve", "--state", str(state),
            "--listen", f"127.0.0.1:{port}", "--server", server, *arguments,
        ],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    served = Served(process, state, port, b"")
    try:
        served.output = _read_until(process, until)
        if until in served.output and not port:
            line = next(x for x in served.output.splitlines() if x.startswith(b"Keystone answers"))
            served.port = int(line.rpartition(b":")[2].partition(b"/")[0])
        yield served
    finally:
        family = served.processes() if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        left = [p for p in family if runs(p)]
        for p in left:
            kill(p)
        assert not left, f"left running: {left}"


def _read_until(process: subprocess.Popen[bytes], until: bytes) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    output = b""
    # a Keystone may have to be made first
    deadline = time.monotonic() + 2 * PATIENCE
    while until not in output:
        ready = readable(descriptor, max(deadline - time.monotonic(), 0))
        data = os.read(descriptor, 65536) if ready else b""
        if not data:
            raise AssertionError(f"it ended or hangs; it printed: {output.decode()}")
        output += data
    return output


def wait_for(condition: object, what: str, seen: Sequence[object] = ()) -> None:
    """Poll a condition until it is true; if it never is, say the last of what it has seen."""
    assert callable(condition)
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < PATIENCE, f"waited in vain until {what}: {seen[-1:]}"
        # What takes long is looked at less often: many a look takes a server longer than a pause.
        time.sleep(min(max(0.02, waited / 20), 0.2))


def stats(path: Path) -> dict[str, object]:
    """What uWSGI's statistics socket tells."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        data = b""
        while part := client.recv(65536):
            data += part
    content: dict[str, object] = json.loads(data)
    return content


def answered(served: Served) -> dict[int, int]:
    """How many requests each worker of a uWSGI has answered, when it is at none.

    It counts one after its client has read the whole answer.
    """

    def look() -> list[dict[str, Any]]:
        workers = stats(served.state / "run" / "stats.sock")["workers"]
        assert isinstance(workers, list)
        return workers

    wait_for(lambda: not any(one["status"] == "busy" for one in look()), "no request runs")
    return {one["id"]: one["requests"] for one in look()}

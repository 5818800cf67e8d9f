"""What breaks during the soak: one thing at a time, each for some seconds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.served import PATIENCE, wait_for
from support.soak.clients import Clients
from support.soak.site import Node, Site, ready

#: Seconds for which something is stopped or away.
SHORT, LONG = 1.0, 3.0
#: Faults of which no client may notice a thing.
SILENT = ("drain", "reload")


@dataclass(frozen=True)
class Fault:
    """One that was had.

    :param name: what broke
    :param began: seconds of the monotonic clock
    :param ended: when it was mended; what was broken may take its time to come back
    :param recovered: when everybody is ready and a login by each way and its validation went well
    """

    name: str
    began: float
    ended: float
    recovered: float


class Faults:
    """Breaks one thing after the other in a thread of its own, those first that were had least.

    :param pause: seconds between a recovery and the next fault
    """

    def __init__(
        self, site: Site, clients: Clients, dice: random.Random, pause: float
    ) -> None:
        self.site, self.clients, self.dice, self.pause = site, clients, dice, pause
        self._start = time.monotonic()
        self.had: list[Fault] = []
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self._counts: Counter[str] = Counter()
        self._ahead = 0.0
        self._one = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._all = dict(self._faults())

    @property
    def names(self) -> list[str]:
        """All that can be had here."""
        return list(self._all)

    @property
    def rounds(self) -> int:
        """How often each was had at least."""
        return min(self._counts[name] for name in self._all)

    @property
    def absent(self) -> list[str]:
        """Those that cannot be had here."""
        return [] if all(node.log_disk for node in self.site.nodes) else ["disk full"]

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def none(self) -> Iterator[None]:
        """No fault is had while the block runs."""
        with self._one:
            yield

    def end(self) -> None:
        """Stop after the one that is being had.

        :raises BaseException: what kept one from being had or from being recovered from
        """
        self.over.set()
        if self._thread.ident is None:
            return
        self._thread.join(4 * PATIENCE)
        if self.failure is not None:
            raise self.failure
        assert not self._thread.is_alive(), "a fault hangs"

    def _run(self) -> None:
        try:
            while not self.over.wait(self.pause):
                least = min(self._counts[name] for name in self._all)
                name = self.dice.choice([x for x in self._all if self._counts[x] == least])
                with self._one:
                    began = time.monotonic()
                    self._all[name]()
                    ended = time.monotonic()
                    self._wait_until_well(name)
                    fault = Fault(name, began, ended, time.monotonic())
                    self.had.append(fault)
                    self._tell(fault)
                    self._counts[name] += 1
        except BaseException as failure:
            self.failure = failure
            self.over.set()

    def _tell(self, fault: Fault) -> None:
        """Print a line while a long run goes on."""
        bad = Counter(
            one.judged for one in self.clients.seen[-2000:]
            if fault.began <= one.moment and one.judged != "good"
        )  # fmt: skip
        told = ", ".join(f"{count} {judged}" for judged, count in bad.items()) or "nobody noticed"
        print(
            f"{(fault.began - self._start) / 60:5.1f} min  {fault.name}:"
            f" {fault.ended - fault.began:.1f} s, well {fault.recovered - fault.ended:.1f} s"
            f" later; {told}",
            flush=True,
        )

    def _wait_until_well(self, name: str) -> None:
        clients = self.clients

        def well() -> bool:
            for node in self.site.nodes:
                node.revive()
            if not all(ready(x) for x in (*(n.deployment for n in self.site.nodes),)):
                return False
            return ready(self.site.balancer) and clients.all_is_well()

        wait_for(well, f"all is well again after: {name}")

    def _faults(self) -> Iterator[tuple[str, Callable[[], None]]]:
        site = self.site
        yield "worker killed", lambda: self._kill_worker(self._node())
        yield "worker stopped", lambda: self._stop(LONG, self._worker(self._node()))
        yield "uWSGI killed", lambda: self._kill_master(self._node())
        yield "node stopped", lambda: self._stop(LONG, *(x.pid for x in self._node().uwsgi()))
        yield "service's worker killed", self._kill_service
        yield "directory killed", self._kill_directory
        yield "directory stopped", self._stop_directory
        yield "directory black-holed", lambda: self._away(
            self.dice.choice(site.directory_proxies), LONG
        )
        yield "Redis killed", site.redis.restart
        yield "Redis stopped", lambda: self._stop(LONG, site.redis.pid)
        yield "Redis black-holed", lambda: self._away(site.redis_proxy, LONG)
        yield "RabbitMQ killed", self._kill_broker
        yield "RabbitMQ stopped", lambda: self._stop(LONG, site.broker.pid or 0)
        yield "MariaDB killed", site.database_lives
        yield "MariaDB stopped", lambda: self._stop(SHORT, site.database_lives.pid)
        yield "clock stepped", self._step_clock
        if not self.absent:
            yield "disk full", lambda: self._fill_disk(self._node())
        yield "drain", lambda: self._drain(self._node())
        yield "reload", lambda: self._reload(self._node())

    def _node(self) -> Node:
        return self.dice.choice(self.site.nodes)

    def _worker(self, node: Node) -> int:
        return self.dice.choice(node.workers()).pid

    def _kill_worker(self, node: Node) -> None:
        _send(self._worker(node), signal.SIGKILL)

    def _kill_master(self, node: Node) -> None:
        _send(node.master.pid, signal.SIGKILL)
        wait_for(lambda: node.gone(), "its workers have ended with it")
        node.revive()

    def _stop(self, seconds: float, *pids: int) -> None:
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)

    def _kill_service(self) -> None:
        served = self.dice.choice(self.site.services)
        workers = [x.pid for x in served.masters("uwsgi").children()]
        _send(self.dice.choice(workers), signal.SIGKILL)

    def _kill_directory(self) -> None:
        server = self.dice.choice(self.site.directories)
        server.kill()
        time.sleep(SHORT)
        server.start()

    def _stop_directory(self) -> None:
        server = self.dice.choice(self.site.directories)
        self._stop(LONG, server.pid or 0)

    def _away(self, proxy: object, seconds: float) -> None:
        proxy.stall()  # type: ignore[attr-defined]
        try:
            time.sleep(seconds)
        finally:
            proxy.forward()  # type: ignore[attr-defined]

    def _kill_broker(self) -> None:
        self.site.broker.kill()
        time.sleep(SHORT)
        self.site.broker.start()

    def _step_clock(self) -> None:
        """Ahead only: a Keystone whose clock is set back does not heed what was revoked since."""
        self._ahead += self.dice.uniform(0.5, 5.0)
        self.site.clock.set(self._ahead)

    def _fill_disk(self, node: Node) -> None:
        with _filled(node.log_disk or Path()):
            time.sleep(LONG)

    def _drain(self, node: Node) -> None:
        node.drained = True
        try:
            _keyfront("drain", str(node.ini))
        finally:
            _keyfront("drain", str(node.ini), "--undo")
            node.drained = False

    def _reload(self, node: Node) -> None:
        _keyfront("reload", str(node.ini))


@contextmanager
def _filled(disk: Path) -> Iterator[None]:
    filler = disk / "full"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 65536)
        yield
    finally:
        filler.unlink(missing_ok=True)


def _keyfront(*words: str) -> None:
    command = [str(Path(sys.prefix, "bin", "keyfront")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)

"""The process that a Keystone of some comparisons runs in: it makes requests of itself.

    OS_KEYSTONE_CONFIG_FILES=... python -m keyfront.benchmarks.compare.keystone_worker [--gevent]
        [--pipeline] [--forks]

There is no web server: requests are made of the WSGI application, so that what is measured is
Keystone and what it calls. It takes and gives JSON, one object a line: see ``keystone_process``,
which starts it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import select
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from .in_process import request

Application = Callable[..., Any]
Told = dict[str, Any]


def count_statements() -> Counter[str]:
    """Return what counts the statements that this process executes from now on, and its writes."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    counts = Counter(statements=0, writes=0)

    def count(connection: Any, cursor: Any, statement: str, *others: object) -> None:
        if statement != "BEGIN":  # SQLite's, which others send with the first statement
            counts["statements"] += 1
            counts["writes"] += statement.startswith(("INSERT", "UPDATE", "DELETE"))

    event.listen(Engine, "before_cursor_execute", count)
    return counts


def make_domain(name: str) -> None:
    """Make a domain.

    Keystone sets its domains' drivers up once, when it is first asked for a user: for domains that
    are there by then. So it cannot be asked for this by a request, which somebody has to log in
    for.
    """
    from keystone.common.provider_api import ProviderAPIs

    made = {"id": uuid.uuid4().hex, "name": name, "enabled": True}
    ProviderAPIs.resource_api.create_domain(made["id"], made)


def driver_of(domain: str) -> Any:
    """Return the identity driver of a domain; somebody of it must have logged in."""
    from keystone.common.provider_api import ProviderAPIs

    found = ProviderAPIs.resource_api.get_domain_by_name(domain)["id"]
    return ProviderAPIs.identity_api._select_identity_driver(found)


def check(driver: Any, pair: tuple[str, str]) -> Told:
    """Have a driver do its part of a login by a user's id: it finds the user and binds as them."""
    begun = time.process_time()
    driver.authenticate(*pair)
    return _told(200, "", "", time.process_time() - begun)


def _told(status: int, token: str, body: str, cpu: float) -> Told:
    return {"status": status, "token": token, "body": body, "cpu": cpu}


def timed(step: Callable[[Any], Told], arguments: list[Any], *, at_once: bool) -> Told:
    """Call with each argument, in turn or each in a thread (or greenlet) of its own.

    :returns: what each gives, or an answer 500 for an exception; the seconds that all took
        together, and the CPU time of this process
    """

    def call(argument: Any) -> Told:
        try:
            return step(argument)
        except Exception as error:
            return _told(500, "", f"{type(error).__name__}: {error}", 0)

    cpu, start = time.process_time(), time.perf_counter()
    if at_once:
        with ThreadPoolExecutor(len(arguments)) as pool:
            answers = list(pool.map(call, arguments))
        cpu = time.process_time() - cpu
    else:
        answers = list(map(call, arguments))
        # not what it takes to make a request
        cpu = sum(answer["cpu"] for answer in answers)
    return {"answers": answers, "seconds": time.perf_counter() - start, "cpu": cpu}


class Worker:
    """A Keystone that is loaded, and does what it is told.

    :param application: the WSGI application
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._counts = count_statements()
        self._master: Any = None

    def do(self, told: Told) -> Told:
        """Do what one line tells."""
        if "make domain" in told:
            make_domain(told["make domain"])
            return {}
        if "authenticate" in told:
            checked = partial(check, driver_of(told["domain"]))
            return timed(checked, told["authenticate"], at_once=told["at_once"])
        if len(told["requests"]) > 1:
            # a single one is not measured
            gc.collect()
        step = self._ask_fresh if told["fresh"] else self._ask
        found = timed(step, told["requests"], at_once=told["at_once"])
        for name in self._counts:
            found[name] = sum(answer[name] for answer in found["answers"])
        return found

    def _ask(self, wanted: list[Any]) -> Told:
        before = self._counts.copy()
        *arguments, subject = wanted
        answer = request(self._application, *arguments, subject=subject)
        told = _told(answer.status, answer.token, answer.body.decode(), answer.cpu)
        return told | {name: count - before[name] for name, count in self._counts.items()}

    def _ask_fresh(self, wanted: list[Any]) -> Told:
        self._master.send(wanted)
        told: Told = self._master.recv()
        return told

    def fork_master(self) -> None:
        """Fork a process that answers nothing itself, and forks a worker for each request."""
        self._master, pipe = multiprocessing.Pipe()
        if os.fork():
            pipe.close()
            return
        self._master.close()
        gc.collect()
        gc.freeze()
        while True:
            try:
                wanted = pipe.recv()
            except EOFError:
                os._exit(0)
            pid = os.fork()
            if not pid:
                pipe.send(self._ask(wanted))
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                os._exit(1)  # it has said why


def answers() -> IO[str]:
    """Return this process's way to who asks it; what else it prints goes to its log from now on."""
    found = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return found


def serve(worker: Worker, lines: IO[str], out: IO[str]) -> None:
    """Do what comes in, line by line, until it ends."""
    while True:
        # unlike a read, this lets the greenlets of the pools run meanwhile
        select.select([lines], [], [])
        line = lines.readline()
        if not line:
            return
        print(json.dumps(worker.do(json.loads(line))), file=out, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Load Keystone and serve standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gevent", action="store_true", help="patch the process first")
    parser.add_argument("--pipeline", action="store_true", help="as keyfront serves it")
    parser.add_argument("--forks", action="store_true", help="be able to answer by a fresh worker")
    options = parser.parse_args(arguments)
    if options.gevent:
        from gevent import monkey

        monkey.patch_all()
    # Keystone reads them, too
    del sys.argv[1:]
    out = answers()
    application: Application
    if options.pipeline:
        from keyfront.gateway.application import load

        application = load()
    else:
        # Looking through it again and again while it is loaded takes longer than once.
        gc.disable()
        from keystone.server import wsgi

        application = wsgi.initialize_public_application()
        gc.enable()
        gc.collect()
    worker = Worker(application)
    if options.forks:
        if options.pipeline:
            from keyfront.common.fork import registry

            registry.install()
            registry.prepare()
        worker.fork_master()
    print("{}", file=out, flush=True)
    serve(worker, sys.stdin, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The process that a Keystone of the LDAP benchmarks runs in: it asks itself for tokens.

    OS_KEYSTONE_CONFIG_FILES=... python -m keyfront.benchmarks.compare.ldap_worker [--gevent]
        [--pipeline]

There is no web server: requests are made of the WSGI application (stock Keystone's own entry; with
``--pipeline`` keyfront's), so that what is timed is Keystone and its driver. It takes and gives
JSON, one object a line: see ``ldap_keystones``, which starts it. With ``--gevent`` the process is
patched, and requests that are made at once each have a greenlet.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import select
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from keyfront.errors import ServerError

Application = Any


def request(
    application: Application,
    method: str,
    path: str,
    token: str | None = None,
    body: object = None,
) -> tuple[int, str | None, bytes]:
    """Make one request of the application; return status, new token and body."""
    content = json.dumps(body).encode() if body is not None else b""
    query = path.partition("?")
    environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": f"/v3/{query[0]}",
        "QUERY_STRING": query[2],
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "5000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(content)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(content),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if token is not None:
        environ["HTTP_X_AUTH_TOKEN"] = token
    seen: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: object = None
    ) -> None:
        seen.append((status, headers))

    answer = application(environ, start_response)
    text = b"".join(answer)
    close = getattr(answer, "close", None)
    if close is not None:
        close()
    status, headers = seen[-1]
    given = {name.lower(): value for name, value in headers}.get("x-subject-token")
    return int(status[:3]), given, text


def ask_for_token(application: Application, body: object) -> None:
    """Make one login, which must succeed."""
    status, token, _ = request(application, "POST", "auth/tokens", None, body)
    if status != 201 or not token:
        raise ServerError(f"a login is answered with {status}")


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


def check_password(driver: Any, pair: tuple[str, str]) -> None:
    """Have a driver do its part of a login by a user's id: it finds the user and binds as them."""
    driver.authenticate(*pair)


def timed(step: Callable[[Any], object], arguments: list[Any], *, at_once: bool) -> dict[str, Any]:
    """Call with each argument, in turn or each in a thread (or greenlet) of its own.

    Gives the seconds that all took together, the CPU time of this process, and the failures.
    """
    failures: list[str] = []

    def call(argument: Any) -> None:
        try:
            step(argument)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    cpu, start = time.process_time(), time.perf_counter()
    if at_once:
        threads = [threading.Thread(target=call, args=(one,)) for one in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for one in arguments:
            call(one)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "failures": failures}


def serve(application: Application, lines: IO[str], answers: IO[str]) -> None:
    """Do what comes in, line by line, until it ends."""
    while True:
        # unlike a read, this lets the greenlets of the pools run meanwhile
        select.select([lines], [], [])
        line = lines.readline()
        if not line:
            return
        told = json.loads(line)
        done: dict[str, Any] = {}
        if "make domain" in told:
            make_domain(told["make domain"])
        elif "logins" in told:
            step = partial(ask_for_token, application)
            done = timed(step, told["logins"], at_once=told["at_once"])
        elif "authenticate" in told:
            step = partial(check_password, driver_of(told["domain"]))
            done = timed(step, told["authenticate"], at_once=told["at_once"])
        else:
            status, token, text = request(application, *told["request"])
            done = {"status": status, "token": token, "body": json.loads(text or b"{}")}
        answers.write(json.dumps(done) + "\n")
        answers.flush()


def main(arguments: list[str] | None = None) -> int:
    """Load Keystone and serve standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gevent", action="store_true", help="patch the process first")
    parser.add_argument("--pipeline", action="store_true", help="as keyfront serves it")
    options = parser.parse_args(arguments)
    if options.gevent:
        from gevent import monkey

        monkey.patch_all()
    # Keystone reads them, too
    del sys.argv[1:]
    # whatever it prints is no answer
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    application = importlib.import_module(
        "keyfront.gateway.wsgi" if options.pipeline else "keystone.wsgi.api"
    ).application
    answers.write("{}\n")
    answers.flush()
    serve(application, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Logins of those who are honest, and a flood of others, at a Keystone that limits logins."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

from keyfront.gateway.node.login_turns import MUCH
from support.keystone_world import User
from support.served import PATIENCE, Served, wait_for

# At a time, each from an address of its own; more than turns and threads.
ATTACKERS = 8
# Seconds between an answer and the next attempt: without, attackers alone occupy all cores.
BREATH = 0.01
# What is refused here: nothing of a password is hashed before.
REFUSALS = (429, 503)


def ask(
    served: Served, source: str, method: str, body: object = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, Any]:
    """Send one request from an address of this machine."""
    connection = HTTPConnection(
        "127.0.0.1", served.port, timeout=PATIENCE, source_address=(source, 0)
    )
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, "/v3/auth/tokens", data, sent)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read() or b"null")


def log_in(served: Served, source: str, user: User | str, password: str = "") -> Any:
    return ask(served, source, "POST", _login(user, password))


def _login(user: User | str, password: str = "") -> dict[str, Any]:
    if isinstance(user, User):
        who: dict[str, object] = {"id": user.id, "password": password or user.password}
    else:
        who = {"name": user, "domain": {"id": "default"}, "password": password}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": who}}}}


def login_environ(source: str, user: User | str) -> dict[str, Any]:
    """A login as the server sees it."""
    body = json.dumps(_login(user)).encode()
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/v3/auth/tokens",
        "REMOTE_ADDR": source,
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
    }


class Known:
    """A user who has logged in from an address, and may do so again at any time.

    But not if his login took more than a second, as on a busy machine it may: then he has taken
    much, and is refused until half of it is forgotten. What is refused for that is counted.
    """

    def __init__(self, served: Served, user: User, address: str) -> None:
        self.user, self.address = user, address
        self.refused = 0
        self.served = served
        began = time.monotonic()
        answer = log_in(served, address, user)
        assert answer[0] == 201, (answer[0], answer[2])
        self._took = time.monotonic() - began

    def logs_in(self) -> None:
        """Log in, while others are refused."""
        began = time.monotonic()
        while (status := log_in(self.served, self.address, self.user)[0]) != 201:
            assert status in REFUSALS and self._took >= MUCH / 2, (status, self._took)
            self.refused += 1
            assert time.monotonic() - began < PATIENCE
        self._took += time.monotonic() - began


class Flood:
    """Logins with wrong passwords, each from another address, and how they were answered."""

    def __init__(self, served: Served, users: list[User | str]) -> None:
        self.served = served
        self.users = users
        self.over = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[object] = []
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._send) for _ in range(ATTACKERS)]

    def _send(self) -> None:
        while not self.over.is_set():
            number = next(self._numbers)
            source = f"127.{number >> 14 & 63 | 64}.{number >> 7 & 127}.{number % 127 + 1}"
            try:
                status, headers, body = log_in(
                    self.served, source, self.users[number % len(self.users)], "wrong"
                )
            except (OSError, http.client.HTTPException):
                continue  # its worker was killed
            finally:
                self.over.wait(BREATH)
            self.statuses[status] += 1
            if status in REFUSALS:
                right = body["error"]["code"] == status and headers["Retry-After"] == "2"
            else:
                right = status == 401
            if not right:
                self.wrong.append((status, body))

    def refused(self) -> int:
        return sum(self.statuses[status] for status in REFUSALS)

    def more(self, count: int) -> None:
        """Wait until as many more were refused."""
        before = self.refused()
        wait_for(lambda: self.refused() >= before + count, "they are refused", [self.statuses])

    @contextmanager
    def under_way(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            self.more(2 * ATTACKERS)
            yield
        finally:
            self.over.set()
            for thread in self._threads:
                thread.join()
        assert not self.wrong, self.wrong[:3]

"""Keystones in processes of their own, without a web server: what they are asked, and it took."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from keyfront.errors import ServerError

from ..lineups.keystone import VALIDATION, Admin
from ..servers.processes import LineProcess, told


class Request(NamedTuple):
    """A request.

    :ivar path: the path, and the query behind a question mark
    :ivar subject: the token that it is about
    """

    method: str
    path: str
    token: str | None = None
    body: object = None
    subject: str | None = None


class Answers(NamedTuple):
    """Answers to requests, all good, and what they took.

    :ivar tokens: the token that each issued; empty for none
    :ivar bodies: the JSON of each
    :ivar seconds: seconds that all took together
    :ivar cpu: CPU seconds of the process for them
    :ivar statements: statements that it executed
    :ivar writes: those of them that write
    """

    tokens: list[str]
    bodies: list[Any]
    seconds: float
    cpu: float
    statements: int = 0
    writes: int = 0


class KeystoneProcess:
    """A Keystone that is asked by its standard input; see ``keystone_worker``."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process
        process.line()

    def make_domain(self, name: str) -> None:
        """Have it make a domain, before anybody has logged in."""
        self._process.ask(json.dumps({"make domain": name}))

    def ask(
        self, requests: Sequence[Request], *, at_once: bool = False, fresh: bool = False
    ) -> Answers:
        """Have it answer requests, in turn.

        :param at_once: true to have each in a thread (or greenlet) of its own
        :param fresh: true to have each in a process of its own, which has answered nothing
        """
        what = {"requests": list(requests), "at_once": at_once, "fresh": fresh}
        return self._answers(what, [f"{one.method} {one.path}" for one in requests])

    def logins(self, bodies: Sequence[object], *, at_once: bool = False) -> Answers:
        """Have it give a token for each body of a login."""
        requests = [Request("POST", VALIDATION, body=body) for body in bodies]
        return self.ask(requests, at_once=at_once)

    def authenticate(
        self, domain: str, pairs: Sequence[tuple[str, str]], *, at_once: bool = False
    ) -> Answers:
        """Have the driver of a domain find users and check their passwords, and nothing else.

        :param pairs: identifiers of users, with their passwords
        """
        what = {"authenticate": list(pairs), "domain": domain, "at_once": at_once}
        return self._answers(what, [f"login of {name}" for name, _ in pairs])

    def request(
        self, method: str, path: str, token: str | None = None, body: object = None
    ) -> dict[str, Any]:
        """Make one request; return ``token`` and ``body`` of the answer.

        :param path: its path behind ``/v3/``
        """
        found = self.ask([Request(method, f"/v3/{path}", token, body)])
        return {"token": found.tokens[0], "body": found.bodies[0]}

    def admin(self, token: str) -> Admin:
        """Return who makes things in it, with an administrator's token."""
        return Admin(lambda method, path, body: self.request(method, path, token, body)["body"])

    def _answers(self, what: Mapping[str, object], names: Sequence[str]) -> Answers:
        found = json.loads(self._process.ask(json.dumps(what)))
        answers = found.pop("answers")
        for name, one in zip(names, answers, strict=True):
            if not 200 <= one["status"] < 300:
                raise ServerError(
                    f"{self._process.name} answers {name} with {one['status']}: "
                    f"{one['body'][-200:]} {self._process.tail()}"
                )
        bodies = [json.loads(one["body"] or "null") for one in answers]
        return Answers([one["token"] for one in answers], bodies, **found)


@contextmanager
def keystone_process(
    name: str, log: Path, environment: Mapping[str, str], *options: str
) -> Iterator[KeystoneProcess]:
    """Run a Keystone until the block ends.

    :param name: the Keystone, in errors
    :param environment: the variables that name its configuration, besides those of this process
    :param options: the options of ``keystone_worker``
    """
    command = [sys.executable, "-m", f"{__package__}.keystone_worker", *options]
    with told(command, {**os.environ, **environment}, name=name, log=log) as running:
        yield KeystoneProcess(running)

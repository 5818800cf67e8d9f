"""The users and services of the cloud's mix: made for it and removed after it, or named in a file.

What is made lies in a domain of its own with a name that nobody has, so that removing the domain
removes all of it. It is looked for by that name, so that what was made while the answer was lost is
removed, too. Passwords are random and never leave this process.
"""

from __future__ import annotations

import json
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyfront.cli.credentials import login
from keyfront.common import json_text
from keyfront.errors import KeyfrontError, OptionError, ServerError

from .cloud_client import LOST, Answer, Client

PREFIX = "keyfront-bench-"
"""How the domains that are made begin."""

_DESCRIPTION = "made by keyfront bench cloud, which removes it; nothing else is in it"
_MEMBER = ("member", "reader", "_member_")
_SERVICE = ("service", "admin")
_ONE, _OTHER, _SERVICES = "one", "other", "services"
# Seconds for which a server that does not answer is asked again to remove what was made.
_PATIENCE = 20.0
# Bytes of a file with users.
_MOST = 1 << 20
_FILE = "--users-file"
_WANTED = 'an object with "users" and, if wanted, "services", lists of objects'


@dataclass(frozen=True, eq=False)
class Account:
    """Somebody who logs in.

    :param auth: the ``auth`` object of the request; holds the password
    :param other_project: the project of re-scopes; ``None`` to find one by asking
    """

    name: str
    auth: dict[str, Any] = field(repr=False)
    other_project: str | None = None


@dataclass(frozen=True)
class Population:
    """The users and services that take part.

    :param users: log in, and re-scope
    :param services: validate
    """

    users: Sequence[Account]
    services: Sequence[Account]


class Domain:
    """A domain of our own in a Keystone.

    :param client: asks as its credentials say
    :param service_role: the role of services; ``None`` for the first of ``service`` and ``admin``
    :ivar left: the things that could not be removed, and how to; empty if nothing is left
    """

    def __init__(self, client: Client, *, service_role: str | None = None) -> None:
        self.name = f"{PREFIX}{secrets.token_hex(8)}"
        self.left = ""
        self._client = client
        self._service_role = service_role
        self._tried = False

    def _token(self) -> str:
        return self._client.log_in(self._client.credentials.auth, "who makes the users")[0]

    def make(self, users: int, services: int) -> Population:
        """Make the domain, its projects and its users.

        :raises ServerError: one cannot be made
        """
        token = self._token()
        roles = self._roles(token)
        self._tried = True
        domain = self._add(token, "/domains", "domain", name=self.name, description=_DESCRIPTION)
        projects = {
            name: self._add(token, "/projects", "project", name=name, domain_id=domain)
            for name in (_ONE, _OTHER, _SERVICES)
        }

        def account(name: str, role: str, *granted: str) -> Account:
            # what rules of passwords ask for as a rule, and what bcrypt takes
            password = f"{secrets.token_urlsafe(32)}aA1!"
            # who has to change a new password could not log in
            options = {"ignore_change_password_upon_first_use": True}
            user = self._add(
                token, "/users", "user",
                name=name, password=password, domain_id=domain, options=options,
            )
            for project in granted:
                grant = f"/projects/{projects[project]}/users/{user}/roles/{role}"
                self._client.demand("PUT", grant, token)
            who = {"user_id": user, "password": password, "project_id": projects[granted[0]]}
            return Account(name, login(who, "{}"), projects[_OTHER])

        member, service = roles
        return Population(
            [account(f"user{number}", member, _ONE, _OTHER) for number in range(users)],
            [account(f"service{number}", service, _SERVICES) for number in range(services)],
        )

    def _roles(self, token: str) -> tuple[str, str]:
        answer = self._client.ask("GET", "/roles", token)
        self._check(answer, "roles cannot be listed")
        found = answer.content.get("roles", [])
        ids = {role["name"]: role["id"] for role in found}
        wanted = (_MEMBER, (self._service_role,) if self._service_role else _SERVICE)
        chosen = [next((ids[name] for name in names if name in ids), None) for names in wanted]
        for names, role in zip(wanted, chosen, strict=True):
            if role is None:
                known = ", ".join(sorted(ids)) or "none"
                raise ServerError(
                    f"{self._client.url}: has no role {' or '.join(names)}, only {known}"
                )
        return str(chosen[0]), str(chosen[1])

    def _add(self, token: str, path: str, kind: str, **values: object) -> str:
        answer = self._client.ask("POST", path, token, {kind: values})
        if kind == "domain" and 400 <= answer.status < 500:
            self._tried = False
        self._check(answer, f"a {kind} was not made")
        return str(answer.content[kind]["id"])

    def _check(self, answer: Answer, failed: str) -> None:
        said = f"{self._client.url}: {failed}"
        if answer.failure.startswith(LOST):
            raise ServerError(f"{said}: {answer.failure}")
        if answer.failure:
            raise ServerError(
                f"{said}, Keystone answers {answer.status}; give the credentials of an "
                f"administrator, or users that are there by {_FILE}"
            )

    def remove(self) -> None:
        """Remove the domain with all that is in it, if it was made; never fails but by a signal.

        A server that is away is asked for some 20 seconds, then :attr:`left` says what is left.
        """
        if not self._tried:
            return
        self.left = (
            f"not removed from {self._client.url}: the domain {self.name} with its projects and "
            f"users; remove it by: openstack domain set --disable {self.name} && openstack domain "
            f"delete {self.name}"
        )
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._remove()
                self.left = ""
                return
            except KeyfrontError as error:
                if time.monotonic() > deadline:
                    self.left += f" ({error})"
                    return
            time.sleep(1)

    def _remove(self) -> None:
        token = self._token()
        found = self._client.demand("GET", f"/domains?name={self.name}", token)
        for domain in found.get("domains", []):
            # Keystone without the filter would list others
            if domain["name"] == self.name:
                place = f"/domains/{domain['id']}"
                self._client.demand("PATCH", place, token, {"domain": {"enabled": False}})
                self._client.demand("DELETE", place, token)


@contextmanager
def made(
    client: Client, users: int, services: int, say: Callable[[str], None], service_role: str | None
) -> Iterator[Population]:
    """Users and services for the block, whichever way it ends.

    :param say: told what could not be removed, and how it can be
    :raises ServerError: they cannot be made; or they could not be removed, and nothing else failed
    """
    domain = Domain(client, service_role=service_role)
    failed = True
    try:
        yield domain.make(users, services)
        failed = False
    finally:
        try:
            domain.remove()
        finally:
            # also if a second Ctrl-C ended that
            if domain.left and failed:
                say(domain.left)
    if domain.left:
        raise ServerError(domain.left)


def read(path: Path, client: Client, services: int) -> Population:
    """Return the users of a file: JSON, ``users`` and ``services``, each with the keys that the
    section ``auth`` of ``clouds.yaml`` has. Without services the credentials' own user is all.

    :param services: number of services, if the file has none
    :raises OptionError: the file cannot be used
    """
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise OptionError(_FILE, path, "readable by its owner only; chmod 600 makes it")
            content = json_text.parse(file.read(_MOST))
    except OSError as error:
        raise OptionError(_FILE, path, f"a file that can be read: {error.strerror}") from None
    except ValueError as error:
        # of what is no JSON it would quote nothing, but of bytes that are no text it would
        place = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise OptionError(_FILE, path, f"JSON{place}") from None
    if not isinstance(content, dict) or not {"users"} <= set(content) <= {"users", "services"}:
        raise OptionError(_FILE, path, _WANTED)
    accounts = {part: _accounts(path, part, found) for part, found in content.items()}
    own = [Account("the credentials' user", client.credentials.auth)] * services
    return Population(accounts["users"], accounts.get("services", own))


def _accounts(path: Path, part: str, found: object) -> list[Account]:
    if not isinstance(found, list) or not found:
        raise OptionError(_FILE, path, _WANTED)
    accounts = []
    for number, values in enumerate(found):
        if not isinstance(values, dict) or not all(isinstance(x, str) for x in values.values()):
            raise OptionError(_FILE, path, _WANTED)
        try:
            accounts.append(Account(f"{part}[{number}]", login(values, "{}")))
        except OptionError as error:
            where = f"{path}, {part}[{number}]"
            raise OptionError(_FILE, where, f"with its {error.option}, as in clouds.yaml") from None
    return accounts

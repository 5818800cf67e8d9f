"""Requests of a log, made to work on another Keystone: with its tokens, and its ids in their paths.

Only the form of a request is kept; docs/benchmarks.md says why.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keyfront.errors import ServerError

from ..lineups.keystone import VALIDATION, ask, log_in
from ..lineups.keystone import login as password_login
from .access_log import Entry
from .generators import wire

_ID = re.compile(r"^(?:[0-9a-f]{32}|[0-9a-f]{64}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$")
_QUERY_ID = re.compile(r"((?:^|[&?])(?:scope\.)?(\w+?)(?:_|\.)id=)([0-9a-f-]{32,64})(?=&|$)")
# What can be sent as it is (RFC 9112 section 3.2.1), and asks no other server.
_TARGET = re.compile(r"/(?!/)[!-~]*")
_COLLECTIONS = ("projects", "users", "domains", "roles", "groups", "services", "endpoints")
_UNKNOWN = "0" * 32
_NOBODYS = "nobody-issued-this"
_LOGIN = "POST"
# Tokens that are asked about: several, so that a cache has to hold more than one answer.
TOKENS = 5


class Form(NamedTuple):
    """A request in general form: its ids are named, its tokens are gone.

    :param refused: true if the answer was 401
    :param missing: true if it was 404
    """

    method: str
    target: str
    refused: bool
    missing: bool


def form(entry: Entry) -> Form | None:
    """Return the form of a request; ``None`` if it would change the target, or asks a proxy."""
    if not _TARGET.fullmatch(entry.target):
        return None  # of whatever a client sent, or somebody wrote into the log
    path, mark, query = entry.target.partition("?")
    login = entry.method == _LOGIN and path == VALIDATION
    if entry.method not in ("GET", "HEAD") and not login:
        return None
    parts = path.split("/")
    for place in range(1, len(parts)):
        if _ID.match(parts[place]):
            parts[place] = f"{{{parts[place - 1]}}}"
    query = _QUERY_ID.sub(lambda match: f"{match[1]}{{{match[2]}s}}", query)
    target = "/".join(parts) + mark + query
    return Form(entry.method, target, entry.status == 401, entry.status == 404)


class Identity(NamedTuple):
    """The ids that a target knows, and tokens for it.

    :param ids: by collection
    :param login: the body of a login
    """

    url: str
    caller: str
    subjects: Sequence[str]
    ids: Mapping[str, str]
    login: Mapping[str, Any]


def identity(url: str, login: dict[str, Any]) -> Identity:
    """Log in to a target and look around."""
    caller = log_in(url, login)
    subjects = [log_in(url, login) for _ in range(TOKENS)]
    ids: dict[str, str] = {}
    for name in _COLLECTIONS:
        try:
            found = ask(url, "GET", f"/v3/{name}", caller)[name]
        except (ServerError, KeyError):
            continue
        if found:
            ids[name] = str(found[0]["id"])
    return Identity(url, caller, subjects, ids, login)


class Wires:
    """The requests of a replay as one target gets them."""

    def __init__(self, target: Identity) -> None:
        self._target = target
        self._places: dict[tuple[Form, int], int] = {}
        self._turn = 0
        self.wires: list[bytes] = []
        self.logged: list[Counter[int]] = []

    def place(self, one: Form, status: int) -> int:
        """Return where the request for a form is in :attr:`wires`; validations take tokens in turn.

        :param status: the status of the log, noted in :attr:`logged`
        """
        turn = 0
        validation = one.target.startswith(VALIDATION) and one.method != _LOGIN
        if validation and not (one.refused or one.missing):
            self._turn = turn = (self._turn + 1) % len(self._target.subjects)
        key = (one, turn)
        if key not in self._places:
            self._places[key] = len(self.wires)
            self.wires.append(self._made(one, turn))
            self.logged.append(Counter())
        place = self._places[key]
        self.logged[place][status] += 1
        return place

    def _made(self, one: Form, turn: int) -> bytes:
        target = self._target
        known = {} if one.missing else target.ids
        path = re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], _UNKNOWN), one.target)
        url = f"{target.url}{path}"
        if one.method == _LOGIN:
            # a wrong password would count against the user, who may then be locked out
            login = password_login(_NOBODYS, _NOBODYS, None) if one.refused else target.login
            return wire(_LOGIN, url, {}, json.dumps(login).encode())
        headers = {"X-Auth-Token": _NOBODYS if one.refused else target.caller}
        if path.startswith(VALIDATION):
            headers["X-Subject-Token"] = _NOBODYS if one.missing else target.subjects[turn]
        return wire(one.method, url, headers)


def as_logged(
    logged: Sequence[Counter[int]], found: Iterable[tuple[int, Mapping[str, int]]]
) -> float:
    """Return the share of answers of the class (2xx, 4xx …) that the log has, 0 to 1.

    :param found: the answers by status, of each place
    """
    matched, everything = 0, sum(counts.total() for counts in logged)
    for place, statuses in found:
        wanted = _classes(logged[place])
        seen = _classes({int(status): count for status, count in statuses.items()})
        matched += sum(min(count, seen[one]) for one, count in wanted.items())
    return matched / everything if everything else 0.0


def _classes(statuses: Mapping[int, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for status, count in statuses.items():
        found[status // 100] += count
    return found

"""Asks a Keystone what a cloud asks: logins, first validations, repeated ones, re-scopes.

The mix is told in docs/benchmarks.md. The first round fills caches and is not counted: a cloud has
been up for long.
"""

from __future__ import annotations

import itertools
import operator
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keyfront.errors import ServerError

from .. import results
from ..results import Cell
from .cloud_client import LOST, TOKENS, Answer, Client, Ready
from .cloud_users import Account, Population
from .measured import percentile

LOGINS, FIRST, REPEATED, RESCOPES = PHASES = ("logins", "first", "repeated", "re-scopes")
WHOLE = "whole"
"""All of them together."""
LABELS = {
    "logins": "logins",
    "first": "first validations",
    "repeated": "repeated ones",
    "re-scopes": "re-scopes",
    WHOLE: "the whole mix",
}
"""The phases in words."""
TIMES = 3
"""How often each service validates a token again."""

# Requests in a row without an answer after which a server is lost.
_LOST = 8
# Logins that tell what the hash of a password takes.
_ALONE = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The number of users, services and requests.

    :param users: the number of users that log in, 1 to 1000
    :param services: the number of services that validate each token, 1 to 100
    :param rounds: the number of rounds that are counted, 1 to 1000
    :param clients: requests at once, 1 to 256
    :param timeout: seconds that an answer is waited for, 1 to 3600
    """

    users: int = 10
    services: int = 5
    rounds: int = 3
    clients: int = 4
    timeout: int = 60


@dataclass
class Phase:
    """A kind of request in one round, or in several.

    :ivar latencies: good answers by their microseconds
    :ivar failures: the other requests, by kind: ``status 503``
    :ivar seconds: for which it went on
    :ivar cpu: CPU seconds of the server; ``None`` where it is not ours
    :ivar asking: CPU seconds of the process that asks
    """

    latencies: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float | None = None
    asking: float = 0.0

    @property
    def good(self) -> int:
        """Answers as they should be."""
        return self.latencies.total()

    @property
    def count(self) -> int:
        """Requests."""
        return self.good + self.failures.total()

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return self.good / self.seconds if self.seconds else 0.0

    def __add__(self, other: Phase) -> Phase:
        known = self.cpu is not None and other.cpu is not None
        return Phase(
            self.latencies + other.latencies,
            self.failures + other.failures,
            self.seconds + other.seconds,
            (self.cpu or 0) + (other.cpu or 0) if known else None,
            self.asking + other.asking,
        )

    def milliseconds(self, fraction: float) -> float:
        """Return within how many of them this part of the good answers came; 0 without any."""
        return percentile(self.latencies, fraction)

    @property
    def cpu_milliseconds(self) -> float | None:
        """CPU of the server for a request."""
        return None if self.cpu is None or not self.count else 1000 * self.cpu / self.count

    @property
    def most(self) -> float | None:
        """Requests a second for which who asks takes a whole core."""
        return self.count / self.asking if self.asking else None

    def sample(self) -> dict[str, Any]:
        """Return it for a result."""
        return {
            "requests": self.count,
            "good": self.good,
            "failures": dict(sorted(self.failures.items())),
            "seconds": round(self.seconds, 4),
            "rate": round(self.rate, 2),
            "p50_ms": self.milliseconds(0.50),
            "p95_ms": self.milliseconds(0.95),
            "p99_ms": self.milliseconds(0.99),
            "server_cpu": None if self.cpu is None else round(self.cpu, 3),
            "asking_cpu": round(self.asking, 3),
        }


#: Of one server in one round, by phase.
Round = dict[str, Phase]


def seconds(one: Round) -> float:
    """Return how long a round took."""
    return sum(phase.seconds for phase in one.values())


def total(rounds: Sequence[Round]) -> Round:
    """Return the phases of several rounds together, and ``whole``, which is all of them."""
    found = {name: sum((one[name] for one in rounds[1:]), rounds[0][name]) for name in PHASES}
    first, *others = found.values()
    return {**found, WHOLE: sum(others, first)}


def samples(rounds: Sequence[Round], **more: Any) -> list[results.Sample]:
    """Return every phase of every round, raw."""
    return [
        {**more, "round": number, "phase": name, **phase.sample()}
        for number, one in enumerate(rounds, 1)
        for name, phase in one.items()
    ]


def digits(value: float | None) -> Cell:
    """Return a figure with three digits that mean something."""
    if value is None:
        return None
    return round(value) if value >= 100 else float(f"{value:.3g}")


# The part of a core from which on a rate is no longer the server's alone.
_NEAR = 0.5


def most_in_words(rounds: Sequence[Round]) -> str:
    """Return how much CPU asking takes, and which rates may be bounded by who asks."""
    everything = total(rounds)
    most = everything[REPEATED].most
    if most is None:
        return ""
    near = [
        LABELS[name]
        for name in PHASES
        if (one := everything[name].most) is not None and everything[name].rate > _NEAR * one
    ]
    text = f"Who asks takes a whole core for {digits(most):g} repeated validations a second"
    return f"{text}; the server may do more {', '.join(near)} than told." if near else f"{text}."


class Alone(NamedTuple):
    """One request at a time, in milliseconds: medians.

    :ivar more: the time of a login beyond that of a re-scope, mostly that of the password's hash
    """

    login: float
    rescope: float
    more: float


class Mix:
    """Asks one server.

    :param client: its own; nobody else may ask by it
    :param population: the users and services that take part
    :param clients: requests at once
    :param cpu: tells the CPU seconds of the server up to now; ``None`` where it is not ours
    """

    def __init__(
        self, client: Client, population: Population, clients: int, cpu: Callable[[], float] | None
    ) -> None:
        self._client = client
        self._population = population
        self._clients = clients
        self._cpu = cpu
        self._lost = 0
        self._why = ""
        self._others: dict[Account, str] = {}

    def prepare(self) -> Alone:
        """Let everybody log in once, and find out what a login takes beside a re-scope.

        The first login of a day writes, and of two at once stock Keystone on SQLite refuses one.

        :raises ServerError: somebody cannot log in, has no project, or may not validate
        """
        services = [self._log_in(one)[0] for one in self._population.services]
        for user in self._population.users:
            token, said = self._log_in(user)
            project = said.get("project", {}).get("id")
            if project is None:
                raise ServerError(f"{self._client.url}: {user.name} has no project to log in to")
            found = self._client.demand("GET", "/auth/projects", token).get("projects", [])
            ids = [str(one["id"]) for one in found if one.get("enabled", True)]
            # the same one where there is no other
            other = next((one for one in ids if one != project), project)
            self._others[user] = user.other_project or other
        for caller in services:
            answer = self._client.ask("GET", TOKENS, caller, subject=token)
            if answer.failure:
                hint = "; a role that may is named by --service-role" * (answer.status == 403)
                raise ServerError(
                    f"{self._client.url}: a service's validation: {answer.failure}{hint}"
                )
        took = [self._alone(user) for user in self._population.users[:_ALONE]]
        login, rescope = (statistics.median(times) for times in zip(*took, strict=True))
        more = max(statistics.median(one - other for one, other in took), 0.0)
        return Alone(round(login, 3), round(rescope, 3), round(more, 3))

    def _log_in(self, account: Account) -> tuple[str, dict[str, Any]]:
        return self._client.log_in(account.auth, account.name)

    def _alone(self, user: Account) -> tuple[float, float]:
        """Return the milliseconds of a login and of a re-scope."""
        answers = [self._client.send(self._login(user))]
        answers.append(self._client.send(self._rescope(user, answers[0].token)))
        for answer in answers:
            if answer.failure:
                raise ServerError(f"{self._client.url}: login of {user.name}: {answer.failure}")
        return 1000 * answers[0].seconds, 1000 * answers[1].seconds

    def _login(self, user: Account) -> Ready:
        return self._client.ready("POST", TOKENS, body={"auth": user.auth})

    def _rescope(self, user: Account, token: str) -> Ready:
        identity = {"methods": ["token"], "token": {"id": token}}
        auth = {"identity": identity, "scope": {"project": {"id": self._others[user]}}}
        return self._client.ready("POST", TOKENS, body={"auth": auth})

    def _validations(
        self, tokens: Sequence[tuple[Account, str]], callers: Sequence[str]
    ) -> list[Ready]:
        return [
            self._client.ready("GET", TOKENS, caller, subject=token)
            for _, token in tokens
            for caller in callers
        ]

    def ask(self) -> Round:
        """Go through the mix once.

        What fails is counted; a user who could not log in has no part in what follows.

        :raises ServerError: the server is lost, or nobody can log in
        """
        users = self._population.users
        callers = [self._log_in(one)[0] for one in self._population.services]
        found: Round = {}
        # not by its own context: that would wait for all that is yet to be asked
        pool = ThreadPoolExecutor(self._clients)
        try:

            def phase(
                name: str, requests: Sequence[Ready], fault: Callable[[Answer], str] = _no_fault
            ) -> list[Answer]:
                answers, taken = self._phase(pool, requests, fault)
                found[name] = found[name] + taken if name in found else taken
                return answers

            answers = phase(LOGINS, [self._login(user) for user in users])
            tokens = _issued(users, answers)
            if not tokens:
                raise ServerError(f"{self._client.url}: nobody can log in: {answers[0].failure}")
            validations = self._validations(tokens, callers)
            phase(FIRST, validations, _no_roles)
            phase(REPEATED, validations * TIMES, _no_roles)
            exchanged = phase(RESCOPES, [self._rescope(user, token) for user, token in tokens])
            others = _issued([user for user, _ in tokens], exchanged)
            phase(FIRST, self._validations(others, callers), _no_roles)
        except BaseException:
            self._client.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return {name: found[name] for name in PHASES}

    def _phase(
        self, pool: ThreadPoolExecutor, requests: Sequence[Ready], fault: Callable[[Answer], str]
    ) -> tuple[list[Answer], Phase]:
        found: list[tuple[int, Answer]] = []
        places = itertools.count()
        texts: dict[bytes, bytes] = {}
        guard = threading.Lock()

        def work() -> None:
            while self._lost < _LOST and (place := next(places)) < len(requests):
                answer = self._client.send(requests[place])
                # All are kept until the end, and most say the same.
                text = texts.setdefault(answer.text, answer.text)
                found.append((place, answer._replace(text=text)))
                with guard:
                    if self._lost < _LOST:  # or it is given up, whoever is answered later
                        self._lost = self._lost + 1 if answer.failure.startswith(LOST) else 0
                        self._why = answer.failure

        before, begun = self._cpu() if self._cpu else None, time.monotonic()
        asking = time.process_time()
        workers = [pool.submit(work) for _ in range(self._clients)]
        wait(workers)
        taken = Phase(seconds=time.monotonic() - begun, asking=time.process_time() - asking)
        if self._cpu and before is not None:
            taken.cpu = self._cpu() - before
        for worker in workers:
            worker.result()
        if self._lost >= _LOST:
            raise ServerError(
                f"{self._client.url}: {_LOST} requests in a row had no answer: {self._why}"
            )
        faults: dict[bytes, str] = {}
        answers = []
        for _, answer in sorted(found, key=operator.itemgetter(0)):
            if not answer.failure:
                if answer.text not in faults:
                    faults[answer.text] = fault(answer)
                answer = answer._replace(failure=faults[answer.text])
            answers.append(answer)
            if answer.failure:
                taken.failures[answer.failure] += 1
            else:
                taken.latencies[round(1e6 * answer.seconds)] += 1
        return answers, taken


def _no_fault(answer: Answer) -> str:
    return ""


def _no_roles(answer: Answer) -> str:
    """Return what is wrong with the answer to a validation; empty if nothing is."""
    said = answer.content.get("token")
    return "" if isinstance(said, dict) and said.get("roles") else "no roles in the token"


def _issued(users: Sequence[Account], answers: Sequence[Answer]) -> list[tuple[Account, str]]:
    pairs = zip(users, answers, strict=True)
    return [(user, one.token) for user, one in pairs if not one.failure and one.token]

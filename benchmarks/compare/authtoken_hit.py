"""Microseconds that a service spends on a token it knows, by the size of the catalog in it.

    python -m keyfront.benchmarks.compare.authtoken_hit [--rounds 6] [--calls 1000]

Sends requests with known tokens through authtoken, in this process, to an application that does
nothing: keyfront's, without a coordinator; keystonemiddleware's with its in-process cache; and the
same with a memcached of this benchmark, at a socket of this machine. The catalogs have 1, 15 and 60
services, the tokens are 100, taken at random. A stand-in for Keystone beneath keystoneauth answers
the first request for each; what comes to it later would be a miss, and an error.

In each round every case is measured once. Prints the medians of
the rounds, with the lowest and the highest, and says of each goal whether it was met; exits with
1 if one was missed. The microseconds depend on the machine: they are only told.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import KeyfrontError, MissingPartError, ServerError

from ..worlds.memcached import memcached_at
from . import goals
from .goals import AUTHTOKEN_GOALS, AUTHTOKEN_MICROSECONDS, MET, MISSED, Goal
from .ratios import Spread, by_round
from .token_hit import call, timed
from .token_stand_in import environ

try:
    import keystonemiddleware.auth_token as stock
    import requests
    from oslo_config import cfg
    from requests.adapters import BaseAdapter
except ModuleNotFoundError as error:  # pragma: no cover - as a host without OpenStack has it
    raise SystemExit(f"authtoken_hit: needs keystonemiddleware, and {error}") from None

from keyfront.middleware.tokens.authtoken.middleware import AuthProtocol

SERVICES = (1, 15, 60)
TOKENS = 100
SEED = 20
KEYFRONT, LOCAL, MEMCACHED = "keyfront", "in-process", "memcached"
CASES = (KEYFRONT, LOCAL, MEMCACHED)
_TOKEN = "gAAAAAB{:0>177}"

Samples = dict[str, list[float]]


def label(case: str, services: int) -> str:
    """Return the name of a case, as the goals have it."""
    return f"{case}, {services} service{'s' if services > 1 else ''}"


class Keystone(BaseAdapter):  # type: ignore[misc, unused-ignore]
    """Answers each validation, beneath keystoneauth's session."""

    def __init__(self, services: int) -> None:
        super().__init__()
        self.calls = 0
        self._services = services

    def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
        """Answer one request."""
        self.calls += 1
        answer = requests.Response()
        answer.request, answer.url, answer.status_code = request, request.url, 200
        answer.raw = io.BytesIO()
        token = request.headers["X-Subject-Token"]
        answer._content = json.dumps({"token": described(token, self._services)}).encode()
        answer.headers["Content-Type"] = "application/json"
        return answer

    def close(self) -> None:
        """There is nothing to close."""


def described(token: str, services: int) -> dict[str, Any]:
    """Return what Keystone says of a token for a project, with a catalog of so many services."""
    domain = {"id": "default", "name": "Default"}
    return {
        "methods": ["password"],
        "user": {
            "domain": domain,
            "id": token[-32:],
            "name": f"user-{token[-3:]}",
            "password_expires_at": None,
        },
        "audit_ids": [token[-22:]],
        "expires_at": "2099-01-01T00:00:00.000000Z",
        "issued_at": "2026-01-01T00:00:00.000000Z",
        "project": {"domain": domain, "id": f"{1:032x}", "name": "project"},
        "is_domain": False,
        "roles": [{"id": f"{role:032x}", "name": f"role-{role}"} for role in range(4)],
        "catalog": [
            {
                "endpoints": [
                    {
                        "id": f"{number:032x}",
                        "interface": interface,
                        "region": "RegionOne",
                        "region_id": "RegionOne",
                        "url": f"http://service-{number}.example.org:8774/v2.1",
                    }
                    for interface in ("public", "internal", "admin")
                ],
                "id": f"{number:032x}",
                "type": f"type-{number}",
                "name": f"service-{number}",
            }
            for number in range(services)
        ],
    }


def request(number: int) -> dict[str, Any]:
    """Return a request with a token, as a server makes it."""
    return environ(
        "GET",
        "/v2.1/servers/detail",
        "127.0.0.1:8774",
        HTTP_USER_AGENT="python-novaclient",
        HTTP_X_AUTH_TOKEN=_TOKEN.format(number),
    )


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answer a request, as the application behind authtoken."""
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


def pipeline(case: str, keystone: Keystone, memcached: str) -> Any:
    """Return one of the candidates, which does not know any token yet."""
    conf = cfg.ConfigOpts()
    conf([], project="authtoken_hit", default_config_files=[], default_config_dirs=[])
    options = {
        "oslo_config_config": conf,
        "www_authenticate_uri": "http://keystone.example.org",
        "auth_version": "v3",
        "auth_type": "admin_token",
        "endpoint": "http://keystone.example.org/v3",
        "token": "service",
        "token_cache_time": "3600",
        **({"memcached_servers": memcached} if case == MEMCACHED else {}),
    }
    made = (AuthProtocol if case == KEYFRONT else stock.AuthProtocol)(service, options)
    made._session.session.mount("http://", keystone)
    return made


def measure(rounds: int, calls: int, memcached: str) -> Samples:
    """Measure every case in every round; microseconds by label.

    :raises ServerError: a request was no hit
    """
    dice = random.Random(SEED)
    cases: list[tuple[str, Any, Keystone]] = []
    samples: Samples = {}
    # Neighbours are those whose ratio is close.
    for case in CASES:
        for services in SERVICES:
            keystone = Keystone(services)
            made = pipeline(case, keystone, memcached)
            for number in range(TOKENS):
                # apart from those of other sizes, which are in the same memcached
                call(made, request(number + services * TOKENS))
            cases.append((label(case, services), made, keystone))
            samples[label(case, services)] = []
    for _ in range(rounds):
        for number, (name, made, keystone) in enumerate(cases):
            first = SERVICES[number % len(SERVICES)] * TOKENS
            numbers = [first + dice.randrange(TOKENS) for _ in range(calls)]
            before = keystone.calls
            samples[name].append(timed(functools.partial(call, made), request, numbers))
            if keystone.calls != before:
                raise ServerError(f"{name}: requests were no hits")
    for _, made, _ in cases:
        made._session.session.close()
    return samples


def judge(samples: Samples) -> dict[Goal, str]:
    """Say of each goal how it was met."""
    found = {}
    for goal in AUTHTOKEN_GOALS:
        sides = samples[goal.first], samples[goal.second]
        # microseconds: the fewer, the higher the rate
        found[goal] = goal.judge(by_round(*(sides[::-1] if goal.figure == "rate" else sides)))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=6, help="how often each case is measured")
    parser.add_argument("--calls", type=int, default=1000, help="requests each time")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.calls) < 1:
        parser.error("--rounds and --calls must be at least 1")
    # What it says of options that its plugin takes, and of its in-process cache.
    logging.disable(logging.WARNING)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="authtoken-hit-", dir=temporary_parent()) as folder,
            memcached_at(Path(folder, "socket")) as memcached,
        ):
            samples = measure(options.rounds, options.calls, memcached)
    except (MissingPartError, KeyfrontError) as error:
        print(f"authtoken_hit: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    print(f"{'a known token':<28}{'us per call':>12}{'lowest':>9}{'highest':>9}")
    for name, found in samples.items():
        times = Spread.of(found)
        print(f"{name:<28}{times.median:>12.2f}{times.low:>9.2f}{times.high:>9.2f}")
    ours = statistics.median(samples[label(KEYFRONT, 15)])
    verdict = MET if ours <= AUTHTOKEN_MICROSECONDS else MISSED
    print(f"goal: <= {AUTHTOKEN_MICROSECONDS:g} us with 15 services: {verdict}")
    verdicts = judge(samples)
    for goal, verdict in verdicts.items():
        print(f"goal: {goal.figure} of {goal.first} / {goal.second} {goal}: {verdict}")
    return 1 if goals.missed(verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())

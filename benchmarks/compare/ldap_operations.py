"""CPU time of a client for a BIND, a search and a connect by LDAPS: ours, python-ldap's, ldap3's.

    python -m keyfront.benchmarks.compare.ldap_operations [--rounds 20]

Each client does the same on one slapd of its own, in turns, every other round in the reverse order:
300 BINDs and 300 searches that find one entry, on one connection without TLS, and 20 times connect
by LDAPS, BIND and close. The process's own time is measured (``time.process_time``), so neither
slapd's nor the way to it counts, and others hardly do. python-ldap has one TLS context for all
connections, as under Keystone; ldap3 is at its fastest (no schema, names not checked) but for its
own TLS context of each connection, which it knows no other way.

Medians over the rounds are printed, and for each other client the ratio, a median over the pairs.
Microseconds depend on the machine: a goal in them that is missed is told, and no error. Ends with
status 1 if the goal for connects, a ratio, was missed: see ``goals.py``.
"""

from __future__ import annotations

import gc
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keyfront.errors import KeyfrontError, MissingPartError, ServerError
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL

from ..worlds.processes import HOST
from ..worlds.slapd import PEOPLE, Slapd, slapd, user_dn, user_name, user_password
from . import comparison
from .goals import LDAP_BIND_MICROSECONDS, LDAP_SEARCH_MICROSECONDS, LDAPS_CONNECT, MET, MISSED
from .ratios import Spread, by_round, in_words

ROUNDS = 20
USERS = 20
# Seconds; nothing here takes that long.
PATIENCE = 10
BIND, SEARCH, CONNECT = "BIND", "search, 1 entry", "connect by LDAPS, BIND"
CALLS = {BIND: 300, SEARCH: 300, CONNECT: 20}
WANTED = ["uid", "cn", "sn", "mail", "description"]
SUBTREE = 2

Step = Callable[[int], object]
Steps = dict[str, Step]



def _filter(number: int) -> str:
    return f"(&(objectClass=inetOrgPerson)(uid={user_name(number)}))"


def _check(found: object, number: int) -> None:
    if found != user_dn(number):
        raise ServerError(f"the search for {user_dn(number)} gave {found}")


def keyfront(server: Slapd, stack: ExitStack) -> Steps:
    """Our own connection."""
    tls = TLS(ca_file=str(server.ca_file))

    def connect(scheme: str, port: int) -> Connection:
        url = ServerURL.parse(f"{scheme}://{HOST}:{port}")
        return Connection.connect(url, tls=tls, connect_timeout=PATIENCE, timeout=PATIENCE)

    kept = connect("ldap", server.plain_port)
    stack.callback(kept.close)

    def bind(number: int) -> None:
        kept.bind(user_dn(number), user_password(number))

    def search(number: int) -> None:
        found = kept.search(PEOPLE, SUBTREE, _filter(number), WANTED)
        _check(found.items[0][0], number)

    def again(number: int) -> None:
        made = connect("ldaps", server.port)
        made.bind(user_dn(number), user_password(number))
        made.close()

    return {BIND: bind, SEARCH: search, CONNECT: again}


def python_ldap(server: Slapd, stack: ExitStack) -> Steps:
    """python-ldap, which stock Keystone uses."""
    try:
        import ldap
    except ImportError:
        raise MissingPartError("python-ldap is missing: pip install keyfront[ldap]") from None
    ldap.set_option(ldap.OPT_X_TLS_CACERTFILE, str(server.ca_file))
    ldap.set_option(ldap.OPT_X_TLS_REQUIRE_CERT, ldap.OPT_X_TLS_DEMAND)
    ldap.set_option(ldap.OPT_X_TLS_NEWCTX, 0)
    kept = ldap.initialize(f"ldap://{HOST}:{server.plain_port}")
    stack.callback(kept.unbind_s)

    def bind(number: int) -> None:
        kept.simple_bind_s(user_dn(number), user_password(number))

    def search(number: int) -> None:
        found = kept.search_s(PEOPLE, SUBTREE, _filter(number), WANTED)
        _check(found[0][0], number)

    def again(number: int) -> None:
        made = ldap.initialize(f"ldaps://{HOST}:{server.port}")
        made.simple_bind_s(user_dn(number), user_password(number))
        made.unbind_s()

    return {BIND: bind, SEARCH: search, CONNECT: again}


def ldap3(server: Slapd, stack: ExitStack) -> Steps:
    """ldap3's own connection."""
    try:
        import ldap3 as library
    except ImportError:
        raise MissingPartError("ldap3 is missing: pip install keyfront[ldap]") from None
    tls = library.Tls(validate=ssl.CERT_REQUIRED, ca_certs_file=str(server.ca_file))

    def connect(port: int, number: int, *, secure: bool) -> Any:
        target = library.Server(
            HOST,
            port,
            use_ssl=secure,
            tls=tls if secure else None,
            get_info=library.NONE,
            connect_timeout=PATIENCE,
        )
        return library.Connection(
            target,
            user_dn(number),
            user_password(number),
            check_names=False,
            auto_referrals=False,
            receive_timeout=PATIENCE,
        )

    kept = connect(server.plain_port, 0, secure=False)
    kept.bind()
    stack.callback(kept.unbind)

    def bind(number: int) -> None:
        if not kept.rebind(user_dn(number), user_password(number), read_server_info=False):
            raise ServerError("ldap3's BIND was refused")

    def search(number: int) -> None:
        kept.search(PEOPLE, _filter(number), dereference_aliases="NEVER", attributes=WANTED)
        _check(kept.response[0]["dn"], number)

    def again(number: int) -> None:
        made = connect(server.port, number, secure=True)
        if not made.bind(read_server_info=False):
            raise ServerError("ldap3's BIND was refused")
        made.unbind()

    return {BIND: bind, SEARCH: search, CONNECT: again}


CLIENTS = {"keyfront": keyfront, "python-ldap": python_ldap, "ldap3": ldap3}

Times = dict[str, dict[str, list[float]]]
"""Microseconds of each round, by operation and client."""


def timed(step: Step, calls: int) -> float:
    """Return microseconds of this process per call."""
    start = time.process_time()
    for number in range(calls):
        step(number % USERS)
    return (time.process_time() - start) / calls * 1e6


def measure(rounds: int) -> Times:
    """Time each operation of each client in each round.

    :raises MissingPartError: slapd, python-ldap or ldap3 is not installed
    :raises ServerError: slapd did not start, or answers otherwise than it should
    """
    times: Times = {name: {client: [] for client in CLIENTS} for name in CALLS}
    with tempfile.TemporaryDirectory(prefix="ldap-operations-") as folder, ExitStack() as stack:
        server = stack.enter_context(slapd(Path(folder), USERS))
        steps = {client: make(server, stack) for client, make in CLIENTS.items()}
        for name in CALLS:
            for client in CLIENTS:
                # whatever is made once is made now
                timed(steps[client][name], 2)
        for number in range(rounds):
            for name, calls in CALLS.items():
                for client in reversed(CLIENTS) if number % 2 else CLIENTS:
                    # each cleans up after itself, and not in another's time
                    gc.collect()
                    times[name][client].append(timed(steps[client][name], calls))
    return times


def table(times: Times) -> str:
    """Return the result as text of at most 100 columns."""
    lines = [f"{'us of CPU':<24}{'':<14}{'median':>10}{'lowest':>10}{'highest':>10}{'ratio':>22}"]
    for name, clients in times.items():
        for client, rounds in clients.items():
            one, text = Spread.of(rounds), ""
            if client != "keyfront":
                times_ours = Spread.of(by_round(rounds, clients["keyfront"]))
                text = f"{times_ours.median:.2f} x keyfront"
            lines.append(
                f"{name if client == 'keyfront' else '':<24}{client:<14}{one.median:>10.1f}"
                f"{one.low:>10.1f}{one.high:>10.1f}{text:>22}"
            )
    return "\n".join(lines)


def judge(times: Times) -> list[tuple[str, str]]:
    """Return each goal in words, and how it was met; the last one is the ratio."""
    found = []
    for name, bound in ((BIND, LDAP_BIND_MICROSECONDS), (SEARCH, LDAP_SEARCH_MICROSECONDS)):
        spent = Spread.of(times[name]["keyfront"]).median
        verdict = MET if spent <= bound else MISSED
        found.append((f"{name} <= {bound:g} us: {spent:.1f}", verdict))
    pairs = by_round(*(times[CONNECT][each] for each in LDAPS_CONNECT[:2]))
    return [*found, in_words(LDAPS_CONNECT, pairs, f"{CONNECT}, ", digits=2)]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; 1 if the ratio was missed, 2 if it cannot be measured."""
    parser = comparison.parser(__doc__)
    parser.add_argument(
        "--rounds", type=comparison.at_least_one, default=ROUNDS, help=f"an even number ({ROUNDS})"
    )
    options = parser.parse_args(arguments)
    try:
        times = measure(options.rounds)
    except KeyfrontError as error:
        print(f"ldap_operations: {error}", file=sys.stderr)
        return 2
    print(table(times))
    verdicts = judge(times)
    print()
    for text, verdict in verdicts:
        print(f"{verdict:<8} {text}")
    return 1 if verdicts[-1][1] == MISSED else 0


if __name__ == "__main__":
    sys.exit(main())

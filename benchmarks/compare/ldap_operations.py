"""CPU time of a client for a BIND, a search and a connect by LDAPS: ours, python-ldap's, ldap3's.

Each client does the same on one slapd of its own, in turns, every other round in the reverse order:
300 BINDs and 300 searches that find one entry, on one connection without TLS, and 20 times connect
by LDAPS, BIND and close. The process's own time is measured (``time.process_time``), so neither
slapd's nor the way to it counts, and others hardly do. python-ldap has one TLS context for all
connections, as under Keystone; ldap3 is at its fastest (no schema, names not checked) but for its
own TLS context of each connection, which it knows no other way.
"""

from __future__ import annotations

import gc
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from keyfront.common import programs
from keyfront.errors import ServerError
from keyfront.middleware.ldap.protocol.connection import Connection
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL

from ..results import Cell, Table
from ..servers.processes import HOST
from ..servers.slapd import PEOPLE, Slapd, slapd, user_dn, user_name, user_password
from . import comparison
from .comparison import Comparison, Report
from .goals import LDAP_BIND_MICROSECONDS, LDAP_SEARCH_MICROSECONDS, LDAPS_CONNECT
from .ratios import Ratio, Spread, at_most, by_round, in_words

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
    programs.require_module("ldap", "ldap")
    import ldap

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
    programs.require_module("ldap3", "ldap")
    import ldap3 as library

    tls = library.Tls(validate=ssl.CERT_REQUIRED, ca_certs_file=str(server.ca_file))

    def connect(port: int, number: int, *, secure: bool) -> Any:
        target = library.Server(
            HOST, port, use_ssl=secure, tls=tls if secure else None, get_info=library.NONE,
            connect_timeout=PATIENCE,
        )  # fmt: skip
        return library.Connection(
            target, user_dn(number), user_password(number), check_names=False,
            auto_referrals=False, receive_timeout=PATIENCE,
        )  # fmt: skip

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
    """Time each operation of each client in each round."""
    times: Times = {name: {client: [] for client in CLIENTS} for name in CALLS}
    with tempfile.TemporaryDirectory(prefix="ldap-operations-") as folder, ExitStack() as stack:
        server = stack.enter_context(slapd(Path(folder), USERS))
        steps = {client: make(server, stack) for client, make in CLIENTS.items()}
        cases = [(name, client) for name in CALLS for client in CLIENTS]
        for name, client in cases:
            # whatever is made once is made now
            timed(steps[client][name], 2)
        for _, (name, client) in comparison.in_turns(cases, rounds):
            # each cleans up after itself, and not in another's time
            gc.collect()
            times[name][client].append(timed(steps[client][name], CALLS[name]))
    return times


def report(times: Times) -> Report:
    """Return the times as a table, and how the goals were met."""
    rows: list[list[Cell]] = []
    for name, clients in times.items():
        for client, rounds in clients.items():
            against = Spread.of(by_round(rounds, clients["keyfront"])).median
            figures = (f"{x:.1f}" for x in Spread.of(rounds))
            rows.append([f"{name}, {client}", *figures, f"{against:.2f}"])
    columns = ["us of CPU", "median", "lowest", "highest", "times keyfront"]
    verdicts = [
        at_most(name, bound, "us", Spread.of(times[name]["keyfront"]).median)
        for name, bound in ((BIND, LDAP_BIND_MICROSECONDS), (SEARCH, LDAP_SEARCH_MICROSECONDS))
    ]
    pairs = by_round(*(times[CONNECT][each] for each in LDAPS_CONNECT[:2]))
    verdicts += in_words([[Ratio(*LDAPS_CONNECT[:3], pairs)]])
    return Report([Table(name="operations", columns=columns, rows=rows)], verdicts)


COMPARISON = Comparison(
    title="A client's CPU time for operations of LDAP",
    measure=lambda options: report(measure(options.rounds)),
    numbers=(("--rounds", 20, "an even number"),),
    distributions=("python-ldap", "ldap3"),
)
main = partial(comparison.main, "ldap_operations", __doc__, COMPARISON)

if __name__ == "__main__":
    raise SystemExit(main())

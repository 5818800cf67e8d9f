"""``keyfront ldap``: asks directory servers, one by one, what works with them (``check``), and says
what the pools of a running server did (``stats``).

The password of ``--bind-dn`` comes from a file or a terminal, never from the command line, which
every user of the machine can read.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from keyfront.errors import CoordinatorError, CredentialsError, OptionError
from keyfront.middleware.ldap import diagnose as probe
from keyfront.middleware.ldap import pool_counters
from keyfront.middleware.ldap.connector import Dialer
from keyfront.middleware.ldap.diagnose import FAILED, NOTE, OK, WARNING, ServerReport
from keyfront.middleware.ldap.kerberos import Kerberos, Tickets, kerberos_of
from keyfront.middleware.ldap.protocol.connection import TAKEN, BindAnswer, Connection
from keyfront.middleware.ldap.protocol.sasl_gssapi import GSSAPI
from keyfront.middleware.ldap.protocol.srv import Resolver, resolver_of
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL
from keyfront.middleware.ldap.secret_file import read_secret
from keyfront.middleware.ldap.service_account import (
    EXTERNAL,
    bind_by_certificate,
    bind_by_ticket,
    check_sasl,
)

from . import drain
from .parser import add_state_argument

_MARKS = {OK: "✓", FAILED: "✗", WARNING: "!", NOTE: " "}
_PLAIN_MARKS = {OK: "+", FAILED: "x", WARNING: "!", NOTE: " "}
_WIDTH = 80
_LABEL = 15
# The library's names of its options, and their names on this command line.
_SPELLED = {
    "set ca_file to the CA": "name its CA by --ca-file",
    "use ldaps:// or start_tls": "use ldaps:// or --start-tls",
    "no search_base is given": "no --base is given",
    "another one, unless gssapi": "left out, unless gssapi",
    "try another bind_dn": "try another --bind-dn",
    "sasl_mechanism = EXTERNAL": "--sasl-external",
    "sasl_mechanism = GSSAPI": "--sasl-gssapi",
    "kerberos_keytab": "--kerberos-keytab",
    "kerberos_without_tls": "--kerberos-without-tls",
    "srv_domains names others": "name others by --srv-domain",
}
_OPTIONS = {
    "ca_file": "--ca-file",
    "client_cert": "--client-cert",
    "client_key": "--client-key",
    "bind_dn": "--bind-dn",
    "kerberos_keytab": "--kerberos-keytab",
    "kerberos_principal": "--kerberos-principal",
    "kerberos_without_tls": "--kerberos-without-tls",
    "nameservers": "--nameserver",
    "srv_domains": "--srv-domain",
    "urls": "URL",
}


#: The counts of all pools together, as they are printed: name, label, meaning.
_STATS = (
    ("servers_up", "servers up", "as each process and pool sees them"),
    ("servers_down", "servers down", "not answering, or asked only now and then"),
    ("logins", "logins", "in all"),
    ("logins_accepted", "accepted", "logins with a right password"),
    ("credentials_refused", "refused", "logins that ended with a verdict on the user"),
    ("logins_failed", "failed", "logins that ended in an outage"),
    ("binds", "binds", "sent for them"),
    ("searches", "searches", "in all"),
    ("searches_retried", "retried", "searches sent again over another connection"),
    ("searches_failed", "failed", "searches that ended in an outage"),
    ("lookups", "lookups", "of servers in DNS, by their domain"),
    ("lookups_failed", "failed", "lookups; the servers known before are used"),
)
#: The counts of each kind of pool, as they are printed: name, label.
_POOL_STATS = (
    ("size", "connections"),
    ("max_size", "at most"),
    ("idle", "idle"),
    ("lent", "lent"),
    ("waiting", "waiting"),
    ("requests", "checkouts"),
    ("requests_queued", "had to wait"),
    ("requests_wait_ms", "waited, ms"),
    ("requests_errors", "got none"),
    ("opened", "opened"),
    ("open_errors", "not opened"),
    ("lost", "found dead"),
    ("expired", "too old"),
    ("idle_evicted", "not needed"),
)


class _NoPassword(argparse.Action):
    """Refuses a password on the command line, and does not repeat it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error("--password is refused, as every user can read it; use --password-file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    parser.description = "Look at LDAP servers."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    part = actions.add_parser(
        "check",
        help="connect to LDAP servers and say what works",
        description="Connect to each server and say what works: TLS, bind, search, paging, and how "
        "long it takes. Nothing is changed. The exit status is 1 if something failed.",
    )
    part.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="ldap://HOST[:PORT], ldaps://…, ldapi://%%2Fpath, or ldaps+srv://DOMAIN: the servers "
        "that the domain's SRV records name",
    )
    part.add_argument(
        "--nameserver",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="DNS server to ask for them, and for their addresses (default: the system's)",
    )
    part.add_argument(
        "--srv-domain",
        action="append",
        default=[],
        metavar="DOMAIN",
        help="where servers that records name may be; . for anywhere (default: in DOMAIN of URL)",
    )
    part.add_argument(
        "--ca-file", metavar="FILE", help="CAs to trust, in PEM (default: the system's)"
    )
    part.add_argument("--start-tls", action="store_true", help="encrypt ldap:// by StartTLS")
    part.add_argument(
        "--client-cert", metavar="FILE", help="certificate to show to the server, in PEM"
    )
    part.add_argument(
        "--client-key", metavar="FILE", help="its key (default: in the file of --client-cert)"
    )
    part.add_argument(
        "--sasl-external",
        action="store_true",
        help="bind by --client-cert (ldapi://: as the user of this process), and say who that is",
    )
    part.add_argument(
        "--sasl-gssapi",
        action="store_true",
        help="bind by Kerberos, and say who that is (pip install 'keyfront[gssapi]')",
    )
    part.add_argument(
        "--kerberos-keytab",
        metavar="FILE",
        help="keys for --sasl-gssapi (default: those of KRB5_CLIENT_KTNAME, or tickets)",
    )
    part.add_argument(
        "--kerberos-principal",
        metavar="NAME",
        help="whose keys they are (default: the first in the keytab)",
    )
    part.add_argument(
        "--kerberos-without-tls", action="store_true", help="let --sasl-gssapi do without TLS"
    )
    part.add_argument("--bind-dn", metavar="DN", help="who binds (default: nobody, anonymous)")
    part.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file with the password of --bind-dn (default: it is asked for at the terminal)",
    )
    part.add_argument("--password", action=_NoPassword, help=argparse.SUPPRESS)
    part.add_argument(
        "--base", metavar="DN", help="where to search (default: what the server names first)"
    )
    part.add_argument(
        "--timeout",
        default="5",
        metavar="SECONDS",
        help="for each step, 0.01 to 600 (default: %(default)s)",
    )
    part.add_argument("--json", action="store_true", help="for programs")
    text = "print what the LDAP pools of a running server's processes did"
    part = actions.add_parser("stats", help=text, description=f"{text[0].upper()}{text[1:]}.")
    drain.add_file_argument(part)
    add_state_argument(part, drain.OF_SERVE)
    part.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Look at each server that the command line names, or at the pools; returns the exit status.

    :raises KeyfrontError: an option cannot be used, or there is no pool
    """
    if arguments.action == "stats":
        folder = drain.folder(arguments.file, arguments.node, arguments.state)
        return stats(folder, out, as_json=arguments.json)
    return check(arguments.urls, _options(arguments), out, as_json=arguments.json)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, the same for all servers.

    :ivar tls: certificates and StartTLS
    :ivar bind_dn: DN to bind as; empty for nobody
    :ivar password: password of ``bind_dn``
    :ivar sasl: bind by this mechanism of SASL instead: EXTERNAL, by the client certificate, or
        GSSAPI, by ``tickets``
    :ivar tickets: the service's Kerberos tickets
    :ivar refused: the KDC's refusal, if it refused: it is asked once for all servers
    :ivar base: DN to search; by default the first that the server names
    :ivar timeout: seconds for each step, 0.01 to 600
    :ivar resolver: looks up the servers of domains; ``None`` if no URL is of one
    """

    tls: TLS
    bind_dn: str = ""
    password: str = field(default="", repr=False)
    sasl: str | None = None
    tickets: Tickets | None = field(default=None, repr=False)
    refused: list[CredentialsError] = field(default_factory=list, repr=False)
    base: str | None = None
    timeout: float = 5.0
    resolver: Resolver | None = None

    def _log_in(self, tickets: Tickets) -> None:
        if self.refused:
            raise self.refused[0]
        try:
            if tickets.due:
                tickets.log_in(self.timeout)
        except CredentialsError as error:
            self.refused.append(error.with_traceback(None))
            raise

    def bind(self, connection: Connection) -> BindAnswer:
        """Send one BIND, be it as nobody, and ask what the password policy says."""
        if self.tickets is not None:
            self._log_in(self.tickets)
            bind_by_ticket(connection, self.tickets, self.timeout)
            return TAKEN
        if self.sasl:
            bind_by_certificate(connection)
            return TAKEN
        return connection.bind(
            self.bind_dn,
            self.password,
            allow_anonymous=not self.bind_dn,
            password_policy=bool(self.bind_dn),
        )


def _options(arguments: argparse.Namespace) -> Options:
    """Return the options of a command line, and ask for the password if there is no file.

    :raises OptionError: one is out of its range, or contradicts another
    """
    bind_dn, password_file = arguments.bind_dn, arguments.password_file
    try:
        seconds = float(arguments.timeout)
        if not 0.01 <= seconds <= 600:
            raise ValueError
    except ValueError:
        raise OptionError(
            "--timeout", arguments.timeout, "a number of seconds from 0.01 to 600"
        ) from None
    try:
        tls = TLS(
            ca_file=arguments.ca_file,
            start_tls=arguments.start_tls,
            client_cert=arguments.client_cert,
            client_key=arguments.client_key,
        )
        tls.context()
        urls = [ServerURL.parse(text, "URL") for text in arguments.urls]
        used = tls.start_tls or any(url.scheme == "ldaps" for url in urls)
        if tls.client_cert and not used:
            allowed = "left out without ldaps:// or --start-tls"
            raise OptionError("client_cert", tls.client_cert, allowed)
        sasl, kerberos = _sasl(arguments)
        check_sasl(sasl, urls, tls, bind_dn=bind_dn or "", kerberos=kerberos)
        tickets = Tickets(kerberos or Kerberos()) if sasl == GSSAPI else None
        resolver = resolver_of(urls, arguments.nameserver, arguments.srv_domain)
    except OptionError as error:
        raise _as_given(error) from None
    if password_file is not None and not bind_dn:
        raise OptionError("--password-file", password_file, "left out without --bind-dn")
    if bind_dn == "":
        raise OptionError("--bind-dn", "(empty)", "a DN, or left out")
    return Options(
        tls=tls,
        bind_dn=bind_dn or "",
        password=_password(bind_dn, password_file) if bind_dn else "",
        sasl=sasl,
        tickets=tickets,
        base=arguments.base,
        timeout=seconds,
        resolver=resolver,
    )


def _sasl(arguments: argparse.Namespace) -> tuple[str | None, Kerberos | None]:
    """Return the mechanism of a command line, and the keytab and principal that it names.

    :raises OptionError: there are two mechanisms
    """
    if arguments.sasl_external and arguments.sasl_gssapi:
        raise OptionError("--sasl-gssapi", True, "left out beside --sasl-external")
    sasl = EXTERNAL if arguments.sasl_external else GSSAPI if arguments.sasl_gssapi else None
    return sasl, kerberos_of(vars(arguments))


def _as_given(error: OptionError) -> OptionError:
    """Return an error of the library with the names of the command line."""
    option = _OPTIONS.get(error.option, error.option)
    if option == "sasl_mechanism":
        option = f"--sasl-{str(error.value).lower()}"
    return OptionError(option, error.value, _spelled(error.allowed))


def _password(bind_dn: str, file: Path | None) -> str:
    if file is not None:
        return read_secret("--password-file", str(file))
    if not sys.stdin.isatty():
        raise OptionError(
            "--password-file", "(not given)", "a file, as there is no terminal to ask at"
        )
    try:
        password = getpass.getpass(f"Password of {bind_dn}: ")
    except EOFError:
        password = ""
        sys.stderr.write("\n")
    if not password:
        raise OptionError("--bind-dn", bind_dn, "left out if there is no password")
    return password


def stats(folder: Path, out: TextIO, *, as_json: bool = False) -> int:
    """Print the sums over all processes of a node with an LDAP pool; returns 0.

    :param as_json: print an object with each count by its name in
        :meth:`keyfront.middleware.ldap.LDAPPool.get_stats`, and ``processes``
    :raises CoordinatorError: none has one, or the counts cannot be read
    """
    if not pool_counters.is_in_use(folder):
        raise CoordinatorError(f"{folder}: no process with an LDAP pool has counted there")
    found = pool_counters.read(folder)
    if as_json:
        out.write(json.dumps(dict(found), indent=2) + "\n")
        return 0
    out.write(f"LDAP pools of {found['processes']} process(es), {folder}\n")
    for name, label, meaning in _STATS:
        out.write(f"{label:<16}{found[name]:>12}  {meaning}\n")
    out.write(f"\n{'':<16}{'SEARCH':>12}{'LOGIN':>12}\n")
    for name, label in _POOL_STATS:
        out.write(f"{label:<16}{found[f'search_{name}']:>12}{found[f'auth_{name}']:>12}\n")
    return 0


def examine(urls: Sequence[ServerURL], options: Options) -> Iterator[ServerReport]:
    """Examine servers and yield what works with each; of domains, also what they name."""
    dialer = Dialer(options.tls, options.timeout, options.timeout)
    terms = probe.Terms(
        dialer=dialer, dn=options.bind_dn, bind=options.bind, base=options.base,
        sasl=options.sasl, resolver=options.resolver,
    )  # fmt: skip
    return probe.examine_all(urls, terms)


def check(urls: Sequence[str], options: Options, out: TextIO, *, as_json: bool = False) -> int:
    """Examine each server and print what works.

    :param urls: URLs of the servers
    :param options: options of the command
    :param out: stream for the tables, or for the JSON
    :param as_json: print a list of ``{"url", "ok", "checks"}`` instead of tables
    :returns: exit status: 0, or 1 if something failed
    :raises OptionError: one is no URL, or not one for StartTLS
    """
    servers = [ServerURL.parse(text, "URL") for text in urls]
    for server in servers:
        if options.tls.start_tls and server.scheme != "ldap":
            allowed = "left out with ldaps://, ldaps+srv:// and ldapi://"
            raise OptionError("--start-tls", server.text, allowed)
    reports = []
    for report in examine(list(dict.fromkeys(servers)), options):
        reports.append(report)
        if not as_json:
            out.write(table(report, _marks(out)) + "\n")
            out.flush()
    failed = sum(not report.ok for report in reports)
    if as_json:
        found = [_for_programs(report) for report in reports]
        out.write(json.dumps(found, indent=2, default=_date) + "\n")
    elif failed:
        out.write(f"{failed} of {len(reports)} failed\n")
    elif any(check.state == WARNING for report in reports for check in report.checks):
        out.write(f"all works; {_marks(out)[WARNING]} is to be looked at\n")
    else:
        out.write("all is well\n")
    return 1 if failed else 0


def _marks(out: TextIO) -> dict[str, str]:
    try:
        "".join(_MARKS.values()).encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_MARKS
    return _MARKS


def table(report: ServerReport, marks: dict[str, str] | None = None) -> str:
    """Return the report for people: a line for each check, none wider than 80 columns.

    :param marks: sign for each state of a check
    """
    marks = marks or _MARKS
    lines = [report.url.text]
    for check in report.checks:
        lead = f"  {marks[check.state]} {check.name:<{_LABEL}} "
        text = "".join(x if x.isprintable() else "?" for x in _spelled(check.text))
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
            break_on_hyphens=False,
        ) or [lead.rstrip()]
    return "\n".join(lines) + "\n"


def _for_programs(report: ServerReport) -> dict[str, Any]:
    checks = [
        {"name": x.name, "state": x.state, "text": _spelled(x.text), **x.data}
        for x in report.checks
    ]
    return {"url": report.url.text, "ok": report.ok, "checks": checks}


def _spelled(text: str) -> str:
    for library, command in _SPELLED.items():
        text = text.replace(library, command)
    return text


def _date(value: datetime.datetime) -> str:
    return f"{value:%Y-%m-%d}"

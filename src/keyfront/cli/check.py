"""``keyfront check``: a login and validations against a Keystone, and what took how long."""

from __future__ import annotations

import argparse
import json
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from keyfront.errors import KeyfrontError, ServerError
from keyfront.middleware.tokens import tags_header

from .credentials import Credentials, of_arguments, refused
from .credentials import add_arguments as add_credentials

#: Days before which the end of a certificate is warned of.
_CERTIFICATE_DAYS = 14
# A second validation by a worker that has not yet seen the token is a first one, too.
_REPEATED = 5
# Bytes of an answer.
_LONGEST = 4 << 20
# Each may be the first request that a worker gets.
_ROUND_TRIPS = 2
# The part of a first validation's time below which the second one came from a cache, where the
# cache itself does not say so. The way there and back is in neither.
_CACHED = 0.5
# Of Server-Timing: a metric's name and how long it took, and how many of them are taken.
_TIMING = re.compile(r"([A-Za-z0-9_.-]{1,32})\s*(?:;[^,]*?)?;\s*dur=(\d{1,9}(?:\.\d{1,9})?)")
_TIMINGS = 8
# Characters of it that are read: what is searched takes the square of that.
_LONGEST_TIMING = 1024
_REQUEST_ID = re.compile(r"req-[0-9a-f-]{1,40}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = (
        "Log in to a Keystone, validate the token, and print what came back and how long it took: "
        "the one that keyfront serve runs, or, with OS_AUTH_URL and the other variables of the "
        "openstack command or --os-cloud, any other. Ends with 0 if all is well, 1 if something "
        "is to be looked at, 2 if it does not work, as monitoring has it."
    )
    add_credentials(parser)
    parser.add_argument(
        "--warn",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="what takes longer is to be looked at, 0.001 to 3600 (default 2)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long each answer is waited for, 0.001 to 3600 (default 30)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.001 and 3600")
    return value


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Check a Keystone.

    :returns: the exit status: 0; 1 with warnings; 2 if it does not work
    :raises KeyfrontError: it does not work, and the result is not to be JSON
    """
    try:
        credentials = of_arguments(arguments)
        report = check(credentials, warn=arguments.warn, timeout=arguments.timeout)
    except KeyfrontError as error:
        if not arguments.json:
            raise
        out.write(json.dumps({"status": "critical", "error": str(error)}) + "\n")
        return 2
    if arguments.json:
        out.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        report.write(out)
    return 1 if report.warnings else 0


@dataclass
class Report:
    """The answers that came back."""

    url: str
    #: Milliseconds of each step, in its order.
    milliseconds: dict[str, float] = field(default_factory=dict)
    #: The version of TLS; empty without.
    tls: str = ""
    #: Days until the server's certificate ends.
    certificate_days: float | None = None
    #: The content of the validated token: names and values.
    token: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    #: Seconds by which this clock is ahead of the server's Date; ``None`` if it tells none.
    ahead: float | None = None
    #: The time for which the answer stands, by the token cache; ``None`` if nobody says it.
    told: str | None = None
    #: Milliseconds of the phases of a login, a first and a repeated validation, in their order.
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    #: The own times of Keystone or a server before it (Server-Timing), in milliseconds.
    timings: dict[str, dict[str, float]] = field(default_factory=dict)
    #: By which ids the requests are found in Keystone's log.
    request_ids: dict[str, str] = field(default_factory=dict)
    #: The phase that has begun and not ended; empty if none.
    waits_for: str = ""

    @property
    def cached(self) -> bool:
        """True if a repeated validation was answered by a cache.

        keyfront's says so. Of another one, or where a proxy takes that header away, the times tell.
        """
        if self.told is not None:
            return tags_header.parse(self.told) is not None
        taken = self.milliseconds
        # What no token is needed for is answered sooner than a token is validated, but by a cache.
        way = taken["round_trip"]
        first, repeated = taken["first_validation"] - way, taken["repeated_validation"] - way
        return repeated <= max(0.0, _CACHED * first)

    @property
    def cache(self) -> str:
        """Return which cache: ``keyfront``, ``unknown``, or ``none``."""
        if not self.cached:
            return "none"
        return "unknown" if self.told is None else "keyfront"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "status": "warning" if self.warnings else "ok",
            "url": self.url,
            "milliseconds": {name: round(value, 2) for name, value in self.milliseconds.items()},
            "cached": self.cached,
            "cache": self.cache,
            "tls": self.tls or None,
            "certificate_days": self.certificate_days,
            **dict(self.token),
            "warnings": self.warnings,
        }

    def write(self, out: TextIO) -> None:
        """Write it for people."""
        taken = self.milliseconds
        rows = [("connection", f"ok, {taken['connection']:.1f} ms")]
        if self.tls:
            days = self.certificate_days
            ends = "" if days is None else f", certificate ends in {days:.0f} days"
            rows.append(("TLS", f"{self.tls}, {taken['tls']:.1f} ms{ends}"))
        rows += [
            ("login", f"ok, {taken['login']:.0f} ms, most of it the hash of the password"),
            ("round trip", f"{taken['round_trip']:.1f} ms, part of each of the next two"),
            ("validation", f"ok, {taken['first_validation']:.1f} ms, the first of this token"),
            ("repeated", f"ok, {taken['repeated_validation']:.1f} ms, {self._source()}"),
            *self.token,
        ]
        rows += [("warning", text) for text in self.warnings]
        for name, value in rows:
            out.write(f"{name:<12}{_printable(value)}\n")

    def _source(self) -> str:
        if self.cached:
            return "from a cache" if self.told is None else "from keyfront's token cache"
        if self.told is not None:
            return "not kept by the token cache"
        return "from no cache: is token_cache in the pipeline?"


def _said_by(token: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the content of a token, without secrets."""
    user = token["user"]
    rows = [("user", f"{user['name']} in {user['domain']['name']}")]
    for scope in ("project", "domain"):
        if scope in token:
            rows.append((scope, str(token[scope]["name"])))
    if "system" in token:
        rows.append(("scope", "system"))
    for name, key in (("roles", "name"), ("catalog", "type")):
        rows.append((name, ", ".join(sorted(str(one[key]) for one in token.get(name, [])))))
    return [*rows, ("expires", str(token["expires_at"]))]


def _printable(text: str) -> str:
    """Return text of a server without what would steer a terminal."""
    return "".join(x if x.isprintable() else "?" for x in text)


def check(
    credentials: Credentials,
    *,
    warn: float = 2.0,
    timeout: float = 30.0,
    report: Report | None = None,
) -> Report:
    """Log in to a Keystone and validate the token, first and repeatedly.

    The token is left to expire: to revoke it would write to the database at each check.

    :param warn: seconds above which a login or a validation is warned of
    :param timeout: seconds that each answer is waited for
    :param report: the report to fill in, which is there also if this fails
    :raises ServerError: Keystone does not answer, or answers otherwise than it should
    """
    report = Report(credentials.url) if report is None else report
    server = _Server(credentials, timeout, report)
    try:
        server.begin("login")
        server.connect()
        login = server.ask("POST", {}, credentials.auth)
        report.milliseconds["login"] = login.milliseconds
        server.begin("")
        report.milliseconds["round_trip"] = min(server.round_trip() for _ in range(_ROUND_TRIPS))
        headers = {"X-Auth-Token": login.token, "X-Subject-Token": login.token}
        server.begin("first_validation")
        first = server.ask("GET", headers)
        report.token = first.said
        report.milliseconds["first_validation"] = first.milliseconds
        report.milliseconds["repeated_validation"] = server.quickest(headers)
        server.begin("")
        # Not in the ones that are timed: with Redis such a question may take a way more.
        report.told = server.ask("GET", {**headers, tags_header.NAME: tags_header.ASK}).told
    finally:
        server.close()
    for name in ("login", "first_validation", "repeated_validation"):
        seconds = report.milliseconds[name] / 1000
        if seconds > warn:
            said = name.replace("_", " ")
            report.warnings.append(f"the {said} took {seconds:.3g} s, more than {warn:g} s")
    days = report.certificate_days
    if days is not None and days < _CERTIFICATE_DAYS:
        report.warnings.append(f"the certificate ends in {days:.0f} days")
    if not credentials.verify:
        report.warnings.append("the certificate was not looked at: verify or OS_INSECURE says so")
    return report


class _Answer(NamedTuple):
    """An answer of ``/auth/tokens``."""

    #: The content of the token: names and values.
    said: list[tuple[str, str]]
    #: The token that was issued.
    token: str
    #: The time for which it stands, by the token cache.
    told: str | None
    milliseconds: float


class _Server:
    """A connection to a Keystone, which is made anew where the server closes it."""

    def __init__(self, credentials: Credentials, timeout: float, report: Report) -> None:
        self._credentials = credentials
        parts = urlsplit(credentials.url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path
        self._timeout = timeout
        self._report = report
        self._connection = HTTPConnection(self._host, self._port, timeout=timeout)
        self._context = credentials.tls()
        self._step = ""
        self._since = 0.0

    def begin(self, step: str) -> None:
        """Note the phases of what comes next under a name; under none if it is empty."""
        self._step = step
        self._report.phases.pop(step, None)
        self._report.timings.pop(step, None)

    def quickest(self, headers: dict[str, str]) -> float:
        """Validate several times, keep the phases of the quickest; returns its milliseconds.

        :raises ServerError: there is no answer, or not the one that is wanted
        """
        report, best = self._report, float("inf")
        kept: tuple[dict[str, float], dict[str, float]] = ({}, {})
        name = "repeated_validation"
        for _ in range(_REPEATED):
            self.begin(name)
            taken = self.ask("GET", headers).milliseconds
            if taken < best:
                best, kept = taken, (report.phases[name], report.timings.get(name, {}))
        report.phases[name], timings = kept
        report.timings.pop(name, None)
        if timings:
            report.timings[name] = timings
        return best

    def _phase(self, ends: str, begins: str) -> None:
        """Note how long a phase took, and which one has begun; either may be empty."""
        now = time.perf_counter()
        if ends and self._step:
            phases = self._report.phases.setdefault(self._step, {})
            phases[ends] = phases.get(ends, 0.0) + (now - self._since) * 1000
        self._since, self._report.waits_for = now, begins

    def connect(self) -> None:
        """Connect, and note how long it took and what the server's certificate is."""
        begun = time.perf_counter()
        self._phase("", "name lookup")
        try:
            known = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._phase("name lookup", "TCP")
            plain = self._connected(known)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._context
            self._phase("TCP", "TLS" if tls else "")
            connected = self._since
            self._connection.sock = self._encrypted(plain, tls) if tls else plain
        except OSError as error:
            raise self._failed(error) from None
        taken = self._report.milliseconds
        taken.setdefault("connection", (connected - begun) * 1000)
        if self._context:
            self._phase("TLS", "")
            taken.setdefault("tls", (time.perf_counter() - connected) * 1000)

    def _connected(self, known: list[Any]) -> socket.socket:
        """Return a connection to the first address that takes one."""
        failed = OSError(f"no address of {self._host}")
        for family, kind, protocol, _, address in known:
            plain = socket.socket(family, kind, protocol)
            try:
                plain.settimeout(self._timeout)
                plain.connect(address)
                return plain
            except OSError as error:
                plain.close()
                failed = error
        raise failed

    def _encrypted(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        found = context.wrap_socket(plain, server_hostname=self._host)
        self._report.tls = found.version() or ""
        certificate = found.getpeercert() or {}
        ends = certificate.get("notAfter")
        if isinstance(ends, str):
            self._report.certificate_days = round(
                (ssl.cert_time_to_seconds(ends) - time.time()) / 86400, 1
            )
        return found

    def round_trip(self) -> float:
        """Ask what needs no token, no user and no database; returns the milliseconds it took.

        :raises ServerError: there is no answer
        """
        return self._exchange("GET", self._path or "/", None, {})[2]

    def ask(
        self, method: str, headers: dict[str, str], auth: dict[str, Any] | None = None
    ) -> _Answer:
        """Send a request to ``/auth/tokens``.

        :raises ServerError: there is no answer, or not the one that is wanted
        """
        body = json.dumps({"auth": auth}) if auth is not None else None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        answer, text, taken = self._exchange(method, f"{self._path}/auth/tokens", body, headers)
        if answer.status not in (200, 201):
            raise self._refused(answer)
        try:
            said = _said_by(json.loads(text)["token"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ServerError(f"{self._credentials.url}: answers with no token") from None
        told = answer.headers.get(tags_header.NAME)
        return _Answer(said, answer.headers.get("X-Subject-Token", ""), told, taken)

    def _exchange(
        self, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[HTTPResponse, bytes, float]:
        """Send a request; returns its answer, that one's body, and the milliseconds it took."""
        begun, sent = time.perf_counter(), time.time()
        try:
            if self._connection.sock is None:
                self.connect()
            self._phase("", "first byte")
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            self._phase("first byte", "the rest")
            text = answer.read(_LONGEST)
            self._phase("the rest", "")
        except (OSError, HTTPException) as error:
            raise self._failed(error) from None
        taken = (time.perf_counter() - begun) * 1000
        self._note(answer)
        self._compare_clocks(answer.headers.get("Date"), sent)
        return answer, text, taken

    def _note(self, answer: HTTPResponse) -> None:
        """Note the server's own time, and the id by which its log has the request."""
        if not self._step:
            return
        known = _REQUEST_ID.fullmatch(answer.headers.get("x-openstack-request-id", ""))
        if known:
            self._report.request_ids[self._step] = known[0]
        told = answer.headers.get("Server-Timing", "")[:_LONGEST_TIMING]
        timings = _TIMING.findall(told)[:_TIMINGS]
        if timings:
            self._report.timings[self._step] = {name: float(x) for name, x in timings}

    def _compare_clocks(self, date: str | None, sent: float) -> None:
        """Note by how much this clock is ahead, the least that an answer tells."""
        try:
            told = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, OverflowError):
            return
        # Date has whole seconds: half of one is what to expect of the rest.
        ahead = (sent + time.time()) / 2 - told - 0.5
        known = self._report.ahead
        self._report.ahead = ahead if known is None or abs(ahead) < abs(known) else known

    def _refused(self, answer: HTTPResponse) -> ServerError:
        hint = ""
        if answer.status == 401:
            hint = "; is it the right user, password, domain and project?"
        elif answer.status == 400 and self._credentials.url.startswith("http:"):
            # what web servers say to HTTP where they speak TLS
            hint = "; is it https:// there?"
        elif answer.status == 503:
            wait = answer.headers.get("Retry-After")
            hint = f"; it asks to come back in {wait} s" if wait else ""
        said = f"answers {answer.status} {_printable(answer.reason)}{hint}"
        return ServerError(f"{self._credentials.url}: {said}")

    def _failed(self, error: Exception) -> ServerError:
        if isinstance(error, ssl.SSLCertVerificationError):
            said = refused(error, "OS_AUTH_URL")
        elif isinstance(error, ssl.SSLError):
            said = f"no TLS: {getattr(error, 'reason', None) or error}; is it http:// there?"
        elif isinstance(error, TimeoutError):
            said = f"no answer within {self._timeout:g} s; is it running?"
        else:
            said = str(getattr(error, "strerror", None) or error or type(error).__name__)
            said = f"{said}; is it running?"
        return ServerError(f"{self._credentials.url}: {said}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

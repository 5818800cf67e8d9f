"""The errors of keyfront: one tree, one line each, made for an operator to act on.

Every error says what is wrong, where, and what to do, in a single line and without a secret.
The command line prints that line and exits with status 2. All of them pickle, so that they cross
process borders whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class KeyfrontError(Exception):
    """Base of every error that keyfront raises on purpose; ``str()`` is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    @property
    def message(self) -> str:
        """The line an operator reads."""
        return str(self.args[0])


class OptionError(KeyfrontError):
    """An option has a value outside its range.

    :param option: the option as the operator writes it, for example ``--listen``
    :param value: the value that was given, never a secret
    :param allowed: the values it takes, in words
    """

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} = {value}: must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        return type(self), (self.option, self.value, self.allowed)


class TargetError(KeyfrontError):
    """An application target (``KEYFRONT_APP``) names nothing that can be loaded."""


class PasteFileError(KeyfrontError):
    """A paste file cannot be read or is broken; names file and line."""


class IncompatibleError(KeyfrontError):
    """A part that keyfront builds upon no longer looks as keyfront needs it."""


class ImportedTooEarlyError(KeyfrontError):
    """A module was imported before gevent's monkey patching and holds blocking primitives."""


class MissingPartError(KeyfrontError):
    """A program or an optional package is not installed; names the command that installs it."""


class StateError(KeyfrontError):
    """A state folder cannot be used: another user's, from a newer version, or not ours."""


class ServerError(KeyfrontError):
    """A server did not start, or ended by itself; names its log."""


class CoordinatorError(KeyfrontError):
    """The epochs of the token cache cannot be reached: changes are refused, nothing is cached."""


class NoEpochTableError(CoordinatorError):
    """No Keystone keeps its epochs where a service looks for them."""


class HeartbeatError(KeyfrontError):
    """The heartbeat's counts cannot be kept in their folder, or no process keeps any there."""


class BenchmarkError(KeyfrontError):
    """A measurement cannot be taken, or a file of results is not one; names file and place."""


class Verdict(enum.Enum):
    """The reason for which a directory refused a user."""

    WRONG_PASSWORD = "wrong password"
    UNKNOWN_USER = "unknown user"
    LOCKED = "account locked"
    DISABLED = "account disabled"
    EXPIRED = "password expired"
    ACCOUNT_EXPIRED = "account expired"
    MUST_CHANGE = "password must be changed"
    NOT_NOW = "not at this time or from this place"
    UNWILLING = "the server is unwilling"
    # Of a service that binds by its certificate (SASL EXTERNAL):
    WRONG_CERTIFICATE = "client certificate not accepted"
    NO_IDENTITY = "the server makes nobody of the client certificate"
    # Of one that binds by Kerberos (SASL GSSAPI):
    WRONG_TICKET = "Kerberos identity not accepted"


class DirectoryError(KeyfrontError):
    """Base of what goes wrong with an LDAP directory.

    :param message: without the server, which is put before it
    :param server: its URL; ``None`` if it concerns none or several
    """

    def __init__(self, message: str, *, server: str | None = None) -> None:
        super().__init__(f"{server}: {message}" if server else message)
        self.server = server

    def __reduce__(self) -> tuple[object, ...]:
        return _as_it_was, (type(self), self.message), vars(self)


class DirectoryUnavailableError(DirectoryError):
    """No server could be asked, or one did not answer: an outage, never a verdict on a user."""


class DirectoryTimeoutError(DirectoryUnavailableError):
    """A server did not answer in time."""


class DirectoryBusyError(DirectoryUnavailableError):
    """A server answered that it cannot answer: it is busy, or what was asked for is elsewhere and
    away. It says nothing of the user, and nothing of what else the server is asked for."""


class KerberosError(DirectoryUnavailableError):
    """No Kerberos ticket is to be had for the service: the KDC is away, or something is set up
    wrongly. It says nothing of the directory's servers."""


class DirectoryProtocolError(DirectoryUnavailableError):
    """A server sent what is not LDAP, or not an answer to what it was asked."""


class DirectoryTLSError(DirectoryUnavailableError):
    """The TLS handshake failed, the certificate is not trusted, or StartTLS was refused."""


class PoolTimeoutError(DirectoryUnavailableError):
    """No connection of the pool became free in time."""


class PoolFullError(DirectoryUnavailableError):
    """Raised when as many as may are waiting for a connection of the pool already."""


class PoolClosedError(DirectoryUnavailableError):
    """The pool is closed, or was never opened."""


class FilterError(DirectoryError):
    """A search filter does not follow RFC 4515; nothing was sent."""


class DirectoryAnswerError(DirectoryError):
    """A server refused an operation.

    :param code: the result code of RFC 4511 section 4.1.9; of a refusal by a KDC, the code of RFC
        4120 section 7.5.9
    :param name: the code's name there, for example ``noSuchObject``
    :param diagnostic: the server's own words
    :param matched_dn: the part of the DN that exists, after ``noSuchObject``
    :param referrals: URLs of servers that may know more; they are never followed
    """

    def __init__(
        self,
        code: int,
        name: str,
        diagnostic: str = "",
        matched_dn: str = "",
        referrals: Sequence[str] = (),
        *,
        server: str | None = None,
        advice: str = "",
    ) -> None:
        parts = [f"{name} ({code})", _printable(diagnostic), advice]
        super().__init__(": ".join(part for part in parts if part), server=server)
        self.code = code
        self.name = name
        self.diagnostic = diagnostic
        self.matched_dn = matched_dn
        self.referrals = tuple(referrals)


class CredentialsError(DirectoryAnswerError):
    """A server refused a BIND because of the user.

    :param verdict: why, as far as the server tells: many say ``WRONG_PASSWORD`` for all
    """

    def __init__(
        self,
        verdict: Verdict,
        code: int = 49,
        name: str = "invalidCredentials",
        diagnostic: str = "",
        matched_dn: str = "",
        referrals: Sequence[str] = (),
        *,
        server: str | None = None,
    ) -> None:
        super().__init__(
            code, name, diagnostic, matched_dn, referrals, server=server, advice=verdict.value
        )
        self.verdict = verdict


def _as_it_was(kind: type[DirectoryError], message: str) -> DirectoryError:
    return kind.__new__(kind, message)


def _printable(text: str) -> str:
    """Return a server's words in at most 300 characters that do nothing to a terminal or a log."""
    line = " ".join(text[:1000].split())
    line = "".join(x if x.isprintable() else "?" for x in line)
    return line if len(line) <= 300 else f"{line[:300]}..."

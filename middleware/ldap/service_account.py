"""Whom a pool searches as: the service's DN and its password, kept in this one place.

A password that the directory refuses is not offered again and again: many directories would lock
the service's account, for everybody who uses it.
"""

from __future__ import annotations

import threading
import time

from keyfront.errors import CredentialsError, DirectoryTimeoutError, OptionError

from .protocol.connection import Connection

#: Seconds for which a refused identity is not offered again. They double with each refusal.
HOLD_SECONDS = 10.0
MAX_HOLD_SECONDS = 300.0


class ServiceIdentity:
    """An identity for the pool's own use; without a DN it is nobody (anonymous).

    Until it has been accepted once, and after a refusal, one BIND at a time tells; who comes
    meanwhile waits for the outcome.

    :param dn: or what else the server takes for one; empty for nobody
    :param password: text is sent in UTF-8
    :raises OptionError: only one of the two is given, or there is no UTF-8 for the password
    """

    __slots__ = ("_accepted", "_changed", "_error", "_hold", "_password", "_trying", "_until", "dn")

    def __init__(self, dn: str, password: str | bytes) -> None:
        try:
            given = bool(password)
            secret = password if isinstance(password, bytes) else _octets(password)
            if secret is None:
                raise OptionError("bind_password", "(hidden)", "text that UTF-8 can express")
            if dn and not given:
                # the server would take it for a wish to be nobody
                raise OptionError("bind_password", "(not set)", f"set, as bind_dn is {dn}")
            if given and not dn:
                raise OptionError("bind_dn", "(not set)", "set, as bind_password is")
            self.dn = dn
            self._password = secret
        finally:
            del password
            secret = b""
        self._accepted = not dn
        self._trying = False
        self._error: CredentialsError | None = None
        self._hold = 0.0
        self._until = 0.0
        self._changed = threading.Condition(threading.Lock())

    def __repr__(self) -> str:
        return f"<ServiceIdentity {self.dn!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a service identity is not copied or pickled: it has a password")

    @property
    def bound_as(self) -> str | None:
        """``bound_as`` of a connection that has this identity."""
        return self.dn or None

    def assume(self, connection: Connection, timeout: float) -> None:
        """Take on this identity, by one BIND; nobody needs none, but an answer is waited for.

        :raises CredentialsError: refused; others as :meth:`.connection.Connection.bind`
        """
        if self.dn:
            connection.bind(self.dn, self._password, timeout=timeout)
        else:
            connection.ping(timeout)

    def begin(self, seconds: float) -> None:
        """Ask for leave to send a BIND; its end has to be told, by one of the methods below.

        :param seconds: to wait for another's BIND, if that is to tell first
        :raises CredentialsError: it was refused a while ago, and is not offered again yet
        :raises DirectoryTimeoutError: the other's took too long
        """
        if self._accepted:
            return
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._accepted:
                now = time.monotonic()
                if self._error is not None and now < self._until:
                    raise _again(self._error, self._until - now)
                if not self._trying:
                    self._trying = True
                    return
                left = min(max(deadline - now, 0.0), threading.TIMEOUT_MAX)
                if not self._changed.wait(left):
                    raise DirectoryTimeoutError(
                        f"the first BIND as {self.dn} was not answered within {seconds:.3g} s"
                    )

    def accepted(self) -> None:
        """Tell that the server took it."""
        if self._accepted:
            return
        with self._changed:
            self._accepted = True
            self._trying = False
            self._error = None
            self._hold = 0.0
            self._changed.notify_all()

    def refused(self, error: CredentialsError) -> None:
        """Tell that the server refused it: for a while, nobody offers it again."""
        if not self.dn:
            return
        with self._changed:
            now = time.monotonic()
            self._trying = False
            if now >= self._until:
                self._hold = min(self._hold * 2 or HOLD_SECONDS, MAX_HOLD_SECONDS)
                self._until = now + self._hold
                self._error = _copied(error, error.diagnostic)
            self._accepted = False
            self._changed.notify_all()

    def failed(self) -> None:
        """Tell that nothing was learnt: the server did not answer the BIND."""
        if self._accepted:
            return
        with self._changed:
            self._trying = False
            self._changed.notify_all()

    def after_fork(self) -> None:
        """Let go of what threads of the parent hold."""
        self._changed = threading.Condition(threading.Lock())
        self._trying = False


def _octets(password: str) -> bytes | None:
    try:
        return password.encode()
    except UnicodeEncodeError:
        return None
    finally:
        del password


def _again(error: CredentialsError, seconds: float) -> CredentialsError:
    told = f"{error.diagnostic}; " if error.diagnostic else ""
    return _copied(error, f"{told}it is not offered again for {seconds:.0f} s")


def _copied(error: CredentialsError, diagnostic: str) -> CredentialsError:
    """The same error without its traceback, which would keep frames."""
    return CredentialsError(
        error.verdict,
        error.code,
        error.name,
        diagnostic,
        error.matched_dn,
        error.referrals,
        server=error.server,
    )

"""The identity that a pool searches with: the service's DN and its password, kept in one place.

A password that the directory refuses is not offered again and again: many directories would lock
the service's account, for everybody who uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from keyfront.errors import CredentialsError, DirectoryTimeoutError, OptionError

from .protocol.connection import Connection
from .protocol.requests import password_octets

#: Seconds for which a refused identity is not offered again. They double with each refusal.
HOLD_SECONDS = 10.0
MAX_HOLD_SECONDS = 300.0


class ServiceAccount:
    """An identity for the pool's own use; without a DN it is nobody (anonymous).

    Until it has been accepted once, and after a refusal, one BIND at a time tells; who comes
    meanwhile waits for the outcome.

    :param dn: DN to bind, or what else the server takes for one; empty for nobody
    :param password: its password; text is sent in UTF-8
    :raises OptionError: only one of the two is given, or there is no UTF-8 for the password
    :ivar bound_as: ``bound_as`` of a connection that has this identity
    """

    __slots__ = (
        *("_accepted", "_changed", "_error", "_hold", "_password", "_trying", "_until"),
        *("bound_as", "dn"),
    )

    def __init__(self, dn: str, password: str | bytes) -> None:
        try:
            given = bool(password)
            secret = password_octets(password)
            if secret is None:
                raise OptionError("bind_password", "(hidden)", "text that UTF-8 can express")
            if dn and not given:
                # the server would take it for a wish to be nobody
                raise OptionError("bind_password", "(not set)", f"set, as bind_dn is {dn}")
            if given and not dn:
                raise OptionError("bind_dn", "(not set)", "set, as bind_password is")
            self.dn = dn
            self.bound_as = dn or None
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
        return f"<ServiceAccount {self.dn!r}>"

    def __reduce__(self) -> str:
        raise TypeError("a service identity is not copied or pickled: it has a password")

    def assume(self, connection: Connection, timeout: float) -> None:
        """Give a connection this identity, by one BIND; nobody needs none, but is answered too.

        :param timeout: seconds for the answer
        :raises CredentialsError: it was refused
        :raises DirectoryUnavailableError: nobody answered
        """
        if self.dn:
            connection.bind(self.dn, self._password, timeout=timeout)
        else:
            connection.ping(timeout)

    @contextmanager
    def attempt(self, seconds: float) -> Iterator[None]:
        """Have leave to send a BIND in a block, whose outcome is noted.

        :param seconds: time to wait for another's BIND, if that is to tell first
        :raises CredentialsError: it is refused, or was refused a while ago and is not offered yet
        :raises DirectoryTimeoutError: another's BIND took too long
        """
        self.begin(seconds)
        try:
            yield
        except CredentialsError as error:
            self.refused(error)
            raise
        except BaseException:
            self.failed()
            raise
        self.accepted()

    def begin(self, seconds: float) -> None:
        """Get leave to send a BIND; its outcome has to be told, by one of the methods below.

        :param seconds: time to wait for another's BIND, if that is to tell first
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
        """Note that the server took the BIND."""
        if self._accepted:
            return
        with self._changed:
            self._accepted = True
            self._trying = False
            self._error = None
            self._hold = 0.0
            self._changed.notify_all()

    def refused(self, error: CredentialsError) -> None:
        """Note that the server refused it: for a while, nobody offers it again."""
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
        """Note that nothing was learnt: the server did not answer the BIND."""
        if self._accepted:
            return
        with self._changed:
            self._trying = False
            self._changed.notify_all()

    def after_fork(self) -> None:
        """Let go of what threads of the parent hold."""
        self._changed = threading.Condition(threading.Lock())
        self._trying = False


def _again(error: CredentialsError, seconds: float) -> CredentialsError:
    told = f"{error.diagnostic}; " if error.diagnostic else ""
    return _copied(error, f"{told}it is not offered again for {seconds:.0f} s")


def _copied(error: CredentialsError, diagnostic: str) -> CredentialsError:
    """Return the same error without its traceback, which would keep frames."""
    return CredentialsError(
        error.verdict,
        error.code,
        error.name,
        diagnostic,
        error.matched_dn,
        error.referrals,
        server=error.server,
    )

"""The service's Kerberos tickets, by python-gssapi and MIT Kerberos (extra ``gssapi``).

libkrb5 waits for a KDC that does not answer for half a minute, and cannot be told otherwise. So
whatever may ask one is done by a native thread, and nobody waits for that longer than he has: what
stands still is that thread, and no greenlet's hub.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keyfront.common import interpreter
from keyfront.errors import CredentialsError, KerberosError, OptionError, Verdict

from .protocol.ber import ProtocolError
from .protocol.sasl_gssapi import GSSAPI, Exchange

T = TypeVar("T")

_MISSING = "another one, unless gssapi is installed: pip install 'keyfront[gssapi]'"
# Seconds of the shortest and the longest pause between two looks at a thread's work.
_SHORTEST, _LONGEST = 0.0005, 0.02
#: Seconds after which nobody begins to wait for a call: the KDC is silent, until that ends.
LATE_SECONDS = 3.0
# Part of a ticket's life after which another one is fetched, and seconds until that is tried again.
_HALF = 0.5
_RETRY_SECONDS = 60.0
#: Seconds at most that a connection waits for a fresh ticket while the one there is is good.
RENEWAL_SECONDS = 2.0
# The keytab that libkrb5 would fetch tickets with by itself; there is no such one.
_NO_KEYTAB = b"MEMORY:keyfront-none"
_ENVIRONMENT = "KRB5_CLIENT_KTNAME"

# Errors of Kerberos are numbers of RFC 4120 section 7.5.9, and libkrb5's own, from here on.
_BASE = -1765328384
# What a KDC says of the client: he is not to ask again and again, or his account may be locked.
_REFUSED = {
    1: "KDC_ERR_NAME_EXP",
    6: "KDC_ERR_C_PRINCIPAL_UNKNOWN",
    12: "KDC_ERR_POLICY",
    18: "KDC_ERR_CLIENT_REVOKED",
    23: "KDC_ERR_KEY_EXPIRED",
    24: "KDC_ERR_PREAUTH_FAILED",
    31: "KRB_AP_ERR_BAD_INTEGRITY",
}
_OLD_KEYS = frozenset((24, 31))
_UNKNOWN_SERVICE, _EXPIRED, _SKEW = 7, 32, 37
# Neither tickets nor keys; errors of GSSAPI's own say that as well.
_NOTHING, _ERRORS = frozenset((141, 181, 195)), 256
_SET_CLOCKS = "set the clocks of this machine, the KDC and the server by NTP"


@dataclass(frozen=True, kw_only=True)
class Kerberos:
    """The options by which a pool's service gets its Kerberos tickets.

    :param keytab: file with the service's keys; by default that of ``KRB5_CLIENT_KTNAME``, and
        without that the tickets that libkrb5 finds: those of ``KRB5CCNAME``, of gssproxy
    :param principal: the service's name, such as ``keystone/api.example.org@EXAMPLE.ORG``; by
        default the first in the keytab
    :param without_tls: true to do without TLS. What is searched can be read and changed on the way
        then
    """

    keytab: str | None = None
    principal: str | None = None
    without_tls: bool = False

    def __post_init__(self) -> None:
        for name in ("keytab", "principal"):
            value = getattr(self, name)
            if value is not None and (not value or "\0" in value):
                raise OptionError(f"kerberos_{name}", value or "(empty)", "a text, or left out")

    @property
    def source(self) -> str:
        """The keytab's path, as far as it is known; empty if there is none."""
        if self.keytab is not None:
            return self.keytab
        kind, _, path = os.environ.get(_ENVIRONMENT, "").rpartition(":")
        return path if kind in ("", "FILE", "WRFILE") else ""

    def check(self) -> None:
        """See that gssapi is there, and the keytab, if one is named.

        :raises OptionError: it is not
        """
        import_gssapi()
        if self.keytab is None:
            return
        option = "kerberos_keytab"
        try:
            # A named pipe would be waited for.
            fd = os.open(self.keytab, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a path"
            allowed = f"a file that can be read ({reason})"
            raise OptionError(option, self.keytab, allowed) from None
        status = os.fstat(fd)
        os.close(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OptionError(option, self.keytab, "a regular file")
        if status.st_mode & 0o027:
            raise OptionError(
                option, self.keytab,
                "only for its owner to write, and for nobody but its group to read; its mode is "
                f"{stat.S_IMODE(status.st_mode):04o}, try chmod 0600",
            )  # fmt: skip


def kerberos_of(values: Mapping[str, Any]) -> Kerberos | None:
    """Return the values of the options ``kerberos_…``; ``None`` if none is given.

    :param values: values by the options' names
    :raises OptionError: one is empty
    """
    made = Kerberos(
        keytab=values["kerberos_keytab"],
        principal=values["kerberos_principal"],
        without_tls=values["kerberos_without_tls"],
    )
    return None if made == Kerberos() else made


def import_gssapi() -> Any:
    """Return ``gssapi.raw`` of python-gssapi, which an extra brings.

    :raises OptionError: it is not installed, or cannot find libgssapi_krb5
    """
    try:
        import gssapi.raw
    except ImportError:
        raise OptionError("sasl_mechanism", GSSAPI, _MISSING) from None
    return gssapi.raw


class _Failure(Exception):
    """An error of GSSAPI, with its text, which only the thread knows in which it came up."""

    def __init__(self, code: int, text: str, *, credentials: bool, expired: bool) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        #: It was the login that failed.
        self.credentials = credentials
        #: The ticket is over.
        self.expired = expired


class _Call(Generic[T]):
    """Something that the thread is to do."""

    __slots__ = ("began", "call", "done", "error", "key", "result", "wanted")

    def __init__(self, key: object, call: Callable[[], T]) -> None:
        self.key = key
        self.call = call
        self.result: T | None = None
        self.error: BaseException | None = None
        self.began: float | None = None
        self.wanted = 0
        self.done = False


class NativeThread:
    """Does calls that may wait in C, one after the other, in a thread of the interpreter's own.

    Where ``threading`` is monkey-patched, that is no greenlet. It ends when there is nothing to do.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call[Any]] = deque()
        self._lock = interpreter.allocate_lock()
        self._runs = False

    def do(self, key: object, call: Callable[[], T], seconds: float) -> T:
        """Return what a call returns. Who asks for the same meanwhile waits for the same one.

        :param key: an object that tells the call from others
        :param call: the call; once it was begun it goes on, whoever waits
        :param seconds: time to wait for it
        :raises TimeoutError: it takes longer, or the one before it has taken ``LATE_SECONDS``; the
            error tells how long, in words
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            began = self._calls[0].began if self._calls else None
            if began is not None and (lasts := time.monotonic() - began) >= LATE_SECONDS:
                raise TimeoutError(f"for {lasts:.0f} s")
            mine = next((each for each in self._calls if each.key == key), None)
            if mine is None:
                mine = _Call(key, call)
                self._calls.append(mine)
            mine.wanted += 1
            starts, self._runs = not self._runs, True
        try:
            if starts:
                self._start()
            pause = _SHORTEST
            while not mine.done:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"within {seconds:.3g} s")
                time.sleep(min(pause, left))
                pause = min(pause * 2, _LONGEST)
        finally:
            with self._lock:
                mine.wanted -= 1
        if mine.error is not None:
            raise mine.error
        return mine.result  # type: ignore[return-value]

    def _start(self) -> None:
        try:
            interpreter.start_new_thread(self._work, ())
        except RuntimeError as error:
            with self._lock:
                self._runs = False
            raise KerberosError(f"no thread can be started for Kerberos: {error}") from None

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._calls and not self._calls[0].wanted:
                    self._calls.popleft()
                if not self._calls:
                    self._runs = False
                    return
                call = self._calls[0]
                call.began = time.monotonic()
            try:
                call.result = call.call()
            except BaseException as error:
                call.error = error.with_traceback(None)
            with self._lock:
                self._calls.popleft()
            call.done = True
            del call


class _Login:
    """The ticket that a KDC gave a service that logged in.

    :ivar handle: a function that returns credentials of GSSAPI, which nobody else waits for
    :ivar principal: the service's full name
    :ivar keys: the digest of the keys that it logged in with
    :ivar renew_at: the time from which another one should be fetched, by ``time.monotonic()``
    :ivar ends_at: the time at which it ends
    """

    __slots__ = ("ends_at", "handle", "keys", "principal", "renew_at")

    def __init__(
        self, handle: Callable[[], Any], principal: str, keys: bytes, lifetime: float, now: float
    ) -> None:
        self.handle = handle
        self.principal = principal
        self.keys = keys
        self.renew_at = now + lifetime * _HALF
        self.ends_at = now + lifetime


# Each login has a cache of its own, so that one that fails harms no other.
_numbers = itertools.count(1)
# Those of parent processes: to free one might wait for a lock that a thread there held.
_inherited: list[Any] = []


class Tickets:
    """The tickets of one service. Threads and greenlets may use them at once.

    :param options: the keytab and the principal
    :raises OptionError: python-gssapi is not installed, or the keytab cannot be read
    """

    def __init__(self, options: Kerberos) -> None:
        options.check()
        self._gss = import_gssapi()
        self._options = options
        # One for logins, and one for tickets of each server: what is there already waits for none.
        self._threads: dict[str, NativeThread] = {}
        self._login: _Login | None = None
        # By what the keytab was told from others, its digest.
        self._digest: tuple[tuple[int, ...], bytes] = ((), b"")

    @property
    def who(self) -> str:
        """The service's name in messages."""
        if self._login is not None:
            return self._login.principal
        if self._options.principal:
            return self._options.principal
        return f"the principal of {self._options.source}" if self._options.source else GSSAPI

    @property
    def good(self) -> bool:
        """True while there is a ticket of a login."""
        return self._login is not None and time.monotonic() < self._login.ends_at

    @property
    def due(self) -> bool:
        """True if the service is to log in: it has not, or half of its ticket's life is over, or it
        has other keys."""
        made = self._login
        return made is None or time.monotonic() >= made.renew_at or made.keys != self.keys()

    def keys(self) -> bytes:
        """Return a value that tells the service's keys from others, by the present file."""
        path = self._options.source
        asked = (self._options.principal or "").encode("utf-8", "surrogateescape")
        stamp: tuple[int, ...] = ()
        if path:
            with suppress(OSError, ValueError):
                status = os.stat(path)
                stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if not stamp:
            return b"no keytab " + asked
        known, digest = self._digest
        if known != stamp:
            try:
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
            except OSError:
                return b"no keytab " + asked
            self._digest = stamp, digest
        return digest + asked

    def put_off(self) -> None:
        """Leave the next login for a while: the ticket there is is good."""
        if self._login is not None:
            self._login.renew_at = time.monotonic() + _RETRY_SECONDS
            self._login.keys = self.keys()

    def log_in(self, seconds: float) -> None:
        """Have the KDC give a ticket for the service's keys.

        :param seconds: time to wait for it
        :raises CredentialsError: the KDC refused
        :raises KerberosError: it does not answer, or there is nobody to log in as
        """
        keys = self.keys()
        self._ask(
            "", keys, lambda: self._acquire(keys), seconds, f"to the login of {self.who}"
        )

    def exchange(self, host: str, end_point: bytes, seconds: float) -> Exchange:
        """Return the client's side of a BIND, with a ticket for a server.

        :param host: the server's own name, as in its URL
        :param end_point: the channel binding of TLS; empty for none
        :param seconds: time to wait for the KDC
        :raises KerberosError: it does not answer, or knows no such server, or the login is over
        """
        made = self._login
        if made is None or time.monotonic() >= made.ends_at:
            raise KerberosError(f"the Kerberos ticket of {self.who} has ended")
        # With an empty realm, so that the KDC tells which: nothing is asked of DNS, and least of
        # all for the name of an address.
        service = f"ldap/{host.lower()}@"
        context = self._ask(
            service,
            object(),
            lambda: _Context(self._gss, made.handle(), service, end_point),
            seconds,
            f"to the request for a ticket of {service[:-1]}",
        )
        return Exchange(context, made.principal)

    def after_fork(self) -> None:
        """Forget the parent's login: a thread of it may have been at work."""
        self._threads = {}
        if self._login is not None:
            _inherited.append(self._login)
            self._login = None

    def _ask(
        self, thread: str, key: object, call: Callable[[], T], seconds: float, what: str
    ) -> T:
        def attempt() -> T:
            try:
                return call()
            except self._gss.GSSError as error:
                # Its text is the thread's, and with its frames it would hold the credentials.
                failed = _failure(self._gss, error)
            raise failed

        failure: _Failure | None = None
        late = ""
        seconds = max(seconds, 0.0)
        try:
            return self._threads.setdefault(thread, NativeThread()).do(key, attempt, seconds)
        except TimeoutError as error:
            late = str(error)
        except _Failure as error:
            failure = error
        if failure is None:
            raise KerberosError(f"Kerberos: no answer of the KDC {late} {what}")
        try:
            raise self._told(failure)
        finally:
            failure = None  # or it would hold this frame, and this frame it

    def _acquire(self, keys: bytes) -> None:
        """Log in; called by the thread. It counts even if nobody waits for it any more."""
        gss, began = self._gss, time.monotonic()
        name = None
        if self._options.principal is not None:
            text = self._options.principal.encode("utf-8", "surrogateescape")
            name = gss.import_name(text, gss.NameType.kerberos_principal)
        store: dict[bytes, bytes] | None = None
        own = self._options.keytab is not None or bool(os.environ.get(_ENVIRONMENT))
        if own:
            store = {b"ccache": b"MEMORY:keyfront-%d-%d" % (os.getpid(), next(_numbers))}
            if self._options.keytab is not None:
                store[b"client_keytab"] = os.fsencode(self._options.keytab)
        options = {"mechs": [gss.MechType.kerberos], "usage": "initiate"}
        if store is None:
            found = gss.acquire_cred(name, **options).creds
        else:
            gss.acquire_cred_from(store, name, **options)
            # Of the tickets alone: libkrb5 would fetch others with the keytab when it likes.
            store[b"client_keytab"] = _NO_KEYTAB
            found = gss.acquire_cred_from(store, name, **options).creds

        def handle() -> Any:
            # Whoever asks a KDC by one holds its lock meanwhile.
            return found if store is None else gss.acquire_cred_from(store, name, **options).creds

        about = gss.inquire_cred(found)
        principal = gss.display_name(about.name).name.decode("utf-8", "replace")
        self._login = _Login(handle, principal, keys, float(about.lifetime or 0), began)

    def _told(self, failure: _Failure) -> CredentialsError | KerberosError:
        """Return the error that an operator reads."""
        code, text = failure.code, failure.text
        if code in _REFUSED and failure.credentials:
            path = self._options.source
            source = f" with the keys of {path}" if path and path not in self.who else ""
            hint = "; were they made anew, the keytab has the old ones" if code in _OLD_KEYS else ""
            return CredentialsError(
                Verdict.WRONG_TICKET, code, _REFUSED[code],
                f"the KDC refused {self.who}{source}: {text}{hint}",
            )  # fmt: skip
        if failure.expired:
            self._login = None
        if code == _SKEW:
            text = f"{text}: {_SET_CLOCKS}"
        elif code == _UNKNOWN_SERVICE:
            text = f"{text}: the URL must have the name that the server has in Kerberos"
        elif failure.credentials and (code in _NOTHING or not 0 <= code < _ERRORS):
            text = self._no_credentials()
        return KerberosError(f"Kerberos: {text}")

    def _no_credentials(self) -> str:
        path, principal = self._options.source, self._options.principal
        if not path:
            return (
                "there is no keytab and no ticket; name the service's keytab (kerberos_keytab, "
                f"or {_ENVIRONMENT})"
            )
        if not os.access(path, os.R_OK):
            return f"the keytab {path} cannot be read"
        wanted = f"no key of {principal}" if principal else "no key"
        return f"the keytab {path} has {wanted}; klist -k {path} lists those it has"


class _Context:
    """A context of GSSAPI, as :class:`.protocol.sasl_gssapi.Context`."""

    def __init__(self, gss: Any, credentials: Any, service: str, end_point: bytes) -> None:
        self._gss = gss
        self._credentials = credentials
        self._name = gss.import_name(service.encode("ascii"), gss.NameType.kerberos_principal)
        # Address types of 0, as all others have it.
        self._bindings = gss.ChannelBindings(0, None, 0, None, end_point) if end_point else None
        self._made: Any = None
        self.complete = False
        self.first = self._next(None)

    def _next(self, token: bytes | None) -> bytes:
        gss = self._gss
        flag = gss.RequirementFlag
        answer = gss.init_sec_context(
            self._name, creds=self._credentials, context=self._made, mech=gss.MechType.kerberos,
            flags=[flag.mutual_authentication, flag.out_of_sequence_detection],
            channel_bindings=self._bindings, input_token=token,
        )  # fmt: skip
        self._made = answer.context
        if not answer.more_steps:
            if flag.mutual_authentication not in answer.flags:
                raise ProtocolError("the server did not prove who it is")
            self.complete = True
        return bytes(answer.token or b"")

    def step(self, token: bytes) -> bytes:
        """Return the answer to a token of the server's; empty if there is none."""
        return bytes(self._read(lambda: self._next(token)))

    def wrap(self, message: bytes) -> bytes:
        """Return a message that nobody can change on the way."""
        return bytes(self._read(lambda: self._gss.wrap(self._made, message, False).message))

    def unwrap(self, token: bytes) -> bytes:
        """Return the message that is in a token of the server's."""
        return bytes(self._read(lambda: self._gss.unwrap(self._made, token).message))

    def _read(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._gss.GSSError as error:
            failed = _failure(self._gss, error)
        hint = f": {_SET_CLOCKS}" if failed.code == _SKEW else ""
        raise ProtocolError(f"a token of GSSAPI is not accepted: {failed.text}{hint}")


def _failure(gss: Any, error: Any) -> _Failure:
    """Return the text of an error of GSSAPI; to be called by the thread in which it came up."""
    minor = error.min_code - (1 << 32) if error.min_code >= 1 << 31 else error.min_code
    words = error.get_all_statuses(error.min_code, False) if error.min_code else []
    words = words or error.get_all_statuses(error.maj_code, True)
    text = "; ".join(
        each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in words
    )
    code = minor - _BASE
    expired = code == _EXPIRED or isinstance(error, gss.ExpiredCredentialsError)
    missing = isinstance(error, gss.MissingCredentialsError)
    return _Failure(code, text, credentials=missing, expired=expired)

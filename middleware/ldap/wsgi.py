"""The ``ldap_auth`` filter: HTTP Basic logins against a directory, for any WSGI service.

In a service's paste file, where its own authentication would stand::

    [pipeline:main]
    pipeline = ldap_auth service

    [filter:ldap_auth]
    use = egg:keyfront#ldap_auth
    urls = ldaps://ldap1.example.org ldaps://ldap2.example.org
    user_dn = uid={},ou=People,dc=example,dc=org

Each request is one login, and each login one BIND: nothing is remembered of it, so a password that
was changed or an account that was locked counts at once. The name goes on as ``REMOTE_USER``,
``X-User`` and ``X-User-Name``, as text, where oslo.middleware's basic authentication puts it; what
the client sent under these names or any other that stands for an identity does not, nor does
the password. All options are in ``keyfront.middleware.ldap.wsgi_options``.

A refusal is 401, the same for an unknown user and a wrong password; with the directory away or all
its connections in use it is 503 with ``Retry-After``. The log tells the reason. Basic credentials
can be read by everybody between, so the service must be reached over HTTPS.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keyfront.errors import (
    CredentialsError,
    FilterError,
    KeyfrontError,
    OptionError,
    PoolFullError,
    PoolTimeoutError,
)

from . import wsgi_options
from .directory import LDAPPool
from .kerberos import kerberos_of
from .protocol.tls import TLS
from .protocol.urls import ServerURL
from .wsgi_options import PublicPath

LOG = logging.getLogger(__name__)

WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

#: Seconds after which a client should try again: the directory is away, or too many log in.
RETRY_AFTER = 5
RETRY_AFTER_BUSY = 1
# Seconds without a failure after which an outage is over.
_QUIET = 5.0

_BUSY = (PoolFullError, PoolTimeoutError)
# The application may resolve what is relative in a path, and be elsewhere then.
_DOTS = re.compile(r"//|/\.\.?(?:/|$)")

# Those of LDAPPool that are the same.
_POOL_OPTIONS = (
    *("urls", "nameservers", "srv_domains"),
    *("strategy", "fail_back", "user_dn", "search_base", "user_filter"),
    *("user_name_attribute", "sasl_mechanism"),
    *("min_size", "max_size", "auth_min_size", "auth_max_size", "timeout", "max_waiting"),
    *("max_lifetime", "max_idle", "check_after", "connect_timeout", "operation_timeout"),
    *("max_answer", "max_entries", "password_policy", "fast_bind"),
    *("max_refused_logins", "refused_logins_seconds"),
)

_MESSAGES = {
    401: ("Unauthorized", "The request you have made requires authentication."),
    503: ("Service Unavailable", "Logins cannot be checked at present; try again later."),
}

#: Characters of the header, at most.
MAX_CREDENTIALS = 8192

# What names a user, or rights of one, begins so in the environ: all headers that auth_token of
# keystonemiddleware removes, those of proxies that authenticate, and what a server in front may
# have set, as nobody but the filter says who the user is. X_User and X-User are the same there.
_IDENTITY = (
    *("HTTP_X_USER", "HTTP_X_PROJECT", "HTTP_X_TENANT", "HTTP_X_DOMAIN", "HTTP_X_ROLE"),
    *("HTTP_X_SERVICE", "HTTP_X_IDENTITY", "HTTP_X_IS_ADMIN", "HTTP_X_TRUST", "HTTP_X_GROUP"),
    *("HTTP_OPENSTACK_SYSTEM_SCOPE", "HTTP_REMOTE_", "HTTP_X_REMOTE_USER", "HTTP_X_AUTH"),
    *("HTTP_X_FORWARDED_USER", "HTTP_X_FORWARDED_EMAIL", "HTTP_X_FORWARDED_GROUPS"),
    *("HTTP_X_FORWARDED_PREFERRED_USERNAME", "HTTP_X_FORWARDED_ACCESS_TOKEN"),
    *("HTTP_X_STORAGE_TOKEN", "HTTP_AUTHORIZATION", "REDIRECT_HTTP_AUTHORIZATION"),
    *("REMOTE_USER", "REDIRECT_REMOTE_USER", "AUTH_TYPE", "REDIRECT_AUTH_TYPE"),
)
#: Those that prove something, to whoever validates them.
TOKENS = frozenset({"HTTP_X_AUTH_TOKEN", "HTTP_X_STORAGE_TOKEN", "HTTP_X_SERVICE_TOKEN"})

# RFC 7617 section 2: in neither name nor password. With those of Latin-1.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Nothing to a directory (RFC 4518 section 2.2), so that a name with them is another's.
_IGNORED = re.compile("[\u034f\u1806\u180b-\u180f\ufe00-\ufe0f\ufffc\ufffd]")


class LDAPAuth:
    """The filter: asks for HTTP Basic credentials, and checks them with a pool.

    :param application: WSGI application that it stands in front of
    :param make_pool: makes the pool; called once, for the first login
    :param realm: realm that the user is told to log in to
    :param lower_case: use names in lower case
    :param public_paths: requests that need no login
    :param keep_tokens: let tokens go on to the application
    """

    def __init__(
        self,
        application: WSGIApplication,
        make_pool: Callable[[], LDAPPool],
        *,
        realm: str,
        lower_case: bool = False,
        public_paths: Iterable[PublicPath] = (),
        keep_tokens: bool = False,
    ) -> None:
        self.application = application
        self.pool: LDAPPool | None = None
        self._make_pool = make_pool
        self._lock = threading.Lock()
        quoted = realm.replace("\\", "\\\\").replace('"', '\\"')
        self._challenge = f'Basic realm="{quoted}", charset="UTF-8"'
        self._lower_case = lower_case
        self._public_paths = tuple(public_paths)
        self._kept = TOKENS if keep_tokens else frozenset()
        self._outage = Outage()
        self._warned = False

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        if self._public_paths and self._is_public(environ):
            strip(environ, self._kept)
            return self.application(environ, start_response)
        if not self._warned:
            self._warn(environ)
        outcome = self._log_in(environ)
        if not isinstance(outcome, str):
            return self._refuse(environ, start_response, outcome)
        strip(environ, self._kept)
        # As text, as keystonemiddleware and oslo.middleware do, not in the Latin-1 of PEP 3333.
        environ["REMOTE_USER"] = environ["HTTP_X_USER"] = environ["HTTP_X_USER_NAME"] = outcome
        environ["AUTH_TYPE"] = "Basic"
        return self.application(environ, start_response)

    def close(self, timeout: float = 5.0) -> None:
        """Close the pool, if there is one; later logins are answered 503.

        :param timeout: seconds to wait for logins under way
        """
        if self.pool is not None:
            self.pool.close(timeout)

    def _log_in(self, environ: Mapping[str, Any]) -> str | int:
        """Return the user's name; 0 if refused, or the seconds after which to try again."""
        found = credentials(environ.get("HTTP_AUTHORIZATION"))
        if found is None:
            return 0
        name, password = found
        name = name.lower() if self._lower_case else name
        address = str(environ.get("REMOTE_ADDR", ""))
        failure: Exception | None = None
        try:
            name = self._pool().authenticate(name, password, address=address).name
        except KeyfrontError as error:
            # without its frames, which have the password
            failure = error.with_traceback(None)
        finally:
            del found, password
        if failure is None:
            self._outage.answered()
            return name.lower() if self._lower_case else name
        if isinstance(failure, CredentialsError):
            self._outage.answered()
            where = shown(address)
            LOG.info("ldap_auth: login of '%s' from %s: %s", shown(name), where, str(failure))
            return 0
        self._outage.failed(str(failure))
        return RETRY_AFTER_BUSY if isinstance(failure, _BUSY) else RETRY_AFTER

    def _pool(self) -> LDAPPool:
        pool = self.pool
        if pool is None:
            # Nothing under the lock waits: a new pool connects when it is used.
            with self._lock:
                pool = self.pool
                if pool is None:
                    pool = self.pool = self._make_pool()
        return pool

    def _refuse(
        self, environ: Mapping[str, Any], start_response: Callable[..., Any], retry_after: int
    ) -> Iterable[bytes]:
        code = 503 if retry_after else 401
        title, message = _MESSAGES[code]
        error = {"code": code, "title": title, "message": message}
        body = json.dumps({"error": error}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if retry_after:
            headers.append(("Retry-After", str(retry_after)))
        else:
            headers.append(("WWW-Authenticate", self._challenge))
        start_response(f"{code} {title}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _is_public(self, environ: Mapping[str, Any]) -> bool:
        method = environ["REQUEST_METHOD"]
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        for public in self._public_paths:
            if public.methods and method not in public.methods:
                continue
            if path == public.path or (
                public.below and path.startswith(public.path) and not _DOTS.search(path)
            ):
                return True
        return False

    def _warn(self, environ: Mapping[str, Any]) -> None:
        """Say once that passwords come in the clear, as far as can be seen."""
        if environ.get("HTTP_AUTHORIZATION") is None or is_secure(environ):
            return
        self._warned = True
        LOG.warning(
            "ldap_auth: passwords come over plain HTTP. Serve it over HTTPS; if a proxy in front "
            "does, have it set X-Forwarded-Proto"
        )


def credentials(header: str | None) -> tuple[str, str] | None:
    """Return name and password of an ``Authorization`` header (RFC 7617), ``None`` without them.

    The name ends at the first colon, and neither may have control characters. Both are
    in UTF-8, as the challenge says; what cannot be that is taken for Latin-1, which clients that do
    not read the challenge send. It is one or the other, as the one login must not become two.

    A directory sees no difference between names that differ in compatibility forms, in spaces
    around or doubled, or in characters that do not show (RFC 4518). A service does, so only one of
    them is accepted; but see ``name_case``.
    """
    if header is None or len(header) > MAX_CREDENTIALS:
        return None
    scheme, _, token = header.strip(" \t").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        data = base64.b64decode(token.strip(" "), validate=True)
    except ValueError:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    name, _, password = text.partition(":")
    name = unicodedata.normalize("NFC", name)
    if not password or not _is_name(name) or _CONTROL.search(password):
        return None
    return name, password


def _is_name(name: str) -> bool:
    if not name or not name.isprintable() or name != " ".join(name.split()):
        return False
    return name.isascii() or (
        unicodedata.normalize("NFKC", name) == name and not _IGNORED.search(name)
    )


def strip(environ: dict[str, Any], kept: frozenset[str] = frozenset()) -> None:
    """Remove from the environ all that stands for an identity, and the password.

    :param kept: keys that stay nevertheless
    """
    for key in [key for key in environ if key.startswith(_IDENTITY)]:
        if key not in kept:
            del environ[key]
    raw = environ.get("headers_raw")
    if raw:  # eventlet's server has them twice
        names = ((header, "HTTP_" + header[0].upper().replace("-", "_")) for header in raw)
        environ["headers_raw"] = tuple(
            header for header, name in names if name in kept or not name.startswith(_IDENTITY)
        )


def is_secure(environ: Mapping[str, Any]) -> bool:
    """Return whether the client speaks HTTPS: to us, or as it says to a proxy in front."""
    if environ.get("wsgi.url_scheme") == "https":
        return True
    forwarded = environ.get("HTTP_X_FORWARDED_PROTO", "").partition(",")[0]
    return (
        forwarded.strip().lower() == "https"
        or "proto=https" in environ.get("HTTP_FORWARDED", "").replace('"', "").lower()
    )


def shown(name: str) -> str:
    """Return a name as the log may have it: one line, of at most 100 characters."""
    name = "".join(x if x.isprintable() and x != "'" else "?" for x in name[:101])
    return name if len(name) <= 100 else f"{name[:100]}..."


class Outage:
    """Logs when logins cannot be checked, and when they can again: a line for each.

    :param clock: returns seconds that never go back
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._last = 0.0
        self._count = 0

    def failed(self, reason: str) -> None:
        """Note that a login could not be checked.

        :param reason: one line for the log
        """
        now = self._clock()
        with self._lock:
            first = self._since is None
            if first:
                self._since = now
                self._count = 0
            self._last = now
            self._count += 1
        if first:
            LOG.error("ldap_auth: logins are answered 503: %s", reason)

    def answered(self) -> None:
        """Note that a login was checked. The outage is over if no other failed for a while."""
        if self._since is None:
            return
        now = self._clock()
        with self._lock:
            if self._since is None or now - self._last < _QUIET:
                return
            seconds, count = self._last - self._since, self._count
            self._since = None
        LOG.warning(
            "ldap_auth: logins are checked again; %d were answered 503 in %.1f s", count, seconds
        )


def filter_factory(
    global_conf: Mapping[str, str] | None, **local_conf: str
) -> Callable[[WSGIApplication], LDAPAuth]:
    """Build the filter (entry point ``paste.filter_factory``).

    Options and files are checked here; nothing is connected to before the first login, so that a
    server may load the pipeline and fork afterwards.

    :param local_conf: options by name, see ``keyfront.middleware.ldap.wsgi_options``
    :raises OptionError: an option is unknown, missing or out of its range, or a file that one names
        cannot be used
    """
    values = wsgi_options.read(local_conf)
    arguments = pool_arguments(values)

    def build(application: WSGIApplication) -> LDAPAuth:
        return LDAPAuth(
            application,
            lambda: LDAPPool(**arguments),
            realm=values["realm"],
            lower_case=values["name_case"] == "lower",
            public_paths=values["public_paths"],
            keep_tokens=values["keep_tokens"],
        )

    return build


def pool_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :class:`~.directory.LDAPPool` that options stand for.

    :param values: values of all options, by :func:`keyfront.middleware.ldap.wsgi_options.read`
    :raises OptionError: one is out of its range, or a file cannot be used
    """
    name = wsgi_options.FILTER
    servers = [ServerURL.parse(text, f"{name}: urls") for text in values["urls"]]
    try:
        tls = TLS(
            ca_file=values["tls_ca_file"],
            ca_dir=values["tls_ca_dir"],
            verify=values["tls_verify"],
            start_tls=values["start_tls"],
            client_cert=values["tls_client_cert"],
            client_key=values["tls_client_key"],
            ciphers=values["tls_ciphers"],
        )
        arguments = {option: values[option] for option in _POOL_OPTIONS}
        arguments |= {
            "tls": tls,
            "kerberos": kerberos_of(values),
            "bind_dn": values["bind_dn"] or "",
            "bind_password": values["bind_password"] or "",
            "bind_password_file": values["bind_password_file"],
        }
        # One that is thrown away reads the files, and says what the pool has against the rest.
        LDAPPool(**arguments, open=False)
    except OptionError as error:
        option = error.option if error.option in values else f"tls_{error.option}"
        raise OptionError(f"{name}: {option}", error.value, error.allowed) from None
    except FilterError as error:
        raise OptionError(
            f"{name}: user_filter", values["user_filter"], f"a filter of RFC 4515 ({error})"
        ) from None
    for server in servers:
        if server.is_in_the_clear and not tls.start_tls:
            LOG.warning(
                "ldap_auth: passwords go to %s in the clear; use ldaps:// or start_tls", server
            )
    return arguments

"""Keystone's LDAP identity through the pool: ``[identity] driver = keyfront_ldap``.

It is Keystone's own driver (entry point ``keystone.identity``) with other connections beneath, so
every option of ``[ldap]`` keeps its meaning and every reference looks as before; what is new is in
``[keyfront_ldap]``. It can be the default driver or that of a domain, from a file or from the
database. Where it differs from the stock driver:

* A login is exactly one BIND, each time. The stock driver's pool of authenticated connections
  lets an old password, a deleted user and a stopped server log in for another minute.
* Only a server's refusal is a wrong password (401). When no server answers, the login and
  everything else that needs the directory is answered 503 with ``Retry-After``.
* Within one HTTP request no search is sent twice; a login by name takes three searches at most
  (by name, by id, the groups) where the stock driver sends nine without a cache.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import flask
import ldap
from keystone import exception
from keystone.i18n import _
from keystone.identity.backends import base
from keystone.identity.backends.ldap import common, core

from keyfront.common.request_phases import DIRECTORY, NOBODY, current, timed
from keyfront.errors import (
    CredentialsError,
    DirectoryError,
    IncompatibleError,
    OptionError,
)

from ..protocol.messages import password_octets
from . import observers, options
from .handler import DriverPool, PoolHandler, refused_identity

LOG = logging.getLogger(__name__)

#: Seconds after which a client may try again.
RETRY_AFTER = 1

# Longer results are not kept for the rest of a request.
_KEPT_ENTRIES = 16
# Whatever else the server answers is for Keystone's code to catch.
_FAILURES = (ldap.INVALID_CREDENTIALS, ldap.SERVER_DOWN, ldap.TIMEOUT, OptionError)

_SEARCHES = "_keyfront_ldap_searches"

# What Keystone's own handler is called with here, besides `sizelimit` (from Keystone 30 on).
_SHAPES = {
    "search_s": ("base", "scope", "filterstr", "attrlist", "attrsonly"),
    "search_ext": (
        *("base", "scope", "filterstr", "attrlist", "attrsonly"),
        *("serverctrls", "clientctrls", "timeout", "sizelimit"),
    ),
    "result3": ("msgid", "all", "timeout", "resp_ctrl_classes"),
    "connect": (
        *("url", "page_size", "alias_dereferencing", "use_tls", "tls_cacertfile"),
        *("tls_cacertdir", "tls_req_cert", "chase_referrals", "debug_level"),
    ),
    "simple_bind_s": ("who", "cred"),
    "add_s": ("dn", "modlist"),
    "modify_s": ("dn", "modlist"),
}

T = TypeVar("T")
Found = list[tuple[str, dict[str, list[Any]]]]


@functools.cache
def takes_size_limit(handler: type) -> bool:
    """Return whether a ``KeystoneLDAPHandler`` limits what ``search_s`` finds.

    Keystone 30 does; 27 to 29 have ``sizelimit`` in ``search_ext`` only.

    :raises IncompatibleError: it is called in another way than from 27 to 30
    """
    for name, needed in _SHAPES.items():
        try:
            known = list(inspect.signature(getattr(handler, name)).parameters)[1:]
        except (AttributeError, TypeError, ValueError):
            known = []
        if tuple(known[: len(needed)]) != needed:
            raise IncompatibleError(
                f"driver = keyfront_ldap: Keystone's {handler.__name__}.{name}() takes "
                f"{', '.join(known) or 'nothing that can be seen'}, and keyfront needs "
                f"{', '.join(needed)} as Keystone 27 to 30 have; set driver = ldap, or install a "
                "keyfront for this Keystone"
            )
    return "sizelimit" in inspect.signature(handler.search_s).parameters  # type: ignore[attr-defined]


class DirectoryUnavailable(exception.LDAPServerConnectionError):
    """No LDAP server could be asked: 503, where Keystone's own class is 500.

    The client is told no names; what happened is in the log.
    """

    code = 503
    title = "Service Unavailable"
    message_format = "The directory of users cannot be asked at the moment. Try again later."


class Handler(common.KeystoneLDAPHandler):
    """Keystone's conversion of values on top of the pool, and its errors for outages."""

    def __init__(self, conn: PoolHandler, owner: DriverPool) -> None:
        super().__init__(conn=conn)
        self._owner = owner
        # What `search_ext` prepared last, and what it is kept by.
        self._pending: tuple[Any, Any] | None = None

    def search_s(
        self,
        base: str,
        scope: int,
        filterstr: str = "(objectClass=*)",
        attrlist: list[str] | None = None,
        attrsonly: int = 0,
        sizelimit: int = 0,
    ) -> Found:
        """Search, unless this HTTP request did so already.

        :param sizelimit: entries at most; 0 for any number
        :raises DirectoryUnavailable: nobody answered
        :raises keystone.exception.UnexpectedError: the configuration is wrong
        :raises keystone.exception.LDAPInvalidCredentialsError: the identity of ``[ldap] user``
            was refused
        :raises ldap.LDAPError: what else the server answered
        """
        key = (self._owner, base, scope, filterstr, _names(attrlist), attrsonly, sizelimit)
        if (kept := self._again(key)) is not None:
            return kept
        search: Any = super().search_s
        given: tuple[Any, ...] = (base, scope, filterstr, attrlist, attrsonly)
        if takes_size_limit(common.KeystoneLDAPHandler):
            found: Found = _asked("search", lambda: search(*given, sizelimit))
        else:
            found = _asked("search", lambda: search(*given))
            found = found[:sizelimit] if sizelimit else found
        self._keep(key, found)
        return found

    def search_ext(
        self,
        base: str,
        scope: int,
        filterstr: str = "(objectClass=*)",
        attrlist: list[str] | None = None,
        attrsonly: int = 0,
        serverctrls: Any = None,
        clientctrls: Any = None,
        timeout: float = -1,
        sizelimit: int = 0,
    ) -> Any:
        """Prepare a search for :meth:`result3`: up to Keystone 29 one that is limited, by the first
        page of so many entries.

        :raises keystone.exception.Error: as :meth:`search_s`
        """
        pages = tuple((x.controlType, x.size, x.cookie) for x in serverctrls or ())
        key = (self._owner, base, scope, filterstr, _names(attrlist), attrsonly, sizelimit, pages)
        if (kept := self._again(key)) is not None:
            return _Again(kept)
        message = _asked(
            "prepare search",
            lambda: super(Handler, self).search_ext(
                base, scope, filterstr, attrlist, attrsonly, serverctrls, clientctrls, timeout,
                sizelimit,
            ),
        )  # fmt: skip
        self._pending = (message, key)
        return message

    def result3(
        self,
        msgid: Any = ldap.RES_ANY,
        all: int = 1,
        timeout: float | None = None,
        resp_ctrl_classes: Any = None,
    ) -> Found:
        """Wait for what :meth:`search_ext` prepared, and return what was found.

        :raises keystone.exception.Error: as :meth:`search_s`
        """
        if isinstance(msgid, _Again):
            return msgid.found
        found: Found = _asked(
            "search", lambda: super(Handler, self).result3(msgid, all, timeout, resp_ctrl_classes)
        )
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] is msgid:
            self._keep(pending[1], found)
        return found

    def _again(self, key: Any) -> Found | None:
        """Return what this request has found by a search before, and tell of it anew: it may be for
        another value of those that Keystone keeps, which depends on the directory as well."""
        searches = _searches_of_this_request()
        if searches is None or key not in searches:
            return None
        found, sources = searches[key]
        for source in sources:
            for observer in observers:
                observer(self._owner, source)
        return _copied(found)

    def _keep(self, key: Any, found: Found) -> None:
        searches = _searches_of_this_request()
        if searches is not None and len(found) <= _KEPT_ENTRIES:
            searches[key] = _copied(found), frozenset(self.conn.sources)

    def add_s(self, dn: str, modlist: Any) -> Any:
        """Add an entry; what was found before it in this request is forgotten."""
        _forget()
        return super().add_s(dn, modlist)

    def modify_s(self, dn: str, modlist: Any) -> Any:
        """Change an entry; what was found before it in this request is forgotten."""
        _forget()
        return super().modify_s(dn, modlist)


class _Again:
    """The results that this request has found before, in place of a search that is under way."""

    def __init__(self, found: Found) -> None:
        self.found = found


class _Connections:
    """A mixin by which a stock ``BaseLdap`` takes its connections from the pool of its driver."""

    def __init__(self, conf: Any, owner: DriverPool | None = None) -> None:
        super().__init__(conf)  # type: ignore[call-arg]
        self._owner = DriverPool(conf) if owner is None else owner

    def get_connection(
        self, user: str | None = None, password: str | None = None, end_user_auth: bool = False
    ) -> Handler:
        """Return a handler; it borrows a connection for each operation.

        :param user: a DN to bind as; by default ``[ldap] user``, which the pool is bound as
        :param end_user_auth: only a password is to be checked, with one BIND
        :raises DirectoryUnavailable: nobody answered the BIND
        :raises keystone.exception.LDAPInvalidCredentialsError: it was refused
        """
        stock: Any = self
        handler = Handler(PoolHandler(self._owner, always_bind=end_user_auth), self._owner)
        # As the stock code does: what is done to its handlers is done to ours.
        handler.connect(
            stock.LDAP_URL,
            page_size=stock.page_size,
            alias_dereferencing=stock.alias_dereferencing,
            use_tls=stock.use_tls,
            tls_cacertfile=stock.tls_cacertfile,
            tls_cacertdir=stock.tls_cacertdir,
            tls_req_cert=stock.tls_req_cert,
            chase_referrals=stock.chase_referrals,
            debug_level=stock.debug_level,
        )
        user = stock.LDAP_USER if user is None else user
        password = stock.LDAP_PASSWORD if password is None else password
        failure: Exception | None = None
        try:
            if user and password:
                handler.simple_bind_s(user, password)
            else:
                handler.simple_bind_s()
        except ldap.INVALID_CREDENTIALS:
            raise exception.LDAPInvalidCredentialsError() from None
        except _FAILURES as error:
            failure = error
        finally:
            del password
        if failure is not None:
            raise _told(failure)
        return handler


class UserApi(_Connections, core.UserApi):
    """Users, by connections of the pool."""


class GroupApi(_Connections, core.GroupApi):
    """Groups, by connections of the pool."""


class Identity(core.Identity):
    """The identity driver (entry point ``keystone.identity``).

    :param conf: a domain's own configuration; by default Keystone's
    :raises keyfront.errors.OptionError: an option of Keystone's own configuration is wrong. That
        of a domain is told when the domain is used, since the other domains must go on.
    :raises keyfront.errors.IncompatibleError: this Keystone's LDAP code looks otherwise
    """

    def __init__(self, conf: Any = None) -> None:
        # Not the stock driver's: its users and groups would be made twice.
        base.IdentityDriverBase.__init__(self)
        takes_size_limit(common.KeystoneLDAPHandler)
        self.conf = core.CONF if conf is None else conf
        self.register_opts(self.conf)
        self.pool = DriverPool(self.conf)
        self.user = UserApi(self.conf, self.pool)
        self.group = GroupApi(self.conf, self.pool)
        if conf is None:
            self.pool.check()

    @staticmethod
    def register_opts(conf: Any) -> None:
        """Make a domain's configuration know ``[keyfront_ldap]`` before the database fills it."""
        options.register_ldap(conf)

    def authenticate(self, user_id: str, password: str) -> dict[str, Any]:
        """Check a password with exactly one BIND and return the user.

        :param user_id: the user's id in the directory, without the domain
        :param password: the password, which is kept nowhere
        :raises AssertionError: the server refused the user or the password, either is empty, or
            there is no such user
        :raises DirectoryUnavailable: nobody answered; it says nothing of the password
        """
        refused = _("Invalid user / password")
        # An empty password would be an unauthenticated bind, which succeeds: RFC 4513 5.1.2.
        secret = password_octets(password) if isinstance(password, (str, bytes)) else None
        if not user_id or not secret:
            raise AssertionError(refused)
        try:
            user = self._get_user(user_id)
        except exception.UserNotFound:
            raise AssertionError(refused) from None
        failure: DirectoryError | None = None
        try:
            with timed(DIRECTORY, "bind") if current.get() else NOBODY:
                identity = self.pool.get().authenticate(user["dn"], secret, address=_address())
        except DirectoryError as error:
            # Without its frames, which hold the password, and raised below outside of them.
            failure = error.with_traceback(None)
        finally:
            del secret, password
        if failure is None:
            _log_warnings(user["dn"], identity)
            found: dict[str, Any] = self.user.filter_attributes(user)
            return found
        if isinstance(failure, CredentialsError):
            # The user is told the same in every case; of what to do, the operator is.
            LOG.info("LDAP login of %s: %s", user["dn"], failure)
            raise AssertionError(refused)
        raise unavailable(f"login of {user['dn']}: {failure}")


def unavailable(reason: str) -> DirectoryUnavailable:
    """Log an outage and return its exception; the answer to this request gets ``Retry-After``.

    :param reason: names the server and what happened
    """
    LOG.error("LDAP: %s", reason)
    if flask.has_request_context():
        flask.after_this_request(_add_retry_after)
    return DirectoryUnavailable()


def _told(error: Exception) -> exception.Error:
    """Log the reason why Keystone's LDAP code cannot go on, and return its exception."""
    if isinstance(error, OptionError):
        LOG.error("LDAP: %s", error)
        return exception.UnexpectedError(exception=str(error))
    # What python-ldap's exception stands for names the server.
    reason = str(error.__cause__ or error)
    if isinstance(error, ldap.INVALID_CREDENTIALS):
        kind = refused_identity(error.__cause__)
        if kind == "certificate":
            LOG.error("LDAP: the service's certificate was refused: %s", reason)
        elif kind:
            LOG.error("LDAP: the service's Kerberos principal was refused: %s", reason)
        else:
            LOG.error("LDAP: the identity of [ldap] user was refused: %s", reason)
        return exception.LDAPInvalidCredentialsError()
    return unavailable(reason)


def _address() -> str:
    """Return the client's address, as Keystone sees it: behind proxies by ``[oslo_middleware]``."""
    return flask.request.remote_addr or "" if flask.has_request_context() else ""


def _add_retry_after(response: Any) -> Any:
    if response.status_code == DirectoryUnavailable.code:
        response.headers["Retry-After"] = str(RETRY_AFTER)
    return response


def _log_warnings(dn: str, identity: Any) -> None:
    if identity.grace is not None:
        LOG.info("LDAP login of %s: password expired, %s more logins", dn, identity.grace)
    elif identity.password_expiring is not None:
        LOG.info("LDAP login of %s: password expires in %s s", dn, identity.password_expiring)


def _searches_of_this_request() -> dict[Any, Any] | None:
    """Return the searches that this HTTP request did so far; ``None`` outside of one."""
    if not flask.has_request_context():
        return None
    kept = getattr(flask.g, _SEARCHES, None)
    if kept is None:
        kept = {}
        setattr(flask.g, _SEARCHES, kept)
    return kept


def _forget() -> None:
    kept = _searches_of_this_request()
    if kept:
        kept.clear()


def _asked(operation: str, call: Callable[[], T]) -> T:
    """Return the result of a search, with Keystone's exceptions for outages and refusals.

    :param operation: the operation's name in a trace
    :raises keystone.exception.Error: as :meth:`Handler.search_s`
    """
    try:
        with timed(DIRECTORY, operation) if current.get() else NOBODY:
            return call()
    except ldap.SIZELIMIT_EXCEEDED:
        raise exception.LDAPSizeLimitExceeded() from None
    except _FAILURES as error:
        failure = error
    # Outside of the except block: the log line is whole, and needs no traceback.
    try:
        raise _told(failure)
    finally:
        del failure


def _names(attrlist: list[str] | None) -> tuple[str, ...] | None:
    return None if attrlist is None else tuple(sorted(x for x in attrlist if x))


def _copied(found: Found) -> Found:
    return [(dn, {name: list(values) for name, values in attributes.items()})
            for dn, attributes in found]

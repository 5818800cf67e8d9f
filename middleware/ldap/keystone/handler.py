"""Answers Keystone's LDAP identity code from the pool, in the manner of python-ldap.

Keystone speaks python-ldap: its argument order, its results, its exception classes. The handler
here speaks it too, so that Keystone's code above runs unchanged. One is made for each operation
and nested in each other, so none of them holds a connection from bind to unbind: each operation
checks one out and returns it. Only a paged search keeps its connection, on which alone its cookie
is good, until the last page, an error, or the end of the handler.

This module imports Keystone and python-ldap; both are there wherever Keystone's ``ldap`` extra is.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ldap
import ldap.controls.libldap
from keystone.identity.backends.ldap import common

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryError,
    DirectoryTimeoutError,
    FilterError,
    OptionError,
    Verdict,
)

from ..directory import LDAPPool
from ..protocol.result_codes import name_of
from ..protocol.urls import ServerURL
from . import observers
from .options import pool_arguments

LOG = logging.getLogger(__name__)

_PAGED = ldap.controls.libldap.SimplePagedResultsControl

# By result code; NO_UNIQUE_ENTRY is python-ldap's own and has the code of its base class.
_CLASSES: dict[int, type[Exception]] = {
    kind.errnum: kind
    for kind in vars(ldap).values()
    if isinstance(kind, type) and ldap.LDAPError in kind.__bases__ and hasattr(kind, "errnum")
}

# libldap's texts, where they are not the names of RFC 4511 in words.
_TEXTS = {
    -1: "Can't contact LDAP server",
    -5: "Timed out",
    -7: "Bad search filter",
    -9: "Bad parameter to an ldap routine",
    -12: "Not Supported",
    2: "Protocol error",
    3: "Time limit exceeded",
    7: "Authentication method not supported",
    8: "Strong(er) authentication required",
    11: "Administrative limit exceeded",
    12: "Critical extension is unavailable",
    17: "Undefined attribute type",
    20: "Type or value exists",
    50: "Insufficient access",
    51: "Server is busy",
    52: "Server is unavailable",
    53: "Server is unwilling to perform",
    66: "Operation not allowed on non-leaf",
    67: "Operation not allowed on RDN",
    68: "Already exists",
    69: "Cannot modify object class",
    71: "Operation affects multiple DSAs",
    80: "Other (e.g., implementation specific) error",
}


class DriverPool:
    """The pool of one driver, made when it is first asked for.

    Each driver has a pool of its own, made from its own configuration: nothing is shared by URL or
    kept by the process, so two domains on one server may differ in CA, identity and size. It is
    made late so that a server which loads Keystone and then forks opens nothing in the parent.

    :param conf: the configuration of Keystone, or of one of its domains
    """

    def __init__(self, conf: Any) -> None:
        self._conf = conf
        self._pool: LDAPPool | None = None
        self._lock = threading.Lock()
        self._warn()

    def get(self) -> LDAPPool:
        """Return the pool.

        :raises OptionError: an option is out of its range, or two contradict each other
        """
        pool = self._pool
        if pool is None:
            # Nothing under the lock waits: a new pool connects when it is used.
            with self._lock:
                pool = self._pool
                if pool is None:
                    pool = self._pool = LDAPPool(**pool_arguments(self._conf))
                    # A domain's driver is replaced when its configuration changes. At the end of
                    # the process the kernel closes what is open.
                    weakref.finalize(self, pool.close, 0.0).atexit = False
        return pool

    def is_service(self, who: str, password: str) -> bool:
        """Return whether these are what the pool binds with before it searches.

        :param who: a DN
        :param password: a password
        """
        ldap = self._conf.ldap
        if not (ldap.user and ldap.password):
            return not who
        return bool(who == ldap.user and password == ldap.password)

    def check(self) -> None:
        """Check the options without connecting.

        :raises OptionError: as :meth:`get`
        """
        pool_arguments(self._conf)

    def _warn(self) -> None:
        text = self._conf.ldap.url or ""
        with contextlib.suppress(OptionError):  # told when the pool is made
            for server in (ServerURL.parse(url) for url in re.split(r"[\s,]+", text) if url):
                if server.is_in_the_clear and not self._conf.ldap.use_tls:
                    LOG.warning(
                        "[ldap] url: passwords go to %s in the clear; use ldaps:// or use_tls",
                        server,
                    )
        if self._conf.ldap.chase_referrals:
            LOG.warning(
                "[ldap] chase_referrals = true: referrals are not followed, since the service's "
                "credentials would go to whatever server they name"
            )
        if self._conf.ldap.debug_level:
            LOG.info("[ldap] debug_level has no effect: libldap is not in use")


@contextlib.contextmanager
def _observed(handler: PoolHandler) -> Iterator[list[str]]:
    """Tell :data:`observers` of a search: also of an error that answers it, as "no such object".

    Who searches appends the server that answered, as ``Connection.source``.
    """
    sources: list[str] = []
    try:
        yield sources
    except DirectoryAnswerError:
        sources.append("")
        raise
    finally:
        for source in sources:
            handler.sources.add(source or None)
            for observer in observers:
                observer(handler._source, source or None)


@contextlib.contextmanager
def _python_ldap_errors() -> Iterator[None]:
    """Raise python-ldap's exceptions instead of ours; the cause is ours."""
    try:
        yield
    except DirectoryError as error:
        raise translated(error) from error.with_traceback(None)
    except OptionError as error:
        raise made(ldap.PARAM_ERROR, str(error)) from None


class PagedSearch:
    """One paged search: its request, its connection, and how far it has come.

    :param pool: lends the connection
    :param request: arguments of ``Connection.search_page`` but page size and cookie
    """

    def __init__(self, pool: LDAPPool, request: dict[str, Any]) -> None:
        self.request = request
        self.size = 0
        self.cookie = b""
        self.left_open = False
        self._borrowed = contextlib.ExitStack()
        self.connection = self._borrowed.enter_context(pool.connection())
        self._budget = self.connection.budget()
        # Whoever forgets it gives up the connection, at the latest when the search is collected.
        self._release = weakref.finalize(self, pool.forget, self.connection)

    @property
    def over(self) -> bool:
        """True if the connection was returned."""
        return not self._release.alive

    def page(self) -> tuple[Any, bytes | None]:
        """Ask for the next page; with size 0, have the server forget the rest (RFC 2696).

        :returns: the entries, and the cookie for the page after it; ``None`` if the server does
            not page
        """
        try:
            answer, cookie = self.connection.search_page(
                **self.request, page_size=self.size, cookie=self.cookie, budget=self._budget
            )
        except BaseException as error:
            # The pool learns why: a server that does not answer is asked no more.
            self._release.detach()
            self._borrowed.__exit__(type(error), error, error.__traceback__)
            raise
        self.left_open = bool(cookie)
        if not cookie:
            self.close()
        return answer, cookie

    def close(self) -> None:
        """Return the connection; one with a search left open is not used again."""
        if self.over:
            return
        if self.left_open:
            self.connection.close()
        self._release.detach()
        self._borrowed.close()


class _PlainSearch:
    """One search asked for by ``search_ext`` without paging: nothing until it is waited for."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request


class PoolHandler(common.LDAPHandler):
    """Keystone's ``LDAPHandler`` interface on the pool of a driver.

    :param source: the pool
    :param always_bind: send a BIND for the identity of the service as well, to check its password
    """

    def __init__(self, source: DriverPool, *, always_bind: bool = False) -> None:
        super().__init__()
        self._source = source
        self._always_bind = always_bind
        self._options: dict[int, Any] = {}
        self._dereference = _default_dereference()
        self._searching = True
        self._paged: PagedSearch | None = None
        #: The servers that have answered its searches, as :data:`observers` are told of them.
        self.sources: set[str | None] = set()
        self.page_size = 0

    def connect(
        self,
        url: str,
        page_size: int = 0,
        alias_dereferencing: int | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Note the options of searches. All else was settled when the pool was made."""
        self.page_size = page_size
        if alias_dereferencing is not None:
            self._dereference = alias_dereferencing

    def set_option(self, option: int, invalue: Any) -> None:
        """Set an option of this handler; ``OPT_DEREF`` counts, others are only kept."""
        self._options[option] = invalue
        if option == ldap.OPT_DEREF:
            self._dereference = invalue

    def get_option(self, option: int) -> Any:
        """Return an option that was set, or python-ldap's default."""
        if option == ldap.OPT_DEREF:
            return self._dereference
        return self._options[option] if option in self._options else ldap.get_option(option)

    def simple_bind_s(
        self, who: str = "", cred: str = "", serverctrls: Any = None, clientctrls: Any = None
    ) -> None:
        """Send one BIND, but none for the pool's own identity, as which it binds when it connects.

        Without a name it is the pool's identity too: Keystone's code binds so where it is given
        none, and then the pool has none either.

        :raises ldap.LDAPError: the bind was refused, or nobody answered
        """
        if not self._always_bind and (not who or self._source.is_service(who, cred)):
            return
        # Of a connection that checked a password nothing else may be asked.
        self._searching = False
        pool = self._source.get()
        with _python_ldap_errors():
            pool.authenticate(who, cred)

    def unbind_s(self) -> None:
        """Give back the connections that are still borrowed. Never fails."""
        paged, self._paged = self._paged, None
        if paged is not None:
            paged.close()

    def search_s(
        self,
        base: str,
        scope: int,
        filterstr: str = "(objectClass=*)",
        attrlist: Sequence[str] | None = None,
        attrsonly: int = 0,
    ) -> list[tuple[Any, Any]]:
        """Search and wait for all of it; return a list as python-ldap does.

        :raises ldap.LDAPError: as python-ldap
        """
        request = self._request(base, scope, filterstr, attrlist, attrsonly, 0)
        return self._search(request)

    def search_ext(
        self,
        base: str,
        scope: int,
        filterstr: str = "(objectClass=*)",
        attrlist: Sequence[str] | None = None,
        attrsonly: int = 0,
        serverctrls: Sequence[Any] | None = None,
        clientctrls: Any = None,
        timeout: float = -1,
        sizelimit: int = 0,
    ) -> PagedSearch | _PlainSearch:
        """Prepare a search, or the next page of one, for :meth:`result3`.

        :raises ldap.LDAPError: no connection is to be had, or a control other than paging
        """
        request = self._request(base, scope, filterstr, attrlist, attrsonly, sizelimit)
        if not serverctrls:
            return _PlainSearch(request)
        if len(serverctrls) > 1 or not isinstance(serverctrls[0], _PAGED):
            raise made(ldap.NOT_SUPPORTED)
        (control,) = serverctrls
        cookie = control.cookie or b""
        paged = self._paged
        if not cookie:
            self.unbind_s()  # a search that was left before its end
            pool = self._source.get()
            with _python_ldap_errors():
                paged = self._paged = PagedSearch(pool, request)
        elif paged is None or paged.over:
            why = "the paged search that this cookie belongs to is over"
            raise made(ldap.UNWILLING_TO_PERFORM, why)
        assert paged is not None
        paged.size, paged.cookie = control.size, cookie
        return paged

    def result3(
        self,
        msgid: Any = ldap.RES_ANY,
        all: int = 1,
        timeout: float | None = None,
        resp_ctrl_classes: Any = None,
    ) -> tuple[int, list[tuple[Any, Any]], int, list[Any]]:
        """Wait for what :meth:`search_ext` prepared.

        :raises ldap.LDAPError: as python-ldap; the connection is returned
        """
        if isinstance(msgid, _PlainSearch):
            return ldap.RES_SEARCH_RESULT, self._search(msgid.request), 0, []
        with _python_ldap_errors(), _observed(self) as sources:
            answer, cookie = msgid.page()
            sources.append(answer.source)
        controls = [] if cookie is None else [_PAGED(criticality=False, size=0, cookie=cookie)]
        return ldap.RES_SEARCH_RESULT, _in_order(answer.items), 0, controls

    def add_s(self, dn: str, modlist: Sequence[tuple[str, list[bytes]]]) -> None:
        """Add an entry. Keystone does so only in its own tests.

        :raises ldap.LDAPError: as python-ldap
        """
        attributes: dict[str, list[bytes]] = {}
        for name, values in modlist:
            attributes.setdefault(name, []).extend(values)
        pool = self._source.get()
        with _python_ldap_errors(), pool.connection() as connection:
            connection.ldap3.add(dn, attributes=attributes)
            _raise_result(connection)

    def modify_s(self, dn: str, modlist: Sequence[tuple[int, str, list[bytes] | None]]) -> None:
        """Change an entry. Keystone does so only in its own tests.

        :raises ldap.LDAPError: as python-ldap
        """
        changes: dict[str, list[tuple[int, list[bytes]]]] = {}
        for operation, name, values in modlist:
            changes.setdefault(name, []).append((operation, values or []))
        pool = self._source.get()
        with _python_ldap_errors(), pool.connection() as connection:
            connection.ldap3.modify(dn, changes)
            _raise_result(connection)

    def _request(
        self,
        base: str,
        scope: int,
        filterstr: str | None,
        attrlist: Sequence[str] | None,
        attrsonly: int,
        sizelimit: int,
    ) -> dict[str, Any]:
        if not self._searching:
            why = "a connection that checked a password is not searched with"
            raise made(ldap.UNWILLING_TO_PERFORM, why)
        if isinstance(attrlist, (str, bytes)):
            raise TypeError(f"expected a list of attributes, not {type(attrlist).__name__}")
        if not isinstance(scope, int):
            raise TypeError(f"expected an integer for scope, not {type(scope).__name__}")
        filterstr = "(objectClass=*)" if filterstr is None else filterstr
        _check((base, filterstr, *(attrlist or ())))
        return {
            "base": base,
            "scope": scope,
            "filter": filterstr,
            "attributes": attrlist or None,
            "attrs_only": bool(attrsonly),
            "size_limit": max(sizelimit, 0),
            "dereference": self._dereference,
        }

    def _search(self, request: dict[str, Any]) -> list[tuple[Any, Any]]:
        pool = self._source.get()
        with _python_ldap_errors(), _observed(self) as sources:
            answer = pool.search(**request)
            sources.append(answer.source)
        return _in_order(answer.items)


def _check(texts: Iterable[Any]) -> None:
    """Refuse what python-ldap refuses, with the same exceptions."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"expected a string, not {type(text).__name__}")
        if "\0" in text:
            raise ValueError("embedded null character")
        if not text.isascii():
            text.encode()


def _in_order(items: list[Any]) -> list[tuple[Any, Any]]:
    """Return items as python-ldap does: references to other servers after the entries."""
    return sorted(items, key=_is_reference)


def _is_reference(item: tuple[Any, Any]) -> bool:
    return item[0] is None


def _default_dereference() -> int:
    """Return the value of ``alias_dereferencing = default``: ldap.conf's, read by python-ldap."""
    return int(ldap.get_option(ldap.OPT_DEREF))


def _raise_result(connection: Any) -> None:
    """Raise the answer to the last operation by ldap3, unless it is a success."""
    result = connection.ldap3.result
    if result["result"] != 0:
        raise DirectoryAnswerError(
            result["result"],
            result["description"],
            result["message"] or "",
            result["dn"] or "",
            result["referrals"] or [],
        )


def translated(error: DirectoryError) -> Exception:
    """Return the exception that python-ldap would have raised, with its dictionary.

    In it, ``desc`` and ``result`` are libldap's; ``info`` is what the server said, or the line of
    ``error``, which names the server.
    """
    if isinstance(error, DirectoryAnswerError):
        # A password that must be changed first can come with the code of success.
        known = _CLASSES.get(error.code) if error.code else ldap.INVALID_CREDENTIALS
        if refused_identity(error):
            known = ldap.INVALID_CREDENTIALS
        about: dict[str, Any] = {
            "result": error.code,
            "desc": _TEXTS.get(error.code) or _in_words(error.name),
            "ctrls": [],
        }
        if error.name != name_of(error.code) and refused_identity(error):
            about["desc"] = error.name  # a KDC's, whose codes are others
        if error.matched_dn:
            about["matched"] = error.matched_dn
        info = error.diagnostic
        if error.referrals:
            info = f"Referral:\n{error.referrals[0]}"
        if info:
            about["info"] = info
        return _new(known or ldap.LDAPError, about)
    if isinstance(error, FilterError):
        return made(ldap.FILTER_ERROR)
    return made(
        ldap.TIMEOUT if isinstance(error, DirectoryTimeoutError) else ldap.SERVER_DOWN, str(error)
    )


# What the service was known by, if it was no password.
_IDENTITIES = {
    Verdict.WRONG_CERTIFICATE: "certificate",
    Verdict.NO_IDENTITY: "certificate",
    Verdict.WRONG_TICKET: "Kerberos principal",
}


def refused_identity(error: BaseException | None) -> str:
    """Return what the service was refused by, in words; empty if it was a password, or if an error
    is none of that."""
    return _IDENTITIES.get(error.verdict, "") if isinstance(error, CredentialsError) else ""


def made(kind: Any, info: str = "") -> Exception:
    """Return an exception of python-ldap's for what no server answered.

    :param kind: one of python-ldap's classes
    :param info: text that says more about it
    """
    about = {"result": kind.errnum, "desc": _TEXTS[kind.errnum], "ctrls": []}
    return _new(kind, about | ({"info": info} if info else {}))


def _new(kind: type[Exception], about: dict[str, Any]) -> Exception:
    return kind(about)


def _in_words(name: str) -> str:
    """Return a name such as ``noSuchObject`` as libldap puts it: ``No such object``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z ]+", name)
    lower = " ".join(x if x.isupper() and len(x) > 1 else x.lower() for x in words)
    return lower[:1].upper() + lower[1:]

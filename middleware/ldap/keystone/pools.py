"""From Keystone's configuration to the one :class:`~.directory.LDAPPool` of a driver.

Each driver has a pool of its own, made from its own configuration: nothing is shared by URL or
kept by the process, so two domains on one server may differ in CA, identity and size. The pool is
made when it is first needed, so that a server which loads Keystone and then forks opens nothing
in the parent.

How the options of ``[ldap]`` are meant here, where that needs a word:

* ``pool_connection_timeout``, when positive, bounds connecting and every answer, and wins over
  ``[keyfront_ldap] connect_timeout`` and ``operation_timeout``. Its default, -1, does not mean
  "for ever" but lets those two decide. Without ``use_pool`` a positive ``connection_timeout``
  bounds connecting.
* ``use_pool = false`` and ``use_auth_pool = false``: the connection is closed after each use.
  It still is a pool, with the same bound on connections, waiting and health of servers.
* ``pool_retry_max`` and ``pool_retry_delay``: a server that cannot be reached is asked again
  after the delay, then after growing ones, whoever needs it meanwhile; a request tries every
  server and address once and never sleeps.
* ``debug_level`` is for libldap, which is not in use: no effect.
* ``chase_referrals``: referrals are never followed, least of all with credentials.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from typing import Any

from keyfront.errors import OptionError

from ..directory import LDAPPool
from ..protocol.tls import TLS
from ..protocol.urls import ServerURL
from . import options

LOG = logging.getLogger(__name__)

# In seconds; what is older when it comes back is closed.
_CLOSE_AFTER_USE = 1e-6

# What a pool calls them, and what the operator does.
_NAMES = {"ca_file": "[ldap] tls_cacertfile", "ca_dir": "[ldap] tls_cacertdir"}

_FAST_BIND = {"auto": "auto", "always": True, "never": False}


class DriverPool:
    """The pool of one driver, made when it is first asked for.

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
        """Whether these are what the pool binds with before it searches."""
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
        if self._conf.ldap.chase_referrals:
            LOG.warning(
                "[ldap] chase_referrals = true: referrals are not followed, since the service's "
                "credentials would go to whatever server they name"
            )
        if self._conf.ldap.debug_level:
            LOG.info("[ldap] debug_level has no effect: libldap is not in use")


def pool_arguments(conf: Any) -> dict[str, Any]:
    """Return the arguments of :class:`~.directory.LDAPPool` that ``conf`` stands for.

    :param conf: a loaded configuration with the groups ``[ldap]`` and ``[keyfront_ldap]``
    :raises OptionError: an option is out of its range, or two contradict each other
    """
    ldap, own = conf.ldap, options.ldap(conf)
    urls = [url for url in re.split(r"[\s,]+", ldap.url or "") if url]
    if not urls:
        raise OptionError("[ldap] url", ldap.url, "one or more URLs, divided by commas")
    servers = [ServerURL.parse(url, "[ldap] url") for url in urls]

    connect_timeout, operation_timeout = own["connect_timeout"], own["operation_timeout"]
    if ldap.use_pool and ldap.pool_connection_timeout > 0:
        connect_timeout = operation_timeout = float(ldap.pool_connection_timeout)
    elif not ldap.use_pool and ldap.connection_timeout > 0:
        connect_timeout = float(ldap.connection_timeout)

    strategy = own["strategy"] or ("balanced" if ldap.randomize_urls else "ordered")
    use_auth_pool = ldap.use_pool and ldap.use_auth_pool
    return {
        "urls": urls,
        "bind_dn": ldap.user if ldap.user and ldap.password else "",
        "bind_password": ldap.password if ldap.user and ldap.password else "",
        "tls": _tls(ldap, servers),
        "strategy": strategy,
        "min_size": _minimum("min_size", own, "pool_size", ldap) if ldap.use_pool else 0,
        "max_size": ldap.pool_size,
        "auth_min_size": _minimum("auth_min_size", own, "auth_pool_size", ldap)
        if use_auth_pool
        else 0,
        "auth_max_size": ldap.auth_pool_size,
        "timeout": own["checkout_timeout"],
        "max_waiting": own["max_waiting"],
        "max_lifetime": float(ldap.pool_connection_lifetime)
        if ldap.use_pool
        else _CLOSE_AFTER_USE,
        "auth_max_lifetime": float(ldap.auth_pool_connection_lifetime)
        if use_auth_pool
        else _CLOSE_AFTER_USE,
        "max_idle": own["max_idle"],
        "check_after": own["check_after"],
        "connect_timeout": connect_timeout,
        "operation_timeout": operation_timeout,
        "password_policy": own["password_policy"],
        "fast_bind": _FAST_BIND[own["fast_bind"]],
        "fail_back": own["fail_back"],
    }


def _minimum(name: str, own: dict[str, Any], bound: str, ldap: Any) -> int:
    size, limit = own[name], ldap[bound]
    if size > limit:
        raise OptionError(
            f"[{options.LDAP_GROUP}] {name}", size, f"at most [ldap] {bound} ({limit})"
        )
    return int(size)


def _tls(ldap: Any, servers: list[ServerURL]) -> TLS:
    secure = [server.text for server in servers if server.scheme == "ldaps"]
    if ldap.use_tls and secure:
        raise OptionError(
            "[ldap] use_tls", "true", f"false with {secure[0]}: ldaps is TLS from the start"
        )
    if not (ldap.use_tls or secure):
        return TLS()
    if not (ldap.tls_cacertfile or ldap.tls_cacertdir or ldap.tls_req_cert == "never"):
        raise OptionError(
            "[ldap] tls_cacertfile",
            "(not set)",
            "set, or tls_cacertdir, when use_tls is true or the URL is ldaps",
        )
    tls = TLS(
        ca_file=ldap.tls_cacertfile,
        ca_dir=None if ldap.tls_cacertfile else ldap.tls_cacertdir,
        verify=ldap.tls_req_cert,
        start_tls=ldap.use_tls,
    )
    try:
        tls.context()  # reads the files; connections use the same
    except OptionError as error:
        name = _NAMES.get(error.option, error.option)
        raise OptionError(name, error.value, error.allowed) from None
    return tls

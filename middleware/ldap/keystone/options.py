"""Defines the options ``[keyfront_ldap]`` of Keystone's LDAP driver, and turns all into a pool's.

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

import re
from typing import Any

from oslo_config import cfg

from keyfront.common.options import values_of
from keyfront.errors import OptionError

from ..kerberos import kerberos_of
from ..protocol.srv import resolver_of
from ..protocol.tls import TLS
from ..protocol.urls import ServerURL
from ..secret_file import read_secret
from ..service_account import check_sasl

LDAP_GROUP = "keyfront_ldap"

# In seconds; what is older when it comes back is closed.
_CLOSE_AFTER_USE = 1e-6

# What a pool calls them, and what the operator does.
_NAMES = {
    "ca_file": "[ldap] tls_cacertfile",
    "ca_dir": "[ldap] tls_cacertdir",
    "bind_dn": "[ldap] user",
    "bind_password": "[ldap] password",
    "bind_password_file": "[keyfront_ldap] bind_password_file",
    "client_cert": "[keyfront_ldap] tls_client_cert",
    "client_key": "[keyfront_ldap] tls_client_key",
    "sasl_mechanism": "[keyfront_ldap] sasl_mechanism",
    "kerberos_keytab": "[keyfront_ldap] kerberos_keytab",
    "kerberos_principal": "[keyfront_ldap] kerberos_principal",
    "kerberos_without_tls": "[keyfront_ldap] kerberos_without_tls",
    "nameservers": "[keyfront_ldap] nameservers",
    "srv_domains": "[keyfront_ldap] srv_domains",
    "urls": "[ldap] url",
}

_FAST_BIND = {"auto": "auto", "always": True, "never": False}

LDAP = [
    cfg.ListOpt(
        "nameservers",
        help="Addresses of DNS servers, such as 192.0.2.1 or [2001:db8::1]:53, which are asked for "
        "the servers of ldap+srv:// and ldaps+srv:// in [ldap] url, and for the addresses of "
        "these. By default those of the system.",
    ),
    cfg.ListOpt(
        "srv_domains",
        help="Domains that the servers which SRV records name may be in; others are not used, as "
        "whoever forges an answer of DNS would choose them. By default the domain in the URL; a "
        "single dot stands for any.",
    ),
    cfg.FloatOpt(
        "connect_timeout",
        default=5.0,
        min=0.01,
        max=600.0,
        help="Seconds that opening a connection may take at most: all addresses of a server, TLS "
        "and StartTLS included. A positive [ldap] pool_connection_timeout wins.",
    ),
    cfg.FloatOpt(
        "operation_timeout",
        default=30.0,
        min=0.01,
        max=3600.0,
        help="Seconds to wait for the answer to a bind, a search or a page of one. A positive "
        "[ldap] pool_connection_timeout wins.",
    ),
    cfg.FloatOpt(
        "checkout_timeout",
        default=10.0,
        min=0.01,
        max=600.0,
        help="Seconds for which a request waits for a connection when all are in use; after that "
        "it is answered 503.",
    ),
    cfg.IntOpt(
        "max_waiting",
        default=0,
        min=0,
        max=100000,
        help="Requests that may wait for a connection at the same time, in each process; the next "
        "one is answered 503 at once. 0 sets no bound.",
    ),
    cfg.IntOpt(
        "min_size",
        default=1,
        min=0,
        max=10000,
        help="Connections for searching that each process keeps open, at most [ldap] pool_size. "
        "0 closes the last one too when it was idle for max_idle.",
    ),
    cfg.IntOpt(
        "auth_min_size",
        default=0,
        min=0,
        max=10000,
        help="Connections for checking passwords that each process keeps open, at most [ldap] "
        "auth_pool_size.",
    ),
    cfg.StrOpt(
        "bind_password_file",
        help="A file with the password of [ldap] user, instead of [ldap] password: in UTF-8, one "
        "line, which only its owner can write and nobody but its group read. When a server refuses "
        "the password it is read again, so that a new one needs no restart.",
    ),
    cfg.StrOpt(
        "sasl_mechanism",
        choices=["EXTERNAL", "GSSAPI"],
        help="EXTERNAL: search as whom the servers make of tls_client_cert, instead of [ldap] user "
        "and its password; with ldapi:// as the user of the process. GSSAPI: as whom they make of "
        "the service's Kerberos principal (pip install 'keyfront[gssapi]'). A server that makes "
        "nobody of it is refused. Users log in by their passwords all the same.",
    ),
    cfg.StrOpt(
        "kerberos_keytab",
        help="A file with the keys of the service's Kerberos principal, which only its owner can "
        "write and nobody but its group read, for sasl_mechanism = GSSAPI. By default that of "
        "KRB5_CLIENT_KTNAME in the environment; without that the tickets in KRB5CCNAME, which "
        "somebody else renews.",
    ),
    cfg.StrOpt(
        "kerberos_principal",
        help="The service's Kerberos principal, such as keystone/api.example.org@EXAMPLE.ORG. By "
        "default the first in the keytab.",
    ),
    cfg.BoolOpt(
        "kerberos_without_tls",
        default=False,
        help="Whether sasl_mechanism = GSSAPI may be used without TLS. No password goes in the "
        "clear then for the service, but users' do, and what is searched can be read and changed "
        "on the way.",
    ),
    cfg.StrOpt(
        "tls_client_cert",
        help="A file with a certificate to show to the servers, in PEM, with its chain. It is read "
        "again when it is another one.",
    ),
    cfg.StrOpt(
        "tls_client_key",
        help="A file with the key of tls_client_cert, in PEM, without a passphrase. By default it "
        "is in the same file.",
    ),
    cfg.IntOpt(
        "max_answer",
        default=128,
        min=1,
        max=4096,
        help="MiB that the answer to a search may take in memory, all pages together; each value "
        "counts 64 bytes besides its own. A larger one is refused, and read no further.",
    ),
    cfg.IntOpt(
        "max_entries",
        default=100000,
        min=0,
        max=100000000,
        help="Entries that the answer to a search may have, all pages together; 0 sets no bound.",
    ),
    cfg.IntOpt(
        "max_refused_logins",
        default=0,
        min=0,
        max=1000,
        help="Requests to log in as one user from one address that the directory may refuse within "
        "refused_logins_seconds, on all processes of the node; no more are sent then, so that "
        "nobody has the directory lock another's account. Choose one less than its own limit. 0 "
        "sets no bound.",
    ),
    cfg.FloatOpt(
        "refused_logins_seconds",
        default=1800.0,
        min=1.0,
        max=604800.0,
        help="Seconds within which refused logins of max_refused_logins count, from the last one "
        "on. Choose no less than the directory's own time after which it forgets them.",
    ),
    cfg.FloatOpt(
        "max_idle",
        default=600.0,
        min=1.0,
        max=86400.0,
        help="Seconds after which an unused connection is closed. Keep it below the idle limit of "
        "the server and of every firewall between: Active Directory hangs up after 900.",
    ),
    cfg.FloatOpt(
        "check_after",
        default=30.0,
        min=0.0,
        max=86400.0,
        help="Seconds a connection may have been idle before it is asked for a sign of life when "
        "it is next used, which takes one round trip; 0 asks every time.",
    ),
    cfg.StrOpt(
        "strategy",
        choices=["ordered", "balanced"],
        help="Which server of [ldap] url a new connection goes to. ordered: the first that works; "
        "balanced: the one with the fewest connections of this process. By default ordered, or "
        "balanced with [ldap] randomize_urls.",
    ),
    cfg.BoolOpt(
        "fail_back",
        default=True,
        help="Whether connections return to a preferred server once it is healthy again; only "
        "with strategy ordered.",
    ),
    cfg.BoolOpt(
        "password_policy",
        default=True,
        help="Whether servers are asked to say why a login fails or when a password expires "
        "(password policy control). What they say is logged, never shown to the user.",
    ),
    cfg.StrOpt(
        "fast_bind",
        default="never",
        choices=["auto", "always", "never"],
        help="Whether passwords are checked by Active Directory's fast bind, which builds no "
        "security context. auto: where a server offers it.",
    ),
    cfg.StrOpt(
        "follow",
        default="auto",
        choices=["auto", "syncrepl", "usn", "psearch", "never"],
        help="How the directory is followed, so that the token cache ends the answers of users "
        "that it disables, deletes or moves. syncrepl: by content synchronization (RFC 4533), as "
        "of slapd with the overlay syncprov; usn: by update sequence numbers, as of Active "
        "Directory and Samba; psearch: by persistent search; auto: by the first of these that a "
        "server offers; never: not at all. Where it can be followed and is not, as while a server "
        "does not answer, answers of this domain are not kept; where it cannot be, they are kept "
        "for token_ttl.",
    ),
    cfg.FloatOpt(
        "token_ttl",
        min=0.0,
        max=3600.0,
        help="Seconds for which the token cache keeps an answer of this domain's users at most; 0 "
        "keeps none. By default, and at most, [keyfront_token_cache] ttl.",
    ),
]


def register_ldap(conf: cfg.ConfigOpts) -> None:
    """Make ``conf`` know ``[keyfront_ldap]``; as often as wanted."""
    conf.register_opts(LDAP, group=LDAP_GROUP)


def ldap(conf: cfg.ConfigOpts) -> dict[str, Any]:
    """Return the values of ``[keyfront_ldap]`` by name.

    :param conf: the service's configuration, or that of one domain, loaded
    :raises OptionError: a value is out of its range
    """
    register_ldap(conf)
    return values_of(conf, LDAP_GROUP, LDAP)


def pool_arguments(conf: Any) -> dict[str, Any]:
    """Return the arguments of :class:`keyfront.middleware.ldap.LDAPPool` that ``conf`` stands for.

    :param conf: a loaded configuration with the groups ``[ldap]`` and ``[keyfront_ldap]``
    :raises OptionError: an option is out of its range, or two contradict each other
    """
    stock, own = conf.ldap, ldap(conf)
    urls = [url for url in re.split(r"[\s,]+", stock.url or "") if url]
    if not urls:
        raise OptionError("[ldap] url", stock.url, "one or more URLs, divided by commas")
    servers = [ServerURL.parse(url, "[ldap] url") for url in urls]

    connect_timeout, operation_timeout = own["connect_timeout"], own["operation_timeout"]
    if stock.use_pool and stock.pool_connection_timeout > 0:
        connect_timeout = operation_timeout = float(stock.pool_connection_timeout)
    elif not stock.use_pool and stock.connection_timeout > 0:
        connect_timeout = float(stock.connection_timeout)

    strategy = own["strategy"] or ("balanced" if stock.randomize_urls else "ordered")
    use_auth_pool = stock.use_pool and stock.use_auth_pool
    file = own["bind_password_file"]
    tls = _tls(stock, own, servers)
    nameservers, domains = own["nameservers"] or [], own["srv_domains"] or []
    try:
        resolver_of(servers, nameservers, domains)
        kerberos = kerberos_of(own)
        check_sasl(
            own["sasl_mechanism"], servers, tls, bind_dn=stock.user or "",
            password=bool(stock.password), password_file=file, kerberos=kerberos,
        )  # fmt: skip
    except OptionError as error:
        raise _named(error) from None
    if file is not None:
        name = f"[{LDAP_GROUP}] bind_password_file"
        if not stock.user or stock.password:
            allowed = "left out beside [ldap] password" if stock.user else "with [ldap] user"
            raise OptionError(name, file, allowed)
        read_secret(name, file)
    return {
        "urls": urls,
        "nameservers": nameservers,
        "srv_domains": domains,
        "bind_dn": stock.user if stock.user and (stock.password or file) else "",
        "bind_password": stock.password if stock.user and stock.password else "",
        "bind_password_file": file,
        "sasl_mechanism": own["sasl_mechanism"],
        "kerberos": kerberos,
        "tls": tls,
        "strategy": strategy,
        "min_size": _minimum("min_size", own, "pool_size", stock) if stock.use_pool else 0,
        "max_size": stock.pool_size,
        "auth_min_size": _minimum("auth_min_size", own, "auth_pool_size", stock)
        if use_auth_pool
        else 0,
        "auth_max_size": stock.auth_pool_size,
        "timeout": own["checkout_timeout"],
        "max_waiting": own["max_waiting"],
        "max_lifetime": float(stock.pool_connection_lifetime)
        if stock.use_pool
        else _CLOSE_AFTER_USE,
        "auth_max_lifetime": float(stock.auth_pool_connection_lifetime)
        if use_auth_pool
        else _CLOSE_AFTER_USE,
        "max_idle": own["max_idle"],
        "check_after": own["check_after"],
        "connect_timeout": connect_timeout,
        "operation_timeout": operation_timeout,
        "max_answer": own["max_answer"],
        "max_entries": own["max_entries"],
        "max_refused_logins": own["max_refused_logins"],
        "refused_logins_seconds": own["refused_logins_seconds"],
        "password_policy": own["password_policy"],
        "fast_bind": _FAST_BIND[own["fast_bind"]],
        "fail_back": own["fail_back"],
    }


def _minimum(name: str, own: dict[str, Any], bound: str, stock: Any) -> int:
    size, limit = own[name], stock[bound]
    if size > limit:
        raise OptionError(
            f"[{LDAP_GROUP}] {name}", size, f"at most [ldap] {bound} ({limit})"
        )
    return int(size)


def _named(error: OptionError) -> OptionError:
    """Return an error of the library with the names of the configuration."""
    return OptionError(_NAMES.get(error.option, error.option), error.value, error.allowed)


def _tls(stock: Any, own: dict[str, Any], servers: list[ServerURL]) -> TLS:
    secure = [server.text for server in servers if server.scheme == "ldaps"]
    if stock.use_tls and secure:
        raise OptionError(
            "[ldap] use_tls", "true", f"false with {secure[0]}: ldaps is TLS from the start"
        )
    if not (stock.use_tls or secure):
        for option in ("tls_client_cert", "tls_client_key"):
            if own[option] is not None:
                name = f"[{LDAP_GROUP}] {option}"
                raise OptionError(name, own[option], "left out without ldaps:// or [ldap] use_tls")
        return TLS()
    if not (stock.tls_cacertfile or stock.tls_cacertdir or stock.tls_req_cert == "never"):
        raise OptionError(
            "[ldap] tls_cacertfile",
            "(not set)",
            "set, or tls_cacertdir, when use_tls is true or the URL is ldaps",
        )
    try:
        tls = TLS(
            ca_file=stock.tls_cacertfile,
            ca_dir=None if stock.tls_cacertfile else stock.tls_cacertdir,
            verify=stock.tls_req_cert,
            start_tls=stock.use_tls,
            client_cert=own["tls_client_cert"],
            client_key=own["tls_client_key"],
        )
        tls.context()  # reads the files; connections use the same
    except OptionError as error:
        raise _named(error) from None
    return tls

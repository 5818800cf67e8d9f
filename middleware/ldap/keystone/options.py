"""The options of Keystone's LDAP driver besides those of ``[ldap]``: ``[keyfront_ldap]``."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

from keyfront.common.options import values_of

LDAP_GROUP = "keyfront_ldap"

LDAP = [
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
        default="auto",
        choices=["auto", "always", "never"],
        help="Whether passwords are checked by Active Directory's fast bind, which builds no "
        "security context. auto: where a server offers it.",
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

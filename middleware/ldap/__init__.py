"""LDAP: pools of connections that are kept, bounded and checked, for searches and logins.

A program needs only :class:`LDAPPool`::

    from keyfront.middleware.ldap import LDAPPool, TLS

    pool = LDAPPool("ldaps://ds1.example.org, ldaps://ds2.example.org",
                    bind_dn="cn=app,dc=example,dc=org", bind_password=secret,
                    search_base="ou=People,dc=example,dc=org",
                    tls=TLS(ca_file="/etc/ssl/certs/example.pem"))

Keystone uses it by ``[identity] driver = keyfront_ldap`` (``keystone/driver.py``), other services
by the paste filter ``ldap_auth``. ``keyfront ldap check`` shows what works on which server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    DirectoryProtocolError,
    DirectoryTimeoutError,
    DirectoryTLSError,
    DirectoryUnavailableError,
    FilterError,
    KerberosError,
    OptionError,
    PoolClosedError,
    PoolFullError,
    PoolTimeoutError,
    Verdict,
)

if TYPE_CHECKING:
    from .diagnose import ServerReport
    from .directory import LDAPPool
    from .kerberos import Kerberos
    from .logins import Identity
    from .protocol.tls import TLS

__all__ = [
    "TLS",
    "CredentialsError",
    "DirectoryAnswerError",
    "DirectoryBusyError",
    "DirectoryError",
    "DirectoryProtocolError",
    "DirectoryTLSError",
    "DirectoryTimeoutError",
    "DirectoryUnavailableError",
    "FilterError",
    "Identity",
    "Kerberos",
    "KerberosError",
    "LDAPPool",
    "OptionError",
    "PoolClosedError",
    "PoolFullError",
    "PoolTimeoutError",
    "ServerReport",
    "Verdict",
    "change_notifications",
    "connector",
    "diagnose",
    "kerberos",
    "keystone",
    "pool_counters",
    "protocol",
    "secret_file",
    "service_account",
    "user_refusals",
    "wsgi",
]

# Where it is. Imported when it is asked for: each process that serves Keystone imports this
# package, and most have no directory.
_PLACES = {
    "LDAPPool": "directory",
    "Identity": "logins",
    "Kerberos": "kerberos",
    "ServerReport": "diagnose",
    "TLS": "protocol.tls",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = found
    return found

"""The oslo.config options of keyfront, listed for ``oslo-config-generator`` as ``keyfront``.

They are read from the service's own configuration file (``keystone.conf``). Where a filter has a
section in a paste file, most of its options can be set there as well, for that pipeline only.
"""

from __future__ import annotations

from oslo_config import cfg

from keyfront.gateway.heartbeat import options as heartbeat
from keyfront.middleware.ldap.keystone import options as ldap
from keyfront.middleware.tokens import options as tokens


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return groups and options (entry point ``oslo.config.opts``)."""
    return [
        (tokens.TOKEN_CACHE_GROUP, tokens.TOKEN_CACHE),
        (tokens.AUTHTOKEN_GROUP, tokens.AUTHTOKEN),
        (ldap.LDAP_GROUP, ldap.LDAP),
        (heartbeat.HEARTBEAT_GROUP, heartbeat.HEARTBEAT),
    ]

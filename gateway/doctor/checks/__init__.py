"""The checks, one file a layer; importing this package enters all of them into the registry.

To add one: a function in the file of its layer, and a fixture that fires it and one that does not
in ``tests/support/doctor``.
"""

from . import (
    apache,
    cross_layer,
    databases,
    haproxy,
    keystone,
    ldap,
    live,
    nginx,
    system,
    uwsgi,
    versions,
)

__all__ = [
    "apache",
    "cross_layer",
    "databases",
    "haproxy",
    "keystone",
    "ldap",
    "live",
    "nginx",
    "system",
    "uwsgi",
    "versions",
]

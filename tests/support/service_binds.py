"""Services that bind to slapd by SASL, without a password: whom it makes of them, and pools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keystone.conf.default
import keystone.conf.ldap
import pytest
from oslo_config import cfg

from keyfront.errors import CredentialsError
from keyfront.middleware.ldap import LDAPPool
from support.directory import SUFFIX, Directory
from support.served import PATIENCE

keystone.conf.default.register_opts(keystone.conf.CONF)

#: Ways to TLS.
KINDS = ("ldaps", "starttls")


def url(d: Directory, kind: str) -> str:
    return d.ldaps_url if kind == "ldaps" else f"ldap://localhost:{d.port}"


def identity_of(name: str) -> str:
    """Whom slapd makes of a service, as ``authz-regexp`` of these tests has it."""
    return f"dn:cn={name},ou=services,{SUFFIX}"


class Pools:
    """Pools that nothing but a fault keeps waiting; they are closed at the end."""

    def __init__(self) -> None:
        self._made: list[LDAPPool] = []

    def make(self, d: Directory, urls: list[str], **options: Any) -> LDAPPool:
        usual = {
            "min_size": 0, "search_base": d.people, "timeout": PATIENCE,
            "connect_timeout": PATIENCE, "operation_timeout": PATIENCE,
        }  # fmt: skip
        self._made.append(LDAPPool(urls, **{**usual, **options}))
        return self._made[-1]


@contextmanager
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    for pool in made._made:
        pool.close(0.0)


def refusal(pool: LDAPPool) -> CredentialsError:
    """What a pool says whose service is refused."""
    with pytest.raises(CredentialsError) as caught:
        pool.search(SUFFIX, 0)
    assert "\n" not in str(caught.value)
    return caught.value


def keystone_conf(d: Directory, folder: Path, options: str) -> cfg.ConfigOpts:
    """The configuration of a Keystone whose users are in a directory.

    :param options: lines of ``[keyfront_ldap]``
    """
    path = folder / "keystone.conf"
    path.write_text(
        f"[ldap]\nurl = {d.ldaps_url}\ntls_cacertfile = {d.ca_file}\nsuffix = {d.suffix}\n"
        f"user_tree_dn = {d.people}\nuser_id_attribute = uid\nuser_name_attribute = cn\n"
        f"group_tree_dn = {d.groups}\nchase_referrals = false\n"
        f"[keyfront_ldap]\n{options}connect_timeout = {PATIENCE}\nmin_size = 0\n"
        f"operation_timeout = {PATIENCE}\ncheckout_timeout = {PATIENCE}\n"
    )
    made = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(made)
    made(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    return made

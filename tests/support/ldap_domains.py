"""Domains of a Keystone whose users are in a slapd, by ``driver = keyfront_ldap``."""

from __future__ import annotations

import uuid
from pathlib import Path

import sqlalchemy

from support.directory import Directory


def driver_options(server: Directory, **more: object) -> dict[str, object]:
    return {
        "url": server.ldaps_url,
        "tls_cacertfile": server.ca_file,
        "user": server.service_dn,
        "password": server.service_password,
        "suffix": server.suffix,
        "user_tree_dn": server.people,
        "user_id_attribute": "uid",
        "user_name_attribute": "cn",
        "user_objectclass": "kfUser",
        "group_tree_dn": server.groups,
        "group_name_attribute": "cn",
        # of a directory that is well, on a busy machine as well
        "pool_connection_timeout": 8,
        **more,
    }


def domain_file(options: dict[str, object], own: str = "") -> str:
    lines = [f"{name} = {value}" for name, value in options.items()]
    return "\n".join(
        ["[identity]", "driver = keyfront_ldap", "[ldap]", *lines, "[keyfront_ldap]", own, ""]
    )


def make_domain(state: Path, name: str) -> str:
    """Put a domain into the database of a Keystone that does not run."""
    made = uuid.uuid4().hex
    url = f"sqlite:///{state / 'keystone.sqlite'}"
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    row = "(:id, :name, '{}', '', 1, '<<keystone.domain.root>>', 1)"
    with engine.begin() as connection:
        connection.execute(
            sqlalchemy.text(
                "INSERT INTO project (id, name, extra, description, enabled, domain_id, is_domain)"
                f" VALUES {row}"
            ),
            {"id": made, "name": name},
        )
    return made

"""The tags of a database write of Keystone, which name the cached answers that it makes stale.

A tag names something an answer depends on: :data:`ALL` (every answer), a family of tables such as
``"catalog"``, or one row, such as ``"user:ID"``. :func:`tags` gives a writer the tags whose epoch
must change when a transaction commits; a reader gives a cached answer again only while the epochs
of the tags it depends on have not changed. Both make the tags of rows with :func:`tag`.

The rules are taken from Keystone 30: the models under ``keystone/*/backends``, the tables that
``keystone/common/sql/migrations`` makes, and the reads of a validation (``token/provider.py``,
``models/token_model.py``, ``common/render_token.py``). A write that they do not cover has
:data:`EVERYTHING`: that costs hits, never exactness. This module needs neither SQLAlchemy nor
Keystone; ``tests/unit/tokens/test_invalidation_rules.py`` checks it with both.

Tags of rows:

- ``user:ID``: the user, its options, names, passwords and access rules, and its events
- ``project:ID``: the project or domain (domains are rows of ``project``)
- ``grants:user:ID``: grants to the user on projects, domains and the system
- ``members:ID``: the groups of the user ``ID``
- ``trust:ID``, ``appcred:ID``: the trust or application credential and its roles
- ``group:ID``: the group, or its mapping to a directory
- ``audit:ID``: a revocation by audit id or by audit chain
- ``name:NAME``: a row that is found by this name now and was not before, see :data:`NAMED`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

Row = Mapping[str, object]

ALL: Final = "all"  #: every answer depends on it
ANY: Final = "any"  #: any write that can change an answer
CONTENT: Final = "content"  #: any such write but a revocation
GRANTS_GROUP: Final = "grants:group"  #: any grant to any group
REVOKED: Final = "revocations"  #: any token is revoked that was good before
#: The tag of names of which no other can be made: each search for a row by name depends on it.
NAMES: Final = "names"

#: One tag for each family of tables.
FAMILIES: Final[tuple[str, ...]] = (
    "users",
    "groups",
    "members",
    "projects",
    "grants",
    "roles",
    "catalog",
    "federation",
    "trusts",
    "appcreds",
    "oauth",
    "mappings",
    "limits",
    "credentials",
    "policies",
)

#: All tags that name no row.
FIXED: Final[tuple[str, ...]] = (ALL, ANY, CONTENT, *FAMILIES, GRANTS_GROUP, REVOKED)

#: The tags of a write that can change any answer, or that is not understood.
EVERYTHING: Final = frozenset({ALL, ANY, CONTENT})

#: Families whose reads stop showing rows as time passes, without a write.
LAPSING: Final = frozenset({"trusts", "oauth"})

#: Tags of one write at most; with more it has :data:`EVERYTHING`, so nobody looks up more rows.
LIMIT: Final = 64

#: The family of each table whose writes are told apart.
FAMILY: Final[Mapping[str, str]] = {
    "user": "users",
    "user_option": "users",
    "local_user": "users",
    "nonlocal_user": "users",
    "federated_user": "users",
    "password": "users",
    # With a group its memberships and grants go, by
    # statements of their own: neither foreign key on group.id cascades.
    "group": "groups",
    "user_group_membership": "members",
    "expiring_user_group_membership": "members",
    "project": "projects",
    "project_tag": "projects",
    "project_option": "projects",
    "assignment": "grants",
    "system_assignment": "grants",
    "role": "roles",
    "role_option": "roles",
    "implied_role": "roles",
    "service": "catalog",
    "endpoint": "catalog",
    "region": "catalog",
    "endpoint_group": "catalog",
    "project_endpoint": "catalog",
    "project_endpoint_group": "catalog",
    # Every token lists the service providers, so every answer depends on this family, and with it
    # on identity_provider.authorization_ttl, which ends memberships.
    "identity_provider": "federation",
    "idp_remote_ids": "federation",
    "federation_protocol": "federation",
    "mapping": "federation",
    "service_provider": "federation",
    "trust": "trusts",
    "trust_role": "trusts",
    "application_credential": "appcreds",
    "application_credential_role": "appcreds",
    "application_credential_access_rule": "appcreds",
    "access_rule": "appcreds",
    "consumer": "oauth",
    "request_token": "oauth",
    "access_token": "oauth",
    "id_mapping": "mappings",
    "limit": "limits",
    "registered_limit": "limits",
    "credential": "credentials",
    # Policies stored for services to fetch; Keystone itself obeys its policy file.
    "policy": "policies",
    "policy_association": "policies",
}

#: Tables whose every write has :data:`EVERYTHING`, with the reason.
UNDIVIDED: Final[Mapping[str, str]] = {
    "whitelisted_config": "a domain's options: its users may move to another identity backend",
    "sensitive_config": "a domain's options, the secret ones: as whitelisted_config",
    "config_register": "which domain the SQL identity driver belongs to: as whitelisted_config",
    "token": "kept by the first migration; Keystone has not written it since UUID tokens",
    "alembic_version": "the schema itself has changed",
}

#: For each table, the columns whose values :func:`tags` needs of the rows written.
KEY_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys([*FAMILY, *UNDIVIDED], ()),
    "user": ("id",),
    "user_option": ("user_id",),
    "local_user": ("user_id",),
    "nonlocal_user": ("user_id",),
    "federated_user": ("user_id",),
    "password": ("local_user_id",),
    "group": ("id",),
    "user_group_membership": ("user_id",),
    "expiring_user_group_membership": ("user_id",),
    "project": ("id",),
    "project_tag": ("project_id",),
    "project_option": ("project_id",),
    "assignment": ("type", "actor_id"),
    "system_assignment": ("type", "actor_id"),
    "trust": ("id",),
    "trust_role": ("trust_id",),
    "application_credential": ("id",),
    "application_credential_role": ("application_credential_id",),
    "application_credential_access_rule": ("application_credential_id",),
    "access_rule": ("user_id",),
    "id_mapping": ("public_id", "entity_type"),
    "revocation_event": (
        "audit_id",
        "audit_chain_id",
        "user_id",
        "trust_id",
        "consumer_id",
        "project_id",
        "domain_id",
        "role_id",
    ),
}

#: Tables that name their owner by another table's internal number: (own column, other table, its
#: column that equals it, its column wanted). The value found joins the row under the last name;
#: left out, where nothing is found, it makes the write :data:`EVERYTHING`.
RESOLVE: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "password": ("local_user_id", "local_user", "id", "user_id"),
    "application_credential_role": (
        "application_credential_id",
        "application_credential",
        "internal_id",
        "id",
    ),
    "application_credential_access_rule": (
        "application_credential_id",
        "application_credential",
        "internal_id",
        "id",
    ),
}



class Search(NamedTuple):
    """The columns by which rows of a table are looked for when their owner is not known."""

    name: str
    #: All of them, the name among them.
    columns: tuple[str, ...]


_BY_NAME = Search("name", ("name", "domain_id"))

#: Tables whose rows are looked for by name. The result of such a search depends on the owners of
#: the rows that it finds, and on ``name:NAME``, the tag of writes that may let another row be
#: found: those that insert a row and those that rename one.
NAMED: Final[Mapping[str, Search]] = {
    **dict.fromkeys(("local_user", "nonlocal_user", "group", "project"), _BY_NAME),
    "federated_user": Search("unique_id", ("idp_id", "protocol_id", "unique_id")),
    "id_mapping": Search("local_id", ("local_id", "domain_id")),
}

# Columns to which Keystone never assigns another value. (With a user's domain the domains of its
# names change, by ON UPDATE CASCADE.)
_FOR_EVER: Final[Mapping[str, frozenset[str]]] = {
    "user": frozenset({"domain_id"}),
    **{table: frozenset(search.columns) - {search.name} for table, search in NAMED.items()},
}

#: Columns whose update alone changes no answer, by table, with the reason.
#:
#: ``user.last_active_at`` is among them only where Keystone disables nobody for inactivity
#: (``sqlalchemy_plugin.py``): to enable such a user, it writes that column alone
#: (``identity/backends/sql_model.py``, ``User.enabled``), and tokens of trusts this user gave turn
#: valid again. Logins write it once a day.
IRRELEVANT: Final[Mapping[str, Mapping[str, str]]] = {
    "local_user": {
        "failed_auth_count": "counts failed logins; read by logins only, shown by no answer",
        "failed_auth_at": "when a login last failed; read by logins only, shown by no answer",
    },
}

# A delete of these takes rows of federated_user along by ON DELETE CASCADE (MariaDB and
# PostgreSQL; SQLite does not enforce foreign keys unless told). No statement shows whose. The
# other cascades stay within the tags of the parent.
_CASCADES: Final = frozenset({"identity_provider", "federation_protocol"})

# Tables whose rows give one tag each: its kind, and the column (own or resolved) of the id.
_PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    "user": ("user", "id"),
    "user_option": ("user", "user_id"),
    "local_user": ("user", "user_id"),
    "nonlocal_user": ("user", "user_id"),
    "federated_user": ("user", "user_id"),
    "password": ("user", "user_id"),
    "group": ("group", "id"),
    "user_group_membership": ("members", "user_id"),
    "expiring_user_group_membership": ("members", "user_id"),
    "project": ("project", "id"),
    "project_tag": ("project", "project_id"),
    "project_option": ("project", "project_id"),
    "trust": ("trust", "id"),
    "trust_role": ("trust", "trust_id"),
    "application_credential": ("appcred", "id"),
    "application_credential_role": ("appcred", "id"),
    "application_credential_access_rule": ("appcred", "id"),
    # A rule is lent only to credentials of its own user, so their answers depend on that user.
    # (The migrations let a rule's delete cascade to application_credential_access_rule.)
    "access_rule": ("user", "user_id"),
}

#: Tables of grants: to users and to groups.
GRANTED: Final = frozenset({"assignment", "system_assignment"})

#: For readers: tables whose rows each belong to an owner, with the kinds of the owner's tags, one
#: of which each write has, and the column (own or resolved) of the owner's id. Not
#: ``access_rule``: its inserts have the family's tag only.
OWNER: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    **{
        table: ((kind,), column)
        for table, (kind, column) in _PLAIN.items()
        if table != "access_rule"
    },
    # With a user his memberships go, where the database cascades.
    "user_group_membership": (("members", "user"), "user_id"),
    "expiring_user_group_membership": (("members", "user"), "user_id"),
    **dict.fromkeys(GRANTED, (("grants:user",), "actor_id")),
    "id_mapping": (("user", "group"), "public_id"),
}

# The kind of tag for each column of a revocation event, the narrowest first. An event revokes a
# token when *all* that it names fits (Revoke._list_token_events and revoke_model.matches), so one
# of its names finds every token concerned, if an answer depends on the tags of both its audit ids,
# of its user, trustor and trustee, of its trust and project, of its user's domain and the domain
# it is scoped to, on "oauth" if it has an access token, and on "roles". access_token_id and
# expires_at cannot stand for an event: the first is never compared, the second has no tag.
_EVENT: Final[tuple[tuple[str, str], ...]] = (
    ("audit_id", "audit"),
    ("audit_chain_id", "audit"),
    ("user_id", "user"),
    ("trust_id", "trust"),
    ("consumer_id", ""),
    ("project_id", "project"),
    ("domain_id", "project"),
    ("role_id", ""),
)
_EVENT_FAMILY: Final[Mapping[str, str]] = {"consumer_id": "oauth", "role_id": "roles"}


class _UnknownRowError(Exception):
    """A row lacks a value that its tag needs, or has one that no row of Keystone should have."""


def tag(kind: str, identity: str) -> str:
    """Return the tag of one row: ``tag("user", "AB1")`` is ``user:ab1``.

    MariaDB and MySQL, with the collation of Keystone's tables, take ``AB1``, ``ab1`` and ``ab1``
    with blanks behind it for one value, and a grant may name its user in another spelling than
    the user's row does. So case and trailing blanks do not count in a tag.

    :param kind: ``user``, ``project``, ``grants:user``, ``members``, ``group``, ``trust``,
        ``appcred``, ``audit`` or ``name``
    :param identity: the row's identifier
    :raises ValueError: the identity is empty, or holds anything but printable ASCII: only the
        database knows which of such values are equal
    """
    return (_kept_tag if len(identity) <= _LONGEST_KEPT else _tag)(kind, identity)


def _tag(kind: str, identity: str) -> str:
    folded = identity.rstrip(" ").lower()
    if not folded or not folded.isascii() or not folded.isprintable():
        raise ValueError(f"{kind}: no tag can be made of {identity!r}")
    return f"{kind}:{folded}"


# Mostly the same are asked for again: each request makes some twenty. Anybody may ask for as long
# an identifier as a request has room for, without a login.
_LONGEST_KEPT: Final = 255
_kept_tag = functools.lru_cache(maxsize=8192)(_tag)


# Letters that are equal in some language: MariaDB and MySQL have collations for Lithuanian (i and
# y, c and ch), for Latin (i and j, u and v) and for Swedish (v and w).
_ALIKE: Final = str.maketrans("jyvw", "iiuu")

# Characters of a name at most: a longer one may have been cut off in the database.
_LONGEST_NAME: Final = 255


def name_tag(name: str) -> str:
    """Return the tag of a name, which stands for rows of any table and domain.

    :param name: the name, up to 255 characters
    :raises ValueError: it is too long, or :func:`tag` raises it, as for names with accents, which
        databases may or may not take for the letters without
    """
    if len(name) > _LONGEST_NAME:
        raise ValueError("no tag is made of names that are so long")
    return tag("name", name.lower().replace("ch", "c").translate(_ALIKE))


def names(
    table: str, operation: str, changed: Collection[str], values: Collection[object]
) -> frozenset[str]:
    """Return the tags of the names that a write gives to rows, besides those of :func:`tags`.

    :param table: the table written
    :param operation: ``insert``, ``update`` or ``delete``
    :param changed: the columns an update assigns; empty if that is not known
    :param values: the values that an insert or update assigns to the column of the name; any other
        than a string where a value is not known
    :returns: none for a delete, or for a table or columns that no search by name uses; else a tag
        for each name, or :data:`NAMES` where one cannot be made
    """
    search = NAMED.get(table)
    if search is None or operation == "delete":
        return frozenset()
    if operation == "update" and changed and search.name not in changed:
        return frozenset()
    try:
        return frozenset({name_tag(value) for value in values} or {NAMES})  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return frozenset({NAMES})


def needed(table: str, operation: str, changed: Collection[str] = ()) -> tuple[str, ...]:
    """Return the columns of the rows written that :func:`tags` needs for these arguments.

    :param table: the table written
    :param operation: ``insert``, ``update`` or ``delete``
    :param changed: the columns an update assigns
    :returns: names of columns; empty where the tags are the same whatever the rows are, so that a
        failed login or the pruning of old revocations costs no look-up
    """
    if _fixed(table, operation, changed) is not None:
        return ()
    return KEY_COLUMNS[table]


def tags(
    table: str,
    operation: str,
    changed: Collection[str],
    rows: Sequence[Row] | None,
) -> frozenset[str]:
    """Return the tags whose epoch must change when a write is committed.

    :param table: the table written
    :param operation: ``insert``, ``update`` or ``delete``
    :param changed: the columns an update assigns
    :param rows: each row written, with the columns that :data:`KEY_COLUMNS` names and those that
        :data:`RESOLVE` adds; before and after, where an update assigns one of these. ``None`` when
        they could not be found out; empty when it is sure that no row was written. Not looked at
        where :func:`needed` is empty.
    :returns: no tags for a write that changes no answer; :data:`EVERYTHING` for one that may
        change any, that is not understood, or that has more than :data:`LIMIT` tags
    """
    fixed = _fixed(table, operation, changed)
    if fixed is not None:
        return fixed
    if rows is None:
        return EVERYTHING
    if not rows:
        return frozenset()
    found = {ANY}
    if table in FAMILY:
        found |= {CONTENT, FAMILY[table]}
    elif table == "revocation_event":
        found.add(REVOKED)
    row_tags = _ROW_TAGS.get(table, _plain)
    try:
        for row in rows:
            found.update(row_tags(table, operation, row))
            if len(found) > LIMIT:
                return EVERYTHING
    except _UnknownRowError:
        return EVERYTHING
    return frozenset(found)


def may_wait(
    table: str,
    operation: str,
    changed: Collection[str],
    rows: Sequence[Row] | None,
    created: Collection[object],
    active: object = None,
) -> bool:
    """Return whether a write takes nothing away from anybody: others may be told of it late.

    That holds for the writes of logins: of a user who is new to this Keystone, about whom no answer
    can still stand (the deletion of an earlier user with the same id was a change of its own); of
    the grants to him; of a membership that is verified again, and of the day of the last login of
    a user who is enabled, both of which then only last longer. Others must first be told of another
    name, a group more or less, and grants to others.

    :param table: the table written
    :param operation: ``insert``, ``update`` or ``delete``
    :param changed: the columns an update assigns
    :param rows: the rows written, as for :func:`tags`
    :param created: ids of users that this transaction or its request has created
    :param active: the id of the user whose day of login this writes, if he was enabled before;
        else ``None``
    """
    if rows is None:
        return False
    if operation == "insert":
        if table in ("user", "id_mapping"):
            return True
        if table == "assignment":
            kinds = [str(row.get("type")) for row in rows]
            granted = all(kind.startswith("User") for kind in kinds)
            return granted and all(row.get("actor_id") in created for row in rows)
        owned = ("federated_user", "nonlocal_user", "expiring_user_group_membership")
        return table in owned and all(row.get("user_id") in created for row in rows)
    if table == "user" and set(changed) == {"last_active_at"}:
        return active is not None and all(row.get("id") == active for row in rows)
    renewed = table == "expiring_user_group_membership" and set(changed) == {"last_verified"}
    return operation == "update" and renewed


def _fixed(table: str, operation: str, changed: Collection[str]) -> frozenset[str] | None:
    """Return the tags of a write if they are the same whatever its rows are; else ``None``."""
    if operation not in ("insert", "update", "delete"):
        return EVERYTHING
    if table == "revocation_event":
        # Pruning old events can only turn a no into a yes, and only for a token expired by then.
        return frozenset({ANY}) if operation == "delete" else None
    if table not in FAMILY or (table in _CASCADES and operation == "delete"):
        return EVERYTHING
    if operation == "update" and changed:
        irrelevant = IRRELEVANT.get(table, {})
        if all(column in irrelevant for column in changed):
            return frozenset()
        if not _FOR_EVER.get(table, frozenset()).isdisjoint(changed):
            return EVERYTHING
    # A new access rule belongs to no credential yet; a row of its own will lend it to one.
    unowned = table == "access_rule" and operation == "insert"
    if unowned or not KEY_COLUMNS[table]:
        return frozenset({ANY, CONTENT, FAMILY[table]})
    return None


def _make(kind: str, value: object) -> str:
    """Return the tag of a value.

    :raises _UnknownRowError: no tag can be made of it
    """
    if not isinstance(value, str):  # absent, NULL, or an SQL expression
        raise _UnknownRowError
    try:
        return tag(kind, value)
    except ValueError:
        raise _UnknownRowError from None


def _plain(table: str, operation: str, row: Row) -> tuple[str, ...]:
    kind, column = _PLAIN[table]
    return (_make(kind, row.get(column)),)


def _grant(table: str, operation: str, row: Row) -> tuple[str, ...]:
    # UserProject, UserDomain, UserSystem; GroupProject, GroupDomain, GroupSystem.
    kind = row.get("type")
    if isinstance(kind, str) and kind.startswith("User"):
        return (_make("grants:user", row.get("actor_id")),)
    if isinstance(kind, str) and kind.startswith("Group"):
        return (GRANTS_GROUP,)
    raise _UnknownRowError


def _mapping(table: str, operation: str, row: Row) -> tuple[str, ...]:
    kind = row.get("entity_type")
    if kind == "user":
        return (_make("user", row.get("public_id")),)
    if kind == "group":
        # A generator other than sha256 gives a group mapped anew another id, without grants. An
        # answer that had needed a group not yet mapped would have mapped it itself.
        group = _make("group", row.get("public_id"))
        return (group,) if operation == "insert" else (group, GRANTS_GROUP)
    raise _UnknownRowError


def _revocation(table: str, operation: str, row: Row) -> tuple[str, ...]:
    for column, kind in _EVENT:
        value = row.get(column)
        if value is not None:
            return (_make(kind, value) if kind else _EVENT_FAMILY[column],)
    raise _UnknownRowError


_ROW_TAGS: Final[Mapping[str, Callable[[str, str, Row], tuple[str, ...]]]] = {
    "assignment": _grant,
    "system_assignment": _grant,
    "id_mapping": _mapping,
    "revocation_event": _revocation,
}


def fingerprint() -> str:
    """Return the rules of this module as text, which must be equal in processes that share epochs.
    """
    return repr(
        (
            *(FIXED, sorted(FAMILY.items()), sorted(UNDIVIDED), sorted(KEY_COLUMNS.items())),
            sorted(RESOLVE.items()),
            sorted((table, sorted(columns)) for table, columns in IRRELEVANT.items()),
            *(sorted(_CASCADES), sorted(_PLAIN.items()), _EVENT, sorted(_EVENT_FAMILY.items())),
            *(sorted(NAMED.items()), sorted(_ALIKE.items()), sorted(_FOR_EVER)),
            LIMIT,
        )
    )

"""The map from Keystone's writes to tags, by example and held against Keystone's own tables."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfront.middleware.tokens.epochs import slots
from keyfront.middleware.tokens.invalidation import rules
from keyfront.middleware.tokens.invalidation.rules import (
    ALL,
    ANY,
    CONTENT,
    EVERYTHING,
    FAMILIES,
    FAMILY,
    FIXED,
    GRANTS_GROUP,
    IRRELEVANT,
    KEY_COLUMNS,
    LIMIT,
    RESOLVE,
    UNDIVIDED,
    needed,
    tag,
    tags,
)

OPERATIONS = ("insert", "update", "delete")
USERS = {"type": "UserProject", "actor_id": "u1"}
GROUPS = {"type": "GroupDomain", "actor_id": "g1"}


def row_tags(table: str, row: dict[str, object], operation: str = "delete") -> set[str]:
    """What one row gives besides what every write gives."""
    return set(tags(table, operation, ("name",), [row])) - {ANY, CONTENT, FAMILY.get(table)}


@pytest.mark.parametrize(
    ("table", "row", "expected"),
    [
        ("user", {"id": "u1"}, "user:u1"),
        ("user_option", {"user_id": "u1"}, "user:u1"),
        ("local_user", {"user_id": "u1"}, "user:u1"),
        ("nonlocal_user", {"user_id": "u1"}, "user:u1"),
        ("federated_user", {"user_id": "u1"}, "user:u1"),
        ("password", {"local_user_id": 7, "user_id": "u1"}, "user:u1"),
        ("access_rule", {"user_id": "u1"}, "user:u1"),
        ("project", {"id": "p1"}, "project:p1"),
        ("project_tag", {"project_id": "p1"}, "project:p1"),
        ("project_option", {"project_id": "p1"}, "project:p1"),
        ("group", {"id": "g1"}, "group:g1"),
        ("user_group_membership", {"user_id": "u1"}, "members:u1"),
        ("expiring_user_group_membership", {"user_id": "u1"}, "members:u1"),
        ("assignment", USERS, "grants:user:u1"),
        ("assignment", {**USERS, "type": "UserDomain"}, "grants:user:u1"),
        ("assignment", GROUPS, "grants:group"),
        ("assignment", {**GROUPS, "type": "GroupProject"}, "grants:group"),
        ("system_assignment", {**USERS, "type": "UserSystem"}, "grants:user:u1"),
        ("system_assignment", {**GROUPS, "type": "GroupSystem"}, "grants:group"),
        ("trust", {"id": "t1"}, "trust:t1"),
        ("trust_role", {"trust_id": "t1"}, "trust:t1"),
        ("application_credential", {"id": "c1"}, "appcred:c1"),
        ("application_credential_role", {"application_credential_id": 3, "id": "c"}, "appcred:c"),
        (
            "application_credential_access_rule",
            {"application_credential_id": 3, "id": "c1"},
            "appcred:c1",
        ),
        ("id_mapping", {"public_id": "u1", "entity_type": "user"}, "user:u1"),
        ("id_mapping", {"public_id": "g1", "entity_type": "group"}, "group:g1"),
    ],
)
def test_tag_of_a_row(table: str, row: dict[str, object], expected: str) -> None:
    for operation in OPERATIONS:
        if operation == "insert" and table == "access_rule":
            continue
        more = {GRANTS_GROUP} if expected == "group:g1" and table == "id_mapping" else set()
        assert tags(table, operation, ("name",), [row]) == {
            *(ANY, CONTENT, FAMILY[table], expected),
            *(more if operation != "insert" else ()),
        }
        assert needed(table, operation, ("name",)) == KEY_COLUMNS[table] != ()
    # Every column it needs, no row to be had, or another value than a string: no guess is made.
    assert tags(table, "delete", (), None) == EVERYTHING
    assert tags(table, "delete", (), [{}]) == EVERYTHING
    for column in row:
        for value in (None, object()):
            found = tags(table, "delete", (), [{**row, column: value}])
            if column in ("local_user_id", "application_credential_id"):
                assert expected in found  # used by the plugin to resolve, not here
            elif expected == GRANTS_GROUP and column == "actor_id":
                assert expected in found
            else:
                assert found == EVERYTHING


@pytest.mark.parametrize("table", [name for name in FAMILY if not KEY_COLUMNS[name]])
def test_tables_that_are_one(table: str) -> None:
    for operation in OPERATIONS:
        if operation == "delete" and table in ("identity_provider", "federation_protocol"):
            continue
        assert needed(table, operation, ("name",)) == ()
        for rows in (None, [], [{"id": "x"}]):
            assert tags(table, operation, ("name",), rows) == {ANY, CONTENT, FAMILY[table]}


def test_what_is_not_known_is_everything() -> None:
    for table in (*UNDIVIDED, "plugin_table", "USER", ""):
        for operation in OPERATIONS:
            assert tags(table, operation, ("id",), [{"id": "x"}]) == {ALL, ANY, CONTENT}
            assert needed(table, operation, ("id",)) == ()
    assert tags("user", "replace", (), [{"id": "x"}]) == EVERYTHING
    assert tags("revocation_event", "truncate", (), None) == EVERYTHING
    assert tags("assignment", "insert", (), [{"type": "Other", "actor_id": "x"}]) == EVERYTHING
    assert tags("id_mapping", "insert", (), [{"entity_type": "x", "public_id": "x"}]) == EVERYTHING
    # One row not understood spoils the others.
    assert tags("user", "delete", (), [{"id": "x"}, {}]) == EVERYTHING


def test_a_write_that_met_no_row_changes_nothing() -> None:
    assert tags("federated_user", "update", ("display_name",), []) == frozenset()
    assert tags("assignment", "delete", (), []) == frozenset()


def test_old_and_new_row_of_a_key() -> None:
    found = tags("trust_role", "update", ("trust_id",), [{"trust_id": "a"}, {"trust_id": "b"}])
    assert found == {ANY, CONTENT, "trusts", "trust:a", "trust:b"}


def test_too_many_rows_are_everything() -> None:
    rows: list[dict[str, object]] = [{"user_id": f"u{n}"} for n in range(LIMIT - 3)]
    fits = tags("user_group_membership", "delete", (), rows)
    assert len(fits) == LIMIT
    assert ALL not in fits
    rows.append({"user_id": "one-more"})
    assert tags("user_group_membership", "delete", (), rows) == EVERYTHING
    # Rows of one tag count once.
    many = [{"project_id": "p"}] * 500
    assert "project:p" in tags("project_tag", "delete", (), many)


def test_irrelevant_columns() -> None:
    both = ("failed_auth_count", "failed_auth_at")
    for changed in (both, both[:1], both[1:], set(both)):
        assert tags("local_user", "update", changed, None) == frozenset()
        assert needed("local_user", "update", changed) == ()
    # With anything else, in another operation, of another table, or not said: relevant.
    row = {"user_id": "u"}
    assert "user:u" in tags("local_user", "update", (*both, "name"), [row])
    assert "user:u" in tags("local_user", "update", (), [row])
    assert "user:u" in tags("local_user", "insert", both, [row])
    assert "user:u" in tags("local_user", "delete", both, [row])
    assert "user:u" in tags("nonlocal_user", "update", both, [row])
    # Enabling a user whom inactivity disabled writes this column alone.
    assert "user:u" in tags("user", "update", ("last_active_at",), [{"id": "u"}])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"audit_id": "a"}, "audit:a"),
        ({"audit_chain_id": "c", "project_id": "p"}, "audit:c"),
        ({"audit_id": "a", "audit_chain_id": "c", "user_id": "u"}, "audit:a"),
        ({"audit_chain_id": "c", "user_id": "u"}, "audit:c"),
        ({"user_id": "u"}, "user:u"),
        ({"user_id": "u", "trust_id": "t", "project_id": "p"}, "user:u"),
        ({"trust_id": "t", "consumer_id": "c"}, "trust:t"),
        ({"consumer_id": "c", "access_token_id": "a"}, "oauth"),
        ({"project_id": "p", "role_id": "r"}, "project:p"),
        ({"domain_id": "d", "role_id": "r"}, "project:d"),
        ({"domain_id": "d", "expires_at": "2030-01-01"}, "project:d"),
        ({"role_id": "r"}, "roles"),
        # Keystone compares neither of these with a token: such an event revokes every token.
        ({"access_token_id": "a"}, ALL),
        ({"expires_at": "2030-01-01"}, ALL),
        ({}, ALL),
    ],
)
def test_revocations(event: dict[str, object], expected: str) -> None:
    unset = dict.fromkeys(KEY_COLUMNS["revocation_event"])
    want = EVERYTHING if expected == ALL else {ANY, rules.REVOKED, expected}
    for row in (event, {**unset, **event}):
        assert tags("revocation_event", "insert", (), [row]) == want
        assert tags("revocation_event", "update", ("issued_before",), [row]) == want
    assert needed("revocation_event", "insert") == KEY_COLUMNS["revocation_event"]


def test_revocations_not_understood_or_pruned() -> None:
    assert tags("revocation_event", "insert", (), [{"audit_id": 7}]) == EVERYTHING
    assert tags("revocation_event", "insert", (), None) == EVERYTHING
    assert tags("revocation_event", "delete", (), None) == {ANY}
    assert needed("revocation_event", "delete") == ()


def test_new_access_rule_and_new_group_mapping() -> None:
    assert tags("access_rule", "insert", (), None) == {ANY, CONTENT, "appcreds"}
    assert needed("access_rule", "insert") == ()
    new = {"public_id": "g", "entity_type": "group"}
    assert row_tags("id_mapping", new, "insert") == {"group:g"}


def test_identity_provider_takes_its_users_along() -> None:
    for table in ("identity_provider", "federation_protocol"):
        assert tags(table, "delete", (), [{"id": "x"}]) == EVERYTHING
        assert ALL not in tags(table, "update", ("description",), None)


def test_spellings_the_database_takes_for_one_are_one_tag() -> None:
    assert tag("user", "AbC ") == tag("user", "abc") == "user:abc"
    assert tag("user", " abc") != tag("user", "abc")
    assert tags("user", "delete", (), [{"id": "ABC  "}, {"id": "abc"}]) == {
        ANY,
        CONTENT,
        "users",
        "user:abc",
    }
    for odd in ("", "  ", "é", "a\x00", "a\n"):
        with pytest.raises(ValueError, match="no tag"):
            tag("user", odd)
        assert tags("user", "delete", (), [{"id": odd}]) == EVERYTHING


@pytest.mark.parametrize(("table", "search"), list(rules.NAMED.items()))
def test_a_name_is_told_by_who_takes_it(table: str, search: rules.Search) -> None:
    for operation in ("insert", "update"):
        found = rules.names(table, operation, {search.name}, ["Bob", "ann "])
        assert found == {rules.name_tag("bob"), rules.name_tag("ann")}
        for odd in (None, 7, b"x", "", "é", "x" * 256):
            assert rules.names(table, operation, {search.name}, ["Bob", odd]) == {rules.NAMES}
        assert rules.names(table, operation, {search.name}, []) == {rules.NAMES}
    assert rules.names(table, "update", {"extra"}, [None]) == frozenset()
    # Which columns it assigns is not known.
    assert rules.names(table, "update", (), [None]) == {rules.NAMES}
    # Who loses a name is told of by his own tag.
    assert rules.names(table, "delete", (), [None]) == frozenset()
    # Nobody moves to another domain, and so gets the name that he has there.
    for column in set(search.columns) - {search.name}:
        assert tags(table, "update", {column}, [{"id": "x"}]) == EVERYTHING
        assert needed(table, "update", {column}) == ()
    assert table in rules.OWNER


def test_tables_without_names_tell_none() -> None:
    assert rules.names("role", "insert", (), ["member"]) == frozenset()
    assert tags("user", "update", {"domain_id"}, [{"id": "x"}]) == EVERYTHING


@pytest.mark.parametrize(
    ("one", "other"),
    [("Bob", "bob"), ("bob", "bob  "), ("vy", "ui"), ("Ji", "iy"), ("w", "V"), ("Ch", "c")],
)
def test_names_that_some_database_takes_for_one_are_one_tag(one: str, other: str) -> None:
    assert rules.name_tag(one) == rules.name_tag(other)
    assert rules.name_tag(one) != rules.name_tag(f" {other}")


def test_fixed_tags() -> None:
    assert len(set(FIXED)) == len(FIXED)
    assert set(FIXED) == {ALL, ANY, CONTENT, GRANTS_GROUP, rules.REVOKED, *FAMILIES}
    assert set(FAMILY.values()) == set(FAMILIES)
    # A tag of a row can never be mistaken for a fixed one.
    assert [name for name in FIXED if ":" in name] == [GRANTS_GROUP]
    assert all(not row.startswith(GRANTS_GROUP) for row in ("grants:user:x", "user:grants:group"))
    assert rules.NAMES not in FIXED


def test_the_map_is_in_one_piece() -> None:
    assert not set(FAMILY) & set(UNDIVIDED)
    assert set(KEY_COLUMNS) == {*FAMILY, *UNDIVIDED, "revocation_event"}
    assert set(IRRELEVANT) <= set(FAMILY)
    assert set(rules._PLAIN) | set(rules._ROW_TAGS) == {t for t, c in KEY_COLUMNS.items() if c}
    assert not set(rules._PLAIN) & set(rules._ROW_TAGS)
    for table, (own, _other, _equal, wanted) in RESOLVE.items():
        assert KEY_COLUMNS[table] == (own,)
        assert rules._PLAIN[table][1] == wanted
    for table, (_kind, column) in rules._PLAIN.items():
        assert table in RESOLVE or KEY_COLUMNS[table] == (column,)
    for reasons in (UNDIVIDED, *IRRELEVANT.values()):
        assert all(reasons.values())


# Keystone's own tables. Two sources: the models, as the code uses them, and the database that the
# migrations make, which has more foreign keys and tables no model knows.

needs_keystone = pytest.mark.skipif(
    importlib.util.find_spec("keystone") is None, reason="Keystone is not installed"
)

# The one cascade whose tags differ from its parent's: see access_rule in rules._PLAIN.
LENT = ("access_rule", "application_credential_access_rule")


@pytest.fixture(
    scope="module", params=["models", pytest.param("migrations", marks=pytest.mark.once)]
)
def tables(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """Keystone's tables by name, as SQLAlchemy describes them."""
    if request.param == "models":
        yield models()
    else:
        yield migrated(tmp_path_factory.mktemp("migrated"))


def models() -> dict[str, Any]:
    import keystone
    from keystone.common import sql

    for module in pkgutil.walk_packages(keystone.__path__, "keystone.", onerror=lambda name: None):
        folder, _, name = module.name.rpartition(".")
        if folder.endswith("backends") and name.startswith("sql"):
            importlib.import_module(module.name)
    return dict(sql.ModelBase.metadata.tables)


def migrated(folder: Path) -> dict[str, Any]:
    import sqlalchemy

    url = f"sqlite:///{folder / 'keystone.sqlite'}"
    config = folder / "keystone.conf"
    config.write_text(f"[database]\nconnection = {url}\n", encoding="utf-8")
    # In a process of its own, for Keystone's options and logging are global.
    program = "from keystone.cmd.manage import main; main()"
    subprocess.run(
        [sys.executable, "-c", program, "--config-file", str(config), "db_sync"],
        check=True,
        capture_output=True,
        timeout=600,
    )
    engine = sqlalchemy.create_engine(url)
    try:
        metadata = sqlalchemy.MetaData()
        metadata.reflect(engine)
        return dict(metadata.tables)
    finally:
        engine.dispose()


@needs_keystone
def test_every_table_of_keystone_is_in_the_map(tables: dict[str, Any]) -> None:
    assert len(tables) > 40
    missing = set(tables) - set(KEY_COLUMNS)
    assert not missing, f"Keystone has tables that rules.py does not know: {sorted(missing)}"
    gone = set(KEY_COLUMNS) - set(tables)
    # The models leave out what Keystone does not use.
    assert gone <= {"token", "alembic_version"}


@needs_keystone
def test_every_column_named_is_one_of_keystone(tables: dict[str, Any]) -> None:
    for table, columns in KEY_COLUMNS.items():
        if table in tables:
            assert set(columns) <= set(tables[table].columns.keys()), table
    for table, reasons in IRRELEVANT.items():
        assert set(reasons) <= set(tables[table].columns.keys()), table
    for table, search in rules.NAMED.items():
        assert search.name in search.columns
        assert set(search.columns) <= set(tables[table].columns.keys()), table
    for table, columns in rules._FOR_EVER.items():
        assert set(columns) <= set(tables[table].columns.keys()), table
    for table, (own, other, equal, wanted) in RESOLVE.items():
        assert own in tables[table].columns
        assert {equal, wanted} <= set(tables[other].columns.keys())


@needs_keystone
def test_events_name_what_a_tag_is_made_for(tables: dict[str, Any]) -> None:
    """A new column of revocation_event may be a new condition, or a new way to revoke."""
    known = {*KEY_COLUMNS["revocation_event"], "access_token_id", "expires_at"}
    times = {"id", "issued_before", "revoked_at"}
    assert set(tables["revocation_event"].columns.keys()) == known | times


@needs_keystone
def test_a_parent_gives_what_its_cascades_would(tables: dict[str, Any]) -> None:
    seen = 0
    for child in tables.values():
        for key in child.foreign_key_constraints:
            parent = key.referred_table
            actions = {"delete": key.ondelete, "update": key.onupdate}
            for operation, action in actions.items():
                if (action or "NO ACTION").upper() in ("NO ACTION", "RESTRICT"):
                    continue
                seen += 1
                changed = [element.column.name for element in key.elements]
                # A row of the parent, and what of the child's row follows from it.
                above = {column.name: f"{parent.name}.{column.name}" for column in parent.columns}
                below = {
                    element.parent.name: above[element.column.name] for element in key.elements
                }
                if child.name in RESOLVE and RESOLVE[child.name][1] == parent.name:
                    wanted = RESOLVE[child.name][3]
                    below[wanted] = above[wanted]
                given = tags(parent.name, operation, changed, [above])
                if given == EVERYTHING:
                    continue
                if (parent.name, child.name) == LENT:
                    assert f"user:{above['user_id']}" in given
                    continue
                wanted_tags = tags(child.name, operation, list(below), [below])
                assert wanted_tags <= given, f"{operation} of {parent.name} takes {child.name}"
    assert seen > 10


@needs_keystone
def test_types_of_grants_and_mappings_are_those_of_keystone() -> None:
    backend = importlib.import_module("keystone.assignment.backends.sql")
    core = importlib.import_module("keystone.assignment.core")
    mapping = importlib.import_module("keystone.identity.mapping_backends.mapping")
    kinds = [value for name, value in vars(backend.AssignmentType).items() if name.isupper()]
    assert len(kinds) == 4
    kinds += [core.Manager._USER_SYSTEM, core.Manager._GROUP_SYSTEM]
    for kind in kinds:
        table = "system_assignment" if kind.endswith("System") else "assignment"
        expected = "grants:user:x" if kind.startswith("User") else GRANTS_GROUP
        assert row_tags(table, {"type": kind, "actor_id": "x"}) == {expected}
    entities = [value for name, value in vars(mapping.EntityType).items() if name.isupper()]
    assert len(entities) == 2
    for entity in entities:
        assert tags("id_mapping", "delete", (), [{"public_id": "x", "entity_type": entity}]) != (
            EVERYTHING
        )


def test_identifiers_as_long_as_a_request_are_not_kept() -> None:
    """Anybody may send some, in a login that fails or in a URL."""
    tracemalloc.start()
    try:
        for number in range(100):
            slots([tag("user", f"{number:0100000}")], 65536)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000

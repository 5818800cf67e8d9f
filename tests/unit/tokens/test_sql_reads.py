"""Which rows a SELECT depends on: held against a database that executes it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from keyfront.middleware.tokens.invalidation import rules
from keyfront.middleware.tokens.invalidation.sql_reads import Reads, reads

# Statements of Keystone, shortened.

_USER = (
    "SELECT user.id, password_1.hash FROM user LEFT OUTER JOIN local_user AS local_user_1 "
    "ON user.id = local_user_1.user_id AND user.domain_id = local_user_1.domain_id "
    "LEFT OUTER JOIN password AS password_1 ON local_user_1.id = password_1.local_user_id "
    "WHERE user.id = ? ORDER BY password_1.created_at_int"
)
_OPTION = (
    "SELECT user_option.user_id FROM (SELECT user.id AS user_id FROM user WHERE user.id = ?) "
    "AS anon_1 JOIN user_option ON anon_1.user_id = user_option.user_id"
)
_NAME = (
    "SELECT user.id FROM user JOIN local_user ON user.id = local_user.user_id "
    "WHERE local_user.name = ? AND local_user.domain_id = ?"
)
_GROUPS = (
    'SELECT "group".id FROM "group" JOIN user_group_membership '
    'ON "group".id = user_group_membership.group_id WHERE user_group_membership.user_id = ?'
)
_GRANTS = (
    "SELECT assignment.type FROM assignment WHERE assignment.actor_id IN "
    "(%(actor_id_1_1)s::VARCHAR, %(actor_id_1_2)s::VARCHAR) AND assignment.inherited = false"
)
_REVOKED = (
    "SELECT revocation_event.id FROM revocation_event WHERE revocation_event.issued_before >= %s "
    "AND (revocation_event.user_id IS NULL OR revocation_event.user_id = %s)"
)


@pytest.mark.parametrize(
    ("statement", "parameters", "families", "tags"),
    [
        (_USER, ("U",), {"users"}, {"user:u"}),
        (_USER.replace("?", "%s"), ("u",), {"users"}, {"user:u"}),
        (_USER.replace("user.id = ?", "? = user.id"), ("u",), {"users"}, {"user:u"}),
        (_OPTION, ("u",), {"users"}, {"user:u"}),
        (_NAME, ("n", "d"), {"users"}, {"users"}),
        (_GROUPS, ("u",), {"groups", "members"}, {"groups", "members:u", "user:u"}),
        (
            _GROUPS.replace('"', "`"),
            ("u",),
            {"groups", "members"},
            {"groups", "members:u", "user:u"},
        ),
        (
            _GRANTS,
            {"actor_id_1_1": "u", "actor_id_1_2": "g"},
            {"grants"},
            {"grants:user:u", "grants:user:g", "grants:group"},
        ),
        (_REVOKED, (1, "u"), {"any"}, {"any"}),
        ("SELECT role.id FROM role WHERE role.id = ?", ("r",), {"roles"}, {"roles"}),
        (
            "SELECT project.id FROM project WHERE project.id = :id_1",
            {"id_1": "p"},
            {"projects"},
            {"project:p"},
        ),
        # An insert of one gives no tag of the user.
        (
            "SELECT access_rule.id FROM access_rule WHERE access_rule.user_id = ?",
            ("u",),
            {"appcreds"},
            {"appcreds"},
        ),
        # What a join leaves out of the second table stays of the first.
        (
            "SELECT user.id FROM user LEFT JOIN role ON user.id = ?",
            ("u",),
            {"users", "roles"},
            {"users", "roles"},
        ),
        # The first of all users may be another one.
        (
            "SELECT one.id FROM (SELECT user.id FROM user LIMIT 1) AS one WHERE one.id = ?",
            ("u",),
            {"users"},
            {"users"},
        ),
        # Another password than the user's.
        (
            "SELECT 1 FROM password JOIN local_user ON local_user.name = password.local_user_id "
            "WHERE local_user.user_id = ?",
            ("u",),
            {"users"},
            {"users", "user:u"},
        ),
        ("SELECT whitelisted_config.domain_id FROM whitelisted_config", (), set(), set()),
        ("BEGIN (implicit)", (), set(), set()),
    ],
)
def test_what_a_statement_reads(
    statement: str, parameters: Any, families: set[str], tags: set[str]
) -> None:
    assert reads(statement, parameters)[:2] == (families, tags)


_BOTH = {"name:n", rules.NAMES, "user:u1", "user:u2"}
_OF_NAME = (
    "SELECT user_group_membership.group_id FROM user_group_membership "
    "JOIN local_user ON local_user.user_id = user_group_membership.user_id "
    "WHERE local_user.name = ? AND local_user.domain_id = ?"
)


@pytest.mark.parametrize(
    ("statement", "parameters", "tags"),
    [
        (_NAME, ("N", "d"), _BOTH),
        (f"SELECT one.id FROM ({_NAME}) AS one JOIN user_option ON user_option.user_id = one.id",
         ("n", "d"), _BOTH),
        (_OF_NAME, ("n", "d"), {*_BOTH, "members:u1", "members:u2"}),
        # Nobody can say which names are equal to this one: all tables go by their families.
        (_OF_NAME, ("é", "d"), {"members", "users"}),
        (_OF_NAME, ("x" * 256, "d"), {"members", "users"}),
        (_OF_NAME, (None, "d"), {"members", "users"}),
        (_OF_NAME, ("n",), {"members", "users"}),
        # By less than what names are looked for with, or by more than that it equals something.
        (_NAME.replace("local_user.domain_id", "user.domain_id"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name LIKE ?"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name > ?"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name IS ?"), ("n", "d"), {"users"}),
        (_NAME.replace("local_user.name = ?", "lower(local_user.name) = ?"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name = lower(?)"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name = ? OR 1 = 1"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name IN (?, 'x')"), ("n", "d"), {"users"}),
        (_NAME.replace("name = ?", "name NOT IN (?)"), ("n", "d"), {"users"}),
        (_NAME.replace("JOIN", "LEFT JOIN").replace("WHERE", "AND"), ("n", "d"), {"users"} | _BOTH),
        (_NAME.replace("name = ?", "name IN (?, ?)"), ("n", "m", "d"), {*_BOTH, "name:m"}),
        (
            "SELECT project.id FROM project WHERE project.name = ? AND project.domain_id = ?",
            ("n", "d"),
            {"name:n", rules.NAMES, "project:u1", "project:u2"},
        ),
        (_GROUPS, ("u",), {"members:u", "user:u", "group:u1", "group:u2"}),
        (
            "SELECT id_mapping.public_id FROM id_mapping WHERE id_mapping.domain_id = ? "
            "AND id_mapping.local_id = ? AND id_mapping.entity_type = ?",
            ("d", "n", "user"),
            {*_BOTH, "group:u1", "group:u2"},
        ),
        ("SELECT role.id FROM role WHERE role.name = ? AND role.domain_id = ?", "nd", {"roles"}),
    ],
)
def test_what_is_found_by_name(statement: str, parameters: Any, tags: set[str]) -> None:
    asked = []

    def find(table: str, column: str, values: Mapping[str, Sequence[object]]) -> list[object]:
        asked.append((table, column))
        # Also NULL, to which nothing is equal.
        return ["u1", "u2", None]

    assert reads(statement, parameters, find).tags == tags
    assert len(asked) == len(set(asked)) <= 1
    # Where nobody can be asked.
    assert not {"user:u1", "group:u1", "project:u1", "name:n"} & reads(statement, parameters).tags


@pytest.mark.parametrize("found", [["u"] * (rules.LIMIT + 1), ["u", "é"], ["u", 7], [b"u"]])
def test_owners_without_tags_are_the_whole_table(found: list[object]) -> None:
    tags = reads(_NAME, ("n", "d"), lambda table, column, values: found).tags
    assert "users" in tags


@pytest.mark.parametrize(
    "condition",
    [
        "user.id = ? OR user.enabled = 1",
        "user.id = ? AND user.enabled = 1 OR user.enabled = 2",
        "(user.id = ? OR user.enabled = 1)",
        "NOT user.id = ?",
        "NOT (user.id = ?)",
        "user.id != ?",
        "user.id = lower(?)",
        "user.id = ? || 'x'",
        "lower(user.id) = ?",
        "user.id IN (?, 'x')",
        "user.id NOT IN (?)",
        "user.id IN (SELECT user_id FROM local_user WHERE local_user.name = ?)",
        "user.id BETWEEN ? AND user.name",
        "user.enabled = CASE WHEN user.id = ? THEN 1 END",
        "user.id = ? UNION SELECT user.id FROM user",
        "/* user.id = 1 AND */ user.id LIKE ?",
        "user.id IS ?",
        "id = ?",
    ],
)
def test_what_is_not_understood_is_the_whole_table(condition: str) -> None:
    found = reads(f"SELECT user.id FROM user WHERE {condition}", ("u",))
    assert found[:2] == ({"users"}, {"users"})


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT project_1.id FROM project AS project_1", {"projects"}),
        ("SELECT trust.id\nFROM\ttrust LEFT JOIN trust_role ON 1", {"trusts"}),
        ("SELECT `limit`.id FROM `limit`, registered_limit", {"limits"}),
        ("SELECT 1 FROM revocation_event", {"any"}),
        ("SELECT 1", set()),
        ("VACUUM INTO project", {"projects"}),
    ],
)
def test_what_is_read_whole(statement: str, expected: set[str]) -> None:
    assert reads(statement, ())[:2] == (expected, expected)


@pytest.mark.parametrize(
    "text", ['SELECT x.id FROM "{}" AS x', 'SELECT 1 UNION SELECT x.id FROM "{}" AS x']
)
def test_every_table_that_is_told_apart_is_found(text: str) -> None:
    for table, family in rules.FAMILY.items():
        assert reads(text.format(table), ())[:2] == ({family}, {family})


def test_what_reads_by_owner_is_what_every_write_tells() -> None:
    """Of the tables whose rows belong to somebody, each write to a row has the tag of its owner."""
    for table, (kinds, column) in rules.OWNER.items():
        row = {column: "x", "type": "UserProject", "entity_type": "user"}
        for operation in ("insert", "update", "delete"):
            found = rules.tags(table, operation, {"extra"}, [row])
            assert found & {rules.tag(kind, "x") for kind in kinds}, (table, operation)


@pytest.mark.parametrize("value", [None, 1, b"u", "ü", "", "a\nb"])
def test_what_makes_no_tag_is_the_whole_table(value: object) -> None:
    assert reads(_USER, (value,))[:2] == ({"users"}, {"users"})


def test_parameters_that_are_not_there_are_the_whole_table() -> None:
    assert reads(_USER, ())[:2] == ({"users"}, {"users"})
    assert reads(_USER, None)[:2] == ({"users"}, {"users"})


# Any statement of these tables, held against SQLite: whatever a write to one row changes of what
# the statement shows, it changes one of the tags.

_COLUMNS = {
    "user": ("id", "domain_id", "enabled"),
    "local_user": ("id", "user_id", "domain_id", "name"),
    "password": ("id", "local_user_id", "hash"),
    "assignment": ("type", "actor_id", "target_id"),
    "user_group_membership": ("user_id", "group_id"),
    "project": ("id", "domain_id", "name"),
}
_VALUES = ("a", "b")
# Which are equal, the database says: it takes no notice of case.
_NAMES = ("n", "N", "m", "é")

Aliases = dict[str, tuple[str, ...]]


def _values(column: str) -> st.SearchStrategy[str]:
    return st.sampled_from(_NAMES if column == "name" else _VALUES)


@st.composite
def _conditions(draw: st.DrawFn, aliases: Aliases) -> tuple[str, list[str]]:
    """Return a condition on the columns of these tables, with its parameters."""
    parts, parameters = [], []
    named = sorted(alias for alias, columns in aliases.items() if "name" in columns)
    if named and draw(st.integers(0, 2)):
        # By name, as Keystone does.
        alias = draw(st.sampled_from(named))
        name, domain = draw(st.sampled_from(_NAMES)), draw(st.sampled_from(_VALUES))
        parts += [f"{alias}.name = ?", f"{alias}.domain_id = ?"]
        parameters += [name, domain]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3] if parts else [1, 1, 2, 3]))):
        alias = draw(st.sampled_from(sorted(aliases)))
        owning = [x for x in aliases[alias] if x.endswith("id")]
        column = draw(st.sampled_from([*owning, *owning, *aliases[alias]]))
        kind = draw(st.sampled_from(["=", "=", "=", "join", "join", "join", "in", "or", "not"]))
        if kind == "join":
            other = draw(st.sampled_from(sorted(aliases)))
            one, another = (
                draw(st.sampled_from([x for x in aliases[name] if x.endswith("id")]))
                for name in (alias, other)
            )
            parts.append(f"{alias}.{one} = {other}.{another}")
        elif kind == "in":
            parts.append(f"{alias}.{column} IN (?, ?)")
            parameters += draw(st.tuples(*[_values(column)] * 2))
        else:
            text = {"=": "{} = ?", "or": "({} = ? OR 1 = 0)", "not": "NOT {} = ?"}[kind]
            parts.append(text.format(f"{alias}.{column}"))
            parameters.append(draw(_values(column)))
    text = parts[0]
    for part in parts[1:]:
        text += draw(st.sampled_from([" AND ", " AND ", " AND ", " OR "])) + part
    return text, parameters


@st.composite
def _statements(draw: st.DrawFn, inner: bool = False) -> tuple[str, list[str], tuple[str, ...]]:
    """Return a SELECT, its parameters and its columns."""
    aliases: Aliases = {}
    text = ""
    parameters: list[str] = []
    for number in range(draw(st.sampled_from([1, 2, 2, 3]))):
        if not inner and not number and draw(st.booleans()):
            subquery, inside, columns = draw(_statements(inner=True))
            alias, item = "anon_1", f"({subquery}) AS anon_1"
            parameters += inside
        else:
            table = draw(st.sampled_from(sorted(_COLUMNS)))
            columns = _COLUMNS[table]
            alias = f"{table}_{number}" if table in aliases else table
            item = table if alias == table else f"{table} AS {alias}"
        aliases[alias] = columns
        join = draw(st.sampled_from(["JOIN", "LEFT OUTER JOIN", ","]))
        if not number or join == ",":
            text += f"{', ' if number else ''}{item}"
            continue
        condition, needed = draw(_conditions(aliases))
        text += f" {join} {item} ON {condition}"
        parameters += needed
    if inner or not draw(st.integers(0, 2)):
        condition, needed = draw(_conditions(aliases))
        text += f" WHERE {condition}"
        parameters += needed
    if inner and draw(st.booleans()):
        text += " ORDER BY 1 LIMIT 1"
    shown = {
        f"{alias}_{column}": f"{alias}.{column}"
        for alias, columns in aliases.items()
        for column in columns
    }
    columns = ", ".join(f"{column} AS {label}" for label, column in shown.items())
    return f"SELECT {columns} FROM {text}", parameters, tuple(shown)


@st.composite
def _rows(draw: st.DrawFn, tables: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Return a few rows of these tables."""
    found = []
    for _ in range(draw(st.integers(2, 6))):
        table = draw(st.sampled_from(tables))
        row = {column: draw(_values(column)) for column in _COLUMNS[table]}
        if table == "assignment":
            row["type"] = draw(st.sampled_from(["UserProject", "GroupProject"]))
        found.append((table, row))
    return found


Rows = list[tuple[str, dict[str, str]]]


@contextmanager
def _database(rows: Rows) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for table, columns in _COLUMNS.items():
            listed = ", ".join(f"{x} COLLATE NOCASE" if x == "name" else x for x in columns)
            connection.execute(f"CREATE TABLE {table} ({listed})")
        for table, row in rows:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} VALUES ({marks})", list(row.values()))
        yield connection


def _read(rows: Rows, text: str, parameters: list[str]) -> tuple[Any, Reads]:
    """Return what a statement shows of these rows, and what it depends on."""
    with _database(rows) as connection:

        def find(table: str, column: str, values: Mapping[str, Sequence[object]]) -> list[object]:
            conditions = [f"{name} IN ({', '.join('?' * len(x))})" for name, x in values.items()]
            query = f"SELECT DISTINCT {column} FROM {table} WHERE {' AND '.join(conditions)}"
            wanted = [value for x in values.values() for value in x]
            return [found for (found,) in connection.execute(query, wanted)]

        shown = sorted(connection.execute(text, parameters), key=repr)
        return shown, reads(text, parameters, find)


def _tags_of(operation: str, table: str, row: dict[str, str], rows: Rows) -> set[str]:
    """Return the tags of a write of a row, in a database with these rows."""
    found: set[str] = set()
    owners: list[dict[str, object]] = [dict(row)]
    if table in rules.RESOLVE:
        own, other, number, wanted = rules.RESOLVE[table]
        # The number is unique there; here each that has it counts.
        owners = [
            {**row, wanted: one[wanted]}
            for name, one in rows
            if name == other and one[number] == row[own]
        ]
    changed = {"name"} if operation == "update" else set()
    for owner in owners or [dict(row)]:
        found |= rules.tags(table, operation, changed, [owner])
    found |= rules.names(table, operation, changed, [row.get("name")])
    return found - {rules.ANY, rules.CONTENT}


@pytest.mark.once
@settings(max_examples=400, deadline=None)
@given(_statements(), st.data())
def test_no_write_changes_what_is_shown_without_a_tag(
    statement: tuple[str, list[str], tuple[str, ...]], data: st.DataObject
) -> None:
    text, parameters, _ = statement
    tables = [table for table in _COLUMNS if re.search(rf"(FROM|JOIN|,) \(*{table}\b", text)]
    rows = data.draw(_rows(tables))
    all_of_them = _read(rows, text, parameters)
    for place, (table, row) in enumerate(rows):
        others = rows[:place] + rows[place + 1 :]
        without = _read(others, text, parameters)
        renamed = [{**row, "name": name} for name in _NAMES if "name" in row]
        changes = [
            ("delete", row, all_of_them, without),
            ("insert", row, without, all_of_them),
            *(
                ("update", one, all_of_them, _read([*others, (table, one)], text, parameters))
                for one in renamed
            ),
        ]
        for operation, written, (before, depends), (after, _) in changes:
            if before != after:
                note(f"{text} {parameters}: {operation} of {table} {row} {written}")
                told = _tags_of(operation, table, written, rows)
                assert (depends.tags | {rules.ALL}) & told, depends
                assert rules.FAMILY[table] in depends.families


def test_the_property_covers_what_is_found_by_name() -> None:
    """Else nothing of it would be tried."""
    told_apart = 0

    @settings(max_examples=100, deadline=None, database=None)
    @given(_statements())
    def look(statement: tuple[str, list[str], tuple[str, ...]]) -> None:
        nonlocal told_apart
        _, found = _read([], *statement[:2])
        told_apart += any(tag.startswith("name:") for tag in found.tags)

    look()
    assert told_apart

"""What a statement writes, and which tables it reads.

Keystone writes through SQLAlchemy's expressions, so table, columns and the rows' keys are read from
SQLAlchemy's own objects. Text that may write is taken for a write to everything. What is read is
told by the words of a statement: a table that it does not read may be among them, and costs a hit.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList

from . import rules as touches

LOG = logging.getLogger(__name__)

# Statements of Keystone, its libraries and drivers that change no rows, as their first word.
_HARMLESS_TEXT = re.compile(
    r"\s*(SELECT|SHOW|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET|EXPLAIN|START)\b", re.I
)


_WORD = re.compile(r"\w+")


@functools.lru_cache(maxsize=4096)
def reads(statement: str) -> frozenset[str]:
    """Return the tags of all tables that a statement may read.

    Tables that are told apart by nothing have none: every answer depends on their writes.
    """
    words = set(_WORD.findall(statement))
    found = {family for table, family in touches.FAMILY.items() if table in words}
    return frozenset(found | ({touches.ANY} if "revocation_event" in words else set()))


class Write(NamedTuple):
    """A statement that writes."""

    table: str
    #: insert, update or delete
    operation: str
    #: Columns that an update assigns.
    changed: frozenset[str]
    #: The key columns of the rows, as ``touches.tags`` takes them; ``None`` if not known yet.
    rows: Sequence[touches.Row] | None
    #: How many rows :func:`look_up` found; -1 if it was not needed.
    looked_up: int = -1


#: A write to who knows what.
UNKNOWN = Write("", "", frozenset(), None)


def describe(context: Any, statement: str) -> Write | None:
    """Return what an execution writes, or ``None`` if nothing.

    :param context: SQLAlchemy's execution context
    :param statement: its text, for statements that are only text
    """
    try:
        return _describe(context, statement)
    except (AttributeError, KeyError, TypeError) as error:
        # Another SQLAlchemy than we know: nothing is lost but hits.
        LOG.warning("a write is taken for a change of everything: %s", error)
        return UNKNOWN


def _describe(context: Any, statement: str) -> Write | None:
    if context.isinsert:
        operation = "insert"
    elif context.isupdate:
        operation = "update"
    elif context.isdelete:
        operation = "delete"
    elif context.compiled is not None and not context.is_text and not context.isddl:
        return None  # a SELECT; Keystone has none that writes
    else:
        return None if _HARMLESS_TEXT.match(statement) else UNKNOWN
    compiled = context.compiled
    table = getattr(getattr(compiled, "statement", None), "table", None)
    if table is None:
        return UNKNOWN
    parameters = context.compiled_parameters
    changed: frozenset[str] = frozenset()
    if operation == "update":
        changed = _assigned(compiled, table)
    keys = touches.needed(table.name, operation, changed)
    rows: Sequence[touches.Row] | None = None
    if keys and operation == "insert":
        rows = _inserted(compiled.statement, keys, parameters)
        if rows is None:
            return UNKNOWN
    elif keys and changed.isdisjoint(keys):
        rows = _pinned(compiled, table, keys, parameters)
    elif keys:
        return UNKNOWN  # Keystone never moves a row to another owner
    return Write(table.name, operation, changed, rows)


def look_up(connection: Connection, write: Write, context: Any) -> Write:
    """Return ``write`` with its rows, found out in the database where they are not known.

    Called before the write, in its transaction. Rows that cannot be found out stay ``None``.
    """
    keys = touches.needed(write.table, write.operation, write.changed)
    if not keys:
        return write
    if write.rows is None:
        table = context.compiled.statement.table
        criteria = getattr(context.invoked_statement, "_where_criteria", None)
        if not criteria:  # all rows of the table, or a statement of an unknown shape
            return write
        query = select(*(table.c[key] for key in keys)).where(*criteria)
        query = query.limit(touches.LIMIT + 1)
        if connection.dialect.name != "sqlite":
            # What the write will see: the present rows, not those of an older snapshot.
            query = query.with_for_update()
        found: list[touches.Row] = []
        for parameters in context.compiled_parameters:
            found += [dict(row) for row in connection.execute(query, parameters).mappings()]
            if len(found) > touches.LIMIT:
                return write
        write = write._replace(rows=found, looked_up=len(found))
        if _pinned(context.compiled, table, table.primary_key.columns.keys(), ()) is not None:
            # By primary key there is no row but these, however they are counted.
            write = write._replace(looked_up=-1)
    if write.table in touches.RESOLVE:
        write = write._replace(rows=_resolve(connection, write, context))
    return write


def _resolve(connection: Connection, write: Write, context: Any) -> Sequence[touches.Row] | None:
    """Add to each row the owner that it names by another table's number."""
    own, other, number, wanted = touches.RESOLVE[write.table]
    table = context.compiled.statement.table.metadata.tables.get(other)
    rows = write.rows or ()
    numbers = {row[own] for row in rows if isinstance(row.get(own), int)}
    if table is None or not numbers or len(numbers) > touches.LIMIT:
        return rows
    query = select(table.c[number], table.c[wanted]).where(table.c[number].in_(numbers))
    owners = {row[0]: row[1] for row in connection.execute(query)}
    return [
        {**row, wanted: owners[row[own]]} if row.get(own) in owners else row for row in rows
    ]


def _assigned(compiled: Any, table: Any) -> frozenset[str]:
    """Return the columns that an update assigns; those it may assign where that is not sure."""
    # From the parameters of the execution, and from values in the statement itself, which
    # SQLAlchemy 2.0 keeps in two places.
    statement = compiled.statement
    ordered = dict(getattr(statement, "_ordered_values", None) or ())
    assigned = [*(compiled.column_keys or ()), *(statement._values or ()), *ordered]
    names = {str(getattr(key, "key", key)) for key in assigned}
    return frozenset(names.intersection(table.c.keys()))


def _inserted(
    statement: Any, keys: Sequence[str], parameters: Sequence[Mapping[str, Any]]
) -> Sequence[touches.Row] | None:
    if statement.select is not None or statement._multi_values:
        return None
    computed = {
        str(getattr(key, "key", key))
        for key, value in (statement._values or {}).items()
        if not isinstance(value, BindParameter)
    }
    if computed.intersection(keys):
        return None
    # A column that is not given is NULL: none of the key columns has a default.
    return [{key: row.get(key) for key in keys} for row in parameters]


def _pinned(
    compiled: Any, table: Any, keys: Sequence[str], parameters: Sequence[Mapping[str, Any]]
) -> Sequence[touches.Row] | None:
    """Return the rows' keys if WHERE says what they are; ``None`` if they have to be looked up."""
    names: dict[str, str] = {}
    for criterion in _conjuncts(compiled.statement._where_criteria):
        if not isinstance(criterion, BinaryExpression) or criterion.operator is not operators.eq:
            continue
        column, value = criterion.left, criterion.right
        if (
            isinstance(value, BindParameter)
            and getattr(column, "table", None) is table
            and value in compiled.bind_names
        ):
            names[str(column.key)] = compiled.bind_names[value]
    if not names.keys() >= set(keys):
        return None
    return [{key: row.get(names[key]) for key in keys} for row in parameters]


def _conjuncts(criteria: Sequence[Any]) -> Iterator[Any]:
    for criterion in criteria:
        if isinstance(criterion, BooleanClauseList) and criterion.operator is operators.and_:
            yield from _conjuncts(criterion.clauses)
        else:
            yield criterion

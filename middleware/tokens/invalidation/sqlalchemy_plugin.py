"""Hooks on a database engine that announce each transaction's changes before and after its commit.

Keystone's workers get it from ``egg:keyfront#keystone``. Any other process that writes to
Keystone's database, above all ``keystone-manage``, gets it by one word in the URL::

    [database]
    connection = mysql+pymysql://keystone:…@db/keystone?plugin=keyfront

For a transaction that writes nothing, or nothing that an answer depends on, only each statement's
kind is looked at. A transaction whose changes nobody could be told of is not committed.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import column, event, select
from sqlalchemy import table as from_table
from sqlalchemy.engine import URL, Connection, CreateEnginePlugin, Engine
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList

from keyfront.errors import CoordinatorError

from ..coordinator import mark_owners
from ..folder import PATH_PARAMETER, folder_here, trusted_users
from ..request import Request, current
from . import rules
from .change_log import Changes, coordinators
from .sql_reads import reads

LOG = logging.getLogger(__name__)

# Names in the info dictionary of a database connection: the tags of its transaction,
_TAGS = "keyfront.tags"
# whether others may be told of it late,
_LATENESS = "keyfront.lateness"
# whether it has written at all,
_WROTE = "keyfront.wrote"
# and its session, as the server knows it.
_SESSION = "keyfront.session"
# Seconds to wait for another server of a cluster, and for each answer to a question about commits:
# a request waits for it, and no other thread of the process asks meanwhile.
_ELSEWHERE_SECONDS = 1
_ANSWER_SECONDS = 5
#: Name of the execution option of our own statements, whose rows are in no answer.
UNNOTED = "keyfront_unnoted"
# Name of the attribute of an execution context with the write that is being executed.
_WRITE = "_keyfront_write"


@dataclass(slots=True)
class _Lateness:
    """The answer to whether others may be told of a transaction late.

    :param created: ids of the users that it inserts
    :param allowed: true as long as each of its writes may be told late
    """

    created: set[object] = field(default_factory=set)
    allowed: bool = True


class Plugin(CreateEnginePlugin):
    """The SQLAlchemy plugin ``?plugin=keyfront``, for any database.

    For SQLite there is more, see :mod:`keyfront.gateway.keystone.sqlite`.

    :param url: the database's URL, which may have the parameter :data:`.PATH_PARAMETER`
    :param kwargs: the arguments of ``create_engine``, not used
    """

    def __init__(self, url: URL, kwargs: dict[str, Any]) -> None:
        path = url.query.get(PATH_PARAMETER)
        self._folder = Path(path) if isinstance(path, str) else None

    def update_url(self, url: URL) -> URL:
        """Return the URL without the parameters that the driver would not know."""
        return url.difference_update_query([PATH_PARAMETER])

    def engine_created(self, engine: Engine) -> None:
        """Attach the hooks to the engine."""
        attach(engine, self._folder)


def attach(engine: Engine, folder: Path | None = None) -> None:
    """Attach the hooks to an engine, so that each change it commits is announced.

    A second call for the same engine does nothing.

    :param engine: the engine of Keystone's database
    :param folder: the folder of the epoch table; by default the one that Keystone's configuration
        names, or that belongs to the engine's database
    """
    if is_attached(engine):
        return
    changes = Changes(
        lambda: folder or folder_here(engine.url),
        lambda: trusted_users(engine.url, changes.folder),
    )
    dialect = engine.dialect
    commit = dialect.do_commit

    def do_commit(connection: Any) -> None:
        _commit(connection, commit, changes, dialect.name)

    def note_session(connection: Any, record: Any, proxy: Any) -> None:
        # Not when it is needed: in a transaction, a question that PostgreSQL refuses would have
        # the commit that follows do nothing, and say nothing.
        if _SESSION not in record.info:
            session = mark_owners.session_of(dialect.name, connection)
            record.info[_SESSION] = session
            if session != mark_owners.UNKNOWN:
                mark_owners.bound_idleness(dialect.name, connection)
            with suppress(Exception):
                connection.rollback()

    def connect(host: str = "", port: int = 0) -> Any:
        url = engine.url
        if host:
            url = url.set(host=host, port=port).difference_update_query(["unix_socket"])
        arguments, named = dialect.create_connect_args(url)
        if dialect.driver in ("pymysql", "mysqldb"):
            # A server that hangs takes connections all the same.
            named["read_timeout"] = _ANSWER_SECONDS
            if host:
                named["connect_timeout"] = _ELSEWHERE_SECONDS
        return dialect.connect(*arguments, **named)

    # No event tells that a commit is over, and the answer must not leave before.
    do_commit.keyfront = changes  # type: ignore[attr-defined]
    setattr(engine.dialect, "do_commit", do_commit)  # noqa: B010 - mypy refuses methods
    coordinators.settled.connections.append((dialect.name, connect))
    if dialect.name != "sqlite":
        event.listen(engine, "checkout", note_session)
    event.listen(engine, "before_cursor_execute", _before_execute)
    event.listen(engine, "after_cursor_execute", _after_execute)
    event.listen(engine, "rollback", _forget)
    event.listen(engine, "checkin", _forget_record)


def is_attached(engine: Engine) -> bool:
    """Return whether the hooks are attached to an engine."""
    return hasattr(engine.dialect.do_commit, "keyfront")


# The column that a login writes once a day, in the table user and no other.
_LAST_ACTIVE = frozenset({"last_active_at"})


def inactivity_counts() -> bool:
    """Return whether Keystone disables users for inactivity; true if that is not known."""
    keystone: Any = sys.modules.get("keystone.conf")
    if keystone is None or "security_compliance" not in keystone.CONF:
        return True
    return bool(keystone.CONF.security_compliance.disable_user_account_days_inactive)


def _changes_nothing(write: Write, context: Any) -> bool:
    """Return whether an update of one column gives it a value on which no answer depends."""
    if write.changed == _LAST_ACTIVE:
        return not inactivity_counts()
    if write.table != "trust" or write.changed != {"remaining_uses"}:
        return False
    # No kept answer shows how often a trust may still be used; but a trust that may not be used any
    # more ends the tokens that were issued with it.
    left = [parameters.get("remaining_uses") for parameters in context.compiled_parameters]
    return bool(left) and all(isinstance(number, int) and number > 0 for number in left)


def _before_execute(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    write = describe(context, statement)
    request = current.get()
    if write is not None and _changes_nothing(write, context):
        return
    if write is not None and request is not None:
        request.writes()
    if write is None:
        noting = request is not None and (request.reading or request.fills)
        if request is not None and noting and not context.execution_options.get(UNNOTED):
            request.note(reads(statement, parameters, partial(find, connection, request)))
        return
    connection.info[_WROTE] = True
    # Whose rows they are can only be seen as long as they are there.
    setattr(context, _WRITE, look_up(connection, write, context))


def find(
    connection: Connection,
    request: Request,
    table: str,
    name: str,
    values: Mapping[str, Sequence[object]],
) -> Sequence[object]:
    """Return the values of a column in the rows in which other columns have given values.

    The caller must note the dependency on these rows.

    :param connection: the connection, in the transaction of the statement that needs them
    :param request: the notes on the request, which keep the result
    :param table: the table's name
    :param name: the column's name
    :param values: by name of another column, the values that it may have
    :returns: distinct values, at most one more than :data:`.rules.LIMIT`
    """
    key = _key(table, name, values)
    found = request.found.get(key)
    if found is None:
        query: Any = select(column(name)).select_from(from_table(table)).limit(rules.LIMIT + 1)
        for one, wanted in values.items():
            query = query.where(column(one).in_(wanted))
        query = query.distinct().execution_options(**{UNNOTED: True})
        # The result may be of a later state than the former statement's, but of none from before
        # the request.
        found = request.found[key] = list(connection.execute(query).scalars())
    return found


def tell_found(
    request: Request,
    table: str,
    name: str,
    values: Mapping[str, Sequence[object]],
    found: Sequence[object],
) -> None:
    """Tell what :func:`find` would return, by a statement that was executed for more than that.

    :param found: the result; the others are the parameters of :func:`find`
    """
    request.found[_key(table, name, values)] = list(found)


def _key(table: str, name: str, values: Mapping[str, Sequence[object]]) -> tuple[object, ...]:
    return (table, name, *((one, tuple(wanted)) for one, wanted in values.items()))


def _after_execute(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    write: Write | None = getattr(context, _WRITE, None)
    if write is None:
        return
    # Not every driver counts the rows of many executions at once.
    counted = not many or context.dialect.supports_sane_multi_rowcount
    if write.operation in ("update", "delete") and counted and cursor.rowcount == 0:
        return  # nothing was there to change
    rows: Sequence[rules.Row] | None = write.rows
    if write.looked_up >= 0 and not (counted and cursor.rowcount == write.looked_up):
        rows = None  # rows of somebody else may have come in between
    tags = rules.tags(write.table, write.operation, write.changed, rows)
    if not tags:
        return
    connection.info.setdefault(_TAGS, set()).update(tags, write.names)
    lateness: _Lateness = connection.info.setdefault(_LATENESS, _Lateness())
    request = current.get()
    if request is not None:
        # What it reads from now on may be taken back with the write, of which no change tells.
        request.view = None
    created = lateness.created | (request.created if request is not None else set())
    active = request.active if request is not None else None
    if not rules.may_wait(write.table, write.operation, write.changed, rows, created, active):
        lateness.allowed = False
    elif (write.table, write.operation) == ("user", "insert") and rows:
        lateness.created.update(row["id"] for row in rows)


def _commit(
    connection: Any, commit: Callable[[Any], None], changes: Changes, dialect: str
) -> None:
    tags: set[str] | None = connection.info.pop(_TAGS, None)
    lateness: _Lateness = connection.info.pop(_LATENESS, None) or _Lateness(allowed=False)
    wrote = connection.info.pop(_WROTE, False)
    request = current.get()
    here = dialect == "sqlite"  # the process itself commits
    if not tags:
        try:
            commit(connection)
        except BaseException as error:
            if request is not None:
                request.unknown_commit |= wrote and not (here or _is_answer(dialect, error))
            raise
        if wrote and request is not None:
            request.committed = True
        return
    session = mark_owners.HERE if here else connection.info.get(_SESSION, mark_owners.UNKNOWN)
    if session == mark_owners.UNKNOWN:
        session = mark_owners.transaction_of(dialect, connection)
    try:
        mark = changes.begin(tags, session, late=lateness.allowed)
    except CoordinatorError as error:
        LOG.error("a change was refused: %s", error)
        if request is not None:
            request.refused = "the other workers could not be told of it"
        raise
    try:
        commit(connection)
    except BaseException as error:
        answered = here or _is_answer(dialect, error)
        if request is not None:
            request.unknown_commit |= not answered
        if answered:
            _end(changes, mark, tags)
        elif mark is not None:
            # The server may still be about to commit. Nothing more may come in this session, so
            # that its end is the end of it.
            with suppress(Exception):
                connection.dbapi_connection.close()
            changes.leave(mark, session)
        raise
    _end(changes, mark, tags)
    if request is not None:
        request.committed = True
        request.end_sharing()
        request.created |= lateness.created


# Errors by which a server says that it has not carried out a COMMIT: MariaDB's and MySQL's numbers
# of a deadlock, a lock that was not to be had, a refused certification, a node of Galera that takes
# no statement and a server that takes no changes; PostgreSQL's classes of rollbacks (but for one
# whose outcome is not known) and of constraints that are checked at the end.
_MYSQL_ANSWERS = frozenset({1047, 1205, 1213, 1290, 1836, 3101})
_POSTGRESQL_ANSWERS = ("40", "23")
_POSTGRESQL_UNKNOWN = "40003"


def _is_answer(dialect: str, error: BaseException) -> bool:
    """Return whether an error of a commit is the server's answer that nothing was committed."""
    if dialect in ("mysql", "mariadb"):
        return bool(error.args) and error.args[0] in _MYSQL_ANSWERS
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
    return state.startswith(_POSTGRESQL_ANSWERS) and state != _POSTGRESQL_UNKNOWN


def _end(changes: Changes, mark: Any, tags: set[str]) -> None:
    try:
        changes.end(mark, tags)
    except CoordinatorError as error:
        # Committed it is, and nobody is told anything stale: until somebody completes the mark,
        # what it covers is asked of Keystone.
        LOG.error("a change could not be completed: %s", error)
        if mark is None:
            raise


def _forget(connection: Connection) -> None:
    # The info of an invalidated connection is gone, and asking for it would connect anew.
    if not connection.invalidated:
        _forget_info(connection.info)


def _forget_record(dbapi_connection: Any, record: Any) -> None:
    _forget_info(record.info)


def _forget_info(info: dict[Any, Any]) -> None:
    info.pop(_TAGS, None)
    info.pop(_LATENESS, None)
    info.pop(_WROTE, None)


# Statements of Keystone, its libraries and drivers that change no rows, as their first word.
_HARMLESS_TEXT = re.compile(
    r"\s*(SELECT|SHOW|PRAGMA|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET|EXPLAIN|START)\b", re.I
)


class Write(NamedTuple):
    """A statement that writes."""

    table: str
    #: insert, update or delete
    operation: str
    #: Columns that an update assigns.
    changed: frozenset[str]
    #: The rows with their key columns, as ``rules.tags`` takes them; ``None`` if not known yet.
    rows: Sequence[rules.Row] | None
    #: The tags of the names that it gives to rows.
    names: frozenset[str] = frozenset()
    #: Number of rows that :func:`look_up` found; -1 if it was not needed.
    looked_up: int = -1


#: A write of which nothing is known.
UNKNOWN = Write("", "", frozenset(), None)


def describe(context: Any, statement: str) -> Write | None:
    """Return the write that a statement's execution makes, or ``None`` if it writes nothing.

    :param context: SQLAlchemy's execution context
    :param statement: the statement's text, for statements that are only text
    :returns: the write; :data:`UNKNOWN` if the statement is not understood
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
    keys = rules.needed(table.name, operation, changed)
    rows: Sequence[rules.Row] | None = None
    if keys and operation == "insert":
        rows = _inserted(compiled.statement, keys, parameters)
        if rows is None:
            return UNKNOWN
    elif keys and changed.isdisjoint(keys):
        rows = _pinned(compiled, table, keys, parameters)
    elif keys:
        return UNKNOWN  # Keystone never moves a row to another owner
    names = rules.names(
        table.name, operation, changed, _names(compiled.statement, table.name, parameters)
    )
    return Write(table.name, operation, changed, rows, names)


def look_up(connection: Connection, write: Write, context: Any) -> Write:
    """Return ``write`` with its rows, looked up in the database if they are not known.

    It is called before the write, in its transaction. Rows that cannot be found out stay ``None``.

    :param connection: the connection of the write
    :param write: the result of :func:`describe`
    :param context: SQLAlchemy's execution context
    """
    keys = rules.needed(write.table, write.operation, write.changed)
    if not keys:
        return write
    if write.rows is None:
        table = context.compiled.statement.table
        criteria = getattr(context.invoked_statement, "_where_criteria", None)
        if not criteria:  # all rows of the table, or a statement of an unknown shape
            return write
        query = select(*(table.c[key] for key in keys)).where(*criteria)
        query = query.limit(rules.LIMIT + 1)
        if connection.dialect.name != "sqlite":
            # What the write will see: the present rows, not those of an older snapshot.
            query = query.with_for_update()
        found: list[rules.Row] = []
        for parameters in context.compiled_parameters:
            found += [dict(row) for row in connection.execute(query, parameters).mappings()]
            if len(found) > rules.LIMIT:
                return write
        write = write._replace(rows=found, looked_up=len(found))
        if _pinned(context.compiled, table, table.primary_key.columns.keys(), ()) is not None:
            # By primary key there is no row but these, however they are counted.
            write = write._replace(looked_up=-1)
    if write.table in rules.RESOLVE:
        write = write._replace(rows=_resolve(connection, write, context))
    return write


def _resolve(connection: Connection, write: Write, context: Any) -> Sequence[rules.Row] | None:
    """Add to each row the owner that it names by another table's number."""
    own, other, number, wanted = rules.RESOLVE[write.table]
    table = context.compiled.statement.table.metadata.tables.get(other)
    rows = write.rows or ()
    numbers = {row[own] for row in rows if isinstance(row.get(own), int)}
    if table is None or not numbers or len(numbers) > rules.LIMIT:
        return rows
    query = select(table.c[number], table.c[wanted]).where(table.c[number].in_(numbers))
    owners = {row[0]: row[1] for row in connection.execute(query)}
    return [
        {**row, wanted: owners[row[own]]} if row.get(own) in owners else row for row in rows
    ]


def _assigned(compiled: Any, table: Any) -> frozenset[str]:
    """Return the columns that an update assigns, or may assign where that is not sure."""
    # From the parameters of the execution, and from values in the statement itself, which
    # SQLAlchemy 2.0 keeps in two places.
    statement = compiled.statement
    ordered = dict(getattr(statement, "_ordered_values", None) or ())
    assigned = [*(compiled.column_keys or ()), *(statement._values or ()), *ordered]
    names = {str(getattr(key, "key", key)) for key in assigned}
    return frozenset(names.intersection(table.c.keys()))


def _names(
    statement: Any, table: str, parameters: Sequence[Mapping[str, Any]]
) -> Sequence[object]:
    """Return the values that a write assigns to the column of the name; ``None`` for computed ones.
    """
    search = rules.NAMED.get(table)
    if search is None:
        return ()
    return [row.get(search.name) for row in parameters]


def _inserted(
    statement: Any, keys: Sequence[str], parameters: Sequence[Mapping[str, Any]]
) -> Sequence[rules.Row] | None:
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
) -> Sequence[rules.Row] | None:
    """Return the rows' keys if WHERE names them; ``None`` if they have to be looked up."""
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

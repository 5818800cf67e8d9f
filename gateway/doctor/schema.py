"""Looks into the database: the indexes that Keystone's models have, and whether it is a replica."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .found import Found
from .readers.files import Unread


@dataclass
class Schema:
    """What the database says of itself.

    :param missing_indexes: tables with the columns that have no index
    :param replica: a sentence if it is a replica; else empty
    """

    missing_indexes: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    replica: str = ""


def look(found: Found) -> Schema | None:
    """Ask the database; ``None`` if it cannot be asked, which is noted without its URL."""
    conf = found.keystone
    url = conf.text("database", "connection") if conf else ""
    if not url:
        return None
    try:
        import sqlalchemy
    except ImportError:
        found.unread.append(Unread("the database", "SQLAlchemy is not installed here"))
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            plain = sqlalchemy.engine.make_url(url).difference_update_query(["plugin"])
            engine = sqlalchemy.create_engine(plain, poolclass=sqlalchemy.pool.NullPool)
            schema = Schema()
            with engine.connect() as connection:
                schema.replica = _replica(connection, engine.dialect.name)
                schema.missing_indexes = _missing(sqlalchemy.inspect(connection), found)
            return schema
    # What a driver raises is its own, and may name the password.
    except Exception as error:
        found.unread.append(
            Unread(
                "the database",
                f"it cannot be asked ({type(error).__name__}): is it up, and may "
                "this user connect?",
            )
        )
        return None


def _replica(connection: Any, dialect: str) -> str:
    import sqlalchemy

    if dialect == "postgresql":
        recovering = connection.execute(sqlalchemy.text("SELECT pg_is_in_recovery()")).scalar()
        return "the database is a standby (pg_is_in_recovery)" if recovering else ""
    if dialect == "mysql":
        read_only = connection.execute(sqlalchemy.text("SELECT @@global.read_only")).scalar()
        return "the database is read-only, as replicas are" if read_only in (1, "1", "ON") else ""
    return ""


def _missing(inspector: Any, found: Found) -> list[tuple[str, tuple[str, ...]]]:
    """Return the columns of Keystone's models that lead no index in the database."""
    try:
        import keystone
        from keystone.common import sql

        for path in sorted(Path(keystone.__file__).parent.glob("*/*backends/sql*.py")):
            names = path.relative_to(Path(keystone.__file__).parents[1]).with_suffix("").parts
            importlib.import_module(".".join(names))
        metadata = sql.ModelBase.metadata
    # Whatever keeps Keystone's models from loading: the schema is not to blame.
    except Exception as error:
        found.unread.append(
            Unread(
                "indexes of the database", f"Keystone's models do not load ({type(error).__name__})"
            )
        )
        return []
    missing = []
    there = set(inspector.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in there:
            continue
        known = [tuple(x["column_names"]) for x in inspector.get_indexes(table.name)]
        known += [tuple(x["column_names"]) for x in inspector.get_unique_constraints(table.name)]
        known.append(tuple(inspector.get_pk_constraint(table.name)["constrained_columns"]))
        for index in sorted(table.indexes, key=lambda x: str(x.name)):
            columns = tuple(column.name for column in index.columns)
            if not any(x[: len(columns)] == columns for x in known):
                missing.append((table.name, columns))
    return missing

"""Which rows the statements depend on that Keystone's own models execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("keystone")

import sqlalchemy as sa
from sqlalchemy.orm import Session

from keyfront.middleware.tokens.invalidation.reads import reads


@pytest.fixture
def session() -> Iterator[Session]:
    from keystone.assignment.backends import sql as assignment  # noqa: F401
    from keystone.common import sql
    from keystone.federation.backends import sql as federation  # noqa: F401
    from keystone.identity.backends import sql as identity  # noqa: F401
    from keystone.resource.backends import sql as resource  # noqa: F401

    engine = sa.create_engine("sqlite://")
    sql.ModelBase.metadata.create_all(engine)
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def noted(session: Session) -> Iterator[set[str]]:
    tags: set[str] = set()

    def note(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        tags.update(reads(statement, parameters).tags)

    engine = session.get_bind()
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield tags
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def test_a_user_and_a_project_are_rows_of_their_own(session: Session) -> None:
    """Else each change of another one would end what is kept of these."""
    from keystone.identity.backends.sql_model import LocalUser, User
    from keystone.resource.backends.sql_model import Project

    session.add(Project(id="p", name="p", domain_id="d", is_domain=False))
    session.add(User(id="u", domain_id="d"))
    session.commit()
    session.add(LocalUser(user_id="u", domain_id="d", name="u"))
    session.commit()
    with noted(session) as tags:
        assert session.get(Project, "p") is not None
    assert tags == {"project:p"}
    with noted(session) as tags:
        found = session.get(User, "u")
        assert found is not None
        assert found.local_user.passwords == []
        assert found.federated_users == []
    assert tags == {"user:u"}
    session.expunge_all()
    with noted(session) as tags:
        assert session.query(User).filter_by(id="u").all()
    assert tags == {"user:u"}
    with noted(session) as tags:
        assert session.query(User).join(User.local_user).filter_by(name="u").all()
    assert "users" in tags


def test_grants_are_of_who_has_them(session: Session) -> None:
    from keystone.assignment.backends.sql import RoleAssignment

    with noted(session) as tags:
        query = session.query(RoleAssignment)
        query.filter(RoleAssignment.actor_id.in_(["u", "g"])).filter_by(target_id="p").all()
    assert tags == {"grants:user:u", "grants:user:g", "grants:group"}

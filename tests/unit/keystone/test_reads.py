"""Which rows the statements depend on that Keystone's own models execute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("keystone")

import sqlalchemy as sa
from sqlalchemy.orm import Session

from keyfront.middleware.tokens.invalidation import sqlalchemy_plugin
from keyfront.middleware.tokens.invalidation.rules import NAMES
from keyfront.middleware.tokens.request import Request, current


@pytest.fixture
def session() -> Iterator[Session]:
    from keystone.assignment.backends import sql as assignment  # noqa: F401
    from keystone.common import sql
    from keystone.federation.backends import sql as federation  # noqa: F401
    from keystone.identity.backends import sql as identity  # noqa: F401
    from keystone.identity.mapping_backends import sql as mapping  # noqa: F401
    from keystone.resource.backends import sql as resource  # noqa: F401

    engine = sa.create_engine("sqlite://")
    sql.ModelBase.metadata.create_all(engine)
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def noted(session: Session) -> Iterator[set[str]]:
    request = Request()
    request.reading = True
    token = current.set(request)
    note = sqlalchemy_plugin._before_execute
    sa.event.listen(session.get_bind(), "before_cursor_execute", note)
    try:
        yield request.reads
    finally:
        sa.event.remove(session.get_bind(), "before_cursor_execute", note)
        current.reset(token)


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
    session.expunge_all()
    with noted(session) as tags:
        query = session.query(User).join(User.local_user)
        (found,) = query.filter_by(name="u", domain_id="d").all()
        assert found.local_user.passwords == found.federated_users == []
    assert tags == {"user:u", "name:u", NAMES}
    with noted(session) as tags:
        query = session.query(User).join(User.nonlocal_user)
        assert not query.filter_by(name="nobody", domain_id="d").all()
    assert tags == {"name:nobodi", NAMES}
    with noted(session) as tags:
        assert session.query(Project).filter_by(name="p", domain_id="d", is_domain=False).all()
    assert tags == {"project:p", "name:p", NAMES}


def test_the_groups_of_a_user_are_rows_of_their_own(session: Session) -> None:
    from keystone.identity.backends.sql_model import Group, UserGroupMembership

    session.add_all([Group(id=group, domain_id="d", name=group) for group in ("g", "h")])
    session.add(UserGroupMembership(user_id="u", group_id="g"))
    session.commit()
    with noted(session) as tags:
        query = session.query(Group).join(UserGroupMembership)
        assert query.filter(UserGroupMembership.user_id == "u").all()
    assert tags == {"members:u", "user:u", "group:g"}


def test_a_mapping_is_found_by_what_the_directory_says(session: Session) -> None:
    from keystone.identity.mapping_backends.sql import IDMapping

    session.add(IDMapping(public_id="f00", domain_id="d", local_id="bob", entity_type="user"))
    session.commit()
    with noted(session) as tags:
        query = session.query(IDMapping.public_id).filter_by(domain_id="d", local_id="bob")
        assert query.filter_by(entity_type="user").one()
    assert tags == {"name:bob", NAMES, "user:f00", "group:f00"}
    session.expunge_all()
    with noted(session) as tags:
        assert session.get(IDMapping, "f00") is not None
    assert tags == {"user:f00", "group:f00"}


def test_grants_are_of_who_has_them(session: Session) -> None:
    from keystone.assignment.backends.sql import RoleAssignment

    with noted(session) as tags:
        query = session.query(RoleAssignment)
        query.filter(RoleAssignment.actor_id.in_(["u", "g"])).filter_by(target_id="p").all()
    assert tags == {"grants:user:u", "grants:user:g", "grants:group"}

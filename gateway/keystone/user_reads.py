"""The user of a login or validation, read by fewer statements.

A user who is looked for by name is read with all that belongs to him by one statement, where
Keystone makes three, and one that asks whose name it is. His password is compared with the row that
was read for that, which Keystone reads again. And if his row was read without federated identities,
or with a password here, neither is looked for again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from keyfront.middleware.tokens.invalidation.rules import NAMES, name_tag, tag
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import UNNOTED, tell_found
from keyfront.middleware.tokens.request import Request, current

# All names that the replaced method uses.
_BY_NAME = frozenset(
    {
        *("sql", "session_for_read", "query", "model", "User", "join", "LocalUser", "filter"),
        *("sqlalchemy", "and_", "name", "domain_id", "one", "NotFound", "exception"),
        *("UserNotFound", "base", "filter_user", "to_dict"),
    }
)
_FEDERATED = frozenset(
    {
        *("sql", "session_for_read", "query", "model", "FederatedUser", "filter", "user_id"),
        *("idp_id", "protocol_id", "unique_id", "append", "to_dict", "base"),
        "federated_objects_to_list",
    }
)


# All names that Keystone's driver uses when it compares a password, and when it reads a user.
_COMPARES = frozenset(
    {
        *("sql", "session_for_read", "_get_user", "base", "filter_user", "to_dict", "exception"),
        *("UserNotFound", "AssertionError", "_", "_is_account_locked", "AccountLocked"),
        *("_check_password", "_record_failed_auth", "enabled", "UserDisabled"),
        *("password_is_expired", "PasswordExpired", "local_user", "failed_auth_count"),
        "_reset_failed_auth",
    }
)


def find_by_name(identity: Any, sql: Any, not_found: type[Exception], model: Any) -> None:
    """Make Keystone read a login's user with all that is his, where it looks for him by name.

    :param identity: the class of Keystone's SQL driver for users; one that uses other names than
        the known ones is left alone
    :param sql: the module ``keystone.common.sql``
    :param not_found: the error that Keystone raises for a user who is not there
    :param model: the module of Keystone's rows of users
    """
    import sqlalchemy

    compute = identity.get_user_by_name
    if hasattr(compute, "keyfront") or not _goes_by(compute, _BY_NAME):
        return
    named, user_of = model.LocalUser, model.User
    # Whose name it is, also where there is no such user.
    query = (
        sqlalchemy.select(named.user_id, user_of)
        .select_from(named)
        .outerjoin(
            user_of,
            sqlalchemy.and_(named.user_id == user_of.id, named.domain_id == user_of.domain_id),
        )
        .where(
            named.name == sqlalchemy.bindparam("wanted_name"),
            named.domain_id == sqlalchemy.bindparam("wanted_domain"),
        )
        .options(*read_at_once_options(user_of))
        .execution_options(**{UNNOTED: True})
    )

    def at_once(self: Any, request: Request, name: str, domain: str) -> Any:
        try:
            tags = {name_tag(name), NAMES}
            with sql.session_for_read() as session:
                wanted = {"wanted_name": name, "wanted_domain": domain}
                rows = session.execute(query, wanted).unique().all()
                # Keystone's own statement would have this asked before it.
                values = {"name": [name], "domain_id": [domain]}
                owners = {owner for owner, _ in rows}
                tell_found(request, "local_user", "user_id", values, list(owners))
                if len(rows) != 1 or rows[0][1] is None:
                    return None
                owner, row = rows[0]
                tags.add(tag("user", owner))
                user = self.get_user(row.id)
            # Only the database knows which names are equal.
            same = name_tag(user["name"]) == name_tag(name)
            if not same or tag("project", user["domain_id"]) != tag("project", domain):
                return None
        except (AttributeError, TypeError, ValueError, not_found):
            return None
        request.note(Reads(frozenset({"users"}), frozenset(tags)))
        request.rows[row.id] = row
        return user

    @functools.wraps(compute)
    def get_user_by_name(self: Any, user_name: str, domain_id: str) -> Any:
        request = current.get()
        if request is not None and request.users is not None:
            user = at_once(self, request, user_name, domain_id)
            if user is not None:
                return user
        return compute(self, user_name, domain_id)

    get_user_by_name.keyfront = True  # type: ignore[attr-defined]
    identity.get_user_by_name = get_user_by_name


def read_at_once_options(model: Any) -> Sequence[Any]:
    """Return options of a query by which all that belongs to a row is read by one statement.

    The options of a user, and those and the tags of a project, are each read by a statement that
    SQLAlchemy makes of the one before, anew each time, which takes as long as all the rest.

    :param model: the class of the rows
    """
    import sqlalchemy.orm

    return [
        sqlalchemy.orm.joinedload(getattr(model, relation.key))
        for relation in sqlalchemy.inspect(model).relationships
        if relation.lazy == "subquery"
    ]


def compare_with_known_row(identity: Any) -> None:
    """Make a login compare its password with the row by which it has found the user's name.

    That row is of the same login, and none is used after a write.

    :param identity: the class of Keystone's SQL driver for users; one that uses other names than
        the known ones is left alone
    """
    import sqlalchemy

    compute, read = identity.authenticate, identity._get_user
    if hasattr(read, "keyfront_rows") or not _goes_by(inspect.unwrap(compute), _COMPARES):
        return

    @functools.wraps(compute)
    def authenticate(self: Any, user_id: str, password: Any) -> Any:
        request = current.get()
        if request is None or request.users is None:
            return compute(self, user_id, password)
        request.row = request.rows.pop(user_id, None)
        try:
            return compute(self, user_id, password)
        finally:
            request.row = None

    @functools.wraps(read)
    def _get_user(self: Any, session: Any, user_id: str) -> Any:
        request = current.get()
        row = None
        if request is not None and request.row is not None:
            row, request.row = request.row, None
            state = sqlalchemy.inspect(row)
            if state.detached and not state.modified:
                # Keystone's own read finds it there.
                session.add(row)
        return read(self, session, user_id)

    _get_user.keyfront_rows = True  # type: ignore[attr-defined]
    identity.authenticate, identity._get_user = authenticate, _get_user


def tell_who_is_of_here(identity: Any, shadow_users: Any) -> None:
    """Make a request not look for federated identities of a user whose row it has read without any,
    nor for the moment since when he is here if he has a password here.

    :param identity: the class of Keystone's SQL driver for users
    :param shadow_users: the class of Keystone's SQL driver for users from elsewhere; one that uses
        other names than the known ones is left alone
    """
    compute = shadow_users.get_federated_objects
    if hasattr(compute, "keyfront") or not _goes_by(compute, _FEDERATED):
        return

    def noting(driver: Any) -> None:
        read = driver._get_user

        @functools.wraps(read)
        def _get_user(self: Any, session: Any, user_id: str) -> Any:
            user_ref = read(self, session, user_id)
            request = current.get()
            if request is not None:
                # As it was read: nothing is loaded for it.
                known = vars(user_ref)
                if known.get("federated_users") == []:
                    request.of_here.add(user_id)
                if known.get("local_user") is not None:
                    request.newcomers[user_id] = False
            return user_ref

        driver._get_user = _get_user

    @functools.wraps(compute)
    def get_federated_objects(self: Any, user_id: str) -> Any:
        request = current.get()
        if request is not None and request.users is not None and user_id in request.of_here:
            try:
                request.note(Reads(frozenset({"users"}), frozenset({tag("user", user_id)})))
            except ValueError:
                return compute(self, user_id)
            return []
        return compute(self, user_id)

    get_federated_objects.keyfront = True  # type: ignore[attr-defined]
    shadow_users.get_federated_objects = get_federated_objects
    for driver in (identity, shadow_users):
        noting(driver)


def _goes_by(compute: Any, names: frozenset[str]) -> bool:
    code = getattr(compute, "__code__", None)
    return code is not None and names.issuperset(code.co_names)

"""The user of a login, read by fewer statements.

A user who is looked for by name is read by his id, which the name's tags need anyhow: by one
statement for all that belongs to him, where Keystone makes three (``read_at_once`` of
``repeated_work.py``). And if his row was read without federated identities, these are not looked
for again.
"""

from __future__ import annotations

import functools
from typing import Any

from keyfront.middleware.tokens.invalidation.reads import Reads
from keyfront.middleware.tokens.invalidation.rules import NAMES, name_tag, tag
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import find
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


def find_by_name(identity: Any, sql: Any, not_found: type[Exception]) -> None:
    """Make Keystone read a login's user by his id, where it looks for him by name.

    :param identity: the class of Keystone's SQL driver for users; one that uses other names than
        the known ones is left alone
    :param sql: the module ``keystone.common.sql``
    :param not_found: the error that Keystone raises for a user who is not there
    """
    compute = identity.get_user_by_name
    if hasattr(compute, "keyfront") or not _goes_by(compute, _BY_NAME):
        return

    def by_id(self: Any, request: Request, name: str, domain: str) -> Any:
        values = {"name": [name], "domain_id": [domain]}
        try:
            tags = {name_tag(name), NAMES}
            with sql.session_for_read() as session:
                connection = session.connection()
                users = find(connection, request, "local_user", "user_id", values)
                if len(users) != 1:
                    return None
                tags.add(tag("user", users[0]))  # type: ignore[arg-type]
                user = self.get_user(users[0])
            # Keystone finds no user by rows that do not belong to one another.
            same = name_tag(user["name"]) == name_tag(name)
            if not same or tag("project", user["domain_id"]) != tag("project", domain):
                return None
        except (AttributeError, TypeError, ValueError, not_found):
            return None  # only the database knows which names are equal
        request.note(Reads(frozenset({"users"}), frozenset(tags)))
        return user

    @functools.wraps(compute)
    def get_user_by_name(self: Any, user_name: str, domain_id: str) -> Any:
        request = current.get()
        if request is not None and request.users is not None:
            user = by_id(self, request, user_name, domain_id)
            if user is not None:
                return user
        return compute(self, user_name, domain_id)

    get_user_by_name.keyfront = True  # type: ignore[attr-defined]
    identity.get_user_by_name = get_user_by_name


def tell_who_is_of_here(identity: Any, shadow_users: Any) -> None:
    """Make a login not look for federated identities of a user whose row it has read without any.

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
            # As it was read: nothing is loaded for it.
            if request is not None and vars(user_ref).get("federated_users") == []:
                request.of_here.add(user_id)
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

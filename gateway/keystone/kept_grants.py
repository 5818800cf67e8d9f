"""The grants and groups of a user, read once for all projects and domains that he logs in to.

For each project, and each domain, Keystone reads the grants of a user there three times, those of
his groups three times, and the groups: a re-scope is that and little else. Here all grants of a
user or of groups are read by one statement and kept in the worker's memory, as values of Keystone's
caches are, and those that Keystone asks for are picked out of them.

Names are not compared as databases do: where two identifiers differ, and a database may take them
for one, Keystone asks its database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Final

from keyfront.middleware.tokens.invalidation import rules
from keyfront.middleware.tokens.invalidation.rules import name_tag, tag
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import UNNOTED
from keyfront.middleware.tokens.request import current

from .needed_interfaces import import_keystone
from .worker_memory import KeystoneMemory, NotKept

#: Grants of one user, or of some groups, that are kept at most; with more Keystone asks each time.
LIMIT: Final = 256

# The beginning of the names of Keystone's functions that read grants only to make a set of them.
_ROLES = "keystone.assignment.core:get_roles_for_"

# All names that Keystone's driver uses when it lists assignments, and when it shows a row.
_LIST_GOES_BY = frozenset(
    {
        *("sql", "session_for_read", "_get_assignment_types", "query", "RoleAssignment"),
        *("filter_by", "filter", "actor_id", "in_", "target_id", "type", "all"),
    }
)
_ROW_GOES_BY = frozenset(
    {
        *("type", "AssignmentType", "USER_PROJECT", "actor_id", "target_id", "USER_DOMAIN"),
        *("GROUP_PROJECT", "GROUP_DOMAIN", "exception", "Error", "_", "role_id", "inherited"),
    }
)

# The beginning of the names of the values of Keystone's function that asks for the ids of groups.
_GROUPS = "keystone.assignment.core:_get_group_ids_for_user_id|"

# All names that Keystone's driver uses when it lists groups, and when it shows one of a directory
# that ends.
_GROUPS_GO_BY = frozenset(
    {
        *("sql", "session_for_read", "get_user", "query", "model", "Group", "join", "filter"),
        *("UserGroupMembership", "user_id", "filter_limit_query", "ExpiringUserGroupMembership"),
        *("all", "_apply_limits_to_list"),
        *("to_dict", "expired"),  # of comprehensions, since Python 3.12
    }
)

# A grant: its type, actor, target and role, and whether projects below inherit it.
_Grant = tuple[str, str, str, str, bool]


class Newcomers:
    """Tells which users are so new to this Keystone that more rows of them may just be written.

    The first login of a federated or directory user commits the user, his groups and his grants one
    after the other, and where Redis is away others are told of it late. So his groups and grants
    are not kept until that is over. A user with a password here was made by an administrator.

    :param sql: the module ``keystone.common.sql``
    :param user: the class of Keystone's rows of users
    :param local_user: the class of its rows of users who have a password here
    :param utcnow: a function that returns the present time by Keystone's clock, UTC without a zone
    """

    #: Longer than any login lasts.
    LATELY: Final = timedelta(minutes=2)

    def __init__(self, sql: Any, user: Any, local_user: Any, utcnow: Callable[[], Any]) -> None:
        import sqlalchemy

        self._sql, self._utcnow = sql, utcnow
        one, other = user.__table__, local_user.__table__
        self._id = one.c.id
        # Nothing that is kept shows what it reads.
        self._query = (
            sqlalchemy.select(one.c.created_at, other.c.user_id)
            .select_from(one.outerjoin(other, other.c.user_id == one.c.id))
            .limit(1)
            .execution_options(**{UNNOTED: True})
        )

    def include(self, user_id: str) -> bool:
        """Return whether a user is new, or that is not known."""
        request = current.get()
        known = None if request is None else request.newcomers.get(user_id)
        if known is None:
            known = self._look(user_id)
            if request is not None:
                request.newcomers[user_id] = known
        return known

    def _look(self, user_id: str) -> bool:
        with self._sql.session_for_read() as session:
            row = session.execute(self._query.where(self._id == user_id)).first()
        if row is None:
            return True
        created, local = row
        # Who came before Keystone noted it has no time; a clock that is ahead is another's.
        long_here = created is None or self._utcnow() - created > self.LATELY
        return local is None and not long_here


def keep_groups(memory: KeystoneMemory, manager: Any, newcomers: Newcomers) -> None:
    """Make Keystone keep the groups of a user.

    :param memory: the worker's memory
    :param manager: the class of Keystone's manager of assignments
    :param newcomers: the users whose groups are not kept
    """
    compute = manager._get_group_ids_for_user_id
    if hasattr(compute, "keyfront"):
        return
    function = f"{compute.__module__}:_get_group_ids_for_user_id"

    @functools.wraps(compute)
    def _get_group_ids_for_user_id(self: Any, user_id: str) -> Any:
        def groups() -> Any:
            found = compute(self, user_id)
            return NotKept(found) if newcomers.include(user_id) else found

        return memory.computed(function, user_id, groups)

    _get_group_ids_for_user_id.keyfront = True  # type: ignore[attr-defined]
    manager._get_group_ids_for_user_id = _get_group_ids_for_user_id


def list_groups_at_once(identity: Any, model: Any, sql: Any) -> None:
    """Make Keystone ask for the ids of a user's groups by one statement, where it makes three.

    :param identity: the class of Keystone's SQL driver for users; one that uses other names than
        the known ones is left alone
    :param model: the module of its rows
    :param sql: the module ``keystone.common.sql``
    """
    import sqlalchemy

    compute = identity.list_groups_for_user
    code = getattr(compute, "__code__", None)
    if hasattr(compute, "keyfront") or code is None or not _GROUPS_GO_BY.issuperset(code.co_names):
        return
    group, member, expiring = (
        one.__table__
        for one in (model.Group, model.UserGroupMembership, model.ExpiringUserGroupMembership)
    )
    whose: Any = sqlalchemy.bindparam("whose")
    which = expiring.c.group_id
    # Of a membership without its group as well: the group may come.
    query = (
        sqlalchemy.select(
            member.c.group_id, group.c.id, group.c.domain_id, sqlalchemy.literal_column("0")
        )
        .select_from(member.outerjoin(group, group.c.id == member.c.group_id))
        .where(member.c.user_id == whose)
        .union_all(
            sqlalchemy.select(which, which, which, sqlalchemy.literal_column("1")).where(
                expiring.c.user_id == whose
            )
        )
        .execution_options(**{UNNOTED: True})
    )

    @functools.wraps(compute)
    def list_groups_for_user(self: Any, user_id: str, hints: Any) -> Any:
        request = current.get()
        if (
            request is None
            or not request.fills
            or not request.fills[-1].key.startswith(_GROUPS)
            or hints.filters
            or hints.limit
        ):
            return compute(self, user_id, hints)
        with sql.session_for_read() as session:
            self.get_user(user_id)
            rows = session.execute(query, {"whose": user_id}).all()
        try:
            if len(rows) > rules.LIMIT or any(expires for *_, expires in rows):
                return compute(self, user_id, hints)  # it knows when they end
            tags = {tag("members", user_id), *(tag("group", row[0]) for row in rows)}
        except ValueError:
            return compute(self, user_id, hints)
        request.note(Reads(frozenset({"groups", "members"}), frozenset(tags)))
        # What else a group has is not asked for.
        return [{"id": one, "domain_id": domain} for _, one, domain, _ in rows if one is not None]

    list_groups_for_user.keyfront = True  # type: ignore[attr-defined]
    identity.list_groups_for_user = list_groups_for_user


def keep_grants(
    memory: KeystoneMemory, driver: Any, assignment: Any, sql: Any, newcomers: Newcomers
) -> None:
    """Make Keystone read the grants of a user, or of his groups, once for the roles on all targets.

    :param memory: the worker's memory
    :param driver: the class of Keystone's SQL driver of assignments; one that uses other names than
        the known ones is left alone
    :param assignment: the class of its rows
    :param sql: the module ``keystone.common.sql``
    :param newcomers: the users whose grants are not kept
    """
    import sqlalchemy

    compute = driver.list_role_assignments
    if hasattr(compute, "keyfront") or not _is_known(compute):
        return
    function = f"{compute.__module__}:list_role_assignments"
    table = assignment.__table__
    query = sqlalchemy.select(
        table.c.type, table.c.actor_id, table.c.target_id, table.c.role_id, table.c.inherited
    ).limit(LIMIT + 1)

    def read(kind: str, actors: Sequence[str]) -> Any:
        if kind == "User" and newcomers.include(actors[0]):
            return NotKept(None)
        kinds = [f"{kind}Project", f"{kind}Domain"]
        with sql.session_for_read() as session:
            rows = session.execute(
                query.where(table.c.actor_id.in_(actors), table.c.type.in_(kinds))
            ).all()
        return None if len(rows) > LIMIT else [tuple(row) for row in rows]

    @functools.wraps(compute)
    def list_role_assignments(
        self: Any,
        role_id: Any = None,
        user_id: Any = None,
        group_ids: Any = None,
        domain_id: Any = None,
        project_ids: Any = None,
        inherited_to_projects: Any = None,
    ) -> Any:
        found = None
        targets = project_ids or (domain_id and [domain_id])
        actors = [user_id] if user_id else group_ids
        # One of both, as Keystone asks.
        if targets and actors and not role_id and not (user_id and group_ids) and _for_roles():
            kind = "User" if user_id else "Group"
            granted: list[_Grant] | None = memory.computed(
                function, (kind, *actors), lambda: read(kind, actors)
            )
            if granted is not None:
                kind += "Project" if project_ids else "Domain"
                found = _granted(granted, kind, targets, inherited_to_projects)
        if found is not None:
            return found
        return compute(
            self, role_id, user_id, group_ids, domain_id, project_ids, inherited_to_projects
        )

    list_role_assignments.keyfront = True  # type: ignore[attr-defined]
    driver.list_role_assignments = list_role_assignments


def _for_roles() -> bool:
    """Return whether roles are being computed, in a request that shares values with others."""
    request = current.get()
    return (
        request is not None
        and request.view is not None
        and any(fill.key.startswith(_ROLES) for fill in request.fills)
    )


def _granted(
    grants: Sequence[_Grant], kind: str, targets: Collection[str], inherited: bool | None
) -> list[dict[str, str]] | None:
    """Return the grants on some targets as the driver does; ``None`` if only it can."""
    who, what = ("user_id" if kind.startswith("User") else "group_id"), "project_id"
    if kind.endswith("Domain"):
        what = "domain_id"
    found = []
    for of_kind, actor, target, role, below in grants:
        if of_kind != kind or (inherited is not None and bool(below) != bool(inherited)):
            continue
        if target not in targets:
            if any(_may_be_one(target, one) for one in targets):
                return None
            continue
        one = {who: actor, what: target, "role_id": role}
        if below:
            one["inherited_to_projects"] = "projects"
        found.append(one)
    return found


def _may_be_one(identity: str, other: str) -> bool:
    """Return whether a database may take two identifiers that differ for one."""
    try:
        return _folded(identity) == _folded(other)
    except (AttributeError, TypeError, ValueError):
        return True


@functools.lru_cache(maxsize=4096)
def _folded(identity: str) -> str:
    return name_tag(identity)


def _is_known(compute: Any) -> bool:
    """Return whether a driver lists assignments in the way that is known here."""
    code = getattr(compute, "__code__", None)
    if code is None:
        return False
    inner = [one for one in code.co_consts if hasattr(one, "co_names")]
    shown = [one for one in inner if one.co_name == "denormalize_role"]
    return (
        _LIST_GOES_BY.issuperset(code.co_names)
        and len(shown) == 1
        and _ROW_GOES_BY.issuperset(shown[0].co_names)
    )


def keep_all(memory: KeystoneMemory) -> None:
    """Make the Keystone that is loaded keep groups and grants.

    :param memory: the worker's memory
    :raises IncompatibleError: a module of Keystone is not where it is expected
    :raises AttributeError: a function or class of Keystone is not where it is expected
    """
    sql = import_keystone("keystone.common.sql")
    users = import_keystone("keystone.identity.backends.sql_model")
    utcnow = import_keystone("oslo_utils.timeutils").utcnow
    newcomers = Newcomers(sql, users.User, users.LocalUser, utcnow)
    identity = import_keystone("keystone.identity.backends.sql").Identity
    list_groups_at_once(identity, users, sql)
    keep_groups(memory, import_keystone("keystone.assignment.core").Manager, newcomers)
    backend = import_keystone("keystone.assignment.backends.sql")
    keep_grants(memory, backend.Assignment, backend.RoleAssignment, sql, newcomers)

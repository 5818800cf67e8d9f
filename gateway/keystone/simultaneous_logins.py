"""First logins of one user at the same time: all of them let in, as each would be alone.

Keystone writes down who comes from a directory or an identity provider at his first login: it
looks for the user, and if he is not there it makes him. Of two logins that both have not found him
the second is answered 409, or 500 where his groups are written. Here it looks again, and goes on
with what the other one has made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .imports import import_keystone, incompatible

# How often a login begins again because others are faster: each time one of them was let in.
_TRIES = 5

# On an error: the user was made by somebody else since the login had looked for him.
_MADE_MEANWHILE = "keyfront_made_meanwhile"


def let_all_in() -> None:
    """Have the Keystone that is loaded let in all who come at once; once only.

    :raises IncompatibleError: a function of Keystone is not where it is expected
    """
    manager = import_keystone("keystone.identity.core").Manager
    users = import_keystone("keystone.identity.shadow_backends.sql").ShadowUsers
    exception = import_keystone("keystone.exception")
    database = import_keystone("oslo_db.exception")
    orm = import_keystone("sqlalchemy.orm.exc")
    try:
        find_who_was_made(users, conflict=exception.Conflict, not_found=exception.UserNotFound)
        begin_again(manager, conflict=exception.Conflict)
        # Transactions that crossed.
        crossed = (database.DBDeadlock, orm.StaleDataError)
        for method in (
            "create_nonlocal_user", "create_federated_user", "update_federated_user_display_name",
        ):  # fmt: skip
            repeat(users, method, errors=crossed)
        # A membership that another login has written.
        written = (*crossed, database.DBDuplicateEntry)
        repeat(users, "add_user_to_group_expires", errors=written)
        if hasattr(users, "cleanup_stale_group_memberships"):  # since 2026.1
            repeat(users, "cleanup_stale_group_memberships", errors=written)
    except AttributeError as error:
        raise incompatible(f"it does not look as expected ({error})") from None


def find_who_was_made(
    users: Any, *, conflict: type[Exception], not_found: type[Exception]
) -> None:
    """Have the driver look for a user whom it cannot make because he is there.

    A user of a directory is given as if he had been found before. The login of an identity
    provider's user begins again (:func:`begin_again`): what it does depends on whether he was
    there.

    :param users: the class of Keystone's driver for users from elsewhere
    :param conflict: what it raises for a row that is there
    :param not_found: what it raises where there is no such user
    """
    make_nonlocal, make_federated = users.create_nonlocal_user, users.create_federated_user
    if _is_done(make_nonlocal):
        return

    def create_nonlocal_user(self: Any, user_dict: Any) -> Any:
        try:
            return make_nonlocal(self, user_dict)
        except conflict as error:
            try:
                return self.get_user(user_dict["id"])
            except not_found:
                # Somebody else has his name: another identity, which is told as Keystone does.
                raise error from None

    def create_federated_user(
        self: Any, domain_id: str, federated_dict: Any, email: str | None = None
    ) -> Any:
        try:
            return make_federated(self, domain_id, federated_dict, email=email)
        except conflict as error:
            names = ("idp_id", "protocol_id", "unique_id")
            try:
                self.get_federated_user(*(federated_dict[name] for name in names))
            except not_found:
                raise error from None
            setattr(error, _MADE_MEANWHILE, True)
            raise

    _put(users, "create_nonlocal_user", create_nonlocal_user)
    _put(users, "create_federated_user", create_federated_user)


def begin_again(manager: Any, *, conflict: type[Exception]) -> None:
    """Have the login of an identity provider's user begin again where he was made meanwhile.

    It has changed nothing by then. And if it took groups from a user whom it holds to be new, it
    would leave him the tokens that he got with them.

    :param manager: the class of Keystone's manager of identities
    :param conflict: what it raises where the user was made
    """
    log_in = manager.shadow_federated_user
    if _is_done(log_in):
        return

    def shadow_federated_user(self: Any, *values: Any, **named: Any) -> Any:
        for _ in range(_TRIES - 1):
            try:
                return log_in(self, *values, **named)
            except conflict as error:
                if not getattr(error, _MADE_MEANWHILE, False):
                    raise
        return log_in(self, *values, **named)

    _put(manager, "shadow_federated_user", shadow_federated_user)


def repeat(owner: Any, method: str, *, errors: tuple[type[Exception], ...]) -> None:
    """Have a transaction repeated that others have crossed.

    :param owner: the class that has the method
    :param method: of one transaction, which an error takes back whole
    :param errors: those that say that it may come out otherwise the next time
    """
    deed: Callable[..., Any] = getattr(owner, method)
    if getattr(deed, "keyfront_repeats", False):
        return

    @functools.wraps(deed)
    def repeated(*values: Any, **named: Any) -> Any:
        for _ in range(_TRIES - 1):
            try:
                return deed(*values, **named)
            except Exception as error:
                if not isinstance(error, errors) and not _has_changed(error):
                    raise
        return deed(*values, **named)

    repeated.keyfront_repeats = True  # type: ignore[attr-defined]
    setattr(owner, method, repeated)


def _has_changed(error: Exception) -> bool:
    """Whether MariaDB refused to write a row that changed since the transaction had read it.

    ER_CHECKREAD, with innodb_snapshot_isolation; oslo.db has no error of its own for it.
    """
    inner = getattr(error, "inner_exception", None)
    cause = getattr(inner, "orig", inner)
    return getattr(cause, "args", ())[:1] == (1020,)


def _is_done(deed: Any) -> bool:
    return getattr(deed, "keyfront_simultaneous", False)


def _put(owner: Any, method: str, function: Any) -> None:
    replaced: Any = functools.wraps(getattr(owner, method))(function)
    replaced.keyfront_simultaneous = True
    setattr(owner, method, replaced)

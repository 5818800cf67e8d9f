"""First logins of one user at the same time, all of which succeed as each would alone.

At the first login of a user of a directory or an identity provider Keystone looks for his row, and
if there is none it makes one. Of two logins that have both found none the second is answered 409,
or 500 where his groups are written. Here it looks again, and goes on with the row that the other
one has made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .needed_interfaces import import_keystone, incompatible

# How often a login begins again because others are faster: each time one of them was let in.
_TRIES = 5

# Name of an error's attribute: the user was made by another login since this one looked for him.
_MADE_MEANWHILE = "keyfront_made_meanwhile"


def let_all_in() -> None:
    """Patch the Keystone that is loaded so that simultaneous first logins succeed; once only.

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
    """Make the driver look again for a user whom it cannot make because his row is there.

    A directory's user is returned as if he had been found before. The login of an identity
    provider's user begins again (:func:`begin_again`), as it does other things for a user who is
    known.

    :param users: the class of Keystone's driver for users from elsewhere
    :param conflict: the error that it raises for a row that is there
    :param not_found: the error that it raises for a user who is not there
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
                # Another identity has his name, which is answered as Keystone does.
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
    """Make the login of an identity provider's user begin again if he was made meanwhile.

    It has changed nothing by then. If it went on as with a new user, it would take groups from him
    without revoking the tokens that he got with them.

    :param manager: the class of Keystone's manager of identities
    :param conflict: the error that it raises if the user was made meanwhile
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
    """Make a method repeat its transaction after errors that others' transactions have caused.

    :param owner: the class that has the method
    :param method: the name of a method with one transaction, which an error rolls back whole
    :param errors: the errors after which the next try may succeed
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
    """Return whether MariaDB refused to write a row that changed since the transaction had read it.

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

"""Logins that cross: which of them look again, and which are refused as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from keyfront.errors import IncompatibleError
from keyfront.gateway.keystone import simultaneous_logins
from keyfront.gateway.keystone.simultaneous_logins import begin_again, find_who_was_made, repeat


class ConflictError(Exception):
    """409."""


class NotFoundError(Exception):
    """404."""


class DeadlockError(Exception):
    """The database took one of two transactions back."""


class Users:
    """Keystone's driver: users by their ids, and who is made by others before he is here."""

    made: dict[str, str]
    others: dict[str, str]

    def create_nonlocal_user(self, user_dict: dict[str, str]) -> dict[str, str]:
        self.made |= self.others
        if user_dict["name"] in self.made.values():
            raise ConflictError
        self.made[user_dict["id"]] = user_dict["name"]
        return user_dict

    def get_user(self, user_id: str) -> dict[str, str]:
        if user_id not in self.made:
            raise NotFoundError
        return {"id": user_id, "name": self.made[user_id]}

    def create_federated_user(
        self, domain_id: str, federated_dict: dict[str, str], email: str | None = None
    ) -> dict[str, str]:
        name = federated_dict["unique_id"]
        return self.create_nonlocal_user({"id": f"{domain_id} {name} {email}", "name": name})

    def get_federated_user(self, idp_id: str, protocol_id: str, unique_id: str) -> str:
        if unique_id not in self.made.values():
            raise NotFoundError
        return unique_id


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Users:
    class Patched(Users):
        create_nonlocal_user = Users.create_nonlocal_user
        create_federated_user = Users.create_federated_user

    for _ in range(2):  # once only
        find_who_was_made(Patched, conflict=ConflictError, not_found=NotFoundError)
    one = Patched()
    one.made, one.others = {}, {}
    return one


ANNA = {"id": "1", "name": "anna"}


def test_a_user_of_a_directory_is_made(users: Users) -> None:
    assert users.create_nonlocal_user(ANNA) == ANNA


def test_a_user_whom_another_login_has_made_is_found(users: Users) -> None:
    users.others = {"1": "anna"}
    assert users.create_nonlocal_user({**ANNA, "password": "secret"}) == ANNA


def test_a_name_that_somebody_else_has_is_refused(users: Users) -> None:
    users.others = {"2": "anna"}
    with pytest.raises(ConflictError):
        users.create_nonlocal_user(ANNA)


class Manager:
    """Keystone's manager: a login finds the user or makes him."""

    def __init__(self, users: Any) -> None:
        self.users = users
        self.begun = 0

    def shadow_federated_user(
        self, idp_id: str, protocol_id: str, user: dict[str, str], group_ids: Any = None
    ) -> str:
        self.begun += 1
        try:
            found: str = self.users.get_federated_user(idp_id, protocol_id, user["id"])
        except NotFoundError:
            named = {"idp_id": idp_id, "protocol_id": protocol_id, "unique_id": user["id"]}
            self.users.create_federated_user("domain", named, email="mail")
            return f"new {user['id']} {group_ids}"
        return f"known {found} {group_ids}"


@pytest.fixture
def manager(users: Users) -> Manager:
    class Patched(Manager):
        shadow_federated_user = Manager.shadow_federated_user

    for _ in range(2):
        begin_again(Patched, conflict=ConflictError)
    return Patched(users)


def test_a_login_by_a_provider_makes_the_user(manager: Manager, users: Users) -> None:
    assert manager.shadow_federated_user("p", "m", {"id": "anna"}, group_ids=[1]) == "new anna [1]"
    assert users.made == {"domain anna mail": "anna"}


def test_it_begins_again_where_he_was_made_meanwhile(manager: Manager, users: Users) -> None:
    users.others = {"x": "anna"}
    assert manager.shadow_federated_user("p", "m", {"id": "anna"}, [2]) == "known anna [2]"
    assert manager.begun == 2


def test_another_conflict_is_one(manager: Manager, users: Users) -> None:
    def refuse(user_dict: Any) -> Any:
        raise ConflictError

    users.create_nonlocal_user = refuse  # type: ignore[method-assign]
    with pytest.raises(ConflictError):
        manager.shadow_federated_user("p", "m", {"id": "anna"})
    assert manager.begun == 1


def test_it_does_not_begin_for_ever(manager: Manager, users: Users) -> None:
    """Made, and gone whenever it looks at the beginning."""

    def get_federated_user(*names: str) -> str:
        get_federated_user.asked += 1  # type: ignore[attr-defined]
        if get_federated_user.asked % 2:  # type: ignore[attr-defined]
            raise NotFoundError
        return "anna"

    get_federated_user.asked = 0  # type: ignore[attr-defined]
    users.others = {"x": "anna"}
    users.get_federated_user = get_federated_user  # type: ignore[method-assign]
    with pytest.raises(ConflictError):
        manager.shadow_federated_user("p", "m", {"id": "anna"})
    assert manager.begun == 5


class SnapshotError(Exception):
    """As oslo.db and SQLAlchemy wrap what MariaDB's driver raises."""

    def __init__(self, number: int) -> None:
        self.inner_exception = Exception()
        self.inner_exception.orig = Exception(number, "...")  # type: ignore[attr-defined]


def _writer(*outcomes: Exception) -> tuple[Any, Callable[[], int]]:
    """A driver with one transaction, which meets these errors; and how often it was begun."""
    left = list(outcomes)

    class Driver:
        begun = 0

        def write(self, value: str) -> str:
            Driver.begun += 1
            if left:
                raise left.pop(0)
            return value

    for _ in range(2):
        repeat(Driver, "write", errors=(DeadlockError,))
    return Driver(), lambda: Driver.begun


@pytest.mark.parametrize("error", [DeadlockError(), SnapshotError(1020)])
def test_a_transaction_that_was_crossed_is_repeated(error: Exception) -> None:
    driver, begun = _writer(error, error)
    assert driver.write("written") == "written"
    assert begun() == 3


@pytest.mark.parametrize("error", [ConflictError(), SnapshotError(1048), ValueError("none")])
def test_another_error_is_told_at_once(error: Exception) -> None:
    driver, begun = _writer(error)
    with pytest.raises(type(error)):
        driver.write("written")
    assert begun() == 1


def test_a_transaction_is_not_repeated_for_ever() -> None:
    driver, begun = _writer(*[DeadlockError()] * 9)
    with pytest.raises(DeadlockError):
        driver.write("written")
    assert begun() == 5


@pytest.mark.parametrize("takes_back", [True, False], ids=["2026.1", "2025.1"])
def test_memberships_need_not_be_taken_back(
    monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    """Keystone takes back those that a login does not bring any more since 2026.1."""

    class Of2025(Users):
        create_nonlocal_user = Users.create_nonlocal_user
        create_federated_user = Users.create_federated_user

        def update_federated_user_display_name(self) -> None: ...

        def add_user_to_group_expires(self) -> None: ...

    class Of2026(Of2025):
        def cleanup_stale_group_memberships(self) -> None: ...

    class Modules:
        ShadowUsers = Of2026 if takes_back else Of2025
        Conflict = UserNotFound = DBDeadlock = DBDuplicateEntry = StaleDataError = Exception

        class Manager(Manager):
            pass

    monkeypatch.setattr(simultaneous_logins, "import_keystone", lambda name: Modules)
    simultaneous_logins.let_all_in()
    repeated = ["add_user_to_group_expires", "cleanup_stale_group_memberships"]
    for name in repeated[: 1 + takes_back]:
        assert getattr(Modules.ShadowUsers, name).keyfront_repeats


def test_a_keystone_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        Manager = ShadowUsers = object
        Conflict = UserNotFound = DBDeadlock = DBDuplicateEntry = StaleDataError = Exception

    monkeypatch.setattr(simultaneous_logins, "import_keystone", lambda name: Empty)
    with pytest.raises(IncompatibleError, match="does not look as expected"):
        simultaneous_logins.let_all_in()

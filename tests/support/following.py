"""What tests of followers of directories have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Literal

from keyfront.errors import CoordinatorError
from keyfront.middleware.ldap.change_notifications import Change
from support.served import wait_for

#: Arguments of ``directory`` for a slapd that can be followed.
SYNCPROV = {"extra": "moduleload syncprov", "extra_database": "overlay syncprov"}


class Heard:
    """A listener that notes what it is told."""

    user_class, group_class, id_attribute = b"kfUser", b"groupOfNames", "uid"

    def __init__(self) -> None:
        self.told: list[str | None] = []
        self.moment = 0.0
        self.begun = 0
        self.reason = ""
        self.refuses = False
        self.lock = threading.Lock()

    def begins(self, server: str) -> None:
        self._note(None)
        self.begun += 1

    def kind(self, attributes: dict[str, list[bytes]]) -> Literal["user", "group", "other"]:
        classes = attributes.get("objectClass", [])
        if self.user_class in classes:
            return "user"
        return "group" if self.group_class in classes else "other"

    def identity(self, change: Change) -> str:
        return change.attributes[self.id_attribute][0].decode()

    def changed(self, users: Sequence[str]) -> None:
        for user in users:
            self._note(user)

    def everything(self) -> None:
        self._note(None)

    def alive(self, server: str, moment: float) -> None:
        self.moment = moment

    def impossible(self, server: str, reason: str) -> None:
        self.reason = reason

    def _note(self, what: str | None) -> None:
        if self.refuses:
            raise CoordinatorError("nobody can be told")
        with self.lock:
            self.told.append(what)

    def take(self) -> list[str | None]:
        with self.lock:
            told, self.told = self.told, []
        return told

    def settle(self) -> None:
        """Wait until all is told that changed before this call."""
        now = time.monotonic()
        wait_for(lambda: self.moment > now, "the follower is up to date")

    def expect(self, what: str | None) -> None:
        """Wait until it is told, or that anybody may have changed."""

        def is_told() -> bool:
            with self.lock:
                return what in self.told

        wait_for(is_told, f"{what} is told")

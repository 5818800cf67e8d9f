"""Says what of a directory Keystone's driver reads, and which user a changed entry is.

A :class:`..change_notifications.Follower` is told both.

This module imports Keystone and python-ldap, as the driver does.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from keystone import exception
from keystone.identity.backends.ldap import common

from ..change_notifications import METHODS, Change, Method, Subscription
from . import options

# The attributes that a filter asks about (RFC 4515).
_IN_FILTER = re.compile(r"\(\s*([A-Za-z][A-Za-z0-9-]*)[^=()]*=")

KINDS: tuple[Literal["user", "group"], ...] = ("user", "group")


class Reading:
    """The trees and attributes that a driver reads.

    :param driver: ``Identity`` of this package
    """

    def __init__(self, driver: Any) -> None:
        self.pool = driver.pool
        self._user, self._group = driver.user, driver.group
        own = options.ldap(driver.conf)
        follow = own["follow"]
        methods: tuple[Method, ...] = tuple(METHODS) if follow == "auto" else (follow,)
        #: Seconds for which answers are kept at most; ``None``: as all others.
        self.ttl: float | None = own["token_ttl"]
        #: ``None``: it is not to be followed.
        self.subscription = None
        if follow != "never":
            self.subscription = Subscription(self._trees(), self._attributes(), methods)
        self._classes = {
            "user": str(self._user.object_class).lower(),
            "group": str(self._group.object_class).lower(),
        }

    def kind(self, attributes: dict[str, list[bytes]]) -> Literal["user", "group", "other"]:
        """Return the kind of an entry, by its object classes."""
        found = {
            value.decode("utf-8", "replace").lower()
            for name, values in attributes.items()
            if name.lower() == "objectclass"
            for value in values
        }
        for kind in KINDS:
            if self._classes[kind] in found:
                return kind
        return "other"

    def identity(self, change: Change) -> str:
        """Return the id of a user, as the driver has it.

        :raises LookupError: it has none
        """
        try:
            ((dn, attributes),) = common.convert_ldap_result([(change.dn, change.attributes)])
            return str(self._user._ldap_res_to_model((dn, attributes))["id"])
        except (exception.Error, ValueError, TypeError) as error:
            raise LookupError(str(error)) from None

    def _trees(self) -> tuple[str, ...]:
        roots = [self._user.tree_dn, self._group.tree_dn]
        if self._user.enabled_emulation:
            roots.append(self._user.enabled_emulation_dn)
        found: list[str] = []
        for root in sorted(roots, key=len):
            below = root.lower().replace(" ", "")
            if not any(
                below == other or below.endswith(f",{other}")
                for other in (x.lower().replace(" ", "") for x in found)
            ):
                found.append(root)
        return tuple(found)

    def _attributes(self) -> tuple[str, ...]:
        user = self._user
        names = {user.id_attr, *user.attribute_mapping.values(), *user.extra_attr_mapping}
        names.update(_IN_FILTER.findall(user.ldap_filter or ""))
        names.discard("dn")
        # A password is nobody's business here; Keystone does not read it either.
        return tuple(sorted(x for x in names if x and x.lower() != "userpassword"))

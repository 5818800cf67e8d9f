"""Checks of the parts that a Keystone needs for requests that no cache answers.

They take nothing that requests need: the database is asked over a connection of its own, since a
pool with no connection left is a sign of load and not of a lost database.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfront.errors import DirectoryUnavailableError, ServerError

if TYPE_CHECKING:
    from keyfront.middleware.tokens.epochs import Coordinator


def parts() -> dict[str, Callable[[], None]]:
    """Return a check for each part that this process's Keystone has; none without a Keystone.

    :returns: by the name of the part (``database``, ``directory``, ``redis``, ``keys``) a function
        that raises any exception if the part cannot be used
    """
    module: Any = sys.modules.get("keystone.conf")
    if module is None or "database" not in module.CONF:
        return {}
    conf = module.CONF
    found: dict[str, Callable[[], None]] = {"database": _Database()}
    if conf.identity.domain_specific_drivers_enabled or "ldap" in conf.identity.driver:
        found["directory"] = _ask_directories
    if "keyfront_token_cache" in conf and conf.keyfront_token_cache.coordinator:
        found["redis"] = _ask_redis
    if conf.token.provider == "fernet":
        found["keys"] = lambda: _look_for_keys(Path(conf.fernet_tokens.key_repository))
    elif conf.token.provider == "jws":
        found["keys"] = lambda: _look_for_keys(Path(conf.jwt_tokens.jws_public_key_repository))
    return found


class _Database:
    """Asks Keystone's database for a row, over a connection that it opens and closes."""

    def __init__(self) -> None:
        self._engine: Any = None

    def __call__(self) -> None:
        """Ask for the row.

        :raises Exception: the error of the database's driver
        """
        if self._engine is None:
            import sqlalchemy
            from keystone.common.sql import core

            # The URL as oslo.db made it, with the parameters of its options.
            url = core._get_main_context_manager()._factory.get_writer_engine().url
            self._engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool)
        with self._engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")


def _ask_directories() -> None:
    """Check that each LDAP directory that is in use has a server that is up.

    The pools know it from operations, and from their own checks of servers that were down.

    :raises DirectoryUnavailableError: a directory has none
    """
    directory: Any = sys.modules.get("keyfront.middleware.ldap.directory")
    for pool in directory.open_pools() if directory is not None else ():
        states, failures = pool.servers, pool.lookup_failures
        if not states and not failures:
            continue  # they are looked up when they are first needed
        if not any(state.state == "up" for state in states):
            told = [f"{state.url.text}: {state.last_error}" for state in states]
            raise DirectoryUnavailableError("; ".join(told + failures))


def _ask_redis() -> None:
    """Check that the Redis which keeps the epochs answers, if there is one.

    :raises CoordinatorError: it does not answer
    """
    for coordinator in coordinators():
        coordinator.statistics()


def coordinators() -> list[Coordinator]:
    """Return the coordinators of this process by which nodes meet; none without a Keystone."""
    change_log: Any = sys.modules.get("keyfront.middleware.tokens.invalidation.change_log")
    found = change_log.coordinators.all() if change_log is not None else ()
    return [coordinator for coordinator in found if coordinator.may_be_away]


def _look_for_keys(folder: Path) -> None:
    """Check that a folder has a key whose first byte can be read.

    :param folder: the folder of keys
    :raises ServerError: there is none, or none may be read
    """
    reason = "it is empty"
    try:
        for name in sorted(os.listdir(folder)):
            with open(folder / name, "rb") as file:
                if file.read(1):
                    return
    except OSError as error:
        reason = error.strerror or str(error)
    raise ServerError(f"{folder}: no key can be read: {reason}")



"""Connects a Keystone that is being loaded to the token cache.

With the ``token_cache`` filter in front, Keystone must tell what its answers depend on, and what
its transactions change; see :mod:`keyfront.middleware.tokens`. Without the filter this costs next
to nothing, and a Keystone that writes to the same database as one with the filter is heard by it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyfront.common import fork as process
from keyfront.middleware.tokens import counters, entries
from keyfront.middleware.tokens.epochs import Coordinator

from .cache_names import CacheNames
from .imports import import_keystone, incompatible
from .token_models import keep_no_outside_decision, keep_per_request, record_validations


class Database:
    """Keystone's database: what it is asked through, and where its epochs are.

    :param factory: of oslo.db's transaction context
    """

    def __init__(self, factory: Any) -> None:
        self.factory = factory
        self._folder: Path | None = None

    def coordinator(self) -> Coordinator | None:
        """Return the coordinator, if there is an epoch table.

        :raises CoordinatorError: there is one that cannot be used
        """
        from keyfront.middleware.tokens.invalidation.change_log import folder_of, registry

        if self._folder is None:
            self._folder = folder_of(import_keystone("keystone.conf").CONF)
        return registry.get(self._folder)

    def watch(self, engine: Any) -> None:
        """Tell of what ``engine`` commits; called by oslo.db for each engine it makes.

        On SQLite its writers wait for one another, too.
        """
        from sqlalchemy import event

        from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach

        from . import sqlite_writers as sqlite
        from .stale_reads import Connections

        attach(engine)
        sqlite.attach(engine)
        if engine.dialect.name != "sqlite":
            look = Connections(engine.dialect, bounded=_options()["settle"] > 0)
            event.listen(engine, "checkout", look)


def watch_database() -> Database:
    """Have every database engine that Keystone makes from now on tell of its changes.

    :raises IncompatibleError: Keystone does not get its engines as expected
    """
    sql = import_keystone("keystone.common.sql.core")
    from .sqlite_writers import mark_writers

    try:
        context = sql._get_main_context_manager()
        database = Database(context._factory)
        context.append_on_engine_create(database.watch)
        mark_writers(context._factory)
    except AttributeError as error:
        raise incompatible(f"its database engines are not made as expected ({error})") from None
    return database


def connect(database: Database) -> CacheNames:
    """Connect what needs a Keystone that is loaded.

    :returns: what names the values of its caches, to be told of the beginning of each request
    :raises IncompatibleError: this Keystone does not look as needed
    """
    from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import is_attached

    if database.factory._started and not is_attached(database.factory.get_writer_engine()):
        raise incompatible("its database engine was made before it could be watched")
    # Python's own fork hooks do the same, but uWSGI runs them only if its configuration says so.
    process.registry.register("request identifiers", after=entries.begin_request_ids)
    process.registry.register("token counters", after=counters.claim_all)
    keep_per_request(import_keystone("keystone.common.cache._context_cache")._ResponseCacheProxy)
    regions = list(_cache_regions())
    _keep_in_memory(regions)
    names = CacheNames(regions, database.coordinator, _options()["settle"])
    record_validations(_token_manager())
    keep_no_outside_decision(import_keystone("oslo_policy._checks"))
    _load_policies()
    return names


def _keep_in_memory(regions: list[Any]) -> None:
    """Give Keystone's caches the memory of this worker, where they have no backend of their own."""
    from .cache_backend import SHARE, KeystoneMemory, use

    values = _options()
    use(regions, KeystoneMemory(int((values["memory"] << 20) * SHARE), values["ttl"]))


def _options() -> dict[str, Any]:
    from keyfront.middleware.tokens import options

    return options.token_cache(import_keystone("keystone.conf").CONF)


def _cache_regions() -> Iterator[Any]:
    """Yield Keystone's cache regions, but for the one with the names of the others."""
    core = import_keystone("keystone.common.cache.core")
    region = import_keystone("dogpile.cache.region").CacheRegion
    seen = {id(core.CACHE_INVALIDATION_REGION)}
    for name, module in list(sys.modules.items()):
        if not name.startswith("keystone."):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, region) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _token_manager() -> Any:
    providers = import_keystone("keystone.common.provider_api").ProviderAPIs
    manager = getattr(providers, "token_provider_api", None)
    for owner in (manager, getattr(manager, "driver", None)):
        if not callable(getattr(owner, "validate_token", None)):
            raise incompatible("its token provider has no validate_token()")
    return manager


def _load_policies() -> None:
    """Have the policies loaded before the first request.

    Keystone loads them in it, and while one thread does, another finds no rules and is answered
    403, which would be kept for others.

    :raises IncompatibleError: Keystone does not keep them as expected
    """
    policy = import_keystone("keystone.common.rbac_enforcer.policy")
    try:
        policy._ENFORCER._enforcer.load_rules()
    except AttributeError as error:
        raise incompatible(f"its policies are not where expected ({error})") from None

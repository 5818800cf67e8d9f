"""Hooks that connect a Keystone that is being loaded to the token cache.

With the ``token_cache`` filter in front, Keystone must note the dependencies of its answers, and
announce the changes of its transactions; see :mod:`keyfront.middleware.tokens`. Without the filter
this costs next to nothing, and a Keystone that writes to the same database as one with the filter
announces its changes to that one.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfront.common import fork
from keyfront.common.options import unread
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import counters, keys_and_entries
from keyfront.middleware.tokens.epochs import Coordinator
from keyfront.middleware.tokens.first_validations import policies
from keyfront.middleware.tokens.node_cache import NodeCache, nodes
from keyfront.middleware.tokens.request import Request, basis_end, current
from keyfront.middleware.tokens.watched_files import WatchedFiles, of_keystone

from .database_loss import connect_once
from .directory_invalidation import Directories
from .first_request import load_driver
from .needed_interfaces import import_keystone, incompatible

LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .cache_regions import CacheViews
    from .worker_memory import KeystoneMemory


class Database:
    """Keystone's database, with the folder and coordinator of its epochs.

    :param factory: the factory of oslo.db's transaction context, which makes engines and sessions
    """

    def __init__(self, factory: Any) -> None:
        self.factory = factory
        self._folder: Path | None = None

    def coordinator(self) -> Coordinator | None:
        """Return the coordinator; ``None`` without an epoch table.

        :raises CoordinatorError: there is a table that cannot be used
        :raises OptionError: an option has a value out of its range
        """
        from keyfront.middleware.tokens.invalidation.change_log import coordinators

        return coordinators.get(self.folder())

    def has_no_epochs(self) -> bool:
        """Return whether there is no epoch table, as the token cache is not in use."""
        try:
            return self.coordinator() is None
        except CoordinatorError:
            return False

    def folder(self) -> Path:
        """Return the folder of the token cache of this database, whether or not there is one."""
        from keyfront.middleware.tokens.folder import folder_of

        if self._folder is None:
            self._folder = folder_of(import_keystone("keystone.conf").CONF)
        return self._folder

    def node(self) -> NodeCache | None:
        """Return the memory that the workers of this node share; ``None`` without a token cache."""
        return None if self._folder is None else nodes.get(self._folder)

    def watch(self, engine: Any) -> None:
        """Attach the hooks to an engine; called by oslo.db for each engine it makes.

        Its changes are announced, writers wait for one another on SQLite, where a request has one
        connection, and connections to other databases are checked for answers from the past.
        """
        from sqlalchemy import event

        from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import attach

        from . import sqlite
        from .stale_reads import Connections

        attach(engine)
        sqlite.attach(engine)
        if _options()["reuse"]:
            sqlite.keep_for_requests(engine)
        if engine.dialect.name != "sqlite":
            look = Connections(engine.dialect, bounded=_options()["settle"] > 0)
            event.listen(engine, "checkout", look)


def watch_database() -> Database:
    """Make every database engine that Keystone makes from now on announce its changes.

    None of them waits for a database that is away, see :func:`.connect_once`.

    :returns: Keystone's database
    :raises IncompatibleError: Keystone does not get its engines as expected
    """
    sql = import_keystone("keystone.common.sql.core")
    from .sqlite import mark_writers

    try:
        context = sql._get_main_context_manager()
        database = Database(context._factory)
        context.append_on_engine_create(database.watch)
        if not context._factory._started:
            connect_once(context)
        mark_writers(context._factory)
    except AttributeError as error:
        raise incompatible(f"its database engines are not made as expected ({error})") from None
    return database


def connect(database: Database) -> CacheViews:
    """Connect a Keystone that is loaded to the token cache.

    :param database: the result of :func:`watch_database`
    :returns: the views, whose ``begin`` is to be called at the beginning of each request that has
        not passed the filter
    :raises IncompatibleError: this Keystone does not look as needed
    """
    from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import is_attached
    from keyfront.middleware.tokens.options import TOKEN_CACHE, TOKEN_CACHE_GROUP

    from .cache_regions import CacheViews
    from .left_out_writes import leave_out_unheard
    from .repeated_work import leave_out
    from .simultaneous_logins import let_all_in
    from .validation_policy import tell_of_validations

    if database.factory._started and not is_attached(database.factory.get_writer_engine()):
        raise incompatible("its database engine was made before it could be watched")
    # Python's own fork hooks do the same, but uWSGI runs them only if its configuration says so.
    fork.registry.register("request identifiers", after=keys_and_entries.begin_request_ids)
    fork.registry.register("token counters", after=counters.claim_all)
    keep_per_request(import_keystone("keystone.common.cache._context_cache")._ResponseCacheProxy)
    let_all_in()
    regions = list(_cache_regions())
    values = _options()
    if found := unread(import_keystone("keystone.conf").CONF, {TOKEN_CACHE_GROUP: TOKEN_CACHE}):
        LOG.warning("nothing reads %s", "; ".join(found))
    memory = _keep_in_memory(regions, database, values)
    views = CacheViews(regions, database.coordinator, values["settle"])
    if values["reuse"]:
        leave_out(values["ttl"], memory)
    leave_out_unheard()
    directories = Directories(database.coordinator, database.node, database.folder)
    directories.connect()
    manager = _token_manager()
    record_validations(manager, directories.note)
    keep_no_outside_decision(import_keystone("oslo_policy._checks"))
    _load_policies()
    load_driver(import_keystone("keystone.conf").CONF.database.connection)
    if values["reuse"] and values["first_validations"]:
        decide = tell_of_validations(manager, directories.note)
        if decide is not None:
            with suppress(CoordinatorError):  # without a folder there is no token cache
                policies[database.folder()] = decide
    return views


def _keep_in_memory(
    regions: list[Any], database: Database, values: Mapping[str, Any]
) -> KeystoneMemory | None:
    """Give Keystone's caches the memory of this worker, where they have no backend of their own.

    :param regions: Keystone's cache regions
    :param database: Keystone's database
    :param values: the values of the token cache's options, by name
    :returns: the memory; ``None`` if Keystone caches nothing, or elsewhere
    """
    from keyfront.middleware.tokens.options import KEYSTONE_SHARE

    from .worker_memory import KeystoneMemory, use

    if not values["reuse"]:
        use(regions, None, database.has_no_epochs)
        return None
    limit = int((values["memory"] << 20) * KEYSTONE_SHARE)
    memory = KeystoneMemory(limit, values["ttl"], database.node, _form())
    used = use(regions, memory, database.has_no_epochs)
    return memory if used and import_keystone("keystone.conf").CONF.cache.enabled else None


def _form() -> str:
    """Return a text that is equal in workers which may share the values that Keystone computes.

    Workers with other versions or options share nothing anyhow. One that has loaded another catalog
    file, or whose Python pickles otherwise, may run beside this one for a while.
    """
    files = WatchedFiles(of_keystone(import_keystone("keystone.conf").CONF), Path()).look()
    return f"{sys.version} {files.hex()} "


def leaves_out_work() -> bool:
    """Return whether ``reuse`` leaves out what Keystone repeats or does for nothing."""
    return bool(_options()["reuse"])


def _options() -> dict[str, Any]:
    from keyfront.middleware.tokens import options

    return options.token_cache(import_keystone("keystone.conf").CONF)


def _cache_regions() -> Iterator[Any]:
    """Yield Keystone's cache regions, except the one that keeps the names of the others."""
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
    for owner, name in (
        (manager, "validate_token"),
        (manager, "check_revocation"),
        (manager, "_validate_token"),
        (getattr(manager, "driver", None), "validate_token"),
    ):
        if not callable(getattr(owner, name, None)):
            raise incompatible(f"its token provider has no {name}()")
    return manager


def _load_policies() -> None:
    """Make Keystone load its policies before the first request.

    By itself it loads them in that request; meanwhile another thread finds no rules and answers
    403, which would be kept for others.

    :raises IncompatibleError: Keystone does not keep them as expected
    """
    policy = import_keystone("keystone.common.rbac_enforcer.policy")
    try:
        policy._ENFORCER._enforcer.load_rules()
    except AttributeError as error:
        raise incompatible(f"its policies are not where expected ({error})") from None


# The hooks that note which tokens Keystone looked at.
#
# ``egg:keyfront#keystone`` installs these. They take Keystone's objects and import none of it.

def record_validations(
    manager: Any, note: Callable[[Request, Any], None] = lambda request, model: None
) -> None:
    """Patch Keystone so that each request notes the tokens that are validated, and the results.

    :param manager: Keystone's token provider manager; its driver decodes tokens
    :param note: a function called with the request and the model of each token that is accepted
    """
    validate, decode = manager.validate_token, manager.driver.validate_token
    model_of = manager._validate_token

    @functools.wraps(model_of)
    def _validate_token(token_id: str) -> Any:
        model = model_of(token_id)
        if not _has_ended(model):
            return model
        # Out of Keystone's cache, which knows no end of it. Keystone itself finds no such trust
        # then, before it looks at the end of the token.
        model_of.invalidate(manager, token_id)
        return model_of(token_id)

    def validate_token(token_id: str, window_seconds: float = 0, **options: Any) -> Any:
        request = current.get()
        if request is None or not request.recording:
            return validate(token_id, window_seconds=window_seconds, **options)
        reading, request.reading = request.reading, False
        try:
            model = validate(token_id, window_seconds=window_seconds, **options)
        except Exception:
            if token_id not in request.garbage:
                request.unsure.add(token_id)
            raise
        finally:
            request.reading = reading
        request.accepted[token_id] = model
        note(request, model)
        window = request.windows.get(token_id, float(window_seconds))
        request.windows[token_id] = min(window, float(window_seconds))
        return model

    def decode_token(token_id: str) -> Any:
        try:
            return decode(token_id)
        except Exception:
            # No key opens it: only a new key could, and of that the database knows nothing.
            request = current.get()
            if request is not None:
                request.garbage.add(token_id)
            raise

    def check_revocation(token: Any) -> Any:
        request = current.get()
        if request is not None:
            request.checked = token
        return check(token)

    check = manager.check_revocation
    manager._validate_token = _validate_token
    manager.validate_token = validate_token
    manager.check_revocation = check_revocation
    manager.driver.validate_token = decode_token


def _has_ended(model: Any) -> bool:
    """Return whether a token's trust or application credential is over; false if unknown."""
    try:
        return basis_end(model) <= time.time()
    except (ValueError, TypeError, AttributeError):
        return False


def keep_per_request(proxy: Any) -> None:
    """Make Keystone's request-local cache last as long as the request, and no longer.

    Keystone keeps it in the context of oslo.context. The previous request's context is still there
    when the caller's token is validated, and a new one is made after that, so that everything is
    computed twice for one request.

    :param proxy: Keystone's class ``_ResponseCacheProxy``
    """
    original = proxy._get_request_context

    def _get_request_context(self: Any) -> Any:
        request = current.get()
        return original(self) if request is None else request.memory

    proxy._get_request_context = _get_request_context


def keep_no_outside_decision(checks: Any) -> None:
    """Keep no answer to a request for which a policy asks another program, as by ``http:``.

    :param checks: the module ``oslo_policy._checks``, whose extensions are all such rules
    """
    for kind in set(checks.get_extensions().values()):
        decide = kind.__call__
        if hasattr(decide, "keyfront"):
            continue

        @functools.wraps(decide)
        def asks(self: Any, *values: Any, decide: Any = decide, **named: Any) -> Any:
            request = current.get()
            if request is not None:
                request.unvouched = True
            return decide(self, *values, **named)

        asks.keyfront = True  # type: ignore[attr-defined]
        kind.__call__ = asks

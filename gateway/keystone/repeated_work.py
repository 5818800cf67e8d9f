"""Work that Keystone repeats for each login and first validation, and that is left out here.

No answer is another than Keystone's: work is left out only where its outcome is known; where that
is not certain Keystone does it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from keyfront.middleware.tokens.invalidation.rules import ANY, REVOKED, tag
from keyfront.middleware.tokens.invalidation.sql_reads import Reads
from keyfront.middleware.tokens.invalidation.sqlalchemy_plugin import inactivity_counts
from keyfront.middleware.tokens.request import Request, current

from . import kept_grants, user_reads
from .body_schemas import keep_validators
from .cache_regions import name_of
from .fernet_keys import keep_keys
from .needed_interfaces import import_keystone, incompatible
from .worker_memory import KeystoneMemory, NotedAsCheck, NotKept


def leave_out(ttl: float, memory: KeystoneMemory | None) -> None:
    """Patch the Keystone that is loaded so that it leaves out repeated work; once only.

    :param ttl: seconds for which it is believed at most that there are no revocations
    :param memory: the worker's memory, for values that are the same for all users; ``None`` if
        Keystone's caches are not in it
    :raises IncompatibleError: a function of Keystone is not where it is expected
    """
    keep_validators(import_keystone("keystone.common.validation"))
    bind_at_once(importlib.import_module("decorator"))
    yield_to_greenlets_only(importlib.import_module("oslo_db.sqlalchemy.engines"))
    formatters = import_keystone("keystone.token.token_formatters")
    keep_keys(formatters)
    turn_identifiers_once(formatters)
    call_at_once(import_keystone("keystone.common.manager"))
    if memory is not None:
        of_keystone = [one for name, one in sys.modules.items() if name.startswith("keystone.")]
        look_up_expiration_once(of_keystone)
    read_times_once(importlib.import_module("oslo_utils.timeutils"))
    write_times_once(import_keystone("keystone.common.utils"))
    for module in ("oslo_middleware.base", "oslo_policy._checks"):
        look_at_signatures_once(importlib.import_module(module))
    sql = import_keystone("keystone.common.sql")
    try:
        identity = import_keystone("keystone.identity.backends.sql").Identity
        shadow_users = import_keystone("keystone.identity.shadow_backends.sql").ShadowUsers
        users = import_keystone("keystone.identity.backends.sql_model")
        know_who_is_active(identity, shadow_users, sql=sql, user=users.User)
        not_found = import_keystone("keystone.exception").UserNotFound
        user_reads.find_by_name(identity, sql, not_found, users)
        tell_of_users_once(identity, shadow_users)
        user_reads.tell_who_is_of_here(identity, shadow_users)
        for driver in (identity, shadow_users):
            read_at_once(driver, "_get_user", users.User)
        user_reads.compare_with_known_row(identity)
        resource = import_keystone("keystone.resource.backends.sql").Resource
        project = import_keystone("keystone.resource.backends.sql_model").Project
        read_at_once(resource, "_get_project", project)
        if memory is not None:
            role = import_keystone("keystone.assignment.role_backends.sql").Role
            keep(memory, role, "list_implied_roles")
            keep(memory, resource, "list_project_parents")
            catalog = import_keystone("keystone.catalog.backends.sql").Catalog
            keep_catalogs_of_projects(memory, catalog)
            model = import_keystone("keystone.models.token_model").TokenModel
            keep_roles_on_projects(memory, model)
            kept_grants.keep_all(memory)
        revoke = import_keystone("keystone.revoke.backends.sql")
        is_younger = skip_empty_lists(revoke, sql, ttl, memory)
        if memory is not None:
            manager = import_keystone("keystone.token.provider").Manager
            look_for_new_tokens_at_once(manager, is_younger)
    except AttributeError as error:
        raise incompatible(f"it does not look as expected ({error})") from None


# Around each function whose values are cached there is one of the package decorator, which binds
# the arguments to the signature at each call. What was given by position comes out as it went in,
# and what was given by name in its place.

# Signatures that are kept; with one more all are dropped.
_SIGNATURES = 4096


def bind_at_once(decorator: Any) -> None:
    """Make the package decorator take arguments that are given by position as they are.

    :param decorator: the package; releases that bind no arguments are left alone
    """
    fix = getattr(decorator, "fix", None)
    if fix is None or hasattr(fix, "keyfront"):
        return
    kept: dict[int, tuple[inspect.Signature, _Parameters | None]] = {}

    @functools.wraps(fix)
    def fixed(args: tuple[object, ...], kwargs: Any, sig: inspect.Signature) -> Any:
        found = kept.get(id(sig))
        if found is None:
            if len(kept) >= _SIGNATURES:
                kept.clear()
            found = kept[id(sig)] = (sig, _parameters(sig))
        parameters = found[1]
        if parameters is None:
            return fix(args, kwargs, sig)
        defaults = parameters.defaults
        missing = len(defaults) - len(args)
        if kwargs and missing > 0:
            names = parameters.names[-missing:]
            rest = tuple(map(kwargs.get, names, defaults[-missing:]))
            # Each name has to be of one of those, and each of those has to be given or to have one.
            if inspect.Parameter.empty in rest or not kwargs.keys() <= set(names):
                return fix(args, kwargs, sig)
            return args + rest, {}
        if missing == 0 and not kwargs:
            return args, {}
        if kwargs or missing < 0 or inspect.Parameter.empty in defaults[-missing:]:
            return fix(args, kwargs, sig)
        return args + defaults[-missing:], {}

    fixed.keyfront = True  # type: ignore[attr-defined]
    decorator.fix = fixed


class _Parameters(NamedTuple):
    """The parameters of a signature, all of which may be given by position."""

    #: The names; ``None`` for a parameter that cannot be given by name.
    names: tuple[str | None, ...]
    defaults: tuple[object, ...]


def _parameters(sig: inspect.Signature) -> _Parameters | None:
    """Return the parameters of a signature; ``None`` if some are given by name alone."""
    given = sig.parameters.values()
    if any(x.kind not in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in given):
        return None
    names = tuple(None if x.kind is x.POSITIONAL_ONLY else x.name for x in given)
    return _Parameters(names, tuple(x.default for x in given))


# Each public method of Keystone's managers is called by a function that asks the clock, and the
# loggers one after the other, whether it is to be traced.

# All names that this function uses, and those within it.
_TRACES = frozenset(
    {
        *("time", "LOG", "logger", "getEffectiveLevel", "log", "TRACE", "trace", "Exception"),
        *("join", "items", "repr"),
    }
)


def call_at_once(manager: Any) -> None:
    """Make Keystone call the methods of its managers themselves, unless they are traced.

    :param manager: the module ``keystone.common.manager``; one that traces otherwise is left alone
    """
    try:
        traced = manager._TraceMeta.wrapper(lambda self: None, "Manager").__code__
        is_on, level = manager.LOG.logger.isEnabledFor, manager.log.TRACE
        known: Mapping[int, bool] = getattr(manager.LOG.logger, "_cache", {})
    except AttributeError:
        return
    inner = [one for one in traced.co_consts if hasattr(one, "co_names")]
    if not all(_TRACES.issuperset(one.co_names) for one in (traced, *inner)):
        return

    def called(method: Any, wrapped: Any) -> Any:
        @functools.wraps(wrapped)
        def call(*values: Any, **named: Any) -> Any:
            # What the logger itself has kept of its answer, until a level is set anew.
            if known.get(level, True) and is_on(level):
                return wrapped(*values, **named)
            return method(*values, **named)

        return call

    kinds = [manager.Manager]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, value in list(vars(kind).items()):
            if getattr(value, "__code__", None) is traced:
                setattr(kind, name, called(value.__wrapped__, value))


# How long a value of Keystone's caches lasts is looked up in its configuration at each call of a
# function whose values are kept. It is an option that does not change while Keystone runs.

# The cells of the function that looks it up.
_LOOKS_UP = ("expiration_time", "expiration_time_is_callable", "self", "should_cache_fn")


def look_up_expiration_once(modules: Iterable[Any]) -> None:
    """Make the functions whose values Keystone caches know how long these last.

    :param modules: the modules of Keystone, configured, which name the decorators of these
        functions; those that are made otherwise than dogpile.cache's are left alone
    """
    for module in modules:
        for memoize in list(vars(module).values()):
            cells = _cells(memoize)
            ask = cells.get("get_or_create_for_user_func")
            inner = _cells(ask.cell_contents) if ask is not None else {}
            if tuple(sorted(inner)) != _LOOKS_UP:
                continue
            lasts, callable_ = inner["expiration_time"], inner["expiration_time_is_callable"]
            if callable_.cell_contents is True:
                value = lasts.cell_contents()
                callable_.cell_contents = False
                lasts.cell_contents = value


def _cells(function: Any) -> dict[str, Any]:
    """Return the closure of a function by names; empty for what is none."""
    if type(function) is not FunctionType:  # a proxy of flask's has whatever it stands for
        return {}
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


# The same two times of one token are parsed six times, always with the same result.

# Characters of a time at most, and of an identifier; only a client's made-up one is longer.
_LONGEST_TIME = _LONGEST_IDENTIFIER = 64


def read_times_once(timeutils: Any) -> None:
    """Make ``parse_isotime`` keep its last results.

    :param timeutils: the module ``oslo_utils.timeutils``
    """
    read = timeutils.parse_isotime
    if hasattr(read, "keyfront"):
        return
    kept = functools.lru_cache(maxsize=256)(read)

    @functools.wraps(read)
    def parse_isotime(timestr: Any) -> Any:
        short = type(timestr) is str and len(timestr) <= _LONGEST_TIME
        return kept(timestr) if short else read(timestr)

    parse_isotime.keyfront = True  # type: ignore[attr-defined]
    timeutils.parse_isotime = parse_isotime


# All names that Keystone's function uses.
_WRITES_TIMES = frozenset(
    {
        *("timeutils", "utcnow", "replace", "strftime", "_ISO8601_TIME_FORMAT"),
        *("_ISO8601_TIME_FORMAT_SUBSECOND", "tzinfo", "tzname"),
    }
)


def write_times_once(utils: Any) -> None:
    """Make ``isotime`` keep its last results.

    :param utils: the module ``keystone.common.utils``; one that uses other names than the known
        ones is left alone
    """
    write: Any = getattr(utils, "isotime", None)
    code = getattr(write, "__code__", None)
    if code is None or not _WRITES_TIMES.issuperset(code.co_names):
        return
    kept = functools.lru_cache(maxsize=256)(write)

    @functools.wraps(write)
    def isotime(at: Any = None, subsecond: bool = False) -> Any:
        # Equal times of other zones are written otherwise, and no time is the present.
        if type(at) is datetime and (at.tzinfo is None or at.tzinfo is UTC):
            return kept(at, bool(subsecond))
        return write(at, subsecond)

    utils.isotime = isotime


# A token has the identifiers of its user and project as 16 bytes: one login turns them to and fro
# six times.

# By the name of a method, all names that it uses.
_UUIDS: Mapping[str, tuple[type[str | bytes], frozenset[str]]] = {
    "convert_uuid_hex_to_bytes": (str, frozenset({"uuid", "UUID", "bytes"})),
    "convert_uuid_bytes_to_hex": (bytes, frozenset({"uuid", "UUID", "hex"})),
}


def turn_identifiers_once(formatters: Any) -> None:
    """Make Keystone keep the last results of turning identifiers to bytes and back.

    :param formatters: Keystone's module ``keystone.token.token_formatters``; a method that uses
        other names than the known ones is left alone
    """
    payload = formatters.BasePayload
    for method, (kind, names) in _UUIDS.items():
        function: Any = getattr(vars(payload).get(method), "__func__", None)
        code = getattr(function, "__code__", None)
        if code is not None and names.issuperset(code.co_names):
            setattr(payload, method, classmethod(_turned_once(function, kind)))


def _turned_once(turn: Callable[[Any, Any], Any], kind: type[str | bytes]) -> Callable[..., Any]:
    # For any of the classes it is the same.
    kept = functools.lru_cache(maxsize=1024)(functools.partial(turn, None))

    @functools.wraps(turn)
    def turned(cls: Any, value: Any) -> Any:
        short = type(value) is kind and len(value) <= _LONGEST_IDENTIFIER
        return kept(value) if short else turn(cls, value)

    return turned


# For each check of a policy, and twice for each request, the arguments of a method are looked up.

@functools.lru_cache(maxsize=512)
def _arguments(function: Any) -> Any:
    return inspect.getfullargspec(function)


def _getfullargspec(function: Any) -> Any:
    """Return the arguments of a function or method as ``inspect`` does, looked up once."""
    # A bound method is another object each time.
    return _arguments(function.__func__ if isinstance(function, MethodType) else function)


class _Inspect:
    """The module ``inspect``, with our ``getfullargspec``."""

    getfullargspec = staticmethod(_getfullargspec)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def look_at_signatures_once(module: Any) -> None:
    """Make a module look up the arguments of each method once.

    :param module: the module; one that looks none up is left alone
    """
    if getattr(module, "inspect", None) is inspect:
        module.inspect = _Inspect()
    if getattr(module, "getfullargspec", None) is inspect.getfullargspec:
        module.getfullargspec = _getfullargspec


# flask asks eight times in each request whether a function that it is about to call is a coroutine.

def know_what_is_a_coroutine(application: Any) -> None:
    """Make flask find out once of each function whether it is a coroutine.

    :param application: Keystone's flask application; one that decides by more than the function is
        left alone
    """
    ensure: Any = getattr(application, "ensure_sync", None)
    code = getattr(ensure, "__code__", None)
    if code is None or not _ENSURES.issuperset(code.co_names):
        return
    plain: set[FunctionType] = set()

    @functools.wraps(ensure)
    def ensure_sync(function: Any) -> Any:
        if type(function) is FunctionType:
            if function in plain:
                return function
            found = ensure(function)
            if found is function and len(plain) < _FUNCTIONS:
                plain.add(function)
            return found
        return ensure(function)

    application.ensure_sync = ensure_sync


# All names that flask's method uses.
_ENSURES = frozenset({"iscoroutinefunction", "async_to_sync"})
# Functions that are known at most; an application has some hundreds.
_FUNCTIONS = 4096


# When a connection goes back to its pool, oslo.db has the thread give way, so that other greenlets
# have their turn. A thread of the system waits for the machine's other threads then, and the login
# with it.

def yield_to_greenlets_only(engines: Any) -> None:
    """Make oslo.db yield at the end of a session only where threads are greenlets.

    :param engines: the module ``oslo_db.sqlalchemy.engines``, before it has made an engine;
        releases that do not yield are left alone
    """
    give_way = getattr(engines, "_thread_yield", None)
    if give_way is None or hasattr(give_way, "keyfront"):
        return

    @functools.wraps(give_way)
    def _thread_yield(connection: Any, record: Any) -> None:
        # Monkey patching replaces it.
        if not isinstance(time.sleep, BuiltinFunctionType):
            give_way(connection, record)

    _thread_yield.keyfront = True  # type: ignore[attr-defined]
    engines._thread_yield = _thread_yield


# After each login Keystone opens a transaction for writing, on SQLite alone in the database, reads
# the user whom it has just read, and writes today's date if that is not what is there. Where users
# are disabled for inactivity that is a change: others may be told of it late if it enables nobody.

# All names that the replaced method uses.
_WRITES_THE_DAY = frozenset(
    {
        *("sql", "session_for_write", "get", "model", "User", "timeutils", "utcnow", "date"),
        "last_active_at",
    }
)


def know_who_is_active(
    identity: Any, shadow_users: Any, *, sql: Any = None, user: Any = None
) -> None:
    """Make Keystone write the day of a user's last login only if this login has read another day.

    :param identity: the class of Keystone's SQL driver for users
    :param shadow_users: the class of Keystone's SQL driver for users from elsewhere
    :param sql: the module ``keystone.common.sql``, to write the day without reading the user again;
        ``None``: it is written as Keystone does
    :param user: the class of the rows of users, needed with ``sql``
    """
    import sqlalchemy

    check, write = identity._check_password, shadow_users.set_last_active_at
    read = shadow_users._get_user
    if hasattr(write, "keyfront"):
        return

    code = getattr(write, "__code__", None)
    update: Any = None
    if sql is not None and code is not None and _WRITES_THE_DAY.issuperset(code.co_names):
        table = user.__table__
        update = (
            table.update()
            .where(table.c.id == sqlalchemy.bindparam("whose"))
            .values(last_active_at=sqlalchemy.bindparam("day"))
        )

    def note(user_ref: Any) -> None:
        request = current.get()
        if request is not None:
            # As it was read: nothing is loaded for it.
            known = vars(user_ref)
            request.last_active = known.get("id"), known.get("last_active_at")
            if known.get("local_user") is not None:
                request.newcomers[known.get("id")] = False

    @functools.wraps(check)
    def _check_password(self: Any, password: Any, user_ref: Any) -> Any:
        note(user_ref)
        return check(self, password, user_ref)

    # For a directory's user no password is compared here, but his row is read.
    @functools.wraps(read)
    def _get_user(self: Any, session: Any, user_id: str) -> Any:
        user_ref = read(self, session, user_id)
        note(user_ref)
        return user_ref

    @functools.wraps(write)
    def set_last_active_at(self: Any, user_id: str) -> None:
        request = current.get()
        if request is None:
            write(self, user_id)
            return
        known, request.last_active = request.last_active, None
        if known == (user_id, _today()):
            return
        if inactivity_counts():
            with suppress(Exception):  # the write will raise it again
                # For a directory's user this is not known here; the directory decides.
                disabled = self.get_user(user_id)["enabled"] is False
                request.active = None if disabled else user_id
        elif update is not None:
            with sql.session_for_write() as session:
                session.execute(update, {"whose": user_id, "day": _today()})
            return
        try:
            write(self, user_id)
        finally:
            request.active = None

    set_last_active_at.keyfront = True  # type: ignore[attr-defined]
    identity._check_password = _check_password
    shadow_users._get_user = _get_user
    shadow_users.set_last_active_at = set_last_active_at


def _today() -> date:
    return import_keystone("oslo_utils.timeutils").utcnow().date()  # type: ignore[no-any-return]


# In one login or validation Keystone asks several times what there is of a user, and always for the
# same: the answer never has the hash of his password.

def tell_of_users_once(identity: Any, shadow_users: Any) -> None:
    """Make a login or validation read each user once.

    :param identity: the class of Keystone's SQL driver for users
    :param shadow_users: the class of Keystone's SQL driver for users from elsewhere, which reads
        the same rows
    """
    for driver, method in (
        (identity, "authenticate"),
        (identity, "get_user_by_name"),
        (identity, "get_user"),
        (shadow_users, "get_user"),
    ):
        tell = getattr(driver, method)
        if not hasattr(tell, "keyfront"):
            setattr(driver, method, _told_once(tell, by_id=method == "get_user"))


def _told_once(tell: Callable[..., Any], *, by_id: bool) -> Callable[..., Any]:
    @functools.wraps(tell)
    def told(self: Any, *values: Any, **named: Any) -> Any:
        request = current.get()
        if by_id and request is not None and request.users and len(values) == 1:
            found = request.users.get(values[0])
            if found is not None:
                request.note(_of_user(values[0]))
                return pickle.loads(found)
        user = tell(self, *values, **named)
        if request is not None and request.users is not None:
            request.users[user["id"]] = pickle.dumps(user, pickle.HIGHEST_PROTOCOL)
        return user

    told.keyfront = True  # type: ignore[attr-defined]
    return told


def _of_user(user_id: str) -> Reads:
    """Return the reads that the data of a user depend on."""
    try:
        return Reads(frozenset({"users"}), frozenset({tag("user", user_id)}))
    except ValueError:
        return Reads(frozenset({"users"}), frozenset({"users"}))


def read_at_once(driver: Any, method: str, model: Any) -> None:
    """Make a driver read a row and the rows that belong to it by one statement.

    :param driver: a class of Keystone's drivers
    :param method: the name of its method that reads a row, by a session and a primary key
    :param model: the class of the rows
    """
    read = getattr(driver, method)
    if hasattr(read, "keyfront"):
        return
    at_once = user_reads.read_at_once_options(model)

    @functools.wraps(read)
    def read_one(self: Any, session: Any, key: str) -> Any:
        # The session keeps it for Keystone's own read, as long as it is held here.
        held = session.get(model, key, options=at_once)
        try:
            return read(self, session, key)
        finally:
            del held

    read_one.keyfront = True  # type: ignore[attr-defined]
    setattr(driver, method, read_one)


# For a token that is just being issued Keystone checks once whether it is revoked. That is not
# kept, so no key has to be made of all the token's values. Nor is it worth a key where the token is
# younger than all revocations: then the check reads nothing.


def look_for_new_tokens_at_once(
    manager: Any, is_younger: Callable[[Request, Any], bool] = lambda request, issued: False
) -> None:
    """Make Keystone check tokens for revocation without its cache, where that takes less.

    :param manager: the class of Keystone's manager of tokens
    :param is_younger: a function that tells of the moment when a token was issued whether it is
        known to be after all revocations, see :func:`skip_empty_lists`
    """
    check = manager.check_revocation_v3
    compute = getattr(check, "original", None)
    if compute is None or hasattr(check, "keyfront"):
        return

    @functools.wraps(check)
    def check_revocation_v3(self: Any, token_values: Any) -> Any:
        request = current.get()
        if request is None or request.view is None:
            return check(self, token_values)
        if request.accepting:
            return compute(self, token_values)
        try:
            younger = is_younger(request, token_values["issued_at"])
        except (KeyError, TypeError):
            younger = False
        if not younger:
            return check(self, token_values)
        with NotedAsCheck(request):
            return compute(self, token_values)

    check_revocation_v3.keyfront = True  # type: ignore[attr-defined]
    manager.check_revocation_v3 = check_revocation_v3


# The parents of a project, the implied roles and, mostly, the catalog are the same for all users.
# Keystone reads them at the first login of each.

def keep(memory: KeystoneMemory, driver: Any, method: str) -> None:
    """Make a driver keep the results of a method of one argument.

    :param memory: the worker's memory
    :param driver: a class of Keystone's drivers
    :param method: the name of the method
    """
    compute = getattr(driver, method)
    if hasattr(compute, "keyfront"):
        return
    function = f"{compute.__module__}:{method}"

    @functools.wraps(compute)
    def kept(self: Any, argument: str) -> Any:
        return memory.computed(function, argument, lambda: compute(self, argument))

    kept.keyfront = True  # type: ignore[attr-defined]
    setattr(driver, method, kept)


# The roles of a token are looked up each time that they are asked for: six times in a validation.

# All names that the replaced method uses.
_ROLES_GO_BY = frozenset(
    {
        *("PROVIDERS", "assignment_api", "get_roles_for_user_and_project", "role_api", "get_role"),
        *("user_id", "project_id", "append"),
    }
)


def keep_roles_on_projects(memory: KeystoneMemory, model: Any) -> None:
    """Make Keystone keep the roles of a user on a project as tokens show them.

    :param memory: the worker's memory
    :param model: the class of Keystone's tokens; one that uses other names than the known ones is
        left alone
    """
    compute = model._get_project_roles
    if hasattr(compute, "keyfront") or not _ROLES_GO_BY.issuperset(compute.__code__.co_names):
        return
    function = f"{compute.__module__}:_get_project_roles"

    @functools.wraps(compute)
    def _get_project_roles(self: Any) -> Any:
        return memory.computed(function, (self.user_id, self.project_id), lambda: compute(self))

    _get_project_roles.keyfront = True  # type: ignore[attr-defined]
    model._get_project_roles = _get_project_roles


class _NotedUser(str):
    """The id of a user, which notes whether it was put into a text."""

    shown = False

    def __str__(self) -> str:
        self.shown = True
        return str.__str__(self)

    def __repr__(self) -> str:
        self.shown = True
        return str.__repr__(self)

    def __format__(self, form: str) -> str:
        self.shown = True
        return str.__format__(self, form)


def keep_catalogs_of_projects(memory: KeystoneMemory, driver: Any) -> None:
    """Make Keystone keep the catalog of a project for all users, if no URL in it names the user.

    :param memory: the worker's memory
    :param driver: the class of Keystone's SQL driver for catalogs, which uses a user's id for
        nothing but the URLs
    """
    compute = driver.get_v3_catalog
    if hasattr(compute, "keyfront"):
        return
    function = f"{compute.__module__}:get_v3_catalog"

    @functools.wraps(compute)
    def get_v3_catalog(self: Any, user_id: str, project_id: str | None) -> Any:
        def catalog() -> Any:
            noted = _NotedUser(user_id)
            found = compute(self, noted, project_id)
            # %c shows a character without asking for the text.
            return NotKept(found) if noted.shown or len(noted) < 2 else found

        return memory.computed(function, project_id, catalog)

    get_v3_catalog.keyfront = True  # type: ignore[attr-defined]
    driver.get_v3_catalog = get_v3_catalog


# For each token that it validates for the first time, Keystone looks for the revocations that may
# apply to it: those of tokens issued up to a moment that is not before the token's own. Most tokens
# are younger than the newest revocation.

# Databases keep that moment with or without fractions of seconds, rounded or cut off.
_MARGIN = timedelta(seconds=1)


_REVOCATIONS = Reads(frozenset({ANY}), frozenset({ANY}))


# What the workers call it.
_NEWEST = "newest revocation"


class _Newest(NamedTuple):
    """The newest moment up to which tokens may have been revoked, in a state of the database."""

    name: str
    moment: datetime
    deadline: float


def skip_empty_lists(
    backend: Any, sql: Any, ttl: float, memory: KeystoneMemory | None = None
) -> Callable[[Request, datetime], bool]:
    """Make Keystone not look for revocations of a token that is younger than all of them.

    :param backend: the module of Keystone's SQL driver for revocations
    :param sql: the module ``keystone.common.sql``
    :param ttl: seconds for which it is believed at most that there are no newer ones
    :param memory: the memory by which workers tell each other the newest; ``None``: each asks
    :returns: a function that tells whether this process knows already that a token is, from the
        moment when it was issued; it reads nothing
    """
    import sqlalchemy

    driver, event = backend.Revoke, backend.RevocationEvent
    look: Callable[[Any, Any], list[Any]] = driver._list_token_events
    if hasattr(look, "keyfront"):
        known_before: Callable[[Request, datetime], bool] = look.keyfront
        return known_before
    newest_of = sqlalchemy.select(sqlalchemy.func.max(event.__table__.c.issued_before))
    kept = _Newest("", datetime.max, -math.inf)

    def look_again(request: Request, name: str) -> _Newest:
        nonlocal kept
        with sql.session_for_read() as session:
            moment = session.execute(newest_of).scalar()
        deadline = min(time.monotonic() + ttl, request.until)
        found = _Newest(name, datetime.min if moment is None else moment, deadline)
        if not request.unvouched:
            kept = found
            if memory is not None:
                memory.keep_of_state(_NEWEST, name, found[1:])
        return found

    def newest(request: Request | None) -> datetime:
        """Return the newest moment up to which tokens may have been revoked."""
        nonlocal kept
        # A write that revokes nothing does not change it.
        name = name_of(request, REVOKED)
        if request is None or not name:
            return datetime.max  # the age of the kept moment would not be known
        found = kept
        if found.name != name or time.monotonic() > found.deadline:
            told = None if memory is None else memory.of_state(_NEWEST, name)
            if told is not None:
                found = kept = _Newest(name, *told)
            else:
                found = look_again(request, name)
        request.until = min(request.until, found.deadline)
        # Also where no statement is executed for it.
        request.note(_REVOCATIONS)
        return found.moment

    @functools.wraps(look)
    def _list_token_events(self: Any, token: Any) -> list[Any]:
        issued = token["issued_at"] - _MARGIN
        # A token that was not younger in an older state will hardly be younger in this one.
        if (kept.moment < issued or time.monotonic() > kept.deadline) and (
            newest(current.get()) < issued
        ):
            return []
        return look(self, token)

    def is_younger(request: Request, issued: datetime) -> bool:
        found = kept
        return (
            found.moment < issued - _MARGIN
            and time.monotonic() <= found.deadline
            and found.name == name_of(request, REVOKED)
        )

    _list_token_events.keyfront = is_younger  # type: ignore[attr-defined]
    driver._list_token_events = _list_token_events
    return is_younger

"""The Keystone factory: what it refuses, its options, and the request-local token."""

from __future__ import annotations

import importlib.util
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyfront.errors import (
    ImportedTooEarlyError,
    IncompatibleError,
    MissingPartError,
    PasteFileError,
)
from keyfront.gateway.keystone import application as factory
from keyfront.gateway.keystone import needed_interfaces
from keyfront.middleware.tokens.request import ENVIRON_KEY, Request

needs_keystone = pytest.mark.skipif(
    importlib.util.find_spec("keystone") is None, reason="Keystone is not installed"
)


class Protocol:
    """As keystonemiddleware's base: the service's token first, the user's last."""

    def process_request(self, request: Any) -> None:
        if request.service_token:
            self._do_fetch_token(request.service_token)
        if request.user_token:
            self._do_fetch_token(request.user_token)

    def _do_fetch_token(self, token: Any) -> Any:
        return self.fetch_token(token)

    def fetch_token(self, token: Any) -> Any:
        raise NotImplementedError


def make_middleware(**replaced: Any) -> Any:
    """A class shaped as Keystone's, with members replaced (``None`` removes one)."""

    class AuthContextMiddleware(Protocol):
        def __init__(self) -> None:
            self.token = None

        def fetch_token(self, token: Any) -> Any:
            self.token = token
            return {"token": self.token}

        def process_request(self, request: Any) -> None:
            super().process_request(request)
            self.fill_context(request)

        def fill_context(self, request: Any) -> None:
            if not self.token:
                self.token = request.user_token
            request.context = self.token

    for name, member in replaced.items():
        if member is None:
            delattr(AuthContextMiddleware, name)
        else:
            setattr(AuthContextMiddleware, name, member)
    return AuthContextMiddleware


@pytest.fixture(autouse=True)
def no_token() -> Iterator[None]:
    """Leave no token in this thread's context."""
    yield
    factory._caller_token.set(None)


def _init_without_token(self: Any) -> None:
    self.auth = None


def _fetch_returns_only(self: Any, token: Any) -> Any:
    return {"token": self.token}


def _fetch_writes_only(self: Any, token: Any) -> Any:
    self.token = token


def _fetch_elsewhere(self: Any, token: Any) -> Any:
    token.token = token
    return self.token


def _fill_from_request(self: Any, request: Any) -> None:
    request.context = request.token


def _fill_keeps_more(self: Any, request: Any) -> None:
    self.caller = request
    request.context = self.token


def _user_first(self: Any, request: Any) -> None:
    self._do_fetch_token(request.user_token)
    self._do_fetch_token(request.service_token)


@pytest.mark.parametrize(
    ("replaced", "difference"),
    [
        ({"__init__": _init_without_token}, "__init__() does not assign self.token"),
        ({"fetch_token": _fetch_returns_only}, "fetch_token() does not assign self.token"),
        ({"fetch_token": _fetch_writes_only}, "fetch_token() does not read self.token"),
        ({"fetch_token": _fetch_elsewhere}, "fetch_token() does not assign self.token"),
        ({"fetch_token": len}, "fetch_token() does not assign self.token"),
        ({"fill_context": _fill_from_request}, "fill_context() does not read self.token"),
        ({"fill_context": None}, "fill_context() does not read self.token"),
        ({"fill_context": _fill_keeps_more}, "fill_context() assigns self.caller"),
        ({"token": "a class attribute"}, "AuthContextMiddleware.token already exists"),
        ({"token": property(lambda self: 1)}, "AuthContextMiddleware.token already exists"),
    ],
)
def test_a_class_of_another_shape_is_refused(replaced: dict[str, Any], difference: str) -> None:
    middleware = make_middleware(**replaced)
    before = dict(vars(middleware))
    with pytest.raises(IncompatibleError, match=r"^Keystone ") as refused:
        factory.make_token_request_local(middleware)
    assert difference in str(refused.value)
    assert dict(vars(middleware)) == before


@pytest.mark.parametrize("process_request", [_user_first, len])
def test_the_users_token_must_be_fetched_last(
    monkeypatch: pytest.MonkeyPatch, process_request: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Protocol, "process_request", process_request)
    with pytest.raises(IncompatibleError, match="service's token first"):
        factory.make_token_request_local(make_middleware())


def test_twice_is_once() -> None:
    middleware = make_middleware()
    factory.make_token_request_local(middleware)
    first = vars(middleware)["token"]
    factory.make_token_request_local(middleware)
    assert vars(middleware)["token"] is first


def test_token_stays_out_of_the_instance() -> None:
    middleware = make_middleware()
    factory.make_token_request_local(middleware)
    instance = middleware()
    assert instance.token is None
    assert instance.fetch_token("mine") == {"token": "mine"}
    assert "token" not in vars(instance)


def test_threads_do_not_see_each_others_token() -> None:
    middleware = make_middleware()
    factory.make_token_request_local(middleware)
    instance = middleware()
    both = threading.Barrier(2, timeout=30)
    seen: dict[str, Any] = {}

    def request(name: str) -> None:
        instance.token = name
        both.wait()
        seen[name] = instance.token

    threads = [threading.Thread(target=request, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {"a": "a", "b": "b"}
    assert instance.token is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_greenlets_do_not_see_each_others_token() -> None:
    gevent = pytest.importorskip("gevent")
    middleware = make_middleware()
    factory.make_token_request_local(middleware)
    instance = middleware()
    seen: dict[str, Any] = {}

    def request(name: str) -> None:
        instance.token = name
        gevent.sleep(0)  # lets the other run; threads are not patched here
        seen[name] = instance.token

    gevent.joinall([gevent.spawn(request, name) for name in ("a", "b")], timeout=30)
    assert seen == {"a": "a", "b": "b"}
    assert instance.token is None


def test_each_request_starts_without_the_one_before() -> None:
    middleware = make_middleware()
    factory.make_token_request_local(middleware)
    instance = middleware()
    store = threading.local()
    seen: list[Any] = []

    def stock(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.append((getattr(store, "context", None), instance.token))
        store.context, instance.token = environ["n"], environ["n"]
        return [b""]

    application = factory.KeystoneApplication(stock, store)
    for number in (1, 2, 3):
        assert application({"n": number}, lambda *_: None) == [b""]
    assert seen == [(None, None)] * 3
    assert application.application is stock


def test_a_request_that_the_filter_has_begun_is_not_begun_again() -> None:
    """It took the state before it asked, and what was made since would get too new a name."""
    begun: list[Request] = []
    application = factory.KeystoneApplication(
        lambda environ, start_response: [b""], threading.local(), begun.append
    )
    own = Request()
    application({ENVIRON_KEY: own}, lambda *_: None)
    assert not begun
    assert own.recorded
    application({}, lambda *_: None)
    assert len(begun) == 1
    assert begun[0] is not own


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, None),
        (
            {"config_files": "/a.conf;/b.conf"},
            {"OS_KEYSTONE_CONFIG_FILES": "/a.conf;/b.conf", "OS_KEYSTONE_CONFIG_DIR": ""},
        ),
        ({"config_dir": "/k"}, {"OS_KEYSTONE_CONFIG_FILES": "", "OS_KEYSTONE_CONFIG_DIR": "/k"}),
    ],
)
def test_options_say_what_the_environment_would(
    options: dict[str, str], environment: dict[str, str] | None
) -> None:
    assert factory._environment({}, options) == environment


@needs_keystone
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({}, ["/of/the/environment.conf"]),
        ({"config_files": " /a.conf ; /b.conf;"}, ["/a.conf", "/b.conf"]),
        ({"config_dir": "/k"}, ["/k/keystone.conf"]),
        ({"config_dir": "/k", "config_files": "a.conf;b.conf"}, ["/k/a.conf", "/k/b.conf"]),
    ],
)
def test_files_that_keystone_is_given(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], files: list[str]
) -> None:
    from keystone.server.flask import core
    from keystone.server.flask.request_processing.middleware import auth_context

    monkeypatch.setenv("OS_KEYSTONE_CONFIG_FILES", "/of/the/environment.conf")
    monkeypatch.delenv("OS_KEYSTONE_CONFIG_DIR", raising=False)
    given: list[Any] = []
    asked: list[tuple[str, bool]] = []
    store = needed_interfaces.checked_request_store()

    def keystone(environ: Any, start_response: Any) -> list[bytes]:
        asked.append((environ.get("PATH_INFO", ""), hasattr(store, "context")))
        store.context = object()
        start_response("200 OK", [])
        return [b"the application"]

    def initialize_application(name: str, config_files: list[str]) -> Any:
        given.append((name, config_files))
        return keystone

    monkeypatch.setattr(core, "initialize_application", initialize_application)
    # There is no Keystone behind this one to connect to the token cache.
    monkeypatch.setattr(factory.token_cache_hooks, "watch_database", lambda: "database")
    names = types.SimpleNamespace(begin=lambda request: None)
    monkeypatch.setattr(
        factory.token_cache_hooks, "connect", lambda database: given.append(database) or names
    )
    try:
        application = factory.app_factory({"__file__": "x.ini"}, **options)
        assert isinstance(
            vars(auth_context.AuthContextMiddleware)["token"], factory.RequestLocalToken
        )
    finally:
        if "token" in vars(auth_context.AuthContextMiddleware):
            del auth_context.AuthContextMiddleware.token
    assert given == [("public", files), "database"]
    # what the first request would make is made, and nothing of that is left
    assert asked == [("/v3", False)]
    assert not hasattr(store, "context")
    assert list(application({}, lambda *_: None)) == [b"the application"]
    del store.context


def test_an_unknown_option_is_named_without_its_value() -> None:
    with pytest.raises(PasteFileError) as refused:
        factory.app_factory({"__file__": "/etc/k/api-paste.ini"}, admin_token="hush")
    message = str(refused.value)
    assert message.startswith("/etc/k/api-paste.ini: ")
    assert "'admin_token'" in message
    assert "config_dir and config_files" in message
    assert "hush" not in message


@pytest.mark.parametrize("option", ["config_files", "config_dir"])
@pytest.mark.parametrize("value", ["", " ; "])
def test_an_empty_option_is_refused(option: str, value: str) -> None:
    with pytest.raises(PasteFileError, match=f"{option} is empty"):
        factory.app_factory(None, **{option: value})


def test_without_keystone_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(needed_interfaces.importlib, "import_module", nothing)
    with pytest.raises(MissingPartError, match=r"pip install 'keyfront\[keystone\]'"):
        factory.app_factory({})


@pytest.mark.parametrize(
    ("status", "own", "expected"),
    [
        ("503 Service Unavailable", [], ["1"]),
        ("503 Service Unavailable", [("retry-after", "30")], ["30"]),
        ("500 Internal Server Error", [], []),
    ],
)
def test_an_outage_says_when_to_come_back(
    status: str, own: list[tuple[str, str]], expected: list[str]
) -> None:
    def stock(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        start_response(status, [("Content-Type", "application/json"), *own])
        return [b""]

    told: list[tuple[str, str]] = []
    application = factory.KeystoneApplication(stock, threading.local())
    list(application({}, lambda status, headers, *_: told.extend(headers)))
    assert [value for name, value in told if name.lower() == "retry-after"] == expected
    assert told[0] == ("Content-Type", "application/json")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("keystone.server", IncompatibleError), ("sqlalchemy", ModuleNotFoundError)],
)
def test_a_module_missing_below_keystone(
    monkeypatch: pytest.MonkeyPatch, missing: str, expected: type[Exception]
) -> None:
    def partly(name: str) -> Any:
        if name == "keystone":
            return types.ModuleType(name)
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(needed_interfaces.importlib, "import_module", partly)
    with pytest.raises(expected, match=missing):
        factory.app_factory({})


class _Proxy:
    def _get_request_context(self) -> Any:
        return factory.inspect.get_current()  # type: ignore[attr-defined]


class _OtherProxy:
    def _get_request_context(self) -> Any:
        return None


def _modules(
    monkeypatch: pytest.MonkeyPatch, store: Any, get_current: Any, proxy: Any = _Proxy
) -> None:
    """Stand-ins for oslo_context and Keystone's request-local cache."""
    context = types.SimpleNamespace(_request_store=store, get_current=get_current)
    cache = types.SimpleNamespace(_ResponseCacheProxy=proxy)
    modules = {"oslo_context.context": context, "keystone.common.cache._context_cache": cache}
    monkeypatch.setattr(needed_interfaces, "import_keystone", modules.__getitem__)


def test_the_request_store_is_tried_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = threading.local()
    _modules(monkeypatch, store, lambda: getattr(store, "context", None))
    assert needed_interfaces.checked_request_store() is store
    assert not hasattr(store, "context")
    store.context = "mine"
    assert needed_interfaces.checked_request_store() is store
    assert store.context == "mine"


def test_a_request_store_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = threading.local()

    def current() -> Any:
        return getattr(store, "context", None)

    _modules(monkeypatch, types.SimpleNamespace(), current)
    with pytest.raises(IncompatibleError, match="not a threading"):
        needed_interfaces.checked_request_store()
    _modules(monkeypatch, None, current)
    with pytest.raises(IncompatibleError, match="not a threading"):
        needed_interfaces.checked_request_store()
    _modules(monkeypatch, store, lambda: None)
    with pytest.raises(IncompatibleError, match="get_current"):
        needed_interfaces.checked_request_store()
    _modules(monkeypatch, store, current, _OtherProxy)
    with pytest.raises(IncompatibleError, match="_ResponseCacheProxy"):
        needed_interfaces.checked_request_store()


def test_a_native_thread_local_under_patched_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    store = threading.local()
    _modules(monkeypatch, store, lambda: getattr(store, "context", None))
    monkeypatch.setattr(threading, "local", type("local", (), {}))
    with pytest.raises(ImportedTooEarlyError, match="patch first"):
        needed_interfaces.checked_request_store()


def test_the_middleware_must_be_in_use() -> None:
    middleware = make_middleware()
    core = types.SimpleNamespace(
        initialize_application=print, _get_config_files=print, _KEYSTONE_MIDDLEWARE=(middleware,)
    )
    needed_interfaces.check_server_core(core, middleware)
    core._KEYSTONE_MIDDLEWARE = (make_middleware(),)
    with pytest.raises(IncompatibleError, match="_KEYSTONE_MIDDLEWARE"):
        needed_interfaces.check_server_core(core, middleware)
    del core._get_config_files
    with pytest.raises(IncompatibleError, match=r"_get_config_files\(\)"):
        needed_interfaces.check_server_core(core, middleware)


@pytest.mark.parametrize(
    ("method", "path", "once"),
    [
        ("POST", "/v3/auth/tokens", True),
        ("GET", "/v3/auth/tokens", True),
        ("HEAD", "/v3/auth/tokens", True),
        ("DELETE", "/v3/auth/tokens", False),
        ("GET", "/v3/users", False),
    ],
)
def test_a_login_and_a_validation_read_each_user_once(method: str, path: str, once: bool) -> None:
    seen: list[bool] = []

    def keystone(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        request = factory.current.get()
        assert request is not None
        seen.append(request.users is not None)
        start_response("200 OK", [])
        return []

    served = factory.KeystoneApplication(keystone, threading.local())
    served({"REQUEST_METHOD": method, "PATH_INFO": path}, lambda *_: None)
    assert seen == [once]

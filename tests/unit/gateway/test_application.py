"""Loading what ``KEYFRONT_APP`` names, and what stands in for it when that fails."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfront.errors import KeyfrontError, OptionError, PasteFileError, TargetError
from keyfront.gateway import application

SECRET = "s3cr3t"
COUNTED = gc.get_freeze_count

PASTE = """
[app:main]
paste.app_factory = {module}:factory
answer = main

[app:other]
paste.app_factory = {module}:factory
answer = other
"""


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tests have imported is frozen and stays so; to count it takes longer than a load."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes an importable module; returns its name, which no other test uses."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(text: str, name: str = "target_module") -> str:
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("target_"):
            del sys.modules[name]


@pytest.fixture
def paste(tmp_path: Path, module: Callable[..., str]) -> Path:
    name = module("def factory(conf, **local):\n    return lambda e, s: [local['answer']]\n")
    path = tmp_path / "app.ini"
    path.write_text(PASTE.format(module=name), encoding="utf-8")
    return path


def answer(target: str | None = None) -> object:
    return application.load(target)({}, lambda *_: None)


def test_config_with_an_absolute_path(paste: Path) -> None:
    assert answer(f"config:{paste}") == ["main"]


def test_config_with_a_name(paste: Path) -> None:
    assert answer(f"config:{paste}#other") == ["other"]


def test_config_with_a_relative_path(paste: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paste.parent)
    assert answer("config:app.ini#other") == ["other"]


def test_config_in_the_home_folder(paste: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(paste.parent))
    assert answer("config:~/app.ini") == ["main"]


def test_a_path_is_taken_as_it_is(paste: Path) -> None:
    odd = paste.rename(paste.with_name("a\\b c.ini"))
    assert answer(f"config:{odd}#other") == ["other"]


def test_egg(monkeypatch: pytest.MonkeyPatch) -> None:
    from keyfront.gateway.keystone import application as keystone

    built = object()
    monkeypatch.setattr(keystone, "app_factory", lambda conf, **local: built)
    assert application.load("egg:keyfront#keystone") is built


def test_object(module: Callable[..., str]) -> None:
    name = module("def app(environ, start_response):\n    return ['object']\n")
    assert answer(f"{name}:app") == ["object"]


def test_object_in_an_object_in_a_package(module: Callable[..., str]) -> None:
    text = "class Site:\n    @staticmethod\n    def app(e, s):\n        return ['dotted']\n"
    name = module(text, "target_package.inner.api")
    assert answer(f"{name}:Site.app") == ["dotted"]


def test_target_from_the_environment(paste: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYFRONT_APP", f"config:{paste}#other")
    assert answer() == ["other"]


@pytest.mark.parametrize("value", [None, ""])
def test_default_target_is_the_packaged_pipeline(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("KEYFRONT_APP", raising=False)
    else:
        monkeypatch.setenv("KEYFRONT_APP", value)
    asked: list[str] = []
    monkeypatch.setattr(application, "_load_config", asked.append)
    application.load()
    (path,) = asked
    assert path.endswith("deploy/paste/keystone.ini")
    assert Path(path).is_file()
    assert application.default_target() == f"config:{path}"


BAD_TARGETS = [
    ("nothing", "must be config:FILE"),
    ("nothing:", "must be config:FILE"),
    (":app", "must be config:FILE"),
    ("..up:app", "must be config:FILE"),
    ("a/b.py:app", "must be config:FILE"),
    ("http://host/app", "must be config:FILE"),
    ("egg:", "must be config:FILE"),
    ("config:", "must be config:FILE"),
    ("target_absent:app", "there is no module target_absent"),
    ("json.absent:app", "there is no module json.absent"),
    ("json.decoder.absent:app", "there is no module json.decoder.absent"),
    ("egg:no-such-distribution#main", "the distribution no-such-distribution is not installed"),
    ("egg:keyfront#absent", "keyfront has no entry point absent in paste.app_factory"),
    ("egg:keyfront", "keyfront has no entry point main in paste.app_factory"),
    ("egg:#main", "a distribution must be named"),
]


@pytest.mark.parametrize("call", [application.load, application.check])
@pytest.mark.parametrize(("target", "words"), BAD_TARGETS)
def test_bad_target(target: str, words: str, call: Callable[[str], object]) -> None:
    with pytest.raises(TargetError) as caught:
        call(target)
    message = str(caught.value)
    assert message.startswith(f"KEYFRONT_APP = {target}: ")
    assert words in message
    assert "\n" not in message


def test_missing_attribute_and_what_cannot_be_called(module: Callable[..., str]) -> None:
    name = module("number = 1\n")
    with pytest.raises(TargetError, match=rf"module {name} has no app$"):
        application.load(f"{name}:app")
    with pytest.raises(TargetError, match=rf"module {name} has no number\.app$"):
        application.load(f"{name}:number.app")
    with pytest.raises(TargetError, match=r"is not callable$"):
        application.load(f"{name}:number")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("import target_that_is_absent", ModuleNotFoundError, "target_that_is_absent"),
        ("import json.absent", ModuleNotFoundError, "json.absent"),
        ("from json import absent", ImportError, "absent"),
        ("int('x')", ValueError, "invalid literal"),
        ("None.x", AttributeError, "NoneType"),
        ("raise SystemExit(3)", SystemExit, "3"),
    ],
)
def test_error_inside_a_module_passes_unchanged(
    text: str, kind: type[BaseException], words: str, module: Callable[..., str]
) -> None:
    name = module(f"{text}\napp = print\n")
    with pytest.raises(kind, match=words) as caught:
        application.load(f"{name}:app")
    assert not isinstance(caught.value, KeyfrontError)


def test_error_of_a_factory_passes_unchanged(tmp_path: Path, module: Callable[..., str]) -> None:
    name = module("def factory(conf, **local):\n    raise LookupError('its own')\n")
    path = tmp_path / "app.ini"
    path.write_text(PASTE.format(module=name), encoding="utf-8")
    with pytest.raises(LookupError, match="its own"):
        application.load(f"config:{path}")


def test_paste_fault_names_the_line_and_keeps_the_cause(paste: Path) -> None:
    paste.write_text(PASTE.format(module="target_gone"), encoding="utf-8")
    with pytest.raises(PasteFileError, match=r"line 3: .*no module target_gone") as caught:
        application.load(f"config:{paste}")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_check_finds_a_good_target_good_without_importing_it(
    paste: Path, module: Callable[..., str]
) -> None:
    name = module("raise AssertionError('imported')\n")
    application.check(f"{name}:app")
    application.check(f"config:{paste}#other")
    application.check("egg:keyfront#keystone")
    application.check(application.default_target())
    assert name not in sys.modules


def test_check_finds_the_fault_of_a_paste_file(paste: Path) -> None:
    with pytest.raises(PasteFileError, match="has no application absent"):
        application.check(f"config:{paste}#absent")


@pytest.mark.parametrize(
    ("value", "prog", "expected"),
    [
        (None, "uwsgi", ["uwsgi"]),
        (None, None, ["gunicorn"]),
        ("", "uwsgi", ["uwsgi"]),
        ("--config-file '/etc/a b.conf'", "uwsgi", ["uwsgi", "--config-file", "/etc/a b.conf"]),
    ],
)
def test_pin_argv(
    value: str | None, prog: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gunicorn", "--bind", "[::]:5000"])
    monkeypatch.delenv("KEYFRONT_ARGV", raising=False)
    if value is not None:
        monkeypatch.setenv("KEYFRONT_ARGV", value)
    application.pin_argv(prog)
    assert sys.argv == expected


def test_pin_argv_of_an_embedded_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYFRONT_ARGV", raising=False)
    monkeypatch.setattr(sys, "argv", [])
    application.pin_argv()
    assert sys.argv == ["keyfront"]


def test_pin_argv_of_an_open_quotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["uwsgi"])
    monkeypatch.setenv("KEYFRONT_ARGV", "--config-file '/etc/a")
    with pytest.raises(OptionError, match="KEYFRONT_ARGV"):
        application.pin_argv()
    assert sys.argv == ["uwsgi"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mysql://keystone:s3cr3t@db/k", "mysql://keystone:***@db/k"),
        ("redis://:s3cr3t@cache:6379", "redis://:***@cache:6379"),
        ("rabbit://u:s3@cr3t@mq", "rabbit://u:***@mq"),
        ("ldap://u:s3/cr3t@host", "ldap://u:***@host"),
        ("to a://u:s3cr3t@h and b://v:s3cr3t@i", "to a://u:***@h and b://v:***@i"),
        ("http://host:5000/v3", "http://host:5000/v3"),
        ("admin@example.org: x", "admin@example.org: x"),
    ],
)
def test_redact(text: str, expected: str) -> None:
    assert application.redact(text) == expected


def test_describe_follows_what_caused_it() -> None:
    def fail(suppress: bool) -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError(f"mysql://u:{SECRET}@db\nis bad") from error
        except ValueError:
            if suppress:
                raise RuntimeError from None
            raise RuntimeError("last")  # noqa: B904 -- the implicit context is the point

    with pytest.raises(RuntimeError) as whole:
        fail(False)
    assert application.describe(whole.value) == (
        "RuntimeError: last (caused by) ValueError: mysql://u:***@db is bad"
        " (caused by) KeyError: 'first'"
    )
    with pytest.raises(RuntimeError) as alone:
        fail(True)
    assert application.describe(alone.value) == "RuntimeError"


def test_describe_ends_on_a_circle() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert application.describe(first) == "ValueError: a (caused by) ValueError: b"


def test_failed_application(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError(f"cannot reach mysql://keystone:{SECRET}@db\nat all")
    called: list[bool] = []
    failed = application.FailedApplication(error, on_request=lambda: called.append(True))
    started: list[tuple[str, list[tuple[str, str]]]] = []
    for number in (1, 2):
        started.clear()
        body = b"".join(failed({}, lambda *given: started.append(given)))  # type: ignore[arg-type]
        ((status, headers),) = started
        assert status == "503 Service Unavailable"
        names = dict(headers)
        assert names["Retry-After"] == str(application.RETRY_AFTER)
        assert names["Content-Length"] == str(len(body))
        assert names["Content-Type"] == "application/json"
        assert json.loads(body)["error"]["code"] == 503
        assert b"mysql" not in body
        assert len(called) == number
        assert capsys.readouterr().err == (
            "keyfront: 503, the application did not load: "
            "RuntimeError: cannot reach mysql://keystone:***@db at all\n"
        )


def test_load_or_fail_loads(paste: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYFRONT_APP", f"config:{paste}")
    assert application.load_or_fail(raising=True)({}, lambda *_: None) == ["main"]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["SystemExit(2)", f"ValueError('a://u:{SECRET}@h')"])
def test_load_or_fail_stands_in(
    kind: str,
    module: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KEYFRONT_APP", f"{module(f'text = 1; raise {kind}')}:app")
    failed = application.load_or_fail(raising=False)
    assert isinstance(failed, application.FailedApplication)
    assert repr(failed.error) in (kind, kind.replace('"', "'"))
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1
    last = printed.splitlines()[-1]
    assert last.startswith(f"keyfront: the application failed to load: {kind.partition('(')[0]}: ")
    # the source line that the traceback quotes is no message; nothing else holds the secret
    assert SECRET not in last
    assert SECRET not in "\n".join(x for x in printed.splitlines() if not x.startswith("    "))


def test_load_or_fail_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEYFRONT_APP", "nothing")
    with pytest.raises(TargetError):
        application.load_or_fail(raising=True)
    printed = capsys.readouterr().err
    assert printed.startswith("keyfront: the application cannot be loaded: TargetError: ")
    assert printed.count("\n") == 1


def test_load_or_fail_lets_an_interrupt_through(
    module: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYFRONT_APP", f"{module('raise KeyboardInterrupt')}:app")
    with pytest.raises(KeyboardInterrupt):
        application.load_or_fail(raising=False)


WATCHED = "import gc\nwatched = gc.isenabled()\nlist_ = []\nlist_.append(list_)\ndef app(*_): ...\n"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_looked_for_while_it_is_loaded(
    module: Callable[..., str], monkeypatch: pytest.MonkeyPatch, enabled: bool, fails: bool
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", COUNTED)
    name = module(WATCHED + ("raise RuntimeError('not today')\n" if fails else ""))
    before = gc.isenabled()
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="not today"):
                application.load(f"{name}:app")
        else:
            application.load(f"{name}:app")
            assert sys.modules[name].watched is False
            # what was loaded has not to be looked through at the next allocation
            assert any(one is sys.modules[name].list_ for one in gc.get_objects(generation=2))
        assert gc.isenabled() is enabled
    finally:
        gc.freeze()  # as it is for all other tests
        (gc.enable if before else gc.disable)()


# In a cycle, as all that Keystone leaves is.
LEFT = """
import atexit, gc

class Left:
    def __del__(self):
        print("freed")

left = Left()
left.cycle = left
atexit.register(lambda: print("ended, frozen:", gc.get_freeze_count() > 0))
def app(*_): ...
"""


@pytest.mark.parametrize(
    ("options", "variables", "looks"),
    [
        ((), {}, False),
        (("-X", "dev"), {}, True),
        (("-W", "error"), {}, True),
        ((), {"PYTHONWARNINGS": "default"}, True),
    ],
)
def test_what_was_loaded_is_not_taken_apart_at_the_end(
    module: Callable[..., str],
    tmp_path: Path,
    options: tuple[str, ...],
    variables: dict[str, str],
    looks: bool,
) -> None:
    name = module(LEFT)
    load = "from keyfront.gateway.application import load_or_fail; load_or_fail(raising=True)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"KEYFRONT_APP": f"{name}:app", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *options, "-c", load]
    ended = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["ended, frozen: False", *(["freed"] if looks else [])]

"""What is wrong in a paste file, and on which line."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from keyfront.errors import PasteFileError
from keyfront.gateway import application, paste_file

GOOD = """\
[DEFAULT]
name = value

[pipeline:main]
pipeline = quiet keystone

[filter:quiet]
paste.filter_factory = json:loads

[app: keystone]
use = egg:keyfront#keystone

[composite:site]
use = call:json:loads
/v3: keystone
/: main
"""

# The file, the line that is wrong (0: none is named), and the words of the message.
CANNOT_BE_PARSED = [
    ("no section", b"pipeline = keystone\n", 1, "a line before the first [section]"),
    ("a byte order mark", b"\xef\xbb\xbf[app:main]\n", 1, "a line before the first [section]"),
    ("not UTF-8", b"[app:main]\nuse = egg:x\nname = \xff\n", 3, "is not UTF-8 text"),
    ("garbage", b"[app:main]\nuse = egg:x\n\ngarbage\n", 4, "neither a [section] nor a key"),
    ("section twice", b"[app:main]\nuse = egg:x\n[app:main]\n", 3, "a [app:main] already"),
    ("key twice", b"[app:main]\nuse = egg:x\nuse = egg:y\n", 3, "[app:main] has a use already"),
]

# What loads and check() say alike.
NAMES_NOTHING = [
    ("empty", "", 0, "has no application main ([app:main] or [pipeline:main])"),
    ("only a bare name", "[main]\nuse = egg:keyfront#keystone\n", 0, "has no application main"),
    (
        "undefined filter",
        "[pipeline:main]\n# x\npipeline = absent keystone\n"
        "[app:keystone]\nuse = egg:keyfront#keystone\n",
        3,
        "[pipeline:main] pipeline: absent is not defined: there is no [filter:absent]",
    ),
    (
        "undefined application",
        "[pipeline:main]\npipeline = absent\n",
        2,
        "[pipeline:main] pipeline: absent is not defined: there is no [app:absent]",
    ),
    (
        "a filter in the application's place",
        "[pipeline:main]\npipeline = f\n[filter:f]\npaste.filter_factory = json:loads\n",
        2,
        "f is not defined: there is no [app:f]",
    ),
    ("empty pipeline", "[pipeline:main]\npipeline =\n", 2, "pipeline: names no application"),
    ("no pipeline", "\n[pipeline:main]\n", 2, "pipeline: names no application"),
    (
        "setting in a pipeline",
        "[pipeline:main]\npipeline = k\ndebug = 1\n[app:k]\nuse = egg:keyfront#keystone\n",
        3,
        "[pipeline:main] debug: a pipeline has no such setting",
    ),
    (
        "distribution not installed",
        "[app:main]\nuse = egg:no-such-distribution#main\n",
        2,
        "[app:main] use: egg:no-such-distribution#main: "
        "the distribution no-such-distribution is not installed",
    ),
    (
        "colon for delimiter",
        "[app:main]\nname: x\nuse: egg:no-such-distribution\n",
        3,
        "the distribution no-such-distribution is not installed",
    ),
    (
        "entry point missing",
        "[app:main]\nuse = egg:keyfront#absent\n",
        2,
        "[app:main] use: egg:keyfront#absent: keyfront has no entry point absent in "
        "paste.app_factory",
    ),
    (
        "an application where a filter is due",
        "[pipeline:main]\npipeline = k k2\n[filter:k]\nuse = egg:keyfront#keystone\n"
        "[app:k2]\nuse = egg:keyfront#keystone\n",
        4,
        "keyfront has no entry point keystone in paste.filter_factory",
    ),
    (
        "module missing",
        "[app:main]\nname = x\npaste.app_factory = json.absent:factory\n",
        3,
        "[app:main] paste.app_factory: there is no module json.absent",
    ),
    (
        "module of a filter missing, two sections on",
        "[pipeline:main]\npipeline = f k\n[app:k]\nuse = egg:keyfront#keystone\n"
        "[filter:f]\npaste.filter_factory = absent_module:factory\n",
        6,
        "[filter:f] paste.filter_factory: there is no module absent_module",
    ),
    (
        "factory of a bad form",
        "[app:main]\npaste.app_factory = json/loads\n",
        2,
        "json/loads is not of the form MODULE:CALLABLE",
    ),
    ("call: module missing", "[app:main]\nuse = call:absent:f\n", 2, "there is no module absent"),
    ("unknown scheme", "[app:main]\nuse = http://x\n", 2, "must begin with egg:, call: or config:"),
    ("no factory", "\n[app:main]\nname = x\n", 2, "[app:main]: has neither use = ... nor paste"),
    (
        "a filter's factory in an application",
        "[app:main]\npaste.filter_factory = json:loads\n",
        1,
        "has neither use = ... nor paste.app_factory",
    ),
    (
        "use of an undefined section",
        "[app:main]\nuse = absent\n",
        2,
        "[app:main] use: absent is not defined: there is no [app:absent]",
    ),
    (
        "filter-with of nothing",
        "[app:main]\nuse = egg:keyfront#keystone\nfilter-with = absent\n",
        3,
        "[app:main] filter-with: absent is not defined: there is no [filter:absent]",
    ),
    (
        "filter-app without next",
        "[filter-app:main]\npaste.filter_factory = json:loads\n",
        1,
        "[filter-app:main]: has no next = APPLICATION",
    ),
    (
        "path of a composite",
        "[composite:main]\nuse = call:json:loads\n/v3: absent\n",
        3,
        "[composite:main] /v3: absent is not defined",
    ),
    (
        "other file missing",
        "[app:main]\nuse = config:other.ini\n",
        2,
        "other.ini: there is no such paste file",
    ),
    (
        "other file without that application",
        "[app:main]\nuse = config:good.ini#absent\n",
        0,
        "good.ini: has no application absent",
    ),
    (
        "name in a value",
        "[app:main]\nuse = egg:keyfront#keystone\nlog = %(absent)s/log\n",
        3,
        "[app:main] log: %(absent)s is not defined; a plain % is written %%",
    ),
    (
        "percent in a value",
        "[app:main]\nuse = egg:keyfront#keystone\npassword = s3cr3t%x\n",
        3,
        "[app:main] password: a plain % is written %%",
    ),
    (
        "percent in a default",
        "[DEFAULT]\npassword = s3cr3t%x\n[app:main]\nuse = egg:keyfront#keystone\n",
        2,
        "[DEFAULT] password: a plain % is written %%",
    ),
]

# What only an import shows.
NAMES_NO_ATTRIBUTE = [
    (
        "attribute missing",
        "[app:main]\npaste.app_factory = json:absent\n",
        2,
        "[app:main] paste.app_factory: module json has no absent",
    ),
    (
        "attribute of a call: missing",
        "[app:main]\nuse = call:json:JSONDecoder.absent\n",
        2,
        "module json has no JSONDecoder.absent",
    ),
]


def ids(table: list[tuple[str, object, int, str]]) -> list[str]:
    return [row[0] for row in table]


def expect(error: PasteFileError, path: Path, line: int, words: str) -> None:
    message = str(error)
    assert "\n" not in message
    if line:
        assert message.startswith(f"{path}, line {line}: ")
    assert words in message
    assert "s3cr3t" not in message


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tests have imported is frozen and stays so; to count it takes longer than a load."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "good.ini").write_text(GOOD, encoding="utf-8")
    return tmp_path / "paste.ini"


@pytest.mark.parametrize(
    ("_", "content", "line", "words"), CANNOT_BE_PARSED, ids=ids(CANNOT_BE_PARSED)
)
def test_cannot_be_parsed(_: str, content: bytes, line: int, words: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(PasteFileError) as caught:
        paste_file.check(path)
    expect(caught.value, path, line, words)
    with pytest.raises(PasteFileError) as caught:
        application.load(f"config:{path}")
    expect(caught.value, path, line, words)


@pytest.mark.parametrize(("_", "text", "line", "words"), NAMES_NOTHING, ids=ids(NAMES_NOTHING))
def test_names_nothing(_: str, text: str, line: int, words: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
    paste_file.check(path)
    for imports in (True, False):
        found = paste_file.find_fault(path, "main", imports=imports)
        assert found is not None
        expect(found, path, line, words)
    with pytest.raises(PasteFileError) as caught:
        application.load(f"config:{path}")
    expect(caught.value, path, line, words)


@pytest.mark.parametrize(
    ("_", "text", "line", "words"), NAMES_NO_ATTRIBUTE, ids=ids(NAMES_NO_ATTRIBUTE)
)
def test_names_no_attribute(_: str, text: str, line: int, words: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
    assert paste_file.find_fault(path, "main", imports=False) is None
    with pytest.raises(PasteFileError) as caught:
        application.load(f"config:{path}")
    expect(caught.value, path, line, words)


def test_missing_file(path: Path) -> None:
    with pytest.raises(PasteFileError) as caught:
        paste_file.check(path)
    assert str(caught.value) == f"{path}: there is no such paste file"


def test_percent_in_the_path(path: Path) -> None:
    odd = path.with_name("good.ini").rename(path.with_name("a%20b.ini"))
    for call in (paste_file.check, lambda path: application.load(f"config:{path}")):
        with pytest.raises(PasteFileError, match="no path with % in it"):
            call(odd)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(PasteFileError) as caught:
        paste_file.check(tmp_path)
    assert str(caught.value) == f"{tmp_path}: the paste file cannot be read: Is a directory"


def test_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root reads everything; tests/integration/gateway/test_bad_input.py asks a real kernel
    def refuse(self: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PasteFileError) as caught:
        paste_file.check(path)
    assert str(caught.value) == f"{path}: the paste file cannot be read: Permission denied"


@pytest.mark.parametrize("name", ["main", "site", "keystone"])
@pytest.mark.parametrize("imports", [True, False])
def test_good_file(name: str, imports: bool, path: Path) -> None:
    good = path.with_name("good.ini")
    paste_file.check(good)
    assert paste_file.find_fault(good, name, imports=imports) is None


def test_fault_in_a_section_that_is_not_reached(path: Path) -> None:
    path.write_text(GOOD + "[app:broken]\nuse = egg:no-such-distribution\n", encoding="utf-8")
    assert paste_file.find_fault(path, "main") is None
    assert paste_file.find_fault(path, "broken") is not None


def test_fault_in_another_file_names_that_file(path: Path) -> None:
    other = path.with_name("a b.ini")
    other.write_text("[app:x]\nuse = egg:no-such-distribution\n", encoding="utf-8")
    path.write_text("[app:main]\nuse = config:%(here)s/a%%20b.ini#x\n", encoding="utf-8")
    found = paste_file.find_fault(path, "main")
    assert found is not None
    expect(found, other, 2, "no-such-distribution is not installed")


def test_a_circle_ends(path: Path) -> None:
    path.write_text("[app:main]\nuse = config:paste.ini\n", encoding="utf-8")
    assert paste_file.find_fault(path, "main") is None


def test_the_packaged_pipeline_is_good() -> None:
    target = application.default_target().removeprefix("config:")
    assert paste_file.find_fault(Path(target), "main") is None


@pytest.mark.parametrize("failure", ["import absent_module_of_its_own", "raise SystemExit(1)"])
def test_failure_inside_a_module_is_not_the_files(
    failure: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(path.parent)
    path.with_name("target_failing.py").write_text(failure, encoding="utf-8")
    path.write_text("[app:main]\npaste.app_factory = target_failing:f\n", encoding="utf-8")
    assert paste_file.find_fault(path, "main") is None

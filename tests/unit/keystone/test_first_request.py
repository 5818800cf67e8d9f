"""What Keystone makes at a first request, made before it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.gateway.keystone import first_request

# In a process of its own: here the plugin and the dialect may have been loaded by another test.
ENGINE = """
import importlib.metadata, sys
from keyfront.gateway.keystone import first_request
url = sys.argv[1]
first_request.load_driver(url)
loaded = set(sys.modules)
def looked(*given, **named):
    raise AssertionError("all distributions are looked at")
importlib.metadata.entry_points = looked
import sqlalchemy
engine = sqlalchemy.create_engine(url)
assert hasattr(engine.dialect.do_commit, "keyfront")
late = {name for name in set(sys.modules) - loaded if name.startswith("sqlalchemy.dialects.")}
assert not late and "sqlite3" in loaded, late
"""


def test_an_engine_finds_the_plugin_and_the_driver(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.sqlite'}?plugin=keyfront&keyfront_path={tmp_path}"
    done = subprocess.run([sys.executable, "-c", ENGINE, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "a.sqlite").exists()  # nobody has connected


def test_the_plugin_is_that_of_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="sqlalchemy.plugins", name="keyfront")
    name, module, attribute = first_request.PLUGIN
    assert (entry.name, entry.value) == (name, f"{module}:{attribute}")


@pytest.mark.parametrize("url", [None, "", "nonsense", "no+such://x", "postgresql+nothing://x/y"])
def test_what_cannot_be_loaded_is_for_the_engine_to_say(url: str | None) -> None:
    first_request.load_driver(url)


def test_keystone_answers_what_it_is() -> None:
    asked: list[dict[str, Any]] = []
    closed = []

    class Body:
        def __iter__(self) -> Iterator[bytes]:
            return iter((b"{}",))

        def close(self) -> None:
            closed.append(self)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Body:
        asked.append(environ)
        start_response("200 OK", [])
        return Body()

    first_request.answer_one(application)
    assert [(one["REQUEST_METHOD"], one["PATH_INFO"]) for one in asked] == [("GET", "/v3")]
    # nothing by which anybody would be let in, and nothing to read
    assert not [name for name in asked[0] if name in ("HTTP_X_AUTH_TOKEN", "REMOTE_USER")]
    assert asked[0]["wsgi.input"].read() == b""
    assert len(closed) == 1


def test_a_keystone_that_cannot_answer_is_loaded_all_the_same() -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        raise RuntimeError("no")

    first_request.answer_one(application)

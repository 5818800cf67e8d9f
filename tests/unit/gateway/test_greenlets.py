"""Monkey patching comes first or not at all. Each test patches in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

needs_gevent = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import gevent"], capture_output=True).returncode != 0,
    reason="gevent is not installed",
)

SHOW = """
from keyfront.errors import KeyfrontError
from keyfront.gateway.greenlets import patch_gevent
try:
    print(patch_gevent())
except KeyfrontError as error:
    print(type(error).__name__, error)
"""


def run(before: str, after: str = "", path: Path | None = None) -> str:
    """What a fresh interpreter prints that runs ``before``, patches, then runs ``after``."""
    script = "\n".join(
        [
            f"import sys; sys.path.insert(0, {str(path)!r})" if path else "",
            textwrap.dedent(before),
            SHOW,
            textwrap.dedent(after),
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def package(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return f"import {name}"


@needs_gevent
def test_patches_a_fresh_process() -> None:
    after = "import socket, gevent.socket; print(socket.socket is gevent.socket.socket)"
    assert run("", after) == "True\nTrue"


@needs_gevent
def test_plugins_of_gevent_are_called_and_looked_for_once(tmp_path: Path) -> None:
    package(tmp_path, "plugin", "def noted(event): print('patched', event.module_name)")
    metadata = tmp_path / "plugin-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    groups = "[gevent.plugins.monkey.did_patch_module]\nplugin = plugin:noted\n"
    (metadata / "entry_points.txt").write_text(groups)
    before = """
    from importlib import metadata
    real, looks = metadata.distributions, []
    metadata.distributions = lambda **chosen: looks.append(1) or real(**chosen)
    asked = metadata.entry_points
    """
    told = run(before, "print(len(looks), metadata.entry_points is asked)", tmp_path).splitlines()
    assert told[-2:] == ["True", "1 True"]
    assert {"patched socket", "patched threading"} <= set(told)


@needs_gevent
def test_does_nothing_when_uwsgi_patched_early() -> None:
    assert run("import gevent.monkey; gevent.monkey.patch_all()\nimport keystone") == "False"


def test_imports_next_to_nothing() -> None:
    loaded = run(
        "import sys; sys.modules['gevent'] = None; known = set(sys.modules)",
        "new = set(sys.modules) - known\n"
        "print(sorted(n for n in new if n.split('.')[0] not in sys.stdlib_module_names))",
    ).splitlines()[-1]
    assert loaded == "['keyfront', 'keyfront.errors', 'keyfront.gateway', " + (
        "'keyfront.gateway.greenlets']"
    )


def test_gevent_missing() -> None:
    assert run("import sys; sys.modules['gevent'] = None") == (
        "MissingPartError gevent is not installed: pip install 'keyfront[gevent]'"
    )


@needs_gevent
@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("keystone.common", "keystone"),
        ("oslo_utils.timeutils", "oslo_utils"),
        ("sqlalchemy", "sqlalchemy"),
        ("requests", "requests, urllib3"),
        ("kombu", "kombu"),
        ("amqp", "amqp"),
        ("dogpile.cache", "dogpile"),
        ("redis", "redis"),
        ("pymemcache", "pymemcache"),
        ("webob", "webob"),
    ],
)
def test_names_what_came_too_early(module: str, named: str) -> None:
    pytest.importorskip(module)
    answer = run(f"import {module}")
    assert answer.startswith("ImportedTooEarlyError imported before gevent's monkey patching: ")
    assert f" {named}" in answer.partition(";")[0]


@needs_gevent
@pytest.mark.parametrize(
    "text",
    [
        "import threading; lock = threading.Lock()",
        "import threading; lock = threading.RLock()",
        "import threading; store = threading.local()",
        "import threading\nclass Store(threading.local): pass",
        "import threading; ready = threading.Event()",
        "from time import sleep",
        "from socket import socket as plain",
        "from socket import create_connection",
        "import queue; jobs = queue.Queue()",
    ],
)
def test_a_primitive_held_by_any_module_is_found(text: str, tmp_path: Path) -> None:
    answer = run(package(tmp_path, "holder", text), path=tmp_path)
    assert answer.startswith(
        "ImportedTooEarlyError imported before gevent's monkey patching: holder; "
    )


@needs_gevent
def test_a_module_that_uses_primitives_by_full_name_may_come_early(tmp_path: Path) -> None:
    text = """
        import socket, threading, time
        def serve():
            time.sleep(1)
            return threading.Lock(), socket.socket()
        class Worker(threading.Thread): pass
        """
    assert run(package(tmp_path, "user", text), path=tmp_path) == "True"


def test_refuses_what_eventlet_has_patched() -> None:
    before = """
        import sys, types
        patcher = types.ModuleType("eventlet.patcher")
        patcher.already_patched = {"socket": True}
        sys.modules["eventlet.patcher"] = patcher
        """
    answer = run(before)
    assert answer.startswith("ImportedTooEarlyError eventlet has already patched this process")

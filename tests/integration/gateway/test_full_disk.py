"""The disk of the logs and of SQLite fills up under a Keystone that is being asked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from support.keystone_world import VALIDATE, Answer, Client, World
from support.keystones import keystone_state, serve_as_is
from support.served import Served

pytest.importorskip("keystone")

# The token cache's files are 35 MiB.
SIZE = "64m"
# Lines of the log until what is left of its last page is full as well.
REFUSED = 60
# No refusal is kept, so that Keystone logs each.
EXTRA = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
negative_ttl = 0
"""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of few bytes."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tmpfs", folder],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte of it; returns the file that takes them."""
    path = disk / "full"
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
@pytest.mark.parametrize("server", ["uwsgi", "mod_wsgi"])
def test_an_answer_always_leaves(tmp_path: Path, server: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        state = keystone_state(disk / "state", extra=EXTRA)
        with serve_as_is(state, server) as served:
            world = World(served.url, served.password)
            world.wait_until_kept()
            token = world.admin
            known = {"X-Auth-Token": token, "X-Subject-Token": token}
            own = {"X-Auth-Token": token}
            assert ask(served, "GET", VALIDATE, known).status == 200
            filler = fill(disk)
            for _ in range(3):
                answers = [ask(served, "GET", "/users/nobody", own)]
                answers.append(ask(served, "DELETE", "/users/nobody", own))
                answers.append(ask(served, "POST", "/projects", own, {"project": {"name": "p"}}))
                answers.append(ask(served, "POST", VALIDATE, {}, login(served)))
                for answer in answers:
                    assert answer.status == 503, answer
                    assert answer.headers["Content-Type"] == "application/json"
                    assert int(answer.headers["Retry-After"]) > 1
                    assert "disk is full" in answer.body["error"]["message"]
                    assert "sqlite" not in str(answer.body).lower()
            for _ in range(REFUSED):
                # Keystone logs each of them.
                assert ask(served, "GET", VALIDATE, {**known, "X-Auth-Token": "x"}).status == 401
            assert ask(served, "GET", VALIDATE, known).status == 200, "what is known needs no disk"
            filler.unlink()
            for _ in range(4):  # each process has a log of its own to make whole
                assert ask(served, "GET", VALIDATE, {**known, "X-Auth-Token": "x"}).status == 401
            assert ask(served, "POST", VALIDATE, {}, login(served)).status == 201
            assert ask(served, "GET", "/users/nobody", own).status == 404
            made = ask(served, "POST", "/projects", own, {"project": {"name": "p"}})
            assert made.status == 201, "nothing of the changes before has stayed"
            log = served.log("keystone.log")
        assert "lines of this log could not be written when they came: No space left" in log
        assert "Traceback" not in log


def ask(
    served: Served, method: str, path: str, headers: dict[str, str], body: object = None
) -> Answer:
    with closing(Client(served.url)) as client:
        return client.request(method, path, headers, body)


def login(served: Served) -> dict[str, object]:
    user = {"name": "admin", "domain": {"id": "default"}, "password": served.password}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}

"""``keyfront tokens check`` on Keystones that hear of changes, and on some that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.keystone_world import World
from support.keystones import keystone_state, serve_as_is
from support.redis_servers import redis_server
from support.served import Served, free_port

pytest.importorskip("keystone")

# Who does not hear of a change goes on with his answer from before it. That must not end by itself:
# it does when the oldest of what it was made of does, which the node may have read when it started.
EXTRA = "[keyfront_token_cache]\npath = {path}\nttl = 3600\n"


class Place(NamedTuple):
    """A served Keystone, and where its configuration is."""

    served: Served
    state: Path

    def check(self, *urls: str, config: Path | None = None, **more: str) -> tuple[int, Any]:
        """What the command says of the given nodes."""
        command = [sys.executable, "-m", "keyfront", "tokens", "check", "--json"]
        command += ["--config-file", str(config or self.state / "keystone.conf")]
        for url in urls:
            command += ["--keystone", url]
        who = {"OS_USERNAME": "admin", "OS_PASSWORD": self.served.password, **more}
        environment = {**os.environ, "OS_PROJECT_NAME": "admin", **who}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert self.served.password not in done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@contextmanager
def serving(state: Path) -> Iterator[Served]:
    """Run a Keystone whose table is in use when the block begins: the command waits for that for
    some seconds, which a busy machine may need for more than that."""
    with serve_as_is(state, "uwsgi") as served:
        World(served.url, served.password).wait_until_kept()
        yield served


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("check")
    state = keystone_state(folder / "state", extra=EXTRA.format(path=folder / "epochs"))
    with serving(state) as served:
        yield Place(served, state)


def faults(result: Any) -> list[str]:
    return [one["fault"] for one in result["findings"]]


def test_all_hear(place: Place) -> None:
    status, result = place.check(place.served.url)
    assert faults(result) == ["", ""]
    assert status == 0


def test_keystone_manage_without_the_plugin(place: Place, tmp_path: Path) -> None:
    text = (place.state / "keystone.conf").read_text()
    assert "?plugin=keyfront" in text
    config = tmp_path / "keystone.conf"
    config.write_text(text.replace("?plugin=keyfront", ""))
    status, result = place.check(config=config)
    assert status == 1
    assert "write ?plugin=keyfront behind the URL" in faults(result)[0]


def test_a_node_that_goes_by_epochs_of_its_own(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("another")
    state = keystone_state(folder / "state", extra=EXTRA.format(path=folder / "epochs"))
    with serving(state) as other:
        # Only its password is the other Keystone's.
        status, result = place.check(other.url, OS_PASSWORD=other.password)
        assert status == 1
        assert "it goes by another epoch table" in faults(result)[1]


def another_node(place: Place, folder: Path, extra: str) -> Path:
    """One more node on the database of the first."""
    url = f"sqlite:///{place.state / 'keystone.sqlite'}?plugin=keyfront"
    return keystone_state(folder, database_url=url, extra=extra)


DEAF = "does not hear of changes made at {}: a token that was revoked there is still good here"


def test_a_node_with_a_folder_of_its_own(place: Place, tmp_path: Path) -> None:
    """As in another container: same database, same keys, and nobody hears of the other."""
    extra = EXTRA.format(path=tmp_path / "epochs")
    with serving(another_node(place, tmp_path / "state", extra)) as other:
        status, result = place.check(place.served.url, other.url)
        assert status == 1
        process, first, second = faults(result)
        assert process == f"a token that it revoked is still good at {other.url}"
        assert DEAF.format(other.url) in first and "epoch table" not in first
        assert "it goes by another epoch table" in second
        assert DEAF.format(place.served.url) in second


def test_a_node_with_another_prefix_in_redis(place: Place, tmp_path: Path) -> None:
    """Of three, two hear of each other; it is said who does not hear of whom."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        nodes = []
        for name, more in (
            ("a", "consistency = lease"),
            ("b", ""),
            ("c", "coordinator_prefix = other:"),
        ):
            path = EXTRA.format(path=tmp_path / f"epochs-{name}")
            extra = f"{path}coordinator = {redis.url}\ncoordinator_timeout = 10\n{more}\n"
            state = another_node(place, tmp_path / name, extra)
            nodes.append(stack.enter_context(serving(state)))
        a, b, c = (node.url for node in nodes)
        config = tmp_path / "a" / "keystone.conf"
        status, result = place.check(a, b, config=config)
        assert faults(result) == ["", "", ""]
        assert status == 0
        status, result = place.check(a, b, c, config=config)
        assert status == 1
        process, first, second, third = faults(result)
        assert process == f"a token that it revoked is still good at {c}"
        for fault in (first, second):
            assert fault == f"it {DEAF.format(c)}"
        assert "it goes by another epoch table" in third
        assert DEAF.format(a) in third and DEAF.format(b) in third


def test_a_user_without_any_right_will_do(place: Place) -> None:
    world = World(place.served.url, place.served.password)
    user = world.person().user
    (project,) = [
        one
        for one in world.call("GET", "/projects").body["projects"]
        if one["id"] == world.still_project
    ]
    who = {"OS_USERNAME": user.name, "OS_PASSWORD": user.password}
    status, result = place.check(place.served.url, OS_PROJECT_NAME=project["name"], **who)
    assert (status, faults(result)) == (0, ["", ""])


def test_a_node_that_is_away_and_a_wrong_password(place: Place) -> None:
    url = f"http://127.0.0.1:{free_port()}/v3"
    status, result = place.check(url, place.served.url, OS_PASSWORD="wrong")
    assert status == 1
    assert faults(result)[1] == "it does not answer: ConnectionRefusedError"
    assert faults(result)[2] == "it gives no token to the user of OS_USERNAME"


def test_what_is_missing_is_named(place: Place) -> None:
    status, said = place.check(place.served.url, OS_PASSWORD="")
    assert status == 2
    assert "OS_PASSWORD" in said
    status, said = place.check("localhost:5000")
    assert status == 2
    assert "--keystone" in said

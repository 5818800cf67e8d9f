"""What ``keystone-manage`` changes is seen at once, if the database's URL says ``plugin=keyfront``.

Answers are kept for an hour here, so none ends by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.engine import make_url

from keyfront.gateway.serve.keystone_manage import KeystoneManage
from keyfront.middleware.tokens.coordinator.local import NAME, SharedMemory
from keyfront.middleware.tokens.folder import default_folder
from support.imported import Imported
from support.keystone_world import VALIDATE, Answer, Client, Person, World
from support.keystones import keystone_state, serve_as_is
from support.served import PATIENCE, Served
from support.token_changes import alive, catalog_has, gone, says

pytest.importorskip("keystone")

# keystone-manage, whether or not its script lies beside this interpreter.
MANAGE = "from keystone.cmd.manage import main; main()"
TTL = 3000
# Enough for both workers to have been asked.
READS = 8
EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
# As Keystone has it by default, with a warning at each password.
max_password_length = 4096
# Only then is the table id_mapping looked at, also for users in SQL.
domain_specific_drivers_enabled = true
domain_config_dir = {folder}/domains
[keyfront_token_cache]
path =
# A container may have 64 MiB in /dev/shm.
node_memory = 4
ttl = {ttl}
negative_ttl = {ttl}
"""


@dataclass
class Place:
    """A Keystone, served or not."""

    state: Path
    #: Of the epoch table.
    folder: Path
    served: Served | None = None
    world: World | None = None
    #: Runs its commands as ``keyfront serve`` does; ``None``: as programs of their own.
    imported: KeystoneManage | None = None
    #: Runs such programs, all with one import of Keystone; ``None``: with one each.
    python: Imported | None = None
    #: The command by which one of them is started that imports it itself.
    before: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        return self.state / "keystone.conf"

    @property
    def url(self) -> str:
        found = re.search(r"^connection = (.*)$", self.config.read_text(), re.MULTILINE)
        assert found is not None
        return found[1].replace("$$", "$")

    def manage(self, *arguments: str, config: Path | None = None, **environment: str) -> str:
        if self.imported is not None and config is None:
            status, output = self.imported.run(*arguments, **environment)
            assert status == 0, output
            assert "Truncating password" not in output, "in a process of ours"
            return output
        command = ("-c", MANAGE, "--config-file", config or self.config, *arguments)
        variables = {**os.environ, **environment}
        if self.python is not None and not self.before:
            done = self.python.run(*command, environment=variables)
        else:
            done = subprocess.run(
                [*self.before, sys.executable, *command], env=variables,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
                check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def bootstrap(self, *arguments: str, password: str | None = None, **more: Path) -> str:
        """With the administrator's own password, unless another user is named."""
        password = password or (self.state / "admin-password").read_text().strip()
        region = ("--bootstrap-region-id", "RegionOne")
        return self.manage(
            "bootstrap", *region, *arguments, OS_BOOTSTRAP_PASSWORD=password, **more
        )

    def ask(self, token: str) -> Answer:
        assert self.world is not None
        client = Client(self.world.base_url)
        headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
        try:
            return client.request("GET", VALIDATE, headers)
        finally:
            client.close()

    def cached(self, token: str) -> list[Answer]:
        return [self.ask(token) for _ in range(READS)]

    def changes(self) -> int:
        with closing(SharedMemory(self.folder, create=False)) as table:
            return table.statistics()["changes"]

    @contextmanager
    def reading(self, token: str) -> Iterator[None]:
        """So that answers are stored while a command runs, too."""
        ended = threading.Event()

        def read() -> None:
            while not ended.wait(0.02):
                self.ask(token)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(PATIENCE)


def _state(folder: Path, *, ttl: float = TTL, parameters: str = "?plugin=keyfront") -> Path:
    (folder / "domains").mkdir()
    state = keystone_state(folder / "state", extra=EXTRA.format(folder=folder, ttl=ttl))
    _reconnect(state / "keystone.conf", parameters)
    return state


def _reconnect(config: Path, parameters: str, to: Path | None = None) -> Path:
    """Write a configuration with other parameters in the database's URL."""
    text, count = re.subn(
        r"^(connection = [^?\n]*).*$", lambda found: found[1] + parameters, config.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    (to or config).write_text(text)
    return to or config


def _usual_folder(state: Path) -> Path:
    return default_folder(make_url(f"sqlite:///{state / 'keystone.sqlite'}"))


@contextmanager
def _served(state: Path, folder: Path, python: Imported | None = None) -> Iterator[Place]:
    try:
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            yield Place(state, folder, served, world, python=python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    state = _state(tmp_path_factory.mktemp("manage"))
    with _served(state, _usual_folder(state)) as place:
        with KeystoneManage(place.config, state) as place.imported:
            yield place


@pytest.fixture(scope="module")
def world(place: Place) -> World:
    assert place.world is not None
    return place.world


# With the plugin


@pytest.mark.slow
def test_bootstrap_moves_an_endpoint(place: Place, world: World) -> None:
    token, url = world.person().token, "http://127.0.0.1:1/moved"
    shows = catalog_has(url)
    assert not any(shows(answer) for answer in place.cached(token))
    with place.reading(token):
        place.bootstrap("--bootstrap-public-url", url)
        assert all(shows(answer) for answer in place.cached(token))


@pytest.mark.slow
def test_bootstrap_sets_a_password(place: Place, world: World) -> None:
    """It also makes the user an administrator, and revokes his tokens."""
    person = world.person()
    token = person.token
    assert all(alive(answer) for answer in place.cached(token))
    with place.reading(token):
        place.bootstrap("--bootstrap-username", person.user.name, password="another-one")
        assert all(gone(answer) for answer in place.cached(token))


@pytest.mark.slow
def test_bootstrap_that_changes_nothing(place: Place, world: World) -> None:
    token = world.person().token
    place.cached(token)
    place.bootstrap()
    before = place.changes()
    place.bootstrap()
    assert all(alive(answer) for answer in place.cached(token))
    # Many run it at every start of a container.
    assert place.changes() - before <= 2


@pytest.mark.slow
def test_user_setup_sets_a_password(place: Place, world: World) -> None:
    person = world.person()
    assert all(alive(answer) for answer in place.cached(person.token))
    arguments = ("--username", person.user.name, "--user-password-plain", "another-one")
    with place.reading(person.token):
        place.manage("user_setup", *arguments)
        assert all(gone(answer) for answer in place.cached(person.token))


@pytest.mark.slow
def test_mapping_purge(place: Place, world: World) -> None:
    """As if the user were one of LDAP: the mapping says who he is."""
    person, other = world.person(), world.user()
    _map(place, person, other.id)
    mapped, own = (says(x, "user", "name") for x in (other.name, person.user.name))
    assert all(mapped(answer) for answer in place.cached(person.token))
    with place.reading(person.token):
        place.manage("mapping_purge", "--all")
        assert all(own(answer) for answer in place.cached(person.token))


def _map(place: Place, person: Person, local: str) -> None:
    engine = sqlalchemy.create_engine(make_url(place.url).set(query={}))
    insert = sqlalchemy.text("INSERT INTO id_mapping VALUES (:public, 'default', :local, 'user')")
    with engine.begin() as connection:
        connection.execute(insert, {"public": person.user.id, "local": local})
    engine.dispose()
    # SQL by hand is not seen.
    coordinator = SharedMemory(place.folder, create=False)
    coordinator.flush()
    coordinator.close()


@pytest.mark.slow
def test_trust_flush(place: Place, world: World) -> None:
    """It removes trusts that no longer hold; another one's token goes on to hold."""
    giver, taker = world.person(world.still_role), world.user()
    kept, dropped = (world.trust(giver, taker, [world.still_role]) for _ in range(2))
    tokens = [world.issue(taker, trust=trust) for trust in (kept, dropped)]
    world.call("DELETE", f"/OS-TRUST/trusts/{dropped}", token=giver.token)
    shows = [gone, alive]
    before = place.changes()
    with place.reading(tokens[0]):
        place.manage("trust_flush")
        for token in tokens:
            assert all(shows[token == tokens[0]](answer) for answer in place.cached(token))
    assert place.changes() > before


# Without it, and elsewhere

# In a mount namespace, as a container or a second pod is.
OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs keyfront-test /dev/shm && exec "$@"', "sh")
NOBODY_HEARS = re.compile(r" ([A-Z]+) keyfront\S+ .*: (there is no token cache to be .*)")


@pytest.mark.slow
@pytest.mark.parametrize("path", [False, True], ids=["by the database", "path"])
def test_a_container_with_a_dev_shm_of_its_own_says_that_nobody_hears(
    place: Place, world: World, tmp_path: Path, path: bool
) -> None:
    """As one for ``bootstrap`` beside the service's: what it changes is seen after ``ttl``."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount may be made here")
    config = tmp_path / "keystone.conf"
    config.write_text(place.config.read_text())
    if path:
        with config.open("a") as more:
            more.write(f"[keyfront_token_cache]\npath = /dev/shm/{tmp_path.name}\n")
    token, before = world.person().token, place.changes()
    place.cached(token)
    container = replace(place, before=OWN_SHM)
    url = f"http://127.0.0.1:1/{uuid.uuid4().hex}"
    log = place.state / "log" / "keystone.log"
    known = len(log.read_text())
    container.bootstrap("--bootstrap-public-url", url, config=config)
    said = NOBODY_HEARS.findall(log.read_text()[known:])
    ((level, text),) = said  # once, however much it changes
    assert level == "WARNING"
    assert ("path names it" in text) is path
    assert place.changes() == before
    assert not any(catalog_has(url)(answer) for answer in place.cached(token))
    # What is heard ends that.
    place.bootstrap("--bootstrap-admin-url", url)
    assert all(catalog_has(url)(answer) for answer in place.cached(token))



@pytest.mark.slow
def test_without_the_plugin_an_answer_lives_as_long_as_ttl(
    tmp_path: Path, imported: Imported
) -> None:
    ttl = 1.0
    state = _state(tmp_path, ttl=ttl)
    stock = _reconnect(state / "keystone.conf", "", to=tmp_path / "stock.conf")
    with _served(state, _usual_folder(state), imported) as place:
        assert place.world is not None
        token = place.world.person().token
        before = place.changes()
        for number in range(2):
            url = f"http://127.0.0.1:1/{number}"
            with place.reading(token):
                place.bootstrap("--bootstrap-public-url", url, config=stock)
            # Of what was read before that nothing is kept any more from now on.
            time.sleep(ttl)
            assert all(catalog_has(url)(answer) for answer in place.cached(token))
        assert place.changes() == before, "it told of its changes"


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["?plugin=keyfront", "?plugin=keyfront&keyfront_path={}"])
def test_where_nobody_serves(tmp_path: Path, imported: Imported, parameters: str) -> None:
    folder = tmp_path / "shared"
    state = _state(tmp_path, parameters=parameters.format(folder))
    place = Place(state, folder, python=imported)
    log = place.state / "log" / "keystone.log"
    log.unlink()
    place.bootstrap("--bootstrap-public-url", "http://127.0.0.1:1/moved")
    assert len(NOBODY_HEARS.findall(log.read_text())) == 1
    # keyfront serve knows it: this is how it makes a Keystone.
    with KeystoneManage(place.config, place.state) as place.imported:
        place.bootstrap("--bootstrap-public-url", "http://127.0.0.1:1/moved-again")
    assert len(NOBODY_HEARS.findall(log.read_text())) == 1
    assert not folder.exists()
    assert not _usual_folder(place.state).exists()


@pytest.mark.slow
def test_folder_in_the_url(tmp_path: Path, imported: Imported) -> None:
    """For workers and keystone-manage alike, with no more than the URL."""
    folder = tmp_path / "shared"
    state = _state(tmp_path, parameters=f"?plugin=keyfront&keyfront_path={folder}")
    try:
        with _served(state, folder, imported) as place:
            _check_both_ways(place)
    finally:
        shutil.rmtree(_usual_folder(state), ignore_errors=True)


@pytest.mark.slow
def test_folder_in_the_options(tmp_path: Path, imported: Imported) -> None:
    """keystone-manage reads the same keystone.conf."""
    folder = tmp_path / "shared"
    state = _state(tmp_path)
    with (state / "keystone.conf").open("a") as config:
        config.write(f"[keyfront_token_cache]\npath = {folder}\n")
    try:
        with _served(state, folder, imported) as place:
            _check_both_ways(place)
        assert not _usual_folder(state).exists()
    finally:
        shutil.rmtree(_usual_folder(state), ignore_errors=True)


def _check_both_ways(place: Place) -> None:
    """A change by HTTP, and one by keystone-manage."""
    assert place.world is not None
    person = place.world.person()
    place.cached(person.token)
    place.world.patch("user", f"/users/{person.user.id}", name="renamed")
    names = {x.token()["user"]["name"] for x in place.cached(person.token)}
    url = "http://127.0.0.1:1/moved"
    place.bootstrap("--bootstrap-public-url", url)
    shown = {catalog_has(url)(answer) for answer in place.cached(person.token)}
    assert (names, shown) == ({"renamed"}, {True})
    assert (place.folder / NAME).exists()

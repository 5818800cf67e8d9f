"""Which folder the processes of one Keystone share, and that no other user can lead them apart.

The service's user, root and a stranger are real users here; only ``/run/keyfront`` is elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from keyfront.middleware.tokens import folder as folders
from keyfront.middleware.tokens.coordinator.local import NAME
from support.served import PATIENCE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")

ROOT, SERVICE, STRANGER = 0, 65534, 65533

# What acts is forked from one process, which has imported what takes half a second, as root: the
# checkout may be readable for nobody else. It forks for each message, and then waits for that child
# or, for a number, says how the child of that number ended.
_ACTORS = """\
import encodings.ascii, gc, json, os, select, signal, socket, sys
from pathlib import Path
import sqlalchemy
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens import folder as folders
from keyfront.middleware.tokens.invalidation import sqlalchemy_plugin
from keyfront.middleware.tokens.coordinator import mark_owners
from keyfront.middleware.tokens.coordinator import local
from keyfront.middleware.tokens.epochs import ALL_SLOT, Slots
import sqlalchemy.dialects.sqlite
gc.freeze()
asked = socket.socket(fileno=0)
while True:
    message, files, _, _ = socket.recv_fds(asked, 65536, 3)
    if not message:
        sys.exit()
    message = json.loads(message)
    if isinstance(message, int):
        ended = os.pidfd_open(message)
        if not select.select([ended], [], [], float(sys.argv[1]))[0]:
            os.kill(message, signal.SIGKILL)
        os.close(ended)
        asked.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(message, 0)[1]))
        continue
    child = os.fork()
    if not child:
        break
    for file in files:
        os.close(file)
    asked.send(b"%d" % child)
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
asked.detach()
user, place, url, deed, temporary = message
os.environ.pop("TMPDIR", None)
if temporary:
    os.environ["TMPDIR"] = temporary
folders.PLACE = Path(place)
engine = sqlalchemy.create_engine(url)
os.setgroups([])
os.setgid(user)
os.setuid(user)
if deed == "change":
    sqlalchemy_plugin.attach(engine)
    user = sqlalchemy.Table("user", sqlalchemy.MetaData(), sqlalchemy.Column("id", sqlalchemy.Text))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.insert(user).values(id="u"))
    sys.exit()
folder = folders.default_folder(engine.url)
folders.check_folder(folder, make=True)
table = local.SharedMemory(folder)
epoch = table.now()
print(folder, flush=True)
for line in sys.stdin:
    print(table.fresh(epoch, Slots([ALL_SLOT, *range(1024)])), flush=True)
"""


class Actors:
    """Starts processes of any user; a context manager.

    :param before: the command by which they are started
    """

    def __init__(self, *before: str) -> None:
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-c", _ACTORS, str(PATIENCE)], stdin=asked
            )

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *error: object) -> None:
        self._asking.close()
        assert self._process.wait(PATIENCE) == 0

    def send(self, message: object, *files: int) -> int:
        """Ask for what ``_ACTORS`` does; return the number that it answers."""
        socket.send_fds(self._asking, [json.dumps(message).encode()], files)
        return int(self._asking.recv(64))


class Actor:
    """A process of a user.

    :param message: who does what where, see ``_ACTORS``
    """

    def __init__(self, actors: Actors, *message: object) -> None:
        self._actors = actors
        stdin, asks = os.pipe()
        answers, stdout = os.pipe()
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answers)
        # Not a pipe, which might be full: it is read at the end.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - end() closes it
        self._process = actors.send(message, stdin, stdout, self._said.fileno())
        os.close(stdin)
        os.close(stdout)

    def answer(self) -> str:
        """Wait for the next line that it prints; empty if it ends."""
        return self._answers.readline().strip()

    def ask(self) -> str:
        self._asks.write("\n")
        self._asks.flush()
        return self.answer()

    def end(self) -> tuple[int, str]:
        """End its input and wait until it has ended; return its exit status and what it said."""
        self._asks.close()
        status = self._actors.send(self._process)
        self._answers.close()
        with self._said:
            self._said.seek(0)
            return status, self._said.read()


@dataclass
class Machine:
    """A database of the service's, and where its folder may lie.

    :param place: stands for ``/run/keyfront``
    :param shared: the folder where anybody may make one: in /dev/shm
    """

    base: Path
    place: Path
    url: str
    shared: Path
    actors: Actors

    @property
    def private(self) -> Path:
        return self.place / self.shared.name.replace("keyfront-", "tokens-")

    def make_place(self, user: int = SERVICE, mode: int = 0o755) -> None:
        self.place.mkdir(mode)
        self.place.chmod(mode)
        os.chown(self.place, user, user)

    def beside(self, number: str) -> Path:
        return self.shared.with_name(f"{self.shared.name}{number}")

    def squat(self, number: str = "") -> None:
        """As a stranger, make the folder first, or one with a number."""
        folder = self.beside(number)
        folder.mkdir(0o755)
        (folder / NAME).touch()
        for path in (folder / NAME, folder):
            os.chown(path, STRANGER, STRANGER)

    def start(self, user: int, deed: str) -> Actor:
        temporary = os.environ.get("TMPDIR")
        return Actor(self.actors, user, str(self.place), self.url, deed, temporary)

    @contextmanager
    def worker(self, user: int = SERVICE) -> Iterator[Worker]:
        """One that has made what it shares, or found it."""
        actor = self.start(user, "share")
        try:
            worker = Worker(actor, Path(actor.answer()))
            yield worker
        finally:
            said = actor.end()[1]
        worker.said = said

    def change(self, user: int) -> str:
        """Change something as ``keystone-manage`` would; return what it complains of."""
        return self.start(user, "change").end()[1]

    def refusal(self, user: int = SERVICE) -> str:
        """Why a worker does not start."""
        status, errors = self.start(user, "share").end()
        assert status != 0
        return errors


@dataclass
class Worker:
    actor: Actor
    folder: Path
    #: Its log, once it is over.
    said: str = ""

    def hears_nothing(self) -> bool:
        """Whether what it took at its start is still fresh."""
        return self.actor.ask() == "True"


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    with Actors() as started:
        yield started


@pytest.fixture
def machine(actors: Actors) -> Iterator[Machine]:
    base = Path(tempfile.mkdtemp(prefix="keyfront-test-"))
    base.chmod(0o755)
    database = base / "database"
    database.mkdir()
    file = database / "db"
    file.touch()
    subprocess.run(
        [sys.executable, "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute("
         "'CREATE TABLE user (id TEXT)')", file], check=True,
    )  # fmt: skip
    for path in (database, file):
        os.chown(path, SERVICE, SERVICE)
    url = f"sqlite:///{file}"
    shared = folders._shared(folders._name(make_url(url)))
    made = Machine(base, base / "place", url, shared, actors)
    try:
        yield made
    finally:
        shutil.rmtree(base)
        for folder in (shared, made.shared):
            for one in folder.parent.glob(f"{folder.name}*"):
                shutil.rmtree(one)


@pytest.fixture
def closed(machine: Machine) -> Iterator[Machine]:
    """A machine on which only root may write into /dev/shm."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount may be made here")
    mount = 'mount -t tmpfs -o mode=0755 keyfront-test /dev/shm && exec "$@"'
    machine.shared = Path("/tmp") / machine.shared.name
    with Actors("unshare", "-m", "sh", "-c", mount, "sh") as machine.actors:
        yield machine


def test_the_place_is_one_that_only_root_makes() -> None:
    assert folders.PLACE.parent == Path("/run")


def test_a_stranger_who_is_first_changes_nothing(machine: Machine) -> None:
    """Neither before the service starts, nor between two of its processes, nor for root."""
    machine.make_place()
    machine.squat()
    with machine.worker() as first, machine.worker() as second:
        assert first.folder == second.folder == machine.private
        shutil.rmtree(machine.shared)
        with machine.worker() as third:
            assert third.folder == machine.private
        assert first.hears_nothing() and second.hears_nothing()
        for user in (ROOT, SERVICE):
            machine.squat()
            with machine.worker() as fresh:
                assert machine.change(user) == ""
                assert not fresh.hears_nothing()
            shutil.rmtree(machine.shared)
        assert not first.hears_nothing() and not second.hears_nothing()


def test_root_need_not_fear_a_stranger_before_the_service_starts(machine: Machine) -> None:
    """As at the installation: nobody has kept anything."""
    machine.make_place()
    machine.squat()
    assert "Error" not in machine.change(ROOT)
    assert not machine.private.exists()


def test_a_service_that_runs_elsewhere_stays_there(machine: Machine) -> None:
    """The place may be made while it runs."""
    with machine.worker() as first:
        assert first.folder == machine.shared
        machine.make_place()
        with machine.worker() as second:
            assert second.folder == machine.shared
            assert machine.change(ROOT) == ""
            assert not first.hears_nothing() and not second.hears_nothing()


@pytest.mark.parametrize("place", ["none", "root's", "open to others", "a link"])
def test_without_a_place_a_stranger_who_is_first_is_passed_over(
    machine: Machine, place: str
) -> None:
    if place == "root's":
        machine.make_place(ROOT)
    elif place == "open to others":
        machine.make_place(mode=0o777)
    elif place == "a link":
        machine.place.symlink_to(machine.base / "database")
    with machine.worker() as worker:
        assert worker.folder == machine.shared
    shutil.rmtree(machine.shared)
    machine.squat()
    machine.squat("-1")
    second = machine.beside("-2")
    with machine.worker() as first, machine.worker() as other:
        assert first.folder == other.folder == second
        # Who comes later goes there as well, whatever the stranger does with his.
        shutil.rmtree(machine.shared)
        with machine.worker() as third:
            assert third.folder == second
        machine.squat("-3")
        for user in (ROOT, SERVICE):
            with machine.worker() as fresh:
                assert fresh.folder == second
                machine.change(user)
                assert not fresh.hears_nothing()
        assert not first.hears_nothing() and not other.hears_nothing()


def test_root_trusts_no_stranger_where_no_service_is(machine: Machine) -> None:
    """It may be the service's, under a user that root knows nothing of."""
    machine.squat()
    said = machine.change(ROOT)
    assert f"{machine.shared}: belongs to user {STRANGER}" in said
    assert f"have root make {machine.place}" in said or "remove it" in said
    shutil.rmtree(machine.shared)
    machine.squat("-1")
    assert f"{machine.beside('-1')}: belongs to user {STRANGER}" in machine.change(ROOT)


def test_root_finds_the_service_also_where_a_keystone_was_tried_as_root(machine: Machine) -> None:
    """What that left has a table as well, in which nobody would hear."""
    with machine.worker(ROOT) as tried:
        assert tried.folder == machine.shared
    with machine.worker() as service:
        assert service.folder == machine.beside("-1")
        said = machine.change(ROOT)
        assert not service.hears_nothing()
    told = f"{machine.shared} belongs to user {ROOT} and is not used, but {service.folder}"
    assert told in said and told in service.said


def test_the_command_flushes_the_services_and_no_strangers(machine: Machine) -> None:
    """Of a database's server, whose file nobody sees, by the owner of the keys."""
    keys, config = machine.base / "keys", machine.base / "keystone.conf"
    keys.mkdir()
    machine.url = f"mysql+pymysql://keystone:secret@127.0.0.1:1/{machine.base.name}"
    shared, machine.shared = machine.shared, folders._shared(
        folders._name(make_url(machine.url))
    )
    config.write_text(
        f"[database]\nconnection = {machine.url}\n[fernet_tokens]\nkey_repository = {keys}\n"
    )
    assert shared != machine.shared

    def flush() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keyfront", "tokens", "flush", "--config-file", config]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    with machine.worker(STRANGER) as stranger, machine.worker() as service:
        assert stranger.folder == machine.shared
        assert service.folder == machine.beside("-1")
        # Whose the service is, is not known yet.
        done = flush()
        assert done.returncode == 2 and f"belongs to user {STRANGER}" in done.stderr
        assert stranger.hears_nothing()
        os.chown(keys, SERVICE, SERVICE)
        done = flush()
        assert done.returncode == 0 and str(service.folder) in done.stdout
        assert stranger.hears_nothing() and not service.hears_nothing()


def test_who_passes_over_a_stranger_says_so(machine: Machine) -> None:
    """He may run a Keystone of the same database."""
    machine.squat()
    with machine.worker() as worker:
        assert worker.folder == machine.beside("-1")
    assert (
        f"{machine.shared} belongs to user {STRANGER} and is not used, but {worker.folder}"
        in worker.said
    )


def test_another_users_service_does_not_go_its_own_way(machine: Machine) -> None:
    machine.make_place()
    with machine.worker() as worker:
        assert worker.folder == machine.private
        assert f"{machine.private}: belongs to user {SERVICE}" in machine.refusal(STRANGER)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["usual TMPDIR", "another TMPDIR"])
def test_root_finds_what_the_service_has_where_it_may_write(
    closed: Machine, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Root may write everywhere, and have another folder for temporary files."""
    with closed.worker() as worker:
        assert worker.folder == closed.shared
        if elsewhere:
            monkeypatch.setenv("TMPDIR", str(closed.base))
        for user in (SERVICE, ROOT):
            with closed.worker() as fresh:
                assert closed.change(user) == ""
                assert not fresh.hears_nothing()
        assert not worker.hears_nothing()


def test_a_stranger_who_is_first_there_is_passed_over(closed: Machine) -> None:
    closed.squat()
    assert f"belongs to user {STRANGER}" in closed.change(ROOT)
    with closed.worker() as worker:
        assert worker.folder == closed.beside("-1")
        for user in (ROOT, SERVICE):
            with closed.worker() as fresh:
                closed.change(user)
                assert not fresh.hears_nothing()


def test_a_stranger_who_holds_a_lock_is_not_waited_for(machine: Machine) -> None:
    """Nor is his file looked into: who is cut off from it in the middle ends by SIGBUS."""
    machine.squat()
    with (machine.shared / "lock").open("w") as lock, (machine.shared / NAME).open("w") as table:
        table.truncate(1 << 20)
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = machine.change(ROOT)
        assert f"{machine.shared}: belongs to user {STRANGER}" in said
        assert "not free within" not in said
        assert "Error" not in machine.change(SERVICE)
        with machine.worker() as worker:
            assert worker.folder == machine.beside("-1")

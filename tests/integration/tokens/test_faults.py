"""What breaks under a running token cache makes it slower, never wrong.

Users and projects are changed and read all the time, while workers are killed and the files that
they share are deleted, cut off and overwritten. An answer whose request was begun after a change
was confirmed must show that change. A change that was not confirmed may be made or not.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import count
from pathlib import Path

import psutil
import pytest

from keyfront.common.file_lock import LOCK_SECONDS, FileLock
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.local import NAME, SharedMemory
from keyfront.middleware.tokens.counters import Counters
from keyfront.middleware.tokens.epochs import MARK_SECONDS, slots
from keyfront.middleware.tokens.invalidation.change_log import Changes, coordinators
from keyfront.middleware.tokens.node_cache import rings
from support.keystone_world import VALIDATE, Answer, Client, World, random_name
from support.keystones import keystone_state, serve_as_is
from support.processes import kill
from support.programs import remove
from support.served import PATIENCE, Served, wait_for

pytest.importorskip("keystone")

KILLS = int(os.environ.get("KEYFRONT_KILLS", "10"))
READERS = 3
# Between reads, so that changes get their share of the workers; far less than a lease.
PAUSE = 0.03
# What each wait below is bounded by.
SECONDS = PATIENCE

# Commits that take as long as on a busy disk, so that many kills fall between mark and stamp.
SLOW_COMMIT = """\
import random, time
from sqlalchemy.engine.default import DefaultDialect

commit = DefaultDialect.do_commit

def do_commit(self, connection):
    time.sleep(random.uniform(0, 0.04))
    commit(self, connection)
    time.sleep(random.uniform(0, 0.04))

def factory(global_conf, **local_conf):
    DefaultDialect.do_commit = do_commit
    return lambda application: application
"""
PIPELINE = """\
[pipeline:main]
pipeline = token_cache slow keystone
[filter:token_cache]
use = egg:keyfront#token_cache
[filter:slow]
paste.filter_factory = slow_commit:factory
[app:keystone]
use = egg:keyfront#keystone
"""


@dataclass
class Subject:
    """Something a token shows, and what it may show now.

    :param path: of the resource
    :param body: makes the body of a change to a value
    :param shown: the value an answer shows
    :param stored: the value in the database
    :param values: each to change it to, without end
    """

    token: str
    path: str
    body: Callable[[object], object]
    shown: Callable[[Answer], object]
    stored: Callable[[], object]
    values: Iterator[object]
    allowed: set[object]
    changing: bool = False
    version: int = 0


@dataclass
class Watch:
    """Reads subjects in threads, and judges what is read."""

    world: World
    subjects: list[Subject]
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    judged: int = 0
    #: Reads without an answer, and why.
    lost: int = 0
    reasons: set[str] = field(default_factory=set)
    confirmed: int = 0
    #: Changes without an answer.
    unconfirmed: int = 0
    #: Changes that were answered 503.
    refused: int = 0
    stale: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)

    def ask(self, subject: Subject) -> Answer | None:
        """Validate the token of a subject over a new connection; ``None`` without an answer."""
        headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": subject.token}
        return self._send("GET", VALIDATE, headers)

    def change(self, subject: Subject, value: object | None = None) -> Answer | None:
        """Change a subject once."""
        value = next(subject.values) if value is None else value
        with self.lock:
            before = set(subject.allowed)
            subject.changing = True
            subject.allowed.add(value)
        answer = self._send(
            "PATCH", subject.path, {"X-Auth-Token": self.world.admin}, subject.body(value)
        )
        with self.lock:
            if answer is None:
                self.unconfirmed += 1
            elif answer.status == 200:
                self.confirmed += 1
                subject.allowed = {value}
            elif answer.status == 503:
                self.refused += 1
                subject.allowed = before
            else:
                self.strange.append(f"PATCH {subject.path}: {answer.status} {answer.body}")
            subject.changing = False
            subject.version += 1
        return answer

    def confirm(self, subject: Subject) -> None:
        """Change a subject, again until it is confirmed."""
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.change(subject)
            if answer is not None and answer.status == 200:
                return
            assert time.monotonic() < deadline, f"no change is confirmed: {answer}"
            time.sleep(0.05)

    def agrees(self, subject: Subject) -> None:
        """As many reads as reach all workers show what the database holds."""
        for _ in range(8):
            answer = self.ask(subject)
            assert answer is not None
            assert subject.shown(answer) == subject.stored()

    def go_on(self) -> None:
        """Wait until each worker has been read from often."""
        enough = self.judged + 40
        wait_for(lambda: self.judged >= enough, "there were some reads")

    def read(self) -> None:
        while not self.ended:
            time.sleep(PAUSE)
            subject = random.choice(self.subjects)
            with self.lock:
                judge, version = not subject.changing, subject.version
            answer = self.ask(subject)
            with self.lock:
                if answer is None:
                    self.lost += 1
                    continue
                shown = subject.shown(answer)
                if isinstance(shown, Answer):
                    self.strange.append(f"read: {answer.status} {answer.body}")
                elif judge and not subject.changing and subject.version == version:
                    self.judged += 1
                    if shown not in subject.allowed:
                        self.stale.append(f"{subject.path}: {shown}, not {subject.allowed}")

    def _send(
        self, method: str, path: str, headers: dict[str, str], body: object = None
    ) -> Answer | None:
        client = Client(self.world.base_url)
        try:
            return client.request(method, path, headers, body)
        except (OSError, HTTPException, ValueError) as error:
            self.reasons.add(repr(error))
            return None
        finally:
            client.close()


@dataclass
class House:
    """A Keystone, started when a test needs one and again after a test that failed."""

    state: Path
    folder: Path
    environment: dict[str, str]
    subjects: list[Subject] = field(default_factory=list)
    world: World | None = None
    served: Served | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def watch(self, *, readers: int = READERS) -> Iterator[Watch]:
        """Readers at work; each subject's state is known."""
        self._start()
        assert self.world is not None
        watch = Watch(self.world, self.subjects)
        threads = [threading.Thread(target=watch.read, daemon=True) for _ in range(readers)]
        try:
            for subject in self.subjects:
                watch.confirm(subject)
            for thread in threads:
                thread.start()
            try:
                yield watch
                wait_for(lambda: watch.judged, "something was read")
            finally:
                watch.ended = True
                for thread in threads:
                    thread.join(SECONDS)
            print(
                f"{watch.judged} reads judged, {len(watch.stale)} stale, {watch.lost} lost;"
                f" {watch.confirmed} changes confirmed, {watch.refused} refused,"
                f" {watch.unconfirmed} unconfirmed {watch.reasons or ''}"
            )
            assert watch.stale == []
            assert watch.strange == []
            assert watch.judged > 0
        except BaseException:
            self.stop()
            raise

    def logged(self) -> str:
        return "".join(x.read_text(errors="replace") for x in (self.state / "log").iterdir())

    def counted(self) -> dict[str, int]:
        lock = FileLock(self.folder / "node-lock")
        return Counters(self.folder / "counters", lock).statistics()

    def statistics(self) -> dict[str, int]:
        with closing(SharedMemory(self.folder, create=False)) as table:
            return dict(table.statistics())

    def workers(self) -> list[psutil.Process]:
        assert self.served is not None
        return self.served.masters("uwsgi").children()

    def database(self, query: str, value: str) -> object:
        with closing(sqlite3.connect(self.state / "keystone.sqlite", timeout=SECONDS)) as found:
            return found.execute(query, (value,)).fetchone()[0]

    def stop(self) -> None:
        self.served = None
        self._stack.close()

    def _start(self) -> None:
        if self.served is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.served = self._stack.enter_context(
                serve_as_is(self.state, "uwsgi", environment=self.environment)
            )
        if self.world is None:
            self.world = World(self.served.url, self.served.password)
            self.subjects += [self._name(self.world), self._flag(self.world)]

    def _name(self, world: World) -> Subject:
        person = world.person()
        query = "SELECT name FROM local_user WHERE user_id = ?"
        return Subject(
            person.token, f"/users/{person.user.id}",
            lambda value: {"user": {"name": value}},
            lambda answer: answer.token().get("user", {}).get("name", answer),
            lambda: self.database(query, person.user.id),
            (random_name() for _ in count()), {person.user.name},
        )

    def _flag(self, world: World) -> Subject:
        project = world.project()
        query = "SELECT enabled FROM project WHERE id = ?"
        return Subject(
            world.person(project=project).token, f"/projects/{project}",
            lambda value: {"project": {"enabled": value == "enabled"}},
            lambda answer: {200: "enabled", 404: "disabled"}.get(answer.status, answer),
            lambda: "enabled" if self.database(query, project) else "disabled",
            ("enabled" if number % 2 else "disabled" for number in count()), {"enabled"},
        )


def _house(folder: Path, *, slow: bool) -> House:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("keyfront serve starts one worker per core, and there is one core")
    shared = folder / "shared"
    state = keystone_state(
        folder / "state",
        # The cheapest that bcrypt takes: passwords are not what is tested.
        extra="[identity]\npassword_hash_rounds = 4\n"
        f"[keyfront_token_cache]\npath = {shared}\nttl = 3000\n",
    )
    environment = {}
    if slow:
        (folder / "slow_commit.py").write_text(SLOW_COMMIT)
        (folder / "pipeline.ini").write_text(PIPELINE)
        environment["KEYFRONT_APP"] = f"config:{folder / 'pipeline.ini'}"
        environment["PYTHONPATH"] = str(folder)
    return House(state, shared, environment)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = _house(tmp_path_factory.mktemp("faults"), slow=False)
    try:
        yield house
    finally:
        house.stop()


def _settle(house: House, watch: Watch) -> None:
    """Wait until no mark is left: somebody's who died is completed when it is over its time."""
    deadline = time.monotonic() + MARK_SECONDS + SECONDS
    while house.statistics()["changes_under_way"]:
        assert time.monotonic() < deadline, "a mark stays"
        time.sleep(0.1)
    for subject in watch.subjects:
        watch.agrees(subject)


# Killed workers


@pytest.mark.slow
def test_killed_workers(tmp_path: Path) -> None:
    house = _house(tmp_path, slow=True)
    try:
        with house.watch() as watch:
            kills = _kill_often(house, watch)
            _settle(house, watch)
            for subject in watch.subjects:
                watch.confirm(subject)
                watch.agrees(subject)
            before = house.counted()
            for subject in watch.subjects:
                watch.agrees(subject)
            after = house.counted()
            statistics = house.statistics()
        print(f"{kills} killed; {statistics}")
        assert after["hits"] > before["hits"]
        # Only what a killed worker was about to answer was lost.
        assert watch.lost <= READERS * kills
        assert watch.confirmed > 0
        assert watch.unconfirmed > 0
    finally:
        house.stop()


def _kill_often(house: House, watch: Watch) -> int:
    killed = 0
    # Until one was killed in a change: by chance ten may all be killed beside theirs.
    while killed < KILLS or (not watch.unconfirmed and killed < 20 * KILLS):
        subject = random.choice(watch.subjects)
        changing = threading.Thread(target=watch.change, args=(subject,))
        changing.start()
        time.sleep(random.uniform(0, 0.3))
        workers = house.workers()
        for worker in workers if random.random() < 0.5 else workers[:1]:
            kill(worker)
            killed += 1
        changing.join(SECONDS)
        assert not changing.is_alive(), "a change hangs"
        if random.random() < 0.5:
            watch.confirm(subject)
    return killed


# Damaged files


def _delete(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def _replace(path: Path) -> None:
    new = path.with_name("junk")
    new.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    new.chmod(0o600)
    new.replace(path)


def _fill(byte: bytes) -> Callable[[Path], None]:
    def fill(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(byte * path.stat().st_size)

    return fill


def _scramble(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(path.stat().st_size))


def _remove_folder(path: Path) -> None:
    remove(path.parent)


_FAULTS: dict[str, Callable[[Path], None]] = {
    "deleted": _delete,
    "emptied": _empty,
    "cut off": _cut_off,
    "replaced by junk": _replace,
    "overwritten with junk": _scramble,
    "overwritten with zeros": _fill(b"\0"),
    "overwritten with ones": _fill(b"\xff"),
}
# A worker that touches what is no longer in the file ends by SIGBUS.
_DEADLY = ("emptied", "cut off")
_STORES = ("answers", "refusals", "values", "counters")
_LOCKS = ("lock", "node-lock")
_CASES = [
    *((NAME, fault) for fault in _FAULTS),
    *((name, fault) for name in _STORES for fault in _FAULTS if fault != "replaced by junk"),
    *((name, "deleted") for name in _LOCKS),
]
# The quick form takes the telling ones of the mapped files; with more kills by environment, all.
_QUICK_CASES = [
    *((NAME, fault) for fault in ("deleted", "cut off", "overwritten with zeros")),
    *(("answers", fault) for fault in ("emptied", "overwritten with ones")),
    *(("values", fault) for fault in ("cut off", "overwritten with zeros")),
    *(("counters", fault) for fault in ("cut off", "overwritten with ones")),
    ("lock", "deleted"),
]
if KILLS <= 10:
    _CASES = _QUICK_CASES
# What the log says of it; nothing is said where nothing is lost but speed.
_LINES = {
    (NAME, "deleted"): r"made a new epoch table",
    (NAME, "emptied"): rf"{NAME}: refused, it is empty",
    (NAME, "cut off"): rf"{NAME}: refused, it is too short",
    (NAME, "replaced by junk"): rf"{NAME}: refused, it is no epoch table",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), _CASES)
def test_damaged_file(house: House, name: str, fault: str) -> None:
    with house.watch() as watch:
        watch.go_on()  # all workers have looked for the files a moment ago
        logged = len(house.logged())
        ring = [path for path in rings(house.folder) if path.name.startswith(f"{name}-")]
        _FAULTS[fault](ring[0] if ring else house.folder / name)
        _change_beside_readers(watch)
        if name != "counters":
            # Of a table that was made anew nothing is kept before the database was asked.
            wait_for(lambda: _hits(house, watch), "something is answered from the cache again")
    if fault not in _DEADLY:
        assert watch.lost == 0
        assert watch.unconfirmed == 0
    assert re.search(_LINES.get((name, fault), ""), house.logged()[logged:])


@pytest.mark.slow
def test_folder_removed(house: House) -> None:
    """Then whoever needs it first makes it anew."""
    with house.watch() as watch:
        watch.go_on()
        logged = len(house.logged())
        remove(house.folder)
        _change_beside_readers(watch)
    house.stop()
    assert watch.lost == 0
    assert watch.unconfirmed == 0
    assert "made a new epoch table" in house.logged()[logged:]


def test_folder_removed_beside_another_process(tmp_path: Path) -> None:
    """Who has just looked for the table trusts it for a lease: no change may be over before."""
    folder = tmp_path / "shared"
    reader, writer = SharedMemory(folder), SharedMemory(folder)
    tags = {"all"}
    reader.touch(slots(tags, reader.slot_count))  # returns when the new table has settled
    epoch, found = reader.now(), slots(tags, reader.slot_count)
    assert reader.fresh(epoch, found)
    coordinators.set(folder, writer)
    changes = Changes(lambda: folder)
    try:
        shutil.rmtree(folder)
        try:
            changes.end(changes.begin(tags), tags)
        except CoordinatorError:
            return  # refused
        assert not reader.fresh(epoch, found)
    finally:
        coordinators.forget(folder)
        reader.close()


def _change_beside_readers(watch: Watch) -> None:
    # At once, and when whoever trusted what was there has looked again.
    for pause in (0.0, 0.0, 0.0, 0.7, 0.0):
        time.sleep(pause)
        for subject in watch.subjects:
            watch.confirm(subject)
    for subject in watch.subjects:
        watch.agrees(subject)


def _hits(house: House, watch: Watch) -> int:
    before = house.counted()["hits"]
    for subject in watch.subjects:
        watch.agrees(subject)
    return house.counted()["hits"] - before


# Changes that cannot be told


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """As by a process that is stopped."""
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
def test_change_that_cannot_be_told_is_refused(house: House) -> None:
    with house.watch() as watch:
        watch.go_on()
        logged = len(house.logged())
        before = [subject.stored() for subject in watch.subjects]
        with _held(house.folder / "lock"):
            judged = watch.judged
            answers = [watch.change(subject) for subject in watch.subjects]
            # Reads went on meanwhile.
            assert watch.judged - judged > 20
        assert [answer and answer.status for answer in answers] == [503, 503], watch.reasons
        for answer in answers:
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.body["error"]["code"] == 503
        assert [subject.stored() for subject in watch.subjects] == before
        for subject in watch.subjects:
            watch.agrees(subject)
            assert watch.change(subject).status == 200
            watch.agrees(subject)
    assert watch.lost == 0
    assert "a change was refused: " in house.logged()[logged:]
    assert f"not free within {LOCK_SECONDS:g} s" in house.logged()[logged:]


@pytest.mark.slow
def test_change_waits_for_a_lock_that_is_let_go(house: House) -> None:
    with house.watch(readers=1) as watch:
        subject = watch.subjects[0]
        with ThreadedChange(watch, subject) as changing, _held(house.folder / "lock"):
            begun, judged = time.monotonic(), watch.judged
            changing.start()
            # Reads go on meanwhile; but it waits for the lock no longer than LOCK_SECONDS.
            enough = begun + LOCK_SECONDS / 5
            wait_for(lambda: watch.judged > judged and time.monotonic() > enough, "it waits")
            assert watch.confirmed == len(watch.subjects)
        assert watch.confirmed == len(watch.subjects) + 1
        watch.agrees(subject)


class ThreadedChange(threading.Thread):
    """A change beside the test; at the end of the block it is made."""

    def __init__(self, watch: Watch, subject: Subject) -> None:
        super().__init__(target=watch.change, args=(subject,))

    def __enter__(self) -> ThreadedChange:
        return self

    def __exit__(self, *_: object) -> None:
        self.join(SECONDS)


@pytest.mark.slow
def test_reads_without_the_lock_of_the_node(house: House) -> None:
    """What is not kept yet is asked of Keystone."""
    with house.watch(readers=1) as watch:
        fresh = watch.world.person().token
        with _held(house.folder / "node-lock"):
            headers = {"X-Auth-Token": watch.world.admin, "X-Subject-Token": fresh}
            answer = watch._send("GET", VALIDATE, headers)
        assert answer is not None
        assert answer.status == 200
    assert watch.lost == 0

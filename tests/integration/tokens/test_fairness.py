"""Nobody lowers another's hits, and of several who ask the same at once one asks Keystone.

By the counters that the workers share. What cannot change an answer must not touch the epochs at
all: anybody who reaches Keystone's port can send it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from keyfront.common.file_lock import FileLock
from keyfront.middleware.tokens.coordinator.local import SharedMemory
from keyfront.middleware.tokens.counters import NAMES, Counters
from support import servers
from support.keystone_world import VALIDATE, Answer, Client, Person, World, grant
from support.keystones import keystone_state, serve_as_is
from support.served import Served, answered, stats, wait_for

pytest.importorskip("keystone")

# Of the user who does much, and of the other, who only wants to be validated.
TURNS = int(os.environ.get("KEYFRONT_FAIRNESS_TURNS", "16"))
VALIDATIONS = 120
# Longer than any wait but one that lasts it out.
FLIGHT_TIMEOUT = 60.0
# Workers and threads of each, as keyfront serve starts them on two cores.
AT_ONCE = 4

# Keystone takes as long as the test says: it notes who asks it, and waits while a file is there.
SLOW = """\
import os, time
from pathlib import Path

def factory(global_conf, folder):
    folder = Path(folder)

    def filter(application):
        def slow(environ, start_response):
            if environ["REQUEST_METHOD"] == "GET" and (folder / "hold").exists():
                with (folder / "asked").open("a") as asked:
                    asked.write(f"{os.getpid()}\\n")
                while (folder / "hold").exists():
                    time.sleep(0.01)
            return application(environ, start_response)

        return slow

    return filter
"""
PIPELINE = """\
[pipeline:main]
pipeline = token_cache slow keystone
[filter:token_cache]
use = egg:keyfront#token_cache
[filter:slow]
paste.filter_factory = slow_keystone:factory
folder = {folder}
[app:keystone]
use = egg:keyfront#keystone
"""
CONFIGURATION = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
[security_compliance]
# So that each failed login is written down, and never locks anybody out.
lockout_failure_attempts = 1000000
[keyfront_token_cache]
path = {shared}
ttl = 3000
negative_ttl = 3000
flight_timeout = {flight_timeout}
"""


@dataclass
class Fair:
    """A running Keystone, and what its workers count."""

    served: Served
    world: World
    folder: Path
    shared: Path

    def counted(self) -> Counter[str]:
        lock = FileLock(self.shared / "node-lock")
        counts = Counters(self.shared / "counters", lock).statistics()
        return Counter({name: counts[name] for name in NAMES})

    def changes(self) -> int:
        with closing(SharedMemory(self.shared, create=False)) as table:
            return table.statistics()["changes"]

    def send(
        self, method: str, path: str, headers: dict[str, str], body: object = None
    ) -> Answer:
        client = Client(self.served.url)
        try:
            return client.request(method, path, headers, body)
        finally:
            client.close()

    def validate(self, token: str) -> Answer:
        return self.send(
            "GET", VALIDATE, {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
        )

    @contextmanager
    def held(self) -> Iterator[Path]:
        """Keystone does not answer; yields the file with a line for each request that it got."""
        hold, asked = self.folder / "hold", self.folder / "asked"
        asked.write_text("")
        hold.touch()
        try:
            yield asked
        finally:
            hold.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fair]:
    with _fair(tmp_path_factory.mktemp("fairness")) as made:
        yield made


@contextmanager
def _fair(folder: Path, more: str = "", memcached: str | None = None) -> Iterator[Fair]:
    """Run a Keystone.

    :param more: lines of ``[keyfront_token_cache]``
    :param memcached: what it caches in, if anything
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("keyfront serve starts one worker per core, and there is one core")
    shared = folder / "shared"
    extra = CONFIGURATION.format(shared=shared, flight_timeout=FLIGHT_TIMEOUT) + more
    state = keystone_state(folder / "state", memcached=memcached, extra=extra)
    (folder / "slow_keystone.py").write_text(SLOW)
    (folder / "pipeline.ini").write_text(PIPELINE.format(folder=folder))
    environment = {
        "KEYFRONT_APP": f"config:{folder / 'pipeline.ini'}", "PYTHONPATH": str(folder),
    }
    with serve_as_is(state, "uwsgi", environment=environment) as served:
        world = World(served.url, served.password)
        world.wait_until_kept()
        yield Fair(served, world, folder, shared)


def _hits_beside(fair: Fair, activity: Callable[[], object]) -> float:
    """The share of hits among another user's validations while something goes on."""
    token = fair.world.person().token
    for _ in range(20):  # until all workers have it
        assert fair.validate(token).status == 200
    before, ended, validations = fair.counted(), threading.Event(), 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(activity)
        future.add_done_callback(lambda _: ended.set())
        while not ended.is_set() or validations < VALIDATIONS:
            assert fair.validate(token).status == 200
            validations += 1
            time.sleep(0.005)
        future.result()
    counted = fair.counted() - before
    hits = counted["hits"] + counted["node_hits"]
    print(f"{validations} validations; {dict(counted)}")
    # An activity asks by GET only where it says so by what it returns.
    asked = future.result() or 0
    assert hits + counted["misses"] + counted["bypassed"] == validations + asked
    return hits / validations


# Who asks for what passes for something else


@pytest.mark.slow
def test_who_lists_assignments_keeps_nobody_out(fair: Fair) -> None:
    """Who may list them may filter by a role, user or group that is called None."""
    world = fair.world
    domain, person = world.domain(), world.person()
    reader = world.user(domain)
    world.call("PUT", grant("domains", domain, "users", reader.id, world.own_role["reader"]))
    headers = {"X-Auth-Token": world.issue(reader, domain=domain)}
    # A change, so that nothing of him is kept.
    world.call("PUT", grant("system", "", "users", person.user.id, world.still_role))
    of_whom = f"user.id={person.user.id}&scope.project.id={person.project}&effective"
    for asked in (f"{of_whom}&role.id=None", "user.id=None"):
        path = f"/role_assignments?{asked}"
        found = [fair.send("GET", path, one) for one in (headers, {"X-Auth-Token": world.admin})]
        assert [(x.status, x.body["role_assignments"]) for x in found] == [(200, [])] * 2
    assert world.issue(person.user, project=person.project)
    assert fair.validate(person.token).status == 200
    assert world.call("GET", "/role_assignments").body["role_assignments"]


# Who changes what is his own


@pytest.mark.slow
def test_user_who_revokes_his_own_tokens(fair: Fair) -> None:
    person = fair.world.person()

    def revoke_often() -> None:
        for _ in range(TURNS):
            token = fair.world.issue(person.user, project=person.project)
            fair.world.revoke(token, by=token)

    before = fair.changes()
    assert _hits_beside(fair, revoke_often) > 0.97
    assert fair.changes() - before >= TURNS


@pytest.mark.slow
def test_user_who_changes_his_own_password(fair: Fair) -> None:
    person = fair.world.person()

    def change_often() -> None:
        password = person.user.password
        for _ in range(TURNS // 4):
            new = uuid.uuid4().hex
            body = {"user": {"original_password": password, "password": new}}
            path = f"/users/{person.user.id}/password"
            fair.world.send("POST", path, {}, body)
            password = new

    assert _hits_beside(fair, change_often) > 0.97


# Who changes what is his own, with what Keystone keeps in memcached


@pytest.fixture(scope="module")
def cached(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Fair, servers.Memcached]]:
    with ExitStack() as stack:
        memcached = stack.enter_context(servers.memcached())
        folder = tmp_path_factory.mktemp("memcached")
        yield stack.enter_context(_fair(folder, memcached=memcached.address)), memcached


def _application_credential(world: World, person: Person) -> None:
    made = world.credential(person)
    path = f"/users/{person.user.id}/application_credentials/{made['id']}"
    world.call("DELETE", path, token=person.token)


def _trust(world: World, person: Person) -> None:
    made = world.trust(person, world.bystander.user, [world.still_role])
    world.call("DELETE", f"/OS-TRUST/trusts/{made}", token=person.token)


def _password(world: World, person: Person) -> None:
    """There and back: the token goes with the password, so he has no other use of it."""
    path, old, new = f"/users/{person.user.id}/password", person.user.password, uuid.uuid4().hex
    for now, then in ((old, new), (new, old)):
        body = {"user": {"original_password": now, "password": then}}
        world.send("POST", path, {}, body)


def _revocation(world: World, person: Person) -> None:
    token = world.issue(person.user, project=person.project)
    world.revoke(token, by=token)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [_application_credential, _trust, _password, _revocation]
)
def test_who_changes_his_own_empties_memcached_for_nobody(
    cached: tuple[Fair, servers.Memcached], change: Callable[[World, Person], None]
) -> None:
    """What another's validation and login need is found there after each change."""
    fair, memcached = cached
    world = fair.world
    person, other = world.person(), world.person()
    # Which the filter leaves to Keystone.
    headers = {
        "X-Auth-Token": world.admin, "X-Subject-Token": other.token, "Authorization": "none",
    }

    def ask() -> Counter[str]:
        """What Keystone looked up, found and stored for a validation and a login."""
        before = Counter({name: int(value) for name, value in memcached.stats().items()
                          if name in ("cmd_set", "get_hits", "get_misses")})
        assert fair.send("GET", VALIDATE, headers).status == 200
        world.issue(other.user, project=other.project)
        after = memcached.stats()
        return Counter({name: int(after[name]) - count for name, count in before.items()})

    change(world, person)
    for _ in range(6):
        usual = ask()
    counted: Counter[str] = Counter()
    for _ in range(TURNS):
        change(world, person)
        counted += ask()
    print(f"{change.__name__}: usually {dict(usual)}; {TURNS} times beside it {dict(counted)}")
    share = counted["get_hits"] / (counted["get_hits"] + counted["get_misses"])
    assert usual["get_hits"] > 4
    assert share > 0.8 * usual["get_hits"] / (usual["get_hits"] + usual["get_misses"])
    # What was found was believed as well: next to nothing is made anew but the login's own.
    assert counted["cmd_set"] <= 1.3 * TURNS * max(usual["cmd_set"], 1)


# Who asks for his own as he likes, and what the workers share

# More than fits into what the workers share of answers.
_OFTEN = 90


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fair]:
    """A Keystone whose workers share little, with a catalog that takes much of it."""
    more = "node_memory = 1\nroutes = /v3/auth/projects, /v3/auth/catalog\n"
    with _fair(tmp_path_factory.mktemp("small"), more) as made:
        service = made.world.make("service", "/services", name="large", type="large")
        for number in range(24):
            made.world.make(
                "endpoint", "/endpoints", service_id=service, interface="public",
                url=f"http://127.0.0.1/{number:0200}", region_id="RegionOne",
            )
        yield made


def _asks(path: str, **headers: str) -> Callable[[Fair, Person], None]:
    """Somebody asks about himself, each time otherwise."""

    def ask(fair: Fair, person: Person) -> None:
        for number in range(_OFTEN):
            sent = {name: value.format(number) for name, value in headers.items()}
            own = {"X-Auth-Token": person.token, "X-Subject-Token": person.token, **sent}
            assert fair.send("GET", path.format(number), own).status == 200

    return ask


def _logs_in(fair: Fair, person: Person) -> None:
    """Tokens that nobody validates."""
    for _ in range(_OFTEN):
        fair.world.rescope(person.token, person.project)


FLOODS = {
    "lists": _asks("/auth/catalog?name={}"),
    "queries": _asks(f"{VALIDATE}?name={{}}"),
    "values of a query": _asks(f"{VALIDATE}?allow_expired={{}}"),
    "headers": _asks(VALIDATE, **{"X-Mine": "{}"}),
    "headers that are known": _asks(VALIDATE, **{"Accept-Language": "en;q=0.{}"}),
    "logins": _logs_in,
}


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
def test_who_asks_in_many_ways_pushes_out_no_answer_of_others(small: Fair, flood: str) -> None:
    """Workers that begin anew find what was answered by those before them."""
    token, person = _unknown_token(small), small.world.person()
    assert small.validate(token).status == 200
    FLOODS[flood](small, person)
    pids = {x["pid"] for x in _workers(small)}
    for process in small.served.processes():
        if process.pid in pids:
            process.kill()
    wait_for(lambda: not pids & {x["pid"] for x in _workers(small)}, "there are other workers")
    before = small.counted()
    assert small.validate(token).status == 200
    assert (small.counted() - before) == {"node_hits": 1}


def _workers(fair: Fair) -> list[dict[str, object]]:
    found = stats(fair.served.state / "run" / "stats.sock")["workers"]
    assert isinstance(found, list)
    return found


# Floods


def _junk(fair: Fair, person: Person) -> int:
    """Tokens that are none, as the subject and as the caller."""
    for _ in range(TURNS):
        assert fair.validate(uuid.uuid4().hex).status == 404
        junk = {"X-Auth-Token": uuid.uuid4().hex, "X-Subject-Token": person.token}
        assert fair.send("GET", VALIDATE, junk).status == 401
    return 2 * TURNS


def _unauthorised(fair: Fair, person: Person) -> None:
    """Changes that this user may not make."""
    own, admin = {"X-Auth-Token": person.token}, fair.world.own_role["admin"]
    disabled = {"project": {"enabled": False}}
    path = grant("projects", person.project, "users", person.user.id, admin)
    for _ in range(TURNS // 4):
        for method, where, body in (
            ("PATCH", f"/projects/{person.project}", disabled),
            ("DELETE", f"/users/{person.user.id}", None),
            ("PUT", path, None),
            ("POST", "/services", {"service": {"name": "x", "type": "x"}}),
        ):
            assert fair.send(method, where, own, body).status == 403
        victim = {**own, "X-Subject-Token": fair.world.bystander.token}
        assert fair.send("DELETE", VALIDATE, victim).status == 403


def _failing_logins(fair: Fair, person: Person) -> None:
    """Wrong passwords of somebody who exists, and of nobody."""
    for _ in range(TURNS // 2):
        for user in (person.user.id, uuid.uuid4().hex):
            password = {"user": {"id": user, "password": "wrong"}}
            body = {"auth": {"identity": {"methods": ["password"], "password": password}}}
            assert fair.send("POST", VALIDATE, {}, body).status == 401


@pytest.mark.slow
@pytest.mark.parametrize("flood", [_junk, _unauthorised, _failing_logins])
def test_flood_touches_nothing(fair: Fair, flood: Callable[[Fair, Person], int | None]) -> None:
    person = fair.world.person()
    # What the flood and the validations need is made before.
    assert fair.world.bystander.token and fair.world.own_role
    other = fair.world.person()
    before = -1

    def begin() -> int | None:
        nonlocal before
        before = fair.changes()
        return flood(fair, person)

    assert _hits_beside(fair, begin) > 0.97
    assert fair.changes() == before
    assert fair.validate(other.token).status == 200


# Several who ask the same at once


def _all_wait(fair: Fair, waits: int, asked: Path) -> None:
    wait_for(lambda: fair.counted()["waits"] >= waits, "the others wait")
    assert len(asked.read_text().split()) == 1


def _unknown_token(fair: Fair) -> str:
    """A token of which nothing stands that was known from its issue."""
    person = fair.world.person()
    fair.world.patch("user", f"/users/{person.user.id}", description="changed")
    return person.token


@pytest.mark.slow
def test_keystone_is_asked_once(fair: Fair) -> None:
    token = _unknown_token(fair)
    before = fair.counted()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with fair.held() as asked:
            futures = [pool.submit(fair.validate, token) for _ in range(AT_ONCE)]
            _all_wait(fair, before["waits"] + AT_ONCE - 1, asked)
        bodies = {str(future.result().token()) for future in futures}
        assert {future.result().status for future in futures} == {200}
    assert len(bodies) == 1
    counted = fair.counted() - before
    assert counted == {"misses": 1, "waits": AT_ONCE - 1, "node_hits": AT_ONCE - 1}
    assert len([x for x in answered(fair.served).values() if x]) == 2


@pytest.mark.slow
def test_keystone_is_asked_once_about_what_is_refused(fair: Fair) -> None:
    junk = uuid.uuid4().hex
    before = fair.counted()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with fair.held() as asked:
            futures = [pool.submit(fair.validate, junk) for _ in range(AT_ONCE)]
            _all_wait(fair, before["waits"] + AT_ONCE - 1, asked)
        assert {future.result().status for future in futures} == {404}
    assert (fair.counted() - before)["misses"] == 1


@pytest.mark.slow
def test_who_asks_is_killed(fair: Fair) -> None:
    """The others see that it is gone, and ask themselves."""
    token = _unknown_token(fair)
    before = fair.counted()["waits"]

    def validate() -> tuple[int, float]:
        try:
            status = fair.validate(token).status
        except (OSError, HTTPException):
            status = 0
        return status, time.monotonic()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        with fair.held() as asked:
            begun = time.monotonic()
            futures = [pool.submit(validate) for _ in range(AT_ONCE)]
            _all_wait(fair, before + AT_ONCE - 1, asked)
            psutil.Process(int(asked.read_text())).kill()
        results = [future.result() for future in futures]
    # The one who was killed, and whoever waited in the same process, got no answer.
    answered = [end - begun for status, end in results if status == 200]
    assert len(answered) == AT_ONCE // 2, results
    assert {status for status, _ in results} == {0, 200}
    print(f"answered after {max(answered):.1f} s")
    assert max(answered) < FLIGHT_TIMEOUT
    # The worker is back.
    for _ in range(8):
        assert fair.validate(token).status == 200

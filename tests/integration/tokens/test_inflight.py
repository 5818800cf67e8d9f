"""What a request brings into Keystone's own cache is named by what there was when it began.

A request is held in the middle, something that it has read is changed, and then it goes on and
stores what it made of the old state. Nobody may be given that. Two workers, on memcached or with
what Keystone caches in their own memory.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest

from keyfront.middleware.tokens.node_cache import statistics
from support import APPS, servers
from support.apps.held_filter import Holds
from support.keystone_world import VALIDATE, Answer, Client, World, grant, random_name
from support.keystones import keystone_state, serve_as_is
from support.served import PATIENCE, wait_for

pytest.importorskip("keystone")

PASTE = """\
[pipeline:main]
pipeline = token_cache held keystone

[filter:token_cache]
use = egg:keyfront#token_cache

[filter:held]
paste.filter_factory = held_filter:filter_factory
folder = {folder}

[app:keystone]
use = egg:keyfront#keystone
"""
EXTRA = """\
[identity]
# The cheapest that bcrypt takes: passwords are not what is tested.
password_hash_rounds = 4
"""


class Homes(NamedTuple):
    """Projects and a domain on which each user has what he is granted himself, and no other."""

    own: str
    domain: str
    above: str
    below: str


@dataclass
class Place:
    """A served Keystone, its administrator, and where its requests are held."""

    world: World
    holds: Holds

    @cached_property
    def homes(self) -> Homes:
        domain = self.world.domain()
        above = self.world.project(domain)
        return Homes(self.world.project(), domain, above, self.world.project(domain, above))

    @contextmanager
    def held(self, point: str, request: Callable[[], Any]) -> Iterator[Future[Any]]:
        """Let ``request`` run up to a point; it goes on when the block ends, and is waited for."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(request())
            except BaseException as error:
                result.set_exception(error)

        self.holds.arm(point)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: self.holds.arrived(point) or result.done(), f"{point} was reached")
            assert self.holds.arrived(point), result.exception() or result.result()
            yield result
        finally:
            self.holds.release(point)
            thread.join(PATIENCE)

    def status(self, token: str) -> set[int]:
        """What several connections are told of a token: they reach both workers."""
        headers = {"X-Auth-Token": self.world.admin, "X-Subject-Token": token}
        return {self.ask(headers).status for _ in range(6)}

    def ask(self, headers: dict[str, str]) -> Answer:
        """What one connection is answered."""
        client = Client(self.world.base_url)
        try:
            return client.request("GET", VALIDATE, headers)
        finally:
            client.close()


@pytest.fixture(scope="module", params=["memcached", "memory"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("inflight")
    holds = folder / "holds"
    holds.mkdir()
    paste = folder / "keystone.ini"
    paste.write_text(PASTE.format(folder=holds))
    with ExitStack() as stack:
        cache = None
        if request.param == "memcached":
            cache = stack.enter_context(servers.memcached())
        address = cache.address if cache else None
        shared = folder / "shared"
        extra = f"{EXTRA}[keyfront_token_cache]\npath = {shared}\n"
        state = keystone_state(folder / "state", memcached=address, extra=extra)
        environment = {
            "KEYFRONT_APP": f"config:{paste}",
            "PYTHONPATH": str(APPS),
        }
        served = stack.enter_context(serve_as_is(state, "uwsgi", environment=environment))
        yield Place(World(served.url, served.password), Holds(holds))
        counts = statistics(shared)
        assert counts["issued"] > 10, counts
        assert counts["known"] > 10, counts
        assert not cache or int(cache.stats()["get_hits"]) > 0, "Keystone did not use its cache"


@pytest.mark.parametrize("point", ["login", "answer"])
@pytest.mark.parametrize("disabled", ["project", "domain of the project", "domain of the user"])
def test_a_token_does_not_outlive_what_was_disabled_during_its_login(
    place: Place, disabled: str, point: str
) -> None:
    """Before anything is made of what was read, and when all is made and nothing is kept yet."""
    world = place.world
    place.status(world.bystander.token)  # the administrator is known, as a service is
    homes = {"project": world.domain(), "user": world.domain()}
    project = world.project(homes["project"])
    person = world.person(domain=homes["user"], project=project)
    path = {
        "project": f"/projects/{project}",
        "domain of the project": f"/domains/{homes['project']}",
        "domain of the user": f"/domains/{homes['user']}",
    }[disabled]
    kind = path.split("/")[1].removesuffix("s")
    with place.held(point, lambda: world.issue(person.user, project=project)) as login:
        world.flag(kind, path, False)
    token = login.result()
    # The login may have been let through: it began before the change. Its token may not.
    assert place.status(token) == {404}
    world.flag(kind, path, True)
    assert 404 not in place.status(world.issue(person.user, project=project))


def test_a_name_that_was_given_away_during_a_login_is_the_others(place: Place) -> None:
    """Whose it was the login has found by name, and its worker has kept."""
    world = place.world
    password, name = uuid.uuid4().hex, random_name()
    one, other = (
        world.make("user", "/users", name=mine, password=password, domain_id="default")
        for mine in (name, random_name())
    )
    who = {"name": name, "domain": {"id": "default"}, "password": password}
    body = {"auth": {"identity": {"methods": ["password"], "password": {"user": who}}}}

    def log_in() -> str:
        client = Client(world.base_url)
        try:
            user: str = client.request("POST", VALIDATE, {}, body).token()["user"]["id"]
            return user
        finally:
            client.close()

    with place.held("login", log_in) as login:
        world.patch("user", f"/users/{one}", name=random_name())
        world.patch("user", f"/users/{other}", name=name)
    assert login.result() == one
    assert {log_in() for _ in range(6)} == {other}


GRANTED = [
    "on another project", "on a domain", "by a group", "inherited", "implied", "into a group",
    "out of a group",
]  # fmt: skip


@pytest.mark.parametrize("granted", GRANTED)
@pytest.mark.parametrize(
    ("how", "point"), [("login", "answer"), ("login", "groups"), ("re-scope", "groups")]
)
def test_what_a_login_read_of_groups_and_grants_is_not_for_the_next(
    place: Place, how: str, point: str, granted: str
) -> None:
    """What somebody is granted anywhere is read at once, by a login to one project; then some of it
    is changed that another project or domain shows, before the login is over. Or it is to that
    itself, and nothing is made yet of what was read."""
    world = place.world
    own, domain, above, other = place.homes
    # One that implies another does so for all who have it.
    role = world.role() if granted == "implied" else world.still_role
    more = world.second_role
    person = world.person(project=own)
    user = person.user
    # What the other shows without the change, so that a login is let in there anyhow.
    target = domain if granted == "on a domain" else other
    kind = "domains" if granted == "on a domain" else "projects"
    world.call("PUT", grant(kind, target, "users", user.id, role))
    group = ""
    if "group" in granted:
        group = world.group(*([] if granted == "into a group" else [user]))
    if granted in ("into a group", "out of a group"):
        world.call("PUT", grant("projects", other, "groups", group, more))
    method, path = {
        "on another project": ("PUT", grant("projects", other, "users", user.id, more)),
        "on a domain": ("PUT", grant("domains", domain, "users", user.id, more)),
        "by a group": ("PUT", grant("projects", other, "groups", group, more)),
        "inherited": ("PUT", grant("projects+", above, "users", user.id, more)),
        "implied": ("PUT", f"/roles/{role}/implies/{more}"),
        "into a group": ("PUT", f"/groups/{group}/users/{user.id}"),
        "out of a group": ("DELETE", f"/groups/{group}/users/{user.id}"),
    }[granted]
    # What was read for the person's first token ends here, and the login reads it anew.
    world.call("PUT", grant("projects", person.project, "users", user.id, more))
    world.call("DELETE", grant("projects", person.project, "users", user.id, more))
    world.patch("user", f"/users/{user.id}", name=random_name())
    token = world.issue(user)

    who = {"id": user.id, "password": user.password}
    by_password = {"methods": ["password"], "password": {"user": who}}
    by_token = {"methods": ["token"], "token": {"id": token}}
    there = {kind.removesuffix("s"): {"id": target}}
    here = {"project": {"id": person.project}}

    def log_in(identity: object, scope: object) -> set[str]:
        answer = world.send("POST", VALIDATE, {}, {"auth": {"identity": identity, "scope": scope}})
        return {one["id"] for one in answer.token()["roles"]}

    identity = by_token if how == "re-scope" else by_password
    scope = there if point == "groups" else here
    with place.held(point, lambda: log_in(identity, scope)):
        world.call(method, path)
    wanted = {role} if method == "DELETE" else {role, more}
    # Not their tokens: these may be of the second in which those of before were revoked.
    assert [log_in(by_password, there) for _ in range(6)] == [wanted] * 6


@pytest.mark.parametrize("changed", ["revoked", "user disabled", "role taken", "renamed"])
@pytest.mark.parametrize("when", ["during the first validation", "before it", "during the login"])
def test_a_change_is_seen_by_first_validations(place: Place, changed: str, when: str) -> None:
    """Each is asked over several connections, of both workers."""
    world = place.world
    person = world.person(world.still_role, world.second_role)
    place.status(world.bystander.token)

    def change(token: str) -> None:
        if changed == "revoked":
            world.revoke(token)
        elif changed == "user disabled":
            world.flag("user", f"/users/{person.user.id}", False)
        elif changed == "role taken":
            role = world.second_role
            world.call(
                "DELETE", grant("projects", person.project, "users", person.user.id, role)
            )
        else:
            world.patch("user", f"/users/{person.user.id}", name=f"{person.user.name}-new")

    if when == "during the login":
        if changed == "revoked":
            pytest.skip("there is no token yet")
        log_in = partial(world.issue, person.user, project=person.project)
        with place.held("answer", log_in) as login:
            change("")
        token = login.result()
    else:
        token = world.issue(person.user, project=person.project)
        if when == "before it":
            change(token)
        else:
            # By somebody whom nobody knows, so that Keystone is asked.
            service = world.person(world.own_role["service"]).token
            headers = {"X-Auth-Token": service, "X-Subject-Token": token}
            validation = partial(place.ask, headers)
            with place.held("answer", validation):
                change(token)
    for _ in range(6):
        answer = place.ask({"X-Auth-Token": world.admin, "X-Subject-Token": token})
        if changed == "renamed":
            assert answer.token()["user"]["name"] == f"{person.user.name}-new"
        elif changed == "role taken":
            roles = {role["id"] for role in answer.token()["roles"]}
            assert roles == {world.still_role}
        else:
            assert answer.status == 404


def test_of_two_changes_the_second_is_seen(place: Place) -> None:
    """The first one stores what it wrote after the second one has committed."""
    world = place.world
    user = world.user()
    made = world.make(
        "credential", "/credentials", blob="zero", type="test", user_id=user.id
    )
    path = f"/credentials/{made}"
    with place.held("credential", lambda: world.patch("credential", path, blob="first")):
        assert world.patch("credential", path, blob="second").status == 200
    seen = {world.call("GET", path).body["credential"]["blob"] for _ in range(6)}
    assert seen == {"second"}


def test_a_new_project_that_was_renamed_has_its_new_name(place: Place) -> None:
    """Keystone stores it after it has notified, which a slow broker makes long."""
    world = place.world
    domain = world.domain()
    with place.held("created", lambda: world.project(domain)):
        (made,) = world.call("GET", f"/projects?domain_id={domain}").body["projects"]
        world.patch("project", f"/projects/{made['id']}", name=f"{made['name']}-new")
    path = f"/projects/{made['id']}"
    seen = {world.call("GET", path).body["project"]["name"] for _ in range(6)}
    assert seen == {f"{made['name']}-new"}

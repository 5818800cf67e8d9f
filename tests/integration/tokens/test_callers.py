"""An answer is kept only while everything stands that its caller was let in by.

And what it shows: the rows of a route, and trusts that end by the clock. Two workers.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from cryptography.fernet import Fernet

from support.cluster import service
from support.keystone_world import VALIDATE, Answer, Client, World, grant, random_name
from support.keystones import keystone_state, serve_as_is
from support.redis_servers import RedisServer, redis_server
from support.served import PATIENCE, Served, wait_for

pytest.importorskip("keystone")
pytest.importorskip("keystonemiddleware")

T = TypeVar("T")

ISSUER = "CN=front"
EXTRA = f"""\
[identity]
password_hash_rounds = 4

[tokenless_auth]
trusted_issuer = {ISSUER}
issuer_attribute = HTTP_X_CLIENT_ISSUER

[oslo_policy]
policy_file = POLICY

[keyfront_token_cache]
ttl = 600
negative_ttl = 600
routes = /v3/projects/{{id}}, /v3/OS-TRUST/trusts, /v3/OS-TRUST/trusts/{{id}}
"""


class Watched(World):
    """A Keystone, and files that it reads."""

    def __init__(self, served: Served, policy: Path) -> None:
        super().__init__(served.url, served.password)
        self.served = served
        self.policy = policy
        self.keys = served.state / "fernet-keys"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("callers")
    policy = folder / "policy.yaml"
    policy.write_text("{}\n")
    state = keystone_state(folder / "state", extra=EXTRA.replace("POLICY", str(policy)))
    with serve_as_is(state, "uwsgi") as served:
        yield Watched(served, policy)


def ask(world: World, path: str, headers: dict[str, str]) -> Answer:
    """Ask both workers: over several connections."""
    answers = []
    for _ in range(4):
        client = Client(world.base_url)
        try:
            answers.append(client.request("GET", path, headers))
        finally:
            client.close()
    assert len({answer.status for answer in answers}) == 1, [a.status for a in answers]
    return answers[-1]


def tokenless(world: World) -> None:
    """Let callers in by a header that is not the usual one."""
    mapping = random_name()
    path = f"/OS-FEDERATION/identity_providers/{hashlib.sha256(ISSUER.encode()).hexdigest()}"
    local = {"user": {"name": "{0}", "domain": {"id": "default"}, "type": "local"}}
    rule = {"local": [local], "remote": [{"type": "HTTP_X_CLIENT_NAME"}]}
    world.call("PUT", path, {"identity_provider": {"enabled": True}})
    world.call("PUT", f"/OS-FEDERATION/mappings/{mapping}", {"mapping": {"rules": [rule]}})
    world.call("PUT", f"{path}/protocols/x509", {"protocol": {"mapping_id": mapping}})


def test_a_caller_without_a_token_is_looked_at_each_time(world: World) -> None:
    tokenless(world)
    person = world.person(world.own_role["admin"])
    caller = {
        "X-Client-Issuer": ISSUER,
        "X-Client-Name": person.user.name,
        "X-Project-Id": person.project,
        "X-Subject-Token": world.bystander.token,
    }
    assert ask(world, VALIDATE, caller).status == 200
    world.flag("user", f"/users/{person.user.id}", False)
    # Keystone's own answer to a disabled one is an error of its own.
    assert ask(world, VALIDATE, caller).status in (401, 500)
    world.flag("user", f"/users/{person.user.id}", True)
    assert ask(world, VALIDATE, caller).status == 200


def while_it_lasts(use: Callable[[str], T]) -> T:
    """Use a trust that ends soon, but not before it was used: on a busy machine later.

    :param use: is given its end, and says by an assertion if it cannot be used
    """
    for seconds in (4, 8, 16, 32, 64):
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        try:
            found = use(end.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
        except AssertionError:
            if datetime.datetime.now(datetime.UTC) < end:
                raise
        else:
            return found
    pytest.fail("it ended before it was used, again and again")


def test_a_token_does_not_outlive_its_trust_though_it_may_be_expired(world: World) -> None:
    giver, taker = world.person(), world.user()
    path = VALIDATE + "?allow_expired=1"

    def use(end: str) -> dict[str, str]:
        trust = world.trust(giver, taker, [world.still_role], expires_at=end)
        token = world.issue(taker, trust=trust)
        caller = {"X-Auth-Token": world.admin, "X-Subject-Token": token}
        assert ask(world, path, caller).status == 200
        return caller

    until(world, path, while_it_lasts(use), 404)


def test_a_service_does_not_go_on_either(world: Watched, tmp_path: Path) -> None:
    """Nothing but the end that Keystone's cache gives ends it: the service asks once a minute."""
    options = "keyfront_revalidate = 60\ntoken_cache_time = 300\n"
    with service(tmp_path, world.served, options) as running:
        giver, taker, own = world.person(), world.user(), world.service.token
        client = Client(running.url.removesuffix("/v3"))
        path = VALIDATE + "?allow_expired=1"

        def use(end: str) -> tuple[dict[str, str], dict[str, str]]:
            trust = world.trust(giver, taker, [world.still_role], expires_at=end)
            token = world.issue(taker, trust=trust)
            # With a service's own token beside it the user's may have ended.
            shown = {"X-Auth-Token": token, "X-Service-Token": own}
            seen = [client.request("GET", "/", shown).status for _ in range(4)]
            assert set(seen) == {200}
            return shown, {"X-Auth-Token": world.admin, "X-Subject-Token": token}

        try:
            shown, caller = while_it_lasts(use)
            until(world, path, caller, 404)
            seen = [client.request("GET", "/", shown).status for _ in range(4)]
            assert set(seen) == {401}
        finally:
            client.close()


def until(world: World, path: str, caller: dict[str, str], status: int) -> None:
    """Wait until Keystone itself answers with a status; then the cache has to do so, too."""
    client = Client(world.base_url)
    deadline = time.monotonic() + PATIENCE
    try:
        while client.request("GET", path, {**caller, "X-Once": random_name()}).status != status:
            assert time.monotonic() < deadline
            assert client.request("GET", path, caller).status in (200, status)
            time.sleep(0.05)  # it lasts for seconds, and ends between any two
    finally:
        client.close()
    assert ask(world, path, caller).status == status


def test_a_trust_is_not_shown_for_longer_than_it_lasts(world: World) -> None:
    giver, taker = world.person(), world.user()
    caller = {"X-Auth-Token": giver.token}

    def use(end: str) -> str:
        trust = world.trust(giver, taker, [world.still_role], expires_at=end)
        path = f"/OS-TRUST/trusts/{trust}"
        assert ask(world, path, caller).status == 200
        return path

    until(world, while_it_lasts(use), caller, 404)


def test_a_route_shows_what_a_query_adds(world: World) -> None:
    above = world.project()
    project = world.project(parent=above)
    service, name = world.endpoints[0].service, random_name()
    body = {"service_id": service, "resource_name": name, "default_limit": 10}
    world.call("POST", "/registered_limits", {"registered_limits": [body]})
    caller = {"X-Auth-Token": world.admin}
    # Limits are shown of projects on which the caller has a role.
    world.call("PUT", grant("projects", project, "users", me(world), world.own_role["member"]))
    path = f"/projects/{above}?subtree_as_list&include_limits"

    def limits() -> list[int]:
        found = ask(world, path, caller).body["project"]["subtree"][0]["project"]["limits"]
        return [limit["resource_limit"] for limit in found]

    assert limits() == []
    limit = {"project_id": project, "service_id": service, "resource_name": name}
    made = world.call("POST", "/limits", {"limits": [{**limit, "resource_limit": 5}]})
    assert limits() == [5]
    world.patch("limit", f"/limits/{made.body['limits'][0]['id']}", resource_limit=7)
    assert limits() == [7]
    world.patch("project", f"/projects/{above}", description="other")
    assert ask(world, path, caller).body["project"]["description"] == "other"


def test_a_token_is_accepted_when_its_key_has_come(world: Watched) -> None:
    """By whichever node made it, whose rotation was here before."""
    key = Fernet.generate_key()
    (primary,) = [x for x in world.keys.iterdir() if x.name == max(os.listdir(world.keys), key=int)]
    token = world.person().token
    payload = Fernet(primary.read_bytes()).decrypt(token + "=" * (-len(token) % 4))
    late = Fernet(key).encrypt(payload).decode().rstrip("=")
    caller = {"X-Auth-Token": world.admin, "X-Subject-Token": late}
    assert ask(world, VALIDATE, caller).status == 404
    # Staged: under it nothing is made here.
    (world.keys / "0").write_bytes(key)
    wait_for(lambda: ask_once(world, VALIDATE, caller).status == 200, "its refusal has gone")
    assert ask(world, VALIDATE, caller).status == 200


def test_a_policy_counts_when_it_is_there(world: Watched) -> None:
    caller = {"X-Auth-Token": world.admin, "X-Subject-Token": world.bystander.token}
    assert ask(world, VALIDATE, caller).status == 200
    world.policy.write_text('"identity:validate_token": "!"\n')
    try:
        wait_for(lambda: ask_once(world, VALIDATE, caller).status == 403, "it is forbidden")
    finally:
        world.policy.write_text("{}\n")
    wait_for(lambda: ask_once(world, VALIDATE, caller).status == 200, "it is allowed again")


def test_the_first_policy_of_a_folder_counts_when_it_comes(world: Watched) -> None:
    """Where oslo.policy looks by itself, beside keystone.conf, and nothing was at the start."""
    caller = {"X-Auth-Token": world.admin, "X-Subject-Token": world.bystander.token}
    assert ask(world, VALIDATE, caller).status == 200
    folder = world.served.state / "policy.d"
    folder.mkdir()
    try:
        (folder / "nobody.yaml").write_text('"identity:validate_token": "!"\n')
        wait_for(lambda: ask_once(world, VALIDATE, caller).status == 403, "it is forbidden")
        (folder / "nobody.yaml").write_text("{}\n")
        wait_for(lambda: ask_once(world, VALIDATE, caller).status == 200, "it is allowed again")
    finally:
        shutil.rmtree(folder)


class Decides(BaseHTTPRequestHandler):
    """Somebody whom a policy asks."""

    verdict = b"True"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.verdict)))
        self.end_headers()
        self.wfile.write(self.verdict)

    def log_message(self, *values: object) -> None:
        pass


def test_what_somebody_else_decides_is_asked_each_time(world: Watched) -> None:
    caller = {"X-Auth-Token": world.admin, "X-Subject-Token": world.bystander.token}
    with ThreadingHTTPServer(("127.0.0.1", 0), Decides) as server:
        threading.Thread(target=server.serve_forever).start()
        rule = f"http://127.0.0.1:{server.server_port}/"
        world.policy.write_text(f'"identity:validate_token": "{rule}"\n')
        try:
            Decides.verdict = b"False"
            wait_for(lambda: ask_once(world, VALIDATE, caller).status == 403, "it is asked")
            for verdict, status in ((b"True", 200), (b"False", 403), (b"True", 200)):
                Decides.verdict = verdict
                assert ask(world, VALIDATE, caller).status == status
        finally:
            world.policy.write_text("{}\n")
            server.shutdown()
    wait_for(lambda: ask_once(world, VALIDATE, caller).status == 200, "it is as before")


def ask_once(world: World, path: str, headers: dict[str, str]) -> Answer:
    client = Client(world.base_url)
    try:
        return client.request("GET", path, headers)
    finally:
        client.close()


def me(world: World) -> str:
    answer = ask(world, VALIDATE, {"X-Auth-Token": world.admin, "X-Subject-Token": world.admin})
    found: str = answer.token()["user"]["id"]
    return found


def test_a_login_needs_nobody_to_be_told(tmp_path: Path) -> None:
    """The first one of a day writes when the user was last there, which nothing goes by."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        extra = (
            "[identity]\npassword_hash_rounds = 4\n[keyfront_token_cache]\n"
            f"coordinator = redis://127.0.0.1:{nobody.getsockname()[1]}\n"
        )
        state = keystone_state(tmp_path / "state", extra=extra)
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            assert world.admin
            caller = {"X-Auth-Token": world.admin, "X-Subject-Token": world.admin}
            assert ask(world, VALIDATE, caller).status == 200
            client = Client(world.base_url)
            try:
                body = {"project": {"name": random_name()}}
                answer = client.request("POST", "/projects", caller, body)
            finally:
                client.close()
            assert answer.status == 503
            assert answer.headers["Retry-After"]


def test_what_logins_go_on_with_without_redis(tmp_path: Path) -> None:
    """Those that take nothing from anybody: the others are refused until Redis is back."""
    with redis_server(tmp_path / "redis") as redis:
        extra = (
            "[identity]\npassword_hash_rounds = 4\n[federation]\ndefault_authorization_ttl = 60\n"
            "[security_compliance]\ndisable_user_account_days_inactive = 90\n"
            f"[keyfront_token_cache]\ncoordinator = redis://127.0.0.1:{redis.port}\n"
            "coordinator_timeout = 10\n"
        )
        state = keystone_state(tmp_path / "state", extra=extra)
        with serve_as_is(state, "uwsgi") as served:
            world = World(served.url, served.password)
            # A change waits for a table that has just begun, on a busy machine for too long.
            world.wait_until_kept()
            _log_in_without(redis, world, state / "keystone.sqlite")


class Provider:
    """An identity provider that tells of names, addresses and projects as well."""

    RULE: ClassVar = {
        "local": [
            {
                "user": {"id": "{0}", "name": "{1}", "email": "{2}"},
                "group": {"id": "{3}"},
                "projects": [{"name": "{4}", "roles": [{"name": "{5}"}]}],
            }
        ],
        "remote": [{"type": f"HTTP_X_{part}"} for part in ("ID", "NAME", "MAIL")]
        + [{"type": f"HTTP_X_{part}"} for part in ("GROUP", "PROJECT", "ROLE")],
    }

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        provider, mapping = random_name(), random_name()
        path = f"/OS-FEDERATION/identity_providers/{provider}"
        # Which makes a domain that projects would be in.
        body = {"identity_provider": {"enabled": True, "domain_id": "default"}}
        world.call("PUT", path, body)
        rules = {"mapping": {"rules": [self.RULE]}}
        world.call("PUT", f"/OS-FEDERATION/mappings/{mapping}", rules)
        world.call("PUT", f"{path}/protocols/mapped", {"protocol": {"mapping_id": mapping}})
        self._path = f"{path}/protocols/mapped/auth"
        (self._project,) = world.call("GET", "/projects?name=admin").body["projects"]
        self._told = {"Group": group, "Project": "admin", "Role": "reader"}

    def login(self, user: str, **told: str) -> str:
        """An unscoped token."""
        values = {"Id": user, "Name": user, "Mail": f"{user}@example.org", **self._told, **told}
        headers = {f"X-{name}": value for name, value in values.items()}
        token: str = self._world.send("GET", self._path, headers, None).headers["X-Subject-Token"]
        # The roles come by the user's id or by his group.
        self._world.rescope(token, self._project["id"])
        return token

    def shown(self, token: str) -> tuple[str, str]:
        """The name and id that a validation shows."""
        headers = {"X-Auth-Token": self._world.admin, "X-Subject-Token": token}
        user = ask(self._world, VALIDATE, headers).token()["user"]
        return user["name"], user["id"]


def _last_there(database: Path, user: str, day: str) -> None:
    """Write when a user was last there, as if he had not been since."""
    with closing(sqlite3.connect(database, timeout=PATIENCE)) as connection, connection:
        changed = connection.execute("UPDATE user SET last_active_at = ? WHERE id = ?", (day, user))
        assert changed.rowcount == 1


def _log_in_without(redis: RedisServer, world: World, database: Path) -> None:
    federation = world.federation()
    group, other = world.group(), world.group()
    for one in (group, other):
        path = grant("projects", world.still_project, "groups", one, world.still_role)
        world.call("PUT", path)
    known, unknown = (replace(federation, user=random_name()) for _ in range(2))
    known.login(group)
    provider = Provider(world, group)
    met, lapsed = random_name(), random_name()
    name, met_id = provider.shown(provider.login(met))
    assert name == met
    _, lapsed_id = provider.shown(provider.login(lapsed))
    sleeper, never = world.user(), world.user()
    giver, taker = world.person(), world.user()
    trust = world.trust(giver, taker, [world.still_role], remaining_uses=3)
    used = [world.issue(taker, trust=trust)]
    today = datetime.datetime.now(datetime.UTC).date()
    world.issue(sleeper)
    redis.kill()
    for user in (sleeper.id, met_id):
        _last_there(database, user, str(today - datetime.timedelta(days=3)))
    _last_there(database, lapsed_id, str(today - datetime.timedelta(days=300)))
    for user in (known, unknown):
        for _ in range(2):  # the second time it is renewed
            token = world.rescope(user.login(group), world.still_project)
            assert status(world, token) == 200
    for one in (sleeper, never):  # the first time of the day, and ever
        for _ in range(2):
            assert status(world, world.issue(one)) == 200
    # Another name and address are for a later login; who is new has his own at once.
    newcomer = random_name()
    for _ in range(2):
        again = provider.login(met, Name="other", Mail="other@example.org")
        assert provider.shown(again) == (met, met_id)
        assert provider.shown(provider.login(newcomer))[0] == newcomer
    used.append(world.issue(taker, trust=trust))
    assert [status(world, token) for token in used] == [200, 200]
    refused = {
        "another group": lambda: known.login(other),
        "another role": lambda: provider.login(met, Role="member"),
        "another project": lambda: provider.login(random_name(), Project=random_name()),
        "back after too long": lambda: provider.login(lapsed),
        "the last use": lambda: world.issue(taker, trust=trust),
        "enabled by the administrator": lambda: world.flag("user", f"/users/{sleeper.id}", True),
        "a change": world.project,
    }
    _last_there(database, sleeper.id, str(today - datetime.timedelta(days=300)))
    for name, deed in refused.items():
        with pytest.raises(AssertionError, match=": 503 "):
            deed()
            pytest.fail(f"{name} was not refused")
    assert [status(world, token) for token in used] == [200, 200]
    redis.start()
    wait_for(lambda: _done(lambda: known.login(other)), "Redis is found again")
    # Each worker finds it again by itself.
    wait_for(lambda: provider.shown(provider.login(met, Name="other"))[0] == "other", "the name")
    wait_for(lambda: _done(lambda: world.issue(taker, trust=trust)), "the last use")
    # It has ended what the trust gave.
    assert {status(world, token) for token in used for _ in range(4)} == {404}


def _done(deed: Callable[[], object]) -> bool:
    try:
        deed()
    except AssertionError as error:
        assert ": 503 " in str(error), error
        return False
    return True


def status(world: World, token: str) -> int:
    return ask(world, VALIDATE, {"X-Auth-Token": world.admin, "X-Subject-Token": token}).status

"""What holds for a Keystone holds where logins have workers of their own: they are of one node."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyfront.gateway.plan.workload import Workload
from support import APPS
from support.deployments import MACHINE, Deployment, deployed, in_turn
from support.keystone_world import VALIDATE, Answer, Client, User, World
from support.programs import own_folder
from support.served import wait_for

if not Path(sys.prefix, "bin", "uwsgi").exists():
    pytest.skip("no uWSGI", allow_module_level=True)

SERVERS = ("nginx+uwsgi", "apache+uwsgi", "mod_wsgi")
ROUNDS = 8
CLIENTS = 3


def _address() -> str:
    """An address of its own for each request: logins are limited by address."""
    return "127." + ".".join(str(2 + secrets.randbelow(252)) for _ in range(3))


class _World(World):
    """The administrator, who comes from everywhere."""

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: object = None
    ) -> Answer:
        with closing(Client(self.base_url, source=_address())) as client:
            return client.request(method, path, headers, body)

    def send(self, method: str, path: str, headers: Mapping[str, str], body: object) -> Answer:
        answer = self.ask(method, path, headers, body)
        assert answer.status in (200, 201, 204), f"{method} {path}: {answer.status} {answer.body}"
        return answer

    def validated(self, token: str) -> int:
        sent = {"X-Auth-Token": self.admin, "X-Subject-Token": token}
        return self.ask("GET", VALIDATE, sent).status

    def logged_in(self, user: User) -> int:
        return self.ask("POST", VALIDATE, {}, _login(user)).status


def _login(user: User) -> dict[str, object]:
    who = {"user": {"id": user.id, "password": user.password}}
    return {"auth": {"identity": {"methods": ["password"], "password": who}}}


def _environment(folder: Path) -> dict[str, str]:
    return {
        "OBSERVED_APP": f"config:{folder}/keystone.ini", "OBSERVED_LOADS": f"{folder}/loads",
        "PYTHONPATH": str(APPS),
    }


@pytest.fixture(scope="module", params=SERVERS)
def site(
    request: pytest.FixtureRequest, keystone_state: tuple[Path, int]
) -> Iterator[tuple[Deployment, _World]]:
    state, _ = keystone_state
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder("groups"))
        folder.chmod(0o711)
        site = stack.enter_context(
            deployed(
                folder, request.param, config=state, manager=True,
                machine=replace(MACHINE, memory=2**31), workload=Workload(login_processes=1),
                target="observed_app:application", environment=_environment(folder),
            )
        )
        site.wait()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SSL_CERT_FILE", str(site.certificate))
        password = (state / "admin-password").read_text().strip()
        world = _World(f"{site.url}/v3", password)
        world.wait_until_kept()
        yield site, world


def test_what_one_group_changes_the_other_knows(site: tuple[Deployment, _World]) -> None:
    """Passwords are changed where logins are; all else is changed, and validated, elsewhere."""
    _, world = site
    for number in range(ROUNDS):
        # A new one each time: Keystone revokes by the second, also what is issued just afterwards.
        person = world.person()
        former = person.user
        assert {world.validated(person.token) for _ in range(4)} == {200}
        user = replace(former, password=f"{former.password}{number}")
        passwords = {"original_password": former.password, "password": user.password}
        world.send("POST", f"/users/{user.id}/password", {}, {"user": passwords})
        assert {world.validated(person.token) for _ in range(4)} == {404}, number
        assert (world.logged_in(former), world.logged_in(user)) == (401, 201)
        for enabled, expected in ((False, 401), (True, 201)):
            world.flag("user", f"/users/{user.id}", enabled)
            assert world.logged_in(user) == expected, number


def test_a_reload_under_load_loses_nobody(site: tuple[Deployment, _World]) -> None:
    site_, world = site
    user, token = world.user(), world.admin
    over = threading.Event()
    failures: list[object] = []
    answered = {"logins": 0, "others": 0}

    def client(kind: str) -> None:
        while not over.is_set():
            try:
                with closing(site_.connect(_address())) as connection:
                    if kind == "logins":
                        answer, body = in_turn(
                            connection, "POST", "/v3/auth/tokens", body=json.dumps(_login(user)),
                            headers={"Content-Type": "application/json"},
                        )  # fmt: skip
                        expected = 201
                    else:
                        sent = {"X-Auth-Token": token, "X-Subject-Token": token}
                        answer, body = in_turn(connection, "GET", "/v3/auth/tokens", headers=sent)
                        expected = 200
                if answer.status == expected:
                    answered[kind] += 1
                else:
                    failures.append((kind, answer.status, body[:200]))
            except Exception as error:
                failures.append((kind, repr(error)))
            over.wait(0.02)

    threads = [threading.Thread(target=client, args=(x,)) for x in answered for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        _go_on(answered, failures)
        site_.reload(_environment(site_.folder))
        _go_on(answered, failures)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def _told(site: Deployment, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    with closing(site.connect(_address())) as connection:
        body = b"{}" if method == "POST" else None
        answer, content = in_turn(connection, method, path, body=body)
        return answer.status, json.loads(content)


def _logins_are(site: Deployment, there: bool) -> bool:
    status, told = _told(site, "/readyz")
    part = told["parts"]["logins"]
    assert part["ok"] or "for logins" in part["error"]
    return status == (200 if there else 503) and part["ok"] == there


def test_a_node_that_takes_no_logins_says_so(site: tuple[Deployment, _World]) -> None:
    """A balancer sends it nothing then; what comes all the same is answered, but for logins."""
    site_, _ = site
    wait_for(lambda: _logins_are(site_, True), "it is ready")
    # The observed application answers it, from where logins are.
    pid = _told(site_, "/observed/password", "POST")[1]["pid"]
    assert all(_told(site_, "/observed/environ")[1]["pid"] != pid for _ in range(8))
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: _logins_are(site_, False), "it misses its process for logins")
        assert _told(site_, "/observed/environ")[0] == _told(site_, "/livez")[0] == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: _logins_are(site_, True), "it runs again")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _logins_are(site_, True), "it is ready with another one")
    assert _told(site_, "/observed/password", "POST")[1]["pid"] != pid


def _go_on(answered: dict[str, int], failures: list[object]) -> None:
    before = dict(answered)
    wait_for(
        lambda: failures or all(answered[kind] > before[kind] + 20 for kind in before),
        "logins and all else are answered",
    )

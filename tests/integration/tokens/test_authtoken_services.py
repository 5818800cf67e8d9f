"""Real services with authtoken in the place of keystonemiddleware's, behind a real Keystone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.keystone_world import Client, World
from support.keystones import serve_as_is
from support.served import Served, wait_for
from support.servers import mariadb, memcached
from support.services import authtoken, configure_glance, configure_neutron, configure_nova

# What a server of the operator's choice would do.
PROGRAM = """\
import os
from wsgiref.simple_server import WSGIRequestHandler, make_server
{before}
from {module} import application

class Handler(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass

server = make_server("127.0.0.1", 0, application, handler_class=Handler)
with open(os.environ["PORT_FILE"] + ".new", "w") as file:
    file.write(str(server.server_port))
os.rename(file.name, os.environ["PORT_FILE"])
server.serve_forever()
"""

@pytest.fixture(scope="module")
def keystone(keystone_state: tuple[Path, int]) -> Iterator[Served]:
    state, _ = keystone_state
    with serve_as_is(state, "uwsgi") as served:
        yield served


@contextmanager
def service(folder: Path, module: str, variable: str, before: str = "") -> Iterator[str]:
    """Run a service until the block ends; returns its URL.

    :param variable: by which it finds its configuration in ``folder``
    """
    log, port = folder / "log", folder / "port"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM.format(module=module, before=before)],
            env={"PATH": os.defpath, variable: str(folder), "PORT_FILE": str(port)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_for(lambda: port.exists() or process.poll() is not None, f"{module} is loaded")
        assert port.exists(), log.read_text(errors="replace")
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait()


def role(keystone: Served, name: str) -> str:
    """The id of a role that Keystone's bootstrap makes."""
    world = World(keystone.url, keystone.password)
    (found,) = world.call("GET", f"/roles?name={name}").body["roles"]
    return str(found["id"])


def check(keystone: Served, url: str, path: str, status: int, *roles: str) -> None:
    """A token is good until it is revoked, and nothing else is."""
    world = World(keystone.url, keystone.password)
    person = world.person(*roles)
    other, third = world.person(*roles), world.person(*roles)
    # one connection at a time, as that server serves them
    def get(token: str | None, **more: str) -> tuple[int, list[str]]:
        client = Client(url)
        try:
            headers = more if token is None else {"X-Auth-Token": token, **more}
            answer = client.request("GET", path, headers)
            return answer.status, answer.headers.get_all("WWW-Authenticate", [])
        finally:
            client.close()

    challenge = [f'Keystone uri="{keystone.url}"']
    for _ in range(3):
        assert get(person.token) == (status, [])
        assert get(other.token) == get(third.token) == (status, [])
    for token in ("garbage", "g" * 10_000, "é", None):
        forged = {"OpenStack-System-Scope": "all", "X-Roles": "admin", "X-User-Id": "admin"}
        assert get(token, **forged, **{"X-Identity-Status": "Confirmed"}) == (401, challenge)
    world.call("DELETE", "/auth/tokens", headers={"X-Subject-Token": person.token})
    # keystonemiddleware's own would go on for longer than this waits
    wait_for(lambda: get(person.token)[0] == 401, "the revoked token is refused")
    assert get(other.token) == (status, [])
    world.flag("user", f"/users/{other.user.id}", False)
    wait_for(lambda: get(other.token)[0] == 401, "the disabled user is refused")
    assert get(third.token) == (status, [])
    world.flag("project", f"/projects/{third.project}", False)
    wait_for(lambda: get(third.token)[0] == 401, "the token of a disabled project is refused")


def test_glance_with_its_own_paste_file(keystone: Served, tmp_path: Path) -> None:
    with memcached() as cache:
        shared = (
            f"memcached_servers = {cache.address}\n"
            "memcache_security_strategy = ENCRYPT\nmemcache_secret_key = secret\n"
        )
        sections = authtoken(keystone.url, keystone.password, shared)
        configure_glance(tmp_path, f"sqlite:///{tmp_path / 'glance.sqlite'}", sections)
        with service(tmp_path, "glance.wsgi.api", "OS_GLANCE_CONFIG_DIR") as url:
            check(keystone, url, "/v2/schemas/image", 200)
        assert int(cache.stats()["cmd_set"]) > 0


def test_nova_with_its_own_paste_file(keystone: Served, tmp_path: Path) -> None:
    pytest.importorskip("nova", reason="nova is installed by tox -e 2026.1 and its like only")
    databases = [f"sqlite:///{tmp_path / name}.sqlite" for name in ("api", "cell0", "cell")]
    configure_nova(tmp_path, *databases, authtoken(keystone.url, keystone.password))
    with service(tmp_path, "nova.wsgi.osapi_compute", "OS_NOVA_CONFIG_DIR") as url:
        check(keystone, url, "/v2.1/servers/detail", 200, role(keystone, "reader"))


def test_neutron_with_its_own_paste_file(keystone: Served, tmp_path: Path) -> None:
    pytest.importorskip("neutron", reason="neutron is installed by tox -e 2026.2 only")
    sections = authtoken(keystone.url, keystone.password)
    with mariadb(tmp_path) as database:
        configure_neutron(tmp_path, database.fresh_database("neutron"), sections)
        with service(tmp_path, "neutron.wsgi.api", "OS_NEUTRON_CONFIG_DIR") as url:
            check(keystone, url, "/v2.0/networks", 200, role(keystone, "reader"))


def test_placement_which_has_no_paste_file(keystone: Served, tmp_path: Path) -> None:
    config = tmp_path / "placement.conf"
    config.write_text(
        "[placement_database]\n"
        f"connection = sqlite:///{tmp_path / 'placement.sqlite'}\nsync_on_startup = true\n"
        + authtoken(keystone.url, keystone.password)
    )
    before = (
        "from keyfront.middleware.tokens.authtoken.install import install\n"
        "install()"
    )  # fmt: skip
    with service(tmp_path, "placement.wsgi.api", "OS_PLACEMENT_CONFIG_DIR", before) as url:
        check(keystone, url, "/resource_providers", 200, role(keystone, "admin"))

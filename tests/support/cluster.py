"""Two Keystone nodes on one database, and two services that trust one of them each.

Nodes and services are processes of this machine that share nothing but the database and, where
there is one, Redis: each node has a folder of its own for what its workers share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from support import APPS, servers
from support.keystone_world import VALIDATE, World
from support.keystones import keystone_state, serve_as_is
from support.served import Served, free_port, serve
from support.token_changes import Kind, Prepared, Read

# The cheapest that bcrypt takes: passwords are not what is tested.
_KEYSTONE = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
"""
_PASTE = """\
[pipeline:main]
pipeline = authtoken service

[filter:authtoken]
use = egg:keyfront#authtoken
auth_type = password
auth_url = {url}
www_authenticate_uri = {url}
username = admin
user_domain_id = default
password = {password}
project_name = admin
project_domain_id = default
{options}

[app:service]
paste.app_factory = service_app:app_factory
"""


@dataclass(frozen=True)
class Cluster:
    """What runs.

    :param nodes: Keystones; changes are made at the first
    :param services: one that asks the first node, and one that asks the last
    :param database: of the nodes, where there are several
    """

    nodes: list[Served]
    services: list[Served]
    database: servers.MariaDB | None = None

    @property
    def everywhere(self) -> dict[str, str]:
        """Where tokens are shown, by name: the nodes' URLs with ``/v3``, the services' without."""
        nodes = {f"node {n}": x.url for n, x in enumerate(self.nodes, 1)}
        found = {f"service {n}": x.url.removesuffix("/v3") for n, x in enumerate(self.services, 1)}
        return nodes | found

    def watch(self, kind: Kind) -> Kind:
        """The kind of change with its validations read at all nodes and services."""

        def prepare(world: object) -> Prepared:
            prepared = kind.prepare(world)  # type: ignore[arg-type]
            reads = [x for x in prepared.reads if x.path == VALIDATE and x.method == "GET"]
            return replace(prepared, reads=list(self._spread(reads)))

        return replace(kind, prepare=prepare)

    def _spread(self, reads: list[Read]) -> Iterator[Read]:
        for read in reads:
            yield read
            for name, url in self.everywhere.items():
                if name == "node 1":
                    continue
                if name.startswith("node"):
                    yield replace(read, name=f"{read.name} at {name}", base_url=url)
                elif read.headers.keys() == {"X-Auth-Token", "X-Subject-Token"}:
                    token = {"X-Auth-Token": read.headers["X-Subject-Token"]}
                    yield replace(
                        read, name=f"{read.name} at {name}", base_url=url, path="/",
                        headers=token, also_by=None,
                    )  # fmt: skip


@contextmanager
def cluster(
    folder: Path, *, nodes: int = 2, coordinator: str = "", coordinator_timeout: float = 10.0,
    options: str = "", service_options: str = "",
    database_options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    service_environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Run one until the block ends; in its table of epochs changes may begin at once.

    :param folder: an empty one
    :param nodes: Keystones: one on SQLite or two on a MariaDB
    :param coordinator: URL of the Redis they share; none if empty
    :param coordinator_timeout: seconds after which that counts as lost; by default many, as one
        that is well may take its time on a busy machine
    :param options: more lines of ``[keyfront_token_cache]``
    :param service_options: more lines of the services' paste section
    :param database_options: more of MariaDB's
    :param environment: more of the nodes'
    :param service_environment: more of the services'
    """
    lines = (f"coordinator = {coordinator}\n", f"coordinator_timeout = {coordinator_timeout}\n")
    shared = "".join(lines) if coordinator else ""
    with ExitStack() as stack:
        server = None
        if nodes > 1:
            server = stack.enter_context(servers.mariadb(folder, more=database_options))
        database = server.fresh_database("keystone") if server else None
        running = []
        for number in range(nodes):
            state = keystone_state(
                folder / f"node{number}",
                database_url=f"{database}&plugin=keyfront" if database else None,
                extra=f"{_KEYSTONE}path = {folder / f'tokens{number}'}\n{shared}{options}\n",
            )
            served = serve_as_is(state, "uwsgi", environment=environment)
            running.append(stack.enter_context(served))
        # A change waits for a table that has just begun, on a busy machine for too long.
        World(running[0].url, running[0].password).wait_until_kept()
        services = []
        told = "".join(f"keyfront_{line}" for line in lines) if coordinator else ""
        for number, node in enumerate((running[0], running[-1])):
            started = service(
                folder / f"service{number}", node, told + service_options, service_environment
            )
            services.append(stack.enter_context(started))
        yield Cluster(running, services, server)


@contextmanager
def service(
    folder: Path, node: Served, options: str, more: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run a service that shows what it was told of a token, until the block ends.

    :param folder: an empty one
    :param node: the Keystone that it asks
    :param options: more lines of its paste section
    :param more: of its environment
    """
    # keyfront serve has a state folder; of the Keystone in it nothing is used
    state = keystone_state(folder)
    paste = folder / "service.ini"
    paste.write_text(_PASTE.format(url=node.url, password=node.password, options=options))
    paste.chmod(0o600)
    environment = {"KEYFRONT_APP": f"config:{paste}", "PYTHONPATH": str(APPS), **(more or {})}
    with serve(state, "uwsgi", port=free_port(), environment=environment) as served:
        yield served

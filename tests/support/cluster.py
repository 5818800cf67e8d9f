"""Two Keystone nodes on one database, and two services that trust one of them each.

Nodes and services are processes of this machine that share nothing but the database and, where
there is one, Redis: each node has a folder of its own for what its workers share.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy

from keyfront.benchmarks.lineups.keystone import authtoken_options
from support import APPS, servers
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, World
from support.keystones import keystone_state, port_of, serve_as_is
from support.redis_servers import RedisServer
from support.served import Served
from support.token_changes import Kind, Prepared, Read

# Seconds to wait for a Redis that hangs, where one does: so long one that is well does not take
# on a busy machine.
TIMEOUT = 3.0

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
{credentials}{options}

[app:service]
paste.app_factory = service_app:app_factory
"""


@dataclass(frozen=True)
class Cluster:
    """What runs.

    :param nodes: Keystones; changes are made at the first
    :param services: one that asks the first node, and one that asks the last
    :param database: of the nodes
    :param url: of what they keep there, for one more node
    :param shared: their options of the Redis that they share
    """

    nodes: list[Served]
    services: list[Served]
    database: servers.MariaDB
    url: str
    shared: str

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


@dataclass(frozen=True)
class Shared:
    """A cluster for several modules, and what it goes by.

    :param redis: the server
    :param proxy: by which nodes and services get to it
    """

    running: Cluster
    redis: RedisServer
    proxy: FaultProxy


@contextmanager
def one_more_node(running: Cluster, folder: Path, options: str) -> Iterator[Served]:
    """Run a node beside those of a cluster until the block ends.

    :param folder: where its state is made, and what its workers share
    :param options: more lines of ``[keyfront_token_cache]``
    """
    state = _node(folder, running.url, running.shared + options)
    _name_in_catalog(running.url, [node.port for node in running.nodes])
    with serve_as_is(state, "uwsgi") as served:
        yield served


def _node(folder: Path, url: str, options: str) -> Path:
    extra = f"{_KEYSTONE}path = {folder / 'tokens'}\n{options}\n"
    return keystone_state(folder / "state", database_url=url, extra=extra)


# Where a service finds its Keystone in the catalog: the first node or the last.
FIRST, LAST = "interface = public\n", "interface = internal\n"


def _name_in_catalog(url: str, ports: list[int]) -> None:
    """Have the catalog name the first node to some services and the last to the others.

    Each node that is made names itself to all, and a service asks whom it finds there.
    """
    bare = sqlalchemy.make_url(url).difference_update_query(["plugin"])
    engine = sqlalchemy.create_engine(bare, poolclass=sqlalchemy.NullPool)
    update = sqlalchemy.text(
        "UPDATE endpoint SET url = :url WHERE interface = :interface"
        " AND service_id IN (SELECT id FROM service WHERE type = 'identity')"
    )
    with engine.begin() as connection:
        for interface, port in (("public", ports[0]), ("internal", ports[-1])):
            named = {"url": f"http://127.0.0.1:{port}/v3", "interface": interface}
            connection.execute(update, named)


@contextmanager
def cluster(
    folder: Path, *, coordinator: str, coordinator_timeout: float = 10.0,
    options: str = "", service_options: str = "", database: servers.MariaDB | None = None,
    database_options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    service_environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Run one until the block ends; in its table of epochs changes may begin at once.

    :param folder: an empty one
    :param coordinator: URL of the Redis they share
    :param coordinator_timeout: seconds after which that counts as lost; by default many, as one
        that is well may take its time on a busy machine
    :param options: more lines of ``[keyfront_token_cache]``
    :param service_options: more lines of the services' paste section
    :param database: the MariaDB, if one runs already, for a new database
    :param database_options: more of MariaDB's
    :param environment: more of the nodes'
    :param service_environment: more of the services'
    """
    lines = (f"coordinator = {coordinator}\n", f"coordinator_timeout = {coordinator_timeout}\n")
    shared = "".join(lines)
    with ExitStack() as stack:
        if database is None:
            started = servers.mariadb(folder, more=database_options)
            database = stack.enter_context(started)
        url = f"{database.fresh_database(f'keystone{uuid.uuid4().hex}')}&plugin=keyfront"
        states = [_node(folder / f"node{x}", url, shared + options) for x in range(2)]
        _name_in_catalog(url, [port_of(state) for state in states])
        running = [
            stack.enter_context(serve_as_is(state, "uwsgi", environment=environment))
            for state in states
        ]
        # A change waits for a table that has just begun, on a busy machine for too long.
        World(running[0].url, running[0].password).wait_until_kept()
        services = []
        told = "".join(f"keyfront_{line}" for line in lines)
        for number, (asked, named) in enumerate(zip(running, (FIRST, LAST), strict=True)):
            trusting = service(
                folder / f"service{number}", asked, f"{told}{named}{service_options}",
                service_environment,
            )
            services.append(stack.enter_context(trusting))
        yield Cluster(running, services, database, url, shared)


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
    # keyfront serve has a state folder; of the Keystone in it nothing is used. At another port it
    # would run keystone-manage, which takes it two seconds of a processor.
    state = keystone_state(folder)
    paste = folder / "service.ini"
    asking = authtoken_options(node.url, node.password)
    paste.write_text(_PASTE.format(credentials=asking, options=options))
    paste.chmod(0o600)
    environment = {"KEYFRONT_APP": f"config:{paste}", "PYTHONPATH": str(APPS), **(more or {})}
    with serve_as_is(state, "uwsgi", environment=environment) as served:
        yield served

"""What the soak runs on: two nodes behind HAProxy as rendered, and everything they need.

Keystone's tables are in a MariaDB, changes are told by Redis, one domain's users are in two slapds,
notifications go to a RabbitMQ, and two services trust a node each. Redis and the slapds are reached
by proxies that can cut connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import psutil

from keyfront.gateway.plan.workload import Workload
from support import servers
from support.broker import Broker, broker
from support.cluster import service
from support.deployments import Deployment, deployed, uwsgi_manager
from support.directory import Directory, directory
from support.fault_proxy import FaultProxy
from support.following import SYNCPROV
from support.keystone_world import World
from support.keystones import keystone_state
from support.ldap_domains import domain_file, driver_options
from support.processes import runs
from support.programs import own_folder, running
from support.redis_servers import RedisServer, redis_server
from support.served import Served, wait_for
from support.set_clock import SetClock

#: Requests may wait for some seconds: beside others the machine takes its time.
WORKLOAD = Workload(latency=10)
#: The domain whose users are in the directory, and how many there are.
DOMAIN, USERS = "people", 200
#: Bytes of the file system that a node's logs are on, where one can be mounted.
LOG_DISK = "16m"
_CONFIGURATION = """\
[DEFAULT]
transport_url = {broker}
log_file = {folder}/disk/keystone.log
# with nobody there the change is made all the same, and the notification lost
[oslo_messaging_notifications]
transport_url = {broker}
driver = messagingv2
retry = 0
[oslo_messaging_rabbit]
heartbeat_timeout_threshold = 10
[keyfront_heartbeat]
enabled = true
path = {folder}/heartbeat
[identity]
password_hash_rounds = 4
domain_specific_drivers_enabled = true
domain_config_dir = {domains}
[keyfront_token_cache]
path = {folder}/tokens
coordinator = {redis}
coordinator_timeout = 1.0
"""
_DOMAIN = (
    "INSERT INTO keystone.project (id, name, extra, description, enabled, domain_id, is_domain)"
    " VALUES ('{id}', '{name}', '{{}}', '', 1, '<<keystone.domain.root>>', 1)"
)


@dataclass
class Node:
    """A host: nginx in front of a uWSGI that is started again when it ends, as systemd does.

    :ivar restarts: how often that was
    :ivar drained: nobody is to ask it but by HAProxy, which does not
    """

    name: str
    deployment: Deployment
    password: str
    environment: dict[str, str]
    log_disk: Path | None
    restarts: int = 0
    drained: bool = False
    _lives: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"{self.deployment.url}/v3"

    @property
    def ini(self) -> Path:
        return self.deployment.folder / "uwsgi.ini"

    @property
    def unit(self) -> psutil.Process:
        """What systemd watches: ``keyfront uwsgi``, which runs uWSGI."""
        return self.deployment.processes[0]

    @property
    def master(self) -> psutil.Process:
        """The one of uWSGI, now."""
        return self.unit.children()[-1]

    def uwsgi(self) -> list[psutil.Process]:
        """All processes of the unit."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.unit, *self.unit.children(recursive=True)]
        return []

    def workers(self) -> list[psutil.Process]:
        """Those that serve the application."""
        from keyfront.gateway.node.counters import read

        found = []
        for pid in read(self.deployment.folder / "run/app/node").workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def gone(self) -> bool:
        """Whether nothing of its uWSGI is left: its workers end with the master."""
        return not runs(self.unit) and not any(runs(x) for x in self.workers())

    def revive(self) -> None:
        """Start uWSGI again if it has ended."""
        if runs(self.unit):
            return
        self.restarts += 1
        log = self.deployment.folder / "log" / f"again-{self.restarts}.out"
        command = uwsgi_manager(self.deployment.folder)
        started = running(command, log, signal.SIGTERM, environment=self.environment)
        process = self._lives.enter_context(started)
        self.deployment.processes[0] = psutil.Process(process.pid)

    def close(self) -> None:
        self._lives.close()


@dataclass
class Site:
    """What runs; :func:`site` starts it.

    :ivar balancer: HAProxy, where users come in
    :ivar domain: the id of the directory's domain
    """

    nodes: list[Node]
    balancer: Deployment
    services: list[Served]
    database: servers.MariaDB
    database_lives: servers.Restarts
    redis: RedisServer
    redis_proxy: FaultProxy
    directories: list[Directory]
    directory_proxies: list[FaultProxy]
    broker: Broker
    clock: SetClock
    domain: str

    @property
    def url(self) -> str:
        """HAProxy's, with ``/v3``."""
        return f"{self.balancer.url}/v3"

    @property
    def everywhere(self) -> dict[str, str]:
        """Where tokens are shown, by name: the nodes' URLs with ``/v3``, the services' without."""
        nodes = {node.name: node.url for node in self.nodes}
        found = {f"service {n}": x.url.removesuffix("/v3") for n, x in enumerate(self.services, 1)}
        return nodes | found


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Run all of it until the block ends; everything is ready when the block begins.

    ``SSL_CERT_FILE`` is set meanwhile: clients of this process trust the nodes' certificate.

    :param folder: an empty one
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        redis = enter(redis_server(_made(folder / "redis")))
        redis_proxy = enter(FaultProxy(redis.port))
        rabbit = enter(broker(_made(folder / "rabbitmq")))
        directories, proxies = [], []
        for number in (1, 2):
            own = _made(folder / f"slapd{number}")
            one = directory(own, tls="both", users=USERS, **SYNCPROV)  # type: ignore[arg-type]
            directories.append(enter(one))
            proxies.append(enter(FaultProxy(directories[-1].port)))
        database = enter(servers.mariadb(folder, more=servers.OUTLIVES))
        database_url = f"{database.fresh_database('keystone')}&plugin=keyfront"
        clock = SetClock(_made(folder / "clock"))
        domains = _made(folder / "domains")
        urls = ",".join(proxy.url() for proxy in proxies)
        options = driver_options(directories[0], url=urls, user_enabled_attribute="enabled")
        del options["tls_cacertfile"]
        (domains / f"keystone.{DOMAIN}.conf").write_text(domain_file(options))
        redis_url = f"redis://127.0.0.1:{redis_proxy.port}/0"
        domain = uuid.uuid4().hex
        nodes: list[Node] = []
        for number in (1, 2):
            own = _made(folder / f"node{number}")
            disk = _small_disk(stack, _made(own / "disk"))
            text = _CONFIGURATION.format(
                broker=rabbit.url(), folder=own, domains=domains, redis=redis_url
            )
            state = keystone_state(own / "state", database_url=database_url, extra=text)
            if not nodes:
                database.ask(_DOMAIN.format(id=domain, name=DOMAIN))
            nodes.append(_node(stack, f"node {number}", state, clock, disk, nodes))
        place = enter(own_folder("soak"))
        place.chmod(0o711)
        first = nodes[0].deployment
        behind = tuple(node.deployment for node in nodes)
        balancer = enter(
            deployed(place, "haproxy", pair=first.folder, nodes=behind, workload=WORKLOAD)
        )
        stack.callback(_trust, os.environ.get("SSL_CERT_FILE"))
        _trust(str(first.certificate))
        for deployment in (*behind, balancer):
            wait_for(lambda x=deployment: ready(x), "it is ready")
        _move_catalog(nodes[0], f"{balancer.url}/v3")
        more = (
            f"cafile = {first.certificate}\nkeyfront_coordinator = {redis_url}\n"
            "keyfront_coordinator_timeout = 1.0\n"
        )
        services = [
            enter(service(folder / f"service{number}", node, more))  # type: ignore[arg-type]
            for number, node in enumerate(nodes, 1)
        ]
        lives = enter(servers.Restarts(database))
        for node in nodes:
            stack.callback(node.close)
        yield Site(
            nodes, balancer, services, database, lives, redis, redis_proxy, directories, proxies,
            rabbit, clock, domain,
        )


def ready(deployment: Deployment) -> bool:
    """Whether its ``/readyz`` says so."""
    connection = deployment.connect()
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _node(
    stack: ExitStack, name: str, state: Path, clock: SetClock, disk: Path | None,
    before: list[Node],
) -> Node:
    place = stack.enter_context(own_folder("soak"))
    place.chmod(0o711)
    environment = {**clock.environment}
    deployment = stack.enter_context(
        deployed(
            place, "nginx+uwsgi", config=state, trusted=("127.0.0.1",), workload=WORKLOAD,
            environment=environment, manager=True,
            pair=before[0].deployment.folder if before else None,
        )
    )
    password = (state / "admin-password").read_text().strip()
    return Node(name, deployment, password, environment, disk)


def _move_catalog(node: Node, url: str) -> None:
    """Services find Keystone by it."""
    world = World(node.url, node.password)
    for endpoint in world.call("GET", "/endpoints").body["endpoints"]:
        world.patch("endpoint", f"/endpoints/{endpoint['id']}", url=url)


def _small_disk(stack: ExitStack, folder: Path) -> Path | None:
    """A file system of few bytes, where this process may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _trust(certificate: str | None) -> None:
    if certificate is None:
        os.environ.pop("SSL_CERT_FILE", None)
    else:
        os.environ["SSL_CERT_FILE"] = certificate

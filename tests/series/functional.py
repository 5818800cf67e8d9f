"""Runs OpenStack's own test suites against ``keyfront serve --database``, and writes the table.

    tox -e 2026.2-functional                                              # all
    tox -e 2026.2-functional -- --server uwsgi --database mariadb         # one deployment
    tox -e 2026.2-functional -- --table                                   # of earlier runs only

Tempest's identity tests run on every line-up with MariaDB and PostgreSQL; its tests of image,
compute and network that glance, nova's and neutron's APIs answer alone, and placement's own, run on
services that validate at one of them. What was found is kept in ``.tox/series`` and written to
docs/compatibility.md, where the rest stays as it is. Ends with 1 if a test failed, or none was run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from keyfront.gateway.keystone import series  # noqa: E402
from series.matrix import DOCUMENT, RESULTS, listed, put_in  # noqa: E402
from support import servers, services  # noqa: E402
from support.keystone_world import Client, World  # noqa: E402
from support.programs import ready, running  # noqa: E402
from support.served import PATIENCE, SHAPES, Served, free_port, serve  # noqa: E402

DATABASES = ("mariadb", "postgresql")
#: The tests that each suite of tempest runs.
TEMPEST = {
    "identity": r"^tempest\.api\.identity\.",
    "image": r"^tempest\.api\.image\.",
    "compute": (
        r"^tempest\.api\.compute\.(flavors|keypairs|limits|test_extensions|test_quotas|test_versions"
        r"|servers\.test_multiple_create_negative|admin\.test_(aggregates|availability_zone|flavors"
        r"|flavors_access|flavors_extra_specs|flavors_microversions|hypervisor"
        r"|instance_usage_audit_log|keypairs_v210|quotas|services|simple_tenant_usage)(_negative)?)\."
    ),
    "network": (
        r"^tempest\.api\.network\.(test_networks|test_networks_negative|test_ports|test_extensions"
        r"|test_versions|admin\.test_ports|admin\.test_quotas|admin\.test_negative_quotas)\."
    ),
}
#: Those of them that need a hypervisor or an agent, the services beside it, or what is not set up.
WITHOUT = {
    "compute": (
        r"test_hypervisor\.|test_hypervisor_negative\..*\.test_(search_hypervisor|show_servers|show_hypervisor"
        r"|get_hypervisor_uptime)_with_non_admin|test_services\.|_valid_service_|_valid_host"
        r"|test_create_server_when_|SecurityGroupAdmin|test_simple_tenant_usage\."
        r"|test_boot_with_low_ram|test_max_metadata_exceed_limit|test_get_availability_zone_list(\[|$)"
        r"|test_aggregate_(add_existent_host|(add|remove)_host_as_user)"
    ),
    # routers are a plugin's, and those are not all of its extensions
    "network": r"_by_router_id|test_list_show_extensions",
}
SUITES = (*TEMPEST, "placement")
#: Where the suites of services run: what they ask of Keystone is the same on every line-up.
SERVICES_ON = ("nginx+uwsgi", "mariadb")
KEPT = RESULTS / "functional.json"
START, END = "<!-- functional -->", "<!-- /functional -->"

# Locked users and remembered passwords are tested, too; and what a password hash costs is not what
# is looked at: a suite makes hundreds of them.
ENVIRONMENT = {
    "OS_IDENTITY__PASSWORD_HASH_ROUNDS": "4",
    "OS_SECURITY_COMPLIANCE__LOCKOUT_FAILURE_ATTEMPTS": "2",
    "OS_SECURITY_COMPLIANCE__LOCKOUT_DURATION": "5",
    "OS_SECURITY_COMPLIANCE__UNIQUE_LAST_PASSWORD_COUNT": "2",
}
_CONFIGURATION = """\
[DEFAULT]
log_file = {folder}/tempest.log
[oslo_concurrency]
lock_path = {folder}/locks
[auth]
admin_username = admin
admin_password = {password}
admin_project_name = admin
admin_domain_name = Default
admin_system = all
[identity]
uri_v3 = {url}
auth_version = v3
user_lockout_failure_attempts = 2
user_lockout_duration = 5
user_unique_last_password_count = 2
[identity-feature-enabled]
security_compliance = true
[image]
region = {region}
# glance needs a second store, or one that others can load images from
[image-feature-enabled]
import_image = false
[compute]
region = {region}
max_microversion = latest
flavor_ref = {flavor}
flavor_ref_alt = {other}
[network]
region = {region}
[service_available]
cinder = false
glance = {glance}
neutron = {neutron}
nova = {nova}
swift = false
horizon = false
"""


def register(world: World, kind: str, url: str) -> str:
    """Name a service in the catalog; returns the region."""
    region = str(world.call("GET", "/regions").body["regions"][0]["id"])
    made = world.call("POST", "/services", {"service": {"type": kind, "name": kind}}).body
    endpoint = {
        "service_id": made["service"]["id"], "region_id": region, "interface": "public", "url": url,
    }  # fmt: skip
    world.call("POST", "/endpoints", {"endpoint": endpoint})
    return region


@contextlib.contextmanager
def glance(folder: Path, served: Served, fresh_database: Callable[[str], str]) -> Iterator[int]:
    """Run glance until the block ends; gives its port."""
    sections = services.authtoken(served.url, served.password)
    services.configure_glance(folder, fresh_database("glance"), sections)
    definitions = str(Path(sys.prefix, "etc", "glance", "metadefs"))
    for words in (["db", "sync"], ["db", "load_metadefs", "--path", definitions]):
        services.manage("glance", folder / "glance-api.conf", *words)
    # images come in chunks, which uWSGI does not hand on unasked
    command = [sys.executable, "-W", "ignore", "-m", "gunicorn", "--threads", "8"]
    command += ["glance.wsgi.api:application", "--bind"]
    with listening(command, folder, "OS_GLANCE_CONFIG_DIR") as port:
        yield port


@contextlib.contextmanager
def nova(folder: Path, served: Served, fresh_database: Callable[[str], str]) -> Iterator[int]:
    """Run nova's API until the block ends; gives its port."""
    databases = [fresh_database(name) for name in ("nova_api", "nova_cell0", "nova")]
    services.configure_nova(folder, *databases, services.authtoken(served.url, served.password))
    command = under_uwsgi("nova.wsgi.osapi_compute")
    with listening(command, folder, "OS_NOVA_CONFIG_DIR") as port:
        yield port


@contextlib.contextmanager
def neutron(folder: Path, served: Served, fresh_database: Callable[[str], str]) -> Iterator[int]:
    """Run neutron's API until the block ends; gives its port."""
    sections = services.authtoken(served.url, served.password)
    services.configure_neutron(folder, fresh_database("neutron"), sections)
    command = under_uwsgi("neutron.wsgi.api")
    with listening(command, folder, "OS_NEUTRON_CONFIG_DIR") as port:
        yield port


def under_uwsgi(module: str) -> list[str]:
    """Return a command to serve an application, which its address is appended to.

    Nova and neutron read the command line, which under uWSGI has nothing that is not theirs.
    """
    return [
        str(Path(sys.prefix, "bin", "uwsgi")), "--master", "--processes", "4", "--lazy-apps",
        "--enable-threads", "--need-app", "--die-on-term", "--buffer-size", "65535",
        "--virtualenv", sys.prefix, "--module", module, "--http-socket",
    ]  # fmt: skip


@contextlib.contextmanager
def listening(command: list[str], folder: Path, variable: str) -> Iterator[int]:
    """Run a service until the block ends; gives the port, at which it answers.

    :param command: what its address is appended to
    :param variable: by which it finds its configuration in the folder
    """
    port, log = free_port(), folder / "log"

    def answers() -> None:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
            connection.request("GET", "/")
            connection.getresponse()

    with running(
        [*command, f"127.0.0.1:{port}"], log, signal.SIGTERM, environment={variable: str(folder)}
    ) as process:
        ready(answers, process, log, (OSError, HTTPException))
        yield port


class Services:
    """The services that suites ask for, each of which runs from then on.

    :ivar region: where they are in the catalog
    :ivar flavors: two of nova's, which tempest takes to be there
    """

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, served: Served,
        fresh_database: Callable[[str], str],
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._served = served
        self._fresh_database = fresh_database
        self._world = World(served.url, served.password)
        self._running: set[str] = set()
        self.region = "RegionOne"
        self.flavors: list[str] = []

    def run(self, suite: str) -> None:
        """Run what a suite needs, if it does not run."""
        # tempest makes all clients of compute with those of image
        if suite in ("image", "compute") and "image" not in self._running:
            self._run("image", glance, "")
        if suite == "compute" and not self.flavors:
            url = self._run("compute", nova, "/v2.1")
            self.flavors = [self._flavor(url, number) for number in (1, 2)]

        if suite == "network" and "network" not in self._running:
            self._run("network", neutron, "")

    def _run(self, kind: str, service: Callable[..., Any], path: str) -> str:
        own = self._folder / f"{kind}-service"
        own.mkdir()
        port = self._stack.enter_context(service(own, self._served, self._fresh_database))
        url = f"http://127.0.0.1:{port}{path}"
        self.region = register(self._world, kind, url)
        self._running.add(kind)
        return url

    def _flavor(self, url: str, number: int) -> str:
        wanted = {"name": f"f{number}", "ram": 64 * number, "disk": 0, "vcpus": 1}
        with contextlib.closing(Client(url)) as client:
            headers = {"X-Auth-Token": self._world.admin}
            answer = client.request("POST", "/flavors", headers, {"flavor": wanted})
        assert answer.status == 200, answer
        return str(answer.body["flavor"]["id"])


def tempest(suite: str, folder: Path, served: Served, found: Services) -> dict[str, int]:
    """Run a suite of tempest; returns how many tests passed, were skipped and failed."""
    configuration = folder / "tempest.conf"
    flavor, other = found.flavors or ("", "")
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder, url=served.url, password=served.password, region=found.region,
            flavor=flavor, other=other,
            glance=str(suite in ("image", "compute")).lower(),
            neutron=str(suite == "network").lower(), nova=str(suite == "compute").lower(),
        )
    )
    program = str(Path(sys.prefix, "bin", "tempest"))
    # it keeps a list of its workspaces there
    environment = {**os.environ, "HOME": str(folder)}
    workspace = folder / "workspace"
    subprocess.run([program, "init", str(workspace)], env=environment, check=True)
    return counted(
        [
            program, "run", "--config-file", str(configuration), "--regex", TEMPEST[suite],
            "--concurrency", str(os.cpu_count()),
            *(["--exclude-regex", WITHOUT[suite]] if suite in WITHOUT else []),
        ],
        workspace, environment, r"^ - (Passed|Skipped|Failed): (\d+)$",
    )  # fmt: skip


def placement(folder: Path, served: Served) -> dict[str, int]:
    """Run placement's API tests with tokens of this Keystone; returns how they went."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/series/placement_suite.py")]
    environment = {
        **os.environ, "KEYSTONE_URL": served.url, "KEYSTONE_PASSWORD": served.password,
    }  # fmt: skip
    return counted(command, folder, environment, r"^(Passed|Skipped|Failed): (\d+)$")


def counted(
    command: list[str], folder: Path, environment: dict[str, str], pattern: str
) -> dict[str, int]:
    """Run a suite and show what it prints; returns its totals by their names in lower case."""
    found: dict[str, int] = {}
    # placement's tests log there all they do
    with (folder / "stderr").open("wb") as rest:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=rest, text=True,
            errors="replace",
        )
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(line, end="", flush=True)
            for name, number in re.findall(pattern, line.rstrip("\n")):
                found[name.lower()] = int(number)
    process.wait()
    if set(found) != {"passed", "skipped", "failed"} or not found["passed"]:
        raise RuntimeError(f"{command[0]} ran no tests: {found}")
    return found


def run(server: str, database: str, suites: list[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Serve Keystone with a server on a database, and run suites against it; gives their totals."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="keyfront-functional-")))
        # Apache's processes that are of another user read there
        folder.chmod(0o755)
        store = stack.enter_context(getattr(servers, database)(folder))
        file = folder / "database"
        file.write_text(store.fresh_database("keystone"))
        file.chmod(0o600)
        served = stack.enter_context(
            serve(
                folder / "state", server, arguments=("--database", f"@{file}"),
                environment=ENVIRONMENT,
            )
        )
        needed = Services(stack, folder, served, store.fresh_database)
        for suite in suites:
            own = folder / suite
            own.mkdir()
            if suite == "placement":
                yield suite, placement(own, served)
            else:
                needed.run(suite)
                yield suite, tempest(suite, own, served, needed)


def cell(found: dict[str, int] | None) -> str:
    """Return what a suite found, for the table: empty if it was not run."""
    if not found:
        return ""
    said = f"**{found['failed']} failed**, {found['passed']}" if found["failed"] else ""
    said = said or str(found["passed"])
    return f"{said}, {found['skipped']} skipped" if found["skipped"] else said


def table(results: dict[str, Any]) -> str:
    """Return the table in Markdown, of results by series and deployment: a row for each."""
    lines = [
        f"| OpenStack | server | database | {' | '.join(SUITES)} | run |",
        f"|---|---|---|{'---:|' * len(SUITES)}---|",
    ]
    for name in [one["name"] for one in listed()["series"]]:
        for server in SHAPES:
            for database in DATABASES:
                found = results.get(name, {}).get(f"{server} {database}", {})
                cells = [cell(found.get(suite)) for suite in SUITES]
                row = [name, f"`{server}`", database, *cells, found.get("date", "")]
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def wanted(suite: str, server: str, database: str) -> bool:
    """Whether a suite runs there, if nothing else is asked for."""
    needed = {"compute": "nova", "network": "neutron"}.get(suite)
    if needed and find_spec(needed) is None:
        return False
    return suite == "identity" or (server, database) == SERVICES_ON


def earlier() -> dict[str, Any]:
    """Return what was found in this folder so far, by series and deployment."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def main() -> int:
    """Run what is asked for; returns 1 if a test failed or none could be run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option, choices in (("server", SHAPES), ("database", DATABASES), ("suite", SUITES)):
        text = f"one {option}; may be repeated"
        parser.add_argument(f"--{option}", action="append", choices=choices, help=text)
    parser.add_argument("--table", action="store_true", help="write the table of earlier runs")
    arguments = parser.parse_args()
    version = series.installed()
    name = version.partition("OpenStack ")[2].rstrip(")")
    results = earlier()
    good = True
    for server in arguments.server or SHAPES if not arguments.table else ():
        for database in arguments.database or DATABASES:
            suites = [
                suite for suite in arguments.suite or SUITES if wanted(suite, server, database)
            ]
            if not suites:
                continue
            print(f"Keystone {version}, {server}, {database}: {', '.join(suites)}", flush=True)
            try:
                for suite, found in run(server, database, suites):
                    good = good and not found["failed"]
                    results = earlier()  # of another process meanwhile, too
                    kept = results.setdefault(name, {}).setdefault(f"{server} {database}", {})
                    kept.update({suite: found, "date": time.strftime("%Y-%m-%d", time.gmtime())})
                    RESULTS.mkdir(parents=True, exist_ok=True)
                    KEPT.write_text(json.dumps(results, indent=1), encoding="utf-8")
            except (pytest.skip.Exception, AssertionError, RuntimeError) as error:
                print(f"could not be run: {error}", file=sys.stderr)
                good = False
    put_in(table(results), DOCUMENT, START, END)
    return 0 if good and results else 1


if __name__ == "__main__":
    sys.exit(main())

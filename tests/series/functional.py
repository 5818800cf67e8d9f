"""Runs OpenStack's own test suites against ``keyfront serve --database``, and writes the table.

    tox -e 2026.2-functional                                              # all
    tox -e 2026.2-functional -- --server uwsgi --database mariadb         # one deployment
    tox -e 2026.2-functional -- --table                                   # of earlier runs only

Tempest's identity tests run on every line-up with MariaDB and PostgreSQL; its image and compute
tests that need no servers, and placement's own API tests, run on services that validate at one of
them. What was found is kept in ``.tox/series`` and written to docs/compatibility.md. Ends with 1 if
a test failed, or none was run.
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
from support.keystone_world import World  # noqa: E402
from support.programs import running  # noqa: E402
from support.served import SHAPES, Served, free_port, serve, wait_for  # noqa: E402

DATABASES = ("mariadb", "postgresql")
#: The tests that each suite of tempest runs; those of compute need no servers, network or images.
TEMPEST = {
    "identity": r"^tempest\.api\.identity\.",
    "image": r"^tempest\.api\.image\.",
    "compute": (
        r"^tempest\.api\.compute\.(flavors|keypairs|limits|test_extensions|test_quotas|test_versions"
        r"|admin\.test_(aggregates|availability_zone|flavors|flavors_access|flavors_extra_specs"
        r"|keypairs_v210|quotas|security_groups|services|hypervisor)(_negative)?\.)"
    ),
}
SUITES = (*TEMPEST, "placement")
#: Where the suites of services run: what they ask of Keystone is the same on every line-up.
SERVICES_ON = ("nginx+uwsgi", "mariadb")
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
[service_available]
cinder = false
glance = {glance}
neutron = false
nova = {nova}
swift = false
horizon = false
"""


@contextlib.contextmanager
def service(
    kind: str, folder: Path, served: Served, fresh_database: Callable[[str], str]
) -> Iterator[str]:
    """Run glance or nova until the block ends, and name it in the catalog; gives the region."""
    module, variable, path = {
        "image": ("glance.wsgi.api", "OS_GLANCE_CONFIG_DIR", ""),
        "compute": ("nova.wsgi.osapi_compute", "OS_NOVA_CONFIG_DIR", "/v2.1"),
    }[kind]
    port = free_port()
    world = World(served.url, served.password)
    region = world.call("GET", "/regions").body["regions"][0]["id"]
    made = world.call("POST", "/services", {"service": {"type": kind, "name": kind}}).body
    endpoint = {
        "service_id": made["service"]["id"], "region_id": region, "interface": "public",
        "url": f"http://127.0.0.1:{port}{path}",
    }  # fmt: skip
    world.call("POST", "/endpoints", {"endpoint": endpoint})
    sections = services.authtoken(served.url, served.password)
    if kind == "image":
        services.configure_glance(folder, fresh_database("glance"), sections)
        definitions = str(Path(sys.prefix, "etc", "glance", "metadefs"))
        for words in (["db", "sync"], ["db", "load_metadefs", "--path", definitions]):
            services.manage("glance", folder / "glance-api.conf", *words)
    else:
        databases = [fresh_database(name) for name in ("nova_api", "nova")]
        services.configure_nova(folder, *databases, sections)
    command = [sys.executable, "-W", "ignore", "-m", "gunicorn", "--threads", "8", "--bind"]
    command += [f"127.0.0.1:{port}", f"{module}:application"]
    log = folder / "log"
    environment = {variable: str(folder)}
    with running(command, log, signal.SIGTERM, environment=environment) as process:
        listening = b"Listening at"
        wait_for(lambda: listening in log.read_bytes() or process.poll() is not None, "it listens")
        assert process.poll() is None, log.read_text(errors="replace")
        yield region


def tempest(suite: str, folder: Path, served: Served, region: str) -> dict[str, int]:
    """Run a suite of tempest; returns how many tests passed, were skipped and failed."""
    configuration = folder / "tempest.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder, url=served.url, password=served.password, region=region,
            glance=str(suite == "image").lower(), nova=str(suite == "compute").lower(),
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
        for suite in suites:
            own = folder / suite
            own.mkdir()
            with contextlib.ExitStack() as running_service:
                if suite == "placement":
                    yield suite, placement(own, served)
                    continue
                region = "RegionOne"
                if suite != "identity":
                    region = running_service.enter_context(
                        service(suite, own, served, store.fresh_database)
                    )
                yield suite, tempest(suite, own, served, region)


def cell(found: dict[str, int] | None) -> str:
    """Return what a suite found, for the table: empty if it was not run."""
    if not found:
        return ""
    said = f"**{found['failed']} failed**, {found['passed']}" if found["failed"] else ""
    said = said or str(found["passed"])
    return f"{said}, {found['skipped']} skipped" if found["skipped"] else said


def table(results: dict[str, Any]) -> str:
    """Return the table in Markdown, of results by series and deployment."""
    lines = [
        f"| OpenStack | server | database | {' | '.join(SUITES)} | run |",
        f"|---|---|---|{'---:|' * len(SUITES)}---|",
    ]
    for name in [one["name"] for one in listed()["series"]]:
        for server in SHAPES:
            for database in DATABASES:
                found = results.get(name, {}).get(f"{server} {database}")
                if found:
                    cells = [cell(found.get(suite)) for suite in SUITES]
                    row = [name, f"`{server}`", database, *cells, found["date"]]
                    lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def wanted(suite: str, server: str, database: str) -> bool:
    """Whether a suite runs there, if nothing else is asked for."""
    if suite == "compute" and find_spec("nova") is None:
        return False
    return suite == "identity" or (server, database) == SERVICES_ON


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
    file = RESULTS / "functional.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
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
                    kept = results.setdefault(name, {}).setdefault(f"{server} {database}", {})
                    kept.update({suite: found, "date": time.strftime("%Y-%m-%d", time.gmtime())})
                    RESULTS.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
            except (pytest.skip.Exception, AssertionError, RuntimeError) as error:
                print(f"could not be run: {error}", file=sys.stderr)
                good = False
    put_in(table(results), DOCUMENT, START, END)
    return 0 if good and results else 1


if __name__ == "__main__":
    sys.exit(main())

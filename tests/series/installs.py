"""Installs keyfront into the environments of services, and writes the table of what pip did.

    python tests/series/installs.py                  # each service of each series
    python tests/series/installs.py --series 2025.1  # those of one
    python tests/series/installs.py --table          # only the table, of earlier runs

Each environment has a service and the libraries of its series, on the newest Python of the series;
then pip installs keyfront with the same constraints. Ends with 1 if a library was moved or taken
away, if libraries contradict one another, or if a part of keyfront that the service loads does not
load there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from series.matrix import DOCUMENT, HERE, RESULTS, listed, put_in  # noqa: E402

KEPT = RESULTS / "installs.json"
START, END = "<!-- installs -->", "<!-- /installs -->"
#: Services by their names in series.toml: the package, and what of keyfront it loads.
SERVICES = {
    "keystone": ("keystone", ["token_cache", "authtoken"]),
    "glance": ("glance", ["authtoken", "heartbeat"]),
    "placement": ("openstack-placement", ["authtoken"]),
    "nova": ("nova", ["authtoken", "heartbeat"]),
    "neutron": ("neutron", ["authtoken", "heartbeat"]),
}
#: What an operator adds beside Keystone.
EXTRAS = "keystone,ldap,redis,uwsgi,metrics,doctor"
KEYS = ("added", "moved")
LOAD = """
import importlib.metadata, sys
wanted = set(sys.argv[1:])
for one in importlib.metadata.entry_points(group="paste.filter_factory"):
    if one.value.startswith("keyfront.") and one.name in wanted:
        one.load()
        wanted.remove(one.name)
sys.exit(f"no {wanted}" if wanted else 0)
"""


def run(*command: str | Path) -> str:
    """Run a command and return what it printed.

    :raises RuntimeError: it failed
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}")
    return done.stdout


def versions(pip: list[str]) -> dict[str, str]:
    """Return what is installed."""
    found = json.loads(run(*pip, "list", "--format", "json"))
    return {one["name"].lower(): one["version"] for one in found}


def compared(before: dict[str, str], after: dict[str, str]) -> dict[str, list[str]]:
    """Return what was added beside keyfront, and what was moved or is gone."""
    return {
        "added": sorted(after.keys() - before.keys() - {"keyfront"}),
        "moved": [
            f"{name} {old} to {after.get(name, 'nothing')}"
            for name, old in sorted(before.items())
            if after.get(name) != old
        ],
    }


def tried(one: dict[str, Any], service: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Install a service and then keyfront; returns what pip added and moved.

    :raises RuntimeError: something does not install, go together, or load
    """
    package, parts = SERVICES[service]
    run(f"python{one['pythons'][-1]}", "-m", "venv", folder)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-compile", "-c", str(HERE / f"{one['name']}.txt")]
    run(*install, f"{package}~={one[service]}.0")
    before = versions(pip)
    run(*install, str(wheel))
    found = compared(before, versions(pip))
    run(*pip, "check")
    run(python, "-c", LOAD, *parts)
    run(folder / "bin" / "keyfront", "--help")
    if service == "keystone":
        run(*install, f"{wheel}[{EXTRAS}]")
        found["extras"] = compared(before, versions(pip))
        run(*pip, "check")
    return found


def table(results: dict[str, Any]) -> str:
    """Return the table in Markdown, of results by series and service."""
    lines = ["| OpenStack | Python | into that of | added | moved | run |", f"{'|---' * 6}|"]
    for one in listed()["series"]:
        for service in SERVICES:
            found = results.get(f"{one['name']} {service}", {})
            for name, what in ((service, found), (f"{service}, extras", found.get("extras", {}))):
                cells = [", ".join(what[key]) or "nothing" if what else "" for key in KEYS]
                row = [one["name"], one["pythons"][-1], name, *cells, found["date"] if what else ""]
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def earlier() -> dict[str, Any]:
    """Return what was found in this folder so far, by series and service."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def main() -> int:
    """Install what is asked for; returns 1 if it was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--series", action="append", help="one series; may be repeated")
    parser.add_argument("--service", action="append", choices=SERVICES, help="may be repeated")
    parser.add_argument("--wheel", type=Path, help="keyfront's; default: one of this folder")
    parser.add_argument("--table", action="store_true", help="write the table of earlier runs")
    arguments = parser.parse_args()
    results = earlier()
    good = True
    with TemporaryDirectory(prefix="keyfront-installs-") as name:
        folder = Path(name)
        wheel = arguments.wheel
        if not arguments.table and not wheel:
            run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
            (wheel,) = folder.glob("*.whl")
        for one in listed()["series"] if not arguments.table else ():
            for service in arguments.service or SERVICES:
                if service not in one or (arguments.series and one["name"] not in arguments.series):
                    continue
                own = folder / f"{one['name']}-{service}"
                try:
                    found = tried(one, service, wheel.resolve(), own)
                except (RuntimeError, OSError) as error:
                    print(f"{one['name']}, {service}: {error}", file=sys.stderr)
                    # Else the page went by an earlier run.
                    found = {key: ["**failed**"] for key in KEYS}
                    if service == "keystone":
                        found = {**found, "extras": found}
                print(f"{one['name']}, {service}: {found}", flush=True)
                good = good and not found["moved"] and not found.get("extras", found)["moved"]
                date = time.strftime("%Y-%m-%d", time.gmtime())
                results = earlier()  # of another process meanwhile, too
                results[f"{one['name']} {service}"] = {**found, "date": date}
                RESULTS.mkdir(parents=True, exist_ok=True)
                KEPT.write_text(json.dumps(results, indent=1), encoding="utf-8")
    put_in(table(results), DOCUMENT, START, END)
    return 0 if good and results else 1


if __name__ == "__main__":
    sys.exit(main())

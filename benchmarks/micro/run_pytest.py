"""``keyfront bench micro``: runs the micro suite with the gate, and keeps what was found."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from keyfront.benchmarks import results
from keyfront.benchmarks.gate.release import Release
from keyfront.benchmarks.results import Cell, Record, Table
from keyfront.errors import BenchmarkError, MissingPartError, OptionError

#: Seconds that a quick run gives each ratio, at most.
QUICK_SECONDS = 3
_HERE = Path(__file__).parent
# pytest's exit status.
_FAILED, _NOTHING = 1, 5
_NEEDS = (("pytest", "pytest"), ("pytest_benchmark", "pytest-benchmark"))
_VERSIONS = (
    *("keystone", "keystonemiddleware", "ldappool", "python-ldap", "ldap3", "amqp"),
    *("Jinja2", "dogpile.cache", "pytest", "pytest-benchmark"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_SECONDS} s for each ratio at most, and no counts of instructions",
    )
    parser.add_argument(
        "-k", dest="expression", metavar="TEXT", help="only what pytest's -k chooses, e.g. ldap"
    )
    parser.add_argument(
        "--baseline",
        metavar="RELEASE",
        help="compare with a release of keyfront instead: a wheel, a source archive, a folder, "
        "keyfront==VERSION, or a revision of the git repository here",
    )
    results.add_argument(parser)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Run the suite; returns 1 if a gate failed.

    :raises MissingPartError: pytest is not installed
    :raises OptionError: ``-k`` chooses nothing, or ``--baseline`` is no release
    :raises BenchmarkError: the suite could not be run, or the result not be written
    """
    for module, distribution in _NEEDS:
        if importlib.util.find_spec(module) is None:
            raise MissingPartError(
                f"{distribution} is not installed: run pip install 'keyfront[bench]'"
            )
    if arguments.baseline is not None:
        Release(arguments.baseline, _HERE).check("--baseline")
    conditions = {
        "quick": arguments.quick,
        "expression": arguments.expression,
        "baseline": arguments.baseline,
    }
    record = Record(
        "micro",
        _name(arguments),
        title="Single operations against their baselines",
        conditions=conditions,
        distributions=_VERSIONS,
        programs=("slapd", "strace", "valgrind"),
    )
    with tempfile.TemporaryDirectory(prefix="bench-micro-") as folder, record:
        found = Path(folder) / "gate.json"
        status = _pytest(arguments, found, Path(folder), out)
        if status == _NOTHING and arguments.expression is not None:
            raise OptionError("-k", arguments.expression, "what is part of a benchmark's name")
        if status not in (0, _FAILED) or not found.is_file():
            raise BenchmarkError(f"the micro-benchmarks could not be run: pytest ended {status}")
        content = json.loads(found.read_text(encoding="utf-8"))
    fill(record, content)
    path = results.write(record.result(), arguments.results)
    out.write(f"{path}\n")
    return int(status == _FAILED)


def _name(arguments: argparse.Namespace) -> str:
    """Return the result's name, one for each way to run it: a part does not replace the whole."""
    parts = ["suite"]
    if arguments.expression is not None:
        parts.append(arguments.expression)
    if arguments.baseline is not None:
        parts.append(f"against {Path(arguments.baseline).name}")
    return " ".join(parts)


def _pytest(arguments: argparse.Namespace, found: Path, folder: Path, out: TextIO) -> int:
    command = [sys.executable, "-m", "pytest", str(_HERE), f"--rootdir={_HERE}", "-c", os.devnull]
    # nothing of the folder it is started in, and nothing left behind
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    command += ["-q", "-rs", "--no-header", "--benchmark-quiet", "--disable-warnings"]
    command += [f"--gate-json={found}"]
    if arguments.quick:
        command += ["-m", "not slow", f"--gate-seconds={QUICK_SECONDS}"]
    if arguments.expression is not None:
        command += [f"-k={arguments.expression}"]
    if arguments.baseline is not None:
        given = Path(arguments.baseline)
        # pytest resolves it from the suite's folder
        name = str(given.absolute()) if given.exists() else arguments.baseline
        command += [f"--gate-baseline={name}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        # pytest-benchmark leaves a folder where it is started
        cwd=folder,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(f"{results.folded(line.rstrip())}\n")
                out.flush()
        except BaseException:
            process.kill()
            raise
    return process.returncode


def fill(record: Record, content: dict[str, Any]) -> None:
    """Put what the gate wrote into a result: a sample for each ratio and count, and two tables."""
    gates, counts = content["gates"], content["counts"]
    record.conditions["seed"] = content["seed"]
    for gate in gates:
        record.samples.append({"kind": "ratio", **gate, "operation": operation(gate["name"])})
    for count in counts:
        record.samples.append({"kind": "count", **count, "operation": operation(count["name"])})
    if content["control"] is not None:
        control = {name: value for name, value in content["control"].items() if name != "pairs_ns"}
        record.conditions["control"] = control
    record.tables.append(
        Table(
            name="ratios",
            columns=["operation", "ours, µs", "baseline, µs", "ratio", "interval", "limit", ""],
            rows=[_row(gate) for gate in gates if "ratio" in gate],
            caption="How many times the baseline's time ours takes; intervals of 99.9 %.",
        )
    )
    record.tables.append(
        Table(
            name="counts",
            columns=["operation", "counted", "count", "recorded", ""],
            rows=[
                [operation(one["name"]), _key(one), one["value"], one["recorded"], one["verdict"]]
                for one in counts
            ],
        )
    )


def operation(node: str) -> str:
    """Return a test's name for a reader: ``tokens: hit against stock keystone``."""
    file, _, name = node.partition("::")
    place = Path(file).stem.removeprefix("test_")
    words = name.removeprefix("test_").replace("_", " ").replace("[", " (").replace("]", ")")
    return f"{place}: {words}"


def _key(count: dict[str, Any]) -> str:
    key: str = count["key"]
    return f"instructions by {key}" if count["fixture"] == "instructions" else key.replace("_", " ")


def _row(gate: dict[str, Any]) -> list[Cell]:
    low, high = ("?" if gate[end] is None else f"{gate[end]:.3g}" for end in ("low", "high"))
    return [
        operation(gate["name"]),
        round(gate["candidate_seconds"] * 1e6, 2),
        round(gate["baseline_seconds"] * 1e6, 2),
        float(f"{gate['ratio']:.3g}"),
        f"{low} to {high}",
        float(f"{gate['limit']:.3g}"),
        gate["verdict"],
    ]

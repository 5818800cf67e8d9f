"""``keyfront bench micro``: runs the micro suite with the gate, and keeps what was found."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from keyfront.benchmarks import results
from keyfront.benchmarks.results import Record
from keyfront.benchmarks.servers.processes import streamed
from keyfront.common import programs
from keyfront.errors import BenchmarkError, OptionError

#: Seconds that a quick run gives each ratio, at most.
QUICK_SECONDS = 3
_HERE = Path(__file__).parent
# pytest's exit status.
_FAILED, _NOTHING = 1, 5
_VERSIONS = (
    *("keystone", "keystonemiddleware", "ldappool", "python-ldap", "ldap3", "amqp"),
    *("Jinja2", "dogpile.cache", "pytest", "pytest-benchmark"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = f"{QUICK_SECONDS} s for each ratio at most, and no counts of instructions"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument(
        "-k", dest="expression", metavar="TEXT", help="only what pytest's -k chooses, e.g. ldap"
    )
    text = "compare with a release of keyfront instead: a wheel, a source archive, a folder, "
    text += "keyfront==VERSION, or a revision of the git repository here"
    parser.add_argument("--baseline", metavar="RELEASE", help=text)
    results.add_argument(parser)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Run the suite; returns 1 if a gate failed.

    :raises MissingPartError: pytest is not installed
    :raises OptionError: ``-k`` chooses nothing, or ``--baseline`` is no release
    :raises BenchmarkError: the suite could not be run, or the result not be written
    """
    for module in ("pytest", "pytest_benchmark"):
        programs.require_module(module, "bench")
    from keyfront.benchmarks.gate.release import Release  # which needs pytest

    if arguments.baseline is not None:
        Release(arguments.baseline, _HERE).check("--baseline")
    names = ("quick", "expression", "baseline")
    # one for each way to run it: a part does not replace the whole
    parts = ["suite", *([arguments.expression] if arguments.expression is not None else [])]
    if arguments.baseline is not None:
        parts.append(f"against {Path(arguments.baseline).name}")
    record = Record(
        "micro",
        " ".join(parts),
        title="Single operations against their baselines",
        conditions={name: getattr(arguments, name) for name in names},
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

    say = results.to(out)
    # pytest-benchmark leaves a folder where it is started
    return streamed(
        command, lambda line: say(line.rstrip()), env=environment, cwd=folder,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


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
    caption = "How many times the baseline's time ours takes; intervals of 99.9 %."
    ratios: dict[str, Any] = {
        "operation": lambda one: operation(one["name"]),
        "ours, µs": lambda one: round(one["candidate_seconds"] * 1e6, 2),
        "baseline, µs": lambda one: round(one["baseline_seconds"] * 1e6, 2),
        "ratio": lambda one: float(f"{one['ratio']:.3g}"),
        "interval": lambda one: f"{_end(one['low'])} to {_end(one['high'])}",
        "limit": lambda one: float(f"{one['limit']:.3g}"),
        "": "verdict",
    }
    counted: dict[str, Any] = {
        "operation": lambda one: operation(one["name"]),
        "counted": _key,
        "count": "value",
        "recorded": "recorded",
        "": "verdict",
    }
    timed = [gate for gate in gates if "ratio" in gate]
    record.tables.append(results.tabled("ratios", timed, ratios, caption))
    record.tables.append(results.tabled("counts", counts, counted))


def operation(node: str) -> str:
    """Return a test's name for a reader: ``tokens: hit against stock keystone``."""
    file, _, name = node.partition("::")
    place = Path(file).stem.removeprefix("test_")
    words = name.removeprefix("test_").replace("_", " ").replace("[", " (").replace("]", ")")
    return f"{place}: {words}"


def _key(count: dict[str, Any]) -> str:
    key: str = count["key"]
    return f"instructions by {key}" if count["fixture"] == "instructions" else key.replace("_", " ")


def _end(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.3g}"

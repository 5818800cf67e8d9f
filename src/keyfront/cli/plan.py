"""What ``keyfront plan`` does: prints the numbers of a node with their reasons, or measures them.

Exit status 0, 2 for bad input, 3 if something cannot be met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any, TextIO

from keyfront import __version__
from keyfront.cli import measure as measure_commands
from keyfront.cli import workload as workload_arguments
from keyfront.errors import OptionError
from keyfront.gateway.plan.compute import GROUPS, Plan, plan
from keyfront.gateway.plan.numbers import Conflict, Number

#: The exit status where the plan cannot be met.
CONFLICT = 3

_SHORT = {"seconds": " s", "bytes": " B", "MiB": " MiB", "MiB a process": " MiB"}
_GAP = "  "
_NAMES = 29
_WIDEST = 150
# What a measurement decides.
_MEASURED = ("uwsgi.processes", "uwsgi.threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``keyfront plan``."""
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help="print these only, for example uwsgi nginx (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    workload_arguments.add_workload_arguments(parser)
    measure_commands.add_arguments(parser)


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Print the plan; returns the exit status.

    :raises OptionError: a figure is not one, or out of range
    :raises KeyfrontError: what shall be measured cannot be served
    """
    machine = workload_arguments.machine(arguments)
    workload = workload_arguments.workload(arguments)
    profile = workload_arguments.profile(arguments)
    made = plan(machine, workload, profile)
    choose(made, arguments.groups)
    measure_commands.check(arguments)
    measured = measure_commands.run(arguments, made, err) if arguments.measure else None
    if measured is not None and measured.taken is not None:
        taken = dataclasses.replace(
            workload, processes=measured.taken.processes, threads=measured.taken.threads
        )
        made = plan(machine, taken, profile)
    if arguments.json:
        out.write(as_json(made, choose(made, arguments.groups), measured))
    else:
        if measured is not None:
            out.write(measured.report())
        # who measures wants to know the outcome first, and may ask for more
        groups = arguments.groups or (_MEASURED if measured is not None else ())
        width = min(_WIDEST, shutil.get_terminal_size().columns)
        out.write(table(made, choose(made, groups), width=max(80, width)))
    out.flush()
    for conflict in made.conflicts:
        err.write(f"keyfront: {refusal(conflict)}\n")
    if measured is not None and not measured.verdict.met:
        err.write(f"keyfront: latency cannot be met: {measured.verdict.text}\n")
        return CONFLICT
    return CONFLICT if made.conflicts else 0


def choose(made: Plan, groups: Sequence[str]) -> list[Number]:
    """The numbers of some groups, ``uwsgi`` for example, or all; one name chooses one number.

    :raises OptionError: there is no such group
    """
    for group in groups:
        if group not in GROUPS and group not in made.numbers:
            raise OptionError("GROUP", group, f"one of {', '.join(GROUPS)}, or a number of one")
    return [
        number
        for number in made.numbers.values()
        if not groups or number.name in groups or _group(number.name) in groups
    ]


def refusal(conflict: Conflict) -> str:
    """What cannot be met and which number must give, in one line."""
    return (
        f"{conflict.name} = {conflict.wanted:g} cannot be met, there is room for "
        f"{conflict.limit:g}: {conflict.gives}"
    )


def as_json(
    made: Plan, numbers: Sequence[Number], measured: measure_commands.Measured | None = None
) -> str:
    """The plan for programs; keys are only ever added."""
    content: dict[str, Any] = {
        "keyfront": __version__,
        "machine": dataclasses.asdict(made.machine),
        "workload": dataclasses.asdict(made.workload),
        "profile": made.profile.name,
        "numbers": {
            number.name: {
                "value": number.value,
                "unit": number.unit,
                "source": number.source,
                "breaks": number.breaks,
            }
            for number in numbers
        },
        "conflicts": [dataclasses.asdict(conflict) for conflict in made.conflicts],
    }
    if measured is not None:
        content["measurement"] = measured.as_dict()
    return json.dumps(content, indent=2) + "\n"


def table(made: Plan, numbers: Sequence[Number], *, width: int = 80) -> str:
    """The plan for people.

    :param width: columns, at least 80
    """
    source = (width - _NAMES - 2 * len(_GAP)) // 2
    widths = (_NAMES, source, width - _NAMES - source - 2 * len(_GAP))
    lines = [*textwrap.wrap(_heading(made), width), ""]
    lines += _row((["number"], ["computed from"], ["what breaks"]), widths)
    for group, members in groupby(numbers, key=lambda number: _group(number.name)):
        lines += ["", group]
        for number in members:
            cells = (
                _named(number),
                textwrap.wrap(number.source, widths[1]),
                textwrap.wrap(number.breaks, widths[2]),
            )
            lines += _row(cells, widths)
    for text in made.profile.gives_up:
        if text == made.profile.gives_up[0]:
            lines += ["", f"What profile {made.profile.name} does without:"]
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _heading(made: Plan) -> str:
    machine, workload = made.machine, made.workload
    parts = [
        f"{machine.cores} core{'s' * (machine.cores != 1)} ({machine.cores_from})",
        f"{machine.memory_mib} MiB ({machine.memory_from})",
        f"{workload.nodes} node{'s' * (workload.nodes != 1)}",
        f"profile {made.profile.name}",
        f"answers within {workload.latency:g} s",
    ]
    return f"keyfront {__version__} plans for " + ", ".join(parts)


def _group(name: str) -> str:
    return name.partition(".")[0]


def _named(number: Number) -> list[str]:
    """Name and value as the first column has them; a long name has the value below it."""
    name = f"  {number.name.partition('.')[2]}"
    value = shown(number)
    if len(name) + 1 + len(value) <= _NAMES:
        return [f"{name}{value.rjust(_NAMES - len(name))}"]
    return [name, value.rjust(_NAMES)]


def shown(number: Number) -> str:
    """The value with its unit, as far as it needs one."""
    if number.value == 0 and number.source.startswith("off"):
        return "off"
    return f"{number.value}{_SHORT.get(number.unit, '')}"


def _row(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip_longest(*cells, fillvalue="")
    ]

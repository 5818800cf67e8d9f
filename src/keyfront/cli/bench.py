"""``keyfront bench``: the measurements, each in a module that is imported when it is asked for.

Such a module has ``add(parser)``, which adds its arguments, and ``run(arguments, out)``, which
returns the exit status and raises :class:`~keyfront.errors.KeyfrontError` for bad input.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from types import ModuleType
from typing import NamedTuple, TextIO


class Action(NamedTuple):
    """An action of ``keyfront bench``.

    :param module: its module within ``keyfront.benchmarks``
    :param help: the line of ``keyfront bench --help``
    """

    module: str
    help: str

    def load(self) -> ModuleType:
        """Import the module of the action."""
        return importlib.import_module(f"keyfront.benchmarks.{self.module}")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments of the action to its parser."""
        self.load().add(parser)


ACTIONS = {
    "micro": Action("micro.run_pytest", "measure single operations and judge them by their gates"),
    "cloud": Action("load.cloud", "ask any Keystone what a cloud asks: logins, validations"),
    "sweep": Action("load.sweep", "throughput and failures against connections"),
    "replay": Action("load.replay", "send an access log to two targets at once"),
    "log": Action("load.synthetic", "write a synthetic access log with a realistic mix"),
    "experiment": Action(
        "experiments.run_experiments", "repeat a published experiment, or all of them"
    ),
    "report": Action("report.page", "make one page of all results"),
    "tables": Action("report.tables", "fill in the tables of documents from results"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the actions, without importing them."""
    parser.description = "Measure, and compare. Results go into a folder; reports come from there."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in ACTIONS.items():
        actions.add_parser(
            name,
            help=action.help,
            description=f"{action.help.capitalize()}.",
            add_arguments=action.add_arguments,
        )


def run(arguments: Namespace, out: TextIO, err: TextIO) -> int:
    """Run the action that was asked for; returns its exit status."""
    status: int = ACTIONS[arguments.action].load().run(arguments, out)
    return status

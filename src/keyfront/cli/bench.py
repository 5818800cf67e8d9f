"""``keyfront bench``: the measurements, each in a module that is imported when it is asked for.

Such a module has ``add(parser)``, which adds its arguments, and ``run(arguments, out)``, which
returns the exit status and raises :class:`~keyfront.errors.KeyfrontError` for bad input.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from types import ModuleType
from typing import NamedTuple, TextIO


class Action(NamedTuple):
    """A word behind ``keyfront bench``.

    :param module: where it is, within ``keyfront.benchmarks``
    """

    module: str
    help: str

    def load(self) -> ModuleType:
        return importlib.import_module(f"keyfront.benchmarks.{self.module}")


ACTIONS = {
    "micro": Action("micro.command", "measure single operations and judge them by their gates"),
    "sweep": Action("load.sweep_command", "throughput and failures against connections"),
    "replay": Action("load.replay_command", "send an access log to two targets at once"),
    "log": Action("load.log_command", "write a synthetic access log with a realistic mix"),
    "experiment": Action("experiments.command", "repeat a published experiment, or all of them"),
    "report": Action("report.command", "make one page of all results"),
    "tables": Action("tables_command", "fill in the tables of documents from results"),
}


def run(arguments: Namespace, out: TextIO) -> int:
    """Run what was asked for; returns the exit status."""
    status: int = ACTIONS[arguments.action].load().run(arguments, out)
    return status

"""``keyfront render``: the configuration files of a deployment, rendered from a plan.

:mod:`.settings` has what the operator tells, :mod:`.lineups` knows which line-up takes which files,
:mod:`.writer` makes their text and writes them, :mod:`.versions` asks the servers of this machine
for their versions, and :mod:`.certificates` makes a self-signed pair for trying.
"""

from __future__ import annotations

from .lineups import SERVERS, check, render
from .settings import Settings
from .versions import Version, Versions
from .writer import Change, File, compare, diff, write

__all__ = [
    "SERVERS",
    "Change",
    "File",
    "Settings",
    "Version",
    "Versions",
    "certificates",
    "check",
    "compare",
    "diff",
    "lineups",
    "missing",
    "render",
    "settings",
    "versions",
    "write",
    "writer",
]

"""The servers that ``keyfront serve`` runs on this machine, and the Keystone they serve.

:mod:`.state` makes and checks the folder that holds a Keystone, by :mod:`.keystone_manage`;
:mod:`.lineups` knows the line-ups of servers; :mod:`.supervisor` starts, watches and stops their
processes. The command itself is ``keyfront/cli/serve.py``.
"""

__all__ = ["database", "lineups", "state", "supervisor"]

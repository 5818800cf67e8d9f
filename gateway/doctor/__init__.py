"""The doctor: compares what is configured and running on this machine with what Keystone needs.

:func:`~.config_files.look` reads the files of all layers into :class:`~.found.Found`,
:func:`~.diagnosis.diagnose` runs the checks of :mod:`.registry` over it, :mod:`.report` prints what
came of it. Nothing is changed, and nothing needs another user's rights.
"""

__all__ = [
    "config_files",
    "diagnosis",
    "fix_plan",
    "found",
    "machine_state",
    "readers",
    "redaction",
    "registry",
    "report",
    "schema",
]

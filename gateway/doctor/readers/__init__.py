"""The readers: one for each kind of configuration file, all giving settings with their places.

A reader never fails: what it cannot read it notes in the :class:`~.files.Files` that it reads from,
and gives what it could.
"""

__all__ = ["apache", "files", "haproxy", "keystone", "nginx", "sections", "systemd", "uwsgi"]

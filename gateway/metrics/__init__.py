"""Tells Prometheus what a node counts, by a process that only reads the mapped files.

No request waits for it, whatever it does, and it needs nothing of the server: it works under uWSGI
and mod_wsgi alike, also while the server is stopped, and can be restarted on its own.
"""

__all__ = ["collector", "server"]

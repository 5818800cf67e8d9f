"""The life of a server process: entrypoints, loading, forking, serving."""

__all__ = [
    "application",
    "doctor",
    "heartbeat",
    "keystone",
    "memory_limit",
    "metrics",
    "mod_wsgi",
    "node",
    "plan",
    "reload",
    "render",
    "serve",
    "uwsgi",
    "wsgi",
]

"""Token validation from a cache that follows each change Keystone commits."""

__all__ = [
    "authtoken",
    "cache",
    "coordinator",
    "counters",
    "directory_leases",
    "epochs",
    "first_validations",
    "folder",
    "invalidation",
    "keys_and_entries",
    "node_cache",
    "options",
    "request",
    "routes",
    "tags_header",
    "watched_files",
    "worker_cache",
]

"""Token validation from a cache that follows each change Keystone commits."""

__all__ = [
    "authtoken",
    "cache",
    "coordinator",
    "counters",
    "entries",
    "epochs",
    "first_validations",
    "folder",
    "invalidation",
    "leases",
    "lru_cache",
    "node_cache",
    "options",
    "request",
    "routes",
    "tags_header",
    "watched_files",
]

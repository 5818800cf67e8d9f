"""Coordinators: they keep the token cache's epoch tables, in shared memory or in Redis."""

__all__ = ["factory", "local", "mark_owners", "redis"]
